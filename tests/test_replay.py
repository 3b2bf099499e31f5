"""A probe leaves no trace, and a sketch is a faithful small image of a gradient."""

from __future__ import annotations

import copy
import math
import random
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.session.replay import (
    NotDivisible,
    Sketch,
    gradients,
    leaves_of,
    mapped,
    samples_in,
    slice_of,
    undisturbed,
)


class Net(nn.Module):
    """Batch norm, dropout, weights that are shared, frozen or unused, buffers that are replaced or grow."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("odd", torch.tensor([math.nan, -0.0, math.inf]), persistent=False)
        self.register_buffer("grown", torch.zeros(2))

    def forward(self, x):
        self.calls = self.calls + 1
        self.odd.zero_()
        self.grown.resize_(3).fill_(1.0)
        x = nn.functional.dropout(self.norm(self.conv(x)), 0.5, self.training).mean((2, 3))
        noise = random.random() + np.random.rand()
        return (self.second(self.first(x).relu()) * noise).square().sum()


def bits_of(tensor):
    return tensor.detach().contiguous().view(torch.uint8).tolist() if tensor.dim() else tensor.item()


def everything(model):
    """All that must be the same afterwards, by identity where identity counts."""
    return {
        "buffers": [(n, id(b), bits_of(b)) for n, b in model.named_buffers()],
        "grads": [(n, id(p.grad), None if p.grad is None else p.grad.tolist()) for n, p in model.named_parameters()],
        "required": [(n, p.requires_grad) for n, p in model.named_parameters()],
        "values": [(n, p.tolist()) for n, p in model.named_parameters()],
        "training": [(n, m.training) for n, m in model.named_modules()],
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": [np.asarray(part).tolist() for part in np.random.get_state()],
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad mode": torch.is_grad_enabled(),
    }


@pytest.fixture
def net():
    random.seed(0)
    np.random.seed(0)
    model = Net()
    model.conv.weight.grad = torch.full_like(model.conv.weight, 2.0)
    model.norm.eval()
    model.norm.train()
    model.first.eval()
    return model


def disturb(model, x):
    model(x).backward()
    model.eval()
    model.conv.requires_grad_(False)
    model.second.requires_grad_(True)
    model.zero_grad(set_to_none=False)


def test_a_probe_leaves_no_trace(net):
    x = torch.randn(5, 3, 6, 6)
    before = everything(net)
    with undisturbed(net):
        assert all(p.grad is None for p in net.parameters())
        disturb(net, x)
        inside = everything(net)
    assert everything(net) == before
    for kind in ("buffers", "grads", "required", "training", "torch", "python", "numpy"):
        assert inside[kind] != before[kind], f"the probe did not touch {kind}, so nothing is tested"


def test_a_probe_that_fails_leaves_no_trace(net):
    before = everything(net)

    def fail():
        with undisturbed(net):
            disturb(net, torch.randn(5, 3, 6, 6))
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()
    assert everything(net) == before


def test_training_goes_on_as_if_there_had_been_no_probe(net):
    twin = copy.deepcopy(net)
    x = torch.randn(5, 3, 6, 6)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    gradients(net, lambda: net(x))
    net(x).backward()
    torch.set_rng_state(states[0]), random.setstate(states[1]), np.random.set_state(states[2])
    twin.conv.weight.grad = torch.full_like(twin.conv.weight, 2.0)
    twin(x).backward()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)


def test_gradients_are_those_of_backward(net):
    x = torch.randn(5, 3, 6, 6)
    before = everything(net)
    found = gradients(net, lambda: net(x))
    assert everything(net) == before
    assert set(found) == {"conv.weight", "conv.bias", "norm.weight", "norm.bias", "first.weight", "first.bias"}
    again = gradients(net, lambda: net(x))
    net.zero_grad()
    net(x).backward()
    for name, gradient in found.items():
        assert torch.equal(gradient, net.get_parameter(name).grad)
        assert torch.equal(gradient, again[name])


def test_gradients_work_where_grad_is_off_and_under_autocast(net):
    x = torch.randn(5, 3, 6, 6)
    with torch.no_grad():
        found = gradients(net, lambda: net(x))
        assert not torch.is_grad_enabled()
    assert found["conv.weight"].abs().sum() > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = gradients(net, lambda: net(x))
        assert torch.is_autocast_enabled("cpu")
    assert not torch.equal(low["conv.weight"], found["conv.weight"])


def test_hooks_on_finished_gradients_stay_still(net):
    fired = []
    net.conv.weight.register_post_accumulate_grad_hook(lambda p: fired.append(1))
    gradients(net, lambda: net(torch.randn(5, 3, 6, 6)))
    assert not fired
    net(torch.randn(5, 3, 6, 6)).backward()
    assert fired == [1]


def test_hooks_on_parameters_stay_still_and_are_there_again(net):
    x, fired, late = torch.randn(5, 3, 6, 6), [], []
    handle = net.conv.weight.register_hook(lambda g: fired.append(1))
    net.first.weight.register_hook(lambda g: fired.append(2))
    hooks = net.conv.weight._backward_hooks

    def closure():
        net.norm.weight.register_hook(lambda g: late.append(1))  # as a forward that registers anew each time
        net.conv.weight.register_hook(lambda g: late.append(2))
        return net(x)

    def failing():
        closure()
        raise KeyError("inside")

    with undisturbed(net):  # nothing is registered twice, nothing is lost
        assert not net.conv.weight._backward_hooks
    gradients(net, lambda: net(x))
    with pytest.raises(KeyError, match="inside"):
        gradients(net, failing)
    assert not fired
    gradients(net, closure)
    late.clear()
    net(x).backward()
    assert sorted(fired) == [1, 2]
    assert not late
    assert net.conv.weight._backward_hooks is hooks
    handle.remove()
    net(x).backward()
    assert sorted(fired) == [1, 2, 2]


def test_a_loss_that_is_none_is_named(net):
    with pytest.raises(ValueError, match="one value that depends on parameters"):
        gradients(net, lambda: torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="one value that depends on parameters"):
        gradients(net, lambda: torch.ones(()))


# ---------------------------------------------------------------- containers


class Pair(NamedTuple):
    first: object
    second: object


@dataclass
class Plain:
    first: object
    second: object = None


@dataclass(frozen=True)
class Frozen:
    first: object
    second: object
    made: object = field(init=False)
    never: object = field(init=False)  # has no value

    def __post_init__(self):
        object.__setattr__(self, "made", self.first)


@dataclass(frozen=True, slots=True)
class Slotted:
    first: object
    second: object


@dataclass
class Mapped(OrderedDict):
    """A mapping that is a dataclass, as what models of transformers return."""

    first: object = None
    second: object = None

    def __post_init__(self):
        self.update(first=self.first, second=self.second)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


def factory(items):
    made = defaultdict(list)
    made.update(items)
    return made


CONTAINERS = {
    "dict": lambda a, b: {"a": a, 2: b},
    "ordered": lambda a, b: OrderedDict(b=a, a=b),
    "user": lambda a, b: UserDict(a=a, b=b),
    "default": lambda a, b: factory({"a": a, "b": b}),
    "proxy": lambda a, b: MappingProxyType({"a": a, "b": b}),
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b, a],
    "empty": lambda a, b: [(), a, {}, b],
    "namedtuple": Pair,
    "plain": Plain,
    "frozen": Frozen,
    "slotted": Slotted,
    "mapped": Mapped,
}


def tree(generator, depth):
    if depth == 0 or generator.random() < 0.2:
        return generator.choice([torch.arange(6), torch.zeros(6, 2), torch.tensor(1.5), None, 3, "text"])
    make = CONTAINERS[generator.choice(sorted(CONTAINERS))]
    return make(tree(generator, depth - 1), tree(generator, depth - 1))


def kinds(batch):
    """The types of all containers, as deep as they go."""
    if isinstance(batch, (dict, UserDict, MappingProxyType)):
        return type(batch), [kinds(v) for v in batch.values()]
    if isinstance(batch, (list, tuple)):
        return type(batch), [kinds(v) for v in batch]
    if isinstance(batch, (Plain, Frozen, Slotted)):
        return type(batch), [kinds(getattr(batch, n)) for n in ("first", "second")]
    return "leaf"


@pytest.mark.parametrize("seed", range(60))
def test_leaves_of_what_is_mapped_are_the_mapped_leaves(seed):
    batch = tree(random.Random(seed), 4)
    before = list(leaves_of(batch))
    marks = {}
    found = mapped(batch, lambda leaf: marks.setdefault(len(marks), object()))
    assert [id(leaf) for leaf in leaves_of(found)] == [id(mark) for mark in marks.values()]
    assert len(marks) == len(before)
    assert kinds(mapped(batch, lambda leaf: leaf)) == kinds(batch)
    assert all(a is b for a, b in zip(leaves_of(batch), before, strict=True)), "the batch itself was changed"


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_container_is_divided(kind):
    batch = CONTAINERS[kind](torch.arange(6), [torch.arange(6) * 2, torch.tensor(7)])
    assert samples_in(batch) == 6
    part = slice_of(batch, 2, 4)
    assert type(part) is type(batch)
    assert {tuple(t.tolist()) for t in leaves_of(part) if t.dim()} == {(2, 3), (4, 6)}
    assert all(len(t) == 6 for t in leaves_of(batch) if t.dim())
    if hasattr(part, "first"):
        assert part.first.tolist() == [2, 3]


def test_what_transformers_uses_is_divided():
    transformers = pytest.importorskip("transformers")
    tokens = transformers.BatchEncoding({"input_ids": torch.arange(6), "attention_mask": torch.ones(6, 3)})
    output = transformers.modeling_outputs.CausalLMOutput(loss=torch.tensor(1.0), logits=torch.zeros(6, 2))
    part, made = slice_of((tokens, output), 1, 3)
    assert type(part) is type(tokens)
    assert part["input_ids"].tolist() == part.input_ids.tolist() == [1, 2]
    assert type(made) is type(output)
    assert made.logits.shape == made["logits"].shape == made[1].shape == (2, 2)
    assert made.loss is output.loss
    assert output.logits.shape == (6, 2)


class Stubborn(list):
    def __init__(self, *items):
        super().__init__(items)


class Closed(tuple):
    __slots__ = ()

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


@pytest.mark.parametrize("batch", [Stubborn(torch.arange(6)), Closed(torch.arange(6), 1)], ids=["holds else", "raises"])
def test_a_container_that_cannot_be_rebuilt_is_named(batch):
    with pytest.raises(NotDivisible, match=f"a {type(batch).__name__} cannot be copied"):
        slice_of([batch], 0, 2)


# ---------------------------------------------------------------- sketches


def sized(*sizes):
    model = nn.Module()
    for i, size in enumerate(sizes):
        model.register_parameter(f"p{i}", nn.Parameter(torch.zeros(size)))
    return model


def drawn(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def test_sketches_are_linear_and_repeatable():
    model = sized((300, 1000), (7,), (0,), (1, 3, 3))
    state = torch.get_rng_state()
    sketch = Sketch(model, width=64)
    a, b = drawn(model, 1), drawn(model, 2)
    mixed = sketch.of({n: 2.0 * a[n] - 3.0 * b[n] for n in a})
    # float32 sums of n terms err by about sqrt(n) roundings of the partial sums; n eps times the terms is a bound.
    per_bucket = 300_000 / 64
    bound = per_bucket * 2.0**-24 * 5.0 * math.sqrt(per_bucket)
    assert torch.allclose(mixed, 2.0 * sketch.of(a) - 3.0 * sketch.of(b), rtol=0, atol=bound)
    assert torch.equal(sketch.of(a), Sketch(model, width=64).of(a))
    assert not torch.equal(sketch.of(a), Sketch(model, width=64, seed=1).of(a))
    assert sketch.of(a).shape == (4, 64)
    assert sketch.of(a).dtype == torch.float32
    assert sketch.of(a)[2].abs().sum() == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["dense", "constant", "one row", "one column", "rank one", "first of blocks"])
def test_the_expected_square_is_the_square(kind):
    width, rows, seeds = 32, 2048, 400
    e = torch.zeros(rows, width)
    generator = torch.Generator().manual_seed(3)
    if kind == "dense":
        e = torch.randn(rows, width, generator=generator)
    elif kind == "constant":  # adds up in every bucket, if signs were not independent
        e = torch.ones(rows, width)
    elif kind == "one row":
        e[5] = torch.randn(width, generator=generator)
    elif kind == "one column":  # lies in one bucket, if buckets were index mod width
        e[:, 5] = torch.randn(rows, generator=generator)
    elif kind == "rank one":  # has one free sign, if signs were a product of rows and columns
        e = torch.randn(rows, 1, generator=generator) * torch.randn(width, generator=generator)
    else:  # the same place of each block of 256 * width
        e.view(-1)[:: 256 * width] = 1.0
    model = sized((rows, width))
    squares = torch.stack([Sketch(model, width, seed).of({"p0": e}).double().square().sum() for seed in range(seeds)])
    relative = squares / e.double().square().sum()
    # Five standard errors of the mean. A square is near normal, or has a tail like chi-square's, whose kurtosis makes
    # the variance of a variance three times that of a normal.
    variance = (4 if kind == "constant" else 2) / width
    assert abs(relative.mean() - 1) < 5 * math.sqrt(variance / seeds)
    assert relative.var() < variance * (1 + 5 * math.sqrt(3 * 2 / seeds))


def test_parameters_do_not_share_signs():
    model = sized((100,), (100,))
    e = torch.randn(100)
    a, b = Sketch(model, 64).of({"p0": e, "p1": e})
    assert not torch.equal(a.abs(), b.abs())
    assert a.square().sum() > 0


def test_sketches_see_noise_that_norms_do_not():
    generator = torch.Generator().manual_seed(0)
    g, e = torch.randn(2, 5000, generator=generator).double()
    e = 0.1 * (e - (e @ g) / (g @ g) * g)
    model = sized((5000,))
    sketch = Sketch(model)
    seen = (sketch.of({"p0": (g + e).float()}) - sketch.of({"p0": g.float()})).norm() / e.norm()
    # A square is within five of its standard deviations, sqrt(2 / 256).
    assert abs(seen**2 - 1) < 5 * math.sqrt(2 / 256)
    assert abs((g + e).norm() - g.norm()) / e.norm() < 0.06  # |e| / (2 |g|)


def test_broken_gradients_show_and_wrong_names_are_named():
    model = sized((100,))
    assert Sketch(model).of({"p0": torch.full((100,), math.nan)}).isnan().any()
    assert Sketch(model).of({}).tolist() == torch.zeros(1, 256).tolist()
    assert torch.equal(Sketch(model).of({"p0": torch.ones(100).bfloat16()}), Sketch(model).of({"p0": torch.ones(100)}))
    with pytest.raises(ValueError, match=r"no parameters named \['q'\]"):
        Sketch(model).of({"q": torch.ones(1)})
    with pytest.raises(ValueError, match="width"):
        Sketch(model, width=0)


def test_a_buffer_that_was_none_is_none_again():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("cache", None)

        def forward(self, x):
            if self.cache is None:
                self.cache = torch.ones(len(x), 1)
            return self.linear(x * self.cache)

    model = Lazy()
    gradients(model, lambda: model(torch.randn(8, 4)).sum())
    assert model.cache is None


def test_a_default_device_does_not_matter():
    model, x = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1)), torch.randn(512, 8)
    handle = lowtide.attach(model, "gact")
    model(x).sum().backward()
    with torch.device("meta"):
        handle.adapt(lambda: model(x).sum())
        handle.remove()
        assert lowtide.check(model, x, lambda m, b: m(b).square().mean(), "actnn", seconds=0.5).ok
