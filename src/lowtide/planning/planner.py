"""From a profile and a limit to a plan: which tensors stay, which are stored and how, which are made again."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..codecs import Codec
from ..machine.costs import codec_seconds, file_seconds, fresh_seconds
from ..policy.choice import Choice
from ..policy.plan import Plan, named
from ..policy.solve import assign
from ..report import size
from ..session.norms import can_read
from ..session.offload import IN_FLIGHT
from ..verify.check import LossFn
from . import verifying
from .checkpoints import candidates, checkpointed, selections, share_of
from .profiling import Part, Profile, Saved, digest
from .solvers import (
    KEEP,
    MOST,
    REBUILD,
    InfeasibleError,
    Item,
    Solution,
    State,
    cheapest,
    evaluate,
    front,
    level,
    path,
    solve,
)

ALLOWED = ("compress", "rebuild", "offload", "checkpoint")
"""What a plan may do with a tensor, besides keeping it; with "checkpoint" whole modules run again in backward."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

_TRADE = 0.2
"""A tenth of a step's time counts as much as an error of a tenth in every weight's gradient: the cost of that is
``2 * 0.1**2``, because noise counts beside each gradient and beside the whole."""


_FEW, _LADDER = 3, 8
"""Of more than a few sets of checkpoints those are solved by the slow solver that are best by the fast one at one of
so many limits."""
_DIVIDED = (2, 3, 4, 6)
"""Bits a value for which what ``auto`` would choose is known to every solver; 3 are its own."""
_RESERVE = 128
"""One part in so many of a budget is left free: small objects and rounding to pages."""


def usable(budget: int) -> int:
    """What a plan may use of a budget."""
    return budget - -(-budget // _RESERVE)


def budget_for(peak: int) -> int:
    """The smallest budget of which so much can be used."""
    budget = -(-peak * _RESERVE // (_RESERVE - 1))
    while usable(budget) < peak:
        budget += 1
    return budget


class BudgetError(ValueError):
    """A limit that no plan meets; ``least`` is the smallest that one does."""

    def __init__(self, message: str, least: float) -> None:
        super().__init__(message)
        self.least = least


def nbytes_of(budget: int | float | str) -> int:
    """Bytes that a user named.

    >>> nbytes_of("2 GiB"), nbytes_of("1.5GB"), nbytes_of(4096)
    (2147483648, 1500000000, 4096)
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise TypeError(f"a budget is a number of bytes or text such as '2 GiB'; got {budget!r}")
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", budget)
        unit = None if match is None else _UNITS.get(match[2].lower())
        if match is None or unit is None:
            raise ValueError(f"a budget is a number with a unit ({', '.join(u for u in _UNITS if u)}); got {budget!r}")
        budget = float(match[1]) * unit
    if not math.isfinite(budget) or budget <= 0:
        raise ValueError(f"a budget must be above zero; got {budget!r}")
    return int(budget)


@dataclass(frozen=True)
class Prediction:
    """What a plan is expected to bring, for one step of the batch that was profiled."""

    peak: int
    """Bytes at the highest moment: weights, gradients, optimizer and batch included."""
    plain_peak: int
    rest: int
    """Bytes that are there before and after a step."""
    saved_nbytes: int
    """What plain autograd keeps of the tensors that the plan is about."""
    stored_nbytes: int
    """What is kept of them instead."""
    error: float | None
    """The relative error of the whole gradient; None if the profile was made without data."""
    added_seconds: float
    step_seconds: float | None
    """Of the plain step, as it was recorded; None without data."""
    optimizer_nbytes: int = 0
    """What the optimizer keeps, which is part of all peaks."""

    @property
    def slowdown(self) -> float | None:
        """The time of a step beside that of a plain one."""
        return None if not self.step_seconds else 1 + self.added_seconds / self.step_seconds


@dataclass(frozen=True)
class BudgetPlan(Plan):
    """A plan that was made for a limit, with what it is expected to bring; :meth:`verify` measures that."""

    predicted: Prediction | None = dataclasses.field(default=None, compare=False)
    model: str = dataclasses.field(default="", compare=False)
    """A digest of the model that was profiled."""
    limit: str = dataclasses.field(default="", compare=False)
    """What was asked for, in words."""
    profile: Profile | None = dataclasses.field(default=None, compare=False, repr=False)
    """What it was made from, for a page; not written to a file."""

    def to_data(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        predicted = None if self.predicted is None else dataclasses.asdict(self.predicted)
        return {**super().to_data(), "predicted": predicted, "model": self.model, "limit": self.limit}

    @classmethod
    def from_data(cls, data: Any) -> BudgetPlan:
        """The plan that :meth:`to_data` gave; that of any other plan will do."""
        made = Plan.from_data(data)
        predicted = data.get("predicted")
        try:
            expected = None if predicted is None else Prediction(**predicted)
        except TypeError as error:
            raise ValueError(f"what this plan predicts cannot be read: {error}") from error
        model, limit = str(data.get("model", "")), str(data.get("limit", ""))
        return cls(made.choices, made.method, made.checkpoints, expected, model, limit)

    def verify(self, model: nn.Module, batch: Any, loss_fn: LossFn | None = None) -> verifying.Verification:
        """Run real steps in child processes: the measured peak, time and gradient error beside the predicted ones.

        Model, batch and ``loss_fn`` are sent there. A ``lambda`` can be sent if ``cloudpickle`` is installed; a
        function of a module always can.
        """
        if self.model and self.model != digest(model):
            raise ValueError("this plan was made for a model with other parameters; profile this one and plan again")
        expected = self.predicted
        return verifying.verify(
            *(self, model, batch, loss_fn),
            beside=0 if expected is None else expected.optimizer_nbytes,
            predicted_peak=None if expected is None else expected.peak,
            predicted_error=None if expected is None else expected.error,
            predicted_slowdown=None if expected is None else expected.slowdown,
        )

    def __str__(self) -> str:
        """What it brings, then every site."""
        return f"{self.summary()}\n{super().__str__()}" if self.predicted is not None else super().__str__()

    def summary(self) -> str:
        """What it brings, in a few lines."""
        expected = self.predicted
        if expected is None:
            return f"plan of {len(self)} sites"
        ratio = expected.saved_nbytes / max(1, expected.stored_nbytes)
        lines = [
            f"{self.limit}: peak {size(expected.peak)}, plain {size(expected.plain_peak)} "
            f"({expected.peak / max(1, expected.plain_peak):.2f}x), of which {size(expected.rest)} is there at rest",
            f"kept for backward: {size(expected.stored_nbytes)} of {size(expected.saved_nbytes)} ({ratio:.1f}x less)",
        ]
        if expected.error is not None:
            slower = f", step {expected.slowdown:.2f}x of plain" if expected.slowdown else ""
            lines.append(f"predicted gradient error {expected.error:.3g}{slower}")
        if self.checkpoints:
            lines.append(f"computed again in backward: {named(self.checkpoints)}")
        counts: dict[str, int] = {}
        for choice in self.choices.values():
            counts[str(choice)] = counts.get(str(choice), 0) + 1
        most = sorted(counts.items(), key=lambda row: -row[1])
        lines.append("sites: " + (", ".join(f"{number} {what}" for what, number in most) or "none"))
        return "\n".join(lines)


# ---------------------------------------------------------------- planning


def plan(
    profile: Profile,
    budget: int | float | str | None = None,
    *,
    ratio: float | None = None,
    bits: float | None = None,
    error: float | None = None,
    allow: Iterable[str] = ("compress", "rebuild"),
    blocks: str | Iterable[str] = (),
    solver: str = "lagrangian",
    time_weight: float = 1.0,
) -> BudgetPlan:
    """Choose what happens to each saved tensor, so that one limit is met at the least error and time.

    One limit is given: ``budget`` for the peak of memory, all included (bytes, or text such as ``"2 GiB"``); ``ratio``
    for how many times fewer bytes autograd keeps; ``bits`` for the bits of each kept value on average; ``error`` for
    the relative error of the gradient, at the smallest peak that has it. ``allow`` names what may be done with a
    tensor: ``"compress"`` it, ``"rebuild"`` it from others that are stored, ``"offload"`` it to host memory, or on a
    CPU to a file. With ``"checkpoint"`` whole blocks may run again in backward, which changes no gradient: members of
    a Sequential or a ModuleList that have modules inside, or those that ``blocks`` names, patterns of module paths such
    as ``"layers.*.mlp"``. That goes with ``budget`` and ``error``. ``solver`` is "lagrangian", "greedy" (faster,
    and at most as good) or "exact" (a dozen tensors at most); the cost of none rises with the budget. ``time_weight``
    says how much time counts beside the error: with 1 a tenth of a step counts as an error of a tenth, with 0 nothing.

    The peak is that of a model of the step: what is still in full in the forward, what is encoded, decoded and released
    in backward, gradients, and the memory inside operators if the profile has it. Raises :class:`BudgetError` if the
    limit cannot be met, with the smallest that can.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    >>> profile = lowtide.profile(model, torch.randn(4096, 64), lambda m, x: m(x).square().mean(), fake=True)
    >>> plan = lowtide.plan(profile, ratio=4)
    >>> plan.predicted.stored_nbytes <= profile.saved_nbytes / 4
    True
    """
    if not isinstance(profile, Profile):
        raise TypeError(f"plan() takes what lowtide.profile() returns; got {type(profile).__name__}")
    allowed = _allowed(allow)
    limits = {"budget": budget, "ratio": ratio, "bits": bits, "error": error}
    given = {name: value for name, value in limits.items() if value is not None}
    if len(given) != 1:
        raise TypeError(f"give one of budget, ratio, bits and error; got {', '.join(given) or 'none'}")
    ((name, value),) = given.items()
    if isinstance(time_weight, bool) or not isinstance(time_weight, (int, float)) or not 0 <= time_weight < math.inf:
        raise ValueError(f"time_weight must be a number of at least 0; got {time_weight!r}")
    if name == "budget":
        wanted: float = nbytes_of(value)
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a number above zero; got {value!r}")
    else:
        wanted = float(value)
    if name == "error" and profile.fake:
        raise ValueError("a profile without data knows no errors; profile a real step, or give budget, ratio or bits")
    if "checkpoint" in allowed and name in ("ratio", "bits"):
        raise ValueError(
            f"allow='checkpoint' goes with budget and error; {name} counts what is stored of each tensor, and a "
            "checkpoint stores none of those inside it"
        )
    problems = Problem.all(profile, allowed, blocks, time_weight)
    text = {"budget": f"budget {size(int(wanted))}" if name == "budget" else "", "ratio": f"{wanted:g}x fewer bytes"}
    text |= {"bits": f"{wanted:g} bits a value", "error": f"error {wanted:g}"}
    refused: list[tuple[int, Problem, InfeasibleError]] = []

    def solved(problem: Problem, solver: str) -> tuple[float, Problem, Solution]:
        if name == "budget":
            found = problem.under_peak(usable(int(wanted)), solver)
            return found.cost + problem.cost, problem, found
        if name == "error":
            found = problem.least_peak(wanted, solver)
            return float(found.peak), problem, found
        found = problem.under_sum(ratio, bits, solver)
        return found.cost, problem, found

    # The slow solver takes the same sets of checkpoints whatever the limit, or a larger budget could cost more.
    slow = _leading(problems) if solver == "lagrangian" else set(range(len(problems)))
    results = []
    for number, problem in enumerate(problems):
        try:
            results.append(solved(problem, solver if number in slow else "greedy"))
        except InfeasibleError as infeasible:
            refused.append((infeasible.least, problem, infeasible))
    if not results:
        _, problem, reason = min(refused, key=lambda row: row[0])
        raise problem.refused(name, wanted, reason) from reason
    _, problem, found = min(results, key=lambda row: row[0])
    return problem.plan(found.picks, text[name])


def _leading(problems: Sequence[Problem]) -> set[int]:
    """The numbers of those that cost least by the fast solver at some of the limits; all of them if they are few."""
    if len(problems) <= _FEW:
        return set(range(len(problems)))
    found = [problem.states("greedy") for problem in problems]
    low, high = min(states[-1].peak for states in found), max(states[0].peak for states in found)
    leading = set()
    for rung in range(_LADDER):
        limit = low + (high - low) * rung // (_LADDER - 1)
        costs = [
            next((state.score + problem.cost for state in states if state.peak <= limit), math.inf)
            for problem, states in zip(problems, found, strict=True)
        ]
        leading.add(costs.index(min(costs)))
    return leading


def _allowed(allow: Iterable[str]) -> tuple[str, ...]:
    names = (allow,) if isinstance(allow, str) else tuple(allow)
    unknown = [name for name in names if name not in ALLOWED]
    if unknown:
        raise ValueError(f"allow takes {', '.join(ALLOWED)}; got {', '.join(map(repr, unknown))}")
    return names


@dataclass(frozen=True)
class Problem:
    """A profile as solvers see it, and the way back from their picks to a plan."""

    profile: Profile
    base: Sequence[int]
    """Bytes at each moment that no plan changes."""
    items: Sequence[Item]
    choices: Sequence[Sequence[Choice]]
    """For each item what its options stand for."""
    price: float
    plain: Profile
    """Of the step as it is; ``profile`` is that with the ``parts`` checkpointed."""
    parts: Sequence[Part] = ()
    time_weight: float = 1.0

    @property
    def recomputed(self) -> float:
        """The time of all second runs as a part of the step's."""
        return sum(share_of(self.plain, part) for part in self.parts)

    @property
    def cost(self) -> float:
        """Of the second runs, as solvers count cost."""
        return self.time_weight * _TRADE * self.recomputed

    @classmethod
    def all(
        cls, profile: Profile, allowed: Sequence[str], blocks: str | Iterable[str] = (), time_weight: float = 1.0
    ) -> list[Problem]:
        """One for each set of modules that is worth trying as checkpoints; the first has none."""
        patterns = (blocks,) if isinstance(blocks, str) else tuple(blocks)
        if "checkpoint" not in allowed:
            if patterns:
                raise ValueError(f"blocks goes with allow='checkpoint'; got blocks={patterns!r}")
            sets: Sequence[Sequence[Part]] = [()]
        else:
            sets = selections(profile, candidates(profile, patterns))
        found = [cls.of(profile, allowed, parts, time_weight) for parts in sets]
        if "offload" in allowed and not profile.device.startswith("cpu"):  # without it nothing is in flight
            others = [name for name in allowed if name != "offload"]
            found = [cls.of(profile, others, parts, time_weight) for parts in sets] + found
        return found

    @classmethod
    def of(
        cls, profile: Profile, allowed: Sequence[str], parts: Sequence[Part] = (), time_weight: float = 1.0
    ) -> Problem:
        """Every tensor that a plan may decide about, with the times at which it takes memory."""
        plain, profile = profile, checkpointed(profile, parts)
        place = {saved.sites[0]: i for i, saved in enumerate(profile.saved)}
        starts = sorted({first for saved in profile.saved for first, _ in saved.decodings})
        items, choices = [], []
        total = profile.level()
        count = sum(saved.has_values for saved in plain.saved)
        for i, saved in enumerate(profile.saved):
            block = profile.blocks[saved.block]
            total[block.born : block.died + 1] -= saved.nbytes
            offered = _options(saved, profile, allowed)
            sources = tuple((place[site], gain) for site, gain in saved.sources if site in place)
            may = "rebuild" in allowed and len(sources) == len(saved.sources) and all(j < i for j, _ in sources)
            items.append(
                Item(
                    full=saved.nbytes,
                    born=block.born,
                    sealed=min(max(block.born, saved.sealed), block.died),
                    died=block.died,
                    windows=_windows(saved, starts, block.died),
                    nbytes=tuple(nbytes for _, nbytes, _, _ in offered),
                    error=tuple(error for _, _, error, _ in offered),
                    seconds=tuple(seconds for _, _, _, seconds in offered),
                    weight=saved.weight / (count if profile.fake else 1),
                    may_keep=saved.has_values,
                    sources=sources if may else (),
                    unopened=tuple(k for k, (choice, *_) in enumerate(offered) if _is_unopened(choice, saved, profile)),
                    rebuilt_nbytes=saved.lossless_nbytes,
                    # A sum of terms has a second tensor of its size while it is rebuilt. The operator that reads it
                    # makes a gradient of that size right after, when the second is gone, so it does not count.
                    rebuilt_seconds=_rebuilding(saved, profile),
                )
            )
            choices.append([choice for choice, _, _, _ in offered])
        if "offload" in allowed and not profile.device.startswith("cpu"):
            sent = [saved.nbytes for saved in profile.saved if saved.has_values]
            total += min(sum(sent), max(IN_FLIGHT, *sent, 0))  # the most that a session has on its way out or ahead
        seconds = profile.step_seconds
        price = time_weight * _TRADE / seconds if seconds else 0.0
        return cls(profile, total.tolist(), items, choices, price, plain, parts, time_weight)

    @functools.cached_property
    def known(self) -> list[list[int]]:
        """Picks that ``auto`` would take, by its own way to divide bits: no plan costs more than those that fit.

        The codecs of ``division`` and ``actnn`` take the bytes of dithered ones, and have twice their error.
        """
        return [self.divided(bits) for bits in _DIVIDED] if any(len(options) > 1 for options in self.choices) else []

    def divided(self, bits: float) -> list[int]:
        """What ``auto`` would do with so many bits a value on average."""
        picks = [KEEP if item.may_keep else 0 for item in self.items]
        rows = [i for i, options in enumerate(self.choices) if self.items[i].may_keep and _codecs(options)]
        place = {i: row for row, i in enumerate(rows)}
        offers = [[*_codecs(self.choices[i]), KEEP] for i in rows]
        items = [self.items[i] for i in rows]
        found = assign(
            [item.weight for item in items],
            [[0.0 if k == KEEP else item.error[k] for k in ks] for item, ks in zip(items, offers, strict=True)],
            [
                [item.full if k == KEEP else item.nbytes[k] - item.rebuilt_nbytes for k in ks]
                for item, ks in zip(items, offers, strict=True)
            ],
            [
                [(place[j], gain) for j, gain in item.sources] if all(j in place for j, _ in item.sources) else []
                for item in items
            ],
            int(bits * sum(math.prod(self.profile.saved[i].shape) for i in rows) / 8),
        )
        counts = [1] * len(picks)
        for i, ks, k in zip(rows, offers, found, strict=True):
            made_from = sum(counts[j] for j, _ in self.items[i].sources)
            if k is None and made_from <= MOST:
                picks[i], counts[i] = REBUILD, made_from
            else:  # through chains it may be more than any solver allows; then it is stored in its most exact form
                picks[i] = ks[-2 if k is None else k]
        return picks

    @functools.cached_property
    def _fronts(self) -> dict[str, tuple[State, ...]]:
        return {}

    def states(self, solver: str) -> tuple[State, ...]:
        """All that "greedy" or "lagrangian" takes from, whatever the limit: peaks fall and costs rise."""
        if solver not in self._fronts:
            self._fronts[solver] = front(self.base, self.items, solver=solver, price=self.price, known=self.known)
        return self._fronts[solver]

    def under_peak(self, limit: int, solver: str) -> Solution:
        """The best for a limit on the peak."""
        if solver in ("greedy", "lagrangian"):
            return cheapest(self.states(solver), limit)
        return solve(self.base, self.items, limit, price=self.price, solver=solver, known=self.known)

    def least_peak(self, error: float, solver: str) -> Solution:
        """The smallest peak on the way down that keeps the error within a limit."""
        states = path(self.base, self.items, price=self.price)
        best = states[0]  # it keeps all that it may
        fronts = [states[1:]]
        if solver == "lagrangian":
            fronts.append(self.states(solver))
        for found in fronts:
            rest = [state for state in found if state.peak < best.peak]
            low, high = -1, len(rest)
            while high - low > 1:  # errors grow as peaks fall
                middle = (low + high) // 2
                low, high = (middle, high) if self.error(rest[middle].picks) <= error else (low, middle)
            best = rest[low] if low >= 0 else best
        return best.solution

    def under_sum(self, ratio: float | None, bits: float | None, solver: str) -> Solution:
        """The best for a limit on all that is kept, whatever the times."""
        if ratio is not None:
            limit = self.saved_nbytes / ratio
        else:
            assert bits is not None
            values = [saved for saved in self.profile.saved if saved.has_values]
            limit = sum(bits * math.prod(saved.shape) / 8 for saved in values)
            limit += sum(saved.lossless_nbytes for saved in self.profile.saved)
        # Moment 0 does not count, and everything lives at moment 1.
        still = [item._replace(born=0, sealed=0, died=1, windows=()) for item in self.items]
        found = solve([-(2**62), 0], still, int(limit), price=self.price, solver=solver, known=self.known)
        return evaluate(self.base, self.items, found.picks, self.price)

    @property
    def saved_nbytes(self) -> int:
        """What plain autograd keeps of the tensors that a plan is about."""
        return sum(item.full for item in self.items)

    def error(self, picks: Sequence[int]) -> float:
        """The relative error of the whole gradient."""
        whole = [item._replace(weight=saved.whole) for item, saved in zip(self.items, self.profile.saved, strict=True)]
        return math.sqrt(evaluate(self.base, whole, picks, 0.0).error)

    def refused(self, name: str, wanted: float, infeasible: InfeasibleError) -> BudgetError:
        """The error that says what is the least, and what dominates it."""
        if name == "error":
            return BudgetError(f"no plan has an error of {wanted:g} or less", math.nan)
        if name != "budget":
            least = infeasible.least
            if name == "ratio":
                most = self.saved_nbytes / max(1, least)
                return BudgetError(f"ratio={wanted:g} cannot be met; the largest possible is {most:.4g}", most)
            values = sum(math.prod(saved.shape) for saved in self.profile.saved if saved.has_values)
            masks = sum(saved.lossless_nbytes for saved in self.profile.saved)
            fewest = 8 * (least - masks) / max(1, values)
            return BudgetError(f"bits={wanted:g} cannot be met; the smallest possible is {fewest:.4g}", fewest)
        at, least = infeasible.at, budget_for(infeasible.least)
        names = ", ".join(f"{role} {label} {size(n)}".replace("  ", " ") for role, label, n in self._fixed(at)[:3])
        return BudgetError(
            f"a budget of {size(int(wanted))} cannot be met: the smallest possible peak is {size(least)}, "
            f"of which {size(self.profile.rest)} is there before the step; at that moment most is held by {names}. A "
            "smaller batch needs less",
            least,
        )

    def _fixed(self, at: int) -> list[tuple[str, str, int]]:
        """Holders at a moment that no plan can shrink."""
        may = {saved.block for saved in self.profile.saved}
        others = dataclasses.replace(
            self.profile, blocks=tuple(b for i, b in enumerate(self.profile.blocks) if i not in may)
        )
        inside = [
            (s.sites[0], s.nbytes) for s, i in zip(self.profile.saved, self.items, strict=True) if _full_at(i, at)
        ]
        rows = [("saved", f"{site}, in full", nbytes) for site, nbytes in inside]
        return sorted([*others.holders(at), *rows], key=lambda row: -row[2])

    def plan(self, picks: Sequence[int], limit: str) -> BudgetPlan:
        """The picks as a plan."""
        chosen: dict[Any, Choice] = {}
        stored = 0
        for saved, item, options, pick in zip(self.profile.saved, self.items, self.choices, picks, strict=True):
            stored += item.full if pick == KEEP else item.rebuilt_nbytes if pick == REBUILD else item.nbytes[pick]
            if not saved.has_values:
                continue
            choice = Choice.keep("it fits") if pick == KEEP else Choice.rebuild() if pick == REBUILD else options[pick]
            chosen.update(dict.fromkeys(saved.sites, choice))
        found = evaluate(self.base, self.items, picks, self.price)
        held = {number for part in self.parts for number in part.inputs} & {s.block for s in self.plain.saved}
        predicted = Prediction(
            peak=found.peak,
            plain_peak=self.plain.peak,
            rest=self.profile.rest,
            saved_nbytes=sum(saved.nbytes for saved in self.plain.saved),
            stored_nbytes=stored + sum(self.plain.blocks[number].nbytes for number in held),
            error=None if self.profile.fake else self.error(picks),
            added_seconds=found.seconds + self.recomputed * self.profile.step_seconds,
            step_seconds=self.profile.step_seconds or None,
            optimizer_nbytes=self.profile.optimizer_nbytes,
        )
        paths = tuple(part.path for part in self.parts)
        return BudgetPlan(chosen, f"plan for {limit}", paths, predicted, self.profile.model, limit, self.plain)

    def levels(self, picks: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Bytes at each moment."""
        return level(self.base, self.items, picks)


def _options(saved: Saved, profile: Profile, allowed: Sequence[str]) -> list[tuple[Choice, int, float, float]]:
    """What may happen to a tensor, besides keeping and rebuilding it: choice, bytes, error, seconds."""
    if not saved.has_values:
        return [(Choice.keep("lossless"), saved.lossless_nbytes, 0.0, 0.0)]
    meta, found = saved.meta, []
    if "compress" in allowed:
        for offer in saved.offers:
            nbytes = offer.codec.packed_nbytes(meta)
            if nbytes + saved.lossless_nbytes < saved.nbytes:
                seconds = _coding(offer.codec, saved, profile)
                found.append((Choice.store(offer.codec), nbytes + saved.lossless_nbytes, offer.error, seconds))
    if "offload" in allowed:
        home = "file" if profile.device.startswith("cpu") else "host"
        seconds = meta.nbytes * (file_seconds().encode + file_seconds().decode) if home == "file" else 0.0
        found.append((Choice.offload(home), saved.lossless_nbytes, 0.0, seconds))
    return found


def _codecs(options: Sequence[Choice]) -> list[int]:
    """Which of them store with a codec."""
    return [k for k, choice in enumerate(options) if choice.codec is not None]


def _coding(codec: Codec, saved: Saved, profile: Profile) -> float:
    """Seconds to encode once and to decode for each read."""
    if not profile.step_seconds:
        return 0.0
    cost = codec_seconds(codec, getattr(torch, saved.dtype), saved.rectified)
    values = math.prod(saved.shape)
    return cost.to_encode(values) + len(saved.decodings) * (cost.to_decode(values) + _faults(saved, profile))


def _rebuilding(saved: Saved, profile: Profile) -> float:
    """Seconds to decode the sources and to make the tensor from them, for each read."""
    if not profile.step_seconds or not saved.sources or not saved.offers:
        return 0.0
    cost = codec_seconds(saved.offers[0].codec, getattr(torch, saved.dtype))
    each = len(saved.sources) * 2 * cost.to_decode(math.prod(saved.shape))
    return len(saved.decodings) * (each + _faults(saved, profile))


def _faults(saved: Saved, profile: Profile) -> float:
    """Seconds of the page faults that a read brings: backward takes memory for a tensor that it would have had.

    They need not happen in the read itself. If the tensor had been kept, its memory would serve another one later.
    """
    return saved.nbytes * fresh_seconds() if profile.device.startswith("cpu") else 0.0


def _windows(saved: Saved, starts: Sequence[int], died: int) -> tuple[tuple[int, int], ...]:
    """Times at which a stored tensor is there in full again.

    A session keeps what it decoded for the next reader of the same tensor, until another tensor is decoded.
    """
    if not saved.transient:
        return ()
    found: list[tuple[int, int]] = []
    reads = saved.decodings
    own = {first for first, _ in reads}
    for number, (first, last) in enumerate(reads):
        if number + 1 < len(reads):
            after = next((start for start in starts if start > first and start not in own), died + 1)
            last = max(last, min(after - 1, reads[number + 1][0]))
        last = min(last, died)
        if first > last:
            continue
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


def _is_unopened(choice: Choice, saved: Saved, profile: Profile) -> bool:
    """Is what is stored so read as it is? Its only readers are batch norms then, for which there is a kernel."""
    if choice.codec is None or not saved.code_reads or set(saved.decodings) - set(saved.code_reads):
        return False
    return can_read(choice.codec, saved.meta, profile.device.partition(":")[0])


def _full_at(item: Item, at: int) -> bool:
    opened = not item.unopened and any(first <= at <= last for first, last in item.windows)
    return opened or item.born <= at <= item.sealed
