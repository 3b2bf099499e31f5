"""Every model: exact with exact codecs, and with lossy ones as wrong as the theory says, not more."""

from __future__ import annotations

import contextlib
import math
import statistics
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import lowtide
from lowtide.codecs import Codec, Packed, Raw, TensorMeta
from lowtide.codecs.base import layout_of
from lowtide.codecs.groups import row_of
from zoo import ZOO


def train(name, method=None, steps=3, autocast=False, **options):
    """Losses, gradients of the last step and reports of a few SGD steps."""
    torch.manual_seed(0)
    model, batch, loss_fn = ZOO[name]()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    losses, reports = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        context = (
            contextlib.nullcontext() if method is None else lowtide.compress(model, method, min_numel=0, **options)
        )
        with context as session, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_fn(model, batch)
        losses.append(loss.item())
        loss.backward()
        if session is not None:
            reports.append(session.report())
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, gradients, reports


def distance(a, b):
    """Relative error of the whole gradient."""
    off = sum((a[n] - b[n]).double().square().sum() for n in b)
    return float((off / sum(b[n].double().square().sum() for n in b)).sqrt())


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("method", [Raw(), "lossless"], ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_exact_codecs_leave_gradients_bit_identical(name, method, autocast):
    try:
        losses, expected, _ = train(name, autocast=autocast)
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip(f"plain PyTorch cannot run this on this CPU: {str(error)[:80]}")
    got_losses, got, reports = train(name, method, autocast=autocast)
    assert got_losses == losses
    assert got.keys() == expected.keys()
    for parameter in expected:
        assert torch.equal(got[parameter], expected[parameter]), parameter
    assert len(reports) == 3
    for report in reports:  # a session that stored nothing would leave gradients as they are, too
        if method == "lossless":
            assert report.stored_nbytes < report.plain_nbytes
        else:
            assert any(site.state == "compressed" and site.codec.startswith("raw") for site in report.sites)


@pytest.mark.parametrize("name", ZOO)
def test_sites_are_the_same_in_each_step(name):
    _, _, reports = train(name, "actnn")
    first, *others = ([s.site for s in report.sites] for report in reports)
    assert len(others) == 2
    assert all(sites == first for sites in others)
    assert len(set(first)) == len(first) > 0


@dataclass(frozen=True)
class WorstCase(Codec):
    """Gaussian noise with the largest variance random rounding can have: (range / 2B)**2.

    Written without any kernel of the library. ``spread`` widens the range where the codec under test
    quantizes something else than the tensor itself.
    """

    id: ClassVar[str] = "worst_case"
    bits: int
    group: int
    layout: str
    spread: float = 1.0

    def encode(self, tensor, *, key, support=None):
        meta = TensorMeta.of(tensor)
        layout = layout_of(meta.shape, meta.stride)
        lines = tensor.permute(layout.order).reshape(-1, row_of(self.layout, layout, meta.numel)).float()
        generator = torch.Generator().manual_seed(key & (2**62 - 1))
        noisy = []
        for part in lines.split(self.group, dim=1):
            low = part.amin(1, keepdim=True)
            low = low - low.abs() / 128  # stored in bfloat16, rounded down; the step rounded up
            reach = (part.amax(1, keepdim=True) - low) * (1 + 1 / 128) * self.spread
            sigma = reach / (2 * (2**self.bits - 1))
            noisy.append(part + sigma * torch.randn(part.shape, generator=generator))
        whole = torch.cat(noisy, 1).to(tensor.dtype)
        inverse = sorted(range(tensor.dim()), key=layout.order.__getitem__)
        whole = whole.view([tensor.shape[d] for d in layout.order]).permute(inverse)
        return Packed(self, meta, (whole,))

    def decode(self, packed, *, support=None):
        return packed.buffers[0]

    def packed_nbytes(self, meta):
        return 1


@dataclass(frozen=True)
class WorstMethod(lowtide.Method):
    """``method`` with each of its codecs replaced by the noise that bounds it."""

    name: ClassVar[str] = "worst"
    method: lowtide.Method

    def choose(self, use):
        choice = self.method.choose(use)
        codec = choice.codec
        if codec.id == "group_quant":
            return lowtide.Choice.store(WorstCase(codec.bits, codec.group, codec.layout))
        if codec.id == "cast":
            return choice
        # |x - mean| of a group spans at most the range of the values plus the range of the means.
        return lowtide.Choice.store(WorstCase(codec.bits, 2**40, "sample", spread=2.0))


@pytest.mark.parametrize("method", ["actnn", "division"])
@pytest.mark.parametrize("name", ZOO)
def test_gradient_error_falls_with_bits_and_stays_below_the_bound(name, method):
    """The bound: the same step with noise of the largest variance the quantizer can have.

    Root mean squares over a few draws (the large net averages over enough values in one). The true variance is
    on average 2/3 of the largest, so the ratio of the two is expected at 0.8; 1.5 leaves room for few draws.
    """
    from lowtide.policy.methods import resolve

    _, exact, _ = train(name, steps=1)
    draws = range(1 if name.startswith("resnet50") else 4)
    errors = {}
    for bits in (8, 4, 2):
        options = {"bits": bits, "propagating_bits": bits}
        worst = WorstMethod(resolve(method, options))
        found = [train(name, method, steps=1, seed=seed, **options) for seed in draws]
        bounds = [train(name, worst, steps=1, seed=seed) for seed in draws]
        errors[bits] = math.sqrt(statistics.fmean(distance(g, exact) ** 2 for _, g, _ in found))
        assert errors[bits] < 1.5 * math.sqrt(statistics.fmean(distance(g, exact) ** 2 for _, g, _ in bounds))
        assert found[0][2][0].stored_nbytes < found[0][2][0].plain_nbytes
    assert 0 < errors[8] < errors[4] < errors[2]
