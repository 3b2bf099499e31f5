"""Keys of the random numbers by which values are rounded: private, replayable, the same for every backend."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

from ..graph import capture
from ..graph.capture import Site


def forward_noise(seed: int, step: int, forward: int, rank: int) -> int:
    """64 bits for one forward of a model in one step, on one rank."""
    return _hash(f"{seed}/{step}/{forward}/{rank}")


def noise_from(tensor: Tensor) -> int:
    """64 bits for a tensor outside of a session, from torch's seed and some of its values: nothing has to be counted.

    Other values round otherwise, and so does each step, because weights have moved meanwhile. On another device this
    waits for the values.
    """
    return _hash(f"{torch.initial_seed()}/{capture.fingerprint(tensor) if capture.has_data(tensor) else 0}")


def key_of(site: Site, noise: int) -> int:
    """The key with which the tensor at ``site`` is encoded, as a signed 64-bit number."""
    value = _site_hash(site) ^ noise
    return value - 2**64 if value >= 2**63 else value


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=1 << 16)
def _site_hash(site: Site) -> int:
    return _hash(str(site))
