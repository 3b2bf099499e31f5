"""Streams of accelerators: where a tensor is encoded, and what cannot be done while a graph is captured."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..graph import capture


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


def refuse_graph_capture() -> None:
    """Raise while a CUDA graph is captured: each replay would repeat one rounding, which then does not average out."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "lowtide cannot compress while a CUDA graph is captured: each replay would repeat the random rounding of "
            "the captured step. Open the session outside of torch.cuda.graph(), or capture the model without lowtide"
        )
