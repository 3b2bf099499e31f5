"""Who serves an operator: ``reference`` in plain torch anywhere, ``cpu`` with Numba, ``gpu`` with Triton."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch

from . import reference

__all__ = ["is_fast", "like_torch", "note_fallback", "prepare", "register", "served", "status"]

PROCESS = os.getpid()  # a child forked from it must not use the threads it had
_LAZY = {"cpu": "numba (not compiled yet)", "cuda": "triton (not called yet)", "xpu": "triton (not called yet)"}

# Filled in once per device type and operator: by ``register``, then when it is compiled, then by the first call.
_status: dict[tuple[str, str], str] = {}
_compiled: dict[tuple[str, str], Callable[..., Any]] = {}
functions: dict[tuple[str, str], Callable[..., Any]] = {}
"""What serves an operator on a device type, from the first call on."""
# The reference was called for these device types and operators, and for these by a fast kernel.
_referred: set[tuple[str, str]] = set()
_fallbacks: set[tuple[str, str]] = set()


def status(device: torch.device | str = "cpu") -> dict[str, str]:
    """What serves each operator on a device.

    On the CPU "numba", "numba (not compiled yet)" or "reference: <reason>"; on CUDA, ROCm and XPU the same with
    "triton", which compiles at a call; on meta tensors "shapes only"; on other devices "reference: no fast kernels for
    <device type>".
    """
    kind = torch.device(device).type
    found = {name: text for (own, name), text in _status.items() if own == kind}
    if found:
        return found
    names = (name for own, name in _status if own == "cpu")
    return dict.fromkeys(names, "shapes only" if kind == "meta" else f"reference: no fast kernels for {kind}")


def is_fast(name: str, device: str) -> bool:
    """Has an operator a fast kernel on such a device, as far as is known by now?"""
    return not _status.get((device, name), "reference").startswith("reference")


def served() -> dict[str, dict[str, str]]:
    """What has served each operator called so far in this process, by device type.

    The texts are those of :func:`status`. Where a fast kernel left some calls to the reference, because it does not
    know their types or shapes, " and reference" follows.
    """
    found: dict[str, dict[str, str]] = {}
    for kind, name in sorted({*functions, *_referred}):
        text = status(kind)[name]
        also = " and reference" if (kind, name) in _fallbacks and not text.startswith("reference") else ""
        found.setdefault(kind, {})[name] = text + also
    return found


def note_fallback(name: str, kind: str = "cpu") -> None:
    """Notes that a fast kernel left a call on such a device to the reference."""
    _fallbacks.add((kind, name))


def register(library: Any, names: Iterable[str]) -> None:
    """The reference serves every device; fast kernels go first, and import their compiler when called.

    The key of CUDA is that of ROCm too.
    """
    forced = os.environ.get("LOWTIDE_KERNELS") == "reference"
    for name in names:
        library.impl(name, _reference(name), "CompositeExplicitAutograd")
        for kind, text in _LAZY.items():
            _status[kind, name] = "reference: LOWTIDE_KERNELS=reference" if forced else text
            if not forced:
                library.impl(name, _lazy(kind, name), kind.upper())


def prepare() -> None:
    """Compiles for the CPU, or loads from the cache, what no call has needed yet."""
    for name, now in status().items():
        if now == _LAZY["cpu"]:
            _load("cpu", name)


@lru_cache
def like_torch(name: str) -> Callable[..., Any] | None:
    """A kernel of the CPU for an operator of torch, if it compiles and gives the bits of torch's own.

    It takes the arguments of the operator, and returns None for what it is not for.
    """
    if os.environ.get("LOWTIDE_KERNELS") == "reference":
        return None
    try:
        from . import cpu

        cpu.compile(name)
        return getattr(cpu, name) if cpu.has_torchs_bits(name) else None
    except Exception:  # a missing compiler, or whatever it raises: slower, never fatal
        return None


def _reference(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(reference, name)

    def call(first: Any, *arguments: Any) -> Any:
        tensor = first[0] if isinstance(first, (list, tuple)) else first
        _referred.add((tensor.device.type, name))
        return function(first, *arguments)

    return call


def _lazy(kind: str, name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return (functions.get((kind, name)) or _first_call(kind, name))(*arguments)

    return call


def _first_call(kind: str, name: str) -> Callable[..., Any]:
    functions[kind, name] = _compiled.get((kind, name)) or _load(kind, name)
    return functions[kind, name]


def _load(kind: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(reference, name)
    try:
        if kind == "cpu":
            from . import cpu

            cpu.compile(name)
            function, text = getattr(cpu, name), "numba"
        else:
            from . import gpu

            function, text = _or_reference(kind, name, getattr(gpu, name)), "triton"
    except Exception as error:  # a missing compiler, or whatever it raises: slower, never fatal
        reason = str(error).strip().partition("\n")[0]
        text = f"reference: {type(error).__name__}: {reason}"
    _compiled[kind, name], _status[kind, name] = function, text
    return function


def _or_reference(kind: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Triton compiles at a call. If a call fails and the reference succeeds with it, that serves from now on."""

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except torch.OutOfMemoryError:  # no fault of the kernel
            raise
        except Exception as error:
            found = getattr(reference, name)(*arguments)
            reason = str(error).strip().partition("\n")[0]
            _status[kind, name] = f"reference: {type(error).__name__}: {reason}"
            functions[kind, name] = getattr(reference, name)
            warnings.warn(
                f"lowtide's Triton kernel for {name} failed ({type(error).__name__}: {reason}). Plain torch serves it "
                "from now on, which gives the same bytes and is very slow on a GPU",
                RuntimeWarning,
                stacklevel=2,
            )
            return found

    return call
