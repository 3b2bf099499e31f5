"""What a user with a GPU runs, here on the CPU: it runs, and it finds a kernel that is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowtide.cli import main
from lowtide.kernels import ops
from lowtide.tools import accelerator

PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
if sys.argv[1] != "cpu":
    import standin
    standin.races.Event.lagging = False
from lowtide.tools import accelerator
print(json.dumps(accelerator.examine(torch.device(sys.argv[1]), small=True)))
"""


def test_it_runs_and_finds_no_difference() -> None:
    """On the stand-in device, whose memory is counted and which has streams; on the CPU where that cannot be built."""
    device = "tide" if shutil.which("g++") and shutil.which("ninja") else "cpu"
    environment = {**os.environ, "LOWTIDE_KERNELS": "reference", "MAX_JOBS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    run = [sys.executable, "-W", "ignore", "-c", PROGRAM, device]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["differing"] == []
    assert all(rate > 0 for rate in found["GB/s"].values())
    steps = found["seconds and peak bytes"]
    assert set(steps) == {"ResNet-50-like", "GPT-2-like"}
    for modes in steps.values():
        assert set(modes) == {"plain", "checkpoint", "division", "auto", "offload", "division in host memory"}
    if device == "tide":
        assert {"to host memory, beside the computation", "and back"} < set(found["GB/s"])
        peaks = {mode: peak for mode, (_, peak) in steps["ResNet-50-like"].items()}
        assert all(peaks.values())
        assert max(peaks["checkpoint"], peaks["offload"]) < peaks["plain"]


def test_it_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.dequantize_blocks
    monkeypatch.setattr(ops, "dequantize_blocks", lambda *given: right(*given).nextafter(torch.tensor(9.0)))
    calls = list(accelerator._calls())
    assert {operator for operator, _, _ in calls} == set(ops.SCHEMAS), "every operator is compared"
    monkeypatch.setattr(accelerator, "_calls", lambda: (call for call in calls if "blocks" in call[0]))
    found = list(accelerator.differences(torch.device("cpu")))
    assert "dequantize_blocks float32 rows of 784" in found
    assert all(name.startswith("dequantize_blocks") for name in found)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--gpu"]) == 1
    assert "No GPU is here" in capsys.readouterr().out
