"""The training harness on tiny data: resuming, pairing by seed, the table. No network, no data set."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from evidence import data, nets, noise, summary, tasks, training
from evidence.muon import Muon, orthogonalized
from evidence.tasks import ARMS, TASKS, Papers, Samples, Task, adjacency, images
from evidence.training import Job, append, jobs_of, missing, read, run


def split(count=96):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    y = (x.float().mean((1, 2, 3)) > 127.5).long()
    return data.Split(x, y, x, y)


def tiny():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 2),
    )  # fmt: skip


@pytest.fixture
def task(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWTIDE_DATA", str(tmp_path))
    found = Task(
        title="tiny",
        epochs=4,
        arms={"exact": 2, "actnn": 2, "exact, perturbed": 1},
        build=tiny,
        load=lambda seed: Samples(split(), 16, images),
        optimizer=torch.optim.SGD,
        rate=0.1,
    )
    monkeypatch.setitem(TASKS, "tiny", found)
    return found


WHEN = ("cpu_seconds", "date", "commit")


def same(a, b):
    return {k: v for k, v in a.items() if k not in WHEN} == {k: v for k, v in b.items() if k not in WHEN}


@pytest.mark.parametrize("arm", ["exact", "actnn", "auto"])
def test_a_run_repeats_and_depends_on_its_seed(task, arm):
    first = run(Job("tiny", arm, 0))
    assert same(first, run(Job("tiny", arm, 0)))
    assert first["loss"] != run(Job("tiny", arm, 1))["loss"]


@pytest.mark.parametrize("arm", ["exact", "actnn", "auto"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(task, arm, monkeypatch):
    monkeypatch.setattr(training, "_PAUSE", -1.0)
    job = Job("tiny", arm, 0)
    whole = run(job)
    training._place(job).unlink()
    once = training.train_epoch
    calls = []

    def stops(*given):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(given)
        return once(*given)

    monkeypatch.setattr(training, "train_epoch", stops)
    with pytest.raises(KeyboardInterrupt):
        run(job)
    monkeypatch.setattr(training, "train_epoch", once)
    assert training._place(job).exists()
    assert same(run(job), whole)


def test_arms_see_the_same_weights_and_batches(task):
    """A method that stores everything exactly must give the very row of the exact run."""
    ARMS["lossless"] = tasks.Arm("lossless")
    try:
        exact, lossless = (run(Job("tiny", arm, 0)) for arm in ("exact", "lossless"))
    finally:
        del ARMS["lossless"]
    assert (exact["accuracy"], exact["loss"]) == (lossless["accuracy"], lossless["loss"])


def test_a_run_that_diverges_ends_and_says_so(task, monkeypatch):
    monkeypatch.setitem(TASKS, "tiny", dataclasses.replace(task, rate=1e30))
    row = run(Job("tiny", "exact", 0))
    assert not torch.tensor(row["loss"]).isfinite()
    assert row["epochs"] < task.epochs


def test_only_missing_rows_are_run(task, tmp_path):
    path = tmp_path / "rows.csv"
    jobs = jobs_of(["tiny"], None, None)
    arms = ("exact", "actnn", "exact, perturbed")
    assert jobs == [Job("tiny", arm, seed) for seed in (0, 1) for arm in arms if (arm, seed) != (arms[2], 1)]
    assert len(jobs_of(["tiny"], ["auto"], 3)) == 3
    assert missing(jobs, path) == jobs
    append(run(jobs[1], epochs=1), path)
    append(run(jobs[3], epochs=1), path)
    assert missing(jobs, path) == [jobs[0], jobs[2], jobs[4]]
    assert [row["arm"] for row in read(path)] == ["actnn", "exact"]
    assert float(read(path)[0]["ratio"]) > 1
    assert read(path)[1]["ratio"] == ""


def test_images_are_moved_and_mirrored_but_not_changed():
    pixels = torch.arange(1, 1 + 6 * 3 * 64, dtype=torch.int32).remainder(251).to(torch.uint8).view(6, 3, 8, 8)
    plain = images(pixels, None)
    assert torch.equal(plain, tasks.normalized(pixels))
    background = tasks.normalized(torch.zeros(1, 3, 1, 1))
    moved = images(pixels.expand(6, 3, 8, 8), torch.Generator().manual_seed(0))
    wide = torch.nn.functional.pad(plain - background, (2,) * 4) + background
    for i in range(6):
        candidates = (
            window if not flip else window.flip(2)
            for y in range(5) for x in range(5) for flip in (False, True)
            for window in [wide[i, :, y : y + 8, x : x + 8]]
        )  # fmt: skip
        assert any(torch.allclose(moved[i], candidate, atol=1e-5) for candidate in candidates)
    assert not torch.allclose(moved, plain)


def test_a_part_of_the_training_images_joins_the_test(monkeypatch):
    train, test = torch.arange(50_000), torch.arange(50_000, 60_000)
    monkeypatch.setattr(data, "cifar10", lambda: data.Split(train, train + 1, test, test + 1))
    found = TASKS["cifar-short"].load(0).split
    assert (len(found.train_x), len(found.test_x)) == (40_000, 20_000)
    assert torch.equal(torch.cat([found.train_x, found.test_x]).sort().values, torch.arange(60_000))
    assert torch.equal(found.train_y, found.train_x + 1)
    assert torch.equal(found.test_y, found.test_x + 1)


def test_a_triangle_rises_for_a_quarter_and_ends_at_nothing():
    optimizer = Muon(tiny().parameters(), lr=0.5, rest=0.4, weight_decay=0.0)
    schedule = tasks.triangle(optimizer, 8)
    rates = []
    for _ in range(9):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    convolutions, others = zip(*rates, strict=True)
    assert convolutions == pytest.approx([0, 0.25, *(0.5 * left / 6 for left in range(6, -1, -1))])
    assert others == pytest.approx([0.4 * rate for rate in convolutions])


def test_an_orthogonalized_matrix_has_the_singular_vectors_of_the_matrix():
    generator = torch.Generator().manual_seed(0)
    for shape in ((6, 20), (20, 6), (8, 8)):
        matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        found = left.T @ orthogonalized(matrix, repeats=5) @ right.T
        # By hand: the polynomial acts on each singular value by itself.
        values = values / matrix.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        assert torch.allclose(found, values.diag(), atol=1e-6)  # the guard of the division is 1e-7


def test_muon_orthogonalizes_steps_of_convolutions_and_is_sgd_else():
    models = [tiny() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    muon = Muon(models[0].parameters(), lr=0.5, rest=0.4, weight_decay=0.01)
    others = [p for p in models[1].parameters() if p.ndim < 4]
    sgd = torch.optim.SGD(others, lr=0.2, momentum=0.85, nesterov=True, weight_decay=0.01)
    momentum = torch.zeros_like(models[0][0].weight)
    for _ in range(3):
        weight = models[0][0].weight.detach().clone()
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        muon.step()
        sgd.step()
        gradient = models[1][0].weight.grad
        momentum = 0.6 * momentum + gradient
        change = 0.5 * orthogonalized((gradient + 0.6 * momentum).flatten(1)).view(weight.shape)
        expected = weight * (8**0.5 / weight.norm()) - change
        assert torch.allclose(models[0][0].weight, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert a.ndim == 4 or torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_whitened_patches_are_uncorrelated():
    mixed = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    mixed = mixed + 2 * mixed.flip(1).roll(1, 3)
    weight = nets.whitening(mixed)
    out = nets.Whitening(weight)(mixed).detach().transpose(0, 1).flatten(1).double()
    half = len(out) // 2
    assert torch.equal(weight[:half], -weight[half:])
    covariance = out[:half] @ out[:half].T / out.shape[1]
    assert torch.allclose(covariance, covariance.diagonal().diag(), atol=1e-4)  # float32
    rows = torch.nn.functional.unfold(mixed, 2).transpose(1, 2).flatten(0, 1).double()
    values = torch.linalg.eigvalsh(rows.T @ rows / len(rows)).flip(0)
    assert torch.allclose(covariance.diagonal(), values / (values + 0.01), atol=1e-4)


def test_adjacency_is_that_of_the_formula():
    edges = torch.tensor([[0, 1, 1], [1, 2, 0]])
    dense = torch.eye(3)
    dense[0, 1] = dense[1, 0] = dense[1, 2] = dense[2, 1] = 1
    root = dense.sum(1).rsqrt().diag()
    assert torch.allclose(adjacency(edges, 3).to_dense(), root @ dense @ root)


def test_papers_are_divided_by_class():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(7, (2000,), generator=generator)
    graph = data.Graph(torch.ones(2000, 5, dtype=torch.uint8), labels, torch.zeros(2, 1, dtype=torch.long))
    papers = Papers(graph, 0)
    assert torch.bincount(labels[papers.train]).tolist() == [20] * 7
    assert len(papers.test) == 1000
    assert not set(papers.train.tolist()) & set(papers.test.tolist())
    assert not torch.equal(papers.test, Papers(graph, 1).test)


def test_every_arm_names_a_method_with_its_options():
    import lowtide

    for arm in ARMS.values():
        if arm.method is not None:
            lowtide.attach(tiny(), arm.method, **arm.options).remove()
    for task in TASKS.values():
        assert set(task.arms) | set(task.more) <= set(ARMS)


def row(arm, seed, accuracy, ratio=""):
    return {
        **dict.fromkeys(training.FIELDS, ""), "task": "cifar", "arm": arm, "seed": str(seed), "accuracy": str(accuracy),
        "ratio": str(ratio), "method": ARMS[arm].method or "", "commit": "c", "date": "d",
    }  # fmt: skip


def test_differences_are_those_of_independent_runs():
    rows = [row("exact", i, 80.0 + i) for i in range(3)] + [row("exact, perturbed", i, 81.0 - i) for i in range(3)]
    rows += [row("division", 1, 79.5, 11.0), row("division", 0, 78.5, 11.0)]
    found = summary.table_of(rows, "cifar")
    # Squares about the means: 2, 2 and 0.5, with 2 + 2 + 1 degrees of freedom; t is 2.571 for 5 of them.
    deviation = (4.5 / 5) ** 0.5
    assert found.deviation == pytest.approx((deviation, 5))
    assert found.gap("division", tasks.CONTROLS) == pytest.approx((-1.5, 2.571 * deviation * (1 / 2 + 1 / 6) ** 0.5))
    assert found.gap("exact", tasks.CONTROLS) == pytest.approx((1.0, 2.571 * deviation * (2 / 3) ** 0.5))
    exact, null, division = summary.lines_of(found)[2:]
    assert exact.startswith("| exact |  | 3 | 81.00 | 1.00 | +1.00 | -0.99 to +2.99 |  |  |")
    assert null.startswith("| exact, perturbed |  | 3 | 80.00 | 1.00 | -1.00 |")
    assert division == (
        "| division | division | 2 | 79.00 | 0.71 | -1.50 | -3.49 to +0.49 | -2.00 | 2.23 | not resolved | 11.0x less |"
    )
    text = "\n".join(summary.reading(found))
    assert "`exact, perturbed` ends -1.00 ± 1.99 beside `exact`. Over 3 seeds the two correlate by -1.00." in text
    assert "Not resolved: neither a loss nor its absence to 0.3 points is shown: `division` -1.50 ± 1.99." in text


def test_splits_that_differ_by_seed_are_compared_seed_by_seed():
    rows = [row("exact", seed, 70.0 + 10 * seed) for seed in range(3)]
    rows += [row("lowrank", seed, 69.0 + 10 * seed + 0.5 * (seed == 1), 11.0) for seed in range(3)]
    found = summary.table_of([{**own, "task": "cora"} for own in rows], "cora")
    # -1, -0.5, -1: the mean is -0.833, the deviation 0.289, t 4.303.
    assert found.gap("lowrank", tasks.CONTROLS) == pytest.approx((-2.5 / 3, 4.303 * (1 / 12) ** 0.5 / 3**0.5))


def test_noise_that_is_added_has_the_length_of_the_error():
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300, bias=False))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    rows = [
        {"task": "t", "arm": arm, "epoch": str(epoch), "parameter": name, "error": str(error)}
        for arm, factor in (("division", 1.0), ("auto", 9.0))
        for name, errors in (("", (7, 7)), ("0.weight", (0.2, 0.4)), ("0.bias", (0, 0)), ("1.weight", (1, 1)))
        for epoch, error in zip((1, 3), (factor * e for e in errors), strict=True)
    ]
    errors = training.errors_along("t", "division", rows)
    for epoch, expected in ((0.0, 0.2), (1.5, 0.25), (5.0, 0.4)):
        for name, parameter in model.named_parameters():
            parameter.grad = before[name].clone()
        training.add_noise(model, errors, epoch, torch.Generator().manual_seed(0))
        found = {n: float((p.grad - before[n]).norm() / before[n].norm()) for n, p in model.named_parameters()}
        # The length of 90 000 normal numbers deviates by 1 / sqrt(2 * 90 000) of itself.
        assert found["0.weight"] == pytest.approx(expected, rel=5 / (2 * 90_000) ** 0.5)
        assert found["1.weight"] == pytest.approx(1, rel=5 / (2 * 90_000) ** 0.5)
        assert found["0.bias"] == 0
    with pytest.raises(ValueError, match=r"run: python -m evidence\.noise t --arms 'pool'"):
        training.errors_along("t", "pool", rows)


def test_a_run_with_added_noise(task, monkeypatch, tmp_path):
    names = [name for name, _ in tiny().named_parameters()]
    rows = [f"tiny,division,0,{name},0.5" for name in names]
    monkeypatch.setattr(training, "NOISE", tmp_path / "noise.csv")
    training.NOISE.write_text("\n".join(["task,arm,epoch,parameter,error", *rows]))
    noisy = run(Job("tiny", "exact + noise of division", 0))
    assert noisy["loss"] != run(Job("tiny", "exact", 0))["loss"]
    assert noisy["options"] == "noise as large as the error of division"
    training.NOISE.write_text("\n".join(["task,arm,epoch,parameter,error", *(r[:-3] + "0" for r in rows)]))
    assert run(Job("tiny", "exact + noise of division", 0))["loss"] == run(Job("tiny", "exact", 0))["loss"]


def test_perturbed_weights_are_off_by_what_is_said():
    exact, off = nn.Linear(300, 300), nn.Linear(300, 300)
    off.load_state_dict(exact.state_dict())
    training.perturb(off, 1e-3, seed=0)
    relative = (off.weight / exact.weight - 1).detach()
    # 90 000 normal numbers; float32 adds errors of 1e-7, a ten-thousandth of this.
    assert float(relative.square().mean().sqrt()) == pytest.approx(1e-3, rel=5 / (2 * 90_000) ** 0.5 + 1e-3)
    assert float(relative.mean()) == pytest.approx(0, abs=5e-3 / 300)


def test_a_perturbed_run_is_another_run_of_nearly_the_same_weights(task):
    (_, exact), (_, off) = (training.prepared(Job("tiny", arm, 0), 1) for arm in ("exact", "exact, perturbed"))
    for a, b in zip(exact["model"].parameters(), off["model"].parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=0)
    assert run(Job("tiny", "exact", 0))["loss"] != run(Job("tiny", "exact, perturbed", 0))["loss"]


def test_mirrored_images_are_judged_with_their_originals():
    class Left(nn.Module):
        def forward(self, x):
            left, right = x[..., :4].mean((1, 2, 3)), x[..., 4:].mean((1, 2, 3))
            return torch.stack([left, torch.full_like(left, 0.1)], 1) * torch.where(left < right, 1.0, 3.0)[:, None]

    pixels = torch.full((500, 3, 8, 8), 128, dtype=torch.uint8)
    pixels[..., :4], pixels[..., 4:] = 100, 140  # dark at the left, so that the mirror image decides
    label = torch.zeros(500, dtype=torch.long)
    half = data.Split(pixels, label, pixels, label)
    assert Samples(half, 100, images).accuracy(Left()) == 0
    assert Samples(half, 100, images, mirrored=True).accuracy(Left()) == 100


def test_errors_along_a_run(task):
    rows = list(noise.rows_of("tiny", [0, 3], ["division", "division, 4 bits"]))
    whole = [row for row in rows if not row["parameter"]]
    assert [(row["arm"], row["epoch"]) for row in whole] == [
        *(("division", 0), ("division, 4 bits", 0), ("division", 3), ("division, 4 bits", 3)),
    ]
    assert whole[0]["error"] > whole[1]["error"] > 0
    assert whole[0]["norm"] == whole[1]["norm"] != whole[2]["norm"]  # trained in between
    # The squared length of the error is the sum of those of all parameters.
    parts = [row for row in rows if row["parameter"] and row["epoch"] == 3]
    assert {row["arm"] for row in parts} == {"division"}
    assert [row["parameter"] for row in parts] == [name for name, _ in tiny().named_parameters()]
    total = math.hypot(*(row["error"] * row["norm"] for row in parts))
    assert total == pytest.approx(whole[2]["error"] * whole[2]["norm"], rel=1e-6)
    assert math.hypot(*(row["sgd_noise"] * row["norm"] for row in parts)) == pytest.approx(
        whole[2]["sgd_noise"] * whole[2]["norm"], rel=1e-6
    )
    text = [{key: "" if value is None else str(value) for key, value in row.items()} for row in rows]
    lines = summary.noise_table(text)
    assert lines[0] == "| | epoch 0 | epoch 3 |"
    assert lines[2].startswith(f"| division | {whole[0]['error']:.2g}")


def test_sgd_noise_is_the_deviation_of_a_gradient_from_batch_to_batch():
    # The gradient of the mean of w * x is the mean of x: 1, 2 and 6 deviate by the root of (4 + 1 + 9) / 2.
    model = nn.Linear(1, 1, bias=False)
    batches = [tasks.Batch(torch.full((4, 1), x), torch.zeros(4)) for x in (1.0, 2.0, 6.0)]

    class Mean:
        def loss(self, model, batch):
            return model(batch.x).mean()

    assert noise.sgd_noise(model, Mean(), batches) == pytest.approx({"": 7**0.5, "weight": 7**0.5})
    assert model.weight.grad is None


def test_verdicts_are_about_the_whole_interval():
    for mean, half, expected in (
        (-0.1, 0.15, "within 0.3"),
        (-0.2, 0.15, "lower"),
        (-0.2, 0.05, "within 0.3, lower"),
        (-0.2, 0.3, "not resolved"),
        (0.0, 0.31, "not resolved"),
        (0.5, 0.1, "higher"),
        (0.1, 0.05, "within 0.3, higher"),
        (-0.5, 0.4, "lower"),
        (-0.5, math.nan, "one run"),
    ):
        assert summary.judged(summary.Gap(mean, half)) == expected


def test_the_figure_shows_every_arm(tmp_path):
    arms = ("exact", "exact, perturbed", "division", "exact + noise of division")
    rows = [row(arm, seed, 80.0 + seed, 11.0 if arm == "division" else "") for arm in arms for seed in range(2)]
    summary.draw([summary.table_of(rows, "cifar")], tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text()
    assert all(f">{arm}<" in drawn for arm in arms)


def test_the_page_is_that_of_the_rows():
    repo = Path(__file__).parent.parent
    rows, measured = (read(repo / f"evidence/results/{name}.csv") for name in ("training", "noise"))
    assert (repo / "docs/evidence.md").read_text() == summary.page(rows, measured), "run: python -m evidence.summary"
