"""Every command: pages and JSON on demand, codes that a script can use, and one line about anything that is wrong."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import lowtide
from lowtide import cli
from lowtide.machine.costs import Seconds
from lowtide.page.writing import read
from lowtide.planning import planner, profiling
from lowtide.planning.verifying import Verification
from lowtide.tools import bench, demo, targets

SMALL = """
import torch
from torch import nn

def loss(model, x):
    return model(x).square().mean()

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1)), torch.randn(256, 64), loss

def fails():
    raise ValueError("the data are missing\\nsecond line")

def loss_fails():
    return (*build()[:2], lambda model, x: 1 / 0)
"""


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test measures this machine, and each has a folder and a file of its own."""
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(profiling, "workspaces", lambda calls: {})
    monkeypatch.setattr(planner, "codec_seconds", lambda codec, dtype, rectified=False: Seconds(1e-9, 1e-9))
    monkeypatch.setattr(planner, "fresh_seconds", lambda: 1e-10)
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text(SMALL)
    Path("broken.json").write_text("{")
    Path("other.json").write_text("{}")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> SimpleNamespace:
        try:
            code: Any = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        return SimpleNamespace(code=code, **capsys.readouterr()._asdict())

    return call


TARGETED = {"profile": [], "plan": ["--ratio", "2"], "fit": ["--budget", "1GiB"], "bench": []}

WRONG = [
    *(
        case
        for name, more in TARGETED.items()
        for case in (
            ([name, "no_such.py:build", *more], "there is no file 'no_such.py'"),
            ([name, "small.py:no_such", *more], "small.py has no function 'no_such'"),
            ([name, "small.py:fails", *more], "ValueError: the data are missing (--debug shows the traceback"),
            ([name, "small.py:loss_fails", *more], "ZeroDivisionError: division by zero"),
            ([name, "hf:no-such-model", *more], "'no-such-model' is neither a file nor a model type"),
            ([name, "small.py:build", *more, "--save", "no/such/x.html"], "expected a file in a folder that exists"),
            ([name, "small.py:build", *more, "--save", "."], "expected a file in a folder that exists; got '.'"),
        )
    ),
    (["plan", "small.py:build", "--budget", "-1GiB"], "a budget must be above zero; got '-1GiB'"),
    (["fit", "small.py:build", "--budget", "-1GiB"], "a budget must be above zero; got '-1GiB'"),
    (["plan", "no_such.json", "--ratio", "2"], "there is no file 'no_such.json'"),
    (["check", "no_such.py:build"], "there is no file 'no_such.py'"),
    (["check", "small.py:fails"], "ValueError: the data are missing (--debug shows the traceback"),
    (["check", "small.py:loss_fails"], "ZeroDivisionError: division by zero"),
    (["check", "small.py:build", "--method", "no-such"], "no-such"),
    (["check", "small.py:build", "--save", "no/such/x.html"], "expected a file in a folder that exists"),
    (["bench", "small.py:build", "--method", "no-such"], "invalid choice: 'no-such'"),
    (["report"], "the following arguments are required: FILE"),
    (["report", "no_such.json"], "there is no file 'no_such.json'; write one with save(), or with --save"),
    (["report", "."], "Is a directory"),
    (["report", "broken.json"], "broken.json: this is not JSON"),
    (
        ["report", "other.json"],
        "other.json: this is no profile, plan, report, check or page of Lowtide; write one with",
    ),
    (["report", "other.json", "--save", "no/such/x.html"], "expected a file in a folder that exists"),
    (["demo", "--page", "page.txt"], "expected a name that ends in .html; got 'page.txt'"),
    (["demo", "--page", "no/such/page.html"], "expected a file in a folder that exists"),
    (["demo", "--steps", "-1"], "expected a whole number of at least 1; got '-1'"),
    (["methods", "--save", "x"], "unrecognized arguments: --save x"),
    (["doctor", "small.py:build"], "unrecognized arguments: small.py:build"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_what_is_wrong_is_one_line_and_code_2(
    arguments: list[str], message: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(plan: Any, model: nn.Module, batch: Any, loss_fn: Any, **more: Any) -> None:
        loss_fn(model, batch)

    monkeypatch.setattr(bench, "verify", verify)
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    *before, line = [line for line in done.err.splitlines() if line != "plain ..."]
    assert not before or before[0].startswith("usage: lowtide ")
    assert message in line
    assert "Traceback" not in done.err


@pytest.mark.parametrize("name", [*TARGETED, "check"])
def test_debug_shows_where_it_failed(name: str, run: Any) -> None:
    done = run(name, "small.py:fails", *TARGETED.get(name, []), "--debug")
    assert done.code == 2
    assert "in fails" in done.err
    assert "Traceback" in done.err


def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)  # root may write anywhere
    for part in ("resolve", "function_of"):
        monkeypatch.setattr(targets, part, lambda *given, **more: pytest.fail("it began to work"))
    monkeypatch.setattr(demo, "run", lambda *given: pytest.fail("it began to work"))
    for command in (
        *([name, "small.py:build", *more, "--save", tmp_path / "x.html"] for name, more in TARGETED.items()),
        ["check", "small.py:build", "--save", tmp_path / "x.html"],
        ["report", "small.json", "--save", tmp_path / "x.html"],
        ["demo", "--page", tmp_path / "x.html"],
        ["demo", "--json", tmp_path / "x.json", "--page", tmp_path.parent / "x.html"],
    ):
        done = run(*command)
        assert done.code == 2
        assert "expected a file that can be written" in done.err.splitlines()[-1]


# ---------------------------------------------------------------- pages and JSON


def test_profile_plan_and_check_become_one_page(run: Any) -> None:
    assert run("profile", "small.py:build", "--save", "profile.json").code == 0
    planned = run("plan", "profile.json", "--ratio", "3", "--save", "plan.json")
    assert planned.code == 0
    assert run("check", "small.py:build", "--method", "actnn", "--save", "check.json").code == 0
    done = run("report", "profile.json", "plan.json", "check.json", "--save", "page.html")
    assert (done.code, done.err) == (0, "")
    assert "Peak of a step" in done.out
    again = run("report", "page.html", "--json")
    assert json.loads(again.out) == read("page.html")
    made = read("page.html")
    assert made["frontier"]["chosen"]["peak"] == lowtide.BudgetPlan.load("plan.json").predicted.peak
    assert made["fidelity"]["parameters"]
    assert made["timeline"]["after"] is not None


@pytest.mark.parametrize("name", ["profile", "plan", "fit", "check"])
def test_commands_save_pages(name: str, run: Any) -> None:
    done = run(name, "small.py:build", *TARGETED.get(name, ["--method", "cast"]), "--save", "x.html", "--json")
    assert done.code == 0, done.err
    made = read("x.html")
    assert made["sites"]
    json.loads(done.out)
    assert (made["timeline"] is None) == (name == "check")


def test_report_of_a_session(run: Any) -> None:
    model, x, loss = targets.function_of("small.py:build")()
    with lowtide.compress(model, "actnn") as session:
        loss(model, x)
    session.report().save("report.json")
    done = run("report", "report.json")
    assert done.code == 0
    assert "Kept for backward" in done.out
    assert "actnn" in done.out


def test_bench_measures_each_method(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def verify(plan: Any, model: nn.Module, batch: Any, loss_fn: Any, *, plain: bool) -> Verification:
        told.append(plan)
        assert not plain
        return Verification(2**20 if plan is None else 2**19, None, 0.25 if plan else 0.0, None, 0.5)

    monkeypatch.setattr(bench, "verify", verify)
    done = run("bench", "small.py:build", "--method", "auto", "--method", "cast", "--json", "--save", "x.html")
    assert (done.code, told) == (0, [None, "auto", "cast"])
    assert done.err == "plain ...\nauto ...\ncast ...\n"
    rows = [
        bench.Row("plain", 2**20, 0.5, 0.0),
        bench.Row("auto", 2**19, 0.5, 0.25),
        bench.Row("cast", 2**19, 0.5, 0.25),
    ]
    assert json.loads(done.out)["rows"] == [asdict(row) for row in rows]
    assert read("x.html")["tables"] == [bench.table(rows)]
    lines = run("bench", "small.py:build").out.splitlines()
    assert [line.split()[0] for line in lines] == ["method", "plain", *bench.METHODS]
    assert lines[2].split()[1:] == ["512.0", "KiB", "0.50x", "0.5", "1.00x", "0.25"]


def test_bench_runs_real_steps(run: Any) -> None:
    done = run("bench", "small.py:build", "--method", "actnn", "--json")
    assert done.code == 0, done.err
    plain, actnn = json.loads(done.out)["rows"]
    assert plain["error"] == 0 < actnn["error"] < 1
    assert plain["peak"] > 256 * 64 * 4


def test_methods_and_doctor_write_json(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(run("methods", "--json").out) == lowtide.methods()
    monkeypatch.setattr(cli, "_try", lambda method: "ok")
    done = run("doctor", "--json")
    found = json.loads(done.out)
    assert done.code == 0
    assert found["healthy"] is True
    assert found["methods"] == dict.fromkeys(lowtide.methods(), "ok")
    assert found["versions"]["lowtide"] == lowtide.__version__
    assert found["kernels"].keys() == cli.kernels.status().keys()

    def fail(method: str) -> str:
        raise RuntimeError(f"{method} is broken")

    monkeypatch.setattr(cli, "_try", fail)
    done = run("doctor", "--json")
    assert done.code == 1
    assert json.loads(done.out)["methods"]["auto"] == "failed: RuntimeError: auto is broken"


ROWS = [
    demo.Row(name, 0.9, 2.3, 0.1, 8 * 2**20, stored * 2**20, (stored + 1) * 2**20, 0.1, 0.1, 0.1, 0.0, "numba", "tuned")
    for name, stored in (("exact", 8), ("auto", 2), ("actnn", 1))
]


def test_the_demo_ends_with_a_page_and_names_it(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("rich")
    monkeypatch.setattr(demo, "compare", lambda steps, batch, on_step: ROWS)
    done = run("demo", "--batch", "8", "--page", "page.html", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["rows"][1]["stored_nbytes"] == 2 * 2**20
    assert Path("page.html").absolute().as_uri() in done.err
    made = read("page.html")
    assert made["tables"][0]["rows"] == [demo._cells(row, ROWS[0]) for row in ROWS]
    assert made["fidelity"]["verdict"]
    assert made["timeline"]["after"]["peak"]["nbytes"] < made["timeline"]["before"]["peak"]["nbytes"]
    assert "with actnn" in made["title"]
