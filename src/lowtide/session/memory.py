"""What is learned about a model stays with it from one ``compress`` to the next."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

from ..policy.policy import Policy


@dataclass
class Memory:
    """A policy with what it learned, and the number of the next step."""

    policy: Policy
    steps: itertools.count[int] = field(default_factory=lambda: itertools.count(1))


# A loop of `with compress(...)` makes a session a step, and the model is all that they have in common. Nothing is put
# on the model itself, and an entry goes with its model.
_memories: WeakKeyDictionary[nn.Module, dict[Hashable, Memory]] = WeakKeyDictionary()


def recall(model: nn.Module, settings: Hashable, begin: Callable[[], Policy]) -> Memory:
    """What sessions with equal ``settings`` share for ``model``; what ``begin`` gives if there is nothing yet."""
    known = _memories.setdefault(model, {})
    if settings not in known:
        known[settings] = Memory(begin())
    return known[settings]


def forget(model: nn.Module) -> None:
    """Let the next ``compress`` of ``model`` begin anew: nothing learned, and noise from the first step on.

    >>> import torch, lowtide
    >>> lowtide.forget(torch.nn.Linear(2, 2))  # nothing is known of it yet, which is no error
    """
    _memories.pop(model, None)
