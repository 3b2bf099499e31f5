"""Accelerate: ``attach`` works on prepared models, and its handle is an object that Accelerate can save."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from tiny import assert_errors_within_bounds, assert_same_weights, batches, llama, moved, weights

import lowtide


def train(method=None, steps=4, rate=0.1, save=None, load=None, start=0, options=None, **settings):
    """Weights after a few batches, and the last report."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # Accelerate keeps the settings of the first Accelerator for the process
    accelerator = Accelerator(cpu=True, **settings)
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model, optimizer = accelerator.prepare(model, optimizer)
    handle = None if method is None else lowtide.attach(model, method, **(options or {}))
    if handle is not None:
        accelerator.register_for_checkpointing(handle)
    if load is not None:
        accelerator.load_state(load)
    for number, batch in list(enumerate(batches(steps)))[start:]:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if save is not None and number == 1:
            accelerator.save_state(save)
    report = None if handle is None else handle.report()
    if handle is not None:
        handle.remove()
    return weights(accelerator.unwrap_model(model)), report


@pytest.mark.stack(
    "Accelerate", "`prepare`d model, `accumulate()`, with and without `mixed_precision`; errors at 4 and 8 bits"
)
@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}], ids=str)
def test_prepared_models(settings):
    expected, _ = train(**settings)
    got, _ = train("lossless", **settings)
    assert_same_weights(got, expected)
    assert train("actnn", options={"bits": 4}, **settings)[1].ratio > 3
    if not settings:
        before = weights(llama())
        exact = moved(train(steps=1, rate=1.0)[0], before)
        assert_errors_within_bounds(
            lambda method, seed: moved(train(method, steps=1, rate=1.0, options={"seed": seed})[0], before), exact
        )


@pytest.mark.stack("Accelerate", "`register_for_checkpointing(handle)`: a saved state is resumed bit for bit")
@pytest.mark.parametrize("method", ["auto", "actnn"])
def test_resume(tmp_path, method):
    whole, _ = train(method, save=tmp_path)
    resumed, _ = train(method, load=tmp_path, start=2)
    assert_same_weights(resumed, whole)
    (tmp_path / "custom_checkpoint_0.pkl").unlink()
    with pytest.raises(Exception, match="custom_checkpoint"):
        train(method, load=tmp_path, start=2)
