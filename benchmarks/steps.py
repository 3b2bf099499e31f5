"""Time and peak of a training step: one mode in one process, as in a user's training, and the processes step by turns.

A mode finds in its heap what it left there itself, and nothing of another mode. The processes of a group are alive at
the same time, and while one steps the others wait: a machine that becomes slower for a minute becomes so for all. Time,
page faults and peak of a row come from the same steps of the same process. See README.md here for the method.
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

from cases import BATCH, METHODS, SUBJECTS, checkpoint_blocks, child, in_child, step, tune
from lowtide.machine.measure import reset_peak, resident
from lowtide.malloc import give_back
from rows import ORIGIN, append, origin, read
from turns import take_turns

WARM = 4  # steps before any counts: the first compiles, and an adaptive method measures in steps 1 and 3
TURNS = 12  # that count
TURN_SECONDS = 0.7  # at least: shorter steps are repeated within a turn, and the fastest of them counts
KEY = ("case", "subject", "size", "precision", "load", "allocator")
MEASURED = (
    "first_s",
    "third_s",
    "min_s",
    "median_s",
    "turns",
    "ratio",
    "ratio_low",
    "ratio_high",
    "faults",
    "peak",
    "rest",
    "process",
    "plain",
    "stored",
)
FIELDS = [*KEY, "mode", "round", *MEASURED, "deciding_s", *ORIGIN]
LOAD = "a busy process on each core"
SETTINGS = ("tuned", "default", "autocast", "busy")


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

    @property
    def setting(self) -> str:
        """One of :data:`SETTINGS`."""
        return "busy" if self.load else "autocast" if self.precision == "bfloat16" else self.allocator


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
    """Train in one mode and report each turn; see README.md for what is returned."""
    tune(argument)
    torch.manual_seed(0)
    subject = SUBJECTS[argument["subject"]](argument["size"])
    if argument["mode"] == "checkpoint":
        checkpoint_blocks(subject)
    faults: list[int] = []

    def run() -> float:
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step(subject, argument["mode"], argument["precision"])
        seconds = time.perf_counter() - start
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        return seconds

    warm = [run() for _ in range(argument["warm"])]
    del faults[:]
    highest = resident("VmHWM")
    reset_peak()
    emit({})
    for _ in range(argument["turns"]):
        seconds = [run()]
        while sum(seconds) < argument["turn_seconds"]:
            seconds.append(run())
        emit({"seconds": min(seconds)})
    peak = resident("VmHWM")
    session = subject.session
    report = session.report() if session else None
    subject.model.zero_grad(set_to_none=True)
    gc.collect()
    if not give_back():
        raise RuntimeError("what is at rest can be told with glibc's allocator only")
    return {
        "warm": warm,
        "faults": statistics.median(faults),
        "peak": peak,
        "rest": resident("VmRSS"),
        "process": max(peak, highest),
        "plain": report.plain_nbytes if report else 0,
        "stored": report.stored_nbytes if report else 0,
        "deciding_s": session.tuner_seconds / (len(warm) + len(faults)) if session else 0.0,
    }


def compile_child(argument: dict[str, Any], emit: Any) -> dict[str, Any]:
    """Fill the cache of kernels, which is there but in the first process that ever uses one."""
    from lowtide.kernels import compiled, cpu

    for name in compiled.KERNELS:
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


def measure(group: Group, turns: int) -> dict[str, dict[str, Any]]:
    """The cells of each mode's row."""
    argument = {
        "subject": group.subject,
        "size": group.size,
        "precision": group.precision,
        "warm": WARM,
        "turns": turns,
        "turn_seconds": TURN_SECONDS,
    }
    with busy(group.load):
        processes = {m: child("steps:step_child", argument | {"mode": m}, group.allocator) for m in group.modes}
        found = take_turns(processes, turns, "plain")
    for cells in found.values():
        cells["first_s"], _, cells["third_s"], _ = cells.pop("warm")
    return found


def run(path: Path, groups: list[Group], rounds: int, budget: float, turns: int = TURNS) -> bool:
    """Measure what ``path`` does not hold yet, at most ``budget`` seconds long; tell whether all is there now."""
    made = origin()
    done: set[tuple[str, ...]] = set()
    for row in read(path):
        if row["commit"] != made["commit"]:
            raise SystemExit(f"{path} has rows of {row['commit']}, and this is {made['commit']}: choose another --out")
        done.add((*(row[name] for name in KEY), row["round"]))
    wanted = [(group, n) for n in range(1, rounds + 1) for group in groups]
    in_child("steps:compile_child", {}, "default")
    start = time.monotonic()
    for i, (group, number) in enumerate(wanted):
        if (*group.key, str(number)) in done:
            continue
        if time.monotonic() - start > budget:
            print(f"{i} of {len(wanted)} groups have run; the same command goes on")
            return False
        for mode, found in measure(group, turns).items():
            cells = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in found.items()}
            named = dict(zip(KEY, group.key, strict=True)) | {"mode": mode, "round": number}
            append(path, FIELDS, named | cells | made)
            words = [*group.key[1:], mode]
            print(
                f"{number}: {' '.join(w for w in words if w):48s} {found['median_s']:7.3f} s {found['ratio']:5.2f}x"
                f" ({found['ratio_low']:.2f}-{found['ratio_high']:.2f})"
                f"  peak {(found['peak'] - found['rest']) / 2**20:5.0f} MiB above {found['rest'] / 2**20:.0f}"
                f"  {found['faults'] / 1e3:5.0f} k faults",
                flush=True,
            )
    return True
