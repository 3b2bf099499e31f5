"""Which autograd node saved which tensor, in which module. Private names of torch are used here, and in ``shards``.

How saved tensors are seen
    A ``TorchFunctionMode`` meets each torch call of the forward. When a call returns, the new nodes
    behind its result are walked, and each saved tensor is offered to the session under its exact names.
    The session may put a hook on that one slot. A slot without a hook stays with autograd, which checks
    it for changes in place; a hook would switch that check off.
    Module hooks supply the path of the module. They also catch nodes whose results no torch call has met
    (custom functions). Nodes are marked in ``node.metadata``; no reference to them is held.

How changes are seen
    Each change in place moves the version of a tensor, which its views and ``detach()`` share. ``.data``
    has a version of its own, so the call of ``.data`` itself is noticed. Memory that somebody reached
    before the session, through numpy or in code that makes no torch calls, can change unseen; autograd
    does not see that either.

What the session relies on, tested by :func:`probe`
    ``node._raw_saved_<slot>.register_hooks`` and ``node._saved_<slot>``: without them nothing can be
    compressed, and the report says so.
    ``SavedTensor.unpack_hook`` tells whose hooks hold a slot. Without it the stack of default hooks
    is consulted while the node is new.
    ``torch._C._storage_Use_Count`` tells whether only the graph keeps a storage. Without it a tensor
    is encoded as soon as it is saved.
    ``Tensor._use_count`` tells, beside that, whether a gradient is held by anybody else. It is not part of the probe:
    without it, or where it tells nothing, gradients are never replaced in place.
    ``torch._subclasses.FakeTensor`` marks tensors without data, whose storages are as those of real ones. Without
    it they are listed and kept, like any subclass.

How checkpoints are seen
    What a region of ``torch.utils.checkpoint`` would save is held by its hooks, and is made again in backward. What
    the checkpoint itself keeps, the inputs of the region and what a selective policy names, is its *boundary*. It is
    offered when the first slot of the region is met, because the hooks of that slot lead to the region's frame.
"""

from __future__ import annotations

import _thread
import contextlib
import copy
import ctypes
import functools
import importlib
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from . import shards

_overrides: Any = torch.overrides
_MARK = "lowtide"
_MADE = "lowtide made"
_FAITHFUL = "lowtide faithful"
_BIAS = "lowtide bias"
_HELD = "lowtide held"
_RAW = "_raw_saved_"
_PARAMETER_NODE = "AccumulateGrad"
_TAKE_LESS = {("Convolution", "input"), ("Relu", "result")}
"""Slots of twins whose backward takes less than the tensor, see ``Slot.twin``."""
_FORMS = frozenset(
    f"{name}Backward{variant}"
    for name in (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Expand"),
        *("Slice", "Select", "Split", "SplitWithSizes", "Narrow", "AsStrided", "Alias", "Clone", "ToCopy"),
    )
    for variant in (0, 1, 2)
)
_DATA: Any = Tensor.data
_GETTER = type(_DATA.__get__)
_FAKE: Any = getattr(torch, "_subclasses", None)
_FakeTensor: Any = getattr(_FAKE, "FakeTensor", type(None))
_CHECKPOINT: Any = importlib.import_module("torch.utils.checkpoint")
_TREES: Any = importlib.import_module("torch.utils._pytree")
_DISPATCH: Any = importlib.import_module("torch.utils._python_dispatch")
_REGION = "Checkpoint"
_REENTRANT: Any = getattr(_CHECKPOINT.CheckpointFunction, "_backward_cls", None)
_NO_GRADIENT = "it gets no gradient, so it may be a mask or positions, which must be exact"
_KEYWORD = "a keyword argument of a checkpoint, which torch keeps as it is"
_MUTABLE = "a selective checkpoint keeps it and lets it be changed"
_STATISTIC = "a further result of an operator, such as a statistic"
_PICKING = {
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        "argmax",
        "argmin",
        "argsort",
        "item",
        "masked_select",
        "multinomial",
        "nonzero",
        "sort",
        "tolist",
        "topk",
    )
    if hasattr(owner, name)
}
BOUNDARY_CODEC = "lowtide_codec"
"""The attribute of a checkpointed function that names the codec for its inputs."""


class DispatchMode(_DISPATCH.TorchDispatchMode):  # type: ignore[misc]
    """A context that sees every call of an operator, those of backward included.

    Torch keeps its compiler away from what a mode does, and imports the compiler for that at the first call, which
    takes seconds and tens of megabytes. Where nobody has imported it there is nothing to be kept away.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__torch_dispatch__" in cls.__dict__:
            cls.__torch_dispatch__ = _untraced(cls.__torch_dispatch__)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which torch's compiler does not look into if there is one."""
    disabled = cast(Any, torch)._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return call


class Site(NamedTuple):
    """Where a tensor is saved: stable from step to step as long as the module does the same things."""

    module: str
    op: str
    slot: str
    ordinal: int

    def __str__(self) -> str:
        tail = f"#{self.ordinal}" if self.ordinal else ""
        return f"{self.module or '(model)'}: {self.op}.{self.slot}{tail}"


class Boundary(NamedTuple):
    """That a checkpoint keeps a tensor, to make everything else in its region again."""

    exact: str | None
    """Why it has to stay as it is, if it has to."""
    codec: Any
    """The codec that the caller of the checkpoint asked for, if any."""


class Slot(NamedTuple):
    """One saved tensor, for as long as the session looks at it.

    ``tensor`` is None if other hooks hold the slot: reading it would run them. ``storage`` is None for tensors
    without a plain storage of their own (sparse, nested, subclasses).
    """

    site: Site
    tensor: Any
    storage: Any
    node: Any
    call: str
    saved: Any
    twin: bool = False
    """Is the node a twin whose backward also takes less: a convolution the means of blocks, a ReLU the packed bits?"""
    boundary: Boundary | None = None
    """Is it kept by a checkpoint? Then ``node`` is the first of the region that was met, or the checkpoint's own."""
    is_part: bool = False
    """Is ``tensor`` the part that this process holds of a tensor that several have (see ``shards``)?"""

    def needs_grad(self, edge: int) -> bool:
        """Does backward have to produce the gradient of the op's ``edge``-th differentiable input?"""
        return self.node.next_functions[edge][0] is not None

    def is_of_leaf(self, edge: int) -> bool:
        """Is the op's ``edge``-th differentiable input a leaf, or merely another form of one: a view, a cast?"""
        node = parent(self.node, edge)
        while node is not None and type(node).__name__ in _FORMS:
            node = parent(node, 0)
        return node is None or type(node).__name__ == _PARAMETER_NODE

    def is_of(self, function: type) -> bool:
        """Was the tensor saved by this ``autograd.Function``, and not by another of the same name?"""
        return getattr(type(self.node), "_forward_cls", None) is function

    @property
    def package(self) -> str:
        """The package that defines the ``autograd.Function``; empty for torch's own ops."""
        made_by = getattr(type(self.node), "_forward_cls", None)
        return "" if made_by is None else str(made_by.__module__).partition(".")[0]

    def scalar(self, name: str) -> Any:
        """A number the node saved beside its tensors, such as ``min_val`` or ``kernel_size``."""
        return getattr(self.node, f"_saved_{name}")

    @property
    def dim(self) -> int:
        """The dimension along which the op works, of one of torch's own nodes or of a twin."""
        node = self.node
        found: int = node.dim if hasattr(node, "dim") else self.scalar("dim")
        return found

    def result_shape(self, output: int) -> tuple[int, ...]:
        """The shape of one of the op's results; empty for a result that was not made."""
        return tuple(self.node._input_metadata[output].shape)

    def watch(self, see: Callable[[Tensor], None]) -> None:
        """Show backward's gradient of the op's first output to ``see``, which must not hold the node."""

        def look(gradients: tuple[Tensor | None, ...]) -> None:
            if gradients[0] is not None:
                see(gradients[0])

        self.node.register_prehook(look)

    def watch_inputs(self, see: Callable[[tuple[Tensor | None, ...], tuple[Tensor | None, ...]], None]) -> None:
        """Show the gradients of the op's inputs and of its outputs to ``see``, which must not hold the node."""
        self.node.register_hook(lambda inputs, outputs: see(inputs, outputs))

    def watch_end(self, see: Callable[[], None]) -> None:
        """Call ``see`` whenever the op's backward has ended."""
        self.node.register_hook(lambda inputs, outputs: see())

    @property
    def number(self) -> int:
        """The number of the node among those of its thread."""
        number: int = self.node._sequence_nr()
        return number

    def watch_maker(self, edge: int, see: Callable[[Tensor], None]) -> bool:
        """Show all that arrives at the maker of the op's ``edge``-th input to ``see``; False if it is a leaf."""
        maker, number = self.node.next_functions[edge]
        if maker is None or self.is_of_leaf(edge):
            return False

        def look(gradients: tuple[Tensor | None, ...]) -> None:
            arrived = gradients[number] if number < len(gradients) else None
            if arrived is not None:
                see(arrived)

        maker.register_prehook(look)
        return True

    def try_before(self, attempt: Callable[[Callable[[], tuple[Tensor | None, ...]]], None]) -> None:
        """Before the op's backward: give ``attempt`` a function that runs it aside and returns its results."""

        own = self.package == __package__.partition(".")[0]

        def look(gradients: tuple[Tensor | None, ...]) -> None:
            node: Any = torch._C._current_autograd_node()
            if not callable(node) and not own and any(g is None for g in gradients):
                return  # autograd would make zeros of them, unless the function has asked it not to

            def run() -> tuple[Tensor | None, ...]:
                if callable(node):
                    results = node(*gradients)
                    return results if isinstance(results, tuple) else (results,)
                # A function of Python may write into what it is given.
                results = node.apply(*[g if own or g is None else g.clone() for g in gradients])
                results = results if isinstance(results, tuple) else (results,)
                inputs = len(node.next_functions)
                # It returns a value for each argument, and only tensors are inputs. Those of twins come first.
                return results[:inputs] if own or len(results) == inputs else (None,) * inputs

            attempt(run)

        self.node.register_prehook(look)

    def remember(self, value: Any) -> None:
        """Leave with the node a weak reference to what stands for this slot, because nodes outlive what they saved."""
        notes = self.node.metadata
        if notes[_MARK] is None:
            notes[_MARK] = {}
        notes[_MARK][self.site.slot] = weakref.ref(value)


class _Holder:
    """The holder of a saved tensor of which we store a part."""

    def __init__(self, saved: Any, whole: Callable[[Tensor], Any]) -> None:
        self._saved = saved
        self._whole = whole

    def register_hooks(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """As torch's own holder does, with the whole given back to backward."""
        whole = self._whole
        self._saved.register_hooks(pack, lambda packed: whole(unpack(packed)))


def changed_in_place(shape: tuple[int, ...]) -> RuntimeError:
    """The error that autograd itself raises for such a tensor."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a saved tensor of shape {tuple(shape)} changed after the forward that saved it"
    )


@dataclass(frozen=True, slots=True)
class Abilities:
    """What this version of torch shows; ``sole`` is the use count of a storage that has one tensor."""

    slots: bool
    foreign_hooks: bool
    sole: int | None


def probe() -> Abilities:
    """Try every private name on a tiny graph, once for each process unless it fails."""
    try:
        return _probed()
    except (AttributeError, RuntimeError, TypeError):
        return Abilities(False, False, None)


@lru_cache(maxsize=1)
def _probed() -> Abilities:
    """What a thread of its own finds.

    Gradients that are off, inference mode, a device for new tensors, hooks and transforms of others all belong to a
    thread, so a new one has none of them. An exception is not remembered, unlike a result.
    """
    found: list[Abilities | Exception] = []

    def run() -> None:
        try:
            found.append(Abilities(*_try_slots(), _sole_count()))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _try_slots() -> tuple[bool, bool]:
    """Can a slot be read and hooked? Do slots show whose hooks hold them?"""
    x = torch.tensor([0.5, -0.5], requires_grad=True, dtype=torch.float32, device="cpu")
    y = torch.nn.functional.gelu(x * 1.0)
    node: Any = y.grad_fn
    node.metadata[_MARK] = None
    saved = node._raw_saved_self
    foreign = hasattr(saved, "unpack_hook") and saved.unpack_hook is None
    value = node._saved_self
    saved.register_hooks(lambda t: t.detach().clone() * 0 + 3.0, lambda t: t)
    (grad,) = torch.autograd.grad(y.sum(), x)
    slots = bool(torch.equal(value, x)) and bool((grad - 1.0).abs().max() < 0.05)
    return slots and node._sequence_nr() >= 0 and _sequence_number() >= 0, foreign


def _sole_count() -> int | None:
    try:
        t = torch.zeros(1, device="cpu")
        sole = use_count(storage_id(t.untyped_storage()))
        other = t.detach()
        two = use_count(storage_id(t.untyped_storage()))
        del other
        return sole if two == sole + 1 and use_count(storage_id(t.untyped_storage())) == sole else None
    except (AttributeError, RuntimeError, TypeError):
        return None


def _sequence_number() -> int:
    """The number that the next node of this thread will get."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda identity: 0)
"""How many owners a storage has; compare with ``Abilities.sole``."""


def storage_id(storage: Any) -> int:
    """The identity of a storage. Another storage may have it once this one is gone."""
    identity: int = storage._cdata
    return identity


def node_at_work() -> int:
    """The number of the node whose backward runs in this thread; -1 if none does."""
    node: Any = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def in_backward() -> bool:
    """Is autograd at work in this thread? Then a forward is a recomputation, such as checkpoint's."""
    return torch._C._current_graph_task_id() != -1


def after_backward(act: Callable[[], None]) -> None:
    """Run ``act`` when the backward that is under way has computed all gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(act)


@contextlib.contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, no hook that was registered on one of ``tensors`` runs; afterwards all are there again, also if it fails.

    The dictionary of a tensor's hooks stays the same object, because the handles that users hold refer to it.
    """
    tensors = list(tensors)
    kept: list[dict[int, Any]] = [dict(tensor._backward_hooks or {}) for tensor in tensors]
    try:
        for tensor, hooks in zip(tensors, kept, strict=True):
            if hooks:
                tensor._backward_hooks.clear()  # type: ignore[union-attr]
        yield
    finally:
        for tensor, hooks in zip(tensors, kept, strict=True):
            if tensor._backward_hooks is not None:
                tensor._backward_hooks.clear()  # of what was registered inside
                tensor._backward_hooks.update(hooks)


def version_of(tensor: Tensor) -> int:
    """How many times the tensor was changed in place; all its views share the count."""
    return tensor._version


def share_version(tensor: Tensor, memory: Tensor) -> Tensor:
    """``memory`` with the version of ``tensor``: it shows changes of that one without keeping its storage."""
    alias = tensor.detach()
    alias.data = memory
    return alias


def has_storage(tensor: Any) -> bool:
    """Is it a strided tensor of torch's own kinds? Fake ones are; sparse ones, nested ones and subclasses are not."""
    kind = type(tensor)
    if kind is not Tensor and kind is not nn.Parameter and (kind is not _FakeTensor or _is_traced()):
        return False
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_traced() -> bool:
    """Does somebody record the calls on fake tensors, to run them on real ones later?"""
    tracer: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")  # not loaded with torch itself
    return tracer is not None and tracer.get_proxy_mode() is not None


def is_recorded() -> bool:
    """Does a tracer record the calls of this thread? What it recorded would contain ours."""
    return torch._C._get_tracing_state() is not None or _is_traced()


def has_data(tensor: Tensor) -> bool:
    """Are there values behind the tensor? Not in a fake one, and not on the meta device."""
    return not (isinstance(tensor, _FakeTensor) or tensor.is_meta)


def is_compiled(model: nn.Module) -> bool:
    """Did a compiler make this module (``torch.compile``, ``lowtide.compile``), or ``module.compile()`` compile it?"""
    made = type(model).__name__ in ("OptimizedModule", "Compiled") and isinstance(
        model._modules.get("_orig_mod"), nn.Module
    )
    return made or getattr(model, "_compiled_call_impl", None) is not None


NEEDS_DATA: tuple[type[Exception], ...] = tuple(
    kind
    for name in ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedFakeTensorException")
    if (kind := getattr(getattr(_FAKE, "fake_tensor", None), name, None)) is not None
)
"""What is raised where a call on tensors without data would have to know values."""


@contextlib.contextmanager
def fakes() -> Iterator[tuple[Callable[[nn.Module], nn.Module], Callable[[Tensor], Tensor]]]:
    """Inside, new tensors have a form and no data. Gives what makes such a copy of a module, and of a tensor."""
    mode = _FAKE.FakeTensorMode(allow_non_fake_inputs=True)
    copying: Any = _FAKE.fake_tensor.FakeCopyMode

    def copy_module(module: nn.Module) -> nn.Module:
        with copying(mode):
            return copy.deepcopy(module)

    def copy_tensor(tensor: Tensor) -> Tensor:
        if has_data(tensor):
            copied: Tensor = mode.from_tensor(tensor)
            return copied
        place = "cpu" if tensor.device.type == "meta" else tensor.device  # perhaps a fake one of another context
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
        return like.requires_grad_(tensor.requires_grad)

    with mode:
        yield copy_module, copy_tensor


def is_lazy(tensor: Tensor) -> bool:
    """Are the values the negatives or conjugates of those in the storage? Shape, strides and offset do not tell."""
    return tensor.is_neg() or tensor.is_conj()


def is_plain(tensor: Any) -> bool:
    """Is it a strided tensor with a storage of its own, and no wrapper of torch.func or forward-mode dual?"""
    if not has_storage(tensor):
        return False
    dual: Any = torch.autograd.forward_ad.unpack_dual
    return storage_of(tensor) is not None and dual(tensor).tangent is None


def storage_of(tensor: Tensor) -> Any:
    """The storage of a tensor, or None for a wrapper of torch.func, which hides it."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold what a sparse one holds, its values first; the tensor itself if it is not sparse."""
    if tensor.layout is torch.strided:
        return [tensor]
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    return [tensor]


def is_ordinary_call() -> bool:
    """Does autograd record this call in the usual way: no compiler, no tracer, nobody else's saved-tensor hooks?"""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


def has_no_modes() -> bool:
    """Does nobody see the operators of this thread?"""
    return torch._C._len_torch_dispatch_stack() == 0


class Shell(Tensor):
    """A tensor without memory. What operators do with it is up to a subclass, by ``__torch_dispatch__``."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Shell:
        """One of this form."""
        made: Shell = Tensor._make_wrapper_subclass(cls, shape, strides=stride, dtype=dtype, device=device)
        return made

    def __init__(self, *_form: object) -> None:
        super().__init__()


Owners = tuple[int, int, int, int]
_UNKNOWN = (0, 0, 0, 0)
"""What no tensor has."""


def owners(tensor: Tensor) -> Owners | None:
    """How many references there are to a tensor in Python and in torch, and to its storage in Python and in torch.

    The first depends on who asks, so it tells something beside :func:`sole_gradient` or :func:`sole_operand` alone.
    None where it would tell nothing: for memory that is not torch's, or not this process's alone, and for devices,
    which may still read what nobody holds.
    """
    count = getattr(tensor, "_use_count", None)
    if type(tensor) is not Tensor or not tensor.is_cpu or count is None or storage_of(tensor) is None:
        return None
    storage = tensor.untyped_storage()
    if not storage.resizable() or storage.is_shared():
        return None
    return sys.getrefcount(tensor), count(), sys.getrefcount(storage), use_count(storage_id(storage))


def sole_gradient() -> Owners:
    """What :func:`owners` says in the backward of an ``autograd.Function`` of a gradient that nobody else holds.

    Such a gradient is gone when the function returns, so it may be changed. It is tried out once for each backward,
    because whoever watches operators may hold more.
    """
    return _sole(_LookFromFunction.applied, torch._C._current_graph_task_id())


def sole_operand() -> Owners:
    """What :func:`owners` says in ``__torch_dispatch__`` of the first operand of a node of torch; see above."""
    return _sole(_LookFromOperator.applied, torch._C._current_graph_task_id())


class _LookFromFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Owners | None]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(owners(grad))
        return grad * 2.0, None

    @classmethod
    def applied(cls, x: Tensor, seen: list[Owners | None]) -> Tensor:
        found: Tensor = cls.apply(x, seen)  # type: ignore[no-untyped-call]
        return found


class _LookFromOperator(Shell):
    seen: list[Owners | None]

    @classmethod
    def of(cls, seen: list[Owners | None]) -> _LookFromOperator:
        made = cls((2, 1, 2), (2, 2, 1), torch.float32, torch.device("cpu"))
        made.seen = seen
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls.of(args[0].seen)
        args[1].seen.append(owners(args[0]))
        return tuple(torch.zeros_like(args[0]) if wanted else None for wanted in args[-1])

    @classmethod
    def applied(cls, x: Tensor, seen: list[Owners | None]) -> Tensor:
        y: Tensor = torch.nn.functional.batch_norm(x, None, None, training=True)
        node: Any = y.grad_fn
        node._raw_saved_input.register_hooks(lambda _: None, lambda _: cls.of(seen))
        return y


_Applied = Callable[[Tensor, "list[Owners | None]"], Tensor]


@lru_cache(maxsize=4)
def _sole(applied: _Applied, task: int) -> Owners:
    """What is seen in this backward of a gradient that nobody else holds; nothing if it is no backward of torch's."""
    found = _looked(applied, (None,)) if task != -1 and _others_show(applied) else []
    return _UNKNOWN if not found or found[0] is None else found[0]


@lru_cache(maxsize=4)
def _others_show(applied: _Applied) -> bool:
    """Is anybody else seen who holds the gradient, a view of it, or its memory?"""
    held: list[Any] = []
    forms: tuple[Callable[[Tensor], Any], ...] = (
        *(lambda grad: grad, lambda grad: grad.view(-1)),
        *(lambda grad: grad.untyped_storage(), lambda grad: grad.detach()),
    )
    watching = [lambda grad, form=form: held.append(form(grad)) for form in forms]
    found = _looked(applied, (None, *watching, None))
    first, *others, last = found if len(found) == len(forms) + 2 else (None, None)
    return first is not None and first == last and first not in others


def _looked(applied: _Applied, watching: Iterable[Callable[[Tensor], Any] | None]) -> list[Owners | None]:
    """What is seen while something watches the gradient, in a thread that has no modes and hooks of others.

    It is none of ``threading``'s, which would note for ever that autograd's own threads had asked for it, and whose
    threads a debugger follows, which may hold what it sees.
    """
    seen: list[Owners | None] = []
    ended = _thread.allocate_lock()

    def run() -> None:
        try:
            for watch in watching:
                x = torch.ones(2, 1, 2, dtype=torch.float32, device="cpu", requires_grad=True)
                y = applied(x * 1.0, seen)
                if watch is not None:
                    y.register_hook(watch)  # type: ignore[no-untyped-call]
                (y * 2.0).sum().backward()  # type: ignore[no-untyped-call]
        except Exception:  # then nothing is known
            seen.clear()
        finally:
            ended.release()

    ended.acquire()
    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # there can be no more threads
        return seen
    ended.acquire()
    return seen


def replaced(kind: type[Tensor], function: Callable[[Any], Tensor], nested: Any) -> Any:
    """Nested tuples, lists and mappings with each tensor of a kind replaced by what the function makes of it."""
    return _TREES.tree_map_only(kind, function, nested)


def is_ordinary_backward() -> bool:
    """Does backward run as usual: once, outside of function transforms, and with no mode of others that sees operators?

    A mode of ours that knows what it sees says so.
    """
    modes = _DISPATCH._get_current_dispatch_mode_stack()
    return (
        not torch.is_grad_enabled()
        and all(getattr(mode, "knows_packed", False) for mode in modes)
        and torch._C._functorch.maybe_current_level() is None
    )


def saved(node: Any, name: str) -> Any:
    """What a node saved under a name. A tensor comes without its history: that of an output leads back to the node."""
    value = getattr(node, f"_saved_{name}")
    return value.detach() if isinstance(value, Tensor) else value


def weight_norm(v: Tensor, g: Tensor, dim: int) -> Tensor:
    """The op behind ``torch.nn.utils.parametrizations.weight_norm``."""
    result: tuple[Tensor, Tensor] = torch._weight_norm_interface(v, g, dim)
    return result[0]


def parent(node: Any, edge: int) -> Any:
    """The node that made an op's ``edge``-th differentiable input, or None if that input needs no gradient."""
    parents = node.next_functions
    return parents[edge][0] if edge < len(parents) else None


def stands_for(node: Any, slot: str) -> Any:
    """What :meth:`Slot.remember` left for a slot, or else its tensor; None if hooks of others hold that."""
    notes = node.metadata.get(_MARK)
    if notes and slot in notes:
        return notes[slot]()
    try:
        holder = getattr(node, _RAW + slot)
        return saved(node, slot) if probe().foreign_hooks and holder.unpack_hook is None else None
    except (AttributeError, RuntimeError):
        return None


def is_as_made(tensor: Tensor) -> bool:
    """Is it the first result of its node, with the values that the node made?

    Each change in place moves the version, through any view and through ``detach()``; ``.data`` does not, and takes the
    note away when it is called. Memory that somebody reached before, by ``.data`` or from numpy, does not show.
    """
    node: Any = tensor.grad_fn
    return node is not None and node.metadata.get(_MADE) == tensor._version and tensor.output_nr == 0


def read_what_was_made(node: Any) -> bool:
    """Did this ReLU, cast or addition read its inputs with the values that their own nodes had made?"""
    return _FAITHFUL in node.metadata


def remember_holder(made: Tensor, holder: Any) -> None:
    """Leave with the node that made a tensor a weak reference to what holds its values."""
    node: Any = made.grad_fn
    node.metadata[_HELD] = weakref.ref(holder)


def holder_of(node: Any) -> Any:
    """What :func:`remember_holder` left, if it still lives."""
    held = node.metadata.get(_HELD)
    return None if held is None else held()


def bias_of(node: Any) -> Tensor | None:
    """The bias of a batch norm, if it learns and has not changed since; the node itself does not keep it."""
    bias: Tensor | None = getattr(parent(node, 2), "variable", None)
    return bias if bias is not None and node.metadata.get(_BIAS) == bias._version else None


def is_parameter(tensor: Tensor) -> bool:
    """Is it a parameter, a leaf that gets a gradient, or a view of either (``Linear`` saves ``weight.t()``)?"""
    if isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
        return True
    base = tensor._base
    return base is not None and (isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad))


def modules_of(model: nn.Module) -> dict[nn.Module, str]:
    """Modules and their names as ``named_modules()`` gives them, in a tenth of its time."""
    names: dict[nn.Module, str] = {}
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module in names:
            continue
        names[module] = name
        start = f"{name}." if name else ""
        inside = [(start + own, child) for own, child in module._modules.items() if child is not None]
        waiting += reversed(inside)
    return names


def _storages_of(modules: Iterable[nn.Module]) -> dict[int, weakref.ref[Any]]:
    """The storages of the modules' parameters and buffers, by identity, for as long as they live."""
    found: dict[int, weakref.ref[Any]] = {}
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            for part in () if tensor is None else strided_parts(shards.local_of(tensor)):
                storage = storage_of(part) if has_storage(part) else None
                if storage is not None:
                    found[storage._cdata] = weakref.ref(storage)
    return found


def buffers_of(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    """A module's own buffers by name, those that are None included."""
    return list(module._buffers.items())


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of, if it is a view."""
    return tensor._base


def parameter_behind_cast(tensor: Tensor) -> tuple[Tensor, bool] | None:
    """The parameter that autocast copied to make ``tensor``, and whether the copy was transposed.

    Other leaves, such as inputs that get a gradient, are the user's, who may change them before backward.
    """
    node: Any = tensor.grad_fn
    if node is None or tensor._version != 0:  # changed in place since: no longer a mere copy
        return None
    transposed = node.name() == "TBackward0"
    if transposed:
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return None
    leaf = node.next_functions[0][0]
    if leaf is None or leaf.name() != f"torch::autograd::{_PARAMETER_NODE}":
        return None
    parameter = leaf.variable
    shape = parameter.shape[::-1] if transposed else parameter.shape
    return (parameter, transposed) if isinstance(parameter, nn.Parameter) and shape == tensor.shape else None


_SAMPLE = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FEW = 16
_INTEGERS: dict[int, Any] = {2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}


def some_values(tensor: Tensor) -> Tensor:
    """The bits of some values all over a tensor, which change with almost any change of the whole."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)].clone().view(_BITS[tensor.element_size()])


def few_values(tensor: Tensor) -> Tensor | list[int]:
    """The same of fewer values, for many tensors a step: numbers if they can be read from memory right away.

    Each value lies in another page of memory, and five operators of torch take longer than to read sixteen of them.
    """
    integer, count = _INTEGERS.get(tensor.element_size()), tensor.numel()
    if integer is None or not count or type(tensor) is not nn.Parameter or not tensor.is_cpu or not _fills(tensor):
        return some_values(tensor)
    values: list[int] = _row_of(integer, count).from_address(tensor.data_ptr())[:: max(1, count // _FEW)]
    return values


@lru_cache(maxsize=1024)
def _row_of(integer: Any, count: int) -> Any:
    """The type of so many integers in memory. Making one takes long, and leaves garbage for Python's collector."""
    return integer * count


def _fills(tensor: Tensor) -> bool:
    """Do its values lie one after the other, in the order of dimensions or with channels last?"""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def fingerprint(tensor: Tensor) -> int:
    """A number made of :func:`some_values`."""
    return hash((tuple(tensor.shape), *some_values(tensor).tolist()))


def _take_modes() -> list[Any]:
    """All function modes of this thread, from the lowest; none of them is on the stack then."""
    return [_overrides._pop_mode() for _ in range(_overrides._len_torch_function_stack())][::-1]


def _put_modes(modes: Iterable[Any]) -> None:
    """Put function modes on the stack, the first one lowest."""
    for mode in modes:
        _overrides._push_mode(mode)


def _default_device() -> Any:
    """The mode that serves ``torch.set_default_device``; it insists on being the lowest."""
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)


def region_of(saved: Any) -> Any:
    """The frame of the non-reentrant checkpoint whose hooks hold a slot; None if others hold it, or nobody."""
    hook = getattr(saved, "unpack_hook", None)
    if getattr(hook, "__globals__", None) is not vars(_CHECKPOINT):
        return None
    return _enclosed(hook, "frame")  # none while it recomputes: what is saved then is made to be read at once


def _enclosed(function: Any, name: str) -> Any:
    """A variable of its surroundings that a function refers to; None if there is none of this name."""
    names = function.__code__.co_freevars
    return function.__closure__[names.index(name)].cell_contents if name in names else None


def _inputs_of(region: Any) -> list[tuple[Any, Callable[[], Any]]]:
    """For each tensor among the positional arguments of a region its holder, and a function that reads it."""
    kept = getattr(region, "saved_args", None)
    if kept is not None:
        return [(item, item.unpack) for item in kept if hasattr(item, "register_hooks")]
    node = region.input_saver.grad_fn  # which keeps them in older releases of torch

    def reader(i: int) -> Callable[[], Any]:
        return lambda: node.saved_tensors[i]

    return [(item, reader(i)) for i, item in enumerate(node._raw_saved_tensors)]


def _keywords_of(region: Any) -> dict[str, Tensor]:
    """Tensors among the keyword arguments of a region, also of a partial function, as checkpoint keeps them."""
    found: dict[str, Any] = dict(_enclosed(region.recompute_fn, "kwargs") or {})
    function = _enclosed(region.recompute_fn, "fn")
    while isinstance(function, functools.partial):
        found |= function.keywords | {f"bound[{i}]": item for i, item in enumerate(function.args)}
        function = function.func
    flat = [(name, value) for name, value in found.items() if type(value) is not tuple]
    flat += [(f"{name}[{i}]", v) for name, value in found.items() if type(value) is tuple for i, v in enumerate(value)]
    return {name: value for name, value in flat if isinstance(value, Tensor)}


class _Cached:
    """What a selective checkpoint keeps of one result, in place of torch's own holder. It may be hooked like a slot."""

    def __init__(self, tensor: Tensor, version: int) -> None:
        self._kept: Any = tensor
        self._version_then = version
        self._unpack: Callable[[Any], Tensor] | None = None

    def register_hooks(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """As a slot of autograd's."""
        self._kept, self._unpack = pack(self._kept), unpack

    def get_val(self, allow_cache_entry_mutation: bool) -> Tensor:
        """As the recomputation calls it."""
        if self._unpack is not None:
            return self._unpack(self._kept)
        if self._kept._version != self._version_then:
            raise RuntimeError("a tensor that a selective checkpoint keeps was modified by an inplace operation")
        kept: Tensor = self._kept
        return kept


@contextlib.contextmanager
def beside_selective() -> Iterator[None]:
    """Inside, no selective checkpoint sees the calls of operators: it counts them, and ours are not the region's."""
    modes = _DISPATCH._get_current_dispatch_mode_stack()
    recording = _CHECKPOINT._CachingTorchDispatchMode
    if not any(isinstance(mode, recording) for mode in modes):
        yield
        return
    own = [mode for mode in modes if getattr(mode, "_mode_key", None) is None]  # others have places of their own
    others = [mode for mode in own if not isinstance(mode, recording)]

    def replace(old: list[Any], new: list[Any]) -> None:
        for _ in old:
            _DISPATCH._pop_mode()
        for mode in new:
            _DISPATCH._push_mode(mode)

    replace(own, others)
    try:
        yield
    finally:
        replace(others, own)


def is_watched() -> bool:
    """Is a capture on this thread's stack of function modes?"""
    return any(isinstance(mode, Capture) for mode in _overrides._get_current_function_mode_stack())


BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
"""The classes of modules whose result for one sample depends on the others."""


def pre_hooks(module: nn.Module) -> Iterable[Callable[..., Any]]:
    """The hooks that run before each forward of a module."""
    return module._forward_pre_hooks.values()


def calls_on_stack(module: nn.Module) -> int:
    """How many calls of ``module`` are running in this thread."""
    code = nn.Module._call_impl.__code__
    frame, count = sys._getframe(1), 0
    while frame is not None:
        count += frame.f_code is code and frame.f_locals.get("self") is module
        frame = frame.f_back  # type: ignore[assignment]
    return count


def watching() -> bool:
    """Is a capture open in this thread? Its mark on a new node tells."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = torch.ones((), requires_grad=True).exp().grad_fn
    return _MARK in node.metadata


def hooks_at_work() -> bool:
    """Do hooks of somebody (a checkpoint, ``save_on_cpu``) take every tensor that is saved now?"""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def describe(node: Any) -> tuple[str, tuple[str, ...]]:
    """The op's name (``Convolution``, or ``LeakyRelu1`` for a variant) and the names of its slots."""
    kind: Any = type(node)
    op, slots, names = _describe_type(kind)
    return op, names or tuple(name for name, _, _ in slots)


@lru_cache(maxsize=1024)
def _describe_type(kind: Any) -> tuple[str, tuple[tuple[str, str, str], ...], tuple[str, ...]]:
    """The op's name; for each slot its name and the attributes that give its holder and its tensor; a twin's names.

    A twin appears as the op it stands for, with that op's names for what it saved.
    """
    op, _, variant = kind.__name__.rpartition("Backward")
    names = [name.removeprefix(_RAW) for name in dir(kind) if name.startswith(_RAW)]
    slots = tuple((n, _RAW + n, "saved_tensors" if n == "tensors" else f"_saved_{n}") for n in names)
    twin = getattr(getattr(kind, "_forward_cls", None), "lowtide_names", None)
    if twin is not None:
        return twin[0], slots, twin[1:]
    return op + ("" if variant == "0" else variant), slots, ()


def op_of(node: Any) -> str:
    """The op of one of torch's own nodes or of a twin; empty for a user's function, which may have any name."""
    kind: Any = type(node)
    op, _, names = _describe_type(kind)
    return op if names or kind.__name__ == f"{op}Backward0" else ""


def _history(tensor: Tensor) -> Any:
    """The node that made a tensor. None also for a view that is no longer valid, of which torch complains when used."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def _note_version(node: Any, result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
    """Leave with a node, as soon as it is there, what tells later whether its result and its inputs have changed."""
    notes = node.metadata
    notes[_MADE] = result._version
    op = op_of(node)
    if op in ("Relu", "Add", "ToCopy"):
        read = (*args, *[kwargs[name] for name in ("input", "other") if name in kwargs]) if kwargs else args
        edges = node.next_functions
        # A change in place has moved the version by one, and that of a function by one more, which says that it did it.
        moved = 1 if type(node).__name__ == f"{op}Backward0" else 2
        pairs = zip(edges, read, strict=False)
        faithful = len(read) >= len(edges) and all(_is_as_its_maker_made_it(*pair, result, moved) for pair in pairs)
        if faithful and read[0].device == result.device:  # a copy to another device is no cast
            notes[_FAITHFUL] = True
    elif op in ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"):
        bias = getattr(parent(node, 2), "variable", None)
        if bias is not None:
            notes[_BIAS] = bias._version


def _is_as_its_maker_made_it(edge: tuple[Any, int], source: Any, result: Tensor, moved: int) -> bool:
    """Has an op, which made ``result``, just read ``source`` with all the values that the node behind it had made?"""
    maker, output = edge
    made = None if maker is None or output != 0 else maker.metadata.get(_MADE)
    if made is None or not isinstance(source, Tensor):
        return False
    if source is result:  # changed in place, and its own maker now
        return bool(source._version == made + moved)
    return bool(source._version == made and source.grad_fn is maker)


class Capture(TorchFunctionMode):
    """Offers every newly saved tensor to ``visit`` and calls ``settle`` after each torch call.

    ``starting`` is called when the forward of the model itself begins, ``exposed`` with the storage of a tensor whose
    ``.data`` somebody asks for, and ``foreign`` when a module begins that is not the model's. ``twin`` may give another
    callable for a call; ``versions`` asks for the notes that :func:`is_as_made` reads. Module hooks are torch's global
    ones, put up while a capture is open: the model's own hooks stay as they are, and one pair serves all modules and
    all captures.
    """

    def __init__(
        self,
        model: nn.Module,
        visit: Callable[[Slot], None],
        settle: Callable[[], None],
        starting: Callable[[], None],
        exposed: Callable[[Any], None],
        foreign: Callable[[], None],
        twin: Callable[..., Callable[..., Any] | None] | None = None,
        versions: bool = False,
    ) -> None:
        super().__init__()
        self._model = model
        self._visit = visit
        self._settle = settle
        self._starting = starting
        self._exposed = exposed
        self._foreign = foreign
        self._twin = twin
        self._versions = versions
        self._abilities = probe()
        self._names: dict[nn.Module, str] = {}
        self._own: dict[int, weakref.ref[Any]] = {}
        self._buffers: dict[int, Tensor] = {}
        self._path: list[str] = []
        self._ordinals: dict[tuple[str, str, str], int] = {}
        self._first = 0
        self._numbers: set[int] = set()
        self._latest: Callable[[], Tensor | None] = lambda: None
        self._thread = 0
        self.picking: set[str] = set()
        """Paths of modules that picked values by their order or size."""
        self._regions: weakref.WeakKeyDictionary[Any, dict[Any, int] | None] = weakref.WeakKeyDictionary()
        self._selective: Callable[[], Any] = lambda: None  # the selective region that was met last, if it lives
        self._within_backward = False

    def __enter__(self) -> Capture:
        self._within_backward = in_backward()
        self._names = modules_of(self._model)
        self._own = _storages_of(self._names)
        self._buffers = {id(b): b for module in self._names for b in module._buffers.values() if b is not None}
        self._path.clear()
        self._thread = threading.get_ident()
        self._push()
        _watch_modules(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _unwatch_modules(self)
        self._buffers.clear()
        modes = _take_modes()
        _put_modes([mode for mode in modes if mode is not self])

    def _push(self) -> None:
        """Stand below the modes of others.

        They are taken off from the top, whoever is there: after an interrupt, which skips our own end, ``with
        torch.device(...)`` around the forward would take us off and stay itself. Only the default device stands lower.
        """
        modes = _take_modes()
        default = modes[:1] if modes and modes[0] is _default_device() else []
        _put_modes([*default, self, *modes[len(default) :]])

    @property
    def path(self) -> str:
        """The path of the module at work."""
        return self._path[-1] if self._path else ""

    def restart(self) -> None:
        """Begin a new forward: ordinals count from zero, and nodes made before belong to somebody else."""
        self._ordinals.clear()
        self._numbers.clear()
        self._first = _sequence_number()

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the call, then look at what it saved."""
        call = func
        if self._twin is not None and self._abilities.slots:
            call = self._twin(func, args, kwargs or {}) or func
        before = _sequence_number() if self._versions else 0
        result = call(*args, **kwargs) if kwargs else call(*args)
        if func in _PICKING:
            self.picking.add(self._path[-1] if self._path else "")
        if torch.compiler.is_compiling():
            return result  # torch.compile traces this code too; what compiled code saves shows when it returns
        if not torch.is_grad_enabled() or self._recomputes():
            # Such a call makes no nodes, or only those of a recomputation, which are read at once. And the history of a
            # view that was made without gradients must not be asked for.
            if type(func) is _GETTER and func.__self__ is _DATA:
                self._expose(args[0])
            self._settle()
        elif isinstance(result, Tensor):
            node = _history(result)
            if node is not None:
                if self._versions and node._sequence_nr() >= before:
                    _note_version(node, result, args, kwargs)
                self._walk(node, func)
                self._latest = weakref.ref(result)
            elif type(func) is _GETTER and func.__self__ is _DATA:
                self._expose(args[0])
            self._settle()
        elif result is None:
            # ``x[i] = y`` returns nothing. Of no other such call may history be asked here: torch sets
            # ``_backward_hooks`` while it holds the lock that ``grad_fn`` of a view waits for.
            if func is Tensor.__setitem__ and args[0].grad_fn is not None:
                self._walk(args[0].grad_fn, func)
        elif type(result) in (tuple, list):
            self._walk_all(result, func)
            self._settle()
        return result

    def _expose(self, tensor: Any) -> None:
        """Somebody asked for ``tensor.data``, through which values change without a trace."""
        if not has_storage(tensor):
            return
        owner = tensor if tensor._base is None else tensor._base
        if owner.grad_fn is not None:
            owner.grad_fn.metadata.pop(_MADE, None)
        storage = storage_of(tensor)
        if storage is not None:
            self._exposed(storage)

    def _walk_all(self, result: Any, func: Callable[..., Any] | None) -> None:
        if isinstance(result, Tensor):
            node = _history(result)
            if node is not None:
                self._walk(node, func)
        elif isinstance(result, (tuple, list)):
            for item in result:
                self._walk_all(item, func)
        elif isinstance(result, Mapping):
            for item in result.values():
                self._walk_all(item, func)

    def _walk(self, node: Any, func: Callable[..., Any] | None) -> None:
        """Offer what the new nodes behind ``node`` saved.

        Nodes are numbered by thread, so the number of one that another thread made tells nothing by itself. It is
        left alone if it cannot be ours: ours come after the session began, before the nodes that read them, and once.
        """
        if _MARK in node.metadata or not self._abilities.slots or torch._C._get_tracing_state() is not None:
            return
        call = getattr(func, "__name__", "")
        if (region := self._selective()) is not None:
            self._offer_cached(region, node, call)
        first, numbers = self._first, self._numbers
        stack = [(node, _sequence_number())]
        while stack:
            node, limit = stack.pop()
            metadata = node.metadata
            if _MARK in metadata:
                continue
            number = node._sequence_nr()
            if not first <= number < limit or number in numbers:
                continue
            numbers.add(number)
            metadata[_MARK] = None
            kind: Any = type(node)
            op, slots, names = _describe_type(kind)
            for name, holder, value in slots:
                try:
                    saved = getattr(node, holder)
                    several = type(saved) is tuple or type(saved) is list
                    foreign = any(map(self._is_foreign, saved)) if several else self._is_foreign(saved)
                    tensor = None if foreign else getattr(node, value)
                except RuntimeError:
                    # The graph behind this node was freed, or the tensor was changed in place since it was saved.
                    # Backward reports both.
                    continue
                if foreign:
                    for item in saved if several else (saved,):
                        self._meet_region(item, node, call)
                if several:
                    kept = self._kept_for(node.run_function) if kind is _REENTRANT else None
                    for i, item in enumerate(saved):
                        slot = names[i] if names else f"{name}[{i}]"
                        each = None if tensor is None else tensor[i]
                        takes_less = (op, slot) in _TAKE_LESS and bool(names)
                        self._offer(node, op, slot, call, item, each, takes_less, kept)
                elif foreign or (
                    tensor is not None and type(tensor) is not nn.Parameter and id(tensor) not in self._buffers
                ):
                    self._offer(node, op, name, call, saved, tensor, False)
            for parent, _ in node.next_functions:
                if parent is None or type(parent).__name__ == _PARAMETER_NODE or _MARK in parent.metadata:
                    continue
                stack.append((parent, number))

    def _offer(
        self,
        node: Any,
        op: str,
        slot: str,
        call: str,
        saved: Any,
        tensor: Any,
        twin: bool,
        kept: tuple[str, Boundary] | None = None,
    ) -> None:
        """Offer one saved tensor, unless it is the model's own; ``kept`` names the module of a checkpoint's region."""
        storage, is_part = None, False
        gets_gradient = type(saved) is _Cached or (tensor is not None and tensor.requires_grad)
        if tensor is None:
            if not self._is_foreign(saved):
                return
        elif is_parameter(tensor):
            return
        elif has_storage(tensor):
            storage = storage_of(tensor)
        else:
            part = shards.part_of(tensor, changed_in_place)
            if part is not None and has_storage(part.local):
                tensor, saved, is_part = part.local, _Holder(saved, part.whole), True
                storage = storage_of(tensor)
        module, boundary = (self._path[-1] if self._path else "", None) if kept is None else kept
        key = (module, op, slot)
        ordinal = self._ordinals.get(key, 0)
        self._ordinals[key] = ordinal + 1
        if boundary is not None and boundary.exact is None and not gets_gradient:
            boundary = boundary._replace(exact=_NO_GRADIENT)
        if storage is None or not self.owns(storage):
            site = Site(module, op, slot, ordinal)
            self._visit(Slot(site, tensor, storage, node, call, saved, twin, boundary, is_part))

    # ------------------------------------------------------------ checkpoints

    def _recomputes(self) -> bool:
        """Does a checkpoint run its region again, in a backward inside of the session?"""
        return not self._within_backward and in_backward()

    def _meet_region(self, saved: Any, node: Any, call: str) -> None:
        """Offer what a checkpoint keeps, when a slot that its hooks hold is met: its inputs once, cached results often.

        A checkpoint within another leaves its inputs to that one's hooks.
        """
        region = region_of(saved)
        if region is None:
            return
        if region not in self._regions:
            cache = _enclosed(region.recompute_fn, "recompute_context")
            self._regions[region] = {} if isinstance(cache, _CHECKPOINT._CachedTorchDispatchMode) else None
            module, boundary = self._kept_for(_enclosed(region.recompute_fn, "fn"))
            for i, (item, read) in enumerate(_inputs_of(region)):
                if self._is_foreign(item):
                    self._meet_region(item, node, call)
                    continue
                try:
                    tensor = read()
                except RuntimeError:
                    continue  # changed in place, which backward reports
                if tensor is not None:
                    self._offer(node, _REGION, f"args[{i}]", call, item, tensor, False, (module, boundary))
            for name, tensor in _keywords_of(region).items():
                kept = boundary._replace(exact=_KEYWORD)
                self._offer(node, _REGION, f"kwargs[{name}]", call, None, tensor, False, (module, kept))
        if self._regions[region] is not None:
            self._selective = weakref.ref(region)
            self._offer_cached(region, node, call)

    def _offer_cached(self, region: Any, node: Any, call: str) -> None:
        """Offer the results that the policy of a selective checkpoint has kept since it was last looked at."""
        cache, seen = _enclosed(region.recompute_fn, "recompute_context"), self._regions[region]
        assert seen is not None
        module, boundary = self._kept_for(_enclosed(region.recompute_fn, "fn"))
        for func, results in cache.storage.items():
            for i in range(seen.get(func, 0), len(results)):
                several = type(results[i]) in (tuple, list)
                holders = list(results[i]) if several else [results[i]]
                for j, holder in enumerate(holders):
                    tensor = getattr(holder, "val", None)
                    if not isinstance(tensor, Tensor):
                        continue
                    why = _MUTABLE if cache.allow_cache_entry_mutation else _STATISTIC if j else None
                    if why is None and holder.version != tensor._version:
                        continue  # changed in place, which the recomputation reports
                    if why is None:
                        holders[j] = _Cached(tensor, holder.version)
                    kept = boundary if why is None else boundary._replace(exact=why)
                    self._offer(node, _REGION, f"cached[{func}][{j}]", call, holders[j], tensor, False, (module, kept))
                results[i] = type(results[i])(holders) if several else holders[0]
            seen[func] = len(results)

    def _kept_for(self, function: Any) -> tuple[str, Boundary]:
        """The path of the module that a checkpoint runs, or else of the one at work; and how it keeps its inputs."""
        codec = getattr(function, BOUNDARY_CODEC, None)
        function = getattr(function, "function", function)
        while isinstance(function, functools.partial):
            function = function.func
        owner = getattr(function, "__self__", function)
        name = self._names.get(owner) if isinstance(owner, nn.Module) else None
        path = self._path[-1] if self._path else ""
        return path if name is None else name, Boundary(None, codec)

    def finish(self) -> None:
        """Offer what a selective checkpoint has kept of its region's last calls; before the capture ends."""
        region, latest = self._selective(), self._latest()
        node = None if latest is None else _history(latest)
        if region is not None and node is not None:
            self._offer_cached(region, node, "")

    def owns(self, storage: Any) -> bool:
        """Does the storage belong to a parameter or buffer that the model had when the capture began?"""
        known = self._own.get(storage._cdata)
        return known is not None and known() is storage  # an identity alone may be that of one that is gone

    def _is_foreign(self, saved: Any) -> bool:
        """Do somebody else's hooks hold this slot? Reading it would run them: checkpoint would recompute."""
        if self._abilities.foreign_hooks:
            return saved is not None and saved.unpack_hook is not None
        return hooks_at_work()

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """A module begins."""
        if self._recomputes():
            return
        if threading.get_ident() != self._thread:
            return
        name = self._names.get(module)
        if name is None:
            self._foreign()
            return
        if not name and not self._path:
            self._starting()
        elif args and args[0] is not self._latest() and torch.is_grad_enabled():
            # What a function without a call of torch has made belongs to the module around this one.
            with torch._C.DisableTorchFunction():
                self._walk_all(args, None)
        self._path.append(name)

    def leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        """A module ends, perhaps by an exception."""
        if self._recomputes():
            return
        name = self._names.get(module)
        if name is None or threading.get_ident() != self._thread:
            return
        # What the last call returned has been walked already, and most modules end with such a call.
        if result is not self._latest() and torch.is_grad_enabled():
            # Otherwise the mode would see every attribute that is read here.
            with torch._C.DisableTorchFunction():
                self._walk_all(result, None)
        # If another hook of the module raised first, ``enter_module`` was not called.
        if self._path and self._path[-1] == name:
            self._path.pop()


# Code that torch.compile made is valid for the global hooks that it met, by number and identity. So all captures share
# two functions, which have the same two numbers whenever they are there; with new ones for each session, compiled parts
# of a model would be compiled again in each.
_MODULES: Any = nn.modules.module
_PRE, _POST = (RemovableHandle(OrderedDict()).id for _ in range(2))
_captures: list[Capture] = []  # those that are open, in any thread
_captures_lock = threading.Lock()


def _before_module(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        for capture in tuple(_captures):
            capture.enter_module(module, args)


def _after_module(module: nn.Module, args: Any, result: Any) -> None:
    if not torch.compiler.is_compiling():
        for capture in tuple(_captures):
            capture.leave_module(module, args, result)


def _watch_modules(capture: Capture) -> None:
    with _captures_lock:
        _captures.append(capture)
        _MODULES._global_forward_pre_hooks[_PRE] = _before_module
        _MODULES._global_forward_hooks[_POST] = _after_module
        _MODULES._global_forward_hooks_always_called[_POST] = True


def _unwatch_modules(capture: Capture) -> None:
    with _captures_lock:
        if capture in _captures:
            _captures.remove(capture)
        if not _captures:
            _MODULES._global_forward_pre_hooks.pop(_PRE, None)
            _MODULES._global_forward_hooks.pop(_POST, None)
            _MODULES._global_forward_hooks_always_called.pop(_POST, None)
