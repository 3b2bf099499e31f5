"""Log-probabilities in codes whose steps are relative."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import ops
from .base import Codec, NotRepresentable, Packed, TensorMeta, flatten, require, require_float, require_positive
from .groups import BITS, GroupQuant

_NEAREST = 2.0**-24
"""Log-probabilities nearer to zero count as this: the probability is 1 but for half a unit in float32's last place."""
_FARTHEST = 128.0
"""Those below its negative count as that: the probability is 0 in float32."""
_PIECE = 1 << 22
"""So many values are turned into logarithms at once: log-probabilities are often the largest tensor of a step."""


@dataclass(frozen=True)
class LogQuant(Codec):
    """Log-probabilities ``x``, as ``log(-x)`` in dithered groups of ``group`` values with ``bits`` bits each.

    Backward of ``log_softmax`` reads ``exp(x)``. Where that is near 1, its distance from 1 counts, which is ``-x``;
    where it is small, a part of it. Even steps of ``log(-x)`` are relative steps of ``x`` and give both. With 8 bits a
    group that holds every value from ``-2**-24`` to ``-128`` has steps of 9 %; one that holds the scores of a fresh
    network has much smaller ones. The mean of ``log(-x)`` is right. That of ``exp(x)`` is off by ``(x*x + x) / 24``
    times the square of the step, in parts of ``exp(x)``.

    Probabilities of 0 come back as 0, and NaN makes its group NaN. It stores nothing above zero.
    """

    id: ClassVar[str] = "log_quant"
    bits: int = 8
    group: int = 256

    def __post_init__(self) -> None:
        require(self.bits, BITS, "bits")
        require_positive(self.group, "group")

    def __str__(self) -> str:
        return f"{self.id}({self.bits} bits)"

    @cached_property
    def _groups(self) -> GroupQuant:
        return GroupQuant(self.bits, self.group, "flat", dither=True)

    def _pieces(self, numel: int) -> Iterator[tuple[int, TensorMeta]]:
        """Where each stretch begins, and its form: groups of values, or all that is left."""
        length = max(1, _PIECE // self.group) * self.group
        for first in range(0, max(1, numel), length):
            yield first, TensorMeta((min(length, numel - first),), (1,), torch.float32)

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Quantize the logarithms; raise :class:`NotRepresentable` if a value is above zero.

        On an accelerator that would be found too late to raise: then the device stops with an error of its own.
        """
        require_float(tensor, self)
        flat, meta, _ = flatten(tensor)
        buffers: list[Tensor] = []
        for i, (first, piece) in enumerate(self._pieces(meta.numel)):
            size = flat[first : first + piece.numel].to(torch.float32).neg()
            below = ~(size < 0).any()  # a NaN is no reason: it comes back
            if flat.device.type != "cpu":
                ops.require_later(below)
            elif not bool(below):
                raise NotRepresentable(f"{float(-size.min()):.3g} is above zero, which no log-probability is")
            buffers += self._groups.encode(size.clamp_(_NEAREST, _FARTHEST).log_(), key=key ^ i).buffers
        return Packed(self, meta, tuple(buffers), key)

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """The log-probabilities, each to its step."""
        meta, device = packed.meta, packed.buffers[0].device
        flat = torch.empty(meta.numel, dtype=meta.dtype, device=device)
        for i, (first, piece) in enumerate(self._pieces(meta.numel)):
            part = Packed(self._groups, piece, packed.buffers[2 * i : 2 * i + 2], packed.key ^ i)
            flat[first : first + piece.numel] = self._groups.decode(part).exp_().neg_()
        return flat.as_strided(meta.shape, meta.stride)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """Those of the groups."""
        return sum(self._groups.packed_nbytes(piece) for _, piece in self._pieces(meta.numel))
