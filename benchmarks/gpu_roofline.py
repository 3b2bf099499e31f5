"""What the GPU kernels would cost in a step, computed and not run: a lower bound from bytes, and one from instructions.

Calls of operators are counted in a real step on the CPU (for bfloat16 under autocast) and scaled to the batch; each
takes bytes and instructions of a value from the row of its own kind in ``results/gpu_aot.csv``. A launch takes at least
its bytes over the bandwidth, and its instructions over what the machine issues: four warps in a clock of an SM. No pipe
of an SM takes that many (integers have half), so a second bound counts the slots that the busiest pipe needs. 85 % and
70 % of the peaks are assumed, and launches are added up. ReLU's backward reads packed bits in the place of its result:
what plain ReLU would take is subtracted. Nothing here was measured on a GPU.

    python benchmarks/gpu_roofline.py --count "ResNet-50, bfloat16"     # one step into results/gpu_calls.csv
    python benchmarks/gpu_roofline.py                                   # the tables of docs/gpu.md
"""

from __future__ import annotations

import argparse
import csv
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from nets import Block, resnet50

REPO = Path(__file__).parent.parent
PAGE = REPO / "docs" / "gpu.md"
TABLE = Path(__file__).parent / "results" / "gpu_aot.csv"
CALLS = Path(__file__).parent / "results" / "gpu_calls.csv"
KERNELS = ("src/lowtide/kernels/programs.py", "src/lowtide/kernels/gpu.py")
PYTHON = "functions of Python"
# Name: row of the table, bytes a second, instructions of a lane a second. Data sheets of the vendor.
MACHINES = {
    "A100 80 GB": ("sm_80", 2.04e12, 108 * 128 * 1.41e9),
    "H100 SXM": ("sm_90", 3.35e12, 132 * 128 * 1.755e9),
}
USED_BYTES, USED_ISSUE = 0.85, 0.7
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Maps that stand for others of the same whole units of a row: 56 for 112, for one.
MAPS = {8: "", 4: " of 28", 2: " of 14", 1: " of 7"}
TOKENS, LAYERS, WIDTH = 8 * 1024, 24, 2048
# One narrow layer of 256 tokens is counted: what a layer saves grows with tokens and width.
NARROW = 256
SHARE = LAYERS * TOKENS / 256 * WIDTH / NARROW
# Operations of a transformer: 6 for each parameter and token, at 40 % of the peak.
WORK = 6 * 1.3e9 * TOKENS / 0.4


class Step(NamedTuple):
    """A step whose calls are counted, and what it stands for."""

    title: str
    dtype: torch.dtype
    scale: float
    """Values of the step for each one counted."""
    repeats: int
    """Calls of the step for each one counted."""
    plain: dict[str, float]
    """Milliseconds of the same step without lowtide, where known."""


# Plain steps. ResNet-50: images a second that NVIDIA published for PyTorch on one A100, with TF32 and mixed precision.
# Transformer: peaks with TF32 and in bfloat16, from data sheets.
STEPS = {
    "ResNet-50, float32": Step(
        "ResNet-50, batch 256, float32", torch.float32, 256.0, 1, {"A100 80 GB": 256 / 938 * 1e3}
    ),
    "ResNet-50, bfloat16": Step(
        "ResNet-50, batch 256, bfloat16", torch.bfloat16, 256.0, 1, {"A100 80 GB": 256 / 2470 * 1e3}
    ),
    "transformer, float32": Step(
        *("1.3 B transformer, 8 x 1024 tokens, float32", torch.float32, SHARE, LAYERS),
        {"A100 80 GB": WORK / 156e12 * 1e3, "H100 SXM": WORK / 494e12 * 1e3},
    ),
    "transformer, bfloat16": Step(
        *("1.3 B transformer, 8 x 1024 tokens, bfloat16", torch.bfloat16, SHARE, LAYERS),
        {"A100 80 GB": WORK / 312e12 * 1e3, "H100 SXM": WORK / 989e12 * 1e3},
    ),
}


# ---------------------------------------------------------------- counting


def kind(name: str, given: dict[str, Any]) -> str:
    """The row of the table for a call of an operator."""
    if name in ("pack_taps", "unpack_taps"):
        return f"{name} {given['bits']} bits"
    dtype = DTYPES[given["x"].dtype if "x" in given else given["dtype"]]
    case = f"{name} {given['bits']} bits {dtype}" if "bits" in given else f"{name} {dtype}"
    if name in ("quantize_blocks", "dequantize_blocks"):
        _, s1, _, s3, inner = given["geometry"]
        case += f" NCHW{MAPS[math.gcd(s3, 8)]}" if s1 == inner == 1 else f" {given['geometry']}"
        case += "" if given.get("support") is None else " rectified, mask"
    return case


class Calls(TorchDispatchMode):
    """Counts calls of lowtide's operators by their kinds, and their values."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.values: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        space, _, name = function.name().partition("::")
        if space == "lowtide":
            names = [argument.name for argument in function._schema.arguments]
            case = kind(name, dict(zip(names, args, strict=False)) | (kwargs or {}))
            self.calls[case] += 1
            self.values[case] += (result if name.startswith(("de", "un")) else args[0]).numel()
        return result


def functions(call: Callable[[], None]) -> int:
    """How many functions of Python are entered. Backward runs in this thread on the CPU."""
    found = 0

    def enter(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def count(name: str) -> list[dict[str, Any]]:
    """The calls of one step with ``division``, and the functions of Python beyond those of a plain step."""
    torch.manual_seed(0)
    if name.startswith("ResNet"):
        model, x, labels = resnet50(), torch.randn(1, 3, 224, 224), torch.randint(0, 1000, (1,))
    else:
        model, x, labels = Block(NARROW, 2), torch.randn(1, 256, NARROW), None

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=STEPS[name].dtype == torch.bfloat16):
            y = model(x)
            loss = y.square().mean() if labels is None else nn.functional.cross_entropy(y, labels)
        loss.backward()

    step()
    plain = functions(step)
    handle = lowtide.attach(model, "division")
    step()
    added = functions(step) - plain
    with Calls() as calls:
        step()
    handle.remove()
    rows = [{"step": name, "kind": case, "calls": n, "values": calls.values[case]} for case, n in calls.calls.items()]
    return [*rows, {"step": name, "kind": PYTHON, "calls": added, "values": 0}]


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------- computing


class Bound(NamedTuple):
    """Milliseconds: by bytes alone; by the larger of bytes and instructions; and of bytes and the busiest pipe."""

    by_bytes: float
    by_issue: float
    by_pipes: float

    def plus(self, other: Bound) -> Bound:
        return Bound(*(a + b for a, b in zip(self, other, strict=True)))


def launch(row: dict[str, str], values: float, machine: str) -> Bound:
    _, bandwidth, issue = MACHINES[machine]
    moved = 1e3 * values * float(row["bytes"]) / bandwidth / USED_BYTES
    issued, busy = (1e3 * values * float(row[name]) / issue / USED_ISSUE for name in ("instructions", "slots"))
    return Bound(moved, max(moved, issued), max(moved, busy))


def spared(case: str, values: float, machine: str) -> float:
    """Milliseconds of plain ReLU's backward, which reads gradient and result and writes a gradient."""
    if not case.startswith("mask_values"):
        return 0.0
    size = 4 if case.endswith("float32") else 2
    return 1e3 * values * 3 * size / MACHINES[machine][1] / USED_BYTES


class Table:
    """The compiled kernels, and what steps call."""

    def __init__(self) -> None:
        self.rows = {(row["case"], row["target"]): row for row in read(TABLE)}
        self.calls = read(CALLS)
        self.targets = list(dict.fromkeys(target for _, target in self.rows))

    def launches(self, case: str, target: str) -> list[dict[str, str]]:
        names = (case, *(f"{case} +{i}" for i in range(1, 4)))
        found = [self.rows[name, target] for name in names if (name, target) in self.rows]
        if not found:
            raise SystemExit(f"{TABLE.name} lacks {case} for {target}")
        return found

    def parts(self, name: str, machine: str) -> Iterator[tuple[str, int, float, Bound, float]]:
        """Of each kind of a step: its launches, values, bounds, and what it spares a plain step."""
        step, target = STEPS[name], MACHINES[machine][0]
        for row in self.calls:
            if row["step"] != name or row["kind"] == PYTHON:
                continue
            values, found = step.scale * int(row["values"]), self.launches(row["kind"], target)
            bound = Bound(0.0, 0.0, 0.0)
            for each in found:
                bound = bound.plus(launch(each, values, machine))
            total = step.repeats * int(row["calls"]) * len(found)
            yield row["kind"], total, values, bound, spared(row["kind"], values, machine)


def overhead(bound: float, saved: float, plain: float | None) -> str:
    return "" if plain is None else f"{1 + (bound - saved) / plain:.2f}x"


def steps(table: Table) -> list[str]:
    """What each step would take on each machine."""
    lines = [
        "| step | machine | launches | Python functions | values, G | by bytes, ms | by instructions | by pipes "
        "| plain ReLU less | plain step | overhead by bytes | by instructions | by pipes |",
        "|---|---|" + "---:|" * 11,
    ]
    for name, step in STEPS.items():
        python = [row for row in table.calls if row["step"] == name and row["kind"] == PYTHON]
        if not python:
            continue
        added = step.repeats * int(python[0]["calls"])
        for machine in MACHINES:
            total, bound, values, saved = 0, Bound(0.0, 0.0, 0.0), 0.0, 0.0
            for _, launches, some, part, less in table.parts(name, machine):
                total, bound, values, saved = total + launches, bound.plus(part), values + some, saved + less
            plain = step.plain.get(machine)
            numbers = " | ".join(f"{ms:.1f}" for ms in (*bound, saved))
            over = " | ".join(overhead(ms, saved, plain) for ms in bound)
            shown = "not known" if plain is None else f"{plain:.0f}"
            first = f"| {step.title} | {machine} | {total} | {added:,} | {values / 1e9:.2f}"
            lines.append(f"{first} | {numbers} | {shown} | {over} |")
    return lines


def kinds(table: Table) -> list[str]:
    """What each kind of operator adds to a step on an A100."""
    machine = "A100 80 GB"
    lines = [
        "| step | operator | launches | values, G | bytes, ms | pipes, ms | instructions a value | slots | bound by |",
        "|---|---|" + "---:|" * 6 + "---|",
    ]
    for name in ("ResNet-50, bfloat16", "transformer, bfloat16"):
        for case, launches, values, bound, _ in sorted(table.parts(name, machine), key=lambda part: -part[3].by_pipes):
            if bound.by_pipes < 0.05:
                continue
            found = table.launches(case, "sm_80")
            instructions, busy = (" + ".join(row[field] for row in found) for field in ("instructions", "slots"))
            limit = "bytes" if bound.by_pipes <= bound.by_bytes * 1.001 else "pipes"
            lines.append(
                f"| {name} | {case} | {launches} | {values / 1e9:.2f} | {bound.by_bytes:.2f} | {bound.by_pipes:.2f} "
                f"| {instructions} | {busy} | {limit} |"
            )
    return lines


def verdict(table: Table) -> list[str]:
    """What bounds ResNet-50 under mixed precision on an A100."""
    name, machine = "ResNet-50, bfloat16", "A100 80 GB"
    sums: dict[str, list[float]] = {}
    less = 0.0
    for case, _, _, bound, saved in table.parts(name, machine):
        part = next((word for word in ("dequantize", "quantize", "mask_values") if case.startswith(word)), "rest")
        own = sums.setdefault(part, [0.0, 0.0])
        own[0], own[1], less = own[0] + bound.by_bytes, own[1] + bound.by_pipes, less + saved
    shown = {part: f"{ms:.1f} ms by pipes and {moved:.1f} by bytes" for part, (moved, ms) in sums.items()}
    total = sum(ms for _, ms in sums.values()) - less
    goal = 0.2 * STEPS[name].plain[machine]
    return [
        f"Of a step of ResNet-50 under mixed precision on an A100, encoding takes {shown['quantize']}, decoding "
        f"{shown['dequantize']}, ReLU's backward {shown['mask_values']}, where plain ReLU takes {less:.1f}, and the "
        f"rest {shown['rest']}. That is {total:.1f} ms more than a plain step; 1.20x would be {goal:.1f}."
    ]


def programs(table: Table) -> list[str]:
    """The compiled kernels."""
    targets = table.targets
    head = ["launch", "bytes", *(f"instructions {t}" for t in targets), "slots sm_80", "slots sm_90"]
    head += [f"registers {t}" for t in targets] + ["shared sm_80"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for case in dict.fromkeys(case for case, _ in table.rows):
        own = {target: table.rows.get((case, target), {}) for target in targets}
        first = next(row for row in own.values() if row)
        shown = [case, first["bytes"], *(row.get("instructions", "") for row in own.values())]
        shown += [own[target].get("slots", "") for target in ("sm_80", "sm_90")]
        shown += [*(row.get("registers", "") for row in own.values()), own["sm_80"].get("shared", "")]
        lines.append("| " + " | ".join(shown) + " |")
    return lines


def summary(table: Table) -> list[str]:
    """How many programs there are, and from which commit."""
    words = ("git", "log", "-1", "--format=%h", "--", *KERNELS)
    commit = subprocess.run(words, capture_output=True, text=True, cwd=REPO, check=True).stdout.strip()
    rows = table.rows.values()
    spilled, faults = sum(row["spills"] != "0" for row in rows), sum(row["faults"] != "" for row in rows)
    counts = Counter(row["target"] for row in rows)
    return [
        f"Kernels of commit {commit}, compiled with Triton 3.7.1 on a machine without a GPU: {len(rows)} programs ("
        + ", ".join(f"{n} for {target}" for target, n in counts.items())
        + f"). {spilled} of them spill, {faults} have an instruction that may change a bit, and "
        f"{max(int(row['registers']) for row in rows)} registers are the most."
    ]


def write(page: str, name: str, lines: list[str]) -> str:
    before, mark, rest = page.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    assert mark, name
    assert end, name
    return before + mark + "\n".join(lines) + "\n" + end + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", choices=list(STEPS), help="count this step anew, and write no page")
    given = parser.parse_args()
    if given.count:
        rows = [row for row in read(CALLS) if row["step"] != given.count]
        rows += count(given.count)
        rows.sort(key=lambda row: list(STEPS).index(row["step"]))
        with CALLS.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["step", "kind", "calls", "values"])
            writer.writeheader()
            writer.writerows(rows)
        return
    table, page = Table(), PAGE.read_text()
    for name, lines in (
        ("summary", summary),
        ("programs", programs),
        ("steps", steps),
        ("kinds", kinds),
        ("verdict", verdict),
    ):
        page = write(page, name, lines(table))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
