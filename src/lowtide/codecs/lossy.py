"""A codec that stands for tensors which are rebuilt from others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import Codec, NotRepresentable, Packed, TensorMeta


@dataclass(frozen=True)
class Derived(Codec):
    """Nothing: the tensor is rebuilt from others that are stored, where the session knows how (see ``derive``)."""

    id: ClassVar[str] = "derived"

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Only a session can keep a tensor so."""
        raise NotRepresentable("no stored tensor to rebuild it from")

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """Never called, because nothing is ever encoded."""
        raise NotRepresentable("no stored tensor to rebuild it from")

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """Nothing is stored."""
        return 0
