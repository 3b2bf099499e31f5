"""Results of residual blocks, rebuilt from their addends: right, free of bytes, and stored whenever in doubt."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide import Choice, Plan, Site
from lowtide.codecs import BlockMean, Cast, GroupQuant, Raw, TensorMeta
from lowtide.policy.methods import Method
from lowtide.policy.tuners.base import Tuner
from lowtide.session import handles
from lowtide.session.handles import Rebuilt

# Ways to add, as networks write it. The last letter of a sum is what a ReLU gets.
ADDS = {
    "a + b": lambda a, b: a + b,
    "b + a": lambda a, b: b + a,
    "a += b": lambda a, b: a.__iadd__(b),
    "torch.add": torch.add,
    "add by names": lambda a, b: torch.add(other=b, input=a),
    "add_": lambda a, b: a.add_(b),
}


class Block(nn.Module):
    """A residual block of ResNet: basic, or with a bottleneck; ``shortcut`` is a convolution with batch norm."""

    def __init__(self, inputs, width, *, bottleneck=False, shortcut=False, inplace=True, add=ADDS["a += b"]):
        super().__init__()
        mid = width // 4 if bottleneck else width
        kernels = (1, 3, 1) if bottleneck else (3, 3)
        widths = (inputs, *[mid] * (len(kernels) - 1), width)
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, k, padding=k // 2, bias=False) for i, o, k in zip(widths, widths[1:], kernels, strict=False)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for o in widths[1:])
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)) if shortcut else None
        )
        self.relu, self.add = nn.ReLU(inplace), add

    def forward(self, x):
        out = x
        for conv, norm in zip(self.convs[:-1], self.norms[:-1], strict=True):
            out = self.relu(norm(conv(out)))
        out = self.norms[-1](self.convs[-1](out))
        return self.relu(self.add(out, x if self.shortcut is None else self.shortcut(x)))


class Net(nn.Module):
    """A stem of convolution, batch norm and ReLU, then blocks, then a convolution that reads the last one's result."""

    def __init__(self, *blocks, width=8):
        super().__init__()
        self.stem, self.norm, self.relu = (
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        self.blocks, self.last = nn.Sequential(*blocks), nn.Conv2d(blocks[-1].norms[-1].num_features, 4, 1)
        for norm in self.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                nn.init.uniform_(norm.bias, -0.5, 0.5)

    def forward(self, x):
        return self.last(self.blocks(self.relu(self.norm(self.stem(x)))))


def images(form=torch.contiguous_format):
    return torch.randn(4, 3, 8, 8).contiguous(memory_format=form)


def gradients(model, x, context, autocast=False):
    """The loss is outside, and therefore exact."""
    model.zero_grad()
    with context as session, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x)
    torch.manual_seed(1)
    (out.float() * torch.randn(out.shape)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), session


def rebuilt(session):
    return [row for row in session.report().sites if row.codec.startswith("rebuilt")]


def of_sums(session):
    """The rebuilt rows that an addition made."""
    return [row for row in rebuilt(session) if "Add of" in row.why]


def derived(model, method, **options):
    return lowtide.compress(model, method, derive=True, min_numel=0, **options)


# Blocks, and how many sums of them are rebuilt from no more than four stored tensors.
NETS = {
    "basic": (lambda: Net(Block(8, 8), Block(8, 8)), 2),
    "basic, new memory": (lambda: Net(Block(8, 8, inplace=False, add=ADDS["a + b"])), 1),
    "shortcut": (lambda: Net(Block(8, 16, shortcut=True), Block(16, 16)), 2),
    "bottleneck": (lambda: Net(Block(8, 32, bottleneck=True, shortcut=True), Block(32, 32, bottleneck=True)), 2),
    **{f"basic, {name}": (lambda add=add: Net(Block(8, 8, add=add)), 1) for name, add in ADDS.items()},
}


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", NETS)
def test_exact_sources_give_exact_gradients(name, form):
    make, sums = NETS[name]
    model = make().to(memory_format=form)
    x = images(form)
    exact, _ = gradients(model, x, nullcontext())
    found, session = gradients(model, x, derived(model, Raw()))
    assert len(of_sums(session)) == sums
    # The rebuilt tensors repeat the few roundings of the forward in another order: some units of float32, no more.
    assert (found - exact).norm() <= 2**-20 * exact.norm()


@pytest.mark.parametrize("name", ["basic", "bottleneck"])
def test_autocast(name):
    model, x = NETS[name][0](), images()
    exact, _ = gradients(model, x, nullcontext(), autocast=True)
    found, session = gradients(model, x, derived(model, Raw()), autocast=True)
    rows = of_sums(session)
    assert len(rows) == 2
    assert {row.dtype for row in rows} == {"bfloat16"}
    # bfloat16 keeps 8 bits: the rebuilt input differs by its rounding, at most.
    assert (found - exact).norm() <= 2**-7 * exact.norm()


def test_stored_bytes_are_those_counted_by_hand():
    """Of a basic block batch norms' inputs are left: two of the three tensors that are stored if sums are."""
    model, x = Net(Block(8, 8), Block(8, 8)), images()
    codec = GroupQuant(4, layout="sample")
    _, session = gradients(model, x, derived(model, codec))
    report = session.report()
    assert len(rebuilt(session)) == 5
    values = 4 * 8 * 8 * 8
    maps, mask, statistics = values * 4 // 8 + 4 * (values // 256), values // 8, 2 * 8 * 4
    assert maps == codec.packed_nbytes(TensorMeta.of(torch.empty(4, 8, 8, 8)))
    # Five norms keep their inputs, five ReLUs their masks; the stem's input is the user's.
    assert report.stored_nbytes == 5 * (maps + mask + statistics)


def test_blpa_rebuilds_sums():
    model, x = Net(Block(8, 32, bottleneck=True, shortcut=True), Block(32, 32, bottleneck=True)), images()
    _, session = gradients(model, x, lowtide.compress(model, "blpa", min_numel=0))
    report = session.report()
    stored = {
        width: BlockMean(8, 2, 4, 256).packed_nbytes(TensorMeta.of(torch.empty(4, width, 8, 8))) for width in (8, 32)
    }
    values = {width: 4 * width * 64 for width in (8, 32)}
    # Of width 8: the stem's norm and two norms in each block; of width 32: the last norms and the shortcut's, which
    # has no ReLU of its own.
    wanted = sum(n * (stored[w] + 2 * w * 4) for w, n in ((8, 5), (32, 3))) + (5 * values[8] + 2 * values[32]) // 8
    assert report.stored_nbytes == wanted


# ---------------------------------------------------------------- values


def site(module, op, slot):
    return Site(module, op, slot, 0)


LAST = site("blocks.0.relu", "Relu", "result")._replace(ordinal=1)  # of a basic block, whose ReLU runs twice
STEM = site("relu", "Relu", "result")
INNER = site("blocks.0.norms.1", "NativeBatchNorm", "input")


@pytest.mark.parametrize("identity", [Choice.store(Cast("bfloat16")), Choice.keep(), Choice.rebuild()])
@pytest.mark.parametrize("inner", [Choice.store(Cast("bfloat16")), Choice.keep()])
def test_a_plan_gives_the_gradient_of_what_is_made_by_hand(inner, identity):
    """``mask * (scale * y' + shift + x')``, with the sources as they are decoded: stored, kept, or rebuilt too."""
    model, x = Net(Block(8, 8)), images()
    seen = {}
    model.norm.register_forward_hook(lambda module, args, out: seen.update(y0=args[0].detach().clone()))
    model.relu.register_forward_hook(lambda module, args, out: seen.update(x=out.detach().clone()))
    norm = model.blocks[0].norms[1]
    norm.register_forward_hook(lambda module, args, out: seen.update(y=args[0].detach().clone()))
    model.last.register_forward_hook(lambda module, args, out: seen.update(z=args[0].detach().clone()))

    first = site("norm", "NativeBatchNorm", "input")
    plan = Plan({LAST: Choice.rebuild(), STEM: identity, INNER: inner, first: Choice.store(Cast("bfloat16"))})
    _, session = gradients(model, x, lowtide.compress(model, plan, min_numel=0))
    assert len(of_sums(session)) == 1

    def rounded(t, choice):
        return (t if choice == Choice.keep() else t.bfloat16()).double()

    def normed(module, y, decoded):
        y = y.double()
        scale = module.weight.detach() / (y.var((0, 2, 3), correction=0) + module.eps).sqrt()
        return (decoded - y.mean((0, 2, 3)).view(1, -1, 1, 1)) * scale.view(1, -1, 1, 1) + module.bias.detach().view(
            1, -1, 1, 1
        )

    if identity == Choice.rebuild():
        through = torch.where(seen["x"] > 0, normed(model.norm, seen["y0"], seen["y0"].bfloat16().double()), 0.0)
    else:
        through = rounded(seen["x"], identity)
    sum_ = torch.where(seen["z"] > 0, normed(norm, seen["y"], rounded(seen["y"], inner)) + through, 0.0)
    torch.manual_seed(1)
    upstream = torch.randn(4, 4, 8, 8).double()
    wanted = torch.einsum("nohw,nihw->oi", upstream, sum_)
    # A few roundings of float32 in each of 256 terms.
    bound = 256 * 2.0**-22 * float(sum_.abs().max() * upstream.abs().max())
    assert float((model.last.weight.grad[:, :, 0, 0].double() - wanted).abs().max()) <= bound


class Errors(Tuner):
    """Stores everything in two bits, and notes how far what is rebuilt is off, and from what it is rebuilt."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def begin(self, step):
        pass

    def choose(self, use, tensor, base, from_sources=None):
        self.seen[use.sites[0]] = (use, tensor.clone(), None if from_sources is None else from_sources.make())
        return base

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@dataclass(frozen=True)
class Watched(Method):
    """Two bits for all, seen by a tuner."""

    name: ClassVar[str] = "watched"
    rebuilds: ClassVar[bool] = True

    def choose(self, use):
        return Choice.store(GroupQuant(2))

    def tuner(self, model):
        return Errors()


def test_variances_of_sources_add_up():
    """Sources come in the order of the sum, and its noise is ``scale**2 * var(y) + var(x)`` where the mask is set."""
    model, x = Net(Block(8, 8)), torch.randn(64, 3, 8, 8)
    session = lowtide.compress(model, Watched(), min_numel=0)
    gradients(model, x, session)
    seen = session.policy.tuner.seen
    use, tensor, made = seen[LAST]
    assert use.sources == (INNER, STEM)
    assert use.decodes == 2
    mask = tensor > 0
    assert torch.equal(made[~mask], torch.zeros_like(made[~mask]))
    norm, y, identity = model.blocks[0].norms[1], seen[INNER][1], seen[STEM][1]
    scale = (norm.weight.detach() / (y.var((0, 2, 3), correction=0) + norm.eps).sqrt()).view(1, -1, 1, 1)
    noise = GroupQuant(2)
    of_y = scale * (noise.encode(y, key=5).decode() - y)
    support = lowtide.kernels.ops.pack_band(identity.flatten(), 0.0, float("inf"), False, True)
    of_x = noise.encode(identity, key=6, support=support).decode(support) - identity
    wanted = float((of_y.square() + of_x.square())[mask].mean())
    found = float((made - tensor)[mask].square().mean())
    # 16384 values with errors of a bounded law: the mean square of such noise is off by a few percent at most.
    assert found == pytest.approx(wanted, rel=0.05)


def test_gradients_stay_unbiased():
    model, x = Net(Block(8, 8)), images()
    gradients(model, x, nullcontext())
    exact = model.last.weight.grad.clone()
    runs = []
    for seed in range(100):
        gradients(model, x, derived(model, GroupQuant(2), seed=seed))
        runs.append(model.last.weight.grad.clone())
    runs = torch.stack(runs)
    spread = runs.std(0) / len(runs) ** 0.5
    assert (spread > 0).all()
    # 32 weights: five standard errors are passed by chance once in 50000 tries.
    assert ((runs.mean(0) - exact).abs() <= 5 * spread).all()


# ---------------------------------------------------------------- chains


def test_a_chain_is_cut_where_four_tensors_are_decoded():
    model, x = Net(*(Block(8, 8) for _ in range(7))), images()
    exact, _ = gradients(model, x, nullcontext())
    found, session = gradients(model, x, derived(model, Raw()))
    # The stem's ReLU needs one tensor, and each block one more; the fourth block has five and is stored.
    assert [row.site.module for row in of_sums(session)] == [f"blocks.{i}.relu" for i in (0, 1, 2, 4, 5, 6)]
    assert (found - exact).norm() <= 2**-19 * exact.norm()
    assert [use.decodes for use in session.chosen if use.sites[0].ordinal == 1] == [2, 3, 4, 5, 2, 3, 4]


def everything(model, x):
    """A plan that stores what cannot be rebuilt and rebuilds all else."""
    _, session = gradients(model, x, lowtide.compress(model, Watched(), min_numel=0))
    choices = {use: Choice.rebuild() if use.sources else Choice.store(Raw()) for use in session.chosen}
    return Plan({site: choice for use, choice in choices.items() for site in use.sites})


def test_a_plan_may_have_longer_chains_up_to_a_bound():
    model, x = Net(*(Block(8, 8) for _ in range(33))), torch.randn(4, 3, 2, 2)
    exact, _ = gradients(model, x, nullcontext())
    found, session = gradients(model, x, lowtide.compress(model, everything(model, x), min_numel=0))
    rows = [row for row in session.report().sites if row.site.op == "Relu" and row.site.ordinal == 1]
    # The 32nd block would be rebuilt from 33 tensors.
    assert [row.state for row in rows].index("exact") == 31
    assert rows[31].why == "it was to be rebuilt, and here it cannot be"
    assert [row.codec for row in rows[:31]] == ["rebuilt + mask"] * 31
    assert (found - exact).norm() <= 2**-14 * exact.norm()


class Held(Net):
    """Holds the results of all blocks until the end, so that they are settled together, the last ones first."""

    def forward(self, x):
        parts = [self.relu(self.norm(self.stem(x)))]
        for block in self.blocks:
            parts.append(block(parts[-1]))
        return self.last(parts[-1])


@pytest.mark.parametrize("bound", [4, 32])
def test_a_chain_has_its_bound_in_any_order(bound, monkeypatch):
    nested = deepest = 0
    summed = Rebuilt._summed

    def counted(self, support):
        nonlocal nested, deepest
        nested += 1
        deepest = max(deepest, nested)
        try:
            return summed(self, support)
        finally:
            nested -= 1

    monkeypatch.setattr(Rebuilt, "_summed", counted)
    model, x = Held(*(Block(8, 8) for _ in range(40))), torch.randn(4, 3, 2, 2)
    exact, _ = gradients(model, x, nullcontext())
    method = lowtide.compress(model, everything(model, x), min_numel=0) if bound == 32 else derived(model, Raw())
    found, session = gradients(model, x, method)
    assert of_sums(session)
    assert 2 < deepest <= bound
    assert (found - exact).norm() <= 2**-14 * exact.norm()


# ---------------------------------------------------------------- lifetimes


def test_backward_twice_reads_the_same_values():
    model, x = Net(Block(8, 8), Block(8, 8)), images()
    with derived(model, "division") as session:
        loss = model(x).square().mean()
    assert len(of_sums(session)) == 2
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(first, model.parameters(), strict=True))


def test_a_gradient_can_be_differentiated():
    model, x = Net(Block(8, 8)), images()
    results = []
    for context in (nullcontext(), derived(model, Raw())):
        with context:
            loss = model(x).square().mean()
        inner = torch.autograd.grad(loss, model.parameters(), create_graph=True)
        outer = torch.autograd.grad(sum(g.square().sum() for g in inner), model.parameters())
        results.append(torch.cat([g.flatten() for g in outer]))
    # Twice the roundings of one backward, and differences of terms of one size.
    assert (results[1] - results[0]).norm() <= 2**-17 * results[0].norm()


def test_nothing_outlives_backward():
    model, x = Net(Block(8, 8), Block(8, 8)), images()
    gc.disable()
    try:
        with derived(model, "division") as session:
            loss = model(x).square().mean()
            kept = [r for r in session._handles.values() if r() is not None]
        loss.backward()
        assert len(kept) >= 10
        assert all(r() is None for r in kept)
    finally:
        gc.enable()


def test_a_sum_that_is_stored_does_not_keep_its_addends():
    """Only what is rebuilt needs them: here backward is done with the addends while a reader of the sum waits."""
    model, x = Net(Block(8, 8)), images()
    plan = Plan({LAST: GroupQuant(8), STEM: GroupQuant(8), INNER: Choice.rebuild()})
    with lowtide.compress(model, plan, min_numel=0) as session:
        out = model(x)
        handles = [r() for r in session._handles.values()]
    assert any(c.site == LAST for h in handles for c in h.consumers)
    assert all(h.origin is None for h in handles)
    out.sum().backward()


# ---------------------------------------------------------------- when in doubt


class Odd(nn.Module):
    """A convolution's result and a batch norm's, joined by ``join`` and read by two more convolutions."""

    def __init__(self, join):
        super().__init__()
        self.stem, self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.last, self.relu, self.join = nn.Conv2d(8, 4, 1), nn.ReLU(inplace=True), join
        self.shift = nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x):
        x = F.relu(self.stem(x))
        return self.last(self.join(self, x, self.norm(self.conv(x))))


def _changed(change, when, model, x, y):
    """Change an addend or the sum by ``change`` at some moment, and go on."""
    if when == "addend":
        change(y)
    if when == "kept addend":
        change(x)
    total = x + y
    if when == "sum":
        change(total)
    if when == "kept addend after the sum":
        change(x)
    return F.relu(total)


def _twice(t):
    t.data.mul_(2)


def _twice_in_place(t):
    with torch.no_grad():
        t.mul_(2)


def _twice_by_detach(t):
    t.detach().mul_(2)


JOINS = {
    "alpha": lambda m, x, y: torch.add(y, x, alpha=2),
    "alpha in place": lambda m, x, y: y.add_(x, alpha=-1),
    "difference": lambda m, x, y: F.relu(y - x),
    "number": lambda m, x, y: F.relu(y + x + 1),
    "number in place": lambda m, x, y: F.relu(y.add_(1).add_(x)),
    "sum()": lambda m, x, y: F.relu(sum([x, y])),
    "broadcast": lambda m, x, y: F.relu(y + m.shift),
    "no gradient": lambda m, x, y: F.relu(y + x.detach()),
    "channels last": lambda m, x, y: F.relu(y + _last(x)),
    "another layout": lambda m, x, y: F.relu(_last(y) + x),
    "same addend": lambda m, x, y: F.relu(y + y),
    "same addend in place": lambda m, x, y: F.relu(y.add_(y)),
    "addends of two layouts": lambda m, x, y: F.relu(y + m.norm(m.conv(_last(x)))),
    "view": lambda m, x, y: F.relu(y + x.flatten(2).unflatten(2, (8, 8))),
    "part": lambda m, x, y: F.relu(torch.cat([y[:2] + x[:2], y[2:]])),
    "part in place": lambda m, x, y: F.relu(_add_to_part(y, x)),
    "kept addend is changed in place": lambda m, x, y: F.relu(y) + torch.relu_(x + y),
    "edited in between": lambda m, x, y: F.relu((y + x).mul_(2)),
    "function of another name": lambda m, x, y: F.relu(Add.apply(x, y)),
    "dropout": lambda m, x, y: F.relu(F.dropout(y, 0.5) + x),
    **{
        f"{when}, {change.__name__}": lambda m, x, y, change=change, when=when: _changed(change, when, m, x, y)
        for change in (_twice, _twice_in_place, _twice_by_detach)
        for when in ("addend", "sum")
    },
    "kept addend, _twice": lambda m, x, y: _changed(_twice, "kept addend", m, x, y),
    "kept addend after the sum, _twice": lambda m, x, y: _changed(_twice, "kept addend after the sum", m, x, y),
}


def _last(x):
    return x.contiguous(memory_format=torch.channels_last)


def _add_to_part(y, x):
    y[:2] += x[:2]
    return y


class Add(torch.autograd.Function):
    """A user's function under the name of a known op."""

    @staticmethod
    def forward(ctx, x, y):
        return 2 * x + y

    @staticmethod
    def backward(ctx, g):
        return 2 * g, g


@pytest.mark.parametrize("name", JOINS)
def test_unusual_sums_are_stored(name):
    model, x = Odd(JOINS[name]), images()
    # What changes without a trace reaches the gradients of earlier weights in plain autograd too.
    weights = [model.last.weight] if "_twice" in name else list(model.parameters())
    results = []
    for context in (nullcontext(), derived(model, Raw())):
        torch.manual_seed(0)
        with context as session:
            out = model(x)
        torch.manual_seed(1)
        results.append(torch.autograd.grad((out * torch.randn(out.shape)).sum(), weights, allow_unused=True))
    assert not of_sums(session)
    for wanted, found in zip(*results, strict=True):
        if wanted is not None:
            assert (found - wanted).norm() <= 2**-20 * wanted.norm()


USUAL = {
    "plain": lambda m, x, y: F.relu(x + y),
    "without ReLU": lambda m, x, y: x + y,
    "three addends": lambda m, x, y: F.relu(m.norm(m.conv(x)) + x + y),
    "four addends": lambda m, x, y: F.relu(m.norm(m.conv(x)) + (x + y) + F.gelu(m.conv(x))),
    "gate": lambda m, x, y: F.relu(y * m.shift + x),
    "an addend was saved before it changed": lambda m, x, y: (F.gelu(y), F.relu(y.add_(x)))[1],
    "kept addend is pooled": lambda m, x, y: F.relu(m.norm(m.conv(z := F.max_pool2d(x, 3, 1, 1))) + z),
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_sums_are_rebuilt(name):
    model, x = Odd(USUAL[name]), images()
    exact, _ = gradients(model, x, nullcontext())
    found, session = gradients(model, x, derived(model, Raw()))
    assert len(of_sums(session)) == 1
    assert (found - exact).norm() <= 2**-20 * exact.norm()


def test_a_mask_alone_is_no_addend():
    model = Odd(lambda m, x, y: F.relu(y + F.relu(m.conv(x))))
    _, session = gradients(model, images(), lowtide.compress(model, Watched(), min_numel=0))
    assert [use.sources for use in session.chosen if "last" in [site.module for site in use.sites]] == [()]


def test_five_addends_are_too_many():
    for count in (4, 5):
        norms = [nn.BatchNorm2d(8) for _ in range(count)]
        model = Odd(lambda m, x, y, norms=norms: sum((norm(m.conv(x)) for norm in norms[1:]), norms[0](m.conv(x))))
        _, session = gradients(model, images(), lowtide.compress(model, Watched(), min_numel=0))
        assert [len(use.sources) for use in session.chosen if use.sites[0].module == "last"] == [count % 5]


def test_a_kept_addend_that_changes_later_is_an_error_as_in_autograd():
    def join(m, x, y):
        total = F.relu(x + y)
        with torch.no_grad():
            x.mul_(2)
        return total

    for context in (nullcontext(), None):
        model = Odd(join)
        with derived(model, Raw()) if context is None else context:
            loss = model(images()).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_kept_addend_that_data_changes_later_is_copied():
    def join(m, x, y):
        total = m.last(F.relu(x + y))
        x.data.mul_(2)
        return total

    model, x = Odd(join), images()
    model.forward = lambda x: join(model, x := F.relu(model.stem(x)), model.norm(model.conv(x)))
    gradients(model, x, nullcontext())
    exact = model.last.weight.grad.clone()
    _, session = gradients(model, x, derived(model, Raw()))
    assert len(of_sums(session)) == 1
    assert (model.last.weight.grad - exact).norm() <= 2**-20 * exact.norm()


def test_a_source_that_data_changed_before_is_not_used():
    """Between a norm and the reader of its result; the norm's own backward sees the change in plain autograd too."""

    def join(m, x, y):
        h = m.conv(x)
        y = m.norm(h)
        h.data.mul_(2)
        return F.relu(y)

    model, x = Odd(join), images()
    gradients(model, x, nullcontext())
    exact = model.last.weight.grad.clone()
    gradients(model, x, derived(model, Raw()))
    assert (model.last.weight.grad - exact).norm() <= 2**-20 * exact.norm()


def test_sums_of_vectors_are_rebuilt():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.norm = (
                nn.Linear(16, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 4),
                nn.BatchNorm1d(16),
            )

        def forward(self, x):
            x = F.relu(self.a(x))
            return self.c(F.relu(x + self.norm(self.b(x))))

    model, x = Tokens(), torch.randn(32, 16)
    exact, _ = gradients(model, x, nullcontext())
    found, session = gradients(model, x, derived(model, Raw()))
    assert len(of_sums(session)) == 1
    assert (found - exact).norm() <= 2**-20 * exact.norm()


def test_sizes_without_data_are_those_of_a_real_run():
    from torch._subclasses import FakeTensorMode

    def report(x, model):
        with derived(model, "division") as session:
            out = model(x)
        out.sum().backward()
        return session.report()

    real = report(images(), Net(Block(8, 16, shortcut=True), Block(16, 16)))
    with FakeTensorMode():
        fake = report(torch.empty(4, 3, 8, 8), Net(Block(8, 16, shortcut=True), Block(16, 16)))
    assert [(row.site, row.codec, row.stored_nbytes) for row in fake.sites] == [
        (row.site, row.codec, row.stored_nbytes) for row in real.sites
    ]
    assert sum("Add of" in row.why for row in real.sites) == 2


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_rebuilding_from_codes_in_one_pass_changes_no_bit(memory_format, half, monkeypatch):
    """Two residual sums, one rebuilt from the other, with a ReLU behind each, from groups that follow channels."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(5))
            self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))

        def forward(self, x):
            x = F.relu(self.norms[0](self.convs[0](x)))
            x = F.relu(self.norms[2](self.convs[2](x)) + self.norms[1](self.convs[1](x)))
            x = F.relu(x + self.norms[3](self.convs[3](x)))
            return self.convs[4](x)

    torch.manual_seed(0)
    x, model = torch.randn(4, 4, 24, 24), Net().to(memory_format=memory_format)
    one_pass, lengths = handles.decode_chain, []

    def gradients():
        twin = copy.deepcopy(model)
        session = lowtide.compress(twin, GroupQuant(4, layout="channel", dither=True), derive=True, min_numel=1, seed=3)
        with session, torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = twin(x.clone(memory_format=memory_format)).square().sum()
        loss.backward()
        return [p.grad for p in twin.parameters()]

    def counted(stages, other):
        lengths.append(len(stages))
        return one_pass(stages, other)

    monkeypatch.setattr(handles, "decode_chain", counted)
    found = gradients()
    assert lengths == [3, 2, 1, 1]  # the last sum is made of the norms of both, and the first tensor is read twice
    monkeypatch.setattr(handles, "is_link", lambda packed, after: False)
    assert all(map(torch.equal, found, gradients()))
    assert len(lengths) == 4
