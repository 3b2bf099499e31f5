"""Train a small CNN on scikit-learn's digits with Lightning and Lowtide: one callback more, nothing else changes.

python examples/lightning_digits.py
"""

from __future__ import annotations

import argparse

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lowtide.integrations.lightning import LowtideCallback


class Digits(lightning.LightningModule):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 4 * 4, 10),
        )  # fmt: skip

    def training_step(self, batch, index):  # noqa: D102
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):  # noqa: D102
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):  # noqa: D102
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train, print accuracy and what was kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--output", default="output")
    given = parser.parse_args()
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    train = DataLoader(TensorDataset(x[:1437], y[:1437]), batch_size=64, shuffle=True)
    valid = DataLoader(TensorDataset(x[1437:], y[1437:]), batch_size=360)
    callback = LowtideCallback("auto", bits=given.bits)
    trainer = lightning.Trainer(
        max_epochs=given.epochs, callbacks=[callback], default_root_dir=given.output, logger=False
    )
    trainer.fit(Digits(), train, valid)
    print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f}")
    print(callback.handle.report())


if __name__ == "__main__":
    main()
