"""Sessions on tensors without data, and the memory tables made with them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import lowtide
from lowtide import capture
from zoo import densenet

METHODS = {
    "lossless": {},
    "division": {},
    "actnn": {"bits": 4},
    "pool": {},
    "cast": {"dtype": "float8_e4m3fn"},
    "lowrank": {},
}


class Basic(nn.Module):
    """ResNet-18's block, with in-place ReLUs and a projected shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        return self.relu(out)


def small_resnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
        *(Basic(16, 16, 1), Basic(16, 32, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


class TokenBlock(nn.Module):
    """A transformer block with dropout and a clamp, over word numbers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(100, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, activation="gelu", batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.block(self.words(numbers)).clamp(-2.0, 2.0).mean(1))


def images() -> Tensor:
    return torch.randn(8, 3, 32, 32)


def words() -> Tensor:
    return torch.randint(0, 100, (16, 32))


NETS = {"resnet": (small_resnet, images), "densenet": (densenet, images), "tokens": (TokenBlock, words)}


def run(net, inputs, method, options, autocast):
    torch.manual_seed(0)
    model, x = net(), inputs()
    y = torch.randint(0, 10, (x.shape[0],))
    cast = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with lowtide.compress(model, method, **options) as session, cast:
        loss = F.cross_entropy(model(x), y)
    return session.report(), model, loss


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NETS)
def test_fake_bytes_are_real_bytes(name, method, autocast):
    real, *_ = run(*NETS[name], method, METHODS[method], autocast)
    with FakeTensorMode():
        fake, model, loss = run(*NETS[name], method, METHODS[method], autocast)
        loss.backward()
    assert any("without data" in note for note in fake.notes)
    assert not any("without data" in note for note in real.notes)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    assert 0 < fake.stored_nbytes < fake.plain_nbytes
    if autocast:  # torch's shape function gives batch norm's statistics in bfloat16, its kernel in float32
        fake, real = without_statistics(fake), without_statistics(real)
    assert fake.sites == real.sites
    assert (fake.plain_nbytes, fake.stored_nbytes) == (real.plain_nbytes, real.stored_nbytes)


def without_statistics(report):
    sites = [s for s in report.sites if (s.site.op, s.site.slot[:-1]) != ("NativeBatchNorm", "result")]
    return dataclasses.replace(report, sites=tuple(sites))


def test_meta_bytes_are_real_bytes():
    real, *_ = run(*NETS["resnet"], "division", {}, False)
    with torch.device("meta"):
        meta, model, loss = run(*NETS["resnet"], "division", {}, False)
    loss.backward()
    assert meta.sites == real.sites
    assert all(p.grad.is_meta for p in model.parameters())


def test_abilities_are_the_same_in_fake_mode():
    outside = capture.probe.__wrapped__()
    with FakeTensorMode():
        assert capture.probe.__wrapped__() == outside
    assert outside.slots
    assert outside.sole is not None


def test_a_tracer_on_fake_tensors_records_exact_gradients():
    """What is recorded will run on real data, so nothing may be replaced by its shape alone."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    x = torch.randn(128, 64)
    parameters = dict(model.named_parameters())

    def gradients(parameters, x):
        with lowtide.compress(model, "actnn"):
            loss = torch.func.functional_call(model, parameters, (x,)).square().mean()
        return torch.autograd.grad(loss, list(parameters.values()))

    traced = make_fx(gradients, tracing_mode="fake")(parameters, x)
    loss = model(x).square().mean()
    for found, exact in zip(traced(parameters, x), torch.autograd.grad(loss, model.parameters()), strict=True):
        torch.testing.assert_close(found, exact)
