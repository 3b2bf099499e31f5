"""What is learned about a model stays with it from one ``compress`` to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from ..policy.policy import Policy


@dataclass
class Memory:
    """A policy with what it learned, and how many steps were taken with it."""

    policy: Policy
    step: int = 0

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
