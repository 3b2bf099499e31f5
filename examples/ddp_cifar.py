"""Train a small ResNet on several processes with compressed activations.

    torchrun --standalone --nproc-per-node 2 examples/ddp_cifar.py

``--cifar FOLDER`` names the folder of CIFAR-10's binary files (``data_batch_1.bin`` and so on). Without it the digits
of scikit-learn are used, drawn larger. ``--method none`` trains without Lowtide, for comparison. Runs on the CPU, or on
one GPU for each process.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lowtide


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Halve the map if the stride is 2."""
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def resnet(width: int, blocks: int) -> nn.Sequential:
    """Three stages, for pictures of 32 x 32."""
    stages = [Block(width, width, 1) for _ in range(blocks)]
    for inputs in (width, 2 * width):
        stages += [Block(inputs, 2 * inputs, 2), *[Block(2 * inputs, 2 * inputs, 1) for _ in range(blocks - 1)]]
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def pictures(folder: Path | None) -> tuple[Tensor, Tensor]:
    """Pictures and their classes."""
    if folder is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        x = torch.from_numpy(digits.images).float().div_(16)[:, None].expand(-1, 3, -1, -1)
        return F.interpolate(x, size=32, mode="bilinear"), torch.from_numpy(digits.target).long()
    files = [np.fromfile(file, np.uint8).reshape(-1, 3073) for file in sorted(folder.glob("data_batch_*.bin"))]
    rows = torch.from_numpy(np.concatenate(files))
    return rows[:, 1:].view(-1, 3, 32, 32).float().div_(255), rows[:, 0].long()


def main() -> None:
    """Train, and tell what was kept for backward."""
    parser = argparse.ArgumentParser(description="train a small ResNet with DDP and compressed activations")
    parser.add_argument("--method", default="auto", help="a method of lowtide, or none")
    parser.add_argument("--cifar", type=Path, help="the folder of CIFAR-10's binary files")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="pictures for each process")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a very small network")
    arguments = parser.parse_args()
    width, blocks, batch, steps = (8, 1, 16, 6) if arguments.tiny else (16, 3, arguments.batch, arguments.steps)

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, y = pictures(arguments.cifar)

    torch.manual_seed(0)
    model = DistributedDataParallel(resnet(width, blocks).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    order = torch.Generator().manual_seed(0)  # the same on every rank, which takes its part of each draw
    attached = nullcontext() if arguments.method == "none" else lowtide.attach(model, arguments.method)
    with attached as handle:
        for step in range(steps):
            chosen = torch.randint(len(x), (batch * ranks,), generator=order)[rank::ranks]
            loss = F.cross_entropy(model(x[chosen].to(device)), y[chosen].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and (step % 20 == 0 or step == steps - 1):
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
        if rank == 0 and handle is not None:
            print(handle.report())
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
