"""What the GPU kernels would cost in a step, computed and not run: a lower bound from bytes, and one from instructions.

Calls of operators are counted in a real step on the CPU (for bfloat16 under autocast) and scaled to the batch; each
takes bytes and instructions of a value from the row of its own kind in ``results/gpu_aot.csv``. A launch takes at least
its bytes over the bandwidth, and its instructions over what the machine issues: four warps in a clock of an SM. No pipe
of an SM takes that many (integers have half), so a second bound counts the slots that the busiest pipe needs. 85 % and
70 % of the peaks are assumed, and launches are added up. Nothing here was measured on a GPU.

    python benchmarks/gpu_roofline.py --method division
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from nets import Block, resnet50

TABLE = Path(__file__).parent / "results" / "gpu_aot.csv"
# Name: row of the table, bytes a second, instructions of a lane a second. Data sheets of the vendor.
MACHINES = {
    "A100 80 GB": ("sm_80", 2.04e12, 108 * 128 * 1.41e9),
    "H100 SXM": ("sm_90", 3.35e12, 132 * 128 * 1.755e9),
}
USED_BYTES, USED_ISSUE = 0.85, 0.7
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Maps that stand for others of the same whole units of a row: 56 for 112, for one.
MAPS = {8: "", 4: " of 28", 2: " of 14", 1: " of 7"}


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


def counted(
    model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], method: str, dtype: torch.dtype = torch.float32
) -> Calls:
    """One step, after one in which adaptive methods decide."""
    handle = lowtide.attach(model, method)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            found = loss(model(x))
        found.backward()

    step()
    with Calls() as calls:
        step()
    handle.remove()
    return calls


def table() -> dict[tuple[str, str], dict[str, str]]:
    with TABLE.open() as file:
        return {(row["case"], row["target"]): row for row in csv.DictReader(file)}


class Bound(NamedTuple):
    """Milliseconds: by bytes alone; by the larger of bytes and instructions; and of bytes and the busiest pipe."""

    by_bytes: float
    by_issue: float
    by_pipes: float


def milliseconds(calls: Calls, scale: float, machine: str) -> tuple[Bound, dict[str, float], list[str]]:
    """The bounds of a step, what each kind adds to the last, and kinds that the table lacks."""
    target, bandwidth, issue = MACHINES[machine]
    rows, total, parts, missing = table(), [0.0, 0.0, 0.0], {}, []
    for case, values in calls.values.items():
        found = [rows[key] for key in ((case, target), (f"{case} +1", target)) if key in rows]
        if not found:
            missing.append(case)
        before = total[2]
        for row in found:
            moved = scale * values * float(row["bytes"]) / bandwidth / USED_BYTES
            issued, busy = (
                scale * values * float(row[name]) / issue / USED_ISSUE for name in ("instructions", "slots")
            )
            for i, part in enumerate((moved, max(moved, issued), max(moved, busy))):
                total[i] += 1e3 * part
        parts[case] = total[2] - before
    return Bound(*total), parts, missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="division")
    given = parser.parse_args()
    torch.manual_seed(0)
    labels = torch.randint(0, 1000, (2,))
    images = torch.randn(2, 3, 224, 224)
    single, mixed = (
        counted(resnet50(), images, lambda y: nn.functional.cross_entropy(y, labels), given.method, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    layer = counted(
        Block(2048, 16), torch.randn(1, 256, 2048), lambda y: y.square().mean(), given.method, torch.bfloat16
    )
    tokens = 8 * 1024
    # Plain steps. ResNet-50: images a second that NVIDIA published for PyTorch on one A100. Transformer: 6 operations
    # for each parameter and token at 40 % of the peak in bfloat16.
    work = 6 * 1.3e9 * tokens / 0.4
    cases = [
        ("ResNet-50, batch 256, float32", single, 128.0, 1, {"A100 80 GB": 256 / 938 * 1e3}),
        ("ResNet-50, batch 256, bfloat16", mixed, 128.0, 1, {"A100 80 GB": 256 / 2470 * 1e3}),
        (
            *("1.3 B transformer, 8 x 1024 tokens, bfloat16", layer, 24 * tokens / 256, 24),
            {"A100 80 GB": work / 312e12 * 1e3, "H100 SXM": work / 989e12 * 1e3},
        ),
    ]
    print(
        "| step | machine | operators called | values, G | by bytes, ms | by instructions, ms | by pipes, ms "
        "| plain step, ms | overhead by instructions | by pipes |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    absent: set[str] = set()
    for name, calls, scale, repeats, plain in cases:
        for machine in MACHINES:
            bound, _, missing = milliseconds(calls, scale, machine)
            absent |= {f"{machine}, {name}: {case}" for case in missing}
            if missing:
                continue
            step = plain.get(machine)
            over = "not known | | "
            if step:
                over = f"{step:.0f} | {1 + bound.by_issue / step:.2f}x | {1 + bound.by_pipes / step:.2f}x"
            count, values = repeats * sum(calls.calls.values()), scale * sum(calls.values.values()) / 1e9
            numbers = " | ".join(f"{ms:.1f}" for ms in bound)
            print(f"| {name} | {machine} | {count} | {values:.2f} | {numbers} | {over} |")
    print("\nLeft out, because the table of compiled kernels lacks a row:", "; ".join(sorted(absent)) or "nothing.")
    for name, calls, scale, _, _ in cases:
        _, parts, _ = milliseconds(calls, scale, "A100 80 GB")
        print(f"\n{name}, A100 80 GB, by pipes:")
        for case, ms in sorted(parts.items(), key=lambda item: -item[1]):
            print(f"{ms:7.2f} ms  {calls.calls[case]:4} calls  {scale * calls.values[case] / 1e9:6.3f} G  {case}")


if __name__ == "__main__":
    main()
