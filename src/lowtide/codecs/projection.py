"""Low rank: each row of a matrix is kept as its product with a few columns.

A tensor is read as a matrix here. The innermost dimension in memory is the row (the features of a token); all other
dimensions together count the rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.reference import mix
from .base import Codec, Packed, TensorMeta, flatten, layout_of, require, require_float, require_positive
from .groups import BITS, GroupQuant

# Temporaries beside the two factors have about this many values, however large the input is.
_CHUNK = 1 << 19
_WORD = 0xFFFFFFFF
_SMALLEST = 2.0**-126  # the smallest number whose reciprocal is a finite float32
_ROUNDING = 0x2545F4914F6CDD1D  # makes the key of the codes another than the key of the signs


@dataclass(frozen=True)
class Projection(Codec):
    """Keeps each row ``x`` of ``D`` values as ``y = x R``, which has ``rank`` values, and decodes it as ``y R'``.

    With ``kind="random"`` R holds random signs over sqrt(rank). Decode makes it again from the key, so nothing is
    stored for it. Because ``E[R R'] = I``, the decoded tensor is unbiased, and
    ``E|error|^2 = (D - 1) / rank * |x|^2`` whatever the values are.

    With ``kind="subspace"`` R is an orthonormal basis of the directions in which this tensor is largest, found by one
    pass of a randomized range finder. R is stored. The error is close to the smallest that a matrix of this rank can
    have, but it is a **bias**: what lies outside the subspace is lost, and no averaging over steps returns it.

    ``bits=0`` keeps y in the tensor's own type, which rounds to nearest. Otherwise y is stored by ``GroupQuant``, which
    is unbiased. R takes ``4 * D * rank`` bytes while it is in use. A row with NaN or Inf decodes to NaN; with
    ``"subspace"`` the whole tensor does. The products are torch's, so the same bytes are promised only for the same
    machine and number of threads.
    """

    id: ClassVar[str] = "projection"
    rank: int
    bits: int = 0
    kind: str = "random"
    group: int = 256

    def __post_init__(self) -> None:
        require_positive(self.rank, "rank")
        require(self.bits, (0, *BITS), "bits")
        require(self.kind, ("random", "subspace"), "kind")
        require_positive(self.group, "group")

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Project all values. ``support`` is not used here; it serves decode."""
        require_float(tensor, self)
        flat, meta, _ = flatten(tensor.detach())
        rows, columns = _matrix(meta)
        if meta.numel == 0:
            return Packed(self, meta, (flat.new_empty(0),))
        x = flat.view(rows, columns)
        stored: tuple[Tensor, ...] = ()
        if self.kind == "random":
            factor = signs(columns, self.rank, key, x.device)
        else:
            stored = (self._basis(x, key),)
            factor = stored[0].to(torch.float32, copy=True)
        factor /= _gain(columns)
        return Packed(self, meta, (*self._project(x, factor, key), *stored), 0 if stored else key)

    def _project(self, x: Tensor, factor: Tensor, key: int) -> tuple[Tensor, ...]:
        width = factor.shape[1]
        plain = x.new_empty((0 if self.bits else x.shape[0], width))
        codes = []
        for number, (first, last) in enumerate(_chunks(*x.shape)):
            y = _product(x[first:last].to(torch.float32), factor)
            if self.bits:
                # Groups are numbered within a chunk. The upper word of the key makes each chunk's noise another.
                chunk_key = _signed(key ^ _ROUNDING ^ (number << 32))
                codes.append(self._quantizer.encode(y, key=chunk_key).buffers)
            else:
                piece = plain[first:last].copy_(y)
                # In decode the products of an Inf could be Inf of one sign, which is not the NaN that is promised.
                piece.masked_fill_(~piece.isfinite(), torch.nan)
        return tuple(map(torch.cat, zip(*codes, strict=True))) if self.bits else (plain.view(-1),)

    def _basis(self, x: Tensor, key: int) -> Tensor:
        """An orthonormal basis of the range of ``x' x S`` with random signs S (Halko, Martinsson, Tropp 2011)."""
        rows, columns = x.shape
        width = min(self.rank, columns)
        low, high = torch.aminmax(x)
        largest = torch.maximum(-low, high).to(torch.float32)
        fine = torch.isfinite(largest)
        test = signs(columns, width, key, x.device)
        sketch = torch.zeros_like(test)
        for first, last in _chunks(rows, columns):
            # Values are divided by the largest, so that their squares neither overflow nor vanish.
            piece = x[first:last].to(torch.float32) / largest.clamp_min(_SMALLEST)
            sketch.addmm_(piece.t(), _product(piece, test))
        basis: Tensor = torch.linalg.qr(torch.where(fine, sketch, 0.0)).Q
        basis = torch.where(fine, basis, torch.nan)
        return basis.to(x.dtype, memory_format=torch.contiguous_format, copy=True)

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """Multiply by the transposed factor. With ``support`` the zeros of a rectified tensor come back exactly."""
        meta = packed.meta
        if meta.numel == 0:
            return packed.buffers[0].new_empty_strided(meta.shape, meta.stride)
        rows, columns = _matrix(meta)
        projected, device = list(packed.buffers), packed.buffers[0].device
        if self.kind == "random":
            factor = signs(columns, self.rank, packed.key, device)
            factor *= _gain(columns) / self.rank
        else:
            factor = projected.pop().to(torch.float32) * _gain(columns)
        out = torch.empty((rows, columns), dtype=meta.dtype, device=device)
        for first, last in _chunks(rows, columns):
            x = _product(self._rows(projected, first, last, rows, factor.shape[1]), factor.t())
            if meta.dtype == torch.float16:
                x = torch.where(x.isinf(), x, x.clamp_(-65504.0, 65504.0))
            if support is not None:
                inside = support[first * columns // 8 : -(-last * columns // 8)]
                x.mul_(ops.unpack_band(inside, x.numel(), x.dtype, 1.0, 0.0).view_as(x))  # NaN stays NaN
            out[first:last] = x
        return out.as_strided(meta.shape, meta.stride)

    def _rows(self, projected: list[Tensor], first: int, last: int, rows: int, width: int) -> Tensor:
        """``y`` of some rows, in float32."""
        pieces = tuple(b.view(rows, -1)[first:last].view(-1) for b in projected)
        if not self.bits:
            return pieces[0].to(torch.float32).view(-1, width)
        return Packed(self._quantizer, _wide(last - first, width), pieces).decode()

    def packed_nbytes(self, meta: TensorMeta) -> int:
        """The projected rows, and the basis if it cannot be made again."""
        if meta.numel == 0:
            return 0
        rows, columns = _matrix(meta)
        width, itemsize = self.rank, meta.dtype.itemsize
        if self.kind == "subspace":
            width = min(width, columns)
        stored = 0 if self.kind == "random" else columns * width * itemsize
        projected = self._quantizer.packed_nbytes(_wide(rows, width)) if self.bits else rows * width * itemsize
        return projected + stored

    @property
    def _quantizer(self) -> GroupQuant:
        return GroupQuant(self.bits, self.group, "row")


def signs(rows: int, columns: int, key: int, device: torch.device) -> Tensor:
    """A matrix of +1 and -1 in float32. Each sign is one bit of a hash of the key and its place."""
    words = -(-columns // 32)
    low, high = (int(mix(torch.tensor(part & _WORD, device="cpu"))) for part in (key, (key >> 32) ^ _ROUNDING))
    out = torch.empty((rows, columns), dtype=torch.float32, device=device)
    bit = torch.arange(32, device=device)
    for first, last in _chunks(rows, columns):
        place = torch.arange(first * words, last * words, device=device)
        word = mix(mix((place + low) & _WORD) ^ high)
        out[first:last] = ((word[:, None] >> bit) & 1).view(last - first, -1)[:, :columns]
    return out.mul_(2.0).sub_(1.0)


def _matrix(meta: TensorMeta) -> tuple[int, int]:
    """Rows and columns of a tensor seen as a matrix."""
    sizes = layout_of(meta.shape, meta.stride).sizes
    columns = sizes[-1] if sizes else 1
    return (meta.numel // columns if columns else 0), columns


def _wide(rows: int, columns: int) -> TensorMeta:
    return TensorMeta((rows, columns), (columns, 1), torch.float32)


def _chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows. Each starts at a multiple of 8 rows, so that a bit mask can be cut there."""
    step = max(8, _CHUNK // columns // 8 * 8)
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a b`` in float32. Autocast would round the factors, but it leaves a call with ``out`` alone."""
    return torch.mm(a, b, out=a.new_empty((a.shape[0], b.shape[1])))


def _gain(columns: int) -> float:
    """A power of two of at least 4 sqrt(columns). If y is divided by it, 4 standard deviations fit in the type of x."""
    return float(2.0 ** math.ceil(2 + math.log2(columns) / 2))


def _signed(key: int) -> int:
    """The same 64 bits as a signed number."""
    key &= 2**64 - 1
    return key - 2**64 if key >= 2**63 else key
