"""Every row of the rules, on a real call that makes the node it names.

Each example is a small module with a parameter ``p`` added to the input, so that the gradient of ``p``
is the gradient that flows on through the op, and the saved tensors belong to the graph alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.codecs import GroupQuant
from lowtide.graph.capture import describe
from lowtide.graph.rules import RULES, Need
from lowtide.report import COMPRESSED, EXACT

Op = Callable[[Tensor, "Model"], Tensor]


@dataclass(frozen=True)
class Example:
    """A call; ``shape`` of its input, ``weights`` of further parameters, and what to know of it."""

    op: Op
    shape: tuple[int, ...] = (6, 5, 16)
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    nan: bool = False
    scale: float = 2.0
    dtype: torch.dtype = torch.float32


class Model(nn.Module):
    """``op(x + p)``."""

    def __init__(self, example: Example) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.op = example.op
        self.p = nn.Parameter(torch.randn(example.shape, generator=generator).to(example.dtype))
        for name, shape in example.weights.items():
            weight = torch.randn(shape, generator=generator).to(example.dtype)
            setattr(self, name, nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x + self.p, self) + 0  # whose result the caller holds, and not the op's own


def _ramp(y: Tensor) -> Tensor:
    """Gradients of an output, another one for each value. A factor would be a tensor that is saved."""
    return (torch.arange(y.numel(), dtype=torch.float64) * 0.618 % 1 + 0.5).view(y.shape).to(y.dtype)


def _indices(limit: int, *shape: int) -> Tensor:
    return torch.randint(0, limit, shape, generator=torch.Generator().manual_seed(2))


def _sdpa(h: Tensor, m: Model) -> Tensor:
    h = h.view(2, 3, 5, 16)
    mask = torch.linspace(-1, 1, 25).view(5, 5) * 1.0
    return F.scaled_dot_product_attention(h * 0.5, h.flip(2) * 0.5, h.neg(), attn_mask=mask)


def _cross_entropy(h: Tensor, m: Model) -> Tensor:
    target = _indices(h.shape[1], h.shape[0], *h.shape[2:])
    target.view(-1)[::7] = -100
    return F.cross_entropy(h, target, label_smoothing=0.0)


def _nll(h: Tensor, m: Model) -> Tensor:
    # contiguous, because the plain 2-D backward refuses channels_last
    return F.nll_loss((h * 2).contiguous(), _indices(h.shape[1], h.shape[0], *h.shape[2:]))


def _experts(h: Tensor, m: Model) -> Tensor:
    offsets = torch.tensor([7, 16, 32], dtype=torch.int32)
    return torch._grouped_mm(h.view(32, 16) * 0.5, torch.tanh(m.w), offs=offsets)


def _slope(function: Callable[[Tensor, Model], Tensor], power: int = 2) -> Op:
    """The gradient by the input, as a gradient penalty takes it: backward then runs through a backward."""

    def op(h: Tensor, m: Model) -> Tensor:
        (slope,) = torch.autograd.grad((function(h * 1.0, m) ** power).sum(), h, create_graph=True)
        return slope

    return op


def _both_slopes(h: Tensor, m: Model) -> Tensor:
    """A gradient by the input and by the weight: all that a convolution's backward saved is read."""
    weight = m.w * 1.0
    slopes = torch.autograd.grad(F.conv2d(h * 1.0, weight).square().sum(), (h, weight), create_graph=True)
    return slopes[0] * slopes[1].sum()


def _written(h: Tensor) -> Tensor:
    return torch.zeros(9, *h.shape[1:])


def _safe_softmax(h: Tensor, m: Model) -> Tensor:
    return torch._safe_softmax(h, -1)


MAPS = (4, 3, 10, 12)
VOLUMES = (2, 3, 6, 8, 7)
SQUARE = {"w": (16, 16)}

_one_bit = {
    ("Relu", "result"): lambda h, m: torch.relu(h),
    ("LeakyRelu", "self"): lambda h, m: F.leaky_relu(h, 0.1),
    ("LeakyRelu1", "result"): lambda h, m: F.leaky_relu_(h, 0.1),
    ("Threshold", "self"): lambda h, m: F.threshold(h, 0.1, 20.0),
    ("Threshold1", "self"): lambda h, m: F.threshold_(h.clone(), 0.1, 20.0),
    ("Hardtanh", "self"): lambda h, m: F.hardtanh(h, -0.3, 1.1),
    ("Hardsigmoid", "self"): lambda h, m: F.hardsigmoid(h),
    ("Clamp1", "self"): lambda h, m: torch.clamp(h, -0.3, 1.1),
    ("ClampMin", "self"): lambda h, m: torch.clamp_min(h, -0.3),
    ("ClampMax", "self"): lambda h, m: torch.clamp_max(h, 1.1),
}
_elementwise = {
    ("Gelu", "self"): F.gelu,
    ("Silu", "self"): F.silu,
    ("Hardswish", "self"): lambda h: F.hardswish(h * 0.4),  # clear of the jumps at -3 and 3
    ("Mish", "self"): F.mish,
    ("Softplus", "self"): F.softplus,
    ("Elu", "self"): F.elu,
    ("Celu", "self"): F.celu,
    ("Glu", "self"): F.glu,
    ("Sigmoid", "result"): torch.sigmoid,
    ("Tanh", "result"): torch.tanh,
    ("Exp", "result"): torch.exp,
    ("Elu1", "result"): F.elu_,
    ("Sin", "self"): torch.sin,
    ("Cos", "self"): torch.cos,
    ("Erf", "self"): torch.erf,
    ("Pow", "self"): torch.square,
    ("Softmax", "result"): lambda h: torch.softmax(h, -1),
    ("LogSoftmax", "result"): lambda h: torch.log_softmax(h, -1),
    ("Atan", "self"): torch.atan,
    ("Expm1", "result"): torch.expm1,
    ("LogSigmoid", "self"): F.logsigmoid,
    ("LogSigmoid", "buffer"): F.logsigmoid,
    ("Logsumexp", "self"): lambda h: torch.logsumexp(h * 0.5, -1),
    ("Logsumexp", "result"): lambda h: torch.logsumexp(h * 0.5, -1),
    ("LinalgVectorNorm", "self"): lambda h: torch.linalg.vector_norm(h, dim=-1),
    ("LinalgVectorNorm", "result"): lambda h: torch.linalg.vector_norm(h, dim=-1),
    ("Var", "self"): lambda h: h.var(-1),
    ("VarMean", "self"): lambda h: sum(torch.var_mean(h, -1)),
    ("Std", "self"): lambda h: h.std(-1),
    ("Std", "result"): lambda h: h.std(-1),
    ("StdMean", "self"): lambda h: sum(torch.std_mean(h, -1)),
    ("StdMean", "result0"): lambda h: sum(torch.std_mean(h, -1)),
    ("MseLoss", "self"): lambda h: F.mse_loss(h * 0.5, h.flip(0)),
    ("MseLoss", "target"): lambda h: F.mse_loss(h * 0.5, h.flip(0)),
    ("SmoothL1Loss", "self"): lambda h: F.smooth_l1_loss(h * 0.5, h.flip(0)),
    ("SmoothL1Loss", "target"): lambda h: F.smooth_l1_loss(h * 0.5, h.flip(0)),
    ("HuberLoss", "self"): lambda h: F.huber_loss(h * 0.5, h.flip(0)),
    ("HuberLoss", "target"): lambda h: F.huber_loss(h * 0.5, h.flip(0)),
    ("BinaryCrossEntropyWithLogits", "self"): lambda h: F.binary_cross_entropy_with_logits(h * 0.5, h.flip(0)),
    ("BinaryCrossEntropyWithLogits", "target"): lambda h: F.binary_cross_entropy_with_logits(h * 0.5, h.flip(0)),
    ("Addcmul", "tensor1"): lambda h: torch.addcmul(h, h * 0.5, h.flip(0), value=0.7),
    ("Addcmul", "tensor2"): lambda h: torch.addcmul(h, h * 0.5, h.flip(0), value=0.7),
    ("Log", "self"): lambda h: (h.abs() + 0.05).log(),
    ("Log2", "self"): lambda h: (h.abs() + 0.05).log2(),
    ("Log10", "self"): lambda h: (h.abs() + 0.05).log10(),
    ("Sqrt", "result"): lambda h: (h.abs() + 0.05).sqrt(),
    ("Rsqrt", "result"): lambda h: (h.abs() + 0.05).rsqrt(),
    ("Reciprocal", "result"): lambda h: (h.abs() + 0.05).reciprocal(),
    ("FftR2C", "self"): lambda h: torch.fft.rfft2(h).real,
}
_second = {
    ("ConvolutionBackward", "grad_output"): _slope(lambda h, m: F.conv2d(h, m.w)),
    ("ConvolutionBackward", "input"): _both_slopes,
    ("LeakyReluBackward", "self"): _slope(lambda h, m: F.leaky_relu(h, 0.1)),
    ("ThresholdBackward", "self"): _slope(lambda h, m: torch.relu(h)),
    ("MaxPool2DWithIndicesBackward", "indices"): _slope(lambda h, m: F.max_pool2d(h, 2)),
    **dict.fromkeys(
        (("SigmoidBackward", "grad_output"), ("SigmoidBackward", "output")), _slope(lambda h, m: torch.sigmoid(h))
    ),
    **dict.fromkeys((("TanhBackward", "grad_output"), ("TanhBackward", "output")), _slope(lambda h, m: torch.tanh(h))),
    **dict.fromkeys((("GeluBackward", "grad_output"), ("GeluBackward", "self")), _slope(lambda h, m: F.gelu(h))),
    **dict.fromkeys(
        (("SoftplusBackward", "grad_output"), ("SoftplusBackward", "self")), _slope(lambda h, m: F.softplus(h))
    ),
}


def _apply(function: Callable[[Tensor], Tensor]) -> Op:
    return lambda h, m: function(h)


EXAMPLES: dict[tuple[str, str], Example] = {
    ("Convolution", "weight"): Example(
        lambda h, m: F.conv2d(h, torch.tanh(m.w), padding=1), MAPS, {"w": (4, 3, 3, 3)}, scale=1.0
    ),
    ("GroupedMm", "self"): Example(_experts, (8, 4, 16), {"w": (3, 16, 24)}),
    ("GroupedMm", "mat2"): Example(_experts, (8, 4, 16), {"w": (3, 16, 24)}),
    **{row: Example(op, MAPS, {"w": (4, 3, 3, 3)}, scale=1.0) for row, op in _second.items()},
    **dict.fromkeys(
        itertools.product(("GridSampler2D",), ("input", "grid")),
        Example(lambda h, m: F.grid_sample(h * 0.5, torch.tanh(m.w), align_corners=False), MAPS, {"w": (4, 9, 8, 2)}),
    ),
    **dict.fromkeys(
        itertools.product(("GridSampler3D",), ("input", "grid")),
        Example(
            lambda h, m: F.grid_sample(h * 0.5, torch.tanh(m.w), align_corners=False), VOLUMES, {"w": (2, 5, 6, 7, 3)}
        ),
    ),
    **dict.fromkeys(
        itertools.product(("MaskedSelect",), ("self", "mask")),
        Example(lambda h, m: h.masked_select(h > 0.3)),
    ),
    ("Scatter", "index"): Example(lambda h, m: _written(h).scatter(0, _indices(9, *h.shape), h)),
    ("Scatter1", "index"): Example(lambda h, m: h.scatter(-1, _indices(16, 6, 5, 4), 0.5)),
    ("ScatterAdd", "index"): Example(lambda h, m: _written(h).scatter_add(0, _indices(9, *h.shape), h)),
    **dict.fromkeys(
        itertools.product(("ScatterReduce",), ("self", "src", "result", "index")),
        Example(
            lambda h, m: (m.w * 1.0).scatter_reduce(0, _indices(9, *h.shape), h, "mean"), weights={"w": (9, 5, 16)}
        ),
    ),
    **dict.fromkeys(
        itertools.product(("IndexAdd",), ("index", "source")),
        Example(lambda h, m: torch.zeros(6, 5, 40).index_add(-1, _indices(40, 16), h)),
    ),
    ("Min", "indices"): Example(lambda h, m: h.min(-1).values, nan=True),
    ("Kthvalue", "indices"): Example(lambda h, m: h.kthvalue(3, -1).values),
    ("Convolution", "input"): Example(lambda h, m: F.conv2d(h, m.w, padding=1), MAPS, {"w": (4, 3, 3, 3)}, scale=1.0),
    **dict.fromkeys((("Addmm", "mat1"),), Example(lambda h, m: F.linear(h, m.w, m.b), weights={**SQUARE, "b": (16,)})),
    ("Addmm", "mat2"): Example(lambda h, m: torch.addmm(m.b, m.w, h), (16, 16), {**SQUARE, "b": (16,)}),
    ("Mm", "self"): Example(lambda h, m: F.linear(h, m.w), weights=SQUARE),
    ("Mm", "mat2"): Example(lambda h, m: torch.mm(m.w, h), (16, 16), SQUARE),
    **dict.fromkeys(
        itertools.product(("Bmm",), ("self", "mat2")),
        Example(lambda h, m: torch.bmm(h * 0.5, h.transpose(1, 2) * 0.25)),
    ),
    **dict.fromkeys(
        itertools.product(("Baddbmm",), ("batch1", "batch2")),
        Example(lambda h, m: torch.baddbmm(m.b, h * 0.5, h.transpose(1, 2) * 0.25), weights={"b": (6, 5, 5)}),
    ),
    **dict.fromkeys(
        (("NativeBatchNorm", slot) for slot in ("input", "result1", "result2")),
        Example(lambda h, m: F.batch_norm(h, None, None, m.w, m.b, True), MAPS, {"w": (3,), "b": (3,)}),
    ),
    **dict.fromkeys(
        (("NativeBatchNorm", slot) for slot in ("running_mean", "running_var")),
        Example(
            lambda h, m: F.batch_norm(h, torch.zeros(3) + 0.1, torch.ones(3) * 2, m.w, m.b, False),
            MAPS,
            {"w": (3,), "b": (3,)},
        ),
    ),
    **dict.fromkeys(
        (("NativeLayerNorm", slot) for slot in ("input", "result1", "result2")),
        Example(lambda h, m: F.layer_norm(h, (16,), m.w, m.b), weights={"w": (16,), "b": (16,)}),
    ),
    **dict.fromkeys(
        (("NativeGroupNorm", slot) for slot in ("input", "result1", "result2")),
        Example(lambda h, m: F.group_norm(h, 2, m.w, m.b), (4, 4, 10, 12), {"w": (4,), "b": (4,)}),
    ),
    # torch's hardtanh treats NaN one way in vector code and another in the tail: nothing to compare with
    **{row: Example(op, (5, 4, 7, 9), nan=row[0] != "Hardtanh") for row, op in _one_bit.items()},
    **{row: Example(_apply(op), (8, 6, 32)) for row, op in _elementwise.items()},
    ("SafeSoftmax", "result"): Example(_safe_softmax),
    **dict.fromkeys((("NllLoss", "self"), ("NllLoss", "target")), Example(_nll, (64, 10))),
    ("NllLoss", "total_weight"): Example(_cross_entropy, (64, 10)),
    **dict.fromkeys((("NllLoss2D", "self"), ("NllLoss2D", "target")), Example(_nll, (3, 5, 6, 7))),
    ("NllLoss2D", "total_weight"): Example(_cross_entropy, (3, 5, 6, 7)),
    **dict.fromkeys(
        itertools.product(
            ("ScaledDotProductFlashAttentionForCpu",),
            ("query", "key", "value", "output", "logsumexp", "attn_mask"),
        ),
        Example(_sdpa),
    ),
    **dict.fromkeys((("Mul", "self"), ("Mul", "other")), Example(lambda h, m: (h * 0.5) * (h + 1.0))),
    **dict.fromkeys((("Div", "self"), ("Div", "other")), Example(lambda h, m: (h * 0.5) / (h.abs() + 1.0))),
    **dict.fromkeys(
        itertools.product(("MaxPool2DWithIndices",), ("self", "result1")),
        Example(lambda h, m: F.max_pool2d(h, 3, 2, 1), MAPS, nan=True),
    ),
    **dict.fromkeys(
        itertools.product(("MaxPool3DWithIndices",), ("self", "result1")),
        Example(lambda h, m: F.max_pool3d(h, 3, 2, 1), VOLUMES, nan=True),
    ),
    **dict.fromkeys(
        itertools.product(("AdaptiveMaxPool2D",), ("self", "result1")),
        Example(lambda h, m: F.adaptive_max_pool2d(h, 4), MAPS),
    ),
    **dict.fromkeys(
        itertools.product(("AdaptiveMaxPool3D",), ("self", "result1")),
        Example(lambda h, m: F.adaptive_max_pool3d(h, 4), VOLUMES),
    ),
    ("AvgPool2D", "self"): Example(lambda h, m: F.avg_pool2d(h, 3, 2), MAPS),
    ("AvgPool3D", "self"): Example(lambda h, m: F.avg_pool3d(h, 3, 2), VOLUMES),
    ("AdaptiveAvgPool2D", "self"): Example(lambda h, m: F.adaptive_avg_pool2d(h, 4), MAPS),
    ("AdaptiveAvgPool3D", "self"): Example(lambda h, m: F.adaptive_avg_pool3d(h, 4), VOLUMES),
    ("ReflectionPad1D", "self"): Example(lambda h, m: F.pad(h, (2, 1), mode="reflect")),
    ("ReflectionPad2D", "self"): Example(lambda h, m: F.pad(h, (2, 1, 1, 2), mode="reflect"), MAPS),
    ("ReflectionPad3D", "self"): Example(lambda h, m: F.pad(h, (2, 1) * 3, mode="reflect"), VOLUMES),
    ("ReplicationPad1D", "self"): Example(lambda h, m: F.pad(h, (2, 1), mode="replicate")),
    ("ReplicationPad2D", "self"): Example(lambda h, m: F.pad(h, (2, 1, 1, 2), mode="replicate"), MAPS),
    ("ReplicationPad3D", "self"): Example(lambda h, m: F.pad(h, (2, 1) * 3, mode="replicate"), VOLUMES),
    **dict.fromkeys(
        (("Gather", "self"), ("Gather", "index")),
        Example(lambda h, m: torch.gather(h, -2, _indices(5, 6, 9, 16))),
    ),
    ("NativeDropout", "result1"): Example(lambda h, m: torch.native_dropout(h, 0.4, True)[0]),
    ("Where", "condition"): Example(lambda h, m: torch.where(h > 0.3, h, h.neg())),
    ("MaskedFill", "mask"): Example(lambda h, m: h.masked_fill(h > 0.3, 1.0)),
    ("Embedding", "indices"): Example(lambda h, m: F.embedding(_indices(11, 6, 5), m.w) + h, weights={"w": (11, 16)}),
    ("IndexSelect", "index"): Example(lambda h, m: torch.index_select(h, -1, _indices(16, 40))),
    ("Index", "indices"): Example(lambda h, m: h[:, _indices(5, 40) - 5, _indices(16, 40)]),
    ("Max", "indices"): Example(lambda h, m: h.max(-1).values, nan=True),
    ("Sort", "indices"): Example(lambda h, m: h.sort(-1).values, nan=True),
    ("Topk", "indices"): Example(lambda h, m: h.topk(3, -1).values, nan=True),
}

TWINS = (
    *itertools.product(("PreluKernel",), ("sign", "values")),
    *itertools.product(("Maximum",), ("not_below", "not_above")),
    *itertools.product(("Recurrent",), ("input", "hx", "cx")),
    *itertools.product(("ScatterReduce",), ("own", "found")),
    ("Amax", "places"),
)
_NO_SLOT = "no such slot in this torch: the row costs nothing"
UNTESTABLE: dict[tuple[str, str], str] = {
    **{
        (op, slot): "the node exists on GPUs alone"
        for op in ("CudnnBatchNorm", "MiopenBatchNorm")
        for slot in ("input", "result1", "result2", "running_mean", "running_var")
    },
    **{
        (f"ScaledDotProduct{kind}", slot): "the node exists on GPUs alone"
        for kind in ("FlashAttention", "EfficientAttention", "CudnnAttention")
        for slot in ("query", "key", "value", "output", "logsumexp", "attn_mask")
    },
    **{
        (op, slot): _NO_SLOT
        for op in ("NativeLayerNorm", "NativeGroupNorm")
        for slot in ("running_mean", "running_var")
    },
    **dict.fromkeys(TWINS, "a twin's: tests/test_thrift.py"),
    ("Linear", "input"): "linear splits into mm and addmm on CPU",
    ("FusedRmsNorm", "input"): "rms_norm splits into elementwise ops on CPU",
}


def _input(example: Example, form: torch.memory_format, nan: bool = False, seed: int = 3) -> Tensor:
    x = torch.randn(example.shape, generator=torch.Generator().manual_seed(seed)) * example.scale
    if nan:
        x.view(-1)[::17] = math.nan
        x.view(-1)[5::23] = math.inf
        x.view(-1)[6::29] = -math.inf
    return x.to(example.dtype).contiguous(memory_format=form)


def _model(example: Example, form: torch.memory_format) -> Model:
    model = Model(example)
    if form is not torch.contiguous_format:
        with torch.no_grad():
            model.p.data = model.p.data.contiguous(memory_format=form)
    return model


def _gradients(
    model: Model, x: Tensor, method: str | None = None, **options: object
) -> tuple[dict[str, Tensor], lowtide.Report | None]:
    model.zero_grad()
    torch.manual_seed(4)
    if method is None:
        y = model(x)
        y.backward(_ramp(y))
        report = None
    else:
        with lowtide.compress(model, method, min_numel=0, **options) as session:
            session.step = 0  # else the noise depends on how many sessions there were before
            y = model(x)
        y.backward(_ramp(y))
        report = session.report()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, report


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit, strides included; NaN equals NaN."""
    return a.keys() == b.keys() and all(
        torch.equal(torch.isnan(a[n]), torch.isnan(b[n]))
        and torch.equal(a[n].nan_to_num(), b[n].nan_to_num())
        and torch.equal(torch.signbit(a[n].nan_to_num()), torch.signbit(b[n].nan_to_num()))
        and a[n].stride() == b[n].stride()
        for n in a
    )


def _forms(example: Example) -> list[torch.memory_format]:
    last = {4: [torch.channels_last], 5: [torch.channels_last_3d]}
    return [torch.contiguous_format, *last.get(len(example.shape), [])]


def _nodes(tensor: Tensor) -> list[object]:
    found, stack = [], [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.append(node)
            stack += [parent for parent, _ in node.next_functions]
    return found


def _rows(need: Need | None = None) -> list[tuple[str, str]]:
    return [r for r in EXAMPLES if r in RULES and (need is None or RULES[r].need is need)]


def _id(row: tuple[str, str]) -> str:
    return ".".join(row)


def _of(report: lowtide.Report, row: tuple[str, str]) -> list[lowtide.report.SiteReport]:
    return [s for s in report.sites if (s.site.op, s.site.slot.partition("[")[0]) == row]


# ---------------------------------------------------------------- the table


def test_every_row_has_an_example() -> None:
    assert set(RULES) == set(EXAMPLES) | set(UNTESTABLE)
    assert not set(EXAMPLES) & set(UNTESTABLE)


@pytest.mark.parametrize("row", RULES, ids=_id)
def test_every_row_has_a_reason(row: tuple[str, str]) -> None:
    rule = RULES[row]
    assert rule.why.strip()
    assert (rule.codec is not None) or rule.need is not Need.LOSSLESS
    assert rule.codec is None or rule.need is not Need.EXACT


@pytest.mark.parametrize("row", EXAMPLES, ids=_id)
def test_examples_make_the_node_they_name(row: tuple[str, str]) -> None:
    op, slot = row
    example = EXAMPLES[row]
    y = _model(example, torch.contiguous_format)(_input(example, torch.contiguous_format))
    found = [n for n in _nodes(y) if describe(n)[0] == op]
    assert found
    saved = [getattr(n, f"_saved_{slot}") for n in found]
    assert any(s is not None for s in saved)


# ---------------------------------------------------------------- lossless: not one bit may change


@pytest.mark.parametrize("row", EXAMPLES, ids=_id)
def test_lossless_changes_no_gradient(row: tuple[str, str]) -> None:
    example = EXAMPLES[row]
    for form, nan in itertools.product(_forms(example), {False, example.nan}):
        model, x = _model(example, form), _input(example, form, nan)
        plain, _ = _gradients(model, x)
        packed, report = _gradients(model, x, "lossless")
        assert _same(packed, plain), (form, nan)
        assert report is not None
        assert _of(report, row), "the session did not meet the slot"


@pytest.mark.parametrize("row", _rows(Need.LOSSLESS), ids=_id)
def test_lossless_rows_save_bytes(row: tuple[str, str]) -> None:
    example = EXAMPLES[row]
    _, report = _gradients(
        _model(example, torch.contiguous_format), _input(example, torch.contiguous_format), "lossless"
    )
    assert report is not None
    for site in _of(report, row):
        assert site.state in (COMPRESSED, "shared"), site
        assert site.stored_nbytes < site.plain_nbytes or site.state == "shared"


SHAPE_ONLY = [r for r in _rows(Need.LOSSLESS) if RULES[r].why == "backward reads only the shape"]


@pytest.mark.parametrize("row", SHAPE_ONLY, ids=_id)
def test_shape_only_rows_store_nothing(row: tuple[str, str]) -> None:
    assert len(SHAPE_ONLY) == 20
    example = EXAMPLES[row]
    for form in _forms(example):
        _, report = _gradients(_model(example, form), _input(example, form), "lossless")
        assert report is not None
        (site,) = _of(report, row)
        assert site.stored_nbytes == 0
        assert site.codec == "shape_only"
        assert site.plain_nbytes > 0


LIMITS = [0.1, 0.2, 0.3, 0.7, 1.1, 1 / 3, -0.1, -0.3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", ["threshold", "hardtanh low", "hardtanh high", "clamp", "clamp_min", "clamp_max"])
def test_limits_that_the_type_does_not_hold(op: str, dtype: torch.dtype) -> None:
    """0.1 is no bfloat16: values beside it must fall on the side where the kernel sees them."""
    for limit in LIMITS:
        function: Op = {
            "threshold": lambda h, m, t=limit: F.threshold(h, t, 20.0),
            "hardtanh low": lambda h, m, t=limit: F.hardtanh(h, t, 5.3),
            "hardtanh high": lambda h, m, t=limit: F.hardtanh(h, -5.3, t),
            "clamp": lambda h, m, t=limit: torch.clamp(h, t, t + 0.3),
            "clamp_min": lambda h, m, t=limit: torch.clamp_min(h, t),
            "clamp_max": lambda h, m, t=limit: torch.clamp_max(h, t),
        }[op]
        near = torch.tensor([limit, limit + 0.3], dtype=torch.float64).to(dtype)
        up, down = (torch.nextafter(near, torch.full_like(near, s * math.inf)) for s in (1, -1))
        x = torch.cat([near, up, down, near + 1, near - 1]).repeat(41)
        example = Example(function, tuple(x.shape), dtype=dtype)
        model = _model(example, torch.contiguous_format)
        model.p.data.zero_()
        plain, _ = _gradients(model, x)
        packed, report = _gradients(model, x, "lossless")
        assert _same(packed, plain), limit
        assert report is not None
        assert report.stored_nbytes < report.plain_nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "ends", [("max", "max"), ("inf", "inf"), (None, "inf"), ("inf", None), ("near", "near")], ids=str
)
def test_clamp_to_the_edge_of_the_type(ends: tuple[str | None, str | None], dtype: torch.dtype) -> None:
    """T5 clamps fp16 to nearly its largest number; others clamp with an infinite end."""
    info = torch.finfo(dtype)
    size = {"max": info.max, "inf": math.inf, "near": info.max * 0.98, None: None}
    low, high = (size[e] for e in ends)
    example = Example(lambda h, m: torch.clamp(h, None if low is None else -low, high), (333,), dtype=dtype)
    model = _model(example, torch.contiguous_format)
    model.p.data.zero_()
    x = torch.tensor([0.5, -0.5, info.max, -info.max, math.inf, -math.inf, math.nan, 3, -3]).to(dtype).repeat(37)
    plain, _ = _gradients(model, x)
    packed, _ = _gradients(model, x, "lossless")
    assert _same(packed, plain)


@pytest.mark.parametrize("ignore_index", [-100, 255, 3])
def test_targets_with_any_ignore_index(ignore_index: int) -> None:
    def op(h: Tensor, m: Model) -> Tensor:
        target = _indices(10, 64)
        target[::5] = ignore_index
        return F.cross_entropy(h, target, ignore_index=ignore_index)

    example = Example(op, (64, 10))
    model, x = _model(example, torch.contiguous_format), _input(example, torch.contiguous_format)
    plain, _ = _gradients(model, x)
    packed, report = _gradients(model, x, "lossless")
    assert _same(packed, plain)
    assert report is not None
    (site,) = _of(report, ("NllLoss", "target"))
    assert site.stored_nbytes <= 64  # 8 bits hold -100..9 and 0..255


@pytest.mark.parametrize("method", ["actnn", "auto"])
def test_a_constant_factor_of_many_values_takes_codes(method: str) -> None:
    """As rotary tables and the weights of a graph's edges do, which dropout's codec refuses."""
    example = Example(lambda h, m: h * torch.linspace(-1, 1, h.numel()).view(h.shape), (64, 32))
    model, x = _model(example, torch.contiguous_format), _input(example, torch.contiguous_format)
    plain, _ = _gradients(model, x)
    packed, report = _gradients(model, x, method)
    assert report is not None
    assert [s.codec.startswith("group_quant(8 bits") for s in _of(report, ("Mul", "other"))] == [True]
    # A factor errs by less than a step: a 255th of its range of 2, the ends of which are rounded to bfloat16. The
    # gradient that arrives, and multiplies that error, is at most 1.5.
    off = float((packed["p"] - plain["p"]).abs().max())
    assert 0 < off <= 1.5 * 2 * (1 + 2.0**-6) ** 2 / 255
    kept, report = _gradients(model, x, "lossless")
    assert _same(kept, plain)
    assert report is not None
    assert [s.state for s in _of(report, ("Mul", "other"))] == ["exact"]


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_noise_is_kept_exactly(p: float) -> None:
    example = Example(lambda h, m: F.dropout(h, p, True), (64, 32))
    model, x = _model(example, torch.contiguous_format), _input(example, torch.contiguous_format)
    plain, _ = _gradients(model, x)
    packed, report = _gradients(model, x, "actnn", bits=1)
    assert _same(packed, plain)
    assert report is not None
    assert [s.codec for s in _of(report, ("Mul", "other"))][:1] == ["two_value"]


# ---------------------------------------------------------------- rows of values


VALUE_ROWS = [r for r in _rows() if Need.LOSSLESS < RULES[r].need < Need.EXACT]


@pytest.mark.parametrize("row", VALUE_ROWS, ids=_id)
def test_value_rows_compress_within_the_step(row: tuple[str, str]) -> None:
    """Errors of 8 bits are small, 17 times smaller than those of 4 bits, and average out.

    A step is range / (2**bits - 1), so 4 bits have steps 255 / 15 = 17 times as wide; a gradient that is
    smooth in the saved tensor has a relative error of about 2**-8 and 17 times that. Asked for is a
    factor of 5 and an 8-bit error below 5 %; the mean of 16 sessions must err less than one does by
    half (independent noise: by 4).
    """
    example = EXAMPLES[row]
    for form in _forms(example):
        model, x = _model(example, form), _input(example, form)
        plain, _ = _gradients(model, x)

        def error(found: dict[str, Tensor], plain: dict[str, Tensor] = plain) -> float:
            squares = sum(float((found[n] - plain[n]).double().square().sum()) for n in plain)
            return math.sqrt(squares / sum(float(p.double().square().sum()) for p in plain.values()))

        runs = [_gradients(model, x, "actnn", bits=8, seed=s) for s in range(16)]
        sites = [s for s in _of(runs[0][1], row) if s.shape]  # not the scalar of h * 0.5
        assert sites
        assert all(s.state in (COMPRESSED, "shared") for s in sites), sites
        eight = sum(error(r[0]) for r in runs) / len(runs)
        assert 0 < eight < 0.05
        if any(s.codec.startswith("cast") for s in sites):
            continue  # rounded to nearest, always the same: nothing averages out, and bits do not matter
        mean = {n: sum(r[0][n] for r in runs) / len(runs) for n in plain}
        assert error(mean) < 0.5 * eight
        options = {"bits": 4, "propagating_bits": 4}
        four = sum(error(_gradients(model, x, "actnn", seed=s, **options)[0]) for s in range(4)) / 4
        if RULES[row].need is not Need.EXPONENT:  # those keep 8 bits
            assert four > 5 * eight


# Written out, so that no row leaves the table of exact ones unnoticed.
EXACT_ROWS = [
    *itertools.product(("NativeBatchNorm",), ("result1", "result2", "running_mean", "running_var")),
    *itertools.product(("NativeLayerNorm", "NativeGroupNorm"), ("result1", "result2")),
    *itertools.product(("NllLoss", "NllLoss2D"), ("total_weight",)),
    *itertools.product(("ScaledDotProductFlashAttentionForCpu",), ("logsumexp", "attn_mask")),
    ("LinalgVectorNorm", "result"),
    ("Std", "result"),
    ("StdMean", "result0"),
    ("Logsumexp", "result"),
    ("GridSampler2D", "grid"),
    ("GridSampler3D", "grid"),
]


def test_the_exact_rows_are_these() -> None:
    assert set(_rows(Need.EXACT)) == set(EXACT_ROWS)


@pytest.mark.parametrize("row", EXACT_ROWS, ids=_id)
def test_exact_rows_stay_exact(row: tuple[str, str]) -> None:
    example = EXAMPLES[row]
    _, report = _gradients(
        _model(example, torch.contiguous_format), _input(example, torch.contiguous_format), "actnn", bits=1
    )
    assert report is not None
    for site in _of(report, row):
        assert site.state in (EXACT, "shared")
        assert site.stored_nbytes == site.plain_nbytes


# ---------------------------------------------------------------- refinements of rows


def test_frozen_convolution_stores_nothing() -> None:
    example = Example(lambda h, m: F.conv2d(h, m.w, padding=1), MAPS, {"w": (4, 3, 3, 3)})
    for form in _forms(example):
        model, x = _model(example, form), _input(example, form)
        model.w.requires_grad_(False)
        plain, _ = _gradients(model, x)
        packed, report = _gradients(model, x, "actnn", bits=1)
        assert _same(packed, plain)
        assert report is not None
        (site,) = _of(report, ("Convolution", "input"))
        assert (site.stored_nbytes, site.codec) == (0, "shape_only")


@pytest.mark.parametrize(
    ("exponent", "codec"),
    [*((p, "cast(bfloat16)") for p in (0.5, -1.0, -2, 0.99, 1.5)), (3, "group_quant(4 bits)"), (-8, ""), (9.5, "")],
)
def test_roots_and_negative_powers_keep_relative_precision(exponent: float, codec: str) -> None:
    """A value near zero must not become another: half a unit of bfloat16, 2**-8, times the steepness of the power."""
    example = Example(lambda h, m: h.abs().add(0.01) ** exponent)
    model, x = _model(example, torch.contiguous_format), _input(example, torch.contiguous_format)
    plain, _ = _gradients(model, x)
    packed, report = _gradients(model, x, "actnn", bits=4)
    assert report is not None
    (site,) = _of(report, ("Pow", "self"))
    assert site.codec == codec
    assert _same(packed, plain) == (not codec)
    if codec.startswith("cast"):
        bound = abs(exponent - 1) * 2.0**-8 * 1.1 + 1e-6  # 1.1 for the square of the error, 1e-6 for float32
        assert bool(((packed["p"] - plain["p"]).abs() <= bound * plain["p"].abs()).all())


@pytest.mark.parametrize("method", ["division", "actnn", "gact", "blpa", "auto", "lowrank", "tinyscript", "float16"])
def test_no_method_rounds_a_divisor_by_a_step(method: str) -> None:
    """Divisors of 1e-15 to 1e15, some of them zero, whose squares are floats: what is finite stays so."""
    scale = torch.logspace(-15, 15, 480).view(6, 5, 16)
    example = Example(lambda h, m: (h * 0.5) / (h.abs() + 1.0).mul(scale))
    model, x = _model(example, torch.contiguous_format), _input(example, torch.contiguous_format)
    scale.view(-1)[::9] = 0.0
    plain, _ = _gradients(model, x)
    name, options = ("cast", {"dtype": "float16"}) if method == "float16" else (method, {})
    packed, report = _gradients(model, x, name, **options)
    assert report is not None
    assert [s.codec for s in _of(report, ("Div", "other"))] == ["cast(bfloat16)"]
    assert torch.equal(packed["p"].isfinite(), plain["p"].isfinite())


@pytest.mark.parametrize("codec", [GroupQuant(2), GroupQuant(8)], ids=str)
def test_not_even_a_codec_for_all_rounds_a_divisor(codec: GroupQuant) -> None:
    example = EXAMPLES["Div", "other"]
    _, report = _gradients(_model(example, torch.contiguous_format), _input(example, torch.contiguous_format), codec)
    assert report is not None
    assert [s.codec for s in _of(report, ("Div", "other"))] == ["cast(bfloat16)"]


@pytest.mark.parametrize(("order", "exact"), [(2, False), (1, True), (3, True), (math.inf, True)])
def test_only_the_usual_length_is_rounded(order: float, exact: bool) -> None:
    example = Example(lambda h, m: torch.linalg.vector_norm(h, order, dim=-1))
    model, x = _model(example, torch.contiguous_format), _input(example, torch.contiguous_format)
    plain, _ = _gradients(model, x)
    packed, _ = _gradients(model, x, "actnn", bits=4)
    assert _same(packed, plain) == exact


def test_a_penalty_on_the_input_alone_keeps_no_input() -> None:
    """Nobody reads a convolution's input in the backward of its backward, if no weight gradient was made there."""
    example = EXAMPLES["ConvolutionBackward", "grad_output"]
    model, x = _model(example, torch.contiguous_format), _input(example, torch.contiguous_format)
    model.w.requires_grad_(False)  # or the convolution itself would keep its input
    plain, _ = _gradients(model, x)
    packed, report = _gradients(model, x, "lossless")
    assert _same(packed, plain)
    assert report is not None
    (first,), (second,) = (_of(report, (op, "input")) for op in ("Convolution", "ConvolutionBackward"))
    assert (first.codec, second.codec) == ("shape_only", "shape_only")


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin", "prod"])
@pytest.mark.parametrize("include", [False, True])
def test_scattered_reductions_change_no_gradient(reduce: str, include: bool) -> None:
    example = Example(
        lambda h, m: (m.w * 1.0).scatter_reduce(0, _indices(9, *h.shape), h, reduce, include_self=include),
        weights={"w": (9, 5, 16)},
    )
    model, x = _model(example, torch.contiguous_format), _input(example, torch.contiguous_format)
    plain, _ = _gradients(model, x)
    packed, _ = _gradients(model, x, "actnn", bits=1)
    assert _same(packed, plain)


class Standardized(nn.Conv2d):
    """Its weight has mean 0 and deviation 1 in each channel, by a batch norm as timm has it, or by hand."""

    def __init__(self, *sizes: int, gain: bool = True, by_hand: bool = False) -> None:
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.rand(sizes[1]) + 0.5) if gain else None
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        if self.by_hand:
            weight = (flat - flat.mean(2, keepdim=True)) / (flat.std(2, keepdim=True) + 1e-5)
        else:
            scale = None if self.gain is None else self.gain * 0.7
            weight = F.batch_norm(flat, None, None, weight=scale, training=True, momentum=0.0)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias)


class Computed(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.g = nn.Parameter(torch.rand(sizes[1], 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * (self.g / self.weight.norm(dim=1, keepdim=True)), self.bias)


parametrizations = nn.utils.parametrizations
DERIVED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (lambda: Standardized(8, 16, 3), "remade"),
    "batch norm without gain": (lambda: Standardized(8, 16, 3, gain=False), "remade"),
    "by hand": (lambda: Standardized(8, 16, 3, by_hand=True), "group_quant(8 bits)"),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Conv2d(8, 16, 3)), "remade"),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Conv2d(8, 16, 3)).eval(), "remade"),
    "transposed": (lambda: parametrizations.weight_norm(nn.ConvTranspose2d(8, 16, 3)), "remade"),
    "linear": (lambda: Computed(8, 16), "remade"),
    "linear, weight norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 16)), "remade"),
}


def _derived(name: str, method: object, bf16: bool = False, between: Callable[[nn.Module], None] = lambda m: None):
    torch.manual_seed(0)
    first, second = nn.Conv2d(4, 8, 3), DERIVED[name][0]()
    model = nn.ModuleList([first, second])
    x = torch.randn(4, 4, 9, 9)
    with (
        nullcontext() if method is None else lowtide.compress(model, method, min_numel=0) as session,
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16),
    ):
        h = first(x).relu()
        y = second(h.movedim(1, -1) if "linear" in name else h)
        loss = (y * y).mean()
    between(model)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return grads, None if method is None else session.report()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", DERIVED)
def test_weights_made_of_parameters_are_made_again(name: str, bf16: bool) -> None:
    """Bit for bit, for no bytes; where the op is not known, 8 bits."""
    plain, _ = _derived(name, None, bf16)
    packed, report = _derived(name, "lossless", bf16)
    assert _same(packed, plain)
    rows = [s for s in report.sites if s.site.module == "1" and s.site.slot in ("weight", "mat2")]
    rows = [s for s in rows if s.site.op in ("Convolution", "Addmm", "Mm")]
    codec = DERIVED[name][1]
    if codec == "remade":
        assert [(s.codec, s.stored_nbytes) for s in rows] == [("remade", 0)]
    elif not bf16:
        _, report = _derived(name, "actnn", bf16)
        assert codec in [s.codec for s in report.sites if s.site.module == "1"]


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("name", [n for n, (_, codec) in DERIVED.items() if codec == "remade"])
def test_a_weight_made_again_notices_that_its_parameter_changed(name: str, by_data: bool) -> None:
    def change(model: nn.Module) -> None:
        parameter = max(model[1].parameters(), key=lambda p: p.numel())
        with torch.no_grad():
            (parameter.data if by_data else parameter).mul_(1.5)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _derived(name, "lossless", between=change)


def test_other_noise_reaches_the_first_layer_by_the_weight_alone() -> None:
    """Its own input is held; the second layer's exact weight leaves it the exact gradient."""
    model = nn.Sequential(nn.Linear(16, 16), parametrizations.weight_norm(nn.Linear(16, 16)))
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(5))
    model(x).sum().backward()
    plain = model[0].weight.grad.clone()
    model.zero_grad()
    with lowtide.compress(model, "actnn", bits=1, min_numel=0):
        loss = model(x).sum()
    loss.backward()
    assert torch.equal(model[0].weight.grad, plain)


LAYOUTS = {
    "contiguous": (MAPS, lambda h: h),
    "channels_last": (MAPS, lambda h: h.contiguous(memory_format=torch.channels_last)),
    "channels_last of one row": (
        (4, 3, 1, 64),
        lambda h: h.contiguous(memory_format=torch.channels_last),
    ),
    "transposed maps": ((4, 3, 12, 10), lambda h: h.transpose(2, 3)),
    "permuted": ((12, 4, 10, 3), lambda h: h.permute(1, 3, 0, 2)),
    "slice": ((4, 6, 10, 24), lambda h: h[:, ::2, :, ::2]),
}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("division", {"bits": 8, "block": 4}),
        ("division", {"bits": 8, "block": 4, "faithful": True}),
        ("actnn", {"bits": 8}),
        ("cast", {"dtype": "float16"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_come_back_in_their_places(layout: str, method: str, options: dict[str, object]) -> None:
    """At 8 bits the weight gradient is right to a few percent, or the values were shuffled."""
    shape, view = LAYOUTS[layout]
    example = Example(lambda h, m: F.conv2d(view(h.mul(2.0)), m.w, padding=1), shape, {"w": (4, 3, 3, 3)}, scale=1.0)
    model, x = _model(example, torch.contiguous_format), _input(example, torch.contiguous_format)
    plain, _ = _gradients(model, x)
    packed, report = _gradients(model, x, method, **options)
    assert report is not None
    assert _of(report, ("Convolution", "input"))
    assert float((packed["w"] - plain["w"]).norm() / plain["w"].norm()) < 0.05


@pytest.mark.parametrize("function", [F.hardtanh, F.relu6, F.hardtanh_], ids=["hardtanh", "relu6", "in place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nan_in_a_hardtanh_of_whole_vectors(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """The kernel treats NaN in two ways: in whole vectors, and in what is left. Whole vectors are nearly all."""
    model = nn.Linear(64, 64, dtype=dtype)
    x = torch.randn(64, 64, dtype=dtype)
    x[::3] = math.nan
    grads = []
    for context in (nullcontext(), lowtide.compress(model, "lossless", min_numel=0)):
        model.zero_grad()
        with context as session:
            loss = function(model(x)).sum()
        loss.backward()
        assert model.bias.grad is not None
        grads.append(model.bias.grad.clone())
    assert torch.equal(*grads)
    assert session is not None
    assert ["mask" in s.codec for s in session.report().sites if s.site.op == "Hardtanh"] == [True]


def _bits(model: nn.Module, forward: Callable[[], Tensor]) -> dict[str, str]:
    """The codec of each stored tensor, by the op and slot that read it first or as well."""
    with lowtide.compress(model, "actnn", bits=2, min_numel=0) as session:
        loss = forward()
    report = session.report()
    del loss
    codecs = {str(s.site): s.codec for s in report.sites if s.codec}
    return {str(s.site): s.codec or codecs.get(s.why.removeprefix("stored at "), s.why) for s in report.sites}


@pytest.mark.parametrize("product", ["q @ k.t()", "torch.mm(q, k.t().clone())", "torch.addmm(q[0, :1], q, k.t())"])
def test_a_product_of_activations_keeps_four_bits_of_both(product: str) -> None:
    model = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
    x = torch.randn(64, 32)

    def forward() -> Tensor:
        q, k = model[0](x), model[1](x)
        found: Tensor = eval(product, {"torch": torch, "q": q, "k": k})
        return found.sum()

    codecs = _bits(model, forward)
    slots = ("Addmm.mat1", "Addmm.mat2") if "addmm" in product else ("Mm.self", "Mm.mat2")
    for slot in slots:
        assert "4 bits" in codecs[f"(model): {slot}"], codecs


@pytest.mark.parametrize(
    "product",
    ["h @ w", "h @ w.t()", "torch.addmm(w[0], h, w)", "h @ w[:, :8]", "h @ w.to(torch.float64).to(torch.float32)"],
)
def test_a_product_with_a_parameter_may_have_two_bits(product: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    weight = nn.Parameter(torch.randn(32, 32))
    x = torch.randn(64, 32)

    def forward() -> Tensor:
        found: Tensor = eval(product, {"torch": torch, "h": model(x), "w": weight})
        return found.sum()

    codecs = _bits(model, forward)
    slot = "Addmm.mat1" if "addmm" in product else "Mm.self"
    assert "2 bits" in codecs[f"(model): {slot}"], codecs
