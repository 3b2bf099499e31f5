"""What an adaptive method learns while training.

A tuner refines the choice of a method by what it saw in earlier steps and in the tensor at hand. Its state is small and
plain, and a run that resumes from it decides the same.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...graph.capture import Site
from ...graph.rules import Need
from ..choice import Choice
from ..use import Use


class FromSources(NamedTuple):
    """How to make a tensor again from its sources."""

    make: Callable[[], Tensor]
    """Makes it from the sources as they are stored, as backward would."""
    scales: Sequence[Tensor | None]
    """What each source is multiplied by: a number for each channel; None for 1, and for what is no product."""


class Wanted(Enum):
    """What backward should show of a site's op."""

    NOTHING = 0
    GRADIENT = 1
    """The gradient of its output, to :meth:`Tuner.observe`."""
    FACTOR = 2
    """That and the gradient of the other factor, a weight's, to :meth:`Tuner.observe_factor`."""
    PROBE = 3
    """What noise in the saved tensor does to the gradients that the op hands on, to :meth:`Tuner.observe_probe`."""


Number = float | Tensor
"""A number that may still lie on a device, as a tensor of one value; see :func:`read`."""


class Arrived(NamedTuple):
    """The gradient of one input of an op, and how noise in a tensor that the op saved changes it."""

    edge: int
    """Which input."""
    is_leaf: bool
    """Does it belong to a parameter, so that nothing flows on?"""
    square: Number
    change: Number
    """The square of the change."""
    along: Number
    """The part of the change that is along the gradient itself, times its length."""
    total: Number
    """The square of all that arrives at that input's maker, from this op and from others; 0 if it is unknown."""


class Tuner(ABC):
    """What an adaptive method learns while training; lives in a session, holds no graph."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @abstractmethod
    def begin(self, step: int) -> None:
        """Before each forward that will be compressed."""

    @property
    def measuring(self) -> bool:
        """Does the step that began last need more memory than most, because it measures?"""
        return False

    @property
    def settled(self) -> object | None:
        """What its answers follow from alone, until this is another object; None if they follow from the tensors too.

        Then nobody has to make a tensor again from its sources for it, and the same question is asked once.
        """
        return None

    @abstractmethod
    def choose(self, use: Use, tensor: Tensor, base: Choice, from_sources: FromSources | None = None) -> Choice:
        """The choice for this tensor, in place of the method's own ``base``. ``tensor`` is only read.

        ``from_sources`` is there if the tensor can be rebuilt from others that are stored already.
        """

    def wants(self, site: Site, need: Need) -> Wanted:
        """What backward should show of the op that saved ``site``."""
        return Wanted.NOTHING

    def observe(self, site: Site, gradient: Tensor) -> None:
        """In backward: the gradient of the output of the op that saved ``site``."""
        return

    def observe_factor(self, site: Site, gradient: Tensor, factor: Tensor) -> None:
        """In backward: the gradients of the output and of the other factor of a linear op."""
        return

    def tried(self, site: Site) -> Number | None:
        """In backward: the mean square of the noise to try on a saved tensor; None for no trial."""
        return None

    def observe_probe(self, site: Site, arrived: Sequence[Arrived]) -> None:
        """In backward: what that noise did to the gradient of each input of the op."""
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


def read(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in main memory, of any shapes and types: one read for each device, however many there are.

    They may have been made on several streams, so the whole device is waited for.
    """
    found: dict[int, Tensor] = {}
    for device in {tensor.device for tensor in tensors}:
        those = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        if device.type == "cpu":
            found.update((i, tensors[i].detach()) for i in those)
            continue
        torch.accelerator.synchronize(device)
        line = torch.cat([tensors[i].detach().reshape(-1) for i in those]).cpu()
        pieces = torch.split(line, [tensors[i].numel() for i in those])
        found.update((i, p.view(tensors[i].shape).to(tensors[i].dtype)) for i, p in zip(those, pieces, strict=True))
    return [found[i] for i in range(len(tensors))]


def square_of(tensor: Tensor) -> Tensor:
    """The sum of the squares of a tensor's values, on its device."""
    norm: Tensor = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32)
    return norm.to(torch.float64).square()


def require_keys(state: Mapping[str, Any], keys: set[str]) -> None:
    """Raise unless a state has exactly these."""
    if set(state) != keys:
        raise ValueError(f"expected a state with the keys {sorted(keys)}; got {sorted(state)}")


def site_of(row: list[Any]) -> Site:
    """The site that a state keeps as a list."""
    module, op, slot, ordinal = row
    return Site(module, op, slot, ordinal)
