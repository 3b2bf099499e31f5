"""The examples that torchrun starts, at their tiny size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


def run(name, *arguments):
    """What the example prints on two processes."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(REPO / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*start, str(REPO / "examples" / f"{name}.py"), "--tiny", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed):
    return re.findall(r"^step .*", printed, re.MULTILINE)


@pytest.mark.stack("Examples", "`examples/ddp_cifar.py` and `examples/fsdp2_gpt.py`, started by torchrun")
@pytest.mark.parametrize(("name", "least"), [("ddp_cifar", 8), ("fsdp2_gpt", 6)])
def test_torchrun_examples(name, least):
    plain = losses(run(name, "--method", "none"))
    assert len(plain) == 2
    assert losses(run(name, "--method", "lossless")) == plain
    printed = run(name)  # as the first line of the file says
    assert len(losses(printed)) == 2
    assert float(re.search(r"\(([\d.]+)x less\)", printed)[1]) > least


def test_each_example_names_its_torchrun_line():
    for name in ("ddp_cifar", "fsdp2_gpt"):
        text = (REPO / "examples" / f"{name}.py").read_text(encoding="utf-8")
        assert f"torchrun --standalone --nproc-per-node 2 examples/{name}.py\n" in text.split('"""')[1]
