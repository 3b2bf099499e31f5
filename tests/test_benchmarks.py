"""The page of benchmarks says what its rows say."""

from __future__ import annotations

import csv

import pytest

import page

ROWS = page.PAGE.parent.parent / "benchmarks" / "results" / "2026-11-16.csv"


def test_page_is_made_from_its_rows() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text, page.read(ROWS)) == text
    assert ROWS.name in text


def test_every_row_says_where_it_comes_from() -> None:
    with ROWS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 100
    origin = ("date", "commit", "machine", "threads", "python", "torch", "numba", "lowtide")
    assert all(row[name] for row in rows for name in origin)


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for 'steps'"):
        page.filled("# Benchmarks\n", page.read(ROWS))
