"""Where few values share a statistic, noise does not average out: such tensors get more bits, in every method."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.codecs import BlockMean, GroupQuant, TensorMeta
from lowtide.graph.capture import Site
from lowtide.graph.rules import Need
from lowtide.policy.policy import Policy
from lowtide.policy.solve import allocate
from lowtide.policy.use import Use, least_bits, statistic_bits

METHODS = ("division", "actnn", "gact", "blpa", "tinyscript", "lowrank")


def bits_of(model: nn.Module, x: Tensor, method: str = "actnn", **options: Any) -> dict[str, str]:
    """What each norm's input is stored with, by the module."""
    with lowtide.compress(model, method, min_numel=0, **options) as session:
        model(x).square().sum().backward()
    return {
        row.site.module: row.codec or row.why
        for row in session.report().sites
        if "Norm" in row.site.op and row.site.slot == "input"
    }


# ---------------------------------------------------------------- the rule


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_rule_is_the_least_that_the_formula_allows(bits: int) -> None:
    """Noise of ``sqrt(6) / (2**bits - 1)`` deviations, averaged over ``n`` values, stays below three percent."""
    limit = (math.sqrt(6) / (2**bits - 1) / 0.03) ** 2
    assert statistic_bits(math.ceil(limit)) <= bits < statistic_bits(math.floor(limit))
    assert statistic_bits(8) == 8


def test_rounding_noise_is_that_of_the_formula() -> None:
    """The deviation of random rounding is a step over ``sqrt(6)``, as for values that fall anywhere between steps."""
    torch.manual_seed(0)
    x = torch.randn(1 << 16).clamp(-3, 3)
    x[::256], x[1::256] = -3.0, 3.0  # every group has a range of six deviations
    for bits in (2, 3, 4):
        error = GroupQuant(bits).encode(x, key=1).decode() - x
        # Uniform positions are an idealisation, by far the worst at two bits, where most values lie in one step.
        assert float(error.std()) == pytest.approx(math.sqrt(6) / (2**bits - 1), rel=0.2)


def test_the_greatest_of_both_reasons_counts() -> None:
    assert least_bits(Need.LINEAR, 0) == 1
    assert least_bits(Need.BATCH, 10**6) == 1
    assert least_bits(Need.PROPAGATE, 768) == 4
    assert least_bits(Need.PROPAGATE, 16) == 8
    assert least_bits(Need.EXPONENT, 10**6) == 8
    assert least_bits(Need.BATCH, 16 * 136, rectified=True) == 4
    assert least_bits(Need.BATCH, 16 * 137, rectified=True) == 3


@pytest.mark.parametrize(
    ("norm", "shape", "expected"),
    [
        (nn.BatchNorm2d(8), (4, 8, 14, 14), "2 bits"),  # 784 values share a statistic
        (nn.BatchNorm2d(8), (4, 8, 12, 12), "3 bits"),  # 576
        (nn.BatchNorm2d(8), (4, 8, 4, 4), "4 bits"),  # 64
        (nn.BatchNorm2d(8), (4, 8, 2, 2), "8 bits"),  # 16
        (nn.BatchNorm2d(8), (2, 8, 1, 2), "nearly equal"),  # 4
        (nn.BatchNorm1d(8), (16, 8), "8 bits"),
        (nn.BatchNorm1d(8), (3, 8, 10), "4 bits"),
        (nn.InstanceNorm2d(8, affine=True), (4, 8, 28, 28), "2 bits"),
        (nn.InstanceNorm2d(8, affine=True), (400, 8, 4, 4), "8 bits"),
        (nn.LayerNorm(64), (400, 64), "4 bits"),
        (nn.LayerNorm(16), (400, 16), "8 bits"),
        (nn.LayerNorm((4, 16)), (100, 4, 16), "4 bits"),
        (nn.GroupNorm(2, 8), (4, 8, 4, 4), "4 bits"),
        (nn.GroupNorm(2, 8), (4, 8, 2, 2), "8 bits"),
        (nn.GroupNorm(8, 8), (4, 8, 2, 2), "nearly equal"),
    ],
)
def test_norms_get_the_bits_of_their_statistics(norm: nn.Module, shape: tuple[int, ...], expected: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.PReLU(), norm)  # a tensor of its own, which somebody else made
    assert expected in bits_of(model, torch.randn(shape))["1"]


def test_a_norm_of_rectified_values_gets_more() -> None:
    for before, expected in ((nn.PReLU(), "2 bits"), (nn.ReLU(), "4 bits")):
        model = nn.Sequential(nn.Conv2d(8, 8, 1), before, nn.BatchNorm2d(8))
        with lowtide.compress(model, "actnn", min_numel=0) as session:
            model(torch.randn(4, 8, 14, 14)).sum().backward()
        found = [row.codec for row in session.report().sites if row.site.module in ("1", "2")]
        assert any(f"group_quant({expected})" in codec for codec in found), found


def test_constant_statistics_average_nothing() -> None:
    norm = nn.BatchNorm2d(8).eval()
    assert "2 bits" in bits_of(nn.Sequential(nn.PReLU(), norm), torch.randn(2, 8, 2, 2))["1"]


@pytest.mark.parametrize("method", METHODS)
def test_more_bits_than_the_floor_stay(method: str) -> None:
    model = nn.Sequential(nn.PReLU(), nn.BatchNorm2d(8))
    options: dict[str, Any] = {"other_bits": 5} if method == "lowrank" else {"bits": 5}
    assert "5 bits" in bits_of(model, torch.randn(4, 8, 8, 8), method, **options)["1"]
    assert "8 bits" in bits_of(model, torch.randn(4, 8, 2, 2), method, **options)["1"]


def test_the_least_of_several_statistics_counts() -> None:
    """One storage that a layer norm of 64 values and a batch norm of 8 read."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm((4, 4, 4)), nn.BatchNorm2d(4)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            h = x * self.scale
            return self.first(h) + self.second(h)

    assert "8 bits" in bits_of(Both(), torch.randn(1, 4, 4, 4), bits=2)["first"]


def test_what_needs_more_is_not_rebuilt_from_less() -> None:
    """A batch norm of 16 values after a SiLU, whose input has 4 bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 1), nn.SiLU(), nn.BatchNorm2d(64))
    for size, expected in ((2, "8 bits"), (8, "rebuilt")):
        found = bits_of(model, torch.randn(4, 3, size, size), "division", derive=True)
        assert expected in found["2"], found


def test_a_part_of_a_batch_has_the_bits_of_the_whole() -> None:
    """As in the probes of a guard: what they tell must be true of the batch."""
    model = nn.Linear(1, 1)
    site = Site("norm", "NativeBatchNorm", "input", 0)
    policy = Policy(lowtide.Division(), model, 0, False)

    def bits(policy: Policy, samples: int) -> int:
        shape = (samples, 8, 16, 16)
        tensor = torch.randn(shape)
        use = Use(Need.BATCH, TensorMeta.of(tensor), True, (site,), sharing=samples * 256)
        codec = policy.choose(use, tensor, None).codec
        assert isinstance(codec, BlockMean)
        return codec.bits

    assert (bits(policy, 16), bits(policy, 1)) == (2, 3)
    whole = Policy(lowtide.Division(), model, 0, False)
    assert (bits(whole, 16), bits(whole.like(model, 1 / 16), 1)) == (2, 2)


# ---------------------------------------------------------------- tuners


def test_floors_hold_within_a_budget_and_beyond_it() -> None:
    cost = torch.tensor([1.0, 1.0, 1e6])
    assert allocate(cost, 1, 15, floors=(4, 1, 1)).tolist() == [4, 3, 8]
    assert allocate(cost, 1, 3, floors=(4, 1, 2)).tolist() == [4, 1, 2]
    assert allocate(cost, 1, 9, (1, 2, 4, 8), floors=(3, 1, 1)).tolist() == [4, 1, 4]
    assert allocate(cost, 1, 9, floors=(1, 1, 1)).tolist() == allocate(cost, 1, 9).tolist()


class Net(nn.Module):
    """Batch norms over fewer and fewer values: 256, 64, 16 and 4 in a batch of 4."""

    def __init__(self) -> None:
        super().__init__()

        def unit(inputs: int, outputs: int, stride: int) -> nn.Module:
            convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

        widths = (3, 32, 64, 128, 256)
        self.maps = nn.Sequential(*(unit(i, o, 2) for i, o in itertools.pairwise(widths)))
        self.deep = nn.Sequential(*(unit(128, 128, 1) for _ in range(8)))
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.deep(self.maps[:3](x))
        return self.head(self.maps[3](h).mean((2, 3)))


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(x), y).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_no_default_is_lost_in_noise(method: str) -> None:
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    exact = gradient(model, x, y)
    with lowtide.attach(model, method, min_numel=0) as handle:
        for _ in range(3):
            assert float((gradient(model, x, y) - exact).norm() / exact.norm()) < 1.0
        if method == "gact":
            handle.adapt(lambda: nn.functional.cross_entropy(model(x), y))
            assert float((gradient(model, x, y) - exact).norm() / exact.norm()) < 1.0
