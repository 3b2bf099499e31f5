"""The page of compatibility lists exactly the tests that are marked for it, and says of each what it found."""

from __future__ import annotations

import re

import pytest

import compatibility
from compatibility import PACKAGES, PAGE, REPO, Row, all_marked, marked, page


def rows_of(text):
    """Stack, what was checked, result and test of each row of a page."""
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    return [(stack, what, result, test.replace("`, `", "::").strip("`")) for stack, what, result, test in cells[1:]]


def test_the_page_lists_exactly_the_marked_tests():
    written = rows_of(PAGE.read_text(encoding="utf-8"))
    assert [(stack, what, test) for stack, what, _, test in written] == [
        (row.stack, row.what, row.test) for row in all_marked()
    ], "run make compatibility"
    for (_, _, result, _), row in zip(written, all_marked(), strict=True):
        assert result in ("works" if row.instead is None else f"no: {row.instead}", "not run")


def test_rows_are_read_from_the_text_of_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(compatibility, "REPO", tmp_path)
    file = tmp_path / "test_x.py"
    file.write_text(
        '@pytest.mark.stack("DDP", "no_sync()")\ndef test_a(): pass\n'
        '@other\n@pytest.mark.stack("FSDP", "all", instead="an error")\ndef test_b(): pass\ndef test_c(): pass\n'
    )
    assert marked(file) == [
        Row("DDP", "no_sync()", None, "test_x.py::test_a"),
        Row("FSDP", "all", "an error", "test_x.py::test_b"),
    ]


@pytest.mark.parametrize(
    ("outcomes", "instead", "result"),
    [
        ({"passed"}, None, "works"),
        ({"passed", "failed"}, None, "**fails**"),
        ({"passed", "failed"}, "an error", "**fails**"),
        ({"passed"}, "an error", "no: an error"),
        ({"passed", "skipped"}, None, "works"),
        ({"skipped"}, None, "not run"),
        (set(), None, "not run"),
    ],
)
def test_a_result_is_that_of_all_cases(outcomes, instead, result):
    row = Row("DDP", "no_sync()", instead, "tests/x.py::test_a")
    text = page([row], {"tests/x.py::test_a": outcomes})
    assert rows_of(text) == [("DDP", "no_sync()", result, "tests/x.py::test_a")]
    assert re.search(r"torch \d+\.\d+", text)


def test_every_stack_has_a_package():
    assert {row.stack for row in all_marked()} <= set(PACKAGES)
    assert REPO.joinpath("tests/stacks").is_dir()
