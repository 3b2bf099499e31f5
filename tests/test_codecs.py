"""One contract for every codec, then what each codec promises beyond it.

Statistical tests have fixed keys, so they cannot flake; their tolerances come from formulas, written
where they are used, with a chance of failure of about one in a million for sound code.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import codec_contract
from codec_contract import bytes_of, same_bits
from lowtide import codecs
from lowtide.codecs import (
    BlockMean,
    Cast,
    Codec,
    GroupQuant,
    Indices,
    LogQuant,
    Mask,
    NotRepresentable,
    PoolOffsets,
    Projection,
    Raw,
    SampleQuant,
    ShapeOnly,
    SixSigma,
    TensorMeta,
    TwoValue,
)
from lowtide.kernels import ops, reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = tuple(n for n in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, n))
POOL = PoolOffsets(size=(64, 64), kernel=(3, 2), stride=(2, 3), padding=(1, 0), dilation=(1, 2))

LEVELS = {
    1: (0.0, 1.0),
    2: (0.0, 0.25, 0.6, 1.0),
    3: (0.0, 0.1, 0.25, 0.4, 0.5, 0.7, 0.9, 1.0),
    4: (*(i / 20 for i in range(12)), 0.6, 0.7, 0.9, 1),
}

# A new codec is one line here; the contract below then holds for it.
CODECS: list[Codec] = [
    Raw(),
    ShapeOnly(),
    Mask(),
    Mask(-1.0, 0.5, closed=True, nan=False),
    TwoValue(),
    *(Indices(-3, -3 + 2**b - 1) for b in (1, 2, 4, 8, 16, 32)),
    POOL,
    *(GroupQuant(b) for b in range(1, 9)),
    GroupQuant(2, 7, "sample"),
    GroupQuant(4, 5, "row"),
    GroupQuant(8, 33, "flat"),
    *(BlockMean(4, 2, b, 50) for b in range(1, 9)),
    *(GroupQuant(b, 50, "sample", LEVELS[b]) for b in LEVELS),
    *(GroupQuant(b, 50, "sample", dither=True) for b in (1, 2, 3, 8)),
    *(BlockMean(4, 2, b, 50, dither=True) for b in (2, 4)),
    *(GroupQuant(b, g, "channel", dither=b == 3) for b, g in ((1, 13), (2, 256), (3, 50), (8, 64))),
    GroupQuant(2, 40, "channel", LEVELS[2]),
    SampleQuant(11, 2, 2, 50),
    BlockMean(4, 2, 2, 50, levels=(0.0, 0.25, 0.6, 1.0)),
    BlockMean(4, 2, 3, 50, True, (0.0, 0.1, 0.25, 0.4, 0.5, 0.7, 0.9, 1.0)),
    BlockMean(3, 1, 8),
    BlockMean(2, 3, 8),
    BlockMean(3, 2, 0),
    BlockMean(1, 2, 0),
    BlockMean(4, 2, 8, faithful=True),
    *(Projection(3, b) for b in (0, 1, 2, 4, 8)),
    Projection(40, 8, group=7),
    Projection(3, 0, "subspace"),
    Projection(5, 8, "subspace"),
    *(SixSigma(b) for b in (1, 2, 4, 8)),
    LogQuant(),
    LogQuant(5, 50),
    Cast("bfloat16"),
    Cast("float16"),
    *(Cast(n) for n in FP8),
    *(Cast(n, 16) for n in FP8),
]
LOSSY = [c for c in CODECS if isinstance(c, (GroupQuant, SampleQuant, BlockMean, Projection, SixSigma, Cast))]
ROUNDED = [c for c in LOSSY if isinstance(c, SampleQuant) or (isinstance(c, (GroupQuant, BlockMean)) and c.bits)]
RANDOM = [*ROUNDED, *(c for c in CODECS if isinstance(c, (Projection, LogQuant)))]
INTEGERS = (Indices, PoolOffsets)


def _values(codec: Codec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values the codec is made for."""
    if isinstance(codec, Indices):
        return torch.randint(codec.low, codec.high + 1, shape, generator=generator)
    if isinstance(codec, PoolOffsets):
        position, (height, width) = torch.zeros(shape, dtype=torch.int64), shape[-2:]
        for size, count, kernel, stride, padding, dilation, view in zip(
            codec.size,
            (height, width),
            codec.kernel,
            codec.stride,
            codec.padding,
            codec.dilation,
            ((-1, 1), (1, -1)),
            strict=True,
        ):
            tap = torch.randint(0, kernel, shape, generator=generator)
            start = torch.arange(count).view(view) * stride - padding
            at = start + tap * dilation
            position = position * size + torch.where(at < 0, at + dilation, at)
        return position
    values = torch.randn(shape, generator=generator)
    if isinstance(codec, LogQuant):
        return -values.exp()
    if isinstance(codec, TwoValue):
        values = (values > 0) * (1 / 0.7)
        values.view(-1)[:1] = 1 / 0.7
    return values


def _fits(codec: Codec, tensor: Tensor) -> bool:
    shape = tensor.shape
    if isinstance(codec, SampleQuant):
        return bool(shape) and tensor.stride(0) == max(tensor.stride())
    dims = {BlockMean: getattr(codec, "dims", 0), PoolOffsets: 2, SixSigma: 2}.get(type(codec), 0)
    return len(shape) >= dims


def _dtypes(codec: Codec) -> tuple[torch.dtype, ...]:
    if isinstance(codec, Indices):
        return (torch.int64, torch.int32) if codec.bits == 16 else (torch.int64,)
    return (torch.int64,) if isinstance(codec, PoolOffsets) else FLOATS


def _half_ulp(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _bound(codec: Codec, x: Tensor) -> Tensor | float:
    """An error no value may exceed, from the tensor's range alone (looser than from its groups).

    Groups: the stored minimum lies at most one bfloat16 unit (2**-7) of it too low, the step is rounded
    up by at most 2**-7, and an error stays below one step. Block means: differences span at most twice the
    range plus the rounding of the means (2**-8). Projections: an orthogonal one cannot lengthen a row, a random one
    mixes each value with all others of its row; codes of ``y`` add at most their step, and rounding ``y`` or the
    basis two units of the type, each as often as there are columns. Six sigma: half a bin, and what lies beyond three
    deviations. Casts: half a unit of the type, relative to the
    value or, in the subnormal range, to the scale.
    """
    if x.numel() == 0:
        return 0.0
    wide = x.double()
    largest, span = wide.abs().max(), wide.max() - wide.min()
    rounding = 2 * largest * _half_ulp(x.dtype) + largest * 2.0**-22
    if isinstance(codec, Cast):
        info = torch.finfo(getattr(torch, codec.dtype))
        floor = largest / info.max * info.smallest_normal if codec.dtype.startswith("float8") else 2.0**-14
        return wide.abs() * info.eps * 0.51 + floor * info.eps + rounding
    if isinstance(codec, Projection):
        columns = codecs.base.layout_of(tuple(x.shape), x.stride()).sizes[-1:] or (1,)
        step = 2 * (1 + 2.0**-6) ** 2 / (2**codec.bits - 1) if codec.bits else 0.0
        return columns[0] * largest * (1 + step + 4 * torch.finfo(x.dtype).eps) + rounding
    if isinstance(codec, SixSigma):
        others = [d for d in range(x.dim()) if d != 1]
        mean, deviation = wide.mean(others, keepdim=True), wide.std(others, correction=0, keepdim=True)
        return 3 * deviation / 2**codec.bits + ((wide - mean).abs() - 3 * deviation).clamp_min(0) + rounding
    if isinstance(codec, LogQuant):  # a step of the logarithm is a factor
        step = _bound(GroupQuant(codec.bits), (-x.float()).log())
        return wide.abs() * (math.exp(step) - 1 + _half_ulp(x.dtype) + 2.0**-22)
    if isinstance(codec, SampleQuant):
        return _bound(GroupQuant(codec.least, codec.group), x)
    if isinstance(codec, GroupQuant):
        return (span + largest * 2.0**-7) * (1 + 2.0**-6) * _widest(codec) + rounding
    assert isinstance(codec, BlockMean)
    if codec.bits == 0:
        return span + rounding
    wobble = largest * 2.0**-8
    return (2 * (span + wobble)) * (1 + 2.0**-6) ** 2 * _widest(codec) + rounding


def _accurate(codec: Codec, x: Tensor, out: Tensor) -> bool:
    """May ``out`` stand for ``x``?"""
    if isinstance(codec, Mask):
        return torch.equal(_inside(codec, out), _inside(codec, x))
    if codec.exact:
        return same_bits(out, x)
    return bool(((out.double() - x.double()).abs() <= _bound(codec, x)).all())


def _widest(codec: GroupQuant | BlockMean) -> float:
    """The largest distance between two levels, as a fraction of the range."""
    even = [i / (2**codec.bits - 1) for i in range(2**codec.bits)]
    return max(b - a for a, b in itertools.pairwise(codec.levels or even))


def _ids(codec: object) -> str:
    return repr(codec).replace(" ", "")


every_codec = pytest.mark.parametrize("codec", CODECS, ids=_ids)
lossy = pytest.mark.parametrize("codec", LOSSY, ids=_ids)


# ---------------------------------------------------------------- the contract


def test_every_registered_codec_is_under_contract() -> None:
    ours = {c for c in codecs.registered().values() if c.__module__.startswith("lowtide.")}
    assert ours == {type(c) for c in CODECS}


@every_codec
def test_every_codec_keeps_the_contract(codec: Codec) -> None:
    codec_contract.check(
        codec,
        dtypes=_dtypes(codec),
        fits=lambda tensor: _fits(codec, tensor),
        fill=lambda shape, generator: _values(codec, shape, generator),
        accurate=lambda x, out: _accurate(codec, x, out),
        random=codec in RANDOM,
    )


@every_codec
def test_repr_evaluates(codec: Codec) -> None:
    assert eval(repr(codec), {**vars(codecs), "inf": math.inf}) == codec


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32, torch.bool])
@lossy
def test_lossy_codecs_refuse_other_types(codec: Codec, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"{codec.id} stores float32, .*got {dtype}.*Raw\(\)"):
        codec.encode(torch.zeros(2, 2, 8, 8, dtype=dtype), key=0)


@pytest.mark.parametrize(
    ("codec", "dtype", "stores"),
    [
        *((c, d, "float32, .*bool") for c in (Mask(), Mask(-1.0, 1.0), TwoValue()) for d in (torch.int64, torch.uint8)),
        *((c, d, "float32, .*bool") for c in (Mask(), TwoValue()) for d in (torch.complex64, torch.float8_e5m2)),
        *((Indices(0, 3), d, "integers") for d in (torch.float32, torch.bool, torch.complex64)),
        *((POOL, d, "int64 positions") for d in (torch.float32, torch.int32, torch.bool)),
    ],
    ids=str,
)
def test_lossless_codecs_refuse_other_types(codec: Codec, dtype: torch.dtype, stores: str) -> None:
    """Some would raise in backward only, or give the values back in another type."""
    for shape in ((2, 2), (0, 2)):
        with pytest.raises(TypeError, match=rf"{codec.id} stores {stores}; got {dtype}.*Raw\(\)"):
            codec.encode(torch.zeros(shape).to(dtype), key=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GroupQuant(9), "bits must be one of 1, 2, 3, 4, 5, 6, 7, 8; got 9"),
        (lambda: GroupQuant(0), "bits must be one of 1, 2, 3, 4, 5, 6, 7, 8; got 0"),
        (lambda: GroupQuant(True), "bits must be one of 1, 2, 3, 4, 5, 6, 7, 8; got True"),
        (lambda: GroupQuant(2.0), "bits must be one of 1, 2, 3, 4, 5, 6, 7, 8; got 2.0"),
        (lambda: GroupQuant("2"), "bits must be one of 1, 2, 3, 4, 5, 6, 7, 8; got '2'"),
        (lambda: GroupQuant(group=0), "group must be a whole number of at least 1; got 0"),
        (lambda: GroupQuant(group=True), "group must be a whole number of at least 1; got True"),
        (lambda: GroupQuant(group=2.5), "group must be a whole number of at least 1; got 2.5"),
        (lambda: GroupQuant(layout="x"), "layout must be one of row, sample, flat, channel; got 'x'"),
        (lambda: BlockMean(block=0), "block must be a whole number of at least 1; got 0"),
        (lambda: BlockMean(dims=4), "dims must be one of 1, 2, 3; got 4"),
        (lambda: BlockMean(dims=2.0), "dims must be one of 1, 2, 3; got 2.0"),
        (lambda: BlockMean(bits=9), "bits must be one of 0, 1, 2, 3, 4, 5, 6, 7, 8; got 9"),
        (lambda: BlockMean(bits=False), "bits must be one of 0, 1, 2, 3, 4, 5, 6, 7, 8; got False"),
        (lambda: BlockMean(group=-1), "group must be a whole number of at least 1; got -1"),
        (lambda: BlockMean(bits=0, faithful=True), "faithful=True needs bits of at least 1; got bits=0"),
        (lambda: Projection(0), "rank must be a whole number of at least 1; got 0"),
        (lambda: Projection(0.5), "rank must be a whole number of at least 1; got 0.5"),
        (lambda: Projection(2, 9), "bits must be one of 0, 1, 2, 3, 4, 5, 6, 7, 8; got 9"),
        (lambda: Projection(2, kind="svd"), "kind must be one of random, subspace; got 'svd'"),
        (lambda: Projection(2, group=0), "group must be a whole number of at least 1; got 0"),
        (lambda: SixSigma(3), "bits must be one of 1, 2, 4, 8; got 3"),
        (lambda: SixSigma(True), "bits must be one of 1, 2, 4, 8; got True"),
        (lambda: SixSigma().encode(torch.zeros(3), key=0), r"channels in dimension 1; got a tensor of shape \(3,\)"),
        (lambda: GroupQuant(8, levels=(0.0, 1.0)), "levels go with 1 to 4 bits; got bits=8"),
        (lambda: BlockMean(bits=0, levels=(0.0, 1.0)), "levels go with 1 to 4 bits; got bits=0"),
        (lambda: GroupQuant(2, levels=(0.0, 1.0)), "levels must be a tuple of 4 numbers from 0.0 to 1.0 with 2 bits"),
        (lambda: GroupQuant(1, levels=[0.0, 1.0]), "levels must be a tuple of 2 numbers"),
        (lambda: GroupQuant(1, levels=("0", 1.0)), "levels must be a tuple of 2 numbers"),
        (lambda: GroupQuant(1, levels=(0.0, 0.9)), "levels must be a tuple of 2 numbers"),
        (lambda: BlockMean(bits=1, levels=(0.1, 1.0)), "levels must be a tuple of 2 numbers"),
        (lambda: GroupQuant(2, levels=(0.0, 0.5, 0.5, 1.0)), r"levels must rise by at least 2\*\*-16 each"),
        (lambda: GroupQuant(2, levels=(0.0, 0.6, 0.5, 1.0)), r"levels must rise by at least 2\*\*-16 each"),
        (lambda: GroupQuant(2, levels=(0.0, math.nan, 0.5, 1.0)), r"levels must rise by at least 2\*\*-16 each"),
        (lambda: GroupQuant(dither=1), "dither must be one of False, True; got 1"),
        (
            lambda: GroupQuant(2, levels=LEVELS[2], dither=True),
            r"dither=True needs even levels; got levels=\(0.0, 0.25",
        ),
        (lambda: BlockMean(levels=LEVELS[2], dither=True), r"dither=True needs even levels; got levels=\(0.0, 0.25"),
        (lambda: BlockMean(bits=0, dither=True), "dither=True goes with bits of at least 1 .*got bits=0, faithful=Fal"),
        (
            lambda: BlockMean(faithful=True, dither=True),
            "dither=True goes with .*got bits=2, faithful=True.*Leave dith",
        ),
        (lambda: Cast("int8"), "dtype must be one of bfloat16, float16, .*; got 'int8'"),
        (lambda: Cast("float8_e5m2", -1), "group must be a whole number of at least 1; got -1"),
        (lambda: Cast("float8_e5m2", False), "group must be a whole number of at least 1; got False"),
        (lambda: Cast("float16", 16), "group=16 goes with an 8-bit type; got dtype='float16'"),
        (lambda: Mask(1.0, 1.0), "low must be below high; got low=1.0, high=1.0"),
        (lambda: Mask(2.0, 1.0), "low must be below high; got low=2.0, high=1.0"),
        (lambda: Mask(math.nan, 1.0), "low must be below high; got low=nan, high=1.0"),
        (lambda: Indices(3, 2), r"low..high must span 1 to 2\*\*32 integers; got 3..2"),
        (lambda: Indices(0, 2**32), r"low..high must span 1 to 2\*\*32 integers; got 0..4294967296"),
        (lambda: SampleQuant(17, 2), "2 samples share 2 to 16 bits in total; got 17"),
        (lambda: SampleQuant(1, 2), "2 samples share 2 to 16 bits in total; got 1"),
        (lambda: SampleQuant(4, 2, 0), "least must be one of 1, 2, 3, 4, 5, 6, 7, 8; got 0"),
        (lambda: SampleQuant(2, 0), "samples must be a whole number of at least 1; got 0"),
        (lambda: SampleQuant(2, 1, 1, 0), "group must be a whole number of at least 1; got 0"),
        (
            lambda: SampleQuant(6, 2).packed_nbytes(TensorMeta((), (), torch.float32)),
            r"samples in dimension 0, outermost in memory; got shape \(\)",
        ),
        (
            lambda: SampleQuant(6, 2).encode(torch.zeros(5, 2).t(), key=0),
            r"samples in dimension 0, outermost in memory; got shape \(2, 5\) with strides \(1, 2\)",
        ),
        *(
            (
                lambda use=use, short=short, faithful=faithful: use(BlockMean(dims=3, faithful=faithful), short),
                rf"block_mean with dims=3 averages over the last 3 dimensions; got a tensor of shape {shape}. {advice}",
            )
            for use in (
                lambda codec, x: codec.encode(x, key=0),
                lambda codec, x: codec.encode_rectified(x, key=0),
                lambda codec, x: codec.packed_nbytes(TensorMeta.of(x)),
            )
            for faithful in (False, True)
            for short, shape, advice in (
                (torch.zeros(3, 4), r"\(3, 4\)", "Take dims of at most 2, or GroupQuant"),
                (torch.zeros(0), r"\(0,\)", "Take dims of at most 1, or GroupQuant"),
                (torch.zeros(()), r"\(\)", "Take GroupQuant"),
            )
        ),
        (lambda: BlockMean(faithful="no"), "faithful must be one of False, True; got 'no'"),
        (lambda: Mask("a"), "low must be a number; got 'a'"),
        (lambda: Mask(0.0, None), "high must be a number; got None"),
        (lambda: Mask(False), "low must be a number; got False"),
        (lambda: Mask(closed="no"), "closed must be one of False, True; got 'no'"),
        (lambda: Mask(nan=1), "nan must be one of False, True; got 1"),
        (lambda: Indices("a", 2), "low must be a whole number; got 'a'"),
        (lambda: Indices(0, 2.5), "high must be a whole number; got 2.5"),
        (lambda: Indices(False, 2), "low must be a whole number; got False"),
        (lambda: replace(POOL, kernel=3), "kernel must be a tuple of whole numbers of at least 1; got 3"),
        (lambda: replace(POOL, stride=(0, 1)), r"stride must be a tuple of whole numbers of at least 1; got \(0, 1\)"),
        (lambda: replace(POOL, padding=(0, -1)), "padding must be a tuple of whole numbers of at least 0"),
        (lambda: replace(POOL, dilation=("1", 1)), "dilation must be a tuple of whole numbers of at least 1"),
        (lambda: replace(POOL, kernel=(3,)), r"one number for each pooled .*got size=\(64, 64\) and kernel=\(3,\)"),
        (lambda: PoolOffsets((), (), (), (), ()), r"one number for each pooled dimension; got size=\(\)"),
        (
            lambda: POOL.encode(torch.zeros(4, dtype=torch.int64), key=0),
            r"pool_offsets with size=\(64, 64\) needs a tensor of at least 2 dimensions; got shape \(4,\)",
        ),
    ],
)
def test_bad_arguments_are_named(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------- special values


CONSTANTS = (0.0, -0.0, 0.1, -0.1, 1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-23, 1e-40, -3.4e38, 3.4028234e38, 1e30)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("codec", [c for c in CODECS if isinstance(c, (GroupQuant, BlockMean, SixSigma))], ids=_ids)
def test_constants_are_exact(codec: GroupQuant | BlockMean | SixSigma, dtype: torch.dtype) -> None:
    """Zeros may lose their sign; pooling rounds its sums and may overflow them."""
    for value, shape in itertools.product(CONSTANTS, ((2, 3, 9, 10), (2, 3, 1, 1), (1, 1, 7, 8, 5))):
        x = torch.full(shape, value).to(dtype)
        huge = abs(value) > 1e37
        if not bool(x.isfinite().all()) or (huge and isinstance(codec, BlockMean)):
            continue
        out = codec.encode(x, key=6).decode()
        if codec.bits == 0:
            assert torch.allclose(out.double(), x.double(), rtol=64 * 2.0**-23, atol=0)
        else:
            assert torch.equal(out, x), value


def test_lossless_codecs_keep_the_sign_of_zero() -> None:
    x = torch.tensor([0.0, -0.0, 2.0])
    assert same_bits(Raw().encode(x, key=0).decode(), x)
    with contextlib.suppress(NotRepresentable):
        assert same_bits(TwoValue().encode(x, key=0).decode(), x)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@lossy
def test_what_is_not_finite_never_looks_finite(codec: Codec, dtype: torch.dtype, bad: float) -> None:
    """The value decodes to something not finite, as does its group; no finite value comes back wrong."""
    clean = (torch.randn(4, 3, 8, 12, 8, generator=torch.Generator().manual_seed(1)) * 1000).to(dtype)
    before = codec.encode(clean, key=7).decode()
    for at in ((1, 2, 3, 4, 5), (3, 2, 7, 11, 7), (0, 0, 0, 0, 0)):
        x = clean.clone()
        x[at] = bad
        out = codec.encode(x, key=7).decode()
        assert not bool(out[at].isfinite())
        finite = out.isfinite()
        error = (out.double() - clean.double()).abs()
        bound = _bound(codec, clean)
        assert bool((error <= bound)[finite].all())
        if isinstance(codec, Cast):
            if codec.dtype == "bfloat16":
                assert int((~finite).sum()) == 1
        elif getattr(codec, "kind", "") == "subspace":
            assert bool(out.isnan().all())
        elif isinstance(codec, SixSigma):
            assert torch.equal(out[:, :2], before[:, :2]) if at[1] == 2 else torch.equal(out[:, 1:], before[:, 1:])
            assert bool(out[:, at[1]].isnan().all())
        elif getattr(codec, "layout", "") != "flat" and not isinstance(codec, SampleQuant):  # who shares bits with it
            others = [n for n in range(4) if n != at[0]]
            assert torch.equal(out[others], before[others])
            assert bool((finite | (out == bad) | out.isnan()).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", range(1, 9))
def test_a_bad_group_is_all_nan_and_alone(bits: int, bad: float) -> None:
    codec = GroupQuant(bits, 16)
    clean = torch.randn(3, 40)
    x = clean.clone()
    x[1, 20] = bad
    out, before = (codec.encode(t, key=8).decode() for t in (x, clean))
    hit = torch.zeros(3, 40, dtype=torch.bool)
    hit[1, 16:32] = True
    assert torch.equal(out.isnan(), hit)
    assert torch.equal(out[~hit], before[~hit])
    full = codec.encode(torch.full((2, 5), bad), key=8).decode()
    assert bool(full.isnan().all())


def _spoilt(codec: Codec, shape: tuple[int, ...], at: tuple[int, ...]) -> Tensor:
    """Where the docstring of a codec says that NaN comes back if the value at ``at`` is NaN or Inf; by plain loops."""
    hit = torch.zeros(shape, dtype=torch.bool)
    hit[at] = True
    if isinstance(codec, BlockMean) and not codec.faithful:
        block = hit
        for d in range(len(shape) - codec.dims, len(shape)):
            first = at[d] - at[d] % codec.block
            index = torch.arange(shape[d]).view([-1 if k == d else 1 for k in range(len(shape))])
            block = block.any(d, keepdim=True) & (first <= index) & (index < first + codec.block)
        if codec.bits == 0:
            return block
        hit = block
    group, row = getattr(codec, "group", 0), math.prod(shape[1:])
    if isinstance(codec, SixSigma):
        return hit.any(0, keepdim=True).any(2, keepdim=True).any(3, keepdim=True).expand(shape)
    if isinstance(codec, BlockMean) and codec.faithful:
        row = group = math.prod(shape[len(shape) - codec.dims :])
    elif isinstance(codec, Projection):
        row = group = hit.numel() if codec.kind == "subspace" else shape[-1]
    elif isinstance(codec, Cast):
        row = shape[-1] if group else hit.numel()
        group = group or row
    elif isinstance(codec, GroupQuant) and codec.layout == "channel":
        return _spoilt_channel(hit, at, codec.group)
    elif isinstance(codec, GroupQuant):
        row = {"row": shape[-1], "sample": row, "flat": hit.numel()}[codec.layout]
    lines = hit.view(-1, row).clone()
    for line in lines:
        for start in range(0, row, group):
            line[start : start + group] = bool(line[start : start + group].any())
    return lines.view(shape)


def _spoilt_channel(hit: Tensor, at: tuple[int, ...], group: int) -> Tensor:
    """In a contiguous tensor: the run of the map, or the maps of the channel in the samples of a block."""
    area, hit = math.prod(hit.shape[2:]), hit.clone()
    if area < group:
        samples = _block(area, group)
        hit[at[0] // samples * samples :][:samples, at[1]] = True
    else:
        line = hit[at[0], at[1]].view(-1)
        first = int(line.nonzero()) // group * group
        line[first : first + group] = True
    return hit


def _block(area: int, group: int) -> int:
    """How many maps a group has: as many as fit, with a number of values that four divides if that is possible."""
    fit = [n for n in range(1, group // area + 1) if n * area % 4 == 0]
    return fit[-1] if fit else group // area


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@lossy
def test_nan_comes_back_where_it_is_documented(codec: Codec, bad: float) -> None:
    """Not one value more, and not one less; a cast to bfloat16 alone keeps the value as it is."""
    x = torch.randn(2, 3, 8, 11, generator=torch.Generator().manual_seed(40))
    for dtype, at in itertools.product(FLOATS, ((0, 0, 0, 0), (1, 1, 5, 4), (1, 2, 7, 10))):
        spoilt = x.to(dtype, copy=True)
        spoilt[at] = bad
        out = codec.encode(spoilt, key=41).decode()
        if codec == Cast("bfloat16"):
            assert same_bits(out[at], spoilt[at])
            assert int((~out.isfinite()).sum()) == 1
            continue
        assert torch.equal(out.isnan(), _spoilt(codec, tuple(x.shape), at)), (dtype, at)
        assert not bool(out.isinf().any())


@lossy
def test_subnormals(codec: Codec) -> None:
    """Below the smallest step (2**-126) no more is promised than an error below that step (for a product: each)."""
    x = torch.linspace(-3e-39, 3e-39, 4 * 64).view(2, 2, 8, 8)
    x[0, 0, 0, 0] = 1e-45
    out = codec.encode(x, key=9).decode()
    assert bool(out.isfinite().all())
    floor = 2.0**-24 if codec == Cast("float16") else 2.0**-126
    steps = x.shape[-1] * 2 if isinstance(codec, Projection) else 1.01
    assert float((out - x).abs().max()) <= steps * floor


@pytest.mark.parametrize("largest", [1e30, 3e38, torch.finfo(torch.float32).max])
@lossy
def test_huge_values_are_right_or_nan(codec: Codec, largest: float) -> None:
    """A finite value never becomes a finite number beyond the bound; up to 1e30 all is finite.

    Beside float32's largest a step that is rounded up may overflow, and so may a product, and half a step beyond the
    range of a group: visibly, as Inf or NaN.
    """
    overflows = isinstance(codec, Projection) or getattr(codec, "dither", False)
    generator = torch.Generator().manual_seed(3)
    for signed in (False, True):
        x = torch.rand(8, 2, 8, 8, generator=generator)
        x = ((x * 2 - 1) if signed else x) * largest
        x[:, :, 0, 0] = largest
        for key in range(4):
            out = codec.encode(x, key=key).decode()
            right = (out.double() - x.double()).abs() <= _bound(codec, x)
            visible = ~out.isfinite() if largest > 3.3e38 or overflows else out.isnan()
            assert bool((right | visible).all())
            if largest == 1e30:
                assert bool(right.all())


@pytest.mark.parametrize("codec", [c for c in CODECS if isinstance(c, (GroupQuant, BlockMean, SixSigma))], ids=repr)
def test_the_largest_half_does_not_overflow(codec: Codec) -> None:
    """Rounding up must not leave the tensor's own type: 65504 is a value fp16 training meets."""
    largest = torch.finfo(torch.float16).max
    x = (torch.rand(8, 2, 8, 8, generator=torch.Generator().manual_seed(4)) * largest).half()
    x[:, :, ::3, 0] = largest
    for key in range(8):
        assert not bool(codec.encode(x, key=key).decode().isinf().any())


# ---------------------------------------------------------------- masks


def _inside(mask: Mask, x: Tensor) -> Tensor:
    """The band by its words: an infinite end is no end, so infinity itself lies inside."""
    if x.dtype == torch.bool:
        return x
    low = (x >= mask.low if mask.closed else x > mask.low) | torch.tensor(mask.low == -math.inf)
    high = (x <= mask.high if mask.closed else x < mask.high) | torch.tensor(mask.high == math.inf)
    return torch.where(x.isnan(), torch.tensor(mask.nan), low & high)


def _telling(dtype: torch.dtype, *ends: float, nan: bool = True) -> Tensor:
    """Ends, their neighbours, and every kind of float, often enough to meet vector code and its tail."""
    info = torch.finfo(dtype)
    some = [0.0, -0.0, 0.5, -0.5, 2.0, -2.0, 7.0, -7.0, info.max, -info.max, info.tiny, -info.tiny]
    some += [math.inf, -math.inf, info.smallest_normal / 2] + ([math.nan] if nan else [])
    exact = torch.tensor([e for e in ends if math.isfinite(e)], dtype=torch.float64).to(dtype)
    up = torch.nextafter(exact, torch.full_like(exact, math.inf))
    down = torch.nextafter(exact, torch.full_like(exact, -math.inf))
    return torch.cat([torch.tensor(some, dtype=dtype), exact, up, down]).repeat(23)[:-3]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("nan", [True, False])
@pytest.mark.parametrize("closed", [True, False])
def test_mask_keeps_the_side_of_every_value(closed: bool, nan: bool, dtype: torch.dtype) -> None:
    for low, high in itertools.product((-math.inf, -1.5, 0.0, 0.25), (math.inf, 0.5, 6.0)):
        mask = Mask(low, high, closed, nan)
        x = _telling(dtype, low, high)
        out = mask.encode(x, key=0).decode()
        assert torch.equal(_inside(mask, out), _inside(mask, x)), mask


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mask_at_the_edge_of_the_type(dtype: torch.dtype) -> None:
    """Clamping to (nearly) the largest number, as T5 does, must not overflow the decoded numbers."""
    largest = torch.finfo(dtype).max
    for low, high in ((-largest, largest), (-math.inf, largest), (-largest, math.inf), (0.0, largest)):
        mask = Mask(low, high, closed=True, nan=False)
        x = _telling(dtype, low, high)
        assert torch.equal(_inside(mask, mask.encode(x, key=0).decode()), _inside(mask, x)), mask


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mask_numbers_fit_the_type_on_every_backend(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses to fill fp16 with 131008, so the reference kernel would raise in backward."""
    largest = torch.finfo(dtype).max
    for low, high, closed in ((-largest, largest, True), (0.0, largest, True), (-largest, math.inf, True)):
        mask = Mask(low, high, closed, nan=False)
        packed = mask.encode(torch.tensor([0.5, 7.0, math.nan, -math.inf], dtype=dtype), key=0)
        out = packed.decode()
        with monkeypatch.context() as patch:
            patch.setattr(ops, "unpack_band", reference.unpack_band)
            assert torch.equal(packed.decode(), out)


def _clamped(low: float | None, high: float | None):  # type: ignore[no-untyped-def]
    def backward(grad: Tensor, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(torch.clamp(x, low, high), x, grad)[0]

    return backward


aten = torch.ops.aten
ONE_BIT_OPS = {
    "relu": (Mask(), lambda g, x: aten.threshold_backward(g, x, 0)),
    "leaky_relu": (Mask(nan=False), lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False)),
    "threshold 0.25": (Mask(0.25), lambda g, x: aten.threshold_backward(g, x, 0.25)),
    "threshold -3": (Mask(-3.0), lambda g, x: aten.threshold_backward(g, x, -3.0)),
    "hardtanh": (Mask(-1.0, 1.0), lambda g, x: aten.hardtanh_backward(g, x, -1.0, 1.0)),
    "hardtanh one-sided": (Mask(2.0, 7.0), lambda g, x: aten.hardtanh_backward(g, x, 2.0, 7.0)),
    "relu6": (Mask(0.0, 6.0), lambda g, x: aten.hardtanh_backward(g, x, 0.0, 6.0)),
    "hardsigmoid": (Mask(-3.0, 3.0, nan=False), lambda g, x: aten.hardsigmoid_backward(g, x)),
    "clamp": (Mask(-0.5, 2.0, True, False), _clamped(-0.5, 2.0)),
    "clamp_min": (Mask(-0.5, math.inf, True, False), _clamped(-0.5, None)),
    "clamp_max": (Mask(-math.inf, 2.0, True, False), _clamped(None, 2.0)),
    "clamp without ends": (Mask(-math.inf, math.inf, True, False), _clamped(-math.inf, math.inf)),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ONE_BIT_OPS)
def test_mask_serves_the_real_backward_bit_for_bit(op: str, dtype: torch.dtype) -> None:
    """hardtanh without NaN: its kernel treats NaN differently in vector code and in the tail."""
    mask, backward = ONE_BIT_OPS[op]
    nan = "hardtanh" not in op and op != "relu6"
    x = _telling(dtype, mask.low, mask.high, nan=nan)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    wanted = backward(grad, x)
    assert same_bits(backward(grad, mask.encode(x, key=0).decode()), wanted)
    assert bool((wanted != 0).any())  # the op lets something through


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (9, 3, 5)])
def test_mask_keeps_booleans(shape: tuple[int, ...]) -> None:
    x = torch.randint(2, shape).bool()
    for mask in (Mask(), Mask(-1.0, 5.0, True)):
        packed = mask.encode(x, key=0)
        assert torch.equal(packed.decode(), x)
        assert packed.nbytes == -(-x.numel() // 8)


# ---------------------------------------------------------------- two values, integers, pools


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_two_value_keeps_dropout_noise(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    noise = torch.empty(3, 7, 11, dtype=dtype).bernoulli_(1 - p).div_(1 - p)
    packed = TwoValue().encode(noise, key=0)
    assert same_bits(packed.decode(), noise)
    assert packed.nbytes == -(-noise.numel() // 8) + noise.element_size()
    assert same_bits(TwoValue().encode(torch.ones(5), key=0).decode(), torch.ones(5))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("value", [1e-7, 1.0, math.inf])
def test_two_value_keeps_any_positive_number(value: float, dtype: torch.dtype) -> None:
    for values in ([value], [value, 0.0] * 20):
        x = torch.tensor(values, dtype=dtype)
        assert same_bits(TwoValue().encode(x, key=0).decode(), x)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize(
    "values",
    [
        *([0.0, 1.0, 2.0], [0.0, 1.0, 1e-7], [0.0, 1.0, 1.01], [1.0, math.inf], [0.0, 0.0]),
        *([0.0, -1.0], [-1.0, 1.0], [-0.0, 1.0], [0.0, 1.0, -0.0], [-math.inf, 1.0]),
        *([0.0, math.nan], [1.0, math.nan], [1.0, -math.nan], [math.inf, math.nan]),
    ],
    ids=str,
)
def test_two_value_refuses_the_rest(values: list[float], dtype: torch.dtype) -> None:
    for place in range(0, 40, 13):  # the odd one among many, within a byte of bits and behind one
        with pytest.raises(NotRepresentable):
            TwoValue().encode(torch.tensor([values[0]] * place + values, dtype=dtype), key=0)


def test_log_probabilities_near_zero_and_far_away() -> None:
    x = torch.tensor([0.0, -0.0, -(2.0**-30), -1e-3, -1.0, -90.0, -1e9, -math.inf])
    p = LogQuant().encode(x, key=1).decode().exp().double()
    assert p[6] == p[7] == 0
    step = (math.log(128) + 24 * math.log(2) + 2 * 2.0**-7 * 17) * (1 + 2.0**-6) / 255
    off = torch.expm1(x.double()).abs() * (math.exp(step / 2) - 1) + 2.0**-23
    assert ((p - x.double().exp()).abs() <= off).all()


@pytest.mark.parametrize("sharpness", [0.1, 3.0, 12.0])
def test_the_gradient_of_cross_entropy_from_coded_log_probabilities(sharpness: float) -> None:
    """Noise beside the gradient of the scores is small for fresh and for confident networks, and averages out."""
    torch.manual_seed(0)
    x = torch.log_softmax(sharpness * torch.randn(500, 100), 1)
    chosen = torch.nn.functional.one_hot(torch.multinomial(x.exp(), 1)[:, 0], 100)
    exact = x.double().exp() - chosen
    errors = torch.stack([LogQuant().encode(x, key=k).decode().double().exp() - chosen - exact for k in range(16)])
    length = float(exact.norm())
    one, mean = float(errors[0].norm()) / length, float(errors.mean(0).norm()) / length
    assert one < 0.02
    assert mean < 1.5 * one / math.sqrt(16)


def test_log_probabilities_refuse_the_rest() -> None:
    with pytest.raises(NotRepresentable, match=r"0\.5 is above zero"):
        LogQuant().encode(torch.tensor([-1.0, 0.5]), key=0)
    assert torch.isnan(LogQuant().encode(torch.tensor([-1.0, math.nan]), key=0).decode()).all()


def test_log_probabilities_are_packed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of a large tensor has the bytes that it has in a tensor of its own."""
    monkeypatch.setattr(codecs.logarithms, "_PIECE", 1024)
    x = -torch.rand(2500)
    packed = LogQuant().encode(x, key=8)
    assert len(packed.buffers) == 6
    assert packed.nbytes == LogQuant().packed_nbytes(packed.meta)
    assert torch.equal(packed.decode()[1024:2048], LogQuant().encode(x[1024:2048], key=8 ^ 1).decode())


@pytest.mark.parametrize("low", [0, -5, 1000, -(2**31)])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
def test_indices_at_every_width(bits: int, low: int) -> None:
    for span in (2 ** (bits // 2) + 1 if bits > 1 else 2, 2**bits):
        codec = Indices(low, low + span - 1)
        assert codec.bits == bits
        for n in (1, 2, 3, 7, 64, 1001):
            x = torch.randint(codec.low, codec.high + 1, (n,))
            x[0], x[-1] = codec.low, codec.high
            packed = codec.encode(x, key=0)
            assert torch.equal(packed.decode(), x)
            assert packed.nbytes == math.ceil(n * bits / 8)
        for wrong in (codec.low - 1, codec.high + 1):
            with pytest.raises(NotRepresentable, match=f"leave {codec.low}..{codec.high}"):
                codec.encode(torch.tensor([codec.low, wrong]), key=0)


def test_indices_never_cut_fractions() -> None:
    with pytest.raises((TypeError, NotRepresentable)):
        Indices(0, 3).encode(torch.tensor([1.5]), key=0)


def _pairs(x: int | tuple[int, ...], dims: int) -> tuple[int, ...]:
    return x if isinstance(x, tuple) else (x,) * dims


POOLS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 1},
    {"kernel_size": 2, "stride": 3, "ceil_mode": True},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 2, "stride": 2, "dilation": 2, "padding": 1},
    {"kernel_size": 3, "stride": 2, "dilation": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 5, "stride": 1, "padding": 2},
]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("options", POOLS, ids=str)
def test_pool_offsets_rebuild_positions(options: dict[str, int], dims: int, channels_last: bool) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 3, *(11, 9, 8)[:dims])
    x[1, 1, 2] = math.nan
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    pool = F.max_pool2d if dims == 2 else F.max_pool3d
    indices = pool(x, **options, return_indices=True)[1]
    kernel = _pairs(options["kernel_size"], dims)
    codec = PoolOffsets(
        tuple(x.shape[2:]),
        kernel,
        _pairs(options.get("stride", kernel), dims),
        _pairs(options.get("padding", 0), dims),
        _pairs(options.get("dilation", 1), dims),
    )
    packed = codec.encode(indices, key=0)
    out = packed.decode()
    assert torch.equal(out, indices)
    assert out.stride() == indices.stride()
    taps = math.prod(kernel)
    width = next(w for w in (1, 2, 4, 8) if taps <= 2**w)
    assert packed.nbytes == math.ceil(indices.numel() * width / 8)
    with pytest.raises(NotRepresentable):
        codec.encode(indices + codec.size[-1] * 7, key=0)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
def test_pool_offsets_of_minus_infinity(form: torch.memory_format) -> None:
    x = torch.full((1, 8, 6, 6), -math.inf).contiguous(memory_format=form)
    indices = F.max_pool2d(x, 3, 2, 1, return_indices=True)[1]
    codec = PoolOffsets((6, 6), (3, 3), (2, 2), (1, 1), (1, 1))
    with contextlib.suppress(NotRepresentable):  # should torch name a place outside the window
        assert torch.equal(codec.encode(indices, key=0).decode(), indices)


def test_pool_offsets_refuse_other_taps() -> None:
    codec = PoolOffsets((4, 4), (2, 2), (2, 2), (0, 0), (1, 1))
    good = torch.tensor([[0, 2], [8, 10]])
    assert torch.equal(codec.encode(good, key=0).decode(), good)
    for wrong in (2, 8, 16, 17, -1, -16):
        bad = good.clone()
        bad[0, 0] = wrong
        with pytest.raises(NotRepresentable):
            codec.encode(bad, key=0)


# ---------------------------------------------------------------- the quantizer's format


def _bfloat(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << 16).view(np.float32)


PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


def _code_bytes(n: int, bits: int) -> int:
    return sum(math.ceil(n * width / 8) for width in PLANES[bits])


def _read(packed: codecs.Packed, row: int, group: int, bits: int) -> tuple[np.ndarray, ...]:
    """Codes, low and step of every value in memory order, read by the format's description."""
    codes_buffer, side_buffer = packed.buffers[-2:]
    raw, side = codes_buffer.numpy(), side_buffer.numpy().view(np.uint16).reshape(-1, 2)
    codes, low, step = [], [], []
    at = g = 0
    for _ in range(packed.meta.numel // row):
        for start in range(0, row, group):
            n = min(group, row - start)
            found, low_bit = [0] * n, 0
            for width in PLANES[bits]:
                size = math.ceil(n * width / 8)
                chunk = raw[at : at + size]
                for e in range(n):
                    found[e] |= (int(chunk[e % size]) >> (e // size * width) & (2**width - 1)) << low_bit
                at, low_bit = at + size, low_bit + width
            codes += found
            words = side[g]
            if words[1] & 0x8000:  # constant
                value = int(words[0]) << 16 | (int(words[1]) & 0x7FFF) << 1 | codes[-n] & 1
                base, scale = np.array([value], np.uint32).view(np.float32)[0], np.float32(0)
            else:
                base, scale = _bfloat(words)
            low += [base] * n
            step += [scale] * n
            g += 1
    assert at == raw.size
    assert g == side.shape[0]
    return np.array(codes), np.array(low, np.float32), np.array(step, np.float32)


@pytest.mark.parametrize("bits", range(1, 9))
def test_format_reads_back_independently(bits: int) -> None:
    x = torch.randn(5, 37, generator=torch.Generator().manual_seed(6))
    x[2, :16] = 0.1
    packed = GroupQuant(bits, 16).encode(x, key=10)
    codes, low, step = _read(packed, 37, 16, bits)
    assert np.array_equal(packed.decode().view(-1).numpy(), low + codes.astype(np.float32) * step)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_side_information_brackets_the_group(bits: int, dtype: torch.dtype) -> None:
    """Low is the next bfloat16 at or below the minimum, step the next at or above what is needed."""
    x = (torch.randn(64, 24, generator=torch.Generator().manual_seed(7)) + 0.3).to(dtype)
    packed = GroupQuant(bits, 24).encode(x, key=11)
    _, low, step = (a.reshape(64, 24)[:, 0].astype(np.float64) for a in _read(packed, 24, 24, bits))
    wide = x.double().numpy()
    smallest, largest = wide.min(1), wide.max(1)
    top = 2**bits - 1
    assert (low <= smallest).all()
    assert (smallest - low <= np.abs(low) * 2.0**-7).all()
    needed = (largest - low) / top
    assert (step >= needed * (1 - 2.0**-23)).all()
    assert (step <= needed * (1 + 2.0**-7)).all()


GOLDEN: dict[Codec, str] = {
    # from the reference kernels; a change here is a change of the format
    GroupQuant(bits=1, group=8, layout="row"): "4a064a02 40bf204000bfe03f40bf204000bfe03f",
    GroupQuant(bits=2, group=8, layout="row"): "d44e1cd44e1c 40bf563f00bf163f40bf563f00bf163f",
    GroupQuant(bits=4, group=8, layout="row"): "903be57f700f903ad47f600f 40bf2b3e00bfef3d40bf2b3e00bfef3d",
    GroupQuant(
        bits=8, group=8, layout="row"
    ): "00b24cfe9832e57f00ff6d00b24cfe9833e57f00fe6d 40bf213c00bfe13b40bf213c00bfe13b",
    GroupQuant(bits=3, group=8, layout="row"): "c8dd5a3c0288dd5a3c02 40bfb73e00bf803e40bfb73e00bf803e",
    GroupQuant(
        bits=7, group=8, layout="row"
    ): "b09926fec8dd5a700f3c02b09826fec8dd5a600e3c02 40bfa23c00bf623c40bfa23c00bf623c",
    BlockMean(
        block=4, dims=1, bits=2, group=16, faithful=False
    ): "003f203fab3e003f203fab3e c862dd873813 a0bf563f60bf193f",
    BlockMean(
        block=2, dims=2, bits=4, group=16, faithful=False
    ): "003e603f803e803fc03e803e 00ff700ffc03fcc304fb74 60bfef3d60bfef3d",
    BlockMean(
        block=3, dims=1, bits=0, group=1024, faithful=False
    ): "abaaaa3d0000403f0000003f0000403fabaaaa3d0000403f0000003f0000403f",
    BlockMean(block=4, dims=1, bits=2, group=1024, faithful=True): "003f203f003f203f ec5a05bc5a05 a0bf563fa0bf563f",
    Projection(rank=2, bits=0): "0000403e0000c0bd0000403e0000c0bd",
}


def _golden_input() -> Tensor:
    return (torch.arange(22, dtype=torch.float32) * 7 % 11 - 3).view(1, 2, 11) / 4


@pytest.mark.parametrize("codec", GOLDEN, ids=_ids)
def test_golden_bytes(codec: Codec) -> None:
    packed = codec.encode(_golden_input(), key=0x0123456789ABCDEF)
    assert " ".join(b.hex() for b in bytes_of(packed)) == GOLDEN[codec]


def test_golden_bytes_cover_the_format() -> None:
    assert {c.bits for c in GOLDEN if isinstance(c, GroupQuant)} == {1, 2, 3, 4, 7, 8}
    assert any(isinstance(c, BlockMean) for c in GOLDEN)


# ---------------------------------------------------------------- statistics


def _tolerance(variance: np.ndarray, largest: np.ndarray, count: int, tests: int) -> np.ndarray:
    """Bernstein: |mean of ``count`` draws| exceeds this in any of ``tests`` with chance below 1e-6.

    t = b L / (3 R) + sqrt((b L / (3 R))**2 + 2 v L / R), L = ln(2 * tests / 1e-6); near 6 standard errors.
    """
    log = math.log(2 * tests / 1e-6)
    linear = largest * log / (3 * count)
    return linear + np.sqrt(linear**2 + 2 * variance * log / count)


def _float_bias(x: np.ndarray, low: np.ndarray, step: np.ndarray, bits: int, dtype: torch.dtype) -> np.ndarray:
    """What rounding to floats may add: half a unit of the output, and of ``scaled + u`` in float32."""
    reach = np.abs(x) + np.abs(low) + step
    return reach * (_half_ulp(dtype) + 2.0**-23) + step * 2**bits * 2.0**-22


def _row_data(ratio: float, n: int, dtype: torch.dtype) -> Tensor:
    spread = torch.rand(n, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    spread[0], spread[1] = 0.0, 1.0
    return (spread - 0.5 if ratio == 0 else spread + ratio).to(dtype)


COPIES = 4000


@pytest.mark.parametrize(
    ("ratio", "dtype"),
    [
        *((r, torch.float32) for r in (0, 1, 100, 10000)),
        *((r, torch.bfloat16) for r in (0, 1)),
        *((r, torch.float16) for r in (0, 1, 100)),
    ],
    ids=str,
)
@pytest.mark.parametrize("bits", range(1, 9))
def test_group_quant_is_unbiased(bits: int, ratio: float, dtype: torch.dtype) -> None:
    """Mean and mean square of the error of each value against the stored low and step.

    A value at fraction p of its step has error variance p (1 - p) step**2, so at most a quarter of
    step**2. ``ratio`` is offset over range. Rows are groups of their own, with their own noise.
    """
    n = 29
    line = _row_data(ratio, n, dtype)
    packed = GroupQuant(bits, n).encode(line.expand(COPIES, n), key=12)
    out = packed.decode().double().numpy()
    head = replace(packed, meta=TensorMeta((1, n), (n, 1), dtype))
    head = replace(head, buffers=(packed.buffers[0][: _code_bytes(n, bits)], packed.buffers[1][:2]))
    _, low, step = (a.astype(np.float64) for a in _read(head, n, n, bits))
    x = line.double().numpy()
    error = out - x
    rounding = _float_bias(x, low, step, bits, dtype)
    assert (np.abs(error) <= step + rounding).all()

    p = (x - low) / step % 1.0
    variance = p * (1 - p) * step**2
    assert (variance <= step**2 / 4).all()
    assert (np.abs(error.mean(0)) <= _tolerance(variance, step, COPIES, n) + rounding).all()
    # Hoeffding for error**2 in [0, (step + rounding)**2]
    hoeffding = (step + rounding) ** 2 * math.sqrt(math.log(2 * n / 1e-6) / (2 * COPIES))
    extra = 2 * rounding * step + rounding**2
    assert (np.abs((error**2).mean(0) - variance) <= hoeffding + extra).all()
    assert ((error**2).mean(0) <= step**2 / 4 + hoeffding + extra).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ratio", [0, 1])
@pytest.mark.parametrize("bits", LEVELS)
def test_levels_are_unbiased(bits: int, ratio: float, dtype: torch.dtype) -> None:
    """Between levels a < b a value has error variance (x - a) (b - x), at most (b - a)**2 / 4.

    Rounding may add what even levels have, and that of the sum of intervals: 2**-23 for each, times their width.
    """
    n, top = 28, 2**bits - 1
    line = _row_data(ratio, n, dtype)
    packed = GroupQuant(bits, n, levels=LEVELS[bits]).encode(line.expand(COPIES, n), key=12)
    out = packed.decode().double().numpy()
    head = replace(packed, meta=TensorMeta((1, n), (n, 1), dtype))
    head = replace(head, buffers=(packed.buffers[0][: _code_bytes(n, bits)], packed.buffers[1][:2]))
    _, low, step = (a.astype(np.float64) for a in _read(head, n, n, bits))
    x = line.double().numpy()
    levels = low[0] + np.array(LEVELS[bits]) * top * step[0]
    at = np.clip(np.searchsorted(levels, x, side="right") - 1, 0, top - 1)
    below, above = levels[at], levels[at + 1]
    rounding = _float_bias(x, low, step, bits, dtype) + (above - below) * top * 2.0**-23
    error = out - x
    assert (np.minimum(np.abs(out - below), np.abs(out - above)) <= rounding).all()
    variance = (x - below) * (above - x)
    width = above - below
    assert (np.abs(error.mean(0)) <= _tolerance(variance, width, COPIES, n) + rounding).all()
    hoeffding = (width + rounding) ** 2 * math.sqrt(math.log(2 * n / 1e-6) / (2 * COPIES))
    extra = 2 * rounding * width + rounding**2
    assert (np.abs((error**2).mean(0) - variance) <= hoeffding + extra).all()
    assert ((error**2).mean(0) <= width**2 / 4 + hoeffding + extra).all()


def _assert_uniform(error: np.ndarray, step: np.ndarray, rounding: np.ndarray) -> None:
    """Errors (draws, values) are at most half a step, and their first two moments those of a uniform distribution.

    The square of such an error has the mean step**2 / 12 and the variance step**4 (1/80 - 1/144) = step**4 / 180.
    """
    draws, n = error.shape
    assert (np.abs(error) <= step / 2 + rounding).all()
    assert (np.abs(error.mean(0)) <= _tolerance(step**2 / 12, step / 2, draws, n) + rounding).all()
    allowed = _tolerance(step**4 / 180, step**2 / 4, draws, n) + rounding * step + rounding**2
    assert (np.abs((error**2).mean(0) - step**2 / 12) <= allowed).all()


@pytest.mark.parametrize(
    ("ratio", "dtype"), [*((r, torch.float32) for r in (0, 1, 100)), *((0, d) for d in FLOATS[1:])], ids=str
)
@pytest.mark.parametrize("bits", range(1, 9))
def test_dithered_errors_are_uniform(bits: int, ratio: float, dtype: torch.dtype) -> None:
    """Whatever the value: the last ones lie on levels, where rounding without dither is exact."""
    n = 29
    line = _row_data(ratio, n, dtype)
    levels = min(2**bits, 8)
    line[-levels:] = (torch.arange(levels) / (2**bits - 1) + ratio - (0.5 if ratio == 0 else 0)).to(dtype)
    codec = GroupQuant(bits, n, dither=True)
    packed = codec.encode(line.expand(COPIES, n), key=12)
    assert bytes_of(packed) == bytes_of(replace(codec, dither=False).encode(line.expand(COPIES, n), key=12))
    head = replace(packed, meta=TensorMeta((1, n), (n, 1), dtype))
    head = replace(head, buffers=(packed.buffers[0][: _code_bytes(n, bits)], packed.buffers[1][:2]))
    _, low, step = (a.astype(np.float64) for a in _read(head, n, n, bits))
    x = line.double().numpy()
    _assert_uniform(packed.decode().double().numpy() - x, step, _float_bias(x, low, step, bits, dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_dithered_blocks_have_uniform_errors(bits: int, dtype: torch.dtype) -> None:
    image = (torch.randn(1, 1, 5, 6, generator=torch.Generator().manual_seed(11)) + 10).to(dtype)
    codec = BlockMean(4, 2, bits, dither=True)
    packed = codec.encode(image.expand(COPIES, 1, 5, 6), key=13)
    assert bytes_of(packed) == bytes_of(replace(codec, dither=False).encode(image.expand(COPIES, 1, 5, 6), key=13))
    x, words = image.double().view(30).numpy(), packed.buffers[2].numpy().view(np.uint16)[:2]
    low, step = (np.full(30, v, np.float64) for v in _bfloat(words))
    rounding = _float_bias(x, low, step, bits, dtype) + np.abs(x) * 2.0**-22
    _assert_uniform(packed.decode().double().view(COPIES, 30).numpy() - x, step, rounding)


@pytest.mark.parametrize("codec", [GroupQuant(2), BlockMean(4)], ids=_ids)
def test_dither_needs_the_key_of_the_encoding(codec: GroupQuant | BlockMean) -> None:
    x = torch.randn(2, 3, 9, 10, generator=torch.Generator().manual_seed(14))
    plain, packed = codec.encode(x, key=-5), replace(codec, dither=True).encode(x, key=-5)
    assert (plain.key, packed.key) == (0, -5)
    assert not torch.equal(packed.decode(), replace(packed, key=-6).decode())
    assert float((packed.decode() - x).square().mean()) < 0.7 * float((plain.decode() - x).square().mean())
    assert (str(plain.codec), str(packed.codec)) == (f"{codec.id}(2 bits)", f"{codec.id}(2 bits, dithered)")
    config = packed.codec.to_config()
    assert codecs.from_config({k: v for k, v in config.items() if k != "dither"}) == codec


@pytest.mark.parametrize("codec", [GroupQuant(2, 16), BlockMean(3, 2, 2)], ids=_ids)
def test_unbiased_over_keys(codec: GroupQuant | BlockMean) -> None:
    """The same over keys rather than rows: error of the mean over 3000 keys, step from the side words."""
    x = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(9))
    keys = torch.randint(-(2**62), 2**62, (3000,), generator=torch.Generator().manual_seed(10)).tolist()
    total = torch.zeros(x.shape, dtype=torch.float64)
    for key in keys:
        packed = codec.encode(x, key=key)
        total += packed.decode()
    row, group = (4, 16) if isinstance(codec, GroupQuant) else (40, 1024)
    _, _, step = (a.reshape(x.shape).astype(np.float64) for a in _read(packed, row, group, 2))
    bias = (total / len(keys) - x).abs().numpy()
    assert (bias <= _tolerance(step**2 / 4, step, len(keys), x.numel()) + 1e-6).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_block_mean_is_unbiased(bits: int, dtype: torch.dtype) -> None:
    """Samples are rows with their own groups; offset 100 must cancel against the rounded means."""
    image = (torch.randn(1, 1, 5, 6, generator=torch.Generator().manual_seed(11)) + 100).to(dtype)
    packed = BlockMean(4, 2, bits).encode(image.expand(COPIES, 1, 5, 6), key=13)
    out = packed.decode().double().view(COPIES, 30).numpy()
    codes = _code_bytes(30, bits)
    head = replace(
        packed,
        meta=TensorMeta((1, 30), (30, 1), dtype),
        buffers=(packed.buffers[1][:codes], packed.buffers[2][:2]),
    )
    _, low, step = (a.astype(np.float64) for a in _read(head, 30, 30, bits))
    x = image.double().view(30).numpy()
    means = packed.buffers[0][:4].double().view(2, 2)
    spread = means.repeat_interleave(4, 0).repeat_interleave(4, 1)[:5, :6].reshape(30).numpy()
    p = (x - spread - low) / step % 1.0
    variance = p * (1 - p) * step**2
    rounding = _float_bias(x, low, step, bits, dtype) + np.abs(spread) * 2.0**-23
    error = out - x
    assert (np.abs(error) <= step + rounding).all()
    assert (np.abs(error.mean(0)) <= _tolerance(variance, step, COPIES, 30) + rounding).all()


ORDERS = {
    "contiguous": (0, 1, 2, 3),
    "channels last": (0, 2, 3, 1),
    "columns outermost": (3, 0, 1, 2),
    "rows innermost": (0, 1, 3, 2),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize(
    "codec",
    [
        GroupQuant(2, 256, "sample"),
        GroupQuant(4, 12),
        GroupQuant(2, 200, "channel"),
        SampleQuant(7, 3),
        BlockMean(8, 2, 2),
        BlockMean(3, 2, 4),
    ],
    ids=_ids,
)
@pytest.mark.parametrize("shape", [(3, 8, 16, 24), (3, 5, 7, 11)], ids=str)
def test_a_rectified_tensor_keeps_its_zeros_in_any_order(
    codec: Codec, shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Bytes and support are those of a mask made apart, and what is zero stays zero where it is."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(5)).relu().to(dtype)
    values[0, 0, 0, :3] = torch.tensor([-0.0, -1.0, 2.0**-20])
    x = values.permute(order).contiguous().permute([order.index(d) for d in range(4)])
    if isinstance(codec, SampleQuant) and order[0] != 0:
        with pytest.raises(ValueError, match="outermost"):
            codec.encode_rectified(x, key=3)
        return
    mask = Mask().encode(x, key=0)
    packed, support = codec.encode_rectified(x, key=3)
    assert torch.equal(support, mask.buffers[0])
    apart = codec.encode(x, key=3, support=support)
    assert packed.meta == apart.meta
    for ours, theirs in zip(packed.buffers, apart.buffers, strict=True):
        assert torch.equal(ours, theirs)
    out = packed.decode(support)
    assert out.stride() == x.stride()
    assert bool((out[x <= 0] == 0).all())
    inside = (x > 0) & (out == 0)  # a mean and a difference may cancel, but that is rare
    assert float(inside.double().mean()) < 0.01


def _draws(key: int, groups: int, n: int, bits: int = 2) -> Tensor:
    return reference._thresholds(reference._group_hash(0, groups, key, torch.device("cpu")), n, bits) - 2**bits


def _chi_square(bins: Tensor, count: int) -> None:
    """Mean k - 1, variance 2 (k - 1): within 6 standard deviations."""
    found = torch.bincount(bins.flatten(), minlength=count).double()
    expected = bins.numel() / count
    statistic = float(((found - expected) ** 2 / expected).sum())
    assert abs(statistic - (count - 1)) <= 6 * math.sqrt(2 * (count - 1))


@pytest.mark.parametrize("bits", [1, 2, 8])
@pytest.mark.parametrize("key", [0, 1, -1, 0x0123456789ABCDEF])
def test_thresholds_are_uniform(key: int, bits: int) -> None:
    """Top byte over all draws, and the dither below it over groups (one draw for each group)."""
    u = _draws(key, 4096, 64, bits)
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    dither = 15 - bits
    grid = (u.double() * 2 ** (8 + dither)).long()
    assert torch.equal(grid.double() * 2.0 ** -(8 + dither), u.double())
    _chi_square(grid >> dither, 256)
    _chi_square((grid[:, 0] >> (dither - 7)) & 0x7F, 128)
    _chi_square(grid[:, 0] & 0x7F, 128)
    grid = (u.double() * 2**24).long()
    pairs = (grid[:, 0::2] >> 20) * 16 + (grid[:, 1::2] >> 20)
    _chi_square(pairs, 256)
    words = (grid[:, :16] >> 20) * 16 + (grid[:, 16:32] >> 20)  # two bytes of one hash
    _chi_square(words, 256)


def test_thresholds_are_independent() -> None:
    """Correlation of n independent pairs has standard deviation 1 / sqrt(n)."""
    u, other = _draws(3, 4096, 64), _draws(0x5DEECE66D1234567, 4096, 64)
    neighbours = [(u[:, :-lag], u[:, lag:]) for lag in (1, 2, 3, 4, 8, 15, 16, 17, 32, 48)]
    neighbours += [(u[:-1], u[1:]), (u, other), (u[:-1], u[1:].flip(1))]
    for a, b in neighbours:
        pair = torch.stack([a.flatten(), b.flatten()]).double()
        assert abs(float(torch.corrcoef(pair)[0, 1])) <= 5 / math.sqrt(pair.shape[1])


# ---------------------------------------------------------------- groups and their borders


@pytest.mark.parametrize("bits", range(1, 9))
def test_rows_do_not_touch_each_other(bits: int) -> None:
    x = torch.randn(3, 5, 37, generator=torch.Generator().manual_seed(12))
    y = x.clone()
    y[1, 2] = y[1, 2].flip(0) * 3 + 1
    codec = GroupQuant(bits, 16, "row")
    for a, b in zip(codec.encode(x, key=14).buffers, codec.encode(y, key=14).buffers, strict=True):
        same = (a.view(15, -1) == b.view(15, -1)).all(1)
        assert same.tolist() == [r != 7 for r in range(15)]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("codec", [GroupQuant(2, 16, "sample"), BlockMean(4, 2, 2, 64)], ids=_ids)
def test_samples_do_not_touch_each_other(codec: Codec, form: torch.memory_format) -> None:
    x = torch.randn(4, 3, 9, 7, generator=torch.Generator().manual_seed(13)).contiguous(memory_format=form)
    y = x.clone()
    y[2] = y[2].flip(0) * 3 + 1
    for a, b in zip(codec.encode(x, key=15).buffers, codec.encode(y, key=15).buffers, strict=True):
        same = (a.view(4, -1) == b.view(4, -1)).all(1)
        assert same.tolist() == [True, True, False, True]


CHANNELS = [
    (5, 19, 7, 7),
    (3, 4, 14, 14),
    (2, 3, 20, 17),
    (40, 5, 3, 3),
    (3, 33, 9, 11),
    (1, 16, 2, 2),
    (13, 7),
    (6, 20, 5),
]


@pytest.mark.parametrize("form", ["contiguous", "channels last"])
@pytest.mark.parametrize("shape", CHANNELS, ids=str)
@pytest.mark.parametrize("group", [256, 40])
def test_groups_follow_channels(shape: tuple[int, ...], form: str, group: int) -> None:
    """Each group has the range of what its channel has of a block, found by a plain loop over the tensor in memory.

    The low word is the largest bfloat16 not above the smallest value, the step the smallest that reaches the largest.
    """
    x = torch.randn(shape, generator=torch.Generator().manual_seed(61)) * (1 + torch.arange(shape[1])).view(
        1, -1, *[1] * (len(shape) - 2)
    )
    if form == "channels last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
        lines = x.movedim(1, -1).reshape(-1, shape[1], 1)
    else:
        lines = x.reshape(shape[0], shape[1], -1)
    outer, channels, inner = lines.shape
    step = max(1, _block(inner, group) if inner <= group else 1)
    wanted = []
    for first in range(0, outer, step) if inner < group else range(outer):
        for channel in range(channels):
            if inner < group:
                wanted.append(lines[first : first + step, channel].reshape(-1))
            else:
                wanted.extend(lines[first, channel].split(group))
    codec = GroupQuant(8, group, "channel")
    packed = codec.encode(x, key=62)
    low, width = _bfloat(packed.buffers[1].numpy().view(np.uint16)).reshape(-1, 2).astype(np.float64).T
    assert len(low) == len(wanted)
    assert packed.nbytes == x.numel() + 4 * len(wanted) == codec.packed_nbytes(TensorMeta.of(x))
    for words, values, start, size in zip(packed.buffers[1].view(-1, 2), wanted, low, width, strict=True):
        smallest, largest = (float(v) for v in values.aminmax())
        if smallest == largest:
            assert int(words[1]) < 0  # a constant, which has no step
            continue
        assert start <= smallest <= start + abs(start) * 2.0**-7
        assert (largest - start) / 255 <= size * (1 + 2.0**-20)
        assert size <= (largest - start) / 255 * (1 + 2.0**-6)
    out = packed.decode()
    assert out.stride() == x.stride()
    reach = (x.abs().amax(dim=[d for d in range(x.dim()) if d != 1], keepdim=True) * 2 / 255) * (1 + 2.0**-6)
    assert bool(((out - x).abs() <= reach).all())


def test_channels_of_their_own_have_smaller_errors() -> None:
    """Channels whose spreads differ by 2**7: across them a group has the widest one's step for all."""
    spread = 2.0 ** torch.linspace(0, 7, 32)
    x = torch.randn(4, 32, 16, 16, generator=torch.Generator().manual_seed(63)) * spread.view(1, -1, 1, 1)
    x = x.contiguous(memory_format=torch.channels_last)
    error = {}
    for layout in ("sample", "channel"):
        out = GroupQuant(4, 256, layout, dither=True).encode(x, key=64).decode()
        error[layout] = float(((out - x).square().mean((0, 2, 3)) / spread.square()).mean())
    assert error["channel"] < error["sample"] / 20


def test_layouts_differ_where_they_should() -> None:
    meta = TensorMeta((4, 3, 10), (30, 10, 1), torch.float32)
    groups = {"row": 12 * 2, "sample": 4 * 4, "flat": 15, "channel": 12 * 2}
    for layout, count in groups.items():
        assert GroupQuant(8, 8, layout).packed_nbytes(meta) == 120 + 4 * count


# ---------------------------------------------------------------- casts


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FP8)
def test_cast_scales_each_group(name: str, dtype: torch.dtype) -> None:
    """Groups of very different size keep their own precision: half a unit of the type for each value.

    The scale is the next bfloat16 at or above the largest over the type's largest, so within 2**-7 of it.
    """
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(33)) * torch.logspace(-3, 3, 40)
    x[1, 16:32], x[2, 3], x[3, 39] = 0.0, math.nan, -math.inf
    x = x.to(dtype)
    packed = Cast(name, 16).encode(x, key=0)
    values, scales = packed.buffers
    assert (values.dtype, scales.dtype, scales.shape) == (getattr(torch, name), torch.bfloat16, (15,))
    info, out = torch.finfo(values.dtype), packed.decode()
    for r, start in itertools.product(range(5), range(0, 40, 16)):
        part, scale = x[r, start : start + 16].double(), float(scales[3 * r + start // 16])
        back, largest = out[r, start : start + 16].double(), float(part.abs().max())
        if not math.isfinite(largest):
            assert math.isnan(scale)
            assert bool(back.isnan().all())
        elif largest == 0:
            assert scale == 1
            assert bool((back == 0).all())
        else:
            needed = largest / info.max
            assert needed * (1 - 2.0**-23) <= scale <= needed * (1 + 2.0**-7)
            unit = (part.abs() / scale).clamp_min(info.smallest_normal).log2().floor().exp2() * info.eps * scale
            slack = back.abs() * _half_ulp(dtype) + largest * 2.0**-22
            assert bool(((back - part).abs() <= unit / 2 + slack).all())


@pytest.mark.parametrize("name", FP8)
def test_cast_with_one_scale(name: str) -> None:
    x = torch.randn(3, 5000, generator=torch.Generator().manual_seed(34))
    values, scale = Cast(name).encode(x, key=0).buffers
    target = getattr(torch, name)
    assert torch.equal(scale, (x.abs().max() / torch.finfo(target).max).view(1))
    assert torch.equal(values.float(), (x / scale).to(target).float().view(-1))


# ---------------------------------------------------------------- bits for each sample


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_sample_has_the_bytes_of_its_bits(dtype: torch.dtype, form: torch.memory_format) -> None:
    x = torch.randn(8, 3, 9, 7, generator=torch.Generator().manual_seed(30)).to(dtype).contiguous(memory_format=form)
    x[2, 1, 1, 1], x[3] = math.nan, 0.1
    x *= torch.tensor([1, 0.1, 1, 1, 9, 2, 30, 1]).view(-1, 1, 1, 1).to(dtype)
    codec, support = SampleQuant(32, 8, 2, 50), _support(x)
    for given in (None, support):
        packed = codec.encode(x, key=31, support=given)
        codes, side, kept = packed.buffers
        bits = kept.tolist()
        assert sum(bits) == 32
        assert len(set(bits)) > 2
        out, at = packed.decode(given), 0
        for n, width in enumerate(bits):
            alone = GroupQuant(width, 50, "sample").encode(x, key=31, support=given)
            size = 3 * _code_bytes(50, width) + _code_bytes(39, width)
            assert torch.equal(codes[at : at + size], alone.buffers[0][n * size : (n + 1) * size])
            assert torch.equal(side[8 * n : 8 * n + 8], alone.buffers[1][8 * n : 8 * n + 8])
            assert same_bits(out[n], alone.decode(given)[n])
            at += size
        assert not codes[at:].any()
        assert packed.nbytes == len(codes) + 8 * 4 * 4 + 8 == codec.packed_nbytes(packed.meta)
        assert len(codes) - at < 4 * 8  # rows of 189 values leave up to 7 bits of each plane of each short group
    equal = SampleQuant(16, 8, 2, 50).encode(x, key=31)
    assert bytes_of(equal)[:2] == bytes_of(GroupQuant(2, 50, "sample").encode(x, key=31))


@pytest.mark.parametrize("row", [1, 3, 8, 37, 64])
def test_codes_of_samples_have_room_for_every_division_of_the_bits(row: int) -> None:
    """The room is that of the worst division of the same bits, to the byte or a byte for each sample above it."""
    for least, samples, group in itertools.product((1, 3, 8), (1, 2, 3), (5, 16)):
        for total in range(least * samples, 8 * samples + 1):
            divisions = itertools.product(range(least, 9), repeat=samples)
            worst = max(sum(ops.row_bytes(row, group, b) for b in d) for d in divisions if sum(d) == total)
            meta = TensorMeta((samples, row), (row, 1), torch.float32)
            room = SampleQuant(total, samples, least, group).packed_nbytes(meta)
            room -= samples * (1 + 4 * ops.groups_in_row(row, group))
            assert worst <= room <= worst + 2 * samples * ops.groups_in_row(row, group)
            assert room == worst or row % 8 or group % 8


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_range_energy_by_brute_force(dtype: torch.dtype) -> None:
    """Five terms of a relative error of 2**-23 (a difference, a square) and five sums."""
    x = torch.randn(6, 97, generator=torch.Generator().manual_seed(32)).to(dtype)
    x[1, 3], x[2, 96], x[3, 0] = math.nan, math.inf, -math.inf
    x[4] = -1.0
    for positive in (False, True):
        found = ops.range_energy(x.view(-1), 97, 20, positive)
        for n in range(6):
            total = 0.0
            for start in range(0, 97, 20):
                some = [v for v in x[n, start : start + 20].tolist() if not (positive and v <= 0)]
                bad = any(not math.isfinite(v) for v in some)
                total += math.nan if bad else (max(some) - min(some)) ** 2 if some else 0.0
            assert math.isnan(total) == (n in ((1, 2) if positive else (1, 2, 3)))
            assert math.isnan(found[n]) == math.isnan(total)
            assert math.isnan(total) or math.isclose(found[n], total, rel_tol=12 * 2.0**-23)


# ---------------------------------------------------------------- block means


def _brute_means(x: Tensor, block: int, dims: int) -> Tensor:
    """Means over blocks of the last ``dims`` dimensions by plain loops in double precision."""
    lead, sizes = x.shape[: x.dim() - dims], x.shape[x.dim() - dims :]
    blocks = [math.ceil(s / block) for s in sizes]
    out = torch.empty(*lead, *blocks, dtype=torch.float64)
    for outer in itertools.product(*(range(s) for s in lead)):
        for at in itertools.product(*(range(b) for b in blocks)):
            cells = itertools.product(
                *(range(a * block, min(s, (a + 1) * block)) for a, s in zip(at, sizes, strict=True))
            )
            values = [float(x[(*outer, *cell)]) for cell in cells]
            out[(*outer, *at)] = math.fsum(values) / len(values)
    return out


def _spread(low: Tensor, block: int, shape: torch.Size, dims: int) -> Tensor:
    for d in range(len(shape) - dims, len(shape)):
        low = low.repeat_interleave(block, d).narrow(d, 0, shape[d])
    return low


BLOCKS = [
    ((2, 3, 21), 8, 1),
    ((2, 2, 9, 10), 4, 2),
    ((1, 2, 5, 7, 6), 3, 3),
    ((2, 2, 8, 8), 4, 2),
    ((7, 5), 3, 2),
]


@pytest.mark.parametrize(("shape", "block", "dims"), BLOCKS, ids=str)
def test_block_means_by_brute_force(shape: tuple[int, ...], block: int, dims: int) -> None:
    """bfloat16 means within half a unit (2**-8) and the rounding of float32 sums; exact differences."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(14)) + 0.5
    codec = BlockMean(block, dims, 2, 32)
    packed = codec.encode(x, key=16)
    means = _brute_means(x, block, dims)
    low = packed.buffers[0].view(means.shape)
    assert low.dtype == torch.bfloat16
    slack = block**dims * 2.0**-24 * float(x.abs().max())
    assert bool(((low.double() - means).abs() <= means.abs() * 2.0**-8 + slack).all())
    # the difference is to the rounded mean, quantized in groups within a sample
    residual = x - _spread(low.float(), block, x.shape, dims)
    inner = GroupQuant(2, 32, "sample").encode(residual, key=16)
    assert bytes_of(inner) == bytes_of(packed)[1:]
    wanted = _spread(low.float(), block, x.shape, dims) + inner.decode()
    assert torch.equal(packed.decode(), wanted)


def test_channels_last_has_the_same_means() -> None:
    x = torch.randn(2, 3, 9, 10, generator=torch.Generator().manual_seed(15))
    for bits in (0, 2):
        codec = BlockMean(4, 2, bits)
        plain, last = codec.encode(x, key=17), codec.encode(x.contiguous(memory_format=torch.channels_last), key=17)
        assert torch.equal(plain.buffers[0].view(2, 3, 3, 3), last.buffers[0].view(2, 3, 3, 3).permute(0, 3, 1, 2))
    volume = torch.randn(2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(15))
    codec = BlockMean(3, 3, 2)
    plain = codec.encode(volume, key=17)
    last = codec.encode(volume.contiguous(memory_format=torch.channels_last_3d), key=17)
    low = last.buffers[0].view(2, 2, 2, 2, 3).permute(0, 4, 1, 2, 3)
    assert torch.equal(plain.buffers[0].view(2, 3, 2, 2, 2), low)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_bits_is_pooling(dtype: torch.dtype, form: torch.memory_format) -> None:
    x = torch.randn(2, 3, 9, 10, generator=torch.Generator().manual_seed(16)).to(dtype)
    out = BlockMean(4, 2, 0).encode(x.contiguous(memory_format=form), key=0).decode()
    pooled = F.avg_pool2d(x.double(), 4, 4, ceil_mode=True, count_include_pad=False)
    wanted = _spread(pooled, 4, x.shape, 2)
    assert torch.allclose(out.double(), wanted, rtol=2 * _half_ulp(dtype), atol=2e-6)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [28, 14, 7, 4])
def test_faithful_follows_the_paper(size: int, bits: int) -> None:
    """Floor-mode average pooling, nearest upsampling, the residual quantized with one range for a map."""
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(17)) + 0.5
    codec = BlockMean(8, 2, bits, faithful=True)
    packed = codec.encode(x, key=18)
    kernel = min(8, size)
    low = F.avg_pool2d(x, kernel, kernel).bfloat16()
    assert torch.equal(packed.buffers[0].view_as(low), low)
    upsampled = F.interpolate(low.float(), size=(size, size), mode="nearest")
    area = size * size
    _, base, step = (a.reshape(6, area) for a in _read(packed, area, area, bits))
    residual = (x - upsampled).view(6, area).double().numpy()
    smallest, top = residual.min(1), 2**bits - 1
    assert (base == base[:, :1]).all()
    assert (step == step[:, :1]).all()
    assert (base[:, 0] <= smallest).all()
    assert (smallest - base[:, 0] <= np.abs(base[:, 0]) * 2.0**-7).all()
    assert (step[:, 0] <= (residual.max(1) - base[:, 0]) / top * (1 + 2.0**-7)).all()
    error = (packed.decode() - x).view(6, area).double().numpy()
    assert (np.abs(error) <= step * (1 + 2.0**-16) + 1e-6).all()
    assert np.abs(error).mean() > 0.05 * step.mean()  # and coarse as the range says, not finer
    predicted = 6 * (2 * (size // kernel) ** 2 + _code_bytes(area, bits) + 4)
    assert packed.nbytes == predicted == codec.packed_nbytes(TensorMeta.of(x))


# ---------------------------------------------------------------- rectified tensors


def _support(x: Tensor) -> Tensor:
    return Mask().encode(x, key=0).buffers[0]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("codec", [c for c in ROUNDED if not getattr(c, "faithful", False)], ids=_ids)
def test_support_restores_zeros(codec: Codec, dtype: torch.dtype, form: torch.memory_format) -> None:
    x = torch.randn(2, 3, 4, 9, 10, generator=torch.Generator().manual_seed(18))
    if form == torch.channels_last:
        form = torch.channels_last_3d
    x = torch.where(x > 0, x + 1, 0).to(dtype).contiguous(memory_format=form)
    x[1, 1] = 0
    support = _support(x)
    packed = codec.encode(x, key=19, support=support)
    out = packed.decode(support)
    assert packed.nbytes == codec.packed_nbytes(TensorMeta.of(x))
    assert bool((out[x == 0] == 0).all())
    plain = codec.encode(x, key=19).decode()
    kept = x > 0
    assert float((out - x)[kept].square().mean()) < float((plain - x)[kept].square().mean())
    assert bool(((out.double() - x.double()).abs() <= _bound(codec, x)).all())


@pytest.mark.parametrize("bits", range(1, 9))
def test_support_is_unbiased_and_tight(bits: int) -> None:
    """Positive values lie in [1, 2]: the range covers those alone, and rounding stays unbiased."""
    n = 24
    line = torch.rand(n, generator=torch.Generator().manual_seed(20)) + 1
    line[::3] = 0
    x = line.expand(COPIES, n).contiguous()
    support = _support(x)
    packed = GroupQuant(bits, n).encode(x, key=21, support=support)
    out = packed.decode(support).double().numpy()
    words = packed.buffers[1].numpy().view(np.uint16)[:2]
    low, step = (float(v) for v in _bfloat(words))
    positive = line[line > 0].double().numpy()
    assert positive.min() - low <= low * 2.0**-7
    assert low <= positive.min()
    assert step <= (positive.max() - low) / (2**bits - 1) * (1 + 2.0**-7)
    error = (out - line.double().numpy())[:, line.numpy() > 0]
    p = (positive - low) / step % 1.0
    variance = p * (1 - p) * step**2
    allowed = _tolerance(variance, np.full_like(p, step), COPIES, n) + 2.0**-22 * 2**bits
    assert (np.abs(error.mean(0)) <= allowed).all()
    assert (out[:, line.numpy() == 0] == 0).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_support_keeps_nan_and_constants(bits: int) -> None:
    x = torch.tensor([[0.0, 0.1, 0.1, 0.0], [0.0, math.nan, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0], [0, math.inf, 1, 2]])
    support = _support(x)
    out = GroupQuant(bits, 4).encode(x, key=22, support=support).decode(support)
    assert torch.equal(out[0], x[0])
    assert torch.equal(out[2], x[2])
    for row in (1, 3):
        assert out[row, 0] == 0
        assert bool(out[row, 1:].isnan().all())


# ---------------------------------------------------------------- operators

_flat = torch.linspace(-1, 1, 120)
_codes, _side = reference.quantize_groups(_flat, 40, 16, 2, 1, False)
_low, _bcodes, _bside = reference.quantize_blocks(_flat, (2, 1, 6, 5, 2), 4, 60, 16, 2, 1, False)
_levels = torch.tensor([0.0, 0.7, 1.5, 3.0])
_mask = reference.pack_band(_flat, 0.0, math.inf, False, True)
_numbers = torch.arange(120) % 4
_geometry = (2, 1, 6, 5, 2)
_bits = torch.tensor([1, 3, 8], dtype=torch.uint8)
_positions = torch.arange(40) % 9
_scodes, _sside = reference.quantize_samples(_flat, _bits, 70, 16, 1, False)
_FP8 = tuple(getattr(torch, n) for n in FP8)
_tiles = reference.quantize_channels(_flat, (20, 6, 1), 16, 2, 1, False)
CALLS = {
    "quantize_groups": [(_flat.to(d), 40, 16, 2, 1, p) for d in FLOATS for p in (False, True)]
    + [(_flat, 120, 120, 8, -1, False), (_flat[:0], 0, 16, 2, 1, False), (_flat, 40, 16, 2, 1, False, _levels)],
    "dequantize_groups": [
        (_codes, _side, 120, 40, 16, 2, d, s, t, k)
        for d in FLOATS
        for s in (None, _mask)
        for t, k in ((None, None), (_levels, None), (None, 1))
    ],
    "quantize_blocks": [
        (_flat.to(d), _geometry, 4, 60, 16, 2, 1, p, t) for d in FLOATS for p in (False, True) for t in (None, _levels)
    ],
    "dequantize_blocks": [
        (_low, _bcodes, _bside, _geometry, 4, 60, 16, 2, d, s, t, k)
        for d in FLOATS
        for s in (None, _mask)
        for t, k in ((None, None), (_levels, None), (None, 1))
    ],
    "quantize_channels": [
        (_flat.to(d), g, 16, 2, 1, p, t)
        for d in FLOATS
        for p in (False, True)
        for g, t in (((20, 6, 1), None), ((5, 6, 4), _levels), ((3, 2, 20), None))
    ]
    + [(_flat[:0], (0, 3, 2), 16, 2, 1, False)],
    "dequantize_channels": [
        (*reference.quantize_channels(_flat, g, 16, 2, 1, False), g, 16, 2, d, s, t, k)
        for d in FLOATS
        for s in (None, _mask)
        for g in ((20, 6, 1), (5, 6, 4), (3, 2, 20))
        for t, k in ((None, None), (_levels, None), (None, 1))
    ],
    "quantize_samples": [(_flat.to(d), _bits, 70, 16, 1, p) for d in FLOATS for p in (False, True)],
    "dequantize_samples": [(_scodes, _sside, _bits, 120, 16, d, s) for d in FLOATS for s in (None, _mask)],
    "cast_groups": [(_flat.to(d), 40, 16, t, s) for d in FLOATS for t in _FP8 for s in (None, torch.ones(1))]
    + [(_flat[:0], 0, 16, torch.float8_e5m2)],
    "uncast_groups": [(*reference.cast_groups(_flat, 40, 16, t), 40, 16, d) for d in FLOATS for t in _FP8],
    "range_energy": [(_flat.to(d), 40, 16, p) for d in FLOATS for p in (False, True)] + [(_flat[:0], 0, 16, False)],
    "block_means": [(_flat.to(d), _geometry, b, d) for d in FLOATS for b in (1, 4, 8)],
    "spread_blocks": [(_low, _geometry, 4, d) for d in FLOATS] + [(_flat, _geometry, 1, torch.float32)],
    "rebuild_affine": [
        (_flat.clone().to(d), g, torch.ones(3), torch.ones(3), o, s)
        for d in FLOATS
        for g in ((4, 3, 10), (40, 3, 1))
        for o in (None, _flat.to(d))
        for s in (None, _mask)
    ],
    "rebuild_chain": [
        (
            *([part] * 2 for part in reference.quantize_channels(_flat, g, 16, 2, 1, False)),
            *(g, 16, [2, 2], d, [s, None], [1, 1], [k, True], *[[torch.ones(6)] * 2] * 2, o, [None, s]),
        )
        for d in FLOATS
        for g in ((20, 6, 1), (1, 6, 20))
        for s in (None, _mask)
        for k in (False, True)
        for o in (None, _flat.to(d))
    ],
    "norm_backward": [
        (_flat, None, *_tiles, (20, 6, 1), (), 0, 0, 16, 2, 1, torch.ones(6), torch.ones(6), w)
        for w in (None, torch.ones(6))
    ],
    "norm_backward_": [
        (_flat.clone(), None, *_tiles, (20, 6, 1), (), 0, 0, 16, 2, 1, torch.ones(6), torch.ones(6), None),
    ],
    "pack_band": [(_flat.to(d), -0.5, 0.5, True, False) for d in FLOATS] + [(_flat > 0, 0.0, 1.0, False, True)],
    "unpack_band": [(_mask, 120, d, 1.0, 0.0) for d in (*FLOATS, torch.bool)],
    "mask_values": [(_flat.to(d), _mask) for d in FLOATS],
    "mask_values_": [(_flat.clone().to(d), _mask) for d in FLOATS],
    "pack_uints": [(_numbers, 0, b) for b in (2, 4, 8, 16, 32)] + [(_numbers.int()[:7], -1, 4)],
    "pack_taps": [(_positions, torch.arange(4) * 2, i, torch.tensor([0, 1, 5]), 9, 2) for i in (1, 5)],
    "unpack_taps": [
        (reference.pack_uints(_positions % 3, 0, 2), 40, torch.arange(4) * 2, i, torch.tensor([0, 1, 5]), 2)
        for i in (1, 5)
    ],
    "unpack_uints": [
        (reference.pack_uints(_numbers, -3, b), 120, b, -3, d)
        for b in (4, 8, 16, 32)
        for d in (torch.int64, torch.int32)
    ],
}


def test_every_operator_is_called() -> None:
    assert set(CALLS) == set(ops.SCHEMAS)


def _tuple(x: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    return () if x is None else x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("name", CALLS)
def test_fakes_know_the_real_shapes(name: str) -> None:
    for args in CALLS[name]:
        real = _tuple(getattr(ops, name)(*args))
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            fakes = tree_map_only(Tensor, lambda a: mode.from_tensor(a, static_shapes=True), args)
            fake = _tuple(getattr(ops, name)(*fakes))
        assert [(f.shape, f.dtype, f.stride()) for f in fake] == [(r.shape, r.dtype, r.stride()) for r in real]


@pytest.mark.parametrize("name", CALLS)
def test_operators_keep_their_schema(name: str) -> None:
    """No autograd and no ahead-of-time graph goes through these, so two of opcheck's tests apply."""
    operator = getattr(torch.ops.lowtide, name).default
    # test_schema compares its inputs before and after by arithmetic, which torch does not have for 8-bit floats
    tests = ("test_faketensor",) if "cast" in name else ("test_schema", "test_faketensor")
    for args in CALLS[name]:
        torch.library.opcheck(operator, args, test_utils=tests)


@pytest.mark.parametrize("name", CALLS)
def test_reference_returns_fresh_memory(name: str) -> None:
    """A functional operator may not hand out its input; the reference serves where nothing faster does."""
    for args in CALLS[name]:
        taken = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor) and a.numel()}
        for out in _tuple(getattr(reference, name)(*args)):
            assert not out.numel() or out.untyped_storage().data_ptr() not in taken


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize(
    "family",
    [
        GroupQuant(group=64, layout="sample", dither=True),
        GroupQuant(dither=True),
        *(GroupQuant(group=g, layout="channel", dither=True) for g in (64, 450)),
        BlockMean(4, dither=True),
    ],
)
def test_the_energy_tells_the_error_of_every_number_of_bits(family, bits, positive, memory):
    torch.manual_seed(0)
    x = torch.randn(4, 16, 13, 16) * torch.rand(1, 16, 1, 1)
    x = (x.relu() if positive else x).contiguous(memory_format=memory)
    codec = replace(family, bits=bits)
    predicted = float(codec.energy(x, positive)) / (12 * (2**bits - 1) ** 2)
    found = 0.0
    for key in range(4):
        packed, support = codec.encode_rectified(x, key=key) if positive else (codec.encode(x, key=key), None)
        found += float((packed.decode(support) - x).square().sum(dtype=torch.float64)) / 4
    counted = int((x > 0).sum()) if positive else x.numel()
    # A uniform error's square spreads by sqrt(0.8) of its mean, groups' ranges differ by a factor of a few, and a step
    # is rounded up by at most a part in 128.
    assert found / predicted == pytest.approx(1.008, abs=0.008 + 5 * 2 * math.sqrt(0.8 / 4 / counted))
