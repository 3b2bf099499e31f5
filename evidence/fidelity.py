"""Error of the gradient against stored bits, for every method, on activations of trained networks.

A network is trained exactly for a few hundred steps. Then, with the same weights, buffers and random state, the
gradients of fixed batches are computed exactly and with each method over several draws of its rounding. Beside them
stands SGD's own noise: the distance between a batch's exact gradient and the mean of many.
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from benchmarks.rows import origin
from evidence import data, nets
from lowtide.codecs import Codec, GroupQuant
from lowtide.report import COMPRESSED

RESULTS = Path(__file__).parent / "results"
STEPS = 300
SEEDS = 3
WARM = 2
"""Steps that a method sees before it is judged: adaptive ones have chosen by the end of the first."""
JUDGED = 2
"""Batches on which every method is judged."""
NOISE_BATCHES = 40


def environment() -> dict[str, Any]:
    """Where a row comes from; the C library plays no part here."""
    return {key: value for key, value in origin().items() if key != "glibc"}


class Entry(NamedTuple):
    """One method with its options. Entries of one series are joined by a line in the figure."""

    series: str
    method: str
    options: dict[str, Any]
    adapt: bool = False
    """Let the method probe the gradient after the first warm step."""


def _bits(method: str, *choices: float, series: str | None = None, adapt: bool = False, **options: Any) -> list[Entry]:
    return [Entry(series or method, method, {"bits": bits, **options}, adapt) for bits in choices]


ENTRIES = [
    Entry("lossless", "lossless", {}),
    *_bits("actnn", 1, 2, 4, 8, series="actnn, fixed bits", level="L2"),
    *_bits("actnn", 1.25, 2, 3, 4),
    *_bits("division", 1, 2, 4),
    *_bits("division", 2, series="division, as published", faithful=True),
    *_bits("division", 4, series="division, derived", derive=True),
    *_bits("auto", 1.5, 2, 2.3, 3, 4),
    *_bits("auto", 2, 4, series="auto, probed", adapt=True),
    *_bits("gact", 2, 4, series="gact, probed", adapt=True),
    *_bits("tinyscript", 2, 3, 4),
    *(e for kind in ("random", "subspace") for e in _bits("lowrank", 0, 4, series=f"lowrank, {kind}", kind=kind)),
    *(Entry("pool", "pool", {"kernel": kernel}) for kernel in (2, 4)),
    *(Entry("cast", "cast", {"dtype": dtype}) for dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2")),
    Entry("cast, groups", "cast", {"dtype": "float8_e4m3fn", "group": 128}),
    *_bits("blpa", 4, 8),
    *_bits("blpa", 4, 8, series="blpa, as published", faithful=True),
]
AVAILABLE = lowtide.methods()


def entries() -> list[Entry]:
    """Those whose method this version has."""
    return [entry for entry in ENTRIES if entry.method in AVAILABLE]


# ---------------------------------------------------------------- networks, batches, training


class Batch(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Subject:
    """A network, its data, and how it is trained before it is measured."""

    title: str
    batch: int
    build: Callable[[], nn.Module]
    load: Callable[[], data.Split]
    prepare: Callable[[Tensor], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    peak_rate: float


def normalized(images: Tensor) -> Tensor:
    """Bytes as numbers of mean 0 and variance 1 over CIFAR-10."""
    mean, deviation = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]]).view(2, 3, 1, 1)
    return (images.float() / 255 - mean) / deviation


TOKENS = 128
SUBJECTS = {
    "cifar": Subject(
        title="ResNet-14 on CIFAR-10",
        batch=128,
        build=nets.resnet14,
        load=data.cifar10,
        prepare=normalized,
        optimizer=functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4),
        peak_rate=0.1,
    ),
    "text": Subject(
        title="Transformer on IMDB reviews",
        batch=32,
        build=functools.partial(nets.TextClassifier, data.VOCABULARY, TOKENS),
        load=functools.partial(data.imdb, TOKENS),
        prepare=lambda numbers: numbers,
        optimizer=functools.partial(torch.optim.AdamW, weight_decay=0.01),
        peak_rate=1e-3,
    ),
}


def batches(subject: Subject, split: data.Split, seed: int) -> Iterator[Batch]:
    """Training batches without end, reshuffled in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    count = len(split.train_x)
    while True:
        order = torch.randperm(count, generator=generator)
        for i in range(0, count - subject.batch + 1, subject.batch):
            pick = order[i : i + subject.batch]
            yield Batch(subject.prepare(split.train_x[pick]), split.train_y[pick])


def train(subject: Subject, split: data.Split, steps: int) -> nn.Module:
    """Exact training; prints the loss now and then.

    The learning rate is that of the first half of a cycle, so that gradients are measured where training still moves.
    """
    torch.manual_seed(0)
    model = subject.build()
    optimizer = subject.optimizer(model.parameters(), lr=subject.peak_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, subject.peak_rate, total_steps=2 * steps)
    for step, batch in enumerate(itertools.islice(batches(subject, split, seed=0), steps), start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x), batch.y)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            print(f"  step {step}: loss {loss.item():.3f}", flush=True)
    return model


def trained(name: str, split: data.Split, steps: int) -> nn.Module:
    """The trained network, from the data folder if the same code trained it there before."""
    subject = SUBJECTS[name]
    code = "".join(map(inspect.getsource, (nets, train, batches))) + repr((subject.batch, subject.peak_rate))
    path = data.folder() / f"{name}-{steps}-{hashlib.sha256(code.encode()).hexdigest()[:8]}.pt"
    if not path.exists():
        part = path.with_suffix(".part")
        torch.save(train(subject, split, steps).state_dict(), part)
        part.replace(path)
    model = subject.build()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model


# ---------------------------------------------------------------- gradients


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y)


def gradient(model: nn.Module, batch: Batch) -> Tensor:
    """The gradient of all parameters as one vector, always from the same random state.

    In float64, because float32 sums over millions of values err in the fourth digit.
    """
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    _loss(model, batch).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


class Difference(NamedTuple):
    """How gradients differ from the right one: the mean over them, and what their mean still lacks."""

    error: float
    error_of_mean: float
    cosine: float


def difference(found: list[Tensor], exact: Tensor) -> Difference:
    """Distances in units of the right gradient's length.

    For unbiased noise ``error_of_mean`` is about ``error / sqrt(len(found))``; what is more is bias.
    """
    length = float(exact.norm())
    errors = [float((g - exact).norm()) / length for g in found]
    mean = torch.stack(found).mean(0)
    cosines = [float(torch.dot(g, exact) / (g.norm() * exact.norm())) for g in found]
    return Difference(_mean(errors), float((mean - exact).norm()) / length, _mean(cosines))


class Noise(NamedTuple):
    """SGD's own noise, in units of the mean gradient and of each batch's own."""

    of_mean: float
    of_batch: float
    cosine: float


def sgd_noise(gradients: list[Tensor]) -> Noise:
    """Distance of a batch's gradient from the mean of all, averaged over the batches.

    ``of_batch`` is on the scale of a method's error, which is in units of the batch's gradient too. The mean holds
    each batch itself and some noise, so both are a little too small: a stricter measure for methods.
    """
    mean = torch.stack(gradients).mean(0)
    away = [float((g - mean).norm()) for g in gradients]
    return Noise(
        of_mean=_mean(away) / float(mean.norm()),
        of_batch=_mean([a / float(g.norm()) for a, g in zip(away, gradients, strict=True)]),
        cosine=_mean([float(torch.dot(g, mean) / (g.norm() * mean.norm())) for g in gradients]),
    )


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


# ---------------------------------------------------------------- bits


class Value(NamedTuple):
    """A stored tensor that methods may compress: its values, and the bytes of masks kept with it."""

    numel: int
    lossless_nbytes: int


class Probe(lowtide.Method):
    """Compresses all it is asked about, and so learns which tensors methods are asked about."""

    name: ClassVar[str] = "probe"
    codec: ClassVar[Codec] = GroupQuant(8)

    def __init__(self) -> None:
        self.uses: list[Any] = []

    def choose(self, use: Any) -> lowtide.Choice:
        """Always the same."""
        self.uses.append(use)
        return lowtide.Choice.store(self.codec)


def values_of(model: nn.Module, batch: Batch) -> dict[lowtide.Site, Value]:
    """The tensors that methods may compress, by the site that carries their bytes.

    A ReLU's mask lies in the same row of a report as the values of its output. It is exact and the same in
    every method, so what a row holds beyond the probe's codec is what to leave out.
    """
    probe = Probe()
    handle = lowtide.attach(model, probe)
    gradient(model, batch)
    report = handle.report()
    handle.remove()
    rows = {row.site: row for row in report.sites}
    found = {}
    for use in probe.uses:
        row = rows[use.sites[0]]
        if row.state != COMPRESSED or row.site in found:
            raise RuntimeError(f"{row.site} holds part of a tensor; bits are counted for tensors stored as a whole")
        lossless = row.stored_nbytes - probe.codec.packed_nbytes(use.meta)
        found[row.site] = Value(use.meta.numel, lossless)
    return found


def stored_bits(report: lowtide.Report, values: dict[lowtide.Site, Value]) -> float:
    """Bits stored for each value that methods may compress, side information included, masks not.

    A tensor that the method keeps exact counts in full, one that it rebuilds from others not at all.
    """
    nbytes = 0
    for row in report.sites:
        if row.site in values:
            lossless = values[row.site].lossless_nbytes if row.state == COMPRESSED else 0
            nbytes += max(0, row.stored_nbytes - lossless)
    return 8 * nbytes / sum(value.numel for value in values.values())


# ---------------------------------------------------------------- measuring


def _quarter(batch: Batch) -> Batch:
    """Enough for a probe, at a quarter of the time."""
    return Batch(*(part[: -(-len(part) // 4)] for part in batch))


def measure(
    model: nn.Module,
    entry: Entry,
    warm: list[Batch],
    judged: list[Batch],
    exact: list[Tensor],
    values: dict[lowtide.Site, Value],
    seeds: int,
) -> dict[str, Any]:
    """One row: how far the method's gradients of the judged batches are from the exact ones, and its bytes.

    Each step draws its own rounding, so ``seeds`` steps on one batch are as many draws. A method whose second
    gradient equals its first draws nothing, and is not asked again.
    """
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    handle = lowtide.attach(model, entry.method, **entry.options)
    try:
        for i, batch in enumerate(warm):
            gradient(model, batch)
            if entry.adapt and i == 0:
                handle.adapt(functools.partial(_loss, model, _quarter(batch)))
        parts = []
        draws = seeds
        for batch, right in zip(judged, exact, strict=True):
            found: list[Tensor] = []
            while len(found) < draws:
                found.append(gradient(model, batch))
                if len(found) == 2 and torch.equal(*found):
                    draws = 1
            parts.append(difference(found[:draws], right))
        report = handle.report()
    finally:
        handle.remove()
        model.load_state_dict(before)
    error, error_of_mean, cosine = (_mean(list(column)) for column in zip(*parts, strict=True))
    return {
        "error": error,
        "error_of_mean": error_of_mean,
        "cosine": cosine,
        "draws": draws,
        "bits": stored_bits(report, values),
        "stored_nbytes": report.stored_nbytes,
        "plain_nbytes": report.plain_nbytes,
        "ratio": report.ratio,
    }


FIELDS = [
    *("net", "series", "method", "options", "bits", "error", "error_of_mean", "cosine", "draws"),
    *("stored_nbytes", "plain_nbytes", "ratio", "noise_of_mean", "steps", "batch"),
    *("date", "commit", "machine", "threads", "python", "torch", "numba", "lowtide"),
]


def rows_of(name: str, steps: int, seeds: int) -> Iterator[dict[str, Any]]:
    """SGD's noise first, then one row for each method."""
    subject = SUBJECTS[name]
    split = subject.load()
    print(f"{subject.title}: {steps} exact steps of {subject.batch}, then gradients", flush=True)
    model = trained(name, split, steps)
    common = {"net": name, "steps": steps, "batch": subject.batch}
    stream = batches(subject, split, seed=1)  # not the order of training
    noise = sgd_noise([gradient(model, batch) for batch in itertools.islice(stream, NOISE_BATCHES)])
    yield common | {
        "series": "sgd",
        "method": "sgd",
        "error": noise.of_batch,
        "noise_of_mean": noise.of_mean,
        "cosine": noise.cosine,
        "draws": NOISE_BATCHES,
    }
    warm, judged = (list(itertools.islice(stream, count)) for count in (WARM, JUDGED))
    exact = [gradient(model, batch) for batch in judged]
    values = values_of(model, judged[0])
    for entry in entries():
        found = measure(model, entry, warm, judged, exact, values, seeds)
        options = " ".join([f"{key}={value}" for key, value in entry.options.items()] + ["probed"] * entry.adapt)
        yield common | {"series": entry.series, "method": entry.method, "options": options} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nets", nargs="*", metavar="net", help=f"any of {', '.join(SUBJECTS)}; default: all")
    parser.add_argument("--steps", type=int, default=STEPS, help="exact steps before measuring")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="draws of the rounding for each batch")
    parser.add_argument("--out", type=Path, default=RESULTS / "fidelity.csv")
    given = parser.parse_args()
    unknown = set(given.nets) - set(SUBJECTS)
    if unknown:
        parser.error(f"unknown net {', '.join(sorted(unknown))}; choose from {', '.join(SUBJECTS)}")
    machine = environment()
    rows = []
    for name in given.nets or SUBJECTS:
        for row in rows_of(name, given.steps, given.seeds):
            rows.append({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in (row | machine).items()})
            shown = ("series", "options", "bits", "error", "error_of_mean", "cosine", "ratio")
            print(*(f"{key} {rows[-1][key]}" for key in shown if rows[-1].get(key)), sep="  ", flush=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} rows in {given.out}")


if __name__ == "__main__":
    main()
