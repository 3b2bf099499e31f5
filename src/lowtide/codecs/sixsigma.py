"""The quantizer of BLPA, whose range follows from the mean and the deviation of a channel, not from its extremes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import ops
from .base import Codec, Layout, Packed, TensorMeta, flatten, layout_of, require, require_float

# So many values are widened to float64 at once. Sums take fewer: torch adds less than 32768 values in one thread, so
# the bytes do not depend on the number of threads.
_CHUNK = 2**18
_SUMMED = 2**14


@dataclass(frozen=True)
class SixSigma(Codec):
    """Even bins over six standard deviations around the mean of each channel (Chakrabarti and Moseley 2019).

    Channels are dimension 1. With ``n = 2**bits`` and ``v = (x - mean) / deviation``, the code is
    ``floor(v * n / 6) + n / 2``, clamped to ``0 .. n - 1``. It decodes to the middle of its bin. Nothing is random, so
    the error is a **bias**, which no averaging over steps removes. It is at most ``3 / n`` deviations for a value
    within three deviations of the mean; for any other value the distance to that range comes on top.

    Mean and deviation are those of the tensor, in float32, and take 8 bytes for each channel. A channel without
    deviation is exact. A channel with NaN or Inf decodes to NaN.

    The paper quantizes the output of BN and puts zero on the edge of a bin, so that the code carries the mask of the
    following ReLU too. Here that mask is stored beside the code, as one exact bit, so a value costs ``bits + 1`` bits.
    """

    id: ClassVar[str] = "six_sigma"
    bits: int = 4

    def __post_init__(self) -> None:
        require(self.bits, (1, 2, 4, 8), "bits")

    def __str__(self) -> str:
        return f"{self.id}({self.bits} bits)"

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Find the statistics, then the bin of each value. ``key`` and ``support`` are not used."""
        require_float(tensor, self)
        flat, meta, layout = flatten(tensor)
        shape = _frame(meta, layout)
        statistics = torch.empty((2, shape[1] if meta.numel else 0), dtype=torch.float32, device=tensor.device)
        if meta.numel == 0:
            return Packed(self, meta, (statistics.new_empty(0, dtype=torch.uint8), statistics))
        values = flat.view(shape)
        statistics[0], statistics[1] = _statistics(values)
        mean, deviation = (s.double().view(1, -1, 1) for s in statistics)
        codes = torch.empty(shape, dtype=torch.uint8, device=tensor.device)
        bins = 2**self.bits
        for part in _parts(shape, _CHUNK):
            wide = values[part].double().sub_(mean).div_(deviation).mul_(bins / 6).floor_().add_(bins // 2)
            # If the deviation is zero or NaN, every code decodes to the mean, or to NaN, so any code will do.
            codes[part] = wide.nan_to_num_(0.0).clamp_(0, bins - 1)
        return Packed(self, meta, (ops.pack_uints(codes.view(-1), 0, self.bits), statistics))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """The middle of each value's bin."""
        meta, (packed_codes, statistics) = packed.meta, packed.buffers
        out = torch.empty(meta.numel, dtype=meta.dtype, device=packed_codes.device)
        if meta.numel:
            shape = _frame(meta, layout_of(meta.shape, meta.stride))
            codes = ops.unpack_uints(packed_codes, meta.numel, self.bits, 0, torch.uint8).view(shape)
            values, bins, largest = out.view(shape), 2**self.bits, torch.finfo(meta.dtype).max
            mean, deviation = (s.double().view(1, -1, 1) for s in statistics)
            for part in _parts(shape, _CHUNK):
                wide = codes[part].double().add_(0.5 - bins // 2).mul_(6 / bins).mul_(deviation).add_(mean)
                values[part] = wide.clamp_(-largest, largest)  # the middle of the last bin may overflow the type
        return out.as_strided(meta.shape, meta.stride)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """The codes, and eight bytes for each channel."""
        channels = _frame(meta, layout_of(meta.shape, meta.stride))[1]
        return -(-meta.numel * self.bits // 8) + (8 * channels if meta.numel else 0)


def _frame(meta: TensorMeta, layout: Layout) -> tuple[int, int, int]:
    """The tensor in memory as three sizes: outside the channels, the channels, and inside them."""
    if len(meta.shape) < 2:
        raise ValueError(
            f"six_sigma needs channels in dimension 1; got a tensor of shape {tuple(meta.shape)}. Take GroupQuant"
        )
    at = layout.order.index(1)
    outer = inner = 1
    for size in layout.sizes[:at]:
        outer *= size
    for size in layout.sizes[at + 1 :]:
        inner *= size
    return outer, meta.shape[1], inner


def _parts(shape: tuple[int, int, int], count: int) -> Iterator[tuple[slice, slice, slice]]:
    """Cut the frame into pieces of about ``count`` values, each with all channels."""
    outer, channels, inner = shape
    width = max(1, min(inner, count // channels))
    height = max(1, count // (channels * width)) if width == inner else 1
    for top in range(0, outer, height):
        for left in range(0, inner, width):
            yield slice(top, top + height), slice(None), slice(left, left + width)


def _statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel. Sums are in float64, where no square of a float32 overflows.

    NaN or Inf in a channel makes its deviation NaN: if the mean is Inf, then Inf minus the mean is NaN.
    """
    shape = (values.shape[0], values.shape[1], values.shape[2])
    count = shape[0] * shape[2]
    total = values.new_zeros(shape[1], dtype=torch.float64)
    for part in _parts(shape, _SUMMED):
        total += values[part].double().sum((0, 2))
    # Deviations are taken from the rounded mean. If all values of a channel are equal, they are equal to that mean, and
    # the deviation is exactly zero.
    mean = (total / count).float()
    total.zero_()
    centre = mean.double().view(1, -1, 1)
    for part in _parts(shape, _SUMMED):
        total += values[part].double().sub_(centre).square_().sum((0, 2))
    return mean, (total / count).sqrt().float()
