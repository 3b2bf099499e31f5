"""How a session is made for what a user named: arguments checked, memory recalled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from ..codecs import Codec
from ..graph import capture, shards
from ..policy.methods import Method, Planned, resolve
from ..policy.plan import Plan
from ..policy.policy import BOUNDARY_BITS, Policy, require_boundary_bits
from ..policy.scope import Scope
from .memory import recall
from .session import Session

MIN_NUMEL = 4096
"""Smaller tensors stay exact: they hold few bytes, and packing one costs some 20 microseconds."""

OPENER = "opens_lowtide_session"
"""The attribute by which hooks of an attached model are known."""


def attached(model: nn.Module) -> bool:
    """Is any module of ``model`` attached?"""
    return any(getattr(h, OPENER, False) for m in model.modules() for h in capture.pre_hooks(m))


def new_session(
    model: nn.Module,
    method: str | Method | Codec | Plan,
    options: Mapping[str, Any],
    *,
    seed: int = 0,
    min_numel: int = MIN_NUMEL,
    derive: bool = False,
    boundary_bits: int | None = BOUNDARY_BITS,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    tensor_parallel: Any = None,
    remembers: bool = False,
) -> Session:
    """A session that is not open yet, for what a user named; raises if the arguments make no sense.

    With ``remembers`` it shares what it learns, and the count of steps, with all such sessions of the same model and
    the same arguments.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if capture.is_compiled(model):
        raise TypeError(
            "this model is compiled, and what a compiled graph saves is not seen from outside; give "
            "lowtide.compile(model, method) the model as it was before torch.compile"
        )
    if next(model.parameters(), None) is None:
        raise ValueError("the model has no parameters, so there is no training memory to compress")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number; got {seed!r}")
    if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 0:
        raise ValueError(f"min_numel must be a whole number of at least 0; got {min_numel!r}")
    if not isinstance(derive, bool):
        raise TypeError(f"derive must be True or False; got {derive!r}")
    require_boundary_bits(boundary_bits)
    scope = Scope.of(model, include, exclude)
    team = None if tensor_parallel is None else shards.team(tensor_parallel)
    resolved = resolve(method, options)
    if isinstance(resolved, Planned):
        if derive:
            raise ValueError("a plan says itself what is rebuilt; derive=True goes with a method")
        resolved.require_some_module(model)
    begin = partial(Policy, resolved, model, min_numel, derive, boundary_bits)
    if not remembers:
        return Session(model, begin(), seed, scope, team=team)
    known = _is_recognisable(resolved)
    settings = (
        resolved if known else type(resolved),
        min_numel,
        derive,
        boundary_bits,
        scope,
        seed,
        None if team is None else team.rank,
    )
    memory = recall(model, settings, begin)
    return Session(model, memory.policy if known else begin(), seed, scope, memory, team)


def _is_recognisable(method: Method) -> bool:
    """Is an equal method of the next call known as the same? If not, only the steps are counted, nothing is learned.

    That is so for a user's method that holds a list, or that compares by identity.
    """
    try:
        hash(method)
    except TypeError:
        return False
    return type(method).__eq__ is not object.__eq__
