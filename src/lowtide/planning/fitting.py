"""The largest batch, or the longest sequence, whose step fits a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..machine.measure import available_nbytes
from ..report import size
from ..verify.check import LossFn
from .planner import BudgetError, BudgetPlan, Problem, budget_for, nbytes_of, plan, usable
from .profiling import Profile, profile, without_data
from .solvers import path
from .verifying import Verification, verify

_MOST = 1 << 24
_ENOUGH = 2**29
"""What operators take inside themselves is measured for a step that keeps at most so many bytes, and scaled."""
METHODS = ("plan", "plain")


@dataclass(frozen=True)
class Fit:
    """The largest size whose step fits; made by :func:`fit`."""

    size: int
    """What ``make_batch`` was called with."""
    budget: int
    peak: int
    """The predicted peak at that size."""
    plan: BudgetPlan | None
    """None if a plain step was to fit."""
    profile: Profile
    verification: Verification | None = None
    """A real step of that size; None if none was run."""

    def __str__(self) -> str:
        """In a few lines."""
        how = "as it is" if self.plan is None else "with a plan"
        lines = [f"{self.size} is the largest size that fits {size(self.budget)} {how}: peak {size(self.peak)}"]
        if self.plan is not None:
            lines.append(self.plan.summary())
        if self.verification is not None:
            lines.append(str(self.verification))
        return "\n".join(lines)


def fit(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    loss_fn: LossFn | None = None,
    budget: int | float | str | None = None,
    *,
    method: str = "plan",
    allow: Iterable[str] = ("compress", "rebuild"),
    blocks: str | Iterable[str] = (),
    solver: str = "lagrangian",
    optimizer: torch.optim.Optimizer | None = None,
    most: int = _MOST,
    measure: bool = True,
    run: bool = True,
) -> Fit:
    """Find the largest ``n`` for which a step on ``make_batch(n)`` fits ``budget``, and run one such step.

    ``n`` may be the number of samples, the length of a sequence, or any size with which memory grows. Sizes are tried
    without data, so none of them needs memory; ``make_batch`` is called for the tried sizes, and what it makes with
    torch functions has no data then. Without a budget the free memory of the model's device counts. ``method`` is
    "plan", or "plain" for the largest size of an ordinary step. No tensor gets fewer than 2 bits. With ``run`` a real
    step of that size runs in a child process, and the result has its peak and time; if that peak is above the budget, a
    smaller size is tried. ``measure`` is that of
    :func:`profile`, ``allow``, ``blocks`` and ``solver`` are those of :func:`plan`.

    >>> import torch, lowtide
    >>> layers = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    >>> model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))
    >>> loss = lambda model, x: model(x).square().mean()
    >>> make = lambda n: torch.randn(n, 64)
    >>> plain = lowtide.fit(model, make, loss, "64 MiB", method="plain", run=False)
    >>> planned = lowtide.fit(model, make, loss, "64 MiB", run=False)
    >>> planned.size > plain.size
    True
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"most must be a whole number of at least 1; got {most!r}")
    given = free_nbytes(model) if budget is None else nbytes_of(budget)
    limit = usable(given)
    allowed = (allow,) if isinstance(allow, str) else tuple(allow)
    named = (blocks,) if isinstance(blocks, str) else tuple(blocks)
    known: dict[tuple[int, bool], tuple[int, Profile]] = {}
    small: list[tuple[int, Profile]] = []  # of a few samples, with what operators take inside themselves

    def least(n: int, inside: bool = False) -> int:
        """The smallest peak of a step of size ``n``; with ``inside`` what operators take inside themselves counts."""
        if (n, inside) not in known:
            found = known[n, False][1] if (n, False) in known else at(n)
            if inside:
                if not small:
                    few = max(1, min(n, n * _ENOUGH // max(1, found.saved_nbytes)))
                    small.append((few, at(few, measure=True)))
                found = _with_workspaces(found, small[0][1], n / small[0][0])
            known[n, inside] = (_least_peak(found, method, allowed, named), found)
        return known[n, inside][0]

    def at(n: int, measure: bool = False) -> Profile:
        return without_data(model, lambda: make_batch(n), loss_fn, None, optimizer, measure=measure)

    best = _largest(least, limit, most)
    above = best + 1
    while best > 0 and least(best, measure) > limit:
        above, best = best, min(best - 1, int(best * limit / least(best, measure)))
    while best > 0 and above - best > 1:
        middle = (best + above) // 2
        best, above = (middle, above) if least(middle, measure) <= limit else (best, middle)
    if best == 0:
        peak, found = known[1, (1, True) in known]
        raise BudgetError(
            f"not even a size of 1 fits {size(given)}: its smallest possible peak is {size(budget_for(peak))}, of "
            f"which {size(found.rest)} is there before the step",
            budget_for(peak),
        )
    while True:
        peak, found = least(best, measure), known[best, measure][1]
        made = None if method == "plain" else plan(found, given, allow=allowed, blocks=named, solver=solver)
        verification = None
        if run:
            batch = make_batch(best)
            if made is not None and found.peak < available_nbytes() // 2:  # it can be measured what noise does
                measured = profile(model, batch, loss_fn, optimizer=optimizer)
                made = plan(measured, given, allow=allowed, blocks=named, solver=solver)
            verification = verify(
                *(made, model, batch, loss_fn),
                plain=found.peak < available_nbytes() // 2,
                beside=found.optimizer_nbytes,
                predicted_peak=peak if made is None or made.predicted is None else made.predicted.peak,
            )
        if verification is None or verification.peak <= given or best == 1:
            break
        # Operators take more inside themselves than in a small step: the next size that leaves as much room is tried.
        best, more = best - 1, verification.peak - least(best, measure)
        while best > 1 and least(best, measure) + more > given:
            best -= 1
    peak = peak if made is None or made.predicted is None else made.predicted.peak
    return Fit(best, given, peak, made, found, verification)


def _with_workspaces(found: Profile, small: Profile, times: float) -> Profile:
    """The profile with what operators take inside themselves, which grows with the batch, as a small one had it."""
    if small.times != found.times:  # another course of the step, so that moments do not correspond
        return found
    inside = tuple((moment, int(times * nbytes)) for moment, nbytes in small.workspaces)
    return dataclasses.replace(found, workspaces=inside)


def _least_peak(found: Profile, method: str, allowed: tuple[str, ...], blocks: tuple[str, ...]) -> int:
    if method == "plain":
        return found.peak
    return min(state.peak for p in Problem.all(found, allowed, blocks) for state in path(p.base, p.items))


def _largest(least: Callable[[int], int], limit: int, most: int) -> int:
    """The largest size from 1 on whose least peak is within the limit; 0 if there is none.

    Peaks grow with the size, nearly in proportion, so a line through two of them tells where to look next.
    """
    if least(1) > limit:
        return 0
    low, high = 1, 2
    while high <= most and least(high) <= limit:
        slope = (least(high) - least(low)) / (high - low)
        guess = int(high + 0.98 * (limit - least(high)) / slope) if slope > 0 else 2 * high
        low, high = high, max(high + 1, min(guess, 64 * high))
        if low == most:
            return most
        high = min(high, most)
    if high > most:
        return low
    while high - low > 1:
        inside = (limit - least(low)) / max(1, least(high) - least(low))
        middle = low + int(inside * (high - low))
        middle = min(max(middle, low + max(1, (high - low) // 8)), high - max(1, (high - low) // 8))
        middle = min(max(middle, low + 1), high - 1)
        if least(middle) <= limit:
            low = middle
        else:
            high = middle
    return low


def free_nbytes(model: nn.Module) -> int:
    """Free memory of the model's device, with what the model itself takes there."""
    device = next(model.parameters()).device
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    if device.type in ("cpu", "meta"):
        return available_nbytes() + own
    free, _ = torch.get_device_module(device).mem_get_info(device)
    return int(free) + own
