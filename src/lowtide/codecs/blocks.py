"""Means of blocks, and differences to them that are quantized in groups: DIVISION, and pooled backprop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import ops
from .base import Codec, Packed, TensorMeta, form_of, layout_of, require, require_float, require_positive, with_stride
from .groups import (
    BITS,
    energy_of,
    fits_norm,
    maps_of,
    quantized_nbytes,
    require_dither,
    require_levels,
    room_for_bits,
    row_of,
    steps_of,
)


@dataclass(frozen=True)
class BlockMean(Codec):
    """Means of blocks in bfloat16, and the difference to them in ``bits`` bits.

    This is DIVISION (Wang et al. 2023): it keeps low frequencies precisely and high frequencies coarsely. ``dims`` is
    the number of spatial dimensions, 1 to 3, which are the last ones. A block at the edge averages the values that it
    has. The difference is taken to the *rounded* means, so their rounding costs no bias. ``levels`` and
    ``dither`` are those of :class:`GroupQuant`.

    ``bits=0`` keeps the means alone, in the tensor's own type. That is pooled backprop, whose error is a **bias**: the
    high frequencies are lost.

    A block with NaN or Inf decodes to NaN, and with it every group of differences that the block has a part in.

    ``faithful=True`` reproduces the published scheme. It pools in floor mode, so that its windows do not line up with
    the nearest-neighbour upsampling unless the block divides the map. Each map has one range, a map with NaN or Inf
    decodes to NaN, and zeros are not restored.
    """

    id: ClassVar[str] = "block_mean"
    block: int = 8
    dims: int = 2
    bits: int = 2
    group: int = 256
    faithful: bool = False
    levels: tuple[float, ...] | None = None
    dither: bool = False

    def __post_init__(self) -> None:
        require_positive(self.block, "block")
        require(self.dims, (1, 2, 3), "dims")
        require(self.bits, (0, *BITS), "bits")
        require_positive(self.group, "group")
        require(self.faithful, (False, True), "faithful")
        require_levels(self.levels, self.bits)
        require_dither(self.dither, self.levels)
        if self.faithful and self.bits == 0:
            raise ValueError("faithful=True needs bits of at least 1; got bits=0")
        if self.dither and (self.faithful or self.bits == 0):
            raise ValueError(
                f"dither=True goes with bits of at least 1 and faithful=False; got bits={self.bits}, "
                f"faithful={self.faithful}. Leave dither out, because there is nothing to subtract"
            )

    def __str__(self) -> str:
        if self.bits == 0:
            return f"{self.id}(means only)"
        return f"{self.id}({self.bits} bits{', levels' if self.levels else ''}{', dithered' if self.dither else ''})"

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Average, then quantize. With ``support`` the range of a group covers positive values' differences only."""
        return self._encode(tensor, key, support is not None, None)

    def encode_rectified(self, tensor: Tensor, *, key: int) -> tuple[Packed, Tensor]:
        """Average, then quantize. A kernel that goes through memory in order writes the bits of ``support`` too."""
        meta, _ = form_of(tensor)
        if (
            not self.bits
            or self.faithful
            or not meta.numel
            or tensor.dim() < self.dims
            or _block_frame(meta.shape, meta.stride, self.dims)[0] != meta.stride
        ):
            return super().encode_rectified(tensor, key=key)
        support = room_for_bits(tensor)
        return self._encode(tensor, key, True, support), support

    def _encode(self, tensor: Tensor, key: int, positive: bool, support: Tensor | None) -> Packed:
        require_float(tensor, self)
        meta, _ = form_of(tensor)
        self._require_dims(meta)
        if meta.numel == 0:
            return Packed(self, meta, (tensor.new_empty(0),))
        if self.faithful:
            return self._encode_faithful(tensor.contiguous(), meta, key)
        stride, geometry, row = _block_frame(meta.shape, meta.stride, self.dims)
        if stride != tensor.stride():
            tensor = tensor.contiguous()
        flat = tensor.as_strided((meta.numel,), (1,))
        if self.bits == 0:
            return Packed(self, meta, (ops.block_means(flat, geometry, self.block, meta.dtype),))
        levels = steps_of(self.levels, self.bits, tensor.device)
        buffers = ops.quantize_blocks(
            flat, geometry, self.block, row, self.group, self.bits, key, positive, levels, support
        )  # fmt: skip
        return Packed(self, meta, buffers, key if self.dither else 0)

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """Means plus differences. With ``support`` zeros come back exactly, but not with ``bits=0`` or ``faithful``."""
        meta = packed.meta
        if meta.numel == 0:
            return packed.buffers[0].new_empty_strided(meta.shape, meta.stride)
        if self.faithful:
            return with_stride(self._decode_faithful(packed), meta.stride)
        stride, geometry, row = _block_frame(meta.shape, meta.stride, self.dims)
        if self.bits == 0:
            flat = ops.spread_blocks(packed.buffers[0], geometry, self.block, meta.dtype)
        else:
            low, codes, side = packed.buffers
            in_order = stride == meta.stride  # otherwise the bits of ``support`` have another order than ``flat``
            flat = ops.dequantize_blocks(
                low, codes, side, geometry, self.block, row, self.group, self.bits, meta.dtype,
                support if in_order else None, steps_of(self.levels, self.bits, codes.device),
                packed.key if self.dither else None,
            )  # fmt: skip
            if support is not None and not in_order:
                values = with_stride(flat.as_strided(meta.shape, stride), meta.stride)
                kept = ops.unpack_band(support, meta.numel, torch.bool, True, False)
                return values.masked_fill_(kept.as_strided(meta.shape, meta.stride).logical_not_(), 0.0)
        return with_stride(flat.as_strided(meta.shape, stride), meta.stride)

    def maps(self, meta: TensorMeta) -> tuple[int, int, int] | None:
        """See :meth:`GroupQuant.maps`."""
        other = self.levels is not None or not self.bits or self.faithful or self.dims != len(meta.shape) - 2
        return None if other else maps_of(meta)

    def norm_backward(
        self,
        packed: Packed,
        grad: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Tensor | None,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """See :meth:`GroupQuant.norm_backward`."""
        meta = packed.meta
        geometry = self.maps(meta)
        if geometry is None or not fits_norm(meta, grad, mean, invstd, weight):
            return None
        _, frame, row = _block_frame(meta.shape, meta.stride, self.dims)
        *flat, for_weight, for_bias = (ops.norm_backward_ if in_place else ops.norm_backward)(
            grad.view(-1), *packed.buffers, geometry, frame, self.block, row, self.group, self.bits,
            packed.key if self.dither else None, mean, invstd, weight,
        )  # fmt: skip
        return grad if in_place else flat[0].view(meta.shape), for_weight, for_bias

    def small(self, packed: Packed) -> Tensor | None:
        """The means as a smaller map, without a copy; None unless they are all there is and every block is whole."""
        shape, stride, _ = packed.meta
        spatial = len(shape) - self.dims
        if self.bits or not packed.meta.numel or any(size % self.block for size in shape[spatial:]):
            return None
        layout = layout_of(shape, _block_frame(shape, stride, self.dims)[0])
        sizes = [shape[d] // self.block if d >= spatial else shape[d] for d in layout.order]
        return packed.buffers[0].view(sizes).permute([layout.order.index(d) for d in range(len(shape))])

    def energy(self, tensor: Tensor, positive: bool) -> Tensor:
        """That of :meth:`GroupQuant.energy`, of the differences to the means."""
        means = BlockMean(self.block, self.dims, 0)
        stride, _, row = _block_frame(tuple(tensor.shape), tensor.stride(), self.dims)
        source = tensor if stride == tensor.stride() else tensor.contiguous()
        difference = source.to(torch.float32) - means.encode(source.to(torch.float32), key=0).decode()
        flat, values = (t.as_strided((t.numel(),), (1,)) for t in (difference, source))
        return energy_of(flat, row, self.group, values > 0 if positive else None)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """The means, the codes, and four bytes for each group."""
        self._require_dims(meta)
        if meta.numel == 0:
            return 0
        if self.faithful:
            return self._faithful_nbytes(meta)
        return self._nbytes(meta)

    def _require_dims(self, meta: TensorMeta) -> None:
        if len(meta.shape) < self.dims:
            fewer = f"dims of at most {len(meta.shape)}, or " if meta.shape else ""
            raise ValueError(
                f"{self.id} with dims={self.dims} averages over the last {self.dims} dimensions; got a tensor of shape "
                f"{tuple(meta.shape)}. Take {fewer}GroupQuant"
            )

    @lru_cache(maxsize=4096)  # noqa: B019 - a codec is a small frozen value
    def _nbytes(self, meta: TensorMeta) -> int:
        stride = layout_of(meta.shape, meta.stride).stride
        _, geometry, row = _block_frame(meta.shape, stride, self.dims)
        low = math.prod(ops.low_shape(geometry, self.block))
        if self.bits == 0:
            return low * meta.dtype.itemsize
        return 2 * low + quantized_nbytes(meta.numel, row, self.group, self.bits)

    # The published scheme has functions of its own, because its windows and its cells do not line up.

    def _faithful_sizes(self, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...], int]:
        spatial = shape[len(shape) - self.dims :]
        kernel = min(self.block, *spatial) if spatial else self.block
        return kernel, tuple((s - kernel) // kernel + 1 for s in spatial), math.prod(spatial)

    def _spread_faithful(self, low: Tensor, shape: tuple[int, ...]) -> Tensor:
        return functional.interpolate(low.to(torch.float32), size=shape[len(shape) - self.dims :], mode="nearest")

    def _encode_faithful(self, tensor: Tensor, meta: TensorMeta, key: int) -> Packed:
        kernel, _, area = self._faithful_sizes(meta.shape)
        maps = tensor.reshape(-1, 1, *meta.shape[tensor.dim() - self.dims :]).to(torch.float32)
        pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[self.dims - 1]
        low = pool(maps, kernel, kernel).to(torch.bfloat16)
        residual = (maps - self._spread_faithful(low, meta.shape)).view(-1)
        levels = steps_of(self.levels, self.bits, tensor.device)
        codes, side = ops.quantize_groups(residual, area, area, self.bits, key, False, levels)
        return Packed(self, meta, (low, codes, side))

    def _decode_faithful(self, packed: Packed) -> Tensor:
        meta, (low, codes, side) = packed.meta, packed.buffers
        area = self._faithful_sizes(meta.shape)[2]
        levels = steps_of(self.levels, self.bits, codes.device)
        residual = ops.dequantize_groups(codes, side, meta.numel, area, area, self.bits, torch.float32, None, levels)
        maps = self._spread_faithful(low, meta.shape)
        maps.add_(residual.view_as(maps))
        if meta.dtype == torch.float16:
            maps.clamp_(-65504.0, 65504.0)  # the step was rounded up, so the largest value may decode to more
        return maps.to(meta.dtype).view(meta.shape)

    def _faithful_nbytes(self, meta: TensorMeta) -> int:
        _, pooled, area = self._faithful_sizes(meta.shape)
        maps = meta.numel // area
        return maps * (2 * math.prod(pooled) + ops.group_bytes(area, self.bits) + 4)


@lru_cache(maxsize=4096)
def _block_frame(
    shape: tuple[int, ...], stride: tuple[int, ...], dims: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The strides to store by, the tensor in memory as (outer, s1, s2, s3, inner), and the row that groups divide.

    The strides are the tensor's own if it is dense and its spatial dimensions lie side by side, as they do in
    contiguous and channels_last tensors. Otherwise they are contiguous ones, and the tensor must be copied to them.
    """
    layout = layout_of(shape, stride)
    spatial = tuple(range(len(shape) - dims, len(shape)))
    first = layout.order.index(spatial[0])
    if not layout.dense or layout.order[first : first + dims] != spatial:
        contiguous = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        return _block_frame(shape, contiguous, dims)
    sizes = layout.sizes
    outer, inner = math.prod(sizes[:first]), math.prod(sizes[first + dims :])
    geometry = (outer, *(1,) * (3 - dims), *sizes[first : first + dims], inner)
    return layout.stride, geometry, row_of("sample", layout, math.prod(shape))
