"""Kernels: ``reference`` defines them in plain torch, ``cpu`` compiles them with Numba."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from . import reference

__all__ = ["prepare", "register", "status"]

PROCESS = os.getpid()  # a child forked from it must not use the threads it had
_LAZY = "numba (not compiled yet)"

# Filled in once per operator: by ``register``, then by the first call.
_functions: dict[str, Callable[..., Any]] = {}
_status: dict[str, str] = {}


def status() -> dict[str, str]:
    """What serves each operator on the CPU: "numba", "numba (not compiled yet)" or "reference: <reason>"."""
    return dict(_status)


def register(library: Any, names: Iterable[str]) -> None:
    """Puts the compiled kernels before the reference on the CPU; Numba is imported on the first call."""
    forced = os.environ.get("LOWTIDE_KERNELS") == "reference"
    for name in names:
        _status[name] = "reference: LOWTIDE_KERNELS=reference" if forced else _LAZY
        if not forced:
            library.impl(name, _lazy(name), "CPU")


def prepare() -> None:
    """Compiles, or loads from the cache, what no call has needed yet."""
    for name, served in status().items():
        if served == _LAZY:
            _load(name)


def _lazy(name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return (_functions.get(name) or _load(name))(*arguments)

    return call


def _load(name: str) -> Callable[..., Any]:
    try:
        from . import cpu

        cpu.compile(name)
        function: Callable[..., Any] = getattr(cpu, name)
        served = "numba"
    except Exception as error:  # a missing Numba, or whatever its compiler raises: slower, never fatal
        reason = str(error).strip().partition("\n")[0]
        function = getattr(reference, name)
        served = f"reference: {type(error).__name__}: {reason}"
    _functions[name], _status[name] = function, served
    return function
