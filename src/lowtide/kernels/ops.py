"""Every kernel as a torch operator: schema, shape function, typed wrapper. The only backend switch.

The dispatcher is the registry: the reference in plain torch serves any device, and a backend that
registers itself for its device (``kernels/cpu.py``) takes precedence there. Shape functions (fakes)
let sizes be planned on ``FakeTensorMode`` without data. Calls that nobody but a CPU kernel can want go past the
dispatcher: see ``_operator``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import backends
from .reference import channel_pieces, channel_sizes, group_bytes, groups_in_row, low_shape, row_bytes

__all__ = [
    "block_means",
    "cast_groups",
    "channel_pieces",
    "channel_sizes",
    "dequantize_blocks",
    "dequantize_channels",
    "dequantize_groups",
    "dequantize_samples",
    "group_bytes",
    "groups_in_row",
    "low_shape",
    "mask_values",
    "mask_values_",
    "norm_backward",
    "norm_backward_",
    "pack_band",
    "pack_taps",
    "pack_uints",
    "quantize_blocks",
    "quantize_channels",
    "quantize_groups",
    "quantize_samples",
    "range_energy",
    "rebuild_affine",
    "rebuild_chain",
    "require_later",
    "row_bytes",
    "spread_blocks",
    "uncast_groups",
    "unpack_band",
    "unpack_taps",
    "unpack_uints",
]

SCHEMAS = {
    "quantize_groups": "(Tensor x, int row, int group, int bits, int key, bool positive,"
    " Tensor? levels=None, Tensor(a!)? support=None) -> (Tensor, Tensor)",
    "dequantize_groups": "(Tensor codes, Tensor side, int numel, int row, int group, int bits,"
    " ScalarType dtype, Tensor? support, Tensor? levels=None, int? key=None) -> Tensor",
    "quantize_blocks": "(Tensor x, int[] geometry, int block, int row, int group, int bits, int key,"
    " bool positive, Tensor? levels=None, Tensor(a!)? support=None) -> (Tensor, Tensor, Tensor)",
    "dequantize_blocks": "(Tensor low, Tensor codes, Tensor side, int[] geometry, int block, int row,"
    " int group, int bits, ScalarType dtype, Tensor? support, Tensor? levels=None, int? key=None) -> Tensor",
    "quantize_channels": "(Tensor x, int[] geometry, int group, int bits, int key, bool positive,"
    " Tensor? levels=None, Tensor(a!)? support=None) -> (Tensor, Tensor)",
    "dequantize_channels": "(Tensor codes, Tensor side, int[] geometry, int group, int bits, ScalarType dtype,"
    " Tensor? support, Tensor? levels=None, int? key=None) -> Tensor",
    "quantize_samples": "(Tensor x, Tensor bits, int size, int group, int key, bool positive,"
    " Tensor(a!)? support=None) -> (Tensor, Tensor)",
    "dequantize_samples": "(Tensor codes, Tensor side, Tensor bits, int numel, int group, ScalarType dtype,"
    " Tensor? support) -> Tensor",
    "range_energy": "(Tensor x, int row, int group, bool positive) -> Tensor",
    "cast_groups": "(Tensor x, int row, int group, ScalarType dtype, Tensor? scale=None) -> (Tensor, Tensor)",
    "uncast_groups": "(Tensor values, Tensor scale, int row, int group, ScalarType dtype) -> Tensor",
    "block_means": "(Tensor x, int[] geometry, int block, ScalarType dtype) -> Tensor",
    "spread_blocks": "(Tensor low, int[] geometry, int block, ScalarType dtype) -> Tensor",
    "rebuild_affine": "(Tensor(a!) x, int[] geometry, Tensor scale, Tensor shift, Tensor? other,"
    " Tensor? support) -> ()",
    "rebuild_chain": "(Tensor[] codes, Tensor[] sides, int[] geometry, int group, int[] bits, ScalarType dtype,"
    " Tensor?[] supports, int[] keys, bool[] dithered, Tensor[] scales, Tensor[] shifts, Tensor? other,"
    " Tensor?[] masks) -> Tensor",
    "norm_backward": "(Tensor grad, Tensor? low, Tensor codes, Tensor side, int[] geometry, int[] frame, int block,"
    " int row, int group, int bits, int? key, Tensor mean, Tensor invstd, Tensor? weight) -> (Tensor, Tensor, Tensor)",
    "norm_backward_": "(Tensor(a!) grad, Tensor? low, Tensor codes, Tensor side, int[] geometry, int[] frame,"
    " int block, int row, int group, int bits, int? key, Tensor mean, Tensor invstd, Tensor? weight)"
    " -> (Tensor, Tensor)",
    "pack_band": "(Tensor x, float low, float high, bool closed, bool nan) -> Tensor",
    "unpack_band": "(Tensor mask, int numel, ScalarType dtype, float inside, float outside) -> Tensor",
    "mask_values": "(Tensor x, Tensor mask) -> Tensor",
    "mask_values_": "(Tensor(a!) x, Tensor mask) -> ()",
    "pack_uints": "(Tensor x, int offset, int bits) -> Tensor",
    "unpack_uints": "(Tensor packed, int numel, int bits, int offset, ScalarType dtype) -> Tensor",
    "pack_taps": "(Tensor x, Tensor starts, int inner, Tensor taps, int size, int bits) -> (Tensor, Tensor)",
    "unpack_taps": "(Tensor packed, int numel, Tensor starts, int inner, Tensor taps, int bits) -> Tensor",
}

LIBRARY: Any = torch.library.Library("lowtide", "DEF")  # type: ignore[no-untyped-call]
for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema)
backends.register(LIBRARY, SCHEMAS)


def _fake(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.library.register_fake(f"lowtide::{function.__name__.removeprefix('_fake_')}", function, lib=LIBRARY)
    return function


def _sizes(numel: int, row: int, group: int, bits: int) -> tuple[int, int]:
    rows = numel // row if row else 0
    return rows * row_bytes(row, group, bits), rows * groups_in_row(row, group) * 2


@_fake
def _fake_quantize_groups(
    x: Tensor,
    row: int,
    group: int,
    bits: int,
    key: int,
    positive: bool,
    levels: Tensor | None = None,
    support: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    codes, side = _sizes(x.numel(), row, group, bits)
    return x.new_empty(codes, dtype=torch.uint8), x.new_empty(side, dtype=torch.int16)


@_fake
def _fake_dequantize_groups(
    codes: Tensor,
    side: Tensor,
    numel: int,
    row: int,
    group: int,
    bits: int,
    dtype: torch.dtype,
    support: Tensor | None,
    levels: Tensor | None = None,
    key: int | None = None,
) -> Tensor:
    return codes.new_empty(numel, dtype=dtype)


@_fake
def _fake_quantize_channels(
    x: Tensor,
    geometry: Sequence[int],
    group: int,
    bits: int,
    key: int,
    positive: bool,
    levels: Tensor | None = None,
    support: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    groups, size = channel_sizes(geometry, group, bits) if x.numel() else (0, 0)
    return x.new_empty(size, dtype=torch.uint8), x.new_empty(2 * groups, dtype=torch.int16)


@_fake
def _fake_dequantize_channels(
    codes: Tensor,
    side: Tensor,
    geometry: Sequence[int],
    group: int,
    bits: int,
    dtype: torch.dtype,
    support: Tensor | None,
    levels: Tensor | None = None,
    key: int | None = None,
) -> Tensor:
    return codes.new_empty(_numel(geometry), dtype=dtype)


@_fake
def _fake_quantize_samples(
    x: Tensor, bits: Tensor, size: int, group: int, key: int, positive: bool, support: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    row = x.numel() // max(1, bits.numel())
    words = bits.numel() * groups_in_row(row, group) * 2
    return x.new_empty(size, dtype=torch.uint8), x.new_empty(words, dtype=torch.int16)


@_fake
def _fake_dequantize_samples(
    codes: Tensor, side: Tensor, bits: Tensor, numel: int, group: int, dtype: torch.dtype, support: Tensor | None
) -> Tensor:
    return codes.new_empty(numel, dtype=dtype)


@_fake
def _fake_range_energy(x: Tensor, row: int, group: int, positive: bool) -> Tensor:
    return x.new_empty(x.numel() // row if row else 0, dtype=torch.float32)


@_fake
def _fake_cast_groups(
    x: Tensor, row: int, group: int, dtype: torch.dtype, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    groups = x.numel() // row * groups_in_row(row, group) if row else 0
    scales = x.new_empty(groups, dtype=torch.bfloat16) if scale is None else scale.new_empty(1)
    return x.new_empty(x.numel(), dtype=dtype), scales


@_fake
def _fake_uncast_groups(values: Tensor, scale: Tensor, row: int, group: int, dtype: torch.dtype) -> Tensor:
    return values.new_empty(values.numel(), dtype=dtype)


def _low_numel(geometry: Sequence[int], block: int) -> int:
    numel = 1
    for size in low_shape(geometry, block):
        numel *= size
    return numel


def _numel(geometry: Sequence[int]) -> int:
    numel = 1
    for size in geometry:
        numel *= size
    return numel


@_fake
def _fake_quantize_blocks(
    x: Tensor,
    geometry: Sequence[int],
    block: int,
    row: int,
    group: int,
    bits: int,
    key: int,
    positive: bool,
    levels: Tensor | None = None,
    support: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    low = x.new_empty(_low_numel(geometry, block), dtype=torch.bfloat16)
    codes, side = _sizes(x.numel(), row, group, bits)
    return low, x.new_empty(codes, dtype=torch.uint8), x.new_empty(side, dtype=torch.int16)


@_fake
def _fake_dequantize_blocks(
    low: Tensor,
    codes: Tensor,
    side: Tensor,
    geometry: Sequence[int],
    block: int,
    row: int,
    group: int,
    bits: int,
    dtype: torch.dtype,
    support: Tensor | None,
    levels: Tensor | None = None,
    key: int | None = None,
) -> Tensor:
    return low.new_empty(_numel(geometry), dtype=dtype)


@_fake
def _fake_block_means(x: Tensor, geometry: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(_low_numel(geometry, block), dtype=dtype)


@_fake
def _fake_spread_blocks(low: Tensor, geometry: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    return low.new_empty(_numel(geometry), dtype=dtype)


@_fake
def _fake_rebuild_affine(
    x: Tensor, geometry: Sequence[int], scale: Tensor, shift: Tensor, other: Tensor | None, support: Tensor | None
) -> None:
    return


@_fake
def _fake_rebuild_chain(
    codes: Sequence[Tensor], sides: Sequence[Tensor], geometry: Sequence[int], *rest: Any
) -> Tensor:
    dtype: torch.dtype = rest[2]
    return codes[0].new_empty(_numel(geometry), dtype=dtype)


@_fake
def _fake_norm_backward(
    grad: Tensor,
    low: Tensor | None,
    codes: Tensor,
    side: Tensor,
    geometry: Sequence[int],
    frame: Sequence[int],
    block: int,
    row: int,
    group: int,
    bits: int,
    key: int | None,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(grad), torch.empty_like(mean), torch.empty_like(mean)


@_fake
def _fake_norm_backward_(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    *_, mean, _invstd, _weight = given
    return torch.empty_like(mean), torch.empty_like(mean)


@_fake
def _fake_pack_band(x: Tensor, low: float, high: float, closed: bool, nan: bool) -> Tensor:
    return x.new_empty(-(-x.numel() // 8), dtype=torch.uint8)


@_fake
def _fake_unpack_band(mask: Tensor, numel: int, dtype: torch.dtype, inside: float, outside: float) -> Tensor:
    return mask.new_empty(numel, dtype=dtype)


@_fake
def _fake_mask_values(x: Tensor, mask: Tensor) -> Tensor:
    return torch.empty_like(x)


@_fake
def _fake_mask_values_(x: Tensor, mask: Tensor) -> None:
    return None


@_fake
def _fake_pack_uints(x: Tensor, offset: int, bits: int) -> Tensor:
    return x.new_empty(-(-x.numel() * bits // 8), dtype=torch.uint8)


@_fake
def _fake_unpack_uints(packed: Tensor, numel: int, bits: int, offset: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(numel, dtype=dtype)


@_fake
def _fake_pack_taps(x: Tensor, starts: Tensor, inner: int, taps: Tensor, size: int, bits: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(-(-x.numel() * bits // 8), dtype=torch.uint8), x.new_empty((), dtype=torch.int64)


@_fake
def _fake_unpack_taps(packed: Tensor, numel: int, starts: Tensor, inner: int, taps: Tensor, bits: int) -> Tensor:
    return packed.new_empty(numel, dtype=torch.int64)


def _operator(name: str) -> Callable[..., Any]:
    """The operator, called through torch's dispatcher unless nobody but a kernel of the CPU can want the call.

    The dispatcher turns each argument into an object of its own and back, which takes longer than a small kernel.
    """
    overload = getattr(torch.ops.lowtide, name).default

    def call(first: Any, *rest: Any) -> Any:
        kernel = backends.functions.get(("cpu", name))  # none before the first call
        if kernel is None or torch.compiler.is_compiling() or not _is_bare(first):
            return overload(first, *rest)
        return kernel(first, *rest)

    return call


def _is_bare(first: Tensor | Sequence[Tensor]) -> bool:
    """Is it a plain tensor of the CPU, or several, in a thread where no mode sees operators?"""
    tensor = first[0] if type(first) is list and first else first
    if type(tensor) is not Tensor or _PLAIN is None:
        return False
    c: Any = torch._C
    modes = c._len_torch_dispatch_stack() + c._len_torch_function_stack()
    return not modes and bool(c._dispatch_keys(tensor).raw_repr() == _PLAIN)


def _plain_keys() -> int | None:
    """What marks a plain tensor of the CPU, while wrappers of transforms have the same type; None if torch is mute."""
    c: Any = torch._C
    if not all(
        hasattr(c, f"_{name}") for name in ("dispatch_keys", "len_torch_dispatch_stack", "len_torch_function_stack")
    ):
        return None
    keys = c._dispatch_keys(torch.empty(0, device="cpu"))
    return int(keys.raw_repr()) if hasattr(keys, "raw_repr") else None


_PLAIN = _plain_keys()

quantize_groups: Callable[..., tuple[Tensor, Tensor]] = _operator("quantize_groups")
dequantize_groups: Callable[..., Tensor] = _operator("dequantize_groups")
quantize_blocks: Callable[..., tuple[Tensor, Tensor, Tensor]] = _operator("quantize_blocks")
dequantize_blocks: Callable[..., Tensor] = _operator("dequantize_blocks")
quantize_channels: Callable[..., tuple[Tensor, Tensor]] = _operator("quantize_channels")
dequantize_channels: Callable[..., Tensor] = _operator("dequantize_channels")
quantize_samples: Callable[..., tuple[Tensor, Tensor]] = _operator("quantize_samples")
dequantize_samples: Callable[..., Tensor] = _operator("dequantize_samples")
range_energy: Callable[[Tensor, int, int, bool], Tensor] = _operator("range_energy")
cast_groups: Callable[..., tuple[Tensor, Tensor]] = _operator("cast_groups")
uncast_groups: Callable[[Tensor, Tensor, int, int, torch.dtype], Tensor] = _operator("uncast_groups")
block_means: Callable[[Tensor, Sequence[int], int, torch.dtype], Tensor] = _operator("block_means")
spread_blocks: Callable[[Tensor, Sequence[int], int, torch.dtype], Tensor] = _operator("spread_blocks")
rebuild_affine: Callable[..., None] = _operator("rebuild_affine")
rebuild_chain: Callable[..., Tensor] = _operator("rebuild_chain")
norm_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = _operator("norm_backward")
norm_backward_: Callable[..., tuple[Tensor, Tensor]] = _operator("norm_backward_")
pack_band: Callable[[Tensor, float, float, bool, bool], Tensor] = _operator("pack_band")
unpack_band: Callable[[Tensor, int, torch.dtype, float, float], Tensor] = _operator("unpack_band")
mask_values: Callable[[Tensor, Tensor], Tensor] = _operator("mask_values")
mask_values_: Callable[[Tensor, Tensor], None] = _operator("mask_values_")
pack_uints: Callable[[Tensor, int, int], Tensor] = _operator("pack_uints")
unpack_uints: Callable[[Tensor, int, int, int, torch.dtype], Tensor] = _operator("unpack_uints")
pack_taps: Callable[..., tuple[Tensor, Tensor]] = _operator("pack_taps")
unpack_taps: Callable[..., Tensor] = _operator("unpack_taps")


def require_later(holds: Tensor) -> None:
    """Lets the device stop with an error unless ``holds``. What must be true is checked, and nobody waits for it."""
    torch.ops.aten._assert_async.msg(holds, "lowtide: a saved index is outside the range of its operation")
