"""What an adaptive method sees of backward: gradients, and what noise in a saved tensor does to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..codecs.base import layout_of
from ..graph import capture, shards
from ..graph.capture import Slot
from ..graph.rules import WRITES_IN_PLACE
from ..policy.tuners.base import Arrived, Number, Tuner, Wanted, square_of
from .handles import Consumer, Reference, fresh

Unpack = Callable[[Reference], Tensor]

_FACTOR = {"Convolution": 1, "Addmm": 2, "Mm": 1, "Linear": 1, "GroupedMm": 1, "LinearFunctionForZeroStage3": 1}
"""Which input of a linear op is the other factor, the weight. Other linear ops are tried with noise."""

_PERIOD = 65_537
"""Values after which the noise of a trial repeats; a prime, so that it does not fall in step with rows or maps."""


def watch(slot: Slot, consumer: Consumer, reference: Reference, tuner: Tuner, unpack: Unpack) -> Unpack:
    """Let ``tuner`` see what it asks for; the function that reads the slot in backward."""
    site, kind = consumer.site, tuner.wants(consumer.site, consumer.need)
    if kind is Wanted.GRADIENT:
        slot.watch(lambda g: tuner.observe(site, shards.local_of(g)) if capture.has_data(g) else None)
    elif kind is Wanted.FACTOR and (edge := _FACTOR.get(site.op)) is not None:

        def see(inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]) -> None:
            factor, gradient = inputs[edge], outputs[0]
            if factor is not None and gradient is not None and capture.has_data(gradient):
                tuner.observe_factor(site, shards.local_of(gradient), shards.local_of(factor))

        slot.watch_inputs(see)
    elif kind is not Wanted.NOTHING and slot.package not in WRITES_IN_PLACE and not slot.is_part:
        # Other ranks might not try a part of a distributed tensor, and the op may wait for them.
        return _Probe(slot, consumer, tuner, unpack).read
    return unpack


class _Probe:
    """Runs the backward of one op three times: as it is, with noise in one saved tensor, and then for good.

    The gradient that arrives at the maker of each input, from this op and from others, is known only later, so the
    tuner is told when the last of them is.
    """

    def __init__(self, slot: Slot, consumer: Consumer, tuner: Tuner, unpack: Unpack) -> None:
        self._site, self._tuner, self._unpack = consumer.site, tuner, unpack
        self._aside = False
        self._noise: Number | None = None
        self._found: dict[int, Arrived] = {}
        edges = [i for i, (maker, _) in enumerate(slot.node.next_functions) if maker is not None]
        self._leaves = {i for i in edges if not slot.watch_maker(i, partial(self._arrive, i))}
        slot.try_before(self._attempt)

    def read(self, reference: Reference) -> Tensor:
        """The saved tensor as backward gets it, or, in a trial, with noise."""
        if not self._aside:
            return self._unpack(reference)
        values = fresh(reference)
        return values if self._noise is None else _disturbed(values, self._noise)

    def _attempt(self, run: Callable[[], tuple[Tensor | None, ...]]) -> None:
        noise = self._tuner.tried(self._site)
        if noise is None:
            return
        with self._tuner.timed(), torch.no_grad():
            self._aside = True
            try:
                plain = run()
                self._noise = noise
                changed = run()
            finally:
                self._aside, self._noise = False, None
            leaves = []
            for i, (a, b) in enumerate(zip(plain, changed, strict=True)):
                if a is None or b is None or not capture.has_data(a):
                    continue
                square, disturbed = square_of(a), square_of(b)
                change = square_of(b - a)  # not in place: an op may hand on the very gradient that it was given
                arrived = Arrived(i, i in self._leaves, square, change, (disturbed - square - change) / 2, 0.0)
                if arrived.is_leaf:
                    leaves.append(arrived)
                else:
                    self._found[i] = arrived
        self._tuner.observe_probe(self._site, leaves)

    def _arrive(self, edge: int, gradient: Tensor) -> None:
        arrived = self._found.pop(edge, None)
        if arrived is not None:
            with self._tuner.timed():
                total = square_of(gradient)
            self._tuner.observe_probe(self._site, [arrived._replace(total=total)])


@lru_cache(maxsize=4)
def _block(device: torch.device) -> Tensor:
    """Uniform noise of mean 0 and variance 1, the same always."""
    generator = torch.Generator().manual_seed(0)
    noise: Tensor = (torch.rand(_PERIOD, generator=generator) - 0.5) * 12**0.5
    return noise.to(device)


def _disturbed(values: Tensor, square: Number) -> Tensor:
    """``values``, which may be changed, plus noise of this mean square."""
    block = (_block(values.device) * square**0.5).to(values.dtype)
    numel = values.numel()
    if not layout_of(tuple(values.shape), values.stride()).dense:
        return values.add_(block.repeat(-(-numel // _PERIOD))[:numel].view(values.shape))
    flat = values.as_strided((numel,), (1,))
    for first in range(0, numel, _PERIOD):
        piece = flat[first : first + _PERIOD]
        piece += block[: piece.numel()]
    return values
