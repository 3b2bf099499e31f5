"""Gradients that nobody else holds are changed in place; those that somebody holds stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.codecs import GroupQuant
from lowtide.graph import capture, thrift
from lowtide.kernels import ops
from lowtide.session import norms


class Results:
    """Where ReLU and batch norm put their gradients: in the place of what they were given, or elsewhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_place: list[str] = []
        self.elsewhere: list[str] = []
        for name in ("mask_values", "norm_backward"):
            for places, ending in ((self.in_place, "_"), (self.elsewhere, "")):
                right = getattr(ops, name + ending)
                monkeypatch.setattr(ops, name + ending, self._counted(name, places, right))

    def _counted(self, name: str, places: list[str], right: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            places.append(name)
            return right(*given)

        return call


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "LEAST", 0)
    monkeypatch.setattr(thrift, "_LEAST_RELU", 0)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Iterator[Results]:
    return Results(monkeypatch)


class Net(nn.Module):
    """Convolution, batch norm, ReLU; and with ``skip`` once around a norm and its ReLU."""

    def __init__(self, skip: bool = False, watch: Callable[[str, Tensor], None] = lambda name, value: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.other = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 8, 3)
        self.skip, self.watch = skip, watch

    def forward(self, x: Tensor) -> Tensor:
        y = self.see("norm", self.norm(self.first(x)))
        y = self.see("relu", torch.relu(y))
        z = self.see("other", self.other(self.second(y)))
        z = torch.relu(z + y if self.skip else z)
        return self.last(z)

    def see(self, name: str, value: Tensor) -> Tensor:
        self.watch(name, value)
        return value


METHOD = {"min_numel": 0}


def gradients(net: Net, compressed: bool, back: Callable[[Net, Tensor], Any] | None = None, **options: Any) -> Any:
    """Of the weights, and what ``back`` returns, which runs backward."""
    x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    net.zero_grad()
    if compressed:
        with lowtide.compress(net, GroupQuant(8, 64, "sample"), **METHOD):
            result = net(x)
    else:
        result = net(x)
    found = (back or (lambda net, result: result.square().sum().backward()))(net, result)
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}, found


def assert_near(own: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Codes of 8 bits err by less than a hundredth; a gradient changed under somebody's hands would be far off."""
    whole = torch.cat([g.flatten() for g in exact.values()])
    off = torch.cat([own[name].flatten() for name in exact]) - whole
    assert off.norm() < 0.01 * whole.norm()


def test_nobody_else_holds_them(results: Results) -> None:
    exact, own = (gradients(Net(), compressed)[0] for compressed in (False, True))
    assert_near(own, exact)
    assert sorted(results.in_place) == ["mask_values"] * 2 + ["norm_backward"] * 2
    assert not results.elsewhere


def test_under_autocast_too(results: Results) -> None:
    """Gradients of 16 bits. The exact ones are rounded to eight bits at each of seven ops, and so are ours."""
    with torch.autocast("cpu", torch.bfloat16):
        exact, own = (gradients(Net(), compressed)[0] for compressed in (False, True))
    whole = torch.cat([g.flatten() for g in exact.values()])
    assert (torch.cat([own[name].flatten() for name in exact]) - whole).norm() < 2 * 7 * 2.0**-8 * whole.norm()
    assert sorted(results.in_place) == ["mask_values"] * 2 + ["norm_backward"] * 2
    assert not results.elsewhere


def test_what_a_sum_gives_to_both_of_its_terms_stays(results: Results) -> None:
    exact, own = (gradients(Net(skip=True), compressed)[0] for compressed in (False, True))
    assert_near(own, exact)
    assert "norm_backward" in results.elsewhere  # the skip holds the gradient of the second norm's result
    assert "mask_values" in results.in_place


def _keep(kept: list[Tensor], value: Tensor) -> None:
    value.register_hook(lambda grad: kept.extend([grad, grad.clone()]))


def _keep_view(kept: list[Tensor], value: Tensor) -> None:
    value.register_hook(lambda grad: kept.extend([grad.view(-1), grad.flatten().clone()]))


def _keep_memory(kept: list[Tensor], value: Tensor) -> None:
    """Of which a tensor is made when all is over."""

    def keep(grad: Tensor) -> None:
        _KEPT.append(grad.untyped_storage())
        kept.append(grad.flatten().clone())

    value.register_hook(keep)


_KEPT: list[Any] = []


def _keep_before(kept: list[Tensor], value: Tensor) -> None:
    node: Any = value.grad_fn
    node.register_prehook(lambda grads: kept.extend([grads[0], grads[0].clone()]))


def _keep_after(kept: list[Tensor], value: Tensor) -> None:
    node: Any = value.grad_fn
    node.register_prehook(lambda grads: kept.append(grads[0].clone()))
    node.register_hook(lambda _, grads: kept.append(grads[0]))


@pytest.mark.parametrize("keep", [_keep, _keep_view, _keep_memory, _keep_before, _keep_after])
@pytest.mark.parametrize("place", ["norm", "relu", "other"])
def test_what_hooks_keep_stays(place: str, keep: Callable[[list[Tensor], Tensor], None], results: Results) -> None:
    kept: list[Tensor] = []

    def watch(name: str, value: Tensor) -> None:
        if name == place:
            keep(kept, value)

    exact, _ = gradients(Net(), False)
    own, _ = gradients(Net(watch=watch), True)
    assert_near(own, exact)
    if _KEPT:
        kept.append(torch.empty(0).set_(_KEPT.pop()))  # type: ignore[call-overload]
    assert len(kept) == 2
    assert torch.equal(*kept)
    assert ("mask_values" if place == "relu" else "norm_backward") in results.elsewhere
    assert len(results.in_place) >= 2


def test_retained_and_captured_gradients_are_right(results: Results) -> None:
    for skip in (False, True):
        for retains in (False, True):
            found = []
            for compressed in (False, True):
                seen: dict[str, Tensor] = {}

                def back(net: Net, result: Tensor, seen: dict[str, Tensor] = seen, retains: bool = retains) -> Any:
                    if not retains:
                        asked = torch.autograd.grad(result.square().sum(), [*seen.values(), *net.parameters()])
                        return dict(zip(seen, asked, strict=False))
                    for value in seen.values():
                        value.retain_grad()
                    result.square().sum().backward()
                    return {name: value.grad for name, value in seen.items()}

                found.append(gradients(Net(skip, seen.__setitem__), compressed, back)[1])
            assert_near(found[1], found[0])
    assert results.in_place


def test_the_gradient_of_the_caller_stays(results: Results) -> None:
    """The first that backward gets is the caller's own. A ReLU's result that is held has no mask in its place."""
    x = torch.randn(4, 8, 6, 6)
    for module in (nn.ReLU(), nn.BatchNorm2d(8)):
        layer = nn.Sequential(nn.Conv2d(8, 8, 1), module)
        own = torch.randn(4, 8, 6, 6)
        before = own.clone()
        with lowtide.compress(layer, GroupQuant(8, 64, "sample"), **METHOD):
            y = layer(x)
        y.backward(own)
        assert torch.equal(own, before)
    assert results.elsewhere == ["norm_backward"]
    assert not results.in_place


def test_memory_of_numpy_stays(results: Results) -> None:
    """A function may return memory that is not torch's, which nobody but itself knows."""

    class Buffered(torch.autograd.Function):
        buffer = np.ones((4, 8, 6, 6), dtype=np.float32)

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.from_numpy(Buffered.buffer)

    for module in (nn.ReLU(), nn.BatchNorm2d(8)):
        layer = nn.Sequential(nn.Conv2d(8, 8, 1), module)
        with lowtide.compress(layer, GroupQuant(8, 64, "sample"), **METHOD):
            y = Buffered.apply(layer(torch.randn(4, 8, 6, 6)))
        y.sum().backward()
        assert (Buffered.buffer == 1).all()
    assert len(results.elsewhere) == 2
    assert not results.in_place


def test_a_node_that_is_called_by_hand_leaves_its_argument(results: Results) -> None:
    layer = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU())
    with lowtide.compress(layer, GroupQuant(8, 64, "sample"), **METHOD):
        y = layer(torch.randn(4, 8, 6, 6))
        node: Any = y.grad_fn
        del y
        torch.ones(1) * 1.0
    own = torch.ones(4, 8, 6, 6)
    with torch.no_grad():
        node.apply(own)
    assert (own == 1).all()
    assert results.elsewhere == ["mask_values"]


def test_backward_twice(results: Results) -> None:
    def twice(net: Net, result: Tensor) -> None:
        loss = result.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    (exact, _), (own, _) = (gradients(Net(), compressed, twice) for compressed in (False, True))
    assert_near(own, exact)
    assert len(results.in_place) == 8


def test_counts_of_owners_that_tell_nothing(monkeypatch: pytest.MonkeyPatch, results: Results) -> None:
    """Where somebody else does not show, or nothing is known, all gradients are made anew."""
    monkeypatch.setattr(capture, "owners", lambda tensor: (1, 1, 1, 1))
    capture._sole.cache_clear()
    capture._others_show.cache_clear()
    assert capture.sole_gradient() == (0, 0, 0, 0)
    monkeypatch.setattr(capture, "owners", lambda tensor: None)
    capture._sole.cache_clear()
    capture._others_show.cache_clear()
    assert capture.sole_gradient() == (0, 0, 0, 0)
    exact, own = (gradients(Net(), compressed)[0] for compressed in (False, True))
    assert_near(own, exact)
    assert not results.in_place
    assert len(results.elsewhere) == 4
    capture._others_show.cache_clear()
