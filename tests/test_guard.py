"""The guard: silent where all is well, exact about what is not, and never in training's way."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.codecs import Cast, Codec, GroupQuant, Packed
from lowtide.graph.rules import Need
from lowtide.policy.methods import Method
from lowtide.policy.use import Use
from lowtide.session.replay import gradients
from lowtide.verify.evidence import _FIRST, _RISKED_ON_VALUES, ALARM, Evidence, Finding, Question, Reading
from lowtide.verify.guard import Guard, _better, _thin
from ranks import on_two_ranks

BATCH = 64
INPUT_OF_3 = "2"  # the ReLU that saves it too comes first


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1),
        nn.Flatten(), nn.Linear(16 * 64, 10),
    )  # fmt: skip


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(BATCH, 3, 8, 8, generator=generator)
        yield x, (x.mean((1, 2, 3)) > 0).long()


def agreed(out, labels):
    """All samples pull the same way, so SGD has little noise and bias shows."""
    return (out - 5).square().mean()


def train(model, steps=6, seed=1, loss=F.cross_entropy, rate=0.05):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    torch.manual_seed(7)
    for x, y in batches(steps, seed):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return [*model.state_dict().values(), torch.get_rng_state()]


@dataclass(frozen=True)
class Wrong(Codec):
    """Stores exact values in 8 bits' bytes, and gives back wrong ones."""

    factor: float
    id: ClassVar[str] = "wrong"

    def encode(self, tensor, *, key, support=None):
        return Packed(self, lowtide.codecs.TensorMeta.of(tensor), (tensor.clone(),))

    def decode(self, packed, support=None):
        return packed.buffers[0] * self.factor

    def packed_nbytes(self, meta):
        return meta.numel


@dataclass(frozen=True)
class Spoilt(Method):
    """Right but for one place, from a step on."""

    name: ClassVar[str] = "spoilt"
    module: str
    codec: Codec

    def choose(self, use: Use) -> lowtide.Choice:
        spoilt = any(site.module == self.module for site in use.sites)
        return lowtide.Choice.store(self.codec if spoilt else GroupQuant(8))


@pytest.mark.parametrize("method", ["actnn", "division", "auto", "tinyscript", "gact", "lossless"])
def test_a_guard_that_finds_nothing_changes_nothing(method):
    plain, watched = net(), net()
    lowtide.attach(plain, method)
    handle = lowtide.attach(watched, method, guard=Guard(every=2, error=1e3, bias=1e3))
    for a, b in zip(train(plain), train(watched), strict=True):
        assert torch.equal(a, b)
    assert [reading.step for reading in handle.guard.readings] == [2, 4, 6]
    assert len(handle.guard.raised) == 0
    assert handle.guard.off is None
    assert not any("guard" in note for note in handle.report().notes)


def test_exact_storage_reads_zero():
    model = net()
    handle = lowtide.attach(model, "lossless", guard=Guard(every=1))
    train(model)
    assert len(handle.guard.readings) == 6
    for reading in handle.guard.readings:
        assert reading.error == reading.bias == reading.along == 0
        assert 0 < reading.noise < reading.square


def test_readings_are_those_of_whole_gradients():
    """The surrogate for the loss, the parts and their scale, against gradients of the real loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    handle = lowtide.attach(model, Spoilt("2", Wrong(1.5)), guard=Guard(every=1, error=1e3, bias=1e3), min_numel=0)
    x, y = torch.randn(BATCH, 32), torch.randint(4, (BATCH,))
    F.cross_entropy(model(x), y).backward()
    handle.remove()
    half = BATCH // 16

    def part(i):
        rows = slice(i * half, (i + 1) * half)
        found = gradients(model, lambda: F.cross_entropy(model(x[rows]), y[rows], reduction="sum") / BATCH)
        return torch.cat([g.flatten().double() for g in found.values()])

    a, b = part(0), part(1)
    (reading,) = handle.guard.readings
    noise = float((a - b).square().sum()) / 2 / 16
    assert reading.noise == pytest.approx(noise, rel=1e-4)
    assert reading.square == pytest.approx(max(0.0, float(a @ b)) + noise, rel=1e-4)
    # The last layer's weight gradient alone is half as long again, all others carry 8-bit noise.
    wrong = [0.5 * gradients(model, lambda i=i: F.cross_entropy(model(x[i * half : (i + 1) * half]),
             y[i * half : (i + 1) * half], reduction="sum") / BATCH)["2.weight"].flatten() for i in (0, 1)]  # fmt: skip
    assert reading.error == pytest.approx(sum(float(w.square().sum()) for w in wrong) / 2 / 16, rel=0.02)
    assert reading.bias == pytest.approx(float(wrong[0] @ wrong[1]), rel=0.1)
    # An error of half the last layer's weight gradient goes along that by half its square.
    along = 2 * sum(float(w.square().sum()) for w in wrong) / (float(a @ a) + float(b @ b))
    assert reading.along == pytest.approx(along, rel=0.02)


def test_a_biased_codec_is_found_raised_logged_and_kept(caplog):
    model = net()
    method = Spoilt("3", Wrong(2.0))
    handle = lowtide.attach(model, method, guard=Guard(every=1))
    with caplog.at_level(logging.WARNING, "lowtide.guard"):
        train(model, steps=40, loss=agreed, rate=1e-5)
    assert [site.module for site in handle.guard.raised.choices] == [INPUT_OF_3]
    assert "bias" in caplog.text
    assert "3: Convolution.input" in caplog.text
    assert any("guard: step" in note for note in handle.report().notes)
    row = next(row for row in handle.report().sites if row.site.module == INPUT_OF_3)
    assert "wrong" not in row.codec
    state = json.loads(json.dumps(handle.state_dict()))
    handle.remove()
    again = net()
    other = lowtide.attach(again, method, guard=Guard(every=1))
    other.load_state_dict(state)
    assert other.guard.raised == handle.guard.raised
    assert other.state_dict() == handle.state_dict()
    again(next(batches(1))[0])
    found = next(r for r in other.report().sites if r.site.module == INPUT_OF_3)
    assert found.codec == row.codec


def test_a_large_error_is_met_at_the_first_look():
    model = net()
    handle = lowtide.attach(model, Spoilt("3", Wrong(200.0)), guard=Guard(every=1))
    train(model, steps=1)
    assert [site.module for site in handle.guard.raised.choices] == [INPUT_OF_3]
    assert "an error of" in handle.guard.log[0]


def test_an_error_above_the_band_is_met_after_some_looks():
    model = net()
    handle = lowtide.attach(model, Spoilt("3", Wrong(9.0)), guard=Guard(every=1))
    train(model, steps=8)
    assert [site.module for site in handle.guard.raised.choices] == [INPUT_OF_3]
    assert "an error of" in handle.guard.log[0]


def test_nan_is_met_at_the_first_look_and_the_exact_gradient_is_not():
    model = net()
    handle = lowtide.attach(model, Spoilt("3", Wrong(math.nan)), guard=Guard(every=1))
    x, y = next(batches(1))
    F.cross_entropy(model(x), y).backward()
    assert [site.module for site in handle.guard.raised.choices] == [INPUT_OF_3]
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_lost_step_is_no_reading():
    model = net()
    handle = lowtide.attach(model, "actnn", guard=Guard(every=1))
    x, y = next(batches(1))
    for _ in range(3):
        (F.cross_entropy(model(x), y) * math.inf).backward()
    assert not handle.guard.readings
    assert handle.guard.off is None
    assert len(handle.guard.log) == 1
    assert "step 1: the gradient is not finite, with or without compression" in handle.guard.log[0]


def test_precision_goes_up_until_the_error_is_allowed():
    model = net()
    strict = Guard(every=1, error=0.02)  # of SGD's noise: 8 bits have more, 16 bits less
    handle = lowtide.attach(model, "actnn", bits=1, level="L2", guard=strict)
    train(model, steps=24)
    first, last = (error_of(model, h) for h in (None, handle))
    assert last < first / 10
    assert len(handle.guard.log) > 1
    report = handle.report()
    assert report.stored_nbytes < report.plain_nbytes


def error_of(model, handle):
    """Relative error of a gradient with the codecs that the guard arrived at, or those of the method alone."""
    x, y = next(batches(1, seed=5))
    session = lowtide.compress(model, "actnn", bits=1, level="L2") if handle is None else handle._session.beside(seed=0)
    handles = [h for m in model.modules() for h in (m._forward_pre_hooks, m._forward_hooks)]
    kept = [dict(h) for h in handles]
    for hooks in handles:
        hooks.clear()
    exact = gradients(model, lambda: F.cross_entropy(model(x), y))
    found = session.gradients(lambda: F.cross_entropy(model(x), y), 1)
    for hooks, old in zip(handles, kept, strict=True):
        hooks.update(old)
    square = sum(float((found[n] - exact[n]).square().sum()) for n in exact)
    return math.sqrt(square / sum(float(g.square().sum()) for g in exact.values()))


def test_outputs_of_one_node_are_all_looked_at():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return self.b(input=torch.relu(self.a(x))).chunk(2, -1)

    model = Halves()
    handle = lowtide.attach(model, "actnn", min_numel=0, guard=Guard(every=1))
    for _ in range(2):
        model(torch.randn(64, 16))[1].square().sum().backward()
    assert len(handle.guard.readings) == 2
    handle.remove()


def test_a_batch_norm_may_be_called_by_keyword():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm = nn.Linear(16, 64), nn.BatchNorm1d(64)

        def forward(self, x):
            return self.norm(input=self.a(x))

    model = Named()
    handle = lowtide.attach(model, "actnn", min_numel=0, guard=Guard(every=1))
    for _ in range(3):
        model(torch.randn(1024, 16)).square().sum().backward()
    assert handle.guard.off is None
    assert len(handle.guard.readings) == 3
    handle.remove()


@pytest.mark.parametrize(
    "change", [{"readings": [1]}, {"readings": 3}, {"evidence": {}}, {"raised": None}, {"evidence": "short"}]
)
def test_a_broken_state_of_a_guard_changes_nothing(change):
    model = net()
    handle = lowtide.attach(model, "actnn", guard=Guard(every=1))
    train(model, steps=2)
    state = handle.state_dict()
    before = json.dumps(state)
    guard = {**state["guard"], **change}
    if guard["evidence"] == "short":
        guard["evidence"] = {**state["guard"]["evidence"], "stakes": [0.1]}
    with pytest.raises(ValueError, match="the guard's state cannot be read"):
        handle.load_state_dict({**state, "step": 77, "guard": guard})
    assert json.dumps(handle.state_dict()) == before


def test_what_is_raised_stays_in_its_home():
    use = Use(Need.LINEAR, lowtide.codecs.TensorMeta((64, 64), (64, 1), torch.float32), False, ())
    choice = lowtide.Choice.store(GroupQuant(2), "file")
    assert _better(use, choice) == lowtide.Choice.store(GroupQuant(4, layout="row"), "file")
    choice = lowtide.Choice.store(Cast("bfloat16"), "file")
    assert _better(use, choice) == lowtide.Choice.offload("file")


def test_the_ladder_ends_at_exact():
    use = Use(Need.LINEAR, lowtide.codecs.TensorMeta((64, 64), (64, 1), torch.float32), False, ())
    choice, seen = lowtide.Choice.store(GroupQuant(1)), []
    while choice != lowtide.Choice.keep():
        choice = _better(use, choice)
        seen.append(choice.codec)
    assert seen == [GroupQuant(4, layout="row"), GroupQuant(8, layout="row"), Cast("bfloat16"), None]


def test_the_ladder_keeps_groups_and_dither():
    meta = lowtide.codecs.TensorMeta((16, 3, 10, 10), (300, 100, 10, 1), torch.float32)
    use = Use(Need.LINEAR, meta, True, ())
    choice = lowtide.Choice.store(GroupQuant(3, 256, "channel", dither=True))
    for bits in (4, 8):
        choice = _better(use, choice)
        assert choice == lowtide.Choice.store(GroupQuant(bits, 256, "channel", dither=True))


CALM = Reading(0, square=1.0, error=0.1, noise=0.05, bias=0.0, along=0.0)


def alarm(readings, parameters=None, error=1.0, bias=0.05):
    """The first finding, and how many looks it took."""
    evidence = Evidence(error, bias)
    for count, reading in enumerate(readings, 1):
        found = evidence.look(reading, {} if parameters is None else parameters(reading))
        if found is not None:
            return found, count
    return None, math.inf


def drawn(values, limit=0.05**2, scale=0.01):
    """Readings with products of errors whose mean is ``limit`` more than that of ``values``."""
    return [CALM._replace(bias=float(limit + scale * value)) for value in values]


def test_evidence_by_hand():
    for readings, expected, most in (
        ([CALM] * 1000, None, None),  # SGD's noise counts as 0.4, its square as 0.16, so 0.1 is allowed
        ([CALM._replace(error=0.16)] * 1000, None, None),
        ([CALM._replace(error=0.2, noise=0.2)] * 1000, None, None),
        ([CALM._replace(error=0.64)] * 10, "error", 5),  # twice what is allowed
        ([CALM._replace(error=64.0)], "error", 1),  # twenty times
        ([CALM._replace(error=math.nan)], "error", 1),
        ([CALM, CALM._replace(error=math.inf)], "error", 2),
        ([CALM._replace(bias=0.05**2)] * 1000, None, None),
        ([CALM._replace(bias=0.01)] * 8, None, None),  # too few
        ([CALM._replace(bias=0.01)] * 30, "bias", 30),
        ([CALM._replace(along=-0.1)] * 30, "shorter", 30),
        ([CALM._replace(along=0.1)] * 30, "longer", 30),
        ([CALM._replace(along=-0.05)] * 1000, None, None),
        ([CALM._replace(bias=b) for b in (0.04, -0.03, 0.05, -0.01)] * 8, None, None),  # noise
        ([Reading(0, 4.0**i, 0.0, 0.0, 0.01 * 4.0**i) for i in range(30)], "bias", 30),  # in units of its own gradient
    ):
        found, count = alarm(readings)
        assert (found and found.what) == expected, readings[0]
        assert expected is None or count <= most


def test_findings_tell_place_and_size():
    found, _ = alarm([CALM._replace(bias=0.04)] * 60)
    assert found == Finding("bias", "", pytest.approx(0.2))
    found, _ = alarm([CALM._replace(error=4 * 0.16)] * 10)
    assert found == Finding("error", "", pytest.approx(2.0))

    def layers(reading):
        return {
            "spoilt": CALM._replace(square=0.02, along=-0.5),
            "small": CALM._replace(square=0.005, along=0.9),  # less than a tenth of the gradient's length
            "right": CALM._replace(square=0.9),
        }

    found, count = alarm([CALM._replace(along=-0.01)] * 60, layers)
    assert found == Finding("shorter", "spoilt", pytest.approx(0.5))
    assert count <= 40


def of_errors(draw, dimensions):
    """Products of two independent errors, each of so many values of mean 0 and deviation 1."""
    return lambda generator, shape: (
        (draw(generator, (*shape, dimensions)) * draw(generator, (*shape, dimensions))).sum(-1) / dimensions**0.5
    )


def rare(generator, shape):
    """Rounding at a tenth of the way between two codes: mostly a little down, now and then far up."""
    return np.where(generator.random(shape) < 0.1, 3.0, -1 / 3)


NULL = {
    "normal": lambda generator, shape: generator.standard_normal(shape),
    "products of normal": of_errors(lambda generator, shape: generator.standard_normal(shape), 2),
    "student": lambda generator, shape: generator.standard_t(3, shape),
    "products of skewed": of_errors(rare, 4),
    "product of skewed": of_errors(rare, 1),
    "skewed up": lambda generator, shape: generator.exponential(1.0, shape) - 1,
    "very skewed up": lambda generator, shape: generator.lognormal(0.0, 1.0, shape) - math.exp(0.5),
    "skewed down": lambda generator, shape: 1 - generator.exponential(1.0, shape),
}
RUNS, LOOKS = 2000, 1000


def alarms(values):
    """In how many rows of values a question alone reaches the alarm, by the formula and for all rows at once."""
    stakes = np.zeros((len(values), len(_RISKED_ON_VALUES)))
    largest, most = np.zeros(len(values)), np.zeros(len(values))
    for n, value in enumerate(values.T, 1):
        stakes += 1 / (n * (n + 1)) / len(_RISKED_ON_VALUES)
        largest = np.maximum(largest, abs(value))
        if n > _FIRST:
            stakes *= 1 + np.outer(value / largest, _RISKED_ON_VALUES)
        most = np.maximum(most, stakes.sum(1))
    return most >= ALARM


def test_the_simulation_is_the_question():
    values = np.random.default_rng(0).standard_normal((20, 200)) + np.linspace(0, 1, 20)[:, None]
    expected = alarms(values)
    assert 0 < expected.sum() < 20
    for row, reached in zip(values, expected, strict=True):
        question, most = Question(), 0.0
        for n, value in enumerate(row, 1):
            question.look(float(value), 1 / (n * (n + 1)))
            most = max(most, math.fsum(question.stakes))
        assert (most >= ALARM) == reached


@pytest.mark.parametrize("kind", NULL)
def test_false_alarms_at_the_limit_are_rarer_than_stated(kind):
    """With a bias of exactly what is allowed, which is worse than none."""
    generator = np.random.default_rng(1)
    count = int(alarms(NULL[kind](generator, (RUNS, LOOKS))).sum())
    # At most 1 % of the runs, and four deviations of a binomial count, about the root of its mean.
    assert count <= RUNS / ALARM + 4 * math.sqrt(RUNS / ALARM)


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_errors_within_the_band_rarely_alarm(spread):
    """Readings scatter, some of them far above the band; their mean is what is allowed."""
    generator, count = np.random.default_rng(2), 0
    for _ in range(100):
        ratios = generator.lognormal(-(spread**2) / 2, spread, 300)
        assert spread < 1 or ratios.max() > 4
        count += alarm([CALM._replace(error=0.16 * float(r)) for r in ratios])[0] is not None
    assert count <= 1 + 4  # 1 % of the runs, and four deviations of 1


@pytest.mark.parametrize(
    ("times", "most"),
    # Products with a deviation of twice the square of the limit. The bias of 1.5, 2 and 5 limits has a mean of 1.25, 3
    # and 24 squares of the limit above what is allowed: 0.6, 1.5 and 12 deviations.
    [(1.5, 150), (2.0, 60), (5.0, 30)],
)
@pytest.mark.parametrize("kind", ["normal", "student"])
def test_looks_until_a_bias_is_found(times, most, kind):
    generator, limit = np.random.default_rng(3), 0.05**2
    counts = []
    for _ in range(20):
        noise = NULL[kind](generator, most) * 2 / (1.0 if kind == "normal" else math.sqrt(3))
        counts.append(alarm([CALM._replace(bias=limit * (times**2 + float(n))) for n in noise])[1])
    assert sorted(counts)[len(counts) // 2] <= most


def test_a_bias_just_above_the_limit_is_found_in_the_end():
    noise = np.random.default_rng(4).standard_normal(20_000)
    found, count = alarm(drawn(noise + 0.05))
    assert found.what == "bias"
    assert count > 500


def test_a_bias_that_begins_late_is_found():
    noise = np.random.default_rng(5).standard_normal(2000)
    noise[1000:] += 1
    found, count = alarm(drawn(noise))
    assert found.what == "bias"
    assert 1000 < count < 1200


def test_evidence_resumes_bit_for_bit():
    noise = np.random.default_rng(6).standard_normal(400)
    readings = [r._replace(along=r.bias) for r in drawn(noise)]

    def layers(reading):
        return {"a": reading, "b": reading._replace(bias=-reading.bias)}

    whole, parts = Evidence(1.0, 0.05), Evidence(1.0, 0.05)
    for i, reading in enumerate(readings):
        whole.look(reading, layers(reading))
        parts.look(reading, layers(reading))
        if i % 100 == 50:
            state = json.loads(json.dumps(parts.state_dict()))
            parts = Evidence(1.0, 0.05)
            parts.load_state_dict(state)
    assert parts.state_dict() == whole.state_dict()
    assert parts.money() == whole.money()
    assert len(json.dumps(whole.state_dict())) < 3000
    with pytest.raises(ValueError, match="expected a state with the keys"):
        parts.load_state_dict({"looks": 1})


def test_a_layer_that_decodes_to_zero_is_found():
    """The bias is large in one layer, and two bits' noise is everywhere."""

    @dataclass(frozen=True)
    class Blind(Method):
        name: ClassVar[str] = "blind"

        def choose(self, use):
            blind = any(site.module == "1" for site in use.sites)
            return lowtide.Choice.store(Wrong(0.0) if blind else GroupQuant(2, layout="row"))

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))
    handle = lowtide.attach(model, Blind(), min_numel=0, guard=Guard(every=1))
    teacher = torch.randn(64, 10)
    for _ in range(40):
        x = torch.randn(BATCH, 64)
        F.cross_entropy(model(x), (x @ teacher + torch.randn(BATCH, 10)).argmax(1)).backward()
    assert "shorter" in handle.guard.log[0]
    assert next(iter(handle.guard.raised.choices)).module == "1"


def test_thin_gradients_keep_inner_products():
    generator = torch.Generator().manual_seed(0)
    a = {"w": torch.randn(1000, 1000, generator=generator), "b": torch.randn(1000, generator=generator)}
    b = {name: g + 0.5 * torch.randn(g.shape, generator=generator) for name, g in a.items()}
    for name, kept in (("w", 1 << 16), ("b", 1000)):
        x, y = _thin(a)[name], _thin(b)[name]
        assert len(x) <= 2 * (1 << 16)
        # The standard error of a mean over the values kept, of products of standard deviation below 1.7.
        assert abs(float(x @ y) / a[name].numel() - float((a[name] * b[name]).mean())) < 5 * 1.7 / math.sqrt(kept)
    assert torch.equal(_thin(a)["b"], a["b"].double())


class WithLoss(nn.Module):
    """Takes names, returns its loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, *, pixels, labels=None):
        logits = self.net(pixels)
        return {"loss": None if labels is None else F.cross_entropy(logits, labels), "logits": logits}


def test_models_that_return_their_loss():
    model = WithLoss()
    handle = lowtide.attach(model, Spoilt("net.3", Wrong(100.0)), guard=Guard(every=1))
    for x, y in batches(3):
        model(pixels=x, labels=y)["loss"].backward()
    assert [site.module for site in handle.guard.raised.choices] == [f"net.{INPUT_OF_3}"]


def test_evaluation_between_steps_is_left_alone():
    model = net()
    handle = lowtide.attach(model, "actnn", guard=Guard(every=1))
    for x, y in batches(3):
        with torch.no_grad():
            model.eval()(x)
        model.train()
        F.cross_entropy(model(x), y).backward()
    assert len(handle.guard.readings) == 3


def test_hooks_on_parameters_count_steps_alone():
    model, fired = net(), []
    model[3].weight.register_hook(lambda gradient: fired.append("before"))
    model[3].weight.register_post_accumulate_grad_hook(lambda parameter: fired.append("after"))
    handle = lowtide.attach(model, "actnn", guard=Guard(every=1))
    for x, y in batches(3):
        F.cross_entropy(model(x), y).backward()
    assert len(handle.guard.readings) == 3
    assert fired == ["before", "after"] * 3


@dataclass(frozen=True)
class Images:
    pixels: torch.Tensor
    labels: torch.Tensor


def test_inputs_in_a_dataclass():
    class OfImages(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, images):
            return F.cross_entropy(self.net(images.pixels), images.labels, reduction="none")

    model, plain = OfImages().eval(), WithLoss().eval()  # batch norms and dropout would see other samples
    handles = [lowtide.attach(m, "lossless", guard=Guard(every=1)) for m in (model, plain)]
    for x, y in batches(2):
        torch.manual_seed(0)
        model(Images(x, y)).mean().backward()
        torch.manual_seed(0)
        F.cross_entropy(plain(pixels=x)["logits"], y).backward()
    for found, expected in zip(*(handle.guard.readings for handle in handles), strict=True):
        assert found.noise > 0
        # Both are sums of float32 products in another order.
        assert found.noise == pytest.approx(expected.noise, rel=1e-4)
        assert found.square == pytest.approx(expected.square, rel=1e-4)


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x, edges):
        return self.layer(x)[edges[0]] - self.layer(x)[edges[1]]


def failing(model, *inputs, match, times=3):
    """Training goes on; the last of ``times`` failures in a row is told."""
    handle = lowtide.attach(model, "actnn", min_numel=0, guard=Guard(every=1))
    for _ in range(times - 1):
        model(*inputs).square().sum().backward()
        assert handle.guard.off is None
    with pytest.warns(UserWarning, match=match):
        model(*inputs).square().sum().backward()
    model(*inputs).square().sum().backward()
    assert any("guard: off" in note for note in handle.report().notes)
    assert not handle._session.is_aside
    assert handle.state_dict()["guard"]["off"]


def test_inputs_without_samples_turn_the_guard_off_and_training_goes_on():
    inputs = torch.randn(50, 32), torch.randint(50, (2, 80))
    failing(Graph(), *inputs, match="guard is off: the batch's tensors do not share one first dimension")


def test_outputs_without_samples_turn_the_guard_off():
    model = nn.Sequential(nn.Linear(32, 32), nn.Flatten(0))
    failing(model, torch.randn(50, 32), match=r"an output of shape \(1600,\) is not by the batch's 50 samples")


def test_a_batch_that_is_too_small_turns_the_guard_off():
    failing(nn.Linear(32, 32), torch.randn(3, 32), match="a batch of 3 samples is too small")


def test_a_batch_norm_that_would_see_too_little_turns_the_guard_off():
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
    failing(model, torch.randn(256, 32), match="a batch norm would see 16 values of a channel, 32 are needed")
    assert not model[1]._forward_pre_hooks


def test_a_probe_that_fails_turns_the_guard_off():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x):
            if len(x) != BATCH:
                raise RuntimeError("only whole batches")
            return self.layer(x)

    failing(Moody(), torch.randn(BATCH, 32), match="guard is off: RuntimeError: only whole batches")


def test_gradients_that_cannot_be_repeated_turn_the_guard_off():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.generator = nn.Linear(32, 32), torch.Generator().manual_seed(0)

        def forward(self, x):
            return self.layer(x * torch.rand(x.shape, generator=self.generator))

    failing(Own(), torch.randn(BATCH, 32), match="the exact gradient of the same samples differs from run to run")


def test_a_single_failure_is_forgiven():
    model = net()
    handle = lowtide.attach(model, "actnn", guard=Guard(every=1))
    for count in (2, BATCH, 2, 2, BATCH, 2):
        x = torch.randn(count, 3, 8, 8)
        F.cross_entropy(model(x), torch.zeros(count, dtype=torch.long)).backward()
    assert len(handle.guard.readings) == 2
    assert handle.guard.off is None


def test_forwards_without_backward_are_told():
    model = net()
    handle = lowtide.attach(model, "actnn", guard=Guard(every=1))
    x, _ = next(batches(1))
    for _ in range(3):
        model(x)
    with pytest.warns(UserWarning, match="no gradient came to the outputs of step 3"):
        model(x)
    assert not handle.guard.readings


def test_a_sample_waits_for_its_backward():
    """Two forwards and one backward, such as of a siamese network."""
    model = net()
    handle = lowtide.attach(model, "actnn", guard=Guard(every=4))
    for x, y in batches(4):
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(x.flip(3)), y)).backward()
    assert [reading.step for reading in handle.guard.readings] == [4, 8]


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 8)

    def forward(self, x):
        return self.layer(x.sub_(0.5).mul_(3))


def test_a_model_that_changes_its_input():
    torch.manual_seed(0)
    model = InPlace()
    handle = lowtide.attach(model, lowtide.codecs.Cast("bfloat16"), min_numel=0, guard=Guard(every=1))
    for _ in range(3):
        model(torch.randn(BATCH, 32)).square().sum().backward()
    assert handle.guard.off is None
    assert len(handle.guard.readings) == 3
    # Rounding to 8 significant bits errs by at most 2**-8 of each value.
    assert all(reading.error < 2**-14 * reading.square for reading in handle.guard.readings)


def test_a_hook_of_the_user_sees_inputs_once():
    torch.manual_seed(0)
    model = nn.Linear(32, 8)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 10,))
    handle = lowtide.attach(model, "lossless", guard=Guard(every=1))
    x = torch.randn(BATCH, 32)
    model(x).sum().backward()
    (reading,) = handle.guard.readings
    half = BATCH // 16
    gradient = [10 * x[i * half : (i + 1) * half].sum(0).expand(8, 32).double() for i in (0, 1)]
    bias = half**2 * 8  # every output's bias has the gradient of all samples
    assert reading.square - reading.noise == pytest.approx(float((gradient[0] * gradient[1]).sum()) + bias, rel=1e-4)


def test_checkpointing_the_attached_model():
    def steps(guard):
        model = net()
        handle = lowtide.attach(model, "actnn", guard=guard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for x, y in batches(4):
            optimizer.zero_grad()
            F.cross_entropy(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False), y).backward()
            optimizer.step()
        return model, handle

    (plain, _), (watched, handle) = steps(False), steps(Guard(every=1, error=1e3, bias=1e3))
    for a, b in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert handle.guard.off is None
    assert len(handle.guard.readings) == 4


def test_compiling_an_attached_model_leaves_it_exact_and_says_so():
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    handle = lowtide.attach(model, "actnn", min_numel=0, guard=Guard(every=1))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(BATCH, 32)
    for _ in range(2):
        compiled(x).sum().backward()
    torch._dynamo.reset()
    assert "no forward was seen yet" in handle.report().notes[-1]
    handle.remove()
    found = model[0].weight.grad / 2
    model.zero_grad()
    model(x).sum().backward()
    assert torch.allclose(found, model[0].weight.grad)


def test_resuming_between_any_two_steps_repeats_the_run():
    guard = Guard(every=2, error=0.02)

    def attached(model):
        return lowtide.attach(model, "actnn", bits=1, level="L2", guard=guard)

    def go(model, handle, data):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for i, (x, y) in data:
            torch.manual_seed(i)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    data = list(enumerate(batches(8)))
    whole = net()
    first = attached(whole)
    go(whole, first, data)
    part = net()
    second = attached(part)
    go(part, second, data[:4])
    again = net()
    again.load_state_dict(part.state_dict())
    third = attached(again)
    third.load_state_dict(json.loads(json.dumps(second.state_dict())))
    go(again, third, data[4:])
    for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert third.state_dict() == first.state_dict()


class Outputs(nn.Module):
    """Returns what ``form`` makes of features and logits."""

    def __init__(self, form):
        super().__init__()
        self.first, self.body, self.head, self.form = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 4), form
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        features = torch.tanh(self.body(self.first(x)))
        return self.form(self, features, self.head(features))


@dataclass
class Found:
    features: torch.Tensor
    logits: torch.Tensor


FORMS = {
    "logits": (lambda m, f, z: z, lambda out: out),
    "depending": (lambda m, f, z: (f, z), lambda out: out[1]),
    "dataclass": (lambda m, f, z: Found(f, z), lambda out: out.logits),
    "leaf": (lambda m, f, z: (z, m.scale), lambda out: out[0] * out[1]),
}


@pytest.mark.parametrize("form", FORMS)
def test_readings_do_not_depend_on_the_form_of_outputs(form):
    make, logits = FORMS[form]
    torch.manual_seed(0)
    model = Outputs(make)
    handle = lowtide.attach(model, Spoilt("body", Wrong(3.0)), min_numel=0, guard=Guard(every=1, error=1e3, bias=1e3))
    x, y = torch.randn(BATCH, 32), torch.randint(4, (BATCH,))
    for _ in range(2):
        out = logits(model(x))
        F.cross_entropy(out, y).backward()
    torch.manual_seed(0)
    other = Outputs(FORMS["logits"][0])
    expected = lowtide.attach(other, Spoilt("body", Wrong(3.0)), min_numel=0, guard=Guard(every=1, error=1e3, bias=1e3))
    F.cross_entropy(other(x), y).backward()
    right, found = expected.guard.readings[0], handle.guard.readings[0]
    for name in ("square", "error", "noise"):
        assert getattr(found, name) == pytest.approx(getattr(right, name), rel=0.01)
    assert not model.scale._backward_hooks


def test_a_mean_beside_samples_counts_once():
    """A penalty on the weights, returned by the model, has one gradient however many samples there are."""
    torch.manual_seed(0)
    model = Outputs(lambda m, f, z: (z, 0.5 * m.head.weight.square().sum()))
    handle = lowtide.attach(model, "lossless", guard=Guard(every=1))
    x, y = torch.randn(BATCH, 32), torch.randint(4, (BATCH,))
    logits, penalty = model(x)
    (F.cross_entropy(logits, y) + 100 * penalty).backward()
    handle.remove()
    (reading,) = handle.guard.readings
    # The penalty is nearly all of the gradient, and a part of 1/16 has 1/16 of it.
    assert reading.square == pytest.approx(float((100 * model.head.weight.detach() / 16).square().sum()), rel=0.02)


def test_dropout_differs_between_the_parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 4))
    handle = lowtide.attach(model, "lossless", guard=Guard(every=1))
    x = torch.randn(1, 32).expand(BATCH, 32)
    model(x).sum().backward()
    assert handle.guard.readings[0].noise > 0.01 * handle.guard.readings[0].square


def test_autocast_is_that_of_the_forward():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    handle = lowtide.attach(model, "lossless", guard=Guard(every=1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(BATCH, 32)).float().square().mean()
    loss.backward()
    assert handle.guard.off is None
    assert len(handle.guard.readings) == 1
    assert set(seen) == {torch.bfloat16}


def test_what_lives_shorter_in_a_probe_is_not_compressed_there():
    """The last sigmoid's result is held by the caller in training, and by nobody in a probe."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Sigmoid())
    handle = lowtide.attach(model, GroupQuant(1), min_numel=0, guard=Guard(every=1))
    x = torch.randn(BATCH, 32)
    out = model(x)
    out.sum().backward()
    assert all(row.state != "compressed" for row in handle.report().sites if row.site.op == "Sigmoid")
    assert handle.guard.readings[0].error == 0
    del out


def test_remove_leaves_no_hook():
    model = net()
    handle = lowtide.attach(model, "actnn", guard=True)
    assert handle.guard.guard == Guard(every=100)
    handle.remove()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Guard(every=0), "every must be a whole number of at least 1; got 0"),
        (lambda: Guard(error=0), "error must be a number above 0; got 0"),
        (lambda: Guard(bias=math.nan), "bias must be a number above 0; got nan"),
        (lambda: lowtide.attach(net(), guard="yes"), "guard must be True, False or a lowtide.Guard; got 'yes'"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_states_with_and_without_a_guard_do_not_mix():
    with_guard = lowtide.attach(net(), "division", guard=True)
    without = lowtide.attach(net(), "division")
    with pytest.raises(ValueError, match="this state has a guard and this attachment has none"):
        without.load_state_dict(with_guard.state_dict())
    with pytest.raises(ValueError, match="this attachment has a guard and this state has none"):
        with_guard.load_state_dict(without.state_dict())


def test_probes_keep_a_sixteenth_of_the_batch():
    """What a probe saves exactly must be small beside what a step saves."""
    model = net()
    handle = lowtide.attach(model, "lossless", guard=Guard(every=1))
    x, y = next(batches(1))
    loss = F.cross_entropy(model(x), y)
    report, taken = handle.report(), handle.guard._taken
    assert taken.half == BATCH // 16
    assert [len(t) for t in taken.inputs[0]] == [2 * taken.half]
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    loss.backward()
    with handle._session.aside(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = taken.loss(model, 0)
    probe = sum(s.nbytes() for key, s in saved.items() if key not in parameters)
    assert probe < report.plain_nbytes / 12


def _train_on_rank(rank):
    found = {}
    for guard in (False, Guard(every=1, error=1e3, bias=1e3)):
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(net())
        handle = lowtide.attach(model, "actnn", guard=guard)
        train(model, steps=3, seed=rank)
        found[bool(guard)] = [t.clone() for t in model.state_dict().values()]
        readings = 0 if handle.guard is None else len(handle.guard.readings)
        handle.remove()
        del model, handle  # before the process group they use
    refused = ""
    try:
        lowtide.attach(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), guard=True)
    except ValueError as error:
        refused = str(error)
    return found, readings, refused


def test_ranks_probe_for_themselves(tmp_path):
    for found, readings, refused in on_two_ranks(_train_on_rank, tmp_path):
        assert readings == 3
        assert "a SyncBatchNorm waits for other processes" in refused
        for plain, watched in zip(found[False], found[True], strict=True):
            assert torch.equal(plain, watched)
