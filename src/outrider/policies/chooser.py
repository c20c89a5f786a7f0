"""How much to draft: all nodes of all requests compete for places in one pass.

Nodes are ranked by the chance that their whole path survives. The prefix of that ranking with the most expected tokens per
second is drafted and verified, the empty prefix (plain decoding) included. Where the pass pads, and where rows are trees, a
whole level of all rows is one entry of the ranking; elsewhere every row gets a length of its own.

    tokens(prefix)  = rows + sum of the survival of its nodes, at most what the prompts that a round reads can feed
    seconds(prefix) = drafting to its deepest level + a pass with places for the nodes that are found

A drafter that says how sure it is ends its drafts itself, by the same account (``Doubt``): a guess must be likely to bring more
tokens than come in its time anyway.
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
"""Of every row, by position: the chance that all guesses up to it are accepted."""


@final
@dataclass
class RoundForecast:
    """What a batch may expect of every depth of a draft: tokens and seconds of a round at pace 1."""

    tokens: list[float]
    seconds: list[float]
    drafting: list[float]
    """The drafter's part of a round that asked it, by the guesses of the longest path."""
    rests: list[float]
    """The other part."""
    most: float = math.inf
    """Tokens that the prompts read in a round can feed: answers cannot come faster than prompts are read."""
    shares: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """A length for every row, by depth, where rows are not asked alike."""
    gains: list[float] = field(init=False)
    """Expected speed, plain decoding being 1."""

    def __post_init__(self) -> None:
        plain = self.seconds[0] / self.tokens[0]
        self.gains = [tokens / seconds * plain for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    def best(self, purse: float, optimism: Sequence[float], *, ends_itself: bool) -> tuple[float, int]:
        """The fastest length, behind the speed that it promises. The purse must be able to pay for its worst case, nothing
        accepted, and it must promise enough for what it risks. ``optimism`` says what part of its cost each may really take.
        Where the drafter ends what it doubts, the longest that is about as fast: what is not worth it will not be drafted."""
        payable = {0: 1 / optimism[0]}
        for length in range(1, len(self.gains)):
            risk, gain = self.risk(length), self.gains[length] / optimism[length]
            if risk <= purse and gain - 1 >= TUNING.margin * risk:
                payable[length] = gain
        best = max(payable, key=payable.__getitem__)
        if best and ends_itself:
            best = max(length for length, gain in payable.items() if gain >= (1 - TUNING.margin) * payable[best])
        return payable[best], best

    def risk(self, length: int) -> float:
        """Plain rounds lost if nothing is accepted."""
        return self.seconds[length] / self.seconds[0] - 1

    def ranked(self, survival: Survival, found: Sequence[float]) -> RoundForecast:
        """This forecast with a length for every row. Drafting one level more is paid once for all rows, so there is a ranking
        for every depth; those around the most promising one for all alike are looked at."""
        near = self._promising
        tokens, seconds, shares = list(self.tokens), list(self.seconds), dict[int, tuple[int, ...]]()
        for depth in range(max(near - 2, 1), min(near + 4, len(tokens))):
            tokens[depth], seconds[depth], shares[depth] = self._best_prefix(survival, found, depth)
        return RoundForecast(tokens, seconds, self.drafting, self.rests, self.most, shares)

    @property
    def _promising(self) -> int:
        return max(range(1, len(self.gains)), key=self.gains.__getitem__)

    def _best_prefix(self, survival: Survival, found: Sequence[float], depth: int) -> tuple[float, float, tuple[int, ...]]:
        """Tokens, seconds and lengths of the best prefix of the ranking of nodes down to a depth. A place is only paid for
        where a guess is found, so nodes are ranked by the chance of a guess that was, and after their parents."""
        num_rows, rests, ranking = len(survival), list(enumerate(self.rests)), list[tuple[float, int, int]]()
        for row, reach in enumerate(survival):
            chances = accumulate((reach[place] / max(found[place], 1e-9) for place in range(depth)), min)
            ranking += [(-chance, place, row) for place, chance in enumerate(chances)]
        tokens, nodes, lengths, best = float(num_rows), 0.0, [0] * num_rows, (0.0, 1.0, (0,) * num_rows)
        for _, place, row in sorted(ranking):
            tokens, nodes, lengths[row] = tokens + survival[row][place], nodes + found[place], place + 1
            seconds = self.drafting[depth] + between(rests, nodes / num_rows)
            if min(tokens, self.most) * best[1] > best[0] * seconds:
                best = min(tokens, self.most), seconds, tuple(lengths)
        return best

    def doubt(self, trust: float, num_rows: int, *, longest: int, further: float, padded: bool) -> Doubt:
        """What each of ``longest`` guesses must be likely to bring: what comes in its time anyway. Where rows are padded a
        place is saved for all or for none of them. A guess that is yet to be drafted will be right with chance ``further`` if
        those before it are, so their hope must be so much higher."""
        rate, levels, places = max(self.gains) * self.tokens[0] / self.seconds[0], list[float](), list[float]()
        for guess, place in zip(slopes(self.drafting[: longest + 1]), slopes(self.rests[: longest + 1]), strict=True):
            own = 0.0 if padded else min(rate * place / num_rows, TUNING.dearest)
            level, most = rate * (guess + (place if padded else 0.0)), num_rows * (TUNING.dearest - own)
            levels.append(min(level / further, most) if further > 0 else most)
            places.append(own)
        return Doubt(tuple(levels), tuple(places), (trust,) * num_rows)

    def reason(self, length: int, budget: float) -> Reason:
        """Why ``length`` was chosen, with what it promises; without a draft, what the most promising one would."""
        promising = length or self._promising
        numbers = {
            "length": promising,
            "gain": self.gains[promising],
            "tokens": self.tokens[promising] / self.tokens[0],
            "cost": self.seconds[promising] / self.seconds[0],
            "budget": budget,
        }
        none = ReasonCode.BUDGET if self.gains[promising] > 1 else ReasonCode.PLAIN_IS_FASTER
        none = ReasonCode.PROMPTS if self.tokens[promising] >= self.most else none
        return Reason(ReasonCode.FASTEST if length else none, numbers)


def look_ahead(
    survival: Survival,
    found: Sequence[float],
    drafting: list[float],
    rests: list[float],
    *,
    padded: bool,
    most: float = math.inf,
) -> RoundForecast:
    """``drafting`` and ``rests`` are the parts of a round by length. A drafter that copies may find less than it was asked for,
    ``found`` by position: a round costs the mean over what is found, not the cost of the mean, since passes have steps."""
    num_rows = len(survival)
    is_shared = padded or num_rows == 1  # where rows are padded, a place is there for all of them or for none
    somebody = found if is_shared else [1 - (1 - chance) ** num_rows for chance in found]
    seconds = list(map(add, _mean_cost(drafting, somebody), _mean_cost(rests, found)))
    tokens = accumulate(map(sum, zip(*survival, strict=True)), initial=float(num_rows))
    return RoundForecast([min(count, most) for count in tokens], [rests[0], *seconds[1:]], drafting, rests, most)


def slopes(curve: Sequence[float]) -> list[float]:
    """By place, what the next one costs on the way to whichever later one is the cheapest to go to: passes have steps, and
    whoever pays for one gets all places up to the next. Those ways are the lower hull of the curve behind the place."""
    found, hull = list[float](), [(len(curve) - 1, math.inf)]
    for at in range(len(curve) - 2, -1, -1):
        while (slope := (curve[hull[-1][0]] - curve[at]) / (hull[-1][0] - at)) >= hull[-1][1]:
            hull.pop()
        hull.append((at, slope))
        found.append(max(slope, 0.0))
    return found[::-1]


def _mean_cost(costs: Sequence[float], found: Sequence[float]) -> list[float]:
    """By the length asked for, the mean of ``costs`` over the lengths found; ``found[k]``: the chance of more than k."""
    return list(accumulate(map(mul, found, map(sub, costs[1:], costs)), initial=costs[0]))
