"""A plan: the finished table site -> choice, as plain data that can be printed, saved, compared and run again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..codecs import Codec
from ..graph.capture import Site
from .choice import Action, Choice

_VERSION = 2
_SHOWN = 20


@dataclass(frozen=True)
class Plan:
    """A choice for each site. A tensor whose sites are not listed stays exact.

    ``lowtide.compress(model, plan)`` runs it. ``session.plan()`` and ``handle.plan()`` give the plan that a method made
    in the last forward. A codec in place of a choice means to store with it. ``method`` tells a reader where the plan
    comes from. ``checkpoints`` are paths of modules whose forward runs once more in backward: nothing is stored of what
    they save, and no site inside them is met.

    >>> from lowtide.codecs import GroupQuant
    >>> plan = Plan({Site("fc", "Addmm", "mat1", 0): GroupQuant(bits=4)})
    >>> Plan.from_json(plan.to_json()) == plan
    True
    >>> print(plan)
    plan of 1 site
    fc: Addmm.mat1  group_quant(4 bits)
    """

    choices: Mapping[Site, Choice] = field(default_factory=dict)
    method: str = field(default="", compare=False)
    checkpoints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        table: Mapping[Site, Choice | Codec] = self.choices
        choices = {}
        for site, choice in table.items():
            if not isinstance(site, Site) or not isinstance(choice, (Choice, Codec)):
                raise TypeError(f"a plan maps a lowtide.Site to a lowtide.Choice or a codec; got {site!r}: {choice!r}")
            choices[site] = choice if isinstance(choice, Choice) else Choice.store(choice)
        object.__setattr__(self, "choices", choices)
        object.__setattr__(self, "checkpoints", _paths(self.checkpoints))

    def __len__(self) -> int:
        return len(self.choices)

    def choice_for(self, sites: Iterable[Site]) -> Choice | None:
        """The choice of the first of a tensor's sites that is listed; None if none is."""
        for site in sites:
            choice = self.choices.get(site)
            if choice is not None:
                return choice
        return None

    @property
    def rebuilds(self) -> bool:
        """Is any tensor rebuilt from others?"""
        return any(choice.action is Action.REBUILD for choice in self.choices.values())

    def without(self, sites: Iterable[Site]) -> Plan:
        """The plan with these sites kept exact."""
        spared = dict.fromkeys(sites, Choice.keep("spared"))
        return Plan({**self.choices, **spared}, self.method, self.checkpoints)

    def diff(self, other: Plan) -> PlanDiff:
        """What ``other`` has that this plan has not, what it lacks, and what it does otherwise."""
        here, there = self.choices, other.choices
        common = [site for site in here if site in there]
        return PlanDiff(
            same=tuple(site for site in common if here[site] == there[site]),
            changed={site: (here[site], there[site]) for site in common if here[site] != there[site]},
            missing=tuple(site for site in here if site not in there),
            added=tuple(site for site in there if site not in here),
            checkpoints=(self.checkpoints, other.checkpoints),
        )

    def to_data(self) -> dict[str, Any]:
        """Plain data, fit for JSON: one row a site."""
        rows = [{**site._asdict(), **choice.to_config()} for site, choice in self.choices.items()]
        blocks = {"checkpoints": list(self.checkpoints)} if self.checkpoints else {}
        return {"version": _VERSION, "method": self.method, **blocks, "sites": rows}

    def to_json(self) -> str:
        """:meth:`to_data` as text."""
        return json.dumps(self.to_data(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote; anything else raises a ValueError that says what is wrong."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is not a plan, which is a JSON document: {error}") from error
        return cls.from_data(data)

    @classmethod
    def from_data(cls, data: Any) -> Plan:
        """The plan that :meth:`to_data` gave."""
        if not isinstance(data, dict) or data.get("version") != _VERSION:
            raise ValueError(f"this is not a plan of version {_VERSION}; write one with Plan.save")
        rows = data.get("sites")
        if not isinstance(rows, list):
            raise ValueError(f"a plan has a list of 'sites'; got {rows!r}")
        choices = {}
        for number, row in enumerate(rows):
            try:
                site, choice = _parsed(row)
            except (TypeError, ValueError) as error:
                raise ValueError(f"row {number} of the plan: {error}") from error
            if site in choices:
                raise ValueError(f"row {number} of the plan: {site} is listed twice")
            choices[site] = choice
        try:
            return cls(choices, str(data.get("method", "")), data.get("checkpoints", ()))
        except TypeError as error:
            raise ValueError(str(error)) from error

    def save(self, path: str | Path, **beside: Any) -> None:
        """Write JSON, or a page if the name ends in .html.

        A page shows what is given ``beside`` too: ``profile``, ``report``, ``check`` and ``verification`` of the same
        model.
        """
        if is_page(path):
            from ..page.writing import save_page  # which stands above: it joins all that there is to show

            save_page(path, plan=self, **beside)
            return
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what :meth:`save` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def _repr_html_(self) -> str:
        """In a notebook."""
        from ..page.writing import notebook

        return notebook(plan=self)

    def __str__(self) -> str:
        """A line for each site."""
        count = f"plan of {len(self)} site{'' if len(self) == 1 else 's'}"
        width = max((len(str(site)) for site in self.choices), default=0)
        lines = [f"{path}  computed again in backward" for path in self.checkpoints]
        lines += [f"{site!s:{width}}  {choice}" for site, choice in self.choices.items()]
        return "\n".join((f"{count}, made by {self.method}" if self.method else count, *lines))


@dataclass(frozen=True)
class PlanDiff:
    """How two plans differ. It is true if they do."""

    same: tuple[Site, ...]
    changed: Mapping[Site, tuple[Choice, Choice]]
    missing: tuple[Site, ...]
    """Sites of the first plan that the second lacks."""
    added: tuple[Site, ...]
    """Sites of the second plan that the first lacks."""
    checkpoints: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """The modules that each of the two computes again."""

    def __bool__(self) -> bool:
        first, second = self.checkpoints
        return bool(self.changed or self.missing or self.added or first != second)

    def __str__(self) -> str:
        """Counts, then every site that differs by name."""
        lines = [
            f"{len(self.same)} sites are the same, {len(self.changed)} changed, {len(self.missing)} missing, "
            f"{len(self.added)} added"
        ]
        lines += [f"changed  {site}: {old} -> {new}" for site, (old, new) in self.changed.items()]
        lines += [f"missing  {site}" for site in self.missing]
        lines += [f"added    {site}" for site in self.added]
        first, second = self.checkpoints
        lines += [f"computed again by the first alone: {path}" for path in first if path not in second]
        lines += [f"computed again by the second alone: {path}" for path in second if path not in first]
        return "\n".join(lines)


def is_page(path: str | Path) -> bool:
    """Does a file of this name get a page, not JSON?"""
    return Path(path).suffix.lower() in (".html", ".htm")


def _paths(given: Any) -> tuple[str, ...]:
    """Paths of modules, in order; none may be named twice or lie inside another."""
    if isinstance(given, str) or not isinstance(given, (list, tuple)) or not all(isinstance(p, str) for p in given):
        raise TypeError(f"checkpoints are paths of modules, such as ('layers.0', 'layers.1'); got {given!r}")
    paths = tuple(given)
    for i, path in enumerate(paths):
        if not path:
            raise ValueError("the whole model cannot be a checkpoint: name modules inside it")
        for other in (*paths[:i], *paths[i + 1 :]):
            if path == other or path.startswith(f"{other}."):
                raise ValueError(f"checkpoints cannot hold one another or be named twice; got {other!r} and {path!r}")
    return paths


def named(sites: Iterable[Site | str]) -> str:
    """Sites in words; of many the first."""
    names = [str(site) for site in sites]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _parsed(row: Any) -> tuple[Site, Choice]:
    if not isinstance(row, dict):
        raise TypeError(f"a site is a mapping; got {row!r}")
    lacking = [name for name in (*Site._fields, "action") if name not in row]
    if lacking:
        raise ValueError(f"{', '.join(lacking)} missing in {row!r}")
    module, op, slot, ordinal = (row[name] for name in Site._fields)
    if not all(isinstance(name, str) for name in (module, op, slot)) or type(ordinal) is not int or ordinal < 0:
        raise ValueError(f"module, op and slot are text, and ordinal is a whole number from 0; got {row!r}")
    return Site(module, op, slot, ordinal), Choice.from_config({k: v for k, v in row.items() if k not in Site._fields})
