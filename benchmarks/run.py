"""Run benchmarks and append rows to a CSV file. See README.md here for the method."""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

import lowtide
from cases import BATCH, METHODS, SUBJECTS, checkpoint_blocks, step
from lowtide import codecs
from lowtide.tools.measure import peak_above, run_child

RESULTS = Path(__file__).parent / "results"
FIELDS = [
    *("case", "subject", "size", "mode", "allocator", "metric", "unit", "median", "p20", "p80", "repeats"),
    *("date", "commit", "machine", "threads", "python", "torch", "numba", "lowtide"),
]


def environment() -> dict[str, Any]:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=RESULTS.parent)
        return done.stdout.strip()

    try:
        import numba

        numba_version = numba.__version__
    except ImportError:
        numba_version = "none"
    names = [x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else ""),
        "machine": f"{os.cpu_count()} x {names[0] if names else platform.processor()}",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba_version,
        "lowtide": lowtide.__version__,
    }


class Table:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.common = environment()

    def add(self, values: list[float], **row: Any) -> None:
        ordered = sorted(values)
        cut = statistics.quantiles(ordered, n=5) if len(ordered) > 1 else ordered * 4
        row |= {
            "median": f"{statistics.median(ordered):.6g}",
            "p20": f"{cut[0]:.6g}",
            "p80": f"{cut[3]:.6g}",
            "repeats": len(ordered),
        }
        row = {**self.common, "size": "", "allocator": "default", **row}
        self.rows.append(row)
        self.path.parent.mkdir(exist_ok=True)
        fresh = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            if fresh:
                writer.writeheader()
            writer.writerow(row)


# ---------------------------------------------------------------- codec: bandwidth beside copy_


def codec_list() -> dict[str, tuple[codecs.Codec, tuple[int, ...]]]:
    maps = (0, 64, 56, 56)
    return {
        **{f"group_quant-{b}": (codecs.GroupQuant(b, 256, "sample"), maps) for b in (1, 2, 4, 8)},
        **{f"block_mean-{b}": (codecs.BlockMean(8, 2, b), maps) for b in (2, 4)},
        "block_mean-pool2": (codecs.BlockMean(2, 2, 0), maps),
        "mask": (codecs.Mask(), maps),
        "cast-bfloat16": (codecs.Cast("bfloat16"), maps),
        "cast-float8": (codecs.Cast("float8_e4m3fn"), maps),
    }


def shaped(numel: int) -> torch.Tensor:
    return torch.randn(max(1, numel // (64 * 56 * 56)), min(64, max(1, numel // 3136)), 56, 56)


def codec_child(argument: dict[str, Any], emit: Any) -> dict[str, Any]:
    """Seconds of encode, decode and copy_, interleaved so that noise hits all alike."""
    tune(argument["allocator"])
    x = shaped(argument["numel"])
    target = torch.empty_like(x)
    found: dict[str, list[float]] = {}
    chosen = codec_list()
    packed = {name: codec.encode(x, key=1) for name, (codec, _) in chosen.items()}
    for name, (codec, _) in chosen.items():  # compile
        codec.decode(packed[name])

    def timed(name: str, run: Any) -> None:
        inner = max(1, int(2e6 / x.numel()))
        start = time.perf_counter()
        for _ in range(inner):
            run()
        found.setdefault(name, []).append((time.perf_counter() - start) / inner)

    for _ in range(argument["repeats"]):
        timed("copy_", lambda: target.copy_(x))
        timed("fresh-copy", lambda: x.clone())
        for name, (codec, _) in chosen.items():
            timed(f"{name} encode", lambda codec=codec: codec.encode(x, key=1))
            timed(f"{name} decode", lambda codec=codec, name=name: codec.decode(packed[name]))
    return {"seconds": found, "nbytes": x.nbytes}


def run_codec(table: Table, full: bool) -> None:
    sizes = (10**4, 10**5, 10**6, 10**7, 25_690_112, 10**8) if full else (10**6, 25_690_112)
    for numel, allocator in itertools.product(sizes, ("default", "tuned")):
        argument = {"numel": numel, "repeats": 15 if full else 9, "allocator": allocator}
        found = run_child("run:codec_child", argument, exact_rss=False)
        for name, seconds in found["seconds"].items():
            table.add(
                [found["nbytes"] / s / 1e9 for s in seconds],
                case="codec",
                subject=name,
                size=found["nbytes"],
                mode=name,
                allocator=allocator,
                metric="bandwidth",
                unit="GB/s",
            )
        copy = statistics.median(found["seconds"]["copy_"])
        print(
            f"\n{found['nbytes'] / 1e6:.1f} MB float32, {allocator} allocator: "
            f"bandwidth over that of copy_ ({copy * 1e3:.2f} ms)"
        )
        for name, seconds in found["seconds"].items():
            middle = statistics.median(seconds)
            print(f"  {name:28s} {copy / middle:6.2f}x  {middle * 1e3:9.3f} ms")


# ---------------------------------------------------------------- step: time and peak of a training step


WARM = 2  # rounds before time counts: the first compiles, and what it showed an adaptive method shapes the second


def tune(kind: str) -> None:
    if kind == "tuned" and not lowtide.tune_cpu_allocator():
        raise RuntimeError("this system's allocator cannot be tuned")


def time_child(argument: dict[str, Any], emit: Any) -> dict[str, Any]:
    """Seconds of a step in each mode, interleaved. The checkpointed model is a copy of its own."""
    tune(argument["allocator"])
    subjects = {}
    for mode in argument["modes"]:
        kind = "checkpoint" if mode == "checkpoint" else "plain"
        if kind not in subjects:
            torch.manual_seed(0)
            subjects[kind] = SUBJECTS[argument["subject"]](argument["batch"])
            if kind == "checkpoint":
                checkpoint_blocks(subjects[kind])
    found: dict[str, list[float]] = {mode: [] for mode in argument["modes"]}
    for repeat in range(argument["repeats"] + WARM):
        for mode in argument["modes"]:
            subject = subjects["checkpoint" if mode == "checkpoint" else "plain"]
            start = time.perf_counter()
            step(subject, mode)
            if repeat >= WARM:
                found[mode].append(time.perf_counter() - start)
    steps = argument["repeats"] + WARM
    sessions = subjects["plain"].sessions
    deciding = {m: s.tuner_seconds / steps for m, s in sessions.items() if s.tuner_seconds}
    return {"seconds": found, "deciding": deciding}


def peak_child(argument: dict[str, Any], emit: Any) -> dict[str, Any]:
    """Peak resident memory of one step above the resting state, and bytes kept for backward."""
    tune(argument["allocator"])
    torch.manual_seed(0)
    subject = SUBJECTS[argument["subject"]](argument["batch"])
    if argument["mode"] == "checkpoint":
        checkpoint_blocks(subject)
    for _ in range(WARM):  # gradients and one-time buffers exist from here on, and adaptive methods have decided
        step(subject, argument["mode"])
    subject.model.zero_grad(set_to_none=True)
    kept = [0, 0]

    def run() -> None:
        kept[:] = step(subject, argument["mode"])

    return {"peak": peak_above(run), "plain": kept[0], "stored": kept[1]}


def measure_steps(
    table: Table,
    case: str,
    subject: str,
    batch: int,
    modes: list[str],
    repeats: int,
    allocators: tuple[str, ...],
) -> None:
    peaks: dict[str, dict[str, Any]] = {}
    for mode in modes:
        argument = {"subject": subject, "batch": batch, "mode": mode, "allocator": "default"}
        peaks[mode] = run_child("run:peak_child", argument, exact_rss=True)
        common = {"case": case, "subject": subject, "size": batch, "mode": mode}
        table.add([peaks[mode]["peak"]], **common, metric="peak", unit="B")
        if peaks[mode]["plain"]:
            table.add([peaks[mode]["plain"]], **common, metric="plain", unit="B")
            table.add([peaks[mode]["stored"]], **common, metric="stored", unit="B")
    for allocator in allocators:
        argument = {
            "subject": subject,
            "batch": batch,
            "modes": modes,
            "repeats": repeats,
            "allocator": allocator,
        }
        child = run_child("run:time_child", argument, exact_rss=False)
        found = child["seconds"]
        for mode, seconds in child["deciding"].items():
            common = {"case": case, "subject": subject, "size": batch, "mode": mode, "allocator": allocator}
            table.add([seconds], **common, metric="deciding", unit="s")
        for mode in modes:
            table.add(
                found[mode],
                case=case,
                subject=subject,
                size=batch,
                mode=mode,
                allocator=allocator,
                metric="time",
                unit="s",
            )
        plain = statistics.median(found["plain"])
        print(f"\n{subject}, batch {batch}, {allocator} allocator: plain step {plain:.3f} s, "
              f"peak {peaks['plain']['peak'] / 2**20:.0f} MiB")  # fmt: skip
        for mode in modes:
            kept = peaks[mode]
            ratio = f"kept {kept['plain'] / kept['stored']:5.1f}x less" if kept["stored"] else ""
            print(
                f"  {mode:22s} time {statistics.median(found[mode]) / plain:5.2f}x"
                f"  peak {kept['peak'] / peaks['plain']['peak']:5.2f}x  {ratio}"
            )


NETWORKS = ("resnet50", "resnet20", "bert", "gpt2", "unet3d")


def run_step(table: Table, full: bool, chosen: list[str] | None = None) -> None:
    short = ["plain", "division", "actnn", "auto", "checkpoint"]
    every = ["plain", *METHODS, "checkpoint", "bf16", "bf16+division", "bf16+actnn"]
    for subject in chosen or (NETWORKS if full else ("resnet50", "bert")):
        measure_steps(
            table,
            "step",
            subject,
            BATCH[subject],
            every if full else [m for m in short if subject != "bert" or m != "actnn"],  # there the same as division
            5 if full else 3,
            ("default", "tuned"),
        )


# ---------------------------------------------------------------- limits: what bounds a codec and a compressed step


LIMIT_CODECS = {"groups": codecs.GroupQuant(2, 256, "sample"), "block means": codecs.BlockMean(8, 2, 2)}


def limits_child(argument: dict[str, Any], emit: Any) -> dict[str, Any]:
    """Nanoseconds a value: reading and writing alone, then each codec on maps of each size.

    ``near`` is a tensor of 6 MB that stays in the last cache, ``far`` one of 103 MB. A codec that takes as long near as
    far is bound by its instructions, one that takes as long as reading or writing alone by memory.
    """
    tune("tuned")
    far = 25_690_112
    found: dict[str, list[float]] = {}

    def timed(name: str, numel: int, run: Any) -> None:
        run()
        for _ in range(argument["repeats"]):
            inner = max(1, 4_000_000 // numel)
            start = time.perf_counter()
            for _ in range(inner):
                run()
            found.setdefault(name, []).append((time.perf_counter() - start) / inner / numel * 1e9)

    x = torch.randn(far)
    target = torch.empty_like(x)
    timed("read", far, lambda: x.sum())
    timed("write", far, lambda: target.fill_(1.0))
    timed("copy", far, lambda: target.copy_(x))
    for place, numel in (("near", 1_605_632), ("far", far)):
        for side in (56, 28, 14, 7):
            maps = x[: numel // side**2 // 16 * 16 * side**2].view(16, -1, side, side)
            for name, codec in LIMIT_CODECS.items():
                packed = codec.encode(maps, key=1)
                timed(f"{name} encode {side} {place}", maps.numel(), lambda c=codec, m=maps: c.encode(m, key=1))
                timed(f"{name} decode {side} {place}", maps.numel(), lambda p=packed: p.decode())
    return {"nanoseconds": found}


def kernels_child(argument: dict[str, Any], emit: Any) -> dict[str, Any]:
    """Seconds of a step inside each kernel, its calls, and seconds of the plain and the compressed step."""
    tune("tuned")
    torch.manual_seed(0)
    subject = SUBJECTS[argument["subject"]](argument["batch"])
    for _ in range(WARM):
        step(subject, "plain")
        step(subject, "division")
    from lowtide.kernels import cpu

    inside: dict[str, float] = {}
    launch = cpu._run

    def timed(name: str, *rest: Any) -> None:
        start = time.perf_counter()
        launch(name, *rest)
        inside[name] = inside.get(name, 0.0) + time.perf_counter() - start

    cpu._run = timed
    seconds: dict[str, list[float]] = {"plain": [], "division": []}
    for _ in range(argument["repeats"]):
        for mode, times in seconds.items():
            start = time.perf_counter()
            step(subject, mode)
            times.append(time.perf_counter() - start)
    return {"inside": {k: v / argument["repeats"] for k, v in inside.items()}, "seconds": seconds}


def run_limits(table: Table, full: bool) -> None:
    repeats = 15 if full else 7
    found = run_child("run:limits_child", {"repeats": repeats}, exact_rss=False)["nanoseconds"]
    print("\nnanoseconds a float32 value, all threads, tuned allocator")
    for name, values in found.items():
        table.add(values, case="limits", subject=name, mode=name, allocator="tuned", metric="time", unit="ns/value")
        print(f"  {name:30s} {statistics.median(values):7.3f}")
    argument = {"subject": "resnet50", "batch": BATCH["resnet50"], "repeats": 5 if full else 3}
    child = run_child("run:kernels_child", argument, exact_rss=False)
    plain, ours = (statistics.median(child["seconds"][m]) for m in ("plain", "division"))
    print(f"\nresnet50, division: step {ours:.3f} s, plain {plain:.3f} s, {ours / plain:.3f}x; inside kernels:")
    for name, seconds in sorted(child["inside"].items(), key=lambda item: -item[1]):
        table.add(
            [seconds],
            case="limits",
            subject="resnet50",
            size=16,
            mode=name,
            allocator="tuned",
            metric="kernel",
            unit="s",
        )
        print(f"  {name:30s} {1e3 * seconds:7.1f} ms")
    for mode, times in child["seconds"].items():
        table.add(
            times, case="limits", subject="resnet50", size=16, mode=mode, allocator="tuned", metric="time", unit="s"
        )


# ---------------------------------------------------------------- overhead and scaling


def overhead_child(argument: dict[str, Any], emit: Any) -> dict[str, Any]:
    """Microseconds that a session adds to a launch-bound step, for each tensor it hooks.

    The codec does nothing, so what remains is Python: function mode, capture, handles, hooks, unpacking. One
    thread, because waking a second one costs more than these ops do.
    """
    torch.set_num_threads(1)
    subject = SUBJECTS[argument["subject"]](argument["batch"])
    null = NullCodec()
    found: dict[str, list[float]] = {"plain": [], "lowtide": []}
    packing: list[float] = []
    packed = 0
    for repeat in range(argument["repeats"] + 3):
        for mode in ("plain", "lowtide"):
            context: Any = torch.enable_grad()
            if mode == "lowtide":
                context = lowtide.compress(subject.model, null, min_numel=0)
            start = time.perf_counter()
            with context as session:
                loss = subject.loss(subject.model)
            loss.backward()
            seconds = time.perf_counter() - start
            if mode == "lowtide":
                packed = sum(s.state in ("compressed", "shared") for s in session.report().sites)
            if repeat >= 3:
                found[mode].append(seconds)
    for _ in range(argument["repeats"]):  # apart, because the timers themselves cost time
        session = lowtide.compress(subject.model, null, min_numel=0)
        spent = add_timers(session)
        with session:
            loss = subject.loss(subject.model)
        loss.backward()
        packing.append(sum(spent) / packed * 1e6)
    pairs = zip(found["lowtide"], found["plain"], strict=True)
    return {
        "session": [(a - b) / packed * 1e6 for a, b in pairs],
        "pack and unpack": packing,
        "packed": packed,
        **found,
    }


def add_timers(session: lowtide.Session) -> list[float]:
    """Collect the seconds spent in the session's own pack and unpack, one entry a call."""
    spent: list[float] = []

    def timed(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def run(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = inner(*arguments)
            spent.append(time.perf_counter() - start)
            return result

        setattr(owner, name, run)

    for owner, name in ((session, "_visit"), (session, "_unpack"), (session._packer, "seal")):
        timed(owner, name)
    return spent


class NullCodec(codecs.Codec):
    """Keeps the tensor itself: no kernel, only the machinery around it."""

    id = "null"

    def encode(self, tensor: torch.Tensor, *, key: int, support: Any = None) -> codecs.Packed:
        return codecs.Packed(self, codecs.TensorMeta.of(tensor), (tensor,))

    def decode(self, packed: codecs.Packed, *, support: Any = None) -> torch.Tensor:
        return packed.buffers[0]

    def packed_nbytes(self, meta: codecs.TensorMeta) -> int:
        return -1

    def to_config(self) -> dict[str, Any]:
        return {"id": self.id}

    def __str__(self) -> str:
        return self.id


def run_overhead(table: Table, full: bool) -> None:
    print("\nPython cost for each packed tensor, no kernel: pack and unpack alone, and the whole session")
    for subject in ("tiny-mlp", "tiny-cnn"):
        argument = {"subject": subject, "batch": BATCH[subject], "repeats": 200 if full else 60}
        found = run_child("run:overhead_child", argument, exact_rss=False)
        common = {"case": "overhead", "subject": subject, "size": found["packed"]}
        for metric in ("pack and unpack", "session"):
            table.add(found[metric], **common, mode="lowtide", metric=metric, unit="us per packed tensor")
        for mode in ("plain", "lowtide"):
            table.add(found[mode], **common, mode=mode, metric="time", unit="s")
        names = ("pack and unpack", "session", "plain", "lowtide")
        packing, session, plain, ours = (statistics.median(found[name]) for name in names)
        print(
            f"  {subject:10s} {packing:5.1f} us, {session:5.1f} us, {found['packed']} tensors, "
            f"step {plain * 1e3:.2f} -> {ours * 1e3:.2f} ms"
        )


def run_scaling(table: Table, full: bool) -> None:
    modes = ["plain", "division", "checkpoint"]
    for depth in (10, 25, 50, 100, 200) if full else (10, 50):
        measure_steps(table, "scaling", f"depth-{depth}", 2048, ["plain", "actnn"], 5, ("default",))
    for batch in (1, 4, 16, 64) if full else (1, 8):
        measure_steps(table, "scaling", "resnet50", batch, modes, 3, ("default",))


CASES = {"codec": run_codec, "step": run_step, "overhead": run_overhead, "limits": run_limits, "scaling": run_scaling}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"any of {', '.join(CASES)}; default: codec step overhead")
    parser.add_argument("--full", action="store_true", help="every size, subject and mode")
    parser.add_argument("--network", action="append", choices=NETWORKS, help="for step: this one alone (repeatable)")
    parser.add_argument("--out", type=Path, default=RESULTS / "latest.csv")
    given = parser.parse_args()
    unknown = set(given.cases) - set(CASES)
    if unknown:
        parser.error(f"unknown case {', '.join(sorted(unknown))}; choose from {', '.join(CASES)}")
    cases = given.cases or (list(CASES) if given.full else ["codec", "step", "overhead"])
    if given.network and "step" not in cases:
        parser.error(f"--network chooses networks of the case step; got {', '.join(cases)}")
    table = Table(given.out)
    for name in cases:
        if name == "step":
            run_step(table, given.full, given.network)
        else:
            CASES[name](table, given.full)
    print(f"\n{len(table.rows)} rows appended to {given.out}")


if __name__ == "__main__":
    main()
