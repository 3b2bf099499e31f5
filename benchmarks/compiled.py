"""Time and peak of a compiled training step with and without packing, beside the eager one: one mode in one process.

    python benchmarks/compiled.py prepare               compile every mode once, so that its graphs are in the caches
    python benchmarks/compiled.py step --rounds 3       append rows to results/compiled.csv
    python benchmarks/compiled.py page                  write the table of docs/compile.md from them

The processes of a round live at the same time and take turns: in each turn every mode runs one step while the others
wait. `ratio` is the median over the turns of a step's time beside that of plain torch.compile in the same turn, so
that a machine which becomes slower or faster meanwhile does so for all. What the compiler and the first steps left in
the heap is given back before the steps that count, in every mode; and `held` is what is kept between forward and
backward, by what malloc has handed out. Modes with "compile" go through torch.compile with inductor, and find their
graphs in its caches.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import lowtide
from cases import SUBJECTS, checkpoint_blocks, child, in_child, tune
from lowtide.machine.measure import reset_peak, resident
from lowtide.malloc import give_back
from rows import ORIGIN, RESULTS, append, origin, read
from turns import take_turns

PAGE = Path(__file__).parent.parent / "docs" / "compile.md"
METHODS = ("lossless", "division", "auto")
MODES = ("plain", "checkpoint", *METHODS, "compile", *(f"compile-{method}" for method in METHODS))
SUBJECT = {"resnet18": 16, "gpt": 6, "resnet8": 512}
NAMES = {
    "resnet18": "ResNet-18, 16 images of 112 px",
    "gpt": "GPT of 4 blocks, width 512, 6 texts of 256 tokens",
    "resnet8": "ResNet-8 of 16 to 64 channels, 512 images of 32 px",
}
WARM = {"auto": 4}  # steps before any counts: it measures in steps 1 and 3
PLAIN = "compile"  # beside which times are told
MEASURED = (
    *("first_s", "min_s", "median_s", "turns", "ratio", "ratio_low", "ratio_high"),
    *("peak", "rest", "held", "graphs", "plain", "stored"),
)
FIELDS = ["subject", "size", "allocator", "mode", "round", *MEASURED, *ORIGIN]


class _Allocated(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def allocated() -> int:
    """Bytes that malloc has handed out."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Allocated
    gc.collect()
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd


def step_child(argument: dict[str, Any], emit: Any) -> dict[str, Any]:
    """Train in one mode, a step for each turn; with ``prepare`` one step only."""
    tune(argument)
    torch.manual_seed(0)
    mode = argument["mode"]
    subject = SUBJECTS[argument["subject"]](argument["size"])
    model, handle = subject.model, None
    if mode == "compile":
        model = torch.compile(model)
    elif mode.startswith("compile-"):
        model = handle = lowtide.compile(model, mode.removeprefix("compile-"))
    elif mode == "checkpoint":
        checkpoint_blocks(subject)
    elif mode != "plain":
        handle = lowtide.attach(model, mode)
    seconds: list[float] = []

    def run(measure_held: bool = False) -> int:
        subject.model.zero_grad(set_to_none=True)
        before = allocated() if measure_held else 0
        start = time.perf_counter()
        loss = subject.loss(model)
        held = allocated() - before if measure_held else 0
        loss.backward()
        seconds.append(time.perf_counter() - start)
        return held

    run()
    if argument["prepare"]:
        return {"first_s": seconds[0]}
    for _ in range(1, WARM.get(mode, 2)):
        run()
    first = seconds[0]
    gc.collect()
    give_back()
    reset_peak()
    emit({})
    for _ in range(argument["turns"]):
        run()
        emit({"seconds": seconds[-1]})
    peak = resident("VmHWM")
    held = run(measure_held=True)
    report = handle.report() if handle is not None else None
    subject.model.zero_grad(set_to_none=True)
    gc.collect()
    give_back()
    return {
        "first_s": first,
        "peak": peak,
        "rest": resident("VmRSS"),
        "held": held,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "plain": report.plain_nbytes if report else 0,
        "stored": report.stored_nbytes if report else 0,
    }


def measure(subject: str, modes: list[str], turns: int, allocator: str) -> dict[str, dict[str, Any]]:
    """Every mode in a process of its own, a step of each in each turn; what was measured, by mode."""
    argument = {"subject": subject, "size": SUBJECT[subject], "prepare": False, "turns": turns}
    processes = {mode: child("compiled:step_child", argument | {"mode": mode}, allocator) for mode in modes}
    return take_turns(processes, turns, PLAIN)


HEADS = ("", "step / compile", "median step", "fastest", "peak of a step", "/ compile", "kept", "/ compile")


def table(rows: list[dict[str, str]]) -> str:
    """A line for each mode: the fastest step of all rounds, and of all else the median of the rounds."""
    lines = ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    for subject, name in NAMES.items():
        found: dict[str, tuple[float, float, float, float, float]] = {}
        for mode in MODES:
            own = [row for row in rows if (row["subject"], row["mode"]) == (subject, mode)]
            if not own:
                continue
            peaks = [int(row["peak"]) - int(row["rest"]) for row in own]
            found[mode] = (
                statistics.median(float(row["ratio"]) for row in own),
                statistics.median(float(row["median_s"]) for row in own),
                min(float(row["min_s"]) for row in own),
                statistics.median(peaks) / 2**20,
                statistics.median(int(row["held"]) for row in own) / 2**20,
            )
        for mode, (ratio, middle, fastest, peak, held) in found.items():
            cells = [f"{ratio:.2f}x", f"{middle:.3f} s", f"{fastest:.3f} s"]
            cells += [f"{peak:.0f} MiB", f"{peak / found[PLAIN][3]:.2f}"]
            cells += [f"{held:.0f} MiB", f"{held / found[PLAIN][4]:.2f}"]
            lines.append(f"| {_title(mode, name)} | " + " | ".join(cells) + " |")
    made = {f"commit {row['commit']}, {row['machine']}, torch {row['torch']}" for row in rows}
    rounds = min(
        max(int(row["round"]) for row in rows if row["subject"] == subject) for subject in {r["subject"] for r in rows}
    )
    turns = min(int(row["turns"]) for row in rows)
    return "\n".join([*lines, "", f"Rounds: {rounds}, turns in each: at least {turns}. {'; '.join(sorted(made))}."])


def _title(mode: str, network: str) -> str:
    if mode == "plain":
        return f"**{network}**: plain, eager"
    if mode.startswith("compile-"):
        return f"`lowtide.compile`, {mode.removeprefix('compile-')}"
    named = {"checkpoint": "checkpoint of each block, eager", PLAIN: "plain `torch.compile`"}
    return named.get(mode, f"{mode}, eager")


def page(results: Path) -> None:
    """Write the table into the page."""
    before, start, rest = PAGE.read_text(encoding="utf-8").partition("<!-- steps -->\n")
    _, end, after = rest.partition("\n<!-- end -->")
    if not start or not end:
        raise ValueError(f"{PAGE.name} has no place for the table")
    PAGE.write_text(before + start + table(read(results)) + end + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "step", "page"])
    parser.add_argument("--out", type=Path, default=RESULTS / "compiled.csv", help="the CSV file to append to")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECT, default=list(SUBJECT))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help=f"{PLAIN} is always among them")
    parser.add_argument("--rounds", type=int, default=1, help="rounds to add to those of the file")
    parser.add_argument("--turns", type=int, default=15, help="steps of each mode in a round")
    parser.add_argument("--allocator", choices=["tuned", "default"], default="tuned")
    options = parser.parse_args()
    if options.what == "page":
        page(options.out)
        return
    modes = [mode for mode in MODES if mode in options.modes or mode == PLAIN]
    for subject in options.subjects * options.rounds:
        if options.what == "prepare":
            for mode in [mode for mode in modes if mode.startswith(PLAIN)]:
                what = {"subject": subject, "size": SUBJECT[subject], "mode": mode, "prepare": True}
                found = in_child("compiled:step_child", what, options.allocator)
                print(f"{subject:9s} {mode:17s} first {found['first_s']:5.1f} s", flush=True)
        else:
            _measure(subject, modes, options)


def _measure(subject: str, modes: list[str], options: argparse.Namespace) -> None:
    """Add a round of rows."""
    made = origin()
    done = [int(row["round"]) for row in read(options.out) if row["subject"] == subject]
    number = max(done, default=0) + 1
    for mode, found in measure(subject, modes, options.turns, options.allocator).items():
        cells = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in found.items()}
        what = {"subject": subject, "size": SUBJECT[subject], "allocator": options.allocator, "mode": mode}
        append(options.out, FIELDS, what | {"round": number} | cells | made)
        peak, held, stored, plain = (
            mib / 2**20 for mib in (found["peak"] - found["rest"], *(found[k] for k in ("held", "stored", "plain")))
        )
        print(
            f"{subject:9s} {mode:17s} ratio {found['ratio']:.3f}  fastest {found['min_s']:6.3f} s  median"
            f" {found['median_s']:6.3f} s  peak {peak:5.0f} MiB  held {held:5.0f} MiB  graphs {found['graphs']}"
            f"  stored {stored:.1f} of {plain:.1f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
