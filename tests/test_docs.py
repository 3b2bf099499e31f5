"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS)
def test_readme_code_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it saves a plan
    monkeypatch.setattr(lowtide, "tune_cpu_allocator", lambda: True)  # which cannot be undone for the tests after this
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(10))
    x, y = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {
        "torch": torch,
        "model": model,
        "x": x,
        "y": y,
        "loss_fn": nn.functional.cross_entropy,
        "optimizer": optimizer,
        "loader": [(x, y)] * 2,
    }
    exec(compile(code, "README.md", "exec"), names)


def test_readme_has_code():
    assert len(BLOCKS) >= 2
