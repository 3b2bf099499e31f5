"""Levels of random rounding for each site, fitted to its values (TinyScript, Fu et al. 2020)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ...codecs import BlockMean, GroupQuant
from ...codecs.base import flatten, require_positive
from ...codecs.groups import row_of
from ...graph.capture import Site
from ..choice import Choice
from ..use import Use
from . import fitting
from .base import FromSources, Tuner, require_keys, site_of


class _Table(NamedTuple):
    step: int
    bits: int
    levels: tuple[float, ...] | None  # None where equal steps are best


# One bit has no inner level; from 5 bits on there is little to gain.
_FITTED = range(2, 5)
_SAMPLE = 1 << 18


class LevelTuner(Tuner):
    """Levels where the values are (TinyScript, Fu et al. 2020): one table for each site.

    A table is fitted to the tensor at hand when its site is first seen, and again every ``refresh`` steps. A tensor
    without negative values counts by its positive ones, as it is encoded. Codecs of block means get the table
    of the differences they round.
    """

    def __init__(self, refresh: int = 500) -> None:
        super().__init__()
        require_positive(refresh, "refresh")
        self.refresh = refresh
        self._step = 0
        self._tables: dict[Site, _Table] = {}

    def begin(self, step: int) -> None:
        """Remember the step."""
        self._step = step

    def choose(self, use: Use, tensor: Tensor, base: Choice, from_sources: FromSources | None = None) -> Choice:
        """``base`` with levels, where its codec rounds in groups and unequal steps are better."""
        codec = base.codec
        if not isinstance(codec, GroupQuant | BlockMean) or codec.bits not in _FITTED:
            return base
        if isinstance(codec, BlockMean) and codec.faithful:
            return base
        table = self._tables.get(use.sites[0])
        if table is None or table.bits != codec.bits or not 0 <= self._step - table.step < self.refresh:
            with self.timed():
                fitted = fitting.fit_levels(histogram_of(tensor.detach(), codec).cpu(), codec.bits)
            even = fitted == fitting.uniform_levels(codec.bits)
            table = self._tables[use.sites[0]] = _Table(self._step, codec.bits, None if even else fitted)
        if table.levels is None:
            return base
        return base.with_codec(dataclasses.replace(codec, levels=table.levels))

    def state_dict(self) -> dict[str, Any]:
        """All tables, and when they were fitted."""
        rows = [
            [list(s), t.step, t.bits, None if t.levels is None else list(t.levels)] for s, t in self._tables.items()
        ]
        return {"step": self._step, "tables": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        require_keys(state, {"step", "tables"})
        self._step = state["step"]
        self._tables = {site_of(s): _Table(n, b, None if t is None else tuple(t)) for s, n, b, t in state["tables"]}


def histogram_of(tensor: Tensor, base: GroupQuant | BlockMean) -> Tensor:
    """Where the values that ``base`` rounds lie in their groups; nothing is read from a device."""
    layout = base.layout if isinstance(base, GroupQuant) else "sample"
    if isinstance(base, BlockMean):  # the first samples are enough, and their differences are small
        samples = max(1, _SAMPLE * tensor.shape[0] // max(1, tensor.numel()))
        tensor = tensor[:samples]
    rectified: bool | Tensor = tensor.amin() >= 0 if tensor.numel() > 0 else False
    flat, meta, order = flatten(tensor)
    row = row_of(layout, order, meta.numel)
    if isinstance(base, GroupQuant):
        return fitting.histogram(flat, row, base.group, rectified)
    means = dataclasses.replace(base, bits=0)
    difference = tensor - means.encode(tensor, key=0).decode()
    return fitting.histogram(flatten(difference)[0], row, base.group, rectified, source=flat)
