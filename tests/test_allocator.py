"""Tuning the allocator: it takes effect, in this process only, and changes nothing but page faults."""

from __future__ import annotations

import pytest

from lowtide.tools.malloc import can_tune
from lowtide.tools.measure import run_child


def count_faults(argument, emit):
    import resource

    import torch

    import lowtide

    tuned = lowtide.tune_cpu_allocator() if argument["tune"] else False

    def work():
        x = torch.ones(2**24)
        return float((x * 2).sum())

    total = max(work() for _ in range(4))  # the heap grows to what it needs
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        work()
    return {"tuned": tuned, "total": total, "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before}


@pytest.mark.skipif(not can_tune(), reason="needs glibc")
def test_freed_memory_is_kept_and_page_faults_go():
    plain, tuned = (run_child("test_allocator:count_faults", {"tune": t}, exact_rss=False) for t in (False, True))
    assert tuned["tuned"]
    assert tuned["total"] == plain["total"]
    # Ten times two fresh tensors of 64 MiB: 327680 pages of 4 KiB by default. Kept memory is faulted in once; the
    # heap may grow by another tensor or two until the pieces fit.
    assert plain["faults"] > 160_000
    assert tuned["faults"] < plain["faults"] / 4
