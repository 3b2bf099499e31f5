"""A session that changes nothing and notes when each saved tensor would be encoded, and when backward reads it."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from torch import Tensor, nn

from ..codecs import TensorMeta
from ..graph import capture
from ..graph.capture import Site, Slot
from ..graph.derive import Affine
from ..policy.choice import Choice
from ..policy.methods import Method
from ..policy.policy import Policy
from ..policy.use import Use
from ..session.handles import SIGN, Handle, Recast, Reference, Remade, Shape, sources_of
from ..session.replay import leaves_of
from ..session.session import Session
from .recorder import SAVED, TRANSIENT, Live, Recorder


@dataclasses.dataclass(frozen=True)
class _KeepAll(Method):
    name = "observe"
    rebuilds = True

    def choose(self, use: Use) -> Choice:
        return Choice.keep("observed")


@dataclasses.dataclass
class Seen:
    """A saved tensor, all of a storage or a stretch of it, as a step showed it."""

    block: Live
    sites: tuple[Site, ...]
    meta: TensorMeta
    use: Use | None
    """What its consumers need of its values; None if masks, indices or its shape are enough."""
    lossless_nbytes: int
    """Of the masks and indices that a session stores in any case."""
    terms: int
    """How many terms it is the sum of, if it can be rebuilt."""
    in_one_pass: bool
    """Is it rebuilt while its source is decoded?"""
    sealed: int
    reads: list[list[int]]
    """The first and the last moment of each time that backward reads it."""
    bit_reads: list[list[int]] = dataclasses.field(default_factory=list)
    """Those of them that take packed bits, had it been stored, so that nothing is decoded."""
    code_reads: list[list[int]] = dataclasses.field(default_factory=list)
    """Those of them that take codes as they are, if a kernel can read them."""
    transient: bool = True
    """Does backward need memory of its size to read it, had it been stored?"""


class ObservedSession(Session):
    """Leaves every tensor to the graph, as plain autograd does, and lists all that a plan could decide about."""

    def __init__(self, model: nn.Module, recorder: Recorder, min_numel: int) -> None:
        super().__init__(model, Policy(_KeepAll(), model, min_numel, derive=False), seed=0)
        self.seen: list[Seen] = []
        self.modules: dict[int, str] = {}
        """By the numbers of nodes, the modules that made them."""
        self.at_work: dict[str, list[int]] = {}
        """By module, the first and the last moment at which nodes of it were at work in backward."""
        self._recorder = recorder
        self._anchors: dict[int, weakref.WeakSet[_Anchor]] = {}
        self._reads: dict[Site, list[list[int]]] = {}
        self._takes_bits: dict[Site, TensorMeta] = {}
        self._takes_codes: dict[Site, TensorMeta] = {}
        self._unsealed: list[weakref.ref[_Anchor]] = []

    def where(self) -> str:
        """The module at work, in the forward by its path, in backward by the node that it left."""
        number = capture.node_at_work()
        if number >= 0:
            module = self.modules.get(number)
            if module is not None:
                now = self._recorder.time + 1  # the moment of what this operator makes, or of what is read now
                self.at_work.setdefault(module, [now, now])[1] = now
            return module or ""
        return "" if self._capture is None else self._capture.path

    def _visit(self, slot: Slot) -> None:
        self.modules.setdefault(slot.number, slot.site.module)
        if slot.tensor is not None and slot.storage is not None:
            block = self._recorder.block_of(slot.storage)
            if block is not None and block.role == TRANSIENT:
                block.role = SAVED
                block.label = str(slot.site)
            slot = slot._replace(saved=_Spy(self, slot))
        super()._visit(slot)

    def hooked(self, slot: Slot, light: Any) -> tuple[Any, Any]:
        """What a slot gets in place of what the session wanted to give it: the tensor itself, and reads that are noted.

        A reference reads the tensor that its handle keeps. What stands for a shape or a cast keeps the tensor by an
        anchor, because plain autograd would, and the anchor does not count as an owner.
        """
        reads: list[list[int]] = []
        self._reads[slot.site] = reads
        slot.watch_end(lambda: self._end(reads))
        if isinstance(light, Reference):
            if light.twin and light.lossless == SIGN:
                self._takes_bits[slot.site] = light.meta
            if light.norm:
                self._takes_codes[slot.site] = light.meta
            return light, lambda kept: self._read(reads, super(ObservedSession, self)._unpack(kept))
        anchor = _Anchor(slot, isinstance(light, (Recast, Remade)))
        identity = capture.storage_id(slot.storage)
        self._anchors.setdefault(identity, weakref.WeakSet()).add(anchor)
        self._unsealed.append(weakref.ref(anchor))
        return anchor, lambda kept: self._read(reads, kept.tensor)

    def _read(self, reads: list[list[int]], tensor: Tensor) -> Tensor:
        self.where()
        now = self._recorder.tick()
        reads.append([now, now])
        return tensor

    def _end(self, reads: list[list[int]]) -> None:
        if reads:
            reads[-1][1] = max(reads[-1][1], self._recorder.time)

    def _owned_by_others(self, identity: int) -> bool:
        anchors = self._anchors.get(identity)
        sole = 0 if self._sole is None else self._sole
        return capture.use_count(identity) > sole + (0 if anchors is None else len(anchors))

    def _settle(self) -> None:
        still = []
        for reference in self._recent:
            handle = reference()
            if handle is not None and handle.raw is not None:
                if self._owned_by_others(handle.identity):
                    still.append(reference)
                else:
                    self._seal(handle)
        self._recent = still
        self._unsealed = [reference for reference in self._unsealed if not self._anchored(reference)]

    def _settled(self, reference: weakref.ref[Handle]) -> bool:
        handle = reference()
        if handle is not None and handle.raw is not None:
            if self._owned_by_others(handle.identity):
                return False
            self._seal(handle)
        return True

    def _anchored(self, reference: weakref.ref[_Anchor]) -> bool:
        """Note a tensor that nobody but anchors owns; True if there is nothing left to wait for."""
        anchor = reference()
        if anchor is None:
            return True
        identity = capture.storage_id(anchor.tensor.untyped_storage())
        if self._pending(identity) is not None:
            return True  # the handle of the storage speaks for it
        alone = 1 if self._sole is None else self._sole  # the count of a storage that one tensor has
        if capture.use_count(identity) > alone - 1 + len(self._anchors[identity]):
            return False
        self._note_anchor(anchor)
        return True

    def _close(self) -> None:
        super()._close()
        for reference in self._unsealed:
            self._anchored(reference)
        self._unsealed.clear()

    def _note_anchor(self, anchor: _Anchor) -> None:
        block = self._recorder.block_of(anchor.tensor.untyped_storage())
        if block is None or any(seen.block is block for seen in self.seen):
            return
        reads = self._reads[anchor.site]
        seen = Seen(
            *(block, (anchor.site,), TensorMeta.of(anchor.tensor), None, 0, 0, False),
            *(self._recorder.tick(), reads, [], [], anchor.is_cast),
        )
        self.seen.append(seen)

    def _seal(self, handle: Handle) -> None:
        raw = handle.raw
        if raw is None or capture.version_of(raw) != handle.version:
            return
        block = self._recorder.block_of(raw.untyped_storage())
        if block is None:
            return
        now = self._recorder.tick()
        for key, meta, _, consumers in handle.extents():
            use, lossless = self._packer.asked(meta, consumers, sources_of(handle) if key is None else None)
            origin = handle.origin if use is not None and use.sources else None
            self.seen.append(
                Seen(
                    block=block,
                    sites=tuple(consumer.site for consumer in consumers),
                    meta=meta,
                    use=use,
                    lossless_nbytes=sum(codec.packed_nbytes(meta) for codec in lossless),
                    terms=0 if origin is None else len(origin.terms),
                    in_one_pass=origin is not None and all(isinstance(t.make, Affine) for t in origin.terms),
                    sealed=now,
                    reads=[],
                )
            )

    def finish(self) -> None:
        """After backward: join the reads of all sites of a tensor, in the order of time."""
        for seen in self.seen:
            if not seen.reads:
                seen.reads = sorted(read for site in seen.sites for read in self._reads.get(site, ()))
                bits = [site for site in seen.sites if self._takes_bits.get(site) == seen.meta]
                seen.bit_reads = sorted(read for site in bits for read in self._reads.get(site, ()))
                norms = [site for site in seen.sites if self._takes_codes.get(site) == seen.meta]
                seen.code_reads = sorted(read for site in norms for read in self._reads.get(site, ()))


@dataclasses.dataclass
class Called:
    """A call of a module in the forward, as a step showed it."""

    path: str
    first: int
    """The moment before its first operator."""
    elapsed: float
    versions: list[tuple[Tensor, int]]
    last: int = -1
    inputs: tuple[Live, ...] = ()
    outputs: tuple[Live, ...] = ()
    is_pure: bool = False
    """Did it leave what it was given as it was? Only then can it run again."""


class Calls:
    """Notes each call of a module of ``model`` while it is open.

    By hooks on the modules themselves: torch does not forget that a global hook wanted keyword arguments.
    """

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self.done: list[Called] = []
        self._recorder = recorder
        self._paths = {module: path for path, module in model.named_modules() if path}
        self._open: list[tuple[nn.Module, Called]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> Calls:
        for module in self._paths:
            self._hooks.append(module.register_forward_pre_hook(self._enter))
            self._hooks.append(module.register_forward_hook(self._leave, with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        versions = [(x, capture.version_of(x)) for x in leaves_of(args) if isinstance(x, Tensor)]
        recorder = self._recorder
        self._open.append((module, Called(self._paths[module], recorder.time, recorder.elapsed, versions)))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if not self._open or self._open[-1][0] is not module:
            return
        _, called = self._open.pop()
        called.last = self._recorder.time
        called.elapsed = self._recorder.elapsed - called.elapsed
        called.inputs, called.outputs = self._known((args, kwargs)), self._known(result)
        called.is_pure = all(capture.version_of(x) == version for x, version in called.versions)
        called.versions = []
        self.done.append(called)

    def _known(self, found: Any) -> tuple[Live, ...]:
        """The storages of all tensors in it, each once."""
        tensors = [leaf for leaf in leaves_of(found) if isinstance(leaf, Tensor) and capture.has_storage(leaf)]
        lives = [self._recorder.block_of(storage) for x in tensors if (storage := capture.storage_of(x)) is not None]
        return tuple({id(live): live for live in lives if live is not None}.values())


class _Anchor:
    """Keeps a tensor of which a session would keep only the shape, or nothing."""

    __slots__ = ("__weakref__", "is_cast", "site", "tensor")

    def __init__(self, slot: Slot, is_cast: bool) -> None:
        self.tensor: Tensor = slot.tensor.detach()
        self.site = slot.site
        self.is_cast = is_cast


class _Spy:
    """Stands for the holder of a slot, and lets the observer have its way with the hooks."""

    def __init__(self, session: ObservedSession, slot: Slot) -> None:
        self._session = session
        self._slot = slot

    def register_hooks(self, pack: Any, unpack: Any) -> None:
        """As a session calls it."""
        light = pack(self._slot.tensor)
        assert isinstance(light, (Reference, Recast, Remade, Shape))
        kept, read = self._session.hooked(self._slot, light)
        self._slot.saved.register_hooks(lambda _: kept, read)
