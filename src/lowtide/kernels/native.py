"""Machine code of the kernels. Numba makes it once for a machine; other processes load it without Numba.

Numba takes time and memory in each process that imports it, in a small network more than compression saves. What it
makes of a kernel is an object file of some 30 KB, so the first process writes that to a cache, and llvmlite, a small
part of Numba, links it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from . import layout

ENTRY = "lowtide_entry"
"""The name of the C function in each object file."""

_DIGEST = 32  # bytes


class MachineCode:
    """Functions of ``compiled``, linked into this process."""

    def __init__(self) -> None:
        self._engines: dict[str, Any] = {}  # own the code
        self._addresses: dict[str, int] = {}
        self._announced = False
        self.renew()

    def renew(self) -> None:
        """A new lock, also for a forked child: a thread that it does not have may hold the old one."""
        self._compiling = threading.RLock()

    def address(self, name: str) -> int:
        """Where a function is; it is compiled if no cache has it. Raises if that is impossible."""
        with self._compiling:
            if name not in self._addresses:
                if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
                    raise RuntimeError("NUMBA_DISABLE_JIT is set")
                self._addresses[name] = self._link(name, _read(name) or self._compile(name))
            return self._addresses[name]

    def _compile(self, name: str) -> bytes:
        if not self._announced:
            self._announced = True
            print("lowtide: compiling CPU kernels (once, then cached)", file=sys.stderr, flush=True)
        from .compiled import machine_code  # which imports Numba

        code = machine_code(name, ENTRY)
        _write(name, code)
        return code

    def _link(self, name: str, code: bytes) -> int:
        """Each object file in an engine of its own: other names in it may be those of another file."""
        llvm = _llvm()
        target = llvm.Target.from_triple(llvm.get_process_triple())
        module = llvm.parse_assembly(f'target triple = "{llvm.get_process_triple()}"')
        engine = llvm.create_mcjit_compiler(module, target.create_target_machine())
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        self._engines[name] = engine
        address: int = engine.get_function_address(ENTRY)
        return address


@lru_cache(1)
def _llvm() -> Any:
    llvm: Any = import_module("llvmlite.binding")
    with contextlib.suppress(RuntimeError):  # newer versions need no call for it, and say so
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


# ---------------------------------------------------------------- the cache


def _digest(*parts: bytes) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        found.update(hashlib.sha256(part).digest())
    return found.digest()


def _sources() -> bytes:
    """A digest of the files whose code and numbers are in an object file."""
    loader: Any = layout.__loader__
    folder = Path(layout.__file__).parent
    return _digest(*(loader.get_data(str(folder / name)) for name in ("layout.py", "compiled.py", "native.py")))


_SOURCES = _sources()  # now: a file that changes later is not what this process compiles


@lru_cache(1)
def _machine() -> str:
    """A name for the processor and for the compiler, with all that sets it."""
    llvm = _llvm()
    try:
        version = metadata.version("numba")
    except metadata.PackageNotFoundError:
        version = "none"
    settings = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("NUMBA_") and k != "NUMBA_CACHE_DIR")
    words = (llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    return _digest(*(w.encode() for w in (*words, sys.version, version, *settings))).hex()[:16]


def _files(name: str) -> Iterator[Path]:
    """Where the object file of a function may be, in the order of preference."""
    file = f"{name}.{_machine()}.o"
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        yield Path(given, "lowtide", file)
        return
    yield Path(__file__).parent / "__pycache__" / file
    with contextlib.suppress(RuntimeError):  # nobody's home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lowtide", file)


def _read(name: str) -> bytes | None:
    """What a cache has of a function, if it is whole and made of these sources."""
    for file in _files(name):
        with contextlib.suppress(OSError):
            written = file.read_bytes()
            digest, code = written[:_DIGEST], written[_DIGEST:]
            if digest == _digest(_SOURCES, code):
                return code
    return None


def _write(name: str, code: bytes) -> None:
    """Put it where that is possible; readers see a whole file or none."""
    for file in _files(name):
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(f".{os.getpid()}")  # a process writes one file at a time
            try:
                temporary.write_bytes(_digest(_SOURCES, code) + code)
                temporary.replace(file)
            finally:
                temporary.unlink(missing_ok=True)
            return
