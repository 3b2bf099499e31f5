"""What the capture sees of a forward, and what it leaves alone, against plain autograd."""

from __future__ import annotations

import gc
import itertools
import math
import threading
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fresh
import lowtide
from lowtide.codecs import GroupQuant
from lowtide.graph import capture
from lowtide.session.handles import _covers

PRELUDE = """
import torch, lowtide
from torch import nn
import torch.nn.functional as F

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]

class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx, g):
        return 0.5 * g
"""


def in_child(code: str, timeout: float = 180.0) -> str:
    """Run ``code`` after the prelude in a process of its own, which is ended if it hangs; what it printed."""
    done = fresh.run(PRELUDE + code, timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_view_of_what_changed_in_place_does_not_hang():
    """Torch holds a lock while it renews the history of such a view; to ask for it then would wait for ever."""
    code = """
from torch.utils.checkpoint import checkpoint

class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_full_backward_hook(lambda *_: None)
    def forward(self, v):
        return v.sin()

USES = {
    "function": (torch.relu_, Square.apply),
    "function that changes its input": (lambda h: h.add_(1), Halve.apply),
    "checkpoint": (torch.relu_, lambda v: checkpoint(torch.sin, v, use_reentrant=True)),
    "hook": (torch.relu_, lambda v: Hooked()(v)),
}

def step(context, change, use):
    torch.manual_seed(0)
    m = nn.Linear(8, 8)
    with context(m):
        h = m(torch.randn(4, 8))
        v = h.view(-1)
        change(h)
        use(v).sum().backward()
    return m.weight.grad

for name, use in USES.items():
    print(name, flush=True)
    plain = step(lambda m: torch.enable_grad(), *use)
    for derive in (False, True):
        found = step(lambda m: lowtide.compress(m, "lossless", min_numel=0, derive=derive), *use)
        assert torch.equal(plain, found)
"""
    assert len(in_child(code).splitlines()) == 4


def gradients_of(model, forward, context):
    """Gradients of all parameters, by name, and the session."""
    model.zero_grad()
    torch.manual_seed(0)
    with context as session:
        loss = forward()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, session


def assert_lossless_is_plain(model, forward, **options):
    """``lossless`` gives plain autograd's gradients bit for bit; the session."""
    plain, _ = gradients_of(model, forward, nullcontext())
    found, session = gradients_of(model, forward, lowtide.compress(model, "lossless", min_numel=0, **options))
    assert plain.keys() == found.keys()
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    return session


def _complex(layer, x):
    return torch.view_as_complex(layer(x).view(256, 32, 2))


@pytest.mark.parametrize(
    "function",
    [
        lambda z: z.conj().real * z.conj().imag,
        lambda z: F.silu(z.conj().imag) * z.conj().imag,
        lambda z: F.relu(z.conj().imag),
        lambda z: F.hardtanh(z.conj().imag),
        lambda z: F.avg_pool2d(z.conj().imag[None], 2),
        lambda z: torch.gather(z.conj(), 1, torch.zeros(256, 4, dtype=torch.int64)).abs(),
        lambda z: (z.conj() * z).real,
    ],
)
@pytest.mark.parametrize("derive", [False, True])
def test_lazy_negatives_and_conjugates_keep_their_sign(function, derive):
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), torch.randn(256, 64)
    assert_lossless_is_plain(layer, lambda: function(_complex(layer, x)).sum(), derive=derive)


def test_lazy_negatives_are_listed():
    layer, x = nn.Linear(64, 64), torch.randn(256, 64)

    def forward():
        z = _complex(layer, x).conj()
        return (z.real * z.imag).sum()

    session = assert_lossless_is_plain(layer, forward)
    assert any("negative" in s.why for s in session.report().sites)


def test_values_nobody_reads_do_not_matter():
    """Overlapping windows are larger together than their storage, of which they leave a part unread."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 3), nn.Conv1d(8, 8, 3)])
    x = torch.randn(16, 8, 40)

    def forward():
        buffer = torch.full((16, 8, 64), math.inf)
        buffer[:, :, :40] = model[0](x)
        return model[1](buffer[:, :, :39]).square().sum() + model[2](buffer[:, :, 1:40]).sum()

    plain, _ = gradients_of(model, forward, nullcontext())
    found, _ = gradients_of(model, forward, lowtide.compress(model, GroupQuant(8), min_numel=0))
    for name in plain:
        assert (found[name] - plain[name]).norm() <= 2**-4 * plain[name].norm()


VIEWS = [
    *[lambda t, i=i: t.chunk(3, -1)[i] for i in range(3)],
    *[lambda t, i=i: t.chunk(2, 0)[i] for i in range(2)],
    lambda t: t[:, ::2],
    lambda t: t[:, 1::2],
    lambda t: t.t(),
    lambda t: t[:1].expand(12, -1),
    lambda t: t.unfold(1, 4, 2),
    lambda t: t[2:9, 1:],
    lambda t: t.reshape(-1)[5:],
    lambda t: t[3],
    lambda t: t[0, 0],
]


def test_coverage_is_that_of_brute_force():
    rows, columns = 12, 18
    for count in (1, 2, 3, 4):
        for chosen in itertools.combinations(VIEWS, count):
            read = torch.zeros(rows, columns)
            views = [view(read) for view in chosen]
            described = frozenset((tuple(v.shape), v.stride(), v.storage_offset()) for v in views)
            places = {
                int(i) for view in chosen for i in view(torch.arange(rows * columns).view(rows, columns)).flatten()
            }
            assert _covers(described, rows * columns) == (len(places) == rows * columns)


def _edit_before_it_is_read(model, h):
    y = F.relu(h)
    y.data.sub_(0.3)
    return model[1](y)


def _edit_after_it_is_read(model, h):
    y = F.relu(h)
    z = model[1](y)
    y.data.sub_(0.3)
    return z


def _edit_later_through_an_alias(model, h):
    y = F.relu(h)
    alias = y.data
    z = model[1](y)
    alias.sub_(0.3)
    return z


def _edit_without_gradients(model, h):
    y = F.relu(h)
    with torch.no_grad():
        y.view(-1).data.sub_(0.3)
    return model[1](y)


@pytest.mark.parametrize(
    "edit", [_edit_before_it_is_read, _edit_after_it_is_read, _edit_later_through_an_alias, _edit_without_gradients]
)
@pytest.mark.parametrize("method", ["lossless", GroupQuant(8), "auto", "blpa"])
def test_a_relu_edited_by_data_is_no_longer_taken_for_one(edit, method):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)), torch.randn(64, 16)

    def forward():
        return edit(model, model[0](x)).sum()  # saves nothing but what is edited

    plain, _ = gradients_of(model, forward, nullcontext())
    found, session = gradients_of(model, forward, lowtide.compress(model, method, min_numel=0))
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    assert any(".data" in s.why for s in session.report().sites)


def test_a_change_through_data_of_a_saved_tensor_raises_as_in_plain():
    torch.manual_seed(0)
    model, x = nn.Linear(16, 16), torch.randn(64, 16)
    for context in (nullcontext(), lowtide.compress(model, "actnn", min_numel=0)):
        with context:
            h = model(x)
            alias = h.data
            y = (h.sin() + h * alias).sum()
            alias.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def _double(p):
    p.data.mul_(2)


def _replace(p):
    p.data = p.data * 2


def _nudge(p):
    p.data.add_(1e-6)


@pytest.mark.parametrize("change", [_double, _replace, _nudge])
@pytest.mark.parametrize("layer", [nn.Linear(64, 48), nn.Conv1d(64, 48, 3)], ids=["linear", "conv"])
def test_a_parameter_changed_by_data_before_backward_raises_under_autocast(layer, change):
    x = torch.randn(8, 64, *[9] * (layer.weight.dim() - 2)).requires_grad_()
    with lowtide.compress(layer, "lossless", min_numel=0), torch.autocast("cpu", torch.bfloat16):
        loss = layer(x).float().sum()
    change(layer.weight)
    with pytest.raises(RuntimeError, match="call backward first"):
        loss.backward()


def test_a_parameter_replaced_by_an_equal_one_is_cast_again():
    layer, x = nn.Linear(64, 48), torch.randn(8, 64).requires_grad_()
    results = []
    for context in (nullcontext(), lowtide.compress(layer, "lossless", min_numel=0)):
        with context, torch.autocast("cpu", torch.bfloat16):
            loss = layer(x).float().square().sum()
        layer.weight.data = layer.weight.data.clone()
        results.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(*results)


def test_few_values_are_read_from_memory_where_a_parameter_fills_it():
    maps = torch.randn(8, 4, 3, 3)
    forms = [maps, maps.to(memory_format=torch.channels_last), maps.bfloat16(), torch.randn(3), maps.double()]
    for values in forms:
        p = nn.Parameter(values.clone(memory_format=torch.preserve_format))
        before = capture.few_values(p)
        assert isinstance(before, list)
        assert 3 <= len(before) <= 32
        assert capture.few_values(p) == before
        p.data.mul_(1.01)
        assert all(a != b for a, b in zip(capture.few_values(p), before, strict=True))
    for values in (maps[:, :3], maps.to(torch.float8_e4m3fn), maps[:0]):
        assert isinstance(capture.few_values(nn.Parameter(values, requires_grad=False)), torch.Tensor)
    assert isinstance(capture.few_values(maps), torch.Tensor)


def test_nan_in_a_parameter_is_no_change():
    layer, x = nn.Linear(64, 48), torch.randn(8, 64).requires_grad_()
    with torch.no_grad():
        layer.weight[0, 0] = math.nan
    with lowtide.compress(layer, "lossless", min_numel=0), torch.autocast("cpu", torch.bfloat16):
        loss = layer(x).float().sum()
    loss.backward()
    assert x.grad[:, 0].isnan().all()


@pytest.mark.parametrize("edit", [lambda t: None, lambda t: t.mul_(3), lambda t: t.data.mul_(3)])
def test_a_leaf_input_under_autocast_is_no_parameter(edit):
    """Plain autograd keeps the copy in bfloat16, which a change of the input does not reach."""
    torch.manual_seed(0)
    layer, start = nn.Linear(64, 48), torch.randn(32, 64)
    grads = []
    for context in (nullcontext(), lowtide.compress(layer, "lossless", min_numel=0)):
        layer.zero_grad()
        x = start.clone().requires_grad_()
        with context, torch.autocast("cpu", torch.bfloat16):
            loss = layer(x).float().square().sum()
        with torch.no_grad():
            edit(x)
        loss.backward()
        grads.append(layer.weight.grad.clone())
    assert torch.equal(*grads)


def test_a_new_tensor_at_the_address_of_an_old_parameter_is_no_parameter():
    """Sharded training gives parameters new memory within forward; activations then get the old addresses."""
    torch.manual_seed(0)

    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])

        def forward(self, x):
            for layer in self.layers:
                layer.weight.data = layer.weight.data.clone()
                x = F.gelu(layer(x))
            return x.sum()

    model, x = Moving(), torch.randn(64, 64)
    with lowtide.compress(model, GroupQuant(4), min_numel=0) as session:
        loss = model(x)
        read = [s.site for s in session.report().sites if s.site.op in ("Gelu", "Addmm")]
    loss.backward()
    assert len({site for site in read if site.op == "Gelu"}) == 6
    assert len({site for site in read if site.slot == "mat1"}) == 6


@pytest.fixture
def no_session_before():
    """What a session tries of torch is tried again, as in a new process."""
    capture._probed.cache_clear()
    yield
    capture._probed.cache_clear()


@pytest.mark.usefixtures("no_session_before")
@pytest.mark.parametrize(
    "surroundings",
    [
        lambda: torch.device("meta"),
        torch.inference_mode,
        torch.no_grad,
        torch.autograd.graph.save_on_cpu,
        FakeTensorMode,
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("not now"),
    ],
)
def test_where_the_first_session_is_made_does_not_matter(surroundings):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    with surroundings():
        lowtide.compress(model, "actnn", min_numel=0)
        assert capture.probe().slots
    with lowtide.compress(model, "actnn", min_numel=0) as session:
        model(torch.randn(128, 64)).sum()
    assert session.report().ratio > 2


@pytest.mark.usefixtures("no_session_before")
def test_a_first_session_within_a_transform_does_not_matter():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    torch.func.grad(lambda x: (lowtide.compress(model, "actnn", min_numel=0), x.sum())[1])(torch.randn(3))
    with lowtide.compress(model, "actnn", min_numel=0) as session:
        model(torch.randn(128, 64)).sum()
    assert session.report().ratio > 2


def in_thread(function):
    """What ``function`` returns in a new thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def made_in(place, function):
    return in_thread(function) if place == "worker" else function()


@pytest.mark.parametrize(("features_in", "head_in"), [("main", "worker"), ("worker", "main"), ("main", "main")])
@pytest.mark.parametrize("warm", [0, 1, 7, 40])
def test_graphs_of_another_thread_stay_as_they_are(features_in, head_in, warm):
    """Only the head is attached; the features' own gradient is bit for bit that of a head that saves exactly."""
    torch.manual_seed(0)
    body = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(8)])
    head = nn.Sequential(nn.Linear(32, 8))
    x = torch.randn(64, 32)

    def step(place):
        body.zero_grad()
        for _ in range(warm):  # moves the numbers that this thread gives to nodes
            torch.ones(1, requires_grad=True).exp()
        features = made_in(features_in, lambda: body(x))
        made_in(place, lambda: head(features)).sum().backward()
        return [p.grad.clone() for p in body.parameters()]

    plain = step(head_in)
    with_hooks = lowtide.attach(head, "actnn", bits=2, min_numel=0)
    for _ in range(3):
        found = step(head_in)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert not [s for s in with_hooks.report().sites if s.site.op == "Gelu"]
    with_hooks.remove()


@pytest.mark.parametrize("use", ["compress", "attach"])
def test_a_session_goes_without_the_garbage_collector(use):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(128, 64)
    gc.collect()
    gc.disable()
    try:
        if use == "compress":
            with lowtide.compress(model, "actnn", min_numel=0) as session:
                loss = model(x).sum()
            gone = weakref.ref(session)
            loss.backward()
            del session, loss
        else:
            attachment = lowtide.attach(model, "actnn", min_numel=0)
            gone = weakref.ref(attachment._session)
            model(x).sum().backward()
            attachment.remove()
            del attachment
        assert gone() is None
    finally:
        gc.enable()


def _modes():
    return torch.overrides._get_current_function_mode_stack()


class Interrupted(nn.Module):
    """Its forward is ended as by Ctrl-C, which skips the hooks that close a session."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        self.layer(x)
        raise KeyboardInterrupt


def test_an_interrupt_leaves_no_device_behind():
    model = Interrupted()
    attachment = lowtide.attach(model, "actnn")
    try:
        with pytest.raises(KeyboardInterrupt), torch.device("meta"):
            model(torch.empty(4, 8, device="cpu"))
        assert torch.empty(1).device.type == "cpu"
    finally:
        attachment.remove()
        assert not _modes()


def test_the_default_device_may_change_within_a_session():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    torch.set_default_device("cpu")
    try:
        with lowtide.compress(model, "actnn"):
            torch.set_default_device("meta")
            model(x)
            torch.set_default_device(None)
            assert torch.empty(1).device.type == "cpu"
        assert not _modes()
    finally:
        torch.set_default_device(None)


def test_modes_around_and_within_a_session_keep_their_order():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with torch.device("meta"), lowtide.compress(model, "actnn"), torch.device("cpu"):
        assert torch.empty(1).device.type == "cpu"
        model(x)
    with torch.device("meta"):
        with lowtide.compress(model, "actnn"):
            assert torch.empty(1).device.type == "meta"
        assert torch.empty(1).device.type == "meta"
    assert not _modes()


@pytest.mark.parametrize("how", ["attach", "compress"])
def test_an_attached_model_can_be_traced(how):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(128, 64)
    plain = model(x)
    context = lowtide.compress(model, "actnn", min_numel=0) if how == "compress" else nullcontext()
    attachment = lowtide.attach(model, "actnn", min_numel=0) if how == "attach" else None
    with context, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), plain)
    if attachment is not None:
        assert attachment.state_dict()["step"] == 0
        recorded = make_fx(model)(x)
        assert torch.equal(recorded(x), plain)
        attachment.remove()


SHAPE_READERS = [
    lambda h: F.avg_pool2d(h, 2),
    lambda h: F.max_pool2d(h, 2),
    lambda h: F.pad(h, (1, 1, 1, 1), mode="reflect"),
    lambda h: torch.gather(h, 3, torch.zeros(2, 4, 8, 2, dtype=torch.int64)),
]


@pytest.mark.parametrize("function", SHAPE_READERS)
@pytest.mark.parametrize("change", [lambda h: h.add_(1), lambda h: h.view(-1).mul_(2), lambda h: h.detach().zero_()])
def test_a_change_of_what_only_lends_its_shape_raises_as_in_plain(function, change):
    model, x = nn.Linear(8, 8), torch.randn(2, 4, 8, 8)
    for context in (nullcontext(), lowtide.compress(model, "lossless", min_numel=0)):
        with context:
            h = model(x)
            loss = function(h).sum()
            change(h)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_only_lends_its_shape_is_not_kept():
    model, x = nn.Linear(8, 8), torch.randn(2, 4, 8, 8)
    with lowtide.compress(model, "lossless", min_numel=0):
        h = model(x)
        storage = weakref.ref(h.untyped_storage())
        loss = F.avg_pool2d(h, 2).sum()
        del h
        assert storage() is None
    loss.backward()


class Passes(nn.Module):
    def forward(self, *tensors):
        return tensors


@pytest.mark.parametrize(
    "use", [lambda v: v.data, lambda v: v.contiguous(), lambda v: Passes()(v), lambda v: torch.broadcast_tensors(v, v)]
)
def test_a_view_that_has_become_invalid_raises_only_where_plain_does(use):
    model, x = nn.Linear(8, 8), torch.randn(4, 8)

    def forward():
        h = model(x)
        view = h.unbind()[0]
        h.mul_(2)
        use(view)
        with torch.no_grad():
            use(view)
        return h.sum()

    assert_lossless_is_plain(model, forward)


def test_a_cast_copy_of_a_parameter_that_changes_is_an_error_as_in_plain_pytorch():
    model, x = nn.Linear(64, 64), torch.randn(128, 64, dtype=torch.bfloat16, requires_grad=True)
    for context in (nullcontext(), lowtide.compress(model, "lossless", min_numel=0)):
        with context:
            weight = model.weight.to(torch.bfloat16)
            loss = (x @ weight * 2.0).sum()
            with torch.no_grad():
                weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
