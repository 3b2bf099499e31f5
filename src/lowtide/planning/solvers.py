"""Which saved tensors to keep, to store or to rebuild, so that the peak of memory stays below a limit at least cost.

Pure functions of numbers: nothing here sees a tensor. A step of training is a row of times, and ``base`` has the bytes
that are there at each of them, whatever is chosen. Each :class:`Item` is one saved tensor, and a *pick* says what
becomes of it: :data:`KEEP`, :data:`REBUILD`, or the index of one of its stored options. Until it is sealed, every pick
takes the same bytes. After that an item has three phases, and in each phase a pick takes the same bytes all the time:

========  ==========================  ========  =====================  ==========================================
phase     times                       ``KEEP``  option ``k``           ``REBUILD``
========  ==========================  ========  =====================  ==========================================
sealing   ``sealed``                  ``full``  ``full + nbytes[k]``   ``full + rebuilt_nbytes``
waiting   to ``died``, in no window   ``full``  ``nbytes[k]``          ``rebuilt_nbytes``
open      in a window                 ``full``  ``full + nbytes[k]``   ``full + rebuilt_nbytes + rebuilt_extra``
                                                or ``nbytes[k]`` if
                                                it is ``unopened``
========  ==========================  ========  =====================  ==========================================

So no pick is the smallest at all times, and even the smallest peak is hard to find. What each solver guarantees is
said in :func:`solve`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KEEP = -1
"""The tensor stays as it is."""
REBUILD = -2
"""Nothing but ``rebuilt_nbytes`` is stored; the tensor is made again from its sources."""

SOLVERS = ("greedy", "exact", "lagrangian")
MOST = 4
"""From so many items that are not rebuilt themselves one is rebuilt at most, unless told otherwise."""

_SEALING, _WAITING, _OPEN = range(3)
_REMEMBERED = 2_000_000
"""For how many pairs of a time and an item a walk remembers the phase."""
_MOVES = 20
"""The most moves of a walk for each pick of each item. Walks end by themselves; this bounds the time in odd cases."""
_SCALES = (1.0, 0.25, 0.0625)
"""Of the first prices, those that greedy paid: an item that lives at several times paid only one of them."""
_LIMITS = 32
"""Limits that are a part of all bytes apart, and as many that are a part of all greedy moves apart."""
_PART = 4
"""For so many limits in a row there are prices."""
_ROUNDS = 2
"""How often prices are corrected."""
_STEPS = 100_000
"""The most steps of a walk at these limits, divided by the number of items."""
_SPREAD = 500
"""The most states whose neighbours are looked at."""
_MANY, _LARGE = 150, 250
"""From so many items on there are fewer of these states, and fewer limits, because each takes longer."""
_PASSES = 3
"""The most passes over all items that look for savings."""
_EXACT_ITEMS = 12
_EXACT_PICKS = 20_000_000
"""The most combinations of picks that "exact" takes: four seconds on a busy core if hardly any can be cut."""


class Item(NamedTuple):
    """One saved tensor, and what may become of it. Times are indices into ``base``, first and last included."""

    full: int
    """Bytes of the tensor itself."""
    born: int
    """The time from which it is there."""
    sealed: int
    """The last time at which forward itself needs it; what is stored of it is there from this time on too."""
    died: int
    """The last time at which backward still has it, or what is stored of it."""
    windows: tuple[tuple[int, int], ...]
    """Times (first, last) after ``sealed`` at which a stored tensor is there in full beside its stored form. Windows
    that overlap count once."""
    nbytes: tuple[int, ...]
    """Bytes of each stored option."""
    error: tuple[float, ...]
    """Error of each stored option; one that is not finite is worse than all finite ones together."""
    seconds: tuple[float, ...]
    """Time of each stored option, to encode and to decode."""
    weight: float = 1.0
    """Cost of a unit of error."""
    may_keep: bool = True
    """If False, the tensor has to be stored or rebuilt."""
    sources: tuple[tuple[int, float], ...] = ()
    """Pairs of an earlier item and a gain. If there are any, the tensor can be rebuilt, and then its error is the sum
    of ``gain * error of the source``, whatever the source's own pick."""
    rebuilt_nbytes: int = 0
    rebuilt_seconds: float = 0.0
    unopened: tuple[int, ...] = ()
    """Stored options that are read as they are: they take no more bytes in a window."""
    rebuilt_extra: int = 0
    """Bytes beside ``full`` in its windows while it is being rebuilt."""


class Solution(NamedTuple):
    """A pick for each item, and what comes of them."""

    picks: tuple[int, ...]
    cost: float
    """``error + price * seconds``."""
    error: float
    """The weighted sum of all errors; infinite if one of them is not finite."""
    seconds: float
    peak: int
    at: int
    """The first time of the peak."""


class InfeasibleError(ValueError):
    """A limit that cannot be met; ``least`` is the smallest peak that the solver reaches, ``at`` the time of it."""

    def __init__(self, message: str, least: int, at: int) -> None:
        super().__init__(message)
        self.least = least
        self.at = at


class State(NamedTuple):
    """One state of a walk. Its picks are found by replaying moves: cheapest if states are asked in order."""

    peak: int
    at: int
    cost: float
    error: float
    seconds: float
    score: float
    """The cost with a large number for each error that is not finite."""
    log: _Log
    moves: int

    @property
    def picks(self) -> tuple[int, ...]:
        """The pick of each item."""
        return self.log.picks_after(self.moves)

    @property
    def solution(self) -> Solution:
        """The same as a solution."""
        return Solution(self.picks, self.cost, self.error, self.seconds, self.peak, self.at)


class _Log:
    """Where a walk began, and its moves: pairs of an item and its new pick."""

    def __init__(self, start: Sequence[int]) -> None:
        self.start = tuple(start)
        self.moves: list[tuple[int, int]] = []
        self.paid: list[tuple[int, int, float]] = []
        """For each step the moves before it, the time of the peak then, and the cost of a byte."""
        self._picks, self._done = list(start), 0

    def picks_after(self, count: int) -> tuple[int, ...]:
        if count < self._done:
            self._picks, self._done = list(self.start), 0
        for i, pick in self.moves[self._done : count]:
            self._picks[i] = pick
        self._done = count
        return tuple(self._picks)


def solve(
    base: Sequence[int],
    items: Sequence[Item],
    limit: int | float,
    *,
    price: float = 0.0,
    solver: str = "greedy",
    most: int = MOST,
    known: Sequence[Sequence[int]] = (),
) -> Solution:
    """A pick for each item, so that the peak is at most ``limit`` and the cost is small.

    The cost is ``sum(weight * error) + price * sum(seconds)``. Nothing is rebuilt from more than ``most`` items that
    are not rebuilt themselves, kept or stored, counted through chains and as often as they are used. ``known`` are
    picks that somebody else found: no solver costs more than those of them that meet the limit.

    - ``"greedy"`` takes the first state of :func:`path` that meets the limit, or what is known. It is fast. Its least
      peak is at most that of all items kept (or stored at least cost, where they may not be kept), and at most that of
      all items at their smallest: each with the pick that takes the fewest bytes while it waits, and rebuilt only as
      ``most`` allows. It may be above the smallest possible one.
    - ``"lagrangian"`` knows all these states and more. It gives the bytes at each time a price, lets each item pick
      what is best at these prices, walks down from there and from what is known, and looks at all that is one move away
      from the best states. It meets the limits that greedy meets, and costs at most as much. The more items there
      are the less it looks at, and from about 1,500 on there are no prices, so that it is little better than greedy.
    - ``"exact"`` finds the least cost, and if there is no solution the smallest possible peak. It is for up to twelve
      items with few picks.

    No cost rises with the limit. For "exact" that is plain. The other two make a set of states without a look at the
    limit, and take the cheapest of those that meet it; a higher limit leaves it at least the same ones to take from.

    All are deterministic. A limit that cannot be met raises :class:`InfeasibleError`; solved again with its ``least``
    the same solver succeeds.

    >>> first = Item(100, 0, 1, 7, ((6, 6),), nbytes=(50, 25), error=(1.0, 4.0), seconds=(0.0, 0.0))
    >>> second = first._replace(born=2, sealed=3, died=5, windows=((4, 4),), weight=3.0)
    >>> solve([0] * 8, [first, second], 200)
    Solution(picks=(-1, -1), cost=0.0, error=0.0, seconds=0.0, peak=200, at=2)
    >>> solve([0] * 8, [first, second], 150).picks
    (0, -1)
    >>> solve([0] * 8, [first, second], 120)
    Traceback (most recent call last):
    ...
    lowtide.planning.solvers.InfeasibleError: a limit of 120 bytes cannot be met: the least peak found is 125, at time 1

    What is rebuilt from a tensor that is kept has no error:

    >>> made = Item(100, 1, 2, 6, ((6, 6),), nbytes=(50,), error=(1.0,), seconds=(0.0,), sources=((0, 1.0),))
    >>> solve([0, 0, 0, 0, 150, 0, 0, 0], [first, made], 250)
    Solution(picks=(-1, -2), cost=0.0, error=0.0, seconds=0.0, peak=250, at=4)
    """
    if solver not in SOLVERS:
        raise ValueError(f"there is no solver {solver!r}; choose one of {', '.join(map(repr, SOLVERS))}")
    if not limit >= 0:
        raise ValueError(f"a limit is a number of bytes, 0 or more; got {limit!r}")
    problem = _Problem(base, items, price, most)
    if solver == "exact":
        _check_small(problem)
        return _exact(problem, limit)
    return cheapest(_states(problem, solver, known), limit)


def cheapest(states: Sequence[State], limit: int | float) -> Solution:
    """Of states whose peaks fall and whose costs rise the first that meets the limit; InfeasibleError if none does."""
    found = next((state for state in states if state.peak <= limit), None)
    if found is None:
        raise _infeasible(limit, states[-1].peak, states[-1].at)
    return found.solution


def path(base: Sequence[int], items: Sequence[Item], *, price: float = 0.0, most: int = MOST) -> tuple[State, ...]:
    """The greedy path from the least cost to the smallest peak: from state to state peaks fall and costs rise.

    It begins with all items kept; one that may not be kept takes what costs least. Each move lowers the level at the
    first time of the peak, where it costs least for each byte that it frees there; one that lowers the cost too goes
    first. What a move costs includes the errors of all that is rebuilt from its item. No move raises another time to
    the peak. So the peak never rises, and where it stays, fewer times have it: the path ends. A second walk begins with
    all items at their smallest, and its states follow where it ends at a lower peak than the first.

    Left out are states with a later one that costs no more. So the first state that meets a limit is the cheapest that
    does, and a lower limit is never cheaper.

    >>> item = Item(100, 0, 1, 3, (), nbytes=(50, 25), error=(1.0, 4.0), seconds=(0.1, 0.1))
    >>> for state in path([0, 0, 90, 0], [item]):
    ...     print(state.peak, state.cost, state.picks)
    190 0.0 (-1,)
    150 1.0 (0,)
    125 4.0 (1,)
    """
    return _descend(_Problem(base, items, price, most))


def front(
    base: Sequence[int],
    items: Sequence[Item],
    *,
    solver: str = "lagrangian",
    price: float = 0.0,
    most: int = MOST,
    known: Sequence[Sequence[int]] = (),
) -> tuple[State, ...]:
    """All states that "greedy" or "lagrangian" takes from, whatever the limit: peaks fall and costs rise.

    >>> item = Item(100, 0, 1, 3, (), nbytes=(50, 25), error=(1.0, 4.0), seconds=(0.1, 0.1))
    >>> [(state.peak, state.cost) for state in front([0, 0, 90, 0], [item])]
    [(190, 0.0), (150, 1.0), (125, 4.0)]
    """
    return _states(_Problem(base, items, price, most), solver, known)


def level(base: Sequence[int], items: Sequence[Item], picks: Sequence[int]) -> NDArray[np.int64]:
    """The bytes at each time.

    >>> item = Item(100, 1, 2, 6, ((4, 4),), nbytes=(25,), error=(1.0,), seconds=(0.0,))
    >>> level([7] * 8, [item], [KEEP]).tolist()
    [7, 107, 107, 107, 107, 107, 107, 7]
    >>> level([7] * 8, [item], [0]).tolist()
    [7, 107, 132, 32, 132, 32, 32, 7]
    """
    problem = _Problem(base, items, 0.0, len(items))
    problem.check_picks(picks)
    return problem.level(picks)


def evaluate(
    base: Sequence[int], items: Sequence[Item], picks: Sequence[int], price: float = 0.0, most: int = MOST
) -> Solution:
    """What comes of these picks: the definition that all solvers share.

    >>> stored = Item(100, 0, 0, 3, (), nbytes=(50,), error=(2.0,), seconds=(0.25,))
    >>> made = Item(80, 1, 1, 3, (), (), (), (), weight=3.0, sources=((0, 0.5),), rebuilt_seconds=0.75)
    >>> evaluate([0, 0, 0, 5], [stored, made], [0, REBUILD], price=10.0)
    Solution(picks=(0, -2), cost=15.0, error=5.0, seconds=1.0, peak=150, at=0)
    """
    return _checked_walk(_Problem(base, items, price, most), picks).state().solution


def _checked_walk(problem: _Problem, picks: Sequence[int]) -> _Walk:
    problem.check_picks(picks)
    walk = _Walk(problem, picks)
    for i, (pick, count) in enumerate(zip(walk.picks, walk.count, strict=True)):
        if pick == REBUILD and count > problem.most:
            raise ValueError(f"item {i} is rebuilt from {count} items that are not; at most {problem.most} are allowed")
    return walk


class _Problem:
    """Items that have been checked, as lists by pick.

    Lists by pick end with the values for REBUILD and KEEP, so that every pick, the negative ones too, is an index.
    """

    def __init__(self, base: Sequence[int], items: Sequence[Item], price: float, most: int) -> None:
        if not (math.isfinite(price) and price >= 0):
            raise ValueError(f"price must be finite and 0 or more; got {price!r}")
        if most < 0:
            raise ValueError(f"most must be 0 or more; got {most!r}")
        if not len(base) or np.asarray(base).dtype.kind not in "iu":
            raise ValueError(f"base must have whole bytes for one time at least; got {_short(base)}")
        self.base = np.asarray(base, dtype=np.int64)
        self.items = items
        self.price, self.most = float(price), most
        self.windows = [_checked(i, item, len(base)) for i, item in enumerate(items)]
        self.waits = [_between(item, windows) for item, windows in zip(items, self.windows, strict=True)]
        self.picks = [
            [*([KEEP] if item.may_keep else []), *range(len(item.nbytes)), *([REBUILD] if item.sources else [])]
            for item in items
        ]
        # Bytes in the three phases; when it is sealed, those beside the tensor itself, which is there in any case.
        self.sealing = [[*item.nbytes, item.rebuilt_nbytes, 0] for item in items]
        self.waiting = [[*item.nbytes, item.rebuilt_nbytes, item.full] for item in items]
        self.opened = [
            [
                *(b if k in item.unopened else item.full + b for k, b in enumerate(item.nbytes)),
                item.full + item.rebuilt_nbytes + item.rebuilt_extra,
                item.full,
            ]
            for item in items
        ]
        self.error = [[*(e if math.isfinite(e) else 0.0 for e in item.error), 0.0, 0.0] for item in items]
        self.bad = [[*(not math.isfinite(e) for e in item.error), False, False] for item in items]
        self.seconds = [[*item.seconds, item.rebuilt_seconds, 0.0] for item in items]
        self.users: list[list[tuple[int, float]]] = [[] for _ in items]
        for i, item in enumerate(items):
            for j, gain in item.sources:
                self.users[j].append((i, gain))
        self.most_moves = _MOVES * sum(map(len, self.picks))
        self.worst = self._worst()
        self.timed = [
            [self.price * s + self.worst * bad for s, bad in zip(*row, strict=True)]
            for row in zip(self.seconds, self.bad, strict=True)
        ]
        self._lay_out()

    def _worst(self) -> float:
        """The cost of an error that is not finite: more than the finite costs of any picks differ."""
        loads = [item.weight for item in self.items]
        total = 0.0
        for i in reversed(range(len(loads))):
            for j, gain in self.items[i].sources:
                loads[j] += gain * loads[i]
            total += loads[i] * max(self.error[i]) + self.price * max(self.seconds[i])
        return min(1.0 + 2.0 * total, 1e200)

    def _lay_out(self) -> None:
        """The same as arrays: options first, then what fills a row, then REBUILD and KEEP."""
        items, times, count = self.items, len(self.base), len(self.items)
        self.born, self.sealed, self.died = (np.array([item[k] for item in items], dtype=np.intp) for k in (1, 2, 3))
        rows = [(i, first, last) for i, windows in enumerate(self.windows) for first, last in windows]
        self.window_item, self.window_first, self.window_last = np.array(rows, dtype=np.intp).reshape(-1, 3).T.copy()
        steps = np.zeros(times + 1, dtype=np.int64)
        full = np.array([item.full for item in items], dtype=np.int64)
        np.add.at(steps, self.born, full)
        np.add.at(steps, self.sealed + 1, -full)
        self.fixed = self.base + steps[:-1].cumsum()
        width = max((len(item.nbytes) for item in items), default=0)

        def table(rows: Sequence[Sequence[float]], fill: float) -> NDArray[np.float64]:
            full = [[*row[:-2], *[fill] * (width + 2 - len(row)), *row[-2:]] for row in rows]
            return np.array(full, dtype=np.float64).reshape(-1, width + 2)

        self.bytes = [table(rows, 0) for rows in (self.sealing, self.waiting, self.opened)]
        self.errors = table(self.error, 0.0)
        self.own = table(self.timed, math.inf)
        self.own[[i for i, item in enumerate(items) if not item.sources], REBUILD] = math.inf
        self.own[[i for i, item in enumerate(items) if not item.may_keep], KEEP] = math.inf
        self.weight = np.array([item.weight for item in items])
        links = [(i, j, gain) for i, item in enumerate(items) for j, gain in item.sources]
        self.link_item, self.link_source = (np.array([row[k] for row in links], dtype=np.intp) for k in (0, 1))
        self.link_gain = np.array([gain for _, _, gain in links])
        sealings = [[(item.sealed, item.sealed)] for item in items]
        phases: list[Sequence[Sequence[tuple[int, int]]]] = [sealings, self.waits, self.windows]
        spans = [
            (phase * count + i, first, last)
            for phase, lists in enumerate(phases)
            for i, pairs in enumerate(lists)
            for first, last in pairs
        ]
        self.span_entry, self.span_first, last = np.array(spans, dtype=np.intp).reshape(-1, 3).T.copy()
        self.span_power = np.frexp(last + 1 - self.span_first)[1] - 1
        self.span_second = last + 1 - (1 << self.span_power)

    def highest(self, level: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each item the highest level before and after it, and in each phase.

        That of a phase comes from the highest of all spans of 1, 2, 4, ... times.
        """
        powers = np.repeat(level[None], int(self.span_power.max(initial=0)) + 1, axis=0)
        for k in range(1, len(powers)):
            half = 1 << (k - 1)
            powers[k] = powers[k - 1]
            np.maximum(powers[k - 1, :-half], powers[k - 1, half:], out=powers[k, :-half])
        around = np.concatenate([[low := np.iinfo(np.int64).min], level, [low]])
        before = np.maximum.accumulate(around)[self.sealed]
        after = np.maximum.accumulate(around[::-1])[::-1][self.died + 2]
        found = np.full(3 * len(self.items), low)
        spans = np.maximum(powers[self.span_power, self.span_first], powers[self.span_power, self.span_second])
        np.maximum.at(found, self.span_entry, spans)
        return np.stack([np.maximum(before, after), *found.reshape(3, -1)])

    def check_picks(self, picks: Sequence[int]) -> None:
        """One pick for each item, and one that it may take."""
        if len(picks) != len(self.items):
            raise ValueError(f"there must be a pick for each of the {len(self.items)} items; got {len(picks)}")
        for i, pick in enumerate(picks):
            if pick not in self.picks[i]:
                raise ValueError(f"item {i} has the picks {self.picks[i]}; got {pick!r}")

    def level(self, picks: Sequence[int]) -> NDArray[np.int64]:
        """The bytes at each time."""

        def taken(table: list[list[int]]) -> NDArray[np.int64]:
            return np.array([row[pick] for row, pick in zip(table, picks, strict=True)], dtype=np.int64)

        sealing, waiting, opened = taken(self.sealing), taken(self.waiting), taken(self.opened)
        steps = np.zeros(len(self.base) + 1, dtype=np.int64)
        np.add.at(steps, self.sealed, sealing)
        np.add.at(steps, self.sealed + 1, waiting - sealing)
        np.add.at(steps, self.died + 1, -waiting)
        more = (opened - waiting)[self.window_item]
        np.add.at(steps, self.window_first, more)
        np.add.at(steps, self.window_last + 1, -more)
        return np.asarray(self.fixed + steps[:-1].cumsum(), dtype=np.int64)

    def start(self) -> list[int]:
        """All that may be kept is kept; the others take what costs least, by the bytes if equal."""
        found: list[int] = []
        errors: list[float] = []
        counts: list[int] = []
        for i, item in enumerate(self.items):
            made = sum(gain * errors[j] for j, gain in item.sources)
            count = sum(counts[j] for j, _ in item.sources)

            def cost(pick: int, i: int = i, made: float = made) -> tuple[float, int]:
                error = made if pick == REBUILD else self.error[i][pick]
                own = self.items[i].weight * error + self.price * self.seconds[i][pick]
                return own + self.worst * self.bad[i][pick], self.waiting[i][pick]

            picks = [pick for pick in self.picks[i] if pick != REBUILD or count <= self.most]
            pick = KEEP if item.may_keep else min(picks, key=cost)
            found.append(pick)
            errors.append(made if pick == REBUILD else self.error[i][pick])
            counts.append(count if pick == REBUILD else 1)
        return found

    def smallest(self) -> list[int]:
        """Each item with the pick that takes the fewest bytes while it waits, rebuilt only as ``most`` allows."""
        found: list[int] = []
        counts: list[int] = []
        for i, item in enumerate(self.items):
            count = sum(counts[j] for j, _ in item.sources)
            picks = [pick for pick in self.picks[i] if pick != REBUILD or count <= self.most]
            pick = min(picks, key=self.waiting[i].__getitem__)
            found.append(pick)
            counts.append(count if pick == REBUILD else 1)
        return found


def _short(values: Sequence[object]) -> str:
    """The first few values, for a message of one line."""
    return f"[{', '.join(map(repr, values[:4]))}{', ...' if len(values) > 4 else ''}]"


def _checked(i: int, item: Item, times: int) -> tuple[tuple[int, int], ...]:
    """The windows of an item, in order and joined where they overlap."""
    if not 0 <= item.born <= item.sealed <= item.died < times:
        raise ValueError(
            f"item {i} must have 0 <= born <= sealed <= died < {times}, the times of base; "
            f"got {item.born}, {item.sealed}, {item.died}"
        )
    sizes = len(item.nbytes), len(item.error), len(item.seconds)
    if len(set(sizes)) > 1:
        raise ValueError(
            f"item {i} must have as many errors and seconds as nbytes; got {sizes[0]} nbytes, {sizes[1]} errors and "
            f"{sizes[2]} seconds"
        )
    if not (item.may_keep or item.nbytes):
        raise ValueError(f"item {i} must have an option, because it may not be kept; got none")
    if min(item.full, item.rebuilt_nbytes, item.rebuilt_extra, *item.nbytes) < 0:
        raise ValueError(f"item {i} must have bytes of 0 or more; got {item}")
    if any(e < 0 and math.isfinite(e) for e in item.error):
        raise ValueError(f"item {i} must have errors of 0 or more; got {item.error}")
    numbers = (item.weight, item.rebuilt_seconds, *item.seconds, *(gain for _, gain in item.sources))
    if not all(math.isfinite(x) and x >= 0 for x in numbers):
        raise ValueError(f"item {i} must have a weight, seconds and gains that are finite and 0 or more; got {item}")
    if any(not 0 <= j < i for j, _ in item.sources):
        raise ValueError(f"item {i} must have sources among the items before it; got {[j for j, _ in item.sources]}")
    joined: list[tuple[int, int]] = []
    for first, last in sorted(item.windows):
        if not item.sealed < first <= last <= item.died:
            raise ValueError(
                f"item {i} must have windows after sealed, {item.sealed}, and up to died, {item.died}; "
                f"got {(first, last)}"
            )
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return tuple(joined)


def _between(item: Item, windows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Times (first, last) at which an item waits: after it was sealed, in no window."""
    edges = [item.sealed, *itertools.chain.from_iterable(windows), item.died + 1]
    return [(low + 1, high - 1) for low, high in zip(edges[::2], edges[1::2], strict=True) if low + 1 < high]


class _Walk:
    """Picks that change one at a time, and the levels, errors and costs that follow."""

    def __init__(self, problem: _Problem, picks: Sequence[int]) -> None:
        items = problem.items
        self.problem = problem
        self.picks = list(picks)
        self.level = problem.level(picks)
        self.error = [0.0] * len(items)
        self.count = [1] * len(items)
        """From how many items that are not rebuilt an item is made; 1 for those themselves."""
        self.load = [item.weight for item in items]
        """The cost of a unit of an item's error, with that of all that is rebuilt from it."""
        for i in range(len(items)):
            self.error[i] = self._error_of(i, self.picks[i])
            if self.picks[i] == REBUILD:
                self.count[i] = sum(self.count[j] for j, _ in items[i].sources)
        for i in reversed(range(len(items))):
            if self.picks[i] == REBUILD:
                for j, gain in items[i].sources:
                    self.load[j] += gain * self.load[i]
        self._worth = np.array([item.weight * e for item, e in zip(items, self.error, strict=True)])
        self._seconds = np.array([row[pick] for row, pick in zip(problem.seconds, picks, strict=True)])
        self.bad = sum(row[pick] for row, pick in zip(problem.bad, picks, strict=True))
        """How many items are stored with an error that is not finite."""
        # For each phase and item the best move: its added cost for each byte that it frees in that phase, and the pick.
        self._rate = np.full(3 * len(items), math.inf)
        self._target = [KEEP] * (3 * len(items))
        self._stale = set(range(len(items)))
        self._entries: dict[int, NDArray[np.intp]] = {}
        self._room = _REMEMBERED
        # Moves that would raise a time to the peak: the time, by how much, and the item.
        self._banned: dict[int, set[int]] = {}
        self._bans = np.empty((3, 64), dtype=np.int64)
        self._ban_count = 0
        self.log = _Log(self.picks)

    def totals(self) -> tuple[float, float, float]:
        """Score, error and seconds. The score is the cost with a large number for each error that is not finite."""
        error, seconds = float(self._worth.sum()), float(self._seconds.sum())
        return error + self.problem.price * seconds + self.problem.worst * self.bad, error, seconds

    def state(self) -> State:
        """What comes of the picks of now."""
        score, error, seconds = self.totals()
        error = math.inf if self.bad else error
        at = int(self.level.argmax())
        cost = error + self.problem.price * seconds
        return State(int(self.level[at]), at, cost, error, seconds, score, self.log, len(self.log.moves))

    def _error_of(self, i: int, pick: int) -> float:
        if pick == REBUILD:
            return sum(gain * self.error[j] for j, gain in self.problem.items[i].sources)
        return self.problem.error[i][pick]

    def added(self, i: int, pick: int) -> float:
        """What it would add to the score."""
        problem, now = self.problem, self.picks[i]
        cost = self.load[i] * (self._error_of(i, pick) - self.error[i])
        cost += problem.price * (problem.seconds[i][pick] - problem.seconds[i][now])
        return cost + problem.worst * (problem.bad[i][pick] - problem.bad[i][now])

    def may_take(self, i: int, pick: int) -> bool:
        """Whether nothing would be rebuilt from too many items."""
        if pick != REBUILD or self.picks[i] == REBUILD:
            return True
        items, most = self.problem.items, self.problem.most
        counts = {i: sum(self.count[j] for j, _ in items[i].sources)}
        for user in self._rebuilt_from(i):
            counts[user] = sum(counts.get(j, self.count[j]) for j, _ in items[user].sources)
        return max(counts.values()) <= most

    def _rebuilt_from(self, i: int) -> list[int]:
        """All that is rebuilt from an item, through chains, each after its sources."""
        found, todo = set[int](), [i]
        while todo:
            for user, _ in self.problem.users[todo.pop()]:
                if self.picks[user] == REBUILD and user not in found:
                    found.add(user)
                    todo.append(user)
        return sorted(found)

    def move(self, i: int, pick: int) -> None:
        """Take another pick."""
        problem, now = self.problem, self.picks[i]
        item = problem.items[i]
        sealing, waiting, opened = (
            table[i][pick] - table[i][now] for table in (problem.sealing, problem.waiting, problem.opened)
        )
        self.level[item.sealed : item.died + 1] += waiting
        if sealing != waiting:
            self.level[item.sealed] += sealing - waiting
        if opened != waiting:
            for first, last in problem.windows[i]:
                self.level[first : last + 1] += opened - waiting
        self.picks[i] = pick
        self.log.moves.append((i, pick))
        self._seconds[i] = problem.seconds[i][pick]
        self.bad += problem.bad[i][pick] - problem.bad[i][now]
        self._banned.pop(i, None)
        self._stale.add(i)
        if REBUILD in (pick, now):
            self._relink(i)
        for k in (i, *self._rebuilt_from(i)) if problem.users[i] else (i,):
            self.error[k] = self._error_of(k, self.picks[k])
            self._worth[k] = problem.items[k].weight * self.error[k]
            self._stale.update(user for user, _ in problem.users[k])

    def _relink(self, i: int) -> None:
        """Counts and loads anew, where they depend on whether an item is rebuilt."""
        items = self.problem.items
        chain = [i, *self._rebuilt_from(i)]
        for k in chain:
            self.count[k] = sum(self.count[j] for j, _ in items[k].sources) if self.picks[k] == REBUILD else 1
            self._stale.update(user for user, _ in self.problem.users[k])
        behind = {j for k in chain for j, _ in items[k].sources}
        todo = list(behind)
        while todo:
            j = todo.pop()
            more = {k for k, _ in items[j].sources} - behind if self.picks[j] == REBUILD else set()
            behind |= more
            todo += more
        for j in sorted(behind, reverse=True):
            used = (gain * self.load[k] for k, gain in self.problem.users[j] if self.picks[k] == REBUILD)
            self.load[j] = items[j].weight + sum(used)
        self._stale |= behind

    def blocker(self, i: int, pick: int, top: int) -> tuple[int, int] | None:
        """A time at which another pick would raise the level to ``top`` or above, and by how much; None if nowhere."""
        problem, now = self.problem, self.picks[i]
        more = problem.sealing[i][pick] - problem.sealing[i][now]
        sealed = problem.items[i].sealed
        if more > 0 and self.level[sealed] + more >= top:
            return sealed, more
        for table, spans in ((problem.opened, problem.windows), (problem.waiting, problem.waits)):
            more = table[i][pick] - table[i][now]
            if more > 0:
                for first, last in spans[i]:
                    at = first + int(self.level[first : last + 1].argmax())
                    if self.level[at] + more >= top:
                        return at, more
        return None

    def step(self) -> bool:
        """Lower the level at the first time of the peak by the move that costs least for a byte; False if none does."""
        count = len(self.picks)
        while True:
            at = int(self.level.argmax())
            top = int(self.level[at])
            self._allow_again(top)
            self._refresh()
            entries = self._at(at)
            rates = self._rate[entries]
            best = int(rates.argmin()) if rates.size else -1
            if best < 0 or rates[best] == math.inf:
                return False
            entry = int(entries[best])
            i, pick = entry % count, self._target[entry]
            blocker = self.blocker(i, pick, top)
            if blocker is None:
                self.log.paid.append((len(self.log.moves), at, float(rates[best])))
                self.move(i, pick)
                return True
            self._ban(i, pick, blocker)

    def _refresh(self) -> None:
        for i in self._stale:
            self._offer(i)
        self._stale.clear()

    def _offer(self, i: int) -> None:
        """The best move of an item in each phase; of equal ones that which frees more."""
        problem, now, load = self.problem, self.picks[i], self.load[i]
        costs = [load * error + cost for error, cost in zip(problem.error[i], problem.timed[i], strict=True)]
        offered = problem.picks[i]
        if problem.items[i].sources:
            costs[REBUILD] += load * self._error_of(i, REBUILD)
            if not self.may_take(i, REBUILD):
                offered = offered[:-1]
        if i in self._banned:
            offered = [pick for pick in offered if pick not in self._banned[i]]
        cost, count = costs[now], len(self.picks)
        tables = problem.sealing[i], problem.waiting[i], problem.opened[i]

        def best(phase: int, picks: Sequence[int]) -> tuple[float, int]:
            least, most, target, table = math.inf, 0, KEEP, tables[phase]
            held = table[now]
            for pick in picks:
                freed = held - table[pick]
                if freed > 0:
                    rate = (costs[pick] - cost) / freed
                    if rate < least or (rate == least and freed > most):
                        least, most, target = rate, freed, pick
            return least, target

        waits = self._rate[i + count], self._target[i + count] = best(_WAITING, offered)
        for phase in (_SEALING, _OPEN):
            entry = i + phase * count
            if now == KEEP:  # nothing has fewer bytes then
                self._rate[entry] = math.inf
            elif now >= 0 <= waits[1]:  # one stored form has so many bytes more than another in every phase
                others = [pick for pick in (*offered[:1], *offered[-1:], waits[1]) if pick < 0 or pick == waits[1]]
                self._rate[entry], self._target[entry] = best(phase, others)
            else:
                self._rate[entry], self._target[entry] = best(phase, offered)

    def _at(self, at: int) -> NDArray[np.intp]:
        """The entries of all items whose pick matters at a time, each in its phase."""
        found = self._entries.get(at)
        if found is None:
            problem, count = self.problem, len(self.picks)
            phase = np.full(count, _WAITING)
            phase[problem.sealed == at] = _SEALING
            phase[problem.window_item[(problem.window_first <= at) & (at <= problem.window_last)]] = _OPEN
            there = np.nonzero((problem.sealed <= at) & (at <= problem.died))[0]
            found = there + phase[there] * count
            if self._room < found.size:
                self._entries.clear()
                self._room = _REMEMBERED
            self._entries[at] = found
            self._room -= found.size
        return found

    def _ban(self, i: int, pick: int, blocker: tuple[int, int]) -> None:
        """Do not offer a move until the level at its blocker has fallen far enough below the peak."""
        self._banned.setdefault(i, set()).add(pick)
        self._stale.add(i)
        if self._ban_count == self._bans.shape[1]:
            self._bans = np.concatenate([self._bans, np.empty_like(self._bans)], axis=1)
        self._bans[:, self._ban_count] = (*blocker, i)
        self._ban_count += 1

    def _allow_again(self, top: int) -> None:
        if not self._ban_count:
            return
        at, more, item = self._bans[:, : self._ban_count]
        over = self.level[at] + more < top
        if over.any():
            for i in item[over].tolist():
                self._banned.pop(i, None)
                self._stale.add(i)
            left = self._bans[:, : self._ban_count][:, ~over]
            self._ban_count = left.shape[1]
            self._bans[:, : self._ban_count] = left

    def polish(self, limit: float) -> None:
        """The move of each item that lowers the cost most and keeps the limit, those that save most first."""
        top = math.floor(min(limit, 2**62)) + 1
        for _ in range(_PASSES):
            count = len(self.log.moves)
            added, peaks = self.neighbours()
            added[peaks >= top] = 0.0
            for i in np.nonzero(added[:, REBUILD] < 0)[0].tolist():
                added[i, REBUILD] *= self.may_take(i, REBUILD)
            place, saved = added.argmin(axis=1), added.min(axis=1)
            item = np.argsort(saved, kind="stable")[: np.count_nonzero(saved < 0)]
            for i, pick in zip(item.tolist(), _picks(place[item], added).tolist(), strict=True):
                # An earlier move may have changed what this one brings.
                if self.added(i, pick) < 0 and self.may_take(i, pick) and self.blocker(i, pick, top) is None:
                    self.move(i, pick)
            if len(self.log.moves) == count:
                return

    def neighbours(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """For each item and pick what it adds to the score, and the peak then."""
        problem = self.problem
        rows, now, error = np.arange(len(self.picks)), np.array(self.picks, dtype=np.intp), np.array(self.error)
        errors = problem.errors.copy()
        made = problem.link_gain * error[problem.link_source]
        errors[:, REBUILD] = np.bincount(problem.link_item, made, len(rows))
        added = np.array(self.load)[:, None] * (errors - error[:, None]) + problem.own - problem.own[rows, now, None]
        added[rows, now] = 0.0
        outside, *highest = problem.highest(self.level)
        peaks = np.repeat(outside[:, None], added.shape[1], axis=1).astype(np.float64)
        for table, high in zip(problem.bytes, highest, strict=True):
            np.maximum(peaks, table - table[rows, now, None] + high[:, None], out=peaks)
        return added, peaks

    def better(self, states: _Table) -> Iterator[State]:
        """States one move away that cost less than all given ones with a peak as low."""
        added, peaks = self.neighbours()
        added += self.totals()[0]
        item, place = np.nonzero(added < states.least(peaks))
        costs, tops, picks = added[item, place], peaks[item, place], _picks(place, added)
        least = math.inf
        for k in np.lexsort((costs, tops)).tolist():
            i, pick, now = int(item[k]), int(picks[k]), self.picks[item[k]]
            if costs[k] < least and self.may_take(i, pick):
                least = costs[k]
                self.move(i, pick)
                yield self.state()
                self.move(i, now)


def _picks(places: NDArray[np.intp], table: NDArray[np.float64]) -> NDArray[np.intp]:
    """The picks at these places in rows of a table: the last two are negative."""
    width = table.shape[1]
    return np.where(places < width - 2, places, places - width)


class _Table:
    """The least score of states with a peak as low."""

    def __init__(self, front: Sequence[State]) -> None:
        self._peaks = np.array([float(state.peak) for state in reversed(front)])
        self._scores = np.array([math.inf, *(state.score for state in reversed(front))])

    def least(self, peaks: NDArray[np.float64]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = self._scores[np.searchsorted(self._peaks, peaks, side="right")]
        return found


def _states(problem: _Problem, solver: str, known: Sequence[Sequence[int]]) -> tuple[State, ...]:
    """The front of all that a solver finds. No limit is given, so none of it depends on one."""
    given = [_checked_walk(problem, picks).state() for picks in known]
    states = _descend(problem)
    if solver == "greedy":
        return _front([*states, *given])
    return _spread(problem, _front([*states, *given, *_priced(problem, states, given)]))


def _front(states: Iterable[State]) -> tuple[State, ...]:
    """Those that cost less than all with a peak as low: from one to the next peaks fall and costs rise."""
    found: list[State] = []
    for state in sorted(states, key=lambda state: (state.peak, state.score)):
        if not found or state.score < found[-1].score:
            found.append(state)
    return tuple(reversed(found))


def _spread(problem: _Problem, front: tuple[State, ...]) -> tuple[State, ...]:
    """The front with states that are one move away from one of it, and again with those of the new ones."""
    left = max(1, int(_SPREAD * min(1.0, _MANY / max(1, len(problem.items))) ** 2))
    done = set[State]()
    while left and (todo := [state for state in front if state not in done]):
        todo = todo[:: -(-len(todo) // left)]
        left -= len(todo)
        done.update(todo)
        table = _Table(front)
        found = [new for state in todo for new in _Walk(problem, state.picks).better(table)]
        front = _front([*front, *found])
    return front


def _descend(problem: _Problem) -> tuple[State, ...]:
    """The states of :func:`path`."""
    walk = _Walk(problem, problem.start())

    def go_down() -> Iterator[State]:
        yield walk.state()
        while len(walk.log.moves) < problem.most_moves and walk.step():
            yield walk.state()

    states = list(go_down())
    least = states[-1].peak
    for i, pick in enumerate(problem.smallest()):
        if pick != walk.picks[i]:
            walk.move(i, pick)
    return _front([*states, *(state for state in go_down() if state.peak < least)])


def _infeasible(limit: float, least: int, at: int) -> InfeasibleError:
    return InfeasibleError(
        f"a limit of {limit} bytes cannot be met: the least peak found is {least}, at time {at}", least, at
    )


def _check_small(problem: _Problem) -> None:
    count = math.prod(map(len, problem.picks))
    if len(problem.items) > _EXACT_ITEMS or count > _EXACT_PICKS:
        raise ValueError(
            f"'exact' is for up to {_EXACT_ITEMS} items and {_EXACT_PICKS} combinations of picks; got "
            f"{len(problem.items)} and {count}: choose 'greedy' or 'lagrangian'"
        )


def _exact(problem: _Problem, limit: float) -> Solution:
    """The least cost by branch and bound, which begins with what greedy found."""
    search = _Search(problem)
    found = next((state for state in _descend(problem) if state.peak <= limit), None)
    if found is not None:
        search.best, search.picks = found.score, list(found.picks)
    search.cheapest(limit)
    if search.picks is None:
        search.smallest()
        assert search.picks is not None
        least = _Walk(problem, search.picks).state()
        raise _infeasible(limit, least.peak, least.at)
    return _Walk(problem, search.picks).state().solution


class _Search:
    """All picks of a small problem, item by item, without those that cannot be better than the best so far.

    Sources come before what is made from them, so a partial choice has its final errors. What is left open adds at
    least its least bytes at each time and its least cost.
    """

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        self.best = math.inf
        self.picks: list[int] | None = None
        # Times at which every item is in the same phase differ by a constant: only the highest of them counts.
        times, count = len(problem.base), len(problem.items)
        phase = np.full((count, times), 3, dtype=np.int8)
        for i, item in enumerate(problem.items):
            phase[i, item.sealed : item.died + 1] = _WAITING
            phase[i, item.sealed] = _SEALING
            for first, last in problem.windows[i]:
                phase[i, first : last + 1] = _OPEN
        columns, place = np.unique(phase, axis=1, return_inverse=True)
        self._fixed = np.full(columns.shape[1], np.iinfo(np.int64).min)
        np.maximum.at(self._fixed, place.reshape(-1), problem.fixed)
        tables = (problem.sealing, problem.waiting, problem.opened)
        self._bytes = [
            np.array([[*(table[i][pick] for table in tables), 0] for pick in picks])[:, columns[i]]
            for i, picks in enumerate(problem.picks)
        ]
        self._rest = [np.zeros_like(self._fixed)]
        self._rest_cost = [0.0]
        for i in reversed(range(count)):
            own = min(
                self._own(i, pick, 0.0 if pick == REBUILD else problem.error[i][pick]) for pick in problem.picks[i]
            )
            self._rest.insert(0, self._rest[0] + self._bytes[i].min(axis=0))
            self._rest_cost.insert(0, self._rest_cost[0] + own)

    def _own(self, i: int, pick: int, error: float) -> float:
        problem = self.problem
        cost = problem.items[i].weight * error + problem.price * problem.seconds[i][pick]
        return cost + problem.worst * problem.bad[i][pick]

    def cheapest(self, limit: float) -> None:
        """Look for a lower cost within the limit."""
        problem = self.problem

        def visit(
            picks: list[int], levels: NDArray[np.int64], cost: float, errors: list[float], counts: list[int]
        ) -> None:
            i = len(picks)
            if i == len(problem.items):
                self.best, self.picks = cost, picks
                return
            after = levels + self._bytes[i]
            fits = (after + self._rest[i + 1]).max(axis=1) <= limit
            children = []
            for k, pick in enumerate(problem.picks[i]):
                error, count = self._made(i, pick, errors, counts)
                if fits[k] and (pick != REBUILD or count <= problem.most):
                    children.append((cost + self._own(i, pick, error), k, pick, error, count))
            for total, k, pick, error, count in sorted(children):
                if total + self._rest_cost[i + 1] < self.best:
                    visit([*picks, pick], after[k], total, [*errors, error], [*counts, count])

        if self._fixed.max() <= limit:
            visit([], self._fixed, 0.0, [], [])

    def smallest(self) -> None:
        """Look for the smallest peak."""
        problem = self.problem
        self.best, self.picks = math.inf, None

        def visit(picks: list[int], levels: NDArray[np.int64], counts: list[int]) -> None:
            i = len(picks)
            if i == len(problem.items):
                self.best, self.picks = int(levels.max()), picks
                return
            after = levels + self._bytes[i]
            peaks = (after + self._rest[i + 1]).max(axis=1).tolist()
            for peak, k, pick in sorted(zip(peaks, range(len(peaks)), problem.picks[i], strict=True)):
                count = self._made(i, pick, None, counts)[1]
                if peak < self.best and (pick != REBUILD or count <= problem.most):
                    visit([*picks, pick], after[k], [*counts, count])

        visit([], self._fixed, [])

    def _made(self, i: int, pick: int, errors: list[float] | None, counts: list[int]) -> tuple[float, int]:
        """The error of a pick, and from how many items it is made."""
        if pick != REBUILD:
            return self.problem.error[i][pick], 1
        sources = self.problem.items[i].sources
        error = 0.0 if errors is None else sum(gain * errors[j] for j, gain in sources)
        return error, sum(counts[j] for j, _ in sources)


def _priced(problem: _Problem, states: Sequence[State], known: Sequence[State]) -> list[State]:
    """States of walks that begin with those of greedy, with what is known, and with what items pick at prices."""
    found: list[State] = []

    def sweep(picks: Sequence[int], limits: Sequence[int]) -> None:
        """Down from limit to limit, and at each of them moves that save."""
        walk = _Walk(problem, picks)
        left = _STEPS // max(1, len(picks))
        for limit in limits:
            while walk.level.max() > limit:
                left -= 1
                if left < 0 or not walk.step():
                    return
                found.append(walk.state())
            walk.polish(limit)
            found.append(walk.state())

    high, low = states[0].peak, states[-1].peak
    count = int(_LIMITS * min(1.0, _LARGE / max(1, len(problem.items))) ** 2)
    even = {low + k * (high - low) // count for k in range(count)}
    limits = sorted(even | {states[-1 - k * len(states) // count].peak for k in range(count)}, reverse=True)
    sweep(states[0].picks, limits)
    given = sorted(known, key=lambda state: -state.peak)
    for k, state in enumerate(given):
        above = given[k - 1].peak if k else math.inf
        below = given[k + 1].peak if k + 1 < len(given) else 0
        sweep(state.picks, [limit for limit in limits if below <= limit <= above])
    market = _Market(problem)
    prices: list[NDArray[np.float64]] = []
    for k in range(0, len(limits), _PART):
        near = limits[k : k + _PART]
        limit = near[len(near) // 2]
        start = next(state for state in states if state.peak <= limit)
        paid = np.zeros(len(problem.base))
        for moves, at, rate in start.log.paid:
            if moves < start.moves:
                paid[at] = max(0.0, rate)
        prices += [paid * scale for scale in _SCALES]
        answer = max((market.answer(row, limit) for row in prices), key=lambda answer: answer.bound)
        for _ in range(_ROUNDS):
            sweep(answer.picks, near)
            # Polyak's step along the excess, with the best cost known in place of the least.
            excess = answer.level.astype(np.float64) - limit
            excess[(excess < 0) & (answer.prices == 0)] = 0.0
            square = float(excess @ excess)
            if square == 0:
                break
            score = min(state.score for state in (start, *found) if state.peak <= limit)
            gap = max(score - answer.bound, 1e-3 * abs(answer.bound))
            answer = market.answer(np.maximum(0.0, answer.prices + gap / square * excess), limit)
        prices = [answer.prices]
    return found


class _Answer(NamedTuple):
    """What items pick at given prices."""

    prices: NDArray[np.float64]
    picks: list[int]
    level: NDArray[np.int64]
    bound: float
    """No picks that meet the limit cost less, if nothing can be rebuilt; otherwise about that."""


class _Market:
    """Items that pick what is best for them at the prices of the bytes at each time."""

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        self._errors = problem.errors.tolist()
        self._made = [i for i, item in enumerate(problem.items) if item.sources]

    def answer(self, prices: NDArray[np.float64], limit: float) -> _Answer:
        """Each item in turn, the last first, is rebuilt where that is cheaper; all others take what is cheapest."""
        problem = self.problem
        sums = np.concatenate([[0.0], prices.cumsum()])
        sealing = prices[problem.sealed]
        spans = sums[problem.window_last + 1] - sums[problem.window_first]
        opened = np.bincount(problem.window_item, spans, len(problem.items))
        waiting = sums[problem.died + 1] - sums[problem.sealed + 1] - opened
        own = problem.own.copy()
        for table, rent in zip(problem.bytes, (sealing, waiting, opened), strict=True):
            own += table * rent[:, None]
        made = own[:, REBUILD].copy()
        own[:, REBUILD] = math.inf
        loads = problem.weight.copy()
        rebuilt = self._rebuild(own, made, loads)
        costs = loads[:, None] * problem.errors + own
        chosen = costs.argmin(axis=1)
        least = costs[np.arange(len(chosen)), chosen]
        least[rebuilt] = made[rebuilt]
        bound = float(least.sum() + prices @ (problem.fixed - limit))
        keep = costs.shape[1] - 1
        picks = [KEEP if k == keep else k for k in chosen.tolist()]
        counts = [1] * len(picks)
        for i in sorted(rebuilt):
            count = sum(counts[j] for j, _ in problem.items[i].sources)
            if count <= problem.most:
                picks[i], counts[i] = REBUILD, count
        return _Answer(prices, picks, problem.level(picks), bound)

    def _rebuild(self, own: NDArray[np.float64], made: NDArray[np.float64], loads: NDArray[np.float64]) -> list[int]:
        """Items that are cheaper to rebuild; their loads go to their sources."""
        fixed = own.tolist()
        now = (loads[:, None] * self.problem.errors + own).min(axis=1).tolist()
        load = loads.tolist()

        def cost(i: int, load: float) -> float:
            return float(min([load * e + c for e, c in zip(self._errors[i], fixed[i], strict=True)]))

        rebuilt = []
        made_from = [1] * len(loads)
        for i in reversed(self._made):
            sources = self.problem.items[i].sources
            reached = made_from[i] + len(sources) - 1
            if reached > self.problem.most:
                continue
            room = now[i] - made[i]
            if room > 0 and sum(cost(j, load[j] + load[i] * gain) - now[j] for j, gain in sources) < room:
                rebuilt.append(i)
                for j, gain in sources:
                    load[j] += load[i] * gain
                    now[j] = cost(j, load[j])
                    made_from[j] = max(made_from[j], reached)
        loads[:] = load
        return rebuilt
