"""What memory a step takes, operator by operator: every storage with the times of its birth and its death.

Time counts what can raise memory: calls of operators that make a storage, and the moments at which a saved tensor would
be encoded or decoded. Between two of them memory can only fall. What an operator takes and gives back inside itself
shows to nobody here (see ``machine.costs``).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from ..graph import capture
from ..machine.costs import Call
from ..session.norms import StillPacked

WEIGHTS, INPUTS, GRADIENTS, SAVED, TRANSIENT = ROLES = ("weights", "inputs", "gradients", "saved", "transient")

_LEAST_CALL = 1 << 20
"""Calls that touch fewer bytes are not noted: what they take inside themselves does not count."""


class Live:
    """One storage, while the step is recorded."""

    __slots__ = ("born", "died", "label", "nbytes", "role", "storage")

    def __init__(self, storage: Any, nbytes: int, born: int, role: str, label: str) -> None:
        self.storage = weakref.ref(storage)
        self.nbytes = nbytes
        self.born = born
        self.died = -1
        self.role = role
        self.label = label


class Recorder(capture.DispatchMode):
    """Records the storages that operators make inside this context, in forward and backward.

    ``where`` names the module or node at work, for a reader.
    """

    knows_packed = True
    """What stands for a packed tensor may be among the arguments of operators; it takes no memory."""

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self.time = 0
        self.blocks: list[Live] = []
        self.calls: list[tuple[int, Call]] = []
        """Calls that may need memory inside themselves, each with its time."""
        self.seconds: dict[str, float] = {}
        """By what was at work, in seconds as the host sees them."""
        self.elapsed = 0.0
        """Seconds of all operators so far."""
        self._where = where
        self._known: dict[int, Live] = {}
        self._references: dict[int, weakref.ref[Any]] = {}

    def know(self, tensors: Iterable[Tensor], role: str, label: str = "") -> None:
        """Storages that are there before the step."""
        for tensor in tensors:
            for part in capture.strided_parts(tensor):
                if capture.has_storage(part):
                    self._add(part.untyped_storage(), role, label)

    def tick(self) -> int:
        """A moment at which memory could rise; its time."""
        self.time += 1
        return self.time

    def block_of(self, storage: Any) -> Live | None:
        """What is known of a storage that is alive."""
        live = self._known.get(capture.storage_id(storage))
        return live if live is not None and live.storage() is storage else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, and note the storages that are new."""
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        took = time.perf_counter() - began
        where = self._where()
        self.seconds[where] = self.seconds.get(where, 0.0) + took
        self.elapsed += took
        new = [storage for storage in _storages(result) if self._is_new(storage)]
        if new:
            self.tick()
            for storage in new:
                self._add(storage, TRANSIENT, f"{where} {func}" if where else str(func))
            if sum(storage.nbytes() for storage in (*_storages(args), *new)) >= _LEAST_CALL:
                call = Call.of(func, args, kwargs or {})
                if call is not None:
                    self.calls.append((self.time, call))
        return result

    def _is_new(self, storage: Any) -> bool:
        live = self._known.get(capture.storage_id(storage))
        return live is None or live.nbytes != storage.nbytes()  # a storage may be given more room

    def _add(self, storage: Any, role: str, label: str) -> None:
        identity = capture.storage_id(storage)
        before = self._known.get(identity)
        if before is not None:
            if before.nbytes == storage.nbytes():
                return
            before.died = max(before.born, self.time - 1)
            role, label = before.role, before.label
        live = Live(storage, storage.nbytes(), self.time, role, label)
        self.blocks.append(live)
        self._known[identity] = live

        def forget(_: object) -> None:
            gone = self._known.pop(identity, None)
            self._references.pop(identity, None)
            if gone is not None:
                gone.died = self.time

        self._references[identity] = weakref.ref(storage, forget)

    def finish(self) -> None:
        """The step is over: what lives now lives to its end."""
        for live in self._known.values():
            live.died = self.time
        self._known.clear()
        self._references.clear()


def _storages(found: Any) -> list[Any]:
    """The storages of all plain tensors in nested tuples, lists and mappings, each once."""
    storages: dict[int, Any] = {}
    stack = [found]
    while stack:
        each = stack.pop()
        if isinstance(each, StillPacked):
            continue
        if isinstance(each, Tensor):
            for part in capture.strided_parts(each):
                storage = capture.storage_of(part) if capture.has_storage(part) else None
                if storage is not None:
                    storages[capture.storage_id(storage)] = storage
        elif isinstance(each, (tuple, list)):
            stack.extend(each)
        elif isinstance(each, Mapping):
            stack.extend(each.values())
    return list(storages.values())
