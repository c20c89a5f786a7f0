"""How often a guess at each position is accepted, from rounds that stopped at the first rejection.

Position k is only *tested* when all guesses before it were accepted, so the rate is accepted over tested; accepted over
drafted would depend on the draft length. Recent rounds weigh more: evidence at every position fades a little each round, and
where it has faded away (or never was) the rate falls back to a prior. That is what lets a length that was lowered rise again;
a window that reads "no tests" as "no success" never comes back.

    w <- (1 - 1/horizon) w + tested         a <- a + (success - a) / w         reach_k = prod_{j <= k} a_j
    E[tokens of a round of K guesses] = 1 + sum_{k <= K} reach_k                 (Leviathan et al. 2023, eq. 1, per position)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import final

Outcome = tuple[int, bool]
"""Of a round: how many positions succeeded, and whether the next one was tested and failed."""

PRIOR_WEIGHT = 10.0
"""Tests a prior is worth. Few, so that the first round after a long silence counts."""
TRUST_WEIGHT = 10.0
"""Expected (or tested) guesses that the prior of a trust is worth."""
_HIGHEST = 0.99
"""No prior promises more: with a rate of 1 every further guess would look free."""


@final
@dataclass
class PositionRates:
    """Mean and weight of the evidence at each position."""

    horizon: float
    """Tests that count, about: the weight that evidence seen every round settles at."""
    means: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def record(self, *rounds: Outcome) -> None:
        """Learn from rounds; what was known before them fades by as many."""
        self.fade(len(rounds))
        most = max((num_passed + failed for num_passed, failed in rounds), default=0)
        missing = max(0, most - len(self.means))
        self.means += [0.0] * missing
        self.weights += [0.0] * missing
        tested, passed = [0] * most, [0] * most
        for num_passed, failed in rounds:
            for position in range(num_passed):
                passed[position] += 1
                tested[position] += 1
            if failed:
                tested[num_passed] += 1
        for position in range(most):
            self.weights[position] += tested[position]
            step = passed[position] - tested[position] * self.means[position]
            self.means[position] += step / self.weights[position]

    def fade(self, num_rounds: int = 1) -> None:
        """Trust what was seen a little less, as after so many rounds without evidence."""
        keep = (1 - 1 / self.horizon) ** num_rounds
        self.weights = [keep * weight for weight in self.weights]

    def inherited(self, prior: Sequence[float]) -> list[float]:
        """Rates at ``len(prior)`` positions, each drawn to the prior where evidence is thin.

        A row that is better or worse than the prior at one position is expected to be so at the next: the prior there is
        shifted as much as the rate before it."""
        rates: list[float] = []
        shift = 0.0
        means, weights, num_known = self.means, self.weights, len(self.means)
        for position, mean in enumerate(prior):
            rate = min(max(mean + shift, 0.0), _HIGHEST)
            if position < num_known:
                weight = weights[position]
                rate = (weight * means[position] + PRIOR_WEIGHT * rate) / (weight + PRIOR_WEIGHT)
            rates.append(rate)
            shift = rate - mean
        return rates

    def copy(self) -> PositionRates:
        return PositionRates(self.horizon, list(self.means), list(self.weights))


@final
@dataclass
class Trust:
    """Guesses accepted for each one that the drafter expected to be: 1 for a drafter that knows itself. And how many of
    those that were tested."""

    horizon: float
    """Rounds that count, about."""
    accepted: float = 0.0
    expected: float = 0.0
    """Sum of the drafter's beliefs in guesses that were tested, ..."""
    tested: float = 0.0
    """... and their number."""

    def record(self, accepted: int, expected: float, *, tested: int, num_rounds: int) -> None:
        self.fade(num_rounds)
        self.accepted += accepted
        self.expected += expected
        self.tested += tested

    def fade(self, num_rounds: int) -> None:
        keep = (1 - 1 / self.horizon) ** num_rounds
        self.accepted *= keep
        self.expected *= keep
        self.tested *= keep

    def given(self, prior: float) -> float:
        """At most 1: modest drafters lose little by being believed."""
        return min((self.accepted + TRUST_WEIGHT * prior) / (self.expected + TRUST_WEIGHT), 1.0)

    def rate(self, prior: float) -> float:
        """How likely a guess is to be right where those before it are, its belief not being known yet."""
        return (self.accepted + TRUST_WEIGHT * prior) / (self.tested + TRUST_WEIGHT)

    def copy(self) -> Trust:
        return Trust(self.horizon, self.accepted, self.expected, self.tested)


def reach_of(rates: Sequence[float]) -> list[float]:
    """Probability that the first k guesses are all accepted, for k = 1, 2, ..."""
    return list(accumulate(rates, mul))


def best_length(reach: Sequence[float], seconds: Sequence[float], *, shortest: int = 0) -> int:
    """The K that maximises (1 + sum_{k <= K} reach_k) / seconds[K]; the shorter one of equals.

    "Add a guess while it pays" finds the same K where ``seconds`` is convex; the scan also sees past a step in it, which
    tiled kernels have."""
    best, best_pace, tokens = shortest, 0.0, 1.0
    for length, cost in enumerate(seconds):
        tokens += reach[length - 1] if length else 0.0
        if length >= shortest and tokens > best_pace * cost * (1 + 1e-12):
            best, best_pace = length, tokens / cost
    return best
