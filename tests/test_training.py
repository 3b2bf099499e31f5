"""The training harness on tiny data: resuming, pairing by seed, the table. No network, no data set."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from evidence import data, noise, summary, tasks, training
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
        seeds=2,
        arms=("exact", "actnn"),
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
    assert (exact["accuracies"], exact["loss"]) == (lossless["accuracies"], lossless["loss"])


def test_a_run_that_diverges_ends_and_says_so(task, monkeypatch):
    monkeypatch.setitem(TASKS, "tiny", dataclasses.replace(task, rate=1e30))
    row = run(Job("tiny", "exact", 0))
    assert not torch.tensor(row["loss"]).isfinite()
    assert row["epochs"] < task.epochs


def test_only_missing_rows_are_run(task, tmp_path):
    path = tmp_path / "rows.csv"
    jobs = jobs_of(["tiny"], None, None)
    assert jobs == [Job("tiny", arm, seed) for seed in (0, 1) for arm in ("exact", "actnn")]
    assert missing(jobs, path) == jobs
    append(run(jobs[1], epochs=1), path)
    append(run(jobs[2], epochs=1), path)
    assert missing(jobs, path) == [jobs[0], jobs[3]]
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


def test_differences_are_taken_seed_by_seed():
    rows = [row("exact", 0, 80.0), row("exact", 1, 90.0), row("exact", 2, 70.0)]
    rows += [row("division", 1, 89.0, 11.0), row("division", 0, 79.5, 11.0)]
    arms = summary.by_arm(rows, "cifar")
    assert summary.differences(arms["division"], arms["exact"]) == [-0.5, -1.0]
    exact, division = summary.table(rows, "cifar")[2:]
    assert exact.startswith("| exact |  | 3 | 80.00 | 10.00 |")
    # The mean is -0.75, the deviation 0.354, the interval 12.706 * 0.25 to both sides.
    assert "| -0.75 | -3.93 to +2.43 | no difference shown | 11.0x less |" in division


def test_errors_along_a_run(task):
    rows = list(noise.rows_of("tiny", [1, 3], ["actnn", "division, 4 bits"]))
    assert [(row["arm"], row["epoch"]) for row in rows] == [
        *(("actnn", 1), ("division, 4 bits", 1), ("actnn", 3), ("division, 4 bits", 3)),
    ]
    assert rows[0]["error"] > rows[1]["error"] > 0
    text = [{key: "" if value is None else str(value) for key, value in row.items()} for row in rows]
    lines = summary.noise_table(text)
    assert lines[0] == "| | epoch 1 | epoch 3 |"
    assert lines[2].startswith(f"| actnn | {rows[0]['error']:.2f}")


def test_verdicts_in_words():
    for mean, half, expected in (
        (-0.2, 0.3, "within 0.3"),
        (-0.2, 0.1, "lower"),
        (-0.1, math.nan, "one run"),
        (0.5, 0.1, "within 0.3"),
        (-0.5, 0.6, "no difference shown"),
        (-0.5, 0.4, "lower"),
        (-0.5, math.nan, "one run"),
    ):
        assert summary.judged(summary.Spread(mean, 0.0, half)) == expected


def test_the_page_is_that_of_the_rows():
    repo = Path(__file__).parent.parent
    rows, measured = (read(repo / f"evidence/results/{name}.csv") for name in ("training", "noise"))
    assert (repo / "docs/evidence.md").read_text() == summary.page(rows, measured), "run: python -m evidence.summary"
