"""Losses and gradients of three steps of every method on four networks, as digests.

``python tests/golden.py write FILE`` before a change that must not alter results, ``python tests/golden.py compare
FILE`` after it. Digests are those of one machine and one torch: matrix products differ between processors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide

STEPS = 3

CASES: dict[str, dict[str, Any]] = {
    "lossless": {},
    "auto": {},
    "auto bits=4": {"bits": 4},
    "division": {},
    "division faithful": {"faithful": True},
    "division derive": {"derive": True},
    "actnn": {},
    "actnn L1": {"level": "L1"},
    "actnn L5": {"level": "L5"},
    "gact": {},
    "blpa": {},
    "blpa faithful": {"faithful": True},
    "tinyscript": {},
    "pool": {},
    "lowrank": {},
    "lowrank subspace": {"kind": "subspace", "bits": 4},
    "cast": {},
    "cast float8": {"dtype": "float8_e4m3fn", "group": 128},
}


class Block(nn.Module):
    """Two convolutions with batch norms and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb = (nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.nb(self.b(functional.relu(self.na(self.a(x))))))


def residual() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), Block(16), nn.MaxPool2d(2)),
        *(Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )
    return net, torch.randn(8, 3, 28, 28)


class Volume(nn.Module):
    """A small U over three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv3d(8, 8, 3, padding=1), nn.InstanceNorm3d(8), nn.LeakyReLU())
        self.up = nn.ConvTranspose3d(8, 8, 2, stride=2)
        self.out = nn.Conv3d(16, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.down(x)
        return self.out(torch.cat((wide, self.up(self.deep(functional.max_pool3d(wide, 2)))), 1)).mean((2, 3, 4))


def transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, activation="gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(32, 64), encoder, nn.Flatten(), nn.Linear(64 * 24, 10)), torch.randn(8, 24, 32)


def perceptron() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(
        *(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU()),
        *(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10)),
    )
    return net, torch.randn(64, 64)


NETS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "residual": residual,
    "volume": lambda: (Volume(), torch.randn(4, 1, 12, 12, 12)),
    "transformer": transformer,
    "perceptron": perceptron,
}


def run(net: str, case: str) -> list[str]:
    """One line a step: the loss, and a digest of all gradients."""
    torch.manual_seed(0)
    model, x = NETS[net]()
    y = torch.randint(0, 10, (len(x),))
    handle = lowtide.attach(model, case.split()[0], min_numel=512, **CASES[case])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    lines = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        digest = hashlib.blake2b(digest_size=8)
        for parameter in model.parameters():
            digest.update(b"-" if parameter.grad is None else parameter.grad.contiguous().numpy().tobytes())
        lines.append(f"{float(loss.detach()).hex()} {digest.hexdigest()}")
        optimizer.step()
    report = handle.report()
    handle.remove()
    return [*lines, f"{report.plain_nbytes} {report.stored_nbytes}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {f"{net}: {case}": run(net, case) for net in NETS for case in CASES}
    if given.action == "write":
        given.file.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    wanted = json.loads(given.file.read_text())
    differing = [name for name in wanted if found.get(name) != wanted[name]]
    for name in differing:
        print(f"{name}\n  was {wanted[name]}\n  is  {found.get(name)}")
    print(f"{len(wanted) - len(differing)} of {len(wanted)} as before")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
