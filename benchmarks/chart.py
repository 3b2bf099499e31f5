"""Draw the charts of docs/benchmarks.md and the README from a results file: ``chart.py results/X.csv``."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parent.parent / "docs"
NAMES = {"resnet50": "ResNet-50, batch 16, 224 px", "bert": "BERT-base, batch 8, 128 tokens"}
MODES = ["plain", "checkpoint", "division", "actnn", "auto"]
COLORS = {"plain": "#8d99ae", "checkpoint": "#c9ada7", "division": "#0077b6", "actnn": "#00b4d8", "auto": "#48b89f"}


def read(path: Path) -> dict[tuple[str, str, str, str], float]:
    """(subject, mode, metric, allocator) -> median, the last row winning."""
    found = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["case"] == "step":
                found[row["subject"], row["mode"], row["metric"], row["allocator"]] = float(row["median"])
    return found


def new_figure(columns: int, size: tuple[float, float]) -> tuple[Figure, Sequence[Axes]]:
    """Panels side by side, in the style of all charts."""
    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "lowtide", "font.family": "sans-serif", "font.size": 10}
    )
    figure, axes = plt.subplots(1, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def save(figure: Figure, path: Path) -> None:
    """Without a date and with fixed ids, so that the same rows give the same file."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def bars(found: dict[tuple[str, str, str, str], float], subjects: list[str], path: Path) -> None:
    figure, axes = new_figure(2 * len(subjects), (4.2 * len(subjects) + 1, 2.9))
    for i, subject in enumerate(subjects):
        modes = [mode for mode in MODES if (subject, mode, "time", "tuned") in found]
        # Time with the tuned allocator: with glibc's default, page faults slow plain PyTorch down most.
        for axis, metric, allocator, scale, unit in (
            (axes[2 * i], "peak", "default", 2**20, "peak MiB of a step"),
            (axes[2 * i + 1], "time", "tuned", 1.0, "seconds a step, tuned allocator"),
        ):
            values = [found[subject, mode, metric, allocator] / scale for mode in modes]
            drawn = axis.bar(modes, values, color=[COLORS[m] for m in modes], width=0.7)
            axis.bar_label(drawn, [f"{v / values[0]:.2f}x" for v in values], padding=2, fontsize=9)
            axis.set_title(f"{NAMES.get(subject, subject)}\n{unit}", fontsize=9.5)
            axis.tick_params(axis="x", rotation=35)
            axis.margins(y=0.15)
    save(figure, path)


def main() -> None:
    found = read(Path(sys.argv[1]))
    subjects = [s for s in NAMES if (s, "plain", "time", "default") in found]
    bars(found, subjects, DOCS / "steps.svg")
    print(f"drew {DOCS / 'steps.svg'}")


if __name__ == "__main__":
    main()
