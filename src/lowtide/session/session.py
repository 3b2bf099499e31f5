"""The lifetime of a compressed forward: what is decided, encoded and counted, and when."""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..codecs import FLOATS, Codec, Derived, NotRepresentable, Packed, Raw, ShapeOnly, TensorMeta
from ..codecs.base import form_of
from ..graph import capture
from ..graph.capture import Capture, Site, Slot
from ..graph.derive import Origin, origin_of
from ..graph.rules import Need, rule_for
from ..policy.methods import Method, Only, Survey, resolve
from ..policy.plan import Plan
from ..policy.tuners.base import Probed
from ..policy.use import Use
from ..report import EXACT, HELD, SHARED, Report, size
from .handles import (
    MASK,
    Consumer,
    Handle,
    Part,
    Rebuilt,
    Recast,
    Reference,
    Row,
    Shape,
    cut,
    described,
    masks,
    need_of,
    rebuilder,
    roots_of,
    sites_of,
)
from .offload import Moved, send
from .replay import Sketch, gradients

MIN_NUMEL = 4096
"""Smaller tensors stay exact: they hold few bytes, and packing one costs some 20 microseconds."""

_RECENT = 12
_SMALL_FACTOR = 1 << 16  # values; a factor that is copied for rebuilding, such as the weight of a norm, has no more
_SHAPE_ONLY = ShapeOnly()
_BY_DATA = "its memory was reached by .data, through which changes do not show"
_HALVES = (torch.bfloat16, torch.float16)
_ticks = itertools.count()  # gives each session of a process its own rounding noise


class Session:
    """A compressed forward; made by ``compress`` and ``attach``."""

    def __init__(self, model: nn.Module, method: Method, seed: int, min_numel: int, derive: bool) -> None:
        self.method = method
        self.override: Callable[[Use, Codec], Codec | None] | None = None
        """Has the last word about a codec, if it is set."""
        self._away = method.home != "device"
        self._tuner = method.tuner(model)
        self._probing = False
        self._probe: tuple[Callable[[], Tensor], int] | None = None
        self._derive_all = derive
        self._derives = derive or method.derives
        self.seed = seed
        self.step = 0
        self._chosen: list[tuple[Use, Codec]] = []
        self._model = model
        self._min_numel = min_numel
        self._abilities = capture.probe()
        self._capture: Capture | None = None
        self._entered = 0
        self._thread = 0
        self._noise = 0
        self._forwards = 0
        self._static: dict[int, weakref.ref[Any]] = {}  # storages of the model's own tensors, as long as they live
        self._exposed: dict[int, weakref.ref[Any]] = {}
        self._handles: dict[int, weakref.ref[Handle]] = {}
        self._recent: list[weakref.ref[Handle]] = []
        self._waiting: deque[weakref.ref[Handle]] = deque()
        self._decoded: weakref.ref[Handle] | None = None
        self._rows: list[Row] = []
        self._counted: dict[int, tuple[weakref.ref[Any], Row]] = {}
        self._without_data = False

    # ------------------------------------------------------------ lifetime

    def __enter__(self) -> Session:
        if self._entered:
            raise RuntimeError("this session is already open; make another with lowtide.compress()")
        self.step = next(_ticks)
        self._open()
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _open(self) -> None:
        if not self._abilities.slots:
            warnings.warn(
                f"lowtide cannot reach saved tensors in torch {torch.__version__}; nothing is compressed",
                stacklevel=3,
            )
        tensors = itertools.chain(self._model.parameters(), self._model.buffers())
        parts = [part for t in tensors for part in capture.strided_parts(t)]
        storages = [capture.storage_of(t) for t in parts if capture.has_storage(t)]
        self._static = {capture.storage_id(s): weakref.ref(s) for s in storages if s is not None}
        self._rows.clear()
        self._without_data = False
        self._chosen.clear()
        self._forget()
        self._forwards = 0
        if self._tuner is not None:
            self._tuner.begin(self.step)
        twin = None if type(self.method).twin is Method.twin else self.method.twin
        self._capture = Capture(
            self._model, self._visit, self._settle, self._start_forward, self._expose, twin, self._derives
        )
        self._start_forward()
        self._capture.__enter__()
        self._entered = 1
        self._thread = threading.get_ident()

    def _close(self) -> None:
        """Stop watching; encode what nobody holds, and note what somebody does."""
        self._entered = 0
        if self._capture is not None:
            self._capture.__exit__(None, None, None)
            self._capture = None  # it refers to us: a cycle would wait for the garbage collector
        for reference in (*self._recent, *self._waiting):
            handle = reference()
            if handle is not None and not self._seal_if_ours(handle) and handle.raw is not None:
                self._leave(handle.row)
        for storage, row in self._counted.values():
            if row.codecs == (_SHAPE_ONLY,) and storage() is not None:
                self._leave(row)
        self._forget()

    def begin(self, module: nn.Module) -> None:
        """Before each forward of an attached ``module``: a step of its own, if gradients are on."""
        if self._probing:
            return
        if self._entered and self._thread != threading.get_ident():
            return  # a forward in another thread stays exact
        if self._entered:
            if capture.calls_on_stack(module) > 1:
                self._entered += 1  # the model calls itself
                return
            self._close()  # an interrupt, which skips closing hooks, ended the last forward
        if torch.is_grad_enabled() and not capture.is_recorded():
            self.step += 1
            if self._probe is not None and self.step % self._probe[1] == 0:
                self.adapt(self._probe[0], every=self._probe[1])
            self._open()

    def end(self) -> None:
        """After each forward of an attached module."""
        if not self._entered or self._thread != threading.get_ident():
            return
        if self._entered > 1:
            self._entered -= 1
        else:
            self._close()

    def abandon(self) -> None:
        """Stop watching a forward that is under way in this thread."""
        if self._entered and self._thread == threading.get_ident():
            self._close()

    def _leave(self, row: Row) -> None:
        """Say why a storage is still there: a slot of autograd's keeps it, or somebody outside."""
        if row.kept is not None:
            row.exact(row.kept)
        else:
            row.state, row.why = HELD, "still in use outside the graph when the forward ended"

    def _forget(self) -> None:
        self._exposed.clear()
        self._handles.clear()
        self._recent.clear()
        self._waiting.clear()
        self._counted.clear()
        self._decoded = None

    def _start_forward(self) -> None:
        """Each forward of the model draws its own noise and counts its sites from zero."""
        assert self._capture is not None
        self._capture.restart()
        self._forwards += 1
        self._noise = _hash(f"{self.seed}/{self.step}/{self._forwards}/{_rank()}")

    # ------------------------------------------------------------ forward

    def _visit(self, slot: Slot) -> None:
        """Decide about one newly saved tensor that is not a parameter."""
        tensor, storage = slot.tensor, slot.storage
        if tensor is None:
            self._rows.append(Row(slot.site, None, HELD, 0, "held by other saved-tensor hooks, such as checkpoint"))
            return
        if storage is None:
            self._keep_odd(slot.site, tensor)
            return
        identity = capture.storage_id(storage)
        if capture.is_lazy(tensor):
            self._count(slot, identity, "a conjugate or a negative that torch has not computed yet", kept=True)
            return
        if self._exposed and identity in self._exposed and self._exposed[identity]() is storage:
            self._count(slot, identity, _BY_DATA, kept=True)
            return
        if self._is_static(identity, storage) or (tensor.dtype in _HALVES and self._recast(slot, identity)):
            return
        try:
            rule = rule_for(slot)
            lossless = None if rule is None or rule.codec is None else rule.codec(slot)
        except Exception as error:  # whatever a node says that no rule foresaw: exact, and listed
            self._count(slot, identity, f"could not be judged: {type(error).__name__}: {error}", kept=True)
            return
        if rule is None:
            self._count(slot, identity, "no rule for this op", kept=True)
            return
        need = rule.need
        if lossless is not None:
            if lossless == _SHAPE_ONLY:
                self._count(slot, identity, rule.why, needs_values=False)
                shape = Shape(tensor)
                slot.hook(lambda _: shape, Shape.unpack)
                return
            need = Need.LOSSLESS
        elif need is Need.EXACT:
            self._count(slot, identity, rule.why, kept=True)
            return
        elif need is Need.LOSSLESS or tensor.dtype not in FLOATS:
            why = f"{str(tensor.dtype).removeprefix('torch.')} values are kept exactly"
            self._count(slot, identity, why, kept=True)
            return
        meta, offset = TensorMeta.of(tensor), tensor.storage_offset()
        consumer = Consumer(slot.site, need, rule.spatial, rule.rectified, lossless, meta, offset)
        self._store(slot, identity, consumer, rule.why)

    def _keep_odd(self, site: Site, tensor: Tensor) -> None:
        """Note a tensor without a plain storage of its own; one of the model's own sparse ones costs nothing."""
        kind = type(tensor).__name__ if type(tensor) is not Tensor else str(tensor.layout)
        meta = TensorMeta(tuple(tensor.shape), (), tensor.dtype)
        parts = capture.strided_parts(tensor)
        values = parts[0].untyped_storage() if len(parts) > 1 and capture.has_storage(parts[0]) else None
        identity = 0 if values is None else capture.storage_id(values)
        if values is not None and self._is_static(identity, values):
            return
        known = self._counted.get(identity)
        if known is not None and known[0]() is values:
            self._rows.append(Row(site, meta, SHARED, 0, known[1].site))
            return
        row = Row(site, meta, EXACT, sum(map(_nbytes, parts)), f"{kind}: kept as it is")
        row.kept = f"{site.op}.{site.slot} keeps it: {row.why}"
        self._rows.append(row)
        if values is not None:
            self._counted[identity] = (weakref.ref(values), row)

    def _store(self, slot: Slot, identity: int, consumer: Consumer, why: str) -> None:
        """Hook the slot to the handle of its storage."""
        tensor, meta = slot.tensor, consumer.view
        handle = self._pending(identity)
        if (
            handle is not None
            and handle.version == capture.version_of(tensor)
            and handle.consumers[0].view.dtype is meta.dtype
        ):
            self._rows.append(Row(slot.site, meta, SHARED, 0, handle.row.site))
        else:
            numel = tensor.numel()
            total = slot.storage.nbytes() // meta.dtype.itemsize
            # A small tensor is not worth the trouble, unless it would keep a large storage alive.
            if numel < self._min_numel and numel * 4 >= total:
                self._count(slot, identity, "small", kept=True)
                return
            row = self._count(slot, identity, why, by_handle=True, meta=meta)
            whole = capture.base_of(tensor) if numel != total else None
            base = None if whole is None else TensorMeta.of(whole)
            handle = Handle(tensor.detach(), identity, base, total, self._noise, row)
            if self._derives:
                handle.origin = self._origin(capture.base_of(tensor), tensor, total)
            reference = weakref.ref(handle)
            self._handles[identity] = reference
            self._recent.append(reference)
        handle.consumers.append(consumer)
        if consumer.lossless is None and not slot.twin:
            handle.readers += 1
        light = Reference(handle, meta, consumer.offset, consumer.lossless, slot.twin)
        if self._derives:
            slot.remember(light)
        tuner = self._tuner
        if tuner is not None and consumer.lossless is None and tuner.wants_gradient(consumer.site, consumer.need):
            slot.watch(lambda gradient: tuner.observe(consumer.site, gradient))
        slot.saved.register_hooks(lambda _: light, self._unpack)
        if self._abilities.sole is None:
            self._seal_if_ours(handle)

    def _expose(self, storage: Any) -> None:
        """Leave a storage to autograd, because ``.data`` may change it from now on without a trace."""
        identity = capture.storage_id(storage)
        if self._is_static(identity, storage):
            return
        self._exposed[identity] = weakref.ref(storage)
        handle = self._pending(identity)
        if handle is not None and handle.is_source:
            handle.move()
            del self._handles[identity]
        elif handle is not None:
            handle.pin(_BY_DATA)

    def _origin(self, base: Tensor | None, tensor: Tensor, numel: int) -> Origin | None:
        """How to rebuild a tensor that fills its storage from those already stored, the first laid out as it is."""
        whole = tensor if base is None else base
        origin = origin_of(whole, capture.stands_for) if whole.numel() == numel else None
        if origin is None:
            return None
        roots = [id(root) for s in origin.sources if isinstance(s, Reference) for root in roots_of(s.handle)]
        if len(set(roots)) < len(roots):
            return None  # the square of a rounded value is biased by the rounding's variance
        sources = list(origin.sources)
        for i, source in enumerate(sources):
            if not isinstance(source, Reference):
                if source.numel() > _SMALL_FACTOR:
                    return None
                sources[i] = source.clone()  # a parameter may change before backward
        for i, source in enumerate(sources):
            if isinstance(source, Reference) and source.meta[:2] == (whole.shape, whole.stride()):
                for each in sources:
                    if isinstance(each, Reference):
                        each.handle.is_source = True
                return origin._replace(sources=(source, *sources[:i], *sources[i + 1 :]))
        return None

    def _is_static(self, identity: int, storage: Any) -> bool:
        """Does the storage belong to the model? An identity alone may be that of one that is gone."""
        known = self._static.get(identity)
        return known is not None and known() is storage

    def _pending(self, identity: int) -> Handle | None:
        """The handle whose storage this is. Its raw tensor keeps the storage, so the identity holds."""
        reference = self._handles.get(identity)
        handle = reference() if reference is not None else None
        return None if handle is None or handle.raw is None else handle

    def _recast(self, slot: Slot, identity: int) -> bool:
        found = capture.parameter_behind_cast(slot.tensor)
        if found is None:
            return False
        row = self._count(slot, identity, "autocast's copy of a parameter: cast again when needed")
        recast = Recast(found[0], found[1], slot.tensor.dtype)
        slot.hook(lambda _: recast, Recast.unpack)
        if row.site is slot.site:
            row.compressed(0, "recast")
        return True

    def _count(
        self,
        slot: Slot,
        identity: int,
        why: str,
        *,
        needs_values: bool = True,
        by_handle: bool = False,
        kept: bool = False,
        meta: TensorMeta | None = None,
    ) -> Row:
        """The row that carries the bytes of this slot's storage, made if there is none yet.

        A storage that gets a handle is found through it; others are remembered by a weak reference. ``kept``
        says that the slot gets no hook, so that autograd keeps the storage as it is.
        """
        handle = self._pending(identity)
        row = handle.row if handle is not None else None
        if row is None and (known := self._counted.get(identity)) is not None and known[0]() is slot.storage:
            row = known[1]
        meta = meta or TensorMeta.of(slot.tensor)
        if row is not None:
            self._rows.append(Row(slot.site, meta, SHARED, 0, row.site))
            if needs_values and row.codecs == (_SHAPE_ONLY,):
                row.exact(why)
            if kept:
                row.kept = f"{slot.site.op}.{slot.site.slot} keeps it: {why}"
            return row
        row = Row(slot.site, meta, EXACT, slot.storage.nbytes(), why)
        row.kept = why if kept else None
        self._rows.append(row)
        if not by_handle:
            self._counted[identity] = (weakref.ref(slot.storage), row)
        if not needs_values:
            row.compressed(0, _SHAPE_ONLY)
        return row

    # ------------------------------------------------------------ encoding

    def _settle(self) -> None:
        """After each torch call: encode what the call's end left to the graph alone."""
        if self._recent:
            self._recent = [r for r in self._recent if not self._settled(r)]
            if len(self._recent) > _RECENT:
                self._waiting.append(self._recent.pop(0))
        if self._waiting:
            for _ in range(min(2, len(self._waiting))):
                reference = self._waiting.popleft()
                if not self._settled(reference):
                    self._waiting.append(reference)

    def _settled(self, reference: weakref.ref[Handle]) -> bool:
        handle = reference()
        return handle is None or self._seal_if_ours(handle)

    def _seal_if_ours(self, handle: Handle) -> bool:
        """Encode if only the graph owns the storage; True if there is nothing left to wait for."""
        raw, sole = handle.raw, self._abilities.sole
        if raw is None:
            return True
        if sole is not None and capture.use_count(handle.identity) > sole:
            return False
        if capture.version_of(raw) == handle.version:
            self._seal(handle, raw)
        return True

    def _seal(self, handle: Handle, raw: Tensor) -> None:
        """Encode the storage, or, where less than all of it is read, each part that is."""
        plans = handle.plans()
        total, chosen = 0, []
        used: dict[Codec, None] = {}
        for key, meta, offset, consumers in plans:
            tensor = cut(raw, meta, offset)
            codec, lossless, why = self._choose(tensor, meta, consumers, handle.origin if key is None else None)
            if why is not None:
                handle.row.why = why
                return
            for each in lossless if codec is None else (codec, *lossless):
                total += each.packed_nbytes(meta)
                used[each] = None
            chosen.append((tensor, codec, lossless))
        if total >= handle.row.plain and not any(type(codec) is Raw for codec in used):
            handle.row.why = "packing would not make it smaller"
            return
        try:
            for (key, meta, _, consumers), (tensor, codec, lossless) in zip(plans, chosen, strict=True):
                handle.parts[key] = self._encode(handle, tensor, meta, consumers, codec, lossless)
        except NotRepresentable as reason:
            handle.parts.clear()
            handle.row.why = f"kept exactly: {reason}"
            return
        handle.raw = None
        row = handle.row
        if self._away:
            for part in handle.parts.values():
                if isinstance(part.values, Moved):
                    row.away += part.values.nbytes
                    row.place = part.values.place
        row.compressed(total - row.away, *used)

    def _choose(
        self, tensor: Tensor, meta: TensorMeta, consumers: list[Consumer], origin: Origin | None
    ) -> tuple[Codec | None, list[Codec], str | None]:
        """Codec for the values, lossless codecs, or why the tensor stays."""
        lossless: list[Codec] = []
        need, spatial, rectified, sites = Need.LOSSLESS, False, False, []
        for consumer in consumers:
            sites.append(consumer.site)
            spatial = spatial or consumer.spatial
            if consumer.lossless is None:
                need = max(need, consumer.need)
            else:
                rectified = rectified or masks(consumer, meta)
                if consumer.lossless not in lossless:
                    lossless.append(consumer.lossless)
        if need is Need.LOSSLESS:
            return None, lossless, None
        if origin is not None and origin.rectified and not rectified:
            origin = None
        if meta.numel < self._min_numel:
            return Raw(), lossless, None
        sources = () if origin is None else sites_of(origin)
        use = Use(need, meta, spatial, tuple(sites), sources, rectified)
        codec: Codec | None
        if origin is not None and self._derive_all and need_of(origin) >= need:
            codec = Derived()
        else:
            codec = self.method.codec_for(use)
            if codec is not None and self._tuner is not None and capture.has_data(tensor):
                codec = self._tuner.codec_for(use, tensor, codec, rebuilder(origin, tensor, meta))
        if codec is None:
            return None, lossless, f"{self.method.name} keeps these values"
        if self.override is not None:
            codec = self.override(use, codec)
            if codec is None:
                return None, lossless, "kept exactly, because its noise was too much"
        self._chosen.append((use, codec))
        return codec, lossless, None

    def _encode(
        self,
        handle: Handle,
        tensor: Tensor,
        meta: TensorMeta,
        consumers: list[Consumer],
        codec: Codec | None,
        lossless: list[Codec],
    ) -> Part:
        if not capture.has_data(tensor):
            # Nothing to pack, and nothing to check: the bytes reported are predicted ones in any case.
            self._without_data = True
            form = _SHAPE_ONLY.encode(tensor, key=0)
            return Part(None if codec is None else form, dict.fromkeys(lossless, form), None)
        origin = handle.origin if type(codec) is Derived else None
        rectified = codec is not None and MASK in lossless and any(masks(c, meta) for c in consumers)
        on_the_way = rectified and origin is None  # the codec finds the mask while it looks at the values
        packs = {c: c.encode(tensor, key=0) for c in lossless if not on_the_way or c != MASK} if lossless else {}
        if codec is None:
            return Part(None, packs, None)
        if origin is not None:
            handle.row.why = f"rebuilt from {described(origin)}"
            return Part(Rebuilt(origin, meta), packs, packs[MASK].buffers[0] if rectified else None)
        key, support = _signed(_site_hash(consumers[0].site) ^ handle.noise), None
        if on_the_way:
            packed, support = codec.encode_rectified(tensor, key=key)
            packs[MASK] = Packed(MASK, form_of(tensor)[0], (support,))
        else:
            packed = codec.encode(tensor, key=key)
        if self._away and meta.numel >= self._min_numel:
            packed = send(packed, self.method.home)
        return Part(packed, packs, support)

    # ------------------------------------------------------------ backward

    def _unpack(self, reference: Reference) -> Tensor:
        handle = reference.handle
        raw = handle.raw
        if raw is not None:
            return reference.read(raw)
        part = handle.parts.get(None)
        if reference.twin:
            means = reference.block_means(part or handle.parts[(reference.meta, reference.offset)])
            if means is not None:
                return means
        if part is not None:
            lossless = reference.lossless
            whole = self._decode(handle, part) if lossless is None else part.packs[lossless].decode()
            return reference.view(whole)
        part = handle.parts[(reference.meta, reference.offset)]
        packed = part.values if reference.lossless is None else part.packs[reference.lossless]
        assert packed is not None
        return packed.decode(part.support)

    def _decode(self, handle: Handle, part: Part) -> Tensor:
        """Decode; keep the result while the next reader may be the same handle's (q, k and v)."""
        last = self._decoded() if self._decoded is not None else None
        decoded = handle.decoded
        if last is not None:
            last.decoded = None
        self._decoded = None
        if decoded is None:
            assert part.values is not None
            decoded = part.values.decode(part.support)
        handle.readers -= 1
        if handle.readers > 0:
            handle.decoded = decoded  # dies with the graph, if nobody comes for it
            self._decoded = weakref.ref(handle)
        return decoded

    # ------------------------------------------------------------ probes

    @property
    def chosen(self) -> dict[Use, Codec]:
        """What the last forward chose for each tensor whose values it stored, tuning included."""
        return dict(self._chosen)

    @property
    def adapts(self) -> bool:
        """Does its method learn from one step for the next?"""
        return self._tuner is not None

    def gradients(self, closure: Callable[[], Tensor], step: int) -> dict[str, Tensor]:
        """Gradients by parameter name from a compressed forward on the side, rounded as ``step`` rounds.

        Like :func:`replay.gradients` it disturbs nothing, nor the count of sessions on which :func:`compress`
        draws its noise. An adaptive method learns from it as from any other step.
        """

        def inside() -> Tensor:
            self.step = step
            self._open()
            try:
                return closure()
            finally:
                self._close()

        return gradients(self._model, inside)

    def adapt(self, closure: Callable[[], Tensor], *, every: int | None = None) -> None:
        """Measure what rounding each tensor does to the gradient, and let the method decide anew.

        ``closure`` runs the forward on a batch of your choice, best a small one, and returns the loss. One exact pass,
        then one more for each stored tensor; gradients are compared by sketches, none is kept. Weights, buffers,
        ``.grad`` and random states are as before. With ``every`` it is repeated before each such number of steps.
        """
        tuner = self._tuner
        if not isinstance(tuner, Probed):
            raise TypeError(f"method {self.method.name!r} does not adapt to probes; use 'gact' or 'auto'")
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"every must be a whole number of at least 1; got {every!r}")
        if not tuner.ready:
            raise RuntimeError(f"{self.method.name} measures its options in a first step; run one before adapt()")
        if self._entered:
            raise RuntimeError("adapt() runs forwards of its own; call it between steps, not inside the session")
        self._probe = None if every is None else (closure, every)
        sketch = Sketch(self._model)
        uses: dict[Site, tuple[Use, Codec]] = {}
        with tuner.timed(), self.aside():
            survey = Survey(tuner, uses)
            exact = self._sketch(sketch, closure, survey)
            found = []
            for use, codec in uses.values():
                change = self._sketch(sketch, closure, Only(use.sites[0], codec)) - exact
                square = float(change.square().sum(dtype=torch.float64))
                found.append((use, square if math.isfinite(square) else math.inf))
        tuner.measured(found)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Forwards of an attached model inside are not compressed, nor counted as steps."""
        self._probing = True
        try:
            yield
        finally:
            self._probing = False

    @property
    def is_aside(self) -> bool:
        """Inside :meth:`aside`?"""
        return self._probing

    def like(self, seed: int, share: float) -> Session:
        """Another session that decides as this one, with noise of its own, for a part ``share`` of its samples."""
        other = Session(self._model, self.method, seed, int(self._min_numel * share), self._derive_all)
        other.override = self.override
        if self._tuner is not None and other._tuner is not None:
            other._tuner.load_state_dict(self._tuner.state_dict())
        return other

    def _sketch(self, sketch: Sketch, closure: Callable[[], Tensor], method: Method) -> Tensor:
        """The gradient with what ``method`` compresses, in a session of its own that no other counts."""
        session = Session(self._model, method, self.seed, self._min_numel, False)
        return sketch.of(session.gradients(closure, 0))

    def state_dict(self) -> dict[str, Any]:
        """Seed, step and what the method learned."""
        learned = {} if self._tuner is None else {"learned": self._tuner.state_dict()}
        return {"seed": self.seed, "step": self.step, **learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, which must come from the same method."""
        expected = {"seed", "step"} | ({"learned"} if self._tuner is not None else set())
        if set(state) != expected:
            raise ValueError(f"{self.method.name} expects the keys {', '.join(sorted(expected))}; got {sorted(state)}")
        self.seed, self.step = int(state["seed"]), int(state["step"])
        if self._tuner is not None:
            self._tuner.load_state_dict(state["learned"])

    # ------------------------------------------------------------ report

    @property
    def tuner_seconds(self) -> float:
        """Time an adaptive method has spent deciding and measuring so far."""
        return 0.0 if self._tuner is None else self._tuner.seconds()

    def report(self) -> Report:
        """What was saved in the last forward, how it is stored, and why."""
        rows = tuple(row.finished() for row in self._rows)
        notes = []
        if not self._abilities.slots:
            notes.append(f"torch {torch.__version__} hides saved tensors: nothing was compressed")
        if self._abilities.sole is None:
            notes.append("torch hides storage owners: tensors were encoded as soon as they were saved")
        if self._without_data:
            notes.append(
                "tensors without data: bytes are those of a real run, if every tensor has the values its rule expects"
            )
        slow = {name: state for name, state in kernels.status().items() if not state.startswith("numba")}
        if self.tuner_seconds:
            notes.append(f"deciding and measuring took {1e3 * self.tuner_seconds:.1f} ms since the session began")
        if slow:
            notes.append(f"slow reference kernels served for {', '.join(slow)} ({next(iter(slow.values()))})")
        for place in dict.fromkeys(row.place for row in self._rows if row.place):
            away = sum(row.away for row in self._rows if row.place == place)
            notes.append(f"{size(away)} of packed values are {place}, not on the device, and not counted as stored")
        return Report(_describe(self.method), rows, tuple(notes))


OPENER = "opens_lowtide_session"
"""The attribute by which hooks of an attached model are known."""


def attached(model: nn.Module) -> bool:
    """Is any module of ``model`` attached?"""
    return any(getattr(h, OPENER, False) for m in model.modules() for h in capture.pre_hooks(m))


def new_session(
    model: nn.Module,
    method: str | Method | Codec | Plan,
    seed: int,
    min_numel: int,
    derive: bool,
    options: dict[str, Any],
) -> Session:
    """A session that is not open yet, for what a user named; raises if the arguments make no sense."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise ValueError("the model has no parameters, so there is no training memory to compress")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number; got {seed!r}")
    if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 0:
        raise ValueError(f"min_numel must be a whole number of at least 0; got {min_numel!r}")
    if not isinstance(derive, bool):
        raise TypeError(f"derive must be True or False; got {derive!r}")
    return Session(model, resolve(method, options), seed, min_numel, derive)


def _describe(method: Method) -> str:
    return repr(method).replace(type(method).__name__, method.name, 1)


def _nbytes(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return tensor.numel() * tensor.element_size()


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=1 << 16)
def _site_hash(site: Site) -> int:
    return _hash(str(site))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _rank() -> int:
    """Ranks must round independently, or averaging over them would not average the noise."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if ready else 0
