"""Two processes that train together, for tests of what must not make one wait for the other."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist


def on_two_ranks(work, path):
    """What ``work(rank)``, a function of a module, returns on each rank of a group of two."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (port, path, work), nprocs=2)
    return [torch.load(path / f"{rank}.pt") for rank in range(2)]


def _rank(rank, port, path, work):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        torch.save(work(rank), path / f"{rank}.pt")
        dist.barrier()  # one that ends first would break the other's connections
    finally:
        dist.destroy_process_group()
