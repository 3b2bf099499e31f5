"""Who gets the bits: least total error under a budget. Pure functions of tensors and lists.

Both allocators are the greedy solution of a linear relaxation: steps that lower the error are taken in the order
of gain per unit of budget. Because each item's gains fall from step to step, taking them in this order is optimal
until the first step that no longer fits, and what is lost after it is at most the gain of that one step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..codecs.groups import sound

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8)

_ROUNDS = 8
_HALVINGS = 60
"""Of a range of prices over sixty decades: what is left is a part in 1e16."""

_WORTH = 0.05
"""A trade lowers the sum of errors by this part at least. Sensitivities are measured to no better than that."""


def allocate(
    cost: Tensor,
    weight: Tensor | int,
    budget: Tensor | int,
    widths: Sequence[int] = WIDTHS,
    floors: Sequence[int] | None = None,
) -> Tensor:
    """Bits ``b`` that minimise ``sum(cost / (2**b - 1)**2)`` under ``sum(weight * b) <= budget``.

    ``weight`` is a whole number for each item (or one for all), ``b`` is one of ``widths``. Where all steps weigh the
    same (equal weights, ``widths`` without gaps) the result is optimal. Otherwise its objective is above the optimum
    by at most the gain of one step: the first, in order of gain per weight, that did not fit. What is left
    after that step goes to later steps that do fit, in a few rounds; each round ends the hopes of one size of step,
    so the filling is complete for up to eight sizes.

    Ties are level: of equal gains the lower width is raised first, then the first item, so equal costs (or none
    known: all zero) give widths that differ by one step at most. A cost that is negative or not finite counts as the
    largest finite one: such an item is treated as delicate but cannot starve the others.

    With ``floors``, a number for each item, item ``i`` gets at least ``floors[i]`` (at most the largest width), also
    where that takes more than the budget; then nobody gets more than its floor.

    Nothing is read back from a device, unless ``weight`` lies on one. A ``budget`` that is a tensor is not
    checked: below the minimum, every item gets the least width.

    >>> allocate(torch.ones(5), 1, 12).tolist()
    [3, 3, 2, 2, 2]
    >>> allocate(torch.tensor([1.0, 100.0]), 1, 6).tolist()
    [2, 4]
    >>> allocate(torch.tensor([1.0, 100.0]), 1, 6, floors=(3, 1)).tolist()
    [3, 3]
    """
    table = _checked(widths)
    items = cost.numel()
    weights = torch.full((items,), weight, device="cpu") if isinstance(weight, int) else weight
    _check_weights(cost, weights)
    least = table[0] * int(weights.sum())
    if not isinstance(budget, Tensor) and budget < least:
        raise ValueError(
            f"a budget of {budget} is too small: {items} items of total weight {int(weights.sum())} need at least "
            f"{least} with {table[0]} bits each; raise the budget or allow smaller widths"
        )
    device = cost.device
    step_bits = [high - low for low, high in itertools.pairwise(table)]
    rounds = min(_ROUNDS, len(torch.unique(weights)) * len(set(step_bits))) if items else 0
    weights = weights.to(device)
    steps = torch.tensor(step_bits, device=device)
    error = [1.0 / (2**b - 1) ** 2 for b in table]
    gain = torch.tensor([a - b for a, b in itertools.pairwise(error)], dtype=torch.float64, device=device)

    # One row for each step, so that a stable sort raises lower widths first; an item's own steps stay in order.
    size = steps[:, None] * weights
    worth = (gain / steps)[:, None] * (sound(cost) / weights)
    order = torch.sort(worth.view(-1), descending=True, stable=True).indices
    left = budget.to(device) - least if isinstance(budget, Tensor) else torch.tensor(budget - least, device=device)
    given = torch.zeros(items, device="cpu") if floors is None else torch.tensor(floors, device="cpu")
    taken = (torch.tensor(table[:-1], device="cpu")[:, None] < given).to(device)
    left = left - (size * taken).sum()
    for _ in range(rounds):
        open_ = (taken | (size <= left)).cumprod(0).bool() & ~taken
        offered = (size * open_).view(-1)[order]
        fits = (offered.cumsum(0) <= left) & (offered > 0)
        left = left - (offered * fits).sum()
        taken.view(-1)[order] |= fits
    return (taken * steps[:, None]).sum(0) + table[0]


def _checked(widths: Sequence[int]) -> tuple[int, ...]:
    table = tuple(sorted(set(widths)))
    if not table or table[0] < 1 or table[-1] > 16:
        raise ValueError(f"widths must be whole numbers from 1 to 16, at least one; got {tuple(widths)}")
    return table


def _check_weights(cost: Tensor, weights: Tensor) -> None:
    if cost.dim() != 1 or weights.shape != cost.shape or weights.is_floating_point():
        raise ValueError(
            f"cost and weight must be vectors of one length, weight of whole numbers; got shapes {tuple(cost.shape)} "
            f"and {tuple(weights.shape)}, weight of {weights.dtype}"
        )
    if weights.numel() and int(weights.min()) < 1:
        raise ValueError(f"every weight must be at least 1; got {int(weights.min())}")


def choose(cost: Sequence[Sequence[float]], nbytes: Sequence[Sequence[int]], budget: int) -> list[int]:
    """For each site the index of one option, so that the errors' sum is small and the bytes' sum within ``budget``.

    ``cost[i][k]`` is the error of option ``k`` at site ``i``, ``nbytes[i][k]`` its bytes. The sum of errors is above
    the optimum by at most the gain of one option: the first improvement, in order of error per byte along
    each site's lower convex hull, that did not fit. What is left goes to any options that still fit, also those off the
    hull. Then sites trade: one is improved for which others give up bytes, as long as that lowers the sum by a
    twentieth. It matters where one site is large beside the rest, and what fits instead of it is worth less. An error
    that is not finite is worse than all finite ones together.

    >>> choose([[9.0, 1.0, 0.0], [5.0, 4.0, 0.0]], [[10, 20, 40], [10, 20, 40]], 50)
    [2, 0]
    >>> choose([[9.0, 1.0, 0.0], [5.0, 4.0, 0.0]], [[10, 20, 40], [10, 20, 40]], 60)
    [1, 2]
    >>> choose([[9.0, 0.0], [5.0, 0.0], [1.0, 0.0]], [[10, 40], [10, 20], [10, 20]], 60)
    [1, 0, 0]
    """
    if [len(c) for c in cost] != [len(b) for b in nbytes] or not all(cost):
        raise ValueError(
            "cost and nbytes must list the same options, at least one a site; got "
            f"{[len(c) for c in cost]} and {[len(b) for b in nbytes]} options"
        )
    errors = _finite(cost)
    cheapest = [min(zip(b, e, range(len(e)), strict=True))[2] for e, b in zip(errors, nbytes, strict=True)]
    left = budget - sum(b[k] for b, k in zip(nbytes, cheapest, strict=True))
    if left < 0:
        raise ValueError(
            f"a budget of {budget} bytes is too small: the cheapest options of all {len(cost)} sites take "
            f"{budget - left} bytes; raise the budget or offer smaller options"
        )
    # Options beyond the room left can be in no solution; without them the bound is tighter.
    hulls = [_hull(e, b, first, b[first] + left) for e, b, first in zip(errors, nbytes, cheapest, strict=True)]
    steps = sorted(
        (-(errors[i][low] - errors[i][high]) / (nbytes[i][high] - nbytes[i][low]), i, low, high)
        for i, hull in enumerate(hulls)
        for low, high in itertools.pairwise(hull)
    )
    chosen = cheapest
    for _, i, low, high in steps:
        price = nbytes[i][high] - nbytes[i][low]
        if chosen[i] == low and price <= left:
            chosen[i], left = high, left - price
    while changes := _best_swap(errors, nbytes, chosen, left) or _best_trade(errors, nbytes, hulls, chosen, left):
        for i, k in changes.items():
            chosen[i], left = k, left - (nbytes[i][k] - nbytes[i][chosen[i]])
    return chosen


def assign(
    weight: Sequence[float],
    error: Sequence[Sequence[float]],
    nbytes: Sequence[Sequence[int]],
    sources: Sequence[Sequence[tuple[int, float]]],
    budget: int,
    most: int = 4,
) -> list[int | None]:
    """For each item one of its options, or None to rebuild it; the weighted errors' sum is small within ``budget``.

    Option ``k`` of item ``i`` has the error ``error[i][k]`` and takes ``nbytes[i][k]``. An item with ``sources``, pairs
    of an earlier item ``j`` and a gain, may take no bytes and have the error ``sum(gain * error of j)`` instead. Chains
    are allowed, as long as nothing is made from more than ``most`` stored items, each of which costs time. What is
    chosen is best for one price of a byte, if each item in turn, the last first, is rebuilt where that is the cheaper;
    the bytes left then go where :func:`choose` sends them. A budget below the least that is found counts as that.

    >>> assign([1.0, 1.0], [[9.0, 1.0], [9.0, 1.0]], [[10, 20], [10, 20]], [[], [(0, 1.0)]], 20)
    [1, None]
    """
    arrays = [
        (np.asarray(_finite([e])[0]), np.asarray(b, dtype=np.float64)) for e, b in zip(error, nbytes, strict=True)
    ]

    def price(i: int, load: float, rate: float) -> float:
        errors, sizes = arrays[i]
        return float((load * errors + rate * sizes).min())

    def loads_at(rate: float) -> tuple[list[float], set[int], float]:
        loads, rebuilt, total = list(weight), set[int](), 0.0
        made_from = [1] * len(loads)  # the most stored items that anything is made from in which this one takes part
        for i in reversed(range(len(loads))):
            stored = price(i, loads[i], rate)
            reached = made_from[i] + len(sources[i]) - 1
            if sources[i] and reached <= most:
                more = sum(
                    price(j, loads[j] + loads[i] * gain, rate) - price(j, loads[j], rate) for j, gain in sources[i]
                )
                if more < stored:
                    rebuilt.add(i)
                    for j, gain in sources[i]:
                        loads[j] += loads[i] * gain
                        made_from[j] = max(made_from[j], reached)
                    continue
            errors, sizes = arrays[i]
            total += sizes[int((loads[i] * errors + rate * sizes).argmin())]
        return loads, rebuilt, total

    low, high = 1e-30, 1e30
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if loads_at(middle)[2] > budget:
            low = middle
        else:
            high = middle
    loads, rebuilt, _ = loads_at(high)
    kept = [i for i in range(len(loads)) if i not in rebuilt]
    least = sum(min(nbytes[i]) for i in kept)
    costs = [[loads[i] * e for e in error[i]] for i in kept]
    picked = choose(costs, [nbytes[i] for i in kept], max(budget, least)) if kept else []
    found: list[int | None] = [None] * len(loads)
    for i, k in zip(kept, picked, strict=True):
        found[i] = k
    return found


def _finite(cost: Sequence[Sequence[float]]) -> list[list[float]]:
    worst = 1.0 + 2.0 * sum(max((abs(e) for e in errors if math.isfinite(e)), default=0.0) for errors in cost)
    return [[float(e) if math.isfinite(e) else worst for e in errors] for errors in cost]


def _hull(errors: Sequence[float], nbytes: Sequence[int], first: int, limit: int) -> list[int]:
    """Options on the lower convex hull from ``first``, by rising bytes and falling error."""
    hull = [first]
    for k in sorted(range(len(errors)), key=lambda k: (nbytes[k], errors[k])):
        if nbytes[k] > limit or errors[k] >= errors[hull[-1]]:
            continue
        while len(hull) > 1 and _slope(errors, nbytes, hull[-2], hull[-1]) >= _slope(errors, nbytes, hull[-1], k):
            hull.pop()
        hull.append(k)
    return hull


def _slope(errors: Sequence[float], nbytes: Sequence[int], low: int, high: int) -> float:
    return (errors[high] - errors[low]) / (nbytes[high] - nbytes[low])


def _best_swap(
    errors: Sequence[Sequence[float]], nbytes: Sequence[Sequence[int]], chosen: Sequence[int], left: int
) -> dict[int, int]:
    """The change of one option that lowers the error most and still fits; empty if none does."""
    swaps = (
        (errors[i][now] - errors[i][k], -i, -k)
        for i, now in enumerate(chosen)
        for k in range(len(errors[i]))
        if errors[i][k] < errors[i][now] and nbytes[i][k] - nbytes[i][now] <= left
    )
    best = max(swaps, default=None)
    return {} if best is None else {-best[1]: -best[2]}


def _best_trade(
    errors: Sequence[Sequence[float]],
    nbytes: Sequence[Sequence[int]],
    hulls: Sequence[Sequence[int]],
    chosen: Sequence[int],
    left: int,
) -> dict[int, int]:
    """A better option for one site, and worse ones for those that lose least by it; empty if no trade is worth it."""
    offers: list[tuple[float, int, int, int]] = []
    for j, hull in enumerate(hulls):
        now, steep = chosen[j], -math.inf
        for k in reversed(hull):
            if nbytes[j][k] < nbytes[j][now]:
                # Options off the hull would lose less by their second step than by their first: steps stay in order.
                steep = max(steep, -_slope(errors[j], nbytes[j], k, now))
                offers.append((steep, j, now, k))
                now = k
    offers.sort()
    best: tuple[float, dict[int, int]] = (_WORTH * sum(row[k] for row, k in zip(errors, chosen, strict=True)), {})
    for i, hull in enumerate(hulls):
        for k in hull:
            raised = errors[i][chosen[i]] - errors[i][k]
            if raised <= 0:
                continue
            changes, gain, lacking = {i: k}, raised, nbytes[i][k] - nbytes[i][chosen[i]] - left
            for _, j, now, after in offers:
                if lacking <= 0 or gain <= best[0]:
                    break
                if j != i:
                    changes[j] = after
                    gain -= errors[j][after] - errors[j][now]
                    lacking -= nbytes[j][now] - nbytes[j][after]
            if lacking <= 0 and gain > best[0]:
                best = gain, changes
    return best[1]
