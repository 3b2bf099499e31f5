"""Code in a process of its own that has imported torch and nothing else.

It is forked from one that waits with torch imported: most of what a new process needs is the time of that import.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch"])


def run(code: str, timeout: float = 120.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with more variables in its environment; the process is ended if it takes longer than ``timeout``."""
    with TemporaryDirectory() as folder:
        process = FORKS.Process(target=_run, args=(code, {**os.environ, **environment}, folder))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(code, timeout)
        output, errors = (Path(folder, name).read_text() for name in ("1", "2"))
        return subprocess.CompletedProcess(code, process.exitcode, output, errors)


def _run(code: str, environment: dict[str, str], folder: str) -> None:
    for number in (1, 2):
        os.dup2(os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    exec(compile(code, "fresh", "exec"), {"__name__": "__main__"})
