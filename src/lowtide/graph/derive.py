"""Tensors that need not be stored, because they are cheap functions of others that are.

The input of a convolution after BN and ReLU is mask * (scale * x + shift), where ``x`` is the input that BN saved
anyway. Storing ``x`` alone, with more bits, beats two coarse copies. The result of a residual block is the sum of such
a term and of another, or of a tensor that is stored for its own sake. A recipe that is linear in what is stored keeps
unbiased values unbiased, given the exact mask; the comments in ``RECIPES`` name those that are not linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .capture import bias_of, is_as_made, op_of, parent, read_what_was_made, saved

Rebuild = Callable[..., Tensor]


class Affine(NamedTuple):
    """Makes scale * x + shift of a source, with a number of each for every channel (dimension 1)."""

    scale: Tensor
    shift: Tensor


class Recipe(NamedTuple):
    """How the result of an op is made again from tensors that its node saved.

    ``build`` reads what else is needed from the node and keeps no reference to it. It returns a function of the
    sources, which may change the first of them, or None if this call cannot be repeated.
    """

    sources: tuple[str, ...]
    build: Callable[[Any], Affine | Rebuild | None]


class Term(NamedTuple):
    """A tensor that is made from sources: all of the one to be rebuilt, or an addend of it."""

    sources: tuple[Any, ...]
    """What stands for each source, as the functions ``stored`` and ``held`` gave it to :func:`origin_of`."""
    make: Affine | Rebuild | None
    """None for the only source itself, as it is."""


class Origin(NamedTuple):
    """The op that made a tensor, and how to make the tensor again: as a sum of terms, in most cases of one."""

    op: str
    terms: tuple[Term, ...]
    rectified: bool
    """Did a ReLU follow? Then the tensor is the rebuilt one where its mask is set, and zero elsewhere."""

    @property
    def sources(self) -> tuple[Any, ...]:
        """Those of all terms, in the order in which the forward added them."""
        return tuple(source for term in self.terms for source in term.sources)


PIECE = 1 << 18
"""So many values are worked on at once: temporaries then stay in the cache and out of the peak. A multiple of 8,
because masks have 8 values in a byte."""


def pieces(dense: Tensor) -> Iterator[Tensor]:
    """A dense tensor as short stretches of its memory."""
    flat = dense.as_strided((dense.numel(),), (1,))
    for first in range(0, flat.numel(), PIECE):
        yield flat[first : first + PIECE]


def _wide(x: Tensor) -> Tensor:
    """The tensor in float32, in which the op itself computes: in 16 bits a large mean would cancel, or overflow."""
    return x.to(torch.float32)


def _batch_norm(node: Any) -> Affine | None:
    if not saved(node, "training"):
        return None
    mean, scale, weight = saved(node, "result1"), saved(node, "result2"), saved(node, "weight")
    # BN's backward does not need the bias, so the node does not keep it; a leaf that learns is found behind it. One
    # that does not learn, and none at all, look the same.
    bias = bias_of(node)
    if bias is None:
        return None
    scale = _wide(scale) if weight is None else _wide(scale) * weight
    return Affine(scale, bias.detach() - mean * scale)


def _layer_norm(node: Any) -> Rebuild | None:
    mean, scale = saved(node, "result1"), saved(node, "result2")
    weight, bias = (None if w is None else w.detach().clone() for w in (saved(node, "weight"), saved(node, "bias")))

    def rebuild(x: Tensor) -> Tensor:
        x = _wide(x).sub_(mean).mul_(scale)
        if weight is not None:
            x = x.mul_(weight)
        return x if bias is None else x.add_(bias)

    return rebuild


def _rms_norm(node: Any) -> Rebuild | None:
    scale, weight = saved(node, "result1"), saved(node, "weight")
    weight = None if weight is None else weight.detach().clone()

    def rebuild(x: Tensor) -> Tensor:
        x = _wide(x).mul_(scale)
        return x if weight is None else x.mul_(weight)

    return rebuild


def _gelu(node: Any) -> Rebuild | None:
    approximate = saved(node, "approximate")

    def rebuild(x: Tensor) -> Tensor:
        for piece in pieces(x):  # there is no GELU in place, and a second whole tensor would raise the peak
            piece.copy_(functional.gelu(piece, approximate=approximate))
        return x

    return rebuild


def _silu(node: Any) -> Rebuild | None:
    return lambda x: functional.silu(x, inplace=True)


def _product(node: Any) -> Rebuild | None:
    return lambda x, y: x.to(torch.promote_types(x.dtype, y.dtype)).mul_(y)


RECIPES: dict[str, Recipe] = {
    "NativeBatchNorm": Recipe(("input",), _batch_norm),
    # These keep the same under the same names, by torch's derivatives.yaml; they have not been run on a GPU.
    "CudnnBatchNorm": Recipe(("input",), _batch_norm),
    "MiopenBatchNorm": Recipe(("input",), _batch_norm),
    "NativeLayerNorm": Recipe(("input",), _layer_norm),
    "FusedRmsNorm": Recipe(("input",), _rms_norm),
    # A product of two independently rounded factors has no bias either.
    "Mul": Recipe(("self", "other"), _product),
    # Not linear: the mean of f(x + noise) is f(x) plus half the curvature times the noise's variance.
    "Gelu": Recipe(("self",), _gelu),
    "Silu": Recipe(("self",), _silu),
}


_MOST_TERMS = 4
"""A sum of more is stored. Every term costs a pass over the tensor in backward."""


def origin_of(tensor: Tensor, stored: Callable[[Any, str], Any], held: Callable[[Any], Any]) -> Origin | None:
    """How to make ``tensor`` again, if a recipe knows.

    ``stored(node, slot)`` gives what stands for a saved tensor whose values the caller keeps, and ``held(node)`` what
    stands for the result of a node; None if it keeps none.
    """
    node: Any = tensor.grad_fn
    if node is None or not is_as_made(tensor):
        return None
    op = op_of(node)
    rectified = op == "Relu"
    if rectified or op == "ToCopy":  # a cast at the end: what is rebuilt gets the tensor's type in any case
        if not read_what_was_made(node):
            return None
        node = parent(node, 0)
        op = op_of(node)
    terms: list[Term] = []
    try:
        known = _find_terms(node, op, stored, held, terms)
    except (AttributeError, RuntimeError):  # the graph behind the node was freed
        return None
    return Origin(op, tuple(terms), rectified) if known else None


def _find_terms(
    node: Any, op: str, stored: Callable[[Any, str], Any], held: Callable[[Any], Any], terms: list[Term]
) -> bool:
    """Append the terms whose sum is the result of ``node``; False if one is not known."""
    if op == "Add":
        # A number, and a tensor that needs no gradient, have no node: an addition of one was not read as made.
        if not read_what_was_made(node) or saved(node, "alpha") != 1:
            return False
        for edge in (0, 1):
            addend = parent(node, edge)
            values = held(addend)
            if values is not None:
                terms.append(Term((values,), None))
            elif len(terms) >= _MOST_TERMS or not _find_terms(addend, op_of(addend), stored, held, terms):
                return False
        return len(terms) <= _MOST_TERMS
    recipe = RECIPES.get(op)
    if recipe is None:
        return False
    sources = tuple(stored(node, slot) for slot in recipe.sources)
    make = None if any(source is None for source in sources) else recipe.build(node)
    if make is None:
        return False
    terms.append(Term(sources, make))
    return True
