"""Which codec each stored tensor deserves: options weighed by what their error does to the gradient.

The error that a codec adds to the gradient is about ``sensitivity * mean squared error``. Errors are measured on the
tensors themselves. Sensitivities come from the last backward by a formula, or, for the price of one small pass a
tensor, from a probe: the change of the whole gradient when this tensor alone is rounded.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...codecs import BlockMean, Codec, GroupQuant, from_config
from ...codecs.base import flatten
from ...graph.capture import Site
from ...graph.rules import Need
from ...kernels import ops
from ..choice import Action, Choice
from ..plan import Plan
from ..solve import choose
from ..use import Use
from . import fitting
from .base import FromSources, Probed, require_keys, site_of
from .levels import histogram_of


class Option(NamedTuple):
    """A codec for one tensor, the mean square of its error there, and its bytes."""

    codec: Codec
    error: float
    nbytes: int


@dataclasses.dataclass
class _Seen:
    """What the first forward showed of one stored tensor."""

    need: Need
    numel: int
    options: list[Option]
    base_error: float
    scale: float  # sensitivity for each unit of the output gradient's square
    sources: tuple[Site, ...]
    rebuilt_error: float | None  # with the sources as the base codecs store them
    sites: tuple[Site, ...]


_LOOK = 1 << 16
"""Values on which options are compared: the spread of a mean square over them is well below a percent."""

# A batch norm's noise reaches its own weight's gradient, and by two small terms the layers before it. Of the first
# there is a formula; the factor for the rest makes the plan as good as one from probes (docs/methods.md, "auto").
_BEYOND = 16.0


class MixTuner(Probed):
    """A codec for each tensor, ``bits`` a value on average: block means or plain groups, even or fitted levels, 1 to 8
    bits, or nothing where a tensor can be rebuilt from another.

    In the first forward every option is tried on a part of each tensor, and the first backward shows the gradients at
    the outputs; from the second step on the plan stands. Only what a weight gradient or a batch norm reads is up for
    choice; what propagates keeps the method's own bits, and is not part of the average.
    """

    def __init__(self, bits: float, group: int, taps: Mapping[str, float]) -> None:
        super().__init__()
        self.bits = bits
        self.group = group
        self._taps = dict(taps)
        self._seen: dict[Site, _Seen] = {}
        self._squares: dict[Site, float] = {}
        self._plan = Plan()
        self._probed: dict[Site, float] = {}
        self._scale = 1.0  # of the formula, in units of the probes
        self._bad = False  # a gradient of the last backward was not finite

    @property
    def ready(self) -> bool:
        """After the first forward."""
        return bool(self._seen)

    def begin(self, step: int) -> None:
        """Decide once a whole backward was finite; a loss scale that is too large makes the first ones not."""
        if self._bad:
            self._squares, self._bad = {}, False
        if not self._plan and self._seen and self._squares:
            with self.timed():
                self._decide()

    def wants_gradient(self, site: Site, need: Need) -> bool:
        """Until the plan stands."""
        return not self._plan and need in (Need.LINEAR, Need.BATCH)

    def observe(self, site: Site, gradient: Tensor) -> None:
        """The square of the output's gradient."""
        with self.timed():
            norm = float(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64))
            self._bad = self._bad or not math.isfinite(norm)
            self._squares[site] = norm * norm

    def choose(self, use: Use, tensor: Tensor, base: Choice, from_sources: FromSources | None = None) -> Choice:
        """What the plan says; ``base`` where there is no plan yet."""
        if use.need not in (Need.LINEAR, Need.BATCH) or tensor.numel() == 0:
            return base
        planned = self._plan.choices.get(use.sites[0])
        if planned is None:
            if not self._plan:
                with self.timed():
                    self._look(use, tensor.detach(), base, from_sources)
            return base
        return base if planned.action is Action.REBUILD and not use.sources else planned

    def trial(self, use: Use) -> Choice | None:
        """Plain groups of two bits."""
        if use.need not in (Need.LINEAR, Need.BATCH):
            return None
        return Choice.store(GroupQuant(2, self.group, "sample" if use.dims else "row"))

    def measured(self, found: Sequence[tuple[Use, float]]) -> None:
        """Use probes in place of the formula."""
        for use, change in found:
            seen = self._seen.get(use.sites[0])
            trial = self.trial(use)
            error = (
                None
                if seen is None
                else next((o.error for o in seen.options if trial and o.codec == trial.codec), None)
            )
            if error and math.isfinite(change):
                self._probed[use.sites[0]] = change / error
        formula = {site: self._formula(seen) for site, seen in self._seen.items()}
        ratios = [self._probed[site] / s for site, s in formula.items() if site in self._probed and 0 < s < math.inf]
        self._scale = statistics.median(ratios) if ratios else 1.0
        if self._probed:
            with self.timed():
                self._decide()

    # ------------------------------------------------------------ looking

    def _look(self, use: Use, tensor: Tensor, base: Choice, from_sources: FromSources | None) -> None:
        piece = tensor
        if tensor.dim() > 1:
            piece = tensor[: max(1, _LOOK * tensor.shape[0] // tensor.numel())]
        support = ops.pack_band(flatten(piece)[0], 0.0, math.inf, False, True) if use.rectified else None
        wide = piece.to(torch.float32)
        options = [
            Option(codec, _mean_square(codec.encode(piece, key=1, support=support).decode(support), wide), nbytes)
            for codec in dict.fromkeys((base.codec, *self._codecs(use, piece)))
            if codec is not None and (nbytes := codec.packed_nbytes(use.meta)) < use.meta.nbytes
        ]
        if not options:
            return
        rebuilt = None if from_sources is None else _mean_square(from_sources(), tensor.to(torch.float32))
        if use.need is Need.BATCH:
            variance = float(tensor.to(torch.float32).var())
            scale = _BEYOND / variance if variance > 0 else 0.0
        else:
            scale = float(use.meta.shape[1 if use.dims else -1])
        first = use.sites[0]
        self._seen[first] = _Seen(
            use.need, use.meta.numel, options, options[0].error, scale, use.sources, rebuilt, use.sites
        )

    def _codecs(self, use: Use, piece: Tensor) -> list[Codec]:
        layout = "sample" if use.dims else "row"
        found: list[Codec] = []
        for bits in range(1, 9):
            plain: list[GroupQuant | BlockMean] = [GroupQuant(bits, self.group, layout)]
            if use.dims and max(use.meta.shape[2:]) > 1:
                plain.append(BlockMean(8, use.dims, bits, self.group))
            for codec in plain:
                found.append(codec)
                if bits in (2, 3):
                    fitted = fitting.fit_levels(histogram_of(piece, codec), bits)
                    if fitted != fitting.uniform_levels(bits):
                        found.append(dataclasses.replace(codec, levels=fitted))
        return found

    # ------------------------------------------------------------ deciding

    def _sensitivity(self, seen: _Seen) -> float:
        probed = self._probed.get(seen.sites[0])
        return self._formula(seen) * self._scale if probed is None else probed

    def _formula(self, seen: _Seen) -> float:
        if seen.need is Need.LINEAR:
            return seen.scale * sum(self._squares.get(s, 0.0) * self._taps.get(s.module, 1.0) for s in seen.sites)
        return seen.scale * sum(self._squares.get(s, 0.0) for s in seen.sites)

    def _decide(self) -> None:
        """Choose among the options of units: a tensor, or a source together with what can be rebuilt from it alone."""
        known = {site: seen for site, seen in self._seen.items() if 0 < self._sensitivity(seen) < math.inf}
        child: dict[Site, Site] = {}
        children: set[Site] = set()
        for site, seen in known.items():
            source = seen.sources[0] if len(seen.sources) == 1 else None
            # A source comes before what is derived from it, so of a chain every second one is somebody's child.
            if source in known and source not in child and source not in children:
                child[source] = site
                children.add(site)
        units: list[list[tuple[float, int, dict[Site, Choice]]]] = []
        for site, seen in known.items():
            if site in children:
                continue
            own = [(self._sensitivity(seen) * o.error, o.nbytes, {site: Choice.store(o.codec)}) for o in seen.options]
            if site in child:
                own = self._joint(site, seen, child[site], known[child[site]])
            elif seen.rebuilt_error is not None and not any(s in known for s in seen.sources):
                own.append((self._sensitivity(seen) * seen.rebuilt_error, 0, {site: Choice.rebuild()}))
            units.append(own)
        numel = sum(seen.numel for seen in known.values())
        least = sum(min(o[1] for o in unit) for unit in units)
        budget = max(int(self.bits * numel / 8), least)
        picked = choose([[o[0] for o in unit] for unit in units], [[o[1] for o in unit] for unit in units], budget)
        choices: dict[Site, Choice] = {}
        for unit, i in zip(units, picked, strict=True):
            choices.update(unit[i][2])
        self._plan = Plan(choices)

    def _joint(
        self, site: Site, seen: _Seen, other: Site, derived: _Seen
    ) -> list[tuple[float, int, dict[Site, Choice]]]:
        """Options of a source, each with what is derived from it rebuilt, or stored by itself."""
        here, there = self._sensitivity(seen), self._sensitivity(derived)
        gain = 0.0
        if derived.rebuilt_error is not None and seen.base_error > 0:
            gain = derived.rebuilt_error / seen.base_error
        found: list[tuple[float, int, dict[Site, Choice]]] = []
        for o in seen.options:
            own = Choice.store(o.codec)
            if derived.rebuilt_error is not None:
                found.append(((here + there * gain) * o.error, o.nbytes, {site: own, other: Choice.rebuild()}))
            for p in derived.options:
                both = {site: own, other: Choice.store(p.codec)}
                found.append((here * o.error + there * p.error, o.nbytes + p.nbytes, both))
        return found

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The plan, and what it was or will be made from."""
        return {
            "plan": self._plan.to_data(),
            "squares": [[list(site), value] for site, value in self._squares.items()],
            "probed": [[list(site), value] for site, value in self._probed.items()],
            "scale": self._scale,
            "bad": self._bad,
            "seen": [
                {
                    "need": int(seen.need),
                    "numel": seen.numel,
                    "options": [[o.codec.to_config(), o.error, o.nbytes] for o in seen.options],
                    "base_error": seen.base_error,
                    "scale": seen.scale,
                    "sources": [list(s) for s in seen.sources],
                    "rebuilt_error": seen.rebuilt_error,
                    "sites": [list(s) for s in seen.sites],
                }
                for seen in self._seen.values()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        require_keys(state, {"plan", "squares", "probed", "scale", "bad", "seen"})
        self._scale, self._bad = state["scale"], state["bad"]
        self._plan = Plan.from_data(state["plan"])
        self._squares = {site_of(site): value for site, value in state["squares"]}
        self._probed = {site_of(site): value for site, value in state["probed"]}
        self._seen = {}
        for row in state["seen"]:
            sites = tuple(map(site_of, row["sites"]))
            options = [Option(from_config(c), error, nbytes) for c, error, nbytes in row["options"]]
            self._seen[sites[0]] = _Seen(
                Need(row["need"]), row["numel"], options, row["base_error"], row["scale"],
                tuple(map(site_of, row["sources"])), row["rebuilt_error"], sites,
            )  # fmt: skip


def _mean_square(found: Tensor, wanted: Tensor) -> float:
    """NaN, from values that are not finite, counts as the worst."""
    error = float(torch.linalg.vector_norm(found.to(torch.float32) - wanted, dtype=torch.float32))
    return error * error / max(1, wanted.numel()) if math.isfinite(error) else math.inf
