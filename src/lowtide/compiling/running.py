"""What compiled graphs call while they run: operators that encode, decode and note, and the forward they belong to.

A compiled graph may come from a cache, and its sizes may be symbols. So nothing is known of a step but what these
operators see: the noise is read here, and the report is filled here.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..codecs import BlockMean, Cast, Codec, GroupQuant, Indices, Mask, Packed, PoolOffsets, TensorMeta, from_config
from ..codecs.base import Layout, layout_of
from ..codecs.groups import channels_of, row_of
from ..graph.capture import Site
from ..kernels import ops
from ..report import COMPRESSED, SHARED, SiteReport
from ..session.noise import forward_noise, key_of

Sizes = tuple[Any, ...]
"""Sizes or strides: whole numbers, or symbols that stand for them."""


class Form(NamedTuple):
    """What a graph must know of a buffer without data."""

    numel: Any
    dtype: torch.dtype


class Label(NamedTuple):
    """What a graph knows of a tensor that it packs or keeps; it travels through the graph as text."""

    sites: tuple[Site, ...]
    why: str
    state: str = COMPRESSED
    plain: bool = True
    """Would the graph keep the tensor without us? A mask that is taken along in place of values is extra."""


class Stored(NamedTuple):
    """A tensor that a graph stores. Words are made of it only when somebody asks for a report."""

    label: Label
    shape: torch.Size
    dtype: torch.dtype
    plain: int
    stored: int
    codec: Codec | None


class Forward:
    """One forward of a compiled model: its random numbers, and what its graphs store."""

    def __init__(self, seed: int, step: int, rank: int) -> None:
        self.seed = seed
        self.step = step
        self.rank = rank
        self.stored: list[Stored] = []
        self._uses: Counter[Site] = Counter()
        self._noise: dict[int, int] = {}

    def key(self, site: Site) -> int:
        """The key of the next tensor at ``site``. A graph that runs several times has other noise each time."""
        self._uses[site] += 1
        use = self._uses[site]
        if use not in self._noise:
            self._noise[use] = forward_noise(self.seed, self.step, use, self.rank)
        return key_of(site, self._noise[use])

    def rows(self) -> Iterator[SiteReport]:
        """What its graphs store, as rows of a report."""
        for label, shape, dtype, plain, stored, codec in self.stored:
            kind, name = str(dtype).removeprefix("torch."), "" if codec is None else str(codec)
            first, *others = label.sites
            yield SiteReport(first, tuple(shape), kind, label.state, plain, stored, name, label.why)
            for site in others:
                yield SiteReport(site, tuple(shape), kind, SHARED, 0, 0, "", f"stored at {first}")


_running: ContextVar[Forward | None] = ContextVar("lowtide_compiled_forward", default=None)


@contextlib.contextmanager
def running(forward: Forward) -> Iterator[None]:
    """Graphs that run meanwhile in this thread belong to ``forward``."""
    token = _running.set(forward)
    try:
        yield
    finally:
        _running.reset(token)


def _current() -> Forward:
    forward = _running.get()
    if forward is None:
        raise RuntimeError(
            "this compiled graph packs what it saves, and runs outside of the model that lowtide.compile returned; "
            "call that model, not what is inside it"
        )
    return forward


# ---------------------------------------------------------------- sizes without data, symbols included


def hint(size: Any) -> int:
    """The value that a symbol had when it was made. ``int`` would fix the symbol to it, and each size recompile."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def hints(sizes: Sequence[Any]) -> tuple[int, ...]:
    """:func:`hint` of each."""
    return tuple(hint(size) for size in sizes)


def _frame(shape: Sizes, stride: Sizes) -> Layout:
    """The layout, its order from the hints and its sizes as they are."""
    found = layout_of(hints(shape), hints(stride))
    return Layout(found.dense, found.order, tuple(stride), tuple(shape[d] for d in found.order))


def _quantized(numel: Any, row: Any, group: int, bits: int) -> tuple[Form, Form]:
    rows = numel // row
    return (
        Form(rows * ops.row_bytes(row, group, bits), torch.uint8),
        Form(rows * ops.groups_in_row(row, group) * 2, torch.int16),
    )


def _group_forms(codec: GroupQuant, layout: Layout, numel: Any) -> tuple[Form, ...]:
    geometry = channels_of(layout) if codec.layout == "channel" else None
    if geometry is None:
        return _quantized(numel, row_of(codec.layout, layout, numel), codec.group, codec.bits)
    if any(isinstance(size, torch.SymInt) for size in geometry[2:]):
        raise ValueError("groups of a channel depend on the size of a map, which is a symbol here")
    groups, size = ops.channel_sizes(geometry, codec.group, codec.bits)
    return Form(size, torch.uint8), Form(2 * groups, torch.int16)


def _block_forms(codec: BlockMean, layout: Layout, numel: Any, dtype: torch.dtype) -> tuple[Form, ...]:
    first = layout.order.index(len(layout.order) - codec.dims)
    spatial = tuple(range(len(layout.order) - codec.dims, len(layout.order)))
    if codec.faithful or layout.order[first : first + codec.dims] != spatial:
        raise ValueError("the sizes of its parts are not known while shapes are symbols")
    blocks = [-(-size // codec.block) for size in layout.sizes[first : first + codec.dims]]
    low = math.prod(layout.sizes[:first]) * math.prod(blocks) * math.prod(layout.sizes[first + codec.dims :])
    if codec.bits == 0:
        return (Form(low, dtype),)
    row = row_of("sample", layout, numel)
    return Form(low, torch.bfloat16), *_quantized(numel, row, codec.group, codec.bits)


def _narrow(codec: Indices | PoolOffsets | Mask, numel: Any) -> tuple[Form]:
    bits = 1 if isinstance(codec, Mask) else codec.bits
    return (Form((numel * bits + 7) // 8, torch.uint8),)


def forms(codec: Codec, shape: Sizes, stride: Sizes, dtype: torch.dtype) -> tuple[Form, ...]:
    """The buffers that ``codec`` makes of a dense tensor; raises a ValueError if nobody can tell."""
    layout, numel = _frame(shape, stride), math.prod(shape)
    if isinstance(codec, (Indices, PoolOffsets, Mask)):  # what they check in the data holds by their rule
        return _narrow(codec, numel)
    if not any(isinstance(size, torch.SymInt) for size in (*shape, *stride)):
        return _static_forms(codec, tuple(shape), tuple(stride), dtype)
    if type(codec) is GroupQuant:
        return _group_forms(codec, layout, numel)
    if type(codec) is BlockMean:
        return _block_forms(codec, layout, numel, dtype)
    if type(codec) is Cast and codec.dtype == "bfloat16":
        return (Form(numel, torch.bfloat16),)
    raise ValueError("the sizes of its parts are not known while shapes are symbols")


@lru_cache(maxsize=4096)
def _static_forms(
    codec: Codec, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> tuple[Form, ...]:
    empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    try:
        packed = codec.encode(empty, key=0)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"its parts are not known without data ({str(error).partition(chr(10))[0]})") from error
    if sum(b.numel() * b.element_size() for b in packed.buffers) != codec.packed_nbytes(TensorMeta.of(empty)):
        raise ValueError("its parts have other sizes without data")
    return tuple(Form(b.numel(), b.dtype) for b in packed.buffers)


# ---------------------------------------------------------------- operators


def to_text(what: Label | Sequence[Label] | Codec) -> str:
    """Text that :func:`_label`, :func:`_labels` or :func:`_codec` reads."""
    return json.dumps(what.to_config() if isinstance(what, Codec) else what)


@lru_cache(maxsize=4096)
def _codec(text: str) -> Codec:
    return from_config(json.loads(text))


@lru_cache(maxsize=4096)
def _label(text: str) -> Label:
    return _read(json.loads(text))


@lru_cache(maxsize=256)
def _labels(text: str) -> tuple[Label, ...]:
    return tuple(_read(each) for each in json.loads(text))


def _read(data: list[Any]) -> Label:
    sites, why, state, plain = data
    return Label(tuple(Site(*site) for site in sites), why, state, plain)


def is_dithered(codec: Codec | None) -> bool:
    """Does decoding need the key of the encoding again?"""
    return bool(getattr(codec, "dither", False))


def in_order(x: Tensor, stride: Sequence[int]) -> Tensor:
    """The values in the order in memory in which they will be decoded; a copy if a compiler made another one."""
    own = x.stride()
    if own == tuple(stride):
        return x
    if all(have == want or size == 1 for have, want, size in zip(own, stride, x.shape, strict=True)):
        return x.as_strided(x.shape, stride)
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def _encode(x: Tensor, stride: list[int], codec: str, label: str, rectified: bool) -> list[Tensor]:
    forward, made, what = _current(), _codec(codec), _label(label)
    x = in_order(x, stride)
    key = forward.key(what.sites[0])
    if rectified:
        packed, support = made.encode_rectified(x, key=key)
        parts = [*packed.buffers, support]
    else:
        packed = made.encode(x, key=key)
        parts = list(packed.buffers)
    parts = [part if part.dim() == 1 else part.reshape(-1) for part in parts]
    stored = sum([part.nbytes for part in parts])
    forward.stored.append(Stored(what, x.shape, x.dtype, x.nbytes if what.plain else 0, stored, made))
    if is_dithered(made):
        parts.append(torch.tensor([packed.key], dtype=torch.int64))
    return parts


def fake_encode(x: Tensor, stride: Sequence[Any], codec: str, label: str, rectified: bool) -> list[Tensor]:
    """The shape function of ``encode``."""
    made = _codec(codec)
    found = list(forms(made, tuple(x.shape), tuple(stride), x.dtype))
    if rectified:
        found += _narrow(Mask(), x.numel())
    parts = [x.new_empty((form.numel,), dtype=form.dtype) for form in found]
    if is_dithered(made):
        parts.append(x.new_empty((1,), dtype=torch.int64, device="cpu"))
    return parts


def _decode(
    parts: list[Tensor], codec: str, size: list[int], stride: list[int], dtype: torch.dtype, rectified: bool
) -> Tensor:
    made, parts = _codec(codec), list(parts)
    key = int(parts.pop()) if is_dithered(made) else 0
    support = parts.pop() if rectified else None
    meta = TensorMeta(tuple(size), tuple(stride), dtype)
    values = made.decode(Packed(made, meta, tuple(parts), key), support=support)
    # An operator must not return a view of what it got.
    return values.clone() if values.data_ptr() in [part.data_ptr() for part in parts if part.numel()] else values


def _fake_decode(
    parts: list[Tensor], codec: str, size: list[int], stride: list[int], dtype: torch.dtype, rectified: bool
) -> Tensor:
    return parts[0].new_empty_strided(size, stride, dtype=dtype)


def _note(kept: list[Tensor], labels: str) -> Tensor:
    forward = _current()
    for tensor, label in zip(kept, _labels(labels), strict=True):
        nbytes = tensor.numel() * tensor.element_size()
        forward.stored.append(Stored(label, tensor.shape, tensor.dtype, nbytes, nbytes, None))
    return torch.empty(0, dtype=torch.uint8)


def fake_note(kept: list[Tensor], labels: str) -> Tensor:
    """The shape function of ``note``."""
    return kept[0].new_empty(0, dtype=torch.uint8, device="cpu")


_LIBRARY: Any = torch.library.Library("lowtide", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(schema: str, function: Callable[..., Any], fake: Callable[..., Any], tag: torch.Tag) -> Any:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(tag,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowtide::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.lowtide, name).default


# The order of values in memory must be the same for encoding and decoding, whatever layout a compiler would like. So
# encoding is told the strides that decoding will give, and takes a tensor of any layout.
encode = _define(
    "encode(Tensor x, SymInt[] stride, str codec, str label, bool rectified) -> Tensor[]",
    _encode,
    fake_encode,
    torch.Tag.flexible_layout,
)
decode = _define(
    "decode(Tensor[] parts, str codec, SymInt[] size, SymInt[] stride, ScalarType dtype, bool rectified) -> Tensor",
    _decode,
    _fake_decode,
    torch.Tag.needs_exact_strides,
)
note = _define("note(Tensor[] kept, str labels) -> Tensor", _note, fake_note, torch.Tag.flexible_layout)
