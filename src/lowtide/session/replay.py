"""Running a model on the side: a probe that leaves training as if it had never been.

Sensitivity is measured by repeating a step with one thing changed. The repetition must see the same random numbers and
must not move batch statistics, gradients or random streams that the real training will use.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..graph import capture, shards
from ..policy.use import Use


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put back on exit, also after an exception, what running ``model`` changes.

    Buffers (the same tensors with the same bits), ``.grad`` of parameters (the same tensors, which are set aside, so
    that nothing is added to them; inside, every ``.grad`` starts as None), ``requires_grad``, training flags, and the
    random states of torch on the CPU and the accelerator, of Python and of NumPy. Hooks that the user registered on
    parameters (``parameter.register_hook``) are set aside too: they may count, log or send, and a probe is no step.
    Gradients inside are therefore those before such hooks. Parameters' values and the
    optimizer are not watched: do not step inside. Nor are generators and plain attributes of the user's own. Open it
    between steps, not between a forward and its backward.
    """
    modules = list(model.modules())
    parameters = list(model.parameters())
    training = [m.training for m in modules]
    gradients = [p.grad for p in parameters]
    required = [p.requires_grad for p in parameters]
    buffers = [(m, name, b) for m in modules for name, b in capture.buffers_of(m)]
    copies = [None if b is None else b.detach().clone() for _, _, b in buffers]
    restore_random = _random_states()
    try:
        for parameter in parameters:
            parameter.grad = None
        with capture.without_hooks(parameters):
            yield
    finally:
        for module, flag in zip(modules, training, strict=True):
            module.training = flag
        for parameter, gradient, flag in zip(parameters, gradients, required, strict=True):
            parameter.grad = gradient
            parameter.requires_grad_(flag)
        with torch.no_grad():
            for (module, name, buffer), saved in zip(buffers, copies, strict=True):
                if getattr(module, name, None) is not buffer:
                    setattr(module, name, buffer)
                if buffer is None or saved is None:
                    continue
                if buffer.shape != saved.shape:
                    buffer.resize_(saved.shape)
                # Past the version counter: a graph that saved the buffer finds the values it saved.
                buffer.data.copy_(saved)
        restore_random()


def _random_states() -> Callable[[], None]:
    """Remember every global random state; the result puts them back."""
    python, legacy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    accelerator = _accelerator()
    many = hasattr(accelerator, "get_rng_state_all")
    states = None
    if accelerator is not None:
        states = accelerator.get_rng_state_all() if many else accelerator.get_rng_state()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(cpu)
        if accelerator is not None:
            accelerator.set_rng_state_all(states) if many else accelerator.set_rng_state(states)

    return restore


def _accelerator() -> Any:
    """The module of the accelerator in use, such as ``torch.cuda``; None if there is none or it was never used."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    initialized = getattr(module, "is_initialized", None)
    return None if initialized is not None and not initialized() else module


def gradients(model: nn.Module, closure: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Gradients of the loss that ``closure`` returns, by parameter name, with nothing disturbed.

    Parameters that are frozen or not reached are absent; a shared one appears under its first name; of one that is
    spread over processes there is the part of this one. They are taken with ``torch.autograd.grad``, so hooks that run
    when ``.grad`` is ready (an optimizer fused into backward, an all-reduce) stay still; :func:`undisturbed` sets aside
    those that run before. Reentrant checkpointing does not allow ``torch.autograd.grad``; use ``use_reentrant=False``.
    """
    if shards.is_gathered(model):
        raise ValueError(
            "FSDP computes with parameters that it gathers in the forward, so the model's own have no gradients to "
            "compare; do that before the model is sharded"
        )
    with undisturbed(model), torch.enable_grad():
        loss = closure()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(f"closure must return a loss of one value that depends on parameters; got {loss!r}")
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: shards.local_of(g) for name, g in zip(named, found, strict=True) if g is not None}


# ---------------------------------------------------------------- slices of a batch


class NotDivisible(ValueError):
    """The batch cannot be divided into samples."""


def leaves_of(batch: Any) -> Iterator[Any]:
    """What lies in nested mappings, tuples, lists and dataclasses, in their order."""
    children = _children(batch)
    if children is None:
        yield batch
    else:
        for child in children.values():
            yield from leaves_of(child)


def mapped(batch: Any, function: Callable[[Any], Any]) -> Any:
    """The same containers anew, with ``function(leaf)`` in place of each leaf of :func:`leaves_of`.

    Containers are rebuilt without running constructors that a user wrote where that is possible, so fields with
    ``init=False`` and frozen dataclasses are copied too. Each new container is read back: one that does not hold what
    was put into it raises :class:`NotDivisible`.
    """
    children = _children(batch)
    if children is None:
        return function(batch)
    wanted = {key: mapped(child, function) for key, child in children.items()}
    try:
        rebuilt = _rebuilt(batch, wanted)
        held = _children(rebuilt)
    except Exception as error:  # constructors and setters are the user's code
        raise NotDivisible(f"a {type(batch).__name__} cannot be copied: {type(error).__name__}: {error}") from error
    if held is None or list(held) != list(wanted) or any(held[key] is not wanted[key] for key in wanted):
        raise NotDivisible(f"a {type(batch).__name__} cannot be copied: its copy does not hold what was put into it")
    return rebuilt


def _children(batch: Any) -> dict[Any, Any] | None:
    """What a container holds directly, by key, place or field; None for a leaf."""
    if isinstance(batch, Mapping):  # models of transformers return mappings that are dataclasses too
        return dict(batch.items())
    if isinstance(batch, (tuple, list)):
        return dict(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, (type, Tensor, nn.Module)):
        names = [field.name for field in dataclasses.fields(batch)]
        return {name: getattr(batch, name) for name in names if hasattr(batch, name)}
    return None


def _rebuilt(batch: Any, children: dict[Any, Any]) -> Any:
    """A container of the type of ``batch`` that holds ``children``."""
    if isinstance(batch, MutableMapping):
        new = copy.copy(batch)
        for key, child in children.items():
            new[key] = child
        return new
    if isinstance(batch, Mapping):
        return type(batch)(children)  # type: ignore[call-arg]
    if isinstance(batch, (tuple, list)):
        make = getattr(type(batch), "_make", type(batch))  # a namedtuple is made by its fields
        return make(children.values())
    new = copy.copy(batch)
    for name, child in children.items():
        object.__setattr__(new, name, child)  # past the setter of a frozen dataclass
    return new


def samples_in(batch: Any) -> int:
    """The size that all tensors of the batch share in their first dimension."""
    sizes = set()
    for leaf in leaves_of(batch):
        if isinstance(leaf, Tensor):
            sizes |= {leaf.shape[0]} if leaf.dim() else set()
        elif leaf is not None and not isinstance(leaf, (bool, int, float)):
            raise NotDivisible(f"the batch holds a {type(leaf).__name__}, which cannot be divided into samples")
    if len(sizes) != 1:
        given = ", ".join(map(str, sorted(sizes))) or "none"
        raise NotDivisible(f"the batch's tensors do not share one first dimension ({given})")
    count = sizes.pop()
    if count < 2:
        raise NotDivisible(f"the batch has {count} samples, and two are needed")
    return int(count)


def slice_of(batch: Any, start: int, stop: int) -> Any:
    """The samples from ``start`` to ``stop``, in containers of the batch's own types.

    >>> slice_of({"x": torch.arange(6), "scale": 2.0}, 2, 4)
    {'x': tensor([2, 3]), 'scale': 2.0}
    """
    return mapped(batch, lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) and leaf.dim() else leaf)


# ---------------------------------------------------------------- which tensors, and comparing gradients


def suspects(stored: Iterable[Use], errors: Mapping[str, float]) -> list[Use]:
    """Stored tensors, those first whose consumers' own parameters err most.

    A consumer without parameters of its own passes its noise to the layers before it. It counts with a share of the
    whole error, by its number of values.
    """
    stored = list(stored)
    by_module: dict[str, float] = {}
    for name, error in errors.items():
        module = name.rpartition(".")[0]
        by_module[module] = by_module.get(module, 0.0) + error**2
    whole, values = sum(by_module.values()), sum(use.meta.numel for use in stored)

    def share(use: Use) -> tuple[float, int]:
        modules = {site.module for site in use.sites} & set(by_module)
        own = sum(by_module[m] for m in modules) if modules else whole * use.meta.numel / values
        return -own, -use.meta.numel

    return sorted(stored, key=share)


_PER_BUCKET = 256
"""Elements of a block that fall into each bucket of a sketch."""

_BLOCKS_AT_ONCE = 64
"""Blocks that are summed together, which bounds the memory that a sketch takes."""


class Sketch:
    """A small linear image of a whole gradient: ``width`` numbers for each parameter.

    Each element gets a sign and a bucket from a hash of (seed, parameter, index), and buckets are summed. So the
    sketch of a difference is the difference of sketches, and over seeds the square of its norm is expected to be the
    square of the difference's norm. For each parameter the variance of that square is about ``2 / width`` of its
    square, and at most ``4 / width``. Gradients of many probes can be compared without keeping any of them.

    Norms of parameters' gradients, which ALAM compares, cannot replace this: noise is nearly orthogonal to a
    gradient, and a change ``e`` orthogonal to ``g`` moves the norm by ``|e|**2 / (2 |g|)`` only.

    One table of signs and places serves all blocks of ``256 * width`` elements; a block rotates its buckets and adds a
    sign to each. Signs of different elements stay independent in pairs, which is all the expectation needs. The second
    ``2 / width`` is for gradients whose blocks are all alike, because they share the table.
    """

    def __init__(self, model: nn.Module, width: int = 256, seed: int = 0) -> None:
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ValueError(f"width must be a whole number of at least 1; got {width!r}")
        self.names = tuple(name for name, _ in model.named_parameters())
        self.width = width
        self.seed = seed
        bits = _hash64(_key(f"{seed}/table"), torch.arange(_PER_BUCKET * width, device="cpu"))
        self._place = {torch.device("cpu"): torch.sort(bits, stable=True).indices}
        self._sign = {
            torch.device("cpu"): _signs(_hash64(_key(f"{seed}/sign"), torch.arange(_PER_BUCKET * width, device="cpu")))
        }

    def of(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Sketches as (parameters, width) in float32, in the order of :attr:`names`; absent gradients are zero."""
        unknown = sorted(set(gradients) - set(self.names))
        if unknown:
            raise ValueError(f"the model has no parameters named {unknown}; gradients go by named_parameters()")
        device = next((g.device for g in gradients.values()), torch.device("cpu"))
        out = torch.zeros(len(self.names), self.width, device=device)
        for buckets, name in zip(out, self.names, strict=True):
            gradient = gradients.get(name)
            if gradient is not None:
                dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
                buckets.copy_(self._of_one(name, dense.reshape(-1)))
        return out

    def _of_one(self, name: str, gradient: Tensor) -> Tensor:
        block, device = _PER_BUCKET * self.width, gradient.device
        if device not in self._place:
            cpu = torch.device("cpu")
            self._place[device], self._sign[device] = self._place[cpu].to(device), self._sign[cpu].to(device)
        place, sign = self._place[device], self._sign[device]
        blocks = -(-gradient.numel() // block)
        own = (
            _hash64(_key(f"{self.seed}/{name}"), torch.arange(blocks * self.width, device="cpu"))
            .view(-1, self.width)
            .to(device)
        )
        turn = ((own[:, :1] >> 1) & 0xFFFFFF) + torch.arange(self.width, device=device)
        total = torch.zeros(self.width, device=device)
        for first in range(0, blocks, _BLOCKS_AT_ONCE):
            piece = gradient[first * block : (first + _BLOCKS_AT_ONCE) * block].to(torch.float32)
            piece = nn.functional.pad(piece, (0, -piece.numel() % block)).view(-1, block) * sign
            sums = piece[:, place].view(-1, _PER_BUCKET, self.width).sum(1)
            cut = slice(first, first + len(sums))
            total += (sums.gather(1, turn[cut] % self.width) * _signs(own[cut])).sum(0)
        return total


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _hash64(key: int, index: Tensor) -> Tensor:
    """64 mixed bits for each index: multiplications wrap, shifts are made logical by a mask."""
    x = (index ^ key) * -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _signs(bits: Tensor) -> Tensor:
    return 1.0 - 2.0 * (bits & 1).to(torch.float32)
