"""The compiled kernels give the bytes of the reference, from any thread, and nothing breaks without them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fresh
from lowtide import kernels
from lowtide.kernels import backends, compiled, cpu, layout, native, ops, reference

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 2, 3, 5, 7, 8, 13, 64, 97, 255, 256, 257, 1000, 1021, 4096, 4097]
GROUPS = [1, 7, 64, 256, 1000]
NAN, INF = float("nan"), float("inf")
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(params=[1, 2, 5], ids=["1 thread", "2 threads", "5 threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Teams of so many threads for any tensor, which take few values at once, however busy the cores are."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(cpu, "_SMALL", 1)
    monkeypatch.setattr(cpu, "_GRAIN", 1000)
    monkeypatch.setattr(cpu, "_grain", lambda shape: 1)
    monkeypatch.setattr(cpu, "_LATE", 1 << 62)
    monkeypatch.setattr(cpu, "_teams", cpu._Teams())
    yield request.param
    torch.set_num_threads(before)


def assert_same(
    ours: Tensor | tuple[Tensor, ...] | None, truth: Tensor | tuple[Tensor, ...] | None, about: object
) -> None:
    """Equal to the bit; only which NaN a NaN is may differ (torch's own copies disagree about it)."""
    if truth is None:
        assert ours is None
        return
    if isinstance(truth, tuple):
        assert isinstance(ours, tuple)
        assert len(ours) == len(truth)
        for a, b in zip(ours, truth, strict=True):
            assert_same(a, b, about)
        return
    assert isinstance(ours, Tensor)
    assert ours.dtype == truth.dtype, about
    assert ours.shape == truth.shape, about
    if truth.dtype.is_floating_point:
        assert torch.equal(ours.isnan(), truth.isnan()), about
        ours, truth = (t.masked_fill(t.isnan(), 0.0).view(_INTS[t.dtype.itemsize]) for t in (ours, truth))
    wrong = (ours != truth).nonzero()
    assert wrong.numel() == 0, f"{about}: {len(wrong)} of {truth.numel()} differ, first at {wrong[0].tolist()}"


def sample(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + numel)
    return torch.randn(numel, generator=generator).mul_(3.0).to(dtype)


def special(dtype: torch.dtype) -> Tensor:
    """Rows of 97 values, each awkward in its own way."""
    x = sample(97 * 20, torch.float32).view(20, 97)
    x[0, 5] = NAN
    x[1, 96] = INF
    x[2, 0] = -INF
    x[3] = 0.0
    x[4] = -0.0
    x[5, ::2], x[5, 1::2] = 0.0, -0.0
    x[6] = 1.2345678
    x[7] = -1.2345678
    x[8] *= 1e-40
    x[9] *= 1e38
    x[10, :2] = torch.tensor([3e38, -3e38])
    x[11] = 3.4e38
    x[12] = -3.4028e38
    x[13].abs_().neg_()
    x[14] = x[14].clamp_max(0.0)
    x[15, 1:], x[15, 0] = 0.0, 1e-42
    x[16] = NAN
    x[17] = INF
    x[18] = x[18].round()
    x[19, 3:40] = -INF
    return x.view(-1).to(dtype)


def supports(x: Tensor, positive: bool) -> tuple[Tensor | None, Tensor | None]:
    """The bits of positive values, and room for a kernel to write them."""
    if not positive:
        return None, None
    support = reference.pack_band(x, 0.0, INF, False, True)
    return support, torch.full_like(support, 0xA5)


def check_groups(x: Tensor, row: int, group: int, bits: int, positive: bool, levels: Tensor | None = None) -> None:
    about = (x.dtype, x.numel(), row, group, bits, positive, levels)
    key = 0x1234567_89ABCDEF + row
    codes, side = reference.quantize_groups(x, row, group, bits, key, positive, levels)
    support, mask = supports(x, positive)
    assert_same(ops.quantize_groups(x, row, group, bits, key, positive, levels, mask), (codes, side), about)
    assert_same(mask, support, about)
    for dtype in {x.dtype, torch.float32}:
        shape = (codes, side, x.numel(), row, group, bits, dtype, support, levels)
        assert_same(ops.dequantize_groups(*shape), reference.dequantize_groups(*shape), about)
        if levels is None:
            assert_same(ops.dequantize_groups(*shape, key), reference.dequantize_groups(*shape, key), (about, "dither"))


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_groups(dtype: torch.dtype, bits: int, positive: bool) -> None:
    for row in ROWS:
        for group in GROUPS:
            check_groups(sample(3 * row, dtype), row, group, bits, positive)
    for group in (1, 7, 64, 1000):
        check_groups(special(dtype), 97, group, bits, positive)
    check_groups(special(dtype), 97 * 20, 256, bits, positive)


SIZES = [*range(1, 21), 255, 256, 257, 4097]


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("dtype", FLOATS)
def test_widths_of_several_planes(dtype: torch.dtype, bits: int, positive: bool) -> None:
    for row in SIZES:
        for group in (5, 256):
            check_groups(sample(3 * row, dtype), row, group, bits, positive)
    for group in (1, 7, 1000):
        check_groups(special(dtype), 97, group, bits, positive)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_widths_of_several_planes_in_threads(threads: int, bits: int) -> None:
    for dtype in FLOATS:
        check_groups(sample(3 * 33_333, dtype), 33_333, 256, bits, False)
        check_blocks(sample(20 * 3136, dtype), (20, 1, 56, 56, 1), 8, 3136, 256, bits)


def levels_of(bits: int) -> Tensor:
    """Levels at distances that are no round numbers, in units of a step."""
    generator = torch.Generator().manual_seed(bits)
    levels = (torch.rand(2**bits - 1, generator=generator, dtype=torch.float64) + 0.05).cumsum(0)
    return torch.cat([levels.new_zeros(1), levels / levels[-1] * (2**bits - 1)]).float()


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_levels(dtype: torch.dtype, bits: int, positive: bool) -> None:
    for row in SIZES:
        for group in (5, 256):
            check_groups(sample(3 * row, dtype), row, group, bits, positive, levels_of(bits))
    for group in (1, 7, 64, 1000):
        check_groups(special(dtype), 97, group, bits, positive, levels_of(bits))


@pytest.mark.parametrize("bits", [2, 3])
def test_levels_in_threads(threads: int, bits: int) -> None:
    for dtype in FLOATS:
        check_groups(sample(3 * 33_333, dtype), 33_333, 256, bits, False, levels_of(bits))
        check_blocks(sample(20 * 3136, dtype), (20, 1, 56, 56, 1), 8, 3136, 256, bits, levels_of(bits))
        check_blocks(special(dtype).repeat(2), (10, 1, 1, 388, 1), 8, 388, 64, bits, levels_of(bits))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_even_levels_change_nothing(bits: int) -> None:
    x, levels = sample(4096, torch.float32), torch.arange(2.0**bits)
    truth = reference.quantize_groups(x, 4096, 256, bits, 5, False)
    assert_same(ops.quantize_groups(x, 4096, 256, bits, 5, False, levels), truth, bits)


def check_channels(
    x: Tensor, geometry: tuple[int, ...], group: int, bits: int, positive: bool, levels: Tensor | None = None
) -> None:
    about, key = (x.dtype, geometry, group, bits, positive, levels), -(2**40) - 3
    codes, side = reference.quantize_channels(x, geometry, group, bits, key, positive, levels)
    support, mask = supports(x, positive)
    assert_same(ops.quantize_channels(x, geometry, group, bits, key, positive, levels, mask), (codes, side), about)
    assert_same(mask, support, about)
    for dtype in {x.dtype, torch.float32}:
        for own in (None,) if levels is not None else (None, key):
            shape = (codes, side, geometry, group, bits, dtype, support, levels, own)
            assert_same(ops.dequantize_channels(*shape), reference.dequantize_channels(*shape), (about, own))


CHANNELS = [
    # outer, channels, inner
    *((300, 16, 1), (257, 17, 1), (5, 3, 1), (1000, 24, 1), (513, 33, 1), (17, 40, 1), (15, 40, 1), (1, 1, 1)),
    *((12, 5, 49), (7, 3, 49), (20, 19, 9), (3, 4, 196), (2, 3, 300), (1, 7, 5), (40, 16, 4), (9, 24, 3)),
]


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_channels(dtype: torch.dtype, positive: bool) -> None:
    for i, geometry in enumerate(CHANNELS):
        x = sample(numel_of(geometry), dtype)
        for group in (256, 64, 7, 1):
            check_channels(x, geometry, group, 1 + (i + group) % 8, positive)
        check_channels(x, geometry, 256, 3, positive, levels_of(3))
    for geometry in ((20, 97, 1), (97, 20, 1), (10, 2, 97), (4, 97, 5)):
        for bits in range(1, 9):
            check_channels(special(dtype), geometry, 64, bits, positive)


@pytest.mark.parametrize("bits", [1, 3, 5, 7])
def test_planes_of_single_bits_that_are_not_even(bits: int) -> None:
    for inner in (124, 128, 132, 140, 196, 198, 248, 252):
        for dtype in FLOATS:
            check_channels(sample(2 * 3 * inner, dtype), (2, 3, inner), 256, bits, dtype is torch.float32)


@pytest.mark.parametrize("dtype", FLOATS)
def test_channels_in_threads(threads: int, dtype: torch.dtype) -> None:
    for geometry in ((3000, 40, 1), (70, 35, 49), (600, 17, 9)):
        for bits in (2, 5):
            check_channels(sample(numel_of(geometry), dtype), geometry, 256, bits, bits == 2)


def test_wrong_sizes_of_channels_raise() -> None:
    x = sample(1000, torch.float32)
    with pytest.raises(RuntimeError, match="1000 values are not 10 x 10 x 9"):
        ops.quantize_channels(x, (10, 10, 9), 256, 2, 0, False)
    codes, side = ops.quantize_channels(x, (10, 10, 10), 256, 2, 0, False)
    for wrong in ((codes[:-1], side), (codes, side[:-2])):
        with pytest.raises(RuntimeError, match=r"do not go with \(10, 10, 10\)"):
            ops.dequantize_channels(*wrong, (10, 10, 10), 256, 2, torch.float32, None)


def check_samples(x: Tensor, samples: int, group: int, positive: bool) -> None:
    about = (x.dtype, x.numel(), samples, group, positive)
    bits = (torch.arange(samples) * 5 % 8 + 1).to(torch.uint8)
    size = sum(ops.row_bytes(x.numel() // samples, group, b) for b in bits.tolist()) + samples % 3
    codes, side = reference.quantize_samples(x, bits, size, group, -77, positive)
    support, mask = supports(x, positive)
    assert_same(ops.quantize_samples(x, bits, size, group, -77, positive, mask), (codes, side), about)
    assert_same(mask, support, about)
    for dtype in {x.dtype, torch.float32}:
        shape = (codes, side, bits, x.numel(), group, dtype, support)
        assert_same(ops.dequantize_samples(*shape), reference.dequantize_samples(*shape), about)
    truth = reference.range_energy(x, x.numel() // samples, group, positive)
    assert_same(ops.range_energy(x, x.numel() // samples, group, positive), truth, about)


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_samples(dtype: torch.dtype, positive: bool) -> None:
    for row in SIZES:
        for group in (5, 256):
            check_samples(sample(9 * row, dtype), 9, group, positive)
    for group in (1, 7, 1000):
        check_samples(special(dtype), 20, group, positive)
        check_samples(special(dtype), 1, group, positive)


@pytest.mark.parametrize("dtype", FLOATS)
def test_samples_in_threads(threads: int, dtype: torch.dtype) -> None:
    for samples, row, group in ((3, 33_333, 256), (1, 99_991, 1000), (197, 101, 64), (2, 50_000, 1 << 20)):
        check_samples(sample(samples * row, dtype), samples, group, False)


def test_wrong_bits_of_samples_raise() -> None:
    x = sample(1000, torch.float32)
    for bits in ([2, 9], [0, 2], [2, 2, 2], []):
        with pytest.raises(RuntimeError, match="bits must be"):
            ops.quantize_samples(x, torch.tensor(bits, dtype=torch.uint8), 1000, 256, 0, False)
    good = torch.tensor([2, 3], dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="the codes of 2 samples take 313 bytes; there is room for 312"):
        ops.quantize_samples(x, good, 312, 256, 0, False)
    codes, side = ops.quantize_samples(x, good, 313, 256, 0, False)
    with pytest.raises(RuntimeError, match="bits must be"):
        ops.dequantize_samples(codes, side, good.long(), 1000, 256, torch.float32, None)
    with pytest.raises(RuntimeError):
        ops.dequantize_samples(codes[:-3], side, good, 1000, 256, torch.float32, None)


FP8 = [getattr(torch, n) for n in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, n)]


def check_casts(x: Tensor, row: int, group: int, target: torch.dtype, scale: Tensor | None = None) -> None:
    about = (x.dtype, x.numel(), row, group, target, scale)
    values, scales = reference.cast_groups(x, row, group, target, scale)
    ours = ops.cast_groups(x, row, group, target, scale)
    assert_same(ours[1], scales, about)
    assert_same(ours[0].float(), values.float(), about)
    for dtype in {x.dtype, torch.float32}:
        shape = (values, scales, row, group, dtype)
        assert_same(ops.uncast_groups(*shape), reference.uncast_groups(*shape), about)


@pytest.mark.parametrize("target", FP8)
@pytest.mark.parametrize("dtype", FLOATS)
def test_casts(dtype: torch.dtype, target: torch.dtype) -> None:
    for row in SIZES:
        for group in (5, 128):
            check_casts(sample(3 * row, dtype), row, group, target)
    for group in (1, 7, 1000):
        check_casts(special(dtype), 97, group, target)
    for scale in (1.0, 0.37, 1e-4, 1e4, INF, NAN):
        check_casts(sample(4097, dtype), 4097, 1000, target, torch.tensor([scale]))
    check_casts(special(dtype), 97 * 20, 100, target, torch.tensor([2.5]))


@pytest.mark.parametrize("target", FP8)
def test_casts_round_as_torch_does(target: torch.dtype) -> None:
    """Every value of the type, the middle to the next, and their neighbours in float32; and back.

    Beyond the type's largest (and 2**-7 of it) it is NaN, where torch's cast changes with its version.
    """
    codes = torch.arange(256, dtype=torch.uint8).view(target)
    assert_same(ops.uncast_groups(codes, torch.ones(1), 256, 256, torch.float32), codes.float(), target)
    exact = codes.float()[codes.float().isfinite()].sort().values
    x = torch.cat([exact, (exact[1:] + exact[:-1]) / 2, exact * 1.5, exact * 1e-3, exact * (1 + 2.0**-7)])
    x = torch.cat([x, x.nextafter(torch.tensor(INF)), x.nextafter(torch.tensor(-INF)), torch.tensor([INF, -INF, NAN])])
    ours = ops.cast_groups(x, x.numel(), 64, target, torch.ones(1))[0]
    within = x.abs() <= torch.finfo(target).max * (1 + 2.0**-7)
    assert_same(ours.float()[within], x[within].to(target).float(), target)
    assert bool(ours.float()[~within].isnan().all())


@pytest.mark.parametrize("target", FP8)
def test_casts_in_threads(threads: int, target: torch.dtype) -> None:
    for dtype in FLOATS:
        check_casts(sample(3 * 33_333, dtype), 33_333, 128, target)
        check_casts(sample(99_991, dtype), 99_991, 4096, target, torch.tensor([0.1]))


def test_wrong_scales_raise() -> None:
    x, target = sample(1000, torch.float32), torch.float8_e4m3fn
    values, scales = ops.cast_groups(x, 1000, 128, target)
    with pytest.raises(RuntimeError):
        ops.cast_groups(x, 999, 128, target)
    with pytest.raises(RuntimeError):
        ops.cast_groups(x, 1000, 128, target, torch.ones(2))
    with pytest.raises(RuntimeError):
        ops.uncast_groups(values, scales[:-1], 1000, 128, torch.float32)
    with pytest.raises(RuntimeError):
        ops.uncast_groups(values, scales.float(), 1000, 128, torch.float32)


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_large_groups(threads: int, dtype: torch.dtype, positive: bool) -> None:
    for row, group in ((99_991, 256), (33_333, 1000), (299_973, 1 << 20)):
        check_groups(sample(299_973 // row * row, dtype), row, group, 2, positive)


def test_an_inverse_is_lowered_once_at_most() -> None:
    """Every step, all bits, and the largest extents that lead to the step: a product is no smaller for larger ones."""
    words = torch.arange(0x0080, 0x7F80)  # 2**-126, the smallest, to the largest bfloat16
    step, inf = reference._from_bits(words << 16), torch.tensor(INF)
    lowered = 0
    for bits in range(1, 9):
        top = torch.tensor(2.0**bits - 1)
        extent = (step.double() * top).float()
        for _ in range(4):  # upwards, as long as the quotient is still rounded up to this step
            above = extent.nextafter(inf)
            extent = torch.where((reference._up(above / top) <= words) & above.isfinite(), above, extent)
        some = extent.isfinite()
        assert bool((reference._up(extent.nextafter(inf) / top) > words)[some].all())
        inverse = reference._inverse(extent, step, float(top))
        assert bool((extent * inverse <= top)[some].all())
        nearest = 1.0 / step
        assert bool(((inverse == nearest) | (extent * nearest > top))[some].all())
        lowered += int((inverse != nearest)[some].sum())
    assert lowered > 1000


def test_no_value_is_rounded_beyond_the_largest_code() -> None:
    """The largest value of a group meets the largest random number, which happens once in two million times.

    With the inverse that is nearest to 1 / step their sum would be the next power of two, and the code 0.
    """
    keys = torch.arange(1 << 16)
    groups = reference.mix(reference.mix(keys))  # the hash of group 0 with each key below 2**32
    key = next(
        int(k)
        for k in keys[(reference.mix(groups ^ 0x5BD1E995) >> 19) == 0x1FFF]
        if bool((reference._thresholds(groups[k : k + 1], 256, 2) == 5.0 - 2.0**-21)[0, 1:].any())
    )
    at = 1 + int((reference._thresholds(groups[key : key + 1], 256, 2)[0, 1:] == 5.0 - 2.0**-21).nonzero()[0])
    words = torch.arange(0x3F00, 0x4000)
    step = reference._from_bits(words << 16)
    extent = 3.0 * step
    found = (extent * (1.0 / step) > 3.0).nonzero()
    assert len(found)
    x = torch.full((256,), float(extent[found[0]]))
    x[0] = 0.0
    codes, side = ops.quantize_groups(x, 256, 256, 2, key, False)
    assert_same((codes, side), reference.quantize_groups(x, 256, 256, 2, key, False), key)
    assert int(reference._unpack(codes.view(1, -1), 256, 2)[0, at]) == 3


class NoWaiting(TorchDispatchMode):
    """Refuses what waits for a device, and division by a number of the host, which CUDA rounds twice."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh", "aten::equal"), name
        assert not name.startswith("aten::div") or isinstance(args[1], Tensor), f"{name} by {args[1]}"
        return function(*args, **(kwargs or {}))


def test_the_reference_waits_for_no_device() -> None:
    x, starts, taps = sample(512, torch.float32), torch.tensor([0, 4]), torch.arange(4)
    mask, positions = torch.zeros(64, dtype=torch.uint8), torch.tensor([1, 3, 4, 6])
    with NoWaiting():
        for levels, key in ((None, 3), (levels_of(2), None)):
            parts = reference.quantize_groups(x, 512, 200, 2, 3, True, levels, mask)
            reference.dequantize_groups(*parts, 512, 512, 200, 2, torch.float16, mask, levels, key)
            parts = reference.quantize_blocks(x, (2, 1, 16, 16, 1), 3, 512, 200, 2, 3, True, levels, mask)
            reference.dequantize_blocks(*parts, (2, 1, 16, 16, 1), 3, 512, 200, 2, torch.float16, mask, levels, key)
            parts = reference.quantize_channels(x, (64, 8, 1), 60, 2, 3, True, levels, mask)
            reference.dequantize_channels(*parts, (64, 8, 1), 60, 2, torch.float16, mask, levels, key)
        scaled = ((64, 8, 1), x[:8], x[:8], x, mask)
        one = [[part] for part in parts]
        rest = (torch.float16, [mask], [3], [True], [x[:8]], [x[:8]], x.half(), [mask])
        reference.rebuild_chain(*one, (64, 8, 1), 60, [2], *rest)
        reference.rebuild_affine(x.clone(), *scaled)
        reference.norm_backward(x, None, *parts, (64, 8, 1), (), 0, 0, 60, 2, 3, x[:8], x[:8], x[:8])
        reference.spread_blocks(reference.block_means(x, (2, 1, 16, 16, 1), 3, x.dtype), (2, 1, 16, 16, 1), 3, x.dtype)
        reference.range_energy(x, 256, 60, True)
        reference.uncast_groups(*reference.cast_groups(x, 256, 60, torch.float8_e4m3fn), 256, 60, torch.float16)
        reference.unpack_band(reference.pack_band(x, 0.0, 1.0, True, False), 512, torch.float32, 1.0, 0.0)
        reference.unpack_uints(reference.pack_uints(positions, 0, 4), 4, 4, 0, torch.int64)
        packed, _ = reference.pack_taps(positions, starts, 2, taps, 8, 2)
        reference.unpack_taps(packed, 4, starts, 2, taps, 2)
    for waiting in (lambda: float(x[0]), lambda: x / 3.0):
        with pytest.raises(AssertionError), NoWaiting():
            waiting()


def test_negative_keys() -> None:
    x = sample(1000, torch.float32)
    for key in (-1, -(2**63), 2**63 - 1, 2**32 - 1, 2**32):
        truth = reference.quantize_groups(x, 1000, 10, 4, key, False)
        assert_same(ops.quantize_groups(x, 1000, 10, 4, key, False), truth, key)


GEOMETRIES = [
    # outer, s1, s2, s3, inner; block
    ((6, 1, 56, 56, 1), 8),
    ((10, 1, 28, 28, 1), 8),
    ((10, 1, 14, 14, 1), 8),
    ((60, 1, 7, 7, 1), 8),
    ((3, 1, 17, 23, 1), 8),
    ((2, 1, 112, 112, 1), 8),
    ((2, 1, 100, 70, 1), 4),
    ((40, 1, 1, 1, 1), 8),
    ((4, 1, 5, 1, 1), 3),
    ((3, 1, 1, 301, 1), 8),  # 1-D
    ((3, 1, 1, 61, 24), 8),
    ((2, 1, 1, 50, 5), 8),
    ((2, 9, 10, 11, 1), 4),  # 3-D
    ((2, 17, 9, 9, 1), 8),
    ((2, 5, 6, 7, 19), 2),
    ((3, 1, 28, 57, 1), 2),  # narrow blocks
    ((5, 1, 14, 14, 1), 2),
    ((5, 1, 7, 7, 1), 2),
    ((2, 5, 6, 21, 1), 2),
    ((4, 1, 9, 13, 1), 4),
    ((2, 1, 28, 28, 16), 8),  # channels last
    ((3, 1, 9, 7, 3), 8),
    ((1, 1, 13, 11, 67), 5),
    ((2, 1, 6, 6, 1), 1),
    ((2, 1, 6, 6, 2), 64),
]


def check_blocks(
    x: Tensor, geometry: tuple[int, ...], block: int, row: int, group: int, bits: int, levels: Tensor | None = None
) -> None:
    for positive in (False, True):
        about = (x.dtype, geometry, block, row, group, bits, positive, levels)
        truth = reference.quantize_blocks(x, geometry, block, row, group, bits, 77, positive, levels)
        support, mask = supports(x, positive)
        ours = ops.quantize_blocks(x, geometry, block, row, group, bits, 77, positive, levels, mask)
        assert_same(ours, truth, about)
        assert_same(mask, support, about)
        shape = (*truth, geometry, block, row, group, bits, x.dtype, support, levels)
        assert_same(ops.dequantize_blocks(*shape), reference.dequantize_blocks(*shape), about)
        if levels is None:
            assert_same(ops.dequantize_blocks(*shape, 77), reference.dequantize_blocks(*shape, 77), (about, "dither"))


WINDOWS = [
    # windows of a plane, values side by side, planes, taps, bits
    ((5, 7), 1, 3, [0, 1, 9, 10], 2),
    ((56, 56), 1, 40, [0, 1, 2, 112, 113, 114, 224, 225, 226], 4),
    ((9, 11), 16, 50, [0, 1, 2, 24, 25, 26, 48, 49, 50], 4),
    ((4, 4), 3, 5, list(range(0, 60, 3)), 8),
    ((1, 1), 1, 6000, [0], 1),
]


@pytest.mark.parametrize(("plane", "inner", "outer", "taps", "bits"), WINDOWS, ids=str)
def test_taps(threads: int, plane: tuple[int, int], inner: int, outer: int, taps: list[int], bits: int) -> None:
    generator = torch.Generator().manual_seed(3)
    starts = (torch.arange(plane[0])[:, None] * 30 + torch.arange(plane[1]) * 2 - 3).reshape(-1)
    tap = torch.randint(len(taps), (outer, starts.numel(), inner), generator=generator)
    table = torch.tensor(taps)
    x = (starts[:, None] + table[tap]).view(-1)
    size = int(x.max())  # so that the last position is outside, as those before the first are
    truth = reference.pack_taps(x, starts, inner, table, size, bits)
    none = (x < 0) | (x >= size)
    assert int(truth[1]) == int(none.sum()) > 0
    assert_same(ops.pack_taps(x, starts, inner, table, size, bits), truth, "outside")
    back = ops.unpack_taps(truth[0], x.numel(), starts, inner, table, bits)
    assert_same(back, reference.unpack_taps(truth[0], x.numel(), starts, inner, table, bits), threads)
    assert torch.equal(back[~none], x[~none])
    wrong = x.clone()
    wrong[::7] += 1
    assert_same(
        ops.pack_taps(wrong, starts, inner, table, size, bits),
        reference.pack_taps(wrong, starts, inner, table, size, bits),
        "between",
    )


def numel_of(geometry: tuple[int, ...]) -> int:
    return torch.Size(geometry).numel()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("geometry", "block"), GEOMETRIES)
def test_blocks(geometry: tuple[int, ...], block: int, dtype: torch.dtype) -> None:
    x = sample(numel_of(geometry), dtype)
    for group in GROUPS:
        check_blocks(x, geometry, block, x.numel(), group, 2)
        check_blocks(x, geometry, block, x.numel() // geometry[0], group, 2)
    for bits in (1, 4, 8):
        check_blocks(x, geometry, block, x.numel(), 256, bits)
    values = special(dtype).repeat(-(-x.numel() // 1940))[: x.numel()]
    check_blocks(values, geometry, block, x.numel(), 64, 4)
    for kind in FLOATS:
        for source in (x, values):
            low = reference.block_means(source, geometry, block, kind)
            assert_same(ops.block_means(source, geometry, block, kind), low, (dtype, kind))
            spread = reference.spread_blocks(low, geometry, block, dtype)
            assert_same(ops.spread_blocks(low, geometry, block, dtype), spread, (dtype, kind))


@pytest.mark.parametrize("dtype", FLOATS)
def test_means_that_are_not_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, largest, largest, torch.inf, 1.0, torch.nan, 1.0, 2.0, 4.0], dtype=dtype)
    for block in (1, 2):
        means = ops.block_means(x, (1, 1, 1, 10, 1), block, dtype)
        assert_same(means, reference.block_means(x, (1, 1, 1, 10, 1), block, dtype), block)
        assert not means.isinf().any()
    beyond = x.to(torch.bfloat16).isinf() | x.isnan()  # float32's largest rounds to Inf in bfloat16
    assert torch.equal(ops.block_means(x, (1, 1, 1, 10, 1), 1, torch.bfloat16).isnan(), beyond)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", FLOATS)
def test_codes_in_blocks_whose_mean_is_not_finite(dtype: torch.dtype, bits: int) -> None:
    """Rows of maps are groups of two blocks; in the first block, whose mean is not finite, no value sets a range."""
    odd = [NAN, INF, -INF] + ([-3e38] if dtype != torch.float16 else [])
    maps = sample(len(odd) * 256, torch.float32).view(-1, 16, 16).abs()
    maps[:, :8, :8] *= -1.0
    for n, value in enumerate(odd):
        maps[n, 0, : 8 if value == -3e38 else 1] = value
    x, geometry = maps.to(dtype).view(-1), (len(odd), 1, 16, 16, 1)
    for levels in (None, levels_of(bits)) if bits <= 4 else (None,):
        for block in (8, 2):
            check_blocks(x, geometry, block, x.numel(), 16, bits, levels)
            check_blocks(x, geometry, block, 256, 7, bits, levels)
        low, codes, side = ops.quantize_blocks(x, geometry, 8, 256, 16, bits, 77, True, levels)
        assert not low.view(-1, 4)[:, 0].isfinite().any()
        found = reference._unpack(codes.view(len(x) // 16, -1), 16, bits).view(-1, 16, 16)
        assert found[:, 1:8, :8].count_nonzero() == 0
        assert found[:, 1:8, 8:].count_nonzero() > 0
        assert (side.view(-1, 16, 2)[:, 1:8] != torch.tensor([0x7FC0, 0])).any(-1).all()  # these groups are not NaN


DRAWS = 4096  # times that a value is encoded below, each with noise of its own


@pytest.mark.parametrize("offset", [0.0, 100.0, 1000.0])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_mean_of_what_is_decoded(dtype: torch.dtype, bits: int, offset: float) -> None:
    """Random rounding has the right mean in float32; decoding to 16 bits adds the error of rounding the two neighbours.

    So the mean is known from the levels of a group, before and after they are rounded, and it is off by at most
    half a unit in the last place of the largest. Six standard deviations of a mean are allowed, of values whose
    variance is at most a quarter of the squared distance of their neighbours.
    """
    x = (offset + sample(256, torch.float32)).to(dtype)
    many = x.repeat(DRAWS)
    for levels in (None, levels_of(bits)) if bits <= 4 else (None,):
        codes, side = ops.quantize_groups(many, 256, 256, bits, 5, False, levels)
        mean = ops.dequantize_groups(codes, side, many.numel(), 256, 256, bits, dtype, None, levels)
        mean = mean.view(DRAWS, 256).double().mean(0)
        low, step = (side[:2].to(torch.int32) << 16).view(torch.float32)
        exact = low + (torch.arange(2.0**bits) if levels is None else levels) * step
        rounded, exact = exact.to(dtype).double(), exact.double()
        above = torch.searchsorted(exact, x.double(), right=True).clamp(1, 2**bits - 1)
        share = (x.double() - exact[above - 1]) / (exact[above] - exact[above - 1])
        gap = rounded[above] - rounded[above - 1]
        predicted = rounded[above - 1] + share * gap
        noise = 6 * 0.5 * gap.max() / DRAWS**0.5
        grid = float(exact.abs().max()) * 2.0**-20  # of sums in float32, and of the random numbers
        assert bool(((mean - predicted).abs() <= noise + grid).all()), levels
        ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(float(rounded.abs().max())))
        assert bool(((predicted - x.double()).abs() <= ulp / 2 + grid).all()), levels
        if dtype != torch.float32 and offset == 1000.0 and bits == 2:
            assert bool(((predicted - x.double()).abs() > ulp / 8).any())  # there is such an error


@pytest.mark.parametrize("offset", [0.0, 100.0, 1000.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_mean_of_decoded_blocks(dtype: torch.dtype, offset: float) -> None:
    """As above; neighbours are at most a step apart before they are rounded, and half a unit each moves them."""
    x = (offset + sample(256, torch.float32)).to(dtype)
    many, geometry = x.repeat(DRAWS), (DRAWS, 1, 16, 16, 1)
    parts = ops.quantize_blocks(many, geometry, 8, 256, 256, 4, 5, False)
    back = ops.dequantize_blocks(*parts, geometry, 8, 256, 256, 4, dtype, None).view(DRAWS, 256).double()
    step = float((parts[2][1:2].to(torch.int32) << 16).view(torch.float32))
    ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(float(back.abs().max())))
    noise = 6 * 0.5 * (step + ulp) / DRAWS**0.5
    error, grid = (back.mean(0) - x.double()).abs(), float(back.abs().max()) * 2.0**-20
    assert bool((error <= ulp / 2 + noise + grid).all())


@pytest.mark.parametrize("dtype", FLOATS)
def test_large_blocks(threads: int, dtype: torch.dtype) -> None:
    for geometry in ((16, 1, 56, 56, 1), (5, 1, 40, 31, 13), (2, 1, 1, 997, 24), (3, 6, 50, 50, 1)):
        x = sample(numel_of(geometry), dtype)
        for group in (256, 1024, 1000):
            check_blocks(x, geometry, 8, x.numel() // geometry[0], group, 2)
            check_blocks(x, geometry, 8, x.numel(), group, 2)


def check_affine(x: Tensor, geometry: tuple[int, int, int], other: Tensor | None, support: Tensor | None) -> None:
    scale, shift = sample(geometry[1], torch.float32, 1), sample(geometry[1], torch.float32, 2)
    found, truth = x.clone(), x.clone()
    reference.rebuild_affine(truth, geometry, scale, shift, other, support)
    ops.rebuild_affine(found, geometry, scale, shift, other, support)
    assert_same(found, truth, (x.dtype, geometry, other is None, support is None))


@pytest.mark.parametrize("dtype", FLOATS)
def test_affine(dtype: torch.dtype) -> None:
    for geometry in ((1, 1, 1), (3, 5, 7), (2, 3, 4096), (3, 1, 5000), (700, 13, 1), (3, 5000, 1), (5, 97, 49)):
        x, other = (sample(math.prod(geometry), dtype, seed) for seed in (3, 4))
        for added in (None, other):
            for support in (None, reference.pack_band(other, 0.0, INF, False, True)):
                check_affine(x, geometry, added, support)
    x = special(dtype)
    check_affine(x, (20, 97, 1), x.flip(0), None)
    check_affine(x, (4, 5, 97), None, reference.pack_band(x, 0.0, INF, False, True))


def test_affine_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    scale, shift = torch.tensor([10.0, 100.0]), torch.tensor([0.5, 0.25])
    channels_first, channels_last = x.clone(), x.clone()
    ops.rebuild_affine(channels_first, (2, 2, 2), scale, shift, None, None)
    assert channels_first.tolist() == [10.5, 20.5, 300.25, 400.25, 50.5, 60.5, 700.25, 800.25]
    mask = torch.tensor([0b10110111], dtype=torch.uint8)
    ops.rebuild_affine(channels_last, (4, 2, 1), scale, shift, torch.arange(8.0), mask)
    assert channels_last.tolist() == [10.5, 201.25, 32.5, 0.0, 54.5, 605.25, 0.0, 807.25]


def test_affine_rounds_each_operation() -> None:
    """Fused into one rounding the product would keep the bits that cancel here."""
    x, shift = torch.full((64,), 1 + 2.0**-12), torch.full((1,), -1 - 2.0**-11)
    ops.rebuild_affine(x, (1, 1, 64), x[:1].clone(), shift, None, None)
    assert x.tolist() == [0.0] * 64


def test_affine_in_threads(threads: int) -> None:
    for dtype in FLOATS:
        for geometry in ((3, 7, 30_011), (90_001, 7, 1)):
            x, other = (sample(math.prod(geometry), dtype, seed) for seed in (3, 4))
            check_affine(x, geometry, other, reference.pack_band(other, 0.0, INF, False, True))


def check_chain(
    geometry: tuple[int, int, int],
    group: int,
    bits: Sequence[int],
    dither: bool,
    has: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """``has`` are bits: support of the sources, an addend, masks of the sums."""
    other, positive, stages = sample(math.prod(geometry), dtype, 4), bool(has & 1), []
    addend = other if has & 2 else None
    truth = addend
    for i, width in enumerate(bits):
        x, key = sample(math.prod(geometry), dtype, 5 + i), 77 - 2**40 * i
        mask = reference.pack_band(x.flip(0), 0.0, INF, False, True)
        support = torch.zeros_like(mask) if positive else None
        codes, side = reference.quantize_channels(x, geometry, group, width, key, positive, None, support)
        scale, shift = (sample(geometry[1], torch.float32, 20 + 2 * i + j) for j in (0, 1))
        dithered = dither == (i % 2 == 0)
        stages.append((codes, side, width, support, key, dithered, scale, shift, mask if has & 4 else None))
        own = key if dithered else None
        made = reference.dequantize_channels(codes, side, geometry, group, width, dtype, support, None, own)
        reference.rebuild_affine(made, geometry, scale, shift, truth, stages[-1][-1])
        truth = made
    codes, sides, widths, supports, keys, dithers, scales, shifts, masks = map(list, zip(*stages, strict=True))
    given = (codes, sides, geometry, group, widths, dtype, supports, keys, dithers, scales, shifts, addend, masks)
    assert_same(reference.rebuild_chain(*given), truth, ("reference", *given[2:5]))
    assert_same(ops.rebuild_chain(*given), truth, given[2:5])


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", FLOATS)
def test_chain(bits: int, dtype: torch.dtype) -> None:
    for geometry in ((1, 1, 1), (2, 3, 784), (3, 5, 256), (2, 3, 1000), (700, 13, 1), (6, 5, 49)):
        for has in range(8):
            check_chain(geometry, 256, [bits], dither=bool(has & 1) != bool(bits & 1), has=has, dtype=dtype)
            check_chain(geometry, 256, [bits, 9 - bits, 3], dither=bool(has & 1), has=has, dtype=dtype)
    check_chain((3, 5, 97), 32, [bits, 2], dither=True, has=7, dtype=dtype)


def test_chain_in_threads(threads: int) -> None:
    check_chain((3, 7, 30_011), 256, [3, 4, 2], dither=True, has=7)
    check_chain((3, 7, 30_011), 256, [3, 5], dither=True, has=6, dtype=torch.bfloat16)
    assert kernels.status()["rebuild_chain"] == "numba"


def test_chain_without_stages_raises() -> None:
    for rebuild in (reference.rebuild_chain, ops.rebuild_chain):
        with pytest.raises(RuntimeError, match="no stages"):
            rebuild([], [], (1, 1, 8), 8, [], torch.float32, [], [], [], [], [], torch.ones(8), [])


def test_chain_with_parts_that_do_not_fit_raises() -> None:
    x = sample(64, torch.float32)
    codes, side = reference.quantize_channels(x, (2, 4, 8), 8, 2, 1, False)
    good = [[codes] * 2, [side] * 2, (2, 4, 8), 8, [2, 2], torch.float32, [None] * 2, [1, 1], [True] * 2]
    good += [[torch.ones(4)] * 2, [torch.ones(4)] * 2, torch.ones(64), [None] * 2]
    ops.rebuild_chain(*good)
    for place, wrong in ((0, [codes, codes[:3]]), (9, [torch.ones(4), torch.ones(3)]), (11, torch.ones(63))):
        with pytest.raises((RuntimeError, IndexError)):
            ops.rebuild_chain(*good[:place], wrong, *good[place + 1 :])


@pytest.mark.parametrize("wrong", ["geometry", "scale", "shift", "other", "support"])
def test_affine_with_parts_that_do_not_fit(wrong: str) -> None:
    """They go to the reference, which raises what torch would."""
    parts = {
        "geometry": (3, 4, 10),
        "scale": torch.ones(4),
        "shift": torch.ones(4),
        "other": torch.ones(120),
        "support": torch.ones(15, dtype=torch.uint8),
    }
    ops.rebuild_affine(torch.ones(120), *parts.values())
    parts[wrong] = (3, 4, 11) if wrong == "geometry" else parts[wrong][:-2]
    with pytest.raises((RuntimeError, IndexError)):
        ops.rebuild_affine(torch.ones(120), *parts.values())


def norm_arguments(
    x: Tensor, geometry: tuple[int, int, int], how: str, group: int, bits: int, dither: bool, weighted: bool
) -> tuple[object, ...]:
    """``x`` packed in a way of ``how``, as ``norm_backward`` takes it."""
    samples, channels, inner = geometry
    grad, key, row, block, frame = sample(x.numel(), torch.float32, 5), 77, 0, 0, ()
    if how == "blocks":
        width = next(w for w in range(math.isqrt(inner), 0, -1) if inner % w == 0)
        block, row, frame = 8, channels * inner, (samples * channels, 1, inner // width, width, 1)
        packed = reference.quantize_blocks(x, frame, block, row, group, bits, key, False)
    elif how == "channels":
        packed = (None, *reference.quantize_channels(x, geometry, group, bits, key, False))
    else:
        row = channels * inner if how == "samples" else inner
        packed = (None, *reference.quantize_groups(x, row, group, bits, key, False))
    values = x.view(geometry)
    mean, invstd = values.mean((0, 2)), 1 / (values.std((0, 2), correction=0) + 1e-3)
    weight = sample(channels, torch.float32, 6) if weighted else None
    return (grad, *packed, geometry, frame, block, row, group, bits, key if dither else None, mean, invstd, weight)


NORMS = ("blocks", "channels", "samples", "rows")
MAPS = [(2, 3, 784), (3, 5, 256), (2, 3, 1000), (70, 13, 1), (16, 37, 49), (5, 40, 196), (1, 1, 16), (3, 2, 5000)]


@pytest.mark.parametrize("how", NORMS)
@pytest.mark.parametrize("geometry", MAPS, ids=str)
def test_norm_backward(geometry: tuple[int, int, int], how: str) -> None:
    for bits in (2, 3, 8):
        x = 3 * sample(math.prod(geometry), torch.float32, 3) + 1
        given = norm_arguments(x, geometry, how, 256, bits, dither=bits != 8, weighted=bits != 3)
        for dtype in (torch.float32, torch.bfloat16):
            grad, *rest = given[0].to(dtype), *given[1:]
            truth = reference.norm_backward(grad, *rest)
            assert truth[0].dtype == dtype
            assert_same(ops.norm_backward(grad, *rest), truth, (bits, how))
            for operator in (ops.norm_backward_, reference.norm_backward_):
                own = grad.clone()
                assert_same((own, *operator(own, *rest)), truth, (bits, how))
    assert kernels.status()["norm_backward"] == "numba"


def test_norm_backward_with_small_groups() -> None:
    """Groups that begin before the first value of a piece and end after its last, or lie all in one."""
    for how in NORMS:
        for group in (7, 60):
            x = sample(3 * 33 * 150, torch.float32, 3)
            given = norm_arguments(x, (3, 33, 150), how, group, 2, dither=True, weighted=True)
            assert_same(ops.norm_backward(*given), reference.norm_backward(*given), (group, how))


def test_norm_backward_in_threads(threads: int) -> None:
    for how in NORMS:
        x = sample(4 * 19 * 5000, torch.float32, 3)
        given = norm_arguments(x, (4, 19, 5000), how, 256, 2, dither=False, weighted=True)
        assert_same(ops.norm_backward(*given), reference.norm_backward(*given), how)


@pytest.mark.parametrize("how", NORMS)
def test_norm_backward_is_the_gradient(how: str) -> None:
    """Beside autograd's in float64: each sum of n terms of size m is off by n * m units in the last place at most."""
    samples, _, inner = geometry = (4, 6, 144)
    x = sample(math.prod(geometry), torch.float32, 3)
    given = norm_arguments(x, geometry, how, 256, 4, dither=True, weighted=True)
    grad, mean, invstd, weight = (given[i].double() for i in (0, 11, 12, 13))
    found = [t.double() for t in ops.norm_backward(*given)]
    low, codes, side = given[1:4]
    if how == "blocks":
        decoded = reference.dequantize_blocks(low, codes, side, *given[5:10], torch.float32, None, None, 77)
    elif how == "channels":
        decoded = reference.dequantize_channels(codes, side, geometry, 256, 4, torch.float32, None, None, 77)
    else:
        decoded = reference.dequantize_groups(codes, side, x.numel(), *given[7:10], torch.float32, None, None, 77)
    values, grads = decoded.double().view(geometry), grad.view(geometry)
    truth = torch.ops.aten.native_batch_norm_backward(
        grads, values, weight, None, None, mean, invstd, True, 0.0, [True, True, True]
    )
    scaled = (values - mean.view(-1, 1)) * invstd.view(-1, 1)
    count = samples * inner
    unit = 2.0**-23 * count * grads.abs().max()
    assert (found[2] - truth[2]).abs().max() <= unit
    assert (found[1] - truth[1]).abs().max() <= unit * scaled.abs().max()
    factor = (invstd * weight).abs().max() * (1 + scaled.abs().max()) ** 2
    assert (found[0].view(geometry) - truth[0]).abs().max() <= 4 * unit / count * inner * factor


def test_norm_backward_keeps_a_nan_in_its_channel() -> None:
    x = sample(2 * 3 * 512, torch.float32, 3)
    x.view(2, 3, 512)[1, 1, 7] = NAN
    given = list(norm_arguments(sample(x.numel(), torch.float32, 3), (2, 3, 512), "channels", 256, 2, False, True))
    given[2:4] = reference.quantize_channels(x, (2, 3, 512), 256, 2, 77, False)
    for_input, for_weight, for_bias = ops.norm_backward(*given)
    assert for_input.view(2, 3, 512).isnan().all(2).tolist() == [[False, True, False]] * 2
    assert for_weight.isnan().tolist() == [False, True, False]
    assert not for_bias.isnan().any()


def test_norm_backward_with_parts_that_do_not_fit() -> None:
    """They go to the reference, which raises what torch would."""
    given = norm_arguments(sample(1200, torch.float32, 3), (3, 4, 100), "rows", 50, 2, False, True)
    for place, wrong in ((0, given[0][:-1]), (2, given[2][:-3]), (11, given[11][:-1]), (4, (3, 4, 99))):
        with pytest.raises((RuntimeError, IndexError)):
            ops.norm_backward(*given[:place], wrong, *given[place + 1 :])


BANDS = [(0.0, INF), (-0.0, 0.0), (-1.0, 1.0), (0.1, 6.0), (-INF, 0.0), (-INF, INF), (INF, INF), (1.0, -1.0)]
BANDS += [(NAN, 1.0), (-0.3, -0.1), (1e-42, 1.0), (-3e38, 3e38), (-1e39, 1e39)]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.bool, torch.int64, torch.uint8])
def test_pack_band(dtype: torch.dtype) -> None:
    values = [sample(n, torch.float32) for n in [*ROWS, 5000]] + [special(torch.float32)]
    for x in values:
        x = x.to(dtype) if dtype.is_floating_point else x.nan_to_num(0.0, 3.0, -3.0).clamp(0, 9).to(dtype)
        if dtype.is_floating_point:
            x[: x.numel() // 3] = x[: x.numel() // 3].clamp(-1.0, 1.0)
        for low, high in BANDS:
            for closed in (False, True):
                for nan in (False, True):
                    truth = reference.pack_band(x, low, high, closed, nan)
                    assert_same(ops.pack_band(x, low, high, closed, nan), truth, (low, high, closed, nan))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.bool, torch.int64])
def test_unpack_band(dtype: torch.dtype) -> None:
    for numel in ROWS:
        mask = reference.pack_band(sample(numel, torch.float32), 0.0, INF, True, False)
        pairs = [(1.0, 0.0), (0.0, 2.0)]
        if dtype.is_floating_point:
            pairs += [(-0.0, 1.25), (NAN, 0.1), (0.0, -0.0)]
        for inside, outside in pairs:
            shape = (mask, numel, dtype, inside, outside)
            assert_same(ops.unpack_band(*shape), reference.unpack_band(*shape), shape[1:])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_mask_values(dtype: torch.dtype) -> None:
    for numel in ROWS:
        x, chosen = sample(numel, dtype), torch.arange(numel) % 3 == 0
        x[:1], x[1:2], x[3:4] = NAN, NAN, -0.0
        truth = torch.where(chosen, x, torch.zeros((), dtype=dtype))
        mask = reference.pack_band(chosen, 0.0, 1.0, False, False)
        assert_same(reference.mask_values(x, mask), truth, numel)
        assert_same(ops.mask_values(x, mask), truth, numel)
        for operator in (ops.mask_values_, reference.mask_values_):
            own = x.clone()
            operator(own, mask)
            assert_same(own, truth, numel)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
def test_uints(bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_fallbacks", set())
    for numel in ROWS:
        for offset in (0, -7, 5, 2**40 if dtype == torch.int64 else 3):
            generator = torch.Generator().manual_seed(numel)
            top = min(2**bits, 2 ** (8 * dtype.itemsize - 2))
            x = torch.randint(0, top, (numel,), generator=generator)
            x = (x + offset).to(dtype)
            packed = reference.pack_uints(x, offset, bits)
            assert_same(ops.pack_uints(x, offset, bits), packed, (numel, offset))
            truth = reference.unpack_uints(packed, numel, bits, offset, dtype)
            assert_same(ops.unpack_uints(packed, numel, bits, offset, dtype), truth, (numel, offset))
            if bits < 8:  # values that do not fit spill over in the same way
                assert_same(ops.pack_uints(x * 3, offset, bits), reference.pack_uints(x * 3, offset, bits), "spill")
    assert bool(backends._fallbacks) == (dtype in (torch.int16, torch.uint8))


def test_masks_and_integers_in_threads(threads: int) -> None:
    for dtype in (*FLOATS, torch.bool):
        x = sample(300_007, torch.float32).relu_().to(dtype)
        mask = reference.pack_band(x, 0.0, INF, False, False)
        assert_same(ops.pack_band(x, 0.0, INF, False, False), mask, dtype)
        truth = reference.unpack_band(mask, x.numel(), dtype, 1.5, 0.0)
        assert_same(ops.unpack_band(mask, x.numel(), dtype, 1.5, 0.0), truth, dtype)
        if dtype != torch.bool:
            assert_same(ops.mask_values(x, mask), x, dtype)  # all that are not zero
    for bits in (1, 2, 4, 8, 16, 32):
        y = torch.arange(300_007) % 2**bits
        packed = reference.pack_uints(y, 0, bits)
        assert_same(ops.pack_uints(y, 0, bits), packed, bits)
        assert_same(ops.unpack_uints(packed, y.numel(), bits, 0, torch.int64), y, bits)


def all_operators(x: Tensor, row: int, group: int, bits: int, geometry: tuple[int, ...], mask: Tensor) -> list[object]:
    """What each operator gives for values, or integers made of them; ``mask`` is filled."""
    numel, dtype, key = x.numel(), x.dtype, 7
    found: list[object] = []
    levels = levels_of(bits) if bits <= 4 else None
    for own in (None, levels):
        packed = ops.quantize_groups(x, row, group, bits, key, True, own, mask)
        found += [packed, mask.clone(), ops.quantize_groups(x, row, group, bits, key, False, own)]
        found.append(ops.dequantize_groups(*packed, numel, row, group, bits, dtype, mask, own))
        if own is None:
            found.append(ops.dequantize_groups(*packed, numel, row, group, bits, dtype, mask, None, key))
        for shape3 in ((numel // row, row, 1), (numel // geometry[3], 1, geometry[3]), (numel, 1, 1)):
            tiles = ops.quantize_channels(x, shape3, group, bits, key, True, own, mask)
            found += [tiles, mask.clone(), ops.dequantize_channels(*tiles, shape3, group, bits, dtype, mask, own)]
            found.append(ops.dequantize_channels(*tiles, shape3, group, bits, torch.float32, None, own))
        for block in (2, 3, 8):
            parts = ops.quantize_blocks(x, geometry, block, row, group, bits, key, True, own, mask)
            found += [parts, mask.clone()]
            shape = (geometry, block, row, group, bits, dtype, mask, own)
            found.append(ops.dequantize_blocks(*parts, *shape))
            if own is None:
                found.append(ops.dequantize_blocks(*parts, *shape, key))
    for block in (2, 3, 8):
        for kind in (dtype, torch.float32):
            low = ops.block_means(x, geometry, block, kind)
            found += [low, ops.spread_blocks(low, geometry, block, dtype)]
    widths = (torch.arange(numel // row) % 8 + 1).to(torch.uint8)
    packed = ops.quantize_samples(x, widths, 8 * numel, group, key, True, mask)
    found += [packed, mask.clone(), ops.dequantize_samples(*packed, widths, numel, group, dtype, mask)]
    found.append(ops.range_energy(x, row, group, True))
    for target in FP8:
        cast = ops.cast_groups(x, row, group, target)
        found += [cast[0].float(), cast[1], ops.uncast_groups(*cast, row, group, dtype)]
    band = ops.pack_band(x, 0.0, 1.0, True, False)
    found += [band, ops.pack_band(x > 0, 0.0, 1.0, True, False)]
    found += [ops.unpack_band(band, numel, kind, 1.0, 0.0) for kind in (dtype, torch.bool, torch.float64)]
    found.append(ops.mask_values(x, band))
    values = x.clone()
    ops.rebuild_affine(values, (numel // row, row, 1), torch.ones(row), torch.ones(row), x, mask)
    found.append(values)
    starts, taps = 3 * torch.arange(row), torch.tensor([0, 1, 2])
    positions = (starts + torch.arange(numel).view(-1, row) % 3).view(-1)
    tapped = ops.pack_taps(positions, starts, 1, taps, 3 * row, 2)
    found += [tapped, ops.unpack_taps(tapped[0], numel, starts, 1, taps, 2)]
    for width in (1, 2, 4, 8, 16, 32):
        for integer in (torch.int64, torch.int32, torch.int8):
            uints = ops.pack_uints(torch.arange(numel, dtype=integer) % 2, 0, width)
            found += [uints, ops.unpack_uints(uints, numel, width, 0, integer)]
    return found


class Canaries:
    """Stands for torch in the launcher: what it allocates lies between canaries, which nobody may touch.

    With ``short`` the last bytes of each allocation count as canaries too, as if it were too small.
    """

    MARGIN = 1024

    def __init__(self, short: int = 0) -> None:
        self.short = short
        self.outputs: list[tuple[Tensor, int]] = []
        self.scratch: list[tuple[Tensor, int]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        size = numel * dtype.itemsize
        memory = torch.full((size + 2 * self.MARGIN,), 0xA5, dtype=torch.uint8)
        assert memory.data_ptr() % layout.LINE == 0
        scratch = sys._getframe(1).f_code.co_name == "of"
        (self.scratch if scratch else self.outputs).append((memory, self.MARGIN + max(0, size - self.short)))
        return memory[self.MARGIN : self.MARGIN + size].view(dtype)

    def touched(self, guarded: list[tuple[Tensor, int]]) -> int:
        """How many allocations were written outside."""
        outside = [torch.cat([memory[: self.MARGIN], memory[end:]]) for memory, end in guarded]
        return sum(bool((canaries != 0xA5).any()) for canaries in outside)


ODD = [
    # rows, row, group
    (1, 1, 1),
    (2, 7, 3),
    (3, 15, 8),
    (3, 17, 16),
    (2, 63, 64),
    (5, 65, 64),
    (1, 255, 256),
    (2, 257, 256),
    (1, 1021, 1000),
    (7, 296, 8),
    (3, 1031, 4096),
    (2, 4099, 256),
]


@pytest.fixture
def fresh_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel gets scratch of its own, as large as it asks for."""
    monkeypatch.setattr(cpu, "_scratch", cpu._Scratch())
    monkeypatch.setattr(cpu, "_MOST_KEPT", -1)


@pytest.mark.usefixtures("fresh_scratch")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "row", "group"), ODD)
def test_kernels_stay_within_their_memory(
    rows: int, row: int, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, masks and scratch have canaries before and behind them; the inputs stay as they were."""
    numel = rows * row
    x = sample(numel, dtype)
    factor = next(f for f in (8, 7, 5, 3, 1) if row % f == 0)
    for geometry in ((rows, 1, factor, row // factor, 1), (rows, 1, 1, row, 1), (rows, factor, 1, row // factor, 1)):
        for bits in (1, 2, 3, 4, 5, 8):
            before = x.clone()
            canaries = Canaries()
            monkeypatch.setattr(cpu, "torch", canaries)
            ours = all_operators(x, row, group, bits, geometry, canaries.empty(-(-numel // 8), torch.uint8))
            monkeypatch.setattr(cpu, "torch", torch)
            assert canaries.touched(canaries.outputs) == canaries.touched(canaries.scratch) == 0, (geometry, bits)
            assert torch.equal(x, before)
            truth = all_operators(x, row, group, bits, geometry, torch.empty(-(-numel // 8), dtype=torch.uint8))
            for i, (a, b) in enumerate(zip(ours, truth, strict=True)):
                assert_same(a, b, (geometry, bits, i))


@pytest.mark.usefixtures("fresh_scratch")
def test_canaries_see_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels fill outputs to their last byte, and some their scratch: if it were a canary, it would be seen."""
    for short, group in ((1, 256), (4, 4099)):
        canaries = Canaries(short)
        monkeypatch.setattr(cpu, "torch", canaries)
        x, mask = sample(2 * 4099, torch.bfloat16), canaries.empty(1025, torch.uint8)
        all_operators(x, 4099, group, 3, (2, 1, 1, 4099, 1), mask)
        assert canaries.touched(canaries.outputs) == len(canaries.outputs) > 80
        if short == 4:  # groups longer than a batch fill the memory in which they are widened
            assert canaries.touched(canaries.scratch) > 10


def test_every_operator_is_compiled() -> None:
    """Without this, all tests above would pass on a machine where nothing compiles.

    The calls made here are counted, because the status of an operator may come from a test that ran before.
    """

    called = set()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            namespace, _, name = function._schema.name.partition("::")
            if namespace == "lowtide":
                called.add(name)
            return function(*args, **(kwargs or {}))

    x = sample(16, torch.float32)
    bits = torch.tensor([2, 3], dtype=torch.uint8)
    starts, taps = torch.tensor([0, 4]), torch.arange(4)
    with Calls():
        ops.dequantize_groups(*ops.quantize_groups(x, 16, 8, 2, 0, False), 16, 16, 8, 2, torch.float32, None)
        parts = ops.quantize_blocks(x, (1, 1, 4, 4, 1), 2, 16, 8, 2, 0, False)
        ops.dequantize_blocks(*parts, (1, 1, 4, 4, 1), 2, 16, 8, 2, torch.float32, None)
        ops.spread_blocks(ops.block_means(x, (1, 1, 4, 4, 1), 2, x.dtype), (1, 1, 4, 4, 1), 2, x.dtype)
        ops.dequantize_samples(*ops.quantize_samples(x, bits, 32, 8, 0, False), bits, 16, 8, torch.float32, None)
        tiles = ops.quantize_channels(x, (4, 4, 1), 8, 2, 0, False)
        ops.dequantize_channels(*tiles, (4, 4, 1), 8, 2, torch.float32, None)
        ops.range_energy(x, 16, 8, False)
        ops.rebuild_affine(x.clone(), (2, 2, 4), x[:2], x[:2], None, None)
        runs = ops.quantize_channels(x, (1, 2, 8), 8, 2, 0, False)
        rest = (torch.float32, [None], [0], [False], [x[:2]], [x[:2]], None, [None])
        ops.rebuild_chain(*[[part] for part in runs], (1, 2, 8), 8, [2], *rest)
        ops.norm_backward(x, None, *runs, (1, 2, 8), (), 0, 0, 8, 2, None, x[:2], x[:2], None)
        ops.norm_backward_(x.clone(), None, *runs, (1, 2, 8), (), 0, 0, 8, 2, None, x[:2], x[:2], None)
        ops.uncast_groups(*ops.cast_groups(x, 16, 8, torch.float8_e4m3fn), 16, 8, torch.float32)
        band = ops.pack_band(x, 0.0, 1.0, True, False)
        ops.unpack_band(band, 16, torch.float32, 1.0, 0.0)
        ops.mask_values_(ops.mask_values(x, band), band)
        ops.unpack_uints(ops.pack_uints(torch.arange(16), 0, 4), 16, 4, 0, torch.int64)
        packed, none = ops.pack_taps(torch.tensor([1, 3, 4, 6]), starts, 2, taps, 8, 2)
        ops.unpack_taps(packed, 4, starts, 2, taps, 2)
    assert int(none) == 0
    assert called == set(ops.SCHEMAS), "call a new operator here"
    assert kernels.status() == dict.fromkeys(ops.SCHEMAS, "numba")


def test_who_sees_operators_sees_these_too() -> None:
    """A kernel of the CPU is called directly only where nobody but it can want the call, and gives the same."""

    class Seen(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    class Watched(TorchFunctionMode):
        names: ClassVar[list[str]] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(1000)
    given = (0.0, math.inf, False, True)
    ops.pack_band(x, *given)  # the first call loads the kernel
    alone = ops.pack_band(x, *given)
    with Seen():
        seen = ops.pack_band(x, *given)
    with Watched():
        watched = ops.pack_band(x, *given)
    assert torch.equal(seen, alone)
    assert torch.equal(watched, alone)
    assert Seen.names == ["lowtide.pack_band.default"]
    assert Watched.names[:1] == ["lowtide.pack_band.default"]
    assert ops._is_bare(x)
    assert ops._is_bare(x.clone().requires_grad_())
    assert ops._is_bare([x, x])
    strange = [nn.Parameter(x), torch.empty(8, device="meta"), torch.randn(4, dtype=torch.complex64).conj(), []]
    assert not any(map(ops._is_bare, strange))
    looked = []
    torch.func.vmap(lambda row: looked.append(ops._is_bare(row)) or row)(torch.ones(2, 8))
    torch.func.grad(lambda row: looked.append(ops._is_bare(row)) or row.sum())(torch.ones(8))
    assert looked == [False, False]


def test_scratch_is_kept_for_the_next_kernel_of_the_thread() -> None:
    scratch = cpu._Scratch()
    first = scratch.of(1000)
    assert first.numel() >= 1000
    assert scratch.of(10) is first
    assert scratch.of(2000) is not first
    assert scratch.of(cpu._MOST_KEPT + 1).numel() > scratch.of(1).numel() == 2000  # much is not kept
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(scratch.of, 10).result()
    assert other.data_ptr() != scratch.of(10).data_ptr()


def test_served_says_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(kernels.status("mps").values()) == {"reference: no fast kernels for mps"}
    assert set(kernels.status("cuda").values()) == set(kernels.status("xpu").values()) == {"triton (not called yet)"}
    assert set(kernels.status("cuda")) == set(kernels.status())
    assert set(kernels.status(torch.device("meta")).values()) == {"shapes only"}
    assert kernels.status("cpu") == kernels.status()
    for name, empty in (("functions", {}), ("_referred", set()), ("_fallbacks", set())):
        monkeypatch.setattr(backends, name, empty)
    assert kernels.served() == {}
    x = sample(64, torch.float32)
    ops.range_energy(x, 64, 8, False)
    ops.pack_band(x, 0.0, 1.0, True, False)
    ops.pack_band(x[:0], 0.0, 1.0, True, False)
    assert kernels.served() == {"cpu": {"pack_band": "numba", "range_energy": "numba"}}
    ops.pack_band(x.double(), 0.0, 1.0, True, False)
    assert kernels.served() == {"cpu": {"pack_band": "numba and reference", "range_energy": "numba"}}
    ops.range_energy(x.to("meta"), 64, 8, False)
    assert set(kernels.served()) == {"cpu"}
    monkeypatch.setattr(reference, "range_energy", lambda x: "ran")  # no other device is at hand
    assert backends._reference("range_energy")(SimpleNamespace(device=torch.device("mps"))) == "ran"
    assert kernels.served()["mps"] == {"range_energy": "reference: no fast kernels for mps"}
    backends.note_fallback("range_energy", "xpu")
    backends.functions["xpu", "range_energy"] = backends.functions["xpu", "pack_band"] = reference.pack_band
    assert kernels.served()["xpu"] == {
        "pack_band": "triton (not called yet)",
        "range_energy": "triton (not called yet) and reference",
    }


def test_a_gpu_kernel_that_fails_is_replaced_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("functions", "_status", "_compiled"):
        monkeypatch.setattr(backends, name, dict(getattr(backends, name)))

    def broken(*arguments: Any) -> Tensor:
        raise NotImplementedError("no such machine\nand more")

    serve = backends._or_reference("cuda", "range_energy", broken)
    x = sample(64, torch.float32)
    with pytest.warns(RuntimeWarning, match=r"kernel for range_energy failed \(NotImplementedError: no such machine\)"):
        assert_same(serve(x, 64, 8, False), reference.range_energy(x, 64, 8, False), "served")
    assert kernels.status("cuda")["range_energy"] == "reference: NotImplementedError: no such machine"
    assert backends.functions["cuda", "range_energy"] is reference.range_energy
    with pytest.raises(RuntimeError):  # what the reference refuses too is an error of the caller
        backends._or_reference("cuda", "block_means", broken)(x, (1, 1, 40, 40, 1), 8, torch.float32)
    assert kernels.status("cuda")["block_means"].startswith("triton")


def test_a_lack_of_memory_is_no_fault_of_a_kernel() -> None:
    def full(*arguments: Any) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        backends._or_reference("cuda", "range_energy", full)(sample(64, torch.float32), 64, 8, False)
    assert kernels.status("cuda")["range_energy"].startswith("triton")


def test_without_triton() -> None:
    code = """
        from lowtide.kernels import backends
        class Hide:
            def find_spec(self, name, path=None, target=None):
                if name.partition('.')[0] == 'triton':
                    raise ImportError('no triton here')
        sys.meta_path.insert(0, Hide())
        for name in [name for name in sys.modules if name.partition('.')[0] == 'triton']:
            del sys.modules[name]  # torch may have imported it
        assert 'lowtide.kernels.gpu' not in sys.modules
        serve = backends._lazy('cuda', 'range_energy')
        assert torch.equal(serve(x, x.numel(), 256, False), reference.range_energy(x, x.numel(), 256, False))
        assert kernels.served()['cuda'] == {'range_energy': 'reference: ImportError: no triton here'}
    """
    run(code)


def test_empty() -> None:
    for dtype in FLOATS:
        x = torch.empty(0, dtype=dtype)
        truth = reference.quantize_groups(x, 0, 256, 2, 0, False)
        assert_same(ops.quantize_groups(x, 0, 256, 2, 0, False), truth, dtype)
        assert_same(ops.pack_band(x, 0.0, 1.0, True, False), torch.empty(0, dtype=torch.uint8), dtype)


def test_inputs_that_require_grad() -> None:
    x = sample(1000, torch.float32)
    truth = reference.quantize_groups(x, 1000, 256, 2, 0, False)
    found = ops.quantize_groups(x.clone().requires_grad_(), 1000, 256, 2, 0, False)
    assert_same(found, truth, "requires grad")
    assert not any(tensor.requires_grad for tensor in found)


def test_wrong_sizes_raise_instead_of_reading_beyond() -> None:
    x = sample(1000, torch.float32)
    with pytest.raises(RuntimeError):
        ops.quantize_groups(x, 999, 256, 2, 0, False)
    with pytest.raises(RuntimeError):
        ops.block_means(x, (1, 1, 40, 40, 1), 8, torch.float32)
    with pytest.raises(RuntimeError):
        ops.quantize_blocks(x, (1, 1, 40, 40, 1), 8, 1000, 256, 2, 0, False)
    codes, side = ops.quantize_groups(x, 1000, 256, 2, 0, False)
    with pytest.raises(RuntimeError):
        ops.dequantize_groups(codes[:-4], side, 1000, 1000, 256, 2, torch.float32, None)
    with pytest.raises(RuntimeError):
        ops.dequantize_groups(codes, side[:-2], 1000, 1000, 256, 2, torch.float32, None)
    for levels in (torch.arange(3.0), torch.arange(4)):
        with pytest.raises(RuntimeError, match="levels must be 4 float32 values"):
            ops.quantize_groups(x, 1000, 256, 2, 0, False, levels)
        with pytest.raises(RuntimeError, match="levels must be 4 float32 values"):
            ops.dequantize_groups(codes, side, 1000, 1000, 256, 2, torch.float32, None, levels)
    with pytest.raises(RuntimeError, match="a key subtracts dither from even levels"):
        ops.dequantize_groups(codes, side, 1000, 1000, 256, 2, torch.float32, None, torch.arange(4.0), 0)


def test_float64_is_served_by_the_reference() -> None:
    x = sample(1000, torch.float64)
    truth = reference.quantize_groups(x, 1000, 256, 2, 0, False)
    assert_same(ops.quantize_groups(x, 1000, 256, 2, 0, False), truth, "float64")


def test_many_python_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    inputs = [sample(270_000 + 1000 * i, torch.float32) for i in range(8)]
    truths = [reference.quantize_groups(x, x.numel(), 256, 2, 5, False) for x in inputs]

    def work(i: int) -> None:
        for _ in range(20):
            assert_same(ops.quantize_groups(inputs[i], inputs[i].numel(), 256, 2, 5, False), truths[i], i)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


class LateRuntime:
    """OpenMP on busy cores: some teams end long after their work is done."""

    def __init__(self, real: Any) -> None:
        self.real, self.late, self.teams = real, True, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def parallel(self, *arguments: Any) -> None:
        self.teams += 1
        self.real.parallel(*arguments)
        if self.late:
            time.sleep(0.05)


def test_threads_that_come_late_are_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = LateRuntime(cpu._compiled.openmp)
    monkeypatch.setattr(cpu._compiled, "openmp", runtime)
    monkeypatch.setattr(cpu, "_teams", cpu._Teams())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x = sample(1 << 18, torch.float32)
    truth = reference.quantize_groups(x, x.numel(), 256, 2, 5, False)

    def calls(count: int) -> int:
        before = runtime.teams
        for _ in range(count):
            assert_same(ops.quantize_groups(x, x.numel(), 256, 2, 5, False), truth, "late")
        return runtime.teams - before

    assert calls(1) == 1
    for pause in (8, 16, 32):  # each as long as the late teams before it make it
        assert calls(pause) == 0
        assert calls(1) == 1
    assert calls(64) == 0
    monkeypatch.setattr(cpu, "_LATE", 1 << 62)  # from here on no team is late, on a busy machine neither
    runtime.late = False
    assert calls(3) == 3


def test_small_tensors_have_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = LateRuntime(cpu._compiled.openmp)
    monkeypatch.setattr(cpu._compiled, "openmp", runtime)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    ops.pack_band(sample(cpu._SMALL - 1, torch.float32), 0.0, 1.0, True, False)
    assert runtime.teams == 0


def run(code: str, timeout: float = 120.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a process of its own, with ``ops``, ``reference`` and an input ``x`` at hand."""
    start = """
        import os, sys, torch
        from lowtide import kernels
        from lowtide.kernels import ops
        from lowtide.kernels import reference
        x = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
        def check():
            ours = ops.quantize_groups(x, x.numel(), 256, 2, 5, False)
            truth = reference.quantize_groups(x, x.numel(), 256, 2, 5, False)
            assert all(torch.equal(a, b) for a, b in zip(ours, truth))
    """
    result = fresh.run(textwrap.dedent(start) + textwrap.dedent(code), timeout, **environment)
    assert result.returncode == 0, result.stderr
    return result


def test_import_leaves_numba_alone() -> None:
    run("assert 'numba' not in sys.modules; assert set(kernels.status().values()) == {'numba (not compiled yet)'}")


FORK = """
    def everything():
        packed = ops.quantize_groups(x, x.numel(), 256, 2, 5, False)
        mask = ops.pack_band(x, 0.0, 1.0, True, False)
        return [part.numpy().tobytes() for part in (*packed, mask)]
    {before}
    torch.ones(1_000_000).mul_(2.0)  # OpenMP has threads now
    child = os.fork()
    if child == 0:
        assert torch.get_num_threads() == 2
        ours = everything()
        torch.set_num_threads(1)  # for the reference: torch, too, may hang on OpenMP in a forked child
        check()
        truth = reference.pack_band(x, 0.0, 1.0, True, False)
        os._exit(0 if ours[2] == truth.numpy().tobytes() and ours == everything() else 1)
    assert os.waitpid(child, 0)[1] == 0
    check()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("before", ["everything()", "ops.quantize_groups(x[:100], 100, 10, 2, 5, False)", ""])
def test_fork(before: str) -> None:
    run("torch.set_num_threads(2)\n" + textwrap.dedent(FORK).format(before=before))


WORKQUEUE = """
    import threading, numba, numpy as np
    from concurrent.futures import ThreadPoolExecutor
    @numba.njit(parallel=True, nogil=True)
    def users(x):
        for i in numba.prange(x.size):
            x[i] = np.sin(x[i])
    def busy():
        while not over:
            users(np.ones(1_000_000))
    over = False
    users(np.ones(10))
    thread = threading.Thread(target=busy)
    thread.start()
    torch.set_num_threads(2)
    list(ThreadPoolExecutor(8).map(lambda _: check(), range(40)))
    over = True
    thread.join()
    assert numba.threading_layer() == 'workqueue'
"""


def test_a_threading_layer_that_aborts_when_shared() -> None:
    run(WORKQUEUE, NUMBA_THREADING_LAYER="workqueue")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_threads_are_those_of_torch() -> None:
    run(
        """
        torch.set_num_threads(2)
        check()
        from lowtide.kernels import cpu
        assert cpu._compiled.openmp.parallel is not None and 'team' in cpu._compiled.code._addresses
        runtimes = {l.split()[-1] for l in open('/proc/self/maps') if 'gomp' in l or 'iomp' in l or 'libomp' in l}
        assert len(runtimes) == 1, runtimes
        """
    )


HIDE = """
    class Hide:
        def find_spec(self, name, path=None, target=None):
            if name.partition('.')[0] == 'numba':
                raise ImportError('no numba here')
    sys.meta_path.insert(0, Hide())
    check()
    assert kernels.status()['quantize_groups'] == 'reference: ImportError: no numba here', kernels.status()
"""


def test_without_numba(tmp_path: Path) -> None:
    assert run(HIDE, NUMBA_CACHE_DIR=str(tmp_path)).stderr == NOTICE


def test_what_is_in_the_cache_needs_no_numba() -> None:
    """Numba would take more than a second and a hundred megabytes of each process."""
    ops.quantize_groups(sample(64, torch.float32), 64, 64, 2, 5, False)  # compiles it, if nobody has
    code = """
        check()
        assert 'numba' not in sys.modules and 'lowtide.kernels.compiled' not in sys.modules
        assert kernels.status()['quantize_groups'] == 'numba'
    """
    assert run(code).stderr == ""


def test_kernel_that_does_not_compile(tmp_path: Path) -> None:
    run(
        """
        from lowtide.kernels import compiled
        def broken(a, b, c, d): return undefined_name
        compiled.KERNELS['quantize_groups'] = broken
        check()
        status = kernels.status()
        assert status['quantize_groups'].startswith('reference: '), status
        ops.pack_band(x, 0.0, 1.0, True, False)
        assert kernels.status()['pack_band'] == 'numba'
        """,
        NUMBA_CACHE_DIR=str(tmp_path),
    )


def test_reference_on_request() -> None:
    run(
        "check(); assert 'numba' not in sys.modules\n"
        "assert kernels.served() == {'cpu': {'quantize_groups': 'reference: LOWTIDE_KERNELS=reference'}}\n"
        "assert set(kernels.status().values()) == {'reference: LOWTIDE_KERNELS=reference'}",
        LOWTIDE_KERNELS="reference",
    )


NOTICE = "lowtide: compiling CPU kernels (once, then cached)\n"


def test_a_broken_cache_is_filled_again(tmp_path: Path) -> None:
    """Compiling is told of, and a process that finds all in the cache says nothing."""
    code = """
        torch.set_num_threads(2)
        ops.pack_band(torch.randn(1 << 20), 0.0, 1.0, True, False)  # many values, so that a team is launched
        assert kernels.status()['pack_band'] == 'numba', kernels.status()
    """
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)).stderr == NOTICE
    for pattern, part in (("team.*.o", 0.99), ("team.*.o", 0.0), ("*.o", 0.1)):
        files = list(tmp_path.rglob(pattern))
        assert files
        for file in files:
            file.write_bytes(file.read_bytes()[: int(part * file.stat().st_size)])
        assert run(code, NUMBA_CACHE_DIR=str(tmp_path)).stderr == NOTICE, (pattern, part)
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)).stderr == ""


def test_the_cache_looks_at_every_file(tmp_path: Path) -> None:
    """A kernel contains the numbers of ``layout``."""
    code = """
        from lowtide.kernels import layout
        assert 'lowtide.kernels.cpu' not in sys.modules
        class Other:
            get_data = staticmethod(lambda path: b'other numbers')
        layout.__loader__ = Other if {other} else layout.__loader__
        from lowtide.kernels import cpu
        cpu.compile('pack_band')
    """
    for other, notice in ((False, NOTICE), (False, ""), (True, NOTICE)):
        assert run(code.format(other=other), NUMBA_CACHE_DIR=str(tmp_path)).stderr == notice


def test_no_two_compiled_functions_share_a_name() -> None:
    """Within an object file the linker would take two functions of one name for one."""
    dispatcher = type(compiled._fill)
    found, new = {}, [f for f in vars(compiled).values() if isinstance(f, dispatcher)]
    while new:
        function = new.pop()
        if id(function) not in found:
            found[id(function)] = function.py_func.__qualname__
            cells = [cell.cell_contents for cell in function.py_func.__closure__ or ()]
            new += [f for f in cells if isinstance(f, dispatcher)]
    assert len(found) > 50
    assert [name for name, count in Counter(found.values()).items() if count > 1] == []


def test_no_place_for_a_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = """
        ops.pack_band(x, 0.0, 1.0, True, False)
        assert kernels.status()['pack_band'] == 'numba'
    """
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path / "file")).stderr == NOTICE


def test_the_cache_of_a_package_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own is next; whoever sets a folder for Numba gets that one alone."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setattr(native, "__file__", str(tmp_path / "no file" / "native.py"))
    (tmp_path / "no file").touch()
    native._write("kernel", b"code")
    (file,) = tmp_path.rglob("*.*")
    assert file.parent == tmp_path / "own" / "lowtide"
    assert native._read("kernel") == b"code"
    monkeypatch.setattr(native, "_SOURCES", b"other sources")
    assert native._read("kernel") is None
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "given"))
    native._write("kernel", b"more")
    assert [p.parts[-3] for p in native._files("kernel")] == ["given"]
    assert native._read("kernel") == b"more"
