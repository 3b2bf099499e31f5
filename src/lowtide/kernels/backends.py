"""Kernels: ``reference`` defines them in plain torch, ``cpu`` compiles them with Numba."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from . import reference

__all__ = ["note_fallback", "prepare", "register", "served", "status"]

PROCESS = os.getpid()  # a child forked from it must not use the threads it had
_LAZY = "numba (not compiled yet)"

# Filled in once per operator: by ``register``, then when it is compiled, then by the first call.
_status: dict[str, str] = {}
_compiled: dict[str, Callable[..., Any]] = {}
_functions: dict[str, Callable[..., Any]] = {}
# The reference was called for these device types and operators, and for these by a compiled kernel.
_referred: set[tuple[str, str]] = set()
_fallbacks: set[str] = set()


def status(device: torch.device | str = "cpu") -> dict[str, str]:
    """What serves each operator on a device.

    On the CPU "numba", "numba (not compiled yet)" or "reference: <reason>"; on meta tensors "shapes only"; on other
    devices "reference: no fast kernels for <device type>".
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return dict(_status)
    return dict.fromkeys(_status, "shapes only" if kind == "meta" else f"reference: no fast kernels for {kind}")


def served() -> dict[str, dict[str, str]]:
    """What has served each operator called so far in this process, by device type.

    The texts are those of :func:`status`. Where a compiled kernel left some calls to the reference, because it does not
    know their types or shapes, " and reference" follows.
    """
    found: dict[str, dict[str, str]] = {}
    for kind, name in sorted({("cpu", name) for name in _functions} | _referred):
        also = " and reference" if kind == "cpu" and name in _fallbacks else ""
        found.setdefault(kind, {})[name] = status(kind)[name] + also
    return found


def note_fallback(name: str) -> None:
    """Notes that a compiled kernel left a call on the CPU to the reference."""
    _fallbacks.add(name)


def register(library: Any, names: Iterable[str]) -> None:
    """The reference serves every device; on the CPU compiled kernels go first, which import Numba when called."""
    forced = os.environ.get("LOWTIDE_KERNELS") == "reference"
    for name in names:
        library.impl(name, _reference(name), "CompositeExplicitAutograd")
        _status[name] = "reference: LOWTIDE_KERNELS=reference" if forced else _LAZY
        if not forced:
            library.impl(name, _lazy(name), "CPU")


def prepare() -> None:
    """Compiles, or loads from the cache, what no call has needed yet."""
    for name, now in status().items():
        if now == _LAZY:
            _load(name)


def _reference(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(reference, name)

    def call(first: Tensor, *arguments: Any) -> Any:
        _referred.add((first.device.type, name))
        return function(first, *arguments)

    return call


def _lazy(name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return (_functions.get(name) or _first_call(name))(*arguments)

    return call


def _first_call(name: str) -> Callable[..., Any]:
    _functions[name] = _compiled.get(name) or _load(name)
    return _functions[name]


def _load(name: str) -> Callable[..., Any]:
    try:
        from . import cpu

        cpu.compile(name)
        function: Callable[..., Any] = getattr(cpu, name)
        text = "numba"
    except Exception as error:  # a missing Numba, or whatever its compiler raises: slower, never fatal
        reason = str(error).strip().partition("\n")[0]
        function = getattr(reference, name)
        text = f"reference: {type(error).__name__}: {reason}"
    _compiled[name], _status[name] = function, text
    return function
