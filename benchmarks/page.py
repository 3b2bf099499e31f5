"""Write the tables of docs/benchmarks.md from a results file: ``page.py results/X.csv``.

Of several rows for one thing the last counts. A table stands between ``<!-- name -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
NETWORKS = {
    "resnet50": "ResNet-50, batch 16, 224 px",
    "bert": "BERT-base shapes, batch 8, 128 tokens",
    "gpt2": "GPT-2 small shapes, batch 2, 256 tokens",
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
    "auto": "**auto**, 2.3 bits",
    "tinyscript": "tinyscript, 2 bits",
    "gact": "gact, 4 bits on average",
    "pool": "pool by 2",
    "cast-bfloat16": "cast to bfloat16",
    "bf16": "bfloat16 autocast",
    "bf16+division": "autocast and division",
    "bf16+actnn": "autocast and actnn",
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


def read(path: Path) -> dict[Key, float]:
    """(case, subject, size, mode, allocator, metric) -> median."""
    found: dict[Key, float] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            key = (row["case"], row["subject"], row["size"], row["mode"], row["allocator"], row["metric"])
            found[key] = float(row["median"])
    return found


def picker(found: dict[Key, float], case: str, subject: str, size: str) -> Callable[..., float]:
    """Looks up a mode's metric; 0.0 if it was not measured."""

    def pick(mode: str, metric: str, allocator: str = "default") -> float:
        return found.get((case, subject, size, mode, allocator, metric), 0.0)

    return pick


def steps(found: dict[Key, float]) -> str:
    """A row for each mode of each network."""
    lines = [
        "| | peak MiB | of plain | time, default allocator | time, tuned allocator | kept for backward |",
        "|---|---|---|---|---|---|",
    ]
    measured = dict.fromkeys((subject, size) for case, subject, size, *_ in found if case == "step")
    for subject, size in sorted(measured, key=lambda item: list(NETWORKS).index(item[0])):
        pick = picker(found, "step", subject, size)
        for mode, name in MODES.items():
            peak = pick(mode, "peak")
            if not peak:
                continue
            times = [(pick(mode, "time", a), pick("plain", "time", a)) for a in ("default", "tuned")]
            cells = [f"{own:.3g} s" if mode == "plain" else f"{own / base:.2f}x" for own, base in times]
            stored = pick(mode, "stored")
            cells.append(f"{pick(mode, 'plain') / stored:.1f}x less" if stored else "")
            head = f"**{NETWORKS[subject]}**: plain" if mode == "plain" else name
            ratio = peak / pick("plain", "peak")
            lines.append(f"| {head} | {peak / 2**20:.0f} | {ratio:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def codecs(found: dict[Key, float]) -> str:
    """Bandwidth over that of copy_."""
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


def sizes(found: dict[Key, float]) -> str:
    """Bandwidth over that of copy_ against the size of a tensor."""
    shown = [f"{codec} {way}" for codec in ("group_quant-2", "block_mean-2", "mask") for way in ("encode", "decode")]
    heads = [f"{CODECS[name.split()[0]].removesuffix(', 2 bits')}, {name.split()[1]}" for name in shown]
    lines = ["| float32 | `copy_` | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    for size in sorted({int(key[2]) for key in found if key[0] == "codec"}):
        copy = found["codec", "copy_", str(size), "copy_", "tuned", "bandwidth"]
        cells = [f"{found['codec', name, str(size), name, 'tuned', 'bandwidth'] / copy:.2f}x" for name in shown]
        lines.append(f"| {size / 1e6:.3g} MB | {copy:.1f} GB/s | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def limits(found: dict[Key, float]) -> str:
    """Nanoseconds a value by the size of maps."""

    def time(name: str) -> str:
        return f"{found['limits', name, '', name, 'tuned', 'time']:.2f}"

    lines = ["| maps | 56 x 56 | 28 x 28 | 14 x 14 | 7 x 7 |", "|---|---|---|---|---|"]
    for codec in ("block means", "groups"):
        for way in ("encode", "decode"):
            cells = [f"{time(f'{codec} {way} {s} near')} / {time(f'{codec} {way} {s} far')}" for s in (56, 28, 14, 7)]
            lines.append(f"| {codec}, {way}, near / far | " + " | ".join(cells) + " |")
    lines.append(f"\nReading alone takes {time('read')}, writing {time('write')}, `copy_` {time('copy')}.")
    return "\n".join(lines)


def growth(found: dict[Key, float]) -> str:
    """Time and peak against depth and batch."""
    lines = ["| | plain step | plain peak | compressed: time | peak | checkpoint: time | peak |", "|---" * 7 + "|"]
    measured = dict.fromkeys((subject, size) for case, subject, size, *_ in found if case == "scaling")
    for subject, size in measured:
        pick = picker(found, "scaling", subject, size)
        depth = subject.removeprefix("depth-")
        deep = depth != subject
        name = f"MLP, {depth} layers of 512, batch {size} (actnn)" if deep else f"ResNet-50, batch {size} (division)"
        cells = [f"{pick('plain', 'time'):.3f} s", f"{pick('plain', 'peak') / 2**20:.0f} MiB"]
        for mode in ("actnn" if deep else "division", "checkpoint"):
            for metric in ("time", "peak"):
                own = pick(mode, metric)
                cells.append(f"{own / pick('plain', metric):.2f}x" if own else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


TABLES = {"steps": steps, "limits": limits, "growth": growth, "codecs": codecs, "sizes": sizes}


def filled(page: str, found: dict[Key, float]) -> str:
    """The page with its tables made anew."""
    for name, table in TABLES.items():
        before, start, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("\n<!-- end -->")
        if not start or not end:
            raise ValueError(f"the page has no place for {name!r}")
        page = before + start + table(found) + end + after
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), read(Path(sys.argv[1]))), encoding="utf-8")
    print(f"wrote {PAGE.name}")
