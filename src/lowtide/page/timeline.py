"""Memory over one step, stacked by role: of a plain step, and with what becomes of each saved tensor."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..planning.checkpoints import later_moments
from ..planning.planner import Problem
from ..planning.profiling import Profile
from ..planning.recorder import GRADIENTS, INPUTS, SAVED, TRANSIENT, WEIGHTS
from ..planning.solvers import Item

OPTIMIZER, PACKED = "optimizer", "packed"
_ORDER = (WEIGHTS, INPUTS, OPTIMIZER, GRADIENTS, PACKED, SAVED, TRANSIENT)
"""Of the roles, from the bottom of the picture to its top: what is always there first."""

_POINTS = 600
"""Moments in a picture. Of more, each of so many runs shows its highest, so the peak is exact."""
_STAGES = 5
_HOLDERS = 8
_INSIDE = "inside an operator"

Outcome = Sequence[int | None]
"""For each saved tensor of a problem's profile the bytes stored of it; None if it stays in full."""


class Band(NamedTuple):
    """Memory that is taken from one moment to another."""

    nbytes: int
    born: int
    died: int
    role: str
    label: str


def bands(profile: Profile, items: Sequence[Item], outcome: Outcome | None) -> list[Band]:
    """Everything that takes memory, and when: of the step as it is, or with what becomes of each saved tensor.

    The phases of a stored tensor are those of ``planning.solvers``: in full until it is sealed, packed from then on,
    and in full again while backward reads it.
    """
    blocks = [Band(*block) for block in profile.blocks]
    if outcome is not None:
        for saved, item, stored in zip(profile.saved, items, outcome, strict=True):
            if stored is None:
                continue
            block, label = blocks[saved.block], str(saved.sites[0])
            blocks[saved.block] = block._replace(nbytes=block.nbytes - item.full)
            blocks.append(Band(item.full, item.born, item.sealed, block.role, label))
            blocks.append(Band(stored, item.sealed, item.died, PACKED, label))
            if stored not in [item.nbytes[k] for k in item.unopened]:  # its bytes tell which option it is
                blocks += [Band(item.full, *window, TRANSIENT, f"{label}, decoded") for window in item.windows]
    if profile.optimizer_nbytes:
        blocks.append(Band(profile.optimizer_nbytes, 0, profile.times, OPTIMIZER, ""))
    blocks += [Band(nbytes, at, at, TRANSIENT, _INSIDE) for at, nbytes in profile.workspaces]
    return [band for band in blocks if band.nbytes]


def timeline_of(problem: Problem, outcome: Outcome | None) -> dict[str, Any]:
    """Levels of each role at each moment, and who holds the peak; with an outcome also after it.

    Both sides have the moments of the second. Where modules run again there, the plain step stands still.
    """
    profile, later = problem.profile, later_moments(problem.plain, problem.parts)
    plain = [
        band._replace(born=later[band.born], died=later[band.died])
        for band in bands(problem.plain, problem.items, None)
    ]
    stages = _stages(plain)
    names = list(dict.fromkeys(stages.values()))
    keys = [(role, "") for role in _ORDER if role != SAVED]
    at = _ORDER.index(SAVED)
    keys[at:at] = [(SAVED, name) for name in names]
    sides = {"before": plain, "after": None if outcome is None else bands(profile, problem.items, outcome)}
    found = {side: None if each is None else _side(each, profile, keys, stages) for side, each in sides.items()}
    return {
        "moments": profile.times + 1,
        "forward_end": profile.forward_end,
        "series": [{"role": role, "stage": stage} for role, stage in keys],
        **found,
    }


def _side(
    taken: Sequence[Band], profile: Profile, keys: Sequence[tuple[str, str]], stages: Mapping[str, str]
) -> dict[str, Any]:
    steps = np.zeros((len(keys), profile.times + 2), dtype=np.int64)
    place = {key: i for i, key in enumerate(keys)}
    for band in taken:
        row = place[band.role, stages[band.label] if band.role == SAVED else ""]
        steps[row, band.born] += band.nbytes
        steps[row, band.died + 1] -= band.nbytes
    levels = steps.cumsum(axis=1)[:, :-1]
    total = levels.sum(axis=0)
    highest = int(total.argmax())
    held: dict[tuple[str, str], int] = defaultdict(int)
    roles: dict[str, int] = defaultdict(int)
    for band in taken:
        if band.born <= highest <= band.died:
            held[band.role, "" if band.role in (WEIGHTS, GRADIENTS, INPUTS, OPTIMIZER) else band.label] += band.nbytes
            roles[band.role] += band.nbytes
    order = sorted(held.items(), key=lambda row: -row[1])
    runs = np.array_split(np.arange(len(total)), min(_POINTS, len(total)))
    moments = [int(run[total[run].argmax()]) for run in runs]
    peak = {
        "at": highest,
        "phase": "forward" if highest <= profile.forward_end else "backward",
        "nbytes": int(total[highest]),
        "roles": {role: roles[role] for role in _ORDER if roles[role]},
        "holders": [{"role": r, "label": label, "nbytes": n} for (r, label), n in order[:_HOLDERS]],
        "others": {"count": len(order[_HOLDERS:]), "nbytes": sum(n for _, n in order[_HOLDERS:])},
    }
    return {"at": moments, "nbytes": [levels[i, moments].tolist() for i in range(len(keys))], "peak": peak}


def _stages(taken: Iterable[Band]) -> dict[str, str]:
    """By the label of a saved tensor, the part of the model in which it was saved: a few parts, in their order."""
    labels: dict[str, int] = defaultdict(int)
    for band in taken:
        if band.role == SAVED:
            labels[band.label] += band.nbytes
    paths = {label: parsed(label)[0].split(".") for label in labels}
    parts: dict[str, str] = {}
    sums: dict[str, int] = {}
    for depth in range(1, 1 + max(map(len, paths.values()), default=0)):
        parts = {label: ".".join(names[:depth]) for label, names in paths.items()}
        sums = defaultdict(int)
        for label, nbytes in labels.items():
            sums[parts[label]] += nbytes
        if len(sums) >= _STAGES - 1 and max(sums.values()) <= sum(sums.values()) / 2:
            break
    joined, total, done = {}, sum(sums.values()), 0
    for part, nbytes in sums.items():
        # A part belongs to the stage in which its middle lies.
        joined[part] = (
            min(_STAGES - 1, int(_STAGES * (done + nbytes / 2) / max(1, total))) if len(sums) > _STAGES else part
        )
        done += nbytes
    members: dict[Any, list[str]] = defaultdict(list)
    for part, stage in joined.items():
        members[stage].append(part)
    named = {stage: [part for part in inside if part] or ["(model)"] for stage, inside in members.items()}
    title = {stage: m[0] if len(m) == 1 else f"{m[0]} to {m[-1]}" for stage, m in named.items()}
    return {label: title[joined[part]] for label, part in parts.items()}


def parsed(label: str) -> tuple[str, str, str, int]:
    """A site from its text."""
    match = re.fullmatch(r"(.*): ([^.:]*)\.(.*?)(?:#(\d+))?", label, re.DOTALL)
    if match is None:
        return "", label, "", 0
    return "" if match[1] == "(model)" else match[1], match[2], match[3], int(match[4] or 0)
