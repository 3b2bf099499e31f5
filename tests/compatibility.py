"""A pytest plugin that writes ``docs/compatibility.md`` from the tests that carry the marker ``stack``.

``make compatibility`` runs it. ``@pytest.mark.stack("Accelerate", "accumulate()")`` makes a test a row of the page. If
a combination is not supported, the test checks what the user sees, and ``instead="..."`` says that in words.
"""

from __future__ import annotations

import ast
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).parent.parent
PAGE = REPO / "docs" / "compatibility.md"

# What each name on the page is, as a package whose version is told. Rows come in this order.
PACKAGES = {
    "PyTorch": "torch",
    "PyTorch AMP": "torch",
    "torch.compile": "torch",
    "Activation checkpointing": "torch",
    "DDP": "torch",
    "FSDP": "torch",
    "FSDP2": "torch",
    "Tensor parallel": "torch",
    "Pipeline parallel": "torch",
    "DeepSpeed": "deepspeed",
    "HF Trainer": "transformers",
    "TRL": "trl",
    "PEFT": "peft",
    "Accelerate": "accelerate",
    "Lightning": "lightning",
    "Examples": "torch",
}

_HEAD = """# Compatibility

Each row is a test that runs with the real packages on the CPU: `make test-stacks` runs them, and `make compatibility`
wrote this page from their results. "Works" means what the test checks, always beside the same stack without Lowtide:
weights or gradients are bit-equal under `lossless`, the error at 4 and 8 bits stays below its bound where the row says
so, and kept bytes fall. "No" means that the combination is not supported; the row says what you see instead.
What is not listed was not tested.
"""


class Row(NamedTuple):
    """One marked test."""

    stack: str
    what: str
    instead: str | None
    test: str


def marked(path: Path) -> list[Row]:
    """Rows of a test file, read from its text: no package is needed for that."""
    found: list[Row] = []
    text = path.read_text(encoding="utf-8")
    if "pytest.mark.stack" not in text:
        return found  # most files, and parsing them all takes seconds
    for node in ast.walk(ast.parse(text)):
        for mark in getattr(node, "decorator_list", ()):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.stack":
                stack, what = (ast.literal_eval(argument) for argument in mark.args)
                instead = {k.arg: ast.literal_eval(k.value) for k in mark.keywords}.get("instead")
                found.append(Row(stack, what, instead, f"{path.relative_to(REPO).as_posix()}::{node.name}"))
    return found


def all_marked() -> list[Row]:
    """Rows of every test file, in the order of the page."""
    rows = [row for path in sorted((REPO / "tests").rglob("test_*.py")) for row in marked(path)]
    return sorted(rows, key=lambda row: list(PACKAGES).index(row.stack))


def page(rows: Iterable[Row], results: dict[str, set[str]]) -> str:
    """The page for the outcomes of tests by name; a test with several cases has several outcomes."""
    rows = list(rows)
    lines = ["| stack | what was checked | result | test |", "|---|---|---|---|"]
    for row in rows:
        result = _result(row, results.get(row.test, set()))
        file, _, function = row.test.partition("::")
        lines.append(f"| {row.stack} | {row.what} | {result} | `{file}`, `{function}` |")
    packages = {name: _version(name) for name in dict.fromkeys(PACKAGES[row.stack] for row in rows)}
    versions = ", ".join(f"{name} {number}" for name, number in packages.items() if number)
    return "\n".join((_HEAD, *lines, "", f"Run with {versions}; Python {platform.python_version()}, {_commit()}.", ""))


def _result(row: Row, outcomes: set[str]) -> str:
    if not outcomes or outcomes == {"skipped"}:
        return "not run"
    if "failed" in outcomes:
        return "**fails**"
    return "works" if row.instead is None else f"no: {row.instead}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:
        return None


def _commit() -> str:
    command = ["git", "-C", str(REPO), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return f"commit {found or 'unknown'}"


# ---------------------------------------------------------------- hooks of pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--compatibility FILE`` asks for the page."""
    parser.addoption("--compatibility", metavar="FILE", type=Path, help="write the page of compatibility here")


def pytest_configure(config: pytest.Config) -> None:
    """Record only if the page is asked for."""
    if config.getoption("--compatibility") is not None:
        config.pluginmanager.register(Recorder(config.getoption("--compatibility")))


class Recorder:
    """Outcomes of tests by name, and at the end the page."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.results: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A setup that fails or is skipped counts, one that passes does not."""
        if report.when == "call" or report.outcome != "passed":
            self.results.setdefault(report.nodeid.partition("[")[0], set()).add(report.outcome)

    def pytest_sessionfinish(self) -> None:
        """Write the page."""
        self.target.write_text(page(all_marked(), self.results), encoding="utf-8")
