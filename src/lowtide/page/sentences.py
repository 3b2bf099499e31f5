"""Why the peak is what it is, in sentences: each from numbers of the document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..planning.profiling import Profile
from ..planning.recorder import INPUTS, SAVED, TRANSIENT
from ..report import EXACT, HELD, UNKNOWN_OP, Report, size
from .timeline import OPTIMIZER, PACKED

_NAMED = 3


def sentences(
    report: Report | None, profile: Profile | None, timeline: dict[str, Any] | None, rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Sentences about the peak, each from numbers of this document."""
    found = []
    if timeline is not None and profile is not None:
        found += _about_peak(timeline, profile)
    if report is not None:
        found += _about_exact(report)
    elif any(row["form"] == "kept" and row["plain_nbytes"] for row in rows) and timeline is not None:
        largest = sorted((r for r in rows if r["form"] == "kept"), key=lambda r: -r["plain_nbytes"])[:_NAMED]
        names = ", ".join(f"{_name(row)} ({size(row['plain_nbytes'])})" for row in largest if row["plain_nbytes"])
        if timeline["after"] is not None:
            found.append(f"The largest tensors that stay in full: {names}.")
    return found


def _name(row: Mapping[str, Any]) -> str:
    tail = f"#{row['ordinal']}" if row["ordinal"] else ""
    return f"{row['module'] or '(model)'}: {row['op']}.{row['slot']}{tail}"


def _about_peak(timeline: dict[str, Any], profile: Profile) -> list[str]:
    before = timeline["before"]["peak"]
    found = []
    if timeline["after"] is None:
        found.append(f"The peak of {size(before['nbytes'])} is in the {before['phase']} pass.")
        peak = before
    else:
        peak = timeline["after"]["peak"]
        change = 1 - peak["nbytes"] / max(1, before["nbytes"])
        moved = "" if peak["phase"] == before["phase"] else f" It moves to the {peak['phase']} pass."
        if peak["nbytes"] < before["nbytes"]:
            text = f"The peak falls from {size(before['nbytes'])} to {size(peak['nbytes'])}, by {change:.0%}.{moved}"
        else:
            text = f"The peak does not fall: {size(before['nbytes'])} before, {size(peak['nbytes'])} after.{moved}"
        found.append(text)
    total, roles = peak["nbytes"], peak["roles"]
    most = sorted(roles.items(), key=lambda row: -row[1])[:_NAMED]
    found.append(
        f"At {'the new' if peak is not before else 'this'} peak most is held by "
        + _listed([f"{_role(role)} ({size(n)}, {n / total:.0%})" for role, n in most])
        + "."
    )
    if profile.rest:
        share = profile.rest / total
        least = (
            "so no compression can bring the peak below that" if share > 0.25 else "which compression leaves as it is"
        )
        found.append(
            f"{size(profile.rest)} ({share:.0%}) is there before the step: weights, batch and optimizer, {least}."
        )
    transient = [h for h in peak["holders"] if h["role"] == TRANSIENT]
    if transient and roles.get(TRANSIENT, 0) > 0.05 * total:
        first = transient[0]
        found.append(
            f"{size(roles[TRANSIENT])} is in use for that moment only; the largest part is {size(first['nbytes'])}: "
            f"{first['label']}. A smaller batch makes it smaller; storing less does not."
        )
    full = [h for h in peak["holders"] if h["role"] == SAVED]
    if timeline["after"] is not None and full and roles.get(SAVED, 0) > 0.05 * total:
        names = _listed([f"{h['label']} ({size(h['nbytes'])})" for h in full[:_NAMED]])
        found.append(f"{size(roles[SAVED])} of saved tensors is still in full then; the largest: {names}.")
    return found


def _role(role: str) -> str:
    words = {INPUTS: "the batch", SAVED: "saved tensors in full", PACKED: "packed tensors"}
    words |= {TRANSIENT: "transient memory", OPTIMIZER: "the optimizer"}
    return words.get(role, role)


def _about_exact(report: Report) -> list[str]:
    found = []
    held = sorted((s for s in report.sites if s.state == HELD and s.plain_nbytes), key=lambda s: -s.plain_nbytes)
    if held:
        names = _listed([f"{s.site} ({size(s.plain_nbytes)})" for s in held[:_NAMED]])
        found.append(f"Other code keeps {size(report.held_nbytes)} alive, and storing it again saves nothing: {names}.")
    unknown: dict[str, int] = defaultdict(int)
    for s in report.sites:
        if s.state == EXACT and s.why.endswith(UNKNOWN_OP):
            unknown[f"{s.site.op}.{s.site.slot}"] += s.plain_nbytes
    if unknown:
        most = sorted(unknown.items(), key=lambda row: -row[1])
        names = _listed([f"{op} ({size(n)})" for op, n in most[:_NAMED]])
        found.append(
            f"{size(sum(unknown.values()))} stays exact because these ops have no rule: {names}. "
            "lowtide.register_rule gives one to an op of your own."
        )
    exact = sorted((s for s in report.sites if s.state == EXACT), key=lambda s: -s.stored_nbytes)
    total = sum(s.stored_nbytes for s in exact)
    if exact and total > 0.05 * max(1, report.stored_nbytes):
        names = _listed([f"{s.site} ({size(s.plain_nbytes)}: {s.why})" for s in exact[:_NAMED]])
        found.append(f"{size(total)} of the {size(report.stored_nbytes)} that are kept is exact; the largest: {names}.")
    return found


def _listed(names: Sequence[str]) -> str:
    """Names in a row.

    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else "".join(names)
