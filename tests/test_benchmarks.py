"""The page of benchmarks says what its rows say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import page  # noqa: E402

ROWS = BENCHMARKS / "results" / "2026-11-16.csv"


def test_page_is_made_from_its_rows() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text, page.read(ROWS)) == text
    assert ROWS.name in text


def test_every_row_says_where_it_comes_from() -> None:
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    assert len(lines) > 100
    assert all(line.count(",") == lines[0].count(",") and ",," not in line.partition(",20")[2] for line in lines[1:])


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for 'steps'"):
        page.filled("# Benchmarks\n", page.read(ROWS))
