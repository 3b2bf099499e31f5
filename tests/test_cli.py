"""The command, its demo, and the meter under the demo's memory column."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide import cli
from lowtide.tools import demo, measure

MIB = 2**20


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"lowtide {lowtide.__version__}\n"


def test_methods_lists_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods"]) == 0
    assert capsys.readouterr().out.splitlines() == list(lowtide.methods().values())


def test_doctor_names_versions_methods_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"lowtide {lowtide.__version__}" in text
    assert f"torch {torch.__version__}" in text
    assert "saved tensors can be reached" in text
    for name in lowtide.methods():
        assert f"  {name}: ok" in text
    for operator in ("quantize_groups", "unpack_uints"):
        assert f"  {operator}: " in text
    assert "not compiled yet" not in text


def test_doctor_reports_a_method_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(method: str) -> str:
        raise RuntimeError(f"{method} is broken")

    monkeypatch.setattr(cli, "_try", fail)
    assert cli.main(["doctor"]) == 1
    assert "pool: failed: RuntimeError: pool is broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [[], ["demo", "--steps", "0"], ["demo", "--batch", "x"], ["demo", "--json", "no/such/folder/x"]],
)
def test_wrong_arguments_end_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert "usage: lowtide" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["rich.console", "sklearn.datasets"])
def test_demo_says_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["demo"]) == 2
    assert "pip install lowtide[demo]" in capsys.readouterr().err


def test_demo_runs_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("sklearn")
    path = tmp_path / "demo.json"
    command = [sys.executable, "-m", "lowtide", "demo", "--steps", "2", "--batch", "16", "--json", str(path)]
    # The reference kernels are quick on a few images, and compiling the others takes longer than the rest.
    environment = os.environ | {"LOWTIDE_KERNELS": "reference"}
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        environment.pop(name, None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr
    content = json.loads(path.read_text(encoding="utf-8"))
    assert done.stdout.rstrip().endswith(content["conclusion"])
    rows = {row.pop("method"): row for row in content["rows"]}
    assert list(rows) == ["exact", "division", "actnn", "pool"]
    exact = rows.pop("exact")
    assert exact["stored_nbytes"] == exact["plain_nbytes"]
    assert exact["peak_nbytes"] >= 0.9 * exact["plain_nbytes"]
    for row in rows.values():
        assert row["first_loss"] == exact["first_loss"]
        assert row["plain_nbytes"] == exact["plain_nbytes"]
        assert 0 < row["stored_nbytes"] < row["plain_nbytes"]
        assert row["ratio"] == pytest.approx(row["plain_nbytes"] / row["stored_nbytes"])
        assert 0 < row["peak_nbytes"] < exact["peak_nbytes"]
        assert 0 < row["seconds_20"] <= row["seconds"] <= row["seconds_80"]
        assert 0 <= row["accuracy"] <= 1
        assert row["kernels"].startswith("reference")
    assert "the slow reference kernels served" in content["conclusion"]


EXACT = demo.Row("exact", 0.98, 2.3, 0.1, 100 * MIB, 100 * MIB, 120 * MIB, 0.100, 0.098, 0.102, 1.0, "none")
DIVISION = replace(
    EXACT, method="division", accuracy=0.975, stored_nbytes=10 * MIB, peak_nbytes=40 * MIB, kernels="numba"
)
POOL = replace(DIVISION, method="pool", accuracy=0.5, peak_nbytes=20 * MIB)


def test_conclusion_prefers_a_method_that_learned_as_well() -> None:
    slow = replace(DIVISION, seconds=0.125, seconds_20=0.120, seconds_80=0.130)
    assert demo.conclusion([EXACT, slow, POOL]) == (
        "With division autograd keeps 10.0x fewer bytes, the peak of a step goes from 120.0 MiB to 40.0 MiB, "
        "test accuracy is 0.5 points lower, and a step takes 25% more time."
    )


def test_conclusion_admits_noise_bad_accuracy_and_slow_kernels() -> None:
    row = replace(
        POOL,
        seconds=0.104,
        seconds_20=0.1,
        seconds_80=0.2,
        load=999.0,
        kernels="reference: No module named numba",
    )
    text = demo.conclusion([EXACT, row])
    assert "a step takes 4% more time (less than the spread between steps)" in text
    assert "no method came within a point of the exact accuracy" in text
    assert "other jobs shared the cores" in text
    assert text.endswith("the slow reference kernels served (No module named numba).")


# ---------------------------------------------------------------- the meter


def allocate(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_above_measures_an_allocation_and_forgets_earlier_peaks() -> None:
    # In a child, where the allocator gives freed memory back; this process may serve 64 MiB from what it kept.
    found = measure.run_child("test_cli:measure_peaks", {}, exact_rss=True)
    assert found["large"] == pytest.approx(64 * MIB, rel=0.05)
    assert found["nothing"] < 2 * MIB


def measure_peaks(argument: dict[str, Any], emit: Any) -> dict[str, int]:
    allocate(256 * MIB)
    return {
        "large": measure.peak_above(lambda: allocate(64 * MIB)),
        "nothing": measure.peak_above(lambda: None),
    }


def test_tensor_peak_counts_what_lives_at_once() -> None:
    def run() -> None:
        kept = allocate(48 * MIB)
        allocate(16 * MIB)
        allocate(8 * MIB)
        del kept

    assert measure._tensor_peak(run) == pytest.approx(64 * MIB, rel=0.01)


CHILD = """
import os
import torch
from lowtide.tools.measure import peak_above

def small_blocks(argument, emit):
    def run():
        return [torch.ones(argument["nbytes"], dtype=torch.uint8) for _ in range(argument["blocks"])]
    run()
    blocks = run()
    last = blocks[-1]
    del blocks
    return {"peak": peak_above(run)}

def talk(argument, emit):
    print("a line for people")
    emit({"given": argument})
    return {"threshold": os.environ.get("MALLOC_MMAP_THRESHOLD_")}

def fail(argument, emit):
    raise ValueError("broken on purpose")

def die(argument, emit):
    emit({"alive": True})
    os.write(2, b"last words")
    os._exit(3)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "child_of_test.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "child_of_test"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc and /proc")
def test_exact_rss_sees_small_blocks_come_back(child: str) -> None:
    # The blocks were used before and one still lives: glibc as it is would keep the rest for the process,
    # and a second use would show a rise of nearly nothing.
    argument = {"nbytes": 128 * 1024, "blocks": 512}
    found = measure.run_child(f"{child}:small_blocks", argument, exact_rss=True)
    assert found["peak"] == pytest.approx(64 * MIB, rel=0.05)


def test_child_streams_events_and_keeps_its_prints_apart(
    child: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1")
    events: list[dict[str, Any]] = []
    result = measure.run_child(f"{child}:talk", {"x": "é"}, exact_rss=False, on_event=events.append)
    assert result == {"threshold": None}
    assert events == [{"given": {"x": "é"}}]
    assert "a line for people" in capsys.readouterr().err


def test_child_failure_carries_its_traceback(child: str) -> None:
    with pytest.raises(measure.ChildError, match=r"(?s)child_of_test:fail failed.*in fail.*broken on purpose"):
        measure.run_child(f"{child}:fail", {}, exact_rss=False)


def test_child_death_carries_its_code_and_last_words(child: str) -> None:
    with pytest.raises(measure.ChildError, match=r"(?s)ended with code 3.*last words"):
        measure.run_child(f"{child}:die", {}, exact_rss=False)
