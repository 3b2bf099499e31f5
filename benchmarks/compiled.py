"""Time and peak of a compiled training step with and without packing, beside the eager one: one mode in one process.

    python benchmarks/compiled.py --out benchmarks/results/compiled.csv

Rows are those of `steps.py` (README.md here says how they are measured); `held` is what the step keeps between forward
and backward, by what malloc has handed out. Modes with "compile" go through torch.compile with inductor.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import lowtide
from cases import SUBJECTS, in_child, tune
from lowtide.machine.malloc import give_back
from lowtide.machine.measure import reset_peak, resident
from rows import ORIGIN, append, origin

MODES = ("plain", "division", "auto", "compile", "compile-division", "compile-auto")
SIZES = {"resnet20": 128, "resnet50": 16, "bert": 8, "gpt2": 2}
WARM, LEAST, SECONDS, MOST = 4, 3, 8.0, 40
MEASURED = ("first_s", "min_s", "median_s", "steps", "ratio", "peak", "rest", "held", "plain", "stored")
FIELDS = ["subject", "size", "allocator", "mode", "round", *MEASURED, *ORIGIN]


class _Allocated(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def allocated() -> int:
    """Bytes that malloc has handed out."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Allocated
    gc.collect()
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd


def step_child(argument: dict[str, Any], emit: Any) -> dict[str, Any]:
    """Train in one mode."""
    tune(argument)
    torch.manual_seed(0)
    subject = SUBJECTS[argument["subject"]](argument["size"])
    method = argument["mode"].removeprefix("compile-")
    model, handle = subject.model, None
    if argument["mode"] == "compile":
        model = torch.compile(model)
    elif argument["mode"].startswith("compile-"):
        model = handle = lowtide.compile(model, method)
    elif argument["mode"] != "plain":
        handle = lowtide.attach(model, method)
    seconds: list[float] = []

    def run(measure_held: bool = False) -> int:
        subject.model.zero_grad(set_to_none=True)
        before = allocated() if measure_held else 0
        start = time.perf_counter()
        loss = subject.loss(model)
        held = allocated() - before if measure_held else 0
        loss.backward()
        seconds.append(time.perf_counter() - start)
        return held

    for _ in range(WARM):
        run()
    first = seconds[0]
    del seconds[:]
    reset_peak()
    while len(seconds) < LEAST or (sum(seconds) < SECONDS and len(seconds) < MOST):
        run()
    peak, counted = resident("VmHWM"), seconds[:]
    held = run(measure_held=True)
    report = handle.report() if handle is not None else None
    subject.model.zero_grad(set_to_none=True)
    gc.collect()
    give_back()
    return {
        "first_s": first,
        "min_s": min(counted),
        "median_s": statistics.median(counted),
        "steps": len(counted),
        "peak": peak,
        "rest": resident("VmRSS"),
        "held": held,
        "plain": report.plain_nbytes if report else 0,
        "stored": report.stored_nbytes if report else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the CSV file to append to")
    parser.add_argument("--subjects", nargs="+", choices=SIZES, default=["resnet20", "bert"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, help="the batch, in place of the subject's own")
    parser.add_argument("--allocator", choices=["tuned", "default"], default="tuned")
    options = parser.parse_args()
    made = origin()
    for number in range(1, options.rounds + 1):
        for subject in options.subjects:
            plain = 0.0
            for mode in options.modes:
                what = {"subject": subject, "size": options.size or SIZES[subject], "mode": mode}
                found = in_child("compiled:step_child", what, options.allocator)
                plain = plain or found["median_s"]
                found["ratio"] = found["median_s"] / plain
                cells = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in found.items()}
                append(options.out, FIELDS, what | {"allocator": options.allocator, "round": number} | cells | made)
                print(
                    f"{number}: {subject:9s} {mode:17s} {found['median_s']:7.3f} s {found['ratio']:5.2f}x"
                    f"  peak {(found['peak'] - found['rest']) / 2**20:6.0f} MiB  held {found['held'] / 2**20:6.0f} MiB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
