"""What must hold of values on a device: nobody waits for the answer, and a later forward looks at it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .streams import on_stream, stream_of

Failed = Callable[[], None]
"""What to do about something that did not hold: raise, or warn and do otherwise from then on."""


class _Sent(NamedTuple):
    answers: Tensor
    arrived: Any
    failed: list[Failed]


class Doubts:
    """Questions to a device, each with a yes or no for an answer.

    In main memory the answer is there at once. A device is asked for its answers at the next forward, and they are
    looked at in the first forward that finds them there; so what did not hold is told a forward or two later.
    """

    def __init__(self) -> None:
        self._asked: deque[tuple[Tensor, Any, Failed]] = deque()
        self._sent: list[_Sent] = []

    def ask(self, holds: Tensor, failed: Failed) -> None:
        """Does the one truth value hold? If not, ``failed`` is called, now or later."""
        if holds.device.type != "cpu":
            self._asked.append((holds, stream_of(holds), failed))
        elif not bool(holds):
            failed()

    def hear(self, wait: bool = False) -> None:
        """Act on what devices have answered by now; with ``wait``, on everything."""
        asked = []
        while self._asked:  # another thread's backward may go on asking
            asked.append(self._asked.popleft())
        streams: list[Any] = []
        for _, stream, _ in asked:
            if stream not in streams:
                streams.append(stream)
        for stream in streams:
            for device in {holds.device for holds, own, _ in asked if own == stream}:
                those = [(holds, failed) for holds, own, failed in asked if own == stream and holds.device == device]
                self._send([holds for holds, _ in those], stream, [failed for _, failed in those])
        sent, self._sent = self._sent, []
        problem: Exception | None = None
        for answers, arrived, failed in sent:
            if wait:
                arrived.synchronize()
            elif not arrived.query():
                self._sent.append(_Sent(answers, arrived, failed))
                continue
            for holds, act in zip(answers.tolist(), failed, strict=True):
                try:
                    if not holds:
                        act()
                except Exception as error:
                    problem = problem or error
        if problem is not None:
            raise problem

    def _send(self, holds: Sequence[Tensor], stream: Any, failed: list[Failed]) -> None:
        with on_stream(holds[0], stream):
            answers = torch.empty(len(holds), dtype=torch.bool, device="cpu", pin_memory=True)
            answers.copy_(torch.stack(tuple(holds)), non_blocking=True)
            arrived = torch.Event(holds[0].device)
            arrived.record()
        self._sent.append(_Sent(answers, arrived, failed))
