"""The page of benchmarks says what its rows say, and a row is one mode in a process of its own."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import compiled
import fresh
import page
import rows
import steps
import turns

MIB = 2**20


def test_page_is_made_from_its_rows() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text, page.RESULTS) == text


@pytest.mark.parametrize("name", ["steps.csv", "codecs.csv"])
def test_every_row_says_where_it_comes_from(name: str) -> None:
    found = rows.read(page.RESULTS / name)
    assert len(found) > 15
    assert all(row[cell] for row in found for cell in rows.ORIGIN)


def test_rows_of_one_network_are_of_one_commit() -> None:
    """They were measured by turns, and only they are compared with one another."""
    commits: dict[tuple[str, ...], set[str]] = {}
    for row in rows.read(page.RESULTS / "steps.csv"):
        commits.setdefault(tuple(row[name] for name in steps.KEY), set()).add(row["commit"])
    assert len(commits) > 3
    assert all(len(found) == 1 for found in commits.values())


def test_every_group_of_a_plan_has_plain_first_and_checkpointing_beside() -> None:
    groups = steps.plan(full=True)
    assert len({group.key for group in groups}) == len(groups)
    assert {group.key for group in steps.plan(full=False)} <= {group.key for group in groups}
    assert all(group.modes[0] == "plain" for group in groups)
    assert all("checkpoint" in group.modes for group in groups if group.case == "step")


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for 'steps'"):
        page.filled("# Benchmarks\n", page.RESULTS)


def test_a_table_compares_with_plain_of_the_same_setting_and_shows_the_range(tmp_path: Path) -> None:
    """Two rounds by hand: peaks above rest 800 and 200 MiB tuned, 1000 and 500 default; ratios 1.1 and 1.3, +- 0.1."""
    made = dict.fromkeys(rows.ORIGIN, "x")
    for number, ratio in ((1, 1.1), (2, 1.3)):
        for allocator, plain, ours in (("tuned", 800, 200), ("default", 1000, 500)):
            for mode, peak, rest, times in (("plain", plain, 300, 1.0), ("division", ours, 400, ratio)):
                cells = {
                    **dict(zip(steps.KEY, ("step", "resnet50", 16, "float32", "", allocator), strict=True)),
                    **{
                        "mode": mode,
                        "round": number,
                        "median_s": 2 * times,
                        "min_s": 1.5 * times,
                        "ratio": times,
                        "ratio_low": times - 0.1,
                        "ratio_high": times + 0.1,
                        "faults": 250_000,
                    },
                    **{"peak": (peak + rest) * MIB, "rest": rest * MIB, "process": (peak + rest + 10) * MIB},
                    **{"plain": 1200 if mode == "division" else 0, "stored": 100 if mode == "division" else 0},
                }
                rows.append(tmp_path / "steps.csv", steps.FIELDS, cells | made)
    plain_line, division_line = page.steps(tmp_path).splitlines()[2:]
    assert [cell.strip() for cell in plain_line.split("|")][2:-1] == [
        *("2 s", "800", "1.00", "1110", "2 s", "1000", "1.00", "1310", "0.25 M", ""),
    ]
    assert [cell.strip() for cell in division_line.split("|")][2:-1] == [
        *("1.20x (1.00-1.40)", "200", "0.25", "610", "1.20x (1.00-1.40)", "500", "0.50", "910", "0.25 M", "12.0x less"),
    ]
    assert page.readme(tmp_path).splitlines()[2] == (
        "| ResNet-50, batch 16, 224 px: plain / division | 800 / 200 | 1110 / 610 | 1.00 / 1.20 | 1 / 12.0x |"
    )


def test_rounds_go_on_where_they_stopped_and_never_mix_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def measure(group: steps.Group, turns: int) -> dict[str, dict[str, float]]:
        ran.append(group.subject)
        common = {"ratio_low": 1.0, "ratio_high": 2.0, "peak": 3 * MIB, "rest": MIB, "faults": 0}
        return {mode: {"median_s": 2.0, "ratio": 1.0 + i / 2} | common for i, mode in enumerate(group.modes)}

    made = dict.fromkeys(rows.ORIGIN, "x")
    monkeypatch.setattr(steps, "measure", measure)
    monkeypatch.setattr(steps, "in_child", lambda *_: {})
    monkeypatch.setattr(steps, "origin", lambda: made)
    path = tmp_path / "steps.csv"
    groups = [steps.Group("step", name, 4, ("plain", "division")) for name in ("bert", "gpt2")]
    assert not steps.run(path, groups[:1], 2, -1.0)
    assert ran == []
    assert steps.run(path, groups[:1], 1, 60.0)
    assert steps.run(path, groups, 2, 60.0)
    # A round is every network once, and what the first call measured is not measured again.
    assert ran == ["bert", "gpt2", "bert", "gpt2"]
    found = rows.read(path)
    assert [float(row["ratio"]) for row in found] == [1.0, 1.5] * 4
    assert [row["round"] for row in found] == ["1"] * 4 + ["2"] * 4
    made["commit"] = "y"
    with pytest.raises(SystemExit, match="has rows of x, and this is y"):
        steps.run(path, groups, 3, 60.0)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_row_has_time_and_peak_of_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten layers and ten GELUs each keep an output of 2048 x 512 floats, and the batch: 84 MiB, and some gradients."""
    monkeypatch.setattr(steps, "TURN_SECONDS", 0.0)
    rows_of = steps.measure(steps.Group("step", "depth-10", 2048, ("plain", "division")), turns=3)
    assert list(rows_of) == ["plain", "division"]
    found, packed = rows_of.values()
    assert (found["ratio"], found["ratio_low"], found["ratio_high"]) == (1.0, 1.0, 1.0)
    assert found["turns"] == 3
    assert 0 < found["min_s"] <= found["median_s"]
    assert found["peak"] <= found["process"]
    assert 84 * MIB < found["peak"] - found["rest"] < 130 * MIB
    assert found["plain"] == found["stored"] == 0
    assert packed["stored"] < packed["plain"] / 4
    assert packed["peak"] - packed["rest"] < found["peak"] - found["rest"]


def test_the_interval_of_a_median_holds_it_in_95_of_100_cases() -> None:
    """Of twelve draws the third smallest and the third largest bound the median in 1 - 2 * 79 / 4096 of all cases."""
    assert turns.median_interval([float(v) for v in range(12, 0, -1)]) == (3.0, 10.0)
    assert turns.median_interval([2.0, 1.0, 3.0]) == (1.0, 3.0)
    assert turns.median_interval([5.0]) == (5.0, 5.0)
    drawn = np.random.default_rng(0).exponential(size=(4000, 12))
    inside = sum(low <= math.log(2) <= high for low, high in map(turns.median_interval, drawn.tolist()))
    # 96.1 % are expected; three deviations of a share of 4000 cases are 0.9 %.
    assert abs(inside / 4000 - (1 - 2 * 79 / 4096)) < 0.0092


def test_settings_of_malloc_in_the_environment_are_refused() -> None:
    program = str(Path(steps.__file__).with_name("run.py"))
    code = f"import runpy, sys; sys.argv[1:] = ['step']; runpy.run_path({program!r}, run_name='__main__')"
    done = fresh.run(code, MALLOC_MMAP_MAX_="0")
    assert done.returncode == 2
    assert "MALLOC_MMAP_MAX_ would change the default allocator" in done.stderr


def test_compiled_modes_take_turns_and_are_compared_within_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes by hand on a machine that slows down: 1, 2 and 4 s plain, and 1.2, 1.1 and 1.5 times as long."""
    ran: list[str] = []
    times = {"compile": [1.0, 2.0, 4.0], "compile-division": [1.2, 2.2, 6.0]}

    class Child:
        def __init__(self, function: str, argument: dict[str, str], allocator: str) -> None:
            self.mode = argument["mode"]
            self.result = {"first_s": 9.0, "peak": 5 * MIB, "rest": MIB, "held": 2 * MIB}
            self.result |= {"graphs": 1, "plain": 0, "stored": 0}
            self.events = iter([{}, *({"seconds": seconds} for seconds in times[self.mode])])

        def __enter__(self) -> Child:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def resume(self) -> dict[str, float] | None:
            ran.append(self.mode)
            return next(self.events, None)

    monkeypatch.setattr(compiled, "child", Child)
    found = compiled.measure("gpt", list(times), 3, "default")
    forwards, backwards = list(times), list(times)[::-1]
    assert ran == [*forwards, *forwards, *backwards, *forwards, *forwards]  # warm up, three turns, the rest
    assert found["compile-division"]["ratio"] == pytest.approx(1.2)
    assert found["compile-division"]["ratio_low"] == pytest.approx(1.1)
    assert found["compile-division"]["ratio_high"] == pytest.approx(1.5)
    assert found["compile-division"]["median_s"] == 2.2
    made = dict.fromkeys(rows.ORIGIN, "x")
    for mode, cells in found.items():
        where = {"subject": "gpt", "size": 6, "allocator": "default", "mode": mode, "round": 1}
        rows.append(tmp_path / "compiled.csv", compiled.FIELDS, where | cells | made)
    line = compiled.table(rows.read(tmp_path / "compiled.csv")).splitlines()[3]
    assert line == "| `lowtide.compile`, division | 1.20x | 2.200 s | 1.200 s | 4 MiB | 1.00 | 2 MiB | 1.00 |"


def test_the_page_of_compiled_steps_is_made_from_its_rows() -> None:
    text = compiled.PAGE.read_text(encoding="utf-8")
    assert compiled.table(rows.read(rows.RESULTS / "compiled.csv")) in text
    assert len({row["commit"] for row in rows.read(rows.RESULTS / "compiled.csv")}) == 1
