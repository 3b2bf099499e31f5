"""Write the tables of docs/benchmarks.md from the rows in ``results``: ``page.py``; ``page.py readme`` prints README's.

A table stands between ``<!-- name -->`` and ``<!-- end -->``. Of several rounds of a step it has the median. A time is
the median over turns of a step over plain's of the same turn, with the 95 % interval of that median in brackets. Of
several rows for anything else the last counts.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
RESULTS = Path(__file__).parent / "results"
NETWORKS = {
    "resnet50": "ResNet-50, batch 16, 224 px",
    "bert": "BERT-base shapes, batch 8, 128 tokens",
    "gpt2": "GPT-2 small shapes, batch 2, 256 tokens",
    "demo": "the demo's small ResNet, batch 64, 32 px",
    "resnet20": "ResNet-20, batch 128, 32 px",
    "unet3d": "3-D U-Net, batch 2, 32x64x64",
}
MODES = {
    "plain": "plain",
    "checkpoint": "checkpoint of each block",
    "lossless": "lossless",
    "division": "**division**, 2 bits",
    "actnn": "**actnn**, 2 bits on average",
    "actnn-fixed": "actnn, 2 bits each (L2)",
    "auto": "**auto**, 3 bits on average",
    "tinyscript": "tinyscript, 2 bits",
    "gact": "gact, 4 bits on average",
    "pool": "pool by 2",
    "cast-bfloat16": "cast to bfloat16",
}
CODECS = {
    "fresh-copy": "`clone()` (into fresh memory)",
    "group_quant-1": "groups, 1 bit",
    "group_quant-2": "groups, 2 bits",
    "group_quant-4": "groups, 4 bits",
    "group_quant-8": "groups, 8 bits",
    "block_mean-2": "block means, 2 bits",
    "block_mean-4": "block means, 4 bits",
    "block_mean-pool2": "pool by 2",
    "mask": "mask",
    "cast-bfloat16": "cast to bfloat16",
    "cast-float8": "cast to float8, scaled",
}
LARGE = "102760448"  # bytes: 103 MB
Key = tuple[str, str, str, str, str, str]
Row = dict[str, str]


class Steps:
    """Rows of steps of one network in one setting, by allocator and mode."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            self._rows.setdefault((row["allocator"], row["mode"]), []).append(row)

    def has(self, allocator: str, mode: str) -> bool:
        return (allocator, mode) in self._rows

    def cells(self, allocator: str, mode: str, name: str) -> list[float]:
        return [float(row[name]) for row in self._rows.get((allocator, mode), [])]

    def peak(self, allocator: str, mode: str) -> float:
        """Of a step, above what is at rest."""
        pairs = zip(self.cells(allocator, mode, "peak"), self.cells(allocator, mode, "rest"), strict=True)
        return median(peak - rest for peak, rest in pairs)

    def time(self, allocator: str, mode: str) -> str:
        if mode == "plain":
            return f"{median(self.cells(allocator, mode, 'median_s')):.3g} s"
        rows = self._rows[allocator, mode]  # earlier ones have no bounds: their rounds bound the ratio
        low = min(float(row.get("ratio_low", row["ratio"])) for row in rows)
        high = max(float(row.get("ratio_high", row["ratio"])) for row in rows)
        return f"{self.slower(allocator, mode):.2f}x ({low:.2f}-{high:.2f})"

    def slower(self, allocator: str, mode: str) -> float:
        """A step over plain's of the same turn."""
        return median(self.cells(allocator, mode, "ratio"))

    def less(self, allocator: str, mode: str) -> str:
        """How much less is kept for backward."""
        stored = median(self.cells(allocator, mode, "stored"))
        return f"{median(self.cells(allocator, mode, 'plain')) / stored:.1f}x less" if stored else ""


def read_steps(path: Path, case: str) -> dict[tuple[str, str, str, str], Steps]:
    """(subject, size, precision, load) -> its rows, in the order of the file."""
    found: dict[tuple[str, str, str, str], list[Row]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["case"] == case:
                found.setdefault((row["subject"], row["size"], row["precision"], row["load"]), []).append(row)
    return {key: Steps(rows) for key, rows in found.items()}


def read(path: Path) -> dict[Key, float]:
    """(case, subject, size, mode, allocator, metric) -> median."""
    found: dict[Key, float] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = (row["case"], row["subject"], row["size"], row["mode"], row["allocator"], row["metric"])
            found[key] = float(row["median"])
    return found


def steps(results: Path, file: str = "steps.csv") -> str:
    """A row for each mode of each network."""
    lines = [
        "| | **tuned allocator:** time | peak MiB | of plain | whole process "
        "| **default:** time | peak MiB | of plain | whole process | page faults | kept for backward |",
        "|---" * 11 + "|",
    ]
    found = read_steps(results / file, "step")
    order = list(NETWORKS)
    for key in sorted(found, key=lambda k: (bool(k[3]), k[2] != "float32", order.index(k[0]))):
        subject, _, precision, load = key
        group = found[key]
        head = NETWORKS[subject]
        head += ", autocast to bfloat16" if precision == "bfloat16" else ""
        head += f", beside {load}" if load else ""
        for mode, name in MODES.items():
            cells = []
            for allocator in ("tuned", "default"):
                if not group.has(allocator, mode):
                    cells += [""] * 4
                    continue
                peak = group.peak(allocator, mode)
                cells += [
                    group.time(allocator, mode),
                    f"{peak / 2**20:.0f}",
                    f"{peak / group.peak(allocator, 'plain'):.2f}",
                    f"{median(group.cells(allocator, mode, 'process')) / 2**20:.0f}",
                ]
            if not any(cells):
                continue
            faults = group.cells("default", mode, "faults")
            cells.append(f"{median(faults) / 1e6:.2f} M" if faults else "")
            cells.append(group.less("tuned", mode))
            lines.append(f"| {f'**{head}**: plain' if mode == 'plain' else name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def readme(results: Path) -> str:
    """The table of the README: the tuned allocator, float32."""
    shown = {"plain": "plain", "checkpoint": "checkpoint", "division": "division", "actnn": "actnn", "auto": "auto"}
    lines = ["| | peak of a step, MiB | of the whole process | time of a step | kept for backward |", "|---" * 5 + "|"]
    found = read_steps(results / "steps.csv", "step")
    for subject, network in NETWORKS.items():
        for (name, _, precision, load), group in found.items():
            if name != subject or precision != "float32" or load or name not in ("resnet50", "bert", "gpt2"):
                continue
            modes = [mode for mode in shown if group.has("tuned", mode)]
            cells = [
                [f"{group.peak('tuned', m) / 2**20:.0f}" for m in modes],
                [f"{median(group.cells('tuned', m, 'process')) / 2**20:.0f}" for m in modes],
                [f"{group.slower('tuned', m):.2f}" for m in modes],
                ["1", *(group.less("tuned", m).removesuffix(" less") or "-" for m in modes[1:])],
            ]
            head = f"{network}: {' / '.join(shown[m] for m in modes)}"
            lines.append(f"| {head} | " + " | ".join(" / ".join(cell) for cell in cells) + " |")
    return "\n".join(lines)


def codecs(results: Path) -> str:
    """Bandwidth over that of copy_."""
    found = read(results / "codecs.csv")
    copies = [found["codec", "copy_", LARGE, "copy_", allocator, "bandwidth"] for allocator in ("default", "tuned")]
    lines = [
        "| | encode, default | encode, tuned | decode, default | decode, tuned |",
        "|---|---|---|---|---|",
        f"| `copy_` (into existing memory) | {copies[0]:.1f} GB/s | {copies[1]:.1f} GB/s | | |",
    ]
    for codec, name in CODECS.items():
        cells = []
        for way in (" encode", " decode") if codec != "fresh-copy" else ("",):
            for allocator, copy in zip(("default", "tuned"), copies, strict=True):
                subject = codec + way
                cells.append(f"{found['codec', subject, LARGE, subject, allocator, 'bandwidth'] / copy:.2f}x")
        lines.append(f"| {name} | " + " | ".join(cells + [""] * (4 - len(cells))) + " |")
    return "\n".join(lines)


def sizes(results: Path) -> str:
    """Bandwidth over that of copy_ against the size of a tensor."""
    found = read(results / "codecs.csv")
    shown = [f"{codec} {way}" for codec in ("group_quant-2", "block_mean-2", "mask") for way in ("encode", "decode")]
    heads = [f"{CODECS[name.split()[0]].removesuffix(', 2 bits')}, {name.split()[1]}" for name in shown]
    lines = ["| float32 | `copy_` | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    for size in sorted({int(key[2]) for key in found if key[0] == "codec"}):
        copy = found["codec", "copy_", str(size), "copy_", "tuned", "bandwidth"]
        cells = [f"{found['codec', name, str(size), name, 'tuned', 'bandwidth'] / copy:.2f}x" for name in shown]
        lines.append(f"| {size / 1e6:.3g} MB | {copy:.1f} GB/s | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def limits(results: Path) -> str:
    """Nanoseconds a value by the size of maps."""
    found = read(results / "codecs.csv")

    def time(name: str) -> str:
        return f"{found['limits', name, '', name, 'tuned', 'time']:.2f}"

    lines = ["| maps | 56 x 56 | 28 x 28 | 14 x 14 | 7 x 7 |", "|---|---|---|---|---|"]
    for codec in ("block means", "groups"):
        for way in ("encode", "decode"):
            cells = [f"{time(f'{codec} {way} {s} near')} / {time(f'{codec} {way} {s} far')}" for s in (56, 28, 14, 7)]
            lines.append(f"| {codec}, {way}, near / far | " + " | ".join(cells) + " |")
    lines += ["", "| one operator, far | before | now |", "|---|---|---|"]
    for operator, (before, now) in {
        "batch norm in training": ("batch norm, torch's", "batch norm, same bits"),
        "max pooling by 3 with a stride of 2": ("max pooling, torch's", "max pooling, same bits"),
        "noise of a dropout": ("dropout's noise, torch's", "dropout's noise, same bits"),
        "backward of a ReLU from bits": ("relu backward, fresh", "relu backward, in place"),
        "backward of a batch norm from 3-bit codes": ("batch norm backward, fresh", "batch norm backward, in place"),
        "three tensors of 3 bits, added up": ("chain of three, one by one", "chain of three, one pass"),
        "a ReLU's mask": ("bits above zero, any band", "bits above zero, a ReLU's"),
        "a ReLU and its mask": ("relu, then its mask", "relu with its mask"),
        "max pooling of bfloat16": ("bfloat16 max pooling, torch's", "bfloat16 max pooling, same bits"),
        "a ReLU of bfloat16 and its mask": ("bfloat16 relu, then its mask", "bfloat16 relu with its mask"),
    }.items():
        lines.append(f"| {operator} | {time(before)} | {time(now)} |")
    lines.append(f"\nReading alone takes {time('read')}, writing {time('write')}, `copy_` {time('copy')}.")
    return "\n".join(lines)


TABLES: dict[str, Callable[[Path], str]] = {
    "steps": steps,
    "another machine": lambda results: steps(results, "steps_xeon.csv"),
    "no AVX-512": lambda results: steps(results, "steps_epyc.csv"),
    "limits": limits,
    "codecs": codecs,
    "sizes": sizes,
}


def filled(page: str, results: Path) -> str:
    """The page with its tables made anew."""
    for name, table in TABLES.items():
        before, start, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("\n<!-- end -->")
        if not start or not end:
            raise ValueError(f"the page has no place for {name!r}")
        page = before + start + table(results) + end + after
    return page


if __name__ == "__main__":
    if sys.argv[1:] == ["readme"]:
        print(readme(RESULTS))
    else:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
        print(f"wrote {PAGE.name}")
