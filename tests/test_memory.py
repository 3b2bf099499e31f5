"""Sessions on tensors without data, and the memory tables made with them."""

from __future__ import annotations

import csv
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import lowtide
from evidence import memory
from evidence.nets import densenet161
from lowtide.codecs import TensorMeta
from lowtide.graph import capture
from nets import resnet50
from zoo import ZOO, densenet

METHODS = {
    "lossless": {},
    "division": {},
    "actnn": {"level": "L2", "bits": 4},
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


def swin():
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(embed_dim=24, depths=[1, 2], num_heads=[2, 4], image_size=56, num_labels=10)
    loss_fn = lambda model, x: F.cross_entropy(model(x).logits, torch.zeros(8, dtype=torch.int64))  # noqa: E731
    return transformers.SwinForImageClassification(config).train(), torch.randn(8, 3, 56, 56), loss_fn


@pytest.mark.parametrize("case", [ZOO[n] for n in ("mobilenet", "unet", "gru", "bert", "llama")] + [swin])
def test_fake_bytes_are_real_bytes_in_other_networks(case):
    def sites():
        torch.manual_seed(0)
        model, batch, loss_fn = case()
        with lowtide.compress(model, "division") as session:
            loss = loss_fn(model, batch)
        report = session.report()
        del loss
        return report.sites

    real = sites()
    with FakeTensorMode():
        assert sites() == real


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
    outside = capture._probed.__wrapped__()
    with FakeTensorMode():
        assert capture._probed.__wrapped__() == outside
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


# ---------------------------------------------------------------- evidence/memory.py

STAGES = ((64, 3, 56, 56), (128, 4, 56, 28), (256, 6, 28, 14), (512, 3, 14, 7))
"""Width, blocks, and the sides of a map before and after each stage of ResNet-50, for images of 224x224."""


def elements(widen: int) -> tuple[int, int]:
    """Outputs of ReLUs and inputs of batch norms, for one image, from the shapes of the architecture alone."""
    relu = norm = 64 * 112**2
    for width, blocks, before, after in STAGES:
        for first in [True] + [False] * (blocks - 1):
            inner = widen * width * ((before if first else after) ** 2 + after**2)
            outer = 4 * width * after**2
            relu += inner + outer
            norm += inner + outer * (2 if first else 1)
    return relu, norm


def test_networks_have_torchvisions_parameters():
    with torch.device("meta"):
        nets = resnet50(), resnet50(widen=2), densenet161()
    assert [sum(p.numel() for p in net.parameters()) for net in nets] == [25_557_032, 68_883_240, 28_681_000]


@pytest.mark.parametrize(("net", "widen"), [("ResNet-50", 1), ("WRN-50-2", 2)])
def test_plain_bytes_against_a_count_by_hand(net, widen):
    relu, norm = elements(widen)
    if widen == 1:
        assert (round(relu / 1e6, 2), round(norm / 1e6, 2)) == (9.61, 11.11)
    report = memory.count(net, 1, "lossless")
    pool = 64 * 56**2
    channels = 64 + sum(4 * w + n * (2 * widen * w + 4 * w) for w, n, *_ in STAGES)  # of all batch norms
    # Statistics; input of the linear layer, log-probabilities, target and total weight of the loss.
    rest = 4 * 2 * channels + 4 * 2048 + 4 * 1000 + 8 + 4
    assert report.held_nbytes == 4 * 3 * 224**2
    assert report.plain_nbytes == 4 * (relu + norm + pool) + 8 * pool + rest


def test_items_add_up_to_the_report():
    report = memory.count("ResNet-50", 64, "division")
    relu, norm = elements(1)
    items = memory.stored_items(report)
    assert sum(items.values()) == report.stored_nbytes + report.held_nbytes
    assert items[memory.MASKS] == 64 * relu // 8
    assert items[memory.POSITIONS] == 64 * 64 * 56**2 // 2
    published = memory.published_items(report, lambda meta: 4 * meta.numel)
    assert published[memory.NORMS] == 64 * 4 * norm
    assert published[memory.MASKS] == items[memory.MASKS]
    assert published[memory.COPY] == published[memory.IMAGE] == items[memory.IMAGE] == 64 * 4 * 3 * 224**2


def test_published_group_has_two_float32_numbers():
    meta = TensorMeta((2, 3, 10, 10), (300, 100, 10, 1), torch.float32)
    assert memory._groups_with_wide_sides(meta) == 2 * (300 * 2 // 8 + 2 * 8)


@pytest.mark.parametrize("net", memory.PUBLISHED_NETS)
def test_published_figures_are_met(net):
    for i, batch in enumerate(memory.NETS[net].batches):
        figures = {row: figure[i] for row, figure in memory.PUBLISHED[net].items()}
        report = memory.count(net, batch, "division")
        if figures[memory.PLAIN] is not None:
            plain = (report.plain_nbytes + report.held_nbytes) / memory.GIB
            assert abs(plain / figures[memory.PLAIN] - 1) < 0.01
        assert (report.stored_nbytes + report.held_nbytes) / memory.GIB < figures["DIVISION"]
        if batch == 512:  # where what does not grow with the batch counts least
            for row in memory.ROWS:
                counted = sum(memory.published_items(report, row.size).values()) / memory.GIB
                assert abs(counted / figures[row.published] - 1) < 0.01


def test_stored_results_are_current():
    with memory.RESULTS.open() as file:
        table = list(csv.DictReader(file))
    compared = [r for r in table if r["published_gib"] and r["row"] != memory.PLAIN]
    assert len(compared) == 2 * 4 * len(memory.ROWS)
    assert all(float(r["difference_percent"]) < 0 for r in compared), "docs/memory.md says that ours are smaller"
    rows = [r for r in table if r["network"] == "ResNet-50" and r["batch"] == "64"]
    assert [r["row"] for r in rows] == [memory.PLAIN, *(row.label for row in memory.ROWS)]
    for stored, row in zip(rows[1:], memory.ROWS, strict=True):
        report = memory.count("ResNet-50", 64, row.method, **row.options)
        assert int(stored["nbytes"]) == report.stored_nbytes + report.held_nbytes, "run: make evidence-memory"
        assert int(rows[0]["nbytes"]) == report.plain_nbytes + report.held_nbytes
