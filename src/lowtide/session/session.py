"""The lifetime of a compressed forward: what is asked, encoded and given back, and when."""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels, malloc
from ..codecs import FLOATS, Packed, Raw, TensorMeta
from ..graph import capture, shards
from ..graph.capture import Capture, Site, Slot
from ..graph.derive import Origin, origin_of
from ..graph.rules import Need, rule_for
from ..graph.weights import WEIGHTS, made_of_parameters
from ..policy.choice import Choice
from ..policy.methods import Method
from ..policy.plan import Plan
from ..policy.policy import Policy
from ..policy.scope import Scope
from ..policy.tuners.base import Probed, Tuner
from ..policy.use import Use
from ..report import UNKNOWN_OP, Report, size
from .handles import (
    Consumer,
    Encoded,
    Handle,
    Recast,
    Reference,
    Remade,
    Shape,
    boundary_consumer,
    holding,
    laid_out,
    roots_of,
)
from .ledger import RECAST, REMADE, SHAPE_ONLY, Entry, Ledger
from .memory import Memory
from .noise import forward_noise
from .norms import StillPacked, can_read, takes_codes
from .offload import Homes, device_of, fetch
from .packing import Packer
from .recomputing import Recomputed
from .replay import Sketch, gradients
from .streams import on_stream, refuse_graph_capture
from .watching import watch

_RECENT = 12
_RAW = Raw()
_SMALL_FACTOR = 1 << 16  # values; a factor that is copied for rebuilding, such as the weight of a norm, has no more
_MADE_AGAIN = "a checkpoint makes it again in backward, from what it keeps itself"
_BOUNDARY = "a checkpoint makes its region again from it, so noise reaches all of the region and every earlier layer"
_BY_DATA = "its memory was reached by .data, through which changes do not show"
_HALVES = (torch.bfloat16, torch.float16)
_STATE_FORMAT = 1


class Session:
    """A compressed forward; made by ``compress`` and ``attach``."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        seed: int,
        scope: Scope | None = None,
        memory: Memory | None = None,
        team: shards.Team | None = None,
    ) -> None:
        self.policy = policy
        self.seed = seed
        self.step = 0
        self._model = model
        self._scope = scope
        self._memory = Memory(policy) if memory is None else memory
        self._given_team = team
        self._team = team
        self._rebuilds = policy.rebuilds
        self._packer = Packer(policy, Homes(self._memory.orders))
        self._recomputed = Recomputed(model, policy.method.checkpoints)
        self._picking: set[str] = set()
        self._probing = False
        self._repeated: tuple[Callable[[], Tensor], int] | None = None
        self._abilities = capture.probe()
        self._sole = self._abilities.sole
        self._capture: Capture | None = None
        self._entered = 0
        self._thread = 0
        self._noise = 0
        self._forwards = 0
        self._begun = False
        self._by_hook = False  # was it opened by a forward of an attached model?
        self._exposed: dict[int, weakref.ref[Any]] = {}
        self._handles: dict[int, weakref.ref[Handle]] = {}
        self._recent: list[weakref.ref[Handle]] = []
        self._waiting: deque[weakref.ref[Handle]] = deque()
        self._left: list[tuple[weakref.ref[Handle], str | Site]] = []
        self._decoded: weakref.ref[Handle] | None = None
        self._handover = _Handover()
        self._reader: Callable[[Reference], Tensor] | None = None  # the unpack hook of this forward's slots
        self._ledger = Ledger()

    @property
    def method(self) -> Method:
        """The method that decides."""
        return self.policy.method

    # ------------------------------------------------------------ lifetime

    def __enter__(self) -> Session:
        if self._entered:
            raise RuntimeError("this session is already open; make another with lowtide.compress()")
        self.step = self._memory.next_step()
        self._by_hook = False
        self._open()
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _open(self) -> None:
        refuse_graph_capture()
        if not self._abilities.slots:
            warnings.warn(
                f"lowtide cannot reach saved tensors in torch {torch.__version__}; nothing is compressed",
                stacklevel=3,
            )
        self._memory.doubts.hear()
        self._look_again()  # for a forward whose backward comes later
        self._ledger.clear()
        self._packer.clear()
        self._forget()
        self._team = self._given_team or shards.team_of(self._model)
        if self.policy.tuner is not None:
            self._tune(self.policy.tuner)
        self._capture = Capture(
            *(self._model, self._visit, self._settle, self._start_forward, self._expose, self._meet_foreign),
            *(self.policy.twin, self._rebuilds),
        )
        self._capture.picking = self._picking
        self._reader = self._unpack
        self._begun = False
        self._number_forward(1)
        self._capture.__enter__()
        self._entered = 1
        self._thread = threading.get_ident()
        self._recomputed.open()

    def _tune(self, tuner: Tuner) -> None:
        """Let the method's tuner decide; ranks that work on the same samples do as the first of them."""
        measured = tuner.measuring
        tuner.begin(self.step)
        if measured != tuner.measuring:  # steps of another kind begin
            malloc.settle()
        if self._team is not None:
            tuner.load_state_dict(self._team.agreed(tuner.state_dict()))

    def _close(self) -> None:
        """Stop watching; encode what nobody holds, and note what somebody does."""
        self._entered = 0
        self._recomputed.close()
        if self._capture is not None:
            try:
                self._capture.finish()
            finally:
                self._capture.__exit__(None, None, None)
                self._capture = self._reader = None  # they refer to us: a cycle would wait for the garbage collector
        for reference in (*self._recent, *self._waiting):
            handle = reference()
            if handle is not None and not self._settled(reference) and handle.raw is not None:
                if handle.entry.kept is None:
                    self._left.append((reference, handle.entry.why))
                handle.entry.left()
                handle.mask = None  # found again if need be, which may never come
        self._ledger.close()
        self._forget()
        if self.policy.tuner is not None and self.policy.tuner.measuring:
            malloc.settle()

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
            self._by_hook = True
            if self._repeated is not None and self.step % self._repeated[1] == 0:
                self.adapt(self._repeated[0])
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

    def _forget(self) -> None:
        self._exposed.clear()
        self._handles.clear()
        self._recent.clear()
        self._waiting.clear()
        self._decoded = None

    def _meet_foreign(self) -> None:
        """A module of another model begins: close if an interrupt, after which torch calls no hooks, left us open."""
        if self._by_hook and not capture.calls_on_stack(self._model):
            self._close()

    def _start_forward(self) -> None:
        """The model's forward begins: the first of the session, unless something was saved before it."""
        self._number_forward(self._forwards + (self._begun or bool(self._ledger.entries)))
        self._begun = True

    def _number_forward(self, number: int) -> None:
        """Each forward of the model draws its own noise and counts its sites from zero."""
        assert self._capture is not None
        self._forwards = number
        self._capture.restart()
        rank = shards.own_rank() if self._team is None else self._team.rank
        self._noise = forward_noise(self.seed, self.step, number, rank)

    # ------------------------------------------------------------ forward

    def _visit(self, slot: Slot) -> None:
        """Decide about one newly saved tensor that is not a parameter."""
        tensor, storage = slot.tensor, slot.storage
        mask = vars(slot.node).pop("mask", None) if slot.twin else None
        if tensor is None:
            made_again = capture.region_of(slot.saved) is not None
            self._ledger.held(slot.site, _MADE_AGAIN if made_again else "held by other saved-tensor hooks")
            return
        if storage is None:
            self._keep_odd(slot.site, tensor)
            return
        identity = capture.storage_id(storage)
        if self._scope is not None and (outside := self._scope.reason(slot.site.module)) is not None:
            self._count(slot, identity, outside, kept=True)
            return
        if capture.is_lazy(tensor):
            self._count(slot, identity, "a conjugate or a negative that torch has not computed yet", kept=True)
            return
        if self._exposed and identity in self._exposed and self._exposed[identity]() is storage:
            self._count(slot, identity, _BY_DATA, kept=True)
            return
        if slot.boundary is not None:
            self._store_boundary(slot, identity)
            return
        if tensor.dtype in _HALVES and self._recast(slot, identity):
            return
        if (slot.site.op, slot.site.slot) in WEIGHTS and self._remake(slot, identity):
            return
        try:
            rule = rule_for(slot)
            lossless = None if rule is None or rule.codec is None else rule.codec(slot)
        except Exception as error:  # whatever a node says that no rule foresaw: exact, and listed
            self._count(slot, identity, f"could not be judged: {type(error).__name__}: {error}", kept=True)
            return
        if rule is None:
            inside = slot.site.op == "CompiledFunction"
            why = "saved by a compiled graph: lowtide.compile packs inside it" if inside else UNKNOWN_OP
            self._count(slot, identity, why, kept=True)
            return
        need, otherwise = rule.need, Need.LOSSLESS
        if lossless is not None:
            if lossless == SHAPE_ONLY:
                self._count(slot, identity, rule.why, needs_values=False)
                shape = Shape(tensor)
                self._handover.hook(slot, shape, Shape.unpack)
                return
            need, otherwise = Need.LOSSLESS, Need.LOSSLESS if rule.otherwise is None else rule.otherwise
        elif need is Need.EXACT:
            self._count(slot, identity, rule.why, kept=True)
            return
        elif need is Need.LOSSLESS or tensor.dtype not in FLOATS:
            why = f"{str(tensor.dtype).removeprefix('torch.')} values are kept exactly"
            self._count(slot, identity, why, kept=True)
            return
        meta, offset = _meta_of(tensor.shape, tensor.stride(), tensor.dtype), tensor.storage_offset()
        sharing = 0 if rule.sharing is None else rule.sharing(slot)
        consumer = Consumer(
            slot.site, need, rule.spatial, rule.rectified, lossless, meta, offset, sharing, otherwise=otherwise
        )
        self._store(slot, identity, consumer, rule.why, mask)

    def _store_boundary(self, slot: Slot, identity: int) -> None:
        """Keep what a checkpoint keeps. It is read once, whole, and everything in the region follows from it."""
        tensor, boundary = slot.tensor, slot.boundary
        assert boundary is not None
        exact = boundary.exact
        if exact is None and tensor.dtype not in FLOATS:
            exact = f"{str(tensor.dtype).removeprefix('torch.')} values are kept exactly"
        if exact is not None:
            self._count(slot, identity, exact, kept=True)
            return
        self._store(slot, identity, boundary_consumer(slot.site, tensor, boundary.codec), _BOUNDARY)

    def _keep_odd(self, site: Site, tensor: Tensor) -> None:
        """Note a tensor without a plain storage of its own; one of the model's own sparse ones costs nothing."""
        values = capture.strided_parts(tensor)[0]
        storage = None if values is tensor or not capture.has_storage(values) else values.untyped_storage()
        if storage is None or not self._is_static(storage):
            self._ledger.add_odd(site, tensor)

    def _store(self, slot: Slot, identity: int, consumer: Consumer, why: str, mask: Tensor | None = None) -> None:
        """Hook the slot to the handle of its storage; ``mask`` is what :data:`SIGN` would keep of the tensor."""
        tensor, meta = slot.tensor, consumer.view
        handle = self._pending(identity)
        if (
            handle is not None
            and handle.version == capture.version_of(tensor)
            and handle.consumers[0].view.dtype is meta.dtype
        ):
            self._ledger.shared(slot.site, meta, handle.entry.site)
        else:
            numel = tensor.numel()
            total = slot.storage.nbytes() // meta.dtype.itemsize
            if self.policy.ignores(numel, total):
                self._count(slot, identity, "small", kept=True)
                return
            if handle is None and self._ledger.known(slot.storage) is None:
                entry = self._ledger.add(slot.site, meta, slot.storage, why, by_handle=True)
            else:
                entry = self._count(slot, identity, why, by_handle=True, meta=meta)
            whole = capture.base_of(tensor) if numel != total else None
            base = None if whole is None else TensorMeta.of(whole)
            handle = Handle(tensor.detach(), identity, base, total, self._noise, entry)
            handle.mask = mask if numel == total else None
            if self._rebuilds:
                self._trace(handle, tensor)
            reference = weakref.ref(handle)
            self._handles[identity] = reference
            self._recent.append(reference)
        handle.consumers.append(consumer)
        if consumer.lossless is None and not slot.twin:
            handle.readers += 1
        light = Reference(handle, meta, consumer.offset, consumer.lossless, slot.twin)
        light.norm = takes_codes(slot)
        if self._rebuilds and not consumer.boundary:
            slot.remember(light)
        tuner = self.policy.tuner
        unpack = self._reader
        assert unpack is not None
        need = consumer.need if consumer.lossless is None else consumer.otherwise
        if tuner is not None and need is not Need.LOSSLESS and not consumer.boundary:
            unpack = watch(slot, consumer._replace(need=need), light, tuner, unpack)
        self._handover.hook(slot, light, unpack)
        if self._sole is None:
            self._seal(handle)

    def _expose(self, storage: Any) -> None:
        """Leave a storage to autograd, because ``.data`` may change it from now on without a trace."""
        if self._is_static(storage):
            return
        identity = capture.storage_id(storage)
        self._exposed[identity] = weakref.ref(storage)
        handle = self._pending(identity)
        if handle is not None and handle.is_source:
            handle.move()
            del self._handles[identity]
        elif handle is not None:
            handle.pin(_BY_DATA)

    def _trace(self, handle: Handle, tensor: Tensor) -> None:
        """Find out how to rebuild a tensor, and let others be rebuilt from it."""
        base = capture.base_of(tensor)
        whole = tensor if base is None else base
        if whole.numel() == handle.numel and capture.is_as_made(whole):
            capture.remember_holder(whole, handle)
            handle.origin = self._origin(whole)

    def _origin(self, whole: Tensor) -> Origin | None:
        """How to rebuild a tensor that fills its storage from those already stored, which are laid out as it is."""
        form = (whole.shape, whole.stride())

        def held(node: Any) -> Reference | None:
            handle = capture.holder_of(node)
            return None if handle is None else holding(handle, form)

        origin = origin_of(whole, capture.stands_for, held)
        if origin is None:
            return None
        terms = [laid for term in origin.terms if (laid := laid_out(term, form, _SMALL_FACTOR)) is not None]
        handles = [source.handle for source in origin.sources if isinstance(source, Reference)]
        if len(terms) < len(origin.terms) or any(handle.pinned is not None for handle in handles):
            return None  # some source is laid out otherwise, or reached by ``.data``, so that it may have changed
        roots = [id(root) for handle in handles for root in roots_of(handle)]
        if len(set(roots)) < len(roots):
            return None  # the square of a rounded value is biased by the rounding's variance
        for handle in handles:
            handle.is_source = True
        return origin._replace(terms=tuple(terms))

    def _is_static(self, storage: Any) -> bool:
        """Does the storage belong to the model?"""
        return self._capture is not None and self._capture.owns(storage)

    def _pending(self, identity: int) -> Handle | None:
        """The handle whose storage this is. Its raw tensor keeps the storage, so the identity holds."""
        reference = self._handles.get(identity)
        handle = reference() if reference is not None else None
        return None if handle is None or handle.raw is None else handle

    def _recast(self, slot: Slot, identity: int) -> bool:
        found = capture.parameter_behind_cast(slot.tensor)
        if found is None:
            return False
        entry = self._count(slot, identity, "autocast's copy of a parameter: cast again when needed")
        recast = Recast(found[0], found[1], slot.tensor, self._memory.doubts)
        self._handover.hook(slot, recast, Recast.unpack)
        if entry.site is slot.site:
            entry.compressed(0, RECAST)
        return True

    def _remake(self, slot: Slot, identity: int) -> bool:
        site, memory = slot.site, self._memory
        if site in memory.refuted:
            self._count(slot, identity, "kept exactly: made again, it once came out otherwise", kept=True)
            return True
        made = made_of_parameters(slot.tensor) if self._pending(identity) is None else None
        if made is None:
            return False
        if made.same is not None:
            # A device is waited for in the first forward alone. What it says later is looked at in a later forward.
            if made.same.device.type == "cpu" or site not in memory.remade:
                memory.remade[site] = bool(made.same)
            elif memory.remade[site]:
                memory.doubts.ask(made.same, partial(_refute, site, memory.refuted))
            if not memory.remade[site]:
                return False
        entry = self._count(slot, identity, "a weight made of parameters: made again when needed", needs_values=False)
        remade = Remade(made, slot.tensor, self._memory.doubts)
        self._handover.hook(slot, remade, Remade.unpack)
        if entry.codecs == (SHAPE_ONLY,):
            entry.compressed(0, REMADE)
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
    ) -> Entry:
        """The entry that carries the bytes of this slot's storage, made if there is none yet.

        A storage that gets a handle is found through it; others are remembered by a weak reference. ``kept``
        says that the slot gets no hook, so that autograd keeps the storage as it is.
        """
        handle = self._pending(identity)
        entry = self._ledger.known(slot.storage) if handle is None else handle.entry
        meta = meta or _meta_of(slot.tensor.shape, slot.tensor.stride(), slot.tensor.dtype)
        if entry is None:
            entry = self._ledger.add(slot.site, meta, slot.storage, why, kept=kept, by_handle=by_handle)
            if not needs_values:
                entry.compressed(0, SHAPE_ONLY)
            return entry
        self._ledger.shared(slot.site, meta, entry.site)
        if needs_values and entry.codecs in ((SHAPE_ONLY,), (REMADE,)):
            entry.exact(why)
        if kept:
            entry.kept = f"{slot.site.op}.{slot.site.slot} keeps it: {why}"
        return entry

    # ------------------------------------------------------------ encoding

    def _settle(self) -> None:
        """After each torch call: encode what the call's end left to the graph alone."""
        if self._recent:
            sole, owners, still = self._sole, capture.use_count, []
            for reference in self._recent:
                handle = reference()
                if handle is None or handle.raw is None:
                    continue
                if sole is not None and owners(handle.identity) > sole:
                    still.append(reference)
                else:
                    self._seal(handle)
            self._recent = still
            if len(still) > _RECENT:
                self._waiting.append(still.pop(0))
        for _ in range(min(2, len(self._waiting))):
            reference = self._waiting.popleft()
            if not self._settled(reference):
                self._waiting.append(reference)

    def _settled(self, reference: weakref.ref[Handle]) -> bool:
        """Encode if only the graph owns the storage; True if there is nothing left to wait for."""
        handle = reference()
        if handle is not None and handle.raw is not None:
            if self._sole is not None and capture.use_count(handle.identity) > self._sole:
                return False
            self._seal(handle)
        return True

    def _look_again(self, reader: Handle | None = None) -> None:
        """Encode what somebody still held when the forward ended and has let go since; not what is read just now."""
        left, self._left = self._left, []
        for reference, why in left:
            handle = reference()
            if handle is None or handle is reader or handle.raw is None:
                continue
            if self._sole is None or capture.use_count(handle.identity) <= self._sole:
                handle.entry.exact(str(why))
                self._seal(handle)

    def _picks_in(self, module: str) -> bool:
        """Did the module of this path, or one inside it, pick values by their order or size in this session?

        If such a module runs again on other values, it may pick others: its experts may get other numbers of rows.
        """
        return any(not module or path == module or path.startswith(f"{module}.") for path in self._picking)

    def _seal(self, handle: Handle) -> None:
        """Encode a storage that nobody changed since it was saved; if somebody did, reading it will complain."""
        raw = handle.raw
        if raw is not None and capture.version_of(raw) == handle.version:
            for i, consumer in enumerate(handle.consumers):
                if consumer.boundary and self._picks_in(consumer.site.module):
                    handle.consumers[i] = consumer._replace(codec=_RAW)
            with on_stream(raw, handle.stream), capture.beside_selective():
                self._packer.seal(handle, raw)
        handle.mask = None

    # ------------------------------------------------------------ backward

    def _unpack(self, reference: Reference) -> Tensor:
        handle = reference.handle
        if self._left:
            self._look_again(handle)
        raw = handle.raw
        if raw is not None:
            return reference.read(raw)
        encoded = handle.encoded.get(None)
        if reference.twin:
            less = reference.for_twin(encoded or handle.encoded[(reference.meta, reference.offset)])
            if less is not None:
                return less
        if encoded is not None and reference.norm and (codes := self._codes_of(reference, encoded)) is not None:
            self._let_go()
            handle.readers -= 1
            return StillPacked.of(codes)
        if encoded is not None:
            pack = encoded.packs.get(reference.lossless) if reference.lossless is not None else None
            return reference.view(self._decode(handle, encoded) if pack is None else pack.decode())
        encoded = handle.encoded[(reference.meta, reference.offset)]
        packed = encoded.read_by(reference.lossless)
        assert packed is not None
        return packed.decode(encoded.support)

    def _codes_of(self, reference: Reference, encoded: Encoded) -> Packed | None:
        """What a batch norm's backward can read in place of its input, if it is the only reader left."""
        handle, packed = reference.handle, encoded.values
        if handle.readers > 1 or handle.decoded is not None or encoded.support is not None:
            return None
        if not isinstance(packed, Packed) or packed.meta != reference.meta or reference.offset:
            return None
        readable = can_read(packed.codec, packed.meta, device_of(packed).type)
        return fetch(packed) if readable and capture.is_ordinary_backward() else None

    def _decode(self, handle: Handle, encoded: Encoded) -> Tensor:
        """Decode; keep the result while the next reader may be the same handle's (q, k and v)."""
        decoded = handle.decoded
        self._let_go()
        if decoded is None:
            assert encoded.values is not None
            decoded = encoded.values.decode(encoded.support)
        handle.readers -= 1
        if handle.readers > 0:
            handle.decoded = decoded  # dies with the graph, if nobody comes for it
            self._decoded = weakref.ref(handle)
        return decoded

    def _let_go(self) -> None:
        """Keep no decoded tensor any longer: somebody reads another one."""
        last = self._decoded() if self._decoded is not None else None
        if last is not None:
            last.decoded = None
        self._decoded = None

    # ------------------------------------------------------------ probes

    @property
    def chosen(self) -> dict[Use, Choice]:
        """What the last forward did to each tensor whose values may be approximated, by what was known of it."""
        return dict(self._packer.chosen)

    def plan(self) -> Plan:
        """What the last forward did, as a plan that can be saved and run again.

        Each tensor is listed at every site that saved it. Masks, indices and shapes are not listed, because every
        method keeps them losslessly, and neither are small tensors.
        """
        choices = {site: choice for use, choice in self._packer.chosen for site in use.sites}
        return Plan(choices, str(self.method), self.method.checkpoints)

    def ambiguous(self) -> set[Site]:
        """Sites that several forwards of the session saved and that were treated differently; a plan has the last."""
        first: dict[Site, Choice] = {}
        pairs = [(site, choice) for use, choice in self._packer.chosen for site in use.sites]
        return {site for site, choice in pairs if first.setdefault(site, choice) != choice}

    @property
    def adapts(self) -> bool:
        """Does its method learn from one step for the next?"""
        return self.policy.tuner is not None

    def gradients(self, closure: Callable[[], Tensor], step: int) -> dict[str, Tensor]:
        """Gradients by parameter name from a compressed forward on the side, rounded as ``step`` rounds.

        Like :func:`replay.gradients` it disturbs nothing, nor the count of steps. An adaptive method learns from it
        as from any other step.
        """

        def inside() -> Tensor:
            self.step, self._by_hook = step, False
            self._open()
            try:
                return closure()
            finally:
                self._close()

        found = gradients(self._model, inside)
        self._memory.doubts.hear(wait=True)
        return found

    def beside(
        self,
        *,
        plan: Plan | None = None,
        seed: int | None = None,
        share: float = 1.0,
        spared: Iterable[Use] = (),
        stored: Iterable[Use] | None = None,
    ) -> Session:
        """Another session on the same model, for probes: run it with :meth:`gradients`.

        It follows ``plan``, or else decides as this one does now, for a part ``share`` of its samples. Tensors that
        are ``spared`` stay exact, and with ``stored`` all that are not among those. So "what if this tensor alone
        were exact" and "what if it alone were not" are asked in one way.
        """
        own = self.policy
        policy = own.like(self._model, share) if plan is None else own.following(plan, self._model)
        spared, stored = tuple(spared), None if stored is None else tuple(stored)
        if spared or stored is not None:
            policy.spare(spared, stored)
        return Session(self._model, policy, self.seed if seed is None else seed, self._scope, team=self._given_team)

    def adapt(self, closure: Callable[[], Tensor]) -> None:
        """Measure what rounding each tensor does to the gradient, and let the method decide anew.

        ``closure`` runs the forward on a batch of your choice, best a small one, and returns the loss. One exact pass,
        then one more for each stored tensor; gradients are compared by sketches, none is kept. Weights, buffers,
        ``.grad`` and random states are as before.
        """
        tuner = self.policy.tuner
        if not isinstance(tuner, Probed):
            raise TypeError(f"method {self.method.name!r} does not adapt to probes; use 'gact' or 'auto'")
        if not tuner.ready:
            raise RuntimeError(f"{self.method.name} measures its options in a first step; run one before adapt()")
        if self._entered:
            raise RuntimeError("adapt() runs forwards of its own; call it between steps, not inside the session")
        sketch = Sketch(self._model)
        found = []
        with tuner.timed(), self.aside():
            survey = self.beside(plan=Plan())
            exact = sketch.of(survey.gradients(closure, 0))
            for use in {use.sites[0]: use for use in survey.chosen}.values():
                trial = None if use.boundary else tuner.trial(use)
                if trial is None:
                    continue
                alone = self.beside(plan=Plan({use.sites[0]: trial}))
                change = sketch.of(alone.gradients(closure, 0)) - exact
                square = float(change.square().sum(dtype=torch.float64))
                found.append((use, square if math.isfinite(square) else math.inf))
        tuner.measured(found)

    def adapt_every(self, closure: Callable[[], Tensor], steps: int | None) -> None:
        """Repeat :meth:`adapt` before every so many steps of an attached model; None ends it."""
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ValueError(f"every must be a whole number of at least 1; got {steps!r}")
        self._repeated = None if steps is None else (closure, steps)

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

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Format, method, seed, step and what the method learned: plain data, fit for JSON."""
        self._memory.doubts.hear(wait=True)
        state = {"format": _STATE_FORMAT, "method": str(self.method), "seed": self.seed, "step": self.step}
        tuner = self.policy.tuner
        return state if tuner is None else {**state, "learned": tuner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, which must come from the same method with the same options."""
        tuner = self.policy.tuner
        if not isinstance(state, Mapping) or state.get("format") != _STATE_FORMAT:
            raise ValueError(f"expected a state of format {_STATE_FORMAT}, as state_dict() gives it; got {state!r:.80}")
        if state.get("method") != str(self.method):
            raise ValueError(f"this state is of {state.get('method')}, and here {self.method} is at work")
        expected = {"format", "method", "seed", "step"} | (set() if tuner is None else {"learned"})
        if set(state) != expected:
            raise ValueError(f"{self.method.name} expects the keys {', '.join(sorted(expected))}; got {sorted(state)}")
        for key in ("seed", "step"):
            if type(state[key]) is not int:
                raise ValueError(f"{key} must be a whole number; got {state[key]!r}")
        if tuner is not None:
            before = tuner.state_dict()
            try:
                tuner.load_state_dict(state["learned"])
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                tuner.load_state_dict(before)
                kind = type(error).__name__
                raise ValueError(
                    f"what {self.method.name} learned cannot be read from this state: {kind}: {error}"
                ) from error
        self.seed, self.step = state["seed"], state["step"]
        self._memory.step = self.step

    # ------------------------------------------------------------ report

    @property
    def tuner_seconds(self) -> float:
        """Time an adaptive method has spent deciding and measuring so far."""
        tuner = self.policy.tuner
        return 0.0 if tuner is None else tuner.seconds()

    def report(self) -> Report:
        """What was saved in the last forward, how it is stored, and why."""
        self._memory.doubts.hear(wait=True)
        notes = []
        if not self._abilities.slots:
            notes.append(f"torch {torch.__version__} hides saved tensors: nothing was compressed")
        if self._abilities.sole is None:
            notes.append("torch hides storage owners: tensors were encoded as soon as they were saved")
        if self._packer.without_data:
            notes.append(
                "tensors without data: bytes are those of a real run, if every tensor has the values its rule expects"
            )
        if self.tuner_seconds:
            notes.append(f"deciding and measuring took {1e3 * self.tuner_seconds:.1f} ms since the session began")
        ran = kernels.served()
        for device, operators in ran.items():
            slow = {name: by for name, by in operators.items() if by.startswith("reference")}
            if slow:
                reason = next(iter(slow.values()))
                notes.append(f"slow reference kernels ran on {device} for {', '.join(slow)} ({reason})")
        for place, nbytes in self._ledger.away():
            notes.append(f"{size(nbytes)} of packed values are {place}, not on the device, and not counted as stored")
        notes += self.method.notes(self.plan())
        twice = self.ambiguous()
        if twice:
            notes.append(
                f"{len(twice)} sites were treated differently in several forwards; a plan has what the last did"
            )
        return Report(str(self.method), self._ledger.finished(), tuple(notes), ran)


class _Handover:
    """The pack hook of every slot: it gives what it is told. A hook of its own for each would live until backward.

    Python looks at all objects again when a quarter as many new ones have lived on, and a step makes thousands.
    """

    __slots__ = ("_light",)

    def __init__(self) -> None:
        self._light: Any = None

    def hook(self, slot: Slot, light: Any, unpack: Callable[[Any], Tensor]) -> None:
        """Let ``light`` replace the slot's tensor now, and ``unpack`` give that back to backward."""
        self._light = light
        try:
            slot.saved.register_hooks(self, unpack)
        finally:
            self._light = None

    def __call__(self, _: Tensor) -> Any:
        return self._light


@lru_cache(maxsize=4096)
def _meta_of(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> TensorMeta:
    """One object for all tensors of a form, where ``TensorMeta.of`` makes one for each: few live until backward."""
    return TensorMeta(shape, stride, dtype)


def _refute(site: Site, refuted: set[Site]) -> None:
    refuted.add(site)
    warnings.warn(
        f"the weight that {site} saved is made again in backward. It came out the same in its first forward, and in a "
        "later one it did not: gradients since then may be off. lowtide keeps it exactly from now on",
        stacklevel=2,
    )
