"""What does a session leave exact? Saved and kept bytes of many families of networks, and the error of their gradients.

The error is the distance of the gradient of all parameters from the exact one, in units of its length, in the third
step of ``auto``, with its defaults where a row names no options; weights stay, and dropout draws the same numbers in
each step. What plain PyTorch keeps is counted beside any session, by torch's own hooks for saved tensors.
"""

from __future__ import annotations

import argparse
import collections
import csv
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import lowtide
from evidence.families import FAMILIES
from evidence.fidelity import environment
from evidence.safety import _wrapped, read
from evidence.zoo import Case, Subject
from lowtide.report import EXACT, Report

RESULTS = Path(__file__).parent / "results" / "coverage.csv"
PAGE = Path(__file__).parent.parent / "docs" / "coverage.md"
STEPS = 3
SHOWN = 3
OPTIONS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama-bf16-2.5": ("llama-bf16", {"bits": 2.5}),
    "lora-bf16-4.5": ("lora-bf16", {"bits": 4.5}),
}
"""Rows of their own: a family, with other options of ``auto``."""
WANTED = {"lstm": 3.0, "bilstm": 3.0, "gru": 3.0, "rnn": 3.0, "lora-bf16": 4.0, "lora-bf16-4.5": 4.0}
"""Recurrent nets have states that follow from each other; adapters in 16 bits have half of the bytes to save."""
USUAL = 6.0


def _rows() -> dict[str, Subject]:
    """What each row is of, in the order of the page."""
    found = {}
    for name, subject in FAMILIES.items():
        found[name] = subject
        for row, (family, options) in OPTIONS.items():
            if family == name:
                given = ", ".join(f"{option}={value}" for option, value in options.items())
                found[row] = subject._replace(title=f"{subject.title}, `{given}`")
    return found


ROWS = _rows()

FIELDS = [
    *("net", "state", "plain_nbytes", "stored_nbytes", "held_nbytes", "ratio", "error", "lossless", "left"),
    *("date", "commit", "machine", "threads", "python", "torch", "numba", "lowtide"),
]
Row = dict[str, Any]


def gradient(case: Case, method: str | None = None, **options: Any) -> tuple[Tensor, Report | None]:
    """The gradient of all parameters as one vector, always from the same random state, and the report of the step."""
    torch.manual_seed(0)
    case.model.zero_grad(set_to_none=True)
    report = None
    if method is None:
        case.loss(0.0).backward()
    else:
        with lowtide.compress(case.model, method, **options) as session:
            loss = case.loss(0.0)
        loss.backward()
        report = session.report()
    parts = [p.grad.flatten() for p in case.model.parameters() if p.grad is not None]
    parts = [torch.view_as_real(p).flatten() if p.is_complex() else p for p in parts]
    return torch.cat([p.double() for p in parts]), report


def saved_by_plain(case: Case) -> int:
    """Bytes of the storages that autograd alone keeps when the forward of plain PyTorch ends."""
    found: dict[int, tuple[StorageWeakRef, int]] = {}

    def see(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        found[reference.cdata] = (reference, storage.nbytes())
        return tensor.detach()  # a result that leads to the node that keeps it would never be freed

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        loss = case.loss(0.0)
    kept = [(reference, nbytes) for reference, nbytes in found.values() if not reference.expired()]
    del loss
    return sum(nbytes for reference, nbytes in kept if reference.expired())  # others hold what has outlived the graph


def left_exact(report: Report) -> dict[str, int]:
    """Bytes that stay as autograd keeps them, by op and slot; small tensors together."""
    found: collections.Counter[str] = collections.Counter()
    for site in report.sites:
        if site.state == EXACT:
            found["small" if site.why == "small" else f"{site.site.op}.{site.site.slot}"] += site.stored_nbytes
    return dict(found.most_common())


def row_of(name: str) -> Row:
    """One step exactly, one with ``lossless``, and three with ``auto``."""
    torch.manual_seed(0)
    case = ROWS[name].build()
    case.model.train()
    for module in case.model.modules():
        if hasattr(module, "n_power_iterations"):
            module.eval()  # the estimate of a spectral norm moves with each forward, and with it the exact gradient
    plain = saved_by_plain(case)
    exact, _ = gradient(case)
    length = float(exact.norm())
    lossless, _ = gradient(case, "lossless")
    for _ in range(STEPS):
        found, report = gradient(case, "auto", **OPTIONS.get(name, (name, {}))[1])
    assert report is not None
    left = left_exact(report)
    return {
        "net": name,
        "plain_nbytes": plain,
        "stored_nbytes": report.stored_nbytes,
        "held_nbytes": report.held_nbytes,
        "ratio": plain / report.stored_nbytes,
        "error": float((found - exact).norm()) / length,
        "lossless": float((lossless - exact).norm()) / length,
        "left": "; ".join(f"{what} {100 * n / report.stored_nbytes:.0f} %" for what, n in list(left.items())[:SHOWN]),
    }


# ---------------------------------------------------------------- the page


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page(rows: Sequence[dict[str, str]]) -> str:
    """The rows as a page: each family before and after."""
    table = {(row["net"], row["state"]): row for row in rows}
    nets = [name for name in ROWS if (name, "after") in table]
    machine = table[nets[0], "after"]
    before, after = (sorted({row["commit"] for row in rows if row["state"] == s}) for s in ("before", "after"))
    short = [name for name in nets if float(table[name, "after"]["ratio"]) < WANTED.get(name, USUAL)]
    lines = [
        "# Coverage by family",
        "",
        *_wrapped(
            """Written by `evidence/coverage.py` from `evidence/results/coverage.csv`; `make evidence-coverage`
            makes both anew in a few minutes. Networks have fresh weights and random inputs, and are small:
            which tensors are saved follows from their ops, and what is left exact of a small one weighs more
            than of a large one. `auto`, with its defaults where a row names no options, third step. *Saved* is
            what plain PyTorch keeps for backward beside weights and the batch, as torch's own hooks count it;
            *ratio* how many times less is kept, *error* the distance of the whole gradient from the
            exact one in units of its length. *Left exact* are the ops with most of the bytes that are kept, and
            their share of these; *small* are tensors of few values, which no method packs."""
        ),
        "",
        f"Commit {', '.join(after)}, {machine['date']}, {machine['machine']}, {machine['threads']} thread(s), Python "
        f"{machine['python']}, torch {machine['torch']},",
        f"Numba {machine['numba']}. *Before* is commit {', '.join(before)}.",
        "",
        f"Below a ratio of {USUAL:g} (3 for recurrent nets, 4 for adapters in bfloat16): "
        + (", ".join(f"{ROWS[name].title}" for name in short) or "none")
        + ".",
        "",
        _line(["network", "from", "batch", "saved", "ratio before", "ratio", "error", "left exact", "commit"]),
        "|---" * 9 + "|",
    ]
    for name in nets:
        title, library, batch, _ = ROWS[name]
        row, old = table[name, "after"], table.get((name, "before"))
        cells = [title, library, batch, f"{int(row['plain_nbytes']) / 2**20:.1f} MiB"]
        cells += ["-" if old is None else f"{float(old['ratio']):.1f}", f"{float(row['ratio']):.1f}"]
        lines.append(_line([*cells, f"{float(row['error']):.2g}", row["left"], row["commit"]]))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nets", nargs="*", metavar="net", help=f"any of {', '.join(ROWS)}; default: all")
    parser.add_argument("--state", choices=("before", "after"), default="after", help="what the rows are called")
    parser.add_argument("--out", type=Path, default=RESULTS, help="other rows stay in it")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    unknown = set(given.nets) - set(ROWS)
    if unknown:
        parser.error(f"unknown net {', '.join(sorted(unknown))}; choose from {', '.join(ROWS)}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    machine = environment()
    order = list(ROWS)
    for name in given.nets or order:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the libraries of the networks say of themselves
            try:
                row = row_of(name) | {"state": given.state} | machine
            except Exception as error:  # a library that is missing, or that has changed: the others go on
                print(f"{name}: left out: {type(error).__name__}: {error}", flush=True)
                continue
        shown = {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()}
        print(*(f"{key} {shown[key]}" for key in FIELDS[:9] if key != "state"), sep="  ", flush=True)
        others = [r for r in read(given.out) if r["net"] in ROWS and (r["net"], r["state"]) != (name, given.state)]
        rows = sorted([*others, shown], key=lambda r: (order.index(r["net"]), r["state"] == "after"))
        with given.out.open("w", newline="") as file:  # after each network, so that an interrupted run is not lost
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    rows = read(given.out)
    if any(row["state"] == "after" for row in rows):
        given.page.write_text(page(rows), encoding="utf-8")
        print(f"{len(rows)} rows in {given.out}, a page in {given.page}")


if __name__ == "__main__":
    main()
