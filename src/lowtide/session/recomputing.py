"""Modules whose forward runs once more in backward, for as long as a session is open.

A checkpoint keeps what the module was given and nothing that the module saves. In backward the module runs again, with
the random numbers and the autocast of its first run, so gradients are those of a plain step, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
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
        return checkpoint(_Run(module, forward), *args, use_reentrant=False, **kwargs)

    setattr(checkpointed, _OURS, True)
    return checkpointed


class _Run:
    """The forward, whose second run begins with the buffers of the first and leaves them as they were before it.

    Running statistics would count a batch twice, and a spectral norm would go on to another weight. Which buffers
    change does not show: batch norms move no version counter. So all are copied, and those that changed are kept.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.function = module
        """Whose inputs a checkpoint keeps, for the report."""
        self._forward = forward
        self._before: list[_Buffer] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = _buffers_of(self.function)
        if self._before is None:
            result = self._forward(*args, **kwargs)
            self._before = [buffer for buffer in now if buffer.has_changed()]
            return result
        try:
            for buffer in self._before:
                buffer.restore()
            return self._forward(*args, **kwargs)
        finally:
            for buffer in now:
                buffer.restore()


class _Buffer(NamedTuple):
    """A buffer, and its values at some time."""

    owner: nn.Module
    name: str
    tensor: Tensor | None
    values: Tensor | None

    def has_changed(self) -> bool:
        if getattr(self.owner, self.name) is not self.tensor:
            return True
        return self.tensor is not None and self.values is not None and not torch.equal(self.tensor, self.values)

    def restore(self) -> None:
        if getattr(self.owner, self.name) is not self.tensor:
            setattr(self.owner, self.name, self.tensor)
        if self.tensor is not None and self.values is not None:
            self.tensor.data.copy_(self.values)  # past the version counter: a graph that saved it finds what it saved


def _buffers_of(module: nn.Module) -> list[_Buffer]:
    found = [(owner, name, b) for owner in module.modules() for name, b in capture.buffers_of(owner)]
    return [_Buffer(owner, name, b, None if b is None else b.detach().clone()) for owner, name, b in found]
