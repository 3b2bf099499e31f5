"""How far each method's gradient is off along an exact training run, beside SGD's own noise.

Explains a table of ``evidence.training``: the exact run of its first seed is repeated, and after some epochs
``lowtide.check`` compares every arm's gradient of one training batch with the exact one.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import lowtide
from benchmarks.run import environment
from evidence.fidelity import RESULTS
from evidence.tasks import ARMS, TASKS
from evidence.training import Job, prepared, train_epoch

FIELDS = [
    *("task", "arm", "epoch", "error", "bias", "chance", "cosine", "sgd_noise", "worst", "worst_share", "ratio"),
    *("date", "commit", "machine", "threads", "python", "torch", "numba", "lowtide"),
]
UNSEEN = 12345
"""Seed of the batch on which gradients are compared."""


def rows_of(name: str, epochs: list[int], arms: list[str]) -> Iterator[dict[str, Any]]:
    """After each of ``epochs`` one row for each arm."""
    task, job = TASKS[name], Job(name, "exact", 0)
    problem, parts = prepared(job, task.epochs)
    batch = next(iter(problem.batches(torch.Generator().manual_seed(UNSEEN))))
    for epoch in range(max(epochs)):
        train_epoch(problem, parts, job, epoch)
        for arm in arms if epoch + 1 in epochs else ():
            method, options, _ = ARMS[arm]
            assert method is not None
            found = lowtide.check(parts["model"], batch, problem.loss, method, seconds=0, **options)
            worst, share = worst_of(found)
            row = {"task": name, "arm": arm, "epoch": epoch + 1, "ratio": found.report.ratio}
            row |= {"worst": worst, "worst_share": share}
            yield row | {key: getattr(found.overall, key) for key in ("error", "bias", "chance", "cosine", "sgd_noise")}


def worst_of(found: lowtide.CheckResult) -> tuple[str, float]:
    """Of the parameters with a tenth of the gradient's length the one whose error is largest beside its SGD noise."""
    shares = {
        name: d.error / d.sgd_noise
        for name, d in found.parameters.items()
        if d.sgd_noise and d.norm >= 0.1 * found.overall.norm
    }
    return max(shares.items(), key=lambda item: item[1], default=("", math.nan))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="?", default="cifar", choices=list(TASKS))
    parser.add_argument("--epochs", type=int, nargs="+", help="after which to measure; default: first, middle, last")
    parser.add_argument("--out", type=Path, default=RESULTS / "noise.csv")
    given = parser.parse_args()
    lowtide.tune_cpu_allocator()
    task, machine = TASKS[given.task], environment()
    epochs = sorted(given.epochs or {1, (task.epochs + 1) // 2, task.epochs})
    arms = [arm for arm in (*task.arms, *task.more) if ARMS[arm].method is not None and not ARMS[arm].adapt]
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for row in rows_of(given.task, epochs, arms):
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in (row | machine).items()})
            file.flush()
            print(f"epoch {row['epoch']}, {row['arm']}: error {row['error']:.3f}, bias {row['bias']:.3f}", flush=True)


if __name__ == "__main__":
    main()
