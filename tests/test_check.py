"""Exact against compressed gradients: the measures, the verdict, the sites, and what must stay untouched."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections import OrderedDict, UserDict
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide import cli
from lowtide.codecs import Codec, GroupQuant, Packed, TensorMeta
from lowtide.session.replay import gradients, samples_in, slice_of
from lowtide.verify.check import (
    LEAST_NOISE,
    SAFE_BIAS,
    SAFE_SHARE,
    SIGNIFICANCE,
    UNSAFE_BIAS,
    WARM,
    Difference,
    _chance,
    difference,
    judge,
)

CONV = lowtide.Site("4", "Convolution", "input", 0)


def convnet() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Identity()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(72, 5)),
    )


def images(count: int = 32) -> tuple[Tensor, Tensor]:
    """Classes that differ, so that the gradient is more than noise."""
    y = torch.arange(count) % 5
    return torch.randn(count, 3, 12, 12) + y.view(-1, 1, 1, 1) / 2, y


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


# ---------------------------------------------------------------- broken codecs


@dataclass(frozen=True)
class Scaled(GroupQuant):
    """Decodes a tenth too much."""

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        return super().decode(packed, support=support) * 1.1


@dataclass(frozen=True)
class Down(Codec):
    """Rounds down in steps of a quarter of the standard deviation."""

    id: ClassVar[str] = "test_check_down"

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        step = tensor.std() / 4
        return Packed(self, TensorMeta.of(tensor), ((tensor / step).floor().to(torch.int8), step))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        return packed.buffers[0] * packed.buffers[1]

    def packed_nbytes(self, meta: TensorMeta) -> int:
        return meta.numel + 4


@dataclass(frozen=True)
class Spoilt(GroupQuant):
    """One NaN."""

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        tensor = super().decode(packed, support=support)
        tensor.view(-1)[0] = math.nan
        return tensor


def plan_with(broken: Codec, model: nn.Module, batch: tuple[Tensor, Tensor]) -> lowtide.Plan:
    """Eight bits everywhere, but for the input of the second convolution."""
    with lowtide.compress(model, GroupQuant(8)) as opened:
        cross_entropy(model, batch)
    sites = list(opened.plan().choices)
    assert CONV in sites
    shared = next(use.sites for use in opened.chosen if CONV in use.sites)
    return lowtide.Plan({site: broken if site in shared else GroupQuant(8) for site in sites})


# ---------------------------------------------------------------- verdicts on networks


def test_lossless_is_exact_and_safe() -> None:
    result = lowtide.check(convnet(), images(), cross_entropy, "lossless")
    assert result.overall.error == result.overall.mean_error == result.overall.bias == 0.0
    assert all(d.error == 0.0 and d.cosine == 1.0 for d in result.parameters.values())
    assert (result.verdict, result.ok, result.sites, result.nonfinite) == ("safe", True, (), ())
    assert "exact" in result.reason
    assert not any("random" in note for note in result.notes)


@pytest.mark.parametrize("method", ["division", "actnn", "auto"])
def test_two_bits_on_a_small_network_are_no_danger(method: str) -> None:
    model = convnet()
    result = lowtide.check(model, images(), cross_entropy, method)
    assert result.verdict in ("safe", "noisy")
    assert result.ok
    assert 0.01 < result.overall.error < 0.4
    assert result.overall.cosine > 0.9
    assert set(result.parameters) == {name for name, _ in model.named_parameters()}
    assert result.report.ratio > 4
    assert result.seeds == 4


def test_measures_are_those_of_gradients_taken_by_hand() -> None:
    model, batch = convnet(), images()
    result = lowtide.check(model, batch, cross_entropy, "actnn", bits=2, level="L2", seeds=3, seconds=0)
    exact = gradients(model, lambda: cross_entropy(model, batch))
    opened = lowtide.compress(model, "actnn", bits=2, level="L2")
    draws = [opened.gradients(lambda: cross_entropy(model, batch), step) for step in (1, 2, 3)]

    def line(g: dict[str, Tensor]) -> Tensor:
        return torch.cat([g[name].flatten() for name in exact]).double()

    right, found = line(exact), torch.stack([line(g) for g in draws])
    length, mean = right.norm(), found.mean(0)
    spread = (found - mean).square().sum() / 2
    got = result.overall
    expected = {
        "norm": length,
        "error": ((found - right).square().sum(1).mean()).sqrt() / length,
        "mean_error": (mean - right).norm() / length,
        "noise_left": (spread / 3).sqrt() / length,
        "bias": ((mean - right).square().sum() - spread / 3).clamp_min(0).sqrt() / length,
        "cosine": F.cosine_similarity(found, right[None]).mean(),
    }
    # Both subtract float32 gradients; what differs is rounding of that subtraction, 2**-24 of the gradient or, in the
    # difference of squares, its root.
    for name, value in expected.items():
        assert getattr(got, name) == pytest.approx(float(value), rel=1e-4, abs=3e-4), name
    name, right_one = "7.weight", exact["7.weight"].double()
    errors = [float((g[name] - right_one).norm() / right_one.norm()) for g in draws]
    assert result.parameters[name].error == pytest.approx(math.sqrt(sum(e * e for e in errors) / 3), rel=1e-4)
    assert (result.sites, result.stored) == ((), len(opened.chosen))


@pytest.mark.parametrize("broken", [Scaled(8), Down()], ids=str)
def test_a_broken_codec_is_unsafe_and_its_site_comes_first(broken: Codec) -> None:
    model, batch = convnet(), images()
    good = lowtide.check(model, batch, cross_entropy, GroupQuant(8))
    assert good.verdict == "safe"
    result = lowtide.check(model, batch, cross_entropy, plan_with(broken, model, batch))
    assert result.verdict == "unsafe"
    assert "bias" in result.reason
    assert CONV in result.sites[0].sites
    assert result.sites[0].fall > 0.9
    assert len(result.sites) == result.stored == len(good.sites) > 3
    assert str(CONV) in str(result).split("worst sites")[1].splitlines()[1]


def test_a_scale_that_is_wrong_everywhere_is_unsafe_at_two_bits_too() -> None:
    # A tenth of the gradients that read a compressed tensor, below the noise of two bits.
    assert lowtide.check(convnet(), images(), cross_entropy, GroupQuant(2)).ok
    result = lowtide.check(convnet(), images(), cross_entropy, Scaled(2), seeds=8)
    assert result.verdict == "unsafe"
    assert "bias" in result.reason
    assert UNSAFE_BIAS < result.overall.bias < result.overall.error
    assert result.overall.chance < SIGNIFICANCE


def test_nan_is_unsafe_and_the_parameter_is_named() -> None:
    model, batch = convnet(), images()
    result = lowtide.check(model, batch, cross_entropy, plan_with(Spoilt(8), model, batch))
    assert (result.verdict, result.ok) == ("unsafe", False)
    assert result.nonfinite == ("4.weight",)
    assert result.overall.error == math.inf
    assert result.sites[0].fall == 1.0
    assert CONV in result.sites[0].sites
    assert all(s.fall == 0.0 for s in result.sites[1:])
    assert "NaN or Inf in the gradient of 4.weight" in str(result)
    assert json.loads(result.to_json())["overall"]["error"] is None


def test_a_parameter_whose_exact_gradient_is_nan_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    model.register_parameter("odd", nn.Parameter(torch.zeros(1)))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() + model.odd.sqrt().sum() * 0  # 0 * inf

    result = lowtide.check(model, torch.randn(64, 64), loss, "actnn", bits=8)
    assert result.verdict == "safe"
    assert "odd" not in result.parameters
    assert any("odd" in note for note in result.notes)


# ---------------------------------------------------------------- nothing is disturbed


def snapshot(model: nn.Module) -> list[bytes]:
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes())
    return [t.numpy().tobytes() for t in tensors] + [repr(s).encode() for s in states[1:]] + [bytes(states[0].tolist())]


@pytest.mark.parametrize("method", ["division", "actnn", "auto"])
def test_weights_buffers_grads_and_random_states_are_untouched(method: str) -> None:
    model, batch = convnet(), images()
    cross_entropy(model, batch).backward()
    before, owners = snapshot(model), [id(p.grad) for p in model.parameters()]
    lowtide.check(model, batch, cross_entropy, method, seeds=2, seconds=1)
    assert snapshot(model) == before
    assert [id(p.grad) for p in model.parameters()] == owners
    with lowtide.compress(model, method) as session:
        cross_entropy(model, batch)
    assert session.step == 1  # later sessions draw the noise they would have drawn


@pytest.mark.parametrize("fails_at", [1, 2, 7, 8])
def test_an_exception_leaves_nothing_behind(fails_at: int) -> None:
    model, batch = convnet(), images()
    cross_entropy(model, batch).backward()
    before, calls = snapshot(model), itertools.count(1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = cross_entropy(model, batch)
        if next(calls) == fails_at:
            raise OSError("broken on purpose")
        return value

    with pytest.raises(OSError, match="on purpose"):  # calls 3 to 6 are those of parts, which may fail
        lowtide.check(model, batch, loss)
    assert snapshot(model) == before
    assert not nn.modules.module._global_forward_hooks


def test_a_model_that_is_compressed_already_is_refused() -> None:
    model, batch = convnet(), images()
    handle = lowtide.attach(model, "actnn")
    with pytest.raises(RuntimeError, match=r"remove\(\)"):
        lowtide.check(model, batch, cross_entropy)
    handle.remove()
    with lowtide.compress(model), pytest.raises(RuntimeError, match="outside of"):
        lowtide.check(model, batch, cross_entropy)
    assert lowtide.check(model, batch, cross_entropy, "lossless").ok


@pytest.mark.parametrize(("method", "first"), [("division", 1), ("actnn", WARM + 1)])
def test_adaptive_methods_learn_before_they_are_judged(
    method: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, taken = [], lowtide.Session.gradients

    def noted(self: lowtide.Session, closure: object, step: int) -> dict[str, Tensor]:
        steps.append(step)
        return taken(self, closure, step)  # type: ignore[arg-type]

    monkeypatch.setattr(lowtide.Session, "gradients", noted)
    lowtide.check(convnet(), images(), cross_entropy, method, seeds=3, seconds=0)
    assert steps == list(range(1, first + 3))


def test_a_result_repeats() -> None:
    model, batch = convnet(), images()
    first = lowtide.check(model, batch, cross_entropy, "actnn", seconds=0)
    lowtide.compress(model)
    again = lowtide.check(model, batch, cross_entropy, "actnn", seconds=0)
    assert first.parameters == again.parameters


# ---------------------------------------------------------------- batches and losses


def test_dropout_masks_are_the_same_in_all_gradients() -> None:
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 5))
    x, y = torch.randn(64, 32), torch.arange(64) % 5
    result = lowtide.check(model, (x, y), cross_entropy, GroupQuant(8))
    # Eight bits err by a part of 1/255 of a group's range; other masks would make an error near 1.
    assert 0 < result.overall.error < 0.02
    assert result.verdict == "safe"


class WithLoss(nn.Module):
    """Takes and gives what models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 5))

    def forward(self, inputs: Tensor, labels: Tensor, scale: float = 1.0) -> object:
        class Output(NamedTuple):
            loss: Tensor

        return Output(F.cross_entropy(self.body(inputs) * scale, labels))


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_a_mapping_has_a_loss_of_its_own(kind: type) -> None:
    batch = kind({"inputs": torch.randn(64, 64), "labels": torch.arange(64) % 5, "scale": 1.0})
    result = lowtide.check(WithLoss(), batch, method="actnn", bits=8)
    assert result.verdict == "safe"
    assert result.overall.sgd_noise is not None


def test_other_batches_need_a_loss() -> None:
    with pytest.raises(TypeError, match=r"type tuple.*give loss_fn\(model, batch\)"):
        lowtide.check(convnet(), images())
    with pytest.raises(TypeError, match="has no loss; put labels"):
        lowtide.check(nn.Linear(4, 4), {"input": torch.randn(2, 4)})


@pytest.mark.parametrize(("name", "value"), [("seeds", 1), ("seeds", True), ("seconds", -1), ("seconds", math.nan)])
def test_wrong_numbers_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        lowtide.check(convnet(), images(), cross_entropy, **{name: value})


def test_wrong_methods_are_refused_as_by_compress() -> None:
    with pytest.raises(ValueError, match="unknown method"):
        lowtide.check(convnet(), images(), cross_entropy, "none")
    with pytest.raises(TypeError, match="no option"):
        lowtide.check(convnet(), images(), cross_entropy, "division", colour=1)


def test_a_gradient_that_cannot_be_repeated_is_noted() -> None:
    generator = torch.Generator()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return cross_entropy(model, (x + torch.randn(x.shape, generator=generator), y))

    result = lowtide.check(convnet(), images(), loss, "lossless")
    assert any("cannot be repeated" in note for note in result.notes)
    assert not any("repeated" in n for n in lowtide.check(convnet(), images(), cross_entropy, "lossless").notes)


# ---------------------------------------------------------------- SGD's own noise


def noise_of(model: nn.Module, batch: object, loss: object) -> tuple[float | None, tuple[str, ...]]:
    result = lowtide.check(model, batch, loss, "lossless", seeds=2)  # type: ignore[arg-type]
    return result.overall.sgd_noise, result.notes


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("count", [256, 255])
def test_sgd_noise_is_the_spread_over_batches(reduction: str, count: int) -> None:
    model = nn.Linear(16, 4)
    offset = torch.randn(4)

    def batch() -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 16)
        return x, x[:, :4] + offset + torch.randn(count, 4)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1], reduction=reduction)

    def gradient(given: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat([g.flatten() for g in gradients(model, lambda: loss(model, given)).values()])

    many = torch.stack([gradient(batch()) for _ in range(200)])
    spread = float((many - many.mean(0)).square().sum(1).mean().sqrt())
    found = []
    for _ in range(10):
        given = batch()
        noise, _ = noise_of(model, given, loss)
        assert noise is not None
        found.append(noise * float(gradient(given).norm()))
    # A variance from 3 degrees of freedom in each of 68 directions, 10 times: the mean of squares is known within
    # sqrt(2 / (3 * d * 10)); with d = 10 effective directions 8 % of the square, 4 % of the root; three of them.
    assert math.sqrt(sum(f * f for f in found) / 10) == pytest.approx(spread, rel=0.12)


def test_sgd_noise_is_unknown_where_parts_say_nothing() -> None:
    model = convnet()
    x, y = images()
    for batch, loss, why in [
        ((x, y, "text"), cross_entropy, "holds a str"),
        ((x[:1], y[:1]), cross_entropy, "1 samples"),
        ((x, y, torch.zeros(3)), cross_entropy, "one first dimension"),
        ((x, y), lambda m, b: F.cross_entropy(m(b[0]), b[1]) / (len(b[0]) == 32), "NaN or Inf"),
        ((x, y), lambda m, b: F.cross_entropy(m(b[0].view(32, 3, 12, 12)), b[1]), "failed with RuntimeError"),
    ]:
        noise, notes = noise_of(model, batch, loss)
        assert noise is None
        assert any("SGD's own noise is unknown" in note and why in note for note in notes), (why, notes)


def test_batch_norms_of_few_values_hide_sgd_noise() -> None:
    # Of two samples only the sign is left.
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
    x, y = torch.randn(8, 16), torch.arange(8) % 5
    noise, notes = noise_of(model, (x, y), cross_entropy)
    assert noise is None
    assert any("batch norms see fewer samples" in note for note in notes)
    assert noise_of(model.eval(), (x, y), cross_entropy)[0] is not None


def test_dropout_does_not_hide_sgd_noise() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.9), nn.Linear(64, 5))
    noise, _ = noise_of(model, (torch.ones(64, 16), torch.zeros(64, dtype=torch.int64)), cross_entropy)
    assert noise is not None  # equal samples: it is all dropout's
    assert noise > 0.1


def test_a_loss_that_couples_samples_hides_sgd_noise() -> None:
    def contrast(model: nn.Module, x: Tensor) -> Tensor:
        z = model(x)
        return F.cross_entropy(z @ x.T, torch.arange(len(x)))

    noise, notes = noise_of(nn.Linear(64, 64), torch.randn(16, 64), contrast)
    assert noise is None
    assert any("couples samples" in note for note in notes)


@dataclass(frozen=True)
class Batch:
    x: Tensor
    y: Tensor


def test_batches_in_dataclasses_have_the_noise_of_the_same_batches_in_tuples() -> None:
    model, batch = convnet().eval(), images()
    expected, _ = noise_of(model, batch, cross_entropy)
    found, _ = noise_of(model, Batch(*batch), lambda model, batch: cross_entropy(model, (batch.x, batch.y)))
    assert expected is not None
    assert expected > 0.1
    assert found == expected


class Pair(NamedTuple):
    x: Tensor
    y: list[Tensor]


def test_parts_keep_their_containers() -> None:
    batch = {"pair": Pair(torch.arange(6), [torch.arange(6) * 2]), "scale": torch.tensor(3.0), "flag": None}
    assert samples_in(batch) == 6
    part = slice_of(batch, 2, 4)
    assert type(part["pair"]) is Pair
    assert part["pair"].x.tolist() == [2, 3]
    assert part["pair"].y[0].tolist() == [4, 6]
    assert part["scale"] is batch["scale"]
    assert part["flag"] is None
    assert batch["pair"].x.tolist() == list(range(6))


# ---------------------------------------------------------------- the measures by themselves


def products_of(errors: Tensor, right: Tensor) -> Tensor:
    rows = torch.cat([errors, right[None]]).double()
    return rows @ rows.T


def test_bias_is_recovered_from_noise() -> None:
    right = torch.zeros(4000)
    right[0] = 1.0
    bias = torch.zeros(4000)
    bias[1] = 0.1
    noise = torch.randn(8, 4000) * 0.3 / math.sqrt(4000)
    found = difference(products_of(noise + bias, right))
    # The estimate of bias**2 has a deviation of sqrt(2 / (8 * 7) / 4000) * 0.3**2 = 0.00027 from the noise with itself
    # and of 2 * 0.1 * 0.3 / sqrt(8 * 4000) = 0.00034 from bias with noise; three of their sum in squares.
    assert found.bias**2 == pytest.approx(0.01, abs=3 * 0.00043)
    assert found.error == pytest.approx(math.sqrt(0.01 + 0.09), rel=0.02)
    assert found.noise_left == pytest.approx(0.3 / math.sqrt(8), rel=0.02)
    assert found.chance < 1e-3


def test_the_chance_is_that_of_students_t() -> None:
    """The cosine to the diagonal in p dimensions is t / sqrt(t**2 + p - 1); quantiles from a printed table."""
    for seeds, level, t in [(4, 0.01, 3.365), (4, 0.001, 5.893), (4, 0.05, 2.015), (3, 0.05, 2.920), (8, 0.01, 2.473)]:
        pairs = seeds * (seeds - 1) // 2
        cosine = t / math.sqrt(t * t + pairs - 1)
        across = torch.zeros(pairs, dtype=torch.float64)
        across[0], across[1] = 1.0, -1.0
        vector = cosine / math.sqrt(pairs) + math.sqrt((1 - cosine**2) / 2) * across
        i, j = torch.triu_indices(seeds, seeds, 1)
        errors = torch.eye(seeds, dtype=torch.float64) * 10
        errors[i, j] = errors[j, i] = vector
        assert _chance(errors) == pytest.approx(level, rel=2e-3)


def test_pure_noise_is_rarely_called_bias() -> None:
    right = torch.ones(300)
    chances = [difference(products_of(torch.randn(4, 300), right)).chance for _ in range(1000)]
    # Uniform, if the formula holds: a binomial count of 100 with a deviation of 9.5; three of them.
    assert sum(c < 0.1 for c in chances) == pytest.approx(100, abs=29)
    assert sum(c > 0.9 for c in chances) == pytest.approx(100, abs=29)


def test_equal_errors_are_all_bias_even_with_two_seeds() -> None:
    right, error = torch.randn(100), torch.randn(100) * 0.1
    found = difference(products_of(error.expand(2, -1), right))
    assert found.bias == pytest.approx(found.error)
    assert (found.noise_left, found.chance) == (pytest.approx(0, abs=1e-7), 0.0)


def test_a_gradient_of_zero_has_no_scale() -> None:
    zero = torch.zeros(10)
    assert difference(products_of(torch.zeros(2, 10), zero)) == Difference(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    found = difference(products_of(torch.randn(2, 10), zero))
    assert (found.error, found.cosine) == (math.inf, 0.0)


# ---------------------------------------------------------------- the verdict by itself

UP = 1 + 1e-9
CALM = Difference(1.0, error=0.05, mean_error=0.025, noise_left=0.025, bias=0.01, chance=0.5, cosine=1.0)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "safe"),
        ({"error": SAFE_SHARE * LEAST_NOISE}, "safe"),
        ({"error": SAFE_SHARE * LEAST_NOISE * UP}, "noisy"),
        ({"error": LEAST_NOISE}, "noisy"),
        ({"error": LEAST_NOISE * UP}, "unsafe"),
        ({"error": 0.25, "sgd_noise": 1.0}, "safe"),
        ({"error": 0.25 * UP, "sgd_noise": 1.0}, "noisy"),
        ({"error": 1.0, "sgd_noise": 1.0}, "noisy"),
        ({"error": UP, "sgd_noise": 1.0}, "unsafe"),
        ({"error": 0.1, "sgd_noise": 0.001}, "safe"),
        ({"error": 0.4 * UP, "sgd_noise": 0.001}, "unsafe"),
        ({"bias": SAFE_BIAS, "chance": 0.0}, "safe"),
        ({"bias": SAFE_BIAS * UP, "chance": SIGNIFICANCE}, "noisy"),
        ({"bias": SAFE_BIAS * UP, "chance": SIGNIFICANCE * UP}, "safe"),
        ({"bias": UNSAFE_BIAS, "chance": SIGNIFICANCE}, "noisy"),
        ({"bias": UNSAFE_BIAS * UP, "chance": SIGNIFICANCE}, "unsafe"),
        ({"bias": 0.3, "chance": SIGNIFICANCE * UP}, "safe"),
    ],
)
def test_verdict_at_its_limits(change: dict[str, float], verdict: str) -> None:
    assert judge(replace(CALM, **change), {}, ())[0] == verdict


def test_leading_parameters_are_tested_with_the_level_divided() -> None:
    for chance, verdict in [(SIGNIFICANCE / 3, "unsafe"), (SIGNIFICANCE / 3 * UP, "safe")]:
        found, reason = judge(CALM, {"a": replace(CALM, bias=0.2, chance=chance), "b": CALM}, ())
        assert found == verdict
        assert ("in a is above" in reason) == (verdict == "unsafe")


def test_nan_and_zero_decide_first() -> None:
    assert judge(replace(CALM, error=0.0), {}, ())[1] == "the gradient is exact"
    assert judge(CALM, {}, ("w",))[0] == "unsafe"


# ---------------------------------------------------------------- sites


@pytest.mark.parametrize("method", ["division", "actnn", "auto", "tinyscript", "pool"])
def test_a_plan_repeats_what_the_method_did(method: str) -> None:
    model, batch = convnet(), images()
    model[3] = nn.Conv2d(8, 8, 1)  # pool has a twin for it, which sums in another order
    first = lowtide.compress(model, method)

    def run() -> Tensor:
        return cross_entropy(model, batch)

    for step in (1, 2, 3):
        expected = first.gradients(run, step)
    assert len(first.plan())
    found = lowtide.compress(model, first.plan()).gradients(run, 3)
    assert all(torch.equal(found[name], g) for name, g in expected.items())


def test_time_bounds_the_sites_that_are_tried() -> None:
    slow = 0.05

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(slow)
        return cross_entropy(model, batch)

    result = lowtide.check(convnet(), images(), loss, "division", seconds=2.5 * slow)
    assert 1 <= len(result.sites) <= 2 < result.stored
    assert f"({len(result.sites)} of {result.stored} switched to exact" in str(result)


def test_the_worst_layer_is_named_and_no_part_of_the_verdict() -> None:
    model, batch = convnet().eval(), images()
    result = lowtide.check(model, batch, cross_entropy, "actnn", seconds=0)
    x, y = batch

    def flat(name: str, start: int, stop: int) -> Tensor:
        found = gradients(model, lambda: cross_entropy(model, (x[start:stop], y[start:stop])))
        return found[name].flatten().double()

    ratios = {}
    for name, d in result.parameters.items():
        slices = torch.stack([flat(name, i * 8, i * 8 + 8) for i in range(4)])
        noise = float((slices - slices.mean(0)).square().sum() / 3 / 4) ** 0.5
        ratios[name] = d.error * d.norm / noise
    worst = max(ratios, key=lambda name: ratios[name])
    assert result.worst_layer is not None
    assert result.worst_layer[0] == worst
    assert result.worst_layer[1] == pytest.approx(ratios[worst], rel=1e-4)  # float32 gradients
    assert f"the worst is {worst}: its error is {result.worst_layer[1]:.3g} times" in str(result)
    data = json.loads(result.to_json())["worst_layer"]
    assert data == {"parameter": worst, "error_by_sgd_noise": result.worst_layer[1]}

    calm = result.parameters[worst]
    loud = {**result.parameters, worst: replace(calm, error=1e6), "tiny": replace(calm, norm=1e-9, error=1e9)}
    changed = replace(result, parameters=loud)
    assert changed.worst_layer == (worst, pytest.approx(1e6 / (calm.sgd_noise or 0)))
    unknown = replace(result, parameters={worst: replace(calm, sgd_noise=None)})
    assert unknown.worst_layer is None
    assert "the worst is" not in str(unknown)
    assert json.loads(unknown.to_json())["worst_layer"] is None


def test_text_and_json_tell_the_same() -> None:
    result = lowtide.check(convnet(), images(), cross_entropy, "division")
    text, data = str(result), json.loads(result.to_json())
    assert text.startswith(f"{result.method}: {result.verdict}: {result.reason}")
    assert f"{result.overall.error:.3g} of the gradient" in text
    assert data["verdict"] == result.verdict
    assert data["overall"]["error"] == result.overall.error
    assert set(data["parameters"]) == set(result.parameters)
    assert lowtide.Site(**data["sites"][0]["sites"][0]) == result.sites[0].sites[0]
    assert data["report"]["stored_nbytes"] == result.report.stored_nbytes
    assert [s.fall for s in result.sites] == sorted((s.fall for s in result.sites), reverse=True)


# ---------------------------------------------------------------- the command


def build() -> object:
    torch.manual_seed(0)
    print("building")
    return convnet(), images(), cross_entropy


def build_mapping() -> object:
    return WithLoss(), {"inputs": torch.randn(64, 64), "labels": torch.arange(64) % 5}


def build_without_loss() -> object:
    return convnet(), images()


def build_nothing() -> None:
    return None


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["test_check:build", "--method", "lossless"], 0),
        (["test_check:build", "--set", "bits=8", "--seeds", "2"], 0),
        (["test_check:build_mapping", "--method", "cast", "--set", "dtype=bfloat16"], 0),
        (["test_check:build", "--method", "pool", "--set", "kernel=4"], 1),
        (["test_check:build", "--method", "none"], 2),
        (["test_check:build", "--set", "colour=1"], 2),
        (["test_check:build", "--set", "bits=9"], 2),
        (["test_check:build_without_loss"], 2),
        (["test_check:build_nothing"], 2),
    ],
)
def test_check_command_ends_with_the_verdicts_code(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", *arguments]) == code
    out, err = capsys.readouterr()
    assert bool(out) == (code < 2)
    assert ("unsafe" in out) == (code == 1)
    assert ("lowtide check: " in err) == (code == 2)


def test_check_command_writes_json_alone_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "test_check:build", "--method", "actnn", "--set", "bits=4", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["method"].startswith("actnn(bits=4")
    assert "building" in err


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["build"], ["no_such_module:build"], ["test_check:no_such"], ["test_check:CONV"]),
        *(["test_check:build", "--seeds", "1"], ["test_check:build", "--set", "bits"]),
    ],
)
def test_check_command_refuses_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["check", *arguments])
    assert end.value.code == 2
    assert "usage: lowtide check" in capsys.readouterr().err


def test_derived_tensors_are_spared_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
    )
    x = torch.randn(16, 3, 16, 16)
    result = lowtide.check(model, x, lambda model, x: model(x).square().mean(), "division", derive=True)
    derived = [site for site in result.sites if site.codec == "rebuilt"]
    assert derived
    assert all(site.fall != 0 for site in derived)
