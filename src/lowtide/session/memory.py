"""What is learned about a model stays with it from one ``compress`` to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

from ..graph.capture import Site
from ..policy.policy import Policy
from .doubts import Doubts
from .transfers import Orders


@dataclass
class Memory:
    """A policy and what it learned, the count of steps, what a device told, and in which order backward read."""

    policy: Policy
    step: int = 0
    doubts: Doubts = field(default_factory=Doubts)
    remade: dict[Site, bool] = field(default_factory=dict)
    """Of weights on a device: did making them again give the same, when that was first tried?"""
    refuted: set[Site] = field(default_factory=set)
    """Weights that came out the same then and did not later."""
    orders: dict[str, Orders] = field(default_factory=dict)

    def next_step(self) -> int:
        """Count one more step."""
        with _lock:
            self.step += 1
            return self.step


_KEPT = 16
"""Settings that are remembered for a model: the last used, so that settings that change each step do not pile up."""

# A loop of `with compress(...)` makes a session a step, and the model is all that they have in common. Nothing is put
# on the model itself, and an entry goes with its model.
_memories: WeakKeyDictionary[nn.Module, dict[Hashable, Memory]] = WeakKeyDictionary()
_lock = threading.Lock()


def recall(model: nn.Module, settings: Hashable, begin: Callable[[], Policy]) -> Memory:
    """What sessions with equal ``settings`` share for ``model``; what ``begin`` gives if there is nothing yet."""
    with _lock:
        known = _memories.setdefault(model, {})
        found = known.pop(settings, None) or Memory(begin())
        known[settings] = found  # the most recent is the last
        while len(known) > _KEPT:
            known.pop(next(iter(known)))
        return found


def forget(model: nn.Module) -> None:
    """Let the next ``compress`` of ``model`` begin anew: nothing learned, and noise from the first step on.

    >>> import torch, lowtide
    >>> lowtide.forget(torch.nn.Linear(2, 2))  # nothing is known of it yet, which is no error
    """
    _memories.pop(model, None)
