"""Run benchmarks and append rows to a CSV file. See README.md here for the method."""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import datetime
import gc
import itertools
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

import lowtide
from cases import BATCH, METHODS, SUBJECTS, checkpoint_blocks, step
from lowtide import codecs
from lowtide.tools.malloc import TUNABLES
from lowtide.tools.measure import peak_above, reset_peak, resident, run_child

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


WARM = 4  # steps before time counts: the first compiles, and an adaptive method measures in steps 1 and 3
ALLOCATORS = ("default", "tuned")


def tune(kind: str) -> None:
    if kind == "tuned" and not lowtide.tune_cpu_allocator():
        raise RuntimeError("this system's allocator cannot be tuned")


def step_child(argument: dict[str, Any], emit: Any) -> dict[str, Any]:
    """Seconds, page faults and peak of the steps of one mode, which is all that this process ever runs.

    The peak is that of the steps whose time counts. Rest is what stays when they are over and freed memory is given
    back: weights, inputs, code.
    """
    tune(argument["allocator"])
    torch.manual_seed(0)
    subject = SUBJECTS[argument["subject"]](argument["batch"])
    if argument["mode"].endswith("checkpoint"):
        checkpoint_blocks(subject)
    seconds, kept = [], (0, 0)
    for number in range(WARM + argument["repeats"]):
        if number == WARM:
            reset_peak()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.perf_counter()
        kept = step(subject, argument["mode"])
        seconds.append(time.perf_counter() - start)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    peak = resident("VmHWM")
    subject.model.zero_grad(set_to_none=True)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return {
        "time": min(seconds[WARM:]),
        "first": seconds[0],
        "measuring": seconds[2],
        "faults": faults / argument["repeats"],
        "process": peak,
        "peak": peak - resident("VmRSS"),
        "plain": kept[0],
        "stored": kept[1],
    }


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


UNITS = {
    "time": "s",
    "first": "s",
    "measuring": "s",
    "faults": "",
    "process": "B",
    "peak": "B",
    "plain": "B",
    "stored": "B",
}


def measure_steps(
    table: Table, case: str, subject: str, batch: int, modes: list[str], rounds: int, allocator: str, busy: bool = False
) -> None:
    """One process for each mode, by turns, in rounds; of each metric the median over rounds is printed."""
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    label = f"{allocator}, busy" if busy else allocator
    for _ in range(rounds):
        for mode in modes:
            argument = {"subject": subject, "batch": batch, "mode": mode, "allocator": allocator, "repeats": 4}
            with tunables(allocator), load() if busy else contextlib.nullcontext():
                found[mode].append(run_child("run:step_child", argument, exact_rss=False))
    common = {"case": case, "subject": subject, "size": batch, "allocator": label}
    middle = {m: {k: statistics.median(f[k] for f in those) for k in UNITS} for m, those in found.items()}
    print(f"\n{subject}, batch {batch}, {label}")
    for mode in modes:
        for metric, unit in UNITS.items():
            if middle[mode][metric]:
                table.add([f[metric] for f in found[mode]], **common, mode=mode, metric=metric, unit=unit)
        own, base = middle[mode], middle["bf16" if mode.startswith("bf16") else "plain"]
        ratio = f"kept {own['plain'] / own['stored']:5.1f}x less" if own["stored"] else ""
        peak, process = (own[key] / 2**20 for key in ("peak", "process"))
        print(
            f"  {mode:16s} time {own['time']:6.3f} s {own['time'] / base['time']:5.2f}x  first {own['first']:5.1f} s  "
            f"peak {peak:5.0f} MiB {own['peak'] / base['peak']:5.2f}x  process {process:5.0f} MiB  "
            f"{own['faults'] / 1e3:5.0f}k faults  {ratio}",
            flush=True,
        )


@contextlib.contextmanager
def tunables(allocator: str) -> Iterator[None]:
    """What a tuned process has to be started with."""
    before = os.environ.get("GLIBC_TUNABLES")
    if allocator == "tuned":
        os.environ["GLIBC_TUNABLES"] = TUNABLES
    try:
        yield
    finally:
        os.environ.pop("GLIBC_TUNABLES", None)
        if before is not None:
            os.environ["GLIBC_TUNABLES"] = before


@contextlib.contextmanager
def load() -> Iterator[None]:
    """Every core kept busy by another process meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


NETWORKS = ("resnet50", "resnet20", "bert", "gpt2", "unet3d")


def run_step(table: Table, full: bool, chosen: list[str] | None = None, rounds: int = 2) -> None:
    short = ["plain", "checkpoint", "division", "actnn", "auto"]
    half = ["bf16", "bf16+division", "bf16+auto"]
    for subject in chosen or (NETWORKS if full else ("resnet50", "bert")):
        modes = ["plain", "checkpoint", *METHODS, *half, "bf16+actnn"] if full else short
        if subject == "bert":  # without maps actnn is the same as division
            modes = [mode for mode in modes if "actnn" not in mode]
        if subject == "resnet50" and not full:
            modes += half
        measure_steps(table, "step", subject, BATCH[subject], modes, rounds, "tuned")
        measure_steps(table, "step", subject, BATCH[subject], short, 1, "default")
        if subject == "resnet50":
            measure_steps(table, "step", subject, BATCH[subject], ["plain", "division", "auto"], 1, "tuned", busy=True)


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
        measure_steps(table, "scaling", f"depth-{depth}", 2048, ["plain", "actnn"], 2, "tuned")
    for batch in (1, 4, 16, 64) if full else (1, 8):
        measure_steps(table, "scaling", "resnet50", batch, modes, 1, "tuned")


CASES = {"codec": run_codec, "step": run_step, "overhead": run_overhead, "limits": run_limits, "scaling": run_scaling}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"any of {', '.join(CASES)}; default: codec step overhead")
    parser.add_argument("--full", action="store_true", help="every size, subject and mode")
    parser.add_argument("--network", action="append", choices=NETWORKS, help="for step: this one alone (repeatable)")
    parser.add_argument("--rounds", type=int, default=2, help="for step: processes of each mode (%(default)s)")
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
            run_step(table, given.full, given.network, given.rounds)
        else:
            CASES[name](table, given.full)
    print(f"\n{len(table.rows)} rows appended to {given.out}")


if __name__ == "__main__":
    main()
