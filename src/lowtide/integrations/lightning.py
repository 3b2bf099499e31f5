"""Lowtide in Lightning's ``Trainer``."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..attachment import Attachment, attach
from ..codecs import Codec
from ..policy.methods import Method
from ..policy.plan import Plan
from .figures import figures, rank

try:
    from lightning.pytorch import Callback
except ImportError as error:
    _missing: ImportError | None = error
    Callback = object
else:
    _missing = None


class LowtideCallback(Callback):
    """Compress what ``training_step`` saves for backward, from the beginning of ``fit()`` to its end.

    Arguments are those of :func:`lowtide.attach`: a method with its options, a plan, or ``budget=...``::

        Trainer(max_epochs=1, callbacks=[LowtideCallback("auto", bits=4)]).fit(model, data)

    Everything inside ``training_step`` is covered, the loss too. For that each step is called through the module
    itself, as Lightning does under DDP, so forward hooks on the ``LightningModule`` see the arguments of
    ``training_step``. With ``module="net"`` only the forwards of ``self.net`` are covered, and nothing is called
    otherwise than before; ``guard`` and ``budget``, which run forwards of their own, need that.

    ``lowtide_plain_mib``, ``lowtide_kept_mib``, ``lowtide_held_mib`` and ``lowtide_peak_mib`` are logged in steps that
    Lightning logs. Checkpoints hold the state of every process, and a run that is resumed goes on bit for bit. The
    model is free of hooks when ``fit()`` ends, also by an exception.
    """

    def __init__(
        self, method: str | Method | Codec | Plan = "auto", *, module: str | None = None, **options: Any
    ) -> None:
        if _missing is not None:
            raise ImportError("LowtideCallback needs Lightning: pip install 'lowtide[lightning]'") from _missing
        asked = [name for name in ("guard", "budget") if options.get(name)]
        if asked and module is None:
            raise ValueError(
                f"{asked[0]} runs forwards of its own, which a whole training_step cannot repeat; name the network in "
                f'it, such as module="net"'
            )
        self.method = method
        self.module = module
        self.options = options
        self.handle: Attachment | None = None
        """What :func:`lowtide.attach` gave for the last ``fit()``; its report stays readable after the end."""
        self._redirected = contextlib.ExitStack()
        self._saved: list[dict[str, Any]] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach; when a run is resumed, go on from what its checkpoint holds."""
        self.remove()
        network = pl_module if self.module is None else pl_module.get_submodule(self.module)
        self.handle = attach(network, self.method, **self.options)
        if network is pl_module and trainer.strategy.model is pl_module:  # else the strategy calls it by itself
            self._redirect(pl_module)
        if self._saved is not None:
            self._load(self._saved)
            self._saved = None

    def _redirect(self, pl_module: Any) -> None:
        """Let ``training_step`` run inside a call of its module, where hooks are heard."""
        step = pl_module.training_step

        @functools.wraps(step)
        def called(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as replaced:

                def once(*args: Any, **kwargs: Any) -> Any:
                    replaced.close()  # the step may call forward itself
                    return step(*args, **kwargs)

                replaced.enter_context(_replaced(pl_module, "forward", once))
                return pl_module(*args, **kwargs)

        self._redirected.enter_context(_replaced(pl_module, "training_step", called))

    def _load(self, states: list[dict[str, Any]]) -> None:
        assert self.handle is not None
        if rank() < len(states):
            self.handle.load_state_dict(states[rank()])
        else:
            warnings.warn(
                f"this checkpoint is of {len(states)} processes, so process {rank()} begins with new noise and nothing "
                f"learned",
                stacklevel=2,
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log bytes and peak in the steps that Lightning logs."""
        if (
            self.handle is not None
            and trainer.log_every_n_steps
            and trainer.global_step % trainer.log_every_n_steps == 0
        ):
            pl_module.log_dict(figures(self.handle, pl_module.device), rank_zero_only=True)

    def state_dict(self) -> dict[str, Any]:
        """The states of all processes, for one checkpoint; every process must call it, as Lightning does."""
        if self.handle is None:
            return {}
        own = self.handle.state_dict()
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return {"ranks": [own]}
        states: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(states, own)
        return {"ranks": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what a checkpoint holds until training starts."""
        self._saved = state_dict.get("ranks")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the hooks off."""
        self.remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take the hooks off."""
        self.remove()

    def remove(self) -> None:
        """Take the hooks off the model; may be called again."""
        self._redirected.close()
        if self.handle is not None:
            self.handle.remove()


@contextlib.contextmanager
def _replaced(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let ``function`` stand for a method of this one module, and put back what was there before."""
    own = vars(module)
    before = own.get(name)
    own[name] = function
    try:
        yield
    finally:
        if before is None:
            own.pop(name, None)
        else:
            own[name] = before
