"""Peak memory of a step on the CPU, measured honestly: in a child process, apart from the timing.

By default glibc keeps freed blocks of up to some 32 MB, so a process does not shrink when tensors go,
and the peak it reports is 4 to 33 % too high and wobbles. With the settings in ``EXACT_RSS`` each larger
block is mapped and given back on its own; the peak then equals the live bytes to about 1 MiB, but a step
takes twice as long. They act only if set before a process starts. Hence a child, and hence two: never
take time and exact memory in the same run.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

EXACT_RSS = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_MMAP_MAX_": "1000000",
}
"""Environment in which resident memory follows live memory (glibc; other allocators ignore it)."""

Emit: TypeAlias = Callable[[dict[str, Any]], None]


class ChildError(RuntimeError):
    """A child process failed; the message holds its traceback, or the end of what it wrote."""


def run_child(
    function: str,
    argument: dict[str, Any],
    *,
    exact_rss: bool,
    on_event: Emit | None = None,
) -> dict[str, Any]:
    """Call ``function`` ("module:name") with ``argument`` in a new process; return what it returns.

    The function takes the argument and ``emit``; each ``emit(event)`` reaches ``on_event`` here at once.
    Argument, events and result are dicts that JSON can carry. The child finds the same modules as this
    process and writes its standard output to standard error. With ``exact_rss`` memory is exact and time
    is not; without, the reverse. Raises :class:`ChildError` if the child fails.
    """
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as given,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as written,
    ):
        json.dump(argument, given)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "lowtide.tools.measure", function],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=written,
            env=_environment(exact_rss),
            encoding="utf-8",
        )
        last: dict[str, Any] = {}
        try:
            assert process.stdout is not None
            for line in process.stdout:
                last = json.loads(line)
                if "event" in last and on_event is not None:
                    on_event(last["event"])
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        written.seek(0)
        text = written.read()
    if "result" not in last:
        reason = last.get("error") or f"it ended with code {process.returncode}\n{text[-4000:]}"
        raise ChildError(f"{function} failed in a child process:\n{reason.rstrip()}")
    sys.stderr.write(text)
    result: dict[str, Any] = last["result"]
    return result


def _environment(exact_rss: bool) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in EXACT_RSS}
    environment["PYTHONPATH"] = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    # Without this ``-m`` puts the current folder first, and a stray json.py there breaks the child.
    environment["PYTHONSAFEPATH"] = "1"
    return environment | (EXACT_RSS if exact_rss else {})


def peak_above(run: Callable[[], object]) -> int:
    """Bytes by which memory rose above its present level while ``run`` was running.

    Resident memory of the whole process where ``/proc`` exists (Linux): the peak is reset, so earlier
    peaks do not count. Exact to about 1 MiB in a child of :func:`run_child` with ``exact_rss``, too high
    or too low elsewhere. Call ``run`` once before, or one-time costs such as compilation count too.
    On other systems the peak of torch's own CPU allocations, from ``torch.profiler``.
    """
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _tensor_peak(run)
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no line {field}")


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


def _child() -> int:
    # Whatever the function prints must not mix with the lines for the parent.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    try:
        module, _, name = sys.argv[1].partition(":")
        function = getattr(importlib.import_module(module), name)
        send(result=function(json.load(sys.stdin), lambda event: send(event=event)))
    except Exception:  # told to the parent whole, whatever it is
        send(error=traceback.format_exc())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_child())
