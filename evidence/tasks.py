"""What is trained: data, network, loss, schedule and the methods compared, for each task.

Everything random but compression comes from the seed: the first weights, the order of samples, their crops, dropout.
Runs of one seed therefore begin alike. They do not stay alike: whatever changes a gradient at all, by compression or
by rounding, soon makes another run of it, and the null arms show how far such runs end from each other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from benchmarks.nets import resnet20
from evidence import data, nets
from evidence.fidelity import Batch, normalized
from evidence.muon import Muon


class Arm(NamedTuple):
    """A method with its options; without a method nothing is compressed."""

    method: str | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    """Of ``lowtide.attach``."""
    adapt: bool = False
    """Probe the gradient after the first step, and before each further epoch."""
    perturbed: float = 0.0
    """Every first weight is multiplied by 1 and a normal number of this size."""
    noise_of: str | None = None
    """Normal noise is added to exact gradients, as large in each parameter as the error measured for this arm."""

    def label(self) -> str:
        """The options in words, for tables."""
        found = [f"{key}={value}" for key, value in self.options.items()] + ["probed"] * self.adapt
        if self.perturbed:
            found.append(f"first weights off by {self.perturbed:g}")
        if self.noise_of is not None:
            found.append(f"noise as large as the error of {self.noise_of}")
        return " ".join(found)


EXACT, NULL, FINE = "exact", "exact, perturbed", "8 bits"
CONTROLS = (EXACT, NULL, FINE)
"""Arms that can lose nothing: what differs between them is chance."""

ARMS = {
    EXACT: Arm(),
    NULL: Arm(perturbed=1e-6),
    FINE: Arm("actnn", {"bits": 8, "level": "L2"}),
    "auto": Arm("auto"),
    **{f"auto, {bits} bits": Arm("auto", {"bits": bits}) for bits in (2, 2.3, 3, 4)},
    "division": Arm("division", {"bits": 2}),
    "division, guarded": Arm("division", {"bits": 2, "guard": True}),
    "division, 1 bit": Arm("division", {"bits": 1}),
    "division, 4 bits": Arm("division", {"bits": 4}),
    "division, as published": Arm("division", {"bits": 2, "faithful": True}),
    "actnn": Arm("actnn", {"bits": 2}),
    "actnn, guarded": Arm("actnn", {"bits": 2, "guard": True}),
    "actnn, 2 bits": Arm("actnn", {"bits": 2, "level": "L2"}),
    "blpa": Arm("blpa", {"bits": 4}),
    "pool": Arm("pool", {"kernel": 2}),
    "tinyscript": Arm("tinyscript", {"bits": 2}),
    "gact, 2 bits": Arm("gact", {"bits": 2}, adapt=True),
    "gact, 4 bits": Arm("gact", {"bits": 4}, adapt=True),
    "lowrank": Arm("lowrank", {"rank": 0.125, "bits": 2}),
    **{f"exact + noise of {arm}": Arm(noise_of=arm) for arm in ("division", "auto")},
}


class Problem(Protocol):
    """Data in memory."""

    steps: int
    """Steps of one epoch."""

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        """One epoch."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """What is minimised."""

    def accuracy(self, model: nn.Module) -> float:
        """Percent of the test set that is right."""


class Samples:
    """Independent samples with labels, in shuffled batches of one size; ``prepare`` sees a batch and a generator.

    With ``mirrored`` the test judges the mean of what the model says of an image and of its mirror image.
    """

    def __init__(
        self,
        split: data.Split,
        batch: int,
        prepare: Callable[[Tensor, torch.Generator | None], Tensor],
        *,
        mirrored: bool = False,
    ) -> None:
        self.split, self.batch, self.prepare, self.mirrored = split, batch, prepare, mirrored
        self.steps = len(split.train_x) // batch

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        order = torch.randperm(len(self.split.train_x), generator=generator)
        for pick in order[: self.steps * self.batch].view(self.steps, self.batch):
            yield Batch(self.prepare(self.split.train_x[pick], generator), self.split.train_y[pick])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y)

    def accuracy(self, model: nn.Module) -> float:
        right = 0
        for pixels, y in zip(self.split.test_x.split(500), self.split.test_y.split(500), strict=True):
            x = self.prepare(pixels, None)
            said = model(x) + model(x.flip(3)) if self.mirrored else model(x)
            right += int((said.argmax(1) == y).sum())
        return 100 * right / len(self.split.test_x)


_MARGIN = 2


def images(pixels: Tensor, generator: torch.Generator | None) -> Tensor:
    """Normalized, channels first; with a generator also mirrored or not, and moved by up to 2 pixels."""
    if generator is not None:
        count, size = len(pixels), pixels.shape[-1]
        start = torch.randint(2 * _MARGIN + 1, (2, count, 1), generator=generator)
        rows, columns = start + torch.arange(size)
        mirrored = torch.rand(count, 1, generator=generator) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
        wide = F.pad(pixels, (_MARGIN,) * 4)
        sample = torch.arange(count)[:, None, None]
        pixels = wide[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    return normalized(pixels).contiguous()


def words(numbers: Tensor, generator: torch.Generator | None) -> Tensor:
    """As they are."""
    return numbers


class Papers:
    """A citation graph as one batch: 20 labels of each class to train with, 1000 other nodes to test with."""

    steps = 20  # in what counts as an epoch

    def __init__(self, graph: data.Graph, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(graph.labels), generator=generator)
        ranks = F.one_hot(graph.labels[order]).cumsum(0).gather(1, graph.labels[order, None])[:, 0]
        self.train = order[ranks <= 20]
        self.test = order[ranks > 20][-1000:]
        self.labels = graph.labels
        words = graph.features.float()
        self.x = words / words.sum(1, keepdim=True).clamp_min(1)

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        return itertools.repeat(Batch(self.x, self.labels), self.steps)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch.x)[self.train], batch.y[self.train])

    def accuracy(self, model: nn.Module) -> float:
        return 100 * float((model(self.x)[self.test].argmax(1) == self.labels[self.test]).float().mean())


def adjacency(edges: Tensor, count: int) -> Tensor:
    """The symmetric graph with a loop at each node, each edge divided by the roots of its ends' degrees."""
    loops = torch.arange(count).expand(2, count)
    both = torch.unique(torch.cat([edges, edges.flip(0), loops], 1), dim=1)
    scale = torch.bincount(both[0], minlength=count).float().rsqrt()
    return torch.sparse_coo_tensor(
        both, scale[both[0]] * scale[both[1]], (count, count), check_invariants=True
    ).coalesce()


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """Up for a quarter of the steps and down, along a cosine; momentum goes the other way."""
    return OneCycleLR(optimizer, optimizer.defaults["lr"], total_steps=steps, pct_start=0.25)


def triangle(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """Up for a quarter of the steps and down to nothing, along straight lines."""
    return LambdaLR(optimizer, lambda step: min(4 * step / steps, (steps - step) / steps / 0.75))


@dataclass(frozen=True)
class Task:
    """One table: a network on its data, and the methods compared."""

    title: str
    epochs: int
    arms: Mapping[str, int]
    """How many seeds each arm of the table has."""
    build: Callable[[], nn.Module]
    load: Callable[[int], Problem]
    """By seed: one set has no official split."""
    optimizer: Callable[..., torch.optim.Optimizer]
    rate: float
    schedule: Callable[[torch.optim.Optimizer, int], LRScheduler] | None = one_cycle
    """By the optimizer and all steps of a run."""
    paired: bool = False
    """Whether runs of one seed are compared with each other: where the seed also divides the data."""
    more: tuple[str, ...] = field(default=())
    """Arms that are run only on request."""


def _cifar(batch: int, *, mirrored: bool = False) -> Callable[[int], Problem]:
    return lambda seed: Samples(data.cifar10(), batch, images, mirrored=mirrored)


def _cifar_with_a_larger_test(batch: int) -> Callable[[int], Problem]:
    """40,000 images to train with; the other 10,000 join the test set, so that chance of its images counts less."""

    def load(seed: int) -> Problem:
        found, count = data.cifar10(), 40_000
        test_x, test_y = (
            torch.cat(pair) for pair in ((found.test_x, found.train_x[count:]), (found.test_y, found.train_y[count:]))
        )
        split = data.Split(found.train_x[:count], found.train_y[:count], test_x, test_y)
        return Samples(split, batch, images, mirrored=True)

    return load


def _pooled(width: int) -> nn.Module:
    return nets.pooled(width, nets.whitening(normalized(data.cifar10().train_x[:5000])))


def _channels_last(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build().to(memory_format=torch.channels_last)


TOKENS = 128
_SGD = functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=5e-4)
_OTHERS = ("division, 1 bit", "division, as published", "tinyscript")
_SHORT: dict[str, Any] = {
    "load": _cifar_with_a_larger_test(200),
    "optimizer": functools.partial(Muon, rest=0.4, weight_decay=1e-3),
    "rate": 0.12,
    "schedule": triangle,
}
TASKS = {
    "cifar-short": Task(
        title="CIFAR-10, six convolutions, 3 epochs",
        epochs=3,
        arms={
            **{EXACT: 14, NULL: 14, FINE: 8},
            **{"auto": 12, "auto, 2 bits": 3, "auto, 2.3 bits": 12, "auto, 4 bits": 3},
            **{"division": 3, "division, guarded": 3, "division, 4 bits": 3, "actnn": 3, "actnn, guarded": 3},
            **{"blpa": 3, "pool": 3},
            **{"exact + noise of division": 3, "exact + noise of auto": 3},
        },
        build=_channels_last(functools.partial(_pooled, 16)),
        **_SHORT,
    ),
    "cifar-wide": Task(
        title="CIFAR-10, six wide convolutions, 2 epochs",
        epochs=2,
        arms=dict.fromkeys((EXACT, NULL, "auto", "division"), 3),
        build=functools.partial(_pooled, 32),
        **_SHORT,
    ),
    "cifar": Task(
        title="CIFAR-10, ResNet-14, 6 epochs",
        epochs=6,
        arms={
            **{EXACT: 12, NULL: 12, FINE: 6},
            **{"auto": 12, "auto, 2 bits": 4, "auto, 2.3 bits": 4, "auto, 3 bits": 4, "auto, 4 bits": 4},
            **{"division": 6, "division, guarded": 4, "division, 4 bits": 4, "actnn": 4, "actnn, guarded": 4},
            **{"blpa": 4, "pool": 4},
            **{"exact + noise of division": 4, "exact + noise of auto": 4},
        },
        more=_OTHERS,
        build=_channels_last(functools.partial(nets.resnet14, 24, stem=16, strides=(2, 2, 2))),
        load=_cifar(64, mirrored=True),
        optimizer=functools.partial(_SGD, weight_decay=2e-4),
        rate=0.1,
    ),
    "imdb": Task(
        title="IMDB reviews, transformer from scratch, 3 epochs",
        epochs=3,
        arms={**dict.fromkeys((EXACT, NULL, "auto", "auto, 2 bits"), 3), "gact, 4 bits": 2, "gact, 2 bits": 2},
        build=functools.partial(nets.TextClassifier, data.VOCABULARY, TOKENS, width=64, heads=2, layers=2),
        load=lambda seed: Samples(data.imdb(TOKENS), 64, words),
        optimizer=functools.partial(torch.optim.AdamW, weight_decay=0.05),
        rate=1e-3,
    ),
    "cora": Task(
        title="Cora, two-layer GCN, 200 steps",
        epochs=10,
        arms=dict.fromkeys((EXACT, "actnn, 2 bits", "auto, 2.3 bits", "lowrank"), 10),
        build=lambda: nets.GraphNet(adjacency(data.cora().edges, len(data.cora().labels)), 1433, 64, 7),
        load=lambda seed: Papers(data.cora(), seed),
        optimizer=functools.partial(torch.optim.Adam, weight_decay=5e-4),
        rate=0.01,
        schedule=None,
        paired=True,
    ),
    "cifar-nine": Task(
        title="CIFAR-10, ResNet-14, 9 epochs",
        epochs=9,
        arms=dict.fromkeys((EXACT, "division", "actnn", "pool"), 3),
        more=("auto", NULL),
        build=_channels_last(functools.partial(nets.resnet14, 24, stem=16, strides=(2, 2, 2))),
        load=_cifar(128),
        optimizer=functools.partial(_SGD, weight_decay=2e-4),
        rate=0.2,
    ),
    "cifar-resnet20": Task(
        title="CIFAR-10, ResNet-20, 20 epochs",
        epochs=20,
        arms={},
        more=(EXACT, "division", "actnn", "auto", "pool", *_OTHERS),
        build=_channels_last(resnet20),
        load=_cifar(128),
        optimizer=_SGD,
        rate=0.2,
    ),
    "cifar-densenet": Task(
        title="CIFAR-10, DenseNet of 40 layers, 20 epochs",
        epochs=20,
        arms={},
        more=(EXACT, "division", "actnn", "auto", "pool", *_OTHERS),
        build=_channels_last(nets.densenet40),
        load=_cifar(64),
        optimizer=_SGD,
        rate=0.1,
    ),
}
