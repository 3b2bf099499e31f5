"""Training on real data with each method: one run, one row, added when the run ends.

    python -m evidence.training                         the committed table: what is still missing of it
    python -m evidence.training cifar --arms division   some rows
    python -m evidence.training cifar-resnet20 --arms exact auto --seeds 1
    python -m evidence.training cifar --workers 1 --threads 1      in this process, on one core

Arms that imitate the noise of another read its size from the rows of ``evidence.noise``.

A run that is stopped goes on from its last epoch when the same command is given again. Delete a row of the CSV to run
it anew. Accuracy is that after the last epoch; the test set is not looked at before.
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import benchmarks.nets
import lowtide
from evidence import data, fidelity, muon, nets, tasks
from evidence.fidelity import RESULTS, environment
from evidence.tasks import ARMS, TASKS, Batch, Problem

_PAUSE = 60.0
"""Seconds between two checkpoints at least."""
_PROBED = 4
"""A probe sees the first of so many parts of a batch."""

NOISE = RESULTS / "noise.csv"

_FILES = (__file__, *(module.__file__ for module in (tasks, muon, nets, data, fidelity, benchmarks.nets)))
_CODE = hashlib.sha256(b"".join(Path(file or "").read_bytes() for file in _FILES)).hexdigest()[:8]
"""Of the code as it was imported: a file that changes while a run goes on does not change its name."""


class Job(NamedTuple):
    """One run."""

    task: str
    arm: str
    seed: int


FIELDS = [
    *("task", "arm", "seed", "accuracy", "loss", "epochs", "ratio", "stored_nbytes", "plain_nbytes"),
    *("cpu_seconds", "method", "options"),
    *("date", "commit", "machine", "threads", "python", "torch", "numba", "lowtide"),
]


def prepared(job: Job, epochs: int) -> tuple[Problem, dict[str, Any]]:
    """The data, and what a run changes: model, optimizer, schedule and attachment, the last two if there are any."""
    task, arm = TASKS[job.task], ARMS[job.arm]
    problem = task.load(job.seed)
    torch.manual_seed(job.seed)
    model = task.build()
    if arm.perturbed:
        perturb(model, arm.perturbed, job.seed)
    optimizer = task.optimizer(model.parameters(), lr=task.rate)
    schedule = None
    if task.schedule is not None:
        schedule = task.schedule(optimizer, epochs * problem.steps)
    handle = None if arm.method is None else lowtide.attach(model, arm.method, seed=job.seed, **arm.options)
    return problem, {"model": model, "optimizer": optimizer, "schedule": schedule, "handle": handle}


def perturb(model: nn.Module, size: float, seed: int) -> None:
    """Multiply every weight by 1 and a normal number of this size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator))


def run(job: Job, epochs: int | None = None) -> dict[str, Any]:
    """Train; the row of the run. ``epochs`` shortens it, for tests."""
    arm = ARMS[job.arm]
    epochs = TASKS[job.task].epochs if epochs is None else epochs
    problem, parts = prepared(job, epochs)
    model, handle = parts["model"], parts["handle"]
    state = _resumed(job, parts)
    saved = time.monotonic()
    while state["epoch"] < epochs:
        began = time.process_time()
        state["loss"] = train_epoch(problem, parts, job, state["epoch"])
        state["epoch"] += 1
        if handle is not None:
            report = handle.report()
            state |= {name: getattr(report, name) for name in ("ratio", "stored_nbytes", "plain_nbytes")}
        state["cpu_seconds"] += time.process_time() - began
        if not math.isfinite(state["loss"]):
            break
        if time.monotonic() - saved > _PAUSE:
            _save(job, parts, state)
            saved = time.monotonic()
    model.eval()
    with torch.no_grad():
        accuracy = problem.accuracy(model)
    row = job._asdict() | {
        "accuracy": accuracy,
        "loss": state["loss"],
        "epochs": state["epoch"],
        "cpu_seconds": round(state["cpu_seconds"], 1),
        "method": arm.method or "",
        "options": arm.label(),
    }
    if handle is not None:
        row |= {name: state[name] for name in ("ratio", "stored_nbytes", "plain_nbytes")}
        handle.remove()
    machine = environment()
    if state["commit"] != machine["commit"]:
        machine["commit"] = f"{state['commit']}..{machine['commit']}"
    return row | machine


def train_epoch(problem: Problem, parts: dict[str, Any], job: Job, epoch: int) -> float:
    """One epoch; the mean loss of its last tenth. Stops where the loss is not finite."""
    model, optimizer, schedule = parts["model"], parts["optimizer"], parts["schedule"]
    arm = ARMS[job.arm]
    order = torch.Generator().manual_seed(job.seed + 1000 * epoch)
    torch.manual_seed(job.seed + 1000 * epoch)
    errors = {} if arm.noise_of is None else errors_along(job.task, arm.noise_of, read(NOISE))
    drawn = torch.Generator().manual_seed(job.seed + 1000 * epoch)
    losses: list[float] = []
    for step, batch in enumerate(problem.batches(order)):
        if arm.adapt and step == (epoch == 0):
            part = Batch(*(x[: -(-len(x) // _PROBED)] for x in batch))
            parts["handle"].adapt(lambda part=part: problem.loss(model, part))
        optimizer.zero_grad()
        loss = problem.loss(model, batch)
        loss.backward()
        if errors:
            add_noise(model, errors, epoch + step / problem.steps, drawn)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
    last = losses[-max(1, len(losses) // 10) :]
    return math.fsum(last) / len(last)


class Measured(NamedTuple):
    """The error of one parameter's gradient, as a part of its length, after some epochs."""

    epochs: list[float]
    errors: list[float]


def errors_along(task: str, arm: str, rows: Iterable[Mapping[str, str]]) -> dict[str, Measured]:
    """What ``evidence.noise`` found for each parameter."""
    found: dict[str, Measured] = {}
    for row in rows:
        if (row["task"], row["arm"]) == (task, arm) and row["parameter"]:
            measured = found.setdefault(row["parameter"], Measured([], []))
            measured.epochs.append(float(row["epoch"]))
            measured.errors.append(float(row["error"]))
    if not found:
        raise ValueError(
            f"the error of {arm!r} is not measured for {task!r}; run: python -m evidence.noise {task} --arms {arm!r}"
        )
    return found


def add_noise(model: nn.Module, errors: Mapping[str, Measured], epoch: float, generator: torch.Generator) -> None:
    """Add normal noise to each gradient, of the length that its error has at this time, the same for all its entries.

    Between two measurements the error is interpolated; before the first and after the last it is theirs.
    """
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        length = float(np.interp(epoch, *errors[name])) * float(gradient.norm())
        noise = torch.randn(gradient.shape, generator=generator)
        gradient.add_(noise, alpha=length / math.sqrt(gradient.numel()))


def _place(job: Job) -> Path:
    """Of the checkpoint; another one if the code of the task has changed since."""
    name = "-".join(map(str, job)).replace(" ", "").replace(",", "-")
    return data.folder() / f"run-{name}-{_CODE}.pt"


def _save(job: Job, parts: dict[str, Any], state: dict[str, Any]) -> None:
    path = _place(job)
    held = {name: part.state_dict() for name, part in parts.items() if part is not None}
    part = path.with_suffix(".part")
    torch.save(held | {"state": state}, part)
    part.replace(path)


def _resumed(job: Job, parts: dict[str, Any]) -> dict[str, Any]:
    """Where to go on: at the beginning, or where the last sitting stopped, with all parts as they were then."""
    path = _place(job)
    if not path.exists():
        commit = environment()["commit"]
        return {"epoch": 0, "loss": math.nan, "cpu_seconds": 0.0, "commit": commit}
    held = torch.load(path, weights_only=False)  # our own file
    for name, part in parts.items():
        if part is not None:
            part.load_state_dict(held[name])
    return held["state"]


# ---------------------------------------------------------------- the table


def read(path: Path) -> list[dict[str, str]]:
    """All rows so far."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def missing(jobs: Iterable[Job], path: Path) -> list[Job]:
    """Those without a row."""
    done = {Job(row["task"], row["arm"], int(row["seed"])) for row in read(path)}
    return [job for job in jobs if job not in done]


def append(row: dict[str, Any], path: Path) -> None:
    """One more row; the header first if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if not file.tell():
            writer.writeheader()
        writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})


def jobs_of(names: Iterable[str], arms: Iterable[str] | None, seeds: int | None) -> list[Job]:
    """Seed by seed, so that a table that is not finished yet has whole rows."""
    found = []
    for name in names:
        own = TASKS[name].arms
        counts = {arm: seeds or own.get(arm, 1) for arm in (own if arms is None else arms)}
        for seed in range(max(counts.values(), default=0)):
            found += [Job(name, arm, seed) for arm, count in counts.items() if seed < count]
    return found


def _quiet(threads: int) -> None:
    torch.set_num_threads(threads)
    lowtide.tune_cpu_allocator()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="task", help=f"any of {', '.join(TASKS)}")
    parser.add_argument("--arms", nargs="+", metavar="arm", help=f"any of {', '.join(map(repr, ARMS))}")
    parser.add_argument("--seeds", type=int, help="how many; default: those of the task, or 1")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time, each on its own cores")
    parser.add_argument("--threads", type=int, help="of each run; default: all cores over the workers")
    parser.add_argument("--out", type=Path, default=RESULTS / "training.csv")
    given = parser.parse_args()
    for what, chosen, known in (("task", given.tasks, TASKS), ("arm", given.arms or (), ARMS)):
        for name in itertools.filterfalse(known.__contains__, chosen):
            parser.error(f"unknown {what} {name!r}; choose from {', '.join(map(repr, known))}")
    jobs = missing(jobs_of(given.tasks or TASKS, given.arms, given.seeds), given.out)
    print(f"{len(jobs)} runs to do", flush=True)
    threads = given.threads or max(1, (os.cpu_count() or 1) // given.workers)
    failed = 0
    for job, result in _results(jobs, given.workers, threads):
        name = ", ".join(map(str, job))
        try:
            row = result()
        except Exception as error:  # the other runs are worth having
            failed += 1
            print(f"{name} failed: {error!r}", flush=True)
            continue
        append(row, given.out)
        _place(job).unlink(missing_ok=True)
        ratio = f", {row['ratio']:.1f}x less kept" if "ratio" in row else ""
        print(f"{name}: {row['accuracy']:.2f} %{ratio}", flush=True)
    if failed:
        raise SystemExit(f"{failed} runs failed; the same command runs them again")


def _results(jobs: list[Job], workers: int, threads: int) -> Iterator[tuple[Job, Callable[[], dict[str, Any]]]]:
    """Each job as it ends, with what returns its row or raises; one worker is this process."""
    if workers == 1:
        _quiet(threads)
        yield from ((job, functools.partial(run, job)) for job in jobs)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, initializer=_quiet, initargs=(threads,)) as pool:
        running = {pool.submit(run, job): job for job in jobs}
        yield from ((running[done], done.result) for done in as_completed(running))


if __name__ == "__main__":
    main()
