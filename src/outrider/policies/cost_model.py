"""What a round costs: prices that were measured at load, corrected by the rounds themselves.

A round is the drafter's part, a curve over guesses along a path, and all the rest, a curve over the guesses of a row in the
target's pass. Prices (``core/prices.py``) give both. Where there are none, the first rounds measure them (``trial``).

    log seconds(part, place) = log price(part, place) + pace + error(part, place),      error(rest, 0) = 0

The pace belongs to all places, and plain rounds have no error. So what a draft costs is always relative to plain decoding.
A Kalman filter learns both from every round. The pace may change from round to round, and errors do not. Those of nearby
places are alike, and prices far from plain decoding are trusted less.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from statistics import fmean
from typing import NamedTuple, final

import numpy as np

from outrider.core.prices import Prices
from outrider.policies.tuning import TUNING

REST, DRAFT = 0, 1
"""The parts of a round: the draft, and all the rest."""
_PLACES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32, 48, 64, 128, 256)
"""Places with an error of their own. Others share that of the next larger one."""
_SHOWN = np.eye(2 * len(_PLACES))
"""What the time of a place shows: the sum of the pace, which is state 0, and of its error. Rests come first, then drafts."""
_SHOWN[:, 0] = 1.0


@cache
def _state(part: int, place: int) -> int:
    """The number of a place's error. It is 0 for plain rounds, whose times show the pace alone."""
    return part * len(_PLACES) + min(bisect_left(_PLACES, place), len(_PLACES) - 1)


def _doubts() -> np.ndarray:
    """Variance of the pace and of errors before the first round. Errors vary together as far as their ways from plain decoding
    coincide."""
    far = np.log2(1 + np.array(_PLACES))
    likeness = np.kron(np.eye(2), np.minimum.outer(far, far) + 0.1 * np.diag(far > 0))
    likeness[len(far) :, len(far) :] += 1.0
    likeness[0, 0] = TUNING.run**2
    return TUNING.doubt**2 * likeness


_DOUBTS = _doubts()


class Timed(NamedTuple):
    """What a round took. ``length`` are guesses along the longest path, ``width`` those of a row in the pass."""

    length: int
    width: int
    draft: float | None
    """None if the drafter was not asked, or had more to read than usual."""
    rest: float


@final
class BatchCosts:
    """Costs of rounds of about one batch size, with about the same number of prompt tokens in the pass."""

    def __init__(self, num_rows: int, prices: Prices | None = None, pace: float = 1.0) -> None:
        self.num_rows, self.prices = num_rows, prices
        self._passes = () if prices is None else prices.passes
        self._first = dict[int, float](), {0: 0.0}
        """The shortest times of rests and of drafts in the first rounds, where they have no prices."""
        self._num_rounds, self._noise = 0, TUNING.doubt**2
        self.trial = TUNING.calibration[0] if prices is None or not prices.drafts else None
        """Draft length of a round that is needed to measure costs; None where they are known."""
        self._spread, self._log = _DOUBTS.copy(), np.zeros(len(_DOUBTS))
        self._log[0] = math.log(pace)
        self._price = cache(self._price_of)

    def _price_of(self, part: int, place: int) -> float:
        if part == REST:
            return self.prices.passing(self.num_rows, place) if self.prices else 1.0
        known = self.prices.drafting(self.num_rows, place) if self.prices else None
        return 0.1 * place * self.plain if known is None else known

    @property
    def pace(self) -> float:
        return math.exp(self._log[0])

    @property
    def plain(self) -> float:
        """Seconds of a plain round at pace 1."""
        return self._price(REST, 0)

    def at(self, part: int, place: int) -> float:
        return self.table(part, (place,))[0]

    def table(self, part: int, places: Sequence[int]) -> list[float]:
        """Seconds of a part at rising places, at pace 1. More work never takes less time."""
        states = [_state(part, place) for place in places]
        errors = _SHOWN[states] @ self._log - self._log[0]
        found = np.array([self._price(part, place) for place in places]) * np.exp(errors)
        return np.minimum.accumulate(found[::-1])[::-1].tolist()

    def doubts(self, places: Sequence[int]) -> list[float]:
        """Shares by which rests at these places may take less than expected: half of a standard deviation."""
        shown = _SHOWN[[_state(REST, place) for place in places]]
        return (np.sqrt(((shown @ self._spread) * shown).sum(1)) / 2).tolist()

    def now(self, part: int, places: Iterable[int]) -> dict[int, float]:
        """Seconds of a part at the present pace."""
        rising = sorted(set(places))
        return dict(zip(rising, (self.pace * seconds for seconds in self.table(part, rising)), strict=True))

    @property
    def contradicts(self) -> bool:
        """Whether rounds show that the shape of the price curve is wrong."""
        least = np.abs(self._log) - np.sqrt(np.diag(self._spread))
        return self.trial is None and bool((least[1:] > math.log(2)).any())

    def _next_trial(self) -> int | None:
        """The first rounds draft so many guesses. They end before a length of which half would take too long."""
        lengths, at = TUNING.calibration, self._num_rounds
        if at >= len(lengths):
            return None
        half = lengths[at] // 2 if lengths[at] != lengths[at - 1] else 0
        is_dear = self.at(DRAFT, half) + self.at(REST, half) > self.plain / TUNING.dearest
        return None if is_dear else lengths[at]

    def record(self, rounds: Sequence[Timed]) -> None:
        """Learn from rounds. Times of places that share an error are learnt from together."""
        alike = defaultdict[int, list[float]](list)
        for timed in rounds:
            is_trial = self.trial is not None
            self._num_rounds += 1
            for part, place, seconds in ((REST, timed.width, timed.rest), (DRAFT, timed.length, timed.draft)):
                if seconds is not None and is_trial and (part == DRAFT or not self._passes):
                    self._measure(part, place, seconds)
                elif seconds is not None and self._price(part, place):
                    alike[_state(part, place)].append(math.log(max(seconds, 1e-9) / self._price(part, place)))
            self.trial = self._next_trial() if is_trial else None
        self._spread[0, 0] += len(rounds) * self._noise / TUNING.run**2
        for state, times in alike.items():
            self._learn(state, times)

    def _measure(self, part: int, place: int, seconds: float) -> None:
        """Let the first rounds give the price of a place. A round may be slow by chance, but never fast: a long draft that took
        more per guess than a shorter one had something to read. A drafter that found nothing is assumed to cost nothing."""
        known = self._first[part]
        known[place] = min(seconds / self.pace, known.get(place, math.inf))
        if part == DRAFT:
            most = min((known[less] / less for less in known if 0 < less < place), default=math.inf)
            known[place] = min(known[place], (1 + TUNING.outlier) * most * place)
        rests, drafts = (tuple(sorted(known.items())) for known in self._first)
        self.prices = Prices(self._passes or ((self.num_rows, rests),), ((self.num_rows, drafts),))
        self._price.cache_clear()

    def _learn(self, state: int, times: Sequence[float]) -> None:
        """Let times of one state correct the pace and the errors, as far as each of them may have caused their mean. They are
        logarithms, in units of the price. Many count as a few, since the pace changes meanwhile. An outlier counts as one of
        ``TUNING.outlier`` at most, and makes costs doubtful again. The noise of rounds is learnt too."""
        shown = _SHOWN[state]
        together = self._spread @ shown
        known, expected = float(together @ shown), float(shown @ self._log)
        most, noise = max(TUNING.outlier, 3 * math.sqrt(known)), self._noise / min(len(times), TUNING.run)
        num_outliers = sum(abs(time - expected) > most for time in times)
        surprises = [min(max(time - expected, -most), most) for time in times]
        gain, mean = together / (known + noise), fmean(surprises)
        self._log += mean * gain
        self._spread += num_outliers / TUNING.run * _DOUBTS - np.outer(gain, together)
        left = known * noise / (known + noise) + fmean((one - known / (known + noise) * mean) ** 2 for one in surprises)
        weight = min(len(times) / min(20 + self._num_rounds, TUNING.memory), 1.0)
        self._noise += weight * (max(left, TUNING.doubt**2 / 1e4) - self._noise)


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
            known = (self.prices, 1.0) if near.trial is not None else (near.prices, near.pace)
            self._known[key] = BatchCosts(num_rows, *known)
        return self._known[key]
