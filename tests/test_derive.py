"""Tensors rebuilt from others: right, unbiased where claimed, free of bytes, and gone with the graph."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.codecs import GroupQuant, Raw
from lowtide.graph.rules import Need
from lowtide.policy.methods import Method


class Maps(nn.Module):
    """conv -> BN -> ReLU -> conv -> BN -> conv."""

    def __init__(self, inplace=False, affine=True):
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, affine=affine)
        self.middle, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.last, self.relu = nn.Conv2d(8, 4, 1), nn.ReLU(inplace=inplace)

    def forward(self, x):
        return self.last(self.norm2(self.middle(self.relu(self.norm1(self.stem(x))))))


class LlamaNorm(nn.Module):
    """The norm as language models write it out: its square, its product and its scaled product are all saved."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Tokens(nn.Module):
    """A norm, then an MLP with an activation or a gate."""

    def __init__(self, norm, kind):
        super().__init__()
        self.first, self.norm, self.kind = nn.Linear(32, 32), norm(32), kind
        self.up, self.gate, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        h = self.norm(self.first(x))
        if self.kind == "gated":
            return self.down(F.silu(self.gate(h)) * self.up(h))
        return self.down(getattr(F, self.kind)(self.up(h)))


NETS = {
    "maps": lambda: (Maps(), torch.randn(4, 3, 9, 9)),
    "maps in place": lambda: (Maps(inplace=True), torch.randn(4, 3, 9, 9)),
    "no affine": lambda: (Maps(affine=False), torch.randn(4, 3, 9, 9)),
    "channels last": lambda: (Maps(), torch.randn(4, 3, 9, 9).to(memory_format=torch.channels_last)),
    "layer norm, gelu": lambda: (Tokens(nn.LayerNorm, "gelu"), torch.randn(4, 6, 32)),
    "rms norm, silu": lambda: (Tokens(nn.RMSNorm, "silu"), torch.randn(4, 6, 32)),
    "maps in pieces": lambda: (Maps(), torch.randn(9, 3, 67, 67)),
    "tokens in pieces": lambda: (Tokens(nn.LayerNorm, "gelu"), torch.randn(5, 1000, 32)),
    "llama": lambda: (Tokens(LlamaNorm, "gated"), torch.randn(4, 6, 32)),
}
# What each net need not store: sites by op and slot whose values are rebuilt.
REBUILT = {
    "maps": 2,
    "maps in place": 2,
    "no affine": 1,
    "channels last": 2,
    "layer norm, gelu": 2,
    "rms norm, silu": 2,
    "maps in pieces": 2,
    "tokens in pieces": 2,
    "llama": 4,
}


def gradients(model, x, context, autocast=False):
    model.zero_grad()
    with context as session, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), session


def rebuilt(report):
    return [s for s in report.sites if s.codec.startswith("rebuilt")]


@pytest.fixture(params=NETS)
def net(request):
    torch.manual_seed(0)
    return request.param, *NETS[request.param]()


def test_exact_sources_give_exact_gradients(net):
    name, model, x = net
    exact, _ = gradients(model, x, nullcontext())
    derived, session = gradients(model, x, lowtide.compress(model, Raw(), derive=True, min_numel=0))
    assert len(rebuilt(session.report())) == REBUILT[name]
    # The rebuilt tensor repeats the op's own few roundings in another order: some units of float32, no more.
    assert (derived - exact).norm() <= 2**-20 * exact.norm()


def test_rebuilt_tensors_cost_their_mask_and_nothing_else(net):
    _, model, x = net
    _, session = gradients(model, x, lowtide.compress(model, GroupQuant(4), derive=True, min_numel=0))
    for site in rebuilt(session.report()):
        bits = 1 if "mask" in site.codec else 0
        numel = site.plain_nbytes // 4
        assert site.stored_nbytes == -(-numel * bits // 8)
        assert "rebuilt from" in site.why


def test_the_error_is_that_of_the_source(net):
    """Eight bits err less than four, and four less than two: what is rebuilt follows what is stored."""
    _, model, x = net
    exact, _ = gradients(model, x, nullcontext())
    errors = []
    for bits in (8, 4, 2):
        found, _ = gradients(model, x, lowtide.compress(model, GroupQuant(bits), derive=True, min_numel=0))
        errors.append(float((found - exact).norm()))
    assert errors[0] < errors[1] / 4
    assert errors[1] < errors[2]


def test_convolution_after_norm_and_relu_stays_unbiased():
    """Given the exact mask the rebuilt input is linear in what is stored, so the weight gradient has no bias."""
    torch.manual_seed(0)
    model, x = Maps(), torch.randn(4, 3, 9, 9)
    gradients(model, x, nullcontext())
    exact = model.middle.weight.grad.clone()
    runs = []
    for seed in range(200):
        gradients(model, x, lowtide.compress(model, FirstNorm(), seed=seed, min_numel=0))
        runs.append(model.middle.weight.grad.clone())
    runs = torch.stack(runs)
    spread = runs.std(0) / len(runs) ** 0.5
    assert (spread > 0).all()
    # 576 weights: five standard errors are passed by chance once in 3000 tries.
    assert ((runs.mean(0) - exact).abs() <= 5 * spread).all()


@dataclass(frozen=True)
class FirstNorm(Method):
    """The input of the first norm in 2 bits, what can be rebuilt from it rebuilt, all else exact."""

    name: ClassVar[str] = "first norm"
    rebuilds: ClassVar[bool] = True

    def choose(self, use):
        if use.sources and use.need is Need.LINEAR and any(s.module == "relu" for s in use.sites):
            return lowtide.Choice.rebuild()
        first = any(s.module == "norm1" for s in use.sites)
        return lowtide.Choice.store(GroupQuant(2)) if first else lowtide.Choice.keep()


def test_backward_twice_reads_the_same_values():
    torch.manual_seed(0)
    model, x = Maps(), torch.randn(4, 3, 9, 9)
    with lowtide.compress(model, "actnn", derive=True, min_numel=0):
        loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(first, model.parameters(), strict=True))


def test_nothing_outlives_the_graph():
    torch.manual_seed(0)
    model, x = Tokens(nn.LayerNorm, "gelu"), torch.randn(4, 6, 32)
    gc.disable()
    try:
        with lowtide.compress(model, "actnn", derive=True, min_numel=0) as session:
            loss = model(x).square().mean()
            kept = [r for r in session._handles.values() if r() is not None]
        del loss
        assert kept
        assert all(r() is None for r in kept)
    finally:
        gc.enable()


def test_nothing_outlives_backward():
    """Nodes live as long as the loss does; what they saved must not."""
    torch.manual_seed(0)
    model, x = Maps(), torch.randn(4, 3, 9, 9)
    with lowtide.compress(model, "actnn", derive=True, min_numel=0) as session:
        loss = model(x).square().mean()
        kept = [r for r in session._handles.values() if r() is not None]
    loss.backward()
    assert kept
    assert all(r() is None for r in kept)


class Wrapped(nn.Module):
    """Two linear layers around what ``middle`` does to the first one's result."""

    def __init__(self, middle):
        super().__init__()
        self.first, self.norm, self.last, self.middle = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 8), middle
        self.gate, self.shift = nn.Parameter(torch.rand(32)), nn.Parameter(torch.rand(32))

    def forward(self, x):
        return self.last(self.middle(self, self.first(x)))


def _padded(model, h):
    h = model.norm(h)
    with torch.no_grad():
        h[:4] = 0.0
    return h


def _padded_below_relu(model, h):
    h = model.norm(h)
    with torch.no_grad():
        h[:4].zero_()
    return F.relu(h)


class Gelu(torch.autograd.Function):
    """A user's function under the name of a known op."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 3 * x

    @staticmethod
    def backward(ctx, g):
        return 3 * g


@pytest.mark.parametrize(
    "middle",
    [
        _padded,
        _padded_below_relu,
        lambda m, h: Gelu.apply(h),
        lambda m, h: F.layer_norm(h, (32,), None, m.shift),
        lambda m, h: F.batch_norm(h, None, None, None, m.shift, True),
        lambda m, h: F.batch_norm(h, None, None, None, m.shift.detach(), True),
        lambda m, h: F.layer_norm(h, (32,), m.gate),
        lambda m, h: h * m.norm(h),
        lambda m, h: h * m.gate,
    ],
)
def test_unusual_results_are_rebuilt_right_or_not_at_all(middle):
    torch.manual_seed(0)
    model, x = Wrapped(middle), torch.randn(16, 32)
    exact, _ = gradients(model, x, nullcontext())
    found, _ = gradients(model, x, lowtide.compress(model, Raw(), derive=True, min_numel=0))
    assert (found - exact).norm() <= 2**-20 * exact.norm()


@pytest.mark.parametrize("middle", [lambda m, h: h * m.norm(h), lambda m, h: h * F.silu(h)])
def test_noise_is_never_multiplied_with_itself(middle):
    torch.manual_seed(0)
    model, x = Wrapped(middle), torch.randn(16, 32)
    _, session = gradients(model, x, lowtide.compress(model, GroupQuant(4), derive=True, min_numel=0))
    assert not [s for s in rebuilt(session.report()) if s.site.module == "last"]


def test_what_propagates_is_not_rebuilt_from_less():
    """The input of SiLU needs four bits; a batch norm's input has two."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 3))
    _, session = gradients(
        model, torch.randn(16, 3, 9, 9), lowtide.compress(model, "division", derive=True, min_numel=0)
    )
    codecs = {s.site.op: s.codec for s in session.report().sites if s.codec}
    assert codecs["NativeBatchNorm"] == "block_mean(2 bits)"
    assert codecs["Silu"] == "group_quant(4 bits)"
    assert codecs["Convolution"] == "rebuilt"


def test_a_factor_that_changed_does_not_change_the_gradient():
    torch.manual_seed(0)
    model, x = Wrapped(lambda m, h: h * m.gate), torch.randn(16, 32)
    results = []
    for context in (nullcontext(), lowtide.compress(model, Raw(), derive=True, min_numel=0)):
        with torch.no_grad():
            model.gate.fill_(0.5)
        with context:
            loss = model(x).square().mean()
        with torch.no_grad():
            model.gate.mul_(3)
        results.append(torch.autograd.grad(loss, model.last.weight)[0])
    assert torch.allclose(*results, rtol=2**-20)


def test_a_large_mean_in_sixteen_bits_does_not_cancel():
    """The op computes in float32 from 16-bit values; so must the rebuilding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    with torch.no_grad():
        model[0].bias.fill_(60.0)
    x = torch.randn(4, 3, 9, 9)
    exact, _ = gradients(model, x, nullcontext(), autocast=True)
    found, session = gradients(model, x, lowtide.compress(model, Raw(), derive=True, min_numel=0), autocast=True)
    assert rebuilt(session.report())
    assert (found - exact).norm() <= 2**-7 * exact.norm()


def test_square_of_a_stored_tensor_is_not_rebuilt():
    """Both factors would carry the same noise, whose square has a mean."""
    torch.manual_seed(0)

    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            h = self.a(x)
            return self.b(h * h)

    model, x = Square(), torch.randn(16, 32)
    _, session = gradients(model, x, lowtide.compress(model, GroupQuant(4), derive=True, min_numel=0))
    assert not rebuilt(session.report())


class Sixteen(nn.Module):
    """The same norm as 16-bit language models write it: in float32, and cast before the weight."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 32), LlamaNorm(32), nn.Linear(32, 32)

    def forward(self, x):
        x = self.first(x)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.last(self.norm.weight * normed.to(x.dtype))


def test_a_cast_at_the_end_is_made_again():
    torch.manual_seed(0)
    model, x = Sixteen().bfloat16(), torch.randn(40, 32, dtype=torch.bfloat16)
    exact, _ = gradients(model, x, nullcontext())
    derived, session = gradients(model, x, lowtide.compress(model, Raw(), derive=True, min_numel=0))
    made = {(s.site.module, s.site.op) for s in rebuilt(session.report())}
    assert made == {("", "Mul"), ("last", "Addmm")}
    assert torch.equal(derived, exact)


def test_autocast_runs_and_rebuilds():
    torch.manual_seed(0)
    model, x = Maps(), torch.randn(4, 3, 9, 9)
    exact, _ = gradients(model, x, nullcontext(), autocast=True)
    found, session = gradients(model, x, lowtide.compress(model, Raw(), derive=True, min_numel=0), autocast=True)
    assert rebuilt(session.report())
    # bfloat16 keeps 8 bits: the rebuilt input differs by at most its rounding.
    assert (found - exact).norm() <= 2**-7 * exact.norm()


def test_derive_must_be_a_truth_value():
    with pytest.raises(TypeError, match="derive must be True or False; got 2"):
        lowtide.compress(Maps(), "actnn", derive=2)


class Halves(nn.Module):
    """Two branches, each on one half of the first layer's result: the second half begins inside its storage."""

    def __init__(self, branch):
        super().__init__()
        self.first, self.branch = nn.Linear(32, 32), branch
        self.norms = nn.ModuleList([nn.RMSNorm(32), nn.RMSNorm(32)])
        self.batch_norms = nn.ModuleList([nn.BatchNorm1d(32), nn.BatchNorm1d(32)])
        self.last = nn.ModuleList([nn.Linear(32, 8), nn.Linear(32, 8)])

    def forward(self, x):
        halves = self.first(x).chunk(2)
        return sum(self.last[i](self.branch(self, i, halves)) for i in range(2))


@pytest.mark.parametrize(
    "branch",
    [
        lambda m, i, halves: m.norms[i](halves[i]),
        lambda m, i, halves: F.relu(m.batch_norms[i](halves[i])),
        lambda m, i, halves: F.silu(halves[i]),
        lambda m, i, halves: F.silu(halves[i]) * halves[1 - i],
    ],
    ids=["norm", "batch norm, relu", "silu", "gate"],
)
@pytest.mark.parametrize("method", [Raw(), GroupQuant(8)], ids=["raw", "8 bits"])
def test_a_source_may_begin_inside_its_storage(branch, method):
    torch.manual_seed(0)
    model, x = Halves(branch), torch.randn(64, 32)
    exact, _ = gradients(model, x, nullcontext())
    found, session = gradients(model, x, lowtide.compress(model, method, derive=True, min_numel=0))
    assert rebuilt(session.report())
    # Eight bits of the range of a group are off by 2^-8 of it at most; a wrong half is off by more than 1.
    assert (found - exact).norm() <= (2**-20 if method == Raw() else 2**-4) * exact.norm()


def _edit_by_detach(h):
    h.detach().mul_(3)


def _edit_by_data(h):
    h.data.mul_(3)


def _edit_by_data_of_a_view(h):
    h.view(-1).data.mul_(3)


def _edit_by_out(h):
    with torch.no_grad():
        torch.mul(h, 3, out=h)


def _edit_by_silu(h):
    with torch.no_grad():
        F.silu(h, inplace=True)


def _edit_by_dropout(h):
    with torch.no_grad():
        F.dropout(h, 0.5, inplace=True)


def _edit_by_foreach(h):
    with torch.no_grad():
        torch._foreach_mul_([h], 3)


def _edit_by_assignment(h):
    with torch.no_grad():
        h[2:5] = 3.0


EDITS = [
    *[_edit_by_detach, _edit_by_data, _edit_by_data_of_a_view, _edit_by_out],
    *[_edit_by_silu, _edit_by_dropout, _edit_by_foreach, _edit_by_assignment],
]


def _edited(edit, relu, model, h):
    h = model.norm(h)
    edit(h)
    return h if relu is None else relu(h)


@pytest.mark.parametrize("relu", [None, F.relu, torch.relu_, nn.ReLU(inplace=True), lambda h: F.relu(input=h)])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm])
def test_a_tensor_that_was_edited_is_not_rebuilt(norm, edit, relu):
    torch.manual_seed(0)
    model, x = Wrapped(lambda m, h: _edited(edit, relu, m, h)), torch.randn(16, 32)
    model.norm = norm(32)
    torch.manual_seed(0)
    exact, _ = gradients(model, x, nullcontext())
    torch.manual_seed(0)
    found, session = gradients(model, x, lowtide.compress(model, Raw(), derive=True, min_numel=0))
    assert not [s for s in rebuilt(session.report()) if s.site.module == "last"]
    assert (found - exact).norm() <= 2**-20 * exact.norm()


@pytest.mark.parametrize(
    "relu", [F.relu, torch.relu_, nn.ReLU(inplace=True), lambda h: F.relu(input=h), torch.Tensor.relu]
)
def test_a_tensor_below_any_relu_is_rebuilt(relu):
    torch.manual_seed(0)
    model, x = Wrapped(lambda m, h: relu(m.norm(h))), torch.randn(16, 32)
    exact, _ = gradients(model, x, nullcontext())
    found, session = gradients(model, x, lowtide.compress(model, Raw(), derive=True, min_numel=0))
    assert len(rebuilt(session.report())) == 1
    assert (found - exact).norm() <= 2**-20 * exact.norm()


def test_a_bias_that_changed_since_is_not_used():
    torch.manual_seed(0)

    def middle(model, h):
        with torch.no_grad():
            model.norm.bias.zero_()
        h = model.norm(h)
        with torch.no_grad():
            model.norm.bias.add_(1)
        return h

    model, x = Wrapped(middle), torch.randn(16, 32)
    model.norm = nn.BatchNorm1d(32)
    exact, _ = gradients(model, x, nullcontext())
    nn.init.zeros_(model.norm.bias)
    found, _ = gradients(model, x, lowtide.compress(model, Raw(), derive=True, min_numel=0))
    assert (found - exact).norm() <= 2**-20 * exact.norm()


def test_a_source_that_changes_by_data_still_gives_what_was_made_of_it():
    torch.manual_seed(0)

    def middle(model, h):
        y = model.last(model.norm(h))
        h.data.mul_(3)
        return y

    model, x = Wrapped(middle), torch.randn(16, 32)
    model.norm, model.forward = nn.LayerNorm(32), lambda x: middle(model, model.first(x))
    gradients(model, x, nullcontext())
    exact = model.last.weight.grad.clone()
    _, session = gradients(model, x, lowtide.compress(model, Raw(), derive=True, min_numel=0))
    assert len(rebuilt(session.report())) == 1
    assert (model.last.weight.grad - exact).norm() <= 2**-20 * exact.norm()
