"""Run benchmarks and append rows to a CSV file. See README.md here for the method."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

import lowtide
import steps
from cases import BATCH, SUBJECTS, in_child, step, tune
from lowtide import codecs
from lowtide.kernels import backends, ops
from rows import ORIGIN, RESULTS, append, origin

FIELDS = [
    *("case", "subject", "size", "mode", "allocator", "metric", "unit", "median", "p20", "p80", "repeats"),
    *ORIGIN,
]


class Table:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.common = origin()

    def add(self, values: list[float], **row: Any) -> None:
        ordered = sorted(values)
        cut = statistics.quantiles(ordered, n=5) if len(ordered) > 1 else ordered * 4
        row |= {
            "median": f"{statistics.median(ordered):.6g}",
            "p20": f"{cut[0]:.6g}",
            "p80": f"{cut[3]:.6g}",
            "repeats": len(ordered),
        }
        append(self.path, FIELDS, {**self.common, "size": "", "allocator": "default", **row})


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
    tune(argument)
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
        found = in_child("run:codec_child", {"numel": numel, "repeats": 15 if full else 9}, allocator)
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


# ---------------------------------------------------------------- limits: what bounds a codec and a compressed step


LIMIT_CODECS = {"groups": codecs.GroupQuant(2, 256, "sample"), "block means": codecs.BlockMean(8, 2, 2)}


def limits_child(argument: dict[str, Any], emit: Any) -> dict[str, Any]:
    """Nanoseconds a value: reading and writing alone, then each codec on maps of each size.

    ``near`` is a tensor of 6 MB that stays in the last cache, ``far`` one of 103 MB. A codec that takes as long near as
    far is bound by its instructions, one that takes as long as reading or writing alone by memory.
    """
    tune(argument)
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
    for name, numel, run in like_torch_calls():
        timed(name, numel, run)
    return {"nanoseconds": found}


def like_torch_calls() -> Iterator[tuple[str, int, Any]]:
    """Operators of torch beside kernels with the same bits, and gradients in fresh memory beside those in place."""
    maps, wide = torch.randn(16, 256, 56, 56), torch.randn(16, 64, 112, 112)
    ones, zeros = torch.ones(256), torch.zeros(256)
    names = ("native_batch_norm", "max_pool2d_with_indices", "bernoulli_", "relu")
    norm, pool, draw, relu = map(backends.like_torch, names)
    if norm is None or pool is None or draw is None or relu is None:
        raise RuntimeError("the kernels have other bits than torch's operators here")
    of_norm = (maps, ones, zeros, zeros.clone(), ones.clone(), True, 0.1, 1e-5)
    of_pool = (wide, [3, 3], [2, 2], [1, 1])
    yield "batch norm, torch's", maps.numel(), lambda: torch.ops.aten.native_batch_norm(*of_norm)
    yield "batch norm, same bits", maps.numel(), lambda: norm(*of_norm)
    yield "max pooling, torch's", wide.numel(), lambda: torch.ops.aten.max_pool2d_with_indices(*of_pool)
    yield "max pooling, same bits", wide.numel(), lambda: pool(*of_pool)
    half = wide.bfloat16()
    yield (
        "bfloat16 max pooling, torch's",
        wide.numel(),
        lambda: torch.ops.aten.max_pool2d_with_indices(half, *of_pool[1:]),
    )
    yield "bfloat16 max pooling, same bits", wide.numel(), lambda: pool(half, *of_pool[1:])
    noise = torch.empty(786_432)
    yield "dropout's noise, torch's", noise.numel(), lambda: noise.bernoulli_(0.9)
    yield "dropout's noise, same bits", noise.numel(), lambda: draw(noise, 0.9)
    grads = itertools.cycle([torch.randn(maps.numel()) for _ in range(6)])  # more than the last cache holds
    mask = ops.pack_band(maps.view(-1), 0.0, math.inf, False, True)
    geometry = (16, 256, 56 * 56)
    codes = ops.quantize_channels(maps.view(-1), geometry, 256, 3, 1, False)
    rest = (None, *codes, geometry, (), 0, 0, 256, 3, 1, zeros, ones, ones)
    yield "relu backward, fresh", maps.numel(), lambda: ops.mask_values(next(grads), mask)
    yield "relu backward, in place", maps.numel(), lambda: ops.mask_values_(next(grads), mask)
    yield "batch norm backward, fresh", maps.numel(), lambda: ops.norm_backward(next(grads), *rest)
    yield "batch norm backward, in place", maps.numel(), lambda: ops.norm_backward_(next(grads), *rest)

    def rebuilt(stages: int, other: torch.Tensor | None) -> torch.Tensor:
        parts = ([part] * stages for part in codes)
        scales = [ones] * stages
        given = (torch.float32, [None] * stages, [1] * stages, [True] * stages, scales, scales, other, [mask] * stages)
        return ops.rebuild_chain(*parts, geometry, 256, [3] * stages, *given)

    yield "chain of three, one by one", maps.numel(), lambda: rebuilt(1, rebuilt(1, rebuilt(1, None)))
    yield "chain of three, one pass", maps.numel(), lambda: rebuilt(3, None)
    yield "bits above zero, any band", maps.numel(), lambda: ops.pack_band(maps.view(-1), 0.0, 1e38, False, True)
    yield "bits above zero, a ReLU's", maps.numel(), lambda: ops.pack_band(maps.view(-1), 0.0, math.inf, False, True)
    for name, values in (("relu", maps), ("bfloat16 relu", maps.bfloat16())):
        above = (values.view(-1), 0.0, math.inf, False, True)
        yield f"{name}, then its mask", maps.numel(), lambda v=values, a=above: (torch.relu_(v), ops.pack_band(*a))
        yield f"{name} with its mask", maps.numel(), lambda v=values: relu(v, v)


def kernels_child(argument: dict[str, Any], emit: Any) -> dict[str, Any]:
    """Seconds of a compressed step, and of it inside each kernel."""
    tune(argument)
    torch.manual_seed(0)
    subject = SUBJECTS[argument["subject"]](argument["batch"])
    for _ in range(steps.WARM):
        step(subject, "division", "float32")
    from lowtide.kernels import cpu

    inside: dict[str, float] = {}
    launch = cpu._run

    def timed(name: str, *rest: Any) -> None:
        start = time.perf_counter()
        launch(name, *rest)
        inside[name] = inside.get(name, 0.0) + time.perf_counter() - start

    cpu._run = timed
    seconds = []
    for _ in range(argument["repeats"]):
        start = time.perf_counter()
        step(subject, "division", "float32")
        seconds.append(time.perf_counter() - start)
    return {"inside": {k: v / argument["repeats"] for k, v in inside.items()}, "seconds": seconds}


def run_limits(table: Table, full: bool) -> None:
    repeats = 15 if full else 7
    found = in_child("run:limits_child", {"repeats": repeats}, "tuned")["nanoseconds"]
    print("\nnanoseconds a float32 value, all threads, tuned allocator")
    for name, values in found.items():
        table.add(values, case="limits", subject=name, mode=name, allocator="tuned", metric="time", unit="ns/value")
        print(f"  {name:30s} {statistics.median(values):7.3f}")
    argument = {"subject": "resnet50", "batch": BATCH["resnet50"], "repeats": 5 if full else 3}
    child = in_child("run:kernels_child", argument, "tuned")
    common = {"case": "limits", "subject": "resnet50", "size": BATCH["resnet50"], "allocator": "tuned", "unit": "s"}
    table.add(child["seconds"], **common, mode="division", metric="time")
    print(f"\nresnet50, division: step {statistics.median(child['seconds']):.3f} s; inside kernels:")
    for name, seconds in sorted(child["inside"].items(), key=lambda item: -item[1]):
        table.add([seconds], **common, mode=name, metric="kernel")
        print(f"  {name:30s} {1e3 * seconds:7.1f} ms")


# ---------------------------------------------------------------- overhead


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
        found = in_child("run:overhead_child", argument, "default")
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


CASES = {"codec": run_codec, "overhead": run_overhead, "limits": run_limits}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"any of step, {', '.join(CASES)}; default: all but limits")
    parser.add_argument("--full", action="store_true", help="every size, network and mode, and limits")
    parser.add_argument("--network", action="append", choices=SUBJECTS, help="for step: this one alone (repeatable)")
    parser.add_argument(
        "--setting", action="append", choices=steps.SETTINGS, help="for step: as --network, of settings"
    )
    parser.add_argument("--rounds", type=int, default=1, help="for step: how often each mode runs, in a new process")
    parser.add_argument("--turns", type=int, default=steps.TURNS, help="for step: steps of each process that count")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for step: begin no process after this time")
    parser.add_argument("--append", action="store_true", help="for step: leave out what --out has, and add the rest")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args()
    cases = given.cases or ["codec", "overhead", *(["limits"] if given.full else []), "step"]
    if unknown := set(cases) - {*CASES, "step"}:
        parser.error(f"unknown case {', '.join(sorted(unknown))}; choose from step, {', '.join(CASES)}")
    if (given.network or given.setting) and "step" not in cases:
        parser.error(f"--network and --setting choose among rows of the case step; got {', '.join(cases)}")
    if set_already := [name for name in os.environ if name == "GLIBC_TUNABLES" or name.startswith("MALLOC_")]:
        parser.error(f"{', '.join(set_already)} would change the default allocator; unset it")
    table = Table(given.out / "codecs.csv")
    for name in cases:
        if name != "step":
            CASES[name](table, given.full)
    if "step" not in cases:
        return 0
    path = given.out / "steps.csv"
    if path.exists() and not given.append:
        parser.error(f"{path} exists; --append adds to it, --out chooses another folder")
    networks, settings = given.network or SUBJECTS, given.setting or steps.SETTINGS
    groups = [g for g in steps.plan(given.full) if g.subject in networks and g.setting in settings]
    return 0 if steps.run(path, groups, given.rounds, given.seconds, given.turns) else 3


if __name__ == "__main__":
    sys.exit(main())
