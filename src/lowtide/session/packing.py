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
from .handles import SIGN, Consumer, Encoded, Handle, Rebuilt, cut, described, is_support, need_of, rebuilder, sites_of
from .ledger import SHAPE_ONLY
from .noise import key_of
from .offload import Moved, send

_RAW = Raw()


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
        total, asked = 0, []
        used: dict[object, None] = {}
        on_purpose = moved = False  # is it stored even if that saves no bytes? do bytes leave the device?
        for key, meta, offset, consumers in extents:
            tensor = cut(raw, meta, offset)
            use, lossless, origin = self._asked(meta, consumers, handle.origin if key is None else None)
            choice = None
            if use is not None:
                choice, nbytes = self._choose(use, tensor, origin)
                action, codec = choice.action, choice.codec
                if action is Action.KEEP:
                    entry.why = choice.why
                    self._note(use, choice)
                    return
                total += nbytes
                used[codec or action.shown] = None
                on_purpose = on_purpose or action is Action.OFFLOAD or type(codec) is Raw
                moved = moved or choice.home != "device"
            for codec in lossless:
                total += codec.packed_nbytes(meta)
                used[codec] = None
            asked.append((tensor, use, choice, lossless, origin))
        why = "packing would not make it smaller" if total >= entry.plain and not on_purpose else None
        if why is None:
            try:
                for (key, meta, _, consumers), (tensor, _, choice, lossless, origin) in zip(
                    extents, asked, strict=True
                ):
                    handle.encoded[key] = self._carry_out(handle, tensor, meta, consumers, choice, lossless, origin)
            except NotRepresentable as reason:
                handle.encoded.clear()
                why = f"kept exactly: {reason}"
        for _, use, choice, _, _ in asked:
            self._note(use, choice if why is None else Choice.keep(why))
        if why is not None:
            entry.why = why
            return
        handle.raw = None
        if moved:
            for encoded in handle.encoded.values():
                if isinstance(encoded.values, Moved):
                    entry.away += encoded.values.nbytes
                    entry.place = encoded.values.place
        entry.compressed(total - entry.away, *used)

    def _asked(
        self, meta: TensorMeta, consumers: list[Consumer], origin: Origin | None
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
        if origin is None or (origin.rectified and not rectified):
            return Use(need, meta, spatial, tuple(sites), (), rectified), lossless, None
        return Use(need, meta, spatial, tuple(sites), sites_of(origin), rectified, need_of(origin)), lossless, origin

    def _choose(self, use: Use, tensor: Tensor, origin: Origin | None) -> tuple[Choice, int]:
        """Ask the policy; the choice and its bytes. What cannot be carried out here, or changes nothing, is a keep."""
        policy = self.policy
        from_sources = None if policy.tuner is None else rebuilder(origin, tensor, use.meta)
        choice = policy.choose(use, tensor, from_sources)
        if choice.action is Action.OFFLOAD and choice.home == "host" and tensor.device.type == "cpu":
            return Choice.keep("it lies in host memory as it is"), 0
        try:
            return choice, choice.nbytes(use.meta)
        except ValueError as error:
            return Choice.keep(f"its codec does not fit: {error}"), 0

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
            handle.entry.why = f"rebuilt from {described(origin)}"
            return Encoded(Rebuilt(origin, meta), packs, packs[SIGN].buffers[0] if rectified else None)
        codec = choice.codec or _RAW
        key, support = key_of(consumers[0].site, handle.noise), None
        if on_the_way:
            packed, support = codec.encode_rectified(tensor, key=key)
            packs[SIGN] = Packed(SIGN, form_of(tensor)[0], (support,))
        else:
            packed = codec.encode(tensor, key=key)
        return Encoded(packed if choice.home == "device" else send(packed, choice.home), packs, support)
