"""What is known of a stored tensor when its fate is decided."""

from __future__ import annotations

from typing import NamedTuple

from ..codecs import TensorMeta
from ..graph.capture import Site
from ..graph.rules import Need


class Use(NamedTuple):
    """What is known of a stored tensor when its codec is chosen: all its consumers together."""

    need: Need
    meta: TensorMeta
    spatial: bool
    sites: tuple[Site, ...]
    sources: tuple[Site, ...] = ()
    """First sites of stored tensors that are enough to rebuild it; then ``Derived()`` may be its codec."""
    rectified: bool = False
    """It has no negative values, and an exact mask of its zeros is stored."""

    @property
    def derivable(self) -> bool:
        """Need it not be stored at all?"""
        return bool(self.sources)

    @property
    def dims(self) -> int:
        """Trailing spatial dimensions of a feature map, 0 if the tensor is not one."""
        return len(self.meta.shape) - 2 if self.spatial and 3 <= len(self.meta.shape) <= 5 else 0
