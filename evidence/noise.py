"""How far each method's gradient is off along an exact training run, beside SGD's own noise.

Explains a table of ``evidence.training``: the exact run of its first seed is repeated, and after some epochs
``lowtide.check`` compares every arm's gradient of one training batch with the exact one. The arms that add noise to
exact gradients take its size from these rows.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowtide
from evidence.fidelity import environment
from evidence.tasks import ARMS, TASKS, Batch, Problem
from evidence.training import NOISE, Job, prepared, read, train_epoch
from lowtide.session.replay import gradients
from lowtide.verify.check import Difference

FIELDS = [
    *("task", "arm", "epoch", "parameter", "norm", "error", "bias", "chance", "cosine", "sgd_noise"),
    *("worst", "worst_share", "ratio"),
    *("date", "commit", "machine", "threads", "python", "torch", "numba", "lowtide"),
]
UNSEEN = 12345
"""Seed of the batches on which gradients are compared."""
BATCHES = 8
"""On so many SGD's own noise is measured; the first of them is the one on which gradients are compared."""
IMITATED = tuple(arm.noise_of for arm in ARMS.values() if arm.noise_of is not None)
"""Arms whose parameters have rows of their own."""


def measurable(name: str) -> list[str]:
    """The task's arms that ``lowtide.check`` can judge: not those that probe or change along the run."""
    arms = ((arm, ARMS[arm]) for arm in (*TASKS[name].arms, *TASKS[name].more))
    return [name for name, arm in arms if arm.method and not arm.adapt and "guard" not in arm.options]


def rows_of(name: str, epochs: list[int], arms: list[str]) -> Iterator[dict[str, Any]]:
    """After each of ``epochs`` a row for each arm, and one for each parameter of those that are imitated."""
    task, job = TASKS[name], Job(name, "exact", 0)
    problem, parts = prepared(job, task.epochs)
    batches = list(itertools.islice(problem.batches(torch.Generator().manual_seed(UNSEEN)), BATCHES))
    for epoch in range(max(epochs) + 1):
        model = parts["model"]
        sgd = sgd_noise(model, problem, batches) if epoch in epochs else {}
        for arm in arms if epoch in epochs else ():
            method, options = ARMS[arm].method, ARMS[arm].options
            assert method is not None
            found = lowtide.check(model, batches[0], problem.loss, method, seconds=0, **options)
            worst, share = worst_of(found, sgd)
            row = {"task": name, "arm": arm, "epoch": epoch}
            whole = {"worst": worst, "worst_share": share, "ratio": found.report.ratio}
            yield row | whole | _measures("", found.overall, sgd)
            if arm in IMITATED:
                yield from (row | _measures(parameter, own, sgd) for parameter, own in found.parameters.items())
        if epoch < max(epochs):
            train_epoch(problem, parts, job, epoch)


def _measures(parameter: str, found: Difference, sgd: dict[str, float]) -> dict[str, Any]:
    noise = sgd[parameter] / found.norm if found.norm else math.inf
    return dataclasses.asdict(found) | {"parameter": parameter, "sgd_noise": noise}


def sgd_noise(model: nn.Module, problem: Problem, batches: list[Batch]) -> dict[str, float]:
    """The deviation of a batch's exact gradient, as a length, by parameter; under "" that of the whole gradient.

    ``lowtide.check`` has one batch alone and measures it on slices, which batch norms can make useless.
    """
    found = [gradients(model, functools.partial(problem.loss, model, batch)) for batch in batches]
    squares = {name: float(torch.stack([g[name].double() for g in found]).var(0).sum()) for name in found[0]}
    return {name: math.sqrt(square) for name, square in {"": math.fsum(squares.values()), **squares}.items()}


def worst_of(found: lowtide.CheckResult, sgd: dict[str, float]) -> tuple[str, float]:
    """Of the parameters with a tenth of the gradient's length the one whose error is largest beside its SGD noise."""
    shares = {
        name: d.error * d.norm / sgd[name]
        for name, d in found.parameters.items()
        if sgd[name] and d.norm >= 0.1 * found.overall.norm
    }
    return max(shares.items(), key=lambda item: item[1], default=("", math.nan))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="?", default="cifar", choices=list(TASKS))
    parser.add_argument("--arms", nargs="+", help="whose rows to make anew; default: all that can be measured")
    parser.add_argument("--epochs", type=int, nargs="+", help="after which to measure; default: all, and before them")
    parser.add_argument("--out", type=Path, default=NOISE)
    given = parser.parse_args()
    lowtide.tune_cpu_allocator()
    machine, known = environment(), measurable(given.task)
    for arm in itertools.filterfalse(known.__contains__, given.arms or ()):
        parser.error(f"unknown arm {arm!r}; choose from {', '.join(map(repr, known))}")
    arms = given.arms or known
    epochs = sorted(given.epochs or range(TASKS[given.task].epochs + 1))
    kept = [row for row in read(given.out) if row["task"] != given.task or row["arm"] not in arms]
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(kept)
        for row in rows_of(given.task, epochs, arms):
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in (row | machine).items()})
            file.flush()
            if not row["parameter"]:
                print(
                    f"epoch {row['epoch']}, {row['arm']}: error {row['error']:.3f}, bias {row['bias']:.3f}", flush=True
                )


if __name__ == "__main__":
    main()
