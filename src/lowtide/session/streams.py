"""Streams of accelerators: where a tensor is encoded and copied, and what cannot be done while a graph is captured."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..graph import capture
from .transfers import NoRoom


def stream_of(tensor: Tensor) -> Any:
    """The stream that is current on the device of a tensor; None where there are no streams."""
    if tensor.device.type == "cpu" or not capture.has_data(tensor):
        return None
    current = getattr(torch.get_device_module(tensor.device), "current_stream", None)
    return None if current is None else current(tensor.device)


def on_stream(tensor: Tensor, stream: Any) -> AbstractContextManager[Any]:
    """Work on that stream, if it is another than the current one.

    A tensor is encoded after some later call, when its owner may have changed the stream. On the stream on which it was
    saved it has been made by then, its memory is given back in order, and backward, which runs on the stream of the
    forward, finds the packed bytes.
    """
    if stream is None or stream == stream_of(tensor):
        return nullcontext()
    work: AbstractContextManager[Any] = torch.get_device_module(tensor.device).stream(stream)
    return work


class Copies:
    """A :class:`~.transfers.Link` between device memory of one stream's work and pinned host memory.

    Torch itself keeps pinned memory that nobody holds any more until the copies that use it are over.
    """

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._device = device
        self._stream = stream
        self._module = torch.get_device_module(device)
        self._outward, self._inward = _beside(device)

    def out(self, buffers: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Any, Any]:
        """Begin to copy to the host, once all is done that the stream has to do until now."""
        held = tuple(on_host(buffer) for buffer in buffers)
        made = self._stream.record_event()
        self._outward.wait_event(made)
        return held, made, self._copy(held, buffers, self._outward)

    def back(self, held: tuple[Tensor, ...], copied: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Begin to copy to new memory of the stream, once all is done that may still use that memory."""
        try:
            with self._module.stream(self._stream):
                buffers = tuple(torch.empty(h.shape, dtype=h.dtype, device=self._device) for h in held)
        except torch.OutOfMemoryError as error:
            raise NoRoom from error
        self._inward.wait_event(self._stream.record_event())
        self._inward.wait_event(copied)
        return buffers, self._copy(buffers, held, self._inward)

    def _copy(self, targets: tuple[Tensor, ...], sources: tuple[Tensor, ...], stream: Any) -> Any:
        with self._module.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                host = target if target.device.type == "cpu" else source
                target.copy_(source, non_blocking=host.is_pinned())  # of other memory the host waits for the copy
            return stream.record_event()

    def read(self, buffers: tuple[Tensor, ...], made: Any) -> None:
        """Let the current stream come after ``made``."""
        current = self._module.current_stream(self._device)
        current.wait_event(made)
        if current != self._stream:
            for buffer in buffers:
                buffer.record_stream(current)

    def reuse(self, last: Any) -> None:
        """Let the stream that the memory belongs to come after ``last``."""
        self._stream.wait_event(last)

    def done(self, event: Any) -> bool:
        """Has the device come so far?"""
        return bool(event.query())


@cache
def _beside(device: torch.device) -> tuple[Any, Any]:
    """Two streams of a device: out and back go at the same time."""
    module = torch.get_device_module(device)
    return module.Stream(device=device), module.Stream(device=device)


def on_host(buffer: Tensor) -> Tensor:
    """Host memory for a buffer of an accelerator, pinned where that is possible."""
    try:
        return torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
    except RuntimeError:  # no pinned memory for this accelerator, or none left
        return torch.empty(buffer.shape, dtype=buffer.dtype)


def refuse_graph_capture() -> None:
    """Raise while a CUDA graph is captured: each replay would repeat one rounding, which then does not average out."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "lowtide cannot compress while a CUDA graph is captured: each replay would repeat the random rounding of "
            "the captured step. Open the session outside of torch.cuda.graph(), or capture the model without lowtide"
        )
