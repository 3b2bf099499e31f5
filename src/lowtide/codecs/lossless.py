"""Codecs that give back exactly what backward reads: copies, masks, small integers, shapes."""

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


def _require_comparable(tensor: Tensor, codec: Codec) -> None:
    """Raise unless the kernels can compare values of this type, and decode can give back every number it may need."""
    if tensor.dtype not in _COMPARABLE:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in _COMPARABLE)
        raise TypeError(f"{codec.id} stores {allowed}; got {tensor.dtype}. Keep such a tensor with Raw()")


@dataclass(frozen=True)
class Raw(Codec):
    """An exact copy. Frees the storage the tensor was a part of."""

    id: ClassVar[str] = "raw"
    exact: ClassVar[bool] = True

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Copy."""
        flat, meta, _ = flatten(tensor)
        return Packed(self, meta, (flat.clone(),))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """A view of the copy, as backward never writes to what it reads."""
        return packed.buffers[0].as_strided(packed.meta.shape, packed.meta.stride)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """As many bytes as the values."""
        return meta.nbytes


@dataclass(frozen=True)
class ShapeOnly(Codec):
    """Nothing but shape, strides and dtype: for slots whose values backward never reads."""

    id: ClassVar[str] = "shape_only"
    exact: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = False

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Keep no bytes."""
        meta = TensorMeta.of(tensor)
        return Packed(self, meta, (tensor.new_empty(0),))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """Uninitialised memory of the same form.

        Not an expanded scalar: under channels_last some kernels choose the gradient's memory format,
        and even values, by the strides of this tensor.
        """
        meta = packed.meta
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=packed.buffers[0].device)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """Nothing."""
        return 0


@dataclass(frozen=True)
class Mask(Codec):
    """One bit for each value: is it inside the band between ``low`` and ``high``?

    Decodes to one number inside the band and one outside, which is all that the backward of relu,
    leaky relu, hardtanh, clamp and the like looks at. ``closed`` counts the ends as inside, ``nan``
    counts NaN as inside; each op's kernel decides both in its own way. Booleans are kept exactly.
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
        """Test each value."""
        _require_comparable(tensor, self)
        flat, meta, _ = flatten(tensor)
        return Packed(self, meta, (ops.pack_band(flat, self.low, self.high, self.closed, self.nan),))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """A number inside the band or one outside for each value."""
        meta = packed.meta
        inside, outside = self._numbers(meta.dtype)
        flat = ops.unpack_band(packed.buffers[0], meta.numel, meta.dtype, inside, outside)
        return flat.as_strided(meta.shape, meta.stride)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """One bit a value."""
        return -(-meta.numel // 8)

    def _numbers(self, dtype: torch.dtype) -> tuple[float, float]:
        """A number inside and one outside that stay so when rounded to ``dtype``."""
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
    """Zero and one other number, as dropout's noise: one bit a value and the number."""

    id: ClassVar[str] = "two_value"
    exact: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = False

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Raise :class:`NotRepresentable` if a third number is there."""
        _require_comparable(tensor, self)
        flat, meta, _ = flatten(tensor)
        if flat.numel() == 0:
            return Packed(self, meta, (flat.new_empty(0, dtype=torch.uint8), flat.new_zeros(1)))
        value = flat.max()
        two = ((flat == 0) | (flat == value)).all() & ~torch.signbit(flat).any()
        if not bool(two) or not float(value) > 0:
            raise NotRepresentable("the tensor holds more than zero and one positive number")
        return Packed(self, meta, (ops.pack_band(flat, 0.0, math.inf, False, False), value.reshape(1)))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """The two numbers again."""
        meta, (mask, value) = packed.meta, packed.buffers
        flat = ops.unpack_band(mask, meta.numel, meta.dtype, float(value), 0.0)
        return flat.as_strided(meta.shape, meta.stride)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """One bit a value, and one value."""
        return -(-meta.numel // 8) + meta.dtype.itemsize


@dataclass(frozen=True)
class Indices(Codec):
    """Integers from ``low`` to ``high`` (both included) in the fewest of 1, 2, 4, 8, 16 or 32 bits."""

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
        """Raise :class:`NotRepresentable` if an integer lies outside."""
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            raise TypeError(f"{self.id} stores integers; got {tensor.dtype}. Keep such a tensor with Raw()")
        flat, meta, _ = flatten(tensor)
        if flat.numel():
            low, high = torch.aminmax(flat)
            if int(low) < self.low or int(high) > self.high:
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
    """Arg-max positions of max pooling, kept as the offset inside each window (4 bits up to 16 taps).

    PyTorch keeps an int64 position in the input plane of ``size``; the window it lies in is known
    from the place in the output, so the offset inside the window is enough, with any stride,
    padding, dilation and ceil mode.
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
        """The width, which is what matters in a report."""
        return f"{self.id}({self.bits} bits)"

    def _windows(self, meta: TensorMeta, device: torch.device) -> tuple[tuple[int, ...], Tensor, int, Tensor]:
        """Strides to store by; then, for memory in that order, where windows begin in the plane, how many values lie
        side by side in one window, and how far behind its beginning its taps are."""
        shape, dims = meta.shape, len(self.size)
        layout, first = layout_of(shape, meta.stride), len(shape) - dims
        at = layout.order.index(first)
        if not layout.dense or layout.order[at : at + dims] != tuple(range(first, len(shape))):
            contiguous = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
            return self._windows(TensorMeta(shape, contiguous, meta.dtype), device)
        starts = taps = torch.zeros((), dtype=torch.int64)
        for d in range(dims):
            below = math.prod(self.size[d + 1 :])
            starts = starts[..., None] + (torch.arange(shape[first + d]) * self.stride[d] - self.padding[d]) * below
            taps = taps[..., None] + torch.arange(self.kernel[d]) * self.dilation[d] * below
        inner = math.prod(layout.sizes[at + dims :])
        return layout.stride, starts.reshape(-1).to(device), inner, torch.unique(taps).to(device)

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Raise :class:`NotRepresentable` if a position is not a tap of its window."""
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
        if int(none):
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
