"""The published tables of activation memory, counted again on tensors without data.

A forward on fake tensors creates, shares and drops storages as a real one does, so the report of its session has the
bytes of a real run (``tests/test_memory.py``), for any batch, in a fraction of a second. Writes
``evidence/results/memory.csv`` and ``docs/memory.md``.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import lowtide
from benchmarks.nets import resnet50
from evidence.nets import densenet161
from lowtide.codecs import BlockMean, GroupQuant, TensorMeta
from lowtide.report import HELD, Report

RESULTS = Path(__file__).parent / "results" / "memory.csv"
PAGE = Path(__file__).parent.parent / "docs" / "memory.md"
GIB = 2**30


# ---------------------------------------------------------------- networks


def _bert_large() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return BertForSequenceClassification(BertConfig(**sizes))


def _swin_tiny() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(SwinConfig(num_labels=1000))  # the defaults are Swin-tiny's


def _images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 224, 224)


def _words(batch: int) -> Tensor:
    return torch.randint(0, 30522, (batch, 128))


class Net(NamedTuple):
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    batches: tuple[int, ...]


NETS = {
    "ResNet-50": Net(resnet50, _images, (64, 128, 256, 512)),
    "WRN-50-2": Net(functools.partial(resnet50, widen=2), _images, (64, 128, 256, 512)),
    "DenseNet-161": Net(densenet161, _images, (64,)),
    "BERT-large": Net(_bert_large, _words, (24,)),
    "Swin-tiny": Net(_swin_tiny, _images, (64,)),
}
PUBLISHED_NETS = ("ResNet-50", "WRN-50-2")


@functools.lru_cache(maxsize=64)
def count(net: str, batch: int, method: str, **options: Any) -> Report:
    """The report of one forward with its loss, while the loop holds the batch."""
    build, inputs, _ = NETS[net]
    with FakeTensorMode():
        model, x = build().train(), inputs(batch)
        targets = torch.zeros(batch, dtype=torch.int64)
        with lowtide.compress(model, method, **options) as session:
            scores = model(x)
            loss = F.cross_entropy(getattr(scores, "logits", scores), targets)
        del loss  # not before the session has closed: the graph must be there, as it is before backward
    return session.report()


# ---------------------------------------------------------------- what the published rows count


def _groups_with_wide_sides(meta: TensorMeta) -> int:
    """2 bits a value in groups of 256 of a sample, with a scale and a minimum of 32 bits each."""
    groups = meta.shape[0] * math.ceil(meta.numel // meta.shape[0] / 256)
    return GroupQuant(2, 256, "sample").packed_nbytes(meta) + 4 * groups


def _division(bits: int) -> Callable[[TensorMeta], int]:
    return BlockMean(8, 2, bits, faithful=True).packed_nbytes


def _groups(bits: int) -> Callable[[TensorMeta], int]:
    return GroupQuant(bits, 256, "sample").packed_nbytes


class Row(NamedTuple):
    """A method of ours beside a row of the published table.

    ``size`` gives the bytes of a tensor that reproduce the published figure, ``rival`` those of another reading of
    it, in which the input of the last average pool stays in float32 too.
    """

    label: str
    published: str
    method: str
    options: dict[str, Any]
    size: Callable[[TensorMeta], int]
    rival: Callable[[TensorMeta], int]


ROWS = [
    Row("`division(faithful=True)`", "DIVISION", "division", {"faithful": True}, _division(2), _division(2)),
    Row("`division()`", "DIVISION", "division", {}, _division(2), _division(2)),
    Row("`actnn(bits=2)`", "ActNN", "actnn", {"level": "L2", "bits": 2}, _groups_with_wide_sides, _groups(2)),
    Row("`actnn(bits=4)`", "BLPA (emulated 4-bit)", "actnn", {"level": "L2", "bits": 4}, _division(4), _groups(4)),
    Row("`actnn(bits=8)`", "AC-GC (emulated 8-bit)", "actnn", {"level": "L2", "bits": 8}, _division(8), _groups(8)),
]
LAST_POOL = 2048 * 7 * 7 * 4
"""Bytes of an image at the last average pool of either ResNet. Its mean needs none of them for backward."""
PLAIN = "plain PyTorch"
# Activation memory in GiB for batches of 64, 128, 256 and 512; None where it did not fit.
PUBLISHED: dict[str, dict[str, tuple[float | None, ...]]] = {
    "ResNet-50": {
        PLAIN: (5.14, 10.25, 20.48, None),
        "DIVISION": (0.49, 0.99, 1.97, 3.94),
        "ActNN": (0.49, 0.97, 1.94, 3.89),
        "BLPA (emulated 4-bit)": (0.82, 1.64, 3.28, 6.56),
        "AC-GC (emulated 8-bit)": (1.47, 2.94, 5.88, 11.75),
    },
    "WRN-50-2": {
        PLAIN: (6.70, 13.38, 26.75, None),
        "DIVISION": (0.64, 1.27, 2.52, 5.02),
        "ActNN": (0.62, 1.25, 2.49, 4.97),
        "BLPA (emulated 4-bit)": (1.06, 2.11, 4.22, 8.44),
        "AC-GC (emulated 8-bit)": (1.91, 3.81, 7.61, 15.20),
    },
}

IMAGE = "the images, which the loop holds"
COPY = "a compressed copy of the images"
CONVOLUTIONS = "inputs of convolutions"
NORMS = "inputs of batch norms"
MASKS = "masks of ReLUs"
POSITIONS = "positions of max pooling"
REST = "linear layer, statistics, loss"
ITEMS = (IMAGE, COPY, CONVOLUTIONS, NORMS, MASKS, POSITIONS, REST)


def stored_items(report: Report) -> dict[str, int]:
    """What a session stores of a CNN, by kind. A ReLU's output is stored once, for the ReLU and for convolutions."""
    items = dict.fromkeys(ITEMS, 0)
    for s in report.sites:
        if s.state == HELD:
            items[IMAGE] += s.plain_nbytes
            continue
        mask = 0
        if s.site.op == "Relu" and s.codec:
            mask = min(s.stored_nbytes, -(-math.prod(s.shape) // 8))
        items[MASKS] += mask
        items[_kind(s.site.op, s.site.slot)] += s.stored_nbytes - mask
    return items


def published_items(report: Report, size: Callable[[TensorMeta], int]) -> dict[str, int]:
    """What the published code stores: each input of each layer by itself, also where two layers share it."""
    items = dict.fromkeys(ITEMS, 0)
    for s in report.sites:
        strides = tuple(math.prod(s.shape[d + 1 :]) for d in range(len(s.shape)))
        meta = TensorMeta(s.shape, strides, torch.float32)
        op, slot = s.site.op, s.site.slot
        if op == "Convolution" and s.state == HELD:
            items[IMAGE] += s.plain_nbytes
            items[COPY] += size(meta)
        elif op == "Convolution" or (op, slot) == ("NativeBatchNorm", "input"):
            items[_kind(op, slot)] += size(meta)
        elif op == "Relu":
            items[MASKS] += -(-meta.numel // 8)
        elif op == "MaxPool2DWithIndices":
            items[POSITIONS] += meta.numel if slot == "result1" else 0
        else:
            items[REST] += s.plain_nbytes
    return items


def _kind(op: str, slot: str) -> str:
    if op == "NativeBatchNorm" and slot == "input":
        return NORMS
    return {"Relu": CONVOLUTIONS, "Convolution": CONVOLUTIONS, "MaxPool2DWithIndices": POSITIONS}.get(op, REST)


# ---------------------------------------------------------------- results


class Result(NamedTuple):
    network: str
    batch: int
    row: str
    published_row: str
    nbytes: int
    published_gib: float | None
    scheme_nbytes: int | None
    """The published scheme, counted by :func:`published_items`."""

    @property
    def difference(self) -> float | None:
        return None if self.published_gib is None else 100 * (self.nbytes / GIB / self.published_gib - 1)

    @property
    def scheme_difference(self) -> float | None:
        if self.published_gib is None or self.scheme_nbytes is None:
            return None
        return 100 * (self.scheme_nbytes / GIB / self.published_gib - 1)


def results() -> list[Result]:
    found = []
    for net, (_, _, batches) in NETS.items():
        for i, batch in enumerate(batches):
            known = {row: figures[i] for row, figures in PUBLISHED.get(net, {}).items()}
            for row in ROWS:
                report = count(net, batch, row.method, **row.options)
                if row is ROWS[0]:
                    plain = report.plain_nbytes + report.held_nbytes
                    found.append(Result(net, batch, PLAIN, PLAIN if known else "", plain, known.get(PLAIN), None))
                scheme = sum(published_items(report, row.size).values()) if known else None
                stored = report.stored_nbytes + report.held_nbytes
                name = row.published if known else ""
                found.append(Result(net, batch, row.label, name, stored, known.get(row.published), scheme))
    return found


def write_csv(found: list[Result], path: Path = RESULTS) -> None:
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow([*Result._fields, "difference_percent", "scheme_difference_percent"])
        for r in found:
            differences = ["" if d is None else f"{d:.1f}" for d in (r.difference, r.scheme_difference)]
            out.writerow([*("" if v is None else v for v in r), *differences])


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def _against_published(found: list[Result], net: str) -> str:
    rows = []
    for label in dict.fromkeys(r.row for r in found if r.network == net):
        here = [r for r in found if r.network == net and r.row == label]
        cells = []
        for r in here:
            figure = "out of memory" if r.published_gib is None else f"{r.published_gib:.2f}, {r.difference:+.1f} %"
            cells.append(f"**{r.nbytes / GIB:.2f}** ({figure})")
        rows.append([label, here[0].published_row, *cells])
    return _table([net, "published row", *(f"batch {b}" for b in NETS[net].batches)], rows)


def _scheme(batch: int = 512) -> str:
    rows = []
    for net in PUBLISHED_NETS:
        for row in ROWS[1:]:
            figure = PUBLISHED[net][row.published][NETS[net].batches.index(batch)]
            assert figure is not None
            report = count(net, batch, row.method, **row.options)
            cells = []
            for size, more in ((row.size, 0), (row.rival, batch * LAST_POOL)):
                counted = (sum(published_items(report, size).values()) + more) / GIB
                cells.append(f"{counted:.2f} ({100 * (counted / figure - 1):+.1f} %)")
            rows.append([net, row.published, f"{figure:.2f}", *cells])
    return _table(["network", f"row, batch {batch}", "published", "counted", "another reading"], rows)


def _itemised(net: str = "ResNet-50", batch: int = 512) -> str:
    columns = []
    for row in ROWS[:3]:
        report = count(net, batch, row.method, **row.options)
        if row is not ROWS[1]:
            columns.append((f"{row.published}, counted", published_items(report, row.size)))
        columns.append((row.label, stored_items(report)))
    rows = [[item, *(f"{items[item] / GIB:.3f}" for _, items in columns)] for item in ITEMS]
    rows.append(["**all**", *(f"**{sum(items.values()) / GIB:.3f}**" for _, items in columns)])
    return _table([f"{net}, batch {batch}, GiB", *(name for name, _ in columns)], rows)


def _others(found: list[Result]) -> str:
    nets = [net for net in NETS if net not in PUBLISHED_NETS]
    rows = []
    for label in (PLAIN, *(row.label for row in ROWS)):
        cells = []
        for net in nets:
            plain, here = (next(r for r in found if (r.network, r.row) == (net, name)) for name in (PLAIN, label))
            less = "" if label == PLAIN else f" ({plain.nbytes / here.nbytes:.1f}x less)"
            cells.append(f"{here.nbytes / GIB:.2f}{less}")
        rows.append([label, *cells])
    return _table(["GiB", *(f"{net}, batch {NETS[net].batches[0]}" for net in nets)], rows)


def page(found: list[Result]) -> str:
    """The whole of ``docs/memory.md``."""
    bert = count("BERT-large", 24, "actnn", level="L2", bits=2)
    noise = sum(s.plain_nbytes for s in bert.sites if s.codec.startswith("two_value"))
    plain = max(abs(r.difference) for r in found if r.row == PLAIN and r.difference is not None)
    return f"""# Activation memory, beside the published tables

Made by `make evidence-memory` (rows in `evidence/results/memory.csv`; torch {torch.__version__.partition("+")[0]}). It
takes seconds, because no value is computed.

## How it is counted
- One forward with its cross-entropy, in training mode and float32, on torch's *fake tensors*: they have shapes and
  storages, and no data. The report of such a session equals that of a real run site by site; `tests/test_memory.py`
  compares them on small networks, and ResNet-50's bytes with a count of elements by hand.
- *Activation memory* is what stays alive for backward: each storage that autograd saved, once, plus the batch of
  images, which the training loop holds in float32. Weights, gradients and optimizer states are no part of it, and
  neither is the peak: backward decodes one tensor at a time on top (`docs/benchmarks.md` measures peaks).
- The published figures are those of the DIVISION paper's repository (arXiv 2208.04187): memory allocated just before
  backward less that before the step, ImageNet at 224x224, with two decimals. Its GB are GiB. The rows BLPA and
  AC-GC are the authors' emulations in 4 and 8 bits, not the original systems.
- The networks are written out with torchvision's layers and in-place ReLUs; their parameters are as many as
  torchvision's, to the last one.

## ResNet-50 and WRN-50-2
GiB; in brackets the published figure and how far ours lies from it. At batch 64 the last published digit is worth up
to 2 %, and there the figures seem to hold 10 or 20 MiB that do not grow with the batch (plain ResNet-50: 5.14, but
20.48 / 4 = 5.12).

{_against_published(found, "ResNet-50")}

{_against_published(found, "WRN-50-2")}

Plain rows differ by at most {plain:.1f} %. All others are smaller than what was published, and the next two tables
say why.

## Why ours are smaller
What the published code stores can be counted from the same shapes: for *each* convolution and *each* batch norm its
own compressed input, one bit for each output of a ReLU, one byte for each output of the max pool, the images in
float32 and once more compressed. With DIVISION's codec at 2, 4 and 8 bits that gives the rows DIVISION, BLPA and
AC-GC; with 2 bits in groups of 256 and two float32 numbers for each group it gives the row ActNN. That these are the
codecs behind the figures is inferred from how well they fit. The last column is another reading: groups of 256 with
bfloat16 pairs for all rows but DIVISION, and the input of the last average pool in float32 for all.

{_scheme()}

Item by item:

{_itemised()}

- **Each storage once.** A convolution on a block's main path and the one on its projected shortcut read the same
  tensor; here it is stored once. The images are held anyway, so no compressed copy of them is made.
- **4 bits for a position in a 3x3 window**, where the published code takes a byte.
- **`actnn` and the 4- and 8-bit rows:** 32 bits beside each group of 256, where ActNN's row fits 64 and DIVISION's
  codec keeps block means (16 bits for up to 64 values) and 32 bits for each map, which for a map of 7x7 is 0.65 bits
  a value.
- **`division()` is larger than `division(faithful=True)`**: blocks at the edges have means of their own, where the
  published scheme drops them, and ranges cover 256 values in place of a map. `docs/methods.md` shows what that buys.

## Other networks
No resident figures are published for these that we know of; logs and tables give peaks or batch sizes.

{_others(found)}

BERT-large (24 layers, sequences of 128, dropout 0.1) and Swin-tiny are those of `transformers`. What propagates gets
at least 4 bits in them (`docs/methods.md`). The counts are for CPU: there dropout keeps its noise in
float32, {noise / GIB:.2f} GiB of BERT-large's plain row, where a GPU keeps a byte for each value, a quarter of that.
The compressed rows have a bit for each value either way.
"""


def main() -> None:
    found = results()
    write_csv(found)
    PAGE.write_text(page(found))
    for r in found:
        beside = "" if r.published_gib is None else f"  published {r.published_gib:6.2f}  {r.difference:+5.1f} %"
        print(f"{r.network:13} batch {r.batch:3}  {r.row:26} {r.nbytes / GIB:7.3f} GiB{beside}")


if __name__ == "__main__":
    main()
