"""Unequal levels for random rounding, fitted to where the values of a group lie (TinyScript, Fu et al. 2020).

A value at position ``x`` of its group's range, between the levels ``a < b``, is rounded at random to one of them, so
it stays unbiased for any levels, with variance ``(x - a) * (b - x)``. The best levels minimise the mean of this over
the positions. A histogram stands for a density that is constant within each bin; everything below is exact for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

BINS = 512
"""Levels lie on borders of bins: multiples of 1/512, exact in float32 and in JSON."""

_SAMPLE = 1 << 18
_Array = np.ndarray[Any, np.dtype[np.float64]]


def histogram(x: Tensor, row: int, group: int, positive: bool | Tensor, source: Tensor | None = None) -> Tensor:
    """How many values of flat ``x`` lie in each of 512 parts of their group's range, as int64.

    Groups are those of the kernels: ``group`` values within a row. With ``positive``, which may be a truth value on the
    device, only values above zero set ranges and count; ``source`` gives the sign where ``x`` is a difference. At most
    2**18 values are looked at (one group at least), evenly spread. Values at the ends of their range are left out: any
    levels keep them exactly. So are groups with a value that is not finite, and constant ones.
    """
    counts = torch.zeros(BINS, dtype=torch.int64, device=x.device)
    if x.numel() == 0:
        return counts
    per_row = -(-row // group)
    total = x.numel() // row * per_row
    length = min(group, row)
    picked = torch.arange(0, total, max(1, -(-total * length // _SAMPLE)), device=x.device)
    place = picked % per_row * group
    inner = torch.arange(length, device=x.device)
    index = (picked // per_row * row + place)[:, None] + inner
    inside = inner < (row - place)[:, None]
    index = torch.where(inside, index, 0)
    values = x[index].to(torch.float32)
    counted = inside & ~(((x if source is None else source)[index] <= 0) & positive)
    low = torch.where(counted, values, torch.inf).amin(1, keepdim=True)
    high = torch.where(counted, values, -torch.inf).amax(1, keepdim=True)
    at = (values - low) / (high - low)
    counted = counted & (at > 0) & (at < 1) & torch.isfinite(high - low)
    bins = torch.where(counted, at * BINS, 0.0).to(torch.int64).clamp_(max=BINS - 1)
    return counts.index_add_(0, bins.view(-1), counted.view(-1).to(torch.int64))


def uniform_levels(bits: int) -> tuple[float, ...]:
    """Equal steps from 0 to 1."""
    top = 2**bits - 1
    return tuple(k / top for k in range(top + 1))


def fit_levels(histogram: Tensor, bits: int) -> tuple[float, ...]:
    """The ``2**bits`` levels, from 0 to 1, of the least variance for values spread like ``histogram``.

    Exact among all levels on borders of bins (a dynamic program over the borders), and equal steps if those, which need
    not lie on borders, are no worse. An empty histogram gives equal steps.

    >>> fit_levels(torch.tensor([6, 2, 1, 1, 0, 0, 0, 0]), 2)
    (0.0, 0.125, 0.375, 1.0)
    >>> fit_levels(torch.ones(512), 2) == uniform_levels(2)
    True
    """
    if bits < 1 or 2**bits - 1 > len(histogram):
        raise ValueError(f"{bits} bits need a histogram of at least {2**bits - 1} bins; got {len(histogram)}")
    level = uniform_levels(bits)
    density = _density(histogram)
    if bits == 1 or density is None:
        return level
    bins = len(density)
    border = np.arange(bins + 1) / bins
    cost = _variance_between(density, border[:, None], border[None, :])
    cost[np.tril_indices(bins + 1)] = np.inf
    best, back = cost[0], []
    for _ in range(2**bits - 2):
        total = best[:, None] + cost
        back.append(total.argmin(0))
        best = np.take_along_axis(total, back[-1][None], 0)[0]
    path = [bins]
    for last in reversed(back):
        path.append(int(last[path[-1]]))
    fitted = tuple(k / bins for k in (0, *reversed(path)))
    return fitted if variance(fitted, histogram) < variance(level, histogram) else level


def variance(levels: Sequence[float], histogram: Tensor) -> float:
    """Mean variance of random rounding to ``levels``, in units of the range's square; NaN for no values."""
    density = _density(histogram)
    if density is None:
        return math.nan
    return math.fsum(float(_variance_between(density, np.array(a), np.array(b))) for a, b in itertools.pairwise(levels))


def _density(histogram: Tensor) -> _Array | None:
    """The share of values in each bin; None if there are none."""
    counts: _Array = histogram.detach().to("cpu", torch.float64).numpy()
    total = counts.sum()
    return counts / total if total > 0 else None


def _variance_between(share: _Array, a: _Array, b: _Array) -> _Array:
    """The integral of ``(x - a) * (b - x)`` times the density, from ``a`` to ``b``."""
    low, high = _moments(share, a), _moments(share, b)
    zeroth, first, second = (h - k for h, k in zip(high, low, strict=True))
    # What is left of cancellation is below 1e-15, far below the variance within one bin.
    spread: _Array = np.maximum((a + b) * first - second - a * b * zeroth, 0.0)
    return spread


def _moments(share: _Array, x: _Array) -> list[_Array]:
    """Integrals of 1, x and x**2 times the density, from 0 to ``x``."""
    bins = len(share)
    border = np.arange(bins + 1) / bins
    k = np.minimum((x * bins).astype(np.int64), bins - 1)
    found = []
    for power in (1, 2, 3):
        part = share * bins * (border[1:] ** power - border[:-1] ** power) / power
        below = np.concatenate([[0.0], np.cumsum(part)])
        found.append(below[k] + share[k] * bins * (x**power - border[k] ** power) / power)
    return found
