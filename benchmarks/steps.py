"""Time and peak of a training step: one mode in one process, as in a user's training; the processes by turns.

A mode finds in its heap what it left there itself, and nothing of another mode. Time, page faults and peak of a row
come from the same steps of the same process. See README.md here for the method.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cases import BATCH, METHODS, SUBJECTS, checkpoint_blocks, in_child, step, tune
from lowtide.machine.malloc import give_back
from lowtide.machine.measure import reset_peak, resident
from rows import ORIGIN, append, origin, read

WARM = 4  # steps before any counts: the first compiles, and an adaptive method measures in steps 1 and 3
LEAST, MOST = 3, 40  # steps that count
SECONDS = 8.0  # that they take together, within those bounds
KEY = ("case", "subject", "size", "precision", "load", "allocator")
MEASURED = (
    "first_s",
    "third_s",
    "min_s",
    "median_s",
    "steps",
    "ratio",
    "faults",
    "peak",
    "rest",
    "process",
    "plain",
    "stored",
)
FIELDS = [*KEY, "mode", "round", *MEASURED, "deciding_s", *ORIGIN]
LOAD = "a busy process on each core"


@dataclass(frozen=True)
class Group:
    """Modes that are compared with one another; the first is plain."""

    case: str
    subject: str
    size: int
    modes: tuple[str, ...]
    precision: str = "float32"
    load: str = ""
    allocator: str = "tuned"

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(str(getattr(self, name)) for name in KEY)


def plan(full: bool) -> list[Group]:
    """What a round measures."""
    common = ("plain", "checkpoint", "division", "actnn", "auto")
    few = ("plain", "checkpoint", "division", "auto")  # without maps division is actnn with the same bits for all
    every = ("plain", "checkpoint", *METHODS)
    groups = []
    for subject in ("resnet50", "bert", "gpt2", "demo"):
        size = BATCH[subject]
        modes = every if full else common if subject in ("resnet50", "demo") else few
        for allocator in ("tuned", "default") if full or subject == "resnet50" else ("tuned",):
            groups.append(Group("step", subject, size, modes, allocator=allocator))
        if full or subject == "resnet50":
            groups.append(Group("step", subject, size, few, precision="bfloat16"))
    if full:
        groups += [Group("step", subject, BATCH[subject], every) for subject in ("resnet20", "unet3d")]
    groups.append(Group("step", "resnet50", BATCH["resnet50"], few, load=LOAD))
    return groups


def step_child(argument: dict[str, Any], emit: Any) -> dict[str, Any]:
    """Train in one mode; see README.md for what is returned."""
    tune(argument)
    torch.manual_seed(0)
    subject = SUBJECTS[argument["subject"]](argument["size"])
    if argument["mode"] == "checkpoint":
        checkpoint_blocks(subject)
    seconds: list[float] = []
    faults: list[int] = []

    def run() -> None:
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step(subject, argument["mode"], argument["precision"])
        seconds.append(time.perf_counter() - start)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    for _ in range(argument["warm"]):
        run()
    warm = seconds[:]
    del seconds[:], faults[:]
    highest = resident("VmHWM")
    reset_peak()
    while len(seconds) < argument["least"] or (sum(seconds) < argument["seconds"] and len(seconds) < MOST):
        run()
    peak = resident("VmHWM")
    session = subject.session
    report = session.report() if session else None
    subject.model.zero_grad(set_to_none=True)
    gc.collect()
    if not give_back():
        raise RuntimeError("what is at rest can be told with glibc's allocator only")
    return {
        "warm": warm,
        "seconds": seconds,
        "faults": statistics.median(faults),
        "peak": peak,
        "rest": resident("VmRSS"),
        "process": max(peak, highest),
        "plain": report.plain_nbytes if report else 0,
        "stored": report.stored_nbytes if report else 0,
        "deciding_s": session.tuner_seconds / (len(warm) + len(seconds)) if session else 0.0,
    }


def compile_child(argument: dict[str, Any], emit: Any) -> dict[str, Any]:
    """Fill the cache of kernels, which is there but in the first process that ever uses one."""
    from lowtide.kernels import cpu

    for name in cpu.KERNELS:
        cpu.compile(name)
    return {}


@contextlib.contextmanager
def busy(load: str) -> Iterator[None]:
    """Keep every core busy meanwhile, if ``load`` says so."""
    with contextlib.ExitStack() as stack:
        for _ in range((os.cpu_count() or 1) if load else 0):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def measure(group: Group, mode: str) -> dict[str, Any]:
    """The cells of one row, but for those that need other rows."""
    argument = {
        "subject": group.subject,
        "size": group.size,
        "mode": mode,
        "precision": group.precision,
        "warm": WARM,
        "least": LEAST,
        "seconds": SECONDS,
    }
    with busy(group.load):
        found = in_child("steps:step_child", argument, group.allocator)
    seconds = found.pop("seconds")
    found["first_s"], _, found["third_s"], _ = found.pop("warm")
    found |= {"min_s": min(seconds), "median_s": statistics.median(seconds), "steps": len(seconds)}
    return found


def run(path: Path, groups: list[Group], rounds: int, budget: float) -> bool:
    """Measure what ``path`` does not hold yet, at most ``budget`` seconds long; tell whether all is there now."""
    made = origin()
    done: dict[tuple[str, ...], float] = {}
    for row in read(path):
        if row["commit"] != made["commit"]:
            raise SystemExit(f"{path} has rows of {row['commit']}, and this is {made['commit']}: choose another --out")
        done[(*(row[name] for name in KEY), row["mode"], row["round"])] = float(row["median_s"])
    wanted = [(group, mode, n) for n in range(1, rounds + 1) for group in groups for mode in group.modes]
    in_child("steps:compile_child", {}, "default")
    start = time.monotonic()
    for i, (group, mode, number) in enumerate(wanted):
        if (*group.key, mode, str(number)) in done:
            continue
        if time.monotonic() - start > budget:
            print(f"{i} of {len(wanted)} processes have run; the same command goes on")
            return False
        found = measure(group, mode)
        done[(*group.key, mode, str(number))] = found["median_s"]
        found["ratio"] = found["median_s"] / done[(*group.key, "plain", str(number))]
        cells = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in found.items()}
        append(path, FIELDS, dict(zip(KEY, group.key, strict=True)) | {"mode": mode, "round": number} | cells | made)
        words = [*group.key[1:], mode]
        print(
            f"{number}: {' '.join(w for w in words if w):48s} {found['median_s']:7.3f} s {found['ratio']:5.2f}x"
            f"  peak {(found['peak'] - found['rest']) / 2**20:5.0f} MiB above {found['rest'] / 2**20:.0f}"
            f"  {found['faults'] / 1e3:5.0f} k faults",
            flush=True,
        )
    return True
