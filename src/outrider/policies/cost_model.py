"""What a round costs: prices that were measured at load, corrected by the rounds themselves.

A round is the drafter's part, a curve over guesses along a path, and all the rest, a curve over the guesses of a row in the
target's pass. Prices (``core/prices.py``) give both. Where there are none, the first rounds measure them (``trial``).

    log seconds(part, place) = log price(part, place) + pace + error(part, place),      error(rest, 0) = 0

The pace belongs to all places, and plain rounds have no error. So what a draft costs is always relative to plain decoding.
A Kalman filter learns both from every round. The pace may change from round to round. Errors hardly change. Those of nearby
places are alike, and prices far from plain decoding are trusted less.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from typing import final

import numpy as np

from outrider.core.prices import Prices
from outrider.policies.tuning import TUNING

_PLACES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32, 48, 64, 128, 256)
"""Places with an error of their own. Others share that of the next larger one."""


@cache
def _index(place: int) -> int:
    return min(bisect_left(_PLACES, place), len(_PLACES) - 1)


def _likeness() -> np.ndarray:
    """How errors vary together, in units of the doubt in a price: as far as their paths from plain decoding coincide. Places of
    rests come first, then those of drafts. In the place of the error of a plain round stands the pace."""
    far = np.log2(1 + np.array(_PLACES))
    both = np.kron(np.eye(2), np.minimum.outer(far, far) + 0.1 * np.diag(far > 0))
    both[len(far) :, len(far) :] += 1.0
    both[0, 0] = TUNING.run**2
    return both


_DOUBTS = TUNING.doubt**2 * _likeness()
"""Variance of the pace and of errors before the first round."""
_KEEP = np.array([1.0] + [1 - 0.02 / TUNING.memory] * (len(_DOUBTS) - 1))
"""What a round leaves of errors: without rounds to confirm them, prices count again in the end."""
_CHANGE = np.diag(1 - _KEEP**2) @ _DOUBTS


@final
class BatchCosts:
    """Costs of rounds of about one batch size, with about the same number of prompt tokens in the pass."""

    def __init__(self, num_rows: int, prices: Prices | None = None, pace: float = 1.0) -> None:
        self.num_rows, self.prices, self._num_rounds, self._noise = num_rows, prices, 0, TUNING.doubt**2
        self._is_priced, self._first = bool(prices and prices.drafts), (dict[int, float](), dict[int, float]())
        """Whether prices are known from the start, and otherwise the shortest times of the first rounds, of both parts."""
        self._passes = () if prices is None else prices.passes
        self._spread, self._log = _DOUBTS.copy(), np.zeros(len(_DOUBTS))
        self._log[0] = math.log(pace)
        self._price = cache(self._price_of)

    def _price_of(self, part: int, place: int) -> float:
        """The price of a rest (part 0) or of a draft (part 1)."""
        if not part:
            return self.prices.passing(self.num_rows, place) if self.prices else 1.0
        known = self.prices.drafting(self.num_rows, place) if self.prices else None
        return 0.1 * place * self._price(0, 0) if known is None else known

    @property
    def pace(self) -> float:
        return math.exp(self._log[0])

    def at(self, part: int, place: int) -> float:
        return self.table(part, (place,))[0]

    def table(self, part: int, places: Sequence[int]) -> list[float]:
        """Seconds of a part at rising places, at pace 1. More work never takes less time."""
        at = np.array([part * len(_PLACES) + _index(place) for place in places])
        found = np.array([self._price(part, place) for place in places]) * np.exp(np.where(at, self._log[at], 0.0))
        return np.minimum.accumulate(found[::-1])[::-1].tolist()

    def doubts(self, places: Sequence[int]) -> list[float]:
        """Shares by which rests at these places may take less than expected: half of a standard deviation."""
        at, pace = np.array([_index(place) for place in places]), self._spread[0]
        return (np.sqrt(pace[0] + np.where(at, 2 * pace[at] + self._spread[at, at], 0.0)) / 2).tolist()

    @property
    def plain(self) -> float:
        """Seconds of a plain round at pace 1."""
        return self._price(0, 0)

    @property
    def contradicts(self) -> bool:
        """Whether rounds show that the shape of the price curve is wrong."""
        least = np.abs(self._log[1:]) - np.sqrt(np.diag(self._spread)[1:])
        return bool(self.trial is None and (least > math.log(2)).any())

    @property
    def trial(self) -> int | None:
        """Draft length of a round that is needed to measure costs; None where they are known."""
        at, lengths = self._num_rounds, TUNING.calibration
        if self._is_priced or at >= len(lengths):
            return None
        length, last = lengths[at], lengths[at - 1]
        half = length // 2 if length != last else 0
        is_dear = half and TUNING.dearest * (self.at(1, max(last, 1)) * half / max(last, 1) + self.at(0, last)) > self.plain
        return None if is_dear else length

    def record(self, length: int, width: int, draft: float | None, rest: float) -> float:
        """Learn from a round with so many guesses along the longest path and so many nodes of a row in the pass. ``draft`` is
        None if the drafter was not asked, or had more to read than usual. Returns the usual seconds of such a round at the
        present pace."""
        is_trial, self._num_rounds = self.trial is not None, self._num_rounds + 1
        if is_trial and not self._passes:
            return self._measure(0, width, rest) + (self._measure(1, length, draft) if draft is not None else 0.0)
        self._log[1:] *= _KEEP[1]
        self._spread = _KEEP[:, None] * self._spread * _KEEP + _CHANGE
        self._spread[0, 0] += self._noise / TUNING.run**2
        usual = self._learn(0, width, rest)
        if draft is None:
            return usual
        if is_trial:
            return usual + self._measure(1, length, draft / self.pace) * self.pace
        return usual + (self._learn(1, length, draft) if self._price(1, length) > 0 else 0.0)

    def _measure(self, part: int, place: int, seconds: float) -> float:
        """Let one of the first rounds be the price of a place. A round may be slow by chance, but never fast. A drafter that
        found nothing is assumed to cost nothing."""
        times = self._first[part]
        if place or not part:
            times[place] = min(seconds, times.get(place, seconds))
        rests, drafts = (sorted((float(at), times[at]) for at in times) for times in self._first)
        rests += [(rests[0][0] + 1, 1.1 * rests[0][1])] if len(rests) == 1 else []
        self.prices = Prices(self._passes or ((self.num_rows, tuple(rests)),), ((self.num_rows, ((0.0, 0.0), *drafts)),))
        self._price.cache_clear()
        return times.get(place, 0.0)

    def _learn(self, part: int, place: int, seconds: float) -> float:
        """Let one time correct the pace and the errors, as far as each of them may have caused it. An outlier counts as one of
        ``TUNING.outlier`` at most, and makes costs doubtful again. The noise of rounds is learnt too."""
        at, price = part * len(_PLACES) + _index(place), self._price(part, place)
        with_pace = self._spread[0] + (self._spread[at] if at else 0.0)
        known, now = (float(one[0] + (one[at] if at else 0.0)) for one in (with_pace, self._log))
        whole, surprise = known + self._noise, math.log(max(seconds, 1e-9) / price) - now
        most = max(TUNING.outlier, 3 * math.sqrt(known))
        if abs(surprise) > most:
            surprise = math.copysign(most, surprise)
            self._spread += _DOUBTS / TUNING.run
        self._log += surprise / whole * with_pace
        self._spread -= np.outer(with_pace / whole, with_pace)
        share, weight = self._noise / whole, min(20 + self._num_rounds, TUNING.memory)
        self._noise += (max((share * surprise) ** 2 + share * known, TUNING.doubt**2 / 1e4) - self._noise) / weight
        return price * math.exp(float(self._log[0] + (self._log[at] if at else 0.0)))


@final
class CostModel:
    """Costs by batch size, four sizes to a doubling, and by prompt tokens in the pass. They belong to the machine, not to a
    text."""

    def __init__(self, prices: Prices | None = None) -> None:
        self.prices = prices
        self._known: dict[tuple[int, int], BatchCosts] = {}

    def of(self, num_rows: int, num_places: int = 0) -> BatchCosts:
        """The costs of a batch size. Without prices, a new size starts from the nearest one within a fifth of it, or is
        measured."""
        key = round(4 * math.log2(num_rows)), num_places
        if key not in self._known:
            like = [one for one in self._known if self.prices is not None or abs(one[0] - key[0]) <= 1]
            nearest = min(like, key=lambda one: (abs(one[0] - key[0]), abs(one[1] - num_places)), default=None)
            near = BatchCosts(num_rows, self.prices) if nearest is None else self._known[nearest]
            prices = near.prices if near.trial is None else self.prices
            self._known[key] = BatchCosts(num_rows, prices, near.pace if near.trial is None else 1.0)
        return self._known[key]
