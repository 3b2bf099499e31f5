"""Work in child processes, and peak memory of a step on the CPU.

By default glibc keeps freed blocks of up to some 32 MB, so a process does not shrink when tensors go, and its peak is
higher than what was ever alive. With the settings in ``EXACT_RSS`` each larger block is mapped and given back on its
own. The peak then equals the live bytes to about 1 MiB, but a step takes twice as long. The settings act only if they
are set before a process starts. So live bytes are measured in a child process of their own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

EXACT_RSS = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_MMAP_MAX_": "1000000",
}
"""Environment in which resident memory follows live memory (glibc; other allocators ignore it)."""

_CHILD = "import sys; from lowtide.machine.measure import serve; sys.exit(serve(sys.argv[1]))"

Emit: TypeAlias = Callable[[dict[str, Any]], None]


class ChildError(RuntimeError):
    """A child process failed; the message holds its traceback, or the end of what it wrote."""


class Child:
    """A function that runs in a new process and pauses at each event, until :meth:`resume` lets it go on.

    The function ("module:name") takes ``argument`` and ``emit``; ``emit(event)`` reports an event and returns when the
    parent asks for the next one. Argument, events and result are dicts that JSON can carry. The child finds the same
    modules as this process and writes its standard output to standard error. ``variables`` are added to its
    environment; with ``exact_rss`` resident memory follows live memory, and steps take longer.

    The process lives within the ``with`` block only: whatever ends the block also ends the process. If this process is
    killed, the child ends at its next event.
    """

    def __init__(
        self,
        function: str,
        argument: dict[str, Any],
        *,
        exact_rss: bool,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.function = function
        self.result: dict[str, Any] | None = None
        """What the function returned, once :meth:`resume` has returned None."""
        self._next_line = json.dumps(argument) + "\n"  # what the child waits for: first its argument, then its turn
        self._variables = {**variables, **(EXACT_RSS if exact_rss else {})}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Child:
        with contextlib.ExitStack() as opened:
            self._errors = opened.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, self.function],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_environment(self._variables),
                encoding="utf-8",
            )
            opened.callback(self._end)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def resume(self) -> dict[str, Any] | None:
        """Let the child run to its next event, and return that; None if the function returned instead.

        Raises :class:`ChildError` if the child fails. Children run at the same time if all were entered before the
        first is resumed, but each only up to where it reads its argument.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # a child that died is described below
            self._process.stdin.write(self._next_line)
            self._process.stdin.flush()
        self._next_line = "\n"
        message: dict[str, Any] = json.loads(self._process.stdout.readline() or "{}")
        if "event" in message:
            event: dict[str, Any] = message["event"]
            return event
        code = self._process.wait()
        self._errors.seek(0)
        text = self._errors.read()
        if "result" not in message:
            reason = message.get("error") or f"it ended with code {code}\n{text[-4000:]}"
            raise ChildError(f"{self.function} failed in a child process:\n{reason.rstrip()}")
        sys.stderr.write(text)
        self.result = message["result"]
        return None

    def _end(self) -> None:
        """Kill the process if it still runs, and release its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):  # what the child did not read is of no use any more
                if pipe is not None:
                    pipe.close()


def run_child(
    function: str,
    argument: dict[str, Any],
    *,
    exact_rss: bool,
    variables: Mapping[str, str] = MappingProxyType({}),
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Call ``function`` with ``argument`` in a new process (see :class:`Child`); return what it returns.

    ``on_event`` hears each event at once; the child waits until it has returned.
    """
    with Child(function, argument, exact_rss=exact_rss, variables=variables) as child:
        while (event := child.resume()) is not None:
            if on_event is not None:
                on_event(event)
    assert child.result is not None
    return child.result


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in EXACT_RSS}
    environment["PYTHONPATH"] = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    # Without this ``-m`` puts the current folder first, and a stray json.py there breaks the child.
    environment["PYTHONSAFEPATH"] = "1"
    return environment | dict(variables)


def peak_above(run: Callable[[], object]) -> int:
    """Return the bytes by which memory rose above its present level while ``run`` was running.

    Where ``/proc`` exists (Linux) this is resident memory of the whole process. The peak is reset first, so earlier
    peaks do not count. It is exact to about 1 MiB in a child with ``exact_rss``, and too high or too low elsewhere.
    Call ``run`` once before, or one-time costs such as compilation count too. On other systems it is the peak of
    torch's own CPU allocations, from ``torch.profiler``.
    """
    gc.collect()
    try:
        reset_peak()
    except OSError:
        return _tensor_peak(run)
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def reset_peak() -> None:
    """Let the peak that Linux reports (``VmHWM``) begin anew at what is resident now; OSError on other systems."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(field: str) -> int:
    """Return bytes of this process that are in memory now (``VmRSS``), or were at most (``VmHWM``); Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no line {field}")


def peak_so_far(device: torch.device | None) -> int | None:
    """Return the highest memory until now: of tensors on a GPU, or of this process; None where nobody counts it."""
    if device is not None and device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        return resident("VmHWM")
    except OSError:
        return None


def available_nbytes() -> int:
    """Return bytes of memory that this machine can give to programs now."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError) as error:
        raise RuntimeError("the memory of this machine is not known here; give a budget") from error


def _tensor_peak(run: Callable[[], object]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    results: Any = profile.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def serve(function: str) -> int:
    """Be the child: read the argument, call the function, write events and result as lines of JSON."""
    # Whatever the function prints must not mix with the lines for the parent.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    def emit(event: dict[str, Any]) -> None:
        send(event=event)
        if not sys.stdin.readline():
            os._exit(1)  # the parent is gone, and nobody waits for the rest

    try:
        module, _, name = function.partition(":")
        argument = json.loads(sys.stdin.readline())
        send(result=getattr(importlib.import_module(module), name)(argument, emit))
    except Exception:  # told to the parent whole, whatever it is
        send(error=traceback.format_exc())
        return 1
    return 0
