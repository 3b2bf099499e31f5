"""What is on the device of all that left it: bytes on their way out, and bytes that backward will read next.

Plain Python. A *link* makes the copies, on a device or in a simulation, and says what waits for what.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

AHEAD = 16
"""At most so many tensors are fetched before they are read."""
_PASSES = 4  # backward may read a graph more than once; no more of them are remembered
_KEPT = 8  # orders of different forwards

Orders = dict[tuple[int, ...], tuple[int, ...]]
"""In which order backward read what a forward sent, by the sizes of that."""


class NoRoom(Exception):
    """The device has no memory left for a copy."""


class Link(Protocol):
    """Copies between one stream's memory and another home. They begin in the order of the calls, beside the stream."""

    def out(self, buffers: Any) -> tuple[Any, Any, Any]:
        """Begin to copy: what holds the bytes there, and events for "they are made" and "they are copied"."""

    def back(self, held: Any, copied: Any) -> tuple[Any, Any]:
        """Begin to copy into new memory what lies there after ``copied``: the memory, and an event for the end.

        Raises :class:`NoRoom` if there is no memory.
        """

    def read(self, buffers: Any, made: Any) -> None:
        """Let what the calling thread does from now on come after ``made``, and keep the memory for it."""

    def reuse(self, last: Any) -> None:
        """Let whatever gets the memory next come after ``last``."""

    def done(self, event: Any) -> bool:
        """Is that over? No is never wrong."""


class _Resident(NamedTuple):
    """Bytes on the device: readers come after ``made``, and the next owner of the memory after ``last``."""

    link: Link
    buffers: Any
    nbytes: int
    made: Any
    last: Any


class Ticket:
    """Stands for bytes that were sent; once nobody holds it, they are forgotten."""

    __slots__ = ("__weakref__", "copied", "held", "link", "nbytes", "number", "place", "tape", "transfers")

    def __init__(self, transfers: Transfers, tape: _Tape, number: int, link: Link, nbytes: int) -> None:
        self.transfers = transfers
        self.tape = tape
        self.place = tape.add(self, nbytes)
        self.number = number
        self.link = link
        self.nbytes = nbytes
        self.held: Any = None
        self.copied: Any = None

    def fetch(self) -> Any:
        """The bytes on the device, for what the calling thread does next."""
        return self.transfers.fetch(self)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.transfers.forget(self.number, self.tape)


class _Tape:
    """What one forward sent, and in which order backward reads it."""

    def __init__(self, orders: Orders) -> None:
        self.alive = 0
        self._orders = orders
        self._tickets: list[weakref.ref[Ticket]] = []
        self._sizes: list[int] = []
        self._seen: list[int] = []
        self._order: tuple[int, ...] = ()
        self._known = 0  # tickets that the order was made for
        self._at = 0

    def add(self, ticket: Ticket, nbytes: int) -> int:
        self._tickets.append(weakref.ref(ticket))
        self._sizes.append(nbytes)
        self.alive += 1
        return len(self._tickets) - 1

    def after(self, place: int) -> Iterator[Ticket]:
        """A read at ``place``: what is expected next, as in the last backward, or else the last sent first."""
        if self._known != len(self._sizes):
            self._known, self._at = len(self._sizes), 0
            self._order = self._orders.get(tuple(self._sizes)) or tuple(reversed(range(self._known)))
        if len(self._seen) < _PASSES * self._known:
            self._seen.append(place)
        for start in (self._at, 0):  # not ahead: perhaps backward runs once more
            try:
                self._at = self._order.index(place, start) + 1
                break
            except ValueError:
                continue
        for at in range(self._at, len(self._order)):
            ticket = self._tickets[self._order[at]]()
            if ticket is not None:
                yield ticket

    def end(self) -> None:
        """Nobody can read it any more: remember how it was read."""
        if self._seen:
            sizes = tuple(self._sizes)
            self._orders.pop(sizes, None)
            self._orders[sizes] = tuple(self._seen)
            while len(self._orders) > _KEPT:
                del self._orders[next(iter(self._orders))]


class Transfers:
    """Bytes of one device that were sent elsewhere. Threads may share it, and a ticket may die at any moment.

    What is on the device for their sake, beside the bytes that were just asked for, takes at most ``limit`` bytes, or
    is one tensor. Nothing here waits by itself: where memory must be free, the work that gets it next is told to wait.
    """

    def __init__(self, limit: int, orders: Orders) -> None:
        self.limit = limit
        self.nbytes = 0
        """Bytes on the device."""
        self._orders = orders
        self._tape = _Tape(orders)
        self._numbers = 0
        self._alive = 0
        self._leaving: dict[int, _Resident] = {}  # in the order of their copies; some may be of dead tickets
        self._fetched: dict[int, _Resident] = {}
        self._dead: deque[tuple[int, _Tape]] = deque()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Another forward: its order is its own."""
        self._tape = _Tape(self._orders)

    def send(self, link: Link, buffers: Any, nbytes: int) -> Ticket:
        """Begin to copy bytes away. The caller lets go of them."""
        with self._held():
            self._sweep()
            self._make_room(nbytes)
            while self._fetched and self.nbytes + nbytes > self.limit:
                self._drop(self._fetched, next(iter(self._fetched)))
            held, made, copied = link.out(buffers)
            self._numbers, self._alive = self._numbers + 1, self._alive + 1
            ticket = Ticket(self, self._tape, self._numbers, link, nbytes)
            ticket.held, ticket.copied = held, copied
            self._keep(self._leaving, ticket.number, _Resident(link, buffers, nbytes, made, copied))
            return ticket

    def fetch(self, ticket: Ticket) -> Any:
        """The bytes again, and begin to fetch those that will be wanted next."""
        with self._held():
            number = ticket.number
            found = self._leaving.get(number)
            if found is None and (found := self._fetched.pop(number, None)) is not None:
                self.nbytes -= found.nbytes
            if found is None:
                found = self._brought_anyway(ticket)
            ticket.link.read(found.buffers, found.made)
            wanted: dict[int, Ticket] = {}
            room = self.limit
            for other in ticket.tape.after(ticket.place):
                if len(wanted) == AHEAD or (wanted and other.nbytes > room):
                    break
                if other.number not in wanted:
                    wanted[other.number], room = other, room - other.nbytes
            for stale in [n for n in self._fetched if n not in wanted]:
                self._drop(self._fetched, stale)
            self._sweep(wanted)
            try:
                for next_, other in wanted.items():
                    if next_ not in self._leaving and next_ not in self._fetched:
                        if not self._make_room(other.nbytes, wanted):
                            break
                        self._keep(self._fetched, next_, found if next_ == number else self._brought(other))
            except NoRoom:
                pass  # what is needed for sure is there
            return found.buffers

    def forget(self, number: int, tape: _Tape) -> None:
        """A ticket died, perhaps in the middle of a call here."""
        self._dead.append((number, tape))
        self._tidy()

    @contextmanager
    def _held(self) -> Iterator[None]:
        try:
            with self._lock:
                self._bury()
                yield
        finally:
            self._tidy()

    def _tidy(self) -> None:
        """Bury the dead, now or, if a call is under way, at its end."""
        while self._dead and self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    def _bury(self) -> None:
        while self._dead:
            number, tape = self._dead.popleft()
            self._alive -= 1
            tape.alive -= 1
            if tape.alive == 0:
                tape.end()
            if number in self._fetched:
                self._drop(self._fetched, number)
            elif number in self._leaving and self._is_over(number):
                self._drop(self._leaving, number)
        if self._alive == 0:
            while self._leaving:
                self._drop(self._leaving, next(iter(self._leaving)))

    def _sweep(self, keep: Container[int] = ()) -> None:
        """Let go of what has left. Copies end in the order in which they began: nobody looks beyond one that runs."""
        over = itertools.takewhile(self._is_over, (n for n in self._leaving if n not in keep))
        for number in list(over):
            self._drop(self._leaving, number)

    def _is_over(self, number: int) -> bool:
        resident = self._leaving[number]
        return resident.link.done(resident.last)

    def _keep(self, place: dict[int, _Resident], number: int, resident: _Resident) -> None:
        place[number] = resident
        self.nbytes += resident.nbytes

    def _drop(self, place: dict[int, _Resident], number: int) -> None:
        resident = place.pop(number)
        self.nbytes -= resident.nbytes
        if not resident.link.done(resident.last):
            resident.link.reuse(resident.last)

    def _make_room(self, nbytes: int, keep: Container[int] = ()) -> bool:
        """Let go of what leaves, the first first. Is there room for so many bytes, or nothing else?"""
        while self.nbytes + nbytes > self.limit:
            number = next((n for n in self._leaving if n not in keep), None)
            if number is None:
                return self.nbytes == 0
            self._drop(self._leaving, number)
        return True

    def _brought(self, ticket: Ticket) -> _Resident:
        buffers, made = ticket.link.back(ticket.held, ticket.copied)
        return _Resident(ticket.link, buffers, ticket.nbytes, made, made)

    def _brought_anyway(self, ticket: Ticket) -> _Resident:
        """What a reader waits for, if need be with all memory that is held here."""
        try:
            return self._brought(ticket)
        except NoRoom:
            for place in (self._leaving, self._fetched):
                while place:
                    self._drop(place, next(iter(place)))
            return self._brought(ticket)
