"""The backward of a batch norm reads the codes of its input, and gives what it would give for the decoded input."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.codecs import BlockMean, GroupQuant, Raw
from lowtide.kernels import backends
from lowtide.session import norms, session
from lowtide.session.norms import StillPacked


@contextmanager
def decoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Batch norms get their input decoded."""
    with monkeypatch.context() as patched:
        patched.setattr(session, "can_read", lambda *_: False)
        yield


class Reads:
    """Counts the batch norms that took their gradients from codes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        found = norms._gradients

        def counted(*given: object) -> object:
            result = found(*given)  # type: ignore[arg-type]
            self.count += result is not None
            return result

        monkeypatch.setattr(norms, "_gradients", counted)


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "LEAST", 0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def network(dims: int = 2, **options: bool) -> nn.Sequential:
    conv, norm = {
        1: (nn.Conv1d, nn.BatchNorm1d),
        2: (nn.Conv2d, nn.BatchNorm2d),
        3: (nn.Conv3d, nn.BatchNorm3d),
    }[dims]
    torch.manual_seed(0)
    return nn.Sequential(
        conv(3, 20, 3, padding=1, bias=False),  # the gradient of a bias below a norm is a sum of terms that cancel
        norm(20, **options),
        nn.ReLU(),
        conv(20, 7, 3, padding=1, bias=False),
        norm(7, **options),
    )


def batch(dims: int = 2) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 3, *{1: (700,), 2: (24, 20), 3: (6, 12, 9)}[dims])


def loss_of(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sin().sum()


def gradients(model: nn.Module, x: Tensor, method: str = "division", **options: object) -> list[Tensor]:
    model = copy.deepcopy(model)  # sessions of one model count its steps, and each step rounds otherwise
    with lowtide.compress(model, method, seed=5, **options):
        loss = loss_of(model(x))
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_close(found: list[Tensor], truth: list[Tensor]) -> None:
    """Sums over a channel are made in another order: n terms are off by n units in the last place of the largest."""
    assert len(found) == len(truth) > 0
    for a, b in zip(found, truth, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= 4 * 1920 * 2.0**-24 * b.norm() + 1e-6


@pytest.mark.parametrize("method", ["division", "actnn", "auto", "blpa"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_gradients_are_those_of_the_decoded_input(
    dims: int, method: str, monkeypatch: pytest.MonkeyPatch, reads: Reads
) -> None:
    model, x = network(dims), batch(dims)
    options = {"level": "L2"} if method == "actnn" else {}
    found = gradients(model, x, method, **options)
    assert reads.count == 2
    with decoding(monkeypatch):
        truth = gradients(model, x, method, **options)
    assert reads.count == 2
    assert_close(found, truth)


def test_autocast_has_gradients_of_sixteen_bits(monkeypatch: pytest.MonkeyPatch, reads: Reads) -> None:
    """Whole, the input and each gradient that is handed on are rounded to eight bits, some of them twice."""
    model, x = network(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model, x)
        assert reads.count == 2
        with decoding(monkeypatch):
            truth = gradients(model, x)
    for a, b in zip(found, truth, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert (a - b).norm() <= 4 * 2.0**-8 * b.norm()


def test_a_norm_all_in_sixteen_bits_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, reads: Reads) -> None:
    model, x = network().bfloat16(), batch().bfloat16()
    found = gradients(model, x)
    assert reads.count == 0
    with decoding(monkeypatch):
        assert all(torch.equal(a, b) for a, b in zip(found, gradients(model, x), strict=True))


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}], ids=str)
def test_norms_of_other_kinds(options: dict[str, bool], monkeypatch: pytest.MonkeyPatch, reads: Reads) -> None:
    model, x = network(**options), batch()
    found = gradients(model, x)
    assert reads.count == 2
    with decoding(monkeypatch):
        assert_close(found, gradients(model, x))


def test_frozen_weights_get_no_gradient(monkeypatch: pytest.MonkeyPatch, reads: Reads) -> None:
    model, x = network(), batch()
    model[1].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    found = gradients(model, x)
    assert reads.count == 2
    assert len(found) == len(list(model.parameters())) - 2
    with decoding(monkeypatch):
        assert_close(found, gradients(model, x))


@pytest.mark.parametrize("change", ["eval", "channels last", "double"])
def test_what_no_kernel_knows_is_decoded(change: str, monkeypatch: pytest.MonkeyPatch, reads: Reads) -> None:
    model, x = network(), batch()
    if change == "eval":
        model.eval()
    elif change == "double":
        model, x = model.double(), x.double()
    else:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    found = gradients(model, x)
    assert reads.count == 0
    with decoding(monkeypatch):
        truth = gradients(model, x)
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


def test_a_graph_that_is_kept_gives_the_same_twice(reads: Reads) -> None:
    model, x = network(), batch()
    with lowtide.compress(model, "division", seed=5):
        loss = loss_of(model(x))
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert reads.count == 4
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_another_reader_had_decoded_serves_the_norm(reads: Reads) -> None:
    """Both save the same map, and the sine's backward comes right before that of the norm."""
    norm, x = nn.BatchNorm2d(20), torch.randn(4, 20, 24, 20, requires_grad=True)
    with lowtide.compress(norm, "division", seed=5):
        y = x * 1.0
        loss = loss_of(norm(y) + y.sin())
        del y
    loss.backward()
    assert reads.count == 0


def test_gradients_of_gradients_are_those_of_the_decoded_input(monkeypatch: pytest.MonkeyPatch, reads: Reads) -> None:
    def twice() -> tuple[Tensor | None, ...]:
        model, x = network(), batch().requires_grad_()
        with lowtide.compress(model, "division", seed=5):
            loss = loss_of(model(x))
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), list(model.parameters()), allow_unused=True)

    found = twice()
    assert reads.count == 2  # by the second backward alone: the first is differentiated itself
    with decoding(monkeypatch):
        truth = twice()
    assert [g is None for g in found] == [g is None for g in truth]
    assert_close([g for g in found if g is not None], [g for g in truth if g is not None])


def test_a_mode_that_sees_operators_sees_no_codes(reads: Reads) -> None:
    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.extend(type(a) for a in args)
            return func(*args, **(kwargs or {}))

    model, x = network(), batch()
    with lowtide.compress(model, "division", seed=5):
        loss = loss_of(model(x))
    with See():
        loss.backward()
    assert reads.count == 0
    assert Tensor in seen
    assert StillPacked not in seen


def test_gradients_in_batches(monkeypatch: pytest.MonkeyPatch, reads: Reads) -> None:
    def batched() -> tuple[Tensor, ...]:
        model = network()
        with lowtide.compress(model, "division", seed=5):
            y = model(batch()).square().sin().sum((0, 2, 3))
        return torch.autograd.grad(y, list(model.parameters()), torch.eye(7), is_grads_batched=True)

    found = batched()
    assert reads.count == 2 * 7
    with decoding(monkeypatch):
        assert_close(list(found), list(batched()))


CODECS = [BlockMean(8, 2, bits=2), GroupQuant(2, layout="channel", dither=True), GroupQuant(3, layout="row")]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_any_other_op_reads_values(codec: BlockMean | GroupQuant) -> None:
    packed = codec.encode(torch.randn(2, 3, 16, 16), key=1)
    reads: list[Callable[[Tensor], Tensor]] = [lambda t: t + 0, lambda t: t.sum((0, 2)), lambda t: torch.cat([t, t])]
    for read in (*reads, lambda t: t.mT, lambda t: torch.add(1, other=t)):
        assert torch.equal(read(StillPacked.of(packed)), read(packed.decode()))


def test_what_is_read_looks_like_the_tensor() -> None:
    packed = GroupQuant(2).encode(torch.randn(2, 3, 16, 16), key=1)
    shown = StillPacked.of(packed)
    form = (shown.shape, shown.stride(), shown.dtype, shown.device.type)
    assert form == ((2, 3, 16, 16), (768, 256, 16, 1), torch.float32, "cpu")
    assert not shown.requires_grad
    assert norms.can_read(packed.codec, packed.meta, "cpu")
    assert not norms.can_read(packed.codec, packed.meta, "cuda")
    assert not norms.can_read(Raw(), packed.meta, "cpu")


def test_small_tensors_are_decoded(monkeypatch: pytest.MonkeyPatch, reads: Reads) -> None:
    x = batch()
    monkeypatch.setattr(norms, "LEAST", 4 * 20 * 24 * 20)
    gradients(network(), x)
    assert reads.count == 1  # the second norm has fewer channels


def test_without_a_compiler_torch_computes_the_gradients(monkeypatch: pytest.MonkeyPatch, reads: Reads) -> None:
    monkeypatch.setitem(backends._status, ("cpu", "norm_backward"), "reference: ImportError: no module named numba")
    gradients(network(), batch())
    assert reads.count == 0
