"""Allocation against brute force, level tables against closed forms, tuners against hand-made decisions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide import levels
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


# ---------------------------------------------------------------- levels


def half_normal(bins=levels.BINS, spread=3.0):
    border = torch.arange(bins + 1, dtype=torch.float64) / bins
    return torch.erf(border * spread / math.sqrt(2)).diff()


def normal(bins=levels.BINS, spread=6.0):
    border = torch.arange(bins + 1, dtype=torch.float64) / bins
    return torch.erf((border - 0.5) * spread / math.sqrt(2)).diff()


def spiky(bins=levels.BINS):
    noise = (torch.arange(bins) * 7919 % 101).double()
    return torch.where(noise > 60, noise, 0.0)


DENSITIES = {
    "uniform": torch.ones(levels.BINS),
    "half-normal": half_normal(),
    "normal": normal(),
    "spiky": spiky(),
    "one bin": torch.eye(levels.BINS)[100],
}


def integral(density, a, b, weight, points=20_000):
    """Of ``weight(x)`` times a histogram's density from a to b, by the midpoint rule."""
    x = a + (torch.arange(points, dtype=torch.float64) + 0.5) * (b - a) / points
    share = density / density.sum() * len(density)
    return float((share[(x * len(density)).long().clamp(max=len(density) - 1)] * weight(x)).sum() * (b - a) / points)


@pytest.mark.parametrize("name", DENSITIES)
def test_variance_is_the_integral(name):
    density = DENSITIES[name].double()
    table = (0.0, 0.1234, 0.3, 0.77, 1.0)
    expected = sum(integral(density, a, b, lambda x: (x - a) * (b - x)) for a, b in itertools.pairwise(table))  # noqa: B023
    # The midpoint rule errs by a point's width at each of 512 jumps of the density: 512 / 20000 of a bin's share.
    assert levels.variance(table, density) == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_fitted_levels_are_the_best_of_all_on_the_grid(bits, seed):
    bins = 9 if bits == 2 else 11
    counts = (torch.arange(bins) * 31 + seed * 17) % 23 * ((torch.arange(bins) + seed) % 4 > 0)
    best = min(
        levels.variance((0.0, *(k / bins for k in inner), 1.0), counts)
        for inner in itertools.combinations(range(1, bins), 2**bits - 2)
    )
    fitted = levels.fit_levels(counts, bits)
    # Both are sums of a few float64.
    assert levels.variance(fitted, counts) <= best + 1e-14
    assert fitted[0] == 0.0
    assert fitted[-1] == 1.0
    assert len(fitted) == 2**bits
    assert all(a < b for a, b in itertools.pairwise(fitted))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("name", ["half-normal", "normal", "spiky"])
def test_fitted_levels_are_stationary(name, bits):
    density = DENSITIES[name].double()
    table = levels.fit_levels(density, bits)
    share = density / density.sum() * len(density)
    for a, k, b in zip(table, table[1:], table[2:], strict=False):
        slope = integral(density, a, k, lambda x: x - a) - integral(density, k, b, lambda x: b - x)  # noqa: B023
        # The slope rises by (b - a) p(k) for each unit of k, and is zero within one bin of a grid optimum.
        near = share[max(0, int(k * len(density)) - 1) : int(k * len(density)) + 1].max()
        assert abs(slope) <= float(near) * (b - a) / len(density) + 1e-4


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_even_values_give_even_levels(bits):
    assert levels.fit_levels(torch.ones(levels.BINS), bits) == levels.uniform_levels(bits)
    assert levels.fit_levels(torch.zeros(levels.BINS), bits) == levels.uniform_levels(bits)


def test_levels_are_denser_where_values_are():
    steps = [b - a for a, b in itertools.pairwise(levels.fit_levels(half_normal(), 3))]
    assert steps == sorted(steps)
    assert steps[0] < 1 / 7 < steps[-1]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", DENSITIES)
def test_fitted_levels_are_no_worse_than_even_ones(name, bits):
    density = DENSITIES[name]
    fitted, even = (
        levels.variance(t, density) for t in (levels.fit_levels(density, bits), levels.uniform_levels(bits))
    )
    assert fitted <= even
    if name == "half-normal" and bits in (2, 3):
        assert fitted < 0.8 * even


def test_rounding_at_random_has_the_variance_that_is_computed():
    density, table = half_normal(), torch.tensor(levels.fit_levels(half_normal(), 3), dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    n = 400_000
    bins = torch.multinomial(density, n, replacement=True, generator=generator)
    x = (bins + torch.rand(n, generator=generator, dtype=torch.float64)) / levels.BINS
    upper = torch.searchsorted(table, x).clamp(1, len(table) - 1)
    low, high = table[upper - 1], table[upper]
    up = torch.rand(n, generator=generator, dtype=torch.float64) < (x - low) / (high - low)
    square = (torch.where(up, high, low) - x).square()
    # Five standard errors of the mean of the squares, and of the mean.
    assert abs(square.mean() - levels.variance(table.tolist(), density)) < 5 * square.std() / math.sqrt(n)
    error = torch.where(up, high, low) - x
    assert abs(error.mean()) < 5 * error.std() / math.sqrt(n)


def positions(x, row, group, positive):
    """The same counts, one value at a time."""
    counts = [0] * levels.BINS
    rows = x.view(-1, row).tolist()
    for line in rows:
        for start in range(0, row, group):
            members = [v for v in line[start : start + group] if not (positive and v <= 0)]
            if not members or not all(map(math.isfinite, members)):
                continue
            low, high = min(members), max(members)
            for v in members:
                if low < v < high:
                    at = torch.tensor(v) - torch.tensor(low)
                    counts[int(at / (torch.tensor(high) - torch.tensor(low)) * levels.BINS)] += 1
    return counts


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize(("row", "group"), [(50, 16), (50, 64), (48, 16), (7, 7)])
def test_histogram_counts_positions_within_groups(row, group, positive):
    x = torch.randn(20 * row)
    x[:row] = 3.0
    x[row + 1], x[2 * row + 2], x[3 * row :][:row] = math.nan, math.inf, -1.0
    assert levels.histogram(x, row, group, positive).tolist() == positions(x, row, group, positive)
    assert levels.histogram(x.relu(), row, group, positive).tolist() == positions(x.relu(), row, group, positive)
    assert levels.histogram(x[:0], row, group, positive).sum() == 0


def test_histogram_takes_the_sign_of_its_source():
    x = torch.randn(64)
    shifted = x + 5.0
    counted = levels.histogram(shifted, 64, 64, True, source=x)
    assert counted.sum() == (x > 0).sum() - 2
    assert levels.histogram(shifted, 64, 64, True).sum() == 62


def test_histogram_of_a_large_tensor_looks_at_a_bounded_part():
    x = torch.randn(3 << 20)
    counted = int(levels.histogram(x, 3 << 19, 256, False).sum())
    assert (1 << 16) < counted <= (1 << 18)
    # A group of 256 has two ends that are not counted; ranges of normal values leave the shape of a normal.
    assert levels.histogram(x, 3 << 19, 256, False)[200:312].sum() > 0.4 * counted


@pytest.mark.parametrize(("shape", "scale"), [(1.0, 0.05), (2.0, 0.3), (3.6, 0.5)])
def test_weibull_densities_are_found_again(shape, scale):
    border = torch.arange(levels.BINS + 1, dtype=torch.float64) / levels.BINS
    counts = (-torch.expm1(-((border / scale) ** shape))).diff()
    found = levels.fit_weibull(counts)
    # At most exp(-(1 / 0.3)**2) = 1.5e-5 of the values lie beyond 1, where x**2 is a dozen times its mean; taking the
    # density as constant within bins changes the second moment by about (1 / 512 / scale)**2 = 1.5e-3 of it.
    assert found.shape == pytest.approx(shape, rel=5e-3)
    assert found.scale == pytest.approx(scale, rel=5e-3)
    assert levels.fit_levels(counts, 3) == levels.weibull_levels(levels.Weibull(shape, scale), 3)


@pytest.mark.parametrize("name", ["uniform", "half-normal", "normal", "spiky"])
def test_a_fitted_weibull_density_has_the_moments_of_the_histogram(name):
    share = DENSITIES[name].double() / DENSITIES[name].sum()
    middle = (torch.arange(levels.BINS, dtype=torch.float64) + 0.5) / levels.BINS
    mean = float((share * middle).sum())
    square = float((share * (middle.square() + 1 / levels.BINS**2 / 12)).sum())
    shape, scale = levels.fit_weibull(DENSITIES[name])
    assert scale * math.gamma(1 + 1 / shape) == pytest.approx(mean, rel=1e-9)
    assert scale**2 * math.gamma(1 + 2 / shape) == pytest.approx(square, rel=1e-9)


def test_a_wrong_family_costs_variance_and_never_more_than_a_histogram_saves():
    density = torch.cat([half_normal(256), half_normal(256)])  # two humps: no Weibull density
    published = levels.weibull_levels(levels.fit_weibull(density), 3)
    assert levels.variance(levels.fit_levels(density, 3), density) < levels.variance(published, density)


def test_wrong_level_requests_are_named():
    with pytest.raises(ValueError, match="4 bits need a histogram of at least 15 bins; got 14"):
        levels.fit_levels(torch.ones(14), 4)
    with pytest.raises(ValueError, match="empty histogram"):
        levels.fit_weibull(torch.zeros(512))
    assert math.isnan(levels.variance((0.0, 1.0), torch.zeros(4)))
