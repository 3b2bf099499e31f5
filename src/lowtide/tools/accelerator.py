"""What somebody with a GPU runs in a minute: are the bytes right, how fast are the kernels, what does a step take?

Results are printed and written to a file that can be sent. Everything also runs on the CPU, which is how it is tested.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .. import kernels
from ..attachment import attach
from ..kernels import ops, reference
from ..policy.choice import Choice
from ..policy.methods import Division, Method
from ..policy.use import Use
from ..session.streams import Copies, stream_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def doctor(out: Path = Path("lowtide-gpu.json"), as_json: bool = False) -> int:
    """Check the GPU of this machine; 0 if all its bytes are those of the reference."""
    if not torch.accelerator.is_available():
        reason = "No GPU is here: torch.accelerator.is_available() is False. Install a torch built for your GPU."
        print(json.dumps({"healthy": False, "reason": reason}, indent=1) if as_json else reason)
        return 1
    device = torch.accelerator.current_accelerator()
    assert device is not None
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        found = examine(device)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"\nWritten to {out}")
    if as_json:
        print(json.dumps({"healthy": not found["differing"], **found}, indent=1))
    return 0 if not found["differing"] else 1


def examine(device: torch.device, small: bool = False) -> dict[str, Any]:
    """Conformance, rates of kernels, and steps of two networks; ``small`` takes sizes that tell nothing of speed."""
    where: dict[str, Any] = {"device": _name(device), "torch": torch.__version__, "python": platform.python_version()}
    print(f"{where['device']}, torch {where['torch']}")
    differing = list(differences(device))
    print(f"Bytes against the reference on the CPU: {'all equal' if not differing else 'DIFFERENT: ' + str(differing)}")
    rounds = 1 if small else 5  # the first ones compile, and adaptive methods decide in them
    rates = dict(speeds(device, 1 << 12 if small else 1 << 26, rounds))
    for name, rate in rates.items():
        print(f"  {name}: {rate:.0f} GB/s")
    steps = {}
    networks = {"ResNet-50-like": convolutions(device, small), "GPT-2-like": transformer(device, small)}
    for name, make in networks.items():
        steps[name] = {mode: step(make, mode, device, rounds) for mode in _MODES}
        for mode, (seconds, peak) in steps[name].items():
            ratio = seconds / steps[name]["plain"][0]
            print(f"  {name} {mode}: {1e3 * seconds:.1f} ms a step ({ratio:.2f}x), peak {peak / 2**20:.0f} MiB")
    served = kernels.served()
    slow = {name: text for name, text in served.get(device.type, {}).items() if "reference" in text}
    print(f"Served by plain torch, at least in part: {slow or 'nothing'}")
    return {**where, "differing": differing, "GB/s": rates, "seconds and peak bytes": steps, "served": served}


def _name(device: torch.device) -> str:
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if name is not None else device.type


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# ---------------------------------------------------------------- conformance


def _same(ours: Any, truth: Any) -> bool:
    if isinstance(truth, (tuple, list)):
        return all(_same(a, b) for a, b in zip(ours, truth, strict=True))
    ours = ours.cpu()
    if truth.dtype.is_floating_point and truth.dtype.itemsize == 1:
        ours, truth = ours.float(), truth.float()
    if truth.dtype.is_floating_point:
        nan = truth.isnan()
        if not torch.equal(ours.isnan(), nan):
            return False
        ours, truth = (t.masked_fill(nan, 0.0).view(_INTS[t.dtype.itemsize]) for t in (ours, truth))
    return torch.equal(ours, truth)


def _awkward(dtype: torch.dtype) -> Tensor:
    """Values of many sizes, a constant row, zeros, and rows with NaN and Inf: 64 rows of 784."""
    x = torch.randn(64, 784, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 64)[:, None]
    x[1], x[2], x[3, 5], x[4, 7], x[5] = 1.2345678, 0.0, math.nan, -math.inf, x[5].relu()
    return x.view(-1).to(dtype)


def differences(device: torch.device) -> Iterator[str]:
    """The operators, with their settings, whose results are not those of the reference on the CPU."""

    def run(operator: Callable[..., Any], given: tuple[Any, ...], place: torch.device) -> Any:
        own = [_copied(one, place) for one in given]
        result = operator(*own)
        return own[0] if result is None else (own[0], result)  # some work in place

    for operator, label, given in _calls():
        truth = run(getattr(reference, operator), given, torch.device("cpu"))
        if not _same(run(getattr(ops, operator), given, device), truth):
            yield f"{operator} {label}"


def _copied(given: Any, place: torch.device) -> Any:
    if isinstance(given, list):
        return [_copied(one, place) for one in given]
    return given.to(place, copy=True) if isinstance(given, Tensor) else given


def _calls() -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    for dtype in FLOATS:
        x, label = _awkward(dtype), str(dtype).removeprefix("torch.")
        numel, geometry = x.numel(), (64, 1, 28, 28, 1)
        mask = reference.pack_band(x, 0.0, math.inf, False, True)
        yield "pack_band", label, (x, 0.0, math.inf, False, True)
        yield "unpack_band", label, (mask, numel, dtype, 1.0, 0.0)
        yield "mask_values", label, (x, mask)
        yield "mask_values_", label, (x, mask)
        yield "range_energy", label, (x, 784, 256, True)
        yield "block_means", label, (x, geometry, 8, dtype)
        for bits in range(1, 9):
            name = f"{label} {bits} bits"
            for group in (256, 196):
                codes = reference.quantize_groups(x, 784, group, bits, 5, True)
                yield "quantize_groups", name, (x, 784, group, bits, 5, True)
                yield "dequantize_groups", name, (*codes, numel, 784, group, bits, dtype, mask, None, 5)
            tiles = reference.quantize_channels(x, (64, 16, 49), 256, bits, 5, False)
            yield "quantize_channels", name, (x, (64, 16, 49), 256, bits, 5, False)
            yield "dequantize_channels", name, (*tiles, (64, 16, 49), 256, bits, dtype, None)
        for row in (784, numel):  # groups end with a row, or lie across maps
            parts = reference.quantize_blocks(x, geometry, 8, row, 256, 2, 5, True)
            yield "quantize_blocks", f"{label} rows of {row}", (x, geometry, 8, row, 256, 2, 5, True)
            yield "dequantize_blocks", f"{label} rows of {row}", (*parts, geometry, 8, row, 256, 2, dtype, mask)
        yield "spread_blocks", label, (parts[0], geometry, 8, dtype)
        own = (torch.arange(64) * 5 % 8 + 1).to(torch.uint8)
        size = sum(reference.row_bytes(784, 256, bits) for bits in own.tolist())
        samples = reference.quantize_samples(x, own, size, 256, 5, True)
        yield "quantize_samples", label, (x, own, size, 256, 5, True)
        yield "dequantize_samples", label, (*samples, own, numel, 256, dtype, mask)
        small = reference.cast_groups(x, 784, 256, torch.float8_e5m2)
        yield "cast_groups", label, (x, 784, 256, torch.float8_e5m2)
        yield "uncast_groups", label, (*small, 784, 256, dtype)
        yield "rebuild_affine", label, (x, (64, 16, 49), torch.randn(16), torch.randn(16), x.flip(0), mask)
    tiles = reference.quantize_channels(_awkward(torch.float32), (64, 16, 49), 256, 3, 5, False)
    scale, other = torch.randn(16), torch.randn(numel)
    for dtype in FLOATS:
        rest = ([None] * 2, [5] * 2, [True] * 2, [scale] * 2, [scale.flip(0)] * 2, other.to(dtype), [None, mask])
        twice = ([part] * 2 for part in tiles)
        yield "rebuild_chain", f"3 bits {dtype}", (*twice, (64, 16, 49), 256, [3] * 2, dtype, *rest)
    norm = (scale, scale.abs() + 0.1, scale.flip(0))
    for name in ("norm_backward", "norm_backward_"):
        yield name, "3 bits", (other, None, *tiles, (64, 16, 49), (), 0, 0, 256, 3, 5, *norm)
    for width, kind in ((1, torch.uint8), (4, torch.int64), (16, torch.int32)):
        whole = (torch.arange(1003) * 7 % 2**width).to(kind)
        yield "pack_uints", f"{width} bits", (whole, 0, width)
        yield "unpack_uints", f"{width} bits", (reference.pack_uints(whole, 0, width), 1003, width, 0, kind)
    starts, taps = torch.arange(0, 56, 2), torch.tensor([0, 1, 2, 56, 57, 58])
    windows = (starts[:, None] + taps[torch.arange(28 * 48).view(28, 48) % 6]).T.reshape(-1)
    packed, _ = reference.pack_taps(windows, starts, 1, taps, 112, 4)
    yield "pack_taps", "4 bits", (windows, starts, 1, taps, 112, 4)
    yield "unpack_taps", "4 bits", (packed, windows.numel(), starts, 1, taps, 4)


# ---------------------------------------------------------------- speed


def _seconds(call: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """The best of some calls."""
    best = math.inf
    for _ in range(rounds):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def speeds(device: torch.device, values: int, rounds: int) -> Iterator[tuple[str, float]]:
    """Gigabytes of the uncompressed tensor a second: copy_, encode and decode, and to pinned host memory and back."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(values, device=device).to(dtype)
        row, label = min(values, 1 << 18), str(dtype).removeprefix("torch.")
        target, size = torch.empty_like(x), x.nbytes / 1e9
        yield f"copy_ {label}", size / _seconds(partial(target.copy_, x), device, rounds)
        for bits in (2, 4):
            codes, side = ops.quantize_groups(x, row, 256, bits, 5, False)
            encode = partial(ops.quantize_groups, x, row, 256, bits, 5, False)
            yield f"quantize_groups {label} {bits} bits", size / _seconds(encode, device, rounds)
            decode = partial(ops.dequantize_groups, codes, side, values, row, 256, bits, dtype, None)
            yield f"dequantize_groups {label} {bits} bits", size / _seconds(decode, device, rounds)
    stream = stream_of(x)
    if stream is not None:
        link = Copies(x.device, stream)
        held, _, copied = link.out((x,))
        out, back = (lambda: link.reuse(link.out((x,))[2])), (lambda: link.read(*link.back(held, copied)))
        yield "to host memory, beside the computation", size / _seconds(out, device, rounds)
        yield "and back", size / _seconds(back, device, rounds)


@dataclass(frozen=True)
class _Away(Method):
    """Everything goes to host memory, as it is or in codes."""

    name = "away"
    codes: bool

    def choose(self, use: Use) -> Choice:
        choice = Division().choose(use)
        return replace(choice, home="host") if self.codes and choice.codec is not None else Choice.offload()


_MODES: dict[str, Method | str | None] = {
    "plain": None,
    "checkpoint": None,
    "division": "division",
    "auto": "auto",
    "offload": _Away(False),
    "division in host memory": _Away(True),
}


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        self.short = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False) if inputs != 4 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y if number == 0 else functional.relu(y)))
        return functional.relu(y + self.short(x))


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(self.first(x)).view(n, t, 3, -1, 64).permute(2, 0, 3, 1, 4)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(n, t, d))
        added: Tensor = self.down(functional.gelu(self.up(self.second(x))))
        return x + added


Subject = tuple[nn.Sequential, Tensor, tuple[type[nn.Module], ...]]


def convolutions(device: torch.device, small: bool) -> Callable[[], Subject]:
    """Bottlenecks of the widths and strides of ResNet-50, without its classes."""

    def make() -> Subject:
        blocks: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        blocks.append(nn.MaxPool2d(3, 2, 1))
        inputs = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))[: 1 if small else 4]:
            for number in range(count):
                blocks.append(_Bottleneck(inputs, width, stride if number == 0 else 1))
                inputs = 4 * width
        x = torch.randn(2, 3, 32, 32) if small else torch.randn(64, 3, 224, 224)
        return nn.Sequential(*blocks).to(device), x.to(device), (_Bottleneck,)

    return make


def transformer(device: torch.device, small: bool) -> Callable[[], Subject]:
    """The twelve layers of GPT-2 small, without its words."""

    def make() -> Subject:
        layers, sequences, length = (1, 1, 16) if small else (12, 8, 1024)
        net = nn.Sequential(*(_Layer(768) for _ in range(layers)))
        return net.to(device), torch.randn(sequences, length, 768).to(device), (_Layer,)

    return make


def step(make: Callable[[], Subject], mode: str, device: torch.device, rounds: int) -> tuple[float, int]:
    """Seconds of a training step, and the peak of its memory above what is there before (0 on the CPU)."""
    torch.manual_seed(0)
    net, x, kinds = make()
    method = _MODES[mode]
    handle = None if method is None else attach(net, method)

    def call() -> None:
        y = x
        if mode == "checkpoint":
            for block in net:
                y = checkpoint(block, y, use_reentrant=False) if isinstance(block, kinds) else block(y)
        else:
            y = net(x)
        loss: Any = y.float().square().mean()
        loss.backward()
        net.zero_grad(set_to_none=True)

    seconds = _seconds(call, device, rounds)
    module, peak = torch.get_device_module(device), 0
    if hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        call()
        peak = module.max_memory_allocated(device) - before
    if handle is not None:
        handle.remove()
    return seconds, peak
