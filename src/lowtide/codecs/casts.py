"""Rounding to nearest in a smaller float type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import ops
from .base import Codec, Packed, TensorMeta, flatten, layout_of, require, require_float, require_positive
from .groups import row_of

_CASTS = {
    name: getattr(torch, name)
    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    if hasattr(torch, name)
}


_SHARE = 4096  # values that a thread casts at once if one scale serves all


@dataclass(frozen=True)
class Cast(Codec):
    """Round to nearest in a smaller float type, scaled where the range needs it.

    An 8-bit type is scaled so that the largest value fits exactly, float16 only if that value would overflow, and
    bfloat16 never. The error is a **bias** of at most half a unit in the last place. As with any cast, a value within
    half a unit of the largest number of its type may round to Inf.

    ``group=0`` takes one scale for the tensor. Otherwise, for 8-bit types only, each run of ``group`` values within the
    innermost dimension in memory has a scale of its own, a bfloat16 that is rounded up: the granularity of COAT (Xi et
    al. 2025).

    Values that share a scale with NaN or Inf decode to NaN. bfloat16 has no scale, and keeps each NaN and Inf itself.
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
        # A value that is not finite makes the scale so, and the scale makes the whole tensor NaN.
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
        """The values in the smaller type; a scale takes two bytes for each group, or four for the tensor."""
        width: int = _CASTS[self.dtype].itemsize
        if self.group:
            row = row_of("row", layout_of(meta.shape, meta.stride), meta.numel)
            return meta.numel * width + (2 * (meta.numel // row) * ops.groups_in_row(row, self.group) if row else 0)
        return meta.numel * width + (0 if self.dtype == "bfloat16" else 4)

    @property
    def _narrow(self) -> bool:
        return self.dtype.startswith("float8")


def _largest(flat: Tensor) -> Tensor:
    """The largest magnitude in float32, or NaN if a value is NaN."""
    if flat.numel() == 0:
        return flat.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(flat)
    return torch.maximum(-low, high).to(torch.float32)
