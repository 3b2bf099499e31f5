"""Draw the chart of docs/benchmarks.md and the README from the rows in ``results``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from page import Steps

DOCS = Path(__file__).parent.parent / "docs"
NAMES = {"resnet50": "ResNet-50, batch 16, 224 px", "bert": "BERT-base, batch 8, 128 tokens"}
MODES = ["plain", "checkpoint", "division", "actnn", "auto"]
COLORS = {"plain": "#8d99ae", "checkpoint": "#c9ada7", "division": "#0077b6", "actnn": "#00b4d8", "auto": "#48b89f"}


def new_figure(columns: int, size: tuple[float, float], rows: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """Panels side by side, in rows, in the style of all charts."""
    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "lowtide", "font.family": "sans-serif", "font.size": 10}
    )
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes.ravel()


def save(figure: Figure, path: Path) -> None:
    """Without a date and with fixed ids, so that the same rows give the same file."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def bars(found: dict[str, Steps], path: Path) -> None:
    """Peak and time of a step, from the same processes, with the tuned allocator."""
    figure, axes = new_figure(2 * len(found), (4.2 * len(found) + 1, 2.9))
    for i, (subject, group) in enumerate(found.items()):
        modes = [mode for mode in MODES if group.has("tuned", mode)]
        peaks = [group.peak("tuned", mode) / 2**20 for mode in modes]
        plain = median(group.cells("tuned", "plain", "median_s"))
        times = [plain * group.slower("tuned", mode) for mode in modes]
        for axis, values, unit in ((axes[2 * i], peaks, "peak MiB of a step"), (axes[2 * i + 1], times, "seconds")):
            drawn = axis.bar(modes, values, color=[COLORS[m] for m in modes], width=0.7)
            axis.bar_label(drawn, [f"{v / values[0]:.2f}x" for v in values], padding=2, fontsize=9)
            axis.set_title(f"{NAMES[subject]}\n{unit}", fontsize=9.5)
            axis.tick_params(axis="x", rotation=35)
            axis.margins(y=0.15)
    save(figure, path)


def main() -> None:
    from page import RESULTS, read_steps  # here, because others take the style of charts from this module alone

    rows = read_steps(RESULTS / "steps.csv", "step")
    found = {name: group for (name, _, precision, load), group in rows.items() if precision == "float32" and not load}
    bars({name: found[name] for name in NAMES if name in found}, DOCS / "steps.svg")
    print(f"drew {DOCS / 'steps.svg'}")


if __name__ == "__main__":
    main()
