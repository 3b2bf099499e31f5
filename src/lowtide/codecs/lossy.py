"""Codecs that approximate: random rounding in groups, block means, casts.

Each is unbiased given its key unless its docstring says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import ops
from .base import (
    Codec,
    Layout,
    NotRepresentable,
    Packed,
    TensorMeta,
    flatten,
    form_of,
    layout_of,
    require,
    require_positive,
    with_stride,
)

BITS = tuple(range(1, 9))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def require_float(tensor: Tensor, codec: Codec) -> None:
    """Raise unless ``tensor`` is of a type that lossy codecs store."""
    if tensor.dtype not in FLOATS:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in FLOATS)
        raise TypeError(f"{codec.id} stores {allowed}; got {tensor.dtype}. Keep such a tensor with Raw()")


def _require_levels(levels: tuple[float, ...] | None, bits: int) -> None:
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


def _steps(levels: tuple[float, ...] | None, bits: int, device: torch.device) -> Tensor | None:
    """Levels in units of a group's step."""
    if levels is None:
        return None
    return torch.tensor([level * (2**bits - 1) for level in levels], dtype=torch.float32, device=device)


@dataclass(frozen=True)
class GroupQuant(Codec):
    """Affine quantization of each run of ``group`` values, rounded at random.

    Rounding up with probability equal to the fraction makes the decoded value unbiased, so a
    gradient that is linear in it is unbiased too. The error of a value is below one step,
    ``(max - low) / (2**bits - 1)`` of its group, and its variance below a quarter of the step's
    square. A constant group is exact; a group with NaN or Inf decodes to NaN.

    ``layout`` says what a group may not straddle: ``"row"`` the innermost dimension (tokens,
    normalized rows), ``"sample"`` the outermost (maps of one image), ``"flat"`` nothing.

    ``levels`` are the values that codes stand for, as fractions of the range, where even ones do not fit
    the values (TinyScript, Fu et al. 2020): 2**bits numbers from 0.0 to 1.0. A value between two of them has a
    variance below a quarter of their distance's square.
    """

    id: ClassVar[str] = "group_quant"
    bits: int = 2
    group: int = 256
    layout: str = "row"
    levels: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        require(self.bits, BITS, "bits")
        require_positive(self.group, "group")
        require(self.layout, ("row", "sample", "flat"), "layout")
        _require_levels(self.levels, self.bits)

    def __str__(self) -> str:
        return f"{self.id}({self.bits} bits{', levels' if self.levels else ''})"

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """With ``support`` the range of a group covers its positive values only."""
        return self._encode(tensor, key, support is not None, None)

    def encode_rectified(self, tensor: Tensor, *, key: int) -> tuple[Packed, Tensor]:
        """The kernel that looks for positive values leaves their bits."""
        support = _room_for_bits(tensor)
        return self._encode(tensor, key, True, support), support

    def _encode(self, tensor: Tensor, key: int, positive: bool, mask: Tensor | None) -> Packed:
        require_float(tensor, self)
        flat, meta, layout = flatten(tensor)
        row = row_of(self.layout, layout, meta.numel)
        levels = _steps(self.levels, self.bits, tensor.device)
        codes, side = ops.quantize_groups(flat, row, self.group, self.bits, key, positive, levels, mask)
        return Packed(self, meta, (codes, side))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """With ``support`` the zeros of a rectified tensor come back exactly."""
        meta, (codes, side) = packed.meta, packed.buffers
        row = row_of(self.layout, layout_of(meta.shape, meta.stride), meta.numel)
        levels = _steps(self.levels, self.bits, codes.device)
        flat = ops.dequantize_groups(codes, side, meta.numel, row, self.group, self.bits, meta.dtype, support, levels)
        return flat.as_strided(meta.shape, meta.stride)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """Codes, and four bytes for each group."""
        row = row_of(self.layout, layout_of(meta.shape, meta.stride), meta.numel)
        return _quantized_nbytes(meta.numel, row, self.group, self.bits)


def _room_for_bits(tensor: Tensor) -> Tensor:
    """Room for a bit of each value."""
    return torch.empty(-(-tensor.numel() // 8), dtype=torch.uint8, device=tensor.device)


def row_of(rule: str, layout: Layout, numel: int) -> int:
    """Values that groups divide among themselves without crossing a border."""
    if numel == 0 or not layout.sizes or rule == "flat":
        return numel
    return layout.sizes[-1] if rule == "row" else numel // layout.sizes[0]


def _quantized_nbytes(numel: int, row: int, group: int, bits: int) -> int:
    if numel == 0:
        return 0
    return numel // row * (ops.row_bytes(row, group, bits) + 4 * ops.groups_in_row(row, group))


@dataclass(frozen=True)
class SampleQuant(Codec):
    """Groups that stay within a sample, with bits of its own for each sample (ActNN's level 3).

    ``bits[n]`` are those of sample ``n`` of dimension 0, which has to be the outermost in memory. A sample has
    the bytes that ``GroupQuant(bits[n], group, "sample")`` gives it with the same key, and one byte for its bits.
    """

    id: ClassVar[str] = "sample_quant"
    bits: tuple[int, ...]
    group: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.bits, tuple):
            raise ValueError(f"bits must be a tuple with a number for each sample; got {self.bits!r}")
        for bits in self.bits:
            require(bits, BITS, "bits")
        require_positive(self.group, "group")

    def __str__(self) -> str:
        return f"{self.id}({sum(self.bits) / max(1, len(self.bits)):.3g} bits on average)"

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """With ``support`` the range of a group covers its positive values only."""
        return self._encode(tensor, key, support is not None, None)

    def encode_rectified(self, tensor: Tensor, *, key: int) -> tuple[Packed, Tensor]:
        """The kernel that looks for positive values leaves their bits."""
        support = _room_for_bits(tensor)
        return self._encode(tensor, key, True, support), support

    def _encode(self, tensor: Tensor, key: int, positive: bool, mask: Tensor | None) -> Packed:
        require_float(tensor, self)
        flat, meta, _ = flatten(tensor)
        self._require_samples(meta)
        bits = torch.tensor(self.bits, dtype=torch.uint8, device=tensor.device)
        codes, side = ops.quantize_samples(flat, bits, self.group, key, positive, mask)
        return Packed(self, meta, (codes, side, bits))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """With ``support`` the zeros of a rectified tensor come back exactly."""
        meta, (codes, side, bits) = packed.meta, packed.buffers
        flat = ops.dequantize_samples(codes, side, bits, meta.numel, self.group, meta.dtype, support)
        return flat.as_strided(meta.shape, meta.stride)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """Codes, four bytes for each group, and one for each sample."""
        self._require_samples(meta)
        row = meta.numel // max(1, len(self.bits))
        return len(self.bits) + sum(_quantized_nbytes(row, row, self.group, bits) for bits in self.bits)

    def _require_samples(self, meta: TensorMeta) -> None:
        if not meta.shape or meta.shape[0] != len(self.bits):
            raise ValueError(
                f"{self.id} has bits for {len(self.bits)} samples; got a tensor of shape {tuple(meta.shape)}, whose "
                "dimension 0 has to be as large"
            )
        if meta.numel and layout_of(meta.shape, meta.stride).order[0] != 0:
            raise ValueError(
                f"{self.id} needs the samples (dimension 0) outermost in memory; got shape {tuple(meta.shape)} with "
                f"strides {tuple(meta.stride)}. Make the tensor contiguous, or take GroupQuant"
            )


@dataclass(frozen=True)
class BlockMean(Codec):
    """Means of blocks in bfloat16, and the difference to them in ``bits`` bits.

    This is DIVISION: the low frequencies kept precisely, the high frequencies coarsely. ``dims`` is
    the number of trailing spatial dimensions, 1 to 3; blocks at the edge average what they hold.
    The difference is taken to the *rounded* means, so their rounding costs no bias. With
    ``bits=0`` nothing but the means (in the tensor's own dtype) is kept: pooled backprop, which is
    biased by the lost high frequencies. ``levels`` as in :class:`GroupQuant`.

    ``faithful=True`` reproduces the published scheme: floor-mode pooling, whose windows do not
    line up with the nearest-neighbour upsampling unless the block divides the map, one range for
    each map, and no restoring of zeros.
    """

    id: ClassVar[str] = "block_mean"
    block: int = 8
    dims: int = 2
    bits: int = 2
    group: int = 256
    faithful: bool = False
    levels: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        require_positive(self.block, "block")
        require(self.dims, (1, 2, 3), "dims")
        require(self.bits, (0, *BITS), "bits")
        require_positive(self.group, "group")
        _require_levels(self.levels, self.bits)
        if self.faithful and self.bits == 0:
            raise ValueError("faithful=True needs bits of at least 1; got bits=0")

    def __str__(self) -> str:
        if self.bits == 0:
            return f"{self.id}(means only)"
        return f"{self.id}({self.bits} bits{', levels' if self.levels else ''})"

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """With ``support`` the range of a group covers the differences of positive values only."""
        return self._encode(tensor, key, support is not None, None)

    def encode_rectified(self, tensor: Tensor, *, key: int) -> tuple[Packed, Tensor]:
        """The kernel that looks for positive values leaves their bits, where it goes through memory in order."""
        meta, _ = form_of(tensor)
        if (
            not self.bits
            or self.faithful
            or not meta.numel
            or tensor.dim() < self.dims
            or _block_frame(meta.shape, meta.stride, self.dims)[0] != meta.stride
        ):
            return super().encode_rectified(tensor, key=key)
        support = _room_for_bits(tensor)
        return self._encode(tensor, key, True, support), support

    def _encode(self, tensor: Tensor, key: int, positive: bool, mask: Tensor | None) -> Packed:
        require_float(tensor, self)
        if tensor.dim() < self.dims:
            raise ValueError(f"block_mean with dims={self.dims} got a tensor of shape {tuple(tensor.shape)}")
        meta, _ = form_of(tensor)
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
        levels = _steps(self.levels, self.bits, tensor.device)
        buffers = ops.quantize_blocks(
            flat, geometry, self.block, row, self.group, self.bits, key, positive, levels, mask
        )  # fmt: skip
        return Packed(self, meta, buffers)

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """Means plus differences; zeros come back exactly with ``support`` (but not from pooling)."""
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
            in_order = stride == meta.stride  # or else the bits of ``support`` are not those of the values here
            flat = ops.dequantize_blocks(
                low, codes, side, geometry, self.block, row, self.group, self.bits, meta.dtype,
                support if in_order else None, _steps(self.levels, self.bits, codes.device),
            )  # fmt: skip
            if support is not None and not in_order:
                values = with_stride(flat.as_strided(meta.shape, stride), meta.stride)
                kept = ops.unpack_band(support, meta.numel, torch.bool, True, False)
                return values.masked_fill_(kept.as_strided(meta.shape, meta.stride).logical_not_(), 0.0)
        return with_stride(flat.as_strided(meta.shape, stride), meta.stride)

    def small(self, packed: Packed) -> Tensor | None:
        """The means as a map of their own, without a copy; None unless they are all there is and blocks are whole."""
        shape, stride, _ = packed.meta
        spatial = len(shape) - self.dims
        if self.bits or not packed.meta.numel or any(size % self.block for size in shape[spatial:]):
            return None
        layout = layout_of(shape, _block_frame(shape, stride, self.dims)[0])
        sizes = [shape[d] // self.block if d >= spatial else shape[d] for d in layout.order]
        return packed.buffers[0].view(sizes).permute([layout.order.index(d) for d in range(len(shape))])

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """Means, codes, and four bytes for each group."""
        if meta.numel == 0:
            return 0
        if self.faithful:
            return self._faithful_nbytes(meta)
        return self._nbytes(meta)

    @lru_cache(maxsize=4096)  # noqa: B019 - a codec is a small frozen value
    def _nbytes(self, meta: TensorMeta) -> int:
        stride = layout_of(meta.shape, meta.stride).stride
        _, geometry, row = _block_frame(meta.shape, stride, self.dims)
        low = math.prod(ops.low_shape(geometry, self.block))
        if self.bits == 0:
            return low * meta.dtype.itemsize
        return 2 * low + _quantized_nbytes(meta.numel, row, self.group, self.bits)

    # The published scheme, kept apart because its windows and cells do not line up.

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
        levels = _steps(self.levels, self.bits, tensor.device)
        codes, side = ops.quantize_groups(residual, area, area, self.bits, key, False, levels)
        return Packed(self, meta, (low, codes, side))

    def _decode_faithful(self, packed: Packed) -> Tensor:
        meta, (low, codes, side) = packed.meta, packed.buffers
        area = self._faithful_sizes(meta.shape)[2]
        levels = _steps(self.levels, self.bits, codes.device)
        residual = ops.dequantize_groups(codes, side, meta.numel, area, area, self.bits, torch.float32, None, levels)
        maps = self._spread_faithful(low, meta.shape)
        maps.add_(residual.view_as(maps))
        if meta.dtype == torch.float16:
            maps.clamp_(-65504.0, 65504.0)  # the step, rounded up, may decode the largest to more
        return maps.to(meta.dtype).view(meta.shape)

    def _faithful_nbytes(self, meta: TensorMeta) -> int:
        _, pooled, area = self._faithful_sizes(meta.shape)
        maps = meta.numel // area
        return maps * (2 * math.prod(pooled) + ops.group_bytes(area, self.bits) + 4)


@lru_cache(maxsize=4096)
def _block_frame(
    shape: tuple[int, ...], stride: tuple[int, ...], dims: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Strides to store by, the tensor as (outer, s1, s2, s3, inner) in memory, and the row.

    Works in place for any dense order that keeps the spatial dimensions together (contiguous and
    channels_last do); otherwise the tensor is to be made contiguous first.
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


@dataclass(frozen=True)
class Derived(Codec):
    """Nothing: the tensor is rebuilt from others that are stored, where the session knows how (see ``derive``)."""

    id: ClassVar[str] = "derived"

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Only a session can keep a tensor so."""
        raise NotRepresentable("no stored tensor to rebuild it from")

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """Never called, because nothing is ever encoded."""
        raise NotRepresentable("no stored tensor to rebuild it from")

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """Nothing is stored."""
        return 0


_CASTS = {
    name: getattr(torch, name)
    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    if hasattr(torch, name)
}


_SHARE = 4096  # values that a thread casts at once where all have one scale


@dataclass(frozen=True)
class Cast(Codec):
    """Round to nearest in a smaller float type, scaled where the range needs it.

    The 8-bit types are scaled so that the largest value fits exactly, float16 only if it would
    overflow. Round-to-nearest is biased by at most half a unit in the last place; as with any cast, a value
    within half a unit of its type's largest may round to Inf.

    ``group=0`` takes one scale for the tensor; otherwise each run of ``group`` values within the innermost
    dimension has its own, a bfloat16 rounded up (8-bit types only): the granularity of COAT (Xi et al. 2025). A
    group with NaN or Inf decodes to NaN.
    """

    id: ClassVar[str] = "cast"
    dtype: str = "bfloat16"
    group: int = 0

    def __post_init__(self) -> None:
        require(self.dtype, tuple(_CASTS), "dtype")
        if self.group != 0 or isinstance(self.group, bool):
            require_positive(self.group, "group")
        if self.group and not self._narrow:
            raise ValueError(f"group={self.group} goes with an 8-bit type; got dtype={self.dtype!r}")

    def __str__(self) -> str:
        return f"{self.id}({self.dtype}{f', groups of {self.group}' if self.group else ''})"

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Scale, then round."""
        require_float(tensor, self)
        flat, meta, layout = flatten(tensor)
        target = _CASTS[self.dtype]
        if self.dtype == "bfloat16":
            return Packed(self, meta, (flat.to(target, copy=True),))
        if self.group:
            row = row_of("row", layout, meta.numel)
            return Packed(self, meta, ops.cast_groups(flat, row, self.group, target))
        scale = _largest(flat) / torch.finfo(target).max
        if self.dtype == "float16":
            scale = scale.clamp_min(1.0)
        # A scale that is not finite poisons the tensor: it stands for a value that is not.
        scale = torch.where(scale == 0, 1.0, scale.clamp_min(2.0**-126)).reshape(1)
        if self._narrow:
            return Packed(self, meta, ops.cast_groups(flat, meta.numel, _SHARE, target, scale))
        return Packed(self, meta, ((flat.to(torch.float32) / scale).to(target), scale))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """Widen, then undo the scale."""
        meta = packed.meta
        flat = packed.buffers[0]
        if self._narrow:
            row = row_of("row" if self.group else "flat", layout_of(meta.shape, meta.stride), meta.numel)
            flat = ops.uncast_groups(flat, packed.buffers[1], row, self.group or _SHARE, meta.dtype)
            return flat.as_strided(meta.shape, meta.stride)
        if self.dtype == "float16":
            flat = flat.to(torch.float32).mul_(packed.buffers[1])
        return flat.to(meta.dtype, copy=True).as_strided(meta.shape, meta.stride)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """The smaller type, and two bytes for each group or four for the tensor if there is a scale."""
        width: int = _CASTS[self.dtype].itemsize
        if self.group:
            row = row_of("row", layout_of(meta.shape, meta.stride), meta.numel)
            return meta.numel * width + (2 * (meta.numel // row) * ops.groups_in_row(row, self.group) if row else 0)
        return meta.numel * width + (0 if self.dtype == "bfloat16" else 4)

    @property
    def _narrow(self) -> bool:
        return self.dtype.startswith("float8")


def _largest(flat: Tensor) -> Tensor:
    """The largest magnitude, in float32; NaN if there is one."""
    if flat.numel() == 0:
        return flat.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(flat)
    return torch.maximum(-low, high).to(torch.float32)
