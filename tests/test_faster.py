"""Kernels that stand for operators of torch in a session give the bits of torch's own, and leave its graph as it is."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fresh
import lowtide
from lowtide import kernels
from lowtide.graph import thrift
from lowtide.kernels import backends, cpu, ops, reference
from lowtide.session.handles import Handle

NORM, POOL = "native_batch_norm", "max_pool2d_with_indices"
BATCH_NORM, MAX_POOL = (getattr(torch.ops.aten, name).default for name in (NORM, POOL))


def assert_bits(own: tuple[Tensor, ...] | None, torchs: tuple[Tensor, ...]) -> None:
    assert own is not None
    for a, b in zip(own, torchs, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        kind = {4: torch.int32, 2: torch.int16}[a.itemsize] if a.is_floating_point() else a.dtype
        nan = a.isnan() & b.isnan()  # whose bits are anybody's
        assert torch.equal(a.view(kind)[~nan], b.view(kind)[~nan])
        assert torch.equal(a.isnan(), b.isnan())


def norms(x: Tensor, momentum: float = 0.1, eps: float = 1e-5, affine: bool = True, running: bool = True) -> None:
    """Our kernel beside torch's."""
    generator = torch.Generator().manual_seed(1)
    weight, bias, mean, var = torch.randn(4, x.shape[1], generator=generator)
    found = []
    for operator in (cpu.native_batch_norm, BATCH_NORM):
        own = [mean.clone(), var.square()] if running else [None, None]
        parameters = (weight, bias) if affine else (None, None)
        result = operator(x, *parameters, *own, True, momentum, eps)
        found.append(None if result is None else (*result, *(s for s in own if s is not None)))
    assert found[1] is not None
    assert_bits(found[0], found[1])


@pytest.mark.parametrize(
    "sizes", [(1, 8, 2), (5, 8, 7), (3, 24, 7, 7), (16, 64, 14, 14), (2, 16, 3, 5, 9), (1, 8, 64, 67)]
)
def test_batch_norm(sizes: tuple[int, ...]) -> None:
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    norms(x)
    norms(x * 1e-3 + 100.0, momentum=0.37, eps=1e-3)
    norms(x.sinh() * 1e4, affine=False)
    norms(x, momentum=0.9)
    norms(x, momentum=1.0, running=False)
    norms(torch.zeros(sizes))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_batch_norm_in_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        norms(torch.randn(16, 40, 28, 28, generator=torch.Generator().manual_seed(0)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_batch_norm_keeps_what_is_not_finite_in_its_channel(value: float) -> None:
    x = torch.randn(4, 16, 9, 9, generator=torch.Generator().manual_seed(0))
    x[2, 5, 3, 3] = value
    norms(x)
    assert cpu.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0][:, 6:].isfinite().all()  # type: ignore[index]


class Other(Tensor):
    """A subclass, which may have its values elsewhere."""


def test_batch_norm_is_not_for_everything() -> None:
    x = torch.randn(4, 16, 6, 6)
    usual: list[Any] = [x, None, None, None, None, True, 0.1, 1e-5]
    assert cpu.native_batch_norm(*usual) is not None
    others: dict[int, tuple[Any, ...]] = {
        0: (
            *(x[:, :12].clone(), x.double(), x.bfloat16(), x.to(memory_format=torch.channels_last), x[:0]),
            *(x[:, :, :1, :1].clone(), torch.randn(16)),
        ),
        1: (
            *(torch.ones(8), torch.ones(16, dtype=torch.float64), torch.ones(32)[::2]),
            *(torch.ones(16, device="meta"), torch.ones(16).as_subclass(Other)),
        ),
        5: (False,),
        7: (0.0,),
    }
    for place, values in others.items():
        for value in values:
            assert cpu.native_batch_norm(*usual[:place], value, *usual[place + 1 :]) is None, (place, value)


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 40)] * 2),
    *[st.tuples(st.integers(1, 5), st.integers(1, 5))] * 2,
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_max_pool(
    sizes: tuple[int, ...],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    odd: int,
    dtype: torch.dtype,
) -> None:
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(odd)).mul_(2).round_()  # with equal values
    for value in (math.nan, -math.inf, math.inf)[:odd]:
        x.masked_fill_(torch.rand(sizes, generator=torch.Generator().manual_seed(int(odd))) < 0.2, value)
    arguments = (x.to(dtype), list(kernel), list(stride), list(padding), list(dilation))
    try:
        truth = MAX_POOL(*arguments)
    except RuntimeError:
        assert cpu.max_pool2d_with_indices(*arguments) is None
        return
    assert_bits(cpu.max_pool2d_with_indices(*arguments), truth)


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 9), st.integers(1, 70)),
    st.tuples(st.integers(1, 3), st.sampled_from([2, 3])),
    st.tuples(st.integers(0, 1), st.integers(0, 1)),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_max_pool_of_windows_two_apart(
    sizes: tuple[int, ...], kernel: tuple[int, int], padding: tuple[int, int], odd: int, dtype: torch.dtype
) -> None:
    """Lines are split into every other value and those between: the form of nearly all poolings."""
    test_max_pool.hypothesis.inner_test(sizes, kernel, (2, 2), padding, (1, 1), odd, dtype)


def test_max_pool_is_not_for_everything() -> None:
    x = torch.randn(2, 3, 8, 8)
    assert cpu.max_pool2d_with_indices(x, [2]) is not None
    assert_bits(cpu.max_pool2d_with_indices(x, [2]), MAX_POOL(x, [2]))
    assert cpu.max_pool2d_with_indices(x, [3], [2], [0], [1], True) is None
    for other in (x[0], x.double(), x.to(memory_format=torch.channels_last), x[:0], x.int()):
        assert cpu.max_pool2d_with_indices(other, [2]) is None

    for wrong in ([2, 3, 4], []):
        assert cpu.max_pool2d_with_indices(x, wrong) is None
    assert cpu.max_pool2d_with_indices(x, [2], [2], [1, 0, 1]) is None


RELU_SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-7, -1e-7, math.inf, -math.inf, math.nan, -math.nan]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 7, 8, 16, 17, 31, 4096, 4097, 70_003])
def test_relu(numel: int, dtype: torch.dtype) -> None:
    """The result in memory of its own and in place, and the mask, which is packed by another kernel beside."""
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator)
    special = torch.tensor(RELU_SPECIAL)[torch.randint(len(RELU_SPECIAL), (numel,), generator=generator)]
    x = torch.where(torch.rand(numel, generator=generator) < 0.3, special, x).to(dtype)
    before, truth = x.clone(), torch.relu(x)
    mask = reference.pack_band(truth, 0.0, math.inf, False, True)
    found = cpu.relu(x)
    assert found is not None
    assert_bits((x,), (before,))
    assert_bits(found, (truth, mask))
    assert cpu.relu(x, x) is not None
    assert_bits((x,), (truth,))


def test_relu_takes_what_fills_its_memory() -> None:
    x = torch.randn(2, 3, 4, 5)
    for dense in (x, x.to(memory_format=torch.channels_last), x[None].to(memory_format=torch.channels_last_3d)):
        found = cpu.relu(dense)
        assert found is not None
        assert found[0].stride() == dense.stride()
        assert torch.equal(found[0], dense.relu())
        in_memory = dense.as_strided((x.numel(),), (1,))
        assert torch.equal(found[1], reference.pack_band(in_memory, 0.0, math.inf, False, True))
    for other in (x[..., ::2], x.double(), x.int(), x[:0]):
        assert cpu.relu(other) is None


# ---------------------------------------------------------------- in sessions


class Calls:
    """What the kernels were asked, by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        right = kernels.like_torch

        def counted(name: str) -> Any:
            kernel = right(name)
            assert kernel is not None

            def call(*given: Any) -> Any:
                found = kernel(*given)
                if found is not None:
                    self.made.append(name)
                return found

            return call

        monkeypatch.setattr(kernels, "like_torch", counted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    monkeypatch.setattr(thrift, "_LEAST_FASTER", 0)
    return Calls(monkeypatch)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3))


def names(node: Any) -> list[str]:
    """Of all nodes behind one, from the last to the first."""
    return [] if node is None else [type(node).__name__, *(n for f, _ in node.next_functions for n in names(f))]


@pytest.mark.parametrize(("half", "made"), [(False, [NORM, POOL]), (True, [POOL])])
def test_a_session_is_exact(calls: Calls, half: bool, made: list[str]) -> None:
    """With autocast to 16 bits too, where torch's own batch norm is fast."""
    x, results = torch.randn(4, 3, 16, 16), []
    for compressed in (False, True):
        model = network()
        session = lowtide.compress(model, "lossless", min_numel=0) if compressed else contextlib.nullcontext()
        for _ in range(2):
            with session, torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = model(x).square().sum()
            loss.backward()
        results.append([loss, *(p.grad for p in model.parameters()), *model.buffers()])
        kinds = [name for name in names(loss.grad_fn) if "Norm" in name or "Pool" in name]
        assert kinds == ["MaxPool2DWithIndicesBackward0", "NativeBatchNormBackward0"]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert calls.made == made * 2


def test_what_others_watch_is_torchs(calls: Calls) -> None:
    """Modes that see operators, no gradients, hooks of others, another layout; and evaluation, but for pooling."""
    model, x, seen = network(), torch.randn(4, 3, 16, 16), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(function)
            return function(*args, **kwargs or {})

    with lowtide.compress(model, "lossless"):
        with Watch():
            model(x)
        with torch.no_grad():
            model(x)
        with torch.autograd.graph.save_on_cpu():
            model(x)
        model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    assert {BATCH_NORM, MAX_POOL} < set(seen)
    assert not calls.made
    model = network().eval()
    with lowtide.compress(model, "lossless"):
        model(x)
        F.max_pool2d(input=model[0](x), kernel_size=2)
    assert calls.made == [POOL, POOL]


def test_defaults_of_torch_do_not_matter(calls: Calls) -> None:
    model, x = network(), torch.randn(4, 3, 16, 16)
    truth = model(x)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), lowtide.compress(model, "lossless"):
            found = model(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, truth)
    assert calls.made == [NORM, POOL]


@pytest.mark.parametrize("name", [NORM, POOL])
def test_other_bits_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.has_torchs_bits(name)
    right = getattr(cpu, name)

    def wrong(*given: Any) -> Any:
        found = right(*given)
        return (found[0].nextafter(torch.tensor(9.0)), *found[1:])

    monkeypatch.setattr(cpu, name, wrong)
    assert not cpu.has_torchs_bits(name)
    backends.like_torch.cache_clear()
    try:
        assert backends.like_torch(name) is None
        monkeypatch.setattr(cpu, name, right)
        backends.like_torch.cache_clear()
        monkeypatch.setenv("LOWTIDE_KERNELS", "reference")
        assert backends.like_torch(name) is None
        monkeypatch.delenv("LOWTIDE_KERNELS")
        monkeypatch.setattr(cpu, "compile", lambda name: 1 / 0)
        assert backends.like_torch(name) is None
    finally:
        backends.like_torch.cache_clear()


def test_without_kernels_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thrift, "_LEAST_FASTER", 0)
    monkeypatch.setattr(kernels, "like_torch", lambda name: None)
    model, x = network(), torch.randn(4, 3, 16, 16)
    truth = model(x)
    with lowtide.compress(model, "lossless"):
        assert torch.equal(model(x), truth)


# ---------------------------------------------------------------- random numbers

DRAW = "bernoulli_"
CHANCES = [0.0, 1e-9, 0.1, 0.5, 1 - 0.1, 1 - 2.0**-53, 1.0]


def is_one_by_one() -> bool:
    """Does torch draw two words for each value here? Other builds of it draw a seed for another generator."""
    generator = torch.Generator().manual_seed(0)
    torch.empty(100).bernoulli_(0.5, generator=generator)
    again = torch.Generator().manual_seed(0)
    torch.empty(200, dtype=torch.int32).random_(generator=again)
    return torch.equal(generator.get_state(), again.get_state())


torch_draws_so = pytest.mark.skipif(not is_one_by_one(), reason="this torch draws its dropout from another generator")


def test_drawn_numbers_are_those_of_a_mersenne_twister() -> None:
    words = np.random.RandomState(7).randint(0, 2**32, 4000, dtype=np.uint32).astype(object)
    for chance in CHANCES:
        numbers = ((words[0::2] << 32) | words[1::2]) & (2**53 - 1)
        truth = torch.tensor([float(number * 2.0**-53 < chance) for number in numbers])
        found = cpu.bernoulli_(torch.empty(2000), chance, generator=torch.Generator().manual_seed(7))
        assert found is not None
        assert torch.equal(found, truth)


@torch_draws_so
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("before", [0, 1, 2, 623, 624, 625])
def test_drawing(before: int, dtype: torch.dtype) -> None:
    """Values and the state behind them, after any number of words, and with a normal number kept for later."""
    own, torchs = (torch.Generator().manual_seed(3) for _ in range(2))
    for generator in (own, torchs):
        torch.empty(before, dtype=torch.int32).random_(generator=generator)
        torch.randn(1, generator=generator)
    for numel in (1, 2, 311, 312, 313, 1000):
        for chance in CHANCES:
            found = cpu.bernoulli_(torch.empty(numel, dtype=dtype), chance, generator=own)
            truth = torch.empty(numel, dtype=dtype).bernoulli_(chance, generator=torchs)
            assert found is not None
            assert torch.equal(found, truth)
            assert torch.equal(own.get_state(), torchs.get_state())
    assert torch.equal(torch.randn(5, generator=own), torch.randn(5, generator=torchs))


def test_drawing_is_not_for_everything() -> None:
    before = torch.get_rng_state()
    for x in (torch.empty(8, dtype=torch.float64), torch.empty(8, 2)[:, 0], torch.empty(0), torch.empty(8).bool()):
        assert cpu.bernoulli_(x, 0.5) is None
    for chance in (-0.1, 1.1, math.nan):
        assert cpu.bernoulli_(torch.empty(8), chance) is None
    assert torch.equal(torch.get_rng_state(), before)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.linear(x))
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.2)
        return F.dropout(x, 0.3, self.training) + torch.dropout(x, 0.0, True)


@torch_draws_so
@pytest.mark.parametrize("half", [False, True])
def test_a_session_drops_what_torch_would(calls: Calls, half: bool) -> None:
    x, results = torch.randn(2, 3, 8, 16), []
    model = Dropping()
    for compressed in (False, True):
        torch.manual_seed(1)
        model.zero_grad()
        session = lowtide.compress(model, "lossless", min_numel=0) if compressed else contextlib.nullcontext()
        with session, torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(x).square().sum()
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters()), torch.get_rng_state()])
        assert not compressed or calls.made == [DRAW] * 3
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_nothing_is_drawn_where_nothing_is_dropped(calls: Calls) -> None:
    model, x = Dropping().eval(), torch.randn(2, 3, 8, 16)
    with lowtide.compress(model, "lossless", min_numel=0):
        x = model.linear(x)
        model.dropout(x)
        F.dropout(x, training=False)
        F.scaled_dot_product_attention(x, x, x)
    assert not calls.made


def test_torchs_compiler_is_not_imported_for_a_mode() -> None:
    """Torch keeps its compiler away from what a mode does, and imports it for that: seconds, and tens of megabytes."""
    code = """
import sys, torch, lowtide
from lowtide.graph import thrift
model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.BatchNorm2d(8))
def step():
    used.clear()
    with lowtide.compress(model, "lossless"):
        loss = model(torch.ones(4, 8, 64, 64)).square().sum()
    loss.backward()
    assert used == ["native_batch_norm"], used
used, find = [], thrift.kernels.like_torch
thrift.kernels.like_torch = lambda name: used.append(name) or find(name)
step()
assert "torch._dynamo" not in sys.modules
import torch._dynamo
torch._dynamo.disable = lambda function, *_, **__: lambda *args, **kwargs: asked.append(1) or function(*args, **kwargs)
asked = []
step()
assert asked, "where there is a compiler, it has to keep away"
"""
    result = fresh.run(code)
    assert result.returncode == 0, result.stderr


class Rectifying(nn.Module):
    """A ReLU behind a convolution, in place or not; somebody may hold its result, or change it."""

    def __init__(self, inplace: bool, then: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3)
        self.inplace, self.then = inplace, then
        self.held: Tensor | None = None
        self.version = 0

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x), self.inplace)
        self.version = y._version
        self.held = y if self.then == "hold" else None
        if self.then == "change":
            y.mul_(-1.0)
        return self.last(F.avg_pool2d(y, 2))  # which reads no values of it


@pytest.mark.parametrize("inplace", [False, True])
def test_a_relu_packs_its_mask(calls: Calls, inplace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the pass that makes the result, which counts as a change if it is one; nobody looks again."""
    x = torch.randn(4, 3, 20, 20)
    packed = []
    right = ops.pack_band
    monkeypatch.setattr(ops, "pack_band", lambda *given: packed.append(given) or right(*given))
    plain, model = Rectifying(inplace), Rectifying(inplace)
    plain(x).square().sum().backward()
    session = lowtide.compress(model, "lossless", min_numel=0)
    with session:
        loss = model(x).square().sum()
    node = next(n for n in behind(loss.grad_fn) if type(n).__name__ == "RectifiedBackward")
    assert not hasattr(node, "mask")
    loss.backward()
    assert calls.made == ["relu"]
    assert not packed
    assert (model.version > 0) == (plain.version > 0) == inplace
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    codecs = [s.codec for s in session.report().sites if s.site.op == "Relu"]
    assert "mask" in codecs[0]


def behind(node: Any) -> list[Any]:
    return [] if node is None else [node, *(n for f, _ in node.next_functions for n in behind(f))]


@pytest.mark.parametrize("inplace", [False, True])
def test_a_mask_does_not_outlive_its_use(calls: Calls, inplace: bool) -> None:
    """A result that somebody holds, or changes, stays as it is: its mask goes, and a change is complained of."""
    x = torch.randn(4, 3, 20, 20)
    for then in ("hold", "change"):
        model = Rectifying(inplace, then)
        session = lowtide.compress(model, "lossless", min_numel=0)
        with session:
            loss = model(x).square().sum()
        handles = [o for o in gc.get_objects() if type(o) is Handle]
        assert handles
        assert all(handle.mask is None for handle in handles)
        if then == "hold":
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        del loss, handles
    assert calls.made == ["relu", "relu"]
