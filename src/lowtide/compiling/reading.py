"""What the backward graph of a compiled step reads of each value that the forward hands to it.

The rows are those of ``graph/rules.py``; here is how they are found in a graph. A backward op may be there as it is
(``convolution_backward``), and then the argument's place tells the slot; or decomposed into simple ops, and then
torch's note of the op they come from tells it. What is computed again in backward is looked through: a partitioner
saves the input of a norm and makes the norm's result again. What is not known here stays exact.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..codecs import Codec, Indices, PoolOffsets
from ..graph.rules import RULES, Need
from .running import hint, hints

# Names are those of aten and prims; an op of anybody else has its namespace before its name.
VIEWS = {
    *("view", "permute", "t", "transpose", "_unsafe_view", "expand", "unsqueeze", "squeeze", "alias"),
    *("detach", "select", "slice", "as_strided", "split", "split_with_sizes", "unbind", "unfold", "diagonal"),
    *("broadcast_in_dim"),
}
"""Ops whose results share the memory of their first argument."""

# Copies with the same values, or values rounded to another type.
_COPIES = {"clone", "_to_copy", "convert_element_type", "contiguous", "constant_pad_nd", "cat"}

# What a norm or an activation is made of, when backward computes its result again. Noise passes linearly ...
_LINEAR = {"add", "sub", "rsub", "neg", "mul", "relu", "where"}
# ... or bent: a value through which noise gets a mean has at least the bits of what propagates.
_BENT = {"gelu", "silu", "tanh", "sigmoid", "erf", "sin", "cos", "square"}
_EXPONENTIAL = {"exp", "expm1"}

_COMPARISONS = {"le", "lt", "ge", "gt", "eq", "ne", "isnan"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_SHAPE_ONLY = "shape"
_BIT = "bit"

Slot = tuple[str, str]

# Backward ops as they are: which argument is which slot of a rule. "shape" reads no values, "bit" one bit.
FUSED: dict[str, dict[int, Slot | str]] = {
    "convolution_backward": {1: ("Convolution", "input")},
    "native_batch_norm_backward": {1: ("NativeBatchNorm", "input")},
    "cudnn_batch_norm_backward": {0: ("CudnnBatchNorm", "input")},
    "miopen_batch_norm_backward": {0: ("MiopenBatchNorm", "input")},
    "batch_norm_backward": {1: ("NativeBatchNorm", "input")},
    "native_layer_norm_backward": {1: ("NativeLayerNorm", "input")},
    "_fused_rms_norm_backward": {1: ("FusedRmsNorm", "input")},
    "native_group_norm_backward": {1: ("NativeGroupNorm", "input")},
    "threshold_backward": {1: _BIT},
    "hardtanh_backward": {1: _BIT},
    "hardsigmoid_backward": {1: _BIT},
    "leaky_relu_backward": {1: _BIT},
    "gelu_backward": {1: ("Gelu", "self")},
    "silu_backward": {1: ("Silu", "self")},
    "hardswish_backward": {1: ("Hardswish", "self")},
    "mish_backward": {1: ("Mish", "self")},
    "softplus_backward": {1: ("Softplus", "self")},
    "glu_backward": {1: ("Glu", "self")},
    "sigmoid_backward": {1: ("Sigmoid", "result")},
    "tanh_backward": {1: ("Tanh", "result")},
    "_softmax_backward_data": {1: ("Softmax", "result")},
    "_log_softmax_backward_data": {1: ("LogSoftmax", "result")},
    "nll_loss_backward": {1: _SHAPE_ONLY},
    "nll_loss2d_backward": {1: _SHAPE_ONLY},
    "max_pool2d_with_indices_backward": {1: _SHAPE_ONLY},
    "max_pool3d_with_indices_backward": {1: _SHAPE_ONLY},
    "avg_pool2d_backward": {1: _SHAPE_ONLY},
    "avg_pool3d_backward": {1: _SHAPE_ONLY},
    "_adaptive_avg_pool2d_backward": {1: _SHAPE_ONLY},
    "_adaptive_avg_pool3d_backward": {1: _SHAPE_ONLY},
    **{
        f"_scaled_dot_product_{kind}_backward": {
            place: (f"ScaledDotProduct{name}", slot)
            for place, slot in zip(places, ("query", "key", "value", "output"), strict=True)
        }
        for kind, name, places in (
            ("flash_attention_for_cpu", "FlashAttentionForCpu", (1, 2, 3, 4)),
            ("flash_attention", "FlashAttention", (1, 2, 3, 4)),
            ("cudnn_attention", "CudnnAttention", (1, 2, 3, 4)),
            ("efficient_attention", "EfficientAttention", (1, 2, 3, 5)),
        )
    },
}

# Ops that are decomposed: of those that they come from, the one slot that has values of an activation. Statistics
# are told apart by their size.
DECOMPOSED: dict[str, Slot] = {
    **{
        name: slot
        for name, places in FUSED.items()
        for slot in places.values()
        if isinstance(slot, tuple) and not name.startswith(("_scaled", "convolution"))
    },
    "mul": ("Mul", "self"),
    "pow": ("Pow", "self"),
    "sin": ("Sin", "self"),
    "cos": ("Cos", "self"),
    "erf": ("Erf", "self"),
    "exp": ("Exp", "result"),
    "sigmoid": ("Sigmoid", "result"),
    "tanh": ("Tanh", "result"),
}

_POOLS = {"max_pool2d_with_indices_backward": 2, "max_pool3d_with_indices_backward": 3}
_LEAST_SHARING = 8  # as in graph/rules.py: with fewer values in a statistic nothing is left beside the noise


class Read(NamedTuple):
    """One reader of a value: a slot of a rule, what it needs, and whether it is the value itself that it reads."""

    slot: Slot
    need: Need
    why: str
    node: fx.Node
    spatial: bool = False
    sharing: int = 0


@dataclass
class Reads:
    """All readers of a value, and the bits that backward would take from it."""

    values: list[Read] = field(default_factory=list)
    bits: list[fx.Node] = field(default_factory=list)
    """Nodes of the backward graph that are one bit for each value: comparisons, and what a ReLU lets through."""
    lossless: Codec | None = None
    """For positions: a codec that keeps them in fewer bits."""

    @property
    def need(self) -> Need:
        """The greatest of all."""
        return max((read.need for read in self.values), default=Need.LOSSLESS)


def op_of(node: Any) -> str:
    """The name of a node's op, whatever its overload; empty if it calls none."""
    return _name(node.target) if isinstance(node, fx.Node) and node.op == "call_function" else ""


def _name(target: Any) -> str:
    return re.sub(r"^(aten|prims)\.", "", str(getattr(target, "overloadpacket", target)))


def origin(node: fx.Node) -> str:
    """The op that this node is, or was made of when ops were decomposed."""
    before = node.meta.get("original_aten")
    return op_of(node) if before is None else _name(before)


def tensor_of(node: Any) -> Tensor | None:
    """The fake tensor that stands for the node's value, if it is a tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def numel_of(node: Any) -> int:
    """How many values a node has, as far as is known; 0 if it is no tensor."""
    value = tensor_of(node)
    return 0 if value is None else math.prod(hints(value.shape))


def root_of(node: fx.Node) -> fx.Node:
    """The node that made the memory of which this one is a view."""
    while op_of(node) in VIEWS or (node.target is operator.getitem and op_of(node.args[0]) in VIEWS):
        node = node.args[0]  # type: ignore[assignment]
    return node


def same_value(node: fx.Node) -> fx.Node:
    """The node itself, before it was detached."""
    while op_of(node) in ("detach", "alias"):
        node = node.args[0]  # type: ignore[assignment]
    return node


def module_of(node: fx.Node) -> str:
    """The path of the module in whose forward the op was called."""
    stack = node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack") or {}
    path = next((str(place[0]) for place in reversed(list(stack.values()))), "")
    path = re.sub(r"^L\['[^']*'\]", "", path)  # the model itself, by the name of the variable
    path = re.sub(r"\._modules\['([^']*)'\]|\[(\d+)\]|\['([^']*)'\]", lambda m: f".{m[1] or m[2] or m[3]}", path)
    return ".".join(name for name in path.split(".") if name not in ("_orig_mod", ""))


class Backward:
    """The backward graph, seen from what it reads."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.of_gradient: set[fx.Node] = set()
        """What depends on the gradient that arrives. Everything of it is linear in that gradient."""
        for node in graph.nodes:
            arrives = node.op == "placeholder" and "tangents" in str(node.target)
            if arrives or any(each in self.of_gradient for each in node.all_input_nodes):
                self.of_gradient.add(node)

    def reads(self, node: fx.Node) -> Reads:
        """Everything that the graph does with a value."""
        found = Reads()
        self._collect(node, found, set())
        return found

    def _collect(self, node: fx.Node, found: Reads, seen: set[fx.Node]) -> None:
        if node in seen:
            return
        seen.add(node)
        for user in node.users:
            self._use(node, user, found, seen)

    def _use(self, node: fx.Node, user: fx.Node, found: Reads, seen: set[fx.Node]) -> None:
        if user.op == "output":
            found.values.append(_exact(node, user, "the backward graph returns it"))
            return
        op = op_of(user)
        if op in FUSED:
            for place in [i for i, each in enumerate(user.args) if each is node] or [-1]:
                self._fused(node, user, FUSED[op].get(place), found)
        elif op == "_low_memory_max_pool_offsets_to_indices":
            found.lossless = Indices(0, math.prod(user.args[1]) - 1)  # type: ignore[arg-type]
        elif user in self.of_gradient:
            found.values.append(self._product(node, user) if op in _PRODUCTS else self._beside_gradient(node, user))
        elif _is_bit(user):
            found.bits.append(user)
        elif origin(user) in DECOMPOSED and origin(user).endswith(("_backward", "_backward_data")):
            found.values.append(self._ruled(node, user, DECOMPOSED[origin(user)]))
        elif op in VIEWS or op in _COPIES or user.target is operator.getitem:
            self._collect(user, found, seen)
        else:
            self._again(node, user, found, seen)

    def _again(self, node: fx.Node, user: fx.Node, found: Reads, seen: set[fx.Node]) -> None:
        """A part of the forward that is computed again: its readers read the value through it."""
        op = op_of(user)
        if op in _LINEAR:
            if op == "relu":
                found.bits.append(user)
            self._collect(user, found, seen)
        elif op in _BENT or _is_whole_power(user) or op in _EXPONENTIAL:
            inner = Reads()
            self._collect(user, inner, seen)
            least = Need.EXPONENT if op in _EXPONENTIAL else Need.PROPAGATE
            found.values += [read._replace(need=max(read.need, least)) for read in inner.values]
            found.bits += inner.bits
        elif op == "div" and user.args[0] is node and user.args[1] is not node:
            self._collect(user, found, seen)
        else:
            found.values.append(_exact(node, user, f"nobody knows what noise would do in {op_of(user)}"))

    def _fused(self, node: fx.Node, user: fx.Node, slot: Slot | str | None, found: Reads) -> None:
        name = op_of(user)
        if slot == _SHAPE_ONLY:
            return
        if slot == _BIT:
            found.bits.append(user)
        elif name in _POOLS and node is user.args[-1]:
            found.lossless = _pool_codec(user, _POOLS[name])
        elif slot is None:
            found.values.append(_exact(node, user, f"a part of {name} that scales or selects"))
        else:
            found.values.append(self._ruled(node, user, slot))  # type: ignore[arg-type]

    def _beside_gradient(self, node: fx.Node, user: fx.Node) -> Read:
        name = origin(user)
        if op_of(user) == "div" and user.args[1] is node:
            return _exact(node, user, RULES["Div", "other"].why)
        if name in DECOMPOSED:
            return self._ruled(node, user, DECOMPOSED[name])
        if op_of(user) == "mul" and name == "div":
            return self._ruled(node, user, ("Div", "self"))
        return _exact(node, user, "no rule for this op")

    def _product(self, node: fx.Node, user: fx.Node) -> Read:
        """A factor of a product of matrices: that of a weight's gradient, or one that passes the gradient on."""
        two = op_of(user) in ("mm", "addmm")
        slot = ("Addmm", "mat1") if two and self._ends_as_weight(user) else ("Mm", "mat2") if two else ("Bmm", "mat2")
        return Read(slot, RULES[slot].need, RULES[slot].why, user)

    def _ends_as_weight(self, node: fx.Node) -> bool:
        """Does this gradient go to outputs only, summed or reshaped at most?"""
        passing = VIEWS | _COPIES | {"sum", "add"}
        return all(
            user.op == "output" or (op_of(user) in passing and self._ends_as_weight(user)) for user in node.users
        )

    def _ruled(self, node: fx.Node, user: fx.Node, slot: Slot) -> Read:
        rule = RULES[slot]
        value = tensor_of(node)
        assert value is not None
        if slot == ("Convolution", "input"):
            weight = [each for each in user.users if each.target is operator.getitem and each.args[1] == 1]
            if weight and not all(self._ends_as_weight(each) for each in weight):
                return Read(slot, Need.PROPAGATE, "the weight is made by other ops", user, spatial=True)
        sharing = 0
        if rule.sharing is not None:
            sharing = _sharing(slot[0], user, value)
            if 0 < sharing < _LEAST_SHARING:
                return _exact(node, user, f"only {sharing} values share a statistic", slot)
        return Read(slot, rule.need, rule.why, user, rule.spatial, sharing)


def _exact(node: fx.Node, user: fx.Node, why: str, slot: Slot | None = None) -> Read:
    return Read(slot or (op_of(user) or "output", "argument"), Need.EXACT, why, user)


def _is_bit(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype == torch.bool and op_of(node) in _COMPARISONS


def _is_whole_power(node: fx.Node) -> bool:
    power = node.args[1] if op_of(node) == "pow" and len(node.args) > 1 else None
    return isinstance(power, (int, float)) and power >= 1 and float(power).is_integer()


def _sharing(op: str, user: fx.Node, value: Tensor) -> int:
    """How many values share a statistic. Where the op is decomposed, the least that it can be."""
    shape = hints(value.shape)
    if "BatchNorm" in op:
        return math.prod(shape) // shape[1] if len(shape) > 1 else 1
    if op == "NativeGroupNorm":
        if op_of(user) in FUSED:
            channels, plane, groups = user.args[6:9]
            return hint(channels) * hint(plane) // hint(groups)
        return math.prod(shape[2:])
    if op_of(user) in FUSED:
        return math.prod(hints(user.args[2]))  # type: ignore[arg-type]
    return shape[-1] if shape else 1


def _pool_codec(user: fx.Node, dims: int) -> Codec | None:
    source = tensor_of(user.args[1])
    if source is None or any(isinstance(size, torch.SymInt) for size in source.shape[-dims:]):
        return None

    def each(value: Any, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        sizes = tuple(value) or default
        return sizes * dims if len(sizes) == 1 else sizes

    kernel = each(user.args[2])
    stride, padding, dilation = user.args[3:6]
    return PoolOffsets(tuple(source.shape[-dims:]), kernel, each(stride, kernel), each(padding), each(dilation))


def ancestors(node: fx.Node, depth: int) -> Iterator[fx.Node]:
    """What a value was made of, a few ops back."""
    for each in node.all_input_nodes if node.op == "call_function" else ():
        yield each
        if depth > 1:
            yield from ancestors(each, depth - 1)
