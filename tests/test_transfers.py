"""Bytes that travel beside the computation, on a simulated device: right, few, and gone when they should be."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.session.transfers import AHEAD, NoRoom, Ticket, Transfers

LIMIT = 100


class Memory:
    """A stretch of device memory with some content."""

    def __init__(self, nbytes: int, content: object) -> None:
        self.nbytes = nbytes
        self.content = content


class Device:
    """One link, whose copies run as late as they may, or after so many questions whether they are over.

    The computation runs at once. A copy knows the device memory by a weak reference only, as a GPU does.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.asked = 0
        self.jobs: deque[tuple[Any, ...]] = deque()
        self.over: set[int] = set()
        self.events = 0
        self.alive: weakref.WeakSet[Memory] = weakref.WeakSet()
        self.copies = 0
        self.rooms: int | None = None
        """How many more times there is memory for a copy."""

    def memory(self, nbytes: int, content: object) -> Memory:
        made = Memory(nbytes, content)
        self.alive.add(made)
        return made

    def _begin(self, target: Any, source: Any, after: int) -> int:
        self.events += 1
        self.jobs.append((self.events, target, source, after))
        return self.events

    def _run_until(self, event: int) -> None:
        while event not in self.over:
            number, target, source, after = self.jobs.popleft()
            assert after in self.over, "a copy begins before what it must wait for"
            source, target = (end() if isinstance(end, weakref.ref) else end for end in (source, target))
            assert source is not None, "the memory was given away before it was copied"
            assert target is not None, "the memory was given away before the copy to it ended"
            target.content = source.content
            self.over.add(number)

    def out(self, memory: Memory) -> tuple[Memory, int, int]:
        held = Memory(memory.nbytes, "not there yet")
        self.events += 1
        self.over.add(made := self.events)
        return held, made, self._begin(held, weakref.ref(memory), made)

    def back(self, held: Memory, copied: int) -> tuple[Memory, int]:
        if self.rooms is not None:
            self.rooms -= 1
            if self.rooms < 0:
                raise NoRoom
        self.copies += 1
        memory = self.memory(held.nbytes, "not there yet")
        return memory, self._begin(weakref.ref(memory), held, copied)

    def read(self, memory: Memory, made: int) -> None:
        self._run_until(made)

    def reuse(self, last: int) -> None:
        self._run_until(last)

    def done(self, event: int) -> bool:
        self.asked += 1
        if event not in self.over and self.patience and self.asked % self.patience == 0:
            self._run_until(event)
        return event in self.over

    def held(self) -> int:
        return sum(memory.nbytes for memory in self.alive)


def bounded(transfers: Transfers, device: Device) -> bool:
    return device.held() == transfers.nbytes and (transfers.nbytes <= LIMIT or len(device.alive) == 1)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(1, 130)),
        st.tuples(st.just("read"), st.integers(0, 30)),
        st.tuples(st.just("drop"), st.integers(0, 30)),
        st.tuples(st.just("backward"), st.booleans()),
        st.tuples(st.just("begin"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS, st.integers(0, 5))
def test_any_order_of_sends_and_reads(actions: list[tuple[str, Any]], patience: int) -> None:
    device, orders = Device(patience), {}
    transfers = Transfers(LIMIT, orders)
    tickets: list[tuple[Ticket, int]] = []

    def read(ticket: Ticket, content: int) -> None:
        assert ticket.fetch().content == content

    for number, (what, value) in enumerate(actions):
        if what == "send":
            tickets.append((transfers.send(device, device.memory(value, number), value), number))
        elif what == "begin":
            transfers.begin()
        elif what == "backward":
            for ticket, content in reversed(tickets):
                read(ticket, content)
                assert bounded(transfers, device)
            if not value:
                while tickets:
                    tickets.pop()
        elif tickets and what == "read":
            read(*tickets[value % len(tickets)])
        elif tickets:
            del tickets[value % len(tickets)]
        ticket = None
        assert bounded(transfers, device)
    tickets.clear()
    assert device.held() == transfers.nbytes == 0


def sent(transfers: Transfers, device: Device, sizes: list[int]) -> list[Ticket]:
    return [transfers.send(device, device.memory(size, i), size) for i, size in enumerate(sizes)]


def test_the_last_bytes_need_no_copy_and_the_next_are_there_before_they_are_asked_for() -> None:
    device = Device(0)
    transfers = Transfers(LIMIT, {})
    tickets = sent(transfers, device, [30] * 8)
    assert transfers.nbytes == 90  # the last three
    for number in (7, 6, 5):
        tickets[number].fetch()
        del tickets[number]
    # One more was fetched for each that was let go.
    assert device.copies == 3
    before = device.copies
    tickets[4].fetch()
    assert device.copies == before + 1  # it was there, and one more is on its way
    assert {ticket.number - 1 for ticket in tickets if ticket.number in transfers._fetched} == {1, 2, 3}


def test_what_was_sent_is_fetched_in_the_order_of_the_last_backward() -> None:
    orders: dict[tuple[int, ...], tuple[int, ...]] = {}
    order = [3, 0, 3, 1, 4, 2]
    missed = []
    for _ in range(2):
        device = Device(1)  # all copies are over at once, so nothing lies on the device that was not fetched
        transfers = Transfers(LIMIT, orders)
        tickets = sent(transfers, device, [40, 41, 42, 43, 44])
        transfers._sweep()
        missed.append(0)
        for place in order:
            missed[-1] += tickets[place].number not in transfers._fetched
            tickets[place].fetch()
        tickets.clear()
    assert orders == {(40, 41, 42, 43, 44): tuple(order)}
    assert missed[0] > 1
    assert missed[1] == 1  # the first


def test_what_was_fetched_in_vain_is_let_go() -> None:
    device = Device(1)
    transfers = Transfers(LIMIT, {})
    tickets = sent(transfers, device, [30] * 12)
    for place, expected in ((11, {10, 9, 8}), (5, {4, 3, 2}), (0, set())):
        tickets[place].fetch()
        there = {*transfers._fetched, *transfers._leaving}
        assert {t.place for t in tickets if t.number in there} == expected


def test_orders_of_several_forwards_stay_apart_and_few() -> None:
    orders: dict[tuple[int, ...], tuple[int, ...]] = {}
    device, transfers = Device(1), None
    for size in range(1, 20):
        transfers = Transfers(LIMIT, orders)
        tickets = sent(transfers, device, [size, size])
        transfers.begin()
        later = sent(transfers, device, [size, size, size])
        for ticket in (*later, *tickets):
            ticket.fetch()
        del ticket, tickets, later
    assert len(orders) == 8
    assert orders[(19, 19)] == (0, 1)
    assert orders[(19, 19, 19)] == (0, 1, 2)


def test_no_more_than_so_many_are_fetched_ahead() -> None:
    device = Device(1)
    transfers = Transfers(10**6, {})
    tickets = sent(transfers, device, [1] * 50)
    tickets[-1].fetch()
    assert len(transfers._fetched) + len(transfers._leaving) <= AHEAD


def test_without_memory_what_was_fetched_ahead_makes_room() -> None:
    device = Device(1)
    transfers = Transfers(LIMIT, {})
    tickets = sent(transfers, device, [30] * 6)
    device.rooms = 1
    assert tickets[0].fetch().content == 0  # nothing was fetched ahead, and that is no error
    device.rooms = 0
    with pytest.raises(NoRoom):
        tickets[1].fetch()
    assert transfers.nbytes == 0
    device.rooms = None
    assert tickets[1].fetch().content == 1
    tickets.clear()
    assert device.held() == 0


def test_a_ticket_that_dies_within_a_call_is_buried_at_its_end() -> None:
    device = Device(0)
    transfers = Transfers(LIMIT, {})
    tickets = sent(transfers, device, [30] * 3)
    with transfers._held():
        tickets.pop(0)
        assert transfers._dead
    assert not transfers._dead
    assert transfers._alive == 2


def test_threads_share_it() -> None:
    device = Device(3)
    transfers = Transfers(LIMIT, {})
    tickets = sent(transfers, device, [7] * 64)
    wrong: list[int] = []

    def read(first: int) -> None:
        for _ in range(20):
            for number in range(first, 64, 4):
                if tickets[number].fetch().content != number:
                    wrong.append(number)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    tickets.clear()
    gc.collect()
    assert device.held() == transfers.nbytes == 0
