"""The evidence harness against hand computations; no network, no data set."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from evidence import data


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
        import torch

        calls.append(1)
        return {"x": torch.arange(3)}

    for _ in range(2):
        assert data._kept("toy", fetch)["x"].tolist() == [0, 1, 2]
    assert calls == [1]
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["toy.pt"]
