"""What the capture sees of a forward, and what it leaves alone, against plain autograd."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide

SOURCES = Path(lowtide.__file__).parent.parent
PRELUDE = """
import torch, lowtide
from torch import nn
import torch.nn.functional as F

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]

class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx, g):
        return 0.5 * g
"""


def in_child(code: str, timeout: float = 60.0) -> str:
    """Run ``code`` after the prelude in a process of its own, which is ended if it hangs; what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "use_of_a_view",
    [
        "v = h.view(-1); h.relu_(); y = Square.apply(v)",
        "v = h.view(-1); h.add_(1); y = Halve.apply(v)",
        "v = h.view(-1); h.relu_(); y = checkpoint(torch.sin, v, use_reentrant=True)",
        "v = h.view(-1); h.relu_(); y = Hooked()(v)",
    ],
)
def test_a_view_of_what_changed_in_place_does_not_hang(use_of_a_view):
    """Torch holds a lock while it renews the history of such a view; to ask for that history then would wait for ever."""
    code = f"""
from torch.utils.checkpoint import checkpoint

class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_full_backward_hook(lambda *_: None)
    def forward(self, v):
        return v.sin()

def step(context):
    torch.manual_seed(0)
    m = nn.Linear(8, 8)
    with context(m):
        h = m(torch.randn(4, 8))
        {use_of_a_view}
        y.sum().backward()
    return m.weight.grad

plain = step(lambda m: torch.enable_grad())
for derive in (False, True):
    found = step(lambda m: lowtide.compress(m, "lossless", min_numel=0, derive=derive))
    print(torch.equal(plain, found))
"""
    assert in_child(code).split() == ["True", "True"]
