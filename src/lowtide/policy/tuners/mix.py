"""Which codec each stored tensor deserves: options weighed by what their noise does to every parameter's gradient.

What is minimised is the mean over the weights ``w`` of ``noise_w**2 / |g_w|**2``, plus the same for the whole gradient:
no layer may drown, and neither may the sum. ``|g_w|`` is the length of the weight's gradient in this batch. It holds
the signal and SGD's own noise, so noise that is small beside it is small beside both.

Where noise comes from, for a tensor that is stored with a mean squared error ``e``:

- A *linear* layer's input reaches that layer's weight alone: ``noise_w**2 = e * c * |dy|**2``, with ``c`` columns of
  the weight for each value and ``dy`` the gradient at the output.
- Anything else disturbs what flows on. Backward tries it once with the real gradient: noise of a known size is added
  to the tensor, and the part ``r`` that changes of the squared gradient at the op's input tells how much of every
  earlier gradient is noise: ``noise_w**2 = r * m * c * |dy|**2`` for each weight before it, with ``m`` the mean square
  of that weight's own input.
- A *rebuilt* tensor has the noise of its sources, each times a gain of its own. Their sum is measured; what belongs to
  which source follows from what each is multiplied by.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...codecs import BlockMean, Cast, Codec, GroupQuant, LogQuant, from_config
from ...codecs.base import flatten, layout_of
from ...graph.capture import Site
from ...graph.rules import Need
from ...kernels import ops
from ..choice import Action, Choice
from ..plan import Plan
from ..solve import assign
from ..use import Use
from .base import Arrived, FromSources, Number, Probed, Wanted, read, require_keys, site_of, square_of

_LOOK = 1 << 16
"""Values on which errors are measured: the spread of a mean square over them is well below a percent."""

_LEAST = {Need.LINEAR: 1, Need.BATCH: 1, Need.PROPAGATE: 2, Need.EXPONENT: 4}
"""Noise is tried at four bits. What passes through an exponential does not grow in proportion to it beyond that."""

_TRIED = 4

_PLAIN = range(1, 5)
"""Bits that are looked at without dither."""

_HALF = Cast("bfloat16")
_HALF_ERROR = 2.0**-18
"""The mean square of its error beside that of the values."""

_BIAS = 0.01
"""Where noise passes through a bend, its mean effect may be at most this part of a gradient."""

_LONGEST = 1000
"""Steps between two measurements at most. The first are made at steps 1, 3, 9 and so on, while weights change fast."""


class Option(NamedTuple):
    """A codec for one tensor, the mean square of its error there, and its bytes; no codec keeps the tensor."""

    codec: Codec | None
    error: float
    nbytes: int

    @property
    def choice(self) -> Choice:
        """The option as a choice."""
        return (
            Choice.keep("its noise would cost more than its bytes") if self.codec is None else Choice.store(self.codec)
        )


class _Candidates(NamedTuple):
    """The codecs that one tensor is looked at with, and how their errors follow from a few numbers.

    The numbers are the energies of the families, the squared errors without dither, and the mean square of the values.
    """

    dithered: list[Codec]
    """Of each family those of 1 to 8 bits."""
    plain: list[GroupQuant]
    fits: dict[Codec, int]
    """The bytes of those that may be chosen."""
    numel: int

    def options(self, numbers: Sequence[float]) -> tuple[list[Option], float]:
        """Those that may be chosen and are worth it, with their errors; and the mean square of the values."""
        count, square = max(1, self.numel), numbers[-1]
        found: list[tuple[Codec, float]] = []
        for i, codec in enumerate(self.dithered):
            # A dithered value errs uniformly over a step, so one look at the ranges tells the error for all bits.
            found.append((codec, numbers[i // 8] / count / (12 * (2 ** (i % 8 + 1) - 1) ** 2)))
        families = len(self.dithered) // 8
        for i, codec in enumerate(self.plain):
            error = numbers[families + i] / count
            error = error if math.isfinite(error) else math.inf  # NaN counts as the worst
            if error >= found[i][1]:
                break
            found.append((codec, error))
        found.append((_HALF, square * _HALF_ERROR))
        return [Option(codec, error, self.fits[codec]) for codec, error in found if codec in self.fits], square

    def tried(self, numbers: Sequence[Tensor]) -> Tensor:
        """The mean square of the noise that backward tries, on the device: that of four bits, if they fit."""
        fitting = [i for i, codec in enumerate(self.dithered) if codec in self.fits]
        four = next((i for i in fitting if i % 8 + 1 == _TRIED), None)
        if four is None and (_HALF in self.fits or not fitting):
            return numbers[-1].to(torch.float64) * _HALF_ERROR
        i = fitting[-1] if four is None else four
        # Divided by tensors, because CUDA multiplies by the inverse of a number of the host.
        by = torch.full((2,), 12.0 * (2 ** (i % 8 + 1) - 1) ** 2, dtype=torch.float64, device=numbers[0].device)
        by[:1].fill_(max(1, self.numel))
        return numbers[i // 8] / by[0] / by[1]


class Finding(NamedTuple):
    """What noise in one tensor costs, and what can be done with it."""

    sites: tuple[Site, ...]
    weight: float
    """The cost of a unit of mean squared error: noise beside each weight's gradient and beside the whole."""
    whole: float
    """The same for the whole gradient alone: the squared noise beside the square of the gradient."""
    options: list[Option]
    sources: list[tuple[Site, float]]
    """First sites of those that it can be rebuilt from, each with the gain of its error."""


@dataclasses.dataclass
class _Seen:
    """What a forward showed of one stored tensor."""

    sites: tuple[Site, ...]
    numel: int
    square: float
    """The mean square of its values."""
    options: list[Option]
    error: float
    """Of the codec that stored it then."""
    tried: float
    """The mean square of the noise that backward tries."""
    sources: tuple[Site, ...]
    gains: tuple[float, ...]
    """What a unit of each source's error adds to its own error if it is rebuilt; empty if it cannot be."""
    bend: float
    """Of its error if it is rebuilt, the mean square of the mean in each column beside the square of the mean square.

    A linear recipe leaves 0.
    """


_NUMBERS = ("numel", "square", "error", "tried", "bend")


class _Share(NamedTuple):
    """What noise does to the gradient of one input of an op, for each unit of its mean square."""

    is_leaf: bool
    noise: float
    """The square of the noise in that gradient."""
    square: float
    """The square of the gradient itself; if something flows on, of all that does."""
    along: float
    """What is added to the gradient, or lost of it, on the average, in units of that square."""


@dataclasses.dataclass
class _Felt:
    """What backward showed of one site."""

    noise: float = 0.0
    """Of a linear op: the square of the noise in the weight's gradient, for each unit of mean squared error."""
    weight: float = 0.0
    """The square of that gradient."""
    aligned: float = 1.0
    """The square of the sum of all rows of the output's gradient, beside the sum of their squares."""
    shares: dict[int, _Share] = dataclasses.field(default_factory=dict)
    """Of any other op, for each of its inputs."""

    def own(self, least: float) -> float:
        """Noise in the gradients of parameters that end here, beside their squares, which count as ``least`` at least.

        A weight between two norms has a gradient of nothing but rounding; noise there harms nobody.
        """
        ends = sum(share.noise / max(share.square, least) for share in self.shares.values() if share.is_leaf)
        return ends + (self.noise / max(self.weight, least) if self.weight > 0 else 0.0)

    @property
    def passed(self) -> float:
        """The part of what flows on that becomes noise."""
        return sum(share.noise / share.square for share in self.shares.values() if not share.is_leaf)

    @property
    def bias(self) -> float:
        """The part of what flows on that is lost or added on the average."""
        return max((share.along for share in self.shares.values() if not share.is_leaf), default=0.0)


_SHORT = 8
"""Rows of less than this part of a group would pay more than a bit a value for ranges of their own."""

_NEGLIGIBLE = 0.01
"""A parameter with less than this part of the gradient's length counts as if it had that."""


def groups_for(use: Use, bits: int, group: int) -> GroupQuant:
    """Dithered groups, in maps of one channel each: the ranges of channels differ; across rows that are very short."""
    short = not use.dims and layout_of(use.meta.shape, use.meta.stride).sizes[-1:] < (group // _SHORT,)
    return GroupQuant(bits, group, "channel" if use.dims else "flat" if short else "row", dither=True)


class MixTuner(Probed):
    """A codec for each tensor, ``bits`` a value on average over all of them; or nothing where it can be rebuilt.

    Measuring steps look at every tensor and at every gradient; the plan that follows stands until the next of them.
    What they measure stays on the device, with a note of what it is for, until somebody has to know (:meth:`settle`).
    """

    def __init__(self, bits: float, group: int) -> None:
        super().__init__()
        self.bits = bits
        self.group = group
        self._step = 0
        self._due = 0
        self._measuring = False
        self._seen: dict[Site, _Seen] = {}
        self._by_site: dict[Site, _Seen] = {}
        self._felt: dict[Site, _Felt] = {}
        self._notes: list[tuple[Sequence[Number], Callable[..., None]]] = []
        self._trying: dict[Site, Tensor] = {}  # what notes will say of it, for the backward that comes before
        self._rounded: set[Site] = set()  # first sites of what the last look found stored with an error
        self._spread: dict[Site, Tensor] = {}  # the variance of each channel, by first site, of this forward
        self._probed: dict[Site, float] = {}
        self._plan = Plan()
        self.planner: Callable[[list[Finding]], Plan] | None = None
        """Decides in place of ``bits``, from what a measuring step found."""
        self._bad = False  # a gradient of the last backward was not finite

    @property
    def ready(self) -> bool:
        """After the first forward."""
        return bool(self._seen or self._notes)

    @property
    def measuring(self) -> bool:
        """In steps 1, 3, 9 and so on."""
        return self._measuring

    @property
    def settled(self) -> Plan | None:
        """The plan, in steps that do not measure."""
        return None if self._measuring else self._plan

    def settle(self) -> None:
        """Read all numbers that were measured and not read yet, at once, and note them in the order of measuring."""
        notes, self._notes = self._notes, []
        found = read([number for numbers, _ in notes for number in numbers if isinstance(number, Tensor)])
        values = iter(found)
        for numbers, note in notes:
            note(*(float(next(values)) if isinstance(number, Tensor) else number for number in numbers))
        self._trying.clear()

    def begin(self, step: int) -> None:
        """Decide after a step that measured; a loss scale that is too large makes gradients that tell nothing."""
        if self._notes:
            with self.timed():
                self.settle()
        if self._measuring and self._felt and not self._bad:
            with self.timed():
                self._decide()
            self._due = min(3 * self._step, self._step + _LONGEST)
        self._step = step
        self._measuring = not self._plan or step >= self._due or step < self._due - _LONGEST
        self._spread.clear()
        if self._measuring:
            self._felt, self._bad = {}, False

    # ------------------------------------------------------------ looking

    def choose(self, use: Use, tensor: Tensor, base: Choice, from_sources: FromSources | None = None) -> Choice:
        """What the plan says; ``base`` where it says nothing."""
        if use.need is Need.LOGARITHM and base.codec == Cast("bfloat16"):
            return base.with_codec(LogQuant(group=self.group))
        if use.need not in _LEAST or tensor.numel() == 0:
            return base
        planned = self._plan.choices.get(use.sites[0])
        if planned is None or (planned.action is Action.REBUILD and not use.sources):
            planned = base
        if self._measuring:
            with self.timed():
                self._look(use, tensor.detach(), planned, from_sources)
        return planned

    def _look(self, use: Use, tensor: Tensor, now: Choice, from_sources: FromSources | None) -> None:
        piece = tensor
        if tensor.dim() > 1:
            # Groups of small maps hold several samples. With fewer they are shorter, and their ranges smaller.
            fewest = -(-self.group // max(1, math.prod(tensor.shape[2:]))) if use.dims else 1
            piece = tensor[: max(fewest, _LOOK * tensor.shape[0] // tensor.numel())]
        found = self._candidates(use, piece)
        if found is None:
            return
        candidates, numbers = found
        tried = candidates.tried(numbers)
        self._trying.update(dict.fromkeys(use.sites, tried))
        self._rounded.discard(use.sites[0])
        if now.action is Action.REBUILD or now.codec in candidates.fits:
            self._rounded.add(use.sites[0])
        if use.sharing and piece.dim() > 1:  # a norm reads it, and may scale its channels
            self._spread[use.sites[0]] = _of_channels(piece).var(1)
        rebuilt: tuple[Number, ...] = ()
        size = (0, 0)
        # Sources that are exact now tell nothing of what rebuilding costs, and what was measured earlier holds.
        if from_sources is not None and not self._rounded.isdisjoint(use.sources):
            error = from_sources.make().to(torch.float32).sub_(tensor)
            means = _means(error, bool(use.dims))
            factors = map(self._factor, use.sources, from_sources.scales)
            rebuilt, size = (square_of(error), square_of(means), *factors), (error.numel(), means.numel())

        count = len(numbers)

        def note(tried: float, *values: float) -> None:
            own, again = values[:count], values[count:]
            options, square = candidates.options(own)
            error = next((o.error for o in options if o.codec == now.codec), 0.0)
            errors = _errors(again[0], again[1], *size) if again else None
            gains, bend, lost = self._from_sources(use, errors, again[2:])
            if now.action is Action.REBUILD:
                error = lost
            options.append(Option(None, 0.0, use.meta.nbytes))
            self._remember(_Seen(use.sites, use.meta.numel, square, options, error, tried, use.sources, gains, bend))

        self._notes.append(((tried, *numbers, *rebuilt), note))

    def _factor(self, source: Site, scale: Tensor | None) -> Number:
        """What the error of a source is multiplied by on the way to a sum, before the mask: the mean over its channels.

        A channel's error is taken to be in proportion to its variance, as its ranges are.
        """
        spread = self._spread.get(source)
        if scale is None or spread is None:
            return 1.0
        return (scale.square() * spread).sum(dtype=torch.float64) / spread.sum(dtype=torch.float64)

    def _from_sources(
        self, use: Use, errors: tuple[float, float] | None, factors: Sequence[float]
    ) -> tuple[tuple[float, ...], float, float]:
        """Gains, bend and error of rebuilding the tensor from its sources as they are stored now."""
        of_sources = [self._seen[s].error if s in self._seen else 0.0 for s in use.sources]
        if errors is not None:
            # Where all channels are constant, or one is not finite, the factor is not a number.
            factors = [f if math.isfinite(f) else 1.0 for f in factors]
            base = sum(f * e for f, e in zip(factors, of_sources, strict=True))
            lost, of_means = errors
            if base > 0 and math.isfinite(lost):
                return tuple(lost / base * f for f in factors), of_means / lost**2 if lost > 0 else 0.0, lost
        before = self._seen.get(use.sites[0])
        if before is None or before.sources != use.sources or not before.gains:
            return (), 0.0, 0.0
        return before.gains, before.bend, sum(g * e for g, e in zip(before.gains, of_sources, strict=True))

    def _remember(self, seen: _Seen) -> None:
        self._seen[seen.sites[0]] = seen
        self._by_site.update(dict.fromkeys(seen.sites, seen))

    def _candidates(self, use: Use, piece: Tensor) -> tuple[_Candidates, list[Tensor]] | None:
        """Every codec that is worth a look, and what :class:`_Candidates` needs to know; None if there is none."""
        group = groups_for(use, 2, self.group)
        families: list[GroupQuant | BlockMean] = [group]
        short = group.layout == "row" and use.meta.shape[-1:] < (self.group,)
        if short:  # such rows have groups, and ranges, of their own
            families.append(dataclasses.replace(group, layout="flat"))
        if use.dims and max(use.meta.shape[2:]) > 1:
            families.append(BlockMean(8, use.dims, 2, self.group, dither=True))
        codecs: list[Codec] = [dataclasses.replace(family, bits=bits) for family in families for bits in range(1, 9)]
        plain = [dataclasses.replace(group, bits=bits, dither=False) for bits in _PLAIN]
        nbytes = {codec: codec.packed_nbytes(use.meta) for codec in (*codecs, *plain, _HALF)}
        least = _LEAST[use.need]
        fits = {c: n for c, n in nbytes.items() if getattr(c, "bits", 16) >= least and n < use.meta.nbytes}
        if not fits:
            return None
        numbers = [family.energy(piece, use.rectified) for family in families]
        # Values at the ends of their range (a few levels, many zeros) come back exactly without dither.
        support = ops.pack_band(flatten(piece)[0], 0.0, math.inf, False, True) if use.rectified else None
        for codec in plain:
            numbers.append(square_of(codec.encode(piece, key=1, support=support).decode(support).float().sub_(piece)))
        numbers.append(piece.to(torch.float32).square().mean())
        return _Candidates(codecs, plain, fits, piece.numel()), numbers

    # ------------------------------------------------------------ backward

    def wants(self, site: Site, need: Need) -> Wanted:
        """In a measuring step everything that is up for choice."""
        if not self._measuring or need not in _LEAST:
            return Wanted.NOTHING
        return Wanted.FACTOR if need is Need.LINEAR else Wanted.PROBE

    def observe_factor(self, site: Site, gradient: Tensor, factor: Tensor) -> None:
        """A linear op: the gradients of its output and of the weight."""
        with self.timed():
            channel = 1 if site.op == "Convolution" else gradient.dim() - 1
            columns = factor.numel() / max(1, gradient.shape[channel])
            if site.op == "GroupedMm":
                columns /= factor.shape[0]  # each row of the input is read for one of the weights
            others = [d for d in range(gradient.dim()) if d != channel]
            summed = square_of(gradient.detach().sum(others, dtype=torch.float32))
            numbers = square_of(gradient), square_of(factor), summed

        def note(square: float, weight: float, summed: float) -> None:
            self._bad = self._bad or not math.isfinite(square + weight)
            if weight == 0 or not math.isfinite(square + weight):
                return
            seen = self._by_site.get(site)
            error = 0.0 if seen is None else seen.error
            # The gradient seen has the noise of this step in it.
            weight = max(weight - columns * square * error, weight / 4)
            self._felt[site] = _Felt(columns * square, weight, summed / square if square > 0 else 1.0)

        self._notes.append((numbers, note))

    def tried(self, site: Site) -> Number | None:
        """The mean square of the noise that backward should try on a tensor; None for no trial."""
        seen = self._by_site.get(site)
        return self._trying.get(site, None if seen is None or seen.tried <= 0 else seen.tried)

    def observe_probe(self, site: Site, arrived: Sequence[Arrived]) -> None:
        """What noise of the size that :meth:`tried` gave did to the gradients of the op's inputs."""
        for edge in arrived:
            note = partial(self._note_probe, site, edge.edge, edge.is_leaf)
            self._notes.append(((edge.square, edge.change, edge.along, edge.total), note))

    def _note_probe(
        self, site: Site, edge: int, is_leaf: bool, square: float, change: float, along: float, total: float
    ) -> None:
        seen = self._by_site.get(site)
        if seen is None or seen.tried <= 0:
            return
        felt = self._felt.setdefault(site, _Felt())
        total = total if total > 0 else square
        self._bad = self._bad or not math.isfinite(change + total)
        if total > 0 and math.isfinite(change + total):
            felt.shares[edge] = _Share(is_leaf, change / seen.tried, total, abs(along) / total / seen.tried)

    # ------------------------------------------------------------ probes of the whole gradient

    def trial(self, use: Use) -> Choice | None:
        """Plain groups of four bits."""
        if use.need not in _LEAST:
            return None
        return Choice.store(groups_for(use, _TRIED, self.group))

    def measured(self, found: Sequence[tuple[Use, float]]) -> None:
        """Use probes of the whole gradient in place of what backward showed."""
        self.settle()
        for use, change in found:
            seen, trial = self._seen.get(use.sites[0]), self.trial(use)
            if seen is None or trial is None:
                continue
            error = next((o.error for o in seen.options if o.codec == trial.codec), 0.0)
            if error and math.isfinite(change):
                self._probed[use.sites[0]] = change / error
        if self._probed:
            with self.timed():
                self._decide()

    # ------------------------------------------------------------ deciding

    def findings(self) -> list[Finding]:
        """What the last measuring step found of each tensor, in the order of the forward.

        Only options are listed whose mean effect on what flows on is within a percent.
        """
        self.settle()
        weights = self._weights()
        whole = self._weights(_counts_whole)
        known = [(site, self._seen[site]) for site in weights]
        options, sources = self._offers(known, _BIAS)
        return [
            Finding(seen.sites, weights[site], whole.get(site, 0.0), those, [(known[j][0], gain) for j, gain in from_])
            for (site, seen), those, from_ in zip(known, options, sources, strict=True)
        ]

    def _weights(self, counts: Callable[[_Felt, int, float], float] | None = None) -> dict[Site, float]:
        """For each tensor the cost of a unit of mean squared error; ``counts`` tells how much each weight counts.

        Probes replace what backward showed. A probe's batch may be so small that some tensors are not stored there;
        those keep what backward showed, in the unit of the probes.
        """
        shown = self._shown(counts or _counts_each)
        if not self._probed:
            return shown
        both = [self._probed[site] / cost for site, cost in shown.items() if cost > 0 and site in self._probed]
        unit = statistics.median(both) if both else 1.0
        costs = {site: unit * cost for site, cost in shown.items()} | self._probed
        return {site: costs[site] for site in self._seen if site in costs}

    def _shown(self, counts: Callable[[_Felt, int, float], float]) -> dict[Site, float]:
        """What backward showed of each cost."""
        total, count = self._total(), sum(1 for felt in self._felt.values() if felt.weight > 0)
        least = _NEGLIGIBLE**2 * total
        spread = [f.own(least) * seen.square for seen in self._seen.values() for f in self._known(seen) if f.weight > 0]
        # Inputs that are not stored, such as the batch itself, come first. Their weights count like the others.
        hidden = [f for site, f in self._felt.items() if f.weight > 0 and site not in self._by_site]
        usual = statistics.median(spread) if spread else 1.0
        before = sum(counts(f, count, total) * usual for f in hidden)  # what noise in all that flows on costs
        found: dict[Site, float] = {}
        for first, seen in self._seen.items():
            known = self._known(seen)
            cost = sum(f.own(least) * counts(f, count, total) + f.passed * before for f in known)
            before += sum(f.own(least) * counts(f, count, total) * seen.square for f in known if f.weight > 0)
            if known and math.isfinite(cost):
                found[first] = cost
        return found

    def _total(self) -> float:
        """The square of all weights' gradients together."""
        return sum(felt.weight for felt in self._felt.values())

    def _known(self, seen: _Seen) -> list[_Felt]:
        return [self._felt[site] for site in seen.sites if site in self._felt]

    def follow(self, plan: Plan) -> None:
        """Begin with a plan, until a step has been measured."""
        self._plan = plan

    def _decide(self) -> None:
        if self.planner is not None:
            self._plan = self.planner(self.findings())
            return
        weights = self._weights()
        known = [(site, self._seen[site]) for site in weights]
        numel = sum(seen.numel for seen in self._seen.values())
        left = [seen for site, seen in self._seen.items() if site not in weights]
        spent = sum(next((o.nbytes for o in seen.options if o.error == seen.error), 0) for seen in left)
        # What no gradient reaches yet, as behind a gain of zero, stays as it is. If that takes more than its part, the
        # others do not pay for it: they are all that the gradient is made of.
        own = sum(seen.numel for _, seen in known)
        budget = int(max(self.bits * numel / 8 - spent, self.bits * own / 8))
        bias = _BIAS
        options, sources = self._offers(known, bias)
        while bias < 1 and _least(options, sources) > budget:
            bias *= 2
            options, sources = self._offers(known, bias)
        picked = assign(
            [weights[site] for site, _ in known],
            [[o.error for o in those] for those in options],
            [[o.nbytes for o in those] for those in options],
            sources,
            max(budget, _least(options, sources)),
        )
        self._plan = Plan(
            {
                site: Choice.rebuild() if k is None else those[k].choice
                for (site, _), those, k in zip(known, options, picked, strict=True)
            }
        )

    def _offers(
        self, known: list[tuple[Site, _Seen]], bias: float
    ) -> tuple[list[list[Option]], list[list[tuple[int, float]]]]:
        """For each tensor the options whose mean effect is within ``bias``, and what it can be rebuilt from."""
        place = {site: i for i, (site, _) in enumerate(known)}
        most = [self._most(seen, bias) for _, seen in known]
        sources: list[list[tuple[int, float]]] = []
        for _, seen in known:
            sources.append([])
            if not seen.gains or not all(s in place for s in seen.sources):
                continue
            # The mean that a bend leaves grows with the noise, not with its root: a limit to what each source adds.
            slope = self._slope(seen)
            limit = bias / math.sqrt(slope) if slope > 0 else math.inf
            limits = [limit / gain if gain > 0 else math.inf for gain in seen.gains]
            if all(
                any(o.error <= least and o.codec for o in self._seen[s].options)
                for s, least in zip(seen.sources, limits, strict=True)
            ):
                sources[-1] = [(place[s], gain) for s, gain in zip(seen.sources, seen.gains, strict=True)]
                for (j, _), least in zip(sources[-1], limits, strict=True):
                    most[j] = min(most[j], least)
        options = [[o for o in seen.options if o.error <= m] for (_, seen), m in zip(known, most, strict=True)]
        return options, sources

    def _most(self, seen: _Seen, bias: float) -> float:
        """The largest error whose mean effect on what flows on is at most ``bias``."""
        most = max((felt.bias for felt in self._known(seen)), default=0.0)
        return bias / most if most > 0 else math.inf

    def _slope(self, seen: _Seen) -> float:
        """The squared bias of a weight's gradient in units of its square, beside the squared error of the input."""
        least = _NEGLIGIBLE**2 * self._total()
        return max((seen.bend * f.own(least) * f.aligned for f in self._known(seen) if f.weight > 0), default=0.0)

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The plan, and what it was or will be made from."""
        self.settle()
        return {
            "plan": self._plan.to_data(),
            "step": self._step,
            "due": self._due,
            "measuring": self._measuring,
            "bad": self._bad,
            "probed": [[list(site), value] for site, value in self._probed.items()],
            "felt": [
                [list(s), f.noise, f.weight, f.aligned, [[edge, *share] for edge, share in f.shares.items()]]
                for s, f in self._felt.items()
            ],
            "seen": [
                {
                    **{key: getattr(seen, key) for key in _NUMBERS},
                    "options": [[o.codec and o.codec.to_config(), o.error, o.nbytes] for o in seen.options],
                    "sources": [list(s) for s in seen.sources],
                    "gains": list(seen.gains),
                    "sites": [list(s) for s in seen.sites],
                }
                for seen in self._seen.values()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        require_keys(state, {"plan", "step", "due", "measuring", "bad", "probed", "felt", "seen"})
        self._step, self._due, self._measuring = state["step"], state["due"], state["measuring"]
        self._bad = state["bad"]
        self._plan = Plan.from_data(state["plan"])
        self._probed = {site_of(site): value for site, value in state["probed"]}
        self._felt = {
            site_of(site): _Felt(noise, weight, aligned, {edge: _Share(*share) for edge, *share in shares})
            for site, noise, weight, aligned, shares in state["felt"]
        }
        self._seen, self._by_site, self._rounded = {}, {}, set()
        self._notes.clear()
        self._trying.clear()
        for row in state["seen"]:
            sites, sources = (tuple(map(site_of, row[key])) for key in ("sites", "sources"))
            options = [Option(c and from_config(c), error, nbytes) for c, error, nbytes in row["options"]]
            numbers = {key: row[key] for key in _NUMBERS}
            gains = tuple(row["gains"])
            self._remember(_Seen(sites=sites, sources=sources, options=options, gains=gains, **numbers))
            if row["error"] > 0:
                self._rounded.add(sites[0])


def _counts_each(felt: _Felt, count: int, total: float) -> float:
    """How much a weight counts: as one among all, and by its part of the whole gradient."""
    return 1.0 / max(1, count) + _counts_whole(felt, count, total)


def _counts_whole(felt: _Felt, count: int, total: float) -> float:
    """The part of the whole gradient's square that is this weight's."""
    return felt.weight / total if total > 0 else 0.0


def _least(options: Sequence[Sequence[Option]], sources: Sequence[Sequence[tuple[int, float]]]) -> int:
    """The bytes of the cheapest plan: everything is rebuilt that can be."""
    return sum(min(o.nbytes for o in those) for those, from_ in zip(options, sources, strict=True) if not from_)


def _of_channels(maps: Tensor) -> Tensor:
    """Each channel's values in a row of its own."""
    return maps.to(torch.float32).transpose(0, 1).flatten(1)


def _means(error: Tensor, maps: bool) -> Tensor:
    """The mean of each column or channel."""
    channel = 1 if maps else error.dim() - 1
    return error.mean([d for d in range(error.dim()) if d != channel]) if error.dim() > 1 else error


def _errors(square: float, of_means: float, numel: int, columns: int) -> tuple[float, float]:
    """The mean squared error, and the mean square of what is left of it in the mean of each column or channel.

    They come from the sums of squares of the errors and of their means. NaN, from values that are not finite, counts as
    the worst.
    """
    square, columns = square / max(1, numel), max(1, columns)
    if not math.isfinite(square):
        return math.inf, 0.0
    # Noise alone leaves a mean square of square / rows there, with a relative spread of sqrt(2 / columns).
    chance = square * columns / max(1, numel) * (1 + 3 * math.sqrt(2 / columns))
    return square, max(0.0, of_means / columns - chance)
