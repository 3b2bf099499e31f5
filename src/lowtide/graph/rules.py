"""What backward needs of each saved tensor: one row for each (op, slot), with its reason.

An op without a row stays exactly as autograd keeps it, and the report lists it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from ..codecs import FLOATS, Codec, Indices, Mask, PoolOffsets, ShapeOnly, TwoValue
from .capture import Slot


class Need(IntEnum):
    """How much of the values backward needs; of several consumers the greatest counts."""

    LOSSLESS = 0
    """A codec that gives back exactly what is read: mask, index, shape."""
    LINEAR = 1
    """Only this layer's weight gradient reads it, linearly: unbiased noise stays unbiased, and here."""
    BATCH = 2
    """Noise reaches earlier layers, averaged over all values that share a batch statistic."""
    PROPAGATE = 3
    """Noise reaches every earlier layer."""
    EXPONENT = 4
    """Noise goes through an exponential: small steps only."""
    LOGARITHM = 5
    """A log-probability, whose exponential is taken: relative precision near zero counts."""
    RELATIVE = 6
    """A divisor, or what a logarithm or root is taken of: relative precision of every value, signs and zeros count."""
    EXACT = 7
    """Must not change."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row. ``codec`` gives the lossless codec for a slot, where there is one."""

    need: Need
    why: str
    spatial: bool = False
    codec: Callable[[Slot], Codec | None] | None = None
    rectified: bool = False
    """The tensor itself has no negative values, and its mask tells where it is zero."""
    sharing: Callable[[Slot], int] | None = None
    """For a norm: how many values share a statistic, and so the average of the noise; 0 if there is no statistic."""
    otherwise: Need | None = None
    """What is read where ``codec`` finds that it cannot store the values; None to keep them."""


def _shape_only(slot: Slot) -> Codec:
    return ShapeOnly()


def _band(
    low: float | str, high: float | str, *, closed: bool = False, nan: bool = True
) -> Callable[[Slot], Codec | None]:
    """A mask whose limits are numbers, or scalars the node saved."""
    if not isinstance(low, str) and not isinstance(high, str) and not closed:
        always = Mask(low, high, closed, nan)
        return lambda _: always

    def codec(slot: Slot) -> Codec | None:
        ends = []
        for end, missing in ((low, -math.inf), (high, math.inf)):
            value = slot.scalar(end) if isinstance(end, str) else end
            value = missing if value is None else float(value)
            # clamp compares with its limits rounded to the dtype, the other kernels with exact ones
            ends.append(float(torch.tensor(value, dtype=slot.tensor.dtype)) if closed else value)
        usable = ends[0] < ends[1] and not (math.isinf(ends[0]) and math.isinf(ends[1]))
        return Mask(ends[0], ends[1], closed, nan) if usable else None

    return codec


def _boolean(slot: Slot) -> Codec | None:
    return Mask() if slot.tensor.dtype == torch.bool else None


def _below(size: Callable[[Slot], int], *, negative: bool = False) -> Callable[[Slot], Codec | None]:
    """Integers from 0 (from ``-size`` with ``negative``) to ``size - 1``; booleans as bits."""

    def codec(slot: Slot) -> Codec | None:
        if slot.tensor.dtype not in (torch.int64, torch.int32, torch.int16):
            return _boolean(slot)
        limit = size(slot)
        if not 1 <= limit < 2**31:
            return None
        found = Indices(-limit if negative else 0, limit - 1)
        return found if found.bits < 8 * slot.tensor.element_size() else None

    return codec


def _targets(slot: Slot) -> Codec | None:
    scores: Tensor = slot.scalar("self")
    ignored = _negative(int(slot.scalar("ignore_index")))
    classes = scores.shape[1 if scores.dim() > 1 else 0]
    low, high = min(0, ignored), max(classes - 1, ignored)
    return Indices(low, high) if high - low < 2**31 else None


def _along_dim(slot: Slot) -> int:
    sizes = slot.scalar("self_sym_sizes")
    return int(sizes[_negative(slot.scalar("dim")) % len(sizes)]) if len(sizes) else 1


def _negative(number: int) -> int:
    """Nodes show a negative number as an unsigned 64-bit one."""
    return number - 2**64 if number >= 2**63 else number


def _gathered(slot: Slot) -> int:
    source: Tensor = slot.scalar("self")
    return source.shape[_negative(slot.scalar("dim")) % source.dim()] if source.dim() else 1


def _along_result(slot: Slot) -> int:
    """For what writes to places along a dimension: how many there are."""
    sizes = slot.result_shape(0)
    return sizes[_negative(slot.dim) % len(sizes)] if sizes else 1


def _plane_of_result(slot: Slot) -> int:
    return math.prod(slot.result_shape(0)[-2:])


def _of_sums(slot: Slot) -> Codec | None:
    return ShapeOnly() if slot.scalar("reduce") in ("sum", "mean") else None


def _indexed(slot: Slot) -> int:
    which = int(slot.site.slot.partition("[")[2].rstrip("]") or 0)
    return int(slot.scalar("self_sym_sizes")[which])


def _plane(slot: Slot) -> int:
    dims = 3 if "3D" in slot.site.op else 2
    return math.prod(slot.scalar("self").shape[-dims:])


def _per_dim(value: object, dims: int, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    sizes = sizes or default
    return tuple(int(s) for s in (sizes * dims if len(sizes) == 1 else sizes))


def _pool_offsets(slot: Slot) -> Codec | None:
    source: Tensor | None = slot.scalar("self")
    if source is None:
        return None
    dims = 3 if "3D" in slot.site.op else 2
    kernel = _per_dim(slot.scalar("kernel_size"), dims)
    return PoolOffsets(
        size=tuple(source.shape[-dims:]),
        kernel=kernel,
        stride=_per_dim(slot.scalar("stride"), dims, kernel),
        padding=_per_dim(slot.scalar("padding"), dims),
        dilation=_per_dim(slot.scalar("dilation"), dims),
    )


def _two_value(slot: Slot) -> Codec | None:
    """Dropout on CPU multiplies by float noise that needs no gradient and holds two numbers."""
    if slot.tensor.dtype == torch.bool:
        return Mask()
    return TwoValue() if not slot.tensor.requires_grad and slot.tensor.dtype in FLOATS else None


def _in_channel(slot: Slot) -> int:
    """In evaluation a batch norm's statistics are constants, and no noise passes."""
    return slot.tensor.numel() // slot.tensor.shape[1] if slot.scalar("training") else 0


def _in_shape(slot: Slot) -> int:
    return math.prod(slot.scalar("normalized_shape"))


def _in_group(slot: Slot) -> int:
    return int(slot.scalar("C")) * int(slot.scalar("HxW")) // int(slot.scalar("group"))


_CONV = "the weight gradient is linear in the input, and nothing else reads it"
_SHAPE = "backward reads only the shape"
_INDEX = "integers fit in fewer bits exactly"
_BOOL = "one bit for each boolean, exactly"
_NORM = "the normalized input enters the gradient of every earlier layer"
_GATE = "the factor multiplies the gradient that flows on"
_POINT = "the derivative at the input multiplies the gradient that flows on"
_OUTPUT = "the derivative is a function of the output"
_NORMS = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "NativeLayerNorm", "NativeGroupNorm")
_ATTENTION = ("FlashAttentionForCpu", "FlashAttention", "EfficientAttention", "CudnnAttention")
_DIVISOR = "a divisor in backward: noise near zero would explode, a relative error does not"
_WEIGHT = "a weight made by other ops: its noise reaches every earlier layer"
_DEVIATION = "its distance from the mean enters the gradient linearly"
_RESIDUAL = "the difference of both enters the gradient"
_SECOND = "a factor of the gradient of a gradient"
_SCALE = "scales every gradient"

RULES: dict[tuple[str, str], Rule] = {
    # convolutions and matrix products
    ("Convolution", "input"): Rule(Need.LINEAR, _CONV, spatial=True),
    ("Addmm", "mat1"): Rule(Need.LINEAR, _CONV),
    ("Mm", "self"): Rule(Need.LINEAR, _CONV),
    ("Linear", "input"): Rule(Need.LINEAR, _CONV),
    ("GroupedMm", "self"): Rule(Need.LINEAR, _CONV),
    ("GroupedMm", "mat2"): Rule(Need.EXPONENT, _WEIGHT),
    ("Convolution", "weight"): Rule(Need.EXPONENT, _WEIGHT, spatial=True),
    ("Addmm", "mat2"): Rule(Need.PROPAGATE, _GATE),
    ("Mm", "mat2"): Rule(Need.PROPAGATE, _GATE),
    ("Bmm", "self"): Rule(Need.PROPAGATE, _GATE),
    ("Bmm", "mat2"): Rule(Need.PROPAGATE, _GATE),
    ("Baddbmm", "batch1"): Rule(Need.PROPAGATE, _GATE),
    ("Baddbmm", "batch2"): Rule(Need.PROPAGATE, _GATE),
    # normalization
    **{
        (f"{kind}BatchNorm", "input"): Rule(Need.BATCH, _NORM, spatial=True, sharing=_in_channel)
        for kind in ("Native", "Cudnn", "Miopen")
    },
    ("NativeLayerNorm", "input"): Rule(Need.PROPAGATE, _NORM, sharing=_in_shape),
    ("FusedRmsNorm", "input"): Rule(Need.PROPAGATE, _NORM, sharing=_in_shape),
    ("NativeGroupNorm", "input"): Rule(Need.PROPAGATE, _NORM, spatial=True, sharing=_in_group),
    **{
        (op, slot): Rule(Need.EXACT, "statistics scale every gradient")
        for op in _NORMS
        for slot in ("result1", "result2", "running_mean", "running_var")
    },
    ("LinalgVectorNorm", "self"): Rule(Need.PROPAGATE, "its direction is the gradient of its length"),
    ("LinalgVectorNorm", "result"): Rule(Need.EXACT, _SCALE),
    **{(op, "self"): Rule(Need.PROPAGATE, _DEVIATION) for op in ("Var", "VarMean", "Std", "StdMean")},
    ("Std", "result"): Rule(Need.EXACT, _SCALE),
    ("StdMean", "result0"): Rule(Need.EXACT, _SCALE),
    # activations of which one bit is read; the ends and NaN as each kernel treats them (that of hardtanh stops the
    # gradient at a NaN in its vector code, and lets it pass in the few values behind the last whole vector)
    ("Relu", "result"): Rule(Need.LOSSLESS, "only the sign is read", codec=_band(0.0, math.inf), rectified=True),
    ("LeakyRelu", "self"): Rule(Need.LOSSLESS, "only the sign is read", codec=_band(0.0, math.inf, nan=False)),
    ("LeakyRelu1", "result"): Rule(Need.LOSSLESS, "only the sign is read", codec=_band(0.0, math.inf, nan=False)),
    ("Threshold", "self"): Rule(Need.LOSSLESS, "only the side is read", codec=_band("threshold", math.inf)),
    ("Threshold1", "self"): Rule(Need.LOSSLESS, "only the side is read", codec=_band("threshold", math.inf)),
    ("Hardtanh", "self"): Rule(
        Need.LOSSLESS, "only inside or outside is read", codec=_band("min_val", "max_val", nan=False)
    ),
    ("Hardsigmoid", "self"): Rule(Need.LOSSLESS, "only inside or outside is read", codec=_band(-3.0, 3.0, nan=False)),
    ("Clamp1", "self"): Rule(
        Need.LOSSLESS, "only inside or outside is read", codec=_band("min", "max", closed=True, nan=False)
    ),
    ("ClampMin", "self"): Rule(
        Need.LOSSLESS, "only the side is read", codec=_band("min", math.inf, closed=True, nan=False)
    ),
    ("ClampMax", "self"): Rule(
        Need.LOSSLESS, "only the side is read", codec=_band(-math.inf, "max", closed=True, nan=False)
    ),
    # the twin of prelu: the sign for the input's gradient, and the values for the slope's alone
    ("PreluKernel", "sign"): Rule(Need.LOSSLESS, "only the sign is read", codec=_band(0.0, math.inf, nan=False)),
    ("PreluKernel", "values"): Rule(Need.LINEAR, "the gradient of the slope is linear in it", spatial=True),
    # activations whose derivative needs values
    **{
        (op, "self"): Rule(Need.PROPAGATE, _POINT)
        for op in ("Gelu", "Silu", "Hardswish", "Mish", "Softplus", "Elu", "Celu", "Glu")
    },
    **{(op, "result"): Rule(Need.PROPAGATE, _OUTPUT) for op in ("Sigmoid", "Tanh", "Exp", "Elu1", "Expm1")},
    **{(op, "self"): Rule(Need.PROPAGATE, _POINT) for op in ("Sin", "Cos", "Erf", "Pow", "Atan")},
    # the derivative of both branches is 1/2 where they meet, so a sign that noise turns does no harm
    ("LogSigmoid", "self"): Rule(Need.PROPAGATE, _POINT),
    ("LogSigmoid", "buffer"): Rule(Need.PROPAGATE, _POINT),
    # softmax and losses
    ("Softmax", "result"): Rule(Need.PROPAGATE, _OUTPUT),
    ("SafeSoftmax", "result"): Rule(Need.PROPAGATE, _OUTPUT),
    ("LogSoftmax", "result"): Rule(Need.LOGARITHM, "backward takes the exponential of the output"),
    **{
        (op, slot): Rule(Need.PROPAGATE, _RESIDUAL)
        for op in ("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropyWithLogits")
        for slot in ("self", "target")
    },
    ("Logsumexp", "self"): Rule(Need.EXPONENT, "backward takes the exponential of its difference to the result"),
    ("Logsumexp", "result"): Rule(Need.EXACT, "fixes the scale of the exponentials"),
    ("NllLoss", "self"): Rule(Need.LOSSLESS, _SHAPE, codec=_shape_only),
    ("NllLoss", "target"): Rule(Need.LOSSLESS, _INDEX, codec=_targets),
    ("NllLoss", "total_weight"): Rule(Need.EXACT, "scales the whole gradient"),
    ("NllLoss2D", "total_weight"): Rule(Need.EXACT, "scales the whole gradient"),
    ("NllLoss2D", "self"): Rule(Need.LOSSLESS, _SHAPE, codec=_shape_only),
    ("NllLoss2D", "target"): Rule(Need.LOSSLESS, _INDEX, codec=_targets),
    # attention: probabilities are rebuilt as exp(q k - logsumexp) from the exact logsumexp, and the
    # gradient of the scores is a difference in which errors of v and of the output do not cancel
    **{
        (f"ScaledDotProduct{kind}", slot): Rule(Need.EXPONENT, "scores pass through the exponential of softmax")
        for kind in _ATTENTION
        for slot in ("query", "key", "value", "output")
    },
    **{
        (f"ScaledDotProduct{kind}", slot): Rule(Need.EXACT, "fixes the scale of the probabilities")
        for kind in _ATTENTION
        for slot in ("logsumexp", "attn_mask")
    },
    # elementwise products and quotients
    # (a constant factor, such as a rotary table or the weights of edges, may be read by every layer: small steps)
    ("Mul", "self"): Rule(Need.PROPAGATE, _GATE, codec=_two_value, otherwise=Need.EXPONENT),
    ("Mul", "other"): Rule(Need.PROPAGATE, _GATE, codec=_two_value, otherwise=Need.EXPONENT),
    ("Div", "self"): Rule(Need.PROPAGATE, "enters the divisor's gradient linearly"),
    ("Addcmul", "tensor1"): Rule(Need.PROPAGATE, _GATE),
    ("Addcmul", "tensor2"): Rule(Need.PROPAGATE, _GATE),
    ("Div", "other"): Rule(Need.RELATIVE, _DIVISOR),
    **{(op, "self"): Rule(Need.RELATIVE, _DIVISOR) for op in ("Log", "Log2", "Log10")},
    **{(op, "result"): Rule(Need.RELATIVE, _DIVISOR) for op in ("Sqrt", "Rsqrt", "Reciprocal")},
    # twins that save the answers of comparisons
    ("Amax", "places"): Rule(Need.LOSSLESS, _BOOL, codec=_boolean),
    ("Maximum", "not_below"): Rule(Need.LOSSLESS, _BOOL, codec=_boolean),
    ("Maximum", "not_above"): Rule(Need.LOSSLESS, _BOOL, codec=_boolean),
    ("ScatterReduce", "own"): Rule(Need.LOSSLESS, _BOOL, codec=_boolean),
    ("ScatterReduce", "found"): Rule(Need.LOSSLESS, _BOOL, codec=_boolean),
    # a recurrent layer's twin runs the layer again from its input, and noise there reaches every state
    ("Recurrent", "input"): Rule(Need.PROPAGATE, "the layer is run again from it"),
    ("Recurrent", "hx"): Rule(Need.EXACT, "the first state, of one step of many"),
    ("Recurrent", "cx"): Rule(Need.EXACT, "the first state, of one step of many"),
    # pools, dropout masks, look-ups
    **{
        (op, "self"): Rule(Need.LOSSLESS, _SHAPE, codec=_shape_only)
        for op in (
            *("MaxPool2DWithIndices", "MaxPool3DWithIndices", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D"),
            *("AvgPool2D", "AvgPool3D", "AdaptiveAvgPool2D", "AdaptiveAvgPool3D"),
            *("ReflectionPad1D", "ReflectionPad2D", "ReflectionPad3D"),
            *("ReplicationPad1D", "ReplicationPad2D", "ReplicationPad3D", "Gather", "FftR2C", "MaskedSelect"),
        )
    },
    ("MaxPool2DWithIndices", "result1"): Rule(
        Need.LOSSLESS, "the place inside the window is enough", codec=_pool_offsets
    ),
    ("MaxPool3DWithIndices", "result1"): Rule(
        Need.LOSSLESS, "the place inside the window is enough", codec=_pool_offsets
    ),
    ("AdaptiveMaxPool2D", "result1"): Rule(Need.LOSSLESS, _INDEX, codec=_below(_plane)),
    ("AdaptiveMaxPool3D", "result1"): Rule(Need.LOSSLESS, _INDEX, codec=_below(_plane)),
    ("NativeDropout", "result1"): Rule(Need.LOSSLESS, _BOOL, codec=_boolean),
    ("Where", "condition"): Rule(Need.LOSSLESS, _BOOL, codec=_boolean),
    ("MaskedSelect", "mask"): Rule(Need.LOSSLESS, _BOOL, codec=_boolean),
    ("IndexAdd", "source"): Rule(Need.LOSSLESS, _SHAPE, codec=_shape_only),
    # the gradient of a grid is a difference of the values around each place; a place that moves reads others
    **{(f"GridSampler{d}D", "input"): Rule(Need.PROPAGATE, _GATE, spatial=True) for d in (2, 3)},
    **{(f"GridSampler{d}D", "grid"): Rule(Need.EXACT, "says which values are read") for d in (2, 3)},
    ("MaskedFill", "mask"): Rule(Need.LOSSLESS, _BOOL, codec=_boolean),
    ("Embedding", "indices"): Rule(
        Need.LOSSLESS, _INDEX, codec=_below(lambda slot: int(slot.scalar("weight_sym_argsize_0")))
    ),
    ("Gather", "index"): Rule(Need.LOSSLESS, _INDEX, codec=_below(_gathered)),
    ("IndexSelect", "index"): Rule(Need.LOSSLESS, _INDEX, codec=_below(_along_dim)),
    ("Index", "indices"): Rule(Need.LOSSLESS, _INDEX, codec=_below(_indexed, negative=True)),
    **{
        (op, "indices"): Rule(Need.LOSSLESS, _INDEX, codec=_below(_along_dim))
        for op in ("Max", "Min", "Kthvalue", "Sort", "Topk")
    },
    **{
        (op, "index"): Rule(Need.LOSSLESS, _INDEX, codec=_below(_along_result))
        for op in ("Scatter", "Scatter1", "ScatterAdd", "ScatterReduce", "IndexAdd")
    },
    # of a sum and of a mean only the number of terms counts; of a maximum exact values are compared
    **{
        ("ScatterReduce", slot): Rule(Need.LOSSLESS, "a sum or a mean: only the shape is read", codec=_of_sums)
        for slot in ("self", "src", "result")
    },
    # gradients of gradients, as a gradient penalty has them
    ("ConvolutionBackward", "grad_output"): Rule(Need.LINEAR, _CONV, spatial=True),
    ("ConvolutionBackward", "input"): Rule(Need.PROPAGATE, _SECOND, spatial=True),
    ("LeakyReluBackward", "self"): Rule(Need.LOSSLESS, "only the sign is read", codec=_band(0.0, math.inf, nan=False)),
    ("ThresholdBackward", "self"): Rule(Need.LOSSLESS, "only the side is read", codec=_band("threshold", math.inf)),
    **{
        (f"{op}Backward", slot): Rule(Need.PROPAGATE, _SECOND)
        for op, slots in (
            *(("Sigmoid", ("grad_output", "output")), ("Tanh", ("grad_output", "output"))),
            *(("Gelu", ("grad_output", "self")), ("Softplus", ("grad_output", "self"))),
        )
        for slot in slots
    },
    ("MaxPool2DWithIndicesBackward", "indices"): Rule(Need.LOSSLESS, _INDEX, codec=_below(_plane_of_result)),
}


_ACT = "the derivative at it multiplies the gradient that flows on"
_SCORES = "scores pass through the exponential of softmax"

# Functions of other packages, by package, class and the number of the tensor in save_for_backward. A class of the same
# name in another package may save other things. What is not listed (statistics, sequence lengths, states of random
# numbers, gradients that a loss has computed in its forward) stays exact. Orders were read in the sources of
# flash-attn 2 and 3 and of Liger-Kernel, which were not run; that of transformers was.
_PACKAGES: dict[tuple[str, str], dict[str, Rule]] = {
    ("transformers", "GeLUFunction"): {"tensors[0]": Rule(Need.PROPAGATE, _ACT)},
    # What ZeRO-3 puts in the place of every linear layer. Its weight is gathered for the forward and let go behind it.
    ("deepspeed", "LinearFunctionForZeroStage3"): {"tensors[0]": Rule(Need.LINEAR, _CONV)},
    **{
        (package, f"FlashAttn{kind}Func"): {f"tensors[{i}]": Rule(Need.EXPONENT, _SCORES) for i in range(4)}
        for package in ("flash_attn", "flash_attn_interface", "flash_attn_3")
        for kind in ("", "Varlen")
    },
    **{
        ("liger_kernel", f"Liger{kind}Function"): {"tensors[0]": Rule(Need.PROPAGATE, _NORM)}
        for kind in ("RMSNorm", "LayerNorm")
    },
    **{
        ("liger_kernel", f"Liger{kind}MulFunction"): {f"tensors[{i}]": Rule(Need.PROPAGATE, _ACT) for i in range(2)}
        for kind in ("SiLU", "GELU")
    },
}
WRITES_IN_PLACE = frozenset({"liger_kernel"})
"""Packages whose functions put their results into what backward is given: none of them may be run on the side."""

_ACTIVATION = Rule(Need.PROPAGATE, "multiplies another activation: its noise reaches what made that one")
_FEW = Rule(Need.EXACT, "so few values share a statistic that the gradient is a difference of nearly equal terms")
_FACTOR_EDGE = {
    ("Mm", "self"): 1,
    ("Addmm", "mat1"): 2,
    ("GroupedMm", "self"): 1,
}  # where the other factor's gradient goes
_FROZEN_CONV = Rule(Need.LOSSLESS, "the weight is frozen: only the shape is read", codec=_shape_only)
_CONSTANT_INPUT = Rule(Need.LOSSLESS, "the input needs no gradient: only the shape is read", codec=_shape_only)
_DERIVED_WEIGHT = Rule(Need.EXPONENT, _WEIGHT)
_ROOT = Rule(Need.RELATIVE, "not a whole power: noise around zero would explode or leave its domain")
_STEEP = Rule(Need.EXACT, "a steep power multiplies a relative error")
_FROZEN_GRID = Rule(Need.LOSSLESS, "the grid needs no gradient: only the shape is read", codec=_shape_only)
_OTHER_LENGTH = Rule(Need.EXACT, "a length of another kind: signs, powers or comparisons are read")
_NO_WEIGHT_GRADIENT = Rule(Need.LOSSLESS, "no weight gradient was made: only the shape is read", codec=_shape_only)


# A norm takes two directions out of the gradient. Of two values that share a statistic nothing is left, and of a few
# little, while the noise stays: at 8 bits some networks err by a fifth with 4 values, none by a tenth with 8.
_LEAST_SHARING = 8


# The derivative of x**p is p * x**(p - 1): a relative error of bfloat16, 1/256 at most, grows to (p - 1) / 256.
_STEEPEST = 4


# Rules that users register for functions of their own. A function is defined for a whole process, and so is its rule.
_registered: dict[tuple[str, str], tuple[type | None, Rule]] = {}
_SAVED = re.compile(r"tensors\[\d+\]")


def register_rule(
    function: str | type[torch.autograd.Function],
    slot: str,
    *,
    need: Need | str,
    why: str,
    codec: Codec | None = None,
    spatial: bool = False,
) -> Callable[[], None]:
    """Say what the backward of an ``autograd.Function`` needs of a tensor that it saved.

    Without a rule such a tensor stays exact, because nobody knows what its noise would do. ``function`` is the class,
    or its name, which then stands for every class of that name. ``slot`` is ``"tensors[i]"`` for the ``i``-th tensor
    given to ``ctx.save_for_backward``. ``need`` is a :class:`Need` or its name in small letters:

    - ``"linear"``: only a weight's gradient reads the tensor, and linearly, like the input of a linear layer;
    - ``"batch"``: noise reaches earlier layers, averaged over many values, like the input of a batch norm;
    - ``"propagate"``: noise reaches every earlier layer, like the input of an activation or a norm;
    - ``"exponent"``: an exponential is taken of it, like queries and keys of attention;
    - ``"logarithm"``: it is a log-probability;
    - ``"relative"``: it is a divisor, or the like: every value needs relative precision;
    - ``"lossless"``: ``codec`` gives back exactly what is read, such as ``Mask()`` where only the sign is, or
      ``ShapeOnly()`` where only the shape is.

    ``why`` goes into reports. ``spatial`` says that the tensor is a map: samples, channels, then places. A second rule
    for the same slot replaces the first. The result is a function that takes the rule back.

    >>> import torch, lowtide
    >>> class Square(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         ctx.save_for_backward(x)
    ...         return x * x
    ...     @staticmethod
    ...     def backward(ctx, grad):
    ...         return 2 * ctx.saved_tensors[0] * grad
    >>> undo = lowtide.register_rule(Square, "tensors[0]", need="propagate", why="the factor multiplies the gradient")
    >>> model = torch.nn.Linear(64, 256)
    >>> with lowtide.compress(model, "actnn") as session:
    ...     loss = Square.apply(model(torch.randn(128, 64))).sum()
    >>> next(row.codec for row in session.report().sites if row.site.op == "Square")
    'group_quant(4 bits)'
    >>> undo()
    """
    of = None if isinstance(function, str) else function
    if of is not None and not (isinstance(of, type) and issubclass(of, torch.autograd.Function)):
        raise TypeError(f"function must be a torch.autograd.Function or its name; got {function!r}")
    name = function if isinstance(function, str) else function.__name__
    if not isinstance(slot, str) or not _SAVED.fullmatch(slot):
        raise ValueError(f"slot must be 'tensors[i]' for the i-th tensor given to save_for_backward; got {slot!r}")
    needs = {n.name.lower(): n for n in Need}
    if need not in needs and not isinstance(need, Need):
        raise ValueError(f"need must be one of {', '.join(needs)}; got {need!r}")
    if not isinstance(why, str) or not why:
        raise ValueError(f"why must say for the report what backward does with the tensor; got {why!r}")
    wanted = need if isinstance(need, Need) else needs[need]
    if (codec is not None) != (wanted is Need.LOSSLESS):
        raise ValueError(
            f"codec goes with need='lossless' and with nothing else; got need={wanted.name.lower()!r}, {codec}"
        )
    if codec is not None and not codec.exact:
        raise ValueError(f"codec must give back exactly what is read, such as Mask() or ShapeOnly(); got {codec}")
    rule = Rule(wanted, why, spatial, None if codec is None else lambda _: codec)
    _registered[name, slot] = entry = (of, rule)

    def undo() -> None:
        if _registered.get((name, slot)) is entry:
            del _registered[name, slot]

    return undo


def rule_for(slot: Slot) -> Rule | None:
    """The row for a slot, refined by what its node says; None if the op is unknown."""
    op, name = slot.site.op, slot.site.slot
    rule = RULES.get((op, name))
    if rule is None:
        if (rule := RULES.get((op, name.partition("[")[0]))) is None:
            of, registered = _registered.get((op, name), (None, None))
            if registered is not None:
                return registered if of is None or slot.is_of(of) else None
            return _PACKAGES.get((slot.package, op), {}).get(name)
    elif op == "Convolution":
        if name == "weight":
            return rule if slot.needs_grad(0) else _CONSTANT_INPUT
        return rule if slot.needs_grad(1) else _FROZEN_CONV
    elif op == "ConvolutionBackward":
        return _second_convolution(slot, rule)
    elif name == "mat2" and slot.call == "linear":
        return _DERIVED_WEIGHT
    elif rule.need is Need.LINEAR:
        edge = _FACTOR_EDGE.get((op, name))
        if edge is not None and slot.call != "linear" and not slot.is_of_leaf(edge):
            return _ACTIVATION
    elif rule.sharing is not None:
        return _FEW if 0 < rule.sharing(slot) < _LEAST_SHARING else rule
    elif (op, name) == ("LinalgVectorNorm", "self"):
        return rule if float(slot.scalar("ord")) == 2 else _OTHER_LENGTH
    elif op.startswith("GridSampler") and name == "input":
        return rule if slot.needs_grad(1) else _FROZEN_GRID
    elif op == "Pow" and not ((exponent := float(slot.scalar("exponent"))) >= 1 and exponent.is_integer()):
        return _ROOT if abs(exponent - 1) <= _STEEPEST else _STEEP
    return rule


def _second_convolution(slot: Slot, rule: Rule) -> Rule:
    """Backward of a convolution's backward, where the gradient of the weight may not have been asked for.

    With ``gI`` and ``gW`` for what arrives at the gradients of input and weight, the input's gradient is made of
    ``gW`` and ``grad_output``, the weight's of ``gI`` and ``grad_output``, and that of ``grad_output`` of ``gI`` and
    the weight, and of ``gW`` and the input. Without ``gW`` only the weight's gradient reads ``grad_output``, and nobody
    reads the input.
    """
    has_weight_gradient = len(slot.result_shape(1)) > 0
    if slot.site.slot == "input":
        return rule if has_weight_gradient else _NO_WEIGHT_GRADIENT
    if slot.site.slot == "grad_output" and has_weight_gradient:
        return RULES["ConvolutionBackward", "input"]
    return rule
