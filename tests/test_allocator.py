"""Tuning the allocator: freed memory stays, is used again, and can be given back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

import lowtide
from lowtide import malloc
from lowtide.machine.measure import run_child
from lowtide.malloc import can_tune, start_environment


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


def grow_heap(argument, emit):
    """Two tensors of 4 MiB come and go a hundred times, and each time twenty small ones stay."""
    import torch

    import lowtide
    from lowtide.machine.measure import resident

    assert lowtide.tune_cpu_allocator()
    before, kept = resident("VmRSS"), []
    for _ in range(100):
        large = torch.ones(2**20), torch.ones(2**20)
        kept.extend(torch.ones(8) for _ in range(20))
        del large
    grown = resident("VmRSS") - before
    large = [torch.ones(2**20) for _ in range(50)]
    del large
    peak = resident("VmRSS")
    assert malloc.give_back()
    return {"grown": grown, "given back": peak - resident("VmRSS")}


@pytest.mark.skipif(not can_tune(), reason="needs glibc")
def test_a_heap_that_starts_as_it_should_does_not_grow_beyond_what_is_alive():
    found = run_child("test_allocator:grow_heap", {}, exact_rss=False, variables=start_environment())
    # Alive are two large tensors and 2000 small ones of less than a KiB each: 10 MiB.
    assert found["grown"] < 40 * 2**20
    assert found["given back"] > 150 * 2**20  # of the 200 MiB freed before


def test_start_environment_keeps_what_is_set_and_is_empty_where_it_is_not_needed(monkeypatch):
    caches = "glibc.malloc.tcache_count=0"
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    for version, expected in {(2, 37): caches, (2, 38): None, (3, 1): None, None: None}.items():
        monkeypatch.setattr(malloc, "glibc_version", lambda version=version: version)
        assert start_environment().get("GLIBC_TUNABLES") == expected
    monkeypatch.setattr(malloc, "glibc_version", lambda: (2, 36))
    monkeypatch.setenv("GLIBC_TUNABLES", f"glibc.malloc.arena_max=4:{caches}")
    assert start_environment() == {"GLIBC_TUNABLES": f"glibc.malloc.arena_max=4:{caches}"}


@pytest.mark.skipif(not can_tune() or shutil.which("cc") is None, reason="needs glibc and a C compiler")
def test_another_allocator_loaded_first_is_not_tuned(tmp_path):
    """As with jemalloc: glibc still has mallopt then, but it does not serve the process."""
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(
        "#include <stddef.h>\nvoid *__libc_malloc(size_t);\nvoid *malloc(size_t n) { return __libc_malloc(n); }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    code = "from lowtide.malloc import can_tune, tune_cpu_allocator; print(can_tune(), tune_cpu_allocator())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for preload, expected in (("", "True True"), (str(library), "False False")):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment | {"LD_PRELOAD": preload}
        )
        assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize("tuned", [True, False])
def test_free_memory_is_given_back_around_forwards_that_measure(tuned, monkeypatch):
    """Those of `auto` are 1, 3 and 9; `actnn` has none. A process that is not tuned is left alone."""
    given, losses = [], []
    monkeypatch.setattr(malloc, "is_tuned", lambda: tuned)
    monkeypatch.setattr(malloc, "give_back", lambda: given.append(len(losses) + 1))
    for method, expected in (("auto", [1, 1, 2, 3, 3, 4, 9, 9, 10]), ("actnn", [])):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        given.clear()
        losses.clear()
        for _ in range(11):
            with lowtide.compress(model, method):
                loss = model(torch.randn(128, 64)).square().sum()
            loss.backward()
            losses.append(loss.item())
        assert given == (expected if tuned else [])
