"""How much to draft: all nodes of all requests compete for places in one pass.

Nodes are ranked by the chance that their whole path survives. The prefix of that ranking with the most expected tokens per
second is drafted and verified, the empty prefix (plain decoding) included. Where the pass pads, and where rows are trees, a
whole level of all rows is one entry of the ranking; elsewhere every row gets its own draft length.

    tokens(prefix)  = rows + sum of the survival of its nodes, at most what the prompts that a round reads can feed
    seconds(prefix) = drafting to its deepest level + a pass with places for the nodes that are found

A drafter that knows its own confidence stops its drafts by the same rule (``Doubt``). One more guess must be likely to bring
more tokens than the batch emits in that time anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add, mul, sub
from typing import final

from outrider.core.interfaces import Doubt
from outrider.core.prices import between
from outrider.core.reason import Reason, ReasonCode
from outrider.policies.tuning import TUNING

Survival = Sequence[Sequence[float]]
"""For each row and position, the probability that all guesses up to it are accepted."""


@final
@dataclass
class RoundForecast:
    """Expected tokens and seconds of a round, for every depth of a draft, at pace 1."""

    tokens: list[float]
    seconds: list[float]
    drafting: list[float]
    rests: list[float]
    """Seconds of the drafter and of the rest of the round, by the number of guesses along the longest path."""
    most: float = math.inf
    """Most answer tokens that the prompts read in a round can supply."""
    doubts: Sequence[float] = ()
    """Shares by which rounds may take less time than expected, by depth."""
    shares: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Draft length of every row, for each depth, where rows have different lengths."""
    gains: list[float] = field(init=False)
    """Expected speed of each depth, in units of plain decoding."""

    def __post_init__(self) -> None:
        plain = self.seconds[0] / self.tokens[0]
        self.gains = [tokens / seconds * plain for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    def best(self, purse: float) -> tuple[float, int]:
        """The expected speed of the best depth, and that depth. The loss budget (``purse``) must cover its worst case, in which
        nothing is accepted, and its promised gain must outweigh that risk."""
        payable = {0: 1 + self.doubts[0]}
        for length, gain in enumerate(self.gains[1:], 1):
            risk = self.risk(length)
            if risk <= purse and gain - 1 >= TUNING.margin * risk:
                payable[length] = gain * (1 + self.doubts[length])
        best = max(payable, key=payable.__getitem__)
        return payable[best], best

    def lengths(self, depth: int, num_rows: int) -> Sequence[int]:
        """Draft length of every row."""
        return self.shares.get(depth, (depth,) * num_rows)

    def risk(self, length: int) -> float:
        """Plain rounds lost if no guess is accepted."""
        return self.seconds[length] / self.seconds[0] - 1

    @property
    def _promising(self) -> int:
        return max(range(1, len(self.gains)), key=self.gains.__getitem__)

    def ranked(self, survival: Survival, found: Sequence[float]) -> RoundForecast:
        """This forecast with its own draft length for every row. One level more is drafted once for all rows, so each depth has
        its own ranking, and only depths near the best common length are tried. Space in the pass is only paid for where the
        drafter finds a guess, so nodes are ranked by the acceptance of guesses that were found, after their parents."""
        rests, tokens, seconds, shares = list(enumerate(self.rests)), list(self.tokens), list(self.seconds), dict(self.shares)
        chances = [list(accumulate((p / max(f, 1e-9) for p, f in zip(reach, found, strict=True)), min)) for reach in survival]
        ranking = sorted((-chance, at, row) for row, reach in enumerate(chances) for at, chance in enumerate(reach))
        for depth in range(max(self._promising - 2, 1), min(self._promising + 4, len(tokens))):
            emitted, places, lengths, tokens[depth], seconds[depth] = float(len(survival)), 0.0, [0] * len(survival), 0.0, 1.0
            for _, at, row in ranking:
                if at < depth:
                    emitted, places, lengths[row] = emitted + survival[row][at], places + found[at], at + 1
                    cost = self.drafting[depth] + between(rests, places / len(survival))
                    if min(emitted, self.most) * seconds[depth] > tokens[depth] * cost:
                        tokens[depth], seconds[depth], shares[depth] = min(emitted, self.most), cost, tuple(lengths)
        return RoundForecast(tokens, seconds, self.drafting, self.rests, self.most, self.doubts, shares)

    def doubt(self, trust: float, num_rows: int, *, longest: int, further: float, padded: bool) -> Doubt:
        """Tokens that each of ``longest`` guesses must be expected to bring: as many as the batch emits in that time anyway.
        Where rows are padded, space is saved for all rows or for none. A later guess is right with probability ``further`` if
        those before it are, so the bar is higher by that much."""
        rate, levels, places = max(self.gains) * self.tokens[0] / self.seconds[0], list[float](), list[float]()
        for guess, place in zip(slopes(self.drafting[: longest + 1]), slopes(self.rests[: longest + 1]), strict=True):
            own = 0.0 if padded else min(rate * place / num_rows, TUNING.dearest)
            level, most = rate * (guess + (place if padded else 0.0)), num_rows * (TUNING.dearest - own)
            levels.append(min(level / further, most) if further > 0 else most)
            places.append(own)
        return Doubt(tuple(levels), tuple(places), (trust,) * num_rows)

    def reason(self, length: int, budget: float) -> Reason:
        """Why ``length`` was chosen, with the expected speed. Without a draft, the expected speed of the best one."""
        best = length or self._promising
        tokens, cost = self.tokens[best] / self.tokens[0], self.seconds[best] / self.seconds[0]
        none = ReasonCode.BUDGET if self.gains[best] > 1 else ReasonCode.PLAIN_IS_FASTER
        none = ReasonCode.PROMPTS if self.tokens[best] >= self.most else none
        numbers = {"length": best, "gain": self.gains[best], "tokens": tokens, "cost": cost, "budget": budget}
        return Reason(ReasonCode.FASTEST if length else none, numbers)


def look_ahead(
    survival: Survival, found: Sequence[float], drafting: list[float], rests: list[float], *, padded: bool, most: float
) -> RoundForecast:
    """Forecast rounds by length. ``drafting`` and ``rests`` are seconds of the two parts of a round. A drafter that copies may
    find fewer guesses than it was asked for: ``found[k]`` is the chance of more than k. So the cost of a round is the mean over
    the lengths found. It is not the cost of the mean length, because pass costs rise in steps."""
    num_rows = len(survival)
    is_shared = padded or num_rows == 1  # where rows are padded, a place is there for all of them or for none
    somebody = found if is_shared else [1 - (1 - chance) ** num_rows for chance in found]
    parts = [
        accumulate(map(mul, chances, map(sub, costs[1:], costs)), initial=costs[0])
        for costs, chances in ((drafting, somebody), (rests, found))
    ]
    tokens = [min(count, most) for count in accumulate(map(sum, zip(*survival, strict=True)), initial=float(num_rows))]
    return RoundForecast(tokens, [rests[0], *list(map(add, *parts))[1:]], drafting, rests, most)


def slopes(curve: Sequence[float]) -> list[float]:
    """For each place, the cost per further place up to the cheapest later one. Pass costs rise in steps, and whoever pays for a
    step gets every place up to the next step. These slopes are those of the lower convex hull of the curve behind the place."""
    found, hull = list[float](), [(len(curve) - 1, math.inf)]
    for at in range(len(curve) - 2, -1, -1):
        while (slope := (curve[hull[-1][0]] - curve[at]) / (hull[-1][0] - at)) >= hull[-1][1]:
            hull.pop()
        hull.append((at, slope))
        found.append(max(slope, 0.0))
    return found[::-1]
