"""Bits for each tensor from probes of the gradient (GACT, Liu et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...codecs import GroupQuant
from ...graph.capture import Site
from ...graph.rules import Need
from ..choice import Choice
from ..plan import Plan
from ..solve import allocate
from ..use import Use
from .base import FromSources, Probed, require_keys


class BitTuner(Probed):
    """Bits for each tensor, ``bits`` a value on average, from probes (GACT, Liu et al. 2022).

    Every tensor has the method's own bits until the first probe; so has a tensor that the probe did not meet. What
    passes through an exponential keeps its own bits always (the change is far from quadratic in its noise), and so does
    what propagates if ``propagating`` gives its bits. The others share what is left of the average. The input of
    a batch norm has at least what its statistics demand; if that is more than ``bits``, it has just that and counts in
    no average, so that nobody else has less for it.
    """

    def __init__(self, bits: float, group: int, propagating: int | None = None) -> None:
        super().__init__()
        self.bits = bits
        self.group = group
        self.propagating = propagating
        self._plan = Plan()
        self._fixed: dict[Site, tuple[int, int]] = {}  # values, and bits that are not up for choice

    def begin(self, step: int) -> None:
        """Nothing changes between probes."""

    @property
    def settled(self) -> Plan:
        """The bits of the last probe."""
        return self._plan

    def choose(self, use: Use, tensor: Tensor, base: Choice, from_sources: FromSources | None = None) -> Choice:
        """The bits the last probe gave."""
        planned = self._plan.choices.get(use.sites[0])
        if planned is None or not isinstance(base.codec, GroupQuant):
            return base
        enough = isinstance(planned.codec, GroupQuant) and planned.codec.bits >= _floor(use)
        return planned if enough else self._groups(use, _floor(use))

    def trial(self, use: Use) -> Choice | None:
        """Two bits: little enough to be seen, enough not to be all noise."""
        if use.need >= Need.LOGARITHM or _floor(use) > self.bits:
            return None
        own = 8 if use.need is Need.EXPONENT else self.propagating if use.need is Need.PROPAGATE else None
        if own is not None:
            self._fixed[use.sites[0]] = (use.meta.numel, own)
            return None
        return self._groups(use, 2)

    def measured(self, found: Sequence[tuple[Use, float]]) -> None:
        """Divide the bits: least sum of changes, each taken as falling with the square of the number of steps."""
        numels = [use.meta.numel for use, _ in found]
        spent = sum(numel * bits for numel, bits in self._fixed.values())
        total = sum(numels) + sum(numel for numel, _ in self._fixed.values())
        self._fixed.clear()
        if not found:
            return
        with self.timed():
            cost = torch.tensor([change * 9.0 for _, change in found], dtype=torch.float64, device="cpu")
            budget = max(int(self.bits * total) - spent, sum(numels))
            floors = [_floor(use) for use, _ in found]
            bits = allocate(cost, torch.tensor(numels, device="cpu"), budget, (1, 2, 4, 8), floors).tolist()
            self._plan = Plan({use.sites[0]: self._groups(use, b) for (use, _), b in zip(found, bits, strict=True)})

    def _groups(self, use: Use, bits: int) -> Choice:
        return Choice.store(GroupQuant(bits, self.group, "sample" if use.dims else "row"))

    def state_dict(self) -> dict[str, Any]:
        """The plan."""
        return {"plan": self._plan.to_data()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        require_keys(state, {"plan"})
        self._plan = Plan.from_data(state["plan"])


def _floor(use: Use) -> int:
    """What propagates may have less than its floor, because the probe measured what that does."""
    return use.least_bits if use.need is Need.BATCH else 1
