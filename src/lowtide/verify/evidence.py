"""When is a reading more than chance? A test that may look for ever, with a bounded rate of false alarms.

A guard looks again and again, so a test that errs once in a hundred looks would err in every run. The test here is a
wager. Somebody who believes that the gradient is spoilt has one unit of money and bets it on the readings, at odds
that are fair, or worse for him, if the gradient is as it should be. His expected money then never exceeds one unit,
and by Ville's inequality the chance that he *ever* holds :data:`ALARM` units is at most ``1 / ALARM``: 1 % over all
looks of a run, however many there are. If the gradient is spoilt, he wins on average, his money grows exponentially
with the number of looks, and any lasting excess over a limit is found in the end. There are two such wagers, one on
the size of errors and one on bias, and both begin anew when precision was raised.

**Money.** At the ``n``-th look ``1 / (n (n + 1))`` of the unit comes into play; the sum over all ``n`` is 1. So there
is always something to bet on a fault that begins late, and it starts from ``n**-2``, not from what a thousand lost
bets left. Money in play is divided among stakes that put different shares of themselves at risk, because the best
share depends on a fault's size, which is unknown. Fair bets with divided money are fair, so the sum of all stakes
counts.

**The size of errors.** Let ``ratio`` be the square of a look's error, divided by the square of what is allowed. A
stake that risks the share ``f`` is multiplied by ``1 + f (ratio - 1)``. That is never negative, and its mean is at
most 1 if the mean of the ratio is. Nothing else is assumed, so no distribution raises the rate. A single reading
above the band is therefore no alarm: with a mean ratio of 1 a reading of 4 (an error of twice what is allowed) may
come by chance in up to a quarter of all looks. Errors of twice what is allowed, look after look, are an alarm at the
fifth; a first reading of 20 times what is allowed is one by itself.

**Bias.** A value, as listed below, has a mean of at most 0, given all looks before, while the bias is within its
limit. A stake that risks the share ``f`` is multiplied by ``1 + f * value / largest``, where ``largest`` is the
greatest size of a value so far, this one included. The mean of that is at most 1 in either of two cases. First, if
values are symmetric about their mean: given the distance from it, the side is a fair coin, and ``value / largest`` is
an odd function of the value that never falls, so what a value gains on one side it loses on the other, or more.
Second, whatever the distribution, if no value is larger than those before: then ``largest`` is known before the look,
and only the mean of the value counts. Heavy tails are covered by the first case. Skewed values are covered by the
second, except at looks that set a record, of which there are about ``log n``. For their sake no money is at risk in
the first :data:`_FIRST` looks of a question, which set most records, and never more than half of a stake. Simulated
chances of an alarm in 2000 looks at exactly the limit, with all money on one question: 0.3 % for products of normal
errors, less for Student's t with 3 degrees of freedom, 0.7 % for products of single numbers that are +3 with a chance
of 0.1 and -1/3 otherwise, 1.2 % for 1 less an exponential number, and 2.8 % for the mean of a lognormal number less
that number (a skewness of -6). Products of errors lean to the other side: the third moment of the product of two
independent errors with the same law is a sum of squares.

A value without noise above 0 is found in 25 looks; normal ones with a mean of 1, 0.5 and 0.2 of their deviation in
50, 90 and 300 (median). The division of money among questions adds up to 10 looks to the first of these numbers.

Three questions are asked of the whole gradient, and of each parameter that has at least a tenth of its length, which
:func:`lowtide.check` tests too. The whole has half the money, the parameters share the other half:

- ``bias``: the product of two parts' errors, divided by the square of the gradient, less the square of the limit.
  Nothing random is common to the two errors, so the mean of the product is the square of the bias.
- ``shorter`` and ``longer``: the share of the exact gradient of the same samples that the error takes away, or adds,
  less the limit. SGD's noise is the same in both factors and does not blur the answer. So a layer whose input decodes
  to too little is found in 30 looks where products of two small parts of a batch would need thousands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..policy.tuners.base import require_keys

ALARM = 100.0
"""Money that means an alarm. Without a fault the chance ever to reach it is at most its inverse."""

LEAST_NOISE = 0.4
"""SGD's noise counts as at least this, and as this where it is unknown: an unbiased error of a quarter of it, 0.1,
makes the mean square of a step 1 % longer, which is little whatever SGD does; 0.4 makes it 16 % longer."""

LEADING = 0.1
"""Parameters with at least this share of the gradient's length are tested for bias by themselves."""

ERROR, BIAS, SHORTER, LONGER = "error", "bias", "shorter", "longer"

_RISKED_ON_VALUES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
_RISKED_ON_RATIOS = (1 / 8, 1 / 2, 1.0)
_FIRST = 8
"""Looks that tell a question how large its values are; no money is at risk in them."""


class Reading(NamedTuple):
    """What one look found, as squares in one common unit, of the whole gradient or of one parameter's.

    ``square`` is the whole batch's gradient, ``error`` that of compression, ``noise`` SGD's own, ``bias`` the product
    of the errors of two parts, which noise leaves at zero on average. ``along`` is no square: it is the part of the
    samples' own exact gradient that the error adds to it, negative if it takes it away.
    """

    step: int
    square: float
    error: float
    noise: float
    bias: float
    along: float = 0.0

    def ratio(self, allowed: float) -> float:
        """The square of the error, divided by that of ``allowed`` times SGD's noise."""
        return self.error / (allowed**2 * max(self.noise, LEAST_NOISE**2 * self.square))


class Finding(NamedTuple):
    """What an alarm is about: the question, and the parameter ("" is the whole gradient).

    ``size`` is the mean since the last raise: of an error in units of what is allowed, else in units of the gradient.
    """

    what: str
    parameter: str
    size: float


class Question:
    """Money on one question about bias: has a series of values a mean above 0?"""

    def __init__(self, seen: int = 0, total: float = 0.0, largest: float = 0.0, *stakes: float) -> None:
        self.seen = int(seen)
        self.total = total
        self.largest = largest
        self.stakes = list(stakes or [0.0] * len(_RISKED_ON_VALUES))

    def look(self, value: float, money: float) -> None:
        """Bring ``money`` into play, and bet on one more value."""
        self.stakes = [stake + money / len(self.stakes) for stake in self.stakes]
        self.seen += 1
        self.total += value
        self.largest = max(self.largest, abs(value))
        if self.seen > _FIRST and self.largest > 0:
            self.stakes = _after(self.stakes, _RISKED_ON_VALUES, value / self.largest)

    def state(self) -> list[float]:
        """What a question is made from again."""
        return [self.seen, self.total, self.largest, *self.stakes]


class Evidence:
    """All looks since precision was last raised, weighed against a guard's limits; its state is plain data."""

    def __init__(self, error: float, bias: float) -> None:
        self._limits = {ERROR: error, BIAS: bias**2, SHORTER: bias, LONGER: bias}
        self._looks = 0
        self._total = 0.0
        self._stakes = [0.0] * len(_RISKED_ON_RATIOS)
        self._questions: dict[tuple[str, str], Question] = {}

    def look(self, whole: Reading, parameters: Mapping[str, Reading]) -> Finding | None:
        """Weigh one more look at the whole gradient and at each parameter's; what the alarm is about, if there is one.

        NaN and Inf, where the exact gradient has none, are no matter of chance: they are an alarm at once.
        """
        if not math.isfinite(whole.error):
            return Finding(ERROR, "", math.inf)
        self._looks += 1
        money = 1 / (self._looks * (self._looks + 1))
        ratio = whole.ratio(self._limits[ERROR])
        self._total += ratio
        self._stakes = _after([s + money / len(self._stakes) for s in self._stakes], _RISKED_ON_RATIOS, ratio - 1)
        # Which parameters lead is seen in exact gradients, so the choice tells nothing of the errors to come.
        leading = {name: r for name, r in parameters.items() if r.square >= LEADING**2 * whole.square > 0}
        self._ask("", whole, money / 2 if leading else money)
        for name, reading in leading.items():
            self._ask(name, reading, money / 2 / len(leading))
        return self._finding()

    def _ask(self, parameter: str, reading: Reading, money: float) -> None:
        values = {BIAS: reading.bias / reading.square, SHORTER: -reading.along, LONGER: reading.along}
        for what, value in values.items():
            question = self._questions.setdefault((what, parameter), Question())
            question.look(value - self._limits[what], money / len(values))

    def money(self) -> dict[str, float]:
        """What each of the two wagers holds: on the size of errors, and on bias."""
        return {ERROR: math.fsum(self._stakes), BIAS: math.fsum(s for q in self._questions.values() for s in q.stakes)}

    def _finding(self) -> Finding | None:
        """An alarm is about the question that holds most."""
        money = self.money()
        if money[ERROR] >= ALARM:
            return Finding(ERROR, "", math.sqrt(self._total / self._looks))
        if money[BIAS] < ALARM:
            return None
        (what, parameter), question = max(self._questions.items(), key=lambda item: math.fsum(item[1].stakes))
        size = question.total / question.seen + self._limits[what]
        return Finding(what, parameter, math.sqrt(max(0.0, size)) if what == BIAS else size)

    def state_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        questions = [[*key, *question.state()] for key, question in self._questions.items()]
        return {"looks": self._looks, "total": self._total, "stakes": list(self._stakes), "questions": questions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        require_keys(state, {"looks", "total", "stakes", "questions"})
        looks, total, stakes = int(state["looks"]), float(state["total"]), [float(s) for s in state["stakes"]]
        questions = {(what, name): Question(*numbers) for what, name, *numbers in state["questions"]}
        complete = all(len(question.stakes) == len(_RISKED_ON_VALUES) for question in questions.values())
        if len(stakes) != len(_RISKED_ON_RATIOS) or not complete:
            raise ValueError("a wager lacks some of its stakes, or has too many")
        self._looks, self._total, self._stakes, self._questions = looks, total, stakes, questions


def _after(stakes: Sequence[float], risked: Sequence[float], gain: float) -> list[float]:
    """The stakes after a bet that gains ``gain`` times what each of them risks."""
    return [stake * (1 + share * gain) for stake, share in zip(stakes, risked, strict=True)]
