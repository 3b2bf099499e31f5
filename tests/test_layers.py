"""The folder tree is the architecture: imports point down, the docs name what exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import lowtide

ROOT = Path(lowtide.__file__).parent
REPO = Path(__file__).parent.parent

# Every module, from top to bottom; a module imports only what stands below it. Packages do not interleave.
LAYERS = [
    *["__main__", "cli"],
    *["tools.demo", "tools.measure", "tools.malloc"],
    *["attachment"],
    *["verify.check", "verify.guard"],
    *["session.session", "session.handles", "session.replay", "session.offload"],
    *["report"],
    *["policy.methods", "policy.tuners.mix", "policy.tuners.bits", "policy.tuners.levels", "policy.tuners.samples"],
    *["policy.tuners.fitting", "policy.tuners.base", "policy.plan", "policy.use", "policy.solve"],
    *["graph.rules", "graph.twins", "graph.derive", "graph.capture"],
    *["codecs.projection", "codecs.fixed", "codecs.lossy", "codecs.lossless", "codecs.base"],
    *["kernels.ops", "kernels.backends", "kernels.cpu", "kernels.compiled", "kernels.reference"],
]
PLACE = {name: i for i, name in enumerate(LAYERS)}
FILES = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in ROOT.rglob("*.py") if p.name != "__init__.py"}

# An import inside a function that breaks a cycle: a backend is loaded when its first operator is called.
LATE = {("kernels.backends", "kernels.cpu"), ("kernels.cpu", "kernels.backends")}


def imports_of(name: str) -> set[str]:
    """Modules of lowtide that a module imports, in any form; a package stands for each of its modules named."""
    package = name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.ImportFrom):
            dotted = (node.module or "").split(".") if node.module else []
            if node.level:
                dotted = package[: len(package) - (node.level - 1)] + dotted
            elif dotted[:1] == ["lowtide"]:
                dotted = dotted[1:]
            else:
                continue
            for alias in node.names:
                found.add(_module((*dotted, alias.name)))
        elif isinstance(node, ast.Import):
            found |= {_module(tuple(a.name.split(".")[1:])) for a in node.names if a.name.startswith("lowtide.")}
    return found - {""}


def _module(dotted: tuple[str, ...]) -> str:
    """The longest part of a dotted name that is a module or a package."""
    for end in range(len(dotted), 0, -1):
        name = ".".join(dotted[:end])
        if name in FILES or (ROOT / name.replace(".", "/") / "__init__.py").exists():
            return name
    return ""


def test_every_module_has_a_place():
    assert sorted(LAYERS) == sorted(FILES), "give a new module its place here and in docs/design.md"


def test_packages_do_not_interleave():
    tops = [name.split(".")[0] for name in LAYERS]
    assert [a for a, b in zip(tops, [*tops[1:], ""], strict=True) if a != b] == list(dict.fromkeys(tops))


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_point_down(name):
    for other in imports_of(name):
        below = [PLACE[other]] if other in PLACE else [i for n, i in PLACE.items() if n.startswith(other + ".")]
        if other == name or (name, other) in LATE:
            continue
        package = ".".join(name.split(".")[:-1])
        assert other != package or not below, f"{name} imports its own package {other}"
        assert all(i > PLACE[name] for i in below), f"{name} imports {other}, which stands above it"


def test_the_layer_test_sees_every_form_of_import(tmp_path, monkeypatch):
    path = tmp_path / "x.py"
    path.write_text(
        "from ..graph import capture\nfrom .. import kernels\nimport lowtide.cli\nfrom lowtide import report\n"
    )
    monkeypatch.setitem(FILES, "codecs.x", path)
    assert imports_of("codecs.x") == {"graph.capture", "kernels", "report", "cli"}


def private_names(tree: ast.AST, own: set[str]) -> set[str]:
    """Names with a leading underscore that a file uses and lowtide does not define itself: those of torch."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {*(node.module or "").split("."), *[alias.name for alias in node.names]}
        elif isinstance(node, ast.Import):
            found |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.JoinedStr):
                name = name.values[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.add(name.value)
    return {name for name in found if name.startswith("_") and not name.endswith("__") and name not in own}


def own_names(trees: list[ast.AST]) -> set[str]:
    """The attributes that lowtide's classes define, and what every named tuple has."""
    own = {"_asdict", "_replace", "_fields"}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            own |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if getattr(node.value, "id", "") in ("self", "cls") else set()
    return own


def test_private_torch_names_live_in_capture():
    trees = {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
    own = own_names(list(trees.values()))
    for path, tree in trees.items():
        if path != FILES["graph.capture"] and path.parent.name != "kernels":
            assert not private_names(tree, own), path
    assert {"_C", "_saved_", "_version", "_base"} <= private_names(trees[FILES["graph.capture"]], own)


def test_the_test_of_private_names_sees_every_form_of_use():
    code = """
from torch._subclasses import FakeTensor
from torch.overrides import _push_mode
import torch._dynamo.config
t._values(); nn.modules.batchnorm._BatchNorm; torch._foreach_mul_; Variable._execution_engine.queue_callback(f)
getattr(node, "_raw"); getattr(node, f"_saved_{name}"); self._mine; named._replace()
"""
    expected = {"_subclasses", "_push_mode", "_dynamo", "_values", "_BatchNorm", "_foreach_mul_", "_execution_engine"}
    assert private_names(ast.parse(code), {"_mine", "_replace"}) == expected | {"_raw", "_saved_"}


def test_public_names_are_listed_and_exist():
    assert all(hasattr(lowtide, name) for name in lowtide.__all__)


def test_docs_name_files_that_exist():
    for page in (REPO / "docs").glob("*.md"):
        for name in re.findall(r"`((?:src|tests|benchmarks|docs|evidence)/[\w./-]+)`", page.read_text()):
            assert (REPO / name).exists(), f"{page.name} names {name}"
