"""Codecs that give back exactly what backward reads of a tensor: copies, masks, small integers, shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import ops
from .base import (
    FLOATS,
    Codec,
    NotRepresentable,
    Packed,
    TensorMeta,
    flatten,
    layout_of,
    require,
    require_whole,
    with_stride,
)

_WIDTHS = (1, 2, 4, 8, 16, 32)
_COMPARABLE = (*FLOATS, torch.float64, torch.bool)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a value."""


def _require_comparable(tensor: Tensor, codec: Codec) -> None:
    """Raise unless the kernels can compare values of this type, and decode can give back every number it may need."""
    if tensor.dtype not in _COMPARABLE:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in _COMPARABLE)
        raise TypeError(f"{codec.id} stores {allowed}; got {tensor.dtype}. Keep such a tensor with Raw()")


@dataclass(frozen=True)
class Raw(Codec):
    """An exact copy of the tensor, which frees the storage that the tensor is a part of."""

    id: ClassVar[str] = "raw"
    exact: ClassVar[bool] = True

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Copy the values."""
        flat, meta, _ = flatten(tensor)
        return Packed(self, meta, (flat.clone(),))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """A view of the copy: backward never writes to what it reads. Who wants to write makes a copy first."""
        return packed.buffers[0].as_strided(packed.meta.shape, packed.meta.stride)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """As many bytes as the values."""
        return meta.nbytes


@dataclass(frozen=True)
class ShapeOnly(Codec):
    """Keeps shape, strides and dtype, for slots whose values backward never reads.

    It keeps the strides of a tensor that is not dense, too.
    """

    id: ClassVar[str] = "shape_only"
    exact: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = False

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Keep no bytes."""
        meta = TensorMeta.of(tensor)
        return Packed(self, meta, (tensor.new_empty(0),))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """Uninitialised memory of the same form.

        An expanded scalar would not do: under channels_last some kernels choose the memory format of the gradient, and
        even its values, by the strides of this tensor.
        """
        meta = packed.meta
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=packed.buffers[0].device)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """No bytes."""
        return 0


@dataclass(frozen=True)
class Mask(Codec):
    """Keeps one bit for each value, which says whether it lies inside the band between ``low`` and ``high``.

    It decodes to one number inside the band and one outside. The backward of relu, leaky relu, hardtanh, clamp and the
    like looks at nothing else. ``closed`` counts the ends as inside, and ``nan`` counts NaN as inside; the kernel of
    each op decides both in its own way. An infinite end is no end, so Inf lies inside. Booleans are kept exactly.
    """

    id: ClassVar[str] = "mask"
    exact: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = False
    low: float = 0.0
    high: float = math.inf
    closed: bool = False
    nan: bool = True

    def __post_init__(self) -> None:
        for end, what in ((self.low, "low"), (self.high, "high")):
            if isinstance(end, bool) or not isinstance(end, (int, float)):
                raise ValueError(f"{what} must be a number; got {end!r}")
        require(self.closed, (False, True), "closed")
        require(self.nan, (False, True), "nan")
        if not self.low < self.high:
            raise ValueError(f"low must be below high; got low={self.low!r}, high={self.high!r}")

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Test whether each value lies inside."""
        _require_comparable(tensor, self)
        flat, meta, _ = flatten(tensor)
        return Packed(self, meta, (ops.pack_band(flat, self.low, self.high, self.closed, self.nan),))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """For each value one of two numbers, inside the band or outside."""
        meta = packed.meta
        inside, outside = self._numbers(meta.dtype)
        flat = ops.unpack_band(packed.buffers[0], meta.numel, meta.dtype, inside, outside)
        return flat.as_strided(meta.shape, meta.stride)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """One bit for each value."""
        return -(-meta.numel // 8)

    def _numbers(self, dtype: torch.dtype) -> tuple[float, float]:
        """A number inside the band and one outside, which stay there when they are rounded to ``dtype``."""
        low, high = self.low, self.high
        if math.isinf(low) and math.isinf(high):
            return 0.0, math.nan
        outside = 0.0 if low == 0 and not self.closed else -math.inf if math.isfinite(low) else math.inf
        if math.isfinite(low) and math.isfinite(high):
            return low / 2 + high / 2, outside
        inside = low + max(1.0, abs(low)) if math.isfinite(low) else high - max(1.0, abs(high))
        largest = torch.finfo(dtype).max if dtype.is_floating_point else math.inf
        return inside if abs(inside) <= largest else math.copysign(math.inf, inside), outside


@dataclass(frozen=True)
class TwoValue(Codec):
    """Keeps a tensor of zeros and one other, positive number, as dropout's noise is: one bit each, and the number."""

    id: ClassVar[str] = "two_value"
    exact: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = False

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Find the number and pack the bits; raise :class:`NotRepresentable` if there is a third number."""
        _require_comparable(tensor, self)
        flat, meta, _ = flatten(tensor)
        if flat.numel() == 0:
            return Packed(self, meta, (flat.new_empty(0, dtype=torch.uint8), flat.new_zeros(1)))
        # Read as integers, floats without a sign are in their order, and all others are below zero.
        least, most = torch.aminmax(flat.view(_INTEGERS[flat.itemsize]))
        value = most.view(flat.dtype)
        mask = ops.pack_band(flat, 0.0, math.inf, False, False)
        if flat.device.type == "cpu":  # packing twice reads less than comparing twice writes
            number = float(value)
            two = int(least) >= 0 and number > 0
            two = two and torch.equal(mask, ops.pack_band(flat, number, number, True, False))
        else:  # the one wait of this codec: nothing but the values can tell
            two = bool(((flat == 0) | (flat == value)).all() & (least >= 0) & (value > 0))
        if not two:
            raise NotRepresentable("the tensor holds more than zero and one positive number")
        return Packed(self, meta, (mask, value.reshape(1)))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """The two numbers again."""
        meta, (mask, value) = packed.meta, packed.buffers
        if mask.device.type == "cpu":
            flat = ops.unpack_band(mask, meta.numel, meta.dtype, float(value), 0.0)
        else:  # the number stays where it is, so nobody waits for it
            flat = torch.where(ops.unpack_band(mask, meta.numel, torch.bool, 1.0, 0.0), value, 0)
        return flat.as_strided(meta.shape, meta.stride)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """One bit for each value, and the number."""
        return -(-meta.numel // 8) + meta.dtype.itemsize


@dataclass(frozen=True)
class Indices(Codec):
    """Keeps integers from ``low`` to ``high``, both included, in as few of 1, 2, 4, 8, 16 or 32 bits as they need."""

    id: ClassVar[str] = "indices"
    exact: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = False
    low: int
    high: int

    def __post_init__(self) -> None:
        require_whole(self.low, "low")
        require_whole(self.high, "high")
        if self.low > self.high or self.high - self.low >= 2**32:
            raise ValueError(f"low..high must span 1 to 2**32 integers; got {self.low}..{self.high}")

    @property
    def bits(self) -> int:
        """Bits of one integer."""
        return next(w for w in _WIDTHS if self.high - self.low < 2**w)

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Pack the distance of each integer to ``low``; raise :class:`NotRepresentable` if one lies outside.

        On an accelerator that would be found too late to raise: then the device stops with an error of its own, as it
        does for any index that is out of range, and nobody waits.
        """
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            raise TypeError(f"{self.id} stores integers; got {tensor.dtype}. Keep such a tensor with Raw()")
        flat, meta, _ = flatten(tensor)
        if flat.numel():
            low, high = torch.aminmax(flat)
            if flat.device.type != "cpu":
                ops.require_later((low >= self.low) & (high <= self.high))
            elif int(low) < self.low or int(high) > self.high:
                raise NotRepresentable(f"integers {int(low)}..{int(high)} leave {self.low}..{self.high}")
        return Packed(self, meta, (ops.pack_uints(flat, self.low, self.bits),))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """The integers again, in their own dtype."""
        meta = packed.meta
        flat = ops.unpack_uints(packed.buffers[0], meta.numel, self.bits, self.low, meta.dtype)
        return flat.as_strided(meta.shape, meta.stride)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """Whole bytes for all integers together."""
        return -(-meta.numel * self.bits // 8)


@dataclass(frozen=True)
class PoolOffsets(Codec):
    """Keeps the positions that max pooling found as offsets inside their windows: 4 bits if a window has 16 taps.

    PyTorch keeps an int64 position in the input plane of ``size``. The window that it lies in follows from its place in
    the output, so the offset inside the window is enough, with any stride, padding, dilation and ceil mode.
    """

    id: ClassVar[str] = "pool_offsets"
    exact: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = False
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def __post_init__(self) -> None:
        for what, least in (("size", 1), ("kernel", 1), ("stride", 1), ("padding", 0), ("dilation", 1)):
            numbers = getattr(self, what)
            whole = isinstance(numbers, tuple) and all(isinstance(n, (int, torch.SymInt)) for n in numbers)
            if not whole or any(n < least for n in numbers):
                raise ValueError(f"{what} must be a tuple of whole numbers of at least {least}; got {numbers!r}")
            if not numbers or len(numbers) != len(self.size):
                raise ValueError(
                    f"size, kernel, stride, padding and dilation must each have one number for each pooled dimension; "
                    f"got size={self.size!r} and {what}={numbers!r}"
                )

    @property
    def bits(self) -> int:
        """Bits of one offset."""
        return next(w for w in _WIDTHS if math.prod(self.kernel) <= 2**w)

    def __str__(self) -> str:
        """The id and the bits, which are what matters in a report."""
        return f"{self.id}({self.bits} bits)"

    def _windows(self, meta: TensorMeta, device: torch.device) -> tuple[tuple[int, ...], Tensor, int, Tensor]:
        """The strides to store by, and what the kernels need to know of memory in that order.

        That is where each window begins in the plane, how many values that lie side by side belong to one window, and
        how far the taps of a window are from its beginning.
        """
        shape, dims = meta.shape, len(self.size)
        layout, first = layout_of(shape, meta.stride), len(shape) - dims
        at = layout.order.index(first)
        if not layout.dense or layout.order[at : at + dims] != tuple(range(first, len(shape))):
            contiguous = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
            return self._windows(TensorMeta(shape, contiguous, meta.dtype), device)
        starts = taps = torch.zeros((), dtype=torch.int64, device=device)
        rising, reach = True, 0  # do taps rise in the order of their window?
        for d in range(dims):
            below = math.prod(self.size[d + 1 :])
            outputs, inputs = (torch.arange(n, device=device) for n in (shape[first + d], self.kernel[d]))
            starts = starts[..., None] + (outputs * self.stride[d] - self.padding[d]) * below
            taps = taps[..., None] + inputs * (self.dilation[d] * below)
        for d in reversed(range(dims)):
            hop = self.dilation[d] * math.prod(self.size[d + 1 :])
            rising = rising and (hop > reach or self.kernel[d] == 1)
            reach += (self.kernel[d] - 1) * hop
        inner = math.prod(layout.sizes[at + dims :])
        # Windows wider than their plane repeat positions. Only then taps have to be sorted, which waits for a device.
        return layout.stride, starts.reshape(-1), inner, taps.reshape(-1) if rising else torch.unique(taps)

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Pack the offsets; raise :class:`NotRepresentable` if a position is not a tap of its window.

        On an accelerator the device stops with an error then, as for :class:`Indices`.
        """
        if tensor.dtype != torch.int64:
            raise TypeError(f"{self.id} stores int64 positions; got {tensor.dtype}. Keep such a tensor with Raw()")
        if tensor.dim() < len(self.size):
            raise ValueError(
                f"{self.id} with size={self.size} needs a tensor of at least {len(self.size)} dimensions; got shape "
                f"{tuple(tensor.shape)}"
            )
        flat, meta, _ = flatten(tensor)
        if meta.numel == 0:
            return Packed(self, meta, (tensor.new_empty(0, dtype=torch.uint8),))
        stride, starts, inner, taps = self._windows(meta, tensor.device)
        if stride != meta.stride:
            flat = tensor.contiguous().view(-1)
        packed, none = ops.pack_taps(flat, starts, inner, taps, math.prod(self.size), self.bits)
        if none.device.type != "cpu":
            ops.require_later(none == 0)
        elif int(none):
            raise NotRepresentable(f"{int(none)} positions are no taps of their pooling windows")
        return Packed(self, meta, (packed,))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """The positions in the input plane again."""
        meta, buffer = packed.meta, packed.buffers[0]
        if meta.numel == 0:
            return torch.empty_strided(meta.shape, meta.stride, dtype=torch.int64, device=buffer.device)
        stride, starts, inner, taps = self._windows(meta, buffer.device)
        flat = ops.unpack_taps(buffer, meta.numel, starts, inner, taps, self.bits)
        return with_stride(flat.as_strided(meta.shape, stride), meta.stride)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """Whole bytes for all offsets together."""
        return -(-meta.numel * self.bits // 8)
