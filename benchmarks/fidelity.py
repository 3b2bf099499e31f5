"""How much each kind of saved tensor costs in gradient error: the measurement behind the default bits.

Two small nets are trained for a while on scikit-learn's digits (a CNN on upsampled images, a transformer
on rows as tokens), then the gradient of one batch is computed exactly and with one kind of tensor
compressed, over several seeds. Beside the error: the part of it that does not average out over seeds
(bias and what is left of the noise), and SGD's own noise, the distance between a batch's gradient and
that of many batches. Attention is also measured with sharper scores, as trained models have them.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lowtide
from lowtide.codecs import BlockMean, Cast, Codec, GroupQuant
from nets import Block, resnet20

SEEDS = 8
_SDPA = "ScaledDotProductFlashAttentionForCpu"


class Rows(nn.Module):
    """A transformer that reads an image as 16 tokens of 2x2 pixels."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.place = nn.Parameter(torch.randn(16, width) * 0.1)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(4)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = F.unfold(x, 2, stride=2).transpose(1, 2)
        return self.head(self.blocks(self.embed(tokens) + self.place).mean(1))


@dataclass(frozen=True)
class Only(lowtide.Method):
    """Compress one kind of tensor, keep the rest."""

    name: ClassVar[str] = "only"
    slots: tuple[str, ...]
    codec: Codec

    def choose(self, use: Any) -> lowtide.Choice:
        # A tensor that attention saved too counts as attention's: it has the greater need.
        sites = [s for s in use.sites if s.op == _SDPA] or use.sites
        wanted = any(f"{s.op}.{s.slot}" in self.slots for s in sites)
        return lowtide.Choice.store(self.codec) if wanted else lowtide.Choice.keep()


def data() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return x, torch.tensor(digits.target)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def gradient(model: nn.Module, x: Tensor, y: Tensor, method: Any = None) -> Tensor:
    model.zero_grad()
    if method is None:
        F.cross_entropy(model(x), y).backward()
    else:
        with lowtide.compress(model, method, min_numel=0):
            loss = F.cross_entropy(model(x.clone()), y)
        loss.backward()
    return flat(model)


def trained(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = data()
    if kind == "cnn":
        model: nn.Module = resnet20(blocks=1)
        x = F.interpolate(x, size=32, mode="bilinear").expand(-1, 3, -1, -1).contiguous()
        steps, lr = 60, 2e-3
    else:
        model, steps, lr = Rows(), 300, 1e-3
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        pick = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[pick]), y[pick]).backward()
        optimizer.step()
    return model, x, y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fidelity.csv")
    out = parser.parse_args().out
    rows: list[dict[str, Any]] = []
    for kind in ("cnn", "transformer"):
        model, x, y = trained(kind)
        state = {k: v.clone() for k, v in model.state_dict().items()}
        batch = torch.arange(64)
        picks = [torch.randint(len(x), (64,)) for _ in range(20)]
        mean = torch.stack([gradient(model, x[p], y[p]) for p in picks]).mean(0)
        noise = float((gradient(model, x[batch], y[batch]) - mean).norm() / mean.norm())
        sharpen = (1.0,) if kind == "cnn" else (1.0, 3.0)
        for sharp in sharpen:
            model.load_state_dict(state)
            if sharp != 1.0:
                for block in model.blocks:
                    block.q.weight.data *= sharp
                    block.k.weight.data *= sharp
            exact = gradient(model, x[batch], y[batch])
            for what, ops in CLASSES[kind].items():
                for bits in (2, 4, 8):
                    for codec in codecs_for(what, bits):
                        found = torch.stack(
                            [gradient(model, x[batch], y[batch], Only(ops, codec)) for _ in range(SEEDS)]
                        )
                        error = float(((found - exact).norm(dim=1) / exact.norm()).mean())
                        left = float((found.mean(0) - exact).norm() / exact.norm())
                        rows.append(
                            {
                                "net": kind,
                                "score scale": f"{sharp**2:g}",
                                "tensor": what,
                                "codec": repr(codec),
                                "error": f"{error:.4g}",
                                f"error of the mean of {SEEDS}": f"{left:.4g}",
                                "sgd noise": f"{noise:.3g}",
                            }
                        )
                        print(*rows[-1].values(), sep="\t", flush=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


CLASSES = {
    "cnn": {
        "conv input": ("Convolution.input",),
        "batch norm input": ("NativeBatchNorm.input",),
        "log softmax output": ("LogSoftmax.result",),
    },
    "transformer": {
        "linear input": ("Addmm.mat1",),
        "layer norm input": ("NativeLayerNorm.input",),
        "gelu input": ("Gelu.self",),
        "attention q k": (f"{_SDPA}.query", f"{_SDPA}.key"),
        "attention v": (f"{_SDPA}.value",),
        "attention output": (f"{_SDPA}.output",),
        "log softmax output": ("LogSoftmax.result",),
    },
}


def codecs_for(what: str, bits: int) -> list[Codec]:
    if what in ("conv input", "batch norm input"):
        return [
            GroupQuant(bits, 256, "sample"),
            BlockMean(8, 2, bits, 256),
            BlockMean(8, 2, bits, 1024),
            BlockMean(8, 2, bits, faithful=True),
        ]
    if what == "log softmax output" and bits == 8:
        return [GroupQuant(8, 256, "row"), Cast("bfloat16")]
    return [GroupQuant(bits, 256, "row")]


if __name__ == "__main__":
    main()
