"""The acceptance rates of one of several drafters, measured in a request.

The probability that the k-th guess of a round is accepted falls with k, along a chain and faster over a tree. The counts of
made and of accepted guesses decay a little every round, so the estimate follows the text. A drafter that got no nodes for a
while counts as unknown again, and so it is tried again. With little evidence, the rate falls from guess k - 1 to guess k by
this drafter's mean factor.

    made_k, accepted_k  <-  (1 - 1/rounds) * made_k, accepted_k  +  what this round showed
    chance_k = min(chance_{k-1}, (accepted_k + w * fall * chance_{k-1}) / (made_k + w)),     chance_0 = 1
    fall = (w * 3/4 + sum_k accepted_k) / (w + sum_k min(made_k, accepted_{k-1})),  at most 1,    accepted_0 = made_1

Nodes go to the largest chances of all drafters. Each drafter's chances fall with k, so this maximises the expected number of
accepted guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

_FALL = 0.75
"""Prior probability that a guess of an unknown drafter is accepted if the one before it is."""
_WEIGHT = 2.0
"""Weight of the prior, in rounds."""


@final
@dataclass
class SourceRates:
    """Acceptance statistics of one drafter in one request."""

    rounds: float
    """Approximate number of rounds that count."""
    made: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    asked: float = 1.0
    returned: float = 1.0
    """Decayed counts of the nodes offered to the drafter and used by it."""

    def record(self, num_asked: int, num_made: int, accepted: Sequence[int]) -> None:
        """Add a round: nodes offered, guesses made, and the indices of the accepted ones."""
        keep = 1 - 1 / self.rounds
        missing = max(0, num_made - len(self.made))
        self.made = [keep * count for count in self.made] + [0.0] * missing
        self.accepted = [keep * count for count in self.accepted] + [0.0] * missing
        for guess in range(num_made):
            self.made[guess] += 1
        for guess in accepted:
            self.accepted[guess] += 1
        self.asked = keep * self.asked + num_asked
        self.returned = keep * self.returned + num_made

    def chances(self, count: int) -> list[float]:
        """Acceptance probabilities of the first ``count`` guesses, in falling order."""
        found: list[float] = []
        before, fall = 1.0, self._fall()
        for guess in range(count):
            known = guess < len(self.made)
            made, accepted = (self.made[guess], self.accepted[guess]) if known else (0.0, 0.0)
            before = min(before, (accepted + _WEIGHT * fall * before) / (made + _WEIGHT))
            found.append(before)
        return found

    def _fall(self) -> float:
        """How often a guess is accepted if the one before it was, over all guesses of this drafter."""
        tested = sum(map(min, self.made, [*self.made[:1], *self.accepted]))
        return min(1.0, (_WEIGHT * _FALL + sum(self.accepted)) / (_WEIGHT + tested))

    @property
    def fill(self) -> float:
        """Share of its nodes that the drafter uses. A copying drafter often finds nothing; a draft model always guesses."""
        return self.returned / self.asked

    def copy(self) -> SourceRates:
        return SourceRates(self.rounds, list(self.made), list(self.accepted), self.asked, self.returned)


def share(budget: int, sources: Sequence[SourceRates], *, min_chance: float) -> int:
    """How many of ``budget`` nodes the first of ``sources`` gets if the largest probabilities win. Ties go to the first."""
    if budget <= 0 or not sources:
        return 0
    curves = [source.chances(budget) for source in sources]
    ranked = sorted((-chance, index) for index, curve in enumerate(curves) for chance in curve if chance >= min_chance)
    return sum(index == 0 for _, index in ranked[:budget])
