"""Streams of the stand-in device, and a watch on what they do to memory.

The stand-in computes at once, so a missing wait would go unseen. Each stream counts its operations and keeps, in a
clock, how far it knows each other stream to be: an event carries the clock of the stream that recorded it, and a wait
merges it. Two accesses to one memory, one of which writes, must be in an order by these clocks. So must all accesses
and the end of a memory, as seen by the stream on which it was made: there the next owner of real memory begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Key = tuple[int, int]
"""A device and a stream of it."""
Clock = dict[Key, int]

CLOCKS: dict[Key, Clock] = {}
HOST: Clock = {}
"""What the host knows to be over; every operation that it queues from then on comes after it."""
DEAF: set[tuple[str, str]] = set()
"""Waits that are left out, to see whether it is found out: the roles of who waits, and of who recorded."""
ROLES: dict[Key, str] = {}


def _merge(clock: Clock, seen: Clock) -> None:
    for key, count in seen.items():
        clock[key] = max(clock.get(key, 0), count)


class Event:
    """How far a stream was when it recorded this."""

    lagging = True
    """Does the device lag behind? Then no event is over when the host asks."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.seen = {**CLOCKS.get(key, {})}

    def query(self) -> bool:
        if not Event.lagging:
            _merge(HOST, self.seen)
        return not Event.lagging


class Stream(torch.Stream):
    """A stream with a clock."""

    @property
    def key(self) -> Key:
        return (self.device_index, self.stream_id)

    def record_event(self, event: None = None) -> Event:
        return Event(self.key)

    def wait_event(self, event: Event) -> None:
        if (ROLES.get(self.key, "compute"), ROLES.get(event.key, "compute")) not in DEAF:
            _merge(CLOCKS.setdefault(self.key, {}), event.seen)


def register(module: Any, device: Any) -> None:
    """Give the module of the stand-in streams as ``torch.cuda`` has them."""

    def index_of(place: Any) -> int:
        found = place if isinstance(place, int) else None if place is None else torch.device(place).index
        return device.current_device() if found is None else found

    def current_stream(place: Any = None) -> Stream:
        index = index_of(place)
        kind = Stream(device="tide").device_type
        return Stream(stream_id=device.current_stream(index), device_index=index, device_type=kind)

    @contextmanager
    def stream(other: Stream) -> Iterator[None]:
        index, before = other.device_index, device.current_device()
        was = device.current_stream(index)
        device.set_device(index)
        device.set_stream(index, other.stream_id)
        try:
            yield
        finally:
            device.set_stream(index, was)
            device.set_device(before)

    module.Stream, module.current_stream, module.stream = Stream, current_stream, stream


@dataclass
class _Memory:
    owner: Key
    reads: list[tuple[Key, int]] = field(default_factory=list)
    writes: list[tuple[Key, int]] = field(default_factory=list)
    lent: set[Key] = field(default_factory=set)


class Races(TorchDispatchMode):
    """While it is on, each operator is looked at; ``found`` has what was not in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.operators = 0
        self._known: dict[int, _Memory] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("aten.record_stream"):
            self._known[args[0].untyped_storage()._cdata].lent.add((args[1].device_index, args[1].stream_id))
            return result
        tensors = [t for t in _tensors(given) + _tensors([result]) if t.device.type == "tide"]
        if not tensors or func.is_view:
            return result
        self.operators += 1
        stream = torch.get_device_module("tide").current_stream(tensors[0].device)
        clock = CLOCKS.setdefault(stream.key, {})
        _merge(clock, HOST)
        for place in {t.device for t in tensors}:  # torch lets the streams of two devices wait for a copy between them
            other = CLOCKS.setdefault(torch.get_device_module("tide").current_stream(place).key, {})
            _merge(clock, other)
        clock[stream.key] = clock.get(stream.key, 0) + 1
        for place in {t.device for t in tensors}:
            _merge(CLOCKS[torch.get_device_module("tide").current_stream(place).key], clock)
        written = {
            id(t) for i, a in enumerate(func._schema.arguments) if _is_written(a) for t in _value(a, i, args, kwargs)
        }
        seen = set()
        for tensor in _tensors(given):
            self._access(tensor, stream.key, id(tensor) in written, name)
            seen.add(tensor.untyped_storage()._cdata)
        for tensor in _tensors([result]):
            if tensor.untyped_storage()._cdata not in seen:
                self._access(tensor, stream.key, True, name)
        return result

    def _access(self, tensor: Tensor, key: Key, writes: bool, name: str) -> None:
        storage = tensor.untyped_storage()
        memory = self._known.get(storage._cdata)
        if memory is None:
            on_device = tensor.device.type == "tide"  # torch keeps pinned memory until its copies are over
            owner = torch.get_device_module("tide").current_stream(tensor.device).key if on_device else key
            memory = self._known[storage._cdata] = _Memory(owner)
            weakref.finalize(storage, self._end, storage._cdata, on_device).atexit = False
        now = CLOCKS[key]
        for other, count in memory.writes + (memory.reads if writes else []):
            if now.get(other, 0) < count:
                self.found.append(f"{name} on {_role(key)}, not after {_role(other)}")
        (memory.writes if writes else memory.reads).append((key, now[key]))

    def _end(self, identity: int, on_device: bool) -> None:
        memory = self._known.pop(identity)
        if not on_device:
            return
        now: Clock = {**HOST}
        for key in (memory.owner, *memory.lent):  # the next owner begins after all that these were told to do
            _merge(now, CLOCKS.get(key, {}))
        for other, count in memory.writes + memory.reads:
            if now.get(other, 0) < count:
                self.found.append(f"memory of {_role(memory.owner)} ended before {_role(other)} was done with it")


def _role(key: Key) -> str:
    return ROLES.get(key, "compute")


def _tensors(given: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for one in given:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple)):
            found += _tensors(one)
    return found


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _value(argument: Any, place: int, args: Any, kwargs: Any) -> list[Tensor]:
    value = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
    return _tensors([value])
