"""What a session promises: nothing left behind, nothing silently wrong, nothing made worse."""

from __future__ import annotations

import copy
import gc
import json
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.codecs import GroupQuant, Raw
from lowtide.report import COMPRESSED, EXACT, HELD, SHARED
from lowtide.session import packing
from ranks import on_two_ranks
from zoo import ZOO


def net(width=64):
    return nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def exact_gradients(model, run):
    model.zero_grad()
    run()
    found = gradients(model)
    model.zero_grad()
    return found


def assert_same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


# ---------------------------------------------------------------- nothing left behind


def fingerprint(model):
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._forward_hooks_always_called), m.training)
        for m in model.modules()
    ]
    anywhere = nn.modules.module
    hooks.append((len(anywhere._global_forward_hooks), len(anywhere._global_forward_pre_hooks)))
    return hooks, [(p.requires_grad, p.grad is None) for p in model.parameters()], list(model.state_dict())


class Failure(Exception):
    pass


@pytest.mark.parametrize("fail", [False, True], ids=["normal", "exception"])
def test_model_random_stream_and_hooks_are_untouched(fail):
    model, (x, _), _ = ZOO["densenet"]()
    model.eval()
    before, weights = fingerprint(model), copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    try:
        with lowtide.compress(model, "division", min_numel=0):
            model(x)
            if fail:
                raise Failure
    except Failure:
        pass
    assert torch.equal(torch.rand(4), expected)
    assert fingerprint(model) == before
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    assert torch._C._len_torch_function_stack() == 0


def test_exception_inside_a_module_leaves_no_hook_and_the_next_session_works():
    model = net()

    def explode(module, args):
        raise Failure

    handle = model[2].register_forward_pre_hook(explode)
    with pytest.raises(Failure), lowtide.compress(model, "actnn"):
        model(torch.randn(4, 32))
    handle.remove()
    assert fingerprint(model)[0] == fingerprint(net())[0]
    with lowtide.compress(model, "actnn", min_numel=0) as session:
        loss = model(torch.randn(4, 32)).sum()
    loss.backward()
    assert [s.site.module for s in session.report().sites] == ["0", "1", "2", "3", "4"]


def test_packed_memory_goes_with_the_graph():
    model = net()
    gc.disable()
    try:
        with lowtide.compress(model, "actnn", min_numel=0) as session:
            loss = model(torch.randn(64, 32)).sum()
        handles = [weakref.ref(h) for h in _live_handles()]
        assert handles
        loss.backward()
        del loss
        assert all(h() is None for h in handles)
        assert session._decoded is None
    finally:
        gc.enable()


def _live_handles():
    from lowtide.session.handles import Handle

    return [o for o in gc.get_objects() if type(o) is Handle]


def test_a_settled_step_leaves_nothing_for_pythons_collector():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)]
    model = nn.Sequential(*layers, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16 * 16, 8))
    session = lowtide.compress(model, "auto")

    def step():
        with session, torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(64, 3, 8, 8)).square().mean()
        loss.backward()
        model.zero_grad()

    for _ in range(12):  # more than the steps in which it measures
        step()
    gc.collect()
    gc.disable()
    try:
        step()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_original_tensor_is_freed_in_the_forward():
    """The point of it all: the big tensor is gone before backward, not only copied."""
    storages = []

    class Watch(nn.Module):
        def forward(self, x):
            storages.append(weakref.ref(x.untyped_storage()))
            return x

    model = nn.Sequential(nn.Linear(32, 512), Watch(), nn.GELU(), Watch(), nn.Linear(512, 1))
    with lowtide.compress(model, "actnn"):
        loss = model(torch.randn(64, 32)).sum()
    assert [s() for s in storages] == [None, None]
    loss.backward()


# ---------------------------------------------------------------- exact where it must be


def test_inplace_misuse_is_still_reported():
    """Whatever plain PyTorch refuses is refused with the session too, pending or kept."""

    class Misuse(nn.Module):
        def __init__(self, op):
            super().__init__()
            self.linear, self.op = nn.Linear(64, 64), op

        def forward(self, x):
            h = self.linear(x)
            y = self.op(h)
            h.add_(1)
            return y.sum() + h.sum()

    for op in (F.gelu, torch.exp, torch.sqrt, lambda h: h * h, lambda h: F.layer_norm(h, (64,))):
        model = Misuse(lambda h, op=op: op(h))
        x = torch.rand(128, 64) + 1
        try:
            model(x).backward()
            refused = False
        except RuntimeError:
            refused = True
        with lowtide.compress(model, "actnn"):
            loss = model(x)
        if refused:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()


def test_legitimate_inplace_operations_stay_exact():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            h = F.relu(self.a(x), inplace=True)
            out = self.b(h)
            out += h
            out[:, :4] = out[:, :4].tanh() * 2
            return F.relu_(out).sum()

    model, x = Residual(), torch.randn(64, 32)
    expected = exact_gradients(model, lambda: model(x).backward())
    with lowtide.compress(model, Raw(), min_numel=0):
        loss = model(x)
    loss.backward()
    assert_same(gradients(model), expected)


@pytest.mark.parametrize("method", [Raw(), "lossless"], ids=str)
def test_accumulation_and_retained_graphs_are_bit_equal(method):
    model, batches = net(), [torch.randn(64, 32) for _ in range(3)]

    def run():
        for x in batches:
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()

    expected = exact_gradients(model, run)
    for x in batches:
        with lowtide.compress(model, method, min_numel=0):
            loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(gradients(model), expected)
    model.zero_grad()
    with lowtide.compress(model, method, min_numel=0):  # all micro-batches and backwards inside one session
        for x in batches:
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
    assert_same(gradients(model), expected)


def test_lossy_backward_repeats_itself_under_retain_graph():
    model, x = net(), torch.randn(64, 32)
    with lowtide.compress(model, "actnn", min_numel=0):
        loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    first = gradients(model)
    model.zero_grad()
    loss.backward()
    assert_same(gradients(model), first)


def test_double_backward_is_bit_equal_with_raw():
    model, x = net(), torch.randn(16, 32)

    def run(context):
        point = x.clone().requires_grad_()
        with context:
            out = model(point).square().sum()
        (slope,) = torch.autograd.grad(out, point, create_graph=True)
        slope.square().sum().backward()

    expected = exact_gradients(model, lambda: run(torch.enable_grad()))
    run(lowtide.compress(model, Raw(), min_numel=0))
    assert_same(gradients(model), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", [Raw(), "actnn"], ids=str)
def test_checkpoint_inside_the_region_recomputes_from_exact_inputs(method, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(32, 64)
            self.block = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 64))
            self.calls = 0

        def run_block(self, x):
            self.calls += 1
            return self.block(x)

        def forward(self, x):
            h = self.first(x)
            return checkpoint(self.run_block, h, use_reentrant=reentrant).sum()

    model, x = Checkpointed(), torch.randn(64, 32)

    def run():
        torch.manual_seed(5)
        model(x).backward()

    expected = exact_gradients(model, run)
    model.calls = 0
    torch.manual_seed(5)
    with lowtide.compress(model, method, min_numel=0, boundary_bits=None) as session:
        loss = model(x)
    assert model.calls == 1  # looking at the graph must not trigger the recomputation
    loss.backward()
    assert model.calls == 2
    if reentrant:
        return_sites = {s.site.module for s in session.report().sites if s.state == COMPRESSED}
        assert not any(m.startswith("block") for m in return_sites)
    # Nothing outside the checkpoint is lossy here, so even 2 bits leave the gradients exact but for
    # the first layer, whose input the caller still holds.
    assert_same(gradients(model), expected)


def test_reports_what_other_hooks_hold():
    model = net()
    with lowtide.compress(model, "actnn", min_numel=0) as session, torch.autograd.graph.save_on_cpu():
        loss = model(torch.randn(64, 32)).sum()
    loss.backward()
    states = {s.state for s in session.report().sites}
    assert states == {HELD}
    assert session.report().stored_nbytes == 0


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about any global module hook
def test_compiled_code_stays_exact_and_is_listed():
    model, x = net(), torch.randn(64, 32)
    expected = exact_gradients(model, lambda: model(x).sum().backward())
    compiled = torch.compile(model, backend="aot_eager")
    with lowtide.compress(model, "actnn", min_numel=0) as session:
        loss = compiled(x).sum()
    loss.backward()
    torch._dynamo.reset()
    for ours, exact in zip(gradients(model), expected, strict=True):
        assert torch.allclose(ours, exact, rtol=1e-5, atol=1e-6)
    assert {(s.site.op, s.state) for s in session.report().sites} == {("CompiledFunction", EXACT)}
    assert all("lowtide.compile" in s.why for s in session.report().sites)


def test_unknown_ops_and_custom_functions_stay_exact_and_are_listed():
    model, batch, loss_fn = ZOO["custom-function"]()
    with lowtide.compress(model, "actnn", min_numel=0) as session:
        loss = loss_fn(model, batch)
    loss.backward()
    rows = {(s.site.op, s.site.slot): s for s in session.report().sites}
    assert rows["Cube", "tensors[0]"].state == EXACT
    assert rows["Cube", "tensors[0]"].why == "no rule for this op"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(64, 32, dtype=torch.float64),
        lambda: torch.randn(64, 32, dtype=torch.complex64),
        lambda: torch.randn(64, 32).relu().to_sparse(),
        lambda: torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(5, 32)], layout=torch.jagged),
    ],
    ids=["float64", "complex64", "sparse", "nested"],
)
def test_unusual_tensors_are_left_exact(make):
    x = make()
    dtype = x.dtype
    weight = nn.Parameter(torch.randn(32, 8, dtype=dtype))

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            out = x * 1.0 if x.layout == torch.sparse_coo else (x * 2.0).sin()
            out = torch.sparse.mm(out, self.weight) if x.layout == torch.sparse_coo else out @ self.weight
            out = out.values() if out.is_nested else out
            return (out.abs() if dtype.is_complex else out).sum()

    model = Product()
    expected = exact_gradients(model, lambda: model(x).backward())
    with lowtide.compress(model, "actnn", min_numel=0) as session:
        loss = model(x)
    loss.backward()
    if dtype == torch.float32 and not x.is_nested and x.layout == torch.strided:
        return
    assert_same(gradients(model), expected)
    assert all(s.state != COMPRESSED for s in session.report().sites if s.dtype == str(dtype)[6:])


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_count_what_they_hold_and_once(layout):
    dense = torch.zeros(64, 64)
    dense[torch.arange(64), torch.randperm(64)] = 1.0
    graph = dense.to_sparse(layout=layout)
    names = {torch.sparse_coo: "indices", torch.sparse_csr: "crow_indices col_indices"}
    names = ["values", *names.get(layout, "ccol_indices row_indices").split()]
    held = sum(getattr(graph, name)().untyped_storage().nbytes() for name in names)

    class Twice(nn.Module):
        def __init__(self, own):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 8))
            self.register_buffer("graph", graph if own else None)

        def forward(self, graph):
            graph = graph if self.graph is None else self.graph
            return torch.sparse.mm(graph, torch.sparse.mm(graph, self.weight)).sum()

    for own, expected in ((False, [held, 0]), (True, [])):
        model = Twice(own)
        with lowtide.compress(model, "lossless", min_numel=0) as session:
            loss = model(graph)
        loss.backward()
        rows = [row for row in session.report().sites if row.shape == (64, 64)]
        assert [row.plain_nbytes for row in rows] == expected


def test_values_that_a_sparse_tensor_shares_are_counted():
    """Autograd keeps them for the sparse product, so a dense op that saves them too frees nothing."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 8))
            self.scale = nn.Parameter(torch.ones(4096))

        def forward(self, indices):
            values = self.scale * 2.0
            sparse = torch.sparse_coo_tensor(indices, values, (64, 64), check_invariants=True)
            return torch.sparse.mm(sparse, self.weight).sum() + F.gelu(values).sum()

    model = Both()
    indices = torch.cartesian_prod(torch.arange(64), torch.arange(64)).T.contiguous()
    with lowtide.compress(model, "actnn", min_numel=0) as session:
        loss = model(indices)
    loss.backward()
    report = session.report()
    assert report.held_nbytes == 0
    assert report.stored_nbytes >= 4096 * 4


def test_nan_and_inf_reach_the_gradient():
    model = net()
    for poison in (float("nan"), float("inf")):
        x = torch.randn(64, 32)
        x[3, 5] = poison
        model.zero_grad()
        with lowtide.compress(model, "actnn", min_numel=0):
            loss = model(x.clone()).sum()
        loss.backward()
        assert not torch.isfinite(model[0].weight.grad).all()


# ---------------------------------------------------------------- storages


def test_each_storage_is_stored_and_counted_once():
    class Projections(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(64)
            self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

        def forward(self, x):
            h = self.norm(x)
            return (self.q(h) + self.k(h) + self.v(h)).sum()

    model = Projections()
    with lowtide.compress(model, "actnn", bits=8) as session:
        loss = model(torch.randn(128, 64))
    report = session.report()
    rows = [s for s in report.sites if s.site.op == "Addmm"]
    assert [s.state for s in rows] == [COMPRESSED, SHARED, SHARED]
    assert rows[0].plain_nbytes == 128 * 64 * 4
    assert sum(s.plain_nbytes for s in rows) == 128 * 64 * 4
    loss.backward()


def test_a_small_slice_does_not_keep_its_base_alive():
    class Pooler(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 2)
            self.seen = None

        def forward(self, x):
            h = self.body(x)
            self.seen = weakref.ref(h.untyped_storage())
            return self.head(h[:, 0]).sum()

    model, x = Pooler(), torch.randn(8, 128, 64)
    expected = exact_gradients(model, lambda: model(x).backward())
    with lowtide.compress(model, "lossless") as session:
        loss = model(x)
    assert model.seen() is None
    loss.backward()
    assert_same(gradients(model), expected)
    row = next(s for s in session.report().sites if s.site.module == "head")
    assert row.stored_nbytes == 8 * 64 * 4
    assert row.plain_nbytes == 8 * 128 * 64 * 4


def test_views_of_one_storage_share_a_handle_and_keep_their_strides():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).sum()

    model, x = Fused(), torch.randn(4, 16, 32)
    expected = exact_gradients(model, lambda: model(x).backward())
    with lowtide.compress(model, Raw(), min_numel=0):
        loss = model(x)
    loss.backward()
    assert_same(gradients(model), expected)


def test_a_tensor_somebody_holds_is_not_copied():
    model, x = net(), torch.randn(256, 32)
    with lowtide.compress(model, "actnn") as session:
        hidden = model[0](x)
        loss = model[1:](hidden).sum()
    row = next(s for s in session.report().sites if s.site.op == "Gelu")
    assert row.state == HELD
    loss.backward()
    assert hidden is not None


def test_nothing_is_packed_that_would_not_shrink():
    class Big(GroupQuant.__mro__[1]):
        id = "never_smaller"

        def encode(self, tensor, *, key, support=None):
            raise AssertionError("must not be called")

        decode = encode

        def packed_nbytes(self, meta):
            return meta.nbytes

        def to_config(self):
            return {"id": self.id}

        def __str__(self):
            return self.id

    try:
        model = net()
        with lowtide.compress(model, Big(), min_numel=0) as session:
            loss = model(torch.randn(64, 32)).sum()
        loss.backward()
        rows = [s for s in session.report().sites if s.site.op == "Gelu"]
        assert rows[0].why == "packing would not make it smaller"
    finally:
        del Big
        gc.collect()


class Lambda(nn.Module):
    """Two linear layers and a function of (first, second, input)."""

    def __init__(self, function, width=64):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(64, width), nn.Linear(width, 64), function

    def forward(self, x):
        return self.function(self.a, self.b, x)


def relative_error(model, x, method, **options):
    expected = exact_gradients(model, lambda: model(x).backward())
    with lowtide.compress(model, method, min_numel=0, **options) as session:
        loss = model(x)
    loss.backward()
    pairs = [(a, b) for a, b in zip(gradients(model), expected, strict=True) if b is not None]
    off = sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)
    return float(off.sqrt()), session.report()


@pytest.mark.parametrize("op", [lambda h: F.threshold(h, 0.0, 0.0), lambda h: F.hardtanh(h, 0.0, float("inf"))])
def test_the_mask_of_an_input_is_not_taken_for_zeros(op):
    """These ops save their input, negative values and all; only relu's output is rectified."""
    model = Lambda(lambda a, b, x: op(h := a(x)).sum() + b(h).square().sum())
    assert relative_error(model, torch.randn(128, 64), "actnn", bits=8)[0] < 0.02


def test_values_nobody_reads_do_not_disturb_those_that_are_read():
    for other in (1000.0, -float("inf")):
        model = Lambda(lambda a, b, x, o=other: b(torch.cat([h := a(x), h.detach() * 0 + o], 1)[:, :64]).square().sum())
        error, report = relative_error(model, torch.randn(128, 64), "actnn", bits=8)
        assert error < 0.02
        assert report.stored_nbytes < report.plain_nbytes / 4


def test_a_copy_of_a_parameter_that_was_changed_is_no_mere_cast():
    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.linear = nn.Parameter(torch.randn(64, 64)), nn.Linear(64, 64).bfloat16()

        def forward(self, _):
            h = self.w.to(torch.bfloat16)
            with torch.no_grad():
                h.clamp_(-0.3, 0.3)
            return self.linear(h).float().square().sum()

    assert relative_error(Changed(), None, "lossless")[0] == 0


def test_fractional_powers_keep_relative_precision():
    model = Lambda(lambda a, b, x: b(h := a(x).square()).sum() + h.pow(1.5).sum())
    error, report = relative_error(model, torch.randn(128, 64), "actnn")
    assert error < 1
    assert "cast(bfloat16)" in [s.codec for s in report.sites]  # of all readers the one that needs most counts


def test_slices_of_a_tensor_that_lives_anyway_are_not_copied():
    heads = nn.ModuleList(nn.Linear(64, 1) for _ in range(3))
    x = torch.randn(32, 16, 64)
    with lowtide.compress(heads, "lossless") as session:
        loss = sum(head(x[:, t]).sum() for t in range(16) for head in heads)
        before = {h.raw.data_ptr() for h in _live_handles() if h.raw is not None}
    start = x.untyped_storage().data_ptr()
    assert before
    assert all(start <= p < start + x.nbytes for p in before)
    report = session.report()
    assert (report.plain_nbytes, report.stored_nbytes, report.held_nbytes) == (0, 0, x.nbytes)
    loss.backward()


def test_what_an_unknown_op_keeps_is_exact_not_held():
    model = Lambda(lambda a, b, x: torch.asinh(h := a(x)).sum() + b(h).square().sum())
    _, report = relative_error(model, torch.randn(128, 64), "actnn")
    row = next(
        s for s in report.sites if s.plain_nbytes == 128 * 64 * 4 and s.site.module == "" and s.site.op == "Asinh"
    )
    assert row.state == EXACT
    assert row.stored_nbytes == row.plain_nbytes


def test_shapes_of_held_tensors_and_frozen_weights_are_no_savings():
    model = nn.Sequential(nn.Conv2d(3, 8, 3).requires_grad_(False), nn.Conv2d(8, 8, 3))
    model[0].bias.requires_grad_(True)
    x = torch.randn(2, 3, 32, 32)
    with lowtide.compress(model, "lossless", min_numel=0) as session:
        loss = model(x).sum()
    rows = {(s.site.module, s.site.slot): s for s in session.report().sites}
    assert rows["0", "input"].state == HELD
    assert not any(slot == "weight" for _, slot in rows)
    loss.backward()


def test_torch_func_inside_the_region_is_left_alone():
    model, x = net(), torch.randn(4, 32)
    expected = torch.func.grad(lambda z: model(z).square().sum())(x)
    with lowtide.compress(model, "actnn", min_numel=0):
        found = torch.func.grad(lambda z: model(z).square().sum())(x)
    assert torch.equal(found, expected)


def test_targets_of_any_range_are_accepted():
    model = Lambda(lambda a, b, x: F.cross_entropy(a(x), torch.zeros(128, dtype=torch.long), ignore_index=-(2**40)))
    assert relative_error(model, torch.randn(128, 64), "lossless")[0] == 0


def test_a_decoded_tensor_does_not_outlive_its_graph():
    model = Lambda(lambda a, b, x: (b(h := a(x)).sum(), h.square().sum()))
    with lowtide.compress(model, "actnn", min_numel=0):
        first, second = model(torch.randn(64, 64))
    handles = [weakref.ref(h) for h in _live_handles()]
    first.backward()
    del first, second
    assert all(h() is None for h in handles)


def test_an_empty_report_says_so():
    with lowtide.compress(net(), "actnn") as session:
        pass
    assert "nothing was saved for backward" in str(session.report())


# ---------------------------------------------------------------- attach, plans, seeds


def test_an_interrupt_does_not_leave_an_attached_session_open():
    class Stops(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.stop = nn.Linear(32, 32), True

        def forward(self, x):
            h = self.linear(x)
            if self.stop:
                raise KeyboardInterrupt
            return h.sum()

    model, x = Stops(), torch.randn(8, 32)
    handle = lowtide.attach(model, "actnn", min_numel=0)
    for recover in (lambda: model(x).backward(), handle.remove):
        model.stop = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model.stop = False
        recover()
        assert torch._C._len_torch_function_stack() == 0
        assert not nn.modules.module._global_forward_hooks


def test_an_interrupt_of_an_attached_forward_leaves_other_models_alone():
    class Stops(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            self.linear(x)
            raise KeyboardInterrupt

    other, x = net(), torch.randn(64, 32)
    other(x).square().sum().backward()
    exact = [p.grad.clone() for p in other.parameters()]
    other.zero_grad()
    attached = Stops()
    handle = lowtide.attach(attached, "actnn", min_numel=0)
    with pytest.raises(KeyboardInterrupt):
        attached(x)
    other(x).square().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(other.parameters(), exact, strict=True))
    assert torch._C._len_torch_function_stack() == 0
    handle.remove()


def test_remove_within_a_forward_leaves_nothing():
    class Removes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            handle.remove()
            return self.linear(x).sum()

    model = Removes()
    handle = lowtide.attach(model, "actnn")
    model(torch.randn(8, 32)).backward()
    assert torch._C._len_torch_function_stack() == 0
    assert not nn.modules.module._global_forward_hooks


def test_an_attached_model_may_be_called_from_another_thread():
    inside, done = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            if threading.current_thread() is threading.main_thread():
                inside.set()
                done.wait(10)
            return self.linear(x).sum()

    model, failures = Waits(), []
    handle = lowtide.attach(model, "actnn", min_numel=0)

    def other():
        inside.wait(10)
        try:
            model(torch.randn(4, 32)).backward()
            failures.append(torch._C._len_torch_function_stack())
        except Exception as error:
            failures.append(error)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    model(torch.randn(4, 32)).backward()
    thread.join()
    assert failures == [0]
    assert torch._C._len_torch_function_stack() == 0
    handle.remove()


def test_attach_compresses_an_unchanged_loop_and_resumes_bit_for_bit():
    def run(steps, state=None, start=0):
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = lowtide.attach(model, "actnn", level="L2", bits=2, min_numel=0, seed=7)
        if state is not None:
            model.load_state_dict(state["model"])
            handle.load_state_dict(state["lowtide"])
        for i in range(start, steps):
            x = torch.randn(64, 32, generator=torch.Generator().manual_seed(i))
            with torch.no_grad():
                model(x)  # evaluation in between must not count
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return {"model": copy.deepcopy(model.state_dict()), "lowtide": handle.state_dict()}, handle, model

    whole, handle, model = run(4)
    half, _, _ = run(2)
    resumed, _, _ = run(4, half, 2)
    assert whole["lowtide"] == resumed["lowtide"]
    assert (whole["lowtide"]["seed"], whole["lowtide"]["step"]) == (7, 4)
    assert all(torch.equal(whole["model"][k], resumed["model"][k]) for k in whole["model"])
    assert handle.report().ratio > 3
    handle.remove()
    handle.remove()
    assert fingerprint(model)[0] == fingerprint(net())[0]


def test_attached_model_survives_copy_exception_and_nesting():
    model = net()
    handle = lowtide.attach(model, Raw(), min_numel=0)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin(torch.randn(2, 32))
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 31))
    assert torch._C._len_torch_function_stack() == 0
    expected = exact_gradients(twin, lambda: twin(torch.ones(8, 32)).sum().backward())
    model(torch.ones(8, 32)).sum().backward()
    assert_same(gradients(model), expected)
    handle.remove()


def test_noise_differs_between_sessions_forwards_and_seeds_and_repeats_with_the_seed():
    x = torch.randn(64, 32)

    def grads(model, handle_seed):
        torch.manual_seed(0)
        fresh = net()
        handle = lowtide.attach(fresh, "actnn", bits=2, min_numel=0, seed=handle_seed)
        found = []
        for _ in range(2):
            fresh.zero_grad()
            fresh(x).square().mean().backward()
            found.append(fresh[2].weight.grad.clone())
        handle.remove()
        return found

    a, b, c = grads(None, 1), grads(None, 1), grads(None, 2)
    assert_same(a, b)
    assert not torch.equal(a[0], a[1])
    assert not torch.equal(a[0], c[0])
    model, found = net(), []
    for _ in range(2):
        model.zero_grad()
        with lowtide.compress(model, "actnn", bits=2, min_numel=0):
            loss = model(x).square().mean()
        loss.backward()
        found.append(model[2].weight.grad.clone())
    assert not torch.equal(*found)


def test_a_plan_compresses_what_it_lists(tmp_path):
    model, x = net(), torch.randn(64, 32)
    with lowtide.compress(model, "actnn", min_numel=0) as session:
        model(x)
    site = next(s.site for s in session.report().sites if s.site.op == "Gelu")
    lowtide.Plan({site: GroupQuant(bits=8)}).save(tmp_path / "plan.json")
    with lowtide.compress(model, lowtide.Plan.load(tmp_path / "plan.json"), min_numel=0) as session:
        loss = model(x).sum()
    loss.backward()
    changed = [s.site for s in session.report().sites if s.state == COMPRESSED and "group" in s.codec]
    assert changed == [site]


def test_weight_gradients_are_unbiased():
    """Mean over sessions of a linear layer's gradient, against the exact variance formula.

    dW = g^T x, so Var[dW] <= sum_n g_n^2 step_n^2 / 4 with one step a row (32 values, one group).
    """
    model, x = nn.Linear(32, 4), torch.randn(16, 32)
    weights = torch.randn(16, 4)
    expected = exact_gradients(model, lambda: (model(x) * weights).sum().backward())[0]
    total, n = torch.zeros_like(expected), 400
    for _ in range(n):
        model.zero_grad()
        with lowtide.compress(model, "actnn", bits=2, min_numel=0):
            loss = (model(x.clone()) * weights).sum()
        loss.backward()
        total += model.weight.grad
    low, high = x.amin(1), x.amax(1)
    step = (high - low + low.abs() / 128) / 3 * (1 + 1 / 128)
    bound = (weights.square() * (step.square() / 4)[:, None]).sum(0).div(n).sqrt()
    assert (total / n - expected).abs().max() < 5 * bound.max()
    assert not torch.equal(total / n, expected)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: lowtide.compress(net(), "divison"), ValueError, "unknown method 'divison'; choose one of"),
        (
            lambda: lowtide.compress(net(), "division", bits=9),
            ValueError,
            "bits must be one of 1, 2, 3, 4, 5, 6, 7, 8; got 9",
        ),
        (lambda: lowtide.compress(net(), "actnn", bits=9), ValueError, "bits must be a number from 1 to 8"),
        (lambda: lowtide.compress(net(), "actnn", level="L2", bits=2.5), ValueError, "bits must be one of 1, 2,"),
        (
            lambda: lowtide.compress(net(), "actnn", level="L9"),
            ValueError,
            "level must be one of L0, L1, L2, L3, L4, L5",
        ),
        (lambda: lowtide.compress(net(), "gact", bits=0), ValueError, "bits must be a number from 1 to 8"),
        (lambda: lowtide.compress(net(), "auto", bits="2"), ValueError, "bits must be a number from 1 to 8"),
        (lambda: lowtide.compress(net(), "division", block=0), ValueError, "block must be a whole number"),
        (lambda: lowtide.compress(net(), "actnn", block=8), TypeError, "has no option 'block'; its options"),
        (lambda: lowtide.compress(nn.ReLU(), "actnn"), ValueError, "no parameters"),
        (lambda: lowtide.compress(lambda x: x, "actnn"), TypeError, "must be a torch.nn.Module"),
        (lambda: lowtide.compress(net(), 7), TypeError, "expected a method's name"),
        (lambda: lowtide.compress(net(), Raw(), bits=2), TypeError, "go with a method's name"),
        (lambda: lowtide.compress(net(), "cast", dtype="int8"), ValueError, "dtype must be one of"),
        (lambda: lowtide.compress(net(), "cast", group=128), ValueError, "group=128 goes with an 8-bit type"),
        (lambda: lowtide.compress(net(), "pool", kernel=0), ValueError, "kernel must be"),
        (lambda: lowtide.compress(net(), "actnn", seed="x"), TypeError, "seed must be"),
        (lambda: lowtide.compress(net(), "actnn", min_numel=-1), ValueError, "min_numel must be"),
        (lambda: lowtide.attach(net(), "nothing"), ValueError, "unknown method"),
    ],
)
def test_bad_arguments_say_what_is_wrong_and_what_is_allowed(call, error, words):
    with pytest.raises(error) as info:
        call()
    assert words in str(info.value)


def test_a_session_cannot_be_opened_twice():
    session = lowtide.compress(net(), "actnn")
    with session, pytest.raises(RuntimeError, match="already open"):
        session.__enter__()


# ---------------------------------------------------------------- threads and processes


def test_sessions_in_several_threads_do_not_meet():
    def work(i, out):
        torch.manual_seed(i)
        model, x = net(), torch.randn(64, 32)
        expected = exact_gradients(model, lambda: model(x).sum().backward())
        for _ in range(5):
            model.zero_grad()
            with lowtide.compress(model, Raw(), min_numel=0):
                loss = model(x).sum()
            loss.backward()
        out[i] = all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))

    results: dict[int, bool] = {}
    threads = [threading.Thread(target=work, args=(i, results)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == dict.fromkeys(range(4), True)


def _train_on_rank(rank):
    found = {}
    for name, method in (("plain", None), ("raw", Raw()), ("actnn", "actnn")):
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(net())
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(rank))
        for i in range(2):
            context = torch.enable_grad() if method is None else lowtide.compress(model, method, min_numel=0)
            with model.no_sync() if i == 0 else torch.enable_grad():
                with context:
                    loss = model(x).square().mean()
                loss.backward()
        found[name] = gradients(model)
        del model, loss  # before the process group they use
    return found


def test_ddp_on_two_ranks_is_bit_equal_with_raw(tmp_path):
    first, second = on_two_ranks(_train_on_rank, tmp_path)
    for found in (first, second):
        assert_same(found["raw"], found["plain"])
    assert_same(first["actnn"], second["actnn"])
    assert not torch.equal(first["actnn"][0], first["plain"][0])


# ---------------------------------------------------------------- fallbacks


def test_without_use_counts_tensors_are_encoded_at_once(monkeypatch):
    from lowtide.graph import capture

    monkeypatch.setattr(capture, "probe", lambda: capture.Abilities(True, True, None))
    model, x = net(), torch.randn(64, 32)
    expected = exact_gradients(model, lambda: model(x).sum().backward())
    with lowtide.compress(model, Raw(), min_numel=0) as session:
        loss = model(x).sum()
    loss.backward()
    assert_same(gradients(model), expected)
    assert "encoded as soon as" in session.report().notes[0]


def test_without_slot_access_nothing_is_compressed_and_the_user_is_told(monkeypatch):
    from lowtide.graph import capture

    monkeypatch.setattr(capture, "probe", lambda: capture.Abilities(False, False, 2))
    model = net()
    session = lowtide.compress(model, "actnn", min_numel=0)
    with pytest.warns(UserWarning, match="nothing is compressed"):
        session.__enter__()
    loss = model(torch.randn(4, 32)).sum()
    session.__exit__()
    loss.backward()
    assert session.report().sites == ()
    assert "nothing was compressed" in str(session.report())


def test_without_foreign_hook_names_checkpoint_is_still_left_alone(monkeypatch):
    from lowtide.graph import capture

    real = capture.probe()
    monkeypatch.setattr(capture, "probe", lambda: capture.Abilities(True, False, real.sole))
    test_checkpoint_inside_the_region_recomputes_from_exact_inputs(Raw(), False)


def test_report_reads_as_text_and_json():
    model = net()
    with lowtide.compress(model, "actnn", min_numel=0) as session:
        loss = model(torch.randn(64, 32)).sum()
    loss.backward()
    report = session.report()
    data = json.loads(report.to_json())
    assert (
        data["stored_nbytes"]
        == report.stored_nbytes
        == sum(s["stored_nbytes"] for s in data["sites"] if s["state"] != HELD)
    )
    assert "Gelu.self" in str(report)
    assert "1: Gelu.self" in report.table()
    assert "smaller sites" in report.table(rows=1)


def test_report_names_kernels_that_fell_back(monkeypatch):
    from lowtide import kernels

    ran = {"cpu": {"pack_band": "reference: no module", "pack_uints": "numba"}, "meta": {"pack_band": "shapes only"}}
    ran["xpu"] = {"pack_uints": "reference: no fast kernels for xpu"}
    monkeypatch.setattr(kernels, "served", lambda: ran)
    with lowtide.compress(net(), "actnn") as session:
        pass
    assert session.report().notes == (
        "slow reference kernels ran on cpu for pack_band (reference: no module)",
        "slow reference kernels ran on xpu for pack_uints (reference: no fast kernels for xpu)",
    )
    assert json.loads(session.report().to_json())["kernels"] == ran


def test_report_tells_which_kernels_ran():
    with lowtide.compress(net(), "actnn", min_numel=0) as session:
        net()(torch.randn(64, 32)).sum()
    assert session.report().kernels["cpu"]["quantize_groups"].startswith("numba")  # a test may have needed both


def test_a_method_that_decides_alone_is_asked_once(monkeypatch):
    """What is remembered of a storage gives the same bytes and gradients as asking again, also for other shapes."""
    asked = []
    decide = packing.Packer._decide
    monkeypatch.setattr(packing.Packer, "_decide", lambda *a: asked.append(1) or decide(*a))

    def step(session, model, batch):
        torch.manual_seed(batch)
        x = torch.randn(batch, 3, 16, 16)
        model.zero_grad()
        with session:
            model(x).square().sum().backward()
        return session.report().stored_nbytes, [p.grad.clone() for p in model.parameters()]

    def counted(session, batch):
        asked.clear()
        return step(session, model, batch), len(asked)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    twin = copy.deepcopy(model)
    session = lowtide.compress(model, "division", seed=1)
    found = [counted(session, batch) for batch in (4, 4, 6, 4)]
    questions = [n for _, n in found]
    assert [n > 0 for n in questions] == [True, False, True, False]
    other = lowtide.compress(twin, "division", seed=1)
    for batch, ((stored, gradients), _) in zip((4, 4, 6, 4), found, strict=True):
        other.policy._decided.clear()
        again, anew = step(other, twin, batch)
        assert again == stored
        assert all(map(torch.equal, anew, gradients))
    adaptive = lowtide.compress(model, "auto")
    # It looks at every tensor in steps 1, 3 and 9, and follows a new plan from the step after.
    assert [counted(adaptive, 4)[1] > 0 for _ in range(10)] == [n in (1, 2, 3, 4, 9, 10) for n in range(1, 11)]
