"""What stands for a saved tensor until backward asks for it.

A *handle* stands for one storage at one version. Hooked slots hold light references to it. Its bytes
are encoded only when nobody but the graph keeps the storage alive, so a tensor that lives anyway is
never copied, and all consumers of a tensor are known before its codec is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from ..codecs import FLOATS, BlockMean, Codec, Mask, Packed, Raw, TensorMeta
from ..codecs.base import flatten, layout_of
from ..codecs.groups import Stage, decode_chain, is_link
from ..graph import capture
from ..graph.capture import Site
from ..graph.derive import PIECE, Affine, Origin, Term, pieces
from ..graph.rules import Need
from ..graph.weights import Made
from ..kernels import ops
from ..policy.tuners.base import FromSources
from ..policy.use import least_bits
from .doubts import Doubts
from .ledger import SHAPE_ONLY, Entry
from .offload import fetch
from .streams import stream_of

SIGN = Mask()  # what backward reads of a rectified tensor


class Consumer(NamedTuple):
    """One slot that reads a storage, and what for."""

    site: Site
    need: Need
    spatial: bool
    rectified: bool
    lossless: Codec | None
    view: TensorMeta
    offset: int
    sharing: int = 0
    boundary: bool = False
    """Does a checkpoint keep it, to make its region again?"""
    codec: Codec | None = None
    """The codec that the caller of that checkpoint asked for, if any."""
    otherwise: Need = Need.LOSSLESS
    """What it reads if ``lossless`` cannot store the values; that they stay exact, by default."""


def boundary_consumer(site: Site, tensor: Tensor, codec: Codec | None) -> Consumer:
    """A checkpoint that keeps ``tensor``. Its region may hold anything, so noise may pass through an exponential."""
    spatial = 4 <= tensor.dim() <= 5
    meta, offset = TensorMeta.of(tensor), int(tensor.storage_offset())
    return Consumer(site, Need.EXPONENT, spatial, False, None, meta, offset, 0, True, codec)


class Encoded:
    """One encoded tensor: its values, if anyone reads them, and its lossless forms, each under its codec."""

    __slots__ = ("packs", "support", "values")

    def __init__(self, values: Packed | Rebuilt | None, packs: dict[Codec, Packed], support: Tensor | None) -> None:
        self.values = values
        self.packs = packs
        self.support = support

    def read_by(self, lossless: Codec | None) -> Packed | Rebuilt | None:
        """What a reader with this codec gets: the values, if it has none or that could not store them."""
        return self.values if lossless is None else self.packs.get(lossless, self.values)


class Handle:
    """One storage at one version, raw until only the graph owns it, packed from then on."""

    __slots__ = (
        *("__weakref__", "above", "base", "consumers", "decoded", "identity", "is_source", "mask", "noise", "numel"),
        *("encoded", "origin", "pinned", "raw", "readers", "entry", "stream", "version"),
    )

    def __init__(
        self, raw: Tensor, identity: int, base: TensorMeta | None, numel: int, noise: int, entry: Entry
    ) -> None:
        self.raw: Tensor | None = raw
        self.stream = stream_of(raw)
        self.identity = identity
        self.version = capture.version_of(raw)
        self.numel = numel
        self.base = base
        self.noise = noise
        self.entry = entry
        self.origin: Origin | None = None
        self.is_source = False  # is anything to be rebuilt from it?
        self.above = 0  # tensors that are decoded besides to rebuild another from it, which was settled before
        self.mask: Tensor | None = None  # the bits of the values above zero, if its maker has found them
        self.pinned: Tensor | None = None
        self.consumers: list[Consumer] = []
        self.encoded: dict[tuple[TensorMeta, int] | None, Encoded] = {}
        self.decoded: Tensor | None = None
        self.readers = 0

    def pin(self, why: str) -> None:
        """Stay raw, as autograd itself would keep the storage: a second owner keeps it from being encoded."""
        assert self.raw is not None
        self.entry.kept = why
        self.pinned = self.raw.detach()

    def read_values(self) -> bool:
        """Let consumers whose lossless codecs cannot store the values read values instead; False if there is none."""
        given_up = [
            c.lossless is not None and c.otherwise is not Need.LOSSLESS and c.view.dtype in FLOATS
            for c in self.consumers
        ]
        self.consumers = [
            c._replace(lossless=None, need=c.otherwise) if values else c
            for c, values in zip(self.consumers, given_up, strict=True)
        ]
        self.readers += sum(given_up)
        return any(given_up)

    def move(self) -> None:
        """Go on with a copy of the storage, because other tensors are rebuilt from the values of now."""
        raw = self.raw
        assert raw is not None
        copy = raw.as_strided((self.numel,), (1,), 0).clone()
        self.raw = copy.as_strided(raw.shape, raw.stride(), raw.storage_offset())
        self.identity, self.version = capture.storage_id(copy.untyped_storage()), capture.version_of(copy)

    def extents(self) -> list[tuple[tuple[TensorMeta, int] | None, TensorMeta, int, list[Consumer]]]:
        """What to encode, the whole storage or each stretch that is read: key in ``encoded``, form, offset, readers."""
        first = self.consumers[0].view
        if math.prod(first.shape) == self.numel and layout_of(first.shape, first.stride).dense:
            return [(None, first, 0, self.consumers)]
        views: dict[tuple[TensorMeta, int], list[Consumer]] = {}
        for consumer in self.consumers:
            views.setdefault((consumer.view, consumer.offset), []).append(consumer)
        if _covers(frozenset((view.shape, view.stride, offset) for view, offset in views), self.numel):
            return [(None, self._whole(), 0, self.consumers)]
        return [(key, *key, consumers) for key, consumers in views.items()]

    def _whole(self) -> TensorMeta:
        """The storage as one dense tensor: in the shape of a reader or of its base if one fills it, else in rows."""
        base = self.base
        for view in [c.view for c in self.consumers] + ([base] if base is not None else []):
            if view.numel == self.numel and layout_of(view.shape, view.stride).dense:
                return view
        shape, _, dtype = self.consumers[0].view
        last = shape[-1] if shape else 1
        if last > 1 and self.numel % last == 0:
            return TensorMeta((self.numel // last, last), (last, 1), dtype)
        return TensorMeta((self.numel,), (1,), dtype)


@lru_cache(maxsize=1024)
def _covers(views: frozenset[tuple[tuple[int, ...], tuple[int, ...], int]], numel: int) -> bool:
    """Do views (shape, stride, offset) together read each of the ``numel`` values of a storage?

    Views may overlap or repeat values, so sizes alone do not tell. Places are marked in units of the longest stretch
    that every view reads whole: three for each row of q, k and v, whatever its length.
    """
    if sum(math.prod(shape) for shape, _, _ in views) < numel:
        return False
    unit, merged = numel, []
    for shape, stride, offset in views:
        dims: list[tuple[int, int]] = []  # (size, stride), neighbours in memory merged
        for size, step in sorted(
            ((n, s) for n, s in zip(shape, stride, strict=True) if n != 1 and s), key=lambda d: d[1]
        ):
            if dims and step == dims[-1][0] * dims[-1][1]:
                dims[-1] = (dims[-1][0] * size, dims[-1][1])
            else:
                dims.append((size, step))
        run = dims.pop(0)[0] if dims and dims[0][1] == 1 else 1
        unit = math.gcd(unit, run, offset, *[step for _, step in dims])
        merged.append((run, dims, offset))
    read = np.zeros(numel // unit, dtype=np.bool_)  # not a tensor, which would have no data among fake ones
    for run, dims, offset in merged:
        sizes, steps = [size for size, _ in dims], [step // unit for _, step in dims]
        as_strided(read[offset // unit :], (*sizes, run // unit), (*steps, 1))[...] = True
    return bool(read.all())


class Reference:
    """What autograd holds for a hooked slot: a view of a handle, read through one codec."""

    __slots__ = ("__weakref__", "handle", "lossless", "meta", "norm", "offset", "twin")

    def __init__(self, handle: Handle, meta: TensorMeta, offset: int, lossless: Codec | None, twin: bool) -> None:
        self.handle = handle
        self.meta = meta
        self.offset = offset
        self.lossless = lossless
        self.twin = twin
        self.norm = False  # is its reader a batch norm, which may read codes?

    def for_twin(self, encoded: Encoded) -> Tensor | None:
        """What a twin reads in place of the tensor: block means or packed signs, if that is what is stored."""
        packed = encoded.values if self.lossless is None else encoded.packs[self.lossless]
        if not isinstance(packed, Packed) or packed.meta != self.meta:
            return None
        if isinstance(packed.codec, BlockMean):
            return packed.codec.small(fetch(packed))
        return packed.buffers[0] if packed.codec == SIGN else None

    def view(self, whole: Tensor) -> Tensor:
        """This reference's part of a decoded storage, which may itself begin somewhere within larger memory."""
        shape, stride, _ = self.meta
        if self.offset == 0 and whole.shape == shape and whole.stride() == stride:
            return whole
        return whole.as_strided(shape, stride, whole.storage_offset() + self.offset)

    def read(self, raw: Tensor) -> Tensor:
        """This reference's part of the very storage that was saved, unless it has changed since."""
        if capture.version_of(raw) != self.handle.version:
            raise capture.changed_in_place(self.meta.shape)
        return cut(raw, self.meta, self.offset)


class Rebuilt:
    """What stands for the values of a tensor that is rebuilt from others."""

    __slots__ = ("meta", "origin")

    def __init__(self, origin: Origin, meta: TensorMeta) -> None:
        self.origin = origin
        self.meta = meta

    def decode(self, support: Tensor | None) -> Tensor:
        """The values, made again; ``support`` tells where a rectified tensor is above zero."""
        shape, stride, dtype = self.meta
        return self._summed(support).made().to(dtype).as_strided(shape, stride)

    def _summed(self, support: Tensor | None) -> _Sum:
        """The terms, those of a source that is rebuilt itself among them."""
        origin = self.origin
        assert support is not None or not origin.rectified
        mask = support if origin.rectified else None
        total = _Sum(None, [])
        # What takes most decoding comes first: then no more than two tensors are there at once, however long a chain.
        terms = sorted(origin.terms, key=lambda t: (-len(read_for([t])), isinstance(t.make, Affine)))
        for term in terms:
            last = term is terms[-1]
            if isinstance(term.make, Affine):
                total = _scaled(term.make, term.sources[0], total, mask if last else None)
            elif term.make is None and term is terms[0] and (source := self._like_this(term.sources[0])) is not None:
                total = source
            else:
                total = _Sum(_made(term, total.made_if_any(), read_only=not last), [])
        if mask is None or isinstance(terms[-1].make, Affine):
            return total
        flat = total.made().to(self.meta.dtype).as_strided((self.meta.numel,), (1,))
        for i, piece in enumerate(pieces(flat)):
            bits = mask[i * PIECE // 8 : (i + 1) * PIECE // 8]
            piece.masked_fill_(ops.unpack_band(bits, piece.numel(), torch.bool, 1.0, 0.0).logical_not_(), 0.0)
        return _Sum(flat, [])

    def _like_this(self, source: Reference) -> _Sum | None:
        """The sum that makes a source, if it is rebuilt too, and has the form of this tensor."""
        encoded = source.handle.encoded.get(None)
        values = None if encoded is None or source.lossless is not None else encoded.values
        if not isinstance(values, Rebuilt) or not values.meta == source.meta == self.meta or source.offset:
            return None
        assert encoded is not None
        total = values._summed(encoded.support)
        if total.stages and total.stages[0].packed.meta == self.meta:
            return total
        return _Sum(total.made().to(self.meta.dtype), [])


class _Sum(NamedTuple):
    """What was added up so far, and what comes next in one pass."""

    values: Tensor | None
    stages: list[Stage]

    def made_if_any(self) -> Tensor | None:
        """The sum, if there is any."""
        return decode_chain(self.stages, self.values) if self.stages else self.values

    def made(self) -> Tensor:
        """The sum."""
        values = self.made_if_any()
        assert values is not None
        return values


def _scaled(affine: Affine, source: Reference, before: _Sum, mask: Tensor | None) -> _Sum:
    """``scale * x + shift`` of a source, plus what was ``before``, and zero where ``mask`` says so."""
    packed, support = _stored(source)
    if packed is not None and is_link(packed, None):
        stage = Stage(packed, support, *affine, mask)
        if before.stages and is_link(packed, before.stages[0].packed):
            return before._replace(stages=[*before.stages, stage])
        before = _Sum(before.made_if_any(), [])
        if before.values is None or before.values.dtype == packed.meta.dtype:
            return before._replace(stages=[stage])
    other, x = before.made_if_any(), fresh(source)
    if other is not None:
        dtype = torch.promote_types(x.dtype, other.dtype)
        x, other = x.to(dtype), other.to(dtype).as_strided((x.numel(),), (1,))
    layout = layout_of(x.shape, x.stride())
    place = layout.order.index(1)
    geometry = (math.prod(layout.sizes[:place]), x.shape[1], math.prod(layout.sizes[place + 1 :]))
    ops.rebuild_affine(x.as_strided((x.numel(),), (1,)), geometry, *affine, other, mask)
    return _Sum(x, [])


def _stored(reference: Reference) -> tuple[Packed | None, Tensor | None]:
    """What stands for just this tensor, and its support, if a codec stores it beside the computation."""
    encoded = reference.handle.encoded.get(None)
    if encoded is None or reference.lossless is not None or reference.offset or type(encoded.values) is not Packed:
        return None, None
    return (encoded.values, encoded.support) if encoded.values.meta == reference.meta else (None, None)


def _made(term: Term, other: Tensor | None, read_only: bool) -> Tensor:
    """A term plus ``other``; in memory of its own unless it is the first one and ``read_only``."""
    make = term.make
    if make is None:
        values = fresh(term.sources[0], read_only and other is None)
    else:
        assert not isinstance(make, Affine)
        values = make(*[fresh(s) if isinstance(s, Reference) else s for s in term.sources])
    if other is None:
        return values
    return values.to(torch.promote_types(values.dtype, other.dtype)).add_(other)


def fresh(reference: Reference, read_only: bool = False) -> Tensor:
    """The stored tensor; unless it is ``read_only``, in memory that may be changed, because no other reader has it."""
    handle = reference.handle
    if handle.raw is not None:
        raw = reference.read(handle.raw)
        return raw if read_only else raw.clone()
    encoded = handle.encoded.get(None) or handle.encoded[(reference.meta, reference.offset)]
    values = encoded.read_by(reference.lossless)
    assert values is not None
    whole = values.decode(encoded.support)
    if not read_only and isinstance(values, Packed) and type(values.codec) is Raw:
        whole = whole.clone()  # what Raw gives back is what it keeps
    return reference.view(whole) if None in handle.encoded else whole


class Recast:
    """Autocast's copy of a parameter, made again from the parameter.

    A change of the parameter in between is an error. Its version shows every change but those by ``.data``; of those a
    few values all over the parameter show what changes it as a whole. A change by ``.data`` of some values alone may
    pass unseen.
    """

    __slots__ = ("doubts", "dtype", "of_copy", "parameter", "some", "transposed", "version")

    def __init__(self, parameter: Tensor, transposed: bool, copy: Tensor, doubts: Doubts) -> None:
        self.parameter = parameter
        self.doubts = doubts
        self.of_copy = Shape(copy)  # complains if somebody changes the copy itself
        self.version = capture.version_of(parameter)
        self.some = capture.few_values(parameter) if capture.has_data(parameter) else None
        self.transposed = transposed
        self.dtype = copy.dtype

    def unpack(self) -> Tensor:
        """The copy, cast again."""
        parameter = self.parameter
        self.of_copy.require_unchanged()
        if capture.version_of(parameter) != self.version:
            self._complain()
        copy = parameter.detach().to(self.dtype)
        if self.some is not None:  # looked at after the cast has brought the parameter into the cache
            now, then = capture.few_values(parameter), self.some
            if isinstance(now, Tensor) and isinstance(then, Tensor):
                self.doubts.ask((now == then).all(), self._complain)
            elif now != then:
                self._complain()
        return copy.t() if self.transposed else copy

    def _complain(self) -> None:
        raise RuntimeError(
            f"a parameter of shape {tuple(self.parameter.shape)} was modified by an inplace operation (an "
            "optimizer step?) or through .data between forward and backward; lowtide casts parameters again for "
            "backward instead of keeping autocast's copies, so call backward first"
        )


class Remade:
    """A weight that was made of parameters, made again from them; a change of one in between is an error."""

    __slots__ = ("doubts", "made", "meta", "of_weight", "offset", "some", "versions")

    def __init__(self, made: Made, weight: Tensor, doubts: Doubts) -> None:
        self.made = made
        self.doubts = doubts
        self.of_weight = Shape(weight)  # complains if somebody changes the weight itself
        self.meta, self.offset = TensorMeta.of(weight), weight.storage_offset()
        self.versions = self._versions()
        self.some = self._some()

    def _versions(self) -> list[int]:
        return [capture.version_of(source) for source in self.made.sources]

    def _some(self) -> list[Tensor]:
        return [capture.some_values(source) for source in self.made.sources if capture.has_data(source)]

    def unpack(self) -> Tensor:
        """The weight, made again."""
        self.of_weight.require_unchanged()
        if self._versions() != self.versions:
            self._complain()
        for now, then in zip(self._some(), self.some, strict=True):
            self.doubts.ask((now == then).all(), self._complain)
        whole = self.made.make(*self.made.sources)
        shape, stride, _ = self.meta
        return whole.as_strided(shape, stride, self.offset)

    def _complain(self) -> None:
        shape = tuple(self.made.sources[0].shape)
        raise RuntimeError(
            f"a parameter of shape {shape} was modified by an inplace operation (an optimizer step?) or through "
            ".data between forward and backward; lowtide makes the weight that was computed from it again for "
            "backward instead of keeping it, so call backward first"
        )


class Shape:
    """A tensor of which backward reads only the shape, with autograd's check that nobody changed it."""

    __slots__ = ("counter", "packed", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.packed = SHAPE_ONLY.encode(tensor, key=0)
        self.version = capture.version_of(tensor)
        has_data = capture.has_data(tensor)
        self.counter = capture.share_version(tensor, self.packed.buffers[0]) if has_data else None

    def require_unchanged(self) -> None:
        """Raise if the tensor was changed in place since."""
        if self.counter is not None and capture.version_of(self.counter) != self.version:
            raise capture.changed_in_place(self.packed.meta.shape)

    def unpack(self) -> Tensor:
        """Memory of the same form."""
        self.require_unchanged()
        return self.packed.decode()


def is_support(consumer: Consumer, meta: TensorMeta) -> bool:
    """Does this consumer's mask tell where the tensor is zero? It must be of the very tensor, and that rectified."""
    return consumer.rectified and consumer.lossless == SIGN and consumer.view.numel == meta.numel


def cut(raw: Tensor, meta: TensorMeta, offset: int) -> Tensor:
    """The part of a storage that ``meta`` describes."""
    if raw.shape == meta.shape and raw.stride() == meta.stride and raw.storage_offset() == offset:
        return raw
    return raw.as_strided(meta.shape, meta.stride, offset)


def holding(handle: Handle, form: tuple[tuple[int, ...], tuple[int, ...]]) -> Reference | None:
    """A reference to all values of a storage, if they are kept and lie in this form, a shape and its strides."""
    view = next((c.view for c in handle.consumers if c.offset == 0 and c.view[:2] == form), None)
    encoded, raw = handle.encoded.get(None), handle.raw
    if raw is None:
        kept = encoded is not None and encoded.values is not None
    else:
        kept = capture.version_of(raw) == handle.version and any(c.lossless is None for c in handle.consumers)
    return Reference(handle, view, 0, None, False) if kept and view is not None else None


def laid_out(term: Term, form: tuple[tuple[int, ...], tuple[int, ...]], most: int) -> Term | None:
    """The term with a source of this form first, and its factors that are not stored copied; they have ``most`` values.

    A parameter may change before backward. None if no source has the form, or a factor is too large to be copied.
    """
    sources = list(term.sources)
    for i, source in enumerate(sources):
        if not isinstance(source, Reference):
            if source.numel() > most:
                return None
            sources[i] = source.clone()
    for i, source in enumerate(sources):
        if isinstance(source, Reference) and source.meta[:2] == form:
            return term._replace(sources=(source, *sources[:i], *sources[i + 1 :]))
    return None


def roots_of(handle: Handle) -> list[Handle]:
    """The handles of the stored tensors whose noise is in the values of this one, or may be."""
    found, open_ = [], [handle]
    while open_:
        handle = open_.pop()
        if handle.origin is None:
            found.append(handle)
        else:
            open_ += [s.handle for s in handle.origin.sources if isinstance(s, Reference)]
    return found


def _is_exact(handle: Handle) -> bool:
    """Are the values, or some that they are rebuilt from, still raw?"""
    encoded = handle.encoded.get(None)
    values = None if encoded is None else encoded.values
    if not isinstance(values, Rebuilt):
        return handle.raw is not None
    return any(_is_exact(s.handle) for s in values.origin.sources if isinstance(s, Reference))


def read_for(terms: Iterable[Term]) -> list[Handle]:
    """The handles of all tensors that are decoded, or read as they are, to make these terms again.

    For a source that is rebuilt itself, those that it is made from.
    """
    found: list[Handle] = []
    for handle in [s.handle for term in terms for s in term.sources if isinstance(s, Reference)]:
        encoded = handle.encoded.get(None)
        values = None if encoded is None else encoded.values
        found += read_for(values.origin.terms) if isinstance(values, Rebuilt) else [handle]
    return found


class Sources(NamedTuple):
    """What a decision has to know of the tensors that another can be rebuilt from. See :class:`Use`."""

    sites: tuple[Site, ...]
    rectified: bool
    need: Need
    bits: int
    decodes: int


def sources_of(handle: Handle) -> Sources | None:
    """What is known of those that the handle's tensor can be rebuilt from; what is rebuilt is no better than they."""
    origin = handle.origin
    if origin is None:
        return None
    stored = [s.handle.consumers for s in origin.sources if isinstance(s, Reference)]
    needs = [max(c.need for c in consumers) for consumers in stored]
    bits = [least_bits(need, sharing_of(consumers)) for need, consumers in zip(needs, stored, strict=True)]
    decodes = handle.above + len(read_for(origin.terms))
    return Sources(sites_of(origin), origin.rectified, min(needs), min(bits), decodes)


def sharing_of(consumers: Iterable[Consumer]) -> int:
    """How many values share a statistic, of several norms among the consumers the least; 0 if there is none."""
    return min((c.sharing for c in consumers if c.sharing), default=0)


def sites_of(origin: Origin) -> tuple[Site, ...]:
    """The first site of each stored tensor that it is rebuilt from."""
    return tuple(s.handle.consumers[0].site for s in origin.sources if isinstance(s, Reference))


def rebuilder(origin: Origin | None, tensor: Tensor, meta: TensorMeta) -> FromSources | None:
    """How to make the tensor again from its sources as they are stored; None if that tells nothing."""
    if origin is None or any(_is_exact(s.handle) for s in origin.sources if isinstance(s, Reference)):
        return None  # as long as a source is exact, rebuilding from it tells nothing of its noise
    made = origin

    def rebuild() -> Tensor:
        support = ops.pack_band(flatten(tensor)[0], 0.0, math.inf, False, True) if made.rectified else None
        return Rebuilt(made, meta).decode(support)

    makes = [term.make for term in made.terms for source in term.sources if isinstance(source, Reference)]
    return FromSources(rebuild, [make.scale if isinstance(make, Affine) else None for make in makes])


def described(origin: Origin) -> str:
    """The origin in words."""
    return f"{origin.op} of {' and '.join(map(str, sites_of(origin)))}"
