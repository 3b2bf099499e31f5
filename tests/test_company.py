"""A model in company: parts of it are compiled, it is copied, saved, or called in other ways than a plain loop does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8))


# ---------------------------------------------------------------- compiled parts


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about any global module hook
@pytest.mark.parametrize("how", ["attach", "compress"])
def test_compiled_parts_are_compiled_once_for_all_sessions(how):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    model, x = net(), torch.randn(128, 64)
    part = nn.Sequential(nn.Linear(256, 256), nn.GELU())
    model.insert(2, torch.compile(part, backend=counter))
    if how == "attach":
        lowtide.attach(model, "lossless", min_numel=0)
    try:
        for step in range(4):
            if how == "attach":
                model(x).sum().backward()
            else:
                with lowtide.compress(model, "lossless", min_numel=0):
                    model(x).sum().backward()
            with torch.no_grad():
                model(x)  # no session, so no hooks of ours, and other code
            assert counter.frame_count == 2, f"after step {step}"
    finally:
        torch._dynamo.reset()
