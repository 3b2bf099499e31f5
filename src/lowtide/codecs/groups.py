"""Random rounding in groups: each run of values has a range of its own.

Both codecs here are unbiased: the mean of the decoded tensor over all keys is the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import ops
from .base import Codec, Layout, Packed, TensorMeta, flatten, layout_of, require, require_float, require_positive

BITS = tuple(range(1, 9))


def require_levels(levels: tuple[float, ...] | None, bits: int) -> None:
    """Raise unless ``levels`` are None or what ``bits`` bits can name."""
    if levels is None:
        return
    if not 1 <= bits <= 4:
        raise ValueError(f"levels go with 1 to 4 bits; got bits={bits}")
    numbers = isinstance(levels, tuple) and all(isinstance(v, (int, float)) for v in levels)
    if not numbers or len(levels) != 2**bits or (levels[0], levels[-1]) != (0, 1):
        raise ValueError(f"levels must be a tuple of {2**bits} numbers from 0.0 to 1.0 with {bits} bits; got {levels}")
    # Closer together they might be one in float32, and their distance has to be divided by.
    if not all(b - a >= 2.0**-16 for a, b in pairwise(levels)):
        raise ValueError(f"levels must rise by at least 2**-16 each; got {levels}")


def require_dither(dither: bool, levels: tuple[float, ...] | None) -> None:
    """Raise unless ``dither`` is a truth value that goes with the levels."""
    require(dither, (False, True), "dither")
    if dither and levels is not None:
        raise ValueError(f"dither=True needs even levels; got levels={levels}. Leave one of them out")


@lru_cache(maxsize=4096)
def steps_of(levels: tuple[float, ...] | None, bits: int, device: torch.device) -> Tensor | None:
    """The levels in units of a group's step, or None if they are even; sent to a device once."""
    if levels is None:
        return None
    return torch.tensor([level * (2**bits - 1) for level in levels], dtype=torch.float32, device=device)


@dataclass(frozen=True)
class GroupQuant(Codec):
    """Affine quantization of each run of ``group`` values, rounded at random.

    A value is rounded up with a probability equal to its fraction of a step. So the decoded value is unbiased, and a
    gradient that is linear in it is unbiased too. The error of a value is below one step of its group,
    ``(max - low) / (2**bits - 1)``, and its variance is at most a quarter of the step's square. A constant group is
    exact. A group with NaN or Inf decodes to NaN.

    ``layout`` names the border that no group crosses. With ``"row"`` a group lies within the innermost dimension in
    memory (the features of a token), with ``"sample"`` within one index of the outermost (the maps of an image). With
    ``"flat"`` there is no border. With ``"channel"`` no group mixes channels (dimension 1), whose ranges often differ:
    a group is a run of values in one map, or, if maps are smaller than groups, what one channel has of several samples
    or pixels in a row. Tensors without such a dimension are cut as with ``"row"``.

    ``levels`` are the values that the codes stand for, as fractions of the group's range: 2**bits numbers from 0.0 to
    1.0. They serve tensors that even levels do not fit (TinyScript, Fu et al. 2020). The variance of a value between
    two levels is at most a quarter of the square of their distance.

    With ``dither`` decoding makes the random numbers of the encoding again and subtracts them (Schuchman 1964; Gray and
    Stockham 1993). The bytes are the same and the decoded value is still unbiased, but its error is uniform on half a
    step to either side, whatever the value. So its variance is a twelfth of the step's square, where levels alone have
    a sixth on average; values that lie on a level are not exact any more. A decoded value may lie half a step outside
    the range of its group.
    """

    id: ClassVar[str] = "group_quant"
    bits: int = 2
    group: int = 256
    layout: str = "row"
    levels: tuple[float, ...] | None = None
    dither: bool = False

    def __post_init__(self) -> None:
        require(self.bits, BITS, "bits")
        require_positive(self.group, "group")
        require(self.layout, ("row", "sample", "flat", "channel"), "layout")
        require_levels(self.levels, self.bits)
        require_dither(self.dither, self.levels)

    def __str__(self) -> str:
        return f"{self.id}({self.bits} bits{', levels' if self.levels else ''}{', dithered' if self.dither else ''})"

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Quantize each group. With ``support`` the range of a group covers its positive values only."""
        return self._encode(tensor, key, support is not None, None)

    def encode_rectified(self, tensor: Tensor, *, key: int) -> tuple[Packed, Tensor]:
        """Quantize each group. The kernel looks for positive values anyway, and writes their bits on the way."""
        support = room_for_bits(tensor)
        return self._encode(tensor, key, True, support), support

    def _encode(self, tensor: Tensor, key: int, positive: bool, support: Tensor | None) -> Packed:
        require_float(tensor, self)
        flat, meta, layout = flatten(tensor)
        levels = steps_of(self.levels, self.bits, tensor.device)
        geometry = self._channels(layout)
        if geometry is not None:
            codes, side = ops.quantize_channels(flat, geometry, self.group, self.bits, key, positive, levels, support)
        else:
            row = row_of(self.layout, layout, meta.numel)
            codes, side = ops.quantize_groups(flat, row, self.group, self.bits, key, positive, levels, support)
        return Packed(self, meta, (codes, side), key if self.dither else 0)

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """The value of each code. With ``support`` the zeros of a rectified tensor come back exactly."""
        meta, (codes, side) = packed.meta, packed.buffers
        layout, key = layout_of(meta.shape, meta.stride), packed.key if self.dither else None
        levels = steps_of(self.levels, self.bits, codes.device)
        geometry = self._channels(layout)
        if geometry is not None:
            flat = ops.dequantize_channels(
                codes, side, geometry, self.group, self.bits, meta.dtype, support, levels, key
            )  # fmt: skip
        else:
            row = row_of(self.layout, layout, meta.numel)
            flat = ops.dequantize_groups(
                codes, side, meta.numel, row, self.group, self.bits, meta.dtype, support, levels, key
            )  # fmt: skip
        return flat.as_strided(meta.shape, meta.stride)

    def maps(self, meta: TensorMeta) -> tuple[int, int, int] | None:
        """(samples, channels, values of a map) if :meth:`norm_backward` is for such tensors."""
        return None if self.levels is not None else maps_of(meta)

    def norm_backward(
        self,
        packed: Packed,
        grad: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Tensor | None,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The gradients of a batch norm whose input is packed, without the input; None if it cannot be done so.

        With ``in_place`` that of the input takes the place of ``grad``.
        """
        meta, (codes, side) = packed.meta, packed.buffers
        geometry = self.maps(meta)
        if geometry is None or not fits_norm(meta, grad, mean, invstd, weight):
            return None
        row = 0 if self.layout == "channel" else row_of(self.layout, layout_of(meta.shape, meta.stride), meta.numel)
        key = packed.key if self.dither else None
        *flat, for_weight, for_bias = (ops.norm_backward_ if in_place else ops.norm_backward)(
            grad.view(-1), None, codes, side, geometry, (), 0, row, self.group, self.bits, key, mean, invstd, weight,
        )  # fmt: skip
        return grad if in_place else flat[0].view(meta.shape), for_weight, for_bias

    def energy(self, tensor: Tensor, positive: bool) -> Tensor:
        """The sum over all groups of the square of the range, for each value that is counted; one number in float64.

        Dithered, the squared error of all values together is this over ``12 * (2**bits - 1)**2``, for any bits.
        With ``positive`` only positive values set ranges and count, as with ``support``.
        """
        flat, meta, layout = flatten(tensor)
        geometry = self._channels(layout)
        if geometry is None or geometry[2] >= self.group or meta.numel == 0:
            row = row_of(self.layout, layout, meta.numel) if geometry is None else geometry[2]
            return energy_of(flat, row, self.group, flat > 0 if positive else None)
        _, channels, inner = geometry
        total = torch.zeros((), dtype=torch.float64, device=flat.device)
        for first, last, step, _ in ops.channel_pieces(geometry, self.group):
            piece = flat.view(geometry)[first:last].view(-1, step, channels, inner).transpose(1, 2).reshape(-1)
            total += energy_of(piece, step * inner, self.group, piece > 0 if positive else None)
        return total

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """The codes take whole bytes in each group, and each group has four bytes beside them."""
        layout = layout_of(meta.shape, meta.stride)
        geometry = self._channels(layout)
        if geometry is None or meta.numel == 0:
            return quantized_nbytes(meta.numel, row_of(self.layout, layout, meta.numel), self.group, self.bits)
        groups, size = ops.channel_sizes(geometry, self.group, self.bits)
        return size + 4 * groups

    def _channels(self, layout: Layout) -> tuple[int, int, int] | None:
        return channels_of(layout) if self.layout == "channel" else None


class Stage(NamedTuple):
    """A stored tensor, a scale and a shift for each of its channels, and the bits of the sum that are not zero."""

    packed: Packed
    support: Tensor | None
    scale: Tensor
    shift: Tensor
    mask: Tensor | None


def is_link(packed: Packed, after: Packed | None) -> bool:
    """Can :func:`decode_chain` decode it, and in one pass with ``after``?"""
    codec, meta = packed.codec, packed.meta
    if type(codec) is not GroupQuant or codec.layout != "channel" or codec.levels is not None:
        return False
    if after is not None:
        return meta == after.meta and codec.group == cast(GroupQuant, after.codec).group
    return channels_of(layout_of(meta.shape, meta.stride)) is not None


def decode_chain(stages: Sequence[Stage], other: Tensor | None) -> Tensor:
    """``scale * x + shift`` of each decoded tensor, added up one after the other, in one pass over memory.

    The sum begins with ``other``, and after each stage it is zero where the stage's mask says so. All tensors have the
    same form and groups of the same length.
    """
    meta, codecs = stages[0].packed.meta, [cast(GroupQuant, stage.packed.codec) for stage in stages]
    geometry = channels_of(layout_of(meta.shape, meta.stride))
    assert geometry is not None
    flat = ops.rebuild_chain(
        [stage.packed.buffers[0] for stage in stages],
        [stage.packed.buffers[1] for stage in stages],
        geometry,
        codecs[0].group,
        [codec.bits for codec in codecs],
        meta.dtype,
        [stage.support for stage in stages],
        [stage.packed.key for stage in stages],
        [codec.dither for codec in codecs],
        [stage.scale for stage in stages],
        [stage.shift for stage in stages],
        None if other is None else other.as_strided((meta.numel,), (1,)),
        [stage.mask for stage in stages],
    )
    return flat.as_strided(meta.shape, meta.stride)


def channels_of(layout: Layout) -> tuple[int, int, int] | None:
    """How a tensor lies in memory: (values before, channels, values within); None without a dimension of channels."""
    if len(layout.order) < 2:
        return None
    at = layout.order.index(1)
    return math.prod(layout.sizes[:at]), layout.sizes[at], math.prod(layout.sizes[at + 1 :])


_LARGEST_MAPS = 1 << 18
"""Values of one channel: more do not stay in the cache while a kernel works on them."""


def maps_of(meta: TensorMeta) -> tuple[int, int, int] | None:
    """(samples, channels, values of a map) of a tensor whose maps lie one after the other and are not too large."""
    if meta.dtype not in (torch.float32, torch.bfloat16) or len(meta.shape) < 3 or not meta.numel:
        return None
    samples, channels, *sizes = meta.shape
    inner = math.prod(sizes)
    contiguous = channels_of(layout_of(meta.shape, meta.stride)) == (samples, channels, inner)
    fits = samples * inner <= _LARGEST_MAPS
    return (samples, channels, inner) if contiguous and fits else None


def fits_norm(meta: TensorMeta, grad: Tensor, *statistics: Tensor | None) -> bool:
    """Is there a kernel for the backward of a batch norm of such types?

    Autocast leaves the weight and the statistics in float32. A norm that is all in 16 bits is left to torch.
    """
    plain = grad.dtype == meta.dtype and grad.is_contiguous()
    return plain and all(t is None or t.dtype == torch.float32 for t in statistics)


def energy_of(flat: Tensor, row: int, group: int, counted: Tensor | None) -> Tensor:
    """The sum over all groups of ``counted values * range**2``; see :meth:`GroupQuant.energy`."""
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    rows, short = flat.to(torch.float32).view(-1, row), -row % group
    inside = torch.ones_like(rows, dtype=torch.bool) if counted is None else counted.view(-1, row)
    inside = functional.pad(inside, (0, short)).view(-1, group)
    values = functional.pad(rows, (0, short)).view(-1, group)
    low = torch.where(inside, values, torch.inf).amin(1)
    high = torch.where(inside, values, -torch.inf).amax(1)
    extent = torch.where(high > low, high - low, 0.0)
    return (extent.square() * inside.sum(1)).sum(dtype=torch.float64)


def room_for_bits(tensor: Tensor) -> Tensor:
    """Memory for one bit of each value."""
    return torch.empty(-(-tensor.numel() // 8), dtype=torch.uint8, device=tensor.device)


def row_of(rule: str, layout: Layout, numel: int) -> int:
    """How many values lie between two borders that no group crosses."""
    if numel == 0 or not layout.sizes or rule == "flat":
        return numel
    return numel // layout.sizes[0] if rule == "sample" else layout.sizes[-1]


def quantized_nbytes(numel: int, row: int, group: int, bits: int) -> int:
    """Bytes of the codes and the side words of ``numel`` values in rows of ``row``."""
    if numel == 0:
        return 0
    return numel // row * (ops.row_bytes(row, group, bits) + 4 * ops.groups_in_row(row, group))


@lru_cache(maxsize=64)
def _gains(least: int, device: torch.device) -> Tensor:
    """What one bit more takes off the error, from ``least`` bits up to the most."""
    error = [1.0 / (2**bits - 1) ** 2 for bits in BITS[least - 1 :]]
    return torch.tensor([a - b for a, b in pairwise(error)], dtype=torch.float64, device=device)


def share_bits(cost: Tensor, total: int, least: int = 1) -> Tensor:
    """Bits ``b`` from ``least`` to 8 that minimise ``sum(cost / (2**b - 1)**2)``, and are ``total`` together, as uint8.

    ``total`` is brought between what all need and what all can have. The best single bit is given first, then the
    next: because gains fall from bit to bit, that is optimal. Of equal gains the fewer bits are raised first, then the
    first item. A cost that is negative or not finite counts as the largest finite one. Nothing is read from a device.

    >>> share_bits(torch.tensor([1.0, 100.0]), 6).tolist()
    [2, 4]
    >>> share_bits(torch.tensor([1.0, 100.0]), 6, least=3).tolist()
    [3, 3]
    """
    items, gains = cost.numel(), _gains(least, cost.device)
    steps = max(0, min(total - least * items, len(gains) * items))
    # One row for each bit, so that a stable sort raises fewer bits first; an item's own bits stay in order.
    order = torch.sort((gains[:, None] * sound(cost)).view(-1), descending=True, stable=True).indices
    given = torch.zeros(len(gains) * items, dtype=torch.uint8, device=cost.device).index_fill_(0, order[:steps], 1)
    return given.view(len(gains), items).sum(0, dtype=torch.uint8) + least


def sound(cost: Tensor) -> Tensor:
    """Costs in float64, relative to the largest; what is no cost counts as the largest."""
    cost = cost.to(torch.float64)
    fine = torch.isfinite(cost) & (cost >= 0)
    if not cost.numel():
        return cost
    largest = torch.where(fine, cost, 0.0).max()
    return torch.where(fine, cost, largest) / torch.where(largest > 0, largest, 1.0)


@dataclass(frozen=True)
class SampleQuant(Codec):
    """Random rounding in groups, with a number of bits for each sample (level 3 of ActNN, Chen et al. 2021).

    ``samples`` samples share ``total`` bits a value, from ``least`` to 8 each; a tensor with another number of samples
    has its part of them, rounded down. The bits go where they lower the variance of the rounding most:
    :func:`share_bits` by the squared ranges of a sample's groups. That is decided where the tensor lies, and the host
    need not know it, because the sum of all bits tells the bytes. If rows of codes do not fill their bytes, it also
    depends on who has how many, and the codes have room for the worst case: a few bytes more for each sample.

    Samples are dimension 0, which must be the outermost in memory. A sample with ``b`` bits has the bytes that
    ``GroupQuant(b, group, "sample")`` gives it with the same key, and one byte more for its number of
    bits. Errors are those of ``GroupQuant``, and a group with NaN or Inf decodes to NaN here too.
    """

    id: ClassVar[str] = "sample_quant"
    total: int
    samples: int
    least: int = 1
    group: int = 256

    def __post_init__(self) -> None:
        require_positive(self.samples, "samples")
        require(self.least, BITS, "least")
        require_positive(self.group, "group")
        low, high = self.samples, self.samples * BITS[-1]
        if isinstance(self.total, bool) or not isinstance(self.total, int) or not low <= self.total <= high:
            raise ValueError(f"{self.samples} samples share {low} to {high} bits in total; got {self.total!r}")

    def __str__(self) -> str:
        return f"{self.id}({max(self.total / self.samples, self.least):.3g} bits on average)"

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Quantize each group. With ``support`` the range of a group covers its positive values only."""
        return self._encode(tensor, key, support is not None, None)

    def encode_rectified(self, tensor: Tensor, *, key: int) -> tuple[Packed, Tensor]:
        """Quantize each group. The kernel looks for positive values anyway, and writes their bits on the way."""
        support = room_for_bits(tensor)
        return self._encode(tensor, key, True, support), support

    def _encode(self, tensor: Tensor, key: int, positive: bool, support: Tensor | None) -> Packed:
        require_float(tensor, self)
        flat, meta, layout = flatten(tensor)
        samples, size = self._require_samples(meta), self._code_bytes(meta)
        energy = ops.range_energy(flat, row_of("sample", layout, meta.numel), self.group, positive)
        bits = share_bits(energy, self._shared(samples), self.least)
        codes, side = ops.quantize_samples(flat, bits, size, self.group, key, positive, support)
        return Packed(self, meta, (codes, side, bits))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """The level of each code. With ``support`` the zeros of a rectified tensor come back exactly."""
        meta, (codes, side, bits) = packed.meta, packed.buffers
        flat = ops.dequantize_samples(codes, side, bits, meta.numel, self.group, meta.dtype, support)
        return flat.as_strided(meta.shape, meta.stride)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """The codes, four bytes for each group, and one byte for each sample."""
        samples = self._require_samples(meta)
        if meta.numel == 0:
            return 0
        return self._code_bytes(meta) + samples * (1 + 4 * ops.groups_in_row(meta.numel // samples, self.group))

    def _shared(self, samples: int) -> int:
        """The sum of the bits of so many samples."""
        return max(self.total * samples // self.samples, self.least * samples)

    def _code_bytes(self, meta: TensorMeta) -> int:
        """The most bytes that codes can take, whoever gets the bits: all take the same if rows fill their bytes."""
        samples = meta.shape[0]
        if meta.numel == 0:
            return 0
        total, row = self._shared(samples), meta.numel // samples
        size = {bits: ops.row_bytes(row, self.group, bits) for bits in BITS[self.least - 1 :]}
        # A mean of bits lies between two numbers; a mixture of these has the most bytes for some pair (a hull).
        pairs = [(a, b) for a in size for b in size if a * samples <= total <= b * samples and a < b]
        return (
            max((size[a] * (b * samples - total) + size[b] * (total - a * samples)) // (b - a) for a, b in pairs)
            if pairs
            else size[BITS[-1]] * samples
        )

    def _require_samples(self, meta: TensorMeta) -> int:
        if not meta.shape or (meta.numel and layout_of(meta.shape, meta.stride).order[0] != 0):
            raise ValueError(
                f"{self.id} needs samples in dimension 0, outermost in memory; got shape {tuple(meta.shape)} with "
                f"strides {tuple(meta.stride)}. Make the tensor contiguous, or take GroupQuant"
            )
        return meta.shape[0]
