"""Homes of packed bytes: the same values from each, exact bytes, and nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide.codecs import BlockMean, Cast, GroupQuant, Packed, Projection, Raw, SampleQuant, SixSigma, TensorMeta
from lowtide.policy.methods import ActNN
from lowtide.session.offload import Moved, fetch, send, to_file, to_host

CODECS = [
    Raw(),
    GroupQuant(2),
    GroupQuant(3, 50),
    GroupQuant(2, dither=True),
    SampleQuant(16, 4),
    BlockMean(4),
    BlockMean(4, faithful=True),
    BlockMean(4, bits=0),
    Projection(3, 4),
    SixSigma(),
    Cast("float16"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def net():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4 * 144, 5)
    )
    return model, torch.randn(8, 3, 16, 16)


def gradients(model, x, context, repeats=1):
    with context as session:
        loss = model(x).square().mean()
    for i in range(repeats):
        model.zero_grad()
        loss.backward(retain_graph=i + 1 < repeats)
    return [p.grad.clone() for p in model.parameters()], session


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def attached(model, **options):
    """One forward and backward under a fixed step, so that two homes round alike."""
    handle = lowtide.attach(model, "actnn", min_numel=64, **options)
    try:
        found, _ = gradients(model, X, nullcontext())
        return found, handle.report()
    finally:
        handle.remove()


X = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_file_gives_the_same_tensor(codec, dtype, folder):
    torch.manual_seed(0)
    for x in (torch.randn(4, 3, 9, 10), torch.randn(4, 3, 9, 10).contiguous(memory_format=torch.channels_last)):
        x = x.to(dtype)
        packed = codec.encode(x, key=1)
        moved = to_file(packed)
        assert isinstance(moved, Moved)
        assert moved.nbytes == packed.nbytes
        assert [b.dtype for b in moved.buffers] == [b.dtype for b in packed.buffers]
        assert not {b.data_ptr() for b in moved.buffers} & {b.data_ptr() for b in packed.buffers}
        for _ in range(2):
            out, wanted = moved.decode(), packed.decode()
            assert torch.equal(out, wanted)
            assert out.stride() == wanted.stride()
            assert out.storage_offset() == 0
    assert not list(folder.iterdir())


def test_bytes_are_in_a_file_whose_name_is_gone(folder):
    moved = to_file(GroupQuant(8).encode(torch.randn(64, 1024), key=0))
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no list of mappings")
    own = rf"{re.escape(str(folder))}/lowtide-\w+ \(deleted\)"
    assert len(re.findall(own, maps.read_text())) == 1
    start = int(next(line for line in maps.read_text().splitlines() if str(folder) in line).split("-")[0], 16)
    assert moved.buffers[0].data_ptr() == start
    del moved
    gc.collect()
    assert not re.findall(own, maps.read_text())


def test_nothing_to_move_stays():
    empty = GroupQuant(2).encode(torch.empty(0, 4), key=0)
    assert to_file(empty) is empty
    packed = GroupQuant(2).encode(torch.randn(4, 4), key=0)
    assert to_host(packed) is packed
    assert send(packed, "device") is packed
    assert fetch(packed) is packed


def test_an_accelerators_bytes_go_to_the_host_and_come_back():
    """Fake tensors have devices that this machine lacks."""
    with FakeTensorMode():
        x = torch.empty(6, dtype=torch.uint8, device="cuda")
        packed = Packed(Raw(), TensorMeta((6,), (1,), torch.uint8), (x,))
        moved = to_host(packed)
        assert isinstance(moved, Moved)
        assert moved.buffers[0].device.type == "cpu"
        assert moved.decode().device == fetch(moved).buffers[0].device == x.device


@pytest.mark.parametrize("when", ["before", "while taking room"])
def test_a_full_disk_is_an_error_that_names_it(folder, monkeypatch, when):
    packed = GroupQuant(8).encode(torch.randn(64, 1024), key=0)
    if when == "before":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 77, 77))
    else:

        def refuse(*args):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    with pytest.raises(OSError, match=r"packed activations need \d+ bytes and \d+ are free.*TMPDIR") as error:
        to_file(packed)
    assert error.value.errno == errno.ENOSPC
    assert error.value.filename == str(folder)
    assert not list(folder.iterdir())


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        to_file(GroupQuant(8).encode(torch.randn(4, 4), key=0), tmp_path / "nowhere")


# ---------------------------------------------------------------- sessions


@pytest.mark.parametrize("derive", [False, True])
@pytest.mark.parametrize("level", ["L4", "L5"])
def test_gradients_are_those_of_the_device(net, folder, level, derive):
    model, _ = net
    wanted, plain = attached(model, derive=derive)
    found, report = attached(model, derive=derive, level=level)
    assert same(found, wanted)
    assert not list(folder.iterdir())
    if level == "L4":  # where a CPU's bytes are
        assert report.stored_nbytes == plain.stored_nbytes
        return
    away = 0
    for before, after in zip(plain.sites, report.sites, strict=True):
        values = [c for c in before.codec.split(" + ") if c.startswith(("group_quant", "sample_quant"))]
        if not values:
            assert after == before
            continue
        mask = before.plain_nbytes // 32 if "mask" in before.codec else 0
        assert after.codec == f"{before.codec}, in a file"
        assert after.stored_nbytes == mask
        away += before.stored_nbytes - mask
    assert away > 0
    assert report.stored_nbytes == plain.stored_nbytes - away
    assert [n for n in report.notes if f"{lowtide.report.size(away)} of packed values are in a file" in n]
    assert not [n for n in plain.notes if "packed values" in n]


def test_backward_twice_reads_the_same_file(net, folder):
    model, x = net
    seeds = {"seed": 3, "min_numel": 64, "level": "L5"}
    with lowtide.compress(model, "actnn", **seeds):
        loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert same(first, [p.grad for p in model.parameters()])


def test_threads_have_files_of_their_own(folder):
    """Four models in four threads give what each gives alone."""

    def train(seed, found):
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
        handle = lowtide.attach(model, ActNN(4, level="L5"), seed=seed, min_numel=64)
        for _ in range(3):
            found[seed], _ = gradients(model, x, nullcontext())
        handle.remove()

    alone, together = {}, {}
    for seed in range(4):
        train(seed, alone)
    threads = [threading.Thread(target=train, args=(seed, together)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(alone[seed], together[seed]) for seed in range(4))
    assert not list(folder.iterdir())


def test_small_tensors_stay_on_the_device(folder):
    """A mapping costs pages and a file; a small slice, copied to free its storage, is not worth it."""

    class Slice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(64, 256), nn.Linear(256, 8)

        def forward(self, x):
            return self.two(self.one(x)[:4])

    model = Slice()
    _, session = gradients(model, torch.randn(512, 64), lowtide.compress(model, "actnn", level="L5"))
    assert {s.site.module: s.codec for s in session.report().sites if s.codec} == {"two": "raw"}
