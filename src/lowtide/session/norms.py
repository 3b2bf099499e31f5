"""A batch norm's backward that reads codes: its input is decoded a few channels at a time, never as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..codecs import BlockMean, Codec, GroupQuant, Packed, TensorMeta
from ..graph import capture
from ..graph.capture import Slot

_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_DETACH = torch.ops.aten.detach.default
_SLOT = ("NativeBatchNorm", "input")
"""The op and slot of the node of autograd that can read such a tensor."""

LEAST = 1 << 20
"""Values below which a tensor of Python costs more than it saves: about 70 microseconds, and little memory."""


class StillPacked(capture.Shell):
    """A saved tensor that is decoded by whoever reads its values, except by the backward of a batch norm."""

    packed: Packed

    @classmethod
    def of(cls, packed: Packed) -> StillPacked:
        """What stands for these codes."""
        made = cls(*packed.meta, packed.buffers[0].device)
        made.packed = packed
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Batch norm's gradients from the codes; for any other op the values."""
        if func is _DETACH:  # autograd does so when it takes what a hook returns
            return cls.of(args[0].packed)
        if func is _BACKWARD:
            alone = capture.owners(args[0]) == capture.sole_operand()
            if (found := _gradients(alone, *args)) is not None:
                return found
        args, kwargs = capture.replaced(cls, lambda still: still.packed.decode(), (args, kwargs or {}))
        return func(*args, **kwargs)


def takes_codes(slot: Slot) -> bool:
    """Is it the input of a batch norm whose statistics and weight are in float32, as autocast leaves them?"""
    if (slot.site.op, slot.site.slot) != _SLOT or slot.is_part:
        return False
    dtype = slot.tensor.dtype if slot.tensor.dtype == torch.float32 else capture.saved(slot.node, "result1").dtype
    return bool(dtype == torch.float32)


def can_read(codec: Codec, meta: TensorMeta, device: str) -> bool:
    """Is there a kernel for a batch norm's backward that reads the codes of such a tensor?"""
    if device != "cpu" or meta.numel < LEAST or not isinstance(codec, (GroupQuant, BlockMean)):
        return False
    return codec.maps(meta) is not None and kernels.is_fast("norm_backward", device)


def _gradients(
    in_place: bool,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    _mean: Tensor | None,
    _var: Tensor | None,
    mean: Tensor | None,
    invstd: Tensor | None,
    train: bool,
    _eps: float,
    wanted: list[bool],
) -> tuple[Tensor | None, ...] | None:
    if not isinstance(x, StillPacked) or not train or mean is None or invstd is None or not wanted[0]:
        return None
    codec = x.packed.codec
    assert isinstance(codec, (GroupQuant, BlockMean))
    found = codec.norm_backward(x.packed, grad, mean, invstd, weight, in_place)
    return None if found is None else tuple(g if w else None for g, w in zip(found, wanted, strict=True))
