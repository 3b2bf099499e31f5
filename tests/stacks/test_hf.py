"""``transformers.Trainer`` with ``LowtideCallback``, beside the same Trainer without it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from tiny import (
    BATCH,
    assert_errors_within_bounds,
    assert_same_weights,
    llama,
    moved,
    samples,
    weights,
)
from transformers import Trainer, TrainerCallback, TrainingArguments

import lowtide
from lowtide.graph import capture
from lowtide.integrations.hf import LowtideCallback
from lowtide.session import attached
from ranks import on_two_ranks

STEPS = 4


def train(path, callback=None, model=None, resume=None, extra=(), **options):
    """Weights after a few steps, and the Trainer."""
    model = llama() if model is None else model
    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(output_dir=str(path), **(defaults | options))
    callbacks = [*extra, *([] if callback is None else [callback])]
    trainer = Trainer(model, args, train_dataset=samples(), eval_dataset=samples(8), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return weights(model), trainer


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def assert_like_plain(path, **options):
    """Under ``lossless`` all weights and losses are those of the plain Trainer, and bytes fall at 4 bits."""
    expected, plain = train(path / "plain", **options)
    got, ours = train(path / "lossless", LowtideCallback("lossless"), **options)
    assert losses(ours) == losses(plain)
    assert len(losses(ours)) == STEPS
    assert_same_weights(got, expected)
    _, packed = train(path / "packed", LowtideCallback("actnn", bits=4), **options)
    return [row for row in packed.state.log_history if "loss" in row]


def clean(model):
    return not attached(model) and not any(capture.pre_hooks(m) for m in model.modules())


SGD = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": 1}


@pytest.mark.stack("HF Trainer", "full fine-tuning of a Llama with AdamW: 4 steps, and errors at 4 and 8 bits")
def test_fine_tuning(tmp_path):
    logs = assert_like_plain(tmp_path)
    assert all(row["lowtide_plain_mib"] > 4 * row["lowtide_kept_mib"] > 0 for row in logs)
    before = weights(llama())
    exact = moved(train(tmp_path / "sgd", **SGD)[0], before)

    def gradient(method, seed):
        return moved(train(tmp_path / "sgd", LowtideCallback(method, seed=seed), **SGD)[0], before)

    assert_errors_within_bounds(gradient, exact)


@pytest.mark.stack("HF Trainer", "gradient accumulation over 3 batches")
def test_accumulation(tmp_path):
    logs = assert_like_plain(tmp_path, gradient_accumulation_steps=3)
    assert all(row["lowtide_plain_mib"] > 4 * row["lowtide_kept_mib"] > 0 for row in logs)


@pytest.mark.stack("HF Trainer", "`bf16=True` (autocast)")
def test_bf16(tmp_path):
    logs = assert_like_plain(tmp_path, bf16=True)
    assert all(row["lowtide_plain_mib"] > 3 * row["lowtide_kept_mib"] > 0 for row in logs)


@pytest.mark.stack(
    "HF Trainer", "`gradient_checkpointing=True`: same weights; nothing to gain but what the checkpoint leaves"
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(tmp_path, reentrant):
    assert_like_plain(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})


@pytest.mark.stack("HF Trainer", "evaluation between steps leaves training as it is")
def test_evaluation(tmp_path):
    args = {"eval_strategy": "steps", "eval_steps": 1}
    expected, plain = train(tmp_path, **args)
    got, ours = train(tmp_path, LowtideCallback("lossless"), **args)
    assert_same_weights(got, expected)
    scores = [[row["eval_loss"] for row in t.state.log_history if "eval_loss" in row] for t in (plain, ours)]
    assert scores[0] == scores[1]
    assert len(scores[0]) == STEPS
    packed, trainer = train(tmp_path, LowtideCallback("actnn", bits=4), **args)
    alone, _ = train(tmp_path, LowtideCallback("actnn", bits=4))
    assert_same_weights(packed, alone)  # forwards without gradients are no steps, and draw no noise
    assert not any("lowtide_kept_mib" in row for row in trainer.state.log_history if "eval_loss" in row)


@pytest.mark.stack("HF Trainer", "a checkpoint is resumed bit for bit, with what `auto` learned")
@pytest.mark.parametrize("method", ["auto", "actnn"])
def test_resume(tmp_path, method):
    whole, _ = train(tmp_path / "a", LowtideCallback(method), save_strategy="steps", save_steps=2)
    saved = tmp_path / "a" / "checkpoint-2"
    assert json.loads((saved / "lowtide_0.json").read_text())["step"] == 2
    resumed, trainer = train(tmp_path / "b", LowtideCallback(method), resume=str(saved))
    assert trainer.state.global_step == STEPS
    assert_same_weights(resumed, whole)
    (saved / "lowtide_0.json").unlink()
    with pytest.warns(UserWarning, match=r"has no lowtide_0\.json"):
        other, _ = train(tmp_path / "c", LowtideCallback(method), resume=str(saved))
    assert any(not torch.equal(other[name], whole[name]) for name in whole)  # the file was needed


def test_resume_from_the_last_checkpoint(tmp_path):
    whole, _ = train(tmp_path, LowtideCallback("actnn"), save_strategy="steps", save_steps=2)
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")  # written at the end of every run
    resumed, trainer = train(tmp_path, LowtideCallback("actnn"), resume=True)
    assert trainer.state.global_step == STEPS
    assert_same_weights(resumed, whole)


def test_a_checkpoint_of_another_method_is_refused(tmp_path):
    train(tmp_path, LowtideCallback("actnn"), save_strategy="steps", save_steps=2)
    model = llama()
    with pytest.raises(ValueError, match="this state is of actnn"):
        train(tmp_path, LowtideCallback("auto"), model=model, resume=True)
    assert clean(model)


def resumed_in_ddp(rank):
    """Weights of two plain and lossless steps, of four steps at once and with a stop; what each process saved."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1"
    )
    path = Path(os.environ["LOWTIDE_TEST_FOLDER"])
    short = {"max_steps": 2, "ddp_find_unused_parameters": False}
    found = {
        "plain": train(path / "p", **short)[0],
        "lossless": train(path / "l", LowtideCallback("lossless"), **short)[0],
    }
    save = {"save_strategy": "steps", "save_steps": 2, "ddp_find_unused_parameters": False}
    found["whole"] = train(path / "a", LowtideCallback("auto"), **save)[0]
    checkpoint = path / "a" / "checkpoint-2"
    found["resumed"] = train(path / "b", LowtideCallback("auto"), resume=str(checkpoint), **save)[0]
    return found | {"state": (checkpoint / f"lowtide_{rank}.json").read_text()}


@pytest.mark.stack("HF Trainer", "DDP with two processes; each saves and resumes its own state, bit for bit")
def test_ddp(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_TEST_FOLDER", str(tmp_path))
    ranks = on_two_ranks(resumed_in_ddp, tmp_path)
    for name in ("plain", "lossless", "whole", "resumed"):
        assert_same_weights(ranks[0][name], ranks[1][name])
    assert_same_weights(ranks[0]["lossless"], ranks[0]["plain"])
    assert_same_weights(ranks[0]["resumed"], ranks[0]["whole"])
    assert ranks[0]["state"] != ranks[1]["state"]  # each learned from samples of its own


@pytest.mark.stack("HF Trainer", "a plan instead of a method")
def test_a_plan(tmp_path):
    method = LowtideCallback("actnn")
    expected, _ = train(tmp_path, method)
    got, _ = train(tmp_path, LowtideCallback(method.handle.plan()))
    assert_same_weights(got, expected)


@pytest.mark.stack("HF Trainer", "a budget instead of a method")
def test_a_budget(tmp_path):
    model = llama()
    loose = LowtideCallback(budget="1 GiB")
    train(tmp_path, loose, model=model)
    assert loose.handle.report().ratio < 1.1  # masks and the like only: all values are kept
    batch = {key: value[None].repeat(BATCH, 1) for key, value in samples(1)[0].items()}
    recorded = lowtide.profile(llama(), batch, lambda model, batch: model(**batch).loss)
    tight = LowtideCallback(budget=int(0.7 * recorded.peak))
    train(tmp_path, tight)
    assert tight.handle.report().ratio > 1.5
    with pytest.raises(lowtide.BudgetError):
        train(tmp_path, LowtideCallback(budget="1 MiB"), model=model)
    assert clean(model)


class Failing(TrainerCallback):
    """Raises at an event of the second step."""

    def __init__(self, event, error):
        setattr(self, event, self.fail)
        self.error = error

    def fail(self, args, state, control, **_):
        if state.global_step == 1:
            raise self.error


@pytest.mark.stack("HF Trainer", "no hook is left when training ends or raises")
@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_step_end"])
def test_no_hook_is_left(tmp_path, event, error):
    model = llama()
    assert clean(model)
    callback = LowtideCallback("actnn")
    with pytest.raises(type(error)):
        train(tmp_path, callback, model=model, extra=[Failing(event, error)])
    assert callback.handle.report().ratio > 4  # it was at work
    assert clean(model)
    train(tmp_path, callback, model=model)  # and may be used again
    assert clean(model)


def test_no_hook_is_left_when_the_forward_raises(tmp_path):
    model = llama()
    seen = []

    def check(module, args, output):
        seen.append(attached(model))
        if len(seen) == 2:
            raise RuntimeError("stop")

    handle = model.model.layers[1].register_forward_hook(check)
    with pytest.raises(RuntimeError, match="stop"):
        train(tmp_path, LowtideCallback("actnn"), model=model)
    assert seen == [True, True]
    handle.remove()
    assert clean(model)


class Reporter(TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(dict(logs))


@pytest.mark.stack("HF Trainer", "plain, kept and peak bytes are in the Trainer's logs and reach its reporters")
def test_logs(tmp_path):
    reporter, callback = Reporter(), LowtideCallback("actnn")
    _, trainer = train(tmp_path, callback, extra=[reporter])
    report = callback.handle.report()
    for logs in ([row for row in reporter.logs if "loss" in row], trainer.state.log_history[:STEPS]):
        assert len(logs) == STEPS
        assert logs[-1]["lowtide_kept_mib"] == report.stored_nbytes / 2**20
        assert logs[-1]["lowtide_plain_mib"] == report.plain_nbytes / 2**20
        assert logs[-1]["lowtide_peak_mib"] > 100  # torch alone takes more


@pytest.mark.stack(
    "HF Trainer", "`torch_compile=True`", instead="a warning says that what compiled code saves is not compressed"
)
def test_compiled(tmp_path):
    class Stop(TrainerCallback):
        def on_step_begin(self, *args, **_):
            raise InterruptedError  # before anything is compiled

    with pytest.warns(UserWarning, match="is not compressed"), pytest.raises(InterruptedError):
        train(tmp_path, LowtideCallback("actnn"), extra=[Stop()], torch_compile=True)


def test_a_trainer_without_the_callback_is_left_alone(tmp_path):
    LowtideCallback("actnn")
    model = llama()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        _, trainer = train(tmp_path, model=model)
    assert dataclasses.is_dataclass(trainer.state)
    assert clean(model)
    assert not any("lowtide_kept_mib" in row for row in trainer.state.log_history)
