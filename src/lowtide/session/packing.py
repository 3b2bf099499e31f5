"""Carrying out choices: a storage is encoded, moved or left to be rebuilt once nobody but the graph owns it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..codecs import Codec, NotRepresentable, Packed, Raw, TensorMeta
from ..codecs.base import form_of
from ..graph import capture
from ..graph.capture import Site
from ..graph.derive import Origin
from ..graph.rules import Need
from ..policy.choice import Action, Choice
from ..policy.policy import Policy
from ..policy.use import Use, least_bits
from .handles import (
    SIGN,
    Consumer,
    Encoded,
    Handle,
    Rebuilt,
    Sources,
    cut,
    described,
    is_support,
    read_for,
    rebuilder,
    sharing_of,
    sources_of,
)
from .ledger import SHAPE_ONLY
from .noise import key_of
from .offload import Homes, place_away

_RAW = Raw()
_DEEPEST = 32  # stored tensors that one may be rebuilt from, one through the other: calls nest as deep in backward


class Part(NamedTuple):
    """What happens to one stretch of a storage; ``key`` is its place in ``Handle.encoded``."""

    key: tuple[TensorMeta, int] | None
    meta: TensorMeta
    offset: int
    site: Site
    use: Use | None
    choice: Choice | None
    lossless: list[Codec]


class Decision(NamedTuple):
    """What happens to one storage, and what the ledger says of it."""

    parts: tuple[Part, ...]
    total: int
    away: int
    place: str
    used: tuple[object, ...]
    why: str | None
    """Why the storage stays as it is, if it does."""
    is_general: bool
    """Does the decision depend on the consumers, the size and the device of the storage alone?"""


class Packer:
    """Asks a policy about each storage of a forward, and does what it says."""

    def __init__(self, policy: Policy, homes: Homes) -> None:
        self.policy = policy
        self.homes = homes
        self.chosen: list[tuple[Use, Choice]] = []
        """What was done to each tensor whose values may be approximated; small ones are left out."""
        self.without_data = False
        """Was there a tensor without data, of which only the shape is kept?"""
        self._refuted: set[tuple[Site, ...]] = set()
        """Readers of tensors of a device which once were not what a lossless form holds: to ask again would wait."""

    def clear(self) -> None:
        """Begin a new forward."""
        self.homes.begin()
        self.chosen.clear()
        self.without_data = False

    def seal(self, handle: Handle, raw: Tensor) -> None:
        """Encode the storage, or, where less than all of it is read, each stretch that is; or note why it stays."""
        entry, policy = handle.entry, self.policy
        if self._refuted and _readers(handle) in self._refuted:
            handle.read_values()
        # Tuners are not asked about tensors without data, and may say otherwise of such with them.
        fixed, sources = policy.is_fixed and (policy.tuner is None or capture.has_data(raw)), sources_of(handle)
        question = (tuple(handle.consumers), handle.numel, entry.plain, raw.device, sources) if fixed else None
        decision: Decision | None = policy.recall(question) if fixed else None
        if decision is None:
            decision = self._decide(handle, raw, sources)
            if fixed and decision.is_general:
                policy.remember(question, decision)
        why = decision.why
        if why is None:
            try:
                for part in decision.parts:
                    handle.encoded[part.key] = self._carry_out(handle, cut(raw, part.meta, part.offset), part)
            except NotRepresentable as reason:
                handle.encoded.clear()
                if handle.read_values():
                    if raw.device.type != "cpu":
                        self._refuted.add(_readers(handle))
                    self.seal(handle, raw)
                    return
                why = f"kept exactly: {reason}"
        if why is not None or not any(p.choice and p.choice.action is Action.REBUILD for p in decision.parts):
            handle.origin = None  # its noise is its own, and it needs no other tensor
        for part in decision.parts:
            use, choice = part.use, part.choice
            if use is not None and choice is not None and use.meta.numel >= policy.min_numel:  # small ones do not count
                lost = why is not None and choice.action is not Action.KEEP
                self.chosen.append((use, Choice.keep(why or "") if lost else choice))
        if why is not None:
            entry.why, entry.place = why, ""
            return
        handle.raw = None
        entry.away, entry.place = decision.away, decision.place
        entry.compressed(decision.total - decision.away, *decision.used)

    def _decide(self, handle: Handle, raw: Tensor, sources: Sources | None) -> Decision:
        """Ask about each stretch that is read; and is it worth it?"""
        total, away, place, parts = 0, 0, "", []
        used: list[object] = []
        kept = on_purpose = False  # does any stretch stay exact? is any stored even if that saves no bytes?
        for key, meta, offset, consumers in handle.extents():
            tensor = cut(raw, meta, offset)
            use, lossless = self.asked(meta, consumers, sources if key is None else None)
            origin = handle.origin if use is not None and use.sources else None
            choice, nbytes = (None, 0) if use is None else self._choose(use, tensor, origin)
            if choice is not None:
                action, codec = choice.action, choice.codec
                kept = kept or action is Action.KEEP
                on_purpose = on_purpose or action is Action.OFFLOAD or type(codec) is Raw
                _add(used, codec or (_RAW if action is Action.KEEP else action.shown))
                if (elsewhere := place_away(choice.home, tensor.device)) is not None:
                    away, place = away + nbytes, elsewhere
            for codec in lossless:
                nbytes += codec.packed_nbytes(meta)
                _add(used, codec)
            total += nbytes
            parts.append(Part(key, meta, offset, consumers[0].site, use, choice, lossless))
        choices = [part.choice for part in parts if part.choice is not None]
        why = None
        if kept and all(choice.action is Action.KEEP for choice in choices):
            why = choices[0].why
        elif total >= handle.entry.plain and not on_purpose:
            why = "packing would not make it smaller"
        # A stretch, or the form of the storage's base, follows from more than the consumers; so does what moves away.
        views = [consumer.view for consumer in handle.consumers]
        is_general = parts[0].key is None and parts[0].meta in views and all(c.home == "device" for c in choices)
        return Decision(tuple(parts), total, away, place, tuple(used), why, is_general)

    def asked(
        self, meta: TensorMeta, consumers: list[Consumer], sources: Sources | None
    ) -> tuple[Use | None, list[Codec]]:
        """What all consumers of a tensor want: its values (if any does), with what it is made of; lossless forms."""
        lossless: list[Codec] = []
        need, spatial, rectified, sites = Need.LOSSLESS, False, False, []
        for consumer in consumers:
            sites.append(consumer.site)
            spatial = spatial or consumer.spatial
            if consumer.lossless is None:
                need = max(need, consumer.need)
            else:
                rectified = rectified or is_support(consumer, meta)
                if consumer.lossless not in lossless:
                    lossless.append(consumer.lossless)
        if need is Need.LOSSLESS:
            return None, lossless
        use = Use(need, meta, spatial, tuple(sites), (), rectified, sharing=sharing_of(consumers))
        if kept := [consumer for consumer in consumers if consumer.boundary]:
            others = [c for c in consumers if c.lossless is None and not c.boundary]
            least = max((least_bits(c.need, c.sharing, rectified) for c in others), default=0)
            codec = next((c.codec for c in kept if c.codec is not None), None)
            use = use._replace(boundary=True, codec=codec, other_bits=least)
        if sources is None or (sources.rectified and not rectified) or sources.decodes > _DEEPEST:
            return use, lossless
        use = use._replace(
            sources=sources.sites, source_need=sources.need, source_bits=sources.bits, decodes=sources.decodes
        )
        return use, lossless

    def _choose(self, use: Use, tensor: Tensor, origin: Origin | None) -> tuple[Choice, int]:
        """Ask the policy; the choice and its bytes. What cannot be carried out here, or changes nothing, is a keep."""
        policy = self.policy
        from_sources = rebuilder(origin, tensor, use.meta) if policy.looks else None
        choice = policy.choose(use, tensor, from_sources)
        if choice.action is Action.OFFLOAD and choice.home == "host" and tensor.device.type == "cpu":
            return Choice.keep("it lies in host memory as it is"), use.meta.nbytes
        try:
            return choice, choice.nbytes(use.meta)
        except ValueError as error:
            return Choice.keep(f"its codec does not fit: {error}"), use.meta.nbytes

    def _carry_out(self, handle: Handle, tensor: Tensor, part: Part) -> Encoded:
        """Encode a tensor as it was chosen; without a choice only lossless forms are read."""
        meta, choice, lossless = part.meta, part.choice, part.lossless
        if not capture.has_data(tensor):
            # Nothing to pack, and nothing to check: the bytes reported are predicted ones in any case.
            self.without_data = True
            form = SHAPE_ONLY.encode(tensor, key=0)
            return Encoded(None if choice is None else form, dict.fromkeys(lossless, form), None)
        rebuilt = choice is not None and choice.action is Action.REBUILD
        rectified = part.use is not None and part.use.rectified
        on_the_way = rectified and not rebuilt  # the codec finds the mask while it looks at the values
        packs = {c: _lossless(c, tensor, handle) for c in lossless if not on_the_way or c != SIGN} if lossless else {}
        if choice is None:
            return Encoded(None, packs, None)
        if rebuilt:
            origin = handle.origin
            assert origin is not None
            read = read_for(origin.terms)
            for source in read:  # those that are not settled yet may be rebuilt themselves
                source.above = max(source.above, handle.above + len(read) - 1)
            handle.entry.why = f"rebuilt from {described(origin)}"
            return Encoded(Rebuilt(origin, meta), packs, packs[SIGN].buffers[0] if rectified else None)
        if part.use is not None and part.use.boundary and choice.codec is not None and not choice.codec.exact:
            require_ordinary(tensor)
        codec = choice.codec or _RAW  # a stretch that is kept beside others that are not has bytes of its own
        key, support = key_of(part.site, handle.noise), None
        if on_the_way:
            packed, support = codec.encode_rectified(tensor, key=key)
            packs[SIGN] = Packed(SIGN, form_of(tensor)[0], (support,))
        else:
            packed = codec.encode(tensor, key=key)
        return Encoded(packed if choice.home == "device" else self.homes.send(packed, choice.home), packs, support)


_LARGEST = 1e4
"""Masks that are added to scores hold values from -1e4 on (transformers' oldest), or -1e9, or the least of the type."""


def require_ordinary(tensor: Tensor) -> None:
    """Raise if a tensor may hold a mask beside other values, which no group of codes could tell apart then."""
    low, high = torch.stack(torch.aminmax(tensor.detach())).tolist() if tensor.numel() else (0.0, 0.0)
    if not (low > -_LARGEST and high < _LARGEST):  # nor if there is a NaN
        raise NotRepresentable(f"values from {low:.3g} to {high:.3g}, which may be those of a mask")


def _lossless(codec: Codec, tensor: Tensor, handle: Handle) -> Packed:
    """What a lossless form keeps of the tensor."""
    if codec == SIGN and handle.mask is not None:
        return Packed(codec, form_of(tensor)[0], (handle.mask,))
    return codec.encode(tensor, key=0)


def _readers(handle: Handle) -> tuple[Site, ...]:
    return tuple(consumer.site for consumer in handle.consumers)


def _add(used: list[object], what: object) -> None:
    if what not in used:
        used.append(what)
