"""What is known of a saved tensor when its fate is decided."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ..codecs import Codec, TensorMeta
from ..graph.capture import Site
from ..graph.rules import Need

# Bits by need, measured (docs/design.md, "Bits by need"): values whose noise reaches every earlier layer get at least 4
# bits, those that pass through an exponential at least 8, and log-probabilities more than codes can give.
_FLOOR = {
    **{Need.LOSSLESS: 1, Need.LINEAR: 1, Need.BATCH: 1, Need.PROPAGATE: 4, Need.EXPONENT: 8},
    **{Need.LOGARITHM: 16, Need.RELATIVE: 16},
}

_TOLERATED = 0.03

# Below a ReLU some channels have hardly a value above zero, so their deviation is far below the range of their group.
# Measured, four times the noise: as if a sixteenth of the values shared the statistic.
_RECTIFIED = 16


@lru_cache(maxsize=1024)
def statistic_bits(sharing: float) -> int:
    """The least bits for the input of a norm in which ``sharing`` values have a statistic in common.

    Noise of ``s`` standard deviations in the input adds about ``s / sqrt(sharing)`` of the gradient to what flows on,
    because backward takes means over these values. Random rounding with ``b`` bits over a range of six standard
    deviations has ``s = sqrt(6) / (2**b - 1)``. The least ``b`` of 1, 2, 3, 4 and 8 that adds at most 3 % is enough:
    with 50 norms in a row that is a fifth in all (docs/safety.md).

    >>> [statistic_bits(n) for n in (29, 30, 136, 137, 740, 741, 6666, 6667)]
    [8, 4, 4, 3, 3, 2, 2, 1]
    """
    steps = math.sqrt(6 / sharing) / _TOLERATED
    return next((bits for bits in (1, 2, 3, 4) if steps <= 2**bits - 1), 8)


def least_bits(need: Need, sharing: int, rectified: bool = False) -> int:
    """What a method gives values of this need at least; ``sharing`` is 0 if no norm reads them."""
    return max(_FLOOR[need], statistic_bits(sharing / _RECTIFIED if rectified else sharing) if sharing else 1)


class Use(NamedTuple):
    """A saved tensor as a policy sees it: what all its consumers together need of it, its form, and its sites."""

    need: Need
    meta: TensorMeta
    spatial: bool
    sites: tuple[Site, ...]
    sources: tuple[Site, ...] = ()
    """First sites of the stored tensors from which it can be rebuilt; none if it cannot."""
    rectified: bool = False
    """It has no negative values, and an exact mask of its zeros is stored."""
    source_need: Need = Need.LOSSLESS
    """The least that any of those sources is kept for. What is rebuilt is no better than its sources."""
    decodes: int = 0
    """How many stored tensors are decoded to rebuild it. Those that a rebuilt source is made from are among them."""
    source_bits: int = 0
    """The least bits that any of those sources has."""
    sharing: int = 0
    """How many values share a statistic in the norm that reads it, of several norms the least; 0 if none does."""
    boundary: bool = False
    """Does a checkpoint keep it, to make its region again?"""
    codec: Codec | None = None
    """The codec that the caller of that checkpoint asked for, if any."""
    other_bits: int = 0
    """The least bits that its readers other than checkpoints need; 0 if there are none."""

    @property
    def derivable(self) -> bool:
        """Can it be rebuilt from few stored tensors?

        Their variances add up, so the noise of four of the same bits is twice that of one, and each is decoded for it.
        """
        return 0 < self.decodes <= 4

    @property
    def least_bits(self) -> int:
        """What a method gives these values at least, unless somebody measured that less will do."""
        return least_bits(self.need, self.sharing, self.rectified)

    @property
    def dims(self) -> int:
        """Trailing spatial dimensions of a feature map, 0 if the tensor is not one."""
        return len(self.meta.shape) - 2 if self.spatial and 3 <= len(self.meta.shape) <= 5 else 0
