"""Twins for every method: ops that keep much more than their backward has to read, or take longer than they must.

- A recurrent layer keeps its gates, or an opaque workspace, for every step in time. Its twin keeps the layer's input
  and runs the layer again in backward, one layer after the other, so that one workspace is there at a time.
- ``relu`` reads a sign for each value. Its twin takes the bits as they are stored, where torch's own backward reads
  them spread over a tensor of the size of the result.
- ``prelu`` reads the sign of its input for one gradient and the values for another. Its twin saves both apart: the
  sign takes one bit and is exact, and noise in the values stays in the gradient of the slope.
- ``amax``, ``maximum`` and a scattered maximum compare values. Their twins save the answers, one bit each.
- ``batch_norm`` in training waits on the CPU for one addition after the other, ``max_pool2d`` compares one value at a
  time, and dropout draws one random number at a time. Kernels of ours give the same bits in a fraction of the time, and
  torch's own nodes are made.

Forward is the op itself. Each backward is written in ops that can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from .. import kernels
from ..codecs import FLOATS
from ..kernels import ops
from . import capture

Grads = tuple[Tensor | None, ...]
RECURRENT = "Recurrent"
"""The op of the twin of a recurrent layer, as sites name it."""


def thriftier(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """A twin of this call of torch, or None. Whatever is unusual gets None."""
    find = _TWINS.get(func) if type(func) in _CALLABLE else None
    return None if find is None else find(func, args, kwargs)


def thriftier_and_exact(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """The same without recurrent layers: a second run of an LSTM may round differently in the last place."""
    return None if type(func) in _CALLABLE and _TWINS.get(func) is _recurrent else thriftier(func, args, kwargs)


def _usual(*tensors: Tensor) -> bool:
    """Plain floats of one type and device, of which one gets a gradient, in a call that autograd records as usual."""
    first = tensors[0]
    return (
        capture.is_ordinary_call()
        and all(map(capture.is_plain, tensors))
        and any(t.requires_grad for t in tensors)
        and first.dtype in FLOATS
        and all(t.dtype == first.dtype and t.device == first.device for t in tensors)
        and not torch.is_autocast_enabled(first.device.type)
    )


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any], *names: str, **defaults: Any) -> dict[str, Any] | None:
    """The arguments by name; ``input`` may be called so or ``self``. None if they are others than these."""
    if len(args) > len(names):
        return None
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    return given if given.keys() == set(names) else None


def _applied(function: Any, *args: Any) -> Any:
    return function.apply(*args)


# ---------------------------------------------------------------- recurrent layers


def _recurrent(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """``(input, hx, weights, biases, layers, dropout, train, bidirectional, batch_first)``, or of a packed sequence."""
    if kwargs or len(args) != 9 or not isinstance(args[0], Tensor):
        return None
    packed = isinstance(args[1], Tensor) and not args[1].is_floating_point()
    x, sizes, hx, weights, *rest = args if packed else (args[0], None, *args[1:])
    biases, layers, dropout, train, bidirectional = rest[:5]
    batch_first = False if packed else rest[5]
    states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    if not x.is_cpu or not _usual(x, *states, *weights) or len(weights) % (layers * (2 if bidirectional else 1)):
        return None
    count, many = len(weights) // layers, 2 if bidirectional else 1
    if count > _MOST_WEIGHTS or any(state.shape[0] != layers * many for state in states):
        return None

    def layer(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        first = states[0] if isinstance(hx, Tensor) else tuple(states)
        middle = (first, list(weights), biases, 1, 0.0, train, bidirectional)
        found = func(x, *middle, batch_first) if sizes is None else func(x, sizes, *middle)
        return tuple(found)

    def run(*_args: Any, **_kwargs: Any) -> tuple[Tensor, ...]:
        result, ends = x, []
        for i in range(layers):
            own = [state[i * many : (i + 1) * many] for state in states]
            cx = own[1] if len(own) > 1 else x.new_empty(0)
            result, *end = _applied(Recurrent, result, own[0], cx, *weights[i * count : (i + 1) * count], layer)
            ends.append(end)
            if dropout and train and i < layers - 1:
                result = torch.dropout(result, dropout, True)
        return (result, *[parts[0] if layers == 1 else torch.cat(parts) for parts in zip(*ends, strict=True)])

    return run


_MOST_WEIGHTS = 10
"""Of one layer: four in each direction, and a projection."""


class Recurrent(torch.autograd.Function):
    """A layer of an LSTM, GRU or RNN that is run again in backward."""

    lowtide_names: ClassVar[tuple[str, ...]] = (
        *(RECURRENT, "input", "hx", "cx"),
        *(f"weight{i}" for i in range(_MOST_WEIGHTS)),
    )

    @staticmethod
    def forward(ctx: Any, x: Tensor, hx: Tensor, cx: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """The layer itself, which is the last of ``rest``, behind its weights; an empty ``cx`` stands for none."""
        *weights, layer = rest
        ctx.save_for_backward(x, hx, cx, *weights)
        ctx.set_materialize_grads(False)
        ctx.layer = layer
        found: tuple[Tensor, ...] = layer(x, [hx, cx] if cx.numel() else [hx], weights)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        """Run the layer again, and back through it."""
        twice = torch.is_grad_enabled()
        wanted = ctx.needs_input_grad[:-1]
        with torch.enable_grad():
            read = [
                t if twice else t.detach().requires_grad_(needed)
                for t, needed in zip(ctx.saved_tensors, wanted, strict=True)
            ]
            x, hx, cx, *weights = read
            results = ctx.layer(x, [hx, cx] if cx.numel() else [hx], weights)
            pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
            asked = [i for i, needed in enumerate(wanted) if needed]
            found = torch.autograd.grad(
                [r for r, _ in pairs],
                [read[i] for i in asked],
                [g for _, g in pairs],
                create_graph=twice,
                allow_unused=True,
            )
        result: list[Tensor | None] = [None] * (len(wanted) + 1)
        for i, gradient in zip(asked, found, strict=True):
            result[i] = gradient
        return tuple(result)


# ---------------------------------------------------------------- a sign


def _relu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    given = _given(args, kwargs, "input", "inplace", inplace=func in _RELU_IN_PLACE)
    x = None if given is None else given["input"]
    if given is None or not isinstance(x, Tensor) or x.numel() < _LEAST_RELU or x.dtype not in FLOATS:
        return None
    if not (capture.is_ordinary_call() and capture.is_plain(x) and x.requires_grad):
        return None
    if given["inplace"] and (x.is_leaf or capture.base_of(x) is not None):
        return None  # torch complains of the one, and gives the other's base a history of its own
    return lambda *_args, **_kwargs: _applied(Rectified, x, bool(given["inplace"]))


_RELU_IN_PLACE = (torch.relu_, Tensor.relu_)
_LEAST_RELU = 1 << 14
"""Values below which a function of Python costs more than its backward saves."""


class Rectified(torch.autograd.Function):
    """``relu``, whose backward reads the packed bits of a mask, if that is what is left of its result."""

    lowtide_names: ClassVar[tuple[str, ...]] = ("Relu", "result")

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        """The op itself."""
        if inplace:
            ctx.mark_dirty(x)
        found = None
        if x.is_cpu and capture.has_no_modes() and not capture.hooks_at_work():
            kernel = kernels.like_torch("relu")
            found = None if kernel is None else kernel(x, x if inplace else None)
        if found is None:
            result = torch.relu_(x) if inplace else torch.relu(x)
        else:
            result, ctx.mask = found  # for the session, which takes it at once
            if inplace:
                torch.autograd.graph.increment_version(x)  # as the operator does
        ctx.save_for_backward(result)
        ctx.form = result.shape, result.stride()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        """Zero where the result is not above zero, as autograd has it."""
        (kept,) = ctx.saved_tensors
        if kept.dtype != torch.uint8:
            return torch.ops.aten.threshold_backward(grad, kept, 0), None
        shape, stride = ctx.form
        numel = grad.numel()
        if grad.stride() == stride and not torch.is_grad_enabled():
            # Compiled autograd traces this, and would ask the tensors of its tracing.
            alone = grad.dtype.itemsize in (2, 4) and not torch.compiler.is_compiling()
            alone = alone and capture.owners(grad) == capture.sole_gradient()
            flat, mask = grad.as_strided((numel,), (1,)), kept.detach()
            if alone:
                ops.mask_values_(flat, mask)
                return grad, None
            return ops.mask_values(flat, mask).as_strided(shape, stride), None
        passed = ops.unpack_band(kept.detach(), numel, torch.bool, 1.0, 0.0).as_strided(shape, stride)
        return torch.where(passed, grad, 0.0), None


# ---------------------------------------------------------------- a slope that learns


def _prelu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    if kwargs or len(args) != 2 or not all(isinstance(a, Tensor) for a in args) or not _usual(*args):
        return None
    x, weight = args
    if weight.dim() > 1 or x.dim() < 1 or (weight.numel() > 1 and (x.dim() < 2 or weight.numel() != x.shape[1])):
        return None
    return lambda *_args, **_kwargs: _applied(Prelu, x, weight)


class Prelu(torch.autograd.Function):
    """``prelu``, whose backward reads the sign of its input and its values apart."""

    lowtide_names: ClassVar[tuple[str, ...]] = ("PreluKernel", "sign", "values", "weight")

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """The op itself."""
        ctx.save_for_backward(x, x if ctx.needs_input_grad[1] else None, weight)
        return torch.prelu(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        """Where the input is above zero the gradient passes; elsewhere the slope multiplies it."""
        sign, values, weight = ctx.saved_tensors
        above = sign > 0
        slope = weight.view(-1, *[1] * (grad.dim() - 2)) if weight.numel() > 1 else weight
        for_x = torch.where(above, grad, slope * grad) if ctx.needs_input_grad[0] else None
        for_weight = None
        if values is not None:
            below = torch.where(above, 0.0, values * grad)
            for_weight = below.sum_to_size(slope.shape if weight.numel() > 1 else [1] * grad.dim()).view(weight.shape)
        return for_x, for_weight


# ---------------------------------------------------------------- comparisons


def _amax(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    given = _given(args, kwargs, "input", "dim", "keepdim", dim=(), keepdim=False)
    if given is None or not isinstance(given["input"], Tensor) or not _usual(given["input"]):
        return None
    x, dim = given["input"], given["dim"]
    dims = [dim] if isinstance(dim, int) else list(dim)
    dims = [d % x.dim() for d in dims] if dims and x.dim() else list(range(x.dim()))
    return lambda *_args, **_kwargs: _applied(Extreme, x, func, dims, given["keepdim"])


class Extreme(torch.autograd.Function):
    """``amax`` or ``amin``, which saves where its result was found."""

    lowtide_names: ClassVar[tuple[str, ...]] = ("Amax", "places")

    @staticmethod
    def forward(ctx: Any, x: Tensor, func: Callable[..., Tensor], dims: list[int], keepdim: bool) -> Tensor:
        """The op itself."""
        kept = func(x, dims, True)
        ctx.save_for_backward(kept == x)
        ctx.dims, ctx.keepdim = dims, keepdim
        return kept if keepdim or not dims else func(x, dims, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        """Equal shares for all places of the result, as autograd has it."""
        (places,) = ctx.saved_tensors
        if not ctx.keepdim:
            for d in sorted(ctx.dims):
                grad = grad.unsqueeze(d)
        found = grad * places
        return (found / places.sum(ctx.dims, keepdim=True) if ctx.dims else found, None, None, None)


def _maximum(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    if kwargs or len(args) != 2 or not all(isinstance(a, Tensor) for a in args) or not _usual(*args):
        return None
    is_maximum = func in (torch.maximum, Tensor.maximum)
    return lambda *_args, **_kwargs: _applied(Larger, *args, func, is_maximum)


class Larger(torch.autograd.Function):
    """``maximum`` or ``minimum``, which saves which of both it was."""

    lowtide_names: ClassVar[tuple[str, ...]] = ("Maximum", "not_below", "not_above")

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, func: Callable[..., Tensor], is_maximum: bool) -> Tensor:
        """The op itself."""
        ctx.save_for_backward(a >= b, a <= b)
        ctx.shapes, ctx.is_maximum = (a.shape, b.shape), is_maximum
        return func(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        """Half for each where both are equal; all for both where one is NaN, as autograd has it."""
        not_below, not_above = ctx.saved_tensors
        grad = torch.where(not_below & not_above, grad / 2, grad)
        below, above = not_above & ~not_below, not_below & ~not_above
        if not ctx.is_maximum:
            below, above = above, below
        found = [
            grad.masked_fill(zero, 0).sum_to_size(shape) if needed else None
            for zero, shape, needed in zip((below, above), ctx.shapes, ctx.needs_input_grad[:2], strict=True)
        ]
        return (*found, None, None)


_SCATTER = ("input", "dim", "index", "src", "reduce", "include_self")


def _scattered(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    given = _given(args, kwargs, *_SCATTER, include_self=True)
    if given is None or given["reduce"] not in ("amax", "amin"):
        return None
    into, dim, index, src, reduce, include = (given[name] for name in _SCATTER)
    if not isinstance(src, Tensor) or not _usual(into, src) or src.shape != index.shape:
        return None
    in_place = func is Tensor.scatter_reduce_
    if in_place and into.requires_grad:
        return None
    return lambda *_args, **_kwargs: _applied(ScatteredExtreme, into, src, index, dim, reduce, include, in_place)


class ScatteredExtreme(torch.autograd.Function):
    """``scatter_reduce`` with a maximum or minimum, which saves where its results were found."""

    lowtide_names: ClassVar[tuple[str, ...]] = ("ScatterReduce", "index", "own", "found")

    @staticmethod
    def forward(
        ctx: Any, into: Tensor, src: Tensor, index: Tensor, dim: int, reduce: str, include: bool, in_place: bool
    ) -> Tensor:
        """The op itself."""
        if in_place:
            before = into.clone()
            result = into.scatter_reduce_(dim, index, src, reduce, include_self=include)
            ctx.mark_dirty(into)
        else:
            before = into
            result = into.scatter_reduce(dim, index, src, reduce, include_self=include)
        ctx.save_for_backward(index, before == result, src == result.gather(dim, index))
        ctx.dim, ctx.include = dim, include
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        """Equal shares for all places of a result, as autograd has it."""
        index, own, found = ctx.saved_tensors
        counted = own.to(grad.dtype).scatter_add(ctx.dim, index, found.to(grad.dtype))
        share = grad / counted
        for_into = for_src = None
        if ctx.needs_input_grad[0]:
            for_into = own * share
            for_into = for_into if ctx.include else for_into.scatter(ctx.dim, index, 0)
        if ctx.needs_input_grad[1]:
            for_src = found * share.gather(ctx.dim, index)
        return for_into, for_src, None, None, None, None, None


# ---------------------------------------------------------------- the same, faster


def _faster(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    x = args[0] if args else kwargs.get("input")
    kinds = _SIMPLE if func in _POOLING else (torch.float32,)
    if type(x) is not Tensor or x.numel() < _LEAST_FASTER or x.dtype not in kinds or not x.is_cpu:
        return None
    if not (x.is_contiguous() and capture.is_ordinary_call() and capture.has_no_modes() and capture.is_plain(x)):
        return None

    return _with_faster(func, args, kwargs)


def _with_faster(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    def run(*_args: Any, **_kwargs: Any) -> Any:
        with Faster():
            return func(*args, **kwargs)

    return run


def _dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Dropout, or attention that drops some of its weights."""
    name, place = ("dropout_p", 4) if func is functional.scaled_dot_product_attention else ("p", 1)
    x = args[0] if args else kwargs.get("input", kwargs.get("query"))
    if not (args[place] if len(args) > place else kwargs.get(name, place == 1)):
        return None
    if type(x) is not Tensor or x.numel() < _LEAST_FASTER or x.dtype not in _SIMPLE or not x.is_cpu:
        return None
    if not (capture.is_ordinary_call() and capture.has_no_modes() and capture.is_plain(x)):
        return None
    return _with_faster(func, args, kwargs)


_LEAST_FASTER = 1 << 16
"""Values below which a mode of Python costs more than it saves: about 30 microseconds."""
_POOLING = (functional.max_pool2d, torch.max_pool2d)
_SIMPLE = (torch.float32, torch.bfloat16, torch.float16)
_FASTER = {
    torch.ops.aten.native_batch_norm.default: "native_batch_norm",
    torch.ops.aten.max_pool2d_with_indices.default: "max_pool2d_with_indices",
    torch.ops.aten.bernoulli_.float: "bernoulli_",
}


class Faster(capture.DispatchMode):
    """Inside, kernels of ours stand for some operators of torch, with the same bits. Nodes are those of torch."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Every other call is made as it is."""
        name = None if kwargs else _FASTER.get(func)
        kernel = None if name is None else kernels.like_torch(name)
        found = None if kernel is None else kernel(*args)
        return func(*args, **kwargs or {}) if found is None else found


_TWINS: dict[Any, Callable[..., Callable[..., Any] | None]] = {
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    **dict.fromkeys((functional.relu, torch.relu, Tensor.relu, *_RELU_IN_PLACE), _relu),
    **dict.fromkeys((functional.batch_norm, torch.batch_norm, *_POOLING), _faster),
    **dict.fromkeys((functional.dropout, torch.dropout, functional.scaled_dot_product_attention), _dropout),
    torch.prelu: _prelu,
    **dict.fromkeys((torch.amax, Tensor.amax, torch.amin, Tensor.amin), _amax),
    **dict.fromkeys((torch.maximum, Tensor.maximum, torch.minimum, Tensor.minimum), _maximum),
    **dict.fromkeys((torch.scatter_reduce, Tensor.scatter_reduce, Tensor.scatter_reduce_), _scattered),
}
_CALLABLE = {type(func) for func in _TWINS}
