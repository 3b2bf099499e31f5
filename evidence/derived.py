"""What it saves, and what it costs, to rebuild tensors from others (``derive=True``), by network and bits.

Networks have fresh weights and random inputs: which tensors can be rebuilt, and how many bytes that saves, depends on
their ops alone. Errors are those of the whole gradient of one batch.
"""

from __future__ import annotations

import argparse
import csv
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import lowtide
from benchmarks.chart import DOCS
from evidence import shapes
from evidence.fidelity import RESULTS, Batch, environment, gradient, stored_bits, values_of

DRAWS = 4
BITS = (2, 4, 8)
CLASSES = 100


class Subject(NamedTuple):
    """A network, the batch that it is given, and the methods that are compared on it."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    methods: tuple[str, ...]


def _images(count: int) -> Batch:
    return Batch(torch.randn(count, 3, 64, 64), torch.randint(CLASSES, (count,)))


def _words() -> Batch:
    numbers = torch.randint(CLASSES, (4, 129))
    return Batch(numbers[:, :-1], numbers[:, 1:].flatten())


_MAPS = ("actnn", "division")
SUBJECTS = {
    "resnet50": Subject("ResNet-50", shapes.resnet50, functools.partial(_images, 8), _MAPS),
    "densenet121": Subject("DenseNet-121", shapes.densenet121, functools.partial(_images, 8), _MAPS),
    "vgg16": Subject("VGG-16 with batch norm", shapes.vgg16, functools.partial(_images, 8), _MAPS),
    "bert": Subject("4 layers of BERT-base", shapes.bert, _words, ("actnn",)),
    "llama": Subject("4 layers like Llama's", shapes.llama, _words, ("actnn",)),
}
LEVELS = {"actnn": {"level": "L2"}}

FIELDS = [
    *("net", "method", "bits", "derive", "stored_bits", "ratio", "error", "rebuilt", "draws"),
    *("stored_nbytes", "plain_nbytes"),
    *("date", "commit", "machine", "threads", "python", "torch", "numba", "lowtide"),
]
Row = dict[str, Any]


def rows_of(name: str, draws: int = DRAWS) -> Iterator[Row]:
    """One row for each method, number of bits, and whether tensors are rebuilt."""
    subject = SUBJECTS[name]
    torch.manual_seed(0)
    model, batch = subject.build(), subject.batch()
    exact = gradient(model, batch)
    length = float(exact.norm())
    values = values_of(model, batch)
    for method in subject.methods:
        for bits in BITS:
            for derive in (False, True):
                handle = lowtide.attach(model, method, derive=derive, bits=bits, **LEVELS.get(method, {}))
                try:
                    errors = [float((gradient(model, batch) - exact).norm()) / length for _ in range(draws)]
                    report = handle.report()
                finally:
                    handle.remove()
                yield {
                    "net": name,
                    "method": method,
                    "bits": bits,
                    "derive": derive,
                    "stored_bits": stored_bits(report, values),
                    "ratio": report.ratio,
                    "error": sum(errors) / draws,
                    "rebuilt": sum("rebuilt" in row.codec.split(" + ") for row in report.sites),
                    "draws": draws,
                    "stored_nbytes": report.stored_nbytes,
                    "plain_nbytes": report.plain_nbytes,
                }


def read(path: Path) -> list[dict[str, str]]:
    """All rows of a file; none if there is none."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(rows: list[dict[str, str]]) -> str:
    """The rows as a page, a net after the other."""
    lines = ["# Tensors rebuilt from others", ""]
    lines += [
        "Written by `evidence/derived.py` from `evidence/results/derived.csv`; `docs/methods.md` explains it under",
        '"Rebuilt tensors". `make evidence-derived` makes both anew in a few minutes.',
        "",
        "Fresh weights, random inputs: 8 images of 64 x 64, or 4 rows of 128 tokens. *Rebuilt* counts tensors that are",
        "not stored; *stored bits* are those for each value that a method may compress, rebuilt ones included;",
        '*error* is that of the whole gradient of one batch, mean of 4 draws. `actnn` has fixed bits (`level="L2"`).',
    ]
    for name, subject in SUBJECTS.items():
        found = [row for row in rows if row["net"] == name]
        if not found:
            continue
        first = found[0]
        lines += [
            "",
            f"## {subject.title}",
            f"Commit {first['commit']}, {first['date']}, {first['machine']}, Python {first['python']}, "
            f"torch {first['torch']}, Numba {first['numba']}.",
            "",
            "| method | bits | derive | rebuilt | stored bits | kept for backward | error |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in found:
            cells = (
                *(row["method"], row["bits"], "yes" if row["derive"] == "True" else "no", row["rebuilt"]),
                *(f"{float(row['stored_bits']):.2f}", f"{float(row['ratio']):.1f}x less"),
                f"{float(row['error']):.3g}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nets", nargs="*", metavar="net", help=f"any of {', '.join(SUBJECTS)}; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS / "derived.csv", help="rows of other nets stay in it")
    parser.add_argument("--page", type=Path, default=DOCS / "derived.md")
    given = parser.parse_args()
    unknown = set(given.nets) - set(SUBJECTS)
    if unknown:
        parser.error(f"unknown net {', '.join(sorted(unknown))}; choose from {', '.join(SUBJECTS)}")
    machine = environment()
    nets = given.nets or list(SUBJECTS)
    kept = [row for row in read(given.out) if row["net"] in SUBJECTS and row["net"] not in nets]
    rows = []
    for name in nets:
        for row in rows_of(name):
            rows.append({k: f"{v:.5g}" if isinstance(v, float) else str(v) for k, v in (row | machine).items()})
            print(*(f"{key} {rows[-1][key]}" for key in FIELDS[:8]), sep="  ", flush=True)
    order = list(SUBJECTS)
    rows = sorted(kept + rows, key=lambda row: order.index(row["net"]))
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    given.page.write_text(table(rows), encoding="utf-8")
    print(f"{len(rows)} rows in {given.out}, a page in {given.page}")


if __name__ == "__main__":
    main()
