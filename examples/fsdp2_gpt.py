"""Train a small GPT whose parameters are sharded over several processes, with compressed activations.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2_gpt.py

The text is the source code of Python's standard library, byte by byte. ``--method none`` trains without Lowtide, for
comparison; ``--bf16`` computes in bfloat16. Runs on the CPU, or on one GPU for each process.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lowtide


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Each position sees those before it."""
        samples, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(samples, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(F.gelu(self.up(self.feed_norm(x))))


class Gpt(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, max(1, width // 32)) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Logits for each position."""
        h = self.bytes(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def text(most: int) -> Tensor:
    """The first bytes of Python's standard library."""
    data = bytearray()
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        data += file.read_bytes()
        if len(data) >= most:
            break
    return torch.frombuffer(data[:most], dtype=torch.uint8)


def main() -> None:
    """Train, and tell what was kept for backward."""
    parser = argparse.ArgumentParser(description="train a small GPT with FSDP2 and compressed activations")
    parser.add_argument("--method", default="auto", help="a method of lowtide, or none")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences for each process")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a very small network")
    arguments = parser.parse_args()
    width, layers, length, batch, steps = 256, 6, 256, arguments.batch, arguments.steps
    if arguments.tiny:
        width, layers, length, batch, steps = 64, 2, 64, 4, 6

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = text(4_000_000)

    torch.manual_seed(0)
    model = Gpt(width, layers, length).to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if arguments.bf16 else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    places = torch.Generator().manual_seed(0)  # the same on every rank, which takes its part of each draw
    attached = nullcontext() if arguments.method == "none" else lowtide.attach(model, arguments.method)
    with attached as handle:
        for step in range(steps):
            starts = torch.randint(len(data) - length, (batch * ranks,), generator=places)[rank::ranks].tolist()
            rows = torch.stack([data[start : start + length + 1] for start in starts]).long().to(device)
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and (step % 20 == 0 or step == steps - 1):
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
        if rank == 0 and handle is not None:
            print(handle.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
