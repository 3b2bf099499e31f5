"""Streams and graphs of accelerators, with a module in the place of CUDA's: none is here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.session import session as sessions
from lowtide.session import streams


class Streams:
    """A device module with streams that have names; what is done on them is written down."""

    def __init__(self) -> None:
        self.now = "first"

    def current_stream(self, device: Any) -> str:
        return self.now

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


def test_a_tensor_is_encoded_on_the_stream_on_which_it_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    tensor: Any = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(streams.capture, "has_data", lambda tensor: True)
    saved = streams.stream_of(tensor)
    module.now = "second"
    with streams.on_stream(tensor, saved):
        assert module.now == "first"
    assert module.now == "second"
    with streams.on_stream(tensor, "second"):
        assert module.now == "second"
    assert streams.stream_of(torch.ones(1)) is None


def test_a_session_seals_on_the_stream_of_the_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    @contextmanager
    def note(tensor: Any, stream: Any) -> Iterator[None]:
        used.append(stream)
        yield

    monkeypatch.setattr(sessions, "on_stream", note)
    monkeypatch.setattr("lowtide.session.handles.stream_of", lambda tensor: "own")
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    with lowtide.compress(net, "division", min_numel=512):
        loss = net(torch.randn(64, 64)).square().mean()
    loss.backward()
    assert used
    assert set(used) == {"own"}


def test_capture_of_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(8, 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot compress while a CUDA graph is captured"), lowtide.compress(net):
        pass
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with lowtide.compress(net):
        net(torch.ones(2, 8))
