"""Launches the Triton kernels of ``programs``, and serves them as operators on GPUs.

Imported on the first call of an operator with a tensor of a GPU. No function here waits for the device;
small tables are sent to it once.

A launch goes to the device of the tensor and to the stream that is current there, also in the thread of autograd. What
a kernel does not know (other types, groups of more than ``LARGEST`` values) is left to the reference and noted.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import programs, reference
from .backends import note_fallback
from .reference import channel_sizes, channel_step, group_bytes, groups_in_row, low_shape, norm_gradients, row_bytes

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LARGEST = 1 << 14  # values of a group: more do not fit the registers of one program
_TILE = 1024  # lanes of a program, of four values each
_MAPS_TILE = 512  # the same where a program makes block means first, in two warps
_MAPS_MOST = 1 << 14  # values whose means a program makes
_SIZE = 1024  # values of a program that knows no groups
_MANY = (1 << 31) - 1 - LARGEST  # what 32-bit numbers inside a row, and programs of a launch, can count
_NO_ROOM = 1 << 50
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Products and sums are rounded by themselves, as in the reference.
_OPTIONS = {"enable_fp_fusion": False}


def _guard(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    device = getattr(torch.get_device_module(tensor.device), "device", None)
    return nullcontext() if device is None else device(tensor.device)


def _refer(name: str, *arguments: Any) -> Any:
    note_fallback(name, arguments[0].device.type)
    return getattr(reference, name)(*arguments)


def _raw(tensor: Tensor) -> Tensor:
    """bfloat16 as integers: the kernels convert it themselves."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _word(value: int) -> int:
    """32 bits as a number that Triton types as int32."""
    value &= 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value


@lru_cache
def magic(divisor: int) -> tuple[int, int]:
    """``n // divisor == (n * m >> 32) >> s`` for 0 <= n < 2**31; (0, 0) for a divisor of 1."""
    if divisor == 1:
        return 0, 0
    shift = (divisor - 1).bit_length() - 1
    return _word(-(-(1 << (32 + shift)) // divisor)), shift


@lru_cache
def wide_magic(divisor: int) -> tuple[int, int]:
    """``n // divisor == (n * m >> 64) >> s`` for 0 <= n < 2**63; (0, 0) for a divisor of 1."""
    if divisor == 1:
        return 0, 0
    shift = (divisor - 1).bit_length() - 1
    return -(-(1 << (64 + shift)) // divisor) - 2**64, shift


def _channels(inner: int, channels: int) -> dict[str, int]:
    """What leads from the place of a value to its channel: see ``programs._channel_at``."""
    found = {"inner": inner, "channels": channels}
    for name, number in list(found.items()):
        found[f"m_{name}"], found[f"h_{name}"] = magic(number)
        found[f"M_{name}"], found[f"H_{name}"] = wide_magic(number)
    return found


def _tile(n: int) -> tuple[int, int, int]:
    """Groups of a program, its lanes, and its warps."""
    lane = max(8, 1 << (-(-n // 4) - 1).bit_length())
    lanes = _TILE if n == 4 * lane else _TILE // 2  # other lengths need more registers for each value
    return max(1, lanes // lane), lane, 4 * max(1, lane // _TILE)


def _is(tensor: Tensor, dtype: torch.dtype, numel: int) -> bool:
    return tensor.dtype == dtype and tensor.numel() == numel and tensor.is_contiguous()


def _table(levels: Tensor | None) -> Tensor | None:
    """The levels, then the inverse of the distance from each to the next."""
    return None if levels is None else torch.cat([levels, 1.0 / (levels[1:] - levels[:-1])])


def _levels_fit(levels: Tensor | None, bits: int) -> bool:
    return levels is None or (bits <= 4 and _is(levels, torch.float32, 2**bits))


def _groups_fit(numel: int, row: int, group: int, bits: int) -> bool:
    return (
        numel > 0
        and row > 0
        and numel % row == 0
        and row <= _MANY
        and group > 0
        and min(row, group) <= LARGEST
        and 0 <= bits <= 8
        and numel // row * groups_in_row(row, group) <= _MANY
    )


def _packed_fit(codes: Tensor, side: Tensor, support: Tensor | None, numel: int, sizes: tuple[int, int]) -> bool:
    """Whether codes, side words (given by their number of groups) and support are what a kernel may read."""
    return (
        _is(codes, torch.uint8, sizes[1])
        and _is(side, torch.int16, 2 * sizes[0])
        and (support is None or _is(support, torch.uint8, -(-numel // 8)))
    )


def _support_fits(support: Tensor | None, positive: bool, numel: int) -> bool:
    return support is None or (positive and _is(support, torch.uint8, -(-numel // 8)))


def _sizes(numel: int, row: int, group: int, bits: int) -> tuple[int, int]:
    return numel // row * groups_in_row(row, group), numel // row * row_bytes(row, group, bits)


class _Groups:
    """Which groups a kernel is launched for: rows of any kind, or blocks by channels."""

    def __init__(
        self, numel: int, row: int, group: int, bits: int, geometry: Sequence[int] | None = None, whole: bool = False
    ) -> None:
        """``whole`` says that nothing depends on rows, which are one if their groups have one length."""
        self.numel, self.bits = numel, bits
        self.channels, self.inner, self.step, self.one = 1, 1, 1, False
        if geometry is None:
            self.row, self.group = row, min(row, group)
            self.layout = int(row % self.group != 0)
            if self.layout == 0 and numel <= _MANY and whole:
                self.row, self.layout = numel, 3
        else:
            outer, self.channels, self.inner = geometry
            self.step = min(channel_step(self.inner, group), outer)
            self.row, self.group, self.outer = self.channels * self.inner, self.step * self.inner, outer
            self.layout, self.one = 2, self.inner == 1

    def launches(self) -> list[tuple[tuple[int, int], int, dict[str, int]]]:
        """Grid, values of a group, and the numbers that say where groups are; groups of one length at a time."""
        found = []
        if self.layout == 2:
            full, rest = divmod(self.outer, self.step)
            size = group_bytes(self.group, self.bits)
            for first, blocks, step in ((0, full, self.step), (full, int(rest > 0), rest)):
                if blocks:
                    n = step * self.inner
                    numbers = {"first": first, "full_bytes": group_bytes(n, self.bits), "n": n}
                    numbers["byte0"] = first * self.channels * size
                    tile = _tile(n)[0]
                    found.append(((blocks, -(-self.channels // tile)), n, numbers))
            shared = {
                "count": 0,
                "per": 1,
                "m_per": 0,
                "h_per": 0,
                "row": self.row,
                "group": self.group,
                "per_row": 1,
                "row_bytes": 0,
            }
            shared["step"] = self.step
        else:
            rows, (full, rest) = self.numel // self.row, divmod(self.row, self.group)
            for first, per, n in ((0, full, self.group), (full, int(rest > 0), rest)):
                if per:
                    numbers = {"count": rows * per, "per": per, "first": first, "n": n, "byte0": 0}
                    numbers["m_per"], numbers["h_per"] = magic(per)
                    found.append(((-(-rows * per // _tile(n)[0]), 1), n, numbers))
            shared = {"row": self.row, "group": self.group, "per_row": groups_in_row(self.row, self.group), "step": 1}
            shared["row_bytes"] = row_bytes(self.row, self.group, self.bits) if self.bits else 0
            shared["full_bytes"] = group_bytes(self.group, self.bits) if self.bits else 0
        shared |= {"channels": self.channels, "inner": self.inner}
        return [(grid, n, {**shared, **numbers}) for grid, n, numbers in found]

    def frame(self) -> tuple[int, ...]:
        """How a place in a group of blocks by channels is divided by ``inner``."""
        return (0, *magic(self.inner), *(0,) * 13)

    def markable(self) -> bool:
        """Whether every group begins on a byte of a mask, and its lanes are whole bytes of it."""
        return self.layout in (0, 3) and self.group == 4 * _tile(self.group)[1]


class _Means:
    """Block means of a tensor, as kernels for groups read them."""

    def __init__(self, low: Tensor, geometry: Sequence[int], block: int, row: int) -> None:
        self.low, self.block, self.geometry, self.row = _raw(low), block, tuple(geometry), row
        self.flat, self.deep = geometry[4] == 1, geometry[1] != 1

    def unit(self, group: int, even: bool) -> int:
        """How many neighbours have one place among the blocks, in all groups of a launch."""
        whole = math.gcd(8, group, math.gcd(self.geometry[3], self.block) if self.flat else self.geometry[4])
        return whole if even else 1

    def frame(self, unit: int) -> tuple[int, ...]:
        return _frame(self.geometry, self.block, self.row, unit, self.maps(unit))

    def maps(self, unit: int) -> bool:
        """Whether a place is found in a map, and then in a row of it."""
        _, s1, s2, s3, _ = self.geometry
        s3 = s3 // unit if self.flat else s3
        return s1 == 1 and s3 > 1 and s2 * s3 * s3 < 1 << 32


@lru_cache
def _frame(geometry: tuple[int, ...], block: int, row: int, unit: int, maps: bool = False) -> tuple[int, ...]:
    """Divisors that lead from a unit of a row to its block: see ``programs._mean_at``.

    With ``maps`` a map is found first. Numbers in it are divided by its ``s3`` units of a row as the product with
    ``ceil(2**32 / s3)`` over ``2**32``: too large by less than ``1 / s3``, as ``s2 * s3 * s3`` is less than ``2**32``.
    """
    _, s1, s2, s3, inner = geometry
    _, b1, b2, b3, _ = low_shape(geometry, block)
    means = row // (s1 * s2 * s3 * inner) * (b1 * b2 * b3 * inner)
    s3, inner = (s3 // unit, 1) if inner == 1 else (s3, inner // unit)
    lines = (*magic(s2 * s3), -s2 * s3, _word(-(-(1 << 32) // s3)), 0, -s3)
    lines = lines if maps else (*magic(s3), s3, *magic(s2), s2)
    return (means, *magic(inner), inner, *lines, *magic(s1), s1, b1, b2, b3)


def _blocks_fit(numel: int, geometry: Sequence[int], block: int, row: int) -> bool:
    return (
        numel > 0
        and math.prod(geometry) == numel
        and row > 0
        and row % math.prod(geometry[1:]) == 0
        and math.prod(low_shape(geometry, block)) <= _MANY
    )


def _named(frame: tuple[int, ...]) -> dict[str, int]:
    return {f"f{i}": number for i, number in enumerate(frame)}


def _quantize(
    x: Tensor,
    groups: _Groups,
    sizes: tuple[int, int],
    key: int,
    positive: bool,
    levels: Tensor | None,
    support: Tensor | None,
    means: _Means | None = None,
    widths: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    room = torch.empty if starts is None else torch.zeros  # samples may leave bytes at the end
    codes = room(sizes[1], dtype=torch.uint8, device=x.device)
    side = torch.empty(2 * sizes[0], dtype=torch.int16, device=x.device)
    table, marked = _table(levels), support is not None and groups.markable()
    for grid, n, numbers in groups.launches():
        tile, lane, warps = _tile(n)
        unit = means.unit(groups.group, n == 4 * lane) if means else 1
        programs.quantize[grid](
            x_ptr=_raw(x), codes_ptr=codes, side_ptr=side.view(torch.int32), mask_ptr=support if marked else None,
            low_ptr=None if means is None else means.low, levels_ptr=table, widths_ptr=widths, starts_ptr=starts,
            key_low=_word(key), key_high=_word(key >> 32), **numbers,
            **_named(means.frame(unit) if means else groups.frame()), grain=1 << (15 - groups.bits), four=4,
            KIND=KINDS[x.dtype], BITS=groups.bits, POSITIVE=positive, MASK=marked,
            LEVELS=0 if levels is None else groups.bits, LAYOUT=groups.layout,
            ALL=groups.layout != 2 and numbers["count"] % tile == 0, ONE=groups.one,
            BLOCK=means.block if means else 0, FLAT=means is not None and means.flat,
            DEEP=means is not None and means.deep,
            MAPS=means is not None and means.maps(unit), UNIT=unit, EVEN=n == 4 * lane, QUAD=n % 4 == 0,
            GROUPS=tile, LANE=lane, num_warps=warps, **_OPTIONS,
        )  # fmt: skip
    if support is not None and not marked:
        support.copy_(pack_band(x, 0.0, math.inf, False, True).view_as(support))
    return codes, side


def _dequantize(
    codes: Tensor,
    side: Tensor,
    groups: _Groups,
    dtype: torch.dtype,
    support: Tensor | None,
    levels: Tensor | None,
    key: int | None,
    means: _Means | None = None,
    widths: Tensor | None = None,
    starts: Tensor | None = None,
    affine: tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None = None,
) -> Tensor:
    out = torch.empty(groups.numel, dtype=dtype, device=codes.device)
    scale, shift, other, mask = affine or (None, None, None, None)
    for grid, n, numbers in groups.launches():
        tile, lane, warps = _tile(n)
        unit = means.unit(groups.group, n == 4 * lane) if means else 1
        programs.dequantize[grid](
            out_ptr=_raw(out), codes_ptr=codes, side_ptr=side.view(torch.int32), support_ptr=support,
            low_ptr=None if means is None else means.low, levels_ptr=levels, widths_ptr=widths, starts_ptr=starts,
            scale_ptr=scale, shift_ptr=shift, other_ptr=other, mask_ptr=mask,
            key_low=_word(key or 0), key_high=_word((key or 0) >> 32), **numbers,
            **_named(means.frame(unit) if means else groups.frame()), grain=1 << (15 - groups.bits), four=4,
            KIND=KINDS[dtype], BITS=groups.bits, SUPPORT=support is not None, DITHER=key is not None,
            LEVELS=0 if levels is None else groups.bits, LAYOUT=groups.layout,
            ALL=groups.layout != 2 and numbers["count"] % tile == 0, ONE=groups.one,
            BLOCK=means.block if means else 0, FLAT=means is not None and means.flat,
            DEEP=means is not None and means.deep,
            MAPS=means is not None and means.maps(unit), UNIT=unit, AFFINE=affine is not None, OTHER=other is not None,
            MASK=mask is not None, EVEN=n == 4 * lane, GROUPS=tile, LANE=lane, num_warps=warps, **_OPTIONS,
        )  # fmt: skip
    return out


# ---------------------------------------------------------------- operators


def quantize_groups(
    x: Tensor,
    row: int,
    group: int,
    bits: int,
    key: int,
    positive: bool,
    levels: Tensor | None = None,
    support: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    numel = x.numel()
    if (
        x.dtype not in KINDS
        or not x.is_contiguous()
        or not _groups_fit(numel, row, group, bits)
        or bits < 1
        or not _levels_fit(levels, bits)
        or not _support_fits(support, positive, numel)
    ):
        found: tuple[Tensor, Tensor] = _refer("quantize_groups", x, row, group, bits, key, positive, levels, support)
        return found
    with _guard(x):
        groups, sizes = _Groups(numel, row, group, bits, whole=True), _sizes(numel, row, group, bits)
        return _quantize(x, groups, sizes, key, positive, levels, support)


def dequantize_groups(
    codes: Tensor,
    side: Tensor,
    numel: int,
    row: int,
    group: int,
    bits: int,
    dtype: torch.dtype,
    support: Tensor | None,
    levels: Tensor | None = None,
    key: int | None = None,
) -> Tensor:
    """See the reference."""
    if (
        dtype not in KINDS
        or not _groups_fit(numel, row, group, bits)
        or bits < 1
        or not _packed_fit(codes, side, support, numel, _sizes(numel, row, group, bits))
        or not _levels_fit(levels, bits)
        or (levels is not None and key is not None)
    ):
        given = (codes, side, numel, row, group, bits, dtype, support, levels, key)
        found: Tensor = _refer("dequantize_groups", *given)
        return found
    with _guard(codes):
        return _dequantize(codes, side, _Groups(numel, row, group, bits, whole=True), dtype, support, levels, key)


def quantize_blocks(
    x: Tensor,
    geometry: Sequence[int],
    block: int,
    row: int,
    group: int,
    bits: int,
    key: int,
    positive: bool,
    levels: Tensor | None = None,
    support: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference. Means are made first, in a pass of their own."""
    numel = x.numel()
    if (
        x.dtype not in KINDS
        or not x.is_contiguous()
        or not _blocks_fit(numel, geometry, block, row)
        or not _groups_fit(numel, row, group, bits)
        or bits < 1
        or not _levels_fit(levels, bits)
        or not _support_fits(support, positive, numel)
    ):
        given = (x, geometry, block, row, group, bits, key, positive, levels, support)
        found: tuple[Tensor, Tensor, Tensor] = _refer("quantize_blocks", *given)
        return found
    with _guard(x):
        groups, sizes = _Groups(numel, row, group, bits, whole=True), _sizes(numel, row, group, bits)
        span = _span(groups, geometry, block) if _one_pass(x.device) else 0
        if span:
            return _quantize_maps(x, groups, sizes, geometry, block, span, key, positive, levels, support)
        low = _means_of(x, geometry, block, torch.bfloat16, nan=False)
        means = _Means(low, geometry, block, groups.row)
        return low, *_quantize(x, groups, sizes, key, positive, levels, support, means)


def _one_pass(device: torch.device) -> bool:
    """Whether threads of a program see after a barrier what others wrote to global memory before it.

    PTX says so. On ROCm Triton's barrier waits for shared memory alone, and of XPU nothing is known.
    """
    return device.type != "xpu" and torch.version.hip is None


def _span(groups: _Groups, geometry: Sequence[int], block: int) -> int:
    """Groups that are whole maps, of which a program makes the means and the codes; 0 if that would not pay.

    The fewest that are six tiles or more, and at most ``_MAPS_MOST`` values: those of all programs at work must stay
    in a cache.
    """
    _, s1, s2, s3, inner = geometry
    lane = _tile(groups.group)[1]
    if groups.layout != 3 or groups.group != 4 * lane or lane > _MAPS_TILE or s1 * inner != 1 or block > 8:
        return 0
    if s3 == math.gcd(8, s3) or s2 * s3 * s3 >= 1 << 32:  # see ``_Means.maps``
        return 0
    least = math.lcm(s2 * s3, groups.group) // groups.group
    tile = _MAPS_TILE // lane
    span = min(-(-6 * tile // least) * least, groups.numel // groups.group)
    return span if span * groups.group <= _MAPS_MOST else 0


def _quantize_maps(
    x: Tensor,
    groups: _Groups,
    sizes: tuple[int, int],
    geometry: Sequence[int],
    block: int,
    span: int,
    key: int,
    positive: bool,
    levels: Tensor | None,
    support: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One pass, as far as the second reading of a span comes from a cache."""
    codes = torch.empty(sizes[1], dtype=torch.uint8, device=x.device)
    side = torch.empty(2 * sizes[0], dtype=torch.int16, device=x.device)
    vector, numbers = _block_numbers(x, geometry, block)
    low = torch.empty(numbers["blocks"], dtype=torch.bfloat16, device=x.device)
    means, lane = _Means(low, geometry, block, groups.row), _tile(groups.group)[1]
    unit, tile = means.unit(groups.group, True), _MAPS_TILE // lane
    rest = span % tile
    programs.quantize_maps[(-(-sizes[0] // span),)](
        x_ptr=_raw(x), codes_ptr=codes, side_ptr=side.view(torch.int32), mask_ptr=support, low_ptr=means.low,
        levels_ptr=_table(levels), count=sizes[0], group=groups.group,
        full_bytes=group_bytes(groups.group, groups.bits), key_low=_word(key), key_high=_word(key >> 32),
        grain=1 << (15 - groups.bits), four=4, **_named(means.frame(unit)), **numbers,
        KIND=KINDS[x.dtype], BITS=groups.bits, POSITIVE=positive, MASK=support is not None,
        LEVELS=0 if levels is None else groups.bits, BLOCK=block, UNIT=unit, VECTOR=vector, GROUPS=tile, LANE=lane,
        SPAN=span, REST=1 << (rest - 1).bit_length() if rest else 0,
        BLOCKS=span * groups.group // (geometry[2] * geometry[3]) * math.prod(low_shape(geometry, block)[2:4]), SIZE=64,
        num_warps=2, maxnreg=None if groups.bits in (1, 2, 4, 8) else 192,  # else sm_100's compiler spills at 128
        **_OPTIONS,
    )  # fmt: skip
    return low, codes, side


def dequantize_blocks(
    low: Tensor,
    codes: Tensor,
    side: Tensor,
    geometry: Sequence[int],
    block: int,
    row: int,
    group: int,
    bits: int,
    dtype: torch.dtype,
    support: Tensor | None,
    levels: Tensor | None = None,
    key: int | None = None,
) -> Tensor:
    """See the reference."""
    numel = math.prod(geometry)
    if (
        dtype not in KINDS
        or not _blocks_fit(numel, geometry, block, row)
        or not _groups_fit(numel, row, group, bits)
        or bits < 1
        or not _is(low, torch.bfloat16, math.prod(low_shape(geometry, block)))
        or not _packed_fit(codes, side, support, numel, _sizes(numel, row, group, bits))
        or not _levels_fit(levels, bits)
        or (levels is not None and key is not None)
    ):
        given = (low, codes, side, geometry, block, row, group, bits, dtype, support, levels, key)
        found: Tensor = _refer("dequantize_blocks", *given)
        return found
    with _guard(codes):
        groups = _Groups(numel, row, group, bits, whole=True)
        means = _Means(low, geometry, block, groups.row)
        return _dequantize(codes, side, groups, dtype, support, levels, key, means)


def _channels_fit(numel: int, geometry: Sequence[int], group: int, bits: int) -> bool:
    outer, channels, inner = geometry
    step = channel_step(inner, group) if inner and group > 0 else 0
    return (
        numel > 0
        and outer * channels * inner == numel
        and 0 < step * inner <= LARGEST
        and 1 <= bits <= 8
        and -(-channels // _tile(step * inner)[0]) < 1 << 16
        and channel_sizes(geometry, group, bits)[0] <= _MANY
    )


def quantize_channels(
    x: Tensor,
    geometry: Sequence[int],
    group: int,
    bits: int,
    key: int,
    positive: bool,
    levels: Tensor | None = None,
    support: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    numel = x.numel()
    if numel and math.prod(geometry) == numel and channel_step(geometry[2], group) == 1:
        return quantize_groups(x, geometry[2], group, bits, key, positive, levels, support)
    if (
        x.dtype not in KINDS
        or not x.is_contiguous()
        or not _channels_fit(numel, geometry, group, bits)
        or not _levels_fit(levels, bits)
        or not _support_fits(support, positive, numel)
    ):
        given = (x, geometry, group, bits, key, positive, levels, support)
        found: tuple[Tensor, Tensor] = _refer("quantize_channels", *given)
        return found
    with _guard(x):
        groups = _Groups(numel, 0, group, bits, geometry)
        return _quantize(x, groups, channel_sizes(geometry, group, bits), key, positive, levels, support)


def dequantize_channels(
    codes: Tensor,
    side: Tensor,
    geometry: Sequence[int],
    group: int,
    bits: int,
    dtype: torch.dtype,
    support: Tensor | None,
    levels: Tensor | None = None,
    key: int | None = None,
) -> Tensor:
    """See the reference."""
    numel = math.prod(geometry)
    if numel and channel_step(geometry[2], group) == 1:
        return dequantize_groups(codes, side, numel, geometry[2], group, bits, dtype, support, levels, key)
    if (
        dtype not in KINDS
        or not _channels_fit(numel, geometry, group, bits)
        or not _packed_fit(codes, side, support, numel, channel_sizes(geometry, group, bits))
        or not _levels_fit(levels, bits)
        or (levels is not None and key is not None)
    ):
        given = (codes, side, geometry, group, bits, dtype, support, levels, key)
        found: Tensor = _refer("dequantize_channels", *given)
        return found
    with _guard(codes):
        return _dequantize(codes, side, _Groups(numel, 0, group, bits, geometry), dtype, support, levels, key)


def rebuild_chain(
    codes: Sequence[Tensor],
    sides: Sequence[Tensor],
    geometry: Sequence[int],
    group: int,
    bits: Sequence[int],
    dtype: torch.dtype,
    supports: Sequence[Tensor | None],
    keys: Sequence[int],
    dithered: Sequence[bool],
    scales: Sequence[Tensor],
    shifts: Sequence[Tensor],
    other: Tensor | None,
    masks: Sequence[Tensor | None],
) -> Tensor:
    """See the reference. A kernel for each stage."""
    if not codes:
        raise RuntimeError("a chain has no stages")
    stages = zip(codes, sides, bits, supports, keys, dithered, scales, shifts, masks, strict=True)
    for code, side, width, support, key, dither, scale, shift, mask in stages:
        own = key if dither else None
        other = _rebuild_stage(code, side, geometry, group, width, dtype, support, own, scale, shift, other, mask)
    assert other is not None
    return other


def _rebuild_stage(
    codes: Tensor,
    side: Tensor,
    geometry: Sequence[int],
    group: int,
    bits: int,
    dtype: torch.dtype,
    support: Tensor | None,
    key: int | None,
    scale: Tensor,
    shift: Tensor,
    other: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """One stage of a chain. To 16 bits in two passes."""
    if dtype != torch.float32:
        out = dequantize_channels(codes, side, geometry, group, bits, dtype, support, None, key)
        rebuild_affine(out, geometry, scale, shift, other, mask)
        return out
    numel = math.prod(geometry)
    rows = numel > 0 and group > 0 and channel_step(geometry[2], group) == 1
    fits = _groups_fit(numel, geometry[2], group, bits) if rows else _channels_fit(numel, geometry, group, bits)
    if (
        not fits
        or bits < 1
        or not _packed_fit(codes, side, support, numel, channel_sizes(geometry, group, bits))
        or not _is(scale, torch.float32, geometry[1])
        or not _is(shift, torch.float32, geometry[1])
        or (other is not None and not _is(other, torch.float32, numel))
        or (mask is not None and not _is(mask, torch.uint8, -(-numel // 8)))
    ):
        note_fallback("rebuild_chain", codes.device.type)
        out = reference.dequantize_channels(codes, side, geometry, group, bits, dtype, support, None, key)
        reference.rebuild_affine(out, geometry, scale, shift, other, mask)
        return out
    groups = _Groups(numel, geometry[2], group, bits, None if rows else geometry)
    groups.channels = geometry[1]
    with _guard(codes):
        affine = (scale, shift, other, mask)
        return _dequantize(codes, side, groups, dtype, support, None, key, affine=affine)


def norm_backward(
    grad: Tensor,
    low: Tensor | None,
    codes: Tensor,
    side: Tensor,
    geometry: Sequence[int],
    frame: Sequence[int],
    block: int,
    row: int,
    group: int,
    bits: int,
    key: int | None,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference. Values are decoded as a whole: sessions leave a batch norm on a GPU to torch."""
    numel, kind = math.prod(geometry), torch.float32
    if low is not None:
        x = dequantize_blocks(low, codes, side, frame, block, row, group, bits, kind, None, None, key)
    elif row:
        x = dequantize_groups(codes, side, numel, row, group, bits, kind, None, None, key)
    else:
        x = dequantize_channels(codes, side, geometry, group, bits, kind, None, None, key)
    return norm_gradients(grad, x, geometry, mean, invstd, weight)


def norm_backward_(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """See the reference."""
    found, for_weight, for_bias = norm_backward(grad, *given)
    grad.copy_(found)
    return for_weight, for_bias


def _samples_fit(numel: int, bits: Tensor, group: int) -> bool:
    if bits.dtype != torch.uint8 or bits.dim() != 1 or not bits.numel() or numel % bits.numel() or not numel:
        return False
    return _groups_fit(numel, numel // bits.numel(), group, 0)


@lru_cache(maxsize=1024)
def _row_sizes(row: int, group: int, device: torch.device) -> Tensor:
    """The bytes of a sample's codes by its bits; no bits would take more than there is room for."""
    return torch.tensor([_NO_ROOM, *(row_bytes(row, group, bits) for bits in range(1, 9))], device=device)


def _starts(bits: Tensor, row: int, group: int, room: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """On the device: the bits of each sample, and where its codes begin. The device stops if they find no room."""
    bits = bits.to(like.device, non_blocking=like.device.type != "cpu")
    sizes = _row_sizes(row, group, like.device)[bits.to(torch.int64)]
    ends = sizes.cumsum(0)
    torch.ops.aten._assert_async.msg(ends[-1] <= room, "lowtide: the codes of samples take more bytes than there are")
    return bits, ends - sizes


def quantize_samples(
    x: Tensor, bits: Tensor, size: int, group: int, key: int, positive: bool, support: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See the reference. Bits are not read from the device."""
    numel = x.numel()
    fit = _samples_fit(numel, bits, group) and x.is_contiguous() and _support_fits(support, positive, numel)
    if not fit or x.dtype not in KINDS:
        found: tuple[Tensor, Tensor] = _refer("quantize_samples", x, bits, size, group, key, positive, support)
        return found
    with _guard(x):
        row = numel // bits.numel()
        own, starts = _starts(bits, row, group, size, x)
        sizes = (bits.numel() * groups_in_row(row, group), size)
        groups = _Groups(numel, row, group, 0)
        return _quantize(x, groups, sizes, key, positive, None, support, widths=own, starts=starts)


def dequantize_samples(
    codes: Tensor, side: Tensor, bits: Tensor, numel: int, group: int, dtype: torch.dtype, support: Tensor | None
) -> Tensor:
    """See the reference. Bits are not read from the device."""
    if dtype in KINDS and _samples_fit(numel, bits, group):
        row = numel // bits.numel()
        with _guard(codes):
            if _packed_fit(codes, side, support, numel, (bits.numel() * groups_in_row(row, group), codes.numel())):
                own, starts = _starts(bits, row, group, codes.numel(), codes)
                groups = _Groups(numel, row, group, 0)
                return _dequantize(codes, side, groups, dtype, support, None, None, widths=own, starts=starts)
    found: Tensor = _refer("dequantize_samples", codes, side, bits, numel, group, dtype, support)
    return found


def range_energy(x: Tensor, row: int, group: int, positive: bool) -> Tensor:
    """See the reference. Groups have their squares first, which then are added in order."""
    numel = x.numel()
    if x.dtype not in KINDS or not x.is_contiguous() or not _groups_fit(numel, row, group, 0):
        found: Tensor = _refer("range_energy", x, row, group, positive)
        return found
    with _guard(x):
        rows, per_row = numel // row, groups_in_row(row, group)
        squares = torch.empty(rows * per_row, dtype=torch.float32, device=x.device)
        for (size, _), n, numbers in _Groups(numel, row, group, 0).launches():
            tile, lane, warps = _tile(n)
            used = {name: numbers[name] for name in ("count", "per", "first", "row", "group", "n", "per_row")}
            programs.extents[(size,)](
                _raw(x), squares, **used, KIND=KINDS[x.dtype], POSITIVE=positive, GROUPS=tile, SIZE=4 * lane,
                num_warps=warps, **_OPTIONS,
            )  # fmt: skip
        out = torch.empty(rows, dtype=torch.float32, device=x.device)
        programs.row_sums[(-(-rows // 32),)](squares, out, rows, per_row, SIZE=32, num_warps=1, **_OPTIONS)
        return out


def _cast_fits(numel: int, row: int, group: int, dtype: torch.dtype, small: torch.dtype) -> bool:
    return dtype in KINDS and small in (torch.float8_e4m3fn, torch.float8_e5m2) and _groups_fit(numel, row, group, 0)


def _cast(program: Any, source: Tensor, out: Tensor, scale: Tensor, row: int, group: int, **constants: Any) -> None:
    for (size, _), n, numbers in _Groups(source.numel(), row, group, 0).launches():
        tile, lane, warps = _tile(n)
        used = {name: numbers[name] for name in ("count", "per", "first", "row", "group", "n", "per_row")}
        program[(size,)](
            source, out, scale, **used, **constants, GROUPS=tile, SIZE=4 * lane, num_warps=warps, **_OPTIONS
        )


def cast_groups(
    x: Tensor, row: int, group: int, dtype: torch.dtype, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    numel = x.numel()
    fits = x.is_contiguous() and _cast_fits(numel, row, group, x.dtype, dtype)
    if not fits or (scale is not None and not _is(scale, torch.float32, 1)):
        found: tuple[Tensor, Tensor] = _refer("cast_groups", x, row, group, dtype, scale)
        return found
    with _guard(x):
        out = torch.empty(numel, dtype=dtype, device=x.device)
        if scale is None:
            scales = torch.empty(numel // row * groups_in_row(row, group), dtype=torch.bfloat16, device=x.device)
        else:
            scales = scale.reshape(1).clone()
        constants = {"KIND": KINDS[x.dtype], "E5M2": dtype == torch.float8_e5m2, "SHARED": scale is not None}
        _cast(programs.cast, _raw(x), out.view(torch.uint8), _raw(scales), row, group, **constants)
        return out, scales


def uncast_groups(values: Tensor, scale: Tensor, row: int, group: int, dtype: torch.dtype) -> Tensor:
    """See the reference."""
    numel = values.numel()
    shared = _is(scale, torch.float32, 1)
    fits = values.is_contiguous() and _cast_fits(numel, row, group, dtype, values.dtype)
    if not fits or not (shared or _is(scale, torch.bfloat16, numel // row * groups_in_row(row, group))):
        found: Tensor = _refer("uncast_groups", values, scale, row, group, dtype)
        return found
    with _guard(values):
        out = torch.empty(numel, dtype=dtype, device=values.device)
        constants = {"KIND": KINDS[dtype], "E5M2": values.dtype == torch.float8_e5m2, "SHARED": shared}
        _cast(programs.uncast, values.view(torch.uint8), _raw(out), _raw(scale), row, group, **constants)
        return out


def _block_numbers(x: Tensor, geometry: Sequence[int], block: int) -> tuple[int, dict[str, int]]:
    """How many values of a row are read at once, and numbers that say where blocks are: see ``programs._mean_of``."""
    _, s1, s2, s3, inner = geometry
    shape = low_shape(geometry, block)
    unit = math.gcd(s3, block, 16 // x.element_size()) if s1 == inner == 1 and block <= 8 else 1
    numbers = {"blocks": math.prod(shape), "inner": inner, "units": s3 // unit}
    numbers["m_inner"], numbers["h_inner"] = magic(inner)
    for i, (size, count) in enumerate(zip((s1, s2, s3), shape[1:4], strict=True), 1):
        numbers |= {f"s{i}": size, f"b{i}": count}
        numbers[f"m{i}"], numbers[f"h{i}"] = magic(count)
    return unit, numbers


def _means_of(x: Tensor, geometry: Sequence[int], block: int, dtype: torch.dtype, nan: bool) -> Tensor:
    unit, numbers = _block_numbers(x, geometry, block)
    low = torch.empty(numbers["blocks"], dtype=dtype, device=x.device)
    programs.means[(-(-low.numel() // 128),)](
        _raw(x), _raw(low), **numbers, KIND=KINDS[x.dtype], OUT=KINDS[dtype], NAN=nan, BLOCK=block,
        DEEP=geometry[1] != 1, UNIT=unit, SIZE=128, **_OPTIONS,
    )  # fmt: skip
    return low


def block_means(x: Tensor, geometry: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    """See the reference."""
    fits = x.is_contiguous() and x.numel() > 0 and math.prod(geometry) == x.numel() and block > 0
    fits = fits and math.prod(low_shape(geometry, block)) <= _MANY
    if x.dtype not in KINDS or dtype not in KINDS or not fits:
        found: Tensor = _refer("block_means", x, geometry, block, dtype)
        return found
    with _guard(x):
        return _means_of(x, geometry, block, dtype, nan=True)


def spread_blocks(low: Tensor, geometry: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    """See the reference."""
    numel, sample = math.prod(geometry), math.prod(geometry[1:])
    fits = low.is_contiguous() and numel and low.numel() == math.prod(low_shape(geometry, block))
    if low.dtype not in KINDS or dtype not in KINDS or not fits or sample > _MANY or geometry[0] >= 1 << 16:
        found: Tensor = _refer("spread_blocks", low, geometry, block, dtype)
        return found
    with _guard(low):
        out = torch.empty(numel, dtype=dtype, device=low.device)
        numbers = _named(_frame(tuple(geometry), block, sample, 1))
        programs.spread[(-(-sample // _SIZE), geometry[0])](
            _raw(low), _raw(out), sample, numbers.pop("f0"), **numbers, KIND=KINDS[low.dtype], OUT=KINDS[dtype],
            BLOCK=block, FLAT=geometry[4] == 1, DEEP=geometry[1] != 1, SIZE=_SIZE, **_OPTIONS,
        )  # fmt: skip
        return out


def rebuild_affine(
    x: Tensor, geometry: Sequence[int], scale: Tensor, shift: Tensor, other: Tensor | None, support: Tensor | None
) -> None:
    """See the reference."""
    _, channels, inner = geometry
    numel = x.numel()
    if (
        x.dtype not in KINDS
        or not x.is_contiguous()
        or not numel
        or math.prod(geometry) != numel
        or max(inner, channels) > _MANY
        or not _is(scale, torch.float32, channels)
        or not _is(shift, torch.float32, channels)
        or (other is not None and not _is(other, x.dtype, numel))
        or (support is not None and not _is(support, torch.uint8, -(-numel // 8)))
    ):
        _refer("rebuild_affine", x, geometry, scale, shift, other, support)
        return
    with _guard(x):
        unit = math.gcd(inner, 16 // x.element_size())
        programs.affine[(-(-numel // (2 * _SIZE)),)](
            _raw(x), scale, shift, None if other is None else _raw(other), support, numel,
            **_channels(inner // unit, channels), KIND=KINDS[x.dtype], OTHER=other is not None,
            SUPPORT=support is not None, UNIT=unit, SIZE=2 * _SIZE, **_OPTIONS,
        )  # fmt: skip


def pack_band(x: Tensor, low: float, high: float, closed: bool, nan: bool) -> Tensor:
    """See the reference."""
    if (x.dtype not in KINDS and x.dtype != torch.bool) or not x.is_contiguous() or not x.numel():
        found: Tensor = _refer("pack_band", x, low, high, closed, nan)
        return found
    with _guard(x):
        out = torch.empty(-(-x.numel() // 8), dtype=torch.uint8, device=x.device)
        low, high = ctypes.c_float(low).value, ctypes.c_float(high).value
        source, kind = (x.view(torch.uint8), 3) if x.dtype == torch.bool else (_raw(x), KINDS[x.dtype])
        programs.pack_band[(-(-out.numel() // 256),)](
            source, out, x.numel(), low, high, KIND=kind, FROM=_end(low, -math.inf, closed),
            TO=_end(high, math.inf, closed), NAN=nan, SIZE=256, **_OPTIONS,
        )  # fmt: skip
        return out


def _end(end: float, none: float, closed: bool) -> int:
    """How a band ends: see ``programs.pack_band``."""
    return 0 if end == none else 2 if closed else 1


@lru_cache
def _values(inside: float, outside: float, dtype: torch.dtype) -> tuple[int, int]:
    """The bits of two values, as numbers of the host."""
    if dtype == torch.bool:
        return 1, 0
    first, second = torch.tensor([inside, outside], dtype=torch.float64).to(dtype).view(_INTS[dtype.itemsize]).tolist()
    return first, second


def unpack_band(mask: Tensor, numel: int, dtype: torch.dtype, inside: float, outside: float) -> Tensor:
    """See the reference."""
    if not _is(mask, torch.uint8, -(-numel // 8)) or not numel or not (dtype == torch.bool or dtype.is_floating_point):
        found: Tensor = _refer("unpack_band", mask, numel, dtype, inside, outside)
        return found
    with _guard(mask):
        out = torch.empty(numel, dtype=dtype, device=mask.device)
        numbers = _values(inside, outside, dtype)
        target = out.view(_INTS[dtype.itemsize])
        programs.unpack_band[(-(-numel // _SIZE),)](mask, target, numel, *numbers, SIZE=_SIZE, **_OPTIONS)
        return out


def mask_values(x: Tensor, mask: Tensor) -> Tensor:
    """See the reference."""
    if not _maskable(x, mask):
        found: Tensor = _refer("mask_values", x, mask)
        return found
    out = torch.empty_like(x)
    _mask(x, mask, out)
    return out


def mask_values_(x: Tensor, mask: Tensor) -> None:
    """See the reference."""
    if _maskable(x, mask):
        _mask(x, mask, x)
    else:
        _refer("mask_values_", x, mask)


def _maskable(x: Tensor, mask: Tensor) -> bool:
    fits = x.dtype.itemsize in (2, 4) and x.numel() > 0 and x.is_contiguous()
    return fits and _is(mask, torch.uint8, -(-x.numel() // 8))


def _mask(x: Tensor, mask: Tensor, out: Tensor) -> None:
    with _guard(x):
        source, target = (t.view(_INTS[x.dtype.itemsize]) for t in (x, out))
        programs.mask_values[(-(-x.numel() // _SIZE),)](source, mask, target, x.numel(), SIZE=_SIZE, **_OPTIONS)


def _integers(dtype: torch.dtype) -> bool:
    return dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _packed_view(packed: Tensor, bits: int) -> Tensor:
    return packed.view(_INTS[bits // 8]) if bits > 8 else packed


def pack_uints(x: Tensor, offset: int, bits: int) -> Tensor:
    """See the reference."""
    if not _integers(x.dtype) or not x.is_contiguous() or not x.numel() or bits not in (1, 2, 4, 8, 16, 32):
        found: Tensor = _refer("pack_uints", x, offset, bits)
        return found
    with _guard(x):
        out = torch.empty(-(-x.numel() * bits // 8), dtype=torch.uint8, device=x.device)
        target = _packed_view(out, bits)
        size = 1024 // max(1, 8 // bits)
        programs.pack_uints[(-(-target.numel() // size),)](
            x, target, x.numel(), offset, BITS=bits, SIZE=size, **_OPTIONS
        )  # fmt: skip
        return out


def unpack_uints(packed: Tensor, numel: int, bits: int, offset: int, dtype: torch.dtype) -> Tensor:
    """See the reference."""
    fits = numel and bits in (1, 2, 4, 8, 16, 32) and _is(packed, torch.uint8, -(-numel * bits // 8))
    if not fits or not _integers(dtype):
        found: Tensor = _refer("unpack_uints", packed, numel, bits, offset, dtype)
        return found
    with _guard(packed):
        out = torch.empty(numel, dtype=dtype, device=packed.device)
        programs.unpack_uints[(-(-numel // _SIZE),)](
            _packed_view(packed, bits), out, numel, offset, BITS=bits, SIZE=_SIZE, **_OPTIONS
        )  # fmt: skip
        return out


def _windows_fit(numel: int, starts: Tensor, inner: int, taps: Tensor, bits: int) -> bool:
    return (
        numel > 0
        and 0 < inner <= _MANY
        and 0 < starts.numel() <= _MANY
        and numel % (starts.numel() * inner) == 0
        and starts.dtype == taps.dtype == torch.int64
        and starts.is_contiguous()
        and taps.is_contiguous()
        and bits in (1, 2, 4, 8)
        and 0 < taps.numel() <= 2**bits
    )


def pack_taps(x: Tensor, starts: Tensor, inner: int, taps: Tensor, size: int, bits: int) -> tuple[Tensor, Tensor]:
    """See the reference."""
    numel = x.numel()
    if x.dtype != torch.int64 or not x.is_contiguous() or not _windows_fit(numel, starts, inner, taps, bits):
        found: tuple[Tensor, Tensor] = _refer("pack_taps", x, starts, inner, taps, size, bits)
        return found
    with _guard(x):
        out = torch.empty(-(-numel * bits // 8), dtype=torch.uint8, device=x.device)
        none = torch.zeros((), dtype=torch.int64, device=x.device)
        programs.pack_taps[(-(-out.numel() // (128 * bits)),)](
            x, starts, taps, out, none, numel, taps=taps.numel(), size=size, **_channels(inner, starts.numel()),
            BITS=bits, SIZE=128 * bits, **_OPTIONS,
        )  # fmt: skip
        return out, none


def unpack_taps(packed: Tensor, numel: int, starts: Tensor, inner: int, taps: Tensor, bits: int) -> Tensor:
    """See the reference."""
    fits = _windows_fit(numel, starts, inner, taps, bits)
    if not fits or not _is(packed, torch.uint8, -(-numel * bits // 8)):
        found: Tensor = _refer("unpack_taps", packed, numel, starts, inner, taps, bits)
        return found
    with _guard(packed):
        out = torch.empty(numel, dtype=torch.int64, device=packed.device)
        programs.unpack_taps[(-(-numel // _SIZE),)](
            packed, starts, taps, out, numel, **_channels(inner, starts.numel()), BITS=bits, SIZE=_SIZE, **_OPTIONS
        )  # fmt: skip
        return out
