"""Modules whose forward runs once more in backward, for as long as a session is open.

A checkpoint keeps what the module was given and nothing that the module saves. In backward the module runs again, with
the random numbers and the autocast of its first run, so gradients are those of a plain step, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..graph import capture

_OURS = "runs_lowtide_checkpoint"


class Recomputed:
    """The modules of ``paths`` in ``model``. While it is open, their ``forward`` is replaced on the instances."""

    def __init__(self, model: nn.Module, paths: Iterable[str]) -> None:
        self._modules = [_checked(path, model.get_submodule(path)) for path in paths]
        self._before: list[tuple[nn.Module, Any]] = []

    def open(self) -> None:
        """Replace; a module that another session has replaced already stays as it is."""
        for module in self._modules:
            if not hasattr(module.__dict__.get("forward"), _OURS):
                self._before.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = _replacement(module)

    def close(self) -> None:
        """Put back what was there; may be called again."""
        while self._before:
            module, own = self._before.pop()
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


def _checked(path: str, module: nn.Module) -> nn.Module:
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"{path} is compiled by TorchScript and cannot be a checkpoint; plan without it")
    return module


def _replacement(module: nn.Module) -> Callable[..., Any]:
    forward = module.forward

    @functools.wraps(forward)  # some code asks for the names of its arguments
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        # In a checkpoint of the user's the second run, after our session, would save other tensors than the first.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or capture.hooks_at_work():
            return forward(*args, **kwargs)
        return checkpoint(_same_buffers(module, forward), *args, use_reentrant=False, **kwargs)

    setattr(checkpointed, _OURS, True)
    return checkpointed


def _same_buffers(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward, whose later runs leave buffers as they were: running statistics would count a batch twice.

    Which buffers change does not show: batch norms move no version counter. So all are copied, for one run of the
    module.
    """
    is_first = True

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            return forward(*args, **kwargs)
        buffers = [(owner, name, b) for owner in module.modules() for name, b in capture.buffers_of(owner)]
        copies = [None if b is None else b.detach().clone() for _, _, b in buffers]
        try:
            return forward(*args, **kwargs)
        finally:
            for (owner, name, buffer), values in zip(buffers, copies, strict=True):
                if getattr(owner, name) is not buffer:
                    setattr(owner, name, buffer)
                if buffer is not None and values is not None:
                    buffer.data.copy_(values)  # past the version counter: a graph that saved it finds what it saved

    return run
