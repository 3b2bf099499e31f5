"""Launches the kernels of ``compiled`` on torch's threads, and serves them as operators."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import struct
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from . import layout, reference
from .backends import PROCESS, note_fallback
from .layout import (
    BATCH,
    BFLOAT16,
    BOOL,
    E4M3,
    E5M2,
    FLOAT16,
    FLOAT32,
    GROUPS,
    SLABS,
    TILE,
    TILE_CHANNELS,
    TILES,
    Launch,
    Progress,
    Slabs,
)
from .native import MachineCode
from .reference import channel_sizes, channel_step, groups_in_row, low_shape, row_bytes

F = TypeVar("F", bound=Callable[..., Any])

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
KINDS8 = {getattr(torch, n, None): k for n, k in (("float8_e4m3fn", E4M3), ("float8_e5m2", E5M2))}


class _OpenMP:
    """The OpenMP runtime that torch itself uses: one pool of threads for torch's kernels and ours.

    Numba's own threading layers bring a second runtime, whose waiting threads spin on the cores that torch's
    next kernel needs; and one of them aborts the process when entered twice.
    """

    def __init__(self) -> None:
        self.parallel: Any = None
        for name in ("libgomp.so.1", "libomp.so", "libiomp5.so", "libomp.dylib"):
            try:
                library = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)  # only if torch has loaded it
                self.parallel = library.GOMP_parallel
                self.thread_number, self.clock = (
                    cast(int, ctypes.cast(function, ctypes.c_void_p).value)
                    for function in (library.omp_get_thread_num, library.omp_get_wtime)
                )
            except (OSError, AttributeError):
                continue
            self.parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            self.parallel.restype = None
            return


_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class _Kernel(NamedTuple):
    address: int
    call: Any


class _Compiled:
    """The kernels compiled or loaded so far."""

    def __init__(self) -> None:
        self.code = MachineCode()
        self.kernels: dict[str, _Kernel] = {}
        self.openmp = _OpenMP()

    def kernel(self, name: str) -> _Kernel:
        address = self.code.address(name)
        return self.kernels.setdefault(name, _Kernel(address, _CALL(address)))

    def team(self) -> int:
        return self.code.address("team")


_compiled = _Compiled()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_compiled.code.renew)


def compile(name: str) -> None:
    """Compiles one kernel, or loads it from the cache; raises if that is impossible."""
    _compiled.kernel(name.removesuffix("_"))  # what works in place has the same kernel
    _compiled.team()


_SMALL = 1 << 18  # values; one thread takes less than 0.1 ms for fewer, and a second one gains little
_GRAIN = 1 << 16  # values that a thread of a team takes at once
_LATE = 1_000_000  # nanoseconds that no thread waits for another unless cores are busy
_PAUSE, _LONGEST_PAUSE = 8, 512  # calls in one thread after a team that was late


class _Scratch(threading.local):
    """Memory that a kernel works in, kept for the next kernel of the same thread unless it is much."""

    def __init__(self) -> None:
        self.kept = torch.empty(0, dtype=torch.uint8)

    def of(self, size: int) -> Tensor:
        """At least so many bytes, until the next call."""
        if self.kept.numel() >= size:
            return self.kept
        memory = torch.empty(size, dtype=torch.uint8)
        if size <= _MOST_KEPT:
            self.kept = memory
        return memory


_MOST_KEPT = 1 << 18
_scratch = _Scratch()


class _Teams:
    """Runs kernels in teams of threads, as long as that is faster than one thread.

    The end of a team is a barrier of OpenMP: the calling thread waits for every other, even for one that has found
    nothing left to do, and it spins for a while first. On cores that other processes keep busy the threads it
    waits for may not run at all until then. So threads take small chunks, whoever comes first; and after a team in
    which the calling thread waited longer than the others saved it, the next calls run in one thread: the more of
    them, the more such teams there were in a row.
    """

    def __init__(self) -> None:
        self.alone, self.pause = 0, _PAUSE

    def pays(self) -> bool:
        """Is it time for a team?"""
        self.alone -= 1
        return self.alone < 0

    def run(self, function: Any, items: int, chunk: int, threads: int, scratch: int, record: tuple[int, ...]) -> None:
        """Runs a kernel over ``items`` in ``threads`` threads."""
        c = _compiled
        stride = layout.aligned(scratch) + layout.LINE  # so that no two threads write to one line
        memory = _scratch.of(threads * stride)
        parameters, progress = array("q", record), array("q", Progress(0, 0, 0))
        launch = array(
            "q",
            Launch(
                thread_number=c.openmp.thread_number,
                clock=c.openmp.clock,
                kernel=function.address,
                parameters=parameters.buffer_info()[0],
                scratch=memory.data_ptr(),
                stride=stride,
                items=items,
                chunk=chunk,
                progress=progress.buffer_info()[0],
            ),
        )
        start = time.perf_counter_ns()
        c.openmp.parallel(c.team(), launch.buffer_info()[0], threads, 0)
        done = Progress(*progress)
        waited = time.perf_counter_ns() - start - done.nanoseconds
        saved = done.nanoseconds * (items - done.own) // max(done.own, 1)
        if waited > _LATE and waited > saved:
            self.alone, self.pause = self.pause, min(2 * self.pause, _LONGEST_PAUSE)
        else:
            self.alone, self.pause = 0, _PAUSE


_teams = _Teams()
_PACK = [struct.Struct(f"{words}q").pack for words in range(32)]  # more words than any record has


def _run(name: str, items: int, work: int, scratch: int, record: tuple[int, ...], grain: int = 1) -> None:
    """Runs a kernel over ``items``, which have ``work`` values; a thread takes at least ``grain`` values at once."""
    function = _compiled.kernels.get(name) or _compiled.kernel(name)
    # A forked child has none of its parent's threads: OpenMP would hang or abort there.
    if work >= _SMALL and _compiled.openmp.parallel is not None and os.getpid() == PROCESS:
        chunk = -(-items * max(grain, _GRAIN) // work)
        threads = min(torch.get_num_threads(), -(-items // chunk))
        if threads > 1 and _teams.pays():
            _teams.run(function, items, chunk, threads, scratch, record)
            return
    memory = _scratch.of(scratch)
    function.call(_PACK[len(record)](*record), memory.data_ptr(), 0, items)


@lru_cache(maxsize=4096)
def _bytes(division: Callable[..., Any], *sizes: Any) -> int:
    """The scratch of a kernel that divides it so."""
    return cast(int, division(*sizes).end)


# ---------------------------------------------------------------- operators


# Kernels trust their parameters. What does not add up here goes to the reference, which raises what torch would.


def _fall_back(function: F, first: Tensor) -> F:
    if first.numel():  # who serves an empty tensor is no news
        note_fallback(function.__name__)
    return function


def _is(tensor: Tensor, dtype: torch.dtype, numel: int) -> bool:
    return tensor.is_cpu and tensor.dtype == dtype and tensor.numel() == numel and tensor.is_contiguous()


@lru_cache(maxsize=4096)
def _sizes(numel: int, row: int, group: int, bits: int) -> tuple[int, int] | None:
    """Groups, and bytes of their codes."""
    if numel == 0 or row < 1 or group < 1 or numel % row or not 1 <= bits <= 8:
        return None
    rows = numel // row
    return rows * groups_in_row(row, group), rows * row_bytes(row, group, bits)


def _packed(codes: Tensor, side: Tensor, support: Tensor | None, numel: int, sizes: tuple[int, int]) -> bool:
    return (
        _is(codes, torch.uint8, sizes[1])
        and _is(side, torch.int16, 2 * sizes[0])
        and (support is None or _is(support, torch.uint8, -(-numel // 8)))
    )


def _fillable(support: Tensor, positive: bool, numel: int) -> bool:
    return positive and _is(support, torch.uint8, -(-numel // 8))


def _table(levels: Tensor | None, bits: int) -> Tensor | None:
    """Levels, then the inverse of the distance from each to the next; nothing if they are even or not sound."""
    if levels is None or levels.dtype != torch.float32 or bits > 4 or levels.shape != (2**bits,):
        return None
    return torch.cat([levels, 1.0 / (levels[1:] - levels[:-1])])


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _dither(key: int | None) -> dict[str, int]:
    """The fields of a record that say what to subtract."""
    known = 0 if key is None else key
    return {"dither": key is not None, "key_low": known & 0xFFFFFFFF, "key_high": (known >> 32) & 0xFFFFFFFF}


def _marked(x: Tensor, row: int, group: int, support: Tensor | None) -> int:
    """Where a kernel puts the bits of values above zero, if it can; otherwise they are put there now."""
    if support is None:
        return 0
    if row % 8 == 0 and group % 8 == 0:
        return support.data_ptr()
    support.copy_(pack_band(x, 0.0, math.inf, False, True))  # a group may begin within a byte
    return 0


def quantize_groups(
    x: Tensor,
    row: int,
    group: int,
    bits: int,
    key: int,
    positive: bool,
    levels: Tensor | None = None,
    support: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    kind, numel = KINDS.get(x.dtype), x.numel()
    sizes, table = _sizes(numel, row, group, bits), _table(levels, bits)
    if (
        kind is None
        or sizes is None
        or not x.is_contiguous()
        or (levels is not None and table is None)
        or (support is not None and not _fillable(support, positive, numel))
    ):
        return _fall_back(reference.quantize_groups, x)(x, row, group, bits, key, positive, levels, support)
    codes = torch.empty(sizes[1], dtype=torch.uint8)
    side = torch.empty(2 * sizes[0], dtype=torch.int16)
    group = min(group, row)
    record = layout.QuantizeGroups(
        x=x.data_ptr(),
        kind=kind,
        codes=codes.data_ptr(),
        side=side.data_ptr(),
        row=row,
        group=group,
        bits=bits,
        levels=_address(table),
        positive=positive,
        support=_marked(x, row, group, support),
        key_low=key & 0xFFFFFFFF,
        key_high=(key >> 32) & 0xFFFFFFFF,
    )
    _run("quantize_groups", sizes[0], numel, _bytes(layout.quantize_groups_scratch, group), record)
    return codes, side


def dequantize_groups(
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
    """See the reference."""
    kind, sizes, table = KINDS.get(dtype), _sizes(numel, row, group, bits), _table(levels, bits)
    if (
        kind is None
        or sizes is None
        or not _packed(codes, side, support, numel, sizes)
        or (levels is not None and (table is None or key is not None))
    ):
        return _fall_back(reference.dequantize_groups, codes)(
            codes, side, numel, row, group, bits, dtype, support, levels, key
        )
    out = torch.empty(numel, dtype=dtype)
    group = min(group, row)
    record = layout.DequantizeGroups(
        out=out.data_ptr(),
        kind=kind,
        codes=codes.data_ptr(),
        side=side.data_ptr(),
        row=row,
        group=group,
        bits=bits,
        levels=_address(table),
        support=_address(support),
        **_dither(key),
    )
    _run("dequantize_groups", sizes[0], numel, _bytes(layout.dequantize_groups_scratch, group), record)
    return out


@lru_cache(maxsize=4096)
def _channel_sizes(numel: int, geometry: tuple[int, ...], group: int, bits: int) -> tuple[int, int] | None:
    """Groups, and bytes of their codes."""
    if numel == 0 or math.prod(geometry) != numel or group < 1 or not 1 <= bits <= 8:
        return None
    return channel_sizes(geometry, group, bits)


def _tiles(geometry: tuple[int, ...], step: int) -> int:
    return -(-geometry[0] // step) * -(-geometry[1] // TILE_CHANNELS)


def quantize_channels(
    x: Tensor,
    geometry: Sequence[int],
    group: int,
    bits: int,
    key: int,
    positive: bool,
    levels: Tensor | None = None,
    support: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    kind, numel, shape = KINDS.get(x.dtype), x.numel(), tuple(geometry)
    if numel and math.prod(shape) == numel and channel_step(shape[2], group) == 1:
        return quantize_groups(x, shape[2], group, bits, key, positive, levels, support)
    sizes, table = _channel_sizes(numel, shape, group, bits), _table(levels, bits)
    if (
        kind is None
        or sizes is None
        or not x.is_contiguous()
        or (levels is not None and table is None)
        or (support is not None and not _fillable(support, positive, numel))
    ):
        return _fall_back(reference.quantize_channels, x)(x, shape, group, bits, key, positive, levels, support)
    outer, channels, inner = shape
    codes = torch.empty(sizes[1], dtype=torch.uint8)
    side = torch.empty(2 * sizes[0], dtype=torch.int16)
    step = min(channel_step(inner, group), outer)
    record = layout.QuantizeChannels(
        x=x.data_ptr(),
        kind=kind,
        codes=codes.data_ptr(),
        side=side.data_ptr(),
        outer=outer,
        channels=channels,
        inner=inner,
        step=step,
        bits=bits,
        levels=_address(table),
        positive=positive,
        support=_marked(x, channels * inner, TILE_CHANNELS * inner, support),
        key_low=key & 0xFFFFFFFF,
        key_high=(key >> 32) & 0xFFFFFFFF,
    )
    _run("quantize_channels", _tiles(shape, step), numel, _bytes(layout.channels_scratch, step * inner), record)
    return codes, side


def dequantize_channels(
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
    """See the reference."""
    kind, shape, table = KINDS.get(dtype), tuple(geometry), _table(levels, bits)
    numel = math.prod(shape)
    if numel and channel_step(shape[2], group) == 1:
        return dequantize_groups(codes, side, numel, shape[2], group, bits, dtype, support, levels, key)
    sizes = _channel_sizes(numel, shape, group, bits)
    if (
        kind is None
        or sizes is None
        or not _packed(codes, side, support, numel, sizes)
        or (levels is not None and (table is None or key is not None))
    ):
        return _fall_back(reference.dequantize_channels, codes)(
            codes, side, shape, group, bits, dtype, support, levels, key
        )
    outer, channels, inner = shape
    out = torch.empty(numel, dtype=dtype)
    step = min(channel_step(inner, group), outer)
    record = layout.DequantizeChannels(
        out=out.data_ptr(),
        kind=kind,
        codes=codes.data_ptr(),
        side=side.data_ptr(),
        outer=outer,
        channels=channels,
        inner=inner,
        step=step,
        bits=bits,
        levels=_address(table),
        support=_address(support),
        **_dither(key),
        apart=channels * inner,
    )
    _run("dequantize_channels", _tiles(shape, step), numel, _bytes(layout.channels_scratch, step * inner), record)
    return out


def _sample_sizes(numel: int, bits: Tensor, group: int) -> tuple[int, int, int] | None:
    """Row, groups, and bytes of their codes, for samples with bits of their own."""
    samples = bits.numel()
    if bits.dim() != 1 or not _is(bits, torch.uint8, samples) or not numel or group < 1 or not samples:
        return None
    row, widths = numel // samples, bits.tolist()
    if numel % samples or not all(1 <= b <= 8 for b in widths):
        return None
    sizes = {b: row_bytes(row, group, b) for b in set(widths)}
    return row, samples * groups_in_row(row, group), sum(sizes[b] for b in widths)


def quantize_samples(
    x: Tensor, bits: Tensor, size: int, group: int, key: int, positive: bool, support: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    kind, numel = KINDS.get(x.dtype), x.numel()
    sizes = _sample_sizes(numel, bits, group)
    if (
        kind is None
        or sizes is None
        or sizes[2] > size
        or not x.is_contiguous()
        or (support is not None and not _fillable(support, positive, numel))
    ):
        return _fall_back(reference.quantize_samples, x)(x, bits, size, group, key, positive, support)
    row, groups, needed = sizes
    codes = torch.empty(size, dtype=torch.uint8)
    codes[needed:] = 0
    side = torch.empty(2 * groups, dtype=torch.int16)
    group = min(group, row)
    record = layout.QuantizeSamples(
        x=x.data_ptr(),
        kind=kind,
        codes=codes.data_ptr(),
        side=side.data_ptr(),
        row=row,
        group=group,
        widths=bits.data_ptr(),
        positive=positive,
        support=_marked(x, row, group, support),
        key_low=key & 0xFFFFFFFF,
        key_high=(key >> 32) & 0xFFFFFFFF,
    )
    _run("quantize_samples", groups, numel, _bytes(layout.quantize_groups_scratch, group), record)
    return codes, side


def dequantize_samples(
    codes: Tensor, side: Tensor, bits: Tensor, numel: int, group: int, dtype: torch.dtype, support: Tensor | None
) -> Tensor:
    """See the reference."""
    kind, sizes = KINDS.get(dtype), _sample_sizes(numel, bits, group)
    if kind is None or sizes is None or not _packed(codes[: sizes[2]], side, support, numel, sizes[1:]):
        return _fall_back(reference.dequantize_samples, codes)(codes, side, bits, numel, group, dtype, support)
    row, groups, _ = sizes
    out = torch.empty(numel, dtype=dtype)
    group = min(group, row)
    record = layout.DequantizeSamples(
        out=out.data_ptr(),
        kind=kind,
        codes=codes.data_ptr(),
        side=side.data_ptr(),
        row=row,
        group=group,
        widths=bits.data_ptr(),
        support=_address(support),
    )
    _run("dequantize_samples", groups, numel, _bytes(layout.dequantize_groups_scratch, group), record)
    return out


def range_energy(x: Tensor, row: int, group: int, positive: bool) -> Tensor:
    """See the reference."""
    kind, numel = KINDS.get(x.dtype), x.numel()
    if kind is None or _sizes(numel, row, group, 1) is None or not x.is_contiguous():
        return _fall_back(reference.range_energy, x)(x, row, group, positive)
    out = torch.empty(numel // row, dtype=torch.float32)
    group = min(group, row)
    record = layout.RangeEnergy(x=x.data_ptr(), kind=kind, out=out.data_ptr(), row=row, group=group, positive=positive)
    _run("range_energy", numel // row, numel, _bytes(layout.one_group_scratch, group), record)
    return out


def cast_groups(
    x: Tensor, row: int, group: int, dtype: torch.dtype, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    kind, kind8, numel = KINDS.get(x.dtype), KINDS8.get(dtype), x.numel()
    sizes = _sizes(numel, row, group, 8)
    sound = scale is None or _is(scale, torch.float32, 1)
    if kind is None or kind8 is None or sizes is None or not sound or not x.is_contiguous():
        return _fall_back(reference.cast_groups, x)(x, row, group, dtype, scale)
    out = torch.empty(numel, dtype=dtype)
    scales = torch.empty(sizes[0], dtype=torch.bfloat16) if scale is None else scale.reshape(1).clone()
    group = min(group, row)
    record = layout.CastGroups(
        x=x.data_ptr(),
        kind=kind,
        out=out.data_ptr(),
        kind8=kind8,
        row=row,
        group=group,
        scales=scales.data_ptr(),
        shared=scale is not None,
    )
    _run("cast_groups", sizes[0], numel, _bytes(layout.one_group_scratch, group), record)
    return out, scales


def uncast_groups(values: Tensor, scale: Tensor, row: int, group: int, dtype: torch.dtype) -> Tensor:
    """See the reference."""
    kind, kind8, numel = KINDS.get(dtype), KINDS8.get(values.dtype), values.numel()
    sizes = _sizes(numel, row, group, 8)
    shared = _is(scale, torch.float32, 1)
    if (
        kind is None
        or kind8 is None
        or sizes is None
        or not values.is_contiguous()
        or not (shared or _is(scale, torch.bfloat16, sizes[0]))
    ):
        return _fall_back(reference.uncast_groups, values)(values, scale, row, group, dtype)
    out = torch.empty(numel, dtype=dtype)
    group = min(group, row)
    record = layout.UncastGroups(
        codes=values.data_ptr(),
        kind8=kind8,
        out=out.data_ptr(),
        kind=kind,
        row=row,
        group=group,
        scales=scale.data_ptr(),
        shared=shared,
    )
    _run("uncast_groups", sizes[0], numel, _bytes(layout.one_group_scratch, group), record)
    return out


class _Frame(NamedTuple):
    """Blocks of a tensor as kernels see them."""

    numel: int
    means: int
    slabs: int
    most: int
    """Blocks of eight by eight worked on at once, at most: whole maps, and a part at either end; 0 for other blocks."""
    shape: Slabs


@lru_cache(maxsize=4096)
def _frame(geometry: tuple[int, ...], block: int) -> _Frame | None:
    if block < 1:
        return None
    outer, s1, s2, s3, inner = geometry
    if s1 > 1:
        depth, rows, width = s1, s2, s3
    elif s2 > 1 or inner < 16:
        depth, rows, width = s2, 1, s3
    else:
        depth, rows, width = s3, 1, 1
    blocks, most, numel = -(-width // block), 0, math.prod(geometry)
    if rows == 1 and inner == 1 and block == 8 and numel:
        most = ((BATCH + 8 * width) // (depth * width) + 2) * -(-depth // 8) * blocks
    shape = Slabs(depth, rows, width, inner, block, blocks, -(-rows // block) * blocks * inner)
    means = math.prod(low_shape(geometry, block))
    return _Frame(numel, means, outer * -(-depth // block), most, shape)


def _grain(shape: Slabs) -> int:
    """Sixteen slabs: a kernel may work twice on the slabs at the ends of what it is given."""
    return 16 * shape.block * shape.rows * shape.width * shape.inner


def quantize_blocks(
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
    """See the reference."""
    kind, numel = KINDS.get(x.dtype), x.numel()
    sizes, table = _sizes(numel, row, group, bits), _table(levels, bits)
    frame = _frame(tuple(geometry), block)
    if (
        kind is None
        or sizes is None
        or frame is None
        or frame.numel != numel
        or not x.is_contiguous()
        or (levels is not None and table is None)
        or (support is not None and not _fillable(support, positive, numel))
    ):
        return _fall_back(reference.quantize_blocks, x)(
            x, geometry, block, row, group, bits, key, positive, levels, support
        )
    low = torch.empty(frame.means, dtype=torch.bfloat16)
    codes = torch.empty(sizes[1], dtype=torch.uint8)
    side = torch.empty(2 * sizes[0], dtype=torch.int16)
    group = min(group, row)
    shape = frame.shape
    record = layout.QuantizeBlocks(
        *shape,
        x=x.data_ptr(),
        kind=kind,
        codes=codes.data_ptr(),
        side=side.data_ptr(),
        row=row,
        group=group,
        bits=bits,
        levels=_address(table),
        positive=positive,
        support=_marked(x, row, group, support),
        key_low=key & 0xFFFFFFFF,
        key_high=(key >> 32) & 0xFFFFFFFF,
        low=low.data_ptr(),
        numel=numel,
        most=frame.most,
    )
    scratch = _bytes(layout.quantize_blocks_scratch, group, shape, frame.most)
    _run("quantize_blocks", sizes[0], numel, scratch, record, _grain(shape))
    return low, codes, side


def dequantize_blocks(
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
    """See the reference."""
    kind, frame, table = KINDS.get(dtype), _frame(tuple(geometry), block), _table(levels, bits)
    numel = 0 if frame is None else frame.numel
    sizes = _sizes(numel, row, group, bits)
    if (
        kind is None
        or sizes is None
        or frame is None
        or not _is(low, torch.bfloat16, frame.means)
        or not _packed(codes, side, support, numel, sizes)
        or (levels is not None and (table is None or key is not None))
    ):
        return _fall_back(reference.dequantize_blocks, low)(
            low, codes, side, geometry, block, row, group, bits, dtype, support, levels, key
        )
    out = torch.empty(numel, dtype=dtype)
    group = min(group, row)
    shape = frame.shape
    record = layout.DequantizeBlocks(
        *shape,
        out=out.data_ptr(),
        kind=kind,
        codes=codes.data_ptr(),
        side=side.data_ptr(),
        row=row,
        group=group,
        bits=bits,
        levels=_address(table),
        support=_address(support),
        **_dither(key),
        low=low.data_ptr(),
        groups=sizes[0],
    )
    scratch = _bytes(layout.dequantize_blocks_scratch, group, shape)
    _run("dequantize_blocks", frame.slabs, numel, scratch, record, _grain(shape))
    return out


def block_means(x: Tensor, geometry: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    """See the reference."""
    kind, out_kind = KINDS.get(x.dtype), KINDS.get(dtype)
    frame, numel = _frame(tuple(geometry), block), x.numel()
    if kind is None or out_kind is None or frame is None or not 0 < numel == frame.numel or not x.is_contiguous():
        return _fall_back(reference.block_means, x)(x, geometry, block, dtype)
    out = torch.empty(frame.means, dtype=dtype)
    record = layout.BlockMeans(*frame.shape, x=x.data_ptr(), kind=kind, out=out.data_ptr(), out_kind=out_kind)
    _run("block_means", frame.slabs, numel, _bytes(layout.means_scratch, frame.shape), record, _grain(frame.shape))
    return out


def spread_blocks(low: Tensor, geometry: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    """See the reference."""
    kind, out_kind, frame = KINDS.get(low.dtype), KINDS.get(dtype), _frame(tuple(geometry), block)
    if kind is None or out_kind is None or frame is None or frame.numel == 0 or not _is(low, low.dtype, frame.means):
        return _fall_back(reference.spread_blocks, low)(low, geometry, block, dtype)
    out = torch.empty(frame.numel, dtype=dtype)
    record = layout.SpreadBlocks(*frame.shape, low=low.data_ptr(), kind=kind, out=out.data_ptr(), out_kind=out_kind)
    scratch = _bytes(layout.spread_scratch, frame.shape)
    _run("spread_blocks", frame.slabs, frame.numel, scratch, record, _grain(frame.shape))
    return out


def rebuild_affine(
    x: Tensor, geometry: Sequence[int], scale: Tensor, shift: Tensor, other: Tensor | None, support: Tensor | None
) -> None:
    """See the reference."""
    kind, numel, channels = KINDS.get(x.dtype), x.numel(), geometry[1]
    if (
        kind is None
        or not 0 < numel == math.prod(geometry)
        or not x.is_contiguous()
        or not _fit_affine(numel, channels, scale, shift, x.dtype, other, support)
    ):
        _fall_back(reference.rebuild_affine, x)(x, geometry, scale, shift, other, support)
        return
    record = layout.RebuildAffine(
        x=x.data_ptr(),
        kind=kind,
        numel=numel,
        channels=channels,
        inner=geometry[2],
        scale=scale.data_ptr(),
        shift=shift.data_ptr(),
        other=_address(other),
        support=_address(support),
    )
    _run("rebuild_affine", -(-numel // TILE), numel, _bytes(layout.affine_scratch), record)


def rebuild_chain(
    codes: Sequence[Tensor],
    sides: Sequence[Tensor],
    geometry: Sequence[int],
    group: int,
    bits: Sequence[int],
    dtype: torch.dtype,
    supports: Sequence[Tensor | None],
    keys: Sequence[int],
    dithered: Sequence[bool],
    scales: Sequence[Tensor],
    shifts: Sequence[Tensor],
    other: Tensor | None,
    masks: Sequence[Tensor | None],
) -> Tensor:
    """See the reference."""
    _, channels, inner = geometry
    kind, numel = KINDS.get(dtype), math.prod(geometry)
    in_rows = kind is not None and numel > 0 and channel_step(inner, group) == 1
    owned = [key if dither else None for key, dither in zip(keys, dithered, strict=True)]
    stages = list(zip(codes, sides, bits, supports, owned, scales, shifts, masks, strict=True))
    records = array("q")
    for code, side, width, support, key, scale, shift, mask in stages if in_rows else ():
        sizes = _sizes(numel, inner, group, width)
        if (
            sizes is None
            or not _packed(code, side, support, numel, sizes)
            or not _fit_affine(numel, channels, scale, shift, dtype, other, mask)
        ):
            break
        records.extend(
            layout.Stage(
                codes=code.data_ptr(),
                side=side.data_ptr(),
                bits=width,
                support=_address(support),
                **_dither(key),
                scale=scale.data_ptr(),
                shift=shift.data_ptr(),
                mask=_address(mask),
            )
        )
    if not records or len(records) < len(stages) * len(layout.Stage._fields):
        return _stage_by_stage(stages, geometry, group, dtype, other)
    out, group = torch.empty(numel, dtype=dtype), min(group, inner)
    record = layout.RebuildChain(
        out=out.data_ptr(),
        kind=KINDS[dtype],
        row=inner,
        group=group,
        channels=channels,
        other=_address(other),
        length=len(stages),
        stages=records.buffer_info()[0],
    )
    groups = numel // inner * groups_in_row(inner, group)
    _run("rebuild_chain", groups, numel * len(stages), _bytes(layout.rebuild_chain_scratch, group), record)
    return out


def _stage_by_stage(
    stages: Sequence[tuple[Any, ...]], geometry: Sequence[int], group: int, dtype: torch.dtype, other: Tensor | None
) -> Tensor:
    """A chain of groups of several samples, or of what does not fit: then one of the operators raises."""
    if not stages:
        raise RuntimeError("a chain has no stages")
    for code, side, width, support, key, scale, shift, mask in stages:
        out = dequantize_channels(code, side, geometry, group, width, dtype, support, None, key)
        rebuild_affine(out, geometry, scale, shift, other, mask)
        other = out
    return out


_MOST_NORM = 1 << 18  # values of scratch for a thread, if one channel has no more: they stay in a cache
_LEAST_NORM = 4096  # values of each sample to decode at once, so that groups at the ends cost little


class _Decoder(NamedTuple):
    """A kernel that decodes, and what it is given: see ``layout.NormBackward``."""

    name: str
    record: tuple[int, ...]
    place: int
    unit: int
    row: int
    group: int
    scratch: int


def norm_backward(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference."""
    found = _norm_backward(grad, torch.empty_like(grad), *given)
    return _fall_back(reference.norm_backward, grad)(grad, *given) if found is None else found


def norm_backward_(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """See the reference."""
    found = _norm_backward(grad, grad, *given)
    return _fall_back(reference.norm_backward_, grad)(grad, *given) if found is None else found[1:]


def _norm_backward(
    grad: Tensor,
    out: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor] | None:
    samples, channels, inner = geometry
    numel = math.prod(geometry)
    decoder = _decoder(low, codes, side, tuple(geometry), tuple(frame), block, row, group, bits, key)
    statistics = (mean, invstd) if weight is None else (mean, invstd, weight)
    if (
        decoder is None
        or not any(_is(grad, dtype, numel) for dtype in (torch.float32, torch.bfloat16))
        or not all(_is(t, torch.float32, channels) for t in statistics)
    ):
        return None
    whole = TILE_CHANNELS if decoder.unit == TILES else 1  # channels that are decoded together
    fitting = min(_LEAST_NORM // inner, _MOST_NORM // (samples * inner), channels)
    step = max(1, fitting // whole) * whole
    for_weight, for_bias = torch.empty_like(mean), torch.empty_like(mean)
    record = decoder.record
    if isinstance(record, layout.DequantizeChannels):  # it puts all samples at once, so it must know their distance
        record = record._replace(apart=layout.norm_scratch(samples, step * inner, decoder.group, 0).length)
    parameters = array("q", record)
    own = layout.NormBackward(
        decode=(_compiled.kernels.get(decoder.name) or _compiled.kernel(decoder.name)).address,
        parameters=parameters.buffer_info()[0],
        words=len(record),
        place=decoder.place,
        unit=decoder.unit,
        row=decoder.row,
        group=decoder.group,
        grad=grad.data_ptr(),
        out=out.data_ptr(),
        kind=KINDS[grad.dtype],
        for_weight=for_weight.data_ptr(),
        for_bias=for_bias.data_ptr(),
        mean=mean.data_ptr(),
        invstd=invstd.data_ptr(),
        weight=_address(weight),
        samples=samples,
        channels=channels,
        inner=inner,
        step=step,
    )
    scratch = _bytes(layout.norm_scratch, samples, step * inner, decoder.group, decoder.scratch)
    _run("norm_backward", -(-channels // step), numel, scratch, own)
    return out, for_weight, for_bias


def _decoder(
    low: Tensor | None,
    codes: Tensor,
    side: Tensor,
    geometry: tuple[int, ...],
    frame: tuple[int, ...],
    block: int,
    row: int,
    group: int,
    bits: int,
    key: int | None,
) -> _Decoder | None:
    """The kernel that decodes maps to float32; None if none can, or what it is given does not add up."""
    numel = math.prod(geometry)
    samples, channels, inner = geometry
    common = {"out": 0, "kind": FLOAT32, "codes": codes.data_ptr(), "side": side.data_ptr(), "bits": bits}
    common |= {"levels": 0, "support": 0, **_dither(key)}
    if low is None and not row and numel and channel_step(inner, group) > 1:
        sizes = _channel_sizes(numel, geometry, group, bits)
        if sizes is None or not _packed(codes, side, None, numel, sizes):
            return None
        step = min(channel_step(inner, group), samples)
        tiles = layout.DequantizeChannels(**common, outer=samples, channels=channels, inner=inner, step=step, apart=0)
        scratch = _bytes(layout.channels_scratch, step * inner)
        return _Decoder("dequantize_channels", tiles, tiles._fields.index("out"), TILES, step, 0, scratch)
    row = row or inner
    sizes = _sizes(numel, row, group, bits)
    if sizes is None or not _packed(codes, side, None, numel, sizes):
        return None
    group = min(group, row)
    if low is None:
        groups = layout.DequantizeGroups(**common, row=row, group=group)
        scratch = _bytes(layout.dequantize_groups_scratch, group)
        return _Decoder("dequantize_groups", groups, groups._fields.index("out"), GROUPS, row, group, scratch)
    blocks = _frame(frame, block)
    if (
        blocks is None
        or blocks.numel != numel
        or frame[0] != samples * channels
        or not _is(low, torch.bfloat16, blocks.means)
    ):
        return None
    shape = blocks.shape
    slabs = layout.DequantizeBlocks(*shape, **common, row=row, group=group, low=low.data_ptr(), groups=sizes[0])
    scratch = _bytes(layout.dequantize_blocks_scratch, group, shape)
    per_map = blocks.slabs // (samples * channels)
    return _Decoder("dequantize_blocks", slabs, slabs._fields.index("out"), SLABS, per_map, 0, scratch)


def _fit_affine(
    numel: int,
    channels: int,
    scale: Tensor,
    shift: Tensor,
    dtype: torch.dtype,
    other: Tensor | None,
    support: Tensor | None,
) -> bool:
    return (
        _is(scale, torch.float32, channels)
        and _is(shift, torch.float32, channels)
        and (other is None or _is(other, dtype, numel))
        and (support is None or _is(support, torch.uint8, -(-numel // 8)))
    )


def pack_band(x: Tensor, low: float, high: float, closed: bool, nan: bool) -> Tensor:
    """See the reference."""
    kind, numel = BOOL if x.dtype == torch.bool else KINDS.get(x.dtype), x.numel()
    if kind is None or numel == 0 or not x.is_contiguous():
        return _fall_back(reference.pack_band, x)(x, low, high, closed, nan)
    out = torch.empty(-(-numel // 8), dtype=torch.uint8)
    first, last = (0, 0) if kind == BOOL else _band(struct.pack("dd", low, high), closed)
    record = layout.PackBand(
        x=x.data_ptr(), kind=kind, out=out.data_ptr(), numel=numel, first=first, last=last, nan=nan
    )
    _run("pack_band", -(-numel // TILE), numel, _bytes(layout.band_scratch), record)
    return out


@lru_cache(256)
def _band(bounds: bytes, closed: bool) -> tuple[int, int]:
    """The integers of ``_order`` between two bounds, compared in float32; an infinite end is no end.

    Keyed on the bits of the bounds, because 0.0 equals -0.0 and NaN does not equal NaN.
    """
    low, high = torch.tensor(struct.unpack("dd", bounds), dtype=torch.float32)
    if low.isnan() or high.isnan():
        return 1, 0
    first, last = (int(b.view(torch.int32)) for b in (low, high))
    first, last = (b ^ 0x7FFFFFFF if b < 0 else b for b in (first, last))
    if low == 0:
        first = -1 if closed else 0
    if high == 0:
        last = 0 if closed else -1
    return (
        first if closed or low == -torch.inf else first + 1,
        last if closed or high == torch.inf else last - 1,
    )


def unpack_band(mask: Tensor, numel: int, dtype: torch.dtype, inside: float, outside: float) -> Tensor:
    """See the reference."""
    known = dtype == torch.bool or dtype.is_floating_point
    if not known or numel == 0 or not _is(mask, torch.uint8, -(-numel // 8)):
        return _fall_back(reference.unpack_band, mask)(mask, numel, dtype, inside, outside)
    out = torch.empty(numel, dtype=dtype)
    one, other = (1, 0) if dtype == torch.bool else _words(struct.pack("dd", inside, outside), dtype)
    record = layout.UnpackBand(
        mask=mask.data_ptr(), out=out.data_ptr(), item=dtype.itemsize, numel=numel, inside=one, outside=other
    )
    _run("unpack_band", -(-numel // TILE), numel, 0, record)
    return out


def mask_values(x: Tensor, mask: Tensor) -> Tensor:
    """See the reference."""
    if not _maskable(x, mask):
        return _fall_back(reference.mask_values, x)(x, mask)
    out = torch.empty_like(x)
    _mask(x, mask, out)
    return out


def mask_values_(x: Tensor, mask: Tensor) -> None:
    """See the reference."""
    if _maskable(x, mask):
        _mask(x, mask, x)
    else:
        _fall_back(reference.mask_values_, x)(x, mask)


def _maskable(x: Tensor, mask: Tensor) -> bool:
    fits = x.dtype.itemsize in (2, 4) and x.numel() > 0 and x.is_contiguous()
    return fits and _is(mask, torch.uint8, -(-x.numel() // 8))


def _mask(x: Tensor, mask: Tensor, out: Tensor) -> None:
    item, numel = x.dtype.itemsize, x.numel()
    record = layout.MaskValues(x=x.data_ptr(), mask=mask.data_ptr(), out=out.data_ptr(), item=item, numel=numel)
    _run("mask_values", -(-numel // TILE), numel, 0, record)


@lru_cache(256)
def _words(values: bytes, dtype: torch.dtype) -> tuple[int, int]:
    """The bits of two values in ``dtype``, as signed integers."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    first, second = torch.tensor(struct.unpack("dd", values), dtype=dtype).view(integer).tolist()
    return first, second


# Inductor keeps positions of max pooling in int8.
_INTEGERS, _WIDTHS = (torch.int64, torch.int32, torch.int8), (1, 2, 4, 8, 16, 32)


def pack_uints(x: Tensor, offset: int, bits: int) -> Tensor:
    """See the reference."""
    numel = x.numel()
    if x.dtype not in _INTEGERS or bits not in _WIDTHS or numel == 0 or not x.is_contiguous():
        return _fall_back(reference.pack_uints, x)(x, offset, bits)
    out = torch.empty(-(-numel * bits // 8), dtype=torch.uint8)
    record = layout.PackUints(
        x=x.data_ptr(), item=x.dtype.itemsize, out=out.data_ptr(), numel=numel, offset=offset, bits=bits
    )
    _run("pack_uints", -(-numel // TILE), numel, 0, record)
    return out


def unpack_uints(packed: Tensor, numel: int, bits: int, offset: int, dtype: torch.dtype) -> Tensor:
    """See the reference."""
    size = -(-numel * bits // 8)
    if dtype not in _INTEGERS or bits not in _WIDTHS or numel == 0 or not _is(packed, torch.uint8, size):
        return _fall_back(reference.unpack_uints, packed)(packed, numel, bits, offset, dtype)
    out = torch.empty(numel, dtype=dtype)
    record = layout.UnpackUints(
        packed=packed.data_ptr(), out=out.data_ptr(), item=dtype.itemsize, numel=numel, offset=offset, bits=bits
    )
    _run("unpack_uints", -(-numel // TILE), numel, 0, record)
    return out


_MOST_TAPS = 1 << 16  # from the first to the last tap of a window, in values: a table that fits the cache


def _windows(numel: int, starts: Tensor, inner: int, taps: Tensor, bits: int) -> bool:
    windows = starts.numel()
    sound = _is(starts, torch.int64, windows) and _is(taps, torch.int64, taps.numel()) and inner > 0 and windows > 0
    return (
        sound and numel > 0 and numel % (windows * inner) == 0 and 0 < taps.numel() <= 2**bits and bits in (1, 2, 4, 8)
    )


def pack_taps(x: Tensor, starts: Tensor, inner: int, taps: Tensor, size: int, bits: int) -> tuple[Tensor, Tensor]:
    """See the reference."""
    numel = x.numel()
    span = int(taps[-1]) + 1 if taps.numel() else 0
    if not _windows(numel, starts, inner, taps, bits) or not _is(x, torch.int64, numel) or not 0 < span <= _MOST_TAPS:
        return _fall_back(reference.pack_taps, x)(x, starts, inner, taps, size, bits)
    numbers = torch.full((span,), -1, dtype=torch.int32)
    numbers[taps] = torch.arange(taps.numel(), dtype=torch.int32)
    out, tiles = torch.empty(-(-numel * bits // 8), dtype=torch.uint8), -(-numel // TILE)
    none = torch.empty(tiles, dtype=torch.int64)
    record = layout.PackTaps(
        x=x.data_ptr(),
        starts=starts.data_ptr(),
        numbers=numbers.data_ptr(),
        none=none.data_ptr(),
        out=out.data_ptr(),
        numel=numel,
        windows=starts.numel(),
        inner=inner,
        span=span,
        size=size,
        bits=bits,
    )
    _run("pack_taps", tiles, numel, _bytes(layout.taps_scratch), record)
    return out, none.sum()


def unpack_taps(packed: Tensor, numel: int, starts: Tensor, inner: int, taps: Tensor, bits: int) -> Tensor:
    """See the reference."""
    if not _windows(numel, starts, inner, taps, bits) or not _is(packed, torch.uint8, -(-numel * bits // 8)):
        return _fall_back(reference.unpack_taps, packed)(packed, numel, starts, inner, taps, bits)
    out = torch.empty(numel, dtype=torch.int64)
    table = torch.cat([taps, taps.new_zeros(2**bits - taps.numel())])  # no code points beyond it
    record = layout.UnpackTaps(
        packed=packed.data_ptr(),
        out=out.data_ptr(),
        starts=starts.data_ptr(),
        taps=table.data_ptr(),
        numel=numel,
        windows=starts.numel(),
        inner=inner,
        bits=bits,
    )
    _run("unpack_taps", -(-numel // TILE), numel, _bytes(layout.taps_scratch), record)
    return out


# ---------------------------------------------------------------- operators of torch, to the same bits


# They return None for what they are not for.


def native_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The result, the means, and the inverse deviations; running statistics are brought up to date."""
    channels = x.shape[1] if x.dim() > 1 else 0
    given = [t for t in (weight, bias, running_mean, running_var) if t is not None]
    if (
        not training
        or not 0 < x.shape[0] * channels < x.numel()  # torch sums maps of one value in another way
        or channels % layout.NORM_CHANNELS
        or eps <= 0
        or not _is(x, torch.float32, x.numel())
        or not all(_is_ordinary(t) and _is(t, torch.float32, channels) for t in given)
    ):
        return None
    out, mean, invstd = (x.new_empty(shape) for shape in (x.shape, channels, channels))
    numbers = array("d", (eps, momentum))
    record = layout.BatchNorm(
        x=x.data_ptr(),
        out=out.data_ptr(),
        mean=mean.data_ptr(),
        invstd=invstd.data_ptr(),
        weight=_address(weight),
        bias=_address(bias),
        running_mean=_address(running_mean),
        running_var=_address(running_var),
        numbers=numbers.buffer_info()[0],
        samples=x.shape[0],
        channels=channels,
        inner=x.numel() // (x.shape[0] * channels),
    )
    scratch = _bytes(layout.batch_norm_scratch)
    _run("native_batch_norm", channels // layout.NORM_CHANNELS, x.numel(), scratch, record)
    return out, mean, invstd


def max_pool2d_with_indices(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """The largest value of each window, and where in its map it stands."""
    given = (kernel, stride or kernel, padding, dilation)
    window = Window(*((sizes[0], sizes[-1]) for sizes in given)) if all(len(s) in (1, 2) for s in given) else None
    if window is None or not window.is_sound() or ceil_mode:
        return None
    if x.dim() != 4 or not x.numel() or x.dtype not in KINDS or not _is(x, x.dtype, x.numel()):
        return None
    samples, channels, *sides = x.shape
    rows, columns = (window.results(side, d) for d, side in enumerate(sides))
    if min(rows, columns) < 1 or sides[0] * sides[1] >= 1 << 31:
        return None
    out, places = (x.new_empty(samples, channels, rows, columns, dtype=t) for t in (x.dtype, torch.int64))
    record = layout.MaxPool(
        x=x.data_ptr(),
        kind=KINDS[x.dtype],
        out=out.data_ptr(),
        places=places.data_ptr(),
        height=sides[0],
        width=sides[1],
        rows=rows,
        columns=columns,
        tall=window.kernel[0],
        wide=window.kernel[1],
        down=window.stride[0],
        along=window.stride[1],
        above=window.padding[0],
        before=window.padding[1],
        row_apart=window.dilation[0],
        apart=window.dilation[1],
    )
    scratch = _bytes(layout.max_pool_scratch, columns, sides[1])
    _run("max_pool2d_with_indices", samples * channels, x.numel(), scratch, record)
    return out, places


def _laid(dims: int) -> tuple[torch.memory_format, ...]:
    """The forms in which a tensor fills its memory without gaps."""
    last = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}
    return (torch.contiguous_format, *last.get(dims, ()))


def relu(x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """The result, in ``out`` if it is given, which may be ``x``; and what ``pack_band`` finds in it above zero."""
    kind, numel = KINDS.get(x.dtype), x.numel()
    if kind is None or not numel or not x.is_cpu or not any(x.is_contiguous(memory_format=f) for f in _laid(x.dim())):
        return None
    out = torch.empty_like(x) if out is None else out
    mask = torch.empty(-(-numel // 8), dtype=torch.uint8)
    record = layout.Relu(x=x.data_ptr(), kind=kind, out=out.data_ptr(), mask=mask.data_ptr(), numel=numel)
    _run("relu", -(-numel // TILE), numel, _bytes(layout.relu_scratch), record)
    return out, mask


_ONES = {torch.float32: 0x3F800000, torch.bfloat16: 0x3F80, torch.float16: 0x3C00}
_STATE = 5056  # bytes of the state of torch's generator
_drawing = threading.Lock()


def bernoulli_(x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor | None:
    """Ones with probability ``p``, zeros otherwise, by the numbers that torch would draw, in one thread as there.

    What another thread draws from the same generator meanwhile by operators of torch may be drawn twice.
    """
    if x.dtype not in _ONES or not x.numel() or not 0.0 <= p <= 1.0 or not _is(x, x.dtype, x.numel()):
        return None
    drawn_from = torch.default_generator if generator is None else generator
    if drawn_from.device.type != "cpu":
        return None
    with _drawing:
        state = drawn_from.get_state()
        if state.numel() != _STATE:
            return None
        _, left, _, at = struct.unpack("<QiiQ", state[:24].numpy().tobytes())
        if left != 1 and not 1 <= at == layout.TWISTER + 1 - left:
            return None
        record = layout.Bernoulli(
            out=x.data_ptr(),
            size=x.itemsize,
            numel=x.numel(),
            one=_ONES[x.dtype],
            below=math.ceil(p * 2**53),
            state=state.data_ptr(),
        )
        _run("bernoulli", 1, 1, _bytes(layout.bernoulli_scratch), record)
        drawn_from.set_state(state)
    return x


class Window(NamedTuple):
    """Of pooling, for rows and for columns."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def is_sound(self) -> bool:
        """Would torch take it?"""
        least = min(*self.kernel, *self.stride, *self.dilation)
        return least > 0 and all(0 <= 2 * p <= k for p, k in zip(self.padding, self.kernel, strict=True))

    def results(self, side: int, d: int) -> int:
        """How many windows there are along a side."""
        return (side + 2 * self.padding[d] - self.dilation[d] * (self.kernel[d] - 1) - 1) // self.stride[d] + 1


def _is_ordinary(tensor: Tensor) -> bool:
    """Has it memory of its own here? The operator may be called before a subclass of tensors has its say."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_cpu


def has_torchs_bits(name: str) -> bool:
    """Does an operator above give what torch gives? That depends on how torch was compiled, and for which processor."""
    with torch.no_grad():
        values = (torch.arange(1100, dtype=torch.float32, device="cpu") * 12.9898).sin_().mul_(3.0).add_(0.25)
        x, small = values[:840].view(5, 8, 3, 7), values[840:872].view(4, 8)
        found: list[tuple[Tensor, ...]] = []
        for operator in (globals()[name], getattr(torch.ops.aten, name)):
            if name == "native_batch_norm":
                mean, var = small[2].clone(), small[3].square()
                found.append((*operator(x, small[0], small[1], mean, var, True, 0.9, 1e-3), mean, var))
            elif name == "bernoulli_":
                drawn_from = torch.Generator("cpu").manual_seed(5)
                torch.rand(3, generator=drawn_from)  # an odd number of words
                drawn = [operator(values.to(t), chance, generator=drawn_from) for t in KINDS for chance in (0.1, 0.9)]
                found.append((*drawn, drawn_from.get_state()))
            elif name == "relu":
                values[:3] = torch.tensor([-0.0, math.inf, -math.inf])
                results = (operator(values.to(dtype)) for dtype in KINDS)
                made = (
                    r if type(r) is tuple else (r, reference.pack_band(r, 0, math.inf, False, True)) for r in results
                )
                found.append(tuple(t.view(torch.uint8) for t in itertools.chain.from_iterable(made)))
            else:
                results = (operator(x.to(dtype), [3, 3], [2, 2], [1, 1]) for dtype in KINDS)
                found.append(tuple(itertools.chain.from_iterable(results)))
    return all(torch.equal(own, other) for own, other in zip(*found, strict=True))
