"""Tuning the allocator: it takes effect, in this process only, and changes nothing but page faults."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

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


@pytest.mark.skipif(not can_tune() or shutil.which("cc") is None, reason="needs glibc and a C compiler")
def test_another_allocator_loaded_first_is_not_tuned(tmp_path):
    """As with jemalloc: glibc still has mallopt then, but it does not serve the process."""
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(
        "#include <stddef.h>\nvoid *__libc_malloc(size_t);\nvoid *malloc(size_t n) { return __libc_malloc(n); }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    code = "from lowtide.tools.malloc import can_tune, tune_cpu_allocator; print(can_tune(), tune_cpu_allocator())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for preload, expected in (("", "True True"), (str(library), "False False")):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment | {"LD_PRELOAD": preload}
        )
        assert done.stdout.strip() == expected, done.stderr
