"""Twins: the op's forward to the bit, its input gradient to the bit, and a weight gradient from means alone."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.codecs import BlockMean
from lowtide.graph.twins import PooledConvolution, pooled_convolution
from lowtide.policy.methods import Method, Pool
from lowtide.report import COMPRESSED, EXACT, HELD, SHARED

FORMS = {1: [torch.contiguous_format], 2: [torch.contiguous_format, torch.channels_last]}
FORMS[3] = [torch.contiguous_format, torch.channels_last_3d]
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EVERY = [
    (dims, form, dtype, bias, outputs)
    for dims in (1, 2, 3)
    for form in FORMS[dims]
    for dtype, bias, outputs in itertools.product(FLOATS, (True, False), (3, 24))
    if dims == 2 or (bias and outputs == 3)
]


def is_twin(node):
    return type(node)._forward_cls is PooledConvolution if hasattr(type(node), "_forward_cls") else False


def case(dims, form, dtype, bias, outputs, kernel=2):
    """A 1x1 convolution and an input that its graph alone owns once the forward is over."""
    torch.manual_seed(dims)
    conv = CONVS[dims](12, outputs, 1, bias=bias).to(dtype=dtype, memory_format=form)
    sizes = ((8,), (8, 12), (4, 8, 4))[dims - 1]
    x = torch.randn(5, 12, *(s * kernel // 2 for s in sizes)).to(dtype).contiguous(memory_format=form)
    return conv, x.requires_grad_()


def run(conv, x, method=None, grad=None):
    """Output, gradient of the input, gradients of the parameters, report."""
    conv.zero_grad()
    x.grad = None
    if method is None:
        out, report = conv(x * 1), None
    else:
        with lowtide.compress(conv, method, min_numel=1) as session:
            out = conv(x * 1)
        report = session.report()
    out.backward(torch.randn_like(out, generator=None) if grad is None else grad)
    return out.detach(), x.grad, [p.grad for p in conv.parameters()], report


@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize(("dims", "form", "dtype", "bias", "outputs"), EVERY, ids=str)
def test_both_paths_have_one_weight_gradient(dims, form, dtype, bias, outputs, kernel):
    """Forward and input gradient to the bit; weight gradients within rounding of the means spread and multiplied.

    The reference is in float64: n = positions products |g||x| for each weight. Means of x are the stored ones. Means
    of g are rounded to the dtype, the sum of n / k^d products runs in float32, the result is rounded: a relative
    error of 2 units of the dtype and n float32 ones, of the norm product |g||x| (Cauchy-Schwarz) at the most.
    """
    conv, x = case(dims, form, dtype, bias, outputs, kernel)
    grad = torch.randn(5, outputs, *x.shape[2:], generator=torch.Generator().manual_seed(3)).to(dtype)
    grad = grad.contiguous(memory_format=form)
    out, dx, exact, _ = run(conv, x, grad=grad)
    twin_out, twin_dx, twin, report = run(conv, x, Pool(kernel), grad)
    assert torch.equal(out, twin_out)
    assert out.stride() == twin_out.stride()
    assert torch.equal(dx, twin_dx)
    assert dx.stride() == twin_dx.stride()

    means = BlockMean(kernel, dims, bits=0)
    spread = means.encode(x.detach(), key=0).decode().double().transpose(0, 1).flatten(1)
    wide = grad.double().transpose(0, 1).flatten(1)
    wanted = (wide @ spread.t()).view_as(twin[0])
    positions = spread.shape[1]
    norms = (wide.norm(dim=1)[:, None] * spread.norm(dim=1)).view_as(wanted)
    bound = (2 * torch.finfo(dtype).eps + positions * 2.0**-24) * norms
    assert bool(((twin[0].double() - wanted).abs() <= bound).all())
    assert twin[0].dtype == dtype
    assert float((exact[0].double() - wanted).norm()) > 0.1 * float(exact[0].double().norm())  # means are not all
    if bias:
        total = wide.sum(1)
        assert bool(
            (
                (twin[1].double() - total).abs() <= (torch.finfo(dtype).eps + positions * 2.0**-24) * wide.abs().sum(1)
            ).all()
        )
    (row,) = (s for s in report.sites if s.site.op == "Convolution")
    assert (row.site.module, row.site.slot, row.state) == ("", "input", COMPRESSED)
    assert row.plain_nbytes == x.numel() * x.element_size()
    assert row.stored_nbytes == row.plain_nbytes // kernel**dims


class Watch(TorchDispatchMode):
    """Every tensor that is made, by op, with its size."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in inputs:
                self.made.append((func.__name__, t.numel()))
        return result


@pytest.mark.parametrize("outputs", [16, 64])
def test_backward_makes_no_full_input(outputs):
    """But for the input's gradient itself, and where outputs are fewer a form that is never written or read."""
    conv = nn.Conv2d(32, outputs, 1, bias=False)
    x = torch.randn(4, 32, 16, 16, requires_grad=True)
    with lowtide.compress(conv, "pool", min_numel=1):
        out = conv(x * 1)
    assert is_twin(out.grad_fn)
    grad = torch.randn_like(out)
    watch = Watch()
    with watch:
        out.backward(grad)
    large = [name for name, numel in watch.made if numel >= x.numel()]
    form = ["empty_strided.default"] if outputs < 32 else []
    assert sorted(large)[: len(form) + 1] == sorted(["convolution_backward.default", *form])
    # what remains is autograd's own work on the input's gradient
    assert set(large) <= {"convolution_backward.default", "mul.Tensor", "detach.default", *form}
    assert large.count("convolution_backward.default") == 1


def test_the_input_is_freed_in_the_forward():
    conv, x = nn.Conv2d(8, 8, 1), torch.randn(2, 8, 16, 16, requires_grad=True)
    seen = []

    def note(module, args):
        seen.append(weakref.ref(args[0].untyped_storage()))

    conv.register_forward_pre_hook(note)
    with lowtide.compress(conv, "pool", min_numel=1):
        out = conv(x * 1)
    assert is_twin(out.grad_fn)
    assert seen[0]() is None


PLAIN = (torch.zeros(2, 4, 8, 8), nn.Parameter(torch.zeros(6, 4, 1, 1)))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (PLAIN, {}),
        ((*PLAIN, torch.zeros(6)), {}),
        ((*PLAIN, None, (1, 1), (0, 0), (1, 1), 1), {}),
        ((*PLAIN, None, 1, "valid"), {}),
        (PLAIN[:1], {"weight": PLAIN[1], "stride": [1, 1], "padding": 0}),
        ((), {"input": PLAIN[0], "weight": PLAIN[1]}),
    ],
)
def test_calls_that_get_a_twin(args, kwargs):
    twin = pooled_convolution(2, F.conv2d, args, kwargs)
    assert twin is not None
    assert torch.equal(twin(*args, **kwargs), F.conv2d(*args, **kwargs))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.zeros(2, 4, 7, 8), PLAIN[1]), {}),
        ((torch.zeros(2, 4, 8, 9), PLAIN[1]), {}),
        ((torch.zeros(4, 8, 8), PLAIN[1]), {}),
        ((torch.zeros(0, 4, 8, 8), PLAIN[1]), {}),
        ((PLAIN[0], nn.Parameter(torch.zeros(6, 4, 3, 3))), {}),
        ((PLAIN[0], nn.Parameter(torch.zeros(6, 4, 1, 3))), {}),
        ((PLAIN[0], PLAIN[1].detach()), {}),
        (PLAIN, {"stride": 2}),
        (PLAIN, {"stride": (1, 2)}),
        (PLAIN, {"padding": 1}),
        (PLAIN, {"padding": "same"}),
        (PLAIN, {"dilation": 2}),
        ((PLAIN[0], nn.Parameter(torch.zeros(4, 1, 1, 1))), {"groups": 4}),
        ((PLAIN[0].double(), nn.Parameter(PLAIN[1].detach().double())), {}),
        ((PLAIN[0].to_sparse(), PLAIN[1]), {}),
        ((nn.Parameter(PLAIN[0]).as_subclass(type("Own", (torch.Tensor,), {})), PLAIN[1]), {}),
        (PLAIN, {"out": None}),
        ((), {}),
    ],
)
def test_unusual_calls_get_none(args, kwargs):
    assert pooled_convolution(2, F.conv2d, args, kwargs) is None


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own make_dual
def test_unusual_surroundings_get_none():
    def asked(func=F.conv2d, kernel=2, args=PLAIN):
        return pooled_convolution(kernel, func, args, {}) is not None

    assert asked()
    assert not asked(kernel=1)
    assert not asked(func=F.conv1d)
    assert not asked(func=F.linear)
    with torch.no_grad():
        assert not asked()
    with torch.autocast("cpu", torch.bfloat16):
        assert not asked()
    with torch.autograd.graph.save_on_cpu():
        assert not asked()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(PLAIN[0], torch.ones_like(PLAIN[0]))
        assert not asked(args=(dual, PLAIN[1]))
    answers = []
    torch.func.grad(lambda w: (answers.append(asked(args=(PLAIN[0], w))), w.sum())[1])(PLAIN[1].detach())
    torch.func.vmap(lambda x: (answers.append(asked(args=(x, PLAIN[1]))), x)[1])(PLAIN[0][None])
    assert answers == [False, False]
    assert asked()


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 with a projected shortcut; ``stride`` takes the shortcut out of the twins."""

    def __init__(self, stride=1):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.conv1, self.conv2 = nn.Conv2d(32, 8, 1, bias=False), nn.Conv2d(8, 8, 3, stride, 1, bias=False)
        self.conv3, self.short = nn.Conv2d(8, 32, 1, bias=False), nn.Conv2d(32, 32, 1, stride, bias=False)
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, (8, 8, 32, 32)))

    def forward(self, x):
        x = self.stem(x).relu()
        y = self.norms[0](self.conv1(x)).relu()
        y = self.norms[1](self.conv2(y)).relu()
        return (self.norms[2](self.conv3(y)) + self.norms[3](self.short(x))).relu()


@pytest.mark.parametrize("form", FORMS[2], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_a_bottleneck_counts_each_storage_once_and_equals_the_other_path(stride, form, monkeypatch):
    """Twins change neither a byte of what is stored nor, but for rounding, a gradient."""
    torch.manual_seed(0)
    net, x = Bottleneck(stride).to(memory_format=form), torch.randn(4, 3, 16, 16).contiguous(memory_format=form)

    def step():
        net.zero_grad()
        with lowtide.compress(net, "pool", min_numel=1) as session:
            loss = net(x.clone()).square().sum()
        loss.backward()
        return loss.detach(), {n: p.grad.clone() for n, p in net.named_parameters()}, session.report()

    used = []
    apply = PooledConvolution.apply
    monkeypatch.setattr(PooledConvolution, "apply", lambda *a: (used.append(1), apply(*a))[1])
    loss, twin, report = step()
    assert len(used) == (3 if stride == 1 else 2)
    monkeypatch.setattr(Pool, "twin", Method.twin)
    plain_loss, plain, plain_report = step()
    assert len(used) == (3 if stride == 1 else 2)
    assert torch.equal(loss, plain_loss)
    assert report.sites == plain_report.sites
    assert (report.plain_nbytes, report.stored_nbytes) == (plain_report.plain_nbytes, plain_report.stored_nbytes)
    by_site = {(s.site.module, s.site.op, s.site.slot): s for s in report.sites if not s.site.ordinal}
    assert by_site["conv1", "Convolution", "input"].state == SHARED
    assert by_site["short", "Convolution", "input"].state == SHARED
    shared = by_site["", "Relu", "result"]
    numel = 4 * 32 * 16 * 16
    assert (shared.state, shared.plain_nbytes, shared.stored_nbytes) == (COMPRESSED, numel * 4, numel + numel // 8)
    for name, wanted in plain.items():
        # sums of at most 1024 products, twice, in different orders; norms bound what cancels
        scale = float(wanted.norm()) + float(plain["conv1.weight"].norm())
        assert float((twin[name] - wanted).norm()) <= 2 * 1024 * 2.0**-24 * scale, name


def test_a_tensor_somebody_holds_keeps_the_weight_gradient_exact():
    conv, x = case(2, torch.contiguous_format, torch.float32, True, 3)
    held = x * 1
    conv(held).sum().backward(retain_graph=True)
    exact = [p.grad.clone() for p in conv.parameters()]
    conv.zero_grad()
    with lowtide.compress(conv, "pool", min_numel=1) as session:
        out = conv(held)
    assert is_twin(out.grad_fn)
    assert [s.state for s in session.report().sites if s.site.op == "Convolution"] == [HELD]
    out.sum().backward()
    assert all(map(torch.equal, exact, (p.grad for p in conv.parameters())))


def test_small_inputs_stay_exact():
    conv, x = case(2, torch.contiguous_format, torch.float32, False, 3)
    grad = torch.ones(5, 3, 8, 12)
    _, _, exact, _ = run(conv, x, grad=grad)
    conv.zero_grad()
    with lowtide.compress(conv, "pool", min_numel=10**6) as session:
        out = conv(x * 1)
    assert {s.state for s in session.report().sites if s.site.op == "Convolution"} == {EXACT}
    out.backward(grad)
    assert torch.equal(conv.weight.grad, exact[0])


def test_changes_in_place_are_reported():
    conv, x = case(2, torch.contiguous_format, torch.float32, False, 3)
    with lowtide.compress(conv, "pool", min_numel=1):
        h = x * 1
        out = conv(h)
        assert is_twin(out.grad_fn)
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    with lowtide.compress(conv, "pool", min_numel=1):
        out = conv(x * 1)
    with torch.no_grad():
        conv.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_twice_retained_is_the_same_and_twice_differentiated_is_refused():
    conv, x = case(2, torch.contiguous_format, torch.float32, True, 3)
    with lowtide.compress(conv, "pool", min_numel=1):
        out = conv(x * 1).square().sum()
    first = torch.autograd.grad(out, conv.weight, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out, conv.weight, retain_graph=True)[0], first)
    (again,) = torch.autograd.grad(out, conv.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        again.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_regions_recompute_as_before(reentrant):
    conv, x = case(2, torch.contiguous_format, torch.float32, True, 3)
    grad = torch.ones(5, 3, 8, 12)
    _, dx, exact, _ = run(conv, x, grad=grad)
    conv.zero_grad()
    x.grad = None
    with lowtide.compress(conv, "pool", min_numel=1):
        out = checkpoint(conv, x * 1, use_reentrant=reentrant)
    out.backward(grad)
    assert torch.equal(x.grad, dx)
    assert all(map(torch.equal, exact, (p.grad for p in conv.parameters())))


def test_autocast_takes_the_ordinary_path():
    conv, x = case(2, torch.contiguous_format, torch.float32, True, 24)
    with torch.autocast("cpu", torch.bfloat16):
        plain = conv(x * 1)
        with lowtide.compress(conv, "pool", min_numel=1) as session:
            out = conv(x * 1)
    assert torch.equal(out, plain)
    assert not is_twin(out.grad_fn)
    assert any("block_mean" in s.codec for s in session.report().sites)
    out.sum().backward()


def test_nan_reaches_the_weight_gradient():
    conv, x = case(2, torch.contiguous_format, torch.float32, False, 3)
    with torch.no_grad():
        x[1, 4, 2, 2] = torch.inf
    _, _, (weight,), _ = run(conv, x, Pool(2), torch.ones(5, 3, 8, 12))
    assert torch.equal(weight.isnan()[:, :, 0, 0], (torch.arange(12) == 4).expand(3, 12))


def test_an_exception_leaves_nothing_behind():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)

        def forward(self, x):
            seen.append(weakref.ref(x.untyped_storage()))
            h = self.conv(x)
            raise ValueError(f"after a twin of shape {tuple(h.shape)}")

    seen = []
    net, x = Fails(), torch.randn(2, 8, 16, 16, requires_grad=True)
    with pytest.raises(ValueError, match="after a twin"), lowtide.compress(net, "pool", min_numel=1):
        net(x * 1)
    assert seen[0]() is None
    assert not is_twin(net.conv(x).grad_fn)
    with pytest.raises(RuntimeError, match="expected input"), lowtide.compress(net, "pool", min_numel=1):
        net.conv(torch.zeros(2, 4, 8, 8))
    assert not is_twin(net.conv(x).grad_fn)


@pytest.mark.parametrize("form", FORMS[2], ids=str)
def test_small_maps_are_the_stored_means(form):
    x = torch.randn(2, 3, 8, 12).contiguous(memory_format=form)
    codec = BlockMean(4, 2, bits=0)
    packed = codec.encode(x, key=0)
    small = codec.small(packed)
    assert torch.allclose(small, F.avg_pool2d(x, 4), atol=16 * 2.0**-24 * float(x.abs().max()))
    assert small.is_contiguous(memory_format=form)
    assert small.data_ptr() == packed.buffers[0].data_ptr()
    assert codec.small(codec.encode(x[:, :, :7], key=0)) is None
    assert BlockMean(4, 2, bits=2).small(BlockMean(4, 2, bits=2).encode(x, key=0)) is None
