"""What an adaptive method learns while training.

A tuner refines the choice of a method by what it saw in earlier steps and in the tensor at hand. Its state is small and
plain, and a run that resumes from it decides the same.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ...graph.capture import Site
from ...graph.rules import Need
from ..choice import Choice
from ..use import Use

FromSources = Callable[[], Tensor]
"""Makes a tensor again from its sources as they are stored, as backward would."""


class Tuner(ABC):
    """What an adaptive method learns while training; lives in a session, holds no graph."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @abstractmethod
    def begin(self, step: int) -> None:
        """Before each forward that will be compressed."""

    @abstractmethod
    def choose(self, use: Use, tensor: Tensor, base: Choice, from_sources: FromSources | None = None) -> Choice:
        """The choice for this tensor, in place of the method's own ``base``. ``tensor`` is only read.

        ``from_sources`` is there if the tensor can be rebuilt from others that are stored already.
        """

    def wants_gradient(self, site: Site, need: Need) -> bool:
        """Whether backward should show the gradient of this site's node to :meth:`observe`."""
        return False

    def observe(self, site: Site, gradient: Tensor) -> None:
        """In backward: the gradient of the output of the node that saved ``site``."""
        return

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON; NaN is possible."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``: the decisions that follow are the same, bit for bit."""

    def seconds(self) -> float:
        """Time spent deciding so far, as the host sees it."""
        return self._seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time spent inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - start


class Probed(Tuner):
    """A tuner that can use measured sensitivities."""

    @property
    def ready(self) -> bool:
        """Can it make use of probes by now?"""
        return True

    @abstractmethod
    def trial(self, use: Use) -> Choice | None:
        """What a probe does to this tensor alone; None if the tensor is not up for choice."""

    @abstractmethod
    def measured(self, found: Sequence[tuple[Use, float]]) -> None:
        """For each probed tensor the squared change of the gradient; decide anew."""


def require_keys(state: Mapping[str, Any], keys: set[str]) -> None:
    """Raise unless a state has exactly these."""
    if set(state) != keys:
        raise ValueError(f"expected a state with the keys {sorted(keys)}; got {sorted(state)}")


def site_of(row: list[Any]) -> Site:
    """The site that a state keeps as a list."""
    module, op, slot, ordinal = row
    return Site(module, op, slot, ordinal)
