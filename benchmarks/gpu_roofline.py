"""What the GPU kernels would cost in a step, computed and not run: a lower bound from bytes, and one from instructions.

Calls of operators are counted in a real step on the CPU and scaled to the batch; bytes and instructions of a value come
from ``results/gpu_aot.csv``. A kernel takes at least its bytes over the bandwidth, and its instructions over what the
machine issues; 85 % and 70 % of the peaks are assumed, and kernels are added up. Nothing here was measured on a GPU.

    python benchmarks/gpu_roofline.py --method division
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
ROWS = {  # the row of the table that stands for an operator: the dearest of its kind
    "quantize_blocks": "quantize_blocks 2 bits {} NCHW rectified, mask",
    "dequantize_blocks": "dequantize_blocks 2 bits {} NCHW rectified, mask",
    "quantize_groups": "quantize_groups 2 bits {}",
    "dequantize_groups": "dequantize_groups 2 bits {}",
    "pack_band": "pack_band {}",
    "unpack_band": "unpack_band {}",
    "pack_taps": "pack_taps 4 bits",
    "unpack_taps": "unpack_taps 4 bits",
}


class Calls(TorchDispatchMode):
    """Counts calls of lowtide's operators, and their values."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.values: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        space, _, name = function.name().partition("::")
        if space == "lowtide":
            back = name.startswith(("de", "un"))
            self.calls[name] += 1
            self.values[name] += (result if back else args[0]).numel()
        return result


def counted(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], method: str) -> Calls:
    """One step, after one in which adaptive methods decide."""
    handle = lowtide.attach(model, method)
    loss(model(x)).backward()
    with Calls() as calls:
        loss(model(x)).backward()
    handle.remove()
    return calls


def table() -> dict[tuple[str, str], dict[str, str]]:
    with TABLE.open() as file:
        return {(row["case"], row["target"]): row for row in csv.DictReader(file)}


def milliseconds(calls: Calls, scale: float, dtype: str, machine: str) -> tuple[float, float, list[str]]:
    """By bytes, by instructions (the larger of both for each kernel), and operators that the table lacks."""
    target, bandwidth, issue = MACHINES[machine]
    rows, by_bytes, bound, missing = table(), 0.0, 0.0, []
    for name, values in calls.values.items():
        case = ROWS.get(name, "").format(dtype)
        found = [rows[key] for key in ((case, target), (f"{case} +1", target)) if key in rows]
        if not found:
            missing.append(name)
        for row in found:
            moved = scale * values * float(row["bytes"]) / bandwidth / USED_BYTES
            issued = scale * values * float(row["instructions"]) / issue / USED_ISSUE
            by_bytes, bound = by_bytes + moved, bound + max(moved, issued)
    return 1e3 * by_bytes, 1e3 * bound, missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="division")
    given = parser.parse_args()
    torch.manual_seed(0)
    labels = torch.randint(0, 1000, (2,))
    convolutions = counted(
        resnet50(), torch.randn(2, 3, 224, 224), lambda y: nn.functional.cross_entropy(y, labels), given.method
    )
    layer = counted(Block(2048, 16), torch.randn(1, 256, 2048), lambda y: y.square().mean(), given.method)
    tokens = 8 * 1024
    # Plain steps. ResNet-50: images a second that NVIDIA published for PyTorch on one A100. Transformer: 6 operations
    # for each parameter and token at 40 % of the peak in bfloat16.
    work = 6 * 1.3e9 * tokens / 0.4
    cases = [
        ("ResNet-50, batch 256, float32", convolutions, 128.0, 1, "float32", {"A100 80 GB": 256 / 938 * 1e3}),
        ("ResNet-50, batch 256, bfloat16", convolutions, 128.0, 1, "bfloat16", {"A100 80 GB": 256 / 2470 * 1e3}),
        (
            *("1.3 B transformer, 8 x 1024 tokens, bfloat16", layer, 24 * tokens / 256, 24, "bfloat16"),
            {"A100 80 GB": work / 312e12 * 1e3, "H100 SXM": work / 989e12 * 1e3},
        ),
    ]
    print(
        "| step | machine | operators called | values, G | by bytes, ms | by the larger bound, ms "
        "| plain step, ms | computed overhead |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    absent: set[str] = set()
    for name, calls, scale, repeats, dtype, plain in cases:
        for machine in MACHINES:
            by_bytes, bound, missing = milliseconds(calls, scale, dtype, machine)
            if missing:
                absent.add(f"{machine}, {dtype}: {', '.join(sorted(missing))}")
                continue
            step = plain.get(machine)
            over = f"{step:.0f} | {1 + bound / step:.2f}x" if step else "not known | "
            count, values = repeats * sum(calls.calls.values()), scale * sum(calls.values.values()) / 1e9
            print(f"| {name} | {machine} | {count} | {values:.2f} | {by_bytes:.1f} | {bound:.1f} | {over} |")
    print("\nLeft out, because the table of compiled kernels lacks a row:", "; ".join(sorted(absent)) or "nothing.")
    for name, calls in (("ResNet-50, two images", convolutions), ("one layer, 256 tokens", layer)):
        print(
            f"{name}: " + ", ".join(f"{n} {op} ({calls.values[op]:,} values)" for op, n in sorted(calls.calls.items()))
        )


if __name__ == "__main__":
    main()
