"""Is any default lost in noise? Every method on many networks with fresh weights and small batches.

The error is the distance between the gradient of all parameters and the exact one, in units of the exact one's length,
in the first step and in the third, when adaptive methods have made up their mind. The weights stay, so one exact
gradient serves for all steps, and dropout draws the same numbers in each.
"""

from __future__ import annotations

import argparse
import collections
import csv
import logging
import math
import statistics
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import lowtide
from evidence.fidelity import environment
from evidence.zoo import SUBJECTS, Case
from lowtide.codecs import GroupQuant

RESULTS = Path(__file__).parent / "results" / "safety.csv"
PAGE = Path(__file__).parent.parent / "docs" / "safety.md"
STEPS = 3
SEEDS = 3
CHANGE = 1e-6
LIMIT, REFERENCE = 1.0, 0.02
"""No default may err by more than the first where 8 bits err by less than the second."""
RIVALS = ("division", "actnn", "gact")
ADAPTIVE, FIXED = ("auto", "actnn"), ("pool", "cast")
"""Those that learn from step to step, and those that draw no random numbers."""
DEFAULTS = ("auto", *RIVALS, "blpa", "tinyscript", "lowrank", "pool", "cast")
BY_DESIGN = "lowrank"
"""Its random projection to a quarter of the columns has an error of 2, whatever the network."""
STUDIED = ("resnet50", "mobilenetv4")
"""The networks on which batch norms are rounded by the number of values in a statistic."""
BITS = (2, 3, 4, 8)

FIELDS = [
    *("net", "entry", "options", "first", "third", "stored_nbytes", "plain_nbytes", "tensors", "changed"),
    *("date", "commit", "machine", "threads", "python", "torch", "numba", "lowtide"),
]
Row = dict[str, Any]


def gradient(case: Case, change: float = 0.0) -> Tensor:
    """The gradient of all parameters as one vector, always from the same random state; sums need float64."""
    torch.manual_seed(0)
    case.model.zero_grad(set_to_none=True)
    case.loss(change).backward()
    return torch.cat([p.grad.flatten() for p in case.model.parameters() if p.grad is not None]).double()


class Found(NamedTuple):
    """Errors of the first and the last step, and the bytes stored in the last."""

    first: float
    third: float
    stored_nbytes: int
    plain_nbytes: int


def measure(case: Case, exact: Tensor, method: Any, seeds: int, steps: int = STEPS, **options: Any) -> Found:
    """Medians over seeds; of bytes the most."""
    errors, reports = [], []
    length = float(exact.norm())
    for seed in range(seeds):
        with lowtide.attach(case.model, method, seed=seed, **options) as handle:
            errors.append([float((gradient(case) - exact).norm()) / length for _ in range(steps)])
            reports.append(handle.report())
    first, third = (statistics.median(run[i] for run in errors) for i in (0, -1))
    return Found(first, third, max(report.stored_nbytes for report in reports), reports[0].plain_nbytes)


def auto_within(case: Case, exact: Tensor, nbytes: int, known: dict[float, Found]) -> tuple[float, Found] | None:
    """``auto`` with about the most bits whose bytes are at most ``nbytes``; None if its fewest take more.

    Bytes grow nearly in proportion to bits, so a guess lies on the line through the nearest two of those ``known``.
    """

    def room(bits: float) -> int:
        return nbytes - known[bits].stored_nbytes

    for _ in range(3):
        if any(0 <= room(bits) <= 0.02 * nbytes for bits in known):
            break
        near = sorted(known, key=lambda bits: abs(room(bits)))[:2]
        slope = (room(near[1]) - room(near[0])) / (near[0] - near[1]) if len(near) == 2 else 0.0
        if slope <= 0:
            slope = known[near[0]].stored_nbytes / near[0]
        guess = round(min(8.0, max(1.0, near[0] + (room(near[0]) - 0.01 * nbytes) / slope)), 3)
        if guess in known:
            break
        known[guess] = measure(case, exact, "auto", 1, bits=guess)
    best = max((bits for bits in known if room(bits) >= 0), default=None)
    return None if best is None else (best, known[best])


def rows_of(name: str) -> Iterator[Row]:
    """8 bits for all, every default, and ``auto`` at the bytes of others."""
    torch.manual_seed(0)
    case = SUBJECTS[name].build()
    case.model.train()
    exact = gradient(case)
    changed = float((gradient(case, CHANGE) - exact).norm() / exact.norm())

    def row(entry: str, found: Found, options: str = "") -> Row:
        return {"net": name, "entry": entry, "options": options, "changed": changed, **found._asdict()}

    yield row("8 bits", measure(case, exact, GroupQuant(8), 1))
    yield row("2 bits", measure(case, exact, Without(2), 1))
    found = {}
    for method in DEFAULTS:
        seeds, steps = SEEDS if method in ADAPTIVE else 1, 1 if method in FIXED else STEPS
        found[method] = measure(case, exact, method, seeds, steps)
        yield row(method, found[method])
    known = {lowtide.Auto().bits: found["auto"]}
    for rival in RIVALS:
        best = auto_within(case, exact, found[rival].stored_nbytes, known)
        if best is not None:
            yield row(f"auto within {rival}", best[1], f"bits={best[0]}")
    if name in STUDIED:
        for sharing, count in sorted(Without.statistics_of(case).items()):
            for bits in BITS:
                alone = measure(case, exact, Without(bits, sharing), 1, 1)
                yield row(f"norms of {sharing}", alone, f"bits={bits}") | {"tensors": count}


class Without(lowtide.Method):
    """One number of bits for batch norms and linear layers, however few values share a statistic.

    With ``sharing`` only inputs of batch norms with so many values in a statistic are rounded.
    """

    name: ClassVar[str] = "without"

    def __init__(self, bits: int, sharing: int | None = None) -> None:
        self.bits, self.sharing = bits, sharing
        self.met: collections.Counter[int] = collections.Counter()

    def choose(self, use: Any) -> lowtide.Choice:
        """Groups as all methods have them."""
        norm = any("BatchNorm" in site.op for site in use.sites)
        if norm:
            self.met[use.sharing] += 1
        if self.sharing is not None and not (norm and use.sharing == self.sharing):
            return lowtide.Choice.keep("not under study")
        if use.need >= lowtide.Need.PROPAGATE:
            return lowtide.Choice.store(GroupQuant(8, layout="sample" if use.dims else "row"))
        return lowtide.Choice.store(GroupQuant(self.bits, layout="sample" if use.dims else "row"))

    @classmethod
    def statistics_of(cls, case: Case) -> dict[int, int]:
        """How many batch norms have so many values in a statistic."""
        method = cls(8, 0)
        with lowtide.attach(case.model, method):
            gradient(case)
        return dict(method.met)


# ---------------------------------------------------------------- the page


def read(path: Path) -> list[dict[str, str]]:
    """All rows of a file; none if there is none."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def worst(row: dict[str, str]) -> float:
    """The larger of the errors of both steps."""
    return max(float(row["first"]), float(row["third"]))


def judged(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The defaults on all networks where 8 bits are good enough."""
    good = {row["net"] for row in rows if row["entry"] == "8 bits" and worst(row) < REFERENCE}
    return [row for row in rows if row["net"] in good and row["entry"] in DEFAULTS]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(row: dict[str, str] | None) -> str:
    """Both steps, or one number where they agree within a tenth."""
    if row is None:
        return "-"
    first, third = float(row["first"]), float(row["third"])
    same = abs(first - third) <= 0.1 * max(first, third)
    return f"{first:.2g}" if same else f"{first:.2g} / {third:.2g}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 118, break_long_words=False, break_on_hyphens=False)


def page(rows: Sequence[dict[str, str]]) -> str:
    """The rows as a page."""
    table = {(row["net"], row["entry"]): row for row in rows}
    nets = [name for name in SUBJECTS if (name, "8 bits") in table]
    machine = rows[0]
    lines = [
        "# Defaults on small batches",
        "",
        *_wrapped(
            """Written by `evidence/safety.py` from `evidence/results/safety.csv`; `make evidence-safety` makes both
            anew in about ten minutes, in a virtual environment of its own. Networks of torchvision, timm and
            transformers have fresh weights and random inputs: 2 to 4 images of 64 or 96 pixels, or 4 rows of 64
            tokens. So few values share a statistic in their batch norms as hardly ever in training. *Error* is the
            distance of the whole gradient from the exact one, in units of its length: in the first step / in the
            third, or one number where they agree within a tenth; medians of 3 seeds for the methods that adapt.
            Detectors that pool regions, such as Mask R-CNN, are left out: the operator `roi_align` is in
            torchvision's compiled part, which does not load beside a torch for CPUs."""
        ),
        "",
        *_wrapped(
            f"""Commit {machine["commit"]}, {machine["date"]}, {machine["machine"]}, {machine["threads"]} thread(s),
            Python {machine["python"]}, torch {machine["torch"]}, Numba {machine["numba"]}."""
        ),
        "",
        "## Every default",
        *_verdict(rows, len(nets)),
        "",
        *_wrapped(
            """*Changed input* is the error of the exact gradient when the input changes by a millionth of its
            deviation: where it is much more than 1e-5, signs of activations flip. *2 bits* is no method: `actnn`'s
            groups with 2 bits for the inputs of all batch norms and linear layers, however few values share a
            statistic, and 8 bits for the rest. (Statistics of fewer than 8 values are exact there, too.)"""
        ),
        "",
        _line(["network", "from", "batch", "changed input", "8 bits", "2 bits", *(f"`{name}`" for name in DEFAULTS)]),
        "|---" * (6 + len(DEFAULTS)) + "|",
    ]
    for name in nets:
        title, library, batch, _ = SUBJECTS[name]
        cells = [title, library, batch, f"{float(table[name, '8 bits']['changed']):.0e}"]
        cells += [_shown(table[name, entry]) for entry in ("8 bits", "2 bits", *DEFAULTS)]
        lines.append(_line(cells))
    lines += [
        "",
        "How many times less is kept for backward than in plain PyTorch, in the third step:",
        "",
        _line(["network", "plain", "8 bits", *(f"`{method}`" for method in DEFAULTS)]),
        "|---" * (3 + len(DEFAULTS)) + "|",
    ]
    for name in nets:
        plain = int(table[name, "8 bits"]["plain_nbytes"])
        ratios = [f"{plain / int(table[name, entry]['stored_nbytes']):.1f}" for entry in ("8 bits", *DEFAULTS)]
        lines.append(_line([SUBJECTS[name].title, f"{plain / 2**20:.0f} MiB", *ratios]))
    return "\n".join([*lines, *_equal_bytes(table, nets), *_by_statistic(rows)]) + "\n"


def _verdict(rows: Sequence[dict[str, str]], nets: int) -> list[str]:
    defaults = judged(rows)
    over = [f"`{row['entry']}` on {SUBJECTS[row['net']].title}" for row in defaults if worst(row) > LIMIT]
    top = max((row for row in defaults if row["entry"] != BY_DESIGN), key=worst)
    return _wrapped(
        f"""The rule: where 8 bits for everything err by less than {REFERENCE:g}, no default errs by more than
        {LIMIT:g}. That judges {len({row["net"] for row in defaults})} of {nets} networks. The largest error but
        for `{BY_DESIGN}` is {worst(top):.2g}, that of `{top["entry"]}` on {SUBJECTS[top["net"]].title}.
        `{BY_DESIGN}` projects the inputs of linear layers at random to a quarter of their columns, which has an
        error of `sqrt(columns / rank) = 2` there by design, in any network; it is unbiased, and made for many
        steps. Above {LIMIT:g}: {", ".join(over) or "none"}."""
    )


def _equal_bytes(table: dict[tuple[str, str], dict[str, str]], nets: Sequence[str]) -> list[str]:
    lines = [
        "",
        "## `auto` at equal bytes",
        *_wrapped(
            """For each method its error in the third step, and that of `auto` with `bits` such that it stores at most
            as many bytes; a dash where it stores more with its fewest."""
        ),
        "",
        _line(["network", *(cell for rival in RIVALS for cell in (f"`{rival}`", "`auto`", "`bits`"))]),
        "|---" * (1 + 3 * len(RIVALS)) + "|",
    ]
    ratios = []
    for name in nets:
        cells = [SUBJECTS[name].title]
        for rival in RIVALS:
            own, other = table[name, rival], table.get((name, f"auto within {rival}"))
            cells.append(f"{float(own['third']):.2g}")
            if other is None:
                cells += ["-", "-"]
                continue
            ratios.append((float(other["third"]) / float(own["third"]), rival, SUBJECTS[name].title))
            cells += [f"{float(other['third']):.2g}", f"{float(other['options'].partition('=')[2]):.2f}"]
        lines.append(_line(cells))
    if not ratios:
        return lines
    largest, rival, title = max(ratios)
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _, _ in ratios))
    wins = sum(ratio <= 1 for ratio, _, _ in ratios)
    summary = f"""`auto` errs less in {wins} of {len(ratios)} pairs. Its error is {mean:.2g} times the other's in the
        geometric mean, and at worst {largest:.2g} times (`{rival}` on {title})."""
    return [*lines, "", *_wrapped(summary)]


def _by_statistic(rows: Sequence[dict[str, str]]) -> list[str]:
    lines = [
        "",
        "## Why: values in a statistic",
        *_wrapped(
            """Here only the inputs of batch norms in which `n` values share a statistic are rounded, to `b` bits in
            groups of 256; all else is exact. In brackets what `docs/methods.md` predicts under "Few values in a
            statistic": `sqrt(6 / n) / (2**b - 1)` for each norm, and for several the root of the sum of squares.
            Where groups mix channels of different deviations, it is up to a few times more. For large `n` what is
            left is the noise in the gradients of the norms' own weights, which the prediction leaves out."""
        ),
    ]
    for name in STUDIED:
        found = [row for row in rows if row["net"] == name and row["entry"].startswith("norms of ")]
        if not found:
            continue
        lines += ["", f"{SUBJECTS[name].title}:", "", _line(["`n`", "norms", *(f"{bits} bits" for bits in BITS)])]
        lines.append("|---" * (2 + len(BITS)) + "|")
        for entry in dict.fromkeys(row["entry"] for row in found):
            own = [row for row in found if row["entry"] == entry]
            sharing, count = int(entry.removeprefix("norms of ")), int(own[0]["tensors"])
            cells = []
            for row, bits in zip(own, BITS, strict=True):
                cells.append(f"{float(row['first']):.2g} ({math.sqrt(6 * count / sharing) / (2**bits - 1):.2g})")
            lines.append(_line([str(sharing), str(count), *cells]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nets", nargs="*", metavar="net", help=f"any of {', '.join(SUBJECTS)}; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="rows of other nets stay in it")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    unknown = set(given.nets) - set(SUBJECTS)
    if unknown:
        parser.error(f"unknown net {', '.join(sorted(unknown))}; choose from {', '.join(SUBJECTS)}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    machine = environment()
    nets = given.nets or list(SUBJECTS)
    rows: list[dict[str, str]] = [r for r in read(given.out) if r["net"] in SUBJECTS and r["net"] not in nets]
    for name in nets:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the libraries of the networks say of themselves
            for row in rows_of(name):
                rows.append({k: f"{v:.5g}" if isinstance(v, float) else str(v) for k, v in (row | machine).items()})
                print(*(f"{key} {rows[-1].get(key, '')}" for key in FIELDS[:6]), sep="  ", flush=True)
        rows.sort(key=lambda row: list(SUBJECTS).index(row["net"]))
        with given.out.open("w", newline="") as file:  # after each network, so that an interrupted run is not lost
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    given.page.write_text(page(rows), encoding="utf-8")
    print(f"{len(rows)} rows in {given.out}, a page in {given.page}")


if __name__ == "__main__":
    main()
