"""Rows of measurements in CSV files, each with where it comes from."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import lowtide
from lowtide.malloc import glibc_version

RESULTS = Path(__file__).parent / "results"
ORIGIN = ("date", "commit", "machine", "threads", "python", "torch", "numba", "glibc", "lowtide")


def origin() -> dict[str, Any]:
    """The last commit that touched what is measured ("+" if that was changed since), the machine and the versions."""

    def git(*words: str) -> str:
        command = ["git", *words, "--", "src", "benchmarks", ":!benchmarks/results"]
        return subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent.parent).stdout.strip()

    try:
        import numba

        numba_version = numba.__version__
    except ImportError:
        numba_version = "none"
    names = [x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git("log", "-1", "--format=%h") + ("+" if git("status", "--porcelain", "-uno") else ""),
        "machine": f"{os.cpu_count()} x {names[0] if names else platform.processor()}",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba_version,
        "glibc": ".".join(map(str, glibc_version() or ("none",))),
        "lowtide": lowtide.__version__,
    }


def append(path: Path, fields: list[str], row: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields)
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
