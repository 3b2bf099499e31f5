"""Processes that step by turns: one steps while the others wait, so a slow minute of the machine meets all of them."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping
from typing import Any

from lowtide.machine.measure import Child


def take_turns(processes: Mapping[str, Child], turns: int, base: str) -> dict[str, dict[str, Any]]:
    """What each process returns, with the times of its turns beside those of ``base``.

    A process emits an event when it is warm, and then ``{"seconds": ...}`` after each turn. All are warm before the
    first turn. They go backwards in every other turn, so that none always comes behind the same one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in processes}
    found: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as opened:
        for process in processes.values():
            opened.enter_context(process).resume()
        for turn in range(turns):
            for name in list(processes)[:: -1 if turn % 2 else 1]:
                event = processes[name].resume()
                assert event is not None
                seconds[name].append(event["seconds"])
        for name, process in processes.items():
            process.resume()
            assert process.result is not None
            found[name] = process.result
    for name, cells in found.items():
        ratios = [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]
        low, high = median_interval(ratios)
        cells |= {"min_s": min(seconds[name]), "median_s": statistics.median(seconds[name]), "turns": turns}
        cells |= {"ratio": statistics.median(ratios), "ratio_low": low, "ratio_high": high}
    return found


def median_interval(values: list[float]) -> tuple[float, float]:
    """Bounds of the median at 95 % or more, whatever the distribution.

    The true median lies between the k-th smallest and the k-th largest of n values unless fewer than k of them lie on
    one side of it, and that number is binomial with probability one half. With fewer than six values no k does.
    """
    ordered, n = sorted(values), len(values)
    outside, k = 0.0, 0
    while 2 * (outside + math.comb(n, k) / 2**n) <= 0.05:
        outside += math.comb(n, k) / 2**n
        k += 1
    return ordered[max(k, 1) - 1], ordered[-max(k, 1)]
