"""``lowtide demo``: one small network, trained exactly and compressed, side by side.

Every method trains in its own process, as a user's would, from the same weights on the same batches. The processes take
turns of a few steps, so that whatever else the machine does slows all methods alike, and each keeps the memory it frees
(:func:`lowtide.tune_cpu_allocator`), as the README recommends. Time and peak come from the same steps.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import kernels
from ..attachment import Attachment, attach
from ..machine.measure import Child, Emit, peak_above, reset_peak, resident
from ..malloc import give_back, start_environment, tune_cpu_allocator
from ..planning.profiling import profile
from ..report import size
from ..verify.check import check

EXACT = "exact"
METHODS = (EXACT, "auto", "division", "actnn", "pool")
STEPS = 40
BATCH = 64

_SIDE = 32
_TRAIN = 1437  # four fifths of the 1797 digits
_WARM = 4  # steps in which kernels compile and adaptive methods decide first: not timed, not measured
_TURN = 5  # steps that a method takes before the next has its turn; the first finds cold caches and is not timed
_TOLERANCE = 0.01  # of test accuracy; less is a few images of 360


class MissingError(ImportError):
    """A package that only the demo needs is not installed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One method's run; bytes and seconds are those of one step.

    Both were taken with the allocator that ``allocator`` names, "tuned" or "default".
    """

    method: str
    accuracy: float
    first_loss: float
    last_loss: float
    plain_nbytes: int
    stored_nbytes: int
    peak_nbytes: int
    seconds: float
    seconds_20: float
    seconds_80: float
    load: float
    kernels: str
    allocator: str

    @property
    def ratio(self) -> float:
        """Plain bytes over stored bytes."""
        return self.plain_nbytes / self.stored_nbytes


# ---------------------------------------------------------------- the network and its data


class Block(nn.Module):
    """Two convolutions around a shortcut, as in ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _conv(inputs, outputs, 3, stride)
        self.second = _conv(outputs, outputs, 3, 1)
        self.shortcut = nn.Identity() if stride == 1 else _conv(inputs, outputs, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the convolutions find to the input."""
        found: Tensor = self.second(self.relu(self.first(x)))
        found += self.shortcut(x)
        rectified: Tensor = self.relu(found)
        return rectified


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    # In so short a run torch's usual momentum of 0.1 would leave the averages behind the weights.
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs, momentum=0.3))


def network(width: int = 16) -> nn.Sequential:
    """Build a residual network of six blocks, for grey images of 32x32 pixels in ten classes."""
    return nn.Sequential(
        _conv(1, width, 3, 1),
        nn.ReLU(inplace=True),
        *(Block(width, width, 1), Block(width, width, 1)),
        *(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1)),
        *(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def _digits() -> dict[str, Any]:
    """Return pixels and labels as plain lists, so that children need not import scikit-learn."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return {"pixels": digits.data.astype(int).tolist(), "labels": digits.target.tolist()}


def _tensors(data: dict[str, Any]) -> tuple[Tensor, Tensor]:
    small = torch.tensor(data["pixels"], dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    images = F.interpolate(small, size=_SIDE, mode="bilinear", align_corners=False)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(data["labels"])[order]


# ---------------------------------------------------------------- what the children do


class _Training:
    """A training from weights and on batches that are the same for each method."""

    def __init__(self, argument: dict[str, Any]) -> None:
        self.method: str = argument["method"]
        self.steps: int = argument["steps"]
        self.batch: int = argument["batch"]
        self.images, self.labels = _tensors(argument["data"])
        torch.manual_seed(0)
        self.model = network().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        # One step more than is taken: the schedule ends at a rate of zero, and refuses a total of one.
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 5e-3, total_steps=self.steps + 1)
        self.handle: Attachment | None = None if self.method == EXACT else attach(self.model, self.method)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        rest = torch.empty(0, dtype=torch.long)
        for _ in range(self.steps):
            while len(rest) < self.batch:
                rest = torch.cat((rest, torch.randperm(_TRAIN, generator=generator)))
            yield self.images[rest[: self.batch]], self.labels[rest[: self.batch]]
            rest = rest[self.batch :]

    def step(self, images: Tensor, labels: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def kept(self, images: Tensor) -> tuple[int, int]:
        """Return the bytes that autograd keeps for a step, and the bytes that were stored instead."""
        if self.handle is not None:
            report = self.handle.report()
            return report.plain_nbytes, report.stored_nbytes
        handle = attach(self.model, "lossless")
        self.model(images)
        handle.remove()
        plain = handle.report().plain_nbytes
        return plain, plain

    @torch.no_grad()
    def accuracy(self) -> float:
        self.model.eval()
        found = self.model(self.images[_TRAIN:]).argmax(1)
        return float((found == self.labels[_TRAIN:]).float().mean())


def train(argument: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Train in this process, with an event after each step; return everything a :class:`Row` needs."""
    tuned = tune_cpu_allocator()
    training = _Training(argument)
    losses: list[float] = []
    seconds: list[float] = []
    for images, labels in training.batches():
        start = time.perf_counter()
        losses.append(training.step(images, labels))
        seconds.append(time.perf_counter() - start)
        if len(losses) == _TURN:  # the next step, which faults in again what is given back, is not timed
            with contextlib.suppress(OSError):
                give_back()
                reset_peak()
        emit({"step": len(losses)})
    peak = _peak(training)
    # Accuracy first: counting the exact method's bytes takes a forward, which moves BatchNorm's averages.
    accuracy = training.accuracy()
    training.model.train()
    plain, stored = training.kept(images)
    timed = sorted(timed_steps(seconds))
    if peak is None:
        peak = peak_above(partial(training.step, images, labels))
    return {
        "accuracy": accuracy,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "plain_nbytes": plain,
        "stored_nbytes": stored,
        "peak_nbytes": peak,
        "seconds": statistics.median(timed),
        "seconds_20": timed[len(timed) // 5],
        "seconds_80": timed[-1 - len(timed) // 5],
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        "kernels": "none" if training.method == EXACT else kernels_in_use(),
        "allocator": "tuned" if tuned else "default",
    }


def _peak(training: _Training) -> int | None:
    """The highest memory since the first turn, above what is there between steps; None but on Linux."""
    try:
        highest = resident("VmHWM")
    except OSError:
        return None
    training.optimizer.zero_grad()
    gc.collect()
    give_back()
    return highest - resident("VmRSS")


def timed_steps(seconds: Sequence[float]) -> list[float]:
    """Leave out the warm-up and the first step of each turn; return the last step's time if no other is left."""
    counted = [value for i, value in enumerate(seconds) if i >= _WARM and i % _TURN]
    return counted or [seconds[-1]]


def kernels_in_use() -> str:
    """Tell what served the operators called in this process so far: "numba", or "reference: reason"."""
    used = [served for served in kernels.status().values() if "not compiled yet" not in served]
    return next((served for served in used if served.startswith("reference")), "numba")


# ---------------------------------------------------------------- the comparison


def compare(steps: int, batch: int, on_step: Callable[[str], None]) -> list[Row]:
    """Train with every method in turn; ``on_step`` hears a method each step."""
    argument = {"steps": steps, "batch": batch, "data": _digits()}
    variables = start_environment()
    with contextlib.ExitStack() as stack:
        children = {
            method: stack.enter_context(
                Child("lowtide.tools.demo:train", argument | {"method": method}, exact_rss=False, variables=variables)
            )
            for method in METHODS
        }
        for turn in range(0, steps, _TURN):
            for method, child in children.items():
                for _ in range(turn, min(turn + _TURN, steps)):
                    child.resume()
                    on_step(method)
        for child in children.values():
            child.resume()
    return [Row(method, **(child.result or {})) for method, child in children.items()]


def run(
    steps: int = STEPS, batch: int = BATCH, json_path: Path | None = None, page: Path | None = None
) -> dict[str, Any]:
    """Compare the methods; show bars meanwhile, then one table, how it was measured, and one sentence.

    With the defaults this takes about a minute on two cores. :class:`MissingError` is raised without rich or
    scikit-learn. ``json_path`` receives all numbers, which are returned too. ``page`` receives a page about one step
    with the best method, and its name is printed last.
    """
    try:
        import sklearn.datasets  # noqa: F401
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError as error:
        raise MissingError(f"the demo needs rich and scikit-learn: pip install lowtide[demo] ({error})") from error
    bars = Console(stderr=True, highlight=False)
    columns = TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=bars, disable=not bars.is_terminal) as progress:
        tasks = {name: progress.add_task(name, total=steps, start=False) for name in METHODS}

        def on_step(name: str) -> None:
            if not progress.tasks[tasks[name]].started:
                progress.start_task(tasks[name])
                if not bars.is_terminal:
                    bars.print(f"{name} ...")
            progress.advance(tasks[name])

        rows = compare(steps, batch, on_step)
    sentence = conclusion(rows)
    _show(rows, steps, batch, sentence)
    settings: dict[str, Any] = {"steps": steps, "batch": batch, "torch": torch.__version__}
    settings |= {"threads": torch.get_num_threads(), "measured": setting(rows)}
    content = {
        "settings": settings,
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
        "conclusion": sentence,
    }
    if page is not None:
        with bars.status("writing the page"):
            _save_page(page, rows, steps, batch)
        print(f"The page about one step with {_best(rows).method}: {page.absolute().as_uri()}")
    if json_path is not None:
        json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content


def _save_page(page: Path, rows: Sequence[Row], steps: int, batch: int) -> None:
    """One step of the network as it is before training: the profile, the gradients with the best method, the table."""
    torch.manual_seed(0)
    model = network().train()
    images, labels = _tensors(_digits())
    data = images[:batch], labels[:batch]
    found = profile(model, data, _loss, optimizer=torch.optim.AdamW(model.parameters()), measure=False)
    method = _best(rows).method
    result = check(model, data, _loss, method, seconds=5.0)
    title = f"{_title(steps, batch)}, with {method}"
    table: dict[str, Any] = {"title": _title(steps, batch), "head": [head.replace("\n", " ") for head in _HEAD]}
    table |= {"rows": [_cells(row, rows[0]) for row in rows], "note": f"{setting(rows)} {conclusion(rows)}"}
    result.save(page, profile=found, tables=[table], title=title)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


_HEAD = (
    "method",
    "test\naccuracy",
    "kept for\nbackward",
    "fewer\nbytes",
    "peak memory\nof a step [1]",
    "seconds\na step [2]",
)


def _title(steps: int, batch: int) -> str:
    return f"A small ResNet on {_TRAIN} digits of {_SIDE}x{_SIDE}: {steps} steps of {batch} images"


def _cells(row: Row, exact: Row) -> list[str]:
    return [
        *(row.method, f"{row.accuracy:.1%}", size(row.stored_nbytes), f"{row.ratio:.1f}x", size(row.peak_nbytes)),
        f"{row.seconds:.3f} ({row.seconds / exact.seconds:.2f}x)",
    ]


def _show(rows: Sequence[Row], steps: int, batch: int, sentence: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(
        title=_title(steps, batch), box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII2, title_style=""
    )
    for number, name in enumerate(_HEAD):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*_cells(row, rows[0]))
    console.print(table)
    console.print(setting(rows), soft_wrap=not console.is_terminal, markup=False)
    console.print(sentence, soft_wrap=not console.is_terminal)


def setting(rows: Sequence[Row]) -> str:
    """Say in one line under which settings the columns of memory and time were measured."""
    malloc = (
        "with lowtide.tune_cpu_allocator()"
        if all(row.allocator == "tuned" for row in rows)
        else "with the system's allocator as it is"
    )
    return (
        f"[1] the highest of all steps after the first {_TURN}, above weights, optimizer and data; [2] median. "
        f"Each method in its own process {malloc}, in turns of {_TURN} steps."
    )


def _close(rows: Sequence[Row]) -> list[Row]:
    """Those whose accuracy is about that of the first, the exact run."""
    return [row for row in rows[1:] if row.accuracy >= rows[0].accuracy - _TOLERANCE]


def _best(rows: Sequence[Row]) -> Row:
    """The smallest peak; of those with the accuracy of the exact run, if there are any."""
    return min(_close(rows) or rows[1:], key=lambda row: row.peak_nbytes)


def conclusion(rows: Sequence[Row]) -> str:
    """Say in one sentence what the numbers show; the first row is the exact run."""
    exact, best, close = rows[0], _best(rows), _close(rows)
    points = 100 * (best.accuracy - exact.accuracy)
    parts = [
        f"With {best.method} autograd keeps {best.ratio:.1f}x fewer bytes",
        f"the peak of a step goes from {size(exact.peak_nbytes)} to {size(best.peak_nbytes)}",
        f"test accuracy is {abs(points):.1f} points {'higher' if points > 0 else 'lower'}"
        if round(points, 1)
        else "test accuracy is the same",
        _time(exact, best),
    ]
    text = ", ".join(parts[:-1]) + f", and {parts[-1]}"
    if not close:
        text += "; no method came within a point of the exact accuracy, so train longer (--steps)"
    load, cores = max(exact.load, best.load), os.cpu_count() or 1
    if load > 1.5 * cores:  # the demo alone makes a load of one for each core
        text += f"; other jobs shared the cores (a load of {load:.0f} on {cores}), so the times mean little"
    if best.kernels.startswith("reference"):
        text += f"; the slow reference kernels served ({best.kernels.removeprefix('reference').lstrip(': ')})"
    return text + "."


def _time(exact: Row, best: Row) -> str:
    change = best.seconds / exact.seconds - 1
    if abs(change) < 0.005:
        return "a step takes as long"
    text = f"a step takes {abs(change):.0%} {'more' if change > 0 else 'less'} time"
    if best.seconds_20 <= exact.seconds_80 and exact.seconds_20 <= best.seconds_80:
        text += " (less than the spread between steps)"
    return text
