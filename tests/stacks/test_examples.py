"""The examples run, at a tiny size."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def example(monkeypatch, tmp_path):
    """Run ``main()`` of an example with arguments, in a folder of its own."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        importlib.import_module(name).main()

    return run


@pytest.mark.stack("Examples", "`examples/hf_trainer.py`")
def test_hf_trainer(example, capsys):
    example("hf_trainer", "--steps", "2", "--length", "32", "--batch", "2")
    assert "x less)" in capsys.readouterr().out
    assert Path("output/checkpoint-2/lowtide_0.json").exists()


@pytest.mark.stack("Examples", "`examples/lightning_digits.py`")
def test_lightning_digits(example, capsys):
    example("lightning_digits", "--epochs", "1")
    text = capsys.readouterr().out
    assert "x less)" in text
    assert float(text.split("accuracy ")[1].split()[0]) > 0.5


@pytest.mark.stack("Examples", "`examples/lora_llama.py`: LoRA in all four modes")
def test_lora_llama(example, capsys, monkeypatch, tmp_path):
    module = importlib.import_module("lora_llama")

    def here(function, job, *, exact_rss):  # its processes would take longer to start than to run
        return getattr(module, function.partition(":")[2])(job, None)

    monkeypatch.setattr(module, "run_child", here)
    page = tmp_path / "page.md"
    page.write_text(f"before {module.BEGIN} old {module.END} after")
    sizes = {"base-steps": 2, "steps": 4, "layers": 1, "hidden": 64, "length": 64, "batch": 2, "rank": 4}
    example("lora_llama", "--page", str(page), *(part for k, v in sizes.items() for part in (f"--{k}", str(v))))
    text = page.read_text()
    assert text.startswith("before ")
    assert text.endswith(" after")
    assert " old " not in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert [row[0].strip("| ") for row in rows] == list(module.MODES)
    errors = {row[0].strip("| "): float(row[4]) for row in rows}
    assert errors["exact"] == errors["checkpoint"] == 0 < errors["lowtide"] < 0.5
    losses = [row[5:] for row in rows]
    assert losses[0] == losses[2]  # checkpointing is exact
    assert "x less)" in capsys.readouterr().out


def test_lora_llama_says_that_a_text_is_too_short(example):
    module = importlib.import_module("lora_llama")
    with pytest.raises(SystemExit, match="give a longer text"):
        next(module.batches(b"short", {"length": 64, "batch": 2}, 1, 0))
