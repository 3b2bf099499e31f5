"""Mixed precision as PyTorch itself offers it, beside the same loop without Lowtide."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tiny import assert_errors_within_bounds, assert_same_weights, batches, llama, moved, weights

import lowtide


def train(method=None, steps=3, rate=0.1, autocast=None, scale=None, dtype=torch.float32, seed=0, **options):
    """Weights after a few steps of SGD, the losses, the last report and the scaler's state."""
    model = llama().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2, enabled=scale is not None)
    handle = contextlib.nullcontext() if method is None else lowtide.attach(model, method, seed=seed, **options)
    losses = []
    with handle:
        for batch in batches(steps):
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                loss = model(**batch).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    return weights(model), losses, None if method is None else handle.report(), scaler.state_dict()


def assert_like_plain(ratio, **options):
    expected, losses, _, scaler = train(**options)
    got, got_losses, report, got_scaler = train("lossless", **options)
    assert (got_losses, got_scaler) == (losses, scaler)
    assert_same_weights(got, expected)
    assert report.stored_nbytes < report.plain_nbytes
    assert train("actnn", bits=4, **options)[2].ratio > ratio
    once = {**options, "steps": 1, "rate": 1.0}
    before = weights(llama().to(options.get("dtype", torch.float32)))
    exact = moved(train(**once)[0], before)
    assert_errors_within_bounds(lambda method, seed: moved(train(method, seed=seed, **once)[0], before), exact)


@pytest.mark.stack("PyTorch AMP", "bfloat16 autocast, and errors at 4 and 8 bits")
def test_bfloat16_autocast():
    assert_like_plain(3, autocast=torch.bfloat16)


@pytest.mark.stack("PyTorch AMP", "float16 autocast with `GradScaler`, and errors at 4 and 8 bits")
def test_float16_autocast_with_a_scaler():
    assert_like_plain(3, autocast=torch.float16, scale=2.0**10)


@pytest.mark.stack("PyTorch AMP", "`GradScaler` skips the same steps when gradients overflow")
@pytest.mark.parametrize("method", ["lossless", "actnn"])
def test_overflow_skips_the_step(method):
    expected, _, _, plain = train(autocast=torch.float16, scale=2.0**40, steps=2)
    got, _, _, ours = train(method, autocast=torch.float16, scale=2.0**40, steps=2)
    assert ours == plain
    assert ours["scale"] == 2.0**38  # both steps overflowed and halved it
    assert_same_weights(got, expected)


@pytest.mark.stack("PyTorch AMP", "a model whose weights are bfloat16: same weights, and bytes fall")
def test_bfloat16_weights():
    expected, losses, _, _ = train(dtype=torch.bfloat16)
    got, got_losses, report, _ = train("lossless", dtype=torch.bfloat16)
    assert got_losses == losses
    assert_same_weights(got, expected)
    assert report.stored_nbytes <= report.plain_nbytes
    assert train("actnn", bits=4, dtype=torch.bfloat16)[2].ratio > 2.5
