"""What a round costs: curves that were measured at load, corrected by the rounds themselves.

A round is the drafter's part, a curve over guesses along a path, and all the rest, a curve over the nodes of a row in the
target's pass. Prices (``core/prices.py``) give both curves their shape for every batch size before the first round. Real rounds
then correct them place by place, robustly, since times have outliers. Without prices a curve begins as a guess, or as that of
the nearest batch size at the same number of packed nodes, and is learnt from rounds alone.

    seconds(B, K, W) = pace_B * (idle_B + draft_B(K) + rest_B(W)),      curve(x) = prior(x) * factor(x)

``pace`` is what all lengths have in common: clocks, growing contexts, a busy machine. It follows quickly, the factors slowly,
so that a length timed long ago can be compared with one timed now. Costs belong to the machine, so they outlive requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple, final

from outrider.core.prices import Prices, between
from outrider.policies.tuning import TUNING

_LEAST = 1e-9
"""Seconds: no estimate is shorter, since estimates are compared by their ratio."""


class Timing(NamedTuple):
    """What one round did, and the seconds of its two parts."""

    length: int
    """Guesses along the longest path."""
    width: int
    """Guesses of a row in the target's pass: the most of any where rows are padded, the mean where not."""
    draft: float
    rest: float
    asked: bool = True
    """The drafter was asked for guesses."""
    is_reading: bool = False
    """It had more to read than usual before it guessed: a prompt, or what was emitted without it."""


def clipped(ratio: float) -> float:
    """A relative difference, at most that of an outlier."""
    return min(max(ratio - 1, -TUNING.outlier), TUNING.outlier)


@final
class Jumps:
    """Notices when ratios to what is usual stay far from 1, where single ones are outliers."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=2 * TUNING.run)

    @property
    def is_calm(self) -> bool:
        """The last ratio was no outlier, as far as it is known."""
        return not self._ratios or 1 / TUNING.jump <= self._ratios[-1] <= TUNING.jump

    def add(self, ratio: float) -> float | None:
        """The factor of a jump, if this ratio completes one."""
        ratios = self._ratios
        ratios.append(ratio)
        if len(ratios) < 2 * TUNING.run or (min(ratios) <= TUNING.jump and max(ratios) >= 1 / TUNING.jump):
            return None
        jump = sorted(ratios)[TUNING.run]
        ratios.clear()
        return jump


@final
@dataclass
class Typical:
    """A running mean of positive numbers that outliers hardly move. The first may be slow, so the second may correct it."""

    value: float = 0.0
    count: float = 0.0

    def add(self, number: float) -> None:
        number, self.count = max(number, _LEAST), self.count + 1
        if self.count <= 2:
            self.value = min(self.value or number, number)
        else:
            self.value *= 1 + clipped(number / self.value) / min(self.count, TUNING.memory)


@final
class Curve:
    """Seconds by place: a shape times a factor that was learnt where rounds have been, and holds nearby. The shape is ``prior``
    where there is one, and else the straight line through what was learnt."""

    def __init__(self, prior: Callable[[float], float] | None, *, is_priced: bool = False) -> None:
        """A prior that ``is_priced`` was measured at load."""
        self._prior, self.is_priced = prior and cache(prior), is_priced
        self.cells: dict[int, Typical] = {}
        self._shape, self._factors = self._fit()
        self._jumps = Jumps()

    def add(self, place: int, seconds: float) -> None:
        """Learn from a round."""
        self.cells.setdefault(place, Typical()).add(seconds)
        self._factors = []

    def follow(self, place: int, seconds: float) -> None:
        """As ``add``; if rounds keep differing from what they took before, the whole curve is scaled."""
        jump = self._jumps.add(self.ratio(place, seconds)) if self.knows(place) else None
        for cell in self.cells.values() if jump else ():
            cell.value, cell.count = max(cell.value * (jump or 1.0), _LEAST), min(cell.count, 2)
        self.add(place, seconds)

    def knows(self, place: int) -> bool:
        """Rounds have been there, more than once."""
        return place in self.cells and self.cells[place].count >= 2

    def ratio(self, place: int, seconds: float) -> float:
        """How many times as long as rounds at this place have taken."""
        return max(seconds, _LEAST) / self.cells[place].value

    @property
    def contradicts(self) -> bool:
        """Rounds say that a measured prior has the wrong shape."""
        known = [self.cells[at].value / shape for at, shape, weight in self._against(self._shape) if weight >= TUNING.run]
        return self.is_priced and len(known) > 1 and max(known) > 2 * min(known)

    def distrust(self) -> None:
        """Forget the prior: only what rounds have shown counts."""
        self._prior, self.is_priced, self._factors = None, False, []

    def _against(self, shape: Callable[[float], float]) -> list[tuple[int, float, float]]:
        """Places that rounds know, the shape there, and how much they count."""
        known = {at: cell for at, cell in self.cells.items() if cell.count >= 2} or self.cells
        return [(at, max(shape(at), _LEAST), min(cell.count, TUNING.memory)) for at, cell in sorted(known.items())]

    def _fit(self) -> tuple[Callable[[float], float], list[tuple[float, float]]]:
        """The shape, and the factors at known places, each drawn to their mean: as far as the shape can be trusted. Another
        batch size may be far, and drafts say nothing about plain rounds."""
        shape = self._prior or _line_through([(at, cell.value, cell.count) for at, cell in self.cells.items() if at])
        known = [(at, self.cells[at].value / value, weight) for at, value, weight in self._against(shape)]
        own, total = float(self.is_priced), sum(weight for _, _, weight in known)
        usual = (own + sum(ratio * weight for _, ratio, weight in known)) / (own + total or 1.0)
        factors: list[tuple[float, float]] = []
        for at, ratio, weight in known:
            trust = 1.0 if self.is_priced else 0.0 if not at else 0.2 if self._prior else 0.5
            draw = trust * TUNING.prior_weight
            factors.append((at, (weight * ratio + draw * usual) / (weight + draw)))
        return shape, factors or [(0.0, 1.0)]

    def at(self, place: float) -> float:
        return self.table((place,))[0]

    def table(self, places: Iterable[float]) -> list[float]:
        """Seconds at several places."""
        if not self._factors:
            self._shape, self._factors = self._fit()
        last, shape = self._factors[-1], self._shape
        return [max(shape(at) * (last[1] if at > last[0] else between(self._factors, at)), _LEAST) for at in places]


@final
class BatchCosts:
    """The costs of rounds of about one batch size."""

    def __init__(self, num_rows: int, prices: Prices | None = None, like: BatchCosts | None = None) -> None:
        """``like`` is the nearest batch size that is known."""
        self.num_rows, self._like = num_rows, like
        self.idle = Typical(like.idle.value, 1) if like else Typical()
        """The drafter's seconds in a round in which it was not asked."""
        self.pace = like.pace if like else 1.0
        self._jumps = Jumps()
        rest = (lambda width: prices.passing(num_rows, width)) if prices else like and partial(_lent, like, num_rows)
        self.rest = Curve(rest, is_priced=prices is not None)
        priced = prices is not None and bool(prices.drafts)
        draft = (lambda length: prices.drafting(num_rows, length) or _LEAST) if prices and priced else like and like.draft.at
        self.draft = Curve(draft, is_priced=priced)
        """The drafter's seconds by guesses, beyond ``idle``, ..."""
        self.missed = Typical(like.missed.value, 1) if like else Typical()
        """... and where it was asked and had none."""

    def record(self, seen: Timing) -> float:
        """Learn from a round; the pace at it."""
        if self.rest.knows(seen.width):
            ratio = self.rest.ratio(seen.width, seen.rest / self.pace)
            self.pace *= self._jumps.add(ratio) or 1 + TUNING.pace_step * clipped(ratio)
        elif not self._jumps.is_calm:
            return self.pace  # a new length would look far too cheap or too dear, and be believed
        self.rest.add(seen.width, seen.rest / self.pace)
        draft = seen.draft / self.pace - (self.idle.value if seen.asked else 0.0)
        if not seen.asked:
            self.idle.add(draft)
        elif not seen.length:
            self.missed.add(draft)
        elif not seen.is_reading or (self.draft.knows(seen.length) and draft < self.draft.at(seen.length)):
            self.draft.follow(seen.length, draft)
        return self.pace

    @property
    def plain(self) -> float:
        """Seconds of a round that does not draft, at pace 1; so are all the following."""
        return self.idle.value + self.rest.at(0)

    def drafting(self, longest: int) -> list[float]:
        """The drafter's seconds in a round that asks it and gets 0, 1, ... guesses."""
        known = self.draft.cells or self.draft.is_priced or self._like
        drafts = (
            self.draft.table(range(1, longest + 1)) if known else (0.1 * k * self.rest.at(0) for k in range(1, longest + 1))
        )
        return [self.idle.value + draft for draft in (self.missed.value, *drafts)]

    def table(self, longest: int) -> list[float]:
        """Seconds of a round that asks the drafter and gets chains of 0, 1, ... guesses for every row."""
        return [draft + rest for draft, rest in zip(self.drafting(longest), self.rest.table(range(longest + 1)), strict=True)]

    @property
    def is_known(self) -> bool:
        """Both curves have a shape: measured at load, or drafts and plain rounds were timed at about this batch size."""
        like = self._like
        lent = like is not None and like.is_known and 0.75 <= self.num_rows / like.num_rows <= 1.34
        return lent or self.rest.is_priced or (self.rest.knows(0) and any(map(self.draft.knows, self.draft.cells)))

    @property
    def longest_known(self) -> int:
        """The longest draft that was timed, here or where the curves come from."""
        here = max((length for length in self.draft.cells if self.draft.knows(length)), default=0)
        return max(here, self._like.longest_known) if self._like else here


@final
class CostModel:
    """Costs by batch size, four sizes to a doubling. A new one begins with the prices, or as the nearest one."""

    def __init__(self) -> None:
        self.prices: Prices | None = None
        self._by_size: dict[int, BatchCosts] = {}

    def distrust(self) -> None:
        """Rounds contradict the prices: they were measured on a busy machine, or on another model."""
        self.prices = None
        for costs in self._by_size.values():
            costs.rest.distrust()
            costs.draft.distrust()

    def of(self, num_rows: int) -> BatchCosts:
        key = round(4 * math.log2(num_rows))
        if key not in self._by_size:
            nearest = min(self._by_size, key=lambda size: abs(size - key), default=None)
            like = None if nearest is None else self._by_size[nearest]
            self._by_size[key] = BatchCosts(num_rows, self.prices, like)
        return self._by_size[key]


def _lent(like: BatchCosts, num_rows: int, width: float) -> float:
    """A pass of the nearest batch with as many packed nodes."""
    return like.rest.at(max(num_rows * (1 + width) / like.num_rows - 1, 0.0))


def _line_through(known: Sequence[tuple[float, float, float]]) -> Callable[[float], float]:
    """Through places, their seconds and weights (least squares). It does not fall: a longer draft never costs less."""
    if not known:
        return lambda _: 1.0
    total = sum(weight for _, _, weight in known)
    mean_at, mean = (sum(weight * pair[i] for *pair, weight in known) / total for i in (0, 1))
    spread = sum(weight * (at - mean_at) ** 2 for at, _, weight in known)
    rise = sum(weight * (at - mean_at) * (value - mean) for at, value, weight in known)
    slope = max(rise / spread, 0.0) if spread else 0.0
    return lambda place: max(mean + slope * (place - mean_at), 0.0)
