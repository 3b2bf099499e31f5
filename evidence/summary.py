"""Write docs/evidence.md and draw docs/evidence.svg from the rows of ``evidence.training``."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.chart import COLORS, DOCS, new_figure, save
from evidence.fidelity import RESULTS
from evidence.tasks import ARMS, CONTROLS, EXACT, NULL, TASKS
from evidence.training import read

Row = dict[str, str]
Runs = dict[str, list[float]]
"""Accuracies of each arm, by seed."""

CLOSE = 0.3
"""Points of accuracy that count as none."""

_COLUMNS = 2
"""Panels of the figure in a row."""

# 97.5 % quantiles of Student's t for 1 to 9 degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def quantile(freedom: int) -> float:
    """Of Student's t at 97.5 %; from 10 degrees of freedom on by its expansion, to three digits.

    >>> quantile(1), round(quantile(10), 3), round(quantile(30), 3), round(quantile(10**9), 3)
    (12.706, 2.228, 2.042, 1.96)
    """
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


class Gap(NamedTuple):
    """A difference of means, and half the width of its 95 % interval."""

    mean: float
    half: float

    @property
    def interval(self) -> str:
        return "" if math.isnan(self.half) else f"{self.mean - self.half:+.2f} to {self.mean + self.half:+.2f}"


class Deviation(NamedTuple):
    """The standard deviation of a run within its arm, taken from all arms together."""

    size: float
    freedom: int


def deviation_of(runs: Iterable[list[float]]) -> Deviation:
    """One for all arms; those with one run tell nothing.

    >>> deviation_of([[1.0, 3.0], [5.0], [4.0, 4.0, 4.0]])
    Deviation(size=0.816496580927726, freedom=3)
    """
    several = [own for own in runs if len(own) > 1]
    freedom = sum(len(own) - 1 for own in several)
    squares = math.fsum(statistics.variance(own) * (len(own) - 1) for own in several)
    return Deviation(math.sqrt(squares / freedom), freedom) if freedom else Deviation(math.nan, 0)


def gap(runs: list[float], controls: list[float], deviation: Deviation) -> Gap:
    """Mean of independent runs less that of others, with one deviation for all.

    >>> gap([2.0, 4.0], [1.0, 1.0], Deviation(1.0, 2))
    Gap(mean=2.0, half=4.303)
    """
    mean = statistics.fmean(runs) - statistics.fmean(controls)
    if not deviation.freedom:
        return Gap(mean, math.nan)
    return Gap(mean, quantile(deviation.freedom) * deviation.size * math.sqrt(1 / len(runs) + 1 / len(controls)))


def paired_gap(runs: dict[int, float], exact: dict[int, float]) -> Gap:
    """Mean of the differences between runs of one seed.

    >>> gap = paired_gap({0: 1.0, 1: 3.0, 2: 5.0}, {0: 1.0, 1: 2.0, 2: 3.0})
    >>> gap.mean, round(gap.half, 3)
    (1.0, 2.484)
    """
    found = [runs[seed] - exact[seed] for seed in sorted(set(runs) & set(exact))]
    if len(found) < 2:
        return Gap(found[0], math.nan) if found else Gap(math.nan, math.nan)
    half = quantile(len(found) - 1) * statistics.stdev(found) / math.sqrt(len(found))
    return Gap(statistics.fmean(found), half)


def judged(difference: Gap) -> str:
    """In words; by the whole interval, so that too few runs never count as "no loss"."""
    low, high = difference.mean - difference.half, difference.mean + difference.half
    if math.isnan(difference.half):
        return "one run"
    if low >= -CLOSE and high <= CLOSE:
        return f"within {CLOSE}" if low <= 0 <= high else f"within {CLOSE}, {'lower' if high < 0 else 'higher'}"
    if low <= 0 <= high:
        return "not resolved"
    return "lower" if high < 0 else "higher"


# ---------------------------------------------------------------- rows


class Table(NamedTuple):
    """The rows of one task by arm and seed, arms in the order of the task."""

    task: str
    arms: dict[str, dict[int, Row]]

    @property
    def accuracies(self) -> dict[str, dict[int, float]]:
        return {arm: {seed: float(own[seed]["accuracy"]) for seed in sorted(own)} for arm, own in self.arms.items()}

    @property
    def deviation(self) -> Deviation:
        return deviation_of(list(own.values()) for own in self.accuracies.values())

    def gap(self, arm: str, others: Iterable[str]) -> Gap:
        """To the mean of other arms; the arm's own runs are never among them."""
        found = self.accuracies
        if TASKS[self.task].paired:
            return paired_gap(found[arm], found[EXACT])
        against = [value for other in others if other != arm for value in found.get(other, {}).values()]
        return gap(list(found[arm].values()), against, self.deviation) if against else Gap(math.nan, math.nan)

    def ratio(self, arm: str) -> float:
        """Autograd's saved bytes over those stored; noise that is added stands where the arm it imitates does."""
        shown = ARMS[arm].noise_of or arm
        found = [float(row["ratio"]) for row in self.arms.get(shown, {}).values() if row["ratio"]]
        return statistics.fmean(found) if found else 1.0


def table_of(rows: Iterable[Row], task: str) -> Table:
    own = [row for row in rows if row["task"] == task]
    known = (*TASKS[task].arms, *TASKS[task].more)
    found: dict[str, dict[int, Row]] = {}
    for arm in dict.fromkeys((*known, *(row["arm"] for row in own))):
        seeds = {int(row["seed"]): row for row in own if row["arm"] == arm}
        if seeds:
            found[arm] = seeds
    return Table(task, found)


def tasks_in(rows: list[Row]) -> list[str]:
    """Those with any row."""
    return [task for task in TASKS if any(row["task"] == task for row in rows)]


# ---------------------------------------------------------------- text


def lines_of(found: Table) -> list[str]:
    """A table with one line for each arm."""
    paired = TASKS[found.task].paired
    several = sum(arm in found.arms for arm in CONTROLS) > 1
    head = ["arm", "options", "runs", "accuracy, %", "deviation"]
    head += ["less controls", "95 % interval"] if several else []
    head += ["less exact, seed by seed" if paired else "less exact", "± at 95 %", "", "kept for backward"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for arm, own in found.arms.items():
        values = list(found.accuracies[arm].values())
        method = next(iter(own.values()))["method"]
        options = next(iter(own.values()))["options"]
        cells = [arm, f"{method} {options}".strip(), str(len(own)), f"{statistics.fmean(values):.2f}"]
        cells.append(f"{statistics.stdev(values):.2f}" if len(values) > 1 else "")
        apart = found.gap(arm, CONTROLS if several else (EXACT,))
        if several:
            cells += [f"{apart.mean:+.2f}", apart.interval]
        alone = found.gap(arm, (EXACT,))
        known = arm != EXACT and not math.isnan(alone.mean)
        cells += [f"{alone.mean:+.2f}" if known else "", f"{alone.half:.2f}" if known and alone.half >= 0 else ""]
        cells.append("" if arm == EXACT and not several else judged(apart))
        cells.append(f"{found.ratio(arm):.1f}x less" if method else "1")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def reading(found: Table) -> list[str]:
    """What the table shows and what it does not, in sentences made from its numbers."""
    if TASKS[found.task].paired or not found.deviation.freedom:
        return []
    controls = [arm for arm in CONTROLS if arm in found.arms]
    methods = [arm for arm in found.arms if arm not in CONTROLS]
    lines = [
        f"- A run deviates by {found.deviation.size:.2f} points from the mean of its arm (all arms together, "
        f"{found.deviation.freedom} degrees of freedom)."
    ]
    if NULL in controls:
        chance = found.gap(NULL, (EXACT,))
        lines.append(
            f"- Chance alone: `{NULL}` ends {chance.mean:+.2f} ± {chance.half:.2f} beside `{EXACT}`.{_alike(found)}"
        )
    verdicts = {arm: judged(found.gap(arm, controls)) for arm in methods}
    for verdict, said in (
        (("lower",), "Lower than the controls"),
        ((f"within {CLOSE}, lower",), f"Lower, but by less than {CLOSE} points"),
        ((f"within {CLOSE}",), f"Within {CLOSE} points of the controls, and no loss shown"),
        (("higher", f"within {CLOSE}, higher"), "Higher than the controls"),
        (("not resolved", "one run"), f"Not resolved: neither a loss nor its absence to {CLOSE} points is shown"),
    ):
        arms = [arm for arm in methods if verdicts[arm] in verdict]
        if arms:
            lines.append(f"- {said}: {', '.join(_with_gap(arm, found.gap(arm, controls)) for arm in arms)}.")
    for arm in methods:
        imitated = ARMS[arm].noise_of
        if imitated in found.arms:
            apart, left = found.gap(arm, controls), found.gap(imitated, (arm,))
            lines.append(
                f"- Cause: noise as large as the error of `{imitated}`, added to exact gradients, changes accuracy by "
                f"{apart.mean:+.2f} ± {apart.half:.2f}. What is left to `{imitated}` itself is {left.mean:+.2f} ± "
                f"{left.half:.2f}."
            )
    return lines


def _with_gap(arm: str, found: Gap) -> str:
    return f"`{arm}` {found.mean:+.2f}" + ("" if math.isnan(found.half) else f" ± {found.half:.2f}")


def _alike(found: Table) -> str:
    """Whether runs of one seed end alike, which is what comparing them seed by seed would need."""
    exact, null = found.accuracies[EXACT], found.accuracies[NULL]
    both = sorted(set(exact) & set(null))
    values = [[own[seed] for seed in both] for own in (exact, null)]
    if len(both) < 3 or any(len(set(own)) < 2 for own in values):
        return ""
    return f" Over {len(both)} seeds the two correlate by {statistics.correlation(*values):+.2f}."


INTRODUCTION = f"""# Accuracy after training on real data

Written by `evidence/summary.py` from `evidence/results/training.csv` and `evidence/results/noise.csv`. `make evidence`
runs what is missing of them and writes this page; a stopped run goes on from its last epoch. `python -m
evidence.training --help` tells how to run one row anew, or one of those beyond the tables.

![Accuracy lost against bytes kept](evidence.svg)

The figure shows each arm's mean accuracy less that of the controls, with its 95 % interval; the band is what two
control arms differ by from chance. Open marks are exact gradients with noise added, drawn where the method stands whose
noise it is.

## How it is measured
- Accuracy is that on the test set after the *last* epoch, whatever epochs before it had. Settings were chosen on exact
  runs alone, none of which are in the tables; methods have their defaults but for the options given.
- Runs are not compared seed by seed. Runs of one seed begin with the same weights and see the same batches, but a
  change in the last digits soon makes another run of it. So *control* arms stand beside the methods: `exact`; `exact,
  perturbed`, whose first weights are off by a millionth; and `8 bits`, whose gradient is off by less than a hundredth.
- A difference is that of two means of independent runs. Its 95 % interval is Student's t with one deviation for all
  arms of the table, pooled within arms. It is not corrected for the number of arms: of twenty that lose nothing, one
  lies outside by chance. Only Cora is compared seed by seed, because there the seed also divides the data.
- `within {CLOSE}` means that the *whole* interval is less than {CLOSE} points away from 0, `lower` that it lies below
  0, `not resolved` that it holds 0 and reaches further than {CLOSE} points: such an arm may lose something or nothing.
- *Kept for backward* is autograd's saved bytes over those stored in the last step, the loss outside.
- Data: `evidence/data.py` fetches it and verifies checksums.
"""

NOISE = """
**Error of the gradient along the exact run** (`python -m evidence.noise`, `evidence/results/noise.csv`), as a part of
the gradient of one batch, by `lowtide.check` after some epochs of seed 0. An unbiased error *e* beside SGD's noise *s*
makes the variance of a step 1 + (*e*/*s*)^2 times as large, as a smaller batch would; *s* is the spread of the exact
gradients of eight batches. In brackets *e*/*s* of the
parameter where it is largest, among those with a tenth of the gradient's length.
"""


def noise_table(rows: list[Row]) -> list[str]:
    """Error of each arm's gradient after some epochs of the exact run, and SGD's own noise in the last line."""
    whole = [row for row in rows if not row["parameter"]]
    epochs = list(dict.fromkeys(row["epoch"] for row in whole))
    found = {(row["arm"], row["epoch"]): row for row in whole}
    lines = [f"| | {' | '.join(f'epoch {epoch}' for epoch in epochs)} |", "|---" * (len(epochs) + 1) + "|"]
    for arm in dict.fromkeys(row["arm"] for row in whole):
        cells = []
        for epoch in epochs:
            row = found.get((arm, epoch))
            if row is None:  # not measured yet
                cells.append("")
                continue
            cell, share = f"{float(row['error']):.2g}", float(row["worst_share"])
            cell += f" ({share:.2f})" if math.isfinite(share) else ""
            cells.append(f"{cell}, biased" if float(row["chance"]) < 0.01 / len(whole) else cell)
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    own = [next(row["sgd_noise"] for row in whole if row["epoch"] == epoch) for epoch in epochs]
    lines.append(f"| SGD's own noise | {' | '.join(f'{float(noise):.2f}' for noise in own)} |")
    return lines


ABOUT = {
    "cifar": """A narrow ResNet for 32x32 images: a convolution of 16 channels, three stages of two blocks with 24, 48
and 96 channels that each begin with a stride of 2. SGD with momentum, batch 64, one cycle of the learning rate, images
moved by up to 2 pixels and mirrored; channels last. In the test the model's answers for an image and for its mirror
image are averaged. It is short and narrow so that many runs fit: it says nothing about networks that are trained to the
end. With 24 channels on maps of 16x16 down to 4x4 a weight has few values to average over, and with channels last a
group of 256 values of the published methods lies across all channels, whatever their ranges: compression has it hard
here. The groups of `auto` follow channels.""",
    "cifar-short": """Six convolutions behind a fixed one that whitens patches of 2x2 pixels: two each with 16, 64 and
64 channels, with max pooling, batch norm and ReLU. Muon, batch 200, a rate that rises and falls along straight lines,
images moved by up to 2 pixels and mirrored; channels last. It trains on 40,000 images, and the other 10,000 join the
test set: of 10,000 test images alone, chance would be most of what runs of one arm differ by. In the test the model's
answers for an image and for its mirror image are averaged. A run takes three minutes of a core, so that many fit. A
part of the saving is max pooling's: nobody reads the values of its input, and its indices need two of 64 bits.
Rates and epochs were chosen by exact runs on those 10,000 images, which are half of the test: accuracies may be a
little too good, those of all arms alike. The guard looks every hundred steps, six times in a run. Here it changed
nothing: guarded runs end as those of their seed without it.""",
    "cifar-nine": """The narrow ResNet-14 again, for longer: SGD with momentum, batch 128, one cycle of the learning
rate, images moved by up to 2 pixels and mirrored; channels last. There are no null arms, and no runs of `auto`
yet.""",
    "cifar-wide": """The network of the table above with 32, 128 and 128 channels, channels first, in two epochs. In
this order of memory a group of the published methods mostly lies within one channel.""",
    "imdb": """A transformer with two layers of width 64 over the first 128 words, AdamW, batch 64, one cycle of the
learning rate; the data has no official split, so a fixed shuffle makes one. `gact` probes the gradient after the first
step and before each epoch.""",
    "cora": """A GCN of width 64 with dropout, Adam; 20 labelled papers of each class, 1000 others to test with, drawn
anew for each seed. `lowrank` with random signs and 2 bits is what EXACT (Liu et al. 2022) stores.""",
}


def page(rows: list[Row], noise: list[Row]) -> str:
    """All of it."""
    lines = [INTRODUCTION]
    for task in tasks_in(rows):
        found = table_of(rows, task)
        own = [row for row in rows if row["task"] == task]
        commits = ", ".join(dict.fromkeys(row["commit"] for row in own))
        dates = ", ".join(dict.fromkeys(row["date"] for row in own))
        machines, first = ", ".join(dict.fromkeys(row["machine"] for row in own)), own[0]
        lines += [f"## {TASKS[task].title}", ABOUT.get(task, ""), "", *lines_of(found), "", *reading(found), ""]
        lines.append(
            f"Commit {commits}, {dates}, {machines}, Python {first['python']}, torch {first['torch']}, Numba "
            f"{first['numba']}.\n"
        )
        measured = [row for row in noise if row["task"] == task]
        if measured:
            commits, dates = (", ".join(dict.fromkeys(row[key] for row in measured)) for key in ("commit", "date"))
            lines += [NOISE, *noise_table(measured), "", f"Commit {commits}, {dates}.\n"]
    return "\n".join(lines)


# ---------------------------------------------------------------- figure


def draw(tables: list[Table], path: Path) -> None:
    """Accuracy lost against bytes kept, one panel for each task."""
    columns, rows = min(_COLUMNS, len(tables)), -(-len(tables) // _COLUMNS)
    figure, axes = new_figure(columns, (5.2 * columns, 4.4 * rows), rows)
    for axis in axes[len(tables) :]:
        axis.set_visible(False)
    for axis, found in zip(axes, tables, strict=False):
        placed = {}
        for arm in found.arms:
            apart = found.gap(arm, CONTROLS)
            if math.isnan(apart.mean):  # the only control
                apart = Gap(0.0, math.nan)
            place = placed[arm] = (found.ratio(arm), apart.mean)
            half = None if math.isnan(apart.half) else apart.half
            colour = _colour(arm)
            fill = "white" if ARMS[arm].noise_of else colour
            axis.errorbar(*place, half, fmt="o", color=colour, markerfacecolor=fill, markersize=5, capsize=2)
        # Names stand in a column at the right, in the order of their points, each with a line to its own.
        for rank, arm in enumerate(sorted(placed, key=lambda arm: placed[arm][1]), start=1):
            axis.annotate(
                arm,
                placed[arm],
                (1.04, rank / (len(placed) + 1)),
                textcoords="axes fraction",
                fontsize=8,
                va="center",
                color=_colour(arm),
                arrowprops={
                    "arrowstyle": "-",
                    "color": _colour(arm),
                    "linewidth": 0.5,
                    "alpha": 0.6,
                    "relpos": (0, 0.5),
                },
            )
        if NULL in found.arms and EXACT in found.arms:
            half = found.gap(NULL, (EXACT,)).half
            axis.axhspan(-half, half, color="#999999", alpha=0.2, linewidth=0)
        axis.axhline(0, color="#444444", linestyle="--", linewidth=0.8)
        axis.set_title(TASKS[found.task].title, fontsize=9.5)
        axis.set_xlabel("times fewer bytes kept for backward")
        axis.set_ylabel("accuracy less that of the controls, points")
        axis.grid(alpha=0.25)
    save(figure, path)


def _colour(arm: str) -> str:
    """Of its method, or of the method whose noise it has."""
    imitated = ARMS[arm].noise_of
    return COLORS.get(ARMS[arm if imitated is None else imitated].method or "plain", "#5a5a8a")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS / "training.csv")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the figure and the page")
    given = parser.parse_args()
    rows = read(given.results)
    draw([table_of(rows, task) for task in tasks_in(rows)], given.docs / "evidence.svg")
    (given.docs / "evidence.md").write_text(page(rows, read(given.results.with_name("noise.csv"))), encoding="utf-8")
    print(f"drew {given.docs / 'evidence.svg'} and wrote {given.docs / 'evidence.md'}")


if __name__ == "__main__":
    main()
