"""Write docs/evidence.md and draw docs/evidence.svg from the rows of ``evidence.training``."""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import NamedTuple

from benchmarks.chart import COLORS, DOCS, new_figure, save
from evidence.fidelity import RESULTS
from evidence.tasks import ARMS, TASKS
from evidence.training import read

Row = dict[str, str]
EXACT = "exact"
CLOSE = 0.3
"""Points of accuracy that count as none."""

# 97.5 % quantiles of Student's t for 1 to 9 degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Spread(NamedTuple):
    """Mean of some numbers, their standard deviation, and half the width of the mean's 95 % confidence interval."""

    mean: float
    deviation: float
    half: float


def spread(values: list[float]) -> Spread:
    """A single number has no spread.

    >>> mean, deviation, half = spread([1.0, 2.0, 3.0])
    >>> mean, deviation, round(half, 3)
    (2.0, 1.0, 2.484)
    """
    count = len(values)
    if count < 2:
        return Spread(values[0], math.nan, math.nan)
    deviation = statistics.stdev(values)
    quantile = _T[count - 2] if count - 2 < len(_T) else _T[-1]
    return Spread(statistics.fmean(values), deviation, quantile * deviation / math.sqrt(count))


def by_arm(rows: list[Row], task: str) -> dict[str, dict[int, Row]]:
    """Rows of each arm by seed, arms in the order of the task."""
    found: dict[str, dict[int, Row]] = {}
    known = (*TASKS[task].arms, *TASKS[task].more)
    for arm in dict.fromkeys((*known, *(row["arm"] for row in rows if row["task"] == task))):
        own = {int(row["seed"]): row for row in rows if (row["task"], row["arm"]) == (task, arm)}
        if own:
            found[arm] = own
    return found


def accuracies(rows: dict[int, Row]) -> list[float]:
    return [float(rows[seed]["accuracy"]) for seed in sorted(rows)]


def differences(rows: dict[int, Row], exact: dict[int, Row]) -> list[float]:
    """Accuracy less that of the exact run of the same seed, which began with the same weights and saw the same data."""
    both = sorted(set(rows) & set(exact))
    return [float(rows[seed]["accuracy"]) - float(exact[seed]["accuracy"]) for seed in both]


def judged(difference: Spread) -> str:
    """In words."""
    if math.isnan(difference.half):
        return "one run"
    if difference.mean + difference.half < 0:
        return "lower"
    return f"within {CLOSE}" if difference.mean >= -CLOSE else "no difference shown"


def table(rows: list[Row], task: str) -> list[str]:
    """One line for each arm."""
    arms = by_arm(rows, task)
    head = ("method", "options", "runs", "accuracy, %", "deviation", "less exact, points", "95 % interval", "")
    lines = [f"| {' | '.join((*head, 'kept for backward'))} |", "|---" * (len(head) + 1) + "|"]
    for arm, own in arms.items():
        first = next(iter(own.values()))
        found = spread(accuracies(own))
        cells = [first["method"] or "exact", first["options"], str(len(own)), f"{found.mean:.2f}"]
        cells.append("" if math.isnan(found.deviation) else f"{found.deviation:.2f}")
        pairs = differences(own, arms.get(EXACT, {}))
        if arm == EXACT or not pairs:
            cells += ["", "", ""]
        else:
            gap = spread(pairs)
            interval = "" if math.isnan(gap.half) else f"{gap.mean - gap.half:+.2f} to {gap.mean + gap.half:+.2f}"
            cells += [f"{gap.mean:+.2f}", interval, judged(gap)]
        ratio = statistics.fmean(float(row["ratio"]) for row in own.values()) if first["ratio"] else 1.0
        cells.append(f"{ratio:.1f}x less" if first["ratio"] else "1")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(rows: list[Row], tasks: list[str], path: Path) -> None:
    """Every run a point, every mean a line across."""
    heights = [len(by_arm(rows, task)) for task in tasks]
    figure, axes = new_figure(len(tasks), (4.2 * len(tasks), 1.2 + 0.36 * max(heights)))
    for axis, task in zip(axes, tasks, strict=True):
        arms = by_arm(rows, task)
        for place, (arm, own) in enumerate(arms.items()):
            values = accuracies(own)
            colour = COLORS.get(ARMS[arm].method or "plain", "#5a5a8a")
            axis.plot(values, [place] * len(values), "o", color=colour, markersize=5, alpha=0.8)
            mean = statistics.fmean(values)
            axis.plot([mean, mean], [place - 0.3, place + 0.3], color=colour, linewidth=2)
        if EXACT in arms:
            axis.axvline(statistics.fmean(accuracies(arms[EXACT])), color="#444444", linestyle="--", linewidth=0.8)
        axis.set_yticks(range(len(arms)), list(arms))
        axis.invert_yaxis()
        axis.set_title(TASKS[task].title, fontsize=9.5)
        axis.set_xlabel("test accuracy of the last epoch, %")
        axis.grid(axis="x", alpha=0.25)
    save(figure, path)


INTRODUCTION = """# Accuracy after training on real data

Written by `evidence/summary.py` from `evidence/results/training.csv`. `make evidence` runs what is missing of the
table, one run after another on each core, and writes this page; a stopped run goes on from its last epoch.
`python -m evidence.training --help` tells how to run one row anew, or one of those beyond the table (ResNet-20,
DenseNet, other methods and bits).

![Test accuracy of every run, method by method](evidence.svg)

## How it is measured
- Accuracy is that on the test set after the *last* epoch, whatever epochs before it had. Settings were chosen on exact
  runs alone; methods have their defaults but for the options given.
- Runs of one seed begin with the same weights and see the same batches and crops, whatever the method. The
  difference is taken seed by seed, and its 95 % interval is Student's t over the seeds: three seeds can show
  a difference only if it is about two and a half times its own deviation, two seeds nine times, ten seeds 0.7 times.
- `lower` means that the interval lies below 0. Otherwise `within 0.3` means that the mean difference is above -0.3
  points, and `no difference shown` that it is not.
- *Kept for backward* is autograd's saved bytes over those stored in the last step, the loss outside.
- Data: `evidence/data.py` fetches it and verifies checksums.
"""

ABOUT = {
    "cifar": """A ResNet for 32x32 images: a convolution of 16 channels, three stages of two blocks with 24, 48 and 96
channels that each begin with a stride of 2. SGD with momentum, batch 128, one cycle of the learning rate, images
moved by up to 2 pixels and mirrored; channels last.

**Every 2-bit method loses accuracy here**, `auto` less than half a point, the others more than one, and the loss
follows the error of the gradient in the second table: `auto`, with the smallest error at the same bytes, loses least,
`pool`, with a bias, most. The others show no bias, so what is left is noise. Over the whole gradient it is half of
SGD's own, but in the first block (in brackets) it is as large midway: there a step is as noisy as with half the batch,
and nine epochs do not make up for that. The network makes it hard: 24 channels on maps of 16x16 down to 4x4 give a
weight few values to average over, and with channels last a group of 256 values lies across all channels, whatever
their ranges. On the wider ResNet-14 of `docs/fidelity.md`, channels first, errors are smaller. That the noise is the
cause agrees with these rows and is not proven by them; more bits where they matter are what `lowtide.check` and the
guard are for.""",
    "imdb": """A transformer with two layers of width 64 over the first 128 words, AdamW, batch 64, one cycle of the
learning rate; the data has no official split, so a fixed shuffle makes one. Attention's tensors have 8 bits in every
method, so 2 bits on average are not reached as a whole. `gact` probes the gradient after the first step and before
each epoch.""",
    "cora": """A GCN of width 64 with dropout, Adam; 20 labelled papers of each class, 1000 others to test with, drawn
anew for each seed. `lowrank` with random signs and 2 bits is what EXACT (Liu et al. 2022) stores.""",
}


def noise_table(rows: list[Row]) -> list[str]:
    """Error of each arm's gradient after some epochs of the exact run, and SGD's own noise in the last line."""
    epochs = list(dict.fromkeys(row["epoch"] for row in rows))
    found = {(row["arm"], row["epoch"]): row for row in rows}
    lines = [f"| | {' | '.join(f'epoch {epoch}' for epoch in epochs)} |", "|---" * (len(epochs) + 1) + "|"]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells = [f"{float(found[arm, epoch]['error']):.2f}" for epoch in epochs]
        biased = [float(found[arm, epoch]["chance"]) < 0.01 / len(rows) for epoch in epochs]
        worst = [float(found[arm, epoch]["worst_share"]) for epoch in epochs]
        cells = [
            f"{cell} ({share:.2f})" if math.isfinite(share) else cell for cell, share in zip(cells, worst, strict=True)
        ]
        marked = [f"{cell}, biased" if bias else cell for cell, bias in zip(cells, biased, strict=True)]
        lines.append(f"| {arm} | {' | '.join(marked)} |")
    own = [next(row["sgd_noise"] for row in rows if row["epoch"] == epoch) for epoch in epochs]
    lines.append(f"| SGD's own noise | {' | '.join(f'{float(n):.2f}' if n else 'unknown' for n in own)} |")
    return lines


NOISE = """
**Error of the gradient along the exact run** (`python -m evidence.noise`, `evidence/results/noise.csv`), as a part of
the gradient of one batch, by `lowtide.check` after some epochs of seed 0. An unbiased error *e* beside SGD's noise *s*
makes the variance of a step 1 + (*e*/*s*)^2 times as large, as a smaller batch would. In brackets *e*/*s* of the
parameter where it is largest, among those with a tenth of the gradient's length.
"""


def page(rows: list[Row], noise: list[Row]) -> str:
    """All of it."""
    lines = [INTRODUCTION]
    for task in tasks_in(rows):
        own = [row for row in rows if row["task"] == task]
        commits = ", ".join(dict.fromkeys(row["commit"] for row in own))
        dates = ", ".join(dict.fromkeys(row["date"] for row in own))
        first = own[0]
        lines += [f"## {TASKS[task].title}", ABOUT.get(task, ""), "", *table(rows, task), ""]
        lines.append(
            f"Commit {commits}, {dates}, {first['machine']}, Python {first['python']}, torch {first['torch']}, Numba "
            f"{first['numba']}.\n"
        )
        measured = [row for row in noise if row["task"] == task]
        if measured:
            lines += [NOISE, *noise_table(measured), "", f"Commit {measured[0]['commit']}, {measured[0]['date']}.\n"]
    return "\n".join(lines)


def tasks_in(rows: list[Row]) -> list[str]:
    """Those with any row."""
    return [task for task in TASKS if any(row["task"] == task for row in rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS / "training.csv")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the figure and the page")
    given = parser.parse_args()
    rows = read(given.results)
    draw(rows, tasks_in(rows), given.docs / "evidence.svg")
    (given.docs / "evidence.md").write_text(page(rows, read(given.results.with_name("noise.csv"))), encoding="utf-8")
    print(f"drew {given.docs / 'evidence.svg'} and wrote {given.docs / 'evidence.md'}")


if __name__ == "__main__":
    main()
