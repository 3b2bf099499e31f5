"""Lowtide in the ``Trainer`` of transformers, and in TRL's trainers, which are subclasses of it."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from ..attachment import Attachment, attach
from ..codecs import Codec
from ..policy.methods import Method
from ..policy.plan import Plan
from .figures import figures, rank

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    _missing: ImportError | None = error
    TrainerCallback = object
else:
    _missing = None

_WATCHED = "tells_lowtide_of_its_end"


class LowtideCallback(TrainerCallback):
    """Compress what a ``Trainer`` saves for backward, from the beginning of ``train()`` to its end.

    Arguments are those of :func:`lowtide.attach`: a method with its options, a plan, or ``budget=...``::

        Trainer(model, args, train_dataset=data, callbacks=[LowtideCallback("auto", bits=4)]).train()

    Each log with a loss also gets ``lowtide_plain_mib``, ``lowtide_kept_mib``, ``lowtide_held_mib`` and
    ``lowtide_peak_mib``. Each checkpoint gets a file ``lowtide_RANK.json`` from each process, and
    ``train(resume_from_checkpoint=...)`` goes on from it bit for bit. The model is free of hooks when ``train()`` ends,
    also by an exception. What is computed outside of the model's forward, such as a loss of your own, stays exact.

    Trainers tell callbacks nothing when training raises. So the first callback that is made wraps ``Trainer.train``.
    """

    def __init__(self, method: str | Method | Codec | Plan = "auto", **options: Any) -> None:
        if _missing is not None:
            raise ImportError(
                "LowtideCallback needs transformers and accelerate: pip install 'lowtide[hf]'"
            ) from _missing
        _watch_trainers()
        self.method = method
        self.options = options
        self.handle: Attachment | None = None
        """What :func:`lowtide.attach` gave for the last ``train()``; its report stays readable after the end."""
        self._resumed: Path | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Attach; when a run is resumed, go on from what its checkpoint holds."""
        assert model is not None
        self.remove()
        if args.torch_compile:
            warnings.warn(
                "Trainer compiles this model (torch_compile=True), and what compiled code saves is not compressed",
                stacklevel=2,
            )
        self.handle = attach(model, self.method, **self.options)
        if self._resumed is not None:
            self._load(self._resumed / _file())

    def _load(self, file: Path) -> None:
        assert self.handle is not None
        if file.exists():
            self.handle.load_state_dict(json.loads(file.read_text(encoding="utf-8")))
        else:
            warnings.warn(
                f"{file.parent} has no {file.name}: it was saved without LowtideCallback or by fewer processes, so "
                f"this process begins with new noise and nothing learned",
                stacklevel=2,
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Add bytes and peak to logs of training, for reporters and for ``state.log_history``."""
        if self.handle is not None and logs is not None and "loss" in logs:
            found = figures(self.handle, args.device)
            logs.update(found)
            if state.log_history:
                state.log_history[-1].update(found)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write this process's state into the checkpoint, unless that is not meant to be resumed."""
        if self.handle is None or args.save_only_model or state.is_hyper_param_search:
            return
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)  # another process may be about to make it
        (folder / _file()).write_text(json.dumps(self.handle.state_dict()), encoding="utf-8")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the hooks off."""
        self.remove()

    def remove(self) -> None:
        """Take the hooks off the model; may be called again."""
        if self.handle is not None:
            self.handle.remove()


def _file() -> str:
    return f"lowtide_{rank()}.json"


def _watch_trainers() -> None:
    """Wrap ``Trainer.train`` once: tell our callbacks what is resumed, and that training is over, however it ends."""
    train = Trainer.train
    if hasattr(train, _WATCHED):
        return

    @functools.wraps(train)
    def watched(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        handler = self.callback_handler
        ours = [callback for callback in handler.callbacks if isinstance(callback, LowtideCallback)]
        others = [callback for callback in handler.callbacks if callback not in ours]
        handler.callbacks = ours + others  # reporters that log what they are given come after us
        folder = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        for callback in ours:
            callback._resumed = Path(folder) if folder else None
        try:
            return train(self, resume_from_checkpoint, *args, **kwargs)
        finally:
            for callback in ours:
                callback.remove()

    setattr(watched, _WATCHED, True)
    Trainer.train = watched
