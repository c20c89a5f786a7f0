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
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import add, truediv
from typing import final

from outrider.core.interfaces import Doubt
from outrider.core.prices import between
from outrider.core.reason import Reason, ReasonCode
from outrider.policies.tuning import TUNING

Survival = Sequence[Sequence[float]]
"""Of every row, by position: the chance that all guesses up to it are accepted."""


@final
@dataclass(frozen=True)
class Outlook:
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

    def best(self, purse: float, optimism: Sequence[float], *, ends_itself: bool) -> int:
        """The fastest length whose worst case, nothing accepted, the purse could pay for, and that promises enough for what it
        risks. ``optimism`` says by how much each may take less than it is thought to. Where the drafter ends what it doubts,
        the longest that is about as fast: what is not worth it will not be drafted."""
        gains = [self.gain(length) / optimism[length] for length in range(len(self.tokens))]
        risks = [self.risk(length) for length in range(len(self.tokens))]
        worthy = (k for k, risk in enumerate(risks) if risk <= purse and gains[k] - 1 >= TUNING.margin * risk)
        payable = [0, *(length for length in worthy if length)]
        best = max(payable, key=gains.__getitem__)
        if best and ends_itself:
            best = max(length for length in payable if gains[length] >= (1 - TUNING.margin) * gains[best])
        return best

    def gain(self, length: int) -> float:
        """Expected speed, plain decoding being 1."""
        return self.tokens[length] / self.seconds[length] * self.seconds[0] / self.tokens[0]

    def risk(self, length: int) -> float:
        """Plain rounds lost if nothing is accepted."""
        return self.seconds[length] / self.seconds[0] - 1

    def ranked(self, survival: Survival, found: Sequence[float]) -> Outlook:
        """The same with a length for every row. Drafting one level more is paid once for all rows, so there is a ranking for
        every depth; those around the most promising one for all alike are looked at."""
        near = max(range(1, len(self.tokens)), key=self.gain)
        tokens, seconds, shares = list(self.tokens), list(self.seconds), dict[int, tuple[int, ...]]()
        for depth in range(max(near - 2, 1), min(near + 4, len(tokens))):
            tokens[depth], seconds[depth], shares[depth] = self._best_prefix(survival, found, depth)
        return replace(self, tokens=tokens, seconds=seconds, shares=shares)

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

    def doubt(self, trust: tuple[float, ...], *, further: float, padded: bool) -> Doubt:
        """What guesses must be likely to bring: what comes in their time anyway. Where rows are padded a place is saved for
        all or for none of them. A guess that is yet to be drafted will be right with chance ``further`` if those before it
        are, so their hope must be so much higher."""
        num_rows, rate = len(trust), max(map(truediv, self.tokens, self.seconds))
        guesses, places = ([rate * step for step in _steps(curve)] for curve in (self.drafting, self.rests))
        per_place = [0.0 if padded else min(place / num_rows, TUNING.dearest) for place in places]
        most = [num_rows * (TUNING.dearest - place) for place in per_place]
        levels = [guess + (place if padded else 0.0) for guess, place in zip(guesses, places, strict=True)]
        levels = [min(level / further, limit) if further > 0 else limit for level, limit in zip(levels, most, strict=True)]
        return Doubt(tuple(levels), tuple(per_place), trust)

    def reason(self, length: int, budget: float) -> Reason:
        """Why ``length`` was chosen, with what it promises; without a draft, what the most promising one would."""
        promising = length or max(range(1, len(self.tokens)), key=self.gain, default=0)
        numbers = {
            "length": promising,
            "gain": self.gain(promising),
            "tokens": self.tokens[promising] / self.tokens[0],
            "cost": self.seconds[promising] / self.seconds[0],
            "budget": budget,
        }
        none = ReasonCode.BUDGET if self.gain(promising) > 1 else ReasonCode.PLAIN_IS_FASTER
        none = ReasonCode.PROMPTS if self.tokens[promising] >= self.most else none
        return Reason(ReasonCode.FASTEST if length else none, numbers)


def look_ahead(
    survival: Survival,
    found: Sequence[float],
    drafting: Sequence[float],
    rests: Sequence[float],
    *,
    padded: bool,
    most: float = math.inf,
) -> Outlook:
    """``drafting`` and ``rests`` are the parts of a round by length. A drafter that copies may find less than it was asked for,
    ``found`` by position: a round costs the mean over what is found, not the cost of the mean, since passes have steps."""
    num_rows = len(survival)
    together = 1 if padded else num_rows  # where rows are padded, a place is there for all of them or for none
    somebody = [1 - (1 - chance) ** together for chance in found]
    seconds = list(map(add, _mean_cost(drafting, somebody), _mean_cost(rests, found)))
    tokens = accumulate(map(sum, zip(*survival, strict=True)), initial=float(num_rows))
    return Outlook([min(count, most) for count in tokens], [rests[0], *seconds[1:]], list(drafting), list(rests), most)


def _steps(curve: Sequence[float]) -> list[float]:
    """By place, what the next one costs on the way to whichever later one is the cheapest to go to: passes have steps, and
    whoever pays for one gets all places up to the next."""
    ends = range(1, len(curve))
    return [max(min((curve[end] - curve[at]) / (end - at) for end in ends[at:]), 0.0) for at in range(len(curve) - 1)]


def _mean_cost(costs: Sequence[float], found: Sequence[float]) -> list[float]:
    """By the length asked for, the mean of ``costs`` over the lengths found; ``found[k]``: the chance of more than k."""
    return list(accumulate((chance * (costs[k + 1] - costs[k]) for k, chance in enumerate(found)), initial=costs[0]))
