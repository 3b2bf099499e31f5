"""The folder tree is the architecture: imports point down, the docs name what exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import lowtide

ROOT = Path(lowtide.__file__).parent
REPO = Path(__file__).parent.parent

# From top to bottom; a module imports only what stands below it.
LAYERS = [
    ["__main__"],
    ["cli"],
    ["demo", "check"],
    ["measure", "allocator"],
    ["attachment"],
    ["guard"],
    ["session"],
    ["handles", "replay"],
    ["report"],
    ["methods"],
    ["mixing"],
    ["tuning"],
    ["planner"],
    ["rules"],
    ["twins", "derive"],
    ["capture"],
    ["offload"],
    ["codecs"],
    ["ops"],
    ["kernels"],
    ["allocation", "levels"],
]
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}


def imports_of(path: Path) -> set[str]:
    """Top-level lowtide modules that a file imports."""
    found = set()
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = list(package)[: len(package) - (node.level - 1)] if node.level else []
            dotted = [*base, *(node.module or "").split(".")] if node.level else (node.module or "").split(".")
            if not node.level and dotted[0] != "lowtide":
                continue
            dotted = [d for d in dotted if d and d != "lowtide"]
            found |= {dotted[0]} if dotted else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("lowtide.")}
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    name = path.relative_to(ROOT).with_suffix("").parts[0]
    if name == "__init__":
        return
    assert name in LEVEL, f"{name} has no place in the layers; give it one here and in docs/design.md"
    for other in imports_of(path) - {name}:
        if other in LEVEL:
            assert LEVEL[other] > LEVEL[name], f"{name} imports {other}, which stands above it"


def test_private_torch_names_live_in_capture():
    private = re.compile(r"torch\._C|\._raw_saved|_sequence_nr|\._cdata|_storage_Use_Count|\._base\b|\._version\b")
    for path in ROOT.rglob("*.py"):
        if path.stem != "capture":
            assert not private.search(path.read_text()), path


def test_public_names_are_listed_and_exist():
    assert all(hasattr(lowtide, name) for name in lowtide.__all__)


def test_docs_name_files_that_exist():
    for page in (REPO / "docs").glob("*.md"):
        for name in re.findall(r"`((?:src|tests|benchmarks|docs|evidence)/[\w./-]+)`", page.read_text()):
            assert (REPO / name).exists(), f"{page.name} names {name}"
