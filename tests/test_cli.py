"""The command, its demo, and the meter under the demo's memory column."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide import cli
from lowtide.machine import measure
from lowtide.malloc import can_tune, start_environment
from lowtide.tools import demo

MIB = 2**20


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"lowtide {lowtide.__version__}\n"


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lowtide", "methods"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("lowtide", run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.splitlines() == list(lowtide.methods().values())


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
    assert "served by the reference" not in text
    assert "tune_cpu_allocator() " in text


def test_doctor_names_the_cure_for_slow_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_try", lambda method: "ok")
    for reason, cure in (
        ("LOWTIDE_KERNELS=reference", "Unset LOWTIDE_KERNELS"),
        ("ModuleNotFoundError: No module named 'numba'", "pip install numba"),
        ("TypingError: cannot compile", "pip install --upgrade numba"),
    ):
        monkeypatch.setattr(cli.kernels, "status", lambda reason=reason: {"a": "numba", "b": f"reference: {reason}"})
        assert cli.main(["doctor"]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert "1 of 2 are served by the reference" in last
        assert cure in last


@pytest.mark.parametrize("debug", [False, True])
def test_doctor_reports_a_method_that_fails(
    debug: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(method: str) -> str:
        raise RuntimeError(f"{method} is broken")

    monkeypatch.setattr(cli, "_try", fail)
    assert cli.main(["doctor", *["--debug"] * debug]) == 1
    out, err = capsys.readouterr()
    assert "pool: failed: RuntimeError: pool is broken" in out
    assert ("in fail" in err) == debug


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["demo", "--steps", "0"], "expected a whole number of at least 1; got '0'"),
        (["demo", "--batch", "x"], "expected a whole number of at least 1; got 'x'"),
        (["demo", "--json", "no/such/folder/x"], "expected a file in a folder that exists; got 'no/such/folder/x'"),
        (["demo", "--json", "."], "expected a file in a folder that exists; got '.'"),
        (["check", "train"], "expected MODULE:FUNCTION, such as train:build; got 'train'"),
        (["check", "no_such_module:build"], "cannot import 'no_such_module': No module named 'no_such_module'"),
        (["check", "test_cli:no_such"], "test_cli has no function 'no_such'"),
    ],
)
def test_wrong_arguments_end_with_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    usage, *_, last = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: lowtide")
    assert last.endswith(message)


def test_a_file_that_cannot_be_written_is_refused_before_the_demo_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "demo.json"
    monkeypatch.setattr(os, "access", lambda place, mode: place not in (tmp_path, path))  # root may write anywhere
    for _ in range(2):  # to the folder at first, to the file itself then
        with pytest.raises(SystemExit) as end:
            cli.main(["demo", "--json", str(path)])
        assert end.value.code == 2
        assert "expected a file that can be written" in capsys.readouterr().err
        path.touch()


def build_badly() -> None:
    print("a line of the user's")
    raise ValueError("the data are missing\nsecond line")


def build_too_much() -> tuple[torch.nn.Module, int, None, int]:
    return torch.nn.Linear(1, 1), 1, None, 4


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_is_one_line_and_debug_shows_the_traceback(debug: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "test_cli:build_badly", *["--debug"] * debug]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    first, *more = err.splitlines()
    assert first == "a line of the user's"
    assert more[-1].startswith("lowtide check: ValueError: the data are missing")
    assert ("in build_badly" in err) == debug
    if not debug:
        assert len(more) == 1
        assert "--debug" in more[0]


def test_a_refusal_needs_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "test_cli:build_too_much"]) == 2
    assert capsys.readouterr().err == (
        "lowtide check: the function must return (model, batch) or (model, batch, loss_fn); got a tuple of 4\n"
    )


def test_what_a_module_prints_stays_out_of_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prints_when_imported.py").write_text(
        "import torch\n"
        "print('a banner')\n"
        "def build():\n"
        "    return torch.nn.Linear(8, 8), torch.randn(16, 8), lambda model, x: model(x).square().mean()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(["check", "prints_when_imported:build", "--method", "lossless", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["method"].startswith("lossless")
    assert "a banner" in err


def test_an_interrupt_ends_with_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    assert cli.main(["demo"]) == 130


def test_a_child_that_failed_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*given: object) -> None:
        raise measure.ChildError("demo:train failed in a child process:\nTraceback\n  a line\nMemoryError: full")

    monkeypatch.setattr(demo, "run", fail)
    assert cli.main(["demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lowtide demo: demo:train failed in a child process: MemoryError: full (--debug")


@pytest.mark.parametrize("package", ["rich.console", "sklearn.datasets"])
def test_demo_says_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install lowtide[demo]" in line


def test_demo_runs_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("sklearn")
    path = tmp_path / "demo.json"
    command = [sys.executable, "-m", "lowtide", "demo", "--steps", "7", "--batch", "32", "--json", str(path)]
    command += ["--page", str(tmp_path / "page.html")]
    environment = dict(os.environ)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        environment.pop(name, None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr
    content = json.loads(path.read_text(encoding="utf-8"))
    *_, sentence, last = done.stdout.splitlines()
    assert sentence == content["conclusion"]
    assert last.endswith((tmp_path / "page.html").as_uri())
    rows = {row.pop("method"): row for row in content["rows"]}
    assert list(rows) == ["exact", "auto", "division", "actnn", "pool"]
    assert all(row["allocator"] == ("tuned" if can_tune() else "default") for row in rows.values())
    assert content["settings"]["measured"] in done.stdout
    exact = rows.pop("exact")
    assert exact["stored_nbytes"] == exact["plain_nbytes"]
    assert exact["peak_nbytes"] >= 0.9 * exact["plain_nbytes"]
    for method, row in rows.items():
        assert row["first_loss"] == exact["first_loss"]
        assert row["plain_nbytes"] == exact["plain_nbytes"]
        assert 0 < row["stored_nbytes"] < row["plain_nbytes"]
        assert row["ratio"] == pytest.approx(row["plain_nbytes"] / row["stored_nbytes"])
        assert row["peak_nbytes"] > 0
        # Pooling saves a third of the bytes, which the heap's own waste can hide.
        assert row["peak_nbytes"] < exact["peak_nbytes"] or method == "pool"
        assert 0 < row["seconds_20"] <= row["seconds"] <= row["seconds_80"]
        assert 0 <= row["accuracy"] <= 1
        assert row["kernels"].startswith("numba")
    assert "slow reference kernels" not in content["conclusion"]


EXACT = demo.Row("exact", 0.98, 2.3, 0.1, 100 * MIB, 100 * MIB, 120 * MIB, 0.100, 0.098, 0.102, 1.0, "none", "tuned")
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


def test_the_table_names_the_setting_of_each_measurement() -> None:
    line = demo.setting([EXACT, DIVISION])
    assert "above weights, optimizer and data" in line
    assert "Each method in its own process with lowtide.tune_cpu_allocator()" in line
    line = demo.setting([EXACT, replace(DIVISION, allocator="default")])
    assert "tune_cpu_allocator" not in line
    assert "allocator as it is" in line


def test_times_leave_out_the_warm_up_and_the_first_step_of_a_turn() -> None:
    # Turns of five steps begin at 0, 5 and 10; the first four steps warm up.
    assert demo.timed_steps(list(range(12))) == [4, 6, 7, 8, 9, 11]
    assert demo.timed_steps([7.0, 8.0]) == [8.0]


def test_methods_take_turns_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method has its turn in each round, in a process that starts as the allocator needs it."""
    told: list[str] = []
    running: set[str] = set()

    class Recorder:
        def __init__(self, function: str, argument: dict[str, Any], *, exact_rss: bool, variables: Any) -> None:
            assert not exact_rss
            assert variables == start_environment()
            self.method, self.left = argument["method"], argument["steps"]
            self.result: dict[str, Any] | None = None

        def __enter__(self) -> Recorder:
            running.add(self.method)
            return self

        def __exit__(self, *exception: object) -> None:
            running.remove(self.method)

        def resume(self) -> dict[str, int] | None:
            assert len(running) == len(demo.METHODS)
            self.left -= 1
            if self.left >= 0:
                return {"step": 1}
            self.result = {k: v for k, v in asdict(EXACT).items() if k != "method"}
            return None

    monkeypatch.setattr(demo, "Child", Recorder)
    monkeypatch.setattr(demo, "_digits", lambda: {})
    rows = demo.compare(7, 16, told.append)
    assert told == [m for m in demo.METHODS for _ in range(5)] + [m for m in demo.METHODS for _ in range(2)]
    assert [row.method for row in rows] == list(demo.METHODS)


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
import signal
import time
from pathlib import Path
import torch
from lowtide.machine.measure import peak_above, run_child

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

def stay(argument, emit):
    emit({"pid": os.getpid()})
    time.sleep(600)

def count(argument, emit):
    for i in range(argument["events"]):
        emit({"i": i, "pid": os.getpid()})
        Path(argument["path"]).write_text(str(i))
    return {"done": True}

def run_stay(argument, emit):
    # A shell starts background jobs with this signal ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_child("child_of_test:stay", {}, exact_rss=False, on_event=emit)

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


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def ends_soon(pid: int, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_running(pid)


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def open_files() -> set[str]:
    return {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


@needs_proc
@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_an_exception_in_the_parent_ends_the_child_and_leaves_nothing(
    child: str, kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    found: list[int] = []

    def stop(event: dict[str, Any]) -> None:
        found.append(event["pid"])
        assert is_running(event["pid"])
        raise kind

    before = open_files()
    with pytest.raises(kind):
        measure.run_child(f"{child}:stay", {}, exact_rss=False, on_event=stop)
    assert not is_running(found[0])
    assert not Path(f"/proc/{found[0]}").exists()  # not even a zombie
    assert not list(folder.iterdir())
    assert open_files() <= before


@needs_proc
def test_an_interrupt_while_waiting_ends_the_child(child: str) -> None:
    """Control-C reaches the parent as a signal while it waits for the child's next line."""
    with measure.Child(f"{child}:run_stay", {}, exact_rss=False) as parent:
        event = parent.resume()
        assert event is not None
        pid = event["pid"]
        assert is_running(pid)
        assert parent._process.stdin is not None
        parent._process.stdin.write("\n")  # it goes on, and waits for a child that sleeps
        parent._process.stdin.flush()
        time.sleep(0.5)
        parent._process.send_signal(signal.SIGINT)
        assert ends_soon(pid)
        assert parent._process.wait(20) != 0


@needs_proc
def test_a_child_ends_by_itself_when_its_parent_is_killed(child: str, tmp_path: Path) -> None:
    argument = {"events": 1000, "path": str(tmp_path / "last")}
    code = f"import sys; sys.path[:0] = {sys.path!r}\nfrom lowtide.machine import measure\n" + (
        f"with measure.Child('{child}:count', {argument!r}, exact_rss=False) as child:\n"
        "    print(child.resume()['pid'], flush=True)\n"
        "    sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    assert ends_soon(pid)
    assert not (tmp_path / "last").exists()


def test_children_pause_until_they_are_resumed(child: str, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    with contextlib.ExitStack() as stack:
        a, b = (
            stack.enter_context(
                measure.Child(f"{child}:count", {"events": 2, "path": str(path)}, exact_rss=False)
            )
            for path in paths
        )  # fmt: skip
        for i in range(2):
            for one in (a, b):
                event = one.resume()
                assert event is not None
                assert event["i"] == i
            assert [path.exists() and path.read_text() for path in paths] == [str(i - 1) if i else False] * 2
            assert (a.result, b.result) == (None, None)
        assert (a.resume(), a.result) == (None, {"done": True})
        assert paths[0].read_text() == "1"
        assert paths[1].read_text() == "0"


def test_a_process_that_cannot_start_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **more: object) -> None:
        raise OSError("no more processes")

    opened: list[Any] = []
    real = tempfile.TemporaryFile

    def remember(*given: Any, **more: Any) -> Any:
        opened.append(real(*given, **more))
        return opened[-1]

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(tempfile, "TemporaryFile", remember)
    with pytest.raises(OSError, match="no more processes"):
        measure.run_child("any:thing", {}, exact_rss=False)
    assert [file.closed for file in opened] == [True]
