"""Everybody who has a say about a saved tensor, in order: the method, what it learned, and what a guard demands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from ..codecs import Cast, Codec, GroupQuant, LogQuant, Raw
from ..codecs.groups import BITS
from ..graph import capture
from ..graph.capture import Site
from ..graph.rules import Need
from ..graph.thrift import RECURRENT, thriftier, thriftier_and_exact
from .choice import Action, Choice
from .methods import Lossless, Method, Planned
from .plan import Plan
from .tuners.base import FromSources, Tuner
from .use import Use

Demand = Callable[[Use, Choice], Choice]
"""Sees what the method chose, and may ask for more precision."""

BOUNDARY_BITS = 8
"""For what a checkpoint keeps; measured in docs/checkpointing.md."""

_DIVISOR = Cast("bfloat16")
_SMALL = Choice.store(Raw(), why="small")
_REMEMBERED = 4096


def boundary_codec(bits: int, spatial: bool) -> Codec:
    """What keeps a checkpoint's inputs with ``bits`` bits a value: dithered groups, or bfloat16 for 16."""
    return Cast("bfloat16") if bits > 8 else GroupQuant(bits, layout="channel" if spatial else "row", dither=True)


def require_boundary_bits(bits: int | None) -> None:
    """Raise unless checkpoints' inputs can be kept with so many bits."""
    allowed = (None, *BITS, 16)
    if isinstance(bits, bool) or bits not in allowed:
        raise ValueError(
            f"boundary_bits must be a whole number from 1 to 8, 16 for bfloat16, or None to keep what checkpoints keep "
            f"as it is; got {bits!r}"
        )


class Policy:
    """Decides about the values of every saved tensor of a session. The session carries out what it says.

    The rules have spoken before: a policy is asked only about values that may be approximated.

    1. A tensor of fewer than ``min_numel`` values is kept. It holds few bytes, and packing it costs time.
    2. With ``derive`` a tensor is rebuilt if its sources are few and kept at least as precisely as it needs.
    3. The method chooses.
    4. The method's tuner refines that by what it learned from earlier steps.
    5. What a checkpoint keeps gets ``boundary_bits`` instead, unless the method or its plan keeps it exactly.
    6. A demand, such as a guard's, has the last word.
    """

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        min_numel: int,
        derive: bool,
        boundary_bits: int | None = BOUNDARY_BITS,
    ) -> None:
        self.method = method
        self.min_numel = min_numel
        self.derive = derive
        self.boundary_bits = boundary_bits
        self.tuner: Tuner | None = method.tuner(model)
        self.demand: Demand | None = None
        self._twins = method
        self._remembered: dict[Use, Choice] = {}
        self._sharing: dict[Site, int] = {}  # in the whole batch, where this sees a part of it
        self._decided: dict[Any, Any] = {}
        """What a session made of choices that stay the same; see :meth:`remember`."""
        self._settled: object | None = None
        """What those answers follow from, besides the method."""

    @property
    def rebuilds(self) -> bool:
        """May a choice be to rebuild a tensor? Only then is it worth finding out what can be rebuilt."""
        return self.derive or self.method.rebuilds

    @property
    def twin(
        self,
    ) -> Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Callable[..., Any] | None]:
        """The method's twins, if it has any, before those that serve every method."""
        method = self.method
        reruns = any(site.op == RECURRENT for site in method.plan.choices) if isinstance(method, Planned) else True
        common = thriftier if reruns and not isinstance(method, Lossless) else thriftier_and_exact
        if type(self._twins).twin is Method.twin:
            return common
        return lambda func, args, kwargs: self._twins.twin(func, args, kwargs) or common(func, args, kwargs)

    def ignores(self, numel: int, storage_numel: int) -> bool:
        """Is a tensor too small to bother? Not if it would keep a much larger storage alive."""
        return numel < self.min_numel and numel * 4 >= storage_numel

    def choose(self, use: Use, tensor: Tensor, from_sources: FromSources | None) -> Choice:
        """What happens to ``tensor``; ``from_sources`` makes it again from those it can be rebuilt from."""
        if use.meta.numel < self.min_numel:
            return _SMALL
        if self._sharing:
            use = use._replace(sharing=self._sharing.get(use.sites[0], use.sharing))
        rebuilds = self.derive and use.derivable and use.need is not Need.RELATIVE
        if rebuilds and use.source_need >= use.need and use.source_bits >= use.least_bits:
            choice = Choice.rebuild()
        else:
            choice = self._method_chooses(use)
            if use.boundary:
                choice = self._at_boundary(use, choice)
            elif self.tuner is not None and choice.action is not Action.KEEP and capture.has_data(tensor):
                choice = self.tuner.choose(use, tensor, choice, from_sources)
            if choice.action is Action.REBUILD and not use.sources:
                choice = Choice.keep("it was to be rebuilt, and here it cannot be")
        if self.demand is not None and choice.action is not Action.KEEP:
            choice = self.demand(use, choice)
        return choice

    def _method_chooses(self, use: Use) -> Choice:
        """A method answers the same question always alike, so it is asked once."""
        choice = self._remembered.get(use)
        if choice is None:
            if len(self._remembered) >= _REMEMBERED:  # shapes that change from step to step
                self._remembered.clear()
                self._decided.clear()  # or `like` would not learn again of what is decided without a question
            choice = self._remembered[use] = _safe(use, self.method.choose(use))
        return choice

    def _at_boundary(self, use: Use, choice: Choice) -> Choice:
        """What a checkpoint keeps of a tensor: a plan's choice, what the caller asked for, or ``boundary_bits``."""
        planned = isinstance(self.method, Planned)
        if choice.action is Action.KEEP and not (planned and use.codec is not None):
            return choice
        if use.codec is not None and not (planned and choice.action is not Action.KEEP):
            picks = (
                "stays exact: asked for, or its block picks by values (top-k), and would pick others for other values"
            )
            return Choice.store(use.codec, why=picks if use.codec.exact else "asked for at the checkpoint")
        if planned or choice.codec is None or choice.codec.exact or isinstance(choice.codec, Cast):
            return choice
        if self.boundary_bits is None:
            return Choice.keep("boundary_bits=None keeps what checkpoints keep")
        return choice.with_codec(boundary_codec(max(self.boundary_bits, use.other_bits), bool(use.dims)))

    @property
    def looks(self) -> bool:
        """Does the tuner look at tensors now?"""
        return self.tuner is not None and self.tuner.settled is None

    @property
    def is_fixed(self) -> bool:
        """Is the same question answered alike now: by the method alone, or by what a tuner has learned before?"""
        return self.demand is None and not self._sharing and not self.looks

    def recall(self, question: Any) -> Any:
        """The answer to a question that was asked before, as long as the tuner has learned nothing since; or None."""
        settled = None if self.tuner is None else self.tuner.settled
        if settled is not self._settled:
            self._settled = settled
            self._decided.clear()
        return self._decided.get(question)

    def remember(self, question: Any, answer: Any) -> None:
        """Keep an answer for :meth:`recall`, which was asked for it in vain."""
        if len(self._decided) >= _REMEMBERED:
            self._decided.clear()
        self._decided[question] = answer

    def like(self, model: nn.Module, share: float = 1.0) -> Policy:
        """A policy that decides as this one does now, for a part ``share`` of the samples, and learns apart."""
        other = Policy(self.method, model, int(self.min_numel * share), self.derive, self.boundary_bits)
        other.demand = self.demand
        if share < 1:
            other._sharing = {use.sites[0]: use.sharing for use in self._remembered if use.sharing}
        if self.tuner is not None and other.tuner is not None:
            other.tuner.load_state_dict(self.tuner.state_dict())
        return other

    def following(self, plan: Plan, model: nn.Module) -> Policy:
        """A policy that follows ``plan``, whatever this one would choose, with the twins of this one."""
        other = Policy(Planned(plan), model, self.min_numel, False)
        other._twins = self.method
        return other

    def spare(self, spared: Collection[Use], stored: Collection[Use] | None) -> None:
        """From now on keep these tensors exact, by their first sites; with ``stored`` also all that are not in it."""
        exact = {use.sites[0] for use in spared}
        others = None if stored is None else {use.sites[0] for use in stored}
        demand = self.demand

        def spare(use: Use, choice: Choice) -> Choice:
            first = use.sites[0]
            if first in exact or (others is not None and first not in others):
                return Choice.keep("spared")
            return choice if demand is None else demand(use, choice)

        self.demand = spare


def _safe(use: Use, choice: Choice) -> Choice:
    """No method rounds a divisor by a step: bfloat16 has the exponents of float32, so its error is relative."""
    codec = choice.codec
    if isinstance(codec, LogQuant) and use.need is not Need.LOGARITHM:
        return Choice.keep(f"{codec.id} stores log-probabilities alone")
    if use.need is not Need.RELATIVE or codec is None or codec.exact or codec == _DIVISOR:
        return choice
    return Choice.store(_DIVISOR, choice.home)
