"""The account of a session: one entry for each saved tensor, and the bytes of each storage once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..codecs import Codec, ShapeOnly, TensorMeta
from ..graph import capture
from ..graph.capture import Site
from ..policy.choice import Action
from ..report import COMPRESSED, EXACT, HELD, SHARED, UNKNOWN_OP, SiteReport

SHAPE_ONLY = ShapeOnly()
REMADE = "remade"
"""In place of a codec, for a weight that is made again from parameters."""
RECAST = "recast"
"""Stands for a codec where autocast's copy of a parameter is made again."""


class Entry:
    """One saved tensor in the making of a report; never holds a tensor."""

    __slots__ = ("away", "codecs", "kept", "meta", "place", "plain", "site", "state", "stored", "why")

    def __init__(self, site: Site, meta: TensorMeta | None, state: str, plain: int, why: str | Site) -> None:
        self.site = site
        self.meta = meta
        self.state = state
        self.plain = self.stored = plain
        self.codecs: tuple[object, ...] = ()
        self.away, self.place = 0, ""  # bytes that left the device, and where they are
        self.why = why
        self.kept: str | None = None  # why autograd itself keeps this storage, if a slot is not hooked

    def compressed(self, stored: int, *codecs: object) -> None:
        """Its bytes are packed now."""
        self.state, self.stored, self.codecs = COMPRESSED, stored, codecs

    def exact(self, why: str) -> None:
        """It stays as it is."""
        self.state, self.stored, self.codecs, self.why = EXACT, self.plain, (), why

    def left(self) -> None:
        """The forward is over, and the storage is still there: a slot of autograd's keeps it, or somebody outside."""
        if self.kept is not None:
            self.exact(self.kept)
        else:
            self.state, self.why = HELD, "still in use outside the graph when the forward ended"

    def finished(self) -> SiteReport:
        """As plain data."""
        meta = self.meta
        shape, dtype = ((), "") if meta is None else (tuple(meta.shape), str(meta.dtype).removeprefix("torch."))
        codec = " + ".join(map(str, self.codecs)) + (f", {self.place}" if self.place else "")
        why = f"stored at {self.why}" if self.state == SHARED else str(self.why)
        return SiteReport(self.site, shape, dtype, self.state, self.plain, self.stored, codec, why, self.form)

    @property
    def form(self) -> str:
        """What became of it, in one word of ``report.FORMS``."""
        if self.state == SHARED:
            return SHARED
        if self.state == HELD or (self.state == EXACT and str(self.why).endswith(UNKNOWN_OP)):
            return "skipped"
        if self.state == EXACT:
            return "kept"
        if self.place:
            return "offloaded"
        if RECAST in self.codecs or REMADE in self.codecs:
            return "recomputed"
        if Action.REBUILD.shown in self.codecs:
            return "rebuilt"
        values = any(isinstance(codec, Codec) and codec.keeps_values for codec in self.codecs)
        return "compressed" if values else "mask"


class Ledger:
    """Rows of one session. Storages without a handle are known by weak references."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._known: dict[int, tuple[weakref.ref[Any], Entry]] = {}

    def clear(self) -> None:
        """Begin anew."""
        self.entries.clear()
        self._known.clear()

    def close(self) -> None:
        """The forward is over: storages of which only the shape was kept, and that still live, are held by others."""
        for storage, entry in self._known.values():
            if entry.codecs in ((SHAPE_ONLY,), (REMADE,)) and storage() is not None:
                entry.left()
        self._known.clear()

    def held(self, site: Site, why: str) -> None:
        """A slot that others hold, so that not even its shape is known."""
        self.entries.append(Entry(site, None, HELD, 0, why))

    def shared(self, site: Site, meta: TensorMeta, at: Site) -> None:
        """A slot whose storage is counted at another site."""
        self.entries.append(Entry(site, meta, SHARED, 0, at))

    def known(self, storage: Any) -> Entry | None:
        """The entry that carries the bytes of a storage without a handle."""
        found = self._known.get(capture.storage_id(storage))
        return found[1] if found is not None and found[0]() is storage else None

    def add(
        self, site: Site, meta: TensorMeta, storage: Any, why: str, *, kept: bool = False, by_handle: bool = False
    ) -> Entry:
        """An entry for a storage that has none yet.

        ``kept`` says that the slot gets no hook, so that autograd keeps the storage. ``by_handle`` says that the
        storage gets a handle, through which the entry is found.
        """
        entry = Entry(site, meta, EXACT, storage.nbytes(), why)
        entry.kept = why if kept else None
        self.entries.append(entry)
        if not by_handle:
            self._known[capture.storage_id(storage)] = (weakref.ref(storage), entry)
        return entry

    def add_odd(self, site: Site, tensor: Tensor) -> None:
        """A tensor without a plain storage of its own: sparse, nested, or of a subclass."""
        kind = type(tensor).__name__ if type(tensor) is not Tensor else str(tensor.layout)
        if capture.has_storage(tensor):
            kind = "in a transform of torch.func"  # which hides the storage
        meta = TensorMeta(tuple(tensor.shape), (), tensor.dtype)
        parts = capture.strided_parts(tensor)
        values = parts[0].untyped_storage() if len(parts) > 1 and capture.has_storage(parts[0]) else None
        known = None if values is None else self.known(values)
        if known is not None:
            self.shared(site, meta, known.site)
            return
        entry = Entry(site, meta, EXACT, sum(map(_nbytes, parts)), f"{kind}: kept as it is")
        entry.kept = f"{site.op}.{site.slot} keeps it: {entry.why}"
        self.entries.append(entry)
        if values is not None:
            self._known[capture.storage_id(values)] = (weakref.ref(values), entry)

    def finished(self) -> tuple[SiteReport, ...]:
        """All rows as plain data."""
        return tuple(entry.finished() for entry in self.entries)

    def away(self) -> Iterator[tuple[str, int]]:
        """Places off the device, and the bytes there."""
        for place in dict.fromkeys(entry.place for entry in self.entries if entry.place):
            yield place, sum(entry.away for entry in self.entries if entry.place == place)


def _nbytes(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return tensor.numel() * tensor.element_size()
