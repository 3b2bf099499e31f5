"""Lightning's ``Trainer`` with ``LowtideCallback``, beside the same Trainer without it."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tiny import assert_errors_within_bounds, assert_same_weights, moved, weights
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.graph import capture
from lowtide.integrations.lightning import LowtideCallback
from lowtide.session import attached
from ranks import on_two_ranks

STEPS = 4


class Net(lightning.LightningModule):
    """A small CNN whose step calls ``self.net`` or, with ``by_forward``, itself."""

    def __init__(self, rate=0.1, by_forward=False, fails=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(8 * 12 * 12, 10),
        )  # fmt: skip
        self.rate, self.by_forward, self.fails = rate, by_forward, fails
        self.losses = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x) if self.by_forward else self.net(x), y)
        if self.fails is not None and batch_idx == 1:
            raise self.fails
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("valid", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def data(count=32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, 12, 12, generator=generator)
    y = torch.randint(10, (count,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)


def fit(path, callback=None, model=None, resume=None, steps=STEPS, extra=(), validate=False, **options):
    model = Net() if model is None else model
    defaults = {
        "max_steps": steps,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    callbacks = [*extra, *([] if callback is None else [callback])]
    trainer = lightning.Trainer(default_root_dir=path, callbacks=callbacks, **(defaults | options))
    trainer.fit(model, data(), data(8) if validate else None, ckpt_path=resume)
    return weights(model), model


def clean(model):
    own = {"forward", "training_step"} & vars(model).keys()
    return not own and not attached(model) and not any(capture.pre_hooks(m) for m in model.modules())


@pytest.mark.stack("Lightning", "a CNN whose `training_step` calls `self.net` or `self`, and errors at 4 and 8 bits")
@pytest.mark.parametrize("by_forward", [False, True])
def test_fit(tmp_path, by_forward):
    expected, plain = fit(tmp_path, model=Net(by_forward=by_forward))
    got, ours = fit(tmp_path, LowtideCallback("lossless"), Net(by_forward=by_forward))
    assert ours.losses == plain.losses
    assert_same_weights(got, expected)
    callback = LowtideCallback("actnn", bits=4)
    fit(tmp_path, callback, Net(by_forward=by_forward))
    report = callback.handle.report()
    assert report.ratio > 4
    assert any(site.site.op == "LogSoftmax" for site in report.sites)  # the loss is covered too
    assert {site.site.module for site in report.sites} >= {"net.0", "net.1"}
    before = weights(Net())
    exact = moved(fit(tmp_path, model=Net(1.0, by_forward), steps=1)[0], before)

    def gradient(method, seed):
        callback = LowtideCallback(method, seed=seed, min_numel=0)
        return moved(fit(tmp_path, callback, Net(1.0, by_forward), steps=1)[0], before)

    assert_errors_within_bounds(gradient, exact)


@pytest.mark.stack("Lightning", 'one network of the module, by `module="net"`')
def test_one_network(tmp_path):
    expected, _ = fit(tmp_path)
    callback = LowtideCallback("lossless", module="net")
    got, model = fit(tmp_path, callback)
    assert_same_weights(got, expected)
    assert not any(site.site.op == "LogSoftmax" for site in callback.handle.report().sites)
    assert {site.site.module for site in callback.handle.report().sites} >= {"0", "1"}
    assert clean(model)


@pytest.mark.stack("Lightning", '`accumulate_grad_batches`, `precision="bf16-mixed"`, validation between steps')
@pytest.mark.parametrize(
    "options",
    [{"accumulate_grad_batches": 2, "steps": 2}, {"precision": "bf16-mixed"}, {"validate": True}],
    ids=["accumulate", "bf16", "validate"],
)
def test_options(tmp_path, options):
    expected, plain = fit(tmp_path, **options)
    got, ours = fit(tmp_path, LowtideCallback("lossless"), **options)
    assert ours.losses == plain.losses
    assert_same_weights(got, expected)
    callback = LowtideCallback("actnn", bits=4)
    fit(tmp_path, callback, **options)
    assert callback.handle.report().ratio > 3


@pytest.mark.stack("Lightning", "a checkpoint is resumed bit for bit, with what `auto` learned")
@pytest.mark.parametrize("method", ["auto", "actnn"])
def test_resume(tmp_path, method):
    keep = ModelCheckpoint(dirpath=tmp_path, filename="at-{step}", every_n_train_steps=STEPS, save_top_k=-1)
    options = {"steps": 2 * STEPS}  # two epochs: Lightning does not resume this loader within one
    whole, _ = fit(tmp_path, LowtideCallback(method), extra=[keep], enable_checkpointing=True, **options)
    saved = tmp_path / f"at-step={STEPS}.ckpt"
    resumed, model = fit(tmp_path, LowtideCallback(method), resume=saved, **options)
    assert len(model.losses) == STEPS
    assert_same_weights(resumed, whole)
    fresh = LowtideCallback(method)
    fresh.load_state_dict = lambda state: None
    other, _ = fit(tmp_path, fresh, resume=saved, **options)
    assert any(not torch.equal(other[name], whole[name]) for name in whole)  # the state was needed


@pytest.mark.stack("Lightning", "no hook is left when `fit()` ends or raises")
@pytest.mark.parametrize("module", [None, "net"])
@pytest.mark.parametrize("error", [None, RuntimeError("stop"), SystemExit(3)], ids=["end", "error", "exit"])
def test_no_hook_is_left(tmp_path, error, module):
    model = Net(fails=error)
    callback = LowtideCallback("actnn", module=module)
    if error is None:
        fit(tmp_path, callback, model)
    else:
        with pytest.raises(type(error)):
            fit(tmp_path, callback, model)
    assert callback.handle.report().ratio > 4
    assert clean(model)


@pytest.mark.stack("Lightning", "plain, kept and peak bytes reach the loggers")
def test_logs(tmp_path):
    callback = LowtideCallback("actnn")
    logger = CSVLogger(tmp_path)
    fit(tmp_path, callback, logger=logger)
    with Path(logger.log_dir, "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == STEPS
    assert float(rows[-1]["lowtide_kept_mib"]) == pytest.approx(
        callback.handle.report().stored_nbytes / 2**20, rel=1e-6
    )
    assert all(float(row["lowtide_peak_mib"]) > 100 for row in rows)  # torch alone takes more


@pytest.mark.stack("Lightning", "a budget, for one network of the module")
def test_a_budget(tmp_path):
    callback = LowtideCallback(budget="1 GiB", module="net")
    fit(tmp_path, callback)
    assert any("a budget of 1.0 GiB" in note for note in callback.handle.report().notes)


@pytest.mark.stack(
    "Lightning", "a budget or a guard for a whole `training_step`", instead='an error says to give `module="net"`'
)
@pytest.mark.parametrize("options", [{"budget": "1 GiB"}, {"guard": True}], ids=["budget", "guard"])
def test_what_runs_forwards_needs_a_network(options):
    with pytest.raises(ValueError, match='module="net"'):
        LowtideCallback(**options)


def trained_in_ddp(rank):
    """Weights at the end, plain, lossless and packed."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")  # else Lightning starts processes of its own
    options = {"strategy": "ddp", "devices": 2}
    path = None
    found = {"plain": fit(path, **options)[0], "lossless": fit(path, LowtideCallback("lossless"), **options)[0]}
    callback = LowtideCallback("actnn")
    found["packed"] = fit(path, callback, **options)[0]
    return found | {"ratio": torch.tensor(callback.handle.report().ratio), "states": callback.state_dict()}


@pytest.mark.stack("Lightning", '`strategy="ddp"` with two processes')
def test_ddp(tmp_path):
    first, second = on_two_ranks(trained_in_ddp, tmp_path)
    for name in ("plain", "lossless", "packed"):
        assert_same_weights(first[name], second[name])
    assert_same_weights(first["lossless"], first["plain"])
    assert first["ratio"] > 4
    assert len(first["states"]["ranks"]) == 2


def test_the_callback_takes_what_attach_takes(tmp_path):
    with pytest.raises(ValueError, match="nosuch"):
        fit(tmp_path, LowtideCallback("nosuch"))
    assert lowtide.integrations.lightning.LowtideCallback is LowtideCallback
