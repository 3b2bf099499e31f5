"""Which modules are compressed at all: patterns of module paths."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn


@dataclass(frozen=True)
class Scope:
    """Modules by patterns of their paths, as in ``named_modules()``.

    A pattern may have ``*``, ``?`` and ``[...]``. It stands for the modules that match it and for all inside them.
    Without ``include`` every module is meant; what ``exclude`` names is left out.

    >>> scope = Scope(include=("encoder",), exclude=("*.norm",))
    >>> scope.reason("encoder.3.conv"), scope.reason("encoder.3.norm"), scope.reason("head")
    (None, 'excluded by *.norm', 'not included')
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, include: object, exclude: object) -> Scope | None:
        """The scope that a user asked for, checked against the model; None if every module is meant."""
        scope = cls(_patterns(include, "include"), _patterns(exclude, "exclude"))
        if not scope.include and not scope.exclude:
            return None
        names = [name for name, _ in model.named_modules()]
        for option, patterns in (("include", scope.include), ("exclude", scope.exclude)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    near = difflib.get_close_matches(pattern, names, 3) or names[1:4]
                    raise ValueError(
                        f"no module matches {option}={pattern!r}; modules go by their paths in named_modules(), such "
                        f"as {', '.join(map(repr, near)) or 'none here'}"
                    )
        return scope

    def reason(self, module: str) -> str | None:
        """Why tensors saved in this module are left alone; None if they are not."""
        paths = list(_ancestors(module))
        for pattern in self.exclude:
            if any(fnmatchcase(path, pattern) for path in paths):
                return f"excluded by {pattern}"
        if self.include and not any(fnmatchcase(path, p) for p in self.include for path in paths):
            return "not included"
        return None


def _patterns(given: object, option: str) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else None
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{option} must be a pattern of module paths or several, such as 'head' or 'blocks.*.mlp'; "
                        f"got {given!r}")  # fmt: skip
    if "" in patterns:
        raise ValueError(f"{option} has an empty pattern, which would stand for the whole model; leave it out")
    return patterns


def _ancestors(module: str) -> Iterable[str]:
    """The path itself, then that of each module around it; the model is "" and stands around all."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""
