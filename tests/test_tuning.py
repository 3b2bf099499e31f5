"""Allocation against brute force, level tables against closed forms, tuners against hand-made decisions."""

from __future__ import annotations

import heapq
import importlib
import io
import itertools
import json
import math
import random
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowtide.codecs import BlockMean, Cast, GroupQuant, SampleQuant, TensorMeta
from lowtide.codecs.groups import share_bits
from lowtide.graph.capture import Site
from lowtide.graph.rules import Need
from lowtide.kernels import ops
from lowtide.policy.choice import Choice
from lowtide.policy.solve import allocate, assign, choose
from lowtide.policy.tuners import fitting as levels
from lowtide.policy.tuners.base import Wanted
from lowtide.policy.tuners.levels import LevelTuner
from lowtide.policy.tuners.samples import SampleTuner, taps
from lowtide.policy.use import Use


def codec_of(tuner, use, tensor, base):
    """The codec that a tuner chooses in place of ``base``."""
    return tuner.choose(use, tensor, Choice.store(base)).codec


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
@given(cost=costs, extra=st.integers(0, 30), least=st.integers(1, 8))
def test_shared_bits_are_optimal_and_have_the_sum_that_the_host_expects(cost, extra, least):
    total = len(cost) * least + extra
    bits = share_bits(torch.tensor(cost, dtype=torch.float64), total, least).tolist()
    assert sum(bits) == min(total, 8 * len(cost))
    assert min(bits) >= least
    # Sums of a few float64: the two objectives may differ by rounding only.
    assert objective(cost, bits) <= optimum(cost, [1] * len(cost), total, range(least, 9)) * (1 + 1e-12)
    assert bits == allocate(torch.tensor(cost, dtype=torch.float64), 1, total, floors=[least] * len(cost)).tolist()


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
        assert allocate(cost, 1, 11).tolist() == allocate(sound, 1, 11).tolist() == share_bits(cost, 11).tolist()


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


def test_sites_trade_where_one_is_large():
    """Without trades one in eight would be above the best of all choices by more than a tenth, the worst by 85 %."""
    rng = random.Random(5)
    excess = []
    for _ in range(100):
        sizes = [rng.choice([1, 2, 4]) for _ in range(6)]
        sizes[rng.randrange(6)] *= 10
        weights = [size * 10 ** rng.uniform(-1, 1) for size in sizes]
        cost = [[weight / 4**bits for bits in (2, 3, 4, 5)] for weight in weights]
        nbytes = [[size * bits for bits in (2, 3, 4, 5)] for size in sizes]
        budget = int(sum(sizes) * rng.uniform(2, 5))

        def total(table, picked):
            return sum(row[k] for row, k in zip(table, picked, strict=True))

        chosen = choose(cost, nbytes, budget)
        assert total(nbytes, chosen) <= budget
        picks = itertools.product(range(4), repeat=6)
        excess.append(total(cost, chosen) / min(total(cost, p) for p in picks if total(nbytes, p) <= budget))
    assert sum(e > 1 + 1e-9 for e in excess) <= 20
    assert max(excess) < 1.1


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


def test_wrong_level_requests_are_named():
    with pytest.raises(ValueError, match="4 bits need a histogram of at least 15 bins; got 14"):
        levels.fit_levels(torch.ones(14), 4)
    assert math.isnan(levels.variance((0.0, 1.0), torch.zeros(4)))


# ---------------------------------------------------------------- tuners


def range_energy(x, row, group, positive):
    """The sum of squared ranges of a row's groups, one group at a time."""
    assert not positive
    rows = x.double().view(-1, row)
    found = [sum((g.max() - g.min()).square() for g in line.split(group)) for line in rows]
    return torch.stack(found).float()


@pytest.fixture
def stand_ins(monkeypatch):
    """Decisions are tested against a plain sum of ranges."""
    monkeypatch.setattr(ops, "range_energy", range_energy, raising=False)


CONV = [Site(f"conv{i}", "Convolution", "input", 0) for i in range(4)]
NORM = Site("norm", "NativeBatchNorm", "input", 0)
BASE = GroupQuant(2, 16, "sample")


def use_of(tensor, *sites, need=Need.LINEAR):
    return Use(need, TensorMeta.of(tensor), True, sites)


def maps(scales, shape=(4, 6, 6), seed=0):
    """One sample for each scale."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(scales), *shape, generator=generator) * torch.tensor(scales).view(-1, 1, 1, 1)


def bits_of(codec, tensor):
    if isinstance(codec, GroupQuant):
        return [codec.bits] * len(tensor)
    return codec.encode(tensor, key=0).buffers[2].tolist()


def decide(tuner, site, tensor, need=Need.LINEAR, base=BASE):
    return bits_of(codec_of(tuner, use_of(tensor, site, need=need), tensor, base), tensor)


def greedy(cost, weight, budget):
    """ActNN's own way, from one bit up: the best step, one at a time, until the best does not fit."""
    bits = [1] * len(cost)
    left = budget - sum(weight)

    def entry(i):
        b = bits[i]
        return -cost[i] * (1 / (2**b - 1) ** 2 - 1 / (2 ** (b + 1) - 1) ** 2) / weight[i], b, i

    heap = [entry(i) for i in range(len(cost))]
    heapq.heapify(heap)
    while heap:
        i = heapq.heappop(heap)[2]
        if weight[i] > left:
            continue
        bits[i], left = bits[i] + 1, left - weight[i]
        if bits[i] < 8:
            heapq.heappush(heap, entry(i))
    return bits


def energies(tensor, group=16):
    return range_energy(tensor.reshape(-1), tensor[0].numel(), group, False).double().tolist()


def test_use_is_still_found_among_methods():
    assert importlib.import_module("lowtide.policy.methods").Use is Use


@pytest.mark.usefixtures("stand_ins")
def test_samples_of_a_layer_share_its_bits_by_their_ranges():
    tuner = SampleTuner(2, 16)
    tuner.begin(0)
    x = maps([0.1, 1.0, 1.0, 10.0, 3.0])
    found = decide(tuner, CONV[0], x)
    assert found == greedy(energies(x), [1] * 5, 10)
    assert found[0] < found[3]
    codec = codec_of(tuner, use_of(x, CONV[0]), x, BASE)
    assert codec == SampleQuant(10, 5, 1, 16)
    assert tuner.seconds() > 0


@pytest.mark.usefixtures("stand_ins")
def test_samples_that_must_have_equal_bits_get_the_plain_codec():
    x = torch.ones(1, 4, 6, 6).repeat(6, 1, 1, 1)
    for bits in (1, 8):
        assert codec_of(SampleTuner(bits, 16), use_of(x, CONV[0]), x, BASE) == GroupQuant(bits, 16, "sample")
    assert codec_of(SampleTuner(3, 16), use_of(x[:1], CONV[0]), x[:1], BASE) == GroupQuant(3, 16, "sample")
    tuner = SampleTuner(3, 16)
    tuner.begin(0)
    for value in (x, x * math.nan, x.cumsum(1)):
        assert decide(tuner, CONV[0], value) == [3] * 6
    half = SampleTuner(2.5, 16)
    assert decide(half, CONV[0], x) == [3, 3, 3, 2, 2, 2]


@pytest.mark.usefixtures("stand_ins")
def test_everything_else_is_left_as_it_is():
    tuner = SampleTuner(2, 16)
    tuner.begin(0)
    x = maps([1.0, 5.0])
    for base, need in (
        (GroupQuant(2, 16, "row"), Need.LINEAR),
        (BlockMean(4, 2, 2), Need.LINEAR),
        (Cast(), Need.LINEAR),
        (BASE, Need.PROPAGATE),
        (BASE, Need.EXPONENT),
    ):
        assert codec_of(tuner, use_of(x, CONV[1], need=need), x, base) is base
    assert codec_of(tuner, use_of(x[:0], CONV[1]), x[:0], BASE) is BASE
    assert tuner.wants(CONV[1], Need.LINEAR) is Wanted.NOTHING
    assert tuner.wants(CONV[2], Need.LINEAR) is Wanted.GRADIENT
    assert tuner.wants(NORM, Need.BATCH) is Wanted.NOTHING
    tuner.observe(CONV[2], torch.ones(3, 3))
    assert tuner.state_dict() == {"refreshed": None, "layers": [], "sensitivity": []}


def step(tuner, number, tensors, gradients):
    """One step: every tensor stored, then every gradient seen, as backward does, from the end."""
    tuner.begin(number)
    found = {site: decide(tuner, site, x) for site, x in tensors.items()}
    for site in reversed(list(gradients)):
        if tuner.wants(site, Need.LINEAR) is Wanted.GRADIENT:
            tuner.observe(site, gradients[site])
    return found


TENSORS = {
    CONV[0]: maps([1.0, 2.0, 0.5, 1.0], (3, 8, 8), 1),
    CONV[1]: maps([0.3, 0.3, 4.0, 1.0], (4, 4, 4), 2),
    CONV[2]: maps([1.0, 1.0, 1.0, 1.5, 0.7, 9.0], (5, 2, 2), 3),  # its own number of samples, as in a detection head
}
GRADIENTS = {
    CONV[0]: maps([0.1, 0.2, 0.1, 0.1], (4, 8, 8), 4),
    CONV[1]: maps([10.0, 10.0, 20.0, 10.0], (5, 4, 4), 5),
    CONV[2]: maps([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], (2, 2, 2), 6),
}
TAPS = {"conv0": 9.0, "conv1": 1.0, "conv2": 4.5}


def pooled(tensors, gradients, bits, taps):
    """Bits in total for each layer, by the greedy on all samples of all layers."""
    cost, weight, owner = [], [], []
    for site, x in tensors.items():
        sensitivity = float(gradients[site].double().square().flatten(1).sum(1).mean())
        for energy in energies(x):
            cost.append(sensitivity * taps.get(site.module, 1.0) * energy / math.prod(x.shape[2:]))
            weight.append(x[0].numel())
            owner.append(site)
    won = greedy(cost, weight, int(bits * sum(weight)))
    return {site: sum(b for b, o in zip(won, owner, strict=True) if o == site) for site in tensors}


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("bits", [1, 1.5, 2, 4, 8])
@pytest.mark.parametrize("taps", [TAPS, {}])
def test_layers_compete_for_the_bits_in_the_second_step(bits, taps):
    tuner = SampleTuner(bits, 16, taps=taps)
    first = step(tuner, 0, TENSORS, GRADIENTS)
    second = step(tuner, 1, TENSORS, GRADIENTS)
    won = pooled(TENSORS, GRADIENTS, bits, taps)
    for site, x in TENSORS.items():
        assert first[site] == greedy(energies(x), [1] * len(x), int(bits * len(x)))
        assert second[site] == greedy(energies(x), [1] * len(x), won[site])
    values = sum(x.numel() for x in TENSORS.values())
    stored = sum(b * x[0].numel() for site, x in TENSORS.items() for b in second[site])
    assert stored <= bits * values
    if bits == 2:
        assert sum(second[CONV[1]]) > sum(first[CONV[1]])
        assert len({tuple(pooled(TENSORS, GRADIENTS, bits, t).items()) for t in (TAPS, {})}) == 2


@pytest.mark.usefixtures("stand_ins")
def test_a_batch_norm_takes_the_bits_of_the_layer_before_it():
    tuner = SampleTuner(2, 16)
    y = maps([1.0, 1.0, 2.0, 7.0, 1.0, 0.1, 3.0, 1.0], (3, 5, 5), 7)
    tuner.begin(0)
    assert decide(tuner, NORM, y, Need.BATCH) == greedy(energies(y), [1] * 8, 16)
    step(tuner, 0, TENSORS, GRADIENTS)
    won = pooled(TENSORS, GRADIENTS, 2, {})
    tuner.begin(1)
    assert decide(tuner, NORM, y, Need.BATCH) == greedy(energies(y), [1] * 8, 16)
    for site, x in TENSORS.items():
        decide(tuner, site, x)
        share = won[site] * len(y) // len(x)
        assert decide(tuner, NORM, y, Need.BATCH) == greedy(energies(y), [1] * 8, share)
    assert {tuple(row["sites"][0]) for row in tuner.state_dict()["layers"]} == set(TENSORS)


@pytest.mark.usefixtures("stand_ins")
def test_a_tensor_of_two_layers_costs_what_both_lose():
    x, other = TENSORS[CONV[0]], TENSORS[CONV[1]]
    tuner = SampleTuner(2, 16)
    relu = Site("relu", "Relu", "result", 0)
    seen = {site: torch.full((4, 9), value) for site, value in ((CONV[0], 2.0), (CONV[1], 3.0), (CONV[2], 2.5))}
    for number in range(2):
        tuner.begin(number)
        codec = codec_of(tuner, use_of(x, relu, CONV[0], CONV[2]), x, BASE)
        decide(tuner, CONV[1], other)
        for site, gradient in seen.items():
            tuner.observe(site, gradient)
    pair = {CONV[0]: x, CONV[1]: other}
    won = pooled(pair, {**seen, CONV[0]: torch.full((4, 9), math.hypot(2.0, 2.5))}, 2, {})[CONV[0]]
    assert won != pooled(pair, {**seen, CONV[0]: seen[CONV[2]]}, 2, {})[CONV[0]], "the larger alone would do as well"
    assert bits_of(codec, x) == greedy(energies(x), [1] * 4, won)


@pytest.mark.usefixtures("stand_ins")
def test_batches_may_vary_and_layers_may_come_and_go():
    tuner = SampleTuner(2, 16)
    step(tuner, 0, TENSORS, GRADIENTS)
    won = pooled(TENSORS, GRADIENTS, 2, {})
    small = {CONV[0]: TENSORS[CONV[0]][:3], CONV[1]: TENSORS[CONV[1]][:1]}
    found = step(tuner, 1, small, {})  # a smaller batch, and a layer less
    for site, x in small.items():
        assert found[site] == greedy(energies(x), [1] * len(x), won[site] * len(x) // len(TENSORS[site]))
    # Those two compete alone now, with the gradients they had; the third keeps its share for when it is back.
    again = pooled(small, GRADIENTS, 2, {})
    fresh = {**small, CONV[2]: TENSORS[CONV[2]], CONV[3]: maps([1.0, 3.0])}
    found = step(tuner, 2, fresh, {})
    assert found[CONV[0]] == greedy(energies(small[CONV[0]]), [1] * 3, again[CONV[0]])
    assert found[CONV[2]] == greedy(energies(TENSORS[CONV[2]]), [1] * 6, won[CONV[2]])
    assert found[CONV[3]] == greedy(energies(fresh[CONV[3]]), [1] * 2, 4)  # new, and its gradient not seen yet
    tuner.begin(3)
    before = tuner.state_dict()
    tuner.begin(4)
    assert tuner.state_dict() == before  # a forward that stored nothing changes no share


@pytest.mark.usefixtures("stand_ins")
def test_accumulated_backwards_keep_the_last_gradient():
    tuner, plain = SampleTuner(2, 16), SampleTuner(2, 16)
    tuner.begin(0)
    for part in (slice(0, 2), slice(2, 4)):
        for site in (CONV[0], CONV[1]):
            decide(tuner, site, TENSORS[site][part])
        for site in (CONV[1], CONV[0]):
            tuner.observe(site, GRADIENTS[site][part])
    late = {site: TENSORS[site][2:] for site in (CONV[0], CONV[1])}
    step(plain, 0, late, {site: GRADIENTS[site][2:] for site in late})
    assert step(tuner, 1, late, {}) == step(plain, 1, late, {})


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("broken", [math.nan, math.inf, 0.0])
def test_a_broken_gradient_starves_nobody(broken):
    tuner = SampleTuner(2, 16)
    for number in range(2):
        step(tuner, number, TENSORS, {**GRADIENTS, CONV[0]: GRADIENTS[CONV[0]] * broken})
    found = step(tuner, 2, TENSORS, {})
    stored = sum(b * x[0].numel() for site, x in TENSORS.items() for b in found[site])
    assert stored <= 2 * sum(x.numel() for x in TENSORS.values())
    assert max(found[CONV[1]]) > 1
    assert max(found[CONV[2]]) > 1


@pytest.mark.usefixtures("stand_ins")
def test_shares_stand_until_the_next_refresh():
    tuner = SampleTuner(2, 16, refresh=3)
    results = [
        step(tuner, n, TENSORS, {s: g * (n + 1) ** i for i, (s, g) in enumerate(GRADIENTS.items())}) for n in range(6)
    ]
    assert results[0] != results[1]  # the first competition is due as soon as gradients are known
    assert results[1] == results[2] == results[3]
    assert results[3] != results[4]
    assert results[4] == results[5]


def through_json(state):
    return json.loads(json.dumps(state))


def through_torch(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("save", [through_json, through_torch])
def test_bits_resume_exactly(save):
    def changed(number):
        return {site: x * (1 + 0.37 * number * i) for i, (site, x) in enumerate(TENSORS.items())}

    def gradients(number):
        return {site: g * math.exp(math.sin(number * (i + 1))) for i, (site, g) in enumerate(GRADIENTS.items())}

    straight, resumed = SampleTuner(2, 16, 3), SampleTuner(2, 16, 3)
    for number in range(3):
        step(straight, number, changed(number), gradients(number))
    straight.observe(CONV[2], GRADIENTS[CONV[2]] * math.nan)
    resumed.load_state_dict(save(straight.state_dict()))
    for number in range(3, 8):
        now = changed(number), gradients(number)
        assert step(straight, number, *now) == step(resumed, number, *now)
        assert str(straight.state_dict()) == str(resumed.state_dict())
    with pytest.raises(ValueError, match="expected a state with the keys"):
        resumed.load_state_dict({"tables": []})


@pytest.mark.usefixtures("stand_ins")
def test_gradients_are_wanted_only_before_bits_are_divided():
    tuner = SampleTuner(2, 16, 3)
    wanted = []
    for number in range(8):
        step(tuner, number, TENSORS, GRADIENTS)
        wanted.append(tuner.wants(CONV[0], Need.LINEAR) is Wanted.GRADIENT)
    # The first division is in step 1, from the gradients of step 0; then every third, each from the step before.
    assert wanted == [True, False, False, True, False, False, True, False]


def test_taps_count_the_weights_a_value_meets():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv1d(4, 4, 5, groups=4), nn.Linear(2, 2), nn.Conv3d(1, 1, (1, 2, 3)))
    assert taps(model) == {"0": 9.0, "1": 1.25, "3": 6.0}


def test_wrong_settings_of_tuners_are_named():
    for bits in (0, 0.5, 9):
        with pytest.raises(ValueError, match="bits must be from 1 to 8"):
            SampleTuner(bits, 16)
    with pytest.raises(ValueError, match="group"):
        SampleTuner(2, 0)
    with pytest.raises(ValueError, match="refresh"):
        SampleTuner(2, 16, 0)
    with pytest.raises(ValueError, match="refresh"):
        LevelTuner(0)


# Codecs with levels; those of the library, if they have the field.


@dataclass(frozen=True)
class _Groups(GroupQuant):
    levels: tuple[float, ...] | None = None


@dataclass(frozen=True)
class _Blocks(BlockMean):
    levels: tuple[float, ...] | None = None


Groups = GroupQuant if "levels" in {f.name for f in fields(GroupQuant)} else _Groups
Blocks = BlockMean if "levels" in {f.name for f in fields(BlockMean)} else _Blocks


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.usefixtures("stand_ins")
def test_levels_are_those_of_the_values_at_hand(bits):
    tuner = LevelTuner()
    tuner.begin(0)
    base = Groups(bits, 16, "sample")
    x = maps([1.0, 2.0, 3.0], (8, 10, 10)).exp()
    for site, value, positive in ((CONV[0], x - 1.5, False), (CONV[1], (x - 1.5).relu(), True)):
        codec = codec_of(tuner, use_of(value, site), value, base)
        expected = levels.fit_levels(levels.histogram(value.view(-1), 800, 16, positive), bits)
        assert codec == replace(base, levels=expected)
        assert expected != levels.uniform_levels(bits)
    assert codec_of(tuner, use_of(x, CONV[0]), x, base).levels != codec.levels
    assert tuner.seconds() > 0
    last = x.to(memory_format=torch.channels_last)
    codec = codec_of(tuner, use_of(last, CONV[2]), last, base)
    flat = x.permute(0, 2, 3, 1).reshape(-1)
    assert codec.levels == levels.fit_levels(levels.histogram(flat, 800, 16, True), bits)


@pytest.mark.parametrize("rectified", [False, True])
def test_levels_of_block_means_are_those_of_differences(rectified):
    x = maps([1.0, 2.0, 3.0], (4, 8, 8)).exp() - 1.5
    x = x.relu() if rectified else x
    means = nn.functional.avg_pool2d(x, 4)
    difference = x - means.repeat_interleave(4, 2).repeat_interleave(4, 3)
    counts = levels.histogram(difference.view(-1), 256, 64, rectified, source=x.view(-1))
    base = Blocks(4, 2, 2, 64)
    tuner = LevelTuner()
    codec = codec_of(tuner, use_of(x, NORM, need=Need.BATCH), x, base)
    # Pooled means may differ in the last bit, which moves a value across a border of bins at most here and there.
    assert codec == replace(base, levels=codec.levels)
    assert levels.variance(codec.levels, counts) == pytest.approx(
        levels.variance(levels.fit_levels(counts, 2), counts), rel=1e-3
    )
    plain = levels.fit_levels(levels.histogram(x.view(-1), 256, 64, rectified), 2)
    assert codec.levels != plain


def test_tables_are_fitted_again_when_they_are_due():
    tuner = LevelTuner(refresh=10)
    base = Groups(2, 64, "sample")
    tables = {}
    for number in range(25):
        tuner.begin(number)
        x = maps([1.0, 1.0], (8, 8, 8)).exp() ** (1 + number / 10)
        for _ in range(2):  # two forwards in one step
            tables[number] = codec_of(tuner, use_of(x, CONV[0]), x, base).levels
        if number == 5:
            late = codec_of(tuner, use_of(x, CONV[1]), x, base).levels
            assert late != tables[5]
    changes = [n for n in range(1, 25) if tables[n] != tables[n - 1]]
    assert changes == [10, 20]


def test_codecs_without_inner_levels_stay():
    tuner = LevelTuner()
    x = maps([1.0, 1.0], (8, 8, 8)).exp()
    for base in (Groups(1, 64, "sample"), Groups(8, 64, "row"), Cast(), Blocks(4, 2, 0), Blocks(4, 2, 2, 64, True)):
        assert codec_of(tuner, use_of(x, CONV[0]), x, base) is base
    constant = torch.ones(2, 3, 4, 4)
    base = Groups(2, 64, "sample")
    assert codec_of(tuner, use_of(constant, CONV[1]), constant, base) is base
    assert codec_of(tuner, use_of(constant, CONV[2]), constant * math.nan, base) is base
    assert codec_of(tuner, use_of(constant[:0], CONV[3]), constant[:0], base) is base
    wide = Groups(4, 64, "sample")  # the bits of a site may change
    assert len(codec_of(tuner, use_of(x, CONV[1]), x, wide).levels) == 16


@pytest.mark.parametrize("save", [through_json, through_torch])
def test_levels_resume_exactly(save):
    base = Groups(2, 32, "sample")
    straight, resumed = LevelTuner(4), LevelTuner(4)

    def run(tuner, number):
        tuner.begin(number)
        values = [maps([1.0, 2.0], (4, 6, 6), number + i).exp() for i in range(2)] + [torch.ones(1, 2, 4, 4)]
        return [codec_of(tuner, use_of(x, CONV[i]), x, base) for i, x in enumerate(values)]

    for number in range(3):
        run(straight, number)
    resumed.load_state_dict(save(straight.state_dict()))
    for number in range(3, 10):
        assert run(straight, number) == run(resumed, number)
        assert straight.state_dict() == resumed.state_dict()
    with pytest.raises(ValueError, match="expected a state with the keys"):
        resumed.load_state_dict({})


# ---------------------------------------------------------------- options, and what can be rebuilt


def _random_items(rng, items):
    """Items with three options each; about half can be rebuilt from one or two that come before."""
    error = [sorted((rng.uniform(0.01, 9) for _ in range(3)), reverse=True) for _ in range(items)]
    nbytes = [sorted(rng.sample(range(5, 60), 3)) for _ in range(items)]
    weight = [10 ** rng.uniform(-2, 2) for _ in range(items)]
    sources = [
        [(j, rng.uniform(0.1, 2)) for j in rng.sample(range(i), min(i, rng.randint(1, 2)))]
        if rng.random() < 0.5
        else []
        for i in range(items)
    ]
    return weight, error, nbytes, sources


def _total(weight, error, nbytes, sources, picked):
    """The objective and the bytes of a choice, by following every rebuilt item to its sources."""
    errors = []
    for i, k in enumerate(picked):
        errors.append(sum(gain * errors[j] for j, gain in sources[i]) if k is None else error[i][k])
    spent = sum(nbytes[i][k] for i, k in enumerate(picked) if k is not None)
    return sum(w * e for w, e in zip(weight, errors, strict=True)), spent


def test_assignments_are_near_the_best_of_all():
    rng = random.Random(3)
    excess = []
    for _ in range(60):
        weight, error, nbytes, sources = items = _random_items(rng, 5)
        least = sum(min(b) for b, s in zip(nbytes, sources, strict=True) if not s)
        budget = least + rng.randint(0, 150)
        found, spent = _total(*items, assign(*items, budget))
        assert spent <= budget
        choices = itertools.product(*([*range(3), *([None] if s else [])] for s in sources))
        totals = [_total(*items, picked) for picked in choices]
        excess.append(found / min(total for total, spent in totals if spent <= budget))
        plain = choose([[w * e for e in es] for w, es in zip(weight, error, strict=True)], nbytes, 10**6)
        assert _total(*items, assign(*items, 10**6))[0] <= _total(*items, plain)[0]
    assert min(excess) >= 1 - 1e-9
    # One price for all bytes, and one item after another: usually the best, sometimes not.
    assert sorted(excess)[len(excess) // 2] < 1.02
    assert sorted(excess)[int(0.9 * len(excess))] < 1.5
