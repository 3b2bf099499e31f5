"""The promise in bytes, on full-size networks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import lowtide
from cases import SUBJECTS
from lowtide.machine.measure import run_child
from nets import resnet50


def ratio(model, loss, method, **options):
    with lowtide.compress(model, method, **options) as session:
        value = loss()
    report = session.report()
    packed = [s for s in report.sites if s.state == "compressed"]
    assert packed
    assert all(s.stored_nbytes < s.plain_nbytes for s in packed)
    value.backward()
    return report.ratio


@pytest.mark.parametrize("method", ["division", "actnn"])
def test_resnet50_at_224_pixels_keeps_over_eleven_times_less(method):
    model, x, y = resnet50(), torch.randn(4, 3, 224, 224), torch.randint(1000, (4,))
    # Of four images 196 values share a statistic in the last maps, so these have 3 bits; of more images 2.
    assert ratio(model, lambda: F.cross_entropy(model(x.clone()), y), method, bits=2) >= 11.4


def test_bert_base_with_dropout_keeps_over_six_times_less():
    subject = SUBJECTS["bert"](2)
    found = ratio(subject.model, lambda: subject.loss(subject.model), "actnn", bits=2, propagating_bits=4)
    assert found >= 6


def test_measured_peak_falls_below_plain_and_checkpointing():
    """ResNet-50 in child processes, at a quarter of the benchmark's batch; there the margin is wider."""
    common = {"subject": "resnet50", "size": 4, "precision": "float32", "allocator": "default"}
    peak = {}
    for mode in ("plain", "checkpoint", "division"):
        argument = common | {"mode": mode, "warm": int(mode == "division"), "turns": 1, "turn_seconds": 0.0}
        found = run_child("steps:step_child", argument, exact_rss=True)
        peak[mode] = found["peak"] - found["rest"]
    assert peak["division"] < 0.55 * peak["plain"], peak
    assert peak["division"] < peak["checkpoint"], peak
