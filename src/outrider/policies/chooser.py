"""How much to draft: all nodes of all requests compete for places in one pass.

Nodes are ranked by the chance that their whole path survives. The prefix of that ranking with the most expected tokens per
second is drafted and verified, the empty prefix (plain decoding) included. Where the pass pads, and where rows are trees, a
whole level of all rows is one entry of the ranking; elsewhere every row gets a length of its own.

    tokens(prefix)  = rows + sum of the survival of its nodes
    seconds(prefix) = drafting to its deepest level + a pass with places for the nodes that are found

A drafter that says how sure it is ends its drafts itself, by the same account (``Doubt``): a guess must be likely to bring more
tokens than come in its time anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

from outrider.core.interfaces import Doubt
from outrider.core.prices import between
from outrider.core.reason import Reason, ReasonCode
from outrider.policies.tuning import TUNING

_HIGHEST_PRICE = 0.5
"""Tokens a guess may cost: no estimate of costs may end every draft at once, or nothing is ever measured again."""

Survival = Sequence[tuple[Sequence[float], Sequence[float]]]
"""Of every row, by position: the chance that all guesses up to it are accepted, and that all are found."""


@final
@dataclass(frozen=True)
class Outlook:
    """What a batch may expect of every length, the same for all rows: tokens and seconds of a round at pace 1."""

    tokens: list[float]
    seconds: list[float]
    drafting: list[float]
    """The drafter's part of a round that asked it, by the guesses of the longest path, ..."""
    rests: list[float]
    """... and the other part."""

    def best(self, purse: float, *, ends_itself: bool) -> int:
        """The fastest length whose worst case, nothing accepted, the purse could pay for, and that promises enough for what it
        risks. Where the drafter ends what it doubts, the longest that is about as fast: what is not worth it will not be
        drafted."""
        risks = [self.risk(length) for length in range(len(self.tokens))]
        worthy = (k for k, risk in enumerate(risks) if risk <= purse and self.gain(k) - 1 >= TUNING.margin * risk)
        payable = [0, *(length for length in worthy if length)]
        best = max(payable, key=self.gain)
        if best and ends_itself:
            best = max(length for length in payable if self.gain(length) >= (1 - TUNING.margin) * self.gain(best))
        return best

    def gain(self, length: int) -> float:
        """Expected speed, plain decoding being 1."""
        return self.tokens[length] / self.seconds[length] * self.seconds[0] / self.tokens[0]

    def risk(self, length: int) -> float:
        """Plain rounds lost if nothing is accepted."""
        return self.seconds[length] / self.seconds[0] - 1

    @property
    def forgone(self) -> float:
        """Tokens that a plain round forgoes, for every one it brings."""
        return max(map(self.gain, range(len(self.tokens)))) - 1

    def price(self, length: int, best: int) -> float:
        """Plain rounds that trying a length costs, against the best: what is expected if it is shorter, the worst if not."""
        tokens = self.tokens[length] / self.tokens[0] if length < best else 1.0
        return self.seconds[length] / self.seconds[0] - tokens / self.gain(best)

    def lengths(self, survival: Survival, best: int) -> tuple[int, ...]:
        """A length for every row: the best prefix of the ranking of single nodes. Drafting one level more is paid once for all
        rows, so there is a ranking for every depth; those around ``best``, the best length for all alike, are looked at."""
        depths = range(max(best - 2, 1), min(best + 4, len(self.tokens)))
        return max((self._ranked_to(survival, depth) for depth in depths), key=lambda found: found[0])[1]

    def _ranked_to(self, survival: Survival, depth: int) -> tuple[float, tuple[int, ...]]:
        """Tokens per second, and the lengths, of the best prefix of the ranking of nodes down to a depth."""
        num_rows, rests, ranking = len(survival), list(enumerate(self.rests)), _ranked(survival, depth)
        tokens, nodes, speed, best = float(num_rows), 0.0, 0.0, 0
        for place, (_, row, position) in enumerate(ranking, 1):
            reach, found = survival[row]
            tokens, nodes = tokens + reach[position], nodes + found[position]
            faster = tokens / (self.drafting[depth] + between(rests, nodes / num_rows))
            if faster > speed:
                best, speed = place, faster
        lengths = [0] * num_rows
        for _, row, position in ranking[:best]:
            lengths[row] = max(lengths[row], position + 1)
        return speed, tuple(lengths)

    def doubt(self, length: int, trust: tuple[float, ...], *, further: float, padded: bool) -> Doubt:
        """What guesses must be likely to bring: what comes in their time anyway. Where rows are padded a place is saved for
        all or for none of them. A guess that is yet to be drafted will be right with chance ``further`` if those before it
        are, so their hope must be so much higher."""
        num_rows, rate = len(trust), self.tokens[length] / self.seconds[length]
        end = min(max(2 * length, 4), len(self.tokens) - 1)
        guess, place = ((curve[end] - curve[1]) / max(end - 1, 1) for curve in (self.drafting, self.rests))
        guess = guess if guess > 0 else self.drafting[1]
        place = min(max(place, 0.0), num_rows * guess)
        per_place = 0.0 if padded else min(rate * place / num_rows, _HIGHEST_PRICE)
        level, most = rate * (guess + (place if padded else 0.0)), num_rows * (_HIGHEST_PRICE - per_place)
        return Doubt(min(level / further, most) if further > 0 else most, per_place, trust)

    def reason(self, length: int, budget: float, is_paused: bool) -> Reason:
        """Why ``length`` was chosen, with what it promises; without a draft, what the most promising one would."""
        promising = length or max(range(1, len(self.tokens)), key=self.gain, default=0)
        numbers = {
            "length": promising,
            "gain": self.gain(promising),
            "tokens": self.tokens[promising] / self.tokens[0],
            "cost": self.seconds[promising] / self.seconds[0],
            "budget": budget,
        }
        none = ReasonCode.BUDGET if is_paused else ReasonCode.PLAIN_IS_FASTER
        return Reason(ReasonCode.FASTEST if length else none, numbers)


def look_ahead(survival: Survival, plain: float, drafting: Sequence[float], rests: Sequence[float], *, padded: bool) -> Outlook:
    """``drafting`` and ``rests`` are the parts of a round by length. A drafter that copies may find less than it was asked for:
    a round costs the mean over what is found, not the cost of the mean, since passes have steps."""
    longest, num_rows = len(drafting) - 1, len(survival)
    gains = [sum(reach[k] for reach, _ in survival) for k in range(longest)]
    nobody = [1.0] * longest
    for _, found in survival:
        nobody = [chance * (1 - find) for chance, find in zip(nobody, found, strict=True)]
    if padded or num_rows == 1:
        seconds = _mean_cost([draft + rest for draft, rest in zip(drafting, rests, strict=True)], nobody)
    else:
        widths = accumulate((sum(found[k] for _, found in survival) / num_rows for k in range(longest)), initial=0.0)
        passes = list(enumerate(rests))
        seconds = [draft + between(passes, width) for draft, width in zip(_mean_cost(drafting, nobody), widths, strict=True)]
    tokens = list(accumulate(gains, initial=float(num_rows)))
    return Outlook(tokens, [plain, *seconds[1:]], list(drafting), list(rests))


def _mean_cost(costs: Sequence[float], nobody: Sequence[float]) -> list[float]:
    """By the length asked for, the mean of ``costs`` over the lengths found; ``nobody[k]``: no row finds more than k."""
    growth = ((1 - none) * (costs[k + 1] - costs[k]) for k, none in enumerate(nobody))
    return list(accumulate(growth, initial=costs[0]))


def _ranked(survival: Survival, longest: int) -> list[tuple[float, int, int]]:
    """Nodes of all rows as (rank, row, position), the likeliest first. A place is only paid for where a guess is found, so the
    chance that counts is that of a guess that was; a node is never ranked before its parent."""
    ranked: list[tuple[float, int, int]] = []
    for row, (reach, found) in enumerate(survival):
        chances = (take / max(find, 1e-9) for take, find in zip(reach[:longest], found, strict=False))
        ranked += [(-chance, row, position) for position, chance in enumerate(accumulate(chances, min))]
    return sorted(ranked, key=lambda node: (node[0], node[2], node[1]))
