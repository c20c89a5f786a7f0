"""What a round costs: prices that were measured at load, corrected by the rounds themselves.

A round is the drafter's part, a curve over guesses along a path, and all the rest, a curve over the guesses of a row in the
target's pass. Prices (``core/prices.py``) give both. Where there are none, the first rounds measure them (``trial``).

    seconds(K, W) = pace * (draft(K) + rest(W)),      curve(x) = price(x) * factor(x)

Factors are learnt at the lengths that were played. ``pace`` is the part that all lengths share: clock frequency and context. It
is the median over the last few rounds, so that a length timed long ago can be compared with one timed now.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from operator import itemgetter
from statistics import fmean
from typing import final

from outrider.core.prices import Prices, between
from outrider.policies.rates import Typical
from outrider.policies.tuning import TUNING


@final
class Curve:
    """Seconds by place: prices times factors. Factors are learnt at places that were played, and also hold nearby."""

    def __init__(self, price: Callable[[float], float], *, weight: float) -> None:
        """``weight`` is the number of rounds that a price counts for."""
        self._price, self._weight = cache(price), weight
        self.cells: dict[int, Typical] = {}
        self._surprises = [TUNING.optimism**2]
        """Squared errors of the predicted seconds, for the first rounds at each place."""

    def add(self, place: int, seconds: float) -> None:
        """Learn from a round. A first one that was slow by chance must not make its neighbours dear, where no round may come
        again."""
        price, cell = self._price(place), self.cells.get(place)
        if price <= 0:  # drafting may be free: a captured round takes the time of its pass
            return
        if cell is None:
            expected = self.at(place)
            self._surprises.append(min(abs(seconds - expected) / max(expected, 1e-12), TUNING.outlier) ** 2)
            seconds = min(seconds, (1 + TUNING.outlier) * expected) if self._weight else seconds
            cell = self.cells[place] = Typical()
        cell.add(seconds / price)

    def knows(self, place: int) -> bool:
        return place in self.cells and self.cells[place].count >= TUNING.run

    @property
    def contradicts(self) -> bool:
        """Whether rounds show that the shape of the price curve is wrong."""
        known = [cell.value for cell in self.cells.values() if cell.count >= TUNING.run]
        return len(known) > 1 and max(known) > 2 * min(known)

    def at(self, place: int) -> float:
        return self.table((place,))[0]

    def table(self, places: Iterable[int]) -> list[float]:
        """Seconds at these places. Between learnt factors the factor is interpolated, beyond the last one it is constant."""
        own, cells = self._weight, sorted(self.cells.items(), key=itemgetter(0))
        known = [(float(at), (own + cell.count * cell.value) / (own + cell.count)) for at, cell in cells] or [(0.0, 1.0)]
        known = [(-1.0, known[0][1]), *known, (1e9, known[-1][1])]
        return [self._price(place) * between(known, place) for place in places]

    def usual(self, place: int) -> float:
        """Mean seconds of rounds at a place, however few there were; the predicted seconds where there were none."""
        cell = self.cells.get(place)
        return self.at(place) if cell is None else self._price(place) * cell.value

    def optimism(self, places: Iterable[int]) -> list[float]:
        """For each place, the smallest share of its estimated cost that it may really have. It starts from the errors of first
        rounds and tightens with every round at that place."""
        error, counts = math.sqrt(fmean(self._surprises)), {place: cell.count for place, cell in self.cells.items()}
        return [1 - error / (1 + counts.get(place, 0)) for place in places]


@final
class BatchCosts:
    """Costs of rounds of about one batch size, with about the same number of prompt tokens in the pass."""

    def __init__(self, num_rows: int, prices: Prices | None = None, pace: float = 1.0) -> None:
        self.num_rows, self.prices, self.pace, self._checked = num_rows, prices, pace, pace
        self._is_priced, self._num_rounds = bool(prices and prices.drafts), 0
        self._recent: deque[float] = deque(maxlen=TUNING.run + 2)
        self.rest = Curve(self._rest_price, weight=1 if prices else 0)
        self.draft = Curve(self._draft_price, weight=1 if self._is_priced else 0)

    def _rest_price(self, width: float) -> float:
        return self.prices.passing(self.num_rows, width) if self.prices else 1.0

    def _draft_price(self, length: float) -> float:
        known = self.prices.drafting(self.num_rows, length) if self.prices else None
        return 0.1 * length * self._rest_price(0) if known is None else known

    @property
    def trial(self) -> int | None:
        """Draft length of a round that is needed to measure costs; None where they are known. A new pace is confirmed by a
        plain round, because what looks like a new pace may be one wrong price."""
        at, lengths = self._num_rounds, TUNING.calibration
        if self._is_priced:
            return 0 if abs(self.pace / self._checked - 1) > TUNING.outlier else None
        if at >= len(lengths):
            return None
        half, is_new = lengths[at] // 2, lengths[at] != lengths[at - 1]  # a round may be slow by chance: each has a second
        is_dear = TUNING.dearest * (self.draft.at(half) + self.rest.at(half)) > self.plain
        return None if half and is_new and is_dear else lengths[at]

    def record(self, length: int, width: int, draft: float | None, rest: float) -> float:
        """Learn from a round with so many guesses along the longest path and so many nodes of a row in the pass. ``draft`` is
        None if the drafter was not asked, or had more to read than usual. Returns the usual seconds of such a round at the
        present pace."""
        was_trial, self._num_rounds = not self._is_priced and self.trial is not None, self._num_rounds + 1
        if (self.prices or not was_trial) and (self.rest.knows(width) or len(self._recent) < TUNING.run):
            self._recent.append((rest + (draft or 0.0)) / self._usual(length, width, draft))
            self.pace = sorted(self._recent)[len(self._recent) // 2]
        self.rest.add(width, rest / self.pace)
        if draft is not None:
            self.draft.add(length, draft / self.pace)
        if not width and (self.rest.knows(0) or abs(self.rest.cells[0].value - 1) < TUNING.outlier):
            self._checked = self.pace
        if was_trial and self.trial is None:
            self._settle()
        return self.pace * self._usual(length, width, draft)

    def _usual(self, length: int, width: int, draft: float | None) -> float:
        return self.rest.usual(width) + (self.draft.usual(length) if draft is not None else 0.0)

    def _settle(self) -> None:
        """End the trials: the measured seconds become the prices. A drafter that found nothing is assumed to cost nothing."""
        passes, drafts = ([(float(at), curve.at(at)) for at in sorted(curve.cells)] for curve in (self.rest, self.draft))
        passes += [(passes[0][0] + 1, 1.1 * passes[0][1])] if len(passes) == 1 else []
        own = self.prices.passes if self.prices else ((self.num_rows, tuple(passes)),)
        self.prices, self._is_priced = Prices(own, ((self.num_rows, ((0.0, 0.0), *drafts)),)), True
        self.rest, self.draft = (Curve(price, weight=1) for price in (self._rest_price, self._draft_price))

    @property
    def plain(self) -> float:
        """Seconds of a plain round at pace 1. It may not have been timed for long, but it never takes longer than a round with
        one guess. Otherwise nothing could show that drafting does not pay."""
        return min(self.rest.table((0, 1)))


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
            nearest = min(self._known, key=lambda one: (abs(one[0] - key[0]), abs(one[1] - num_places)), default=None)
            lends = nearest is not None and (self.prices is not None or abs(nearest[0] - key[0]) <= 1)
            like = self._known[nearest] if nearest is not None and lends else BatchCosts(num_rows, self.prices)
            self._known[key] = BatchCosts(num_rows, like.prices, like.pace)
        return self._known[key]
