"""Processes that train together, for tests of what must not make one wait for the other."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

import fresh  # noqa: F401  the processes are forked where torch is imported


def on_two_ranks(work, path):
    """What ``work(rank)``, a function of a module, returns on each rank of a group of two."""
    return on_ranks(work, path, 2)


def on_ranks(work, path, count):
    """What ``work(rank)``, a function of a module, returns on each rank of a group of ``count``."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    start_processes(_rank, (port, path, work, count, dict(os.environ)), count, start_method="forkserver")
    return [torch.load(path / f"{rank}.pt") for rank in range(count)]


def _rank(rank, port, path, work, count, environment):
    os.environ.clear()  # the process that forks has the environment of its own start
    os.environ.update(environment)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    try:
        torch.save(work(rank), path / f"{rank}.pt")
        dist.barrier()  # one that ends first would break the other's connections
    finally:
        dist.destroy_process_group()
