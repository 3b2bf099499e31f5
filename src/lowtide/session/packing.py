"""Carrying out choices: a storage is encoded, moved or left to be rebuilt once nobody but the graph owns it."""

from __future__ import annotations

from torch import Tensor

from ..codecs import Codec, NotRepresentable, Packed, Raw, TensorMeta
from ..codecs.base import form_of
from ..graph import capture
from ..graph.derive import Origin
from ..graph.rules import Need
from ..policy.choice import Action, Choice
from ..policy.policy import Policy
from ..policy.use import Use
from .handles import (
    SIGN,
    Consumer,
    Encoded,
    Handle,
    Rebuilt,
    cut,
    described,
    is_support,
    need_of,
    read_for,
    rebuilder,
    sharing_of,
    sites_of,
)
from .ledger import SHAPE_ONLY
from .noise import key_of
from .offload import place_away, send

_RAW = Raw()
_DEEPEST = 32  # stored tensors that one may be rebuilt from, one through the other: calls nest as deep in backward


class Packer:
    """Asks a policy about each storage of a forward, and does what it says."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.chosen: list[tuple[Use, Choice]] = []
        """What was done to each tensor whose values may be approximated; small ones are left out."""
        self.without_data = False
        """Was there a tensor without data, of which only the shape is kept?"""

    def clear(self) -> None:
        """Begin a new forward."""
        self.chosen.clear()
        self.without_data = False

    def seal(self, handle: Handle, raw: Tensor) -> None:
        """Encode the storage, or, where less than all of it is read, each stretch that is; or note why it stays."""
        entry, extents = handle.entry, handle.extents()
        total, away, asked = 0, 0, []
        used: list[object] = []
        kept = on_purpose = False  # does any stretch stay exact? is any stored even if that saves no bytes?
        for key, meta, offset, consumers in extents:
            tensor = cut(raw, meta, offset)
            use, lossless, origin = self._asked(handle, meta, consumers, handle.origin if key is None else None)
            choice, nbytes = (None, 0) if use is None else self._choose(use, tensor, origin)
            if choice is not None:
                action, codec = choice.action, choice.codec
                kept = kept or action is Action.KEEP
                on_purpose = on_purpose or action is Action.OFFLOAD or type(codec) is Raw
                _add(used, codec or (_RAW if action is Action.KEEP else action.shown))
                if (place := place_away(choice.home, tensor.device)) is not None:
                    away, entry.place = away + nbytes, place
            for codec in lossless:
                nbytes += codec.packed_nbytes(meta)
                _add(used, codec)
            total += nbytes
            asked.append((tensor, use, choice, lossless, origin))
        why = None
        if kept and all(choice is None or choice.action is Action.KEEP for _, _, choice, _, _ in asked):
            why = next(choice.why for _, _, choice, _, _ in asked if choice is not None)
        elif total >= entry.plain and not on_purpose:
            why = "packing would not make it smaller"
        else:
            try:
                for (key, meta, _, consumers), (tensor, _, choice, lossless, origin) in zip(
                    extents, asked, strict=True
                ):
                    handle.encoded[key] = self._carry_out(handle, tensor, meta, consumers, choice, lossless, origin)
            except NotRepresentable as reason:
                handle.encoded.clear()
                why = f"kept exactly: {reason}"
        if why is not None or not any(choice and choice.action is Action.REBUILD for _, _, choice, _, _ in asked):
            handle.origin = None  # its noise is its own, and it needs no other tensor
        for _, use, choice, _, _ in asked:
            lost = why is not None and choice is not None and choice.action is not Action.KEEP
            self._note(use, Choice.keep(why or "") if lost else choice)
        if why is not None:
            entry.why, entry.place = why, ""
            return
        handle.raw = None
        entry.away = away
        entry.compressed(total - away, *used)

    def _asked(
        self, handle: Handle, meta: TensorMeta, consumers: list[Consumer], origin: Origin | None
    ) -> tuple[Use | None, list[Codec], Origin | None]:
        """What all consumers of a tensor want: its values (if any does), lossless forms; and how to rebuild it."""
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
            return None, lossless, None
        use = Use(need, meta, spatial, tuple(sites), (), rectified, sharing=sharing_of(consumers))
        decodes = 0 if origin is None else handle.above + len(read_for(origin.terms))
        if origin is None or (origin.rectified and not rectified) or decodes > _DEEPEST:
            return use, lossless, None
        source_need, source_bits = need_of(origin)
        use = use._replace(sources=sites_of(origin), source_need=source_need, source_bits=source_bits, decodes=decodes)
        return use, lossless, origin

    def _choose(self, use: Use, tensor: Tensor, origin: Origin | None) -> tuple[Choice, int]:
        """Ask the policy; the choice and its bytes. What cannot be carried out here, or changes nothing, is a keep."""
        policy = self.policy
        from_sources = None if policy.tuner is None else rebuilder(origin, tensor, use.meta)
        choice = policy.choose(use, tensor, from_sources)
        if choice.action is Action.OFFLOAD and choice.home == "host" and tensor.device.type == "cpu":
            return Choice.keep("it lies in host memory as it is"), use.meta.nbytes
        try:
            return choice, choice.nbytes(use.meta)
        except ValueError as error:
            return Choice.keep(f"its codec does not fit: {error}"), use.meta.nbytes

    def _note(self, use: Use | None, choice: Choice | None) -> None:
        """Remember what was decided about values, for the plan; small tensors are no decision."""
        if use is not None and choice is not None and use.meta.numel >= self.policy.min_numel:
            self.chosen.append((use, choice))

    def _carry_out(
        self,
        handle: Handle,
        tensor: Tensor,
        meta: TensorMeta,
        consumers: list[Consumer],
        choice: Choice | None,
        lossless: list[Codec],
        origin: Origin | None,
    ) -> Encoded:
        """Encode a tensor as it was chosen; None stands for a tensor of which only lossless forms are read."""
        if not capture.has_data(tensor):
            # Nothing to pack, and nothing to check: the bytes reported are predicted ones in any case.
            self.without_data = True
            form = SHAPE_ONLY.encode(tensor, key=0)
            return Encoded(None if choice is None else form, dict.fromkeys(lossless, form), None)
        rebuilt = choice is not None and choice.action is Action.REBUILD
        rectified = choice is not None and SIGN in lossless and any(is_support(c, meta) for c in consumers)
        on_the_way = rectified and not rebuilt  # the codec finds the mask while it looks at the values
        packs = {c: c.encode(tensor, key=0) for c in lossless if not on_the_way or c != SIGN} if lossless else {}
        if choice is None:
            return Encoded(None, packs, None)
        if rebuilt:
            assert origin is not None
            read = read_for(origin.terms)
            for source in read:  # those that are not settled yet may be rebuilt themselves
                source.above = max(source.above, handle.above + len(read) - 1)
            handle.entry.why = f"rebuilt from {described(origin)}"
            return Encoded(Rebuilt(origin, meta), packs, packs[SIGN].buffers[0] if rectified else None)
        codec = choice.codec or _RAW  # a stretch that is kept beside others that are not has bytes of its own
        key, support = key_of(consumers[0].site, handle.noise), None
        if on_the_way:
            packed, support = codec.encode_rectified(tensor, key=key)
            packs[SIGN] = Packed(SIGN, form_of(tensor)[0], (support,))
        else:
            packed = codec.encode(tensor, key=key)
        return Encoded(packed if choice.home == "device" else send(packed, choice.home), packs, support)


def _add(used: list[object], what: object) -> None:
    if what not in used:
        used.append(what)
