"""A checkpoint that keeps compressed inputs: recompute, and a fraction of the boundaries.

Inside a session that session sees the checkpoint like any other, and packs and reports what it keeps. Without one this
module does it, by handles of the same kind: an input is encoded once nobody but the graph owns it. There is no hook
that would tell when, so it is looked at when the next checkpoint begins. In a chain of blocks each input is then
encoded before the next block runs, and the last one never; backward reads that one first.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as plain_checkpoint

from ..codecs import FLOATS, Codec, TensorMeta
from ..graph import capture
from ..graph.capture import Site
from ..policy.choice import Choice
from ..policy.methods import Uniform
from ..policy.policy import BOUNDARY_BITS, Policy, boundary_codec
from ..report import EXACT
from .handles import Handle, Reference, boundary_consumer, fresh
from .ledger import Entry
from .noise import noise_from
from .offload import Homes
from .opening import MIN_NUMEL
from .packing import Packer

_SITE = Site("", "Checkpoint", "args", 0)
_TORCH_OPTIONS = ("context_fn", "determinism_check", "debug", "early_stop")


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    codec: Codec | None = None,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Run ``function(*args, **kwargs)`` and keep its inputs compressed, to run it again in backward.

    Like ``torch.utils.checkpoint.checkpoint`` with ``use_reentrant=False``, whose options ``context_fn``,
    ``determinism_check``, ``debug`` and ``early_stop`` it takes too. The forward is exact. Backward runs ``function``
    on what ``codec`` gives back, by default 8 bits a value, so all gradients inside carry that small error
    (docs/checkpointing.md). ``codec=lowtide.codecs.Raw()`` keeps the inputs exact.

    Compressed are float tensors that get a gradient, among the arguments or in tuples of them. Parameters, integers,
    masks, positions and small tensors stay as they are, and so does a tensor that somebody else still holds. What
    ``function`` reads by other ways than its arguments is not seen.

    In a session (:func:`compress`, :func:`attach`) the session stores the inputs and reports them: its method, its
    ``boundary_bits`` and its noise apply, ``lossless`` keeps them exact, and ``codec`` comes before ``boundary_bits``.
    Without a session the noise follows from torch's seed and from the values themselves.

    >>> import torch, lowtide
    >>> block = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    >>> x = torch.randn(128, 64, requires_grad=True)
    >>> h = x * 2
    >>> for _ in range(4):
    ...     h = lowtide.checkpoint(block, h)
    >>> h.square().mean().backward()
    """
    if codec is not None:
        if not isinstance(codec, Codec):
            raise TypeError(f"codec must be a codec such as lowtide.codecs.GroupQuant(bits=8), or None; got {codec!r}")
        Choice.store(codec)  # complains of one that does not keep values
    if kwargs.pop("use_reentrant", False):
        raise ValueError("lowtide.checkpoint is never reentrant; leave use_reentrant out, or give False")
    options = {name: kwargs.pop(name) for name in _TORCH_OPTIONS if name in kwargs}
    tensors: list[Tensor] = []
    call = _Call(function, codec, _split(args, tensors), {name: _split(v, tensors) for name, v in kwargs.items()})
    options |= {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if capture.is_watched() or not capture.is_ordinary_call():
        return plain_checkpoint(call, *tensors, **options)
    kept = _thread.kept
    kept.settle()
    with saved_tensors_hooks(lambda tensor: kept.keep(tensor, codec), _read):
        return plain_checkpoint(call, *tensors, **options)


_TENSOR = object()
"""Marks the place of a tensor among arguments."""


def _split(value: Any, tensors: list[Tensor]) -> Any:
    """The value with its tensors moved to a list; looks into tuples, which nobody can change."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TENSOR
    return tuple(_split(item, tensors) for item in value) if type(value) is tuple else value


def _join(value: Any, tensors: Iterator[Tensor]) -> Any:
    """What :func:`_split` was given."""
    if value is _TENSOR:
        return next(tensors)
    return tuple(_join(item, tensors) for item in value) if type(value) is tuple else value


class _Call:
    """A function that takes all tensors by position, because torch leaves those in keywords and tuples as they are."""

    def __init__(self, function: Callable[..., Any], codec: Codec | None, args: Any, kwargs: dict[str, Any]) -> None:
        self.function = function
        self._args, self._kwargs = args, kwargs
        setattr(self, capture.BOUNDARY_CODEC, codec)

    def __call__(self, *tensors: Tensor) -> Any:
        rest = iter(tensors)
        args = _join(self._args, rest)
        return self.function(*args, **{name: _join(value, rest) for name, value in self._kwargs.items()})


class _Kept:
    """What the checkpoints of one thread keep outside of sessions. The graph owns the handles, this only finds them."""

    def __init__(self) -> None:
        self._waiting: list[tuple[weakref.ref[Handle], Codec]] = []

    def keep(self, tensor: Tensor, codec: Codec | None) -> Reference | _Exact:
        """What stands for an input of a checkpoint. One storage has one handle, as long as nothing is encoded."""
        storage = capture.storage_of(tensor) if capture.has_storage(tensor) else None
        if storage is None or capture.is_lazy(tensor):
            return _Exact(tensor)
        identity, numel = capture.storage_id(storage), tensor.numel()
        total = storage.nbytes() // tensor.element_size()
        may_be_noisy = tensor.requires_grad and tensor.dtype in FLOATS and not capture.is_parameter(tensor)
        if not may_be_noisy or (numel < MIN_NUMEL and numel * 4 >= total):
            return _Exact(tensor)
        codec = codec or boundary_codec(BOUNDARY_BITS, 4 <= tensor.dim() <= 5)
        consumer = boundary_consumer(_SITE, tensor, codec)
        handle = self._pending(identity, capture.version_of(tensor), consumer.view.dtype)
        if handle is None:
            base = capture.base_of(tensor) if numel != total else None
            entry = Entry(_SITE, consumer.view, EXACT, storage.nbytes(), "")
            form = None if base is None else TensorMeta.of(base)
            handle = Handle(tensor.detach(), identity, form, total, noise_from(tensor), entry)
            self._waiting.append((weakref.ref(handle), codec))
        handle.consumers.append(consumer)
        return Reference(handle, consumer.view, consumer.offset, None, False)

    def _pending(self, identity: int, version: int, dtype: torch.dtype) -> Handle | None:
        for reference, _ in self._waiting:
            handle = reference()
            if handle is not None and (handle.identity, handle.version) == (identity, version):
                return handle if handle.raw is not None and handle.consumers[0].view.dtype is dtype else None
        return None

    def settle(self) -> None:
        """Encode what only the graph still owns."""
        sole, still = capture.probe().sole, []
        for reference, codec in self._waiting:
            handle = reference()
            if handle is None or handle.raw is None:
                continue
            if sole is not None and capture.use_count(handle.identity) > sole:
                still.append((reference, codec))
            elif capture.version_of(handle.raw) == handle.version:
                Packer(Policy(Uniform(codec), _NO_MODEL, MIN_NUMEL, derive=False), Homes({})).seal(handle, handle.raw)
        self._waiting = still


_NO_MODEL = nn.Module()


class _Thread(threading.local):
    """Each thread looks at its own inputs, because backward of another may read them meanwhile."""

    def __init__(self) -> None:
        self.kept = _Kept()


_thread = _Thread()


class _Exact:
    """An input that stays as it is, with autograd's check that nobody changed it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = capture.version_of(tensor)


def _read(kept: Reference | _Exact) -> Tensor:
    """What backward gets to run the function on."""
    if isinstance(kept, Reference):
        return fresh(kept, read_only=True)
    if capture.version_of(kept.tensor) != kept.version:
        raise capture.changed_in_place(tuple(kept.tensor.shape))
    return kept.tensor
