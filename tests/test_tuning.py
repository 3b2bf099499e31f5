"""Allocation against brute force, level tables against closed forms, tuners against hand-made decisions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.allocation import allocate, choose

# ---------------------------------------------------------------- bits


def objective(cost, bits):
    return math.fsum(c / (2**b - 1) ** 2 for c, b in zip(cost, bits, strict=True))


def optimum(cost, weight, budget, widths):
    feasible = (
        bits
        for bits in itertools.product(widths, repeat=len(cost))
        if sum(w * b for w, b in zip(weight, bits, strict=True)) <= budget
    )
    return min(objective(cost, bits) for bits in feasible)


costs = st.lists(st.floats(0.0, 1e6) | st.sampled_from([0.0, 1.0, 1e-30, 1e30]), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cost=costs, extra=st.integers(0, 20), weight=st.integers(1, 5))
def test_bits_of_equal_weight_are_optimal(cost, extra, weight):
    widths = (1, 2, 3, 4, 5, 6)
    budget = weight * len(cost) + extra
    bits = allocate(torch.tensor(cost, dtype=torch.float64), weight, budget, widths).tolist()
    assert sum(bits) * weight <= budget
    # Sums of a few float64: the two objectives may differ by rounding only.
    assert objective(cost, bits) <= optimum(cost, [weight] * len(cost), budget, widths) * (1 + 1e-12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    cost=costs,
    weight=st.lists(st.integers(1, 50), min_size=4, max_size=4),
    extra=st.integers(0, 300),
    widths=st.sampled_from([(1, 2, 4, 8), (2, 3, 5), (1, 4, 5), (1, 2, 3, 4, 5), (4,)]),
)
def test_bits_of_unequal_weight_are_within_one_step_of_the_optimum(cost, weight, extra, widths):
    weight = weight[: len(cost)]
    least = widths[0] * sum(weight)
    bits = allocate(torch.tensor(cost, dtype=torch.float64), torch.tensor(weight), least + extra, widths).tolist()
    assert sum(w * b for w, b in zip(weight, bits, strict=True)) <= least + extra
    after = dict(itertools.pairwise(widths))
    # The step that ended the greedy order is the next one of some item, and small enough for the whole room.
    gains = [
        c / (2**b - 1) ** 2 - c / (2 ** after[b] - 1) ** 2
        for c, w, b in zip(cost, weight, bits, strict=True)
        if b in after and w * (after[b] - b) <= extra
    ]
    bound = optimum(cost, weight, least + extra, widths) + max(gains, default=0.0)
    assert objective(cost, bits) <= bound * (1 + 1e-12)
    if len({*weight}) * len({b - a for a, b in itertools.pairwise(widths)}) <= 8:  # then nothing that fits is left out
        left = least + extra - sum(w * b for w, b in zip(weight, bits, strict=True))
        assert all(w * (after[b] - b) > left for w, b in zip(weight, bits, strict=True) if b in after)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-40, 3e38, math.nan, -1.0, math.inf])
def test_equal_costs_give_level_bits(value):
    cost = torch.full((32,), value)
    assert allocate(cost, 1, 64).tolist() == [2] * 32
    assert allocate(cost, 1, 72).tolist() == [3] * 8 + [2] * 24
    assert allocate(cost, 100, 6450).tolist() == [2] * 32
    assert allocate(cost, 1, 10**9).tolist() == [8] * 32
    # With gaps 28 bits are left over four bits: seven steps of four fit.
    assert allocate(cost, 1, 4 * 32 + 30, (1, 2, 4, 8)).tolist() == [8] * 7 + [4] * 25


def test_a_broken_cost_counts_as_the_largest_and_starves_nobody():
    sound = torch.tensor([4.0, 1.0, 16.0, 16.0])
    for broken in (math.nan, math.inf, -math.inf, -1.0):
        cost = torch.tensor([4.0, 1.0, 16.0, broken])
        assert allocate(cost, 1, 11).tolist() == allocate(sound, 1, 11).tolist()


def test_steps_are_ordered_by_gain_for_their_size():
    # Raising the first item from 2 to 4 bits gains 0.107 for two bits, each of the others 0.071 for one.
    assert allocate(torch.tensor([1.0, 0.08, 0.08]), 1, 6, (1, 2, 4)).tolist() == [2, 2, 2]
    # The first two items gain as much as the third at a tenth of its weight.
    assert allocate(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1, 1, 10]), 12 + 10).tolist() == [6, 6, 1]


def test_a_budget_may_be_a_tensor():
    cost = torch.tensor([4.0, 1.0, 16.0])
    for budget in range(3, 25):
        assert allocate(cost, 1, torch.tensor(budget)).tolist() == allocate(cost, 1, budget).tolist()
    assert allocate(cost, 1, torch.tensor(0)).tolist() == [1, 1, 1]


def test_wrong_budgets_weights_and_widths_are_named():
    cost = torch.ones(3)
    with pytest.raises(ValueError, match=r"budget of 5 .* total weight 6 need at least 6"):
        allocate(cost, 2, 5)
    with pytest.raises(ValueError, match="at least 1; got 0"):
        allocate(cost, torch.tensor([1, 0, 1]), 5)
    with pytest.raises(ValueError, match="one length"):
        allocate(cost, torch.tensor([1, 1]), 5)
    with pytest.raises(ValueError, match="whole numbers"):
        allocate(cost, torch.ones(3), 5)
    with pytest.raises(ValueError, match="widths"):
        allocate(cost, 1, 5, (0, 1))
    assert allocate(torch.ones(0), 1, 0).tolist() == []


# ---------------------------------------------------------------- options

option = st.tuples(st.floats(0.0, 100.0) | st.sampled_from([0.0, 1.0]), st.integers(0, 40))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(sites=st.lists(st.lists(option, min_size=1, max_size=5), min_size=1, max_size=4), extra=st.integers(0, 120))
def test_chosen_options_are_within_one_gain_of_the_optimum_and_the_budget(sites, extra):
    cost = [[e for e, _ in options] for options in sites]
    nbytes = [[b for _, b in options] for options in sites]
    least = sum(map(min, nbytes))
    chosen = choose(cost, nbytes, least + extra)

    def total(table, picked):
        return math.fsum(row[k] for row, k in zip(table, picked, strict=True))

    def feasible(picked):
        return total(nbytes, picked) <= least + extra

    assert feasible(chosen)
    best = min(total(cost, p) for p in itertools.product(*(range(len(o)) for o in sites)) if feasible(p))
    # One option's gain: from the one chosen to any that could be had if the whole room were given to its site.
    gain = max(
        errors[k] - min(e for e, b in zip(errors, sizes, strict=True) if b <= min(sizes) + extra)
        for errors, sizes, k in zip(cost, nbytes, chosen, strict=True)
    )
    assert total(cost, chosen) <= best + gain + 1e-9
    for i, errors in enumerate(cost):  # no single change that fits would help
        for k, error in enumerate(errors):
            changed = [*chosen[:i], k, *chosen[i + 1 :]]
            assert not (feasible(changed) and error < errors[chosen[i]])


def test_options_off_the_hull_use_what_is_left():
    # Error per byte makes (12, 0.0) the only step, which does not fit; (11, 9.9) lies above the hull and does.
    assert choose([[10.0, 9.9, 0.0]], [[10, 11, 12]], 11) == [1]
    # Here both fit the site alone, so the hull has them in view of the whole room.
    assert choose([[10.0, 9.9, 0.0], [10.0, 0.0, 0.0]], [[10, 11, 12], [10, 11, 11]], 22) == [1, 1]


def test_steps_go_along_the_hull_in_order():
    # The first site's middle option gains little, yet the way beyond it gains most for its bytes.
    assert choose([[10.0, 9.0, 0.0], [10.0, 7.0]], [[0, 5, 10], [0, 10]], 10) == [2, 0]
    # The step to ten bytes does not fit beside the second site's, so the small one beyond it is out of reach.
    assert choose([[10.0, 1.0, 0.9], [10.0, 0.0]], [[0, 10, 12], [0, 5]], 13) == [0, 1]
    # Twelve bytes can never be had, so they do not hide the option of ten.
    assert choose([[10.0, 5.0, 0.0], [10.0, 6.0]], [[0, 10, 12], [0, 10]], 10) == [1, 0]


def test_an_error_that_is_not_finite_is_worse_than_all_others():
    cost = [[math.nan, 1.0], [50.0, 0.0], [math.inf, 2.0]]
    assert choose(cost, [[1, 2], [1, 2], [1, 2]], 5) == [1, 0, 1]


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match=r"budget of 4 bytes .* all 2 sites take 5 bytes"):
        choose([[1.0], [1.0, 0.5]], [[3], [2, 9]], 4)
    with pytest.raises(ValueError, match="same options"):
        choose([[1.0]], [[1, 2]], 4)
    with pytest.raises(ValueError, match="at least one"):
        choose([[]], [[]], 4)
    assert choose([], [], 0) == []
