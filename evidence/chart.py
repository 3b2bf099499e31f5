"""Draw docs/fidelity.svg and write the table docs/fidelity.md from the rows of a run of ``evidence.fidelity``."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from benchmarks.chart import COLORS, DOCS, new_figure, save
from evidence.fidelity import ENTRIES, RESULTS, SUBJECTS

Row = dict[str, str]
NOISE = "sgd"
MARKERS = "osD^vPX*<>hp"
TICKS = (1, 2, 4, 8, 16, 32)


def read(path: Path) -> dict[str, list[Row]]:
    """The rows of each network, in the order of the file."""
    found: dict[str, list[Row]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["net"], []).append(row)
    return found


def styles() -> dict[str, tuple[str, str]]:
    """Colour and marker of each series: always the same, whatever methods a file holds."""
    series = list(dict.fromkeys(entry.series for entry in ENTRIES))
    others = iter(matplotlib.colormaps["Dark2"].colors + matplotlib.colormaps["tab10"].colors)
    return {
        name: (COLORS.get(name) or matplotlib.colors.to_hex(next(others)), MARKERS[i % len(MARKERS)])
        for i, name in enumerate(series)
    }


def panel(axis: Axes, rows: list[Row], title: str) -> None:
    """Error against bits; a method without error has no place on a logarithmic scale."""
    look = styles()
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["series"] == NOISE:
            axis.axhline(float(row["error"]), color="#444444", linestyle="--", linewidth=1)
            axis.annotate("SGD's own noise", (1, float(row["error"])), (-2, 3), xycoords=("axes fraction", "data"),
                          textcoords="offset points", ha="right", fontsize=9, color="#444444")  # fmt: skip
        elif float(row["error"]) > 0:
            points.setdefault(row["series"], []).append((float(row["bits"]), float(row["error"])))
    for series, found in points.items():
        colour, marker = look[series]
        axis.plot(
            *zip(*sorted(found, key=lambda point: (point[0], -point[1])), strict=True),
            color=colour,
            marker=marker,
            markersize=6,
            label=series,
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(TICKS, [str(tick) for tick in TICKS])
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("stored bits for each value, side information included")
    axis.grid(alpha=0.25)


def draw(found: dict[str, list[Row]], path: Path) -> None:
    figure, axes = new_figure(len(found), (4.6 * len(found), 4.2))
    for axis, (net, rows) in zip(axes, found.items(), strict=True):
        panel(axis, rows, SUBJECTS[net].title)
    axes[0].set_ylabel("relative error of the whole gradient")
    handles = {}
    for axis in axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    save(figure, path)


def table(found: dict[str, list[Row]]) -> str:
    """The rows as a page."""
    lines = ["# Error of the gradient against stored bits", ""]
    lines += ["Written by `evidence/chart.py` from `evidence/results/fidelity.csv`; `docs/methods.md` explains both."]
    for net, rows in found.items():
        first = rows[0]
        noise = next(row for row in rows if row["series"] == NOISE)
        lines += [
            "",
            f"## {SUBJECTS[net].title}",
            f"After {first['steps']} exact steps, batch {first['batch']}. Commit {first['commit']}, {first['date']}, "
            f"{first['machine']}, Python {first['python']}, torch {first['torch']}, Numba {first['numba']}.",
            "",
            f"SGD's own noise: {_short(noise['error'])} of a batch's gradient (cosine {_short(noise['cosine'])}), "
            f"{_short(noise['noise_of_mean'])} of the mean of {noise['draws']} batches.",
            "",
            "| method | options | bits | error | error of the mean | draws | cosine | kept for backward |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            if row is not noise:
                cells = (
                    *(row["method"], row["options"], f"{float(row['bits']):.3f}", _short(row["error"])),
                    *(_short(row["error_of_mean"]), row["draws"], f"{float(row['cosine']):.4f}"),
                    f"{float(row['ratio']):.1f}x less",
                )
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _short(number: str) -> str:
    return f"{float(number):.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS / "fidelity.csv")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the figure and the table")
    given = parser.parse_args()
    found = read(given.results)
    draw(found, given.docs / "fidelity.svg")
    (given.docs / "fidelity.md").write_text(table(found), encoding="utf-8")
    print(f"drew {given.docs / 'fidelity.svg'} and wrote {given.docs / 'fidelity.md'}")


if __name__ == "__main__":
    main()
