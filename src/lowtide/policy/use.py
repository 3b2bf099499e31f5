"""What is known of a saved tensor when its fate is decided."""

from __future__ import annotations

from typing import NamedTuple

from ..codecs import TensorMeta
from ..graph.capture import Site
from ..graph.rules import Need


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

    @property
    def derivable(self) -> bool:
        """Can it be rebuilt from few stored tensors?

        Their variances add up, so the noise of four of the same bits is twice that of one, and each is decoded for it.
        """
        return 0 < self.decodes <= 4

    @property
    def dims(self) -> int:
        """Trailing spatial dimensions of a feature map, 0 if the tensor is not one."""
        return len(self.meta.shape) - 2 if self.spatial and 3 <= len(self.meta.shape) <= 5 else 0
