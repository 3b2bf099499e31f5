"""Opt-in tuning of glibc's allocator, which otherwise gives memory back and faults it in again.

By default glibc maps every block above some size anew and returns the top of the heap as soon as it is free. So each
large tensor costs a page fault for each 4 KiB, which is a fifth of a ResNet-50 training step on two cores. Keeping
freed memory in the process avoids that, for plain and compressed steps alike.

What is kept must also be used again, or the heap grows far beyond what is alive. torch asks for blocks that begin at
multiples of 64 bytes. For that glibc looks for 96 bytes more than it needs, and gives back what is left before and
behind the block. Before 2.38 it hands such a rest of 32 to 96 bytes to the next small object that wants one. The object
stays there when the block is freed, and the hole is then too small for another block of the same size. From 2.38 on
glibc takes such a hole. Older versions waste less if rests are not cached for small objects, and only the environment
in which a process starts can say so (:func:`start_environment`).
"""

from __future__ import annotations

import ctypes
import os

_M_MXFAST = 1
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = -1  # as a size this is the largest there is
_REUSES_ALIGNED = (2, 38)
_NO_CACHES = "glibc.malloc.tcache_count=0"
_state = {"tuned": False}


def glibc_version() -> tuple[int, int] | None:
    """Return the version of the glibc that runs this process; None with another C library."""
    try:
        version = ctypes.CDLL(None).gnu_get_libc_version
    except (AttributeError, OSError, TypeError):  # musl and macOS; nothing to open; Windows
        return None
    version.restype = ctypes.c_char_p
    major, minor = version().decode().split(".")[:2]
    return int(major), int(minor)


def can_tune() -> bool:
    """Tell whether glibc's own ``malloc`` serves this process; elsewhere tuning does nothing."""
    if glibc_version() is None:
        return False
    # An allocator loaded before glibc (LD_PRELOAD of jemalloc, say) has a malloc of its own, which mallopt cannot set.
    served, glibc = (ctypes.cast(ctypes.CDLL(name).malloc, ctypes.c_void_p).value for name in (None, "libc.so.6"))
    return served == glibc


def tune_cpu_allocator() -> bool:
    """Let this process keep the memory it frees, so that the next large tensor costs no page faults.

    From now on every block that anything in the process asks of ``malloc``, however large, comes from the heap and not
    from a mapping of its own (``M_MMAP_MAX`` 0), the heap never shrinks (``M_TRIM_THRESHOLD`` off), and small blocks
    that are freed join their neighbours at once (``M_MXFAST`` 0). So resident memory no longer falls when tensors are
    freed, and other processes cannot have it. ``malloc_trim`` still gives it back; a session calls it in the few steps
    in which its method measures. Nothing else changes, and it cannot be undone. Call it once at the start of a CPU
    training script.

    With glibc before 2.38 the process should also be started with the variables of :func:`start_environment`, or its
    heap grows to two or three times what is alive.

    It returns whether it took effect, which it does with glibc's allocator only.
    """
    if not can_tune():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_MXFAST, 0)
    _state["tuned"] = all(mallopt(what, value) for what, value in settings)
    return _state["tuned"]


def is_tuned() -> bool:
    """Tell whether :func:`tune_cpu_allocator` took effect in this process."""
    return _state["tuned"]


def start_environment() -> dict[str, str]:
    """Return variables to set before a process starts that will call :func:`tune_cpu_allocator`.

    Empty where they would bring nothing: with glibc 2.38 or newer, and without glibc. They turn off the lists of small
    free blocks that each thread keeps (``glibc.malloc.tcache_count=0`` in ``GLIBC_TUNABLES``), so a small allocation
    takes somewhat longer.
    """
    version = glibc_version()
    if version is None or version >= _REUSES_ALIGNED:
        return {}
    others = [x for x in os.environ.get("GLIBC_TUNABLES", "").split(":") if x and x != _NO_CACHES]
    return {"GLIBC_TUNABLES": ":".join([*others, _NO_CACHES])}


def give_back() -> bool:
    """Return all free memory of this process to the system, as far as glibc can; tell whether it could try."""
    if not can_tune():
        return False
    ctypes.CDLL(None).malloc_trim(0)
    return True


def settle() -> None:
    """Between computations that differ: return what is free, if this process keeps what it frees.

    The blocks of the next lie elsewhere in the heap than those of the last. What they leave unused would stay resident.
    """
    if is_tuned():
        give_back()
