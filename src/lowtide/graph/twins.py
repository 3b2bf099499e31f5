"""Twins: the same forward as an op of torch, with a backward that reads less.

A twin saves its tensors as the op does, under the op's names, so that sites, sharing, sealing and the checks for
in-place changes are those of every other tensor. Its backward accepts an input in either form: as it was, or as
the small map of its block means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..codecs import FLOATS, BlockMean, TensorMeta
from . import capture

_CONVOLUTIONS: dict[Callable[..., Any], int] = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_PLAIN = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def pooled_convolution(
    kernel: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Tensor] | None:
    """A twin of this call of a 1x1 convolution, which can take its weight gradient from block means; or None.

    Averaging over blocks is a projection P that equals its own transpose, so ``sum g P(x) = sum P(g) P(x)``: for a
    1x1 convolution whose map the blocks divide, the gradient from the means of x spread over their blocks is the
    gradient from the means of x and g alone, times the size of a block. Whatever is unusual gets None.
    """
    dims = _CONVOLUTIONS.get(func)
    if dims is None or kernel == 1 or len(args) > len(_ARGUMENTS):
        return None
    given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    if not {"input", "weight"} <= given.keys() <= set(_ARGUMENTS):
        return None
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if not (capture.is_ordinary_call() and all(map(capture.is_plain, tensors)) and weight.requires_grad):
        return None
    if x.dtype not in FLOATS or any(t.dtype != x.dtype or t.device != x.device for t in tensors):
        return None
    if torch.is_autocast_enabled(x.device.type):
        return None
    ones = weight.dim() == x.dim() == dims + 2 and set(weight.shape[2:]) == {1} and weight.shape[1] == x.shape[1]
    plain = all(_is_each(given.get(name, value), value) for name, value in _PLAIN.items())
    if not (ones and plain and x.numel()) or any(size % kernel for size in x.shape[2:]):
        return None
    apply: Callable[..., Tensor] = PooledConvolution.apply
    return lambda *_args, **_kwargs: apply(x, weight, bias, func, kernel)


def _is_each(value: object, wanted: int) -> bool:
    """Is ``value`` the number that is wanted, or as many of it as there are dimensions?"""
    if isinstance(value, (tuple, list)):
        return all(v == wanted for v in value)
    return value == wanted or (wanted == 0 and value == "valid")


class PooledConvolution(torch.autograd.Function):
    """A 1x1 convolution; see :func:`pooled_convolution`. It cannot be differentiated twice."""

    lowtide_names: ClassVar[tuple[str, ...]] = ("Convolution", "input", "weight")

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, func: Callable[..., Tensor], kernel: int
    ) -> Tensor:
        """The op itself."""
        ctx.save_for_backward(x, weight)
        ctx.form, ctx.kernel = TensorMeta.of(x), kernel
        return func(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The input's gradient as autograd has it; the weight's from block means, if only they are left."""
        kept, weight = ctx.saved_tensors
        shape, stride, dtype = ctx.form
        for_input, for_weight, for_bias = ctx.needs_input_grad[:3]
        if kept.shape == shape:
            return (*_backward(grad, kept, weight, (for_input, for_weight, for_bias)), None, None)
        grads: list[Tensor | None] = [None] * 5
        dims = len(shape) - 2
        if for_input:
            # Of the input only shape and strides are read here: memory that is there will do, if it is large enough.
            room = grad.untyped_storage().nbytes() // dtype.itemsize - grad.storage_offset()
            if room >= math.prod(shape):
                form = grad.as_strided(shape, stride)
            else:
                form = torch.empty_strided(shape, stride, dtype=dtype, device=grad.device)
            grads[0] = _backward(grad, form, weight, (True, False, False))[0]
        if for_weight:
            means = BlockMean(ctx.kernel, dims, bits=0)
            small = means.small(means.encode(grad, key=0))
            assert small is not None
            of_weight = _backward(small, kept, weight, (False, True, False))[1]
            assert of_weight is not None
            grads[1] = of_weight.mul_(ctx.kernel**dims)
        if for_bias:
            grads[2] = grad.sum((0, *range(2, dims + 2)))
        return tuple(grads)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What autograd calls for a convolution with the usual stride, padding, dilation and groups."""
    dims = x.dim() - 2
    bias_sizes = [weight.shape[0]] if wanted[2] else None
    found: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.convolution_backward(
        grad, x, weight, bias_sizes, [1] * dims, [0] * dims, [1] * dims, False, [0] * dims, 1, wanted
    )
    return found
