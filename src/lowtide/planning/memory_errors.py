"""What held memory when there was none left, and the plan that would have fitted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..report import size
from ..session.replay import leaves_of
from ..verify.check import LossFn
from .fitting import free_nbytes
from .planner import BudgetError, nbytes_of, plan
from .profiling import profile


@contextlib.contextmanager
def explain_oom(
    model: nn.Module | None = None,
    batch: Any = None,
    loss_fn: LossFn | None = None,
    *,
    budget: int | float | str | None = None,
    write: Callable[[str], object] | None = None,
) -> Iterator[None]:
    """Run a step inside: if memory runs out, tell what held it, and the plan that would have fitted; then raise.

    Nothing is computed for the explanation, so it needs no memory. Without ``model`` and ``batch`` the outermost module
    that was running is looked for in the traceback; an error in backward shows none, so give them. ``budget`` is what
    the plan should fit, the memory of the device unless given. The text goes to standard error, or to ``write``.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    >>> loss = lambda model, x: model(x).square().mean()
    >>> lines = []
    >>> with lowtide.explain_oom(model, torch.randn(4096, 64), loss, budget="8 MiB", write=lines.append):
    ...     raise MemoryError
    Traceback (most recent call last):
    MemoryError
    >>> "peak" in lines[0]
    True
    """
    limit = None if budget is None else nbytes_of(budget)
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            tell = write or (lambda text: print(text, file=sys.stderr))
            try:
                tell(_explained(error.__traceback__, model, batch, loss_fn, limit))
            except Exception as other:  # the error of the step matters more than that of its explanation
                tell(f"lowtide could not explain this: {type(other).__name__}: {other}")
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Does the error say that memory ran out, on whatever device?"""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _explained(
    trace: TracebackType | None, model: nn.Module | None, batch: Any, loss_fn: LossFn | None, limit: int | None
) -> str:
    if model is None:
        found = _running(trace)
        if found is None:
            return "lowtide: no model was running when memory ran out; give explain_oom(model, batch, loss_fn)"
        model, *call = found
        batch, loss_fn = tuple(call), surrogate_loss
    limit = free_nbytes(model) if limit is None else limit
    made = profile(model, batch, loss_fn, fake=True, measure=False)
    lines = [f"lowtide: memory ran out. One step of {type(model).__name__} as it is:", str(made)]
    try:
        lines += [f"A plan that fits {size(limit)}:", plan(made, limit).summary()]
        lines.append(f'Use it with lowtide.attach(model, budget="{size(limit)}").')
    except BudgetError as error:
        lines.append(str(error))
    return "\n".join(lines)


def _running(trace: TracebackType | None) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None:
    """The outermost module that was called, and what it was called with."""
    while trace is not None:
        values = trace.tb_frame.f_locals
        module, args, kwargs = (values.get(name) for name in ("self", "args", "kwargs"))
        if isinstance(module, nn.Module) and isinstance(args, tuple) and isinstance(kwargs, dict):
            return module, args, kwargs
        trace = trace.tb_next
    return None


def surrogate_loss(model: nn.Module, call: Any) -> Tensor:
    """The sum of all that the model returns: a loss whose backward has the same memory as that of any other."""
    args, kwargs = call
    found = model(*args, **kwargs)
    outputs = [leaf for leaf in leaves_of(found) if isinstance(leaf, Tensor) and leaf.requires_grad]
    named = getattr(found, "loss", None)
    if isinstance(named, Tensor):
        outputs = [named]
    if not outputs:
        raise ValueError("the model returns no tensor that depends on its parameters")
    total = outputs[0].float().sum()
    for other in outputs[1:]:
        total = total + other.float().sum()
    return total
