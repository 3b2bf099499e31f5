"""A probe leaves no trace, and a sketch is a faithful small image of a gradient."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from lowtide.session.replay import Sketch, gradients, undisturbed


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


def test_a_loss_that_is_none_is_named(net):
    with pytest.raises(ValueError, match="one value that depends on parameters"):
        gradients(net, lambda: torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="one value that depends on parameters"):
        gradients(net, lambda: torch.ones(()))


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
