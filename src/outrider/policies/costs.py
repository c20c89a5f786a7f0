"""What a round costs on this machine, learnt from the rounds themselves.

A round's seconds are the drafter's plus all the rest (the target's pass, the walk, the commit). The drafter's are a curve over
the length of the longest draft; the rest is one over the width of the pass, which is that length where rows are padded and the
mean of all rows where they are not. Both are learnt robustly, since round times have outliers (first calls, garbage collection,
neighbours). A longer draft never costs less: where few measurements say otherwise, neighbours are pooled by the number of
their rounds. Lengths that were never tried are read off their neighbours, along straight lines. Costs belong to the machine
and the models, not to a request: a ``CostModel`` is owned by a policy object and outlives requests, the exception to "method
objects are frozen". It is fed by one engine at a time; were two to share it, single rounds could be lost but no state broken.

    seconds(B, K, W) = pace_B * (idle_B + draft_B(K) + rest_B(W))
    x <- x (1 + clip(ratio - 1) / n),   ratio = seen / (pace x)

``pace`` is what all lengths have in common: clocks, growing contexts, a busy machine. It follows quickly and the curves slowly,
so that a length measured long ago can be compared with one measured now. (Both quickly would be a trap: with one length in
play, pace and curve would drift apart, their product unchanged, and take the comparison with them.) Where passes alone become
faster or slower, as when compiled code takes the place of eager code, it is the drafter's whole curve that jumps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

_MEMORY = 200
"""Rounds of a length that count."""
_OUTLIER = 0.3
"""A round moves an estimate by no more than if it had differed by this share."""
SLOWEST = 3.0
"""Times as long as usual: rounds slower than that are counted as so slow."""
_PACE_STEP = 0.1
"""Part of a round's difference that is taken for a change of pace."""
_JUMP = 1.15
_DRAFT_JUMP = 1.5
_JUMP_ROUNDS = 6
"""So many rounds in a row, all this much slower or all faster than usual, are a jump: of the pace, of the drafter's times."""
_LEAST = 1e-9
"""Seconds: no estimate is shorter, since estimates are compared by their ratio."""
_MINOR = 0.1
"""Part of a pass; changes of the drafter's times below it are no jumps."""
_STALE = 400
"""Rounds of other lengths that halve the weight of what is known of one: the pace was not followed exactly meanwhile."""
_TRUSTED = 2
"""Rounds before a length is believed: the first call with a new shape may allocate, compile or capture."""
_DRAWN = 4
"""Rounds of a length that count as much as the line through all of them."""
ABOUT = 1.34
"""Batches whose sizes differ by no more than this factor are alike."""
_SNAPSHOT_LEN = 65
"""Lengths remembered of another batch size's curve."""
_ASSUMED_DRAFT = 0.1
"""Cost of a guess, in passes, before one was measured."""
_FORGET = 0.8
"""Weight of earlier catch-up rounds at each further one."""
_NORMAL = 1.25
"""A draft up to this much slower than usual was not slowed by catching up; small noise must not be multiplied by a long lag."""
_SHORT_LAG = 3
"""Tokens a drafter reads at about no cost before it guesses; one or two are normal."""

Shape = Callable[[float], float]


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """What one round took, and what it did."""

    length: int
    """Guesses of the longest draft."""
    draft: float
    rest: float
    """Seconds without the drafter's."""
    asked: bool = True
    """The drafter was asked for guesses."""
    lag: int = 0
    """Tokens that had been emitted since it was last asked."""
    is_first: bool = False
    """It was asked for a new request, whose prompt it may have read."""
    mean_length: float | None = None
    """Guesses of a row in the mean, where a pass does not pad."""

    @property
    def is_reading(self) -> bool:
        """The drafter had more to read than usual before it guessed."""
        return self.is_first or (self.asked and self.lag > _SHORT_LAG)

    @property
    def width(self) -> int:
        """That of the pass; 0 only where there was no guess."""
        return self.length if self.mean_length is None else max(round(self.mean_length), min(self.length, 1))


def _clipped(ratio: float) -> float:
    return min(max(ratio - 1, -_OUTLIER), _OUTLIER)


@final
class Jumps:
    """Notices when numbers stay far from what is usual, where single ones are outliers."""

    def __init__(self, far: float) -> None:
        self._far = far
        self._ratios: deque[float] = deque(maxlen=_JUMP_ROUNDS)

    @property
    def is_calm(self) -> bool:
        """The last number was no outlier, as far as it is known, and not the first one after a jump."""
        return not self._ratios or 1 / self._far <= self._ratios[-1] <= self._far

    def add(self, ratio: float) -> float | None:
        """The factor of a jump, if this ratio to what is usual completes one."""
        ratios = self._ratios
        ratios.append(ratio)
        if len(ratios) < _JUMP_ROUNDS or (min(ratios) <= self._far and max(ratios) >= 1 / self._far):
            return None
        jump = sorted(ratios)[_JUMP_ROUNDS // 2]
        ratios.clear()
        return jump


@final
class Typical:
    """A running mean of positive numbers that outliers hardly move."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0.0

    def age(self, num_rounds: int) -> None:
        """Weigh less what was seen so long ago."""
        if num_rounds and self.count > _TRUSTED:
            self.count = max(_TRUSTED, min(self.count, _MEMORY) * 0.5 ** (num_rounds / _STALE))

    def add(self, *numbers: float) -> None:
        fresh = max(0, min(int(_TRUSTED - self.count), len(numbers)))
        for number in numbers[:fresh]:  # the first may be slow
            self.value = min(self.value, max(number, _LEAST)) if self.count else max(number, _LEAST)
            self.count += 1
        if fresh < len(numbers):
            self.count += len(numbers) - fresh
            step = sum(_clipped(number / self.value) for number in numbers[fresh:])
            self.value *= 1 + step / min(self.count, _MEMORY)


@final
class Curve:
    """Seconds as a function of length: measured where tried, a known ``shape`` scaled to fit elsewhere."""

    def __init__(self, shape: Shape) -> None:
        self.cells: dict[int, Typical] = {}
        self._last_added: dict[int, int] = {}
        self._num_added = 0
        self._shape = shape
        self._anchors: list[tuple[int, float]] = []
        """Measured lengths and their factors, ..."""
        self._line: _Line | None = None
        """... and the line through all but length 0; both are made anew once something was measured."""

    def add(self, length: int, seconds: Sequence[float]) -> None:
        cell = self.cells.setdefault(length, Typical())
        cell.age(self._num_added - self._last_added.get(length, self._num_added))
        cell.add(*seconds)
        self._num_added += len(seconds)
        self._last_added[length] = self._num_added
        self._anchors = []

    def scale(self, factor: float) -> None:
        """All lengths take so many times as long as they did; none of them is known well."""
        for cell in self.cells.values():
            cell.value = max(cell.value * factor, _LEAST)
            cell.count = min(cell.count, _TRUSTED)
        self._anchors = []

    def _fit(self) -> list[tuple[int, float]]:
        """Measured lengths and their factors."""
        if not self._anchors and self.cells:
            self._line = _line_through([(at, cell.value, min(cell.count, _MEMORY)) for at, cell in self.cells.items() if at])
            trusted = {at: cell for at, cell in self.cells.items() if cell.count >= _TRUSTED} or self.cells
            places = sorted(trusted)
            values = _rising([(self._drawn(at), min(trusted[at].count, _MEMORY)) for at in places])
            self._anchors = [(at, value / max(self._shape(at), 1e-12)) for at, value in zip(places, values, strict=True)]
        return self._anchors

    def _drawn(self, at: int) -> float:
        """Seconds of a measured length, drawn to the line if it is not known well."""
        cell = self.cells[at]
        if self._line is None or not at:
            return cell.value
        return cell.value + (self._line.at(at) - cell.value) * _DRAWN / (cell.count + _DRAWN)

    @property
    def slope(self) -> float | None:
        """Seconds that a further guess adds, over all measured lengths; None before there are two."""
        self._fit()
        return self._line and self._line.slope

    def knows(self, length: int) -> bool:
        return length in self.cells and self.cells[length].count >= _TRUSTED

    def weight(self, length: int) -> float:
        """How well a length is known: the rounds that count."""
        return self.cells[length].count if length in self.cells else 0.0

    def at(self, length: int) -> float:
        """Shape times a factor, which is linear between and beyond measured lengths, but never falls beyond them."""
        return self.table((length,))[0]

    def table(self, lengths: Iterable[float]) -> list[float]:
        """``at`` several lengths, in rising order."""
        anchors = self._fit()
        if len(anchors) < 2:
            factor = anchors[0][1] if anchors else 1.0
            return [self._shape(length) * factor for length in lengths]
        values, right = [], 1
        for length in lengths:
            while right < len(anchors) - 1 and anchors[right][0] < length:
                right += 1
            (left_at, left), (right_at, factor) = anchors[right - 1], anchors[right]
            slope = (factor - left) / (right_at - left_at)
            if length > right_at:
                factor += max(slope, 0.0) * (length - right_at)
            else:
                factor = left + slope * max(length - left_at, 0)
            values.append(self._shape(length) * factor)
        return values


class _Line(NamedTuple):
    """Seconds by length."""

    mean_at: float
    mean: float
    slope: float

    def at(self, length: int) -> float:
        return self.mean + self.slope * (length - self.mean_at)


def _line_through(measured: Sequence[tuple[int, float, float]]) -> _Line | None:
    """Through lengths, their seconds and weights (least squares); None before there are two."""
    if len(measured) < 2:
        return None
    total = sum(weight for _, _, weight in measured)
    mean_at, mean = (sum(weight * pair[i] for *pair, weight in measured) / total for i in (0, 1))
    spread = sum(weight * (at - mean_at) ** 2 for at, _, weight in measured)
    return _Line(mean_at, mean, sum(weight * (at - mean_at) * (value - mean) for at, value, weight in measured) / spread)


def _rising(measured: Sequence[tuple[float, float]]) -> list[float]:
    """The nearest values (least squares, by weight) that never fall: neighbours in the wrong order share their mean."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in measured:
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (right, by, size), (left, over, before) = blocks.pop(), blocks.pop()
            blocks.append(((left * over + right * by) / (over + by), over + by, before + size))
    return [value for value, _, size in blocks for _ in range(size)]


def _proportional(length: float) -> float:
    return float(length)


def _flat(length: float) -> float:
    del length
    return 1.0


def _snapshot(curve: Curve, ratio: float = 1.0) -> Shape:
    """The curve as it is now, as the shape of another, of batches ``ratio`` times as large: what a pass costs is mostly a
    matter of its nodes, so a length there is like the length here that has as many."""
    values = curve.table([max(ratio * (length + 1) - 1, 0.0) for length in range(_SNAPSHOT_LEN)])

    def at(length: float) -> float:
        left = min(int(length), _SNAPSHOT_LEN - 2)
        return values[left] + (values[left + 1] - values[left]) * (length - left)

    return at


@final
class BatchCosts:
    """The costs of rounds of one batch size. ``like``, of another size, lends its curves' shapes until this one has its own."""

    def __init__(self, num_rows: int = 1, like: BatchCosts | None = None) -> None:
        ratio = num_rows / like._num_rows if like else 1.0
        self._num_rows = num_rows
        self.draft = Curve(_snapshot(like.draft) if like else _proportional)
        self.rest = Curve(_snapshot(like.rest, ratio) if like else _flat)
        self.idle = Typical()
        """The drafter's seconds in a round in which it was not asked."""
        self.missed = Typical()
        """... in which it was asked and had no guess."""
        self.pace = 1.0
        self.plain_excess = 1.0
        """What plain rounds take on average, in those that are typical."""
        self._pace_jumps, self._draft_jumps = Jumps(_JUMP), Jumps(_DRAFT_JUMP)
        self._longest_lent = like.longest_known if like else 0
        self._is_close = like is not None and like.knows_drafting and 1 / ABOUT <= ratio <= ABOUT
        self._caught_up, self._seconds_over = 0.0, 0.0
        if like:
            self.idle.add(like.idle.value)
            self.missed.add(like.missed.value)

    def record(self, *rounds: Timing) -> list[float]:
        """Learn from rounds, oldest first; the pace at each of them."""
        paces: list[float] = []
        drafts: dict[tuple[int, bool], list[float]] = {}
        rests: dict[int, list[float]] = {}
        for seen in rounds:
            is_known = self.rest.knows(seen.width)
            if is_known:
                self._follow(seen.rest / self.rest.cells[seen.width].value)
            paces.append(self.pace)
            if not is_known and not self._pace_jumps.is_calm:
                continue  # if the pace has just jumped, a new length looks far too cheap or too dear, and is believed
            if not seen.asked and self.knows_plain:
                ratio = min((seen.draft + seen.rest) / (self.pace * self.plain), SLOWEST)
                self.plain_excess += (ratio - self.plain_excess) / _MEMORY
            draft, usual = seen.draft / self.pace, self._draft(seen.length) if seen.is_reading else 0.0
            rests.setdefault(seen.width, []).append(seen.rest / self.pace)
            # Reading only ever adds: if a round that read was faster all the same, what is usual was thought too high.
            if not seen.is_reading or (self.draft.knows(seen.length) and draft - self.idle.value < usual):
                drafts.setdefault((seen.length, seen.asked), []).append(draft)
            elif not seen.is_first:
                self._caught_up = _FORGET * self._caught_up + seen.lag
                self._seconds_over = _FORGET * self._seconds_over + draft - self.idle.value - _NORMAL * usual
        for width, seconds in rests.items():
            self.rest.add(width, seconds)
        for (length, asked), seconds in drafts.items():
            self._record_drafts(length, seconds, asked=asked)
        return paces

    def _record_drafts(self, length: int, seconds: Sequence[float], *, asked: bool) -> None:
        if not asked:
            self.idle.add(*seconds)
            return
        over_idle = [each - self.idle.value for each in seconds]
        if not length:
            self.missed.add(*over_idle)
            return
        if self.draft.knows(length):
            for each in over_idle:
                self._follow_draft(each, self.draft.cells[length].value)
        self.draft.add(length, over_idle)

    def _follow(self, ratio: float) -> None:
        """Take part of a round's difference, or all of it if it stays, for a change of pace."""
        jump = self._pace_jumps.add(ratio / self.pace)
        self.pace *= jump or 1 + _PACE_STEP * _clipped(ratio / self.pace)

    def _follow_draft(self, seconds: float, usual: float) -> None:
        """Notice a jump of the drafter's times, if it is one that matters beside a pass."""
        matters = abs(seconds - usual) > _MINOR * self.rest.at(0)
        jump = self._draft_jumps.add(max(seconds, _LEAST) / usual if matters else 1.0)
        if jump is not None:
            self.draft.scale(jump)

    def catch_up(self, lag: int) -> float:
        """Seconds by which a round is longer if the drafter must first read ``lag`` tokens that were emitted without it."""
        return lag * max(self._seconds_over, 0.0) / self._caught_up if self._caught_up else 0.0

    def _draft(self, length: int) -> float:
        if length == 0:
            return self.missed.value
        return self.draft.at(length) if self.draft.cells else _ASSUMED_DRAFT * length * self.rest.at(0)

    @property
    def per_guess(self) -> float:
        """Seconds of drafting one guess more for every row."""
        drafting = self.draft.slope
        return self._draft(1) if drafting is None or drafting <= 0 else drafting

    @property
    def per_place(self) -> float:
        """Seconds of a pass that is one guess wider. For each row at most as long as drafting, which is known better."""
        return min(max(self.rest.slope or 0.0, 0.0), self._num_rows * self.per_guess)

    @property
    def knows_plain(self) -> bool:
        """Rounds that do not draft were timed at this batch size."""
        return self.rest.knows(0)

    @property
    def knows_drafting(self) -> bool:
        """Rounds that draft were timed at about this batch size: the shape of a far one is a guess."""
        return self._is_close or any(map(self.draft.knows, self.draft.cells))

    @property
    def plain(self) -> float:
        """Seconds of a round that does not draft, at pace 1; so are all the following."""
        return self.idle.value + self.rest.at(0)

    @property
    def longest_known(self) -> int:
        """The longest draft that was timed often enough, here or at the batch size whose shape was lent."""
        known = (length for curve in (self.draft, self.rest) for length in curve.cells if curve.knows(length))
        return max(known, default=self._longest_lent)

    def drafting(self, longest: int) -> list[float]:
        """The drafter's seconds in a round that asks it and gets 0, 1, ... ``longest`` guesses."""
        lengths = range(longest + 1)
        assumed = [_ASSUMED_DRAFT * length * self.rest.at(0) for length in lengths]
        drafts = self.draft.table(lengths) if self.draft.cells else assumed
        return [self.idle.value + draft for draft in (self.missed.value, *drafts[1:])]

    def table(self, longest: int) -> list[float]:
        """Seconds of a round that asks the drafter and gets 0, 1, ... ``longest`` guesses for every row."""
        return [draft + rest for draft, rest in zip(self.drafting(longest), self.rest.table(range(longest + 1)), strict=True)]


@final
class CostModel:
    """Costs by batch size. A new batch size starts with the shape of the nearest one."""

    def __init__(self) -> None:
        self._by_size: dict[int, BatchCosts] = {}

    def of(self, batch_size: int) -> BatchCosts:
        if batch_size not in self._by_size:
            nearest = min(self._by_size, key=lambda size: abs(size - batch_size), default=None)
            self._by_size[batch_size] = BatchCosts(batch_size, self._by_size[nearest] if nearest else None)
        return self._by_size[batch_size]
