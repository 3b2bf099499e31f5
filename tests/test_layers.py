"""The folder tree is the architecture: imports point down, the docs name what exists."""

from __future__ import annotations

import ast
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import conftest
import lowtide

ROOT = Path(lowtide.__file__).parent
REPO = Path(__file__).parent.parent

# Every module, from top to bottom; a module imports only what stands below it. Packages do not interleave.
LAYERS = [
    *["__main__", "cli"],
    *["tools.demo", "tools.bench", "tools.targets", "tools.accelerator"],
    *["integrations.hf", "integrations.lightning", "integrations.figures"],
    *["attachment"],
    *["page.writing", "page.document", "page.sentences", "page.timeline"],
    *["compiling.compiled", "compiling.dynamo", "compiling.packing", "compiling.reading", "compiling.running"],
    *["planning.budgeted", "planning.memory_errors", "planning.fitting", "planning.planner", "planning.verifying"],
    *["planning.checkpoints", "planning.profiling", "planning.observing", "planning.recorder", "planning.solvers"],
    *["machine.costs", "machine.measure"],
    *["verify.check", "verify.guard", "verify.evidence"],
    *[
        "session.checkpoint",
        "session.opening",
        "session.session",
        "session.watching",
        "session.packing",
        "session.recomputing",
        "session.handles",
        "session.norms",
        "session.ledger",
        "session.memory",
    ],
    "session.doubts",
    *["session.replay", "session.offload", "session.noise", "session.streams"],
    *["session.transfers"],
    *["malloc"],
    *["report"],
    *["policy.scope", "policy.policy", "policy.methods", "policy.tuners.mix", "policy.tuners.bits"],
    *["policy.tuners.levels", "policy.tuners.samples"],
    *["policy.tuners.fitting", "policy.tuners.base", "policy.plan", "policy.choice", "policy.use", "policy.solve"],
    *["graph.rules", "graph.twins", "graph.thrift", "graph.weights", "graph.derive", "graph.capture", "graph.shards"],
    *["codecs.projection", "codecs.sixsigma", "codecs.casts", "codecs.logarithms", "codecs.blocks", "codecs.groups"],
    *["codecs.lossless", "codecs.base"],
    *["kernels.ops", "kernels.backends", "kernels.cpu", "kernels.native", "kernels.compiled", "kernels.layout"],
    *["kernels.gpu", "kernels.programs", "kernels.reference"],
]
PLACE = {name: i for i, name in enumerate(LAYERS)}
FILES = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in ROOT.rglob("*.py") if p.name != "__init__.py"}

# An import inside a function that breaks a cycle: a backend is loaded when its first operator is called, and what
# can be saved as a page calls the writer of pages, which stands above all that it joins.
LATE = {("kernels.backends", "kernels.cpu"), ("kernels.cpu", "kernels.backends"), ("kernels.gpu", "kernels.backends")}
LATE |= {(name, "page.writing") for name in ("report", "policy.plan", "planning.profiling", "verify.check")}


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
    """The attributes that lowtide's classes define, what every named tuple has, and ``os._exit``."""
    own = {"_asdict", "_replace", "_fields", "_make", "_exit"}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            own |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if getattr(node.value, "id", "") in ("self", "cls") else set()
    return own


# Private names of torch: those of autograd in one file, and those of the compiler, which has no public way to pack
# what passes from a forward graph to a backward graph, in another. Kernels name torch's float formats.
PRIVATE = {FILES["graph.capture"], FILES["graph.shards"], FILES["compiling.dynamo"]}


def test_private_torch_names_live_in_three_files():
    trees = {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
    own = own_names(list(trees.values()))
    for path, tree in trees.items():
        if path not in PRIVATE and path.parent.name != "kernels":
            assert not private_names(tree, own), path
    assert {"_C", "_saved_", "_version", "_base"} <= private_names(trees[FILES["graph.capture"]], own)
    assert {"_dynamo", "_functorch", "_inductor"} <= private_names(trees[FILES["compiling.dynamo"]], own)


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


# The one module that users reach through the package. All others are implementation: Python binds them to the package
# when something imports them, and their names promise nothing.
PUBLIC_MODULES = {"codecs"}


def undocumented(names, namespace):
    """Names that do not exist in the namespace, or that exist without a docstring of their own."""
    found = []
    for name in names:
        value = getattr(namespace, name, None)
        text = (vars(value).get("__doc__") if isinstance(value, type) else getattr(value, "__doc__", None)) or ""
        generated = text.startswith(f"{name}(")  # by @dataclass
        if value is None or not text.strip() or generated:
            found.append(name)
    return found


def misplaced(names, namespace):
    """Public names that are bound but not listed, or listed but not bound; modules count only if they are public."""
    bound = {
        name
        for name, value in vars(namespace).items()
        if not name.startswith("_") and (not isinstance(value, ModuleType) or name in PUBLIC_MODULES)
    }
    return bound ^ (set(names) - {"__version__"})


def test_public_names_are_those_that_are_bound():
    assert lowtide.__all__ == sorted(set(lowtide.__all__))
    assert lowtide.compile is vars(lowtide)["compile"], "bound when it is first asked for"
    assert set(lowtide.__all__) <= set(dir(lowtide))
    assert not misplaced(lowtide.__all__, lowtide)
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", lowtide.__version__)


def test_public_names_are_documented():
    assert not undocumented(set(lowtide.__all__) - {"__version__"}, lowtide)
    assert not undocumented(set(lowtide.codecs.__all__), lowtide.codecs)


def test_no_module_has_the_name_of_something_public():
    """Importing ``lowtide.check``, were it a module, would replace the function of that name."""
    modules = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules & set(lowtide.__all__) == PUBLIC_MODULES


def test_the_test_of_public_names_sees_what_is_wrong():
    @dataclass
    class Bare:
        x: int

    class Documented:
        """Says what it is."""

    class Heir(Documented):
        pass

    def helper():
        pass

    names = {"Bare": Bare, "Documented": Documented, "Heir": Heir, "helper": helper, "re": re, "_hidden": helper}
    namespace = SimpleNamespace(**names)
    assert undocumented(["Bare", "Documented", "Heir", "helper", "absent"], namespace) == [
        *("Bare", "Heir", "helper", "absent"),
    ]
    assert misplaced(["Bare", "Documented", "absent", "__version__"], namespace) == {"Heir", "helper", "absent"}


def names_in(page):
    """Dotted names below ``lowtide`` in the code of a page, in fences and in line."""
    code = re.findall(r"```.*?```|`[^`\n]+`", page, re.DOTALL)
    return {name for text in code for name in re.findall(r"\blowtide((?:\.[A-Za-z_]\w*)+)", text)}


def exists(dotted):
    """Whether a dotted name below ``lowtide`` is an attribute, or a module with perhaps an attribute in it."""
    try:
        pkgutil.resolve_name(f"lowtide{dotted}")
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize(
    "page", [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_pages_name_what_exists(page):
    text = page.read_text(encoding="utf-8")
    planned = set(re.findall(r"`lowtide(\.\w+)`[^:\n]*: not there", text))  # which the page itself says
    assert {name for name in names_in(text) if not exists(name)} == planned


def test_the_test_of_pages_sees_names_in_code():
    page = "`lowtide.attach(model)` and lowtide.prose\n```python\nx = lowtide.codecs.NoSuch()\n```\n`lowtide.absent`"
    assert names_in(page) == {".attach", ".codecs.NoSuch", ".absent"}
    assert [exists(name) for name in (".attach", ".codecs.Raw", ".machine.measure", ".codecs.NoSuch", ".absent")] == [
        *(True, True, True, False, False),
    ]
    assert names_in((REPO / "README.md").read_text(encoding="utf-8")) >= {".compress", ".attach", ".check"}


def test_slow_tests_are_tests_that_exist():
    for place in conftest.SLOW:
        name, _, function = place.partition("::")
        text = (REPO / "tests" / name).read_text(encoding="utf-8")
        assert f"def {function}(" in text, f"tests/conftest.py lists {place}, which does not exist"


def test_docs_name_files_that_exist():
    for page in (REPO / "docs").glob("*.md"):
        for name in re.findall(r"`((?:src|tests|benchmarks|docs|evidence)/[\w./-]+)`", page.read_text()):
            assert (REPO / name).exists(), f"{page.name} names {name}"
