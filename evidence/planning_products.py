"""What plans would gain if results of linear layers were made again from their stored inputs; computed, not built.

Every tensor that autograd keeps of the result of a linear layer, up to an exact scaling, rotation or transposition,
gets one more pick in the planner's problem: made again from the layer's stored input, at the time of the layer's
forward, with the input's error times the mean square gain of the weight. No memory is counted for the weight or the
input while that happens. So this is more than could be gained.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

import lowtide
from evidence.planning import PLANS, PRODUCTS, SUBJECTS, Run, add, read
from lowtide.planning.planner import Problem
from lowtide.planning.profiling import Saved
from lowtide.planning.solvers import Item, path

_OPERANDS = {"query": ("q_proj", "query"), "key": ("k_proj", "key"), "value": ("v_proj", "value")}
_BUDGETS = (0.8, 0.7, 0.6, 0.57, 0.55)
"""As parts of the plain peak."""


def _maker(saved: Saved, made: dict[int, str], linear: dict[str, nn.Linear]) -> str | None:
    """The path of the linear layer whose result a tensor is."""
    if saved.block in made:
        return made[saved.block]
    for site in saved.sites:
        slot = site.slot
        if site.op == "Bmm":  # attention written out: values and keys differ by their last dimension
            slot = "query" if slot == "self" else "value" if saved.shape[-1] < saved.shape[-2] else "key"
            if saved.shape[-1] == saved.shape[-2]:
                continue
        for name in _OPERANDS.get(slot, ()):
            if f"{site.module}.{name}" in linear:
                return f"{site.module}.{name}"
    return None


def _with_products(problem: Problem, linear: dict[str, nn.Linear]) -> tuple[list[Item], int]:
    """The items with one more pick where there is a product, sources first; and the bytes of those."""
    profile = problem.profile
    made = {n: part.path for part in problem.plain.parts for n in part.outputs if part.path in linear}
    shares = {part.path: part.share for part in problem.plain.parts}
    read_by = {
        site.module: i
        for i, saved in enumerate(profile.saved)
        for site in saved.sites
        if site.op in ("Mm", "Addmm") and site.slot in ("self", "mat1")
    }
    items, nbytes = list(problem.items), 0
    sources = [list(item.sources) for item in items]
    for i, saved in enumerate(profile.saved):
        maker = _maker(saved, made, linear)
        source = None if maker is None else read_by.get(maker)
        if maker is None or source is None or sources[i] or not saved.has_values:
            continue
        weight = linear[maker].weight.detach()
        gain = float(weight.square().sum() / weight.shape[0])
        sources[i] = [(source, gain)]
        seconds = len(saved.decodings) * shares[maker] * profile.step_seconds
        items[i] = items[i]._replace(rebuilt_seconds=seconds)
        nbytes += saved.nbytes
    order: list[int] = []

    def place(i: int) -> None:
        if i not in order:
            for j, _ in sources[i]:
                place(j)
            order.append(i)

    for i in range(len(items)):
        place(i)
    rank = {i: k for k, i in enumerate(order)}
    return [items[i]._replace(sources=tuple((rank[j], gain) for j, gain in sources[i])) for i in order], nbytes


def _frontier(problems: Sequence[Problem], items: Sequence[Sequence[Item]]) -> list[tuple[int, float]]:
    """Peak and cost of every state of every problem."""
    return [
        (state.peak, state.cost + problem.cost)
        for problem, own in zip(problems, items, strict=True)
        for state in path(problem.base, own, price=problem.price)
    ]


def products(names: list[str], run: Run) -> None:
    """Rows of smallest peaks and of costs under budgets, as plans are and as they would be."""
    done = {(row["subject"], row["way"]) for row in read(PRODUCTS)}
    for name in names:
        model = SUBJECTS[name].model()
        linear = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
        wanted = [way for way in PLANS if (name, way) not in done]
        if not wanted:
            continue
        profile: lowtide.Profile = run.profile(name, model, SUBJECTS[name].make(SUBJECTS[name].size))
        for way in wanted:
            problems = Problem.all(profile, PLANS[way])
            more = [_with_products(problem, linear) for problem in problems]
            now = _frontier(problems, [problem.items for problem in problems])
            then = _frontier(problems, [items for items, _ in more])
            row = {"subject": name, "way": way, "plain": profile.peak, "nbytes": more[0][1]}
            row |= {"least": min(now)[0], "least_with_products": min(then)[0]}
            for part in _BUDGETS:
                for key, states in (("", now), ("_with_products", then)):
                    costs = [cost for peak, cost in states if peak <= part * profile.peak]
                    row[f"cost_at_{part}{key}"] = f"{min(costs):.4g}" if costs else ""
            add(PRODUCTS, row)
