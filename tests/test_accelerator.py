"""What a user with a GPU runs, here on the CPU: it runs, and it finds a kernel that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowtide.cli import main
from lowtide.kernels import ops
from lowtide.tools import accelerator


def test_it_runs_and_finds_no_difference() -> None:
    found = accelerator.examine(torch.device("cpu"), small=True)
    assert found["differing"] == []
    assert set(found["seconds and peak bytes"]) == {"ResNet-50-like", "GPT-2-like"}
    assert all(rate > 0 for rate in found["GB/s"].values())


def test_it_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.dequantize_blocks
    monkeypatch.setattr(ops, "dequantize_blocks", lambda *given: right(*given).nextafter(torch.tensor(9.0)))
    found = list(accelerator.differences(torch.device("cpu")))
    assert "dequantize_blocks float32" in found
    assert all(name.startswith("dequantize_blocks") for name in found)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--gpu"]) == 1
    assert "No GPU is here" in capsys.readouterr().out
