"""Compression inside ``torch.compile``: against the plain compiled model, against eager sessions, step by step."""

from __future__ import annotations

import importlib
import re
import shutil
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.codecs import GroupQuant, Raw
from lowtide.compiling import dynamo, running
from lowtide.kernels import backends
from lowtide.report import COMPRESSED, EXACT, HELD
from nets import Block
from ranks import on_two_ranks

COUNTERS = torch._dynamo.utils.counters
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own names
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a C++ compiler for the CPU"
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    COUNTERS.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return COUNTERS["stats"]["unique_graphs"]


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 8 * 8, 10)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.head(x.flatten(1))


class Transformer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(16, width), Block(width, 2), nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.block(self.embed(x)))


CASES = {"cnn": (Cnn, (16, 3, 16, 16)), "transformer": (Transformer, (8, 32, 16))}


def make(name, seed=0):
    kind, shape = CASES[name]
    torch.manual_seed(seed)
    return kind(), torch.randn(shape)


def step(call, model, x):
    """One step; its gradients."""
    model.zero_grad(set_to_none=True)
    out = call(x)
    out.reshape(-1, 10).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def error(ours, exact):
    """The length of the difference beside that of the exact gradient."""
    difference = sum((a.double() - b.double()).square().sum() for a, b in zip(ours, exact, strict=True))
    return float((difference / sum(b.double().square().sum() for b in exact)).sqrt())


def same(ours, others):
    return all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


@lru_cache
def plain(name, backend="aot_eager"):
    """Gradients of the compiled model without us; each is compiled once for all tests, and nobody writes to them."""
    model, x = make(name)
    return step(torch.compile(model, backend=backend), model, x)


def saved_nbytes(out, model):
    """What the graph behind ``out`` really keeps, without weights: each storage once."""
    node = out.grad_fn
    while "CompiledFunction" not in node.name():
        node = node.next_functions[0][0]
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in node.saved_tensors if t.numel()}
    return sum(nbytes for place, nbytes in storages.items() if place not in weights)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", ["lossless", Raw()], ids=["lossless", "Raw"])
def test_gradients_are_those_of_plain_compile_bit_for_bit_without_approximation(name, method):
    expected = plain(name)
    model, x = make(name)
    compiled = lowtide.compile(model, method, backend="aot_eager", min_numel=1)
    assert same(step(compiled, model, x), expected)
    report = compiled.report()
    assert report.stored_nbytes <= report.plain_nbytes
    if name == "cnn":  # masks and positions are packed, and give back exactly what is read
        codecs = {row.site.op: row.codec for row in report.sites if row.state == COMPRESSED}
        assert codecs["Relu"] == "mask"
        assert codecs["MaxPool2DWithIndices"] == "pool_offsets(2 bits)"


@pytest.mark.parametrize("name", CASES)
def test_errors_fall_with_bits_as_in_eager_sessions(name):
    expected = plain(name)
    errors = {}
    for bits in (4, 8):
        model, x = make(name)
        compiled = lowtide.compile(model, GroupQuant(bits=bits, layout="sample"), backend="aot_eager", min_numel=1)
        ours = error(step(compiled, model, x), expected)
        model, x = make(name)
        with lowtide.compress(model, GroupQuant(bits=bits, layout="sample"), min_numel=1) as session:
            out = model(x).reshape(-1, 10).square().mean()
        out.backward()
        eager = error([p.grad for p in model.parameters()], expected)
        assert any(row.state == COMPRESSED for row in session.report().sites)
        # The same tensors with the same bits: noise of one size, whose length over thousands of values varies little.
        assert 0 < ours < 1.5 * eager
        errors[bits] = ours
    assert errors[8] < errors[4] / 8  # steps are (2**8 - 1) / (2**4 - 1) = 17 times finer


@pytest.mark.parametrize(("name", "method", "options"), [
    ("cnn", "division", {}),
    ("cnn", "actnn", {"level": "L2", "bits": 2}),
    ("transformer", "actnn", {"level": "L2", "bits": 2}),
])  # fmt: skip
def test_saves_what_an_eager_session_saves_and_reports_what_is_kept(name, method, options):
    model, x = make(name)
    with lowtide.compress(model, method, min_numel=256, **options) as session:
        out = model(x)
    eager = session.report()
    del out
    compiled = lowtide.compile(model, method, backend="aot_eager", min_numel=256, **options)
    out = compiled(x)
    report = compiled.report()
    assert eager.plain_nbytes - report.stored_nbytes >= 0.9 * (eager.plain_nbytes - eager.stored_nbytes)
    # what the report says is what the graph keeps, but for the input, which is ours, and 8 bytes for each key
    assert saved_nbytes(out, model) == report.stored_nbytes + report.held_nbytes
    assert report.held_nbytes == x.nbytes


def test_noise_is_new_in_each_step_repeats_for_a_seed_and_needs_one_graph():
    def run(seed, steps, begin=0):
        model, x = make("cnn")
        compiled = lowtide.compile(model, "auto", backend="aot_eager", seed=seed, min_numel=256)
        compiled.step = begin
        return [step(compiled, model.eval(), x) for _ in range(steps)]  # no running statistics in between

    first = run(0, 3)
    assert graphs() == 1
    assert not same(first[0], first[1])
    assert not same(first[1], first[2])
    again = run(0, 3)
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert same(run(0, 1, begin=2)[0], first[2])  # a run that resumes
    assert not same(run(1, 1)[0], first[0])


def test_torchs_random_numbers_are_left_alone():
    model, x = make("transformer")
    compiled = lowtide.compile(model, "auto", backend="aot_eager", min_numel=1)
    before = torch.get_rng_state()
    step(compiled, model, x)
    step(compiled, model, x)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("method", "name"), [("auto", "cnn"), ("division", "cnn"), ("auto", "transformer"), ("cast", "transformer")]
)
def test_batches_of_any_size_share_a_graph(name, method):
    model, x = make(name)
    compiled = lowtide.compile(model, method, backend="aot_eager", dynamic=True, min_numel=64)
    for size in (8, 6, 7, 5):
        part = x[:size].clone()
        expected = step(model, model, part)
        assert error(step(compiled, model, part), expected) < 0.6  # as in static graphs; wrong places would give 1.4
        report = compiled.report()
        least = 1.9 if method == "cast" else 4.0
        # positions in planes whose size is a symbol stay in 64 bits: an eighth of all that the CNN saves
        assert report.ratio > (1 / (1 / least + 1 / 8) if name == "cnn" else least)
    assert graphs() <= 2  # one, and another where torch finds a size equal to a constant
    assert saved_nbytes(compiled(part), model) >= compiled.report().stored_nbytes


def test_signs_come_from_the_forward_where_backward_computes_a_relu_again(monkeypatch):
    """Inductor's decompositions without its compiler: ReLU is made again from the packed input of a batch norm."""

    def decomposed(partitioner):
        return dynamo.aot_autograd(
            fw_compiler=dynamo.boxed_nop,
            bw_compiler=dynamo.boxed_nop,
            partition_fn=partitioner,
            decompositions=select_decomp_table(),
        )

    importlib.import_module("torch._inductor.lowering")  # which the decomposition of pooling looks for
    monkeypatch.setattr(dynamo, "_eager_backend", decomposed)
    model, x = make("cnn")
    expected = step(model, model, x)
    compiled = lowtide.compile(model, GroupQuant(8, layout="sample"), backend="aot_eager", min_numel=1)
    ours = step(compiled, model, x)
    rows = {row.site.op: row for row in compiled.report().sites if row.plain_nbytes == 0 and row.state == COMPRESSED}
    assert rows["Relu"].codec == "mask"  # beside what is saved without us
    # A step is 1/255 of a range of some six deviations, so rounding errs by sqrt(6) / 255 = 0.01 of one deviation. A
    # value that changes its side would add its whole gradient: one in a hundred values does, and that is 0.1.
    assert 0 < error(ours, expected) < 0.02


def test_dropout_masks_are_bits_and_gradients_exact():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.3), nn.GELU(), nn.Linear(64, 10)), torch.randn(64, 32)

    model, x = build()
    torch.manual_seed(1)
    expected = step(torch.compile(model, backend="aot_eager"), model, x)
    torch._dynamo.reset()
    model, x = build()
    compiled = lowtide.compile(model, "lossless", backend="aot_eager", min_numel=1)
    torch.manual_seed(1)
    assert same(step(compiled, model, x), expected)
    masks = [row for row in compiled.report().sites if row.dtype == "bool"]
    assert [row.codec for row in masks] == ["mask"]
    assert masks[0].stored_nbytes * 8 == masks[0].plain_nbytes


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = F.gelu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(F.gelu(x))


def test_each_graph_packs_its_own():
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(128, 32)
    expected = step(model, model, x)
    compiled = lowtide.compile(model, "cast", backend="aot_eager", min_numel=1)
    ours = step(compiled, model, x)
    assert graphs() == 2
    assert 0 < error(ours, expected) < 0.01
    sites = [row.site for row in compiled.report().sites if row.state == COMPRESSED]
    assert {"first", "second"} <= {site.module for site in sites}
    assert len(sites) == len(set(sites)) >= 3


def test_what_is_not_known_stays_exact_and_is_listed():
    class Cumulative(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 10)

        def forward(self, x):
            h = self.a(x)
            return self.b(torch.logcumsumexp(h, 1))

    torch.manual_seed(0)
    model, x = Cumulative(), torch.randn(64, 16)
    expected = step(torch.compile(model, backend="aot_eager"), model, x)
    torch._dynamo.reset()
    compiled = lowtide.compile(model, GroupQuant(8), backend="aot_eager", min_numel=1)
    ours = step(compiled, model, x)
    exact = [row for row in compiled.report().sites if row.state == EXACT and row.plain_nbytes == 64 * 32 * 4]
    assert exact
    assert all(row.why for row in exact)
    assert same(ours, expected)


def test_a_small_value_that_is_compared_with_many_is_kept():
    """Of 64 values backward reads 16 000 comparisons: these would take more bytes than the values."""

    class Compared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 1)
            self.register_buffer("limits", torch.randn(250))

        def forward(self, x):
            return torch.maximum(self.a(x), self.limits)

    torch.manual_seed(0)
    model, x = Compared(), torch.randn(64, 16)
    expected = step(torch.compile(model, backend="aot_eager"), model, x)
    torch._dynamo.reset()
    compiled = lowtide.compile(model, "lossless", backend="aot_eager", min_numel=0)
    assert same(step(compiled, model, x), expected)
    report = compiled.report()
    assert 0 < report.stored_nbytes <= report.plain_nbytes


def test_retain_graph_decodes_twice():
    model, x = make("transformer")
    compiled = lowtide.compile(model, "auto", backend="aot_eager", min_numel=1)
    loss = compiled(x).square().mean()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert same([p.grad for p in model.parameters()], first)


def test_autocast_and_a_checkpoint_inside():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Transformer()

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                h = self.inner.embed(x)
                return self.inner.head(checkpoint(self.inner.block, h, use_reentrant=False)).float()

    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(8, 32, 16)
    expected = step(torch.compile(model, backend="aot_eager"), model, x)
    torch._dynamo.reset()
    compiled = lowtide.compile(model, "lossless", backend="aot_eager", min_numel=1)
    assert same(step(compiled, model, x), expected)
    torch._dynamo.reset()
    compiled = lowtide.compile(model, GroupQuant(8), backend="aot_eager", min_numel=1)
    assert error(step(compiled, model, x), expected) < 0.05
    assert any(row.state == COMPRESSED for row in compiled.report().sites)


def _train_on(rank):
    model, x = make("transformer")
    x = x[4 * rank : 4 * rank + 4].clone()
    exact = step(nn.parallel.DistributedDataParallel(model), model, x)
    found = []
    for method in ("lossless", "auto"):
        inner = lowtide.compile(model, method, backend="aot_eager", min_numel=1)
        found.append(step(nn.parallel.DistributedDataParallel(inner), model, x))
    return exact, *found, sorted(row.stored_nbytes for row in inner.report().sites)


def test_data_parallel_ranks_agree(tmp_path):
    ours, others = on_two_ranks(_train_on, tmp_path)
    exact, lossless, auto, stored = ours
    assert same(lossless, exact)
    assert 0 < error(auto, exact) < 0.6
    assert same(auto, others[2])
    assert stored == others[3]


def test_weights_are_never_approximated():
    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
            self.b = nn.Linear(64, 10)

        def forward(self, x):
            return self.b(F.gelu(self.a(x)))

    torch.manual_seed(0)
    model, x = Normalized(), torch.randn(64, 64)
    compiled = lowtide.compile(model, GroupQuant(1), backend="aot_eager", min_numel=1)
    step(compiled, model, x)
    made = [row for row in compiled.report().sites if row.why == "made of weights alone"]
    assert all(row.state == EXACT for row in made)
    kept = {row.site for row in compiled.report().sites if row.state == COMPRESSED}
    assert {site.op for site in kept} <= {"Gelu", "Addmm", "Relu"}


def test_a_plan_of_an_eager_session_is_followed():
    model, x = make("cnn")
    with lowtide.compress(model, "actnn", level="L2", bits=8, min_numel=256) as session:
        model(x)
    compiled = lowtide.compile(model, session.plan(), backend="aot_eager", min_numel=256)
    step(compiled, model, x)
    rows = {row.site: row for row in compiled.report().sites if row.state == COMPRESSED}
    planned = {site: str(choice) for site, choice in session.plan().choices.items()}
    met = {site: row.codec for site, row in rows.items() if site in planned and site.op != "Relu"}
    assert len(met) == 3  # the mask of a ReLU is not what a plan is about
    assert all(planned[site] == codec for site, codec in met.items())


def test_compiled_models_are_modules_like_the_model():
    model, x = make("cnn")
    compiled = lowtide.compile(model, "cast", backend="aot_eager")
    assert [p.data_ptr() for p in compiled.parameters()] == [p.data_ptr() for p in model.parameters()]
    assert {name.removeprefix("_orig_mod.") for name in compiled.state_dict()} == set(model.state_dict())
    assert compiled.conv1 is model.conv1
    compiled.eval()
    assert not model.training
    with torch.no_grad():
        assert torch.equal(compiled(x), torch.compile(model, backend="aot_eager")(x))
    assert compiled.step == 0
    assert "no forward" in str(compiled.report())


def test_errors_say_what_to_do():
    model, x = make("cnn")
    with pytest.raises(ValueError, match="level='L2'"):
        lowtide.compile(model, "actnn")
    with pytest.raises(ValueError, match="eager session"):
        lowtide.compile(model, "gact")
    with pytest.raises(ValueError, match="rebuilds"):
        lowtide.compile(model, "blpa")
    with pytest.raises(ValueError, match="bits=2"):
        lowtide.compile(model, "auto", bits=2)
    with pytest.raises(ValueError, match="inductor, aot_eager; got 'eager'"):
        lowtide.compile(model, backend="eager")
    with pytest.raises(ValueError, match="backend='inductor'"):
        lowtide.compile(model, backend="aot_eager", mode="default")
    with pytest.raises(TypeError, match="Module"):
        lowtide.compile(lambda x: x)
    compiled = lowtide.compile(model, "cast", backend="aot_eager")
    for already in (compiled, torch.compile(model)):
        with pytest.raises(TypeError, match="compiled already"):
            lowtide.compile(already)
        for begin in (lowtide.attach, lowtide.compress):
            with pytest.raises(TypeError, match=r"lowtide\.compile"):
                begin(already)
    with pytest.raises(RuntimeError, match="outside of the model"):
        compiled._call(x.requires_grad_())


@needs_compiler
def test_inductor_is_bit_equal_to_plain_inductor_without_approximation(monkeypatch):
    monkeypatch.setattr(backends, "_fallbacks", set())
    expected = plain("cnn", "inductor")
    model, x = make("cnn")
    compiled = lowtide.compile(model, "lossless", min_numel=256)
    assert same(step(compiled, model, x), expected)
    report = compiled.report()
    assert report.stored_nbytes < report.plain_nbytes
    assert [row.plain_nbytes for row in report.sites if row.state == HELD] == [x.nbytes]
    assert {row.dtype: row.codec for row in report.sites if row.site.op == "MaxPool2DWithIndices"} == {
        "int8": "indices(low=0, high=3)"
    }
    assert backends._fallbacks == set()  # fast kernels know every type that inductor keeps


@needs_compiler
def test_inductor_has_new_noise_in_one_graph_and_reports_the_same_from_its_cache():
    model, x = make("transformer")
    expected = step(model, model, x)
    reports = []
    for _ in range(2):
        torch._dynamo.reset()
        COUNTERS.clear()
        compiled = lowtide.compile(model, "actnn", level="L2", bits=4, min_numel=256)
        errors = [error(step(compiled, model, x), expected) for _ in range(3)]
        assert graphs() == 1
        assert len(set(errors)) == 3
        assert max(errors) < 0.2  # rounding with 15 steps over six deviations errs by sqrt(6) / 15 of one: 0.16
        reports.append(compiled.report().sites)
    assert reports[0] == reports[1] != ()
    assert compiled.report().ratio > 4


@needs_compiler
def test_inductor_with_sizes_as_symbols():
    model, x = make("cnn")
    compiled = lowtide.compile(model, "division", dynamic=True, min_numel=64)
    for size in (8, 6, 7):
        part = x[:size].clone()
        assert error(step(compiled, model, part), step(model, model, part)) < 0.6
    assert graphs() <= 2
    assert compiled.report().ratio > 4


def first_readers(body):
    """Of each decoded buffer in code that inductor wrote: the call that reads it first, and how many are before it."""
    waiting, found = {}, {}
    pattern = r"^ +((?:buf\d+ = )?(?:torch\.ops|extern_kernels|cpp_fused)\S*\(.*|buf\d+ = buf\d+(?:;.*)?)$"
    for call in re.findall(pattern, body, re.MULTILINE):
        made, _, source = call.partition(" = ")
        if "lowtide.decode" in call:
            waiting[made] = 0
        elif re.fullmatch(r"buf\d+(;.*)?", source):  # inductor gives a buffer a second name
            if source.partition(";")[0] in waiting:
                waiting[made] = waiting.pop(source.partition(";")[0])
        else:
            read = waiting.keys() & set(re.findall(r"buf\d+", call))
            found.update({name: (call, waiting.pop(name)) for name in read})
            waiting = {name: calls + 1 for name, calls in waiting.items()}
    assert not waiting
    return found


def test_inductor_makes_no_copy_for_a_layout_and_decodes_just_before_the_first_reader(monkeypatch):
    """The code that inductor writes for the two graphs; without its C++, because nobody looks at what that computes."""
    strides = []

    def in_order(x, stride):
        if x.dtype != torch.bool:
            strides.append((tuple(x.stride()), tuple(stride)))
        return torch.zeros_like(x)  # nothing has computed it

    monkeypatch.setattr(running, "in_order", in_order)
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    # Indices that nobody wrote must still lie within their tensors.
    monkeypatch.setattr(
        torch._C._dynamo.guards,
        "_empty_strided_cpu",
        lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype).zero_(),
    )
    model, x = make("cnn")
    compiled = lowtide.compile(model, GroupQuant(4, layout="sample"), min_numel=1)
    with config.patch(force_disable_caches=True):
        _, (_, backward) = run_fw_bw_and_get_code(lambda: compiled(x))
    assert [have for have, _ in strides] == [want for _, want in strides]
    assert sum(stride[1] == 1 for stride, _ in strides if len(stride) == 4) >= 3  # maps are in channels-last memory
    readers = first_readers(backward[backward.index("def call") :])
    assert len(readers) >= 5
    assert (
        max(before for _, before in readers.values()) <= 1
    )  # the loop that makes the gradient beside it may be between
    convolution = next(call for call, _ in readers.values() if "convolution_backward" in call)
    assert re.findall(r"buf\d+", convolution)[2] in readers  # its input comes from us without a pass over it
    # Compiled loops read bits as floats, as they read all else.
    assert "const bool*" not in backward
    assert "const uint8_t*" not in backward
