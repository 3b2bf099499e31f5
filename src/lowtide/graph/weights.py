"""Weights that an op has made of parameters alone, and that can be made again, to the bit, when backward reads them.

Weight standardisation, weight norm and spectral norm give a convolution a weight that is no parameter. Autograd keeps
it beside the parameter that it was made of, which lives anyway, and the op's other inputs, which are small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from . import capture
from .capture import base_of, describe, is_parameter, parent, saved

WEIGHTS = frozenset(
    {
        *(("Convolution", "weight"), ("Addmm", "mat2"), ("Mm", "mat2"), ("Linear", "weight")),
        *(("GroupedMm", "mat2"), ("Bmm", "mat2")),
    }
)
"""The slots in which weights are saved."""

_SMALL = 8
"""What else an op reads has at most one value for so many of the weight."""


class Made(NamedTuple):
    """How to make the storage of a weight again; ``sources`` share the versions of what they are read from."""

    sources: tuple[Tensor, ...]
    make: Callable[..., Tensor]
    same: Tensor | None
    """Did it come out the same when it was tried? Where the tensors are; None for tensors without data."""


def _batch_norm(node: Any) -> tuple[tuple[Tensor | None, ...], Callable[..., Tensor]] | None:
    if not saved(node, "training"):
        return None
    eps, weight = saved(node, "eps"), saved(node, "weight")

    def make(x: Tensor, scale: Tensor | None = None) -> Tensor:
        return functional.batch_norm(x, None, None, scale, None, True, 0.0, eps)

    return (saved(node, "input"), *([] if weight is None else [weight])), make


def _weight_norm(node: Any) -> tuple[tuple[Tensor | None, ...], Callable[..., Tensor]] | None:
    dim = saved(node, "dim")
    return (saved(node, "v"), saved(node, "g")), lambda v, g: capture.weight_norm(v, g, dim)


def _pair(make: Callable[..., Tensor]) -> Callable[[Any], tuple[tuple[Tensor | None, ...], Callable[..., Tensor]]]:
    return lambda node: ((saved(node, "self"), saved(node, "other")), make)


_MAKERS: dict[str, Callable[[Any], tuple[tuple[Tensor | None, ...], Callable[..., Tensor]] | None]] = {
    "NativeBatchNorm": _batch_norm,
    "WeightNormInterface": _weight_norm,
    "Div": _pair(torch.div),
    "Mul": _pair(torch.mul),
}
_VIEWS = ("View", "UnsafeView", "ReshapeAlias")


def made_of_parameters(tensor: Tensor) -> Made | None:
    """How to make the storage of ``tensor`` again, or None.

    It is tried at once, and what comes out of another form is not offered. What does not come out the same, bit for
    bit, must not be used: a bias that the op did not save, a state that has changed, an op of another kind.
    """
    whole = tensor if (base := base_of(tensor)) is None else base
    node: Any = whole.grad_fn
    if node is None or capture.version_of(whole) != 0:
        return None
    cast = describe(node)[0] == "ToCopy"
    while cast and node is not None and describe(node)[0] in ("ToCopy", *_VIEWS):
        node = parent(node, 0)
    maker = None if node is None else _MAKERS.get(describe(node)[0])
    try:
        found = None if maker is None else maker(node)
    except (AttributeError, RuntimeError):  # another kind of node, or the graph behind it was freed
        return None
    if found is None:
        return None
    sources, make = [s for s in found[0] if s is not None], found[1]
    if len(sources) < len(found[0]) or not any(s.numel() == whole.numel() for s in sources):
        return None
    if not all(_is_there_anyway(node, s) or s.numel() * _SMALL <= whole.numel() for s in sources):
        return None
    shape, stride, dtype = whole.shape, whole.stride(), whole.dtype

    def again(*read: Tensor) -> Tensor:
        with torch.no_grad():
            result = make(*read).view(shape)
            return result.to(dtype) if result.dtype != dtype else result

    try:
        trial = again(*sources)
    except RuntimeError:  # a view of another form
        return None
    if trial.stride() != stride or trial.storage_offset() != whole.storage_offset():
        return None
    return Made(tuple(sources), again, (trial == whole.detach()).all() if capture.has_data(trial) else None)


def _is_there_anyway(node: Any, source: Tensor) -> bool:
    """Is it a parameter, or a view of one? What was saved comes without its history, so the memory tells."""
    storage = capture.storage_of(source)
    for edge in range(len(node.next_functions)):
        maker = parent(node, edge)
        while maker is not None and describe(maker)[0] in _VIEWS:
            maker = parent(maker, 0)
        leaf = getattr(maker, "variable", None)
        if leaf is not None and is_parameter(leaf) and capture.storage_of(leaf) is storage:
            return True
    return False
