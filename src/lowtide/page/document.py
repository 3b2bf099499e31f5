"""One JSON document about the memory of a step, from what profiles, plans, reports and checks know.

The document is plain data. The page shows it and computes nothing but layout, so every number on the page is in the
document. A part that nothing was given for is null.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import __version__
from ..planning.planner import ALLOWED, BudgetPlan, Problem
from ..planning.profiling import Profile, Saved
from ..planning.recorder import SAVED
from ..planning.solvers import KEEP, REBUILD, evaluate, path
from ..planning.verifying import Verification
from ..policy.choice import Action, Choice
from ..policy.plan import Plan
from ..report import COMPRESSED, FORMS, SHARED, Report
from ..verify.check import NEGLIGIBLE, CheckResult, finite
from .sentences import sentences
from .timeline import Outcome, parsed, timeline_of

KIND = "lowtide page"
FORMAT = 1

_FRONTIER = 40
_ROWS = 4000
"""Saved tensors in a document. Of more, the smallest are left out, and the document says how many."""
_AGAIN = "its block runs again in backward"
_GIVEN = "a block that runs again in backward keeps what it was given"


def document(
    *,
    report: Report | None = None,
    profile: Profile | None = None,
    plan: Plan | None = None,
    check: CheckResult | None = None,
    verification: Verification | None = None,
    tables: Iterable[Mapping[str, Any]] = (),
    title: str | None = None,
    frontier: bool = True,
) -> dict[str, Any]:
    """Join all that is known of one step.

    A report, a plan and a check may be given with the profile of the same model: only a profile has times. ``tables``
    are shown as they are; each has a title, a head, rows and a note. Other plans for the profile, the ``frontier``,
    take up to a second to find.
    """
    _check_types(report, profile, plan, check, verification)
    if report is None and check is not None:
        report = check.report
    if profile is None and isinstance(plan, BudgetPlan):
        profile = plan.profile
    if isinstance(plan, BudgetPlan) and profile is not None and plan.model and plan.model != profile.model:
        raise ValueError("the plan and the profile are of models with other parameters; profile the model of the plan")
    problem = None if profile is None else _problem(profile, plan)
    outcome = None if problem is None else _outcome(problem.profile, plan, report)
    timeline = None if problem is None else timeline_of(problem, outcome)
    rows = _rows(report, problem, plan, outcome)
    shown = sorted(rows, key=lambda row: -row["plain_nbytes"])[:_ROWS]
    made = {
        "kind": KIND,
        "format": FORMAT,
        "lowtide": __version__,
        "title": title or _title(report, profile, plan, check),
        "about": _about(report, profile, plan),
        "headline": _headline(report, profile, plan, check, verification, timeline),
        "timeline": timeline,
        "sites": shown,
        "left_out": {"sites": len(rows) - len(shown), "plain_nbytes": _sum(rows) - _sum(shown)},
        "frontier": None if profile is None or not frontier else _frontier(profile, plan),
        "fidelity": None if check is None else _fidelity(check),
        "why": sentences(report, profile, timeline, rows),
        "tables": [dict(table) for table in tables],
        "notes": _notes(report, profile, check),
    }
    found: dict[str, Any] = finite(made)
    return found


def _notes(report: Report | None, profile: Profile | None, check: CheckResult | None) -> list[str]:
    found = [note for part in (report, profile, check) if part is not None for note in part.notes]
    if profile is None and report is not None:
        found.append("the peak of a step is not known here; save(..., profile=lowtide.profile(model, batch)) adds it")
    if profile is not None and not profile.workspaces:
        found.append("memory that operators take inside themselves was not measured and is not in these numbers")
    return list(dict.fromkeys(found))


def _check_types(*parts: Any) -> None:
    kinds = (Report, Profile, Plan, CheckResult, Verification)
    names = ("report", "profile", "plan", "check", "verification")
    for part, kind, name in zip(parts, kinds, names, strict=True):
        if part is not None and not isinstance(part, kind):
            raise TypeError(f"{name} must be a {kind.__name__}; got {type(part).__name__}")


def _sum(rows: Iterable[Mapping[str, Any]], name: str = "plain_nbytes") -> int:
    return sum(row[name] for row in rows)


# ---------------------------------------------------------------- what it is about


def _title(report: Report | None, profile: Profile | None, plan: Plan | None, check: CheckResult | None) -> str:
    if plan is not None:
        return f"Memory of a step with a {plan.method}" if plan.method else "A plan"
    if check is not None:
        return f"Memory and gradients with {check.method}"
    if report is not None:
        return f"Memory of a step with {report.method}"
    return "Memory of a plain step" if profile is not None else "Memory of a step"


def _about(report: Report | None, profile: Profile | None, plan: Plan | None) -> dict[str, Any]:
    return {
        "method": report.method if report is not None else plan.method if plan is not None else None,
        "limit": plan.limit if isinstance(plan, BudgetPlan) and plan.limit else None,
        "device": None if profile is None else profile.device,
        "fake": None if profile is None else profile.fake,
        "kernels": {} if report is None else {k: dict(v) for k, v in report.kernels.items()},
    }


def _headline(
    report: Report | None,
    profile: Profile | None,
    plan: Plan | None,
    check: CheckResult | None,
    verification: Verification | None,
    timeline: dict[str, Any] | None,
) -> dict[str, Any]:
    predicted = plan.predicted if isinstance(plan, BudgetPlan) else None
    peak: dict[str, Any] | None = None
    kept: dict[str, Any] | None = None
    step: dict[str, Any] | None = None
    gradient: dict[str, Any] | None = None
    if verification is not None:
        peak = {
            "before": verification.plain_peak,
            "after": verification.peak,
            "how": "measured in processes of their own",
        }
    elif timeline is not None:
        after = None if timeline["after"] is None else timeline["after"]["peak"]["nbytes"]
        how = "computed without data" if profile is not None and profile.fake else "computed from the recorded step"
        peak = {"before": timeline["before"]["peak"]["nbytes"], "after": after, "how": how}
    elif predicted is not None:
        peak = {"before": predicted.plain_peak, "after": predicted.peak, "how": "predicted by the planner"}
    if report is not None:
        kept = {"before": report.plain_nbytes, "after": report.stored_nbytes, "held": report.held_nbytes}
    elif predicted is not None:
        kept = {"before": predicted.saved_nbytes, "after": predicted.stored_nbytes, "held": 0}
    elif profile is not None:
        kept = {"before": profile.saved_nbytes, "after": None, "held": 0}
    if verification is not None:
        plain = None if not verification.slowdown else verification.seconds / verification.slowdown
        step = {"before": plain, "after": verification.seconds, "how": "measured, the fastest of a few steps"}
    elif predicted is not None and predicted.step_seconds:
        seconds = predicted.step_seconds
        step = {"before": seconds, "after": seconds + predicted.added_seconds, "how": "predicted from times of codecs"}
    elif profile is not None and profile.step_seconds:
        step = {"before": profile.step_seconds, "after": None, "how": "one recorded step"}
    if check is not None:
        total = check.overall
        gradient = {"error": total.error, "sgd_noise": total.sgd_noise, "bias": total.bias, "cosine": total.cosine}
        gradient |= {"verdict": check.verdict, "reason": check.reason, "how": f"measured with {check.seeds} draws"}
    elif verification is not None or (predicted is not None and predicted.error is not None):
        error = verification.error if verification is not None else predicted.error if predicted is not None else None
        gradient = {"error": error, "sgd_noise": None, "bias": None, "cosine": None, "verdict": None, "reason": None}
        gradient["how"] = "measured" if verification is not None else "predicted by the planner"
    return {"peak": peak, "kept": kept, "step": step, "gradient": gradient}


# ---------------------------------------------------------------- what becomes of each tensor


def _outcome(profile: Profile, plan: Plan | None, report: Report | None) -> Outcome | None:
    if report is not None:
        return _as_reported(profile, report)
    return None if plan is None else [_stored(saved, plan.choice_for(saved.sites)) for saved in profile.saved]


def _as_reported(profile: Profile, report: Report) -> Outcome:
    """The report has the bytes of a storage at one site; the first stretch of that storage gets them here."""
    rows = {row.site: row for row in report.sites if row.state != SHARED}
    spent: set[Any] = set()
    found: list[int | None] = []
    for saved in profile.saved:
        row = next((rows[site] for site in saved.sites if site in rows), None)
        if row is None:  # another stretch of a storage whose bytes are elsewhere, or not in the report at all
            owner = next((r for r in rows.values() if r.site in spent and _same(profile, saved, r.site)), None)
            found.append(None if owner is None or owner.state != COMPRESSED else 0)
        else:
            found.append(row.stored_nbytes if row.state == COMPRESSED else None)
            spent.add(row.site)
    return found


def _same(profile: Profile, saved: Saved, site: Any) -> bool:
    return any(other.block == saved.block and site in other.sites for other in profile.saved)


def _stored(saved: Saved, choice: Choice | None) -> int | None:
    """Bytes of one tensor under a plan: what the planner counts, masks included."""
    if not saved.has_values:
        return saved.lossless_nbytes
    if choice is None or choice.action is Action.KEEP:
        return None
    if choice.action is Action.STORE and choice.home == "device":
        return choice.nbytes(saved.meta) + saved.lossless_nbytes
    return saved.lossless_nbytes


def _rows(
    report: Report | None, problem: Problem | None, plan: Plan | None, outcome: Outcome | None
) -> list[dict[str, Any]]:
    """One row for each saved tensor: as the report has it, or as profile and plan have it, or as the plan alone."""
    if report is not None:
        return [
            _row(s.site, s.shape, s.dtype, s.form, s.plain_nbytes, s.stored_nbytes, s.codec, s.why)
            for s in report.sites
        ]
    if problem is None:
        choices = {} if plan is None else plan.choices
        return [_row(site, (), "", _form(c), 0, 0, str(c), c.why) for site, c in choices.items()]
    found = []
    loose: dict[str, int] = defaultdict(int)
    profile, parts = problem.plain, problem.parts
    left = {site: i for i, saved in enumerate(problem.profile.saved) for site in saved.sites}
    given = {number for part in parts for number in part.inputs}
    for saved in profile.saved:
        number = next((left[site] for site in saved.sites if site in left), None)
        if number is None and saved.block not in given:
            first, *others = saved.sites
            found.append(_row(first, saved.shape, saved.dtype, "recomputed", saved.nbytes, 0, "", _AGAIN))
            found += [_row(s, saved.shape, saved.dtype, "shared", 0, 0, "", f"as {first}") for s in others]
            continue
        choice = None if plan is None or number is None else plan.choice_for(saved.sites)
        stored = None if outcome is None or number is None else outcome[number]
        what = "mask, index or shape" if not saved.has_values else "exact" if choice is None else str(choice)
        form = "kept" if outcome is None or number is None else "mask" if not saved.has_values else _form(choice)
        why = _GIVEN if number is None else "" if choice is None else choice.why
        first, *others = saved.sites
        found.append(
            _row(
                *(first, saved.shape, saved.dtype, form, saved.nbytes, saved.nbytes if stored is None else stored),
                *("" if outcome is None else what, why or f"backward needs: {saved.need}"),
            )
        )
        found += [_row(s, saved.shape, saved.dtype, "shared", 0, 0, "", f"stored at {first}") for s in others]
    may = {saved.block for saved in profile.saved}
    for number, block in enumerate(profile.blocks):
        if block.role == SAVED and number not in may:
            loose[block.label] += block.nbytes
    for label, nbytes in loose.items():
        if any(part.holds(parsed(label)[0]) for part in parts):
            found.append(_row(parsed(label), (), "", "recomputed", nbytes, 0, "", _AGAIN))
            continue
        why = "no plan changes it: it is small, other code keeps it, or there is no rule for the op"
        found.append(_row(parsed(label), (), "", "kept", nbytes, nbytes, "", why))
    return found


def _row(
    site: Sequence[Any], shape: Sequence[int], dtype: str, form: str, plain: int, stored: int, codec: str, why: str
) -> dict[str, Any]:
    assert form in FORMS, form
    module, op, slot, ordinal = site
    place = {"module": module, "op": op, "slot": slot, "ordinal": ordinal, "shape": list(shape), "dtype": dtype}
    return {**place, "form": form, "plain_nbytes": plain, "stored_nbytes": stored, "codec": codec, "why": why}


def _form(choice: Choice | None) -> str:
    if choice is None or choice.action is Action.KEEP:
        return "kept"
    if choice.action is Action.STORE:
        return "compressed" if choice.home == "device" else "offloaded"
    return {Action.REBUILD: "rebuilt", Action.OFFLOAD: "offloaded"}.get(choice.action, "recomputed")


# ---------------------------------------------------------------- what else could be chosen


def _problem(profile: Profile, plan: Plan | None) -> Problem:
    """The profile as a solver sees it. Without a plan times do not count, so that no codec has to be timed."""
    if plan is None:
        profile = dataclasses.replace(profile, step_seconds=0.0)
    away = plan is not None and any(c.action is Action.OFFLOAD for c in plan.choices.values())
    allowed = ALLOWED if away else [name for name in ALLOWED if name != "offload"]
    paths = () if plan is None else plan.checkpoints
    return Problem.of(profile, allowed, [part for part in profile.parts if part.path in paths])


def _frontier(profile: Profile, plan: Plan | None) -> dict[str, Any]:
    """Peaks that plans reach without running blocks again, and at what error.

    With a profile that has no data it is at what cost by formula.
    """
    problem = _problem(profile, None if plan is None else dataclasses.replace(plan, checkpoints=()))
    states = path(problem.base, problem.items, price=problem.price)
    chosen = [states[i] for i in sorted({round(k * (len(states) - 1) / (_FRONTIER - 1)) for k in range(_FRONTIER)})]
    fake = problem.profile.fake
    points = []
    for state in chosen:
        picks = state.picks
        kept = sum(
            item.full if pick == KEEP else item.rebuilt_nbytes if pick == REBUILD else item.nbytes[pick]
            for item, pick in zip(problem.items, picks, strict=True)
        )
        error = None if fake else problem.error(picks)
        seconds = state.seconds if problem.price else None
        points.append({"peak": state.peak, "kept": kept, "error": error, "cost": state.cost, "seconds": seconds})
    predicted = plan.predicted if isinstance(plan, BudgetPlan) else None
    mark = None
    if predicted is not None and plan is not None:
        cost = None
        if fake:  # the cost that the points have, of what the plan does
            own = [_pick(s, o, plan) for s, o in zip(problem.profile.saved, problem.choices, strict=True)]
            known = [pick for pick in own if pick is not None]
            cost = evaluate(problem.base, problem.items, known).cost if len(known) == len(own) else None
        mark = {"peak": predicted.peak, "kept": predicted.stored_nbytes, "error": predicted.error, "cost": cost}
        mark["seconds"] = predicted.added_seconds if problem.price else None
    return {"measure": "cost" if fake else "error", "points": points, "chosen": mark, "plain": problem.profile.peak}


def _pick(saved: Saved, offered: Sequence[Choice], plan: Plan) -> int | None:
    if not saved.has_values:
        return 0
    choice = plan.choice_for(saved.sites)
    if choice is None or choice.action is Action.KEEP:
        return KEEP
    if choice.action is Action.REBUILD:
        return REBUILD
    return offered.index(choice) if choice in offered else None


def _fidelity(check: CheckResult) -> dict[str, Any]:
    """Each parameter's gradient, the worst beside SGD's noise first; what hardly has a gradient comes last."""
    rows: list[dict[str, Any]] = []
    for name, d in check.parameters.items():
        ratio = None if not d.sgd_noise else d.error / d.sgd_noise
        numbers = {"norm": d.norm, "error": d.error, "sgd_noise": d.sgd_noise, "ratio": ratio, "bias": d.bias}
        counts = d.norm >= NEGLIGIBLE * check.overall.norm
        rows.append({"parameter": name, **numbers, "chance": d.chance, "cosine": d.cosine, "counts": counts})
    rows.sort(key=lambda r: (not r["counts"], -(r["error"] if r["ratio"] is None else r["ratio"])))
    spoilers = [{"sites": list(map(str, s.sites)), "codec": s.codec, "fall": s.fall} for s in check.sites]
    return {
        "verdict": check.verdict,
        "reason": check.reason,
        "seeds": check.seeds,
        "overall": dataclasses.asdict(check.overall),
        "parameters": rows,
        "sites": spoilers,
        "stored": check.stored,
        "nonfinite": list(check.nonfinite),
    }
