"""The definition of every kernel, in plain torch: readable, slow, and the truth.

A faster backend must give the same bytes. Everything here is fixed to the bit: the order of
every sum, the random numbers, the rounding of the side information, the layout of the codes.

Numbers written once, used by every backend
    Groups.   A flat tensor is cut into rows of ``row`` values and each row into groups of ``group``
              values; the last group of a row may be shorter. A group starts on a byte.
    Channels. A tensor (outer, channels, inner) may be cut so that no group mixes channels. With ``inner`` of at least
              ``group`` values, rows are runs of ``inner``. Otherwise a block is ``channel_step`` outer indices, and a
              group is what one channel has of a block, outer index by outer index. Groups of a block come channel by
              channel; the last block may be shorter. (Blocks of one index are rows of ``inner`` again.)
    Codes.    Planes whose widths ``w`` are the powers of two in ``bits``, the widest first and with the lowest
              bits of the codes (3 = 2 + 1, 7 = 4 + 2 + 1). In the ``P = ceil(n * w / 8)`` bytes of a plane for
              the ``n`` values of a group, value ``e`` sits in byte ``e % P`` at bit ``(e // P) * w``.
    Side.     Two 16-bit words for each group: ``low`` (bfloat16, rounded down) and ``step``
              (bfloat16, rounded up). A constant group sets the sign bit of the second word and
              keeps its 32-bit value in the remaining 31 bits and the first code's lowest bit, so it
              decodes exactly. A group with a value that is not finite, or with a range beyond
              float32, keeps ``low = NaN`` and decodes to NaN.
    Rounding. ``code = floor((x - low) * inverse + u)`` with ``u`` uniform on [0, 1): unbiased with respect to the
              *stored* low and step. ``inverse`` is the float32 nearest to ``1 / step``, or the largest below it that
              leaves no value of the group above the largest code. The sum is taken from ``2**bits`` on, so that the
              code is in the first bits of its mantissa and nothing has to be clamped or converted. Codes of
              values that set no range mean nothing.
    Decoding. ``low + code * step`` in float32, plus the mean of the block if there is one. A 16-bit type gets the
              nearest of its values, so there the mean of what is decoded may be off by half a unit in the last
              place of the largest decoded value of the group; in float32 there is no such error. (Rounding up with
              the probability that suits the two *rounded* neighbours would remove it, and triple the time of
              encoding.)
    Levels.   Values between neighbours that need not be even. With ``L`` in units of the step (from 0 to
              ``2**bits - 1``) the sum of ``clamp((s - L[i]) * (1 / (L[i + 1] - L[i])), 0, 1)`` over ``i`` in order
              takes the place of ``s = (x - low) * inverse``, and ``L[code]`` that of the code: unbiased again.
    Random.   ``u = (2**(15 - bits) * byte + dither) / 2**(23 - bits)``. ``byte`` comes from one 32-bit hash for
              four values of the group, ``dither`` (``15 - bits`` bits) from one hash for the group; so each
              ``u`` is uniform on the grid of the sum's mantissa at the cost of a quarter hash.
              Only 32-bit integer arithmetic, so Numba and Triton compute the same.
    Dither.   With the key of the encoding, decoding takes the threshold off again: ``low + (code + 0.5 - u) * step``.
              Then the error of any value is uniform on half a step to either side (Schuchman 1964): its variance is
              a twelfth of the squared step, half of what plain levels give on average, for the same bytes. In
              float32 it is ``((code + (2**bits + 0.5)) - t) * step + low`` with ``t = 2**bits + u``; both sums in the
              brackets are exact. The mean of ``u`` is half a unit of its grid below 1/2, so means are off by
              ``2**(bits - 24)`` of a step. What is decoded may lie half a step outside the range of its group.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# Temporaries of the reference stay near this many values whatever the size of the input.
_CHUNK = 1 << 19
_WORD = 0xFFFFFFFF
_SMALLEST_STEP = 2.0**-126  # the smallest step whose reciprocal is a finite float32
_NAN_LOW = 0x7FC0
_ONE = 0x3F80
_CONSTANT = 0x8000
_GOLDEN = 0x9E3779B9
_DITHER = 0x5BD1E995


# ---------------------------------------------------------------- random numbers


def mix(x: Tensor) -> Tensor:
    """A 32-bit finalizer with low bias, on int64 tensors that hold 32-bit values."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def _group_hash(first: int, count: int, key: int, device: torch.device) -> Tensor:
    index = torch.arange(first, first + count, dtype=torch.int64, device=device) & _WORD
    return mix(mix((index + (key & _WORD)) & _WORD) ^ ((key >> 32) & _WORD))


def _thresholds(groups: Tensor, n: int, bits: int) -> Tensor:
    """``2**bits + u`` for each of the ``n`` values of each group: shape (len(groups), n), float32."""
    lane = -(-n // 4)
    j = torch.arange(lane, dtype=torch.int64, device=groups.device)
    words = mix((groups[:, None] + j * _GOLDEN) & _WORD)
    byte = torch.cat([(words >> (8 * k)) & 0xFF for k in range(4)], dim=1)[:, :n]
    dither = (mix(groups ^ _DITHER) >> (17 + bits))[:, None]
    return _from_bits(((127 + bits) << 23) | (byte << (15 - bits)) | dither)


# ---------------------------------------------------------------- groups


@lru_cache(maxsize=8)
def _planes(bits: int) -> list[tuple[int, int]]:
    """Width of each plane, and the lowest bit of a code that it holds."""
    widths = [w for w in (8, 4, 2, 1) if bits & w]
    return [(w, sum(widths[:i])) for i, w in enumerate(widths)]


def group_bytes(n: int, bits: int) -> int:
    """Bytes of the codes of one group of ``n`` values."""
    return sum(-(-n * width // 8) for width, _ in _planes(bits))


def row_bytes(row: int, group: int, bits: int) -> int:
    """Bytes of the codes of one row."""
    full, rest = row // group, row % group  # not divmod: a compiler's symbols have none
    return full * group_bytes(group, bits) + group_bytes(rest, bits)


def groups_in_row(row: int, group: int) -> int:
    """Groups of one row, the short one included."""
    return -(-row // group)


def _tiles(rows: int, row: int, group: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Rectangles ``(row0, row1, group0, group1, n)`` of groups of one length, small enough to hold."""
    full, rest = divmod(row, group)
    if full:
        per_row = full * group
        if per_row <= _CHUNK:
            step = max(1, _CHUNK // per_row)
            for r in range(0, rows, step):
                yield r, min(rows, r + step), 0, full, group
        else:
            step = max(1, _CHUNK // group)
            for r in range(rows):
                for g in range(0, full, step):
                    yield r, r + 1, g, min(full, g + step), group
    if rest:
        step = max(1, _CHUNK // rest)
        for r in range(0, rows, step):
            yield r, min(rows, r + step), full, full + 1, rest


def _tile_hash(tile: tuple[int, int, int, int, int], per_row: int, key: int, device: torch.device) -> Tensor:
    r0, r1, g0, g1, _ = tile
    if g1 - g0 == per_row:
        return _group_hash(r0 * per_row, (r1 - r0) * per_row, key, device)
    parts = [_group_hash(r * per_row + g0, g1 - g0, key, device) for r in range(r0, r1)]
    return torch.cat(parts)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32).to(torch.int64) & _WORD


def _from_bits(x: Tensor) -> Tensor:
    return ((x ^ 0x80000000) - 0x80000000).to(torch.int32).view(torch.float32)


def _word16(x: Tensor) -> Tensor:
    return ((x ^ 0x8000) - 0x8000).to(torch.int16)


def _down(x: Tensor) -> Tensor:
    """The 16 bits of the largest bfloat16 not above each value."""
    b = _bits(x)
    away = (b >> 31 == 1) & (b & 0xFFFF != 0)
    return (b >> 16) + away.to(torch.int64)


def _up(x: Tensor) -> Tensor:
    """The 16 bits of the smallest bfloat16 not below each value, for values >= 0."""
    b = _bits(x)
    return (b >> 16) + (b & 0xFFFF != 0).to(torch.int64)


def _range(x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each group (those to keep; 0.0 if there are none)."""
    if keep is None:
        low, high = torch.aminmax(x, dim=1)
    else:
        low = torch.where(keep, x, torch.inf).amin(1)
        high = torch.where(keep, x, -torch.inf).amax(1)
        none = ~keep.any(1)
        low, high = low.masked_fill(none, 0.0), high.masked_fill(none, 0.0)
    return low + 0.0, high + 0.0  # -0.0 becomes 0.0


def _between(s: Tensor, levels: Tensor) -> Tensor:
    """How many intervals between levels lie below each value, with the fraction of its own."""
    inverse = 1.0 / (levels[1:] - levels[:-1])
    total = torch.zeros_like(s)
    for i in range(len(inverse)):
        total += ((s - levels[i]) * inverse[i]).clamp_(0.0, 1.0)
    return total


def _over(x: Tensor, number: float) -> Tensor:
    """``x / number``, rounded once. By a number of the host, CUDA would multiply with its rounded inverse instead."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def _inverse(extent: Tensor, step: Tensor, top: float) -> Tensor:
    """Of each step, the largest that takes ``extent`` to no more than ``top``.

    That is the nearest to ``1 / step`` or its neighbour below: a test tries every step and the largest extents.
    """
    inverse = 1.0 / step
    return torch.where(extent * inverse > top, _from_bits(_bits(inverse) - 1), inverse)


def _quantize_tile(
    x: Tensor, keep: Tensor | None, groups: Tensor, bits: int, levels: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes (groups, bytes) and side words (groups, 2) of ``x`` (groups, n), float32."""
    top = float(2**bits - 1)
    low, high = _range(x, keep)
    low_word = _down(low)
    low_kept = _from_bits(low_word << 16)
    step_word = _up(_over(high - low_kept, top).clamp_min(_SMALLEST_STEP))
    step = _from_bits(step_word << 16)
    constant = low == high
    bad = ~(torch.isfinite(low_kept) & torch.isfinite(step)) & ~(constant & torch.isfinite(low))

    scaled = (x - low_kept[:, None]) * _inverse((high - low_kept).masked_fill(bad, 0.0), step, top)[:, None]
    if levels is not None:
        scaled = _between(scaled, levels)
    codes = (_bits(scaled + _thresholds(groups, x.shape[1], bits)) >> (23 - bits)) & (2**bits - 1)
    codes = codes.masked_fill_((bad | constant)[:, None], 0).to(torch.uint8)

    exact = _bits(low)
    codes[:, 0] = torch.where(constant & ~bad, exact & 1, codes[:, 0]).to(torch.uint8)
    low_word = torch.where(constant, exact >> 16, low_word)
    step_word = torch.where(constant, _CONSTANT | ((exact & 0xFFFF) >> 1), step_word)
    low_word = torch.where(bad, _NAN_LOW, low_word)
    step_word = torch.where(bad, 0, step_word)
    return _pack(codes, bits), torch.stack([_word16(low_word), _word16(step_word)], 1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    return torch.cat([_pack_plane((codes >> low) & (2**w - 1), w) for w, low in _planes(bits)], dim=1)


def _pack_plane(codes: Tensor, width: int) -> Tensor:
    groups, n = codes.shape
    size = -(-n * width // 8)
    per_byte = 8 // width
    codes = torch.nn.functional.pad(codes, (0, size * per_byte - n)).view(groups, per_byte, size)
    packed = codes[:, 0].clone()
    for k in range(1, per_byte):
        packed |= codes[:, k] << (k * width)
    return packed


def _unpack(packed: Tensor, n: int, bits: int) -> Tensor:
    codes, at = packed.new_zeros((packed.shape[0], n)), 0
    for width, low in _planes(bits):
        size, mask = -(-n * width // 8), 2**width - 1
        plane = packed[:, at : at + size]
        codes |= torch.cat([(plane >> (k * width)) & mask for k in range(8 // width)], dim=1)[:, :n] << low
        at += size
    return codes


def _side_values(codes: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
    words = side.to(torch.int64) & 0xFFFF
    constant = words[:, 1] & _CONSTANT != 0
    tail = ((words[:, 1] & 0x7FFF) << 1) | (codes[:, 0].to(torch.int64) & 1)
    base = _from_bits((words[:, 0] << 16) | torch.where(constant, tail, 0))
    step = _from_bits(torch.where(constant, 0, words[:, 1]) << 16)
    return base, step


def _check_levels(levels: Tensor | None, bits: int) -> None:
    if levels is not None and (levels.dtype != torch.float32 or levels.shape != (2**bits,)):
        raise RuntimeError(f"levels must be {2**bits} float32 values; got {levels.dtype}, {tuple(levels.shape)}")


def _rows(x: Tensor, row: int) -> int:
    return 0 if row == 0 else x.numel() // row


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
    """Codes and side words of a flat tensor; with ``positive`` only values above zero set ranges.

    ``support`` is filled with their bits, as ``pack_band(x, 0, inf, False, True)`` gives them: with ``positive`` alone.
    """
    _fill_support(x, positive, support)
    return _quantize(x, x, row, group, bits, key, positive, levels)


def _fill_support(x: Tensor, positive: bool, support: Tensor | None) -> None:
    if support is None:
        return
    if not positive or support.dtype != torch.uint8 or support.numel() != -(-x.numel() // 8):
        raise RuntimeError(
            f"a support goes with positive values and has {-(-x.numel() // 8)} bytes; got {support.shape}"
        )
    support.copy_(pack_band(x, 0.0, torch.inf, False, True).view_as(support))


def _quantize(
    source: Tensor, values: Tensor, row: int, group: int, bits: int, key: int, positive: bool, levels: Tensor | None
) -> tuple[Tensor, Tensor]:
    _check_levels(levels, bits)
    rows, per_row = _rows(values, row), groups_in_row(row, group) if row else 0
    codes = values.new_empty((rows, row_bytes(row, group, bits) if row else 0), dtype=torch.uint8)
    side = values.new_empty((rows, per_row, 2), dtype=torch.int16)
    if values.numel() == 0:
        return codes.view(-1), side.view(-1)
    x2, s2 = values.view(rows, row), source.view(rows, row)
    full_bytes = group_bytes(group, bits)
    for tile in _tiles(rows, row, group):
        r0, r1, g0, g1, n = tile
        cut = slice(g0 * group, g0 * group + (g1 - g0) * n)
        x = x2[r0:r1, cut].reshape(-1, n).to(torch.float32)
        keep = ~(s2[r0:r1, cut].reshape(-1, n) <= 0) if positive else None
        packed, words = _quantize_tile(x, keep, _tile_hash(tile, per_row, key, x.device), bits, levels)
        start = g0 * full_bytes
        size = (g1 - g0) * packed.shape[1]
        codes[r0:r1, start : start + size] = packed.view(r1 - r0, size)
        side[r0:r1, g0:g1] = words.view(r1 - r0, g1 - g0, 2)
    return codes.view(-1), side.view(-1)


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
    """The flat tensor again, rounded once to ``dtype``; values whose bit in ``support`` is 0 are exactly zero.

    With the ``key`` of the encoding its dither is subtracted, which needs even levels: see *Dither* above.
    """
    _check_levels(levels, bits)
    if levels is not None and key is not None:
        raise RuntimeError("a key subtracts dither from even levels; got a key and levels")
    out = codes.new_empty(numel, dtype=dtype)
    if numel == 0:
        return out
    rows, per_row = numel // row, groups_in_row(row, group)
    codes, side, out2 = codes.view(rows, -1), side.view(rows, per_row, 2), out.view(rows, row)
    full_bytes = group_bytes(group, bits)
    for tile in _tiles(rows, row, group):
        r0, r1, g0, g1, n = tile
        size = group_bytes(n, bits)
        cut = slice(g0 * full_bytes, g0 * full_bytes + (g1 - g0) * size)
        packed = codes[r0:r1, cut].reshape(-1, size)
        base, step = _side_values(packed, side[r0:r1, g0:g1].reshape(-1, 2))
        found = _unpack(packed, n, bits)
        steps = found.to(torch.float32) if levels is None else levels[found.to(torch.int64)]
        if key is not None:
            steps = (steps + (2**bits + 0.5)) - _thresholds(_tile_hash(tile, per_row, key, codes.device), n, bits)
        x = _fit_dtype(steps * step[:, None] + base[:, None], dtype)
        out2[r0:r1, g0 * group : g0 * group + (g1 - g0) * n] = x.view(r1 - r0, -1)
    return _restore_zeros(out, support)


def _fit_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite values beyond float16 become its largest: the step, rounded up, may decode 65504 to more."""
    return torch.where(x.isinf(), x, x.clamp(-65504.0, 65504.0)) if dtype == torch.float16 else x


def _restore_zeros(out: Tensor, support: Tensor | None) -> Tensor:
    if support is not None:
        for i in range(0, out.numel(), _CHUNK):
            piece = out[i : i + _CHUNK]
            piece.masked_fill_(~_mask_bits(support, i, piece.numel()), 0.0)
    return out


# ---------------------------------------------------------------- groups that follow channels


def channel_step(inner: int, group: int) -> int:
    """Outer indices of a block: as many as ``group`` values have room for, in whole fours of values if any.

    The four lanes of such a group have one length, which is what fast kernels like.
    """
    step, unit = group // inner, 4 // math.gcd(4, inner)
    return max(1, step - step % unit if step >= unit else step)


def channel_sizes(geometry: Sequence[int], group: int, bits: int) -> tuple[int, int]:
    """Groups, and bytes of their codes."""
    outer, channels, inner = geometry
    if channel_step(inner, group) == 1:
        return outer * channels * groups_in_row(inner, group), outer * channels * row_bytes(inner, group, bits)
    step = channel_step(inner, group)
    full, rest = outer // step, outer % step
    size = full * group_bytes(step * inner, bits) + group_bytes(rest * inner, bits)
    return channels * -(-outer // step), channels * size


def channel_pieces(geometry: Sequence[int], group: int) -> Iterator[tuple[int, int, int, int]]:
    """Blocks of one length, not too many at once: outer indices from, to, those of a block, and the first group."""
    outer, channels, inner = geometry
    step = channel_step(inner, group)
    end = outer - outer % step
    at_once = step * max(1, _CHUNK // (step * channels * inner))
    for first in range(0, end, at_once):
        yield first, min(first + at_once, end), step, first // step * channels
    if end < outer:
        yield end, outer, outer - end, end // step * channels


def _later(key: int, groups: int) -> int:
    """A key that gives group 0 the noise which ``key`` gives to group ``groups``."""
    return (key >> 32 << 32) | ((key + groups) & _WORD)


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
    """As :func:`quantize_groups`, in groups that follow channels; ``support`` stays in the order of memory."""
    outer, channels, inner = geometry
    if outer * channels * inner != x.numel():
        raise RuntimeError(f"{x.numel()} values are not {outer} x {channels} x {inner}")
    if x.numel() == 0 or channel_step(inner, group) == 1:
        return quantize_groups(x, inner if x.numel() else 0, group, bits, key, positive, levels, support)
    _fill_support(x, positive, support)
    x3, parts = x.view(outer, channels, inner), []
    for first, last, step, groups in channel_pieces(geometry, group):
        piece = x3[first:last].view(-1, step, channels, inner).transpose(1, 2).reshape(-1)
        n = step * inner
        parts.append(quantize_groups(piece, n, n, bits, _later(key, groups), positive, levels))
    return torch.cat([codes for codes, _ in parts]), torch.cat([side for _, side in parts])


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
    """The flat tensor again, in the order of memory; see :func:`dequantize_groups`."""
    outer, channels, inner = geometry
    numel = outer * channels * inner
    if numel == 0 or channel_step(inner, group) == 1:
        return dequantize_groups(codes, side, numel, inner, group, bits, dtype, support, levels, key)
    if (side.numel() // 2, codes.numel()) != channel_sizes(geometry, group, bits):
        raise RuntimeError(f"{codes.numel()} bytes and {side.numel()} words do not go with {tuple(geometry)}")
    out, at = codes.new_empty(numel, dtype=dtype), 0
    for first, last, step, groups in channel_pieces(geometry, group):
        n, count = step * inner, (last - first) // step * channels
        size = count * group_bytes(n, bits)
        piece = dequantize_groups(
            codes[at : at + size], side[2 * groups : 2 * (groups + count)], count * n, n, n, bits, dtype, None, levels,
            None if key is None else _later(key, groups),
        )  # fmt: skip
        here = out.view(outer, channels, inner)[first:last].view(-1, step, channels, inner)
        here.copy_(piece.view(-1, channels, step, inner).transpose(1, 2))
        at += size
    return _restore_zeros(out, support)


# ---------------------------------------------------------------- 8-bit floats


def cast_groups(
    x: Tensor, row: int, group: int, dtype: torch.dtype, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Values over the scale of their group, rounded to the nearest of an 8-bit float type; and the scales.

    A scale is a bfloat16, rounded up, that takes the largest of a group to the largest of the type: 1 for a group
    of zeros, NaN for one with a value that is not finite. With ``scale``, one float32, that serves all groups.
    Values over a scale that is not finite become 0, and so decode to NaN. A value that a given scale leaves more
    than 2**-7 beyond the type's largest becomes NaN (torch's own cast changes with its version there).
    """
    if x.numel() % max(1, row) or (scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1)):
        raise RuntimeError(f"{x.numel()} values have no rows of {row}, or {scale} is not one float32")
    rows, per_row = _rows(x, row), groups_in_row(row, group)
    out = x.new_empty(x.numel(), dtype=dtype)
    scales = x.new_empty((rows, per_row), dtype=torch.bfloat16) if scale is None else scale.reshape(1).clone()
    if x.numel() == 0:
        return out, scales.view(-1)
    x2, out2 = x.view(rows, row), out.view(rows, row)
    largest_kept = torch.finfo(dtype).max * (1 + 2.0**-7)
    for r0, r1, g0, g1, n in _tiles(rows, row, group):
        cut = slice(g0 * group, g0 * group + (g1 - g0) * n)
        piece = x2[r0:r1, cut].reshape(-1, n).to(torch.float32)
        if scale is None:
            largest = piece.abs().amax(1)
            word = _up(_over(largest, torch.finfo(dtype).max).clamp_min(_SMALLEST_STEP))
            word = torch.where(largest == 0, _ONE, torch.where(largest.isfinite(), word, _NAN_LOW))
            scales[r0:r1, g0:g1] = _word16(word).view(torch.bfloat16).view(r1 - r0, g1 - g0)
            own = _from_bits(word << 16)[:, None]
        else:
            own = scale.reshape(1, 1)
        scaled = piece / own
        scaled = torch.where(scaled.abs() <= largest_kept, scaled, torch.nan)
        out2[r0:r1, cut] = torch.where(own.isfinite(), scaled, 0.0).to(dtype).view(r1 - r0, -1)
    return out, scales.view(-1)


def uncast_groups(values: Tensor, scale: Tensor, row: int, group: int, dtype: torch.dtype) -> Tensor:
    """The flat tensor again; ``scale`` has a bfloat16 for each group, or one float32 for all."""
    rows, per_row = _rows(values, row), groups_in_row(row, group)
    shared = scale.dtype == torch.float32 and scale.numel() == 1
    if values.numel() % max(1, row) or not (shared or (scale.dtype, scale.numel()) == (torch.bfloat16, rows * per_row)):
        raise RuntimeError(
            f"{values.numel()} values in rows of {row} and groups of {group} do not go with {scale.numel()} scales"
        )
    out = values.new_empty(values.numel(), dtype=dtype)
    if values.numel() == 0:
        return out
    v2, out2 = values.view(rows, row), out.view(rows, row)
    for r0, r1, g0, g1, n in _tiles(rows, row, group):
        cut = slice(g0 * group, g0 * group + (g1 - g0) * n)
        wide = v2[r0:r1, cut].reshape(-1, n).to(torch.float32)
        own = scale.view(1, 1) if shared else scale.view(rows, per_row)[r0:r1, g0:g1].reshape(-1, 1).to(torch.float32)
        out2[r0:r1, cut] = _fit_dtype(wide * own, dtype).view(r1 - r0, -1).to(dtype)
    return out


# ---------------------------------------------------------------- samples with bits of their own


def _widths(numel: int, bits: Tensor) -> list[int]:
    if bits.dtype != torch.uint8 or bits.dim() != 1 or numel % max(1, bits.numel()) or (numel and not bits.numel()):
        raise RuntimeError(
            f"bits must be one uint8 value for each sample of {numel} values; got {bits.dtype}, {tuple(bits.shape)}"
        )
    widths: list[int] = bits.tolist()
    if not all(1 <= b <= 8 for b in widths):
        raise RuntimeError(f"bits must be from 1 to 8; got {widths}")
    return widths


def quantize_samples(
    x: Tensor, bits: Tensor, size: int, group: int, key: int, positive: bool, support: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and side words of samples (rows of one size), each with bits of its own.

    Codes have ``size`` bytes, which the caller knows without the bits; what they do not need is zero at the end. The
    noise is that of :func:`quantize_groups` for the same groups, so are the bytes of a sample for its bits, and
    ``support``.
    """
    _fill_support(x, positive, support)
    widths = _widths(x.numel(), bits)
    if x.numel() == 0:
        return x.new_zeros(size, dtype=torch.uint8), x.new_empty(0, dtype=torch.int16)
    row = x.numel() // len(widths)
    needed = sum(row_bytes(row, group, width) for width in widths)
    if needed > size:
        raise RuntimeError(f"the codes of {len(widths)} samples take {needed} bytes; there is room for {size}")
    per_row, parts = groups_in_row(row, group), []
    for n, width in enumerate(widths):
        piece = x[n * row : (n + 1) * row]
        parts.append(quantize_groups(piece, row, group, width, _later(key, n * per_row), positive))
    rest = x.new_zeros(size - needed, dtype=torch.uint8)
    return torch.cat([*(codes for codes, _ in parts), rest]), torch.cat([side for _, side in parts])


def dequantize_samples(
    codes: Tensor, side: Tensor, bits: Tensor, numel: int, group: int, dtype: torch.dtype, support: Tensor | None
) -> Tensor:
    """The flat tensor again; values whose bit in ``support`` is 0 are exactly zero."""
    widths = _widths(numel, bits)
    out = codes.new_empty(numel, dtype=dtype)
    if numel == 0:
        return out
    row, at = numel // len(widths), 0
    words = 2 * groups_in_row(row, group)
    for n, width in enumerate(widths):
        size = row_bytes(row, group, width)
        piece, some = codes[at : at + size], side[n * words : (n + 1) * words]
        out[n * row : (n + 1) * row] = dequantize_groups(piece, some, row, row, group, width, dtype, None)
        at += size
    return _restore_zeros(out, support)


def range_energy(x: Tensor, row: int, group: int, positive: bool) -> Tensor:
    """For each row the sum over its groups of ``(max - min)**2``: what sets the variance of their rounding.

    Summed in float32, from the first group to the last. A value that is not finite makes its row NaN; with
    ``positive`` only values above zero count.
    """
    rows = _rows(x, row)
    out = x.new_zeros(rows, dtype=torch.float32)
    if x.numel() == 0:
        return out
    x2 = x.view(rows, row)
    step = max(1, _CHUNK // min(group, row))
    for r in range(0, rows, step):
        for start in range(0, row, group):
            piece = x2[r : r + step, start : start + group].to(torch.float32)
            low, high = _range(piece, ~(piece <= 0) if positive else None)
            extent = torch.where(low.isfinite() & high.isfinite(), high - low, torch.nan)
            out[r : r + step] += extent * extent
    return out


# ---------------------------------------------------------------- block means


def _geometry(geometry: Sequence[int]) -> tuple[int, int, int, int, int]:
    outer, s1, s2, s3, inner = geometry
    return outer, s1, s2, s3, inner


def low_shape(geometry: Sequence[int], block: int) -> tuple[int, int, int, int, int]:
    """Shape of the block means of a tensor seen as (outer, s1, s2, s3, inner)."""
    outer, s1, s2, s3, inner = _geometry(geometry)
    return outer, -(-s1 // block), -(-s2 // block), -(-s3 // block), inner


def block_means(x: Tensor, geometry: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    """Mean of each block of ``block`` values a side; edge blocks average what they hold.

    Sums are float32 and ordered: for each column of a block the rows from first to last, then the
    columns from first to last, each sum starting at +0.0. What is not finite comes out as NaN: Inf in a block, or a
    sum beyond float32.
    """
    means = _means(x, geometry, block, dtype)
    return means.masked_fill_(~means.isfinite(), torch.nan)


def _means(x: Tensor, geometry: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    outer, s1, s2, s3, inner = _geometry(geometry)
    b1, b2, b3 = low_shape(geometry, block)[1:4]
    low = x.new_empty((outer, b1, b2, b3, inner), dtype=dtype)
    if x.numel() == 0:
        return low.view(-1)
    x = x.view(outer, s1, s2, s3, inner)
    counts = [
        (s - torch.arange(0, b * block, block, device=x.device)).clamp_max_(block).to(torch.float32)
        for s, b in ((s1, b1), (s2, b2), (s3, b3))
    ]
    count = counts[0][:, None, None] * counts[1][None, :, None] * counts[2][None, None, :]
    step = max(1, _CHUNK // max(1, s1 * s2 * s3 * inner))
    for o in range(0, outer, step):
        piece = x[o : o + step].to(torch.float32)
        columns = piece.new_zeros((piece.shape[0], b1, b2, s3, inner))
        for i in range(min(block, s1)):
            for j in range(min(block, s2)):
                part = piece[:, i::block, j::block]
                columns[:, : part.shape[1], : part.shape[2]] += part
        total = columns.new_zeros((piece.shape[0], b1, b2, b3, inner))
        for k in range(min(block, s3)):
            part = columns[:, :, :, k::block]
            total[:, :, :, : part.shape[3]] += part
        low[o : o + step] = _fit_dtype(total / count[None, ..., None], dtype)
    return low.view(-1)


def _spread(low: Tensor, geometry: Sequence[int], block: int) -> Tensor:
    _, s1, s2, s3, _ = _geometry(geometry)
    for dim, size in ((1, s1), (2, s2), (3, s3)):
        if low.shape[dim] != size:
            index = torch.arange(size, device=low.device) // block
            low = low.index_select(dim, index)
    return low


def spread_blocks(low: Tensor, geometry: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    """Each block filled with its mean: the inverse of :func:`block_means` on constant blocks."""
    low = low.view(low_shape(geometry, block))
    return _fit_dtype(_spread(low, geometry, block), dtype).to(dtype, copy=True).reshape(-1)


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
    """Block means in bfloat16 and the quantized difference to those *rounded* means; ``support`` as for groups.

    In a block whose mean is not finite all differences are -Inf: a group that takes its range from one of them is NaN,
    and in other groups, where they set no range, their codes are 0.
    """
    _fill_support(x, positive, support)
    outer, s1, s2, s3, inner = _geometry(geometry)
    low = _means(x, geometry, block, torch.bfloat16)
    residual = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    low5, x5, r5 = (
        low.view(low_shape(geometry, block)),
        x.view(tuple(geometry)),
        residual.view(tuple(geometry)),
    )
    step = max(1, _CHUNK // max(1, s1 * s2 * s3 * inner))
    for o in range(0, outer, step):
        spread = _spread(low5[o : o + step], geometry, block).to(torch.float32)
        spread = spread.masked_fill_(~spread.isfinite(), torch.inf)
        r5[o : o + step] = x5[o : o + step].to(torch.float32) - spread
    codes, side = _quantize(x, residual, row, group, bits, key, positive, levels)
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
    """Block means plus decoded difference, rounded once to ``dtype``: see *Decoding* above. ``key`` as for groups."""
    outer, s1, s2, s3, inner = _geometry(geometry)
    numel = outer * s1 * s2 * s3 * inner
    residual = dequantize_groups(codes, side, numel, row, group, bits, torch.float32, None, levels, key)
    out = residual if dtype == torch.float32 else residual.new_empty(numel, dtype=dtype)
    low5, r5, o5 = (
        low.view(low_shape(geometry, block)),
        residual.view(tuple(geometry)),
        out.view(tuple(geometry)),
    )
    step = max(1, _CHUNK // max(1, s1 * s2 * s3 * inner))
    for o in range(0, outer, step):
        spread = _spread(low5[o : o + step], geometry, block).to(torch.float32)
        o5[o : o + step] = _fit_dtype(spread + r5[o : o + step], dtype)
    return _restore_zeros(out, support)


# ---------------------------------------------------------------- rebuilding


def rebuild_affine(
    x: Tensor,
    geometry: Sequence[int],
    scale: Tensor,
    shift: Tensor,
    other: Tensor | None,
    support: Tensor | None,
) -> None:
    """``x * scale + shift`` in the place of ``x``, plus ``other``; zero where the bit in ``support`` is 0.

    ``x`` is flat, and so is ``other``; ``geometry`` is (outer, channels, inner), and each channel has a scale and a
    shift. Every operation is rounded to float32 by itself, in this order. A 16-bit type is widened before the first and
    gets the nearest of its values after the last.
    """
    _, channels, inner = x.view(*geometry).shape
    for i in range(0, x.numel(), _CHUNK):
        piece = x[i : i + _CHUNK]
        channel = torch.arange(i, i + piece.numel(), device=x.device) // inner % channels
        wide = piece.to(torch.float32) * scale[channel] + shift[channel]
        if other is not None:
            wide = wide + other.view_as(x)[i : i + _CHUNK].to(torch.float32)
        piece.copy_(_fit_dtype(wide, x.dtype))
    _restore_zeros(x, support)


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
    """A sum, stage by stage: :func:`dequantize_channels`, then :func:`rebuild_affine` with what is there so far.

    That is ``other`` before the first stage. Each stage has an entry in every list, and its mask is the ``support`` of
    the sum. Its key counts if it is dithered.
    """
    made = other
    stages = zip(codes, sides, bits, supports, keys, dithered, scales, shifts, masks, strict=True)
    for code, side, width, support, key, dither, scale, shift, mask in stages:
        out = dequantize_channels(code, side, geometry, group, width, dtype, support, None, key if dither else None)
        rebuild_affine(out, geometry, scale, shift, made, mask)
        made = out
    if made is None or made is other:
        raise RuntimeError("a chain has no stages")
    return made


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
    """The gradients of a batch norm's input, weight and bias, where its input is packed.

    ``grad`` is flat, and ``geometry`` is (samples, channels, inner). Statistics are in float32. The input was packed by
    :func:`quantize_blocks` if there is ``low``; otherwise by :func:`quantize_groups`, or by :func:`quantize_channels`
    if ``row`` is 0.
    """
    numel = math.prod(geometry)
    if low is not None:
        x = dequantize_blocks(low, codes, side, frame, block, row, group, bits, torch.float32, None, None, key)
    elif row:
        x = dequantize_groups(codes, side, numel, row, group, bits, torch.float32, None, None, key)
    else:
        x = dequantize_channels(codes, side, geometry, group, bits, torch.float32, None, None, key)
    return norm_gradients(grad, x, geometry, mean, invstd, weight)


def norm_backward_(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """:func:`norm_backward`, with the gradient of the input in the place of ``grad``."""
    found, for_weight, for_bias = norm_backward(grad, *given)
    grad.copy_(found)
    return for_weight, for_bias


_NORM_LANES = 16


def norm_gradients(
    grad: Tensor, x: Tensor, geometry: Sequence[int], mean: Tensor, invstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`norm_backward`.

    A map is summed in float32, in sixteen lanes of every sixteenth value, of which the upper half is then added to the
    lower until one is left. Samples are added in float64. Every other operation is rounded to float32 by itself. At
    the end the input's gradient gets the type of ``grad``.
    """
    samples, channels, inner = geometry
    g, centre = grad.to(torch.float32).view(samples, channels, inner), mean.view(channels, 1)
    values = x.view(samples, channels, inner)
    away = values - centre
    totals = []
    for terms in (g, away * g):
        padded = torch.nn.functional.pad(terms, (0, -inner % _NORM_LANES)).view(samples, channels, -1, _NORM_LANES)
        lanes = torch.zeros_like(padded[:, :, 0])
        for k in range(padded.shape[2]):
            lanes = lanes + padded[:, :, k]
        while lanes.shape[2] > 1:
            half = lanes.shape[2] // 2
            lanes = lanes[:, :, :half] + lanes[:, :, half:]
        total = torch.zeros(channels, dtype=torch.float64, device=grad.device)
        for n in range(samples):
            total = total + lanes[n, :, 0]
        totals.append(total)
    total, dot = totals
    wide, count = invstd.to(torch.float64), samples * inner
    shared, slope = (_over(t, count).to(torch.float32).view(channels, 1) for t in (total, dot * wide * wide))
    factor = (invstd if weight is None else invstd * weight).view(channels, 1)
    out = ((g - shared) - away * slope) * factor
    return out.view(-1).to(grad.dtype), (dot * wide).to(torch.float32), total.to(torch.float32)


# ---------------------------------------------------------------- masks and small integers


def pack_band(x: Tensor, low: float, high: float, closed: bool, nan: bool) -> Tensor:
    """One bit for each value, lowest bit first: is it between ``low`` and ``high``?

    16-bit values are compared in float32, as torch's own kernels do. An infinite end is no end.
    """
    out = x.new_empty(-(-x.numel() // 8), dtype=torch.uint8)
    if x.dtype in (torch.float32, torch.bfloat16, torch.float16):
        low, high = ctypes.c_float(low).value, ctypes.c_float(high).value
    for i in range(0, x.numel(), _CHUNK):
        piece = x[i : i + _CHUNK]
        if x.dtype == torch.bool:
            inside = piece
        else:
            if piece.element_size() == 2:
                piece = piece.to(torch.float32)
            above = piece >= low if closed or low == -torch.inf else piece > low
            below = piece <= high if closed or high == torch.inf else piece < high
            inside = above & below
            if nan:
                inside = inside | torch.isnan(piece)
        bits = torch.nn.functional.pad(inside.to(torch.uint8), (0, -piece.numel() % 8)).view(-1, 8)
        packed = bits[:, 0].clone()
        for k in range(1, 8):
            packed |= bits[:, k] << k
        out[i // 8 : i // 8 + packed.numel()] = packed
    return out


def _mask_bits(mask: Tensor, first: int, count: int) -> Tensor:
    """Bits ``first .. first + count`` as booleans; ``first`` is a multiple of 8."""
    piece = mask[first // 8 : first // 8 + -(-count // 8)]
    return torch.stack([(piece >> k) & 1 for k in range(8)], dim=1).view(-1)[:count].to(torch.bool)


def unpack_band(mask: Tensor, numel: int, dtype: torch.dtype, inside: float, outside: float) -> Tensor:
    """``inside`` where the bit is set, ``outside`` elsewhere."""
    out = mask.new_empty(numel, dtype=dtype)
    for i in range(0, numel, _CHUNK):
        piece = out[i : i + _CHUNK]
        bits = _mask_bits(mask, i, piece.numel())
        if dtype == torch.bool:
            piece.copy_(bits)
        else:
            piece.fill_(outside).masked_fill_(bits, inside)
    return out


def mask_values(x: Tensor, mask: Tensor) -> Tensor:
    """Flat values where the bit is set, with all their bits, and zero elsewhere, where NaN is zero too."""
    found = torch.zeros_like(x)
    for i in range(0, x.numel(), _CHUNK):
        piece = x[i : i + _CHUNK]
        torch.where(_mask_bits(mask, i, piece.numel()), piece, found[i : i + _CHUNK], out=found[i : i + _CHUNK])
    return found


def mask_values_(x: Tensor, mask: Tensor) -> None:
    """:func:`mask_values` in the place of ``x``."""
    x.copy_(mask_values(x, mask))


_WIDE = {16: torch.int16, 32: torch.int32}


def pack_uints(x: Tensor, offset: int, bits: int) -> Tensor:
    """Integers minus ``offset`` in ``bits`` bits each, lowest bits first."""
    out = x.new_empty(-(-x.numel() * bits // 8), dtype=torch.uint8)
    for i in range(0, x.numel(), _CHUNK):
        piece = x[i : i + _CHUNK].to(torch.int64) - offset
        if bits in _WIDE:
            half = 1 << (bits - 1)
            packed = ((piece ^ half) - half).to(_WIDE[bits]).view(torch.uint8)
        else:
            per_byte = 8 // bits
            codes = torch.nn.functional.pad(piece.to(torch.uint8), (0, -piece.numel() % per_byte)).view(-1, per_byte)
            packed = codes[:, 0].clone()
            for k in range(1, per_byte):
                packed |= codes[:, k] << (k * bits)
        out[i * bits // 8 : i * bits // 8 + packed.numel()] = packed
    return out


def unpack_uints(packed: Tensor, numel: int, bits: int, offset: int, dtype: torch.dtype) -> Tensor:
    """The integers again."""
    if bits in _WIDE:
        codes = packed.view(_WIDE[bits]).to(torch.int64) & ((1 << bits) - 1)
    else:
        mask = 2**bits - 1
        codes = torch.stack([(packed >> (k * bits)) & mask for k in range(8 // bits)], dim=1).view(-1)[:numel]
    return (codes.to(torch.int64) + offset).to(dtype)


# ---------------------------------------------------------------- positions in windows


def pack_taps(x: Tensor, starts: Tensor, inner: int, taps: Tensor, size: int, bits: int) -> tuple[Tensor, Tensor]:
    """Positions as numbers of taps in ``bits`` bits each, lowest bits first; and how many are none.

    Position ``e`` belongs to the window that begins at ``starts[e // inner % len(starts)]``, and its tap ``k`` lies
    ``taps[k]`` (rising from 0) behind that. A position outside 0 to ``size``, or between the taps, is none and packed
    as 0.
    """
    found = (x.view(-1, starts.numel(), inner) - starts[:, None]).view(-1)
    tap = torch.searchsorted(taps, torch.minimum(found.clamp_min(0), taps[-1]))
    none = (taps[tap] != found) | (x < 0) | (x >= size)
    return pack_uints(tap.masked_fill_(none, 0), 0, bits), none.sum()


def unpack_taps(packed: Tensor, numel: int, starts: Tensor, inner: int, taps: Tensor, bits: int) -> Tensor:
    """The positions again."""
    tap = unpack_uints(packed, numel, bits, 0, torch.int64)
    return (taps[tap].view(-1, starts.numel(), inner) + starts[:, None]).view(-1)
