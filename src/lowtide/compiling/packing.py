"""Rewrites the two graphs of a step: what the forward would hand to backward is encoded there and decoded here.

The partition itself is torch's. Of each storage that it saves one copy is encoded, behind the last op of the forward
that reads it, and decoded before the first op of the backward that does; views are taken again from what is decoded.
Bits that backward would take from values that are packed now (the sign behind a ReLU) are taken by the forward, from
the exact values, and handed on as bits.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ..codecs import FLOATS, Codec, GroupQuant, Mask, TensorMeta
from ..codecs.base import layout_of
from ..graph.capture import Site
from ..graph.rules import Need
from ..policy.choice import Action
from ..policy.methods import Method
from ..policy.use import Use
from ..report import EXACT, HELD
from . import reading, running
from .reading import Backward, Read, Reads, ancestors, module_of, numel_of, op_of, root_of, same_value, tensor_of
from .running import Label, hints, to_text

_SIGN = Mask()
_STATISTIC = 8  # a value so many times smaller than what it was made of may be a statistic, which scales gradients
_NOT_SMALLER = "packing would not make it smaller"
_NEAR = 3  # so many ops may lie between the two
_MADE_BY = {
    "relu": "Relu",
    "max_pool2d_with_indices": "MaxPool2DWithIndices",
    "max_pool3d_with_indices": "MaxPool3DWithIndices",
    "_low_memory_max_pool_with_offsets": "MaxPool2DWithIndices",
    "native_dropout": "NativeDropout",
}

SymbolOf = Callable[[fx.Graph, torch.SymInt], Any]
"""Gives the number that a symbol stands for as a node of a graph."""


@dataclass
class Saved:
    """One storage that the forward hands to backward, and what becomes of it."""

    root: fx.Node
    views: list[fx.Node]
    reads: Reads
    why: str = ""
    state: str = EXACT
    codec: Codec | None = None
    is_dropped: bool = False
    """Is nothing read of it but bits or the shape?"""
    rectified: bool = False
    sites: tuple[Site, ...] = ()

    @property
    def form(self) -> fx.Node:
        """What is encoded: the first view that has all values, as its readers see them, or else the storage itself."""
        value = tensor_of(self.root)
        for view in self.views:
            seen = tensor_of(view)
            if value is None or seen is None or numel_of(view) != numel_of(self.root):
                continue
            if seen.dtype == value.dtype and layout_of(hints(seen.shape), hints(seen.stride())).dense:
                return view
        return self.root

    @property
    def is_packed(self) -> bool:
        """Does it go to backward in another form?"""
        return self.codec is not None or self.is_dropped


@dataclass
class Graphs:
    """A step: both graphs, and what passes between them."""

    forward: fx.Graph
    backward: fx.Graph
    returned: int
    """So many outputs of the forward are the user's."""
    is_weight: list[bool]
    """Which inputs of the forward live as long as the model."""
    symbol_of: SymbolOf
    is_fused: bool = False
    """Does a compiler join simple ops, so that they need no pass over memory of their own?"""
    channels_last: bool = False
    """Will the compiler bring maps of convolutions into channels-last memory, whatever the graphs say of strides?"""
    saved: list[Saved] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.output = self.forward.output_node()
        self.results: list[Any] = list(self.output.args[0])  # type: ignore[arg-type]
        self.holders = {node.name: node for node in self.backward.find_nodes(op="placeholder")}
        self.inputs: list[fx.Node] = list(self.forward.find_nodes(op="placeholder"))
        # A backward that asks for strides by number gets those that the graphs speak of.
        by_number = self.backward.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
        self.maps: set[fx.Node] = set()
        if self.channels_last and not by_number:
            self.maps = _beside_convolutions(self.forward)

    def laid(self, node: fx.Node) -> Tensor | None:
        """The fake tensor of a node of the forward, in the order in memory that it will have when the graph runs.

        Encoding brings a tensor that comes in another order into this one, so a wrong guess costs a copy and no more.
        """
        value = tensor_of(node)
        if value is None or node not in self.maps or not value.is_contiguous():
            return value
        channels, *maps = value.shape[1:]
        stride = [1, *(channels * math.prod(maps[i + 1 :]) for i in range(len(maps)))]
        return value.new_empty_strided(value.shape, [math.prod(value.shape[1:]), *stride])

    def is_saved(self, node: Any) -> bool:
        """Is it a tensor that the forward returns for backward?"""
        return isinstance(node, fx.Node) and node.name in self.holders and tensor_of(node) is not None

    def of_weights(self) -> set[fx.Node]:
        """Everything that is computed from weights and buffers alone."""
        found = {node for node, weight in zip(self.inputs, self.is_weight, strict=False) if weight}
        for node in self.forward.nodes:
            if node.op == "call_function" and node.all_input_nodes and found.issuperset(node.all_input_nodes):
                found.add(node)
        return found

    def need_gradients(self) -> set[fx.Node]:
        """Inputs of the forward to which backward returns a gradient."""
        gradients: Sequence[Any] = self.backward.output_node().args[0]  # type: ignore[assignment]
        return {node for node, gradient in zip(self.inputs, gradients, strict=False) if gradient is not None}


def _beside_convolutions(graph: fx.Graph) -> set[fx.Node]:
    """Maps that convolutions make or read, and what is computed from or for them value by value."""
    found: set[fx.Node] = set()

    def is_beside(node: fx.Node, others: Iterable[fx.Node]) -> bool:
        value = tensor_of(node)
        return value is not None and any(
            other in found or (op_of(other) == "convolution" and _rank(other) == value.dim()) for other in others
        )

    for node in reversed(graph.nodes):
        if _rank(node) in (4, 5) and (op_of(node) == "convolution" or is_beside(node, node.users)):
            found.add(node)
    for node in graph.nodes:
        (maker,) = node.all_input_nodes if _is_offsets(node) else (node,)
        if _rank(node) in (4, 5) and is_beside(node, maker.all_input_nodes):
            found.add(node)
    return found


def _rank(node: fx.Node) -> int:
    """How many dimensions a map of numbers has; 0 for anything else, whose layout a compiler leaves alone."""
    value = tensor_of(node)
    return value.dim() if value is not None and (value.dtype.is_floating_point or _is_offsets(node)) else 0


def _is_offsets(node: fx.Node) -> bool:
    """Are these positions inside the windows of a max pooling? A compiled pooling lays them out like its result."""
    if node.target is not operator.getitem:
        return False
    return op_of(node.args[0]) == "_low_memory_max_pool_with_offsets" and bool(node.args[1] == 1)


def decide(graphs: Graphs, method: Method, min_numel: int) -> None:
    """What happens to each storage that the forward saves."""
    backward = Backward(graphs.backward)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graphs.results[graphs.returned :]:
        if graphs.is_saved(node):
            groups.setdefault(root_of(node), []).append(node)
    of_weights, learning = graphs.of_weights(), graphs.need_gradients()
    returned = {root_of(node) for node in graphs.results[: graphs.returned] if isinstance(node, fx.Node)}
    ordinals: Counter[tuple[str, ...]] = Counter()
    for root, views in groups.items():
        if root.op == "placeholder" and root in of_weights:
            continue
        reads = Reads()
        for view in views:
            found = backward.reads(graphs.holders[view.name])
            reads.values += found.values
            reads.bits += found.bits
            reads.lossless = reads.lossless or found.lossless
        saved = Saved(root, views, reads)
        saved.sites = _sites(saved, ordinals)
        graphs.saved.append(saved)
        if root in of_weights:
            saved.why = "made of weights alone"
        elif root in returned:
            saved.why, saved.state = "the graph returns it, so the caller has it", HELD
        elif root.op == "placeholder" and root not in learning:
            saved.why, saved.state = "an input of the model, which the caller has", HELD
        else:
            _choose(saved, graphs.laid(saved.form), method, min_numel)


def _choose(saved: Saved, value: Tensor | None, method: Method, min_numel: int) -> None:
    root, reads = saved.root, saved.reads
    if value is None:
        saved.why = "not one tensor"
        return
    meta = TensorMeta(hints(value.shape), hints(value.stride()), value.dtype)
    if meta.numel < min_numel:
        saved.why = "small"
    elif not layout_of(meta.shape, meta.stride).dense or value.storage_offset() != 0:
        saved.why = "a part of a larger storage"
    elif meta.dtype == torch.bool:
        _take(saved, Mask(), value, meta, "one bit for each boolean, exactly")
    elif reads.lossless is not None and not meta.dtype.is_floating_point:
        _take(saved, reads.lossless, value, meta, "positions fit in fewer bits exactly")
    elif meta.dtype not in FLOATS:
        saved.why = f"{meta.dtype} stays as it is".replace("torch.", "")
    elif reads.need is Need.EXACT:
        saved.why = next(read.why for read in reads.values if read.need is Need.EXACT)
    elif not reads.values:
        # A small value may be compared with a large one, and each comparison takes a bit.
        saved.is_dropped = sum(-(-numel_of(bit) // 8) for bit in reads.bits) < meta.nbytes
        saved.why = "only bits or the shape are read" if saved.is_dropped else _NOT_SMALLER
    elif numel_of(root) * _STATISTIC <= max((numel_of(each) for each in ancestors(root, _NEAR)), default=0):
        saved.why = "much smaller than what it was made of: it may be a statistic"
    else:
        _approximate(saved, method, value, meta)


def _approximate(saved: Saved, method: Method, value: Tensor, meta: TensorMeta) -> None:
    reads = saved.reads
    maps = [read for read in reads.values if read.spatial]
    spatial = bool(maps) and any(_form(read, saved) == meta.shape for read in maps)
    saved.rectified = op_of(saved.root) == "relu" and any(_is_sign_of(saved.root.name, bit) for bit in reads.bits)
    sharing = min((read.sharing for read in reads.values if read.sharing), default=0)
    use = Use(reads.need, meta, spatial, saved.sites, rectified=saved.rectified, sharing=sharing)
    choice = method.choose(use)
    if choice.action is Action.KEEP:
        saved.why = choice.why
    elif choice.action is not Action.STORE or choice.home != "device":
        saved.why = f"a compiled graph cannot do this: {choice}"
    else:
        assert choice.codec is not None
        extra = -(-meta.numel // 8) if saved.rectified else 0
        _take(saved, choice.codec, value, meta, choice.why or max(reads.values, key=lambda r: r.need).why, extra)


def _form(read: Read, saved: Saved) -> tuple[int, ...]:
    """The shape that a reader of maps sees: that of the value itself, unless it reads a view."""
    shapes = [hints(value.shape) for each in read.node.all_input_nodes if (value := tensor_of(each)) is not None]
    own = tensor_of(saved.form)
    assert own is not None
    shape = hints(own.shape)
    return shape if shape in shapes or any(len(s) == len(shape) for s in shapes) else ()


def _take(saved: Saved, codec: Codec, value: Tensor, meta: TensorMeta, why: str, extra: int = 0) -> None:
    """Pack with ``codec`` if that can be done here, and is worth it."""
    if isinstance(codec, GroupQuant) and codec.layout == "channel" and _has_symbols(value.shape[2:]):
        codec = dataclasses.replace(codec, layout="sample")  # groups of channels are cut by the size of a map
    saved.why = why
    try:
        codec.to_config()
        smaller = codec.packed_nbytes(meta) + extra < meta.nbytes
        running.forms(codec, tuple(value.shape), value.stride(), value.dtype)
    except (ValueError, TypeError) as error:
        saved.why = f"{codec} does not fit: {error}"
        return
    if smaller:
        saved.codec = codec
    else:
        saved.why = _NOT_SMALLER


def _has_symbols(sizes: Sequence[Any]) -> bool:
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _sites(saved: Saved, ordinals: Counter[tuple[str, ...]]) -> tuple[Site, ...]:
    found = []
    places = dict.fromkeys((module_of(read.node) or module_of(saved.root), *read.slot) for read in saved.reads.values)
    for place in places or [_made(saved.root)]:
        found.append(Site(*place, ordinals[place]))
        ordinals[place] += 1
    return tuple(found)


def _made(node: fx.Node) -> tuple[str, str, str]:
    """A name for what a node made; in rules where they have one."""
    module, result = module_of(node), "result"
    if node.target is operator.getitem:
        result = f"result{node.args[1]}"
        node = node.args[0]  # type: ignore[assignment]
    op = op_of(node) or str(node.target)
    return module, _MADE_BY.get(op, op), result


def _is_sign_of(name: str, bit: fx.Node) -> bool:
    """Does this node of the backward graph read whether the value ``name`` is above zero, and nothing else?"""
    op, args = op_of(bit), bit.args
    if op == "le":
        return args[1] == 0 and same_value(args[0]).name == name  # type: ignore[arg-type,return-value]
    if op == "threshold_backward":
        return args[2] == 0 and same_value(args[1]).name == name  # type: ignore[arg-type,return-value]
    return False


class Rewriting:
    """Carries out what :func:`decide` decided."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self.twins = {node.name: node for node in graphs.forward.nodes}
        self.extra: list[tuple[fx.Node, str]] = []
        """What is handed on beside what was saved: masks, and the token of the note."""
        self.parts: dict[fx.Node, list[fx.Node]] = {}
        self.masks: dict[tuple[fx.Node, Codec], Callable[[torch.dtype, fx.Node], fx.Node]] = {}
        self.ordinals: Counter[tuple[str, ...]] = Counter()
        tensors = (graphs.holders[n.name] for n in graphs.results[graphs.returned :] if graphs.is_saved(n))
        self.anchor = next(tensors, None)

    def run(self) -> None:
        """Rewrite both graphs."""
        if self.anchor is None:
            return
        graphs = self.graphs
        packed = [saved for saved in graphs.saved if saved.is_packed]
        note = self._note([saved for saved in graphs.saved if not saved.is_packed])
        bits = [
            (bit, saved) for saved in packed if saved.codec is None or not saved.codec.exact for bit in saved.reads.bits
        ]
        bits = list({bit: (bit, saved) for bit, saved in bits}.values())
        # A ReLU is replaced last: until then its node is known by its name in both graphs.
        for bit, saved in sorted(bits, key=lambda each: op_of(each[0]) == "relu"):
            if not (saved.rectified and _is_sign_of(saved.root.name, bit)):
                self._hoist(bit)
        for saved in packed:
            self._pack(saved, [bit for bit, owner in bits if owner is saved])
        self._join(note)

    # ------------------------------------------------------------ bits

    def _hoist(self, bit: fx.Node) -> None:
        """Let the forward take a bit for each value that backward would take from approximate ones."""
        op = op_of(bit)
        if op in reading.FUSED:
            source, codec = bit.args[1], _band(bit)
            assert isinstance(source, fx.Node)
            decoded = self._mask(source, codec)
            value = tensor_of(source)
            assert value is not None
            bit.replace_input_with(source, decoded(value.dtype, bit))
        elif op == "relu":
            inside = self._mask(bit, _SIGN)(torch.bool, bit)
            self._replace(bit, self._where(inside, bit))
        elif op == "le" and bit.args[1] == 0:
            inside = self._mask(bit.args[0], _SIGN)(torch.bool, bit)  # type: ignore[arg-type]
            self._replace(bit, self._not(inside, bit))
        else:
            self._replace(bit, self._mask(bit, _SIGN)(torch.bool, bit))

    def _mask(self, node: fx.Node, codec: Codec) -> Callable[[torch.dtype, fx.Node], fx.Node]:
        """A function that puts the decoded bits of a value before a node of the backward graph."""
        twin = self._twin(same_value(node))
        if (twin, codec) not in self.masks:
            value = self.graphs.laid(twin)
            assert value is not None
            assert self.anchor is not None
            place = _made(twin)
            label = Label((Site(*place, self.ordinals[place]),), "backward reads one bit of it", plain=False)
            self.ordinals[place] += 1
            (part,) = self._encode(twin, twin, codec, label, False)
            with self.graphs.backward.inserting_before(self.anchor):
                holder = self._placeholder(f"lowtide_bits_{twin.name}", part)
            self.extra.append((part, holder.name))
            self.masks[twin, codec] = self._bits_from(holder, codec, value)
        return self.masks[twin, codec]

    def _bits_from(self, holder: fx.Node, codec: Codec, value: Tensor) -> Callable[[torch.dtype, fx.Node], fx.Node]:
        def before(dtype: torch.dtype, node: fx.Node) -> fx.Node:
            with self.graphs.backward.inserting_before(node):
                return self._decode_bits([holder], codec, value, dtype)

        return before

    def _twin(self, node: fx.Node) -> fx.Node:
        """The same value in the forward graph; it is computed there if only backward did so until now."""
        found = self.twins.get(node.name)
        if found is None:
            assert node.op == "call_function", f"{node.name} is no value of the forward"
            inputs = {each: self._twin(each) for each in node.all_input_nodes}
            graph = self.graphs.forward
            order = {each: i for i, each in enumerate(graph.nodes)}
            last = max([*inputs.values(), self.graphs.inputs[-1]], key=order.__getitem__)
            with graph.inserting_after(last):
                found = graph.node_copy(node, lambda each: inputs[each])
            found.meta = {**node.meta, "partitioner_tag": "is_forward"}
            found.meta.pop("autograd_backward", None)
            self.twins[node.name] = found
            if not self.graphs.maps.isdisjoint(inputs.values()) and _rank(found) in (4, 5):
                self.graphs.maps.add(found)
        return found

    def _not(self, inside: fx.Node, before: fx.Node) -> fx.Node:
        with self.graphs.backward.inserting_before(before):
            node = self.graphs.backward.call_function(torch.ops.aten.logical_not.default, (inside,))
        return _described(node, inside.meta["val"])

    def _where(self, inside: fx.Node, relu: fx.Node) -> fx.Node:
        """What a ReLU lets through by its exact bits."""
        with self.graphs.backward.inserting_before(relu):
            zero = self.graphs.backward.call_function(
                torch.ops.aten.full.default,
                ([], 0.0),
                {"dtype": relu.meta["val"].dtype, "device": relu.meta["val"].device},
            )
            _described(zero, relu.meta["val"].new_empty(()))
            node = self.graphs.backward.call_function(torch.ops.aten.where.self, (inside, relu.args[0], zero))
        return _described(node, relu.meta["val"])

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self.graphs.backward.erase_node(old)

    # ------------------------------------------------------------ values

    def _pack(self, saved: Saved, bits: list[fx.Node]) -> None:
        """Encode one storage, and let every reader in backward have what is decoded, or bits, or a shape."""
        graphs, root, form = self.graphs, saved.root, saved.form
        value, whole = graphs.laid(form), graphs.laid(root)
        assert value is not None
        assert whole is not None
        holders = [graphs.holders[view.name] for view in saved.views]
        parts, holding = [], []
        if saved.codec is not None:
            label = Label(saved.sites, saved.why)
            parts = self._encode(form, self._last_reader(saved), saved.codec, label, saved.rectified)
            with graphs.backward.inserting_before(holders[0]):
                holding = [self._placeholder(f"lowtide_{root.name}_{i}", part) for i, part in enumerate(parts)]
        if saved.rectified:
            dithered = running.is_dithered(saved.codec)
            from_support = self._bits_from(holding[-2 if dithered else -1], _SIGN, whole)
            for bit in bits:
                if _is_sign_of(root.name, bit):
                    self._read_support(bit, from_support, value.dtype)
        readers = {user for holder in holders for user in holder.users}
        first = next((node for node in graphs.backward.nodes if node in readers), None)
        if first is not None:
            with graphs.backward.inserting_before(first):
                if saved.codec is None:
                    decoded = self._empty(value)
                elif value.dtype == torch.bool:
                    decoded = self._decode_bits(holding, saved.codec, value, value.dtype)
                else:
                    decoded = self._decode(holding, saved.codec, value, value.dtype, saved.rectified)
                made: dict[fx.Node, fx.Node] = {form: decoded}
                if form is not root and any(view is not form for view in saved.views):
                    made[root] = self._as_root(decoded, whole)
                for view, holder in zip(saved.views, holders, strict=True):
                    holder.replace_all_uses_with(self._view_again(view, made))
        for holder in holders:
            graphs.backward.erase_node(holder)
        for view in saved.views:
            self.parts[view] = []
        self.parts[saved.views[0]] = parts

    def _read_support(
        self, bit: fx.Node, support: Callable[[torch.dtype, fx.Node], fx.Node], dtype: torch.dtype
    ) -> None:
        if op_of(bit) == "threshold_backward":
            bit.replace_input_with(bit.args[1], support(dtype, bit))  # type: ignore[arg-type]
        else:
            self._replace(bit, self._not(support(torch.bool, bit), bit))

    def _last_reader(self, saved: Saved) -> fx.Node:
        """The last op of the forward that reads the storage: behind it the values are not needed any more."""
        order = {node: i for i, node in enumerate(self.graphs.forward.nodes)}
        found, waiting = saved.root, [saved.root]
        while waiting:
            node = waiting.pop()
            for user in node.users:
                if user.op == "output":
                    continue
                if order[user] > order[found]:
                    found = user
                if root_of(user) is saved.root:
                    waiting.append(user)
        if found.op == "placeholder":
            return self.graphs.inputs[-1]
        return found

    def _view_again(self, view: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
        """The same view of what was decoded."""
        if view not in made:
            base = self._view_again(view.args[0], made)  # type: ignore[arg-type]
            others = fx.map_arg(view.args[1:], lambda each: self._number(each.meta["val"]))
            node = self.graphs.backward.call_function(view.target, (base, *others), view.kwargs)  # type: ignore[arg-type]
            made[view] = _described(node, view.meta["val"])
        return made[view]

    def _as_root(self, decoded: fx.Node, whole: Tensor) -> fx.Node:
        """The storage itself, of which other views are taken: the same values in the same order in memory."""
        size, stride = ([self._number(each) for each in sizes] for sizes in (whole.shape, whole.stride()))
        node = self.graphs.backward.call_function(torch.ops.aten.as_strided.default, (decoded, size, stride, 0))
        return _described(node, whole)

    # ------------------------------------------------------------ nodes

    def _encode(self, x: fx.Node, after: fx.Node, codec: Codec, label: Label, rectified: bool) -> list[fx.Node]:
        graph, value = self.graphs.forward, self.graphs.laid(x)
        assert value is not None
        arguments = (to_text(codec), to_text(label), rectified)
        with graph.inserting_before((after if after.op != "placeholder" else self.graphs.inputs[-1]).next):
            stride = [self._number(each, graph) for each in value.stride()]
            node = graph.call_function(running.encode, (x, stride, *arguments))
        fakes = running.fake_encode(value, list(value.stride()), *arguments)
        node.meta.update(val=fakes, partitioner_tag="is_forward")
        parts: list[fx.Node] = []
        for i, fake in enumerate(fakes):
            with graph.inserting_after(parts[-1] if parts else node):
                parts.append(graph.call_function(operator.getitem, (node, i)))
            parts[-1].meta.update(val=fake, partitioner_tag="is_forward")
        return parts

    def _decode(
        self, parts: list[fx.Node], codec: Codec, value: Tensor, dtype: torch.dtype, rectified: bool
    ) -> fx.Node:
        """Call in the place where the node should be."""
        size, stride = ([self._number(each) for each in sizes] for sizes in (value.shape, value.stride()))
        arguments = (to_text(codec), size, stride, dtype, rectified)
        node = self.graphs.backward.call_function(running.decode, (parts, *arguments))
        fakes = [part.meta["val"] for part in parts]
        fake = value.new_empty_strided(value.shape, value.stride(), dtype=dtype)
        plain = (to_text(codec), list(value.shape), list(value.stride()), dtype, rectified)
        node.meta["eager_input_vals"] = ((fakes, *plain), {})
        return _described(node, fake)

    def _decode_bits(self, parts: list[fx.Node], codec: Codec, value: Tensor, dtype: torch.dtype) -> fx.Node:
        """Call in the place where the node should be.

        A compiled loop on the CPU works on vectors of floats. It reads booleans one by one, and the few bytes that
        belong to such a vector through a copy on the stack: either takes longer than all else that it does.
        """
        if dtype != torch.bool or not self.graphs.is_fused or value.device.type != "cpu":
            return self._decode(parts, codec, value, dtype, False)
        number = self._decode(parts, codec, value, torch.float32, False)
        bits = self.graphs.backward.call_function(torch.ops.aten.gt.Scalar, (number, 0))
        return _described(bits, value.new_empty_strided(value.shape, value.stride(), dtype=dtype))

    def _empty(self, value: Tensor) -> fx.Node:
        size, stride = ([self._number(each) for each in sizes] for sizes in (value.shape, value.stride()))
        node = self.graphs.backward.call_function(
            torch.ops.aten.empty_strided.default, (size, stride), {"dtype": value.dtype, "device": value.device}
        )
        return _described(node, value)

    def _placeholder(self, name: str, part: fx.Node) -> fx.Node:
        node = self.graphs.backward.placeholder(name)
        node.meta["val"] = part.meta["val"]
        return node

    def _number(self, size: Any, graph: fx.Graph | None = None) -> Any:
        return self.graphs.symbol_of(graph or self.graphs.backward, size) if isinstance(size, torch.SymInt) else size

    # ------------------------------------------------------------ what passes

    def _note(self, kept: list[Saved]) -> fx.Node | None:
        """The forward notes at run time what it keeps as it is."""
        kept = [saved for saved in kept if tensor_of(saved.root) is not None]
        if not kept:
            return None
        labels = to_text([Label(saved.sites, saved.why, saved.state) for saved in kept])
        graph = self.graphs.forward
        with graph.inserting_before(self.graphs.output):
            node = graph.call_function(running.note, ([saved.root for saved in kept], labels))
        fakes = [tensor_of(saved.root) for saved in kept]
        node.meta.update(val=running.fake_note(fakes, labels), partitioner_tag="is_forward")  # type: ignore[arg-type]
        return node

    def _join(self, note: fx.Node | None) -> None:
        """The outputs of the forward and the inputs of the backward, in one order."""
        graphs = self.graphs
        extra = [part for part, _ in self.extra]
        if note is not None:
            at = self.graphs.backward.find_nodes(op="placeholder")
            first = next(n for n in at if isinstance(n.meta.get("val"), Tensor))
            with graphs.backward.inserting_before(first):
                self._placeholder("lowtide_note", note)
            extra = [note, *extra]
        results, given = graphs.results, graphs.output.meta.get("desc")
        notes = list(given or [None] * len(results))
        made, described = results[: graphs.returned] + extra, notes[: graphs.returned]
        saved = list(zip(results, notes, strict=True))[graphs.returned :]
        described += [next(note for node, note in saved if graphs.is_saved(node))] * len(extra)
        for node, description in saved:
            for part in self.parts.get(node, [node]) if isinstance(node, fx.Node) else [node]:
                made.append(part)
                described.append(description)
        graphs.output.args = (tuple(made),)
        if given is not None:
            graphs.output.meta["desc"] = described


def _described(node: fx.Node, value: Any) -> fx.Node:
    node.meta.update(val=value, autograd_backward=True, partitioner_tag="is_backward")
    return node


def _band(bit: fx.Node) -> Mask:
    """Which values one of the activations of which one bit is read lets pass; as in graph/rules.py."""
    op = op_of(bit)
    if op == "threshold_backward":
        return Mask(float(bit.args[2]))  # type: ignore[arg-type]
    if op == "hardtanh_backward":
        return Mask(float(bit.args[2]), float(bit.args[3]), nan=False)  # type: ignore[arg-type]
    if op == "hardsigmoid_backward":
        return Mask(-3.0, 3.0, nan=False)
    return Mask(nan=False)
