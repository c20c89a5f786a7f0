"""How often guesses are accepted, by their position in the draft.

Position k is only *tested* when all guesses before it were accepted, so the rate is accepted over tested; accepted over drafted
would depend on the draft length. Recent rounds weigh more: evidence fades a little each round, and where it has faded away (or
never was) a rate falls back to its prior.

    w <- (1 - 1/horizon) w + tested         a <- a + (success - a) / w         reach_k = prod_{j <= k} a_j
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from operator import mul
from typing import final

from outrider.policies.tuning import TUNING

Outcome = tuple[int, bool]
"""Outcome of a round: how many positions succeeded, and whether the next one was tested and failed."""


@final
@dataclass
class PositionRates:
    """Mean and weight of the evidence at each position."""

    horizon: float
    """Number of tests that count: the weight at which evidence settles if every round tests the position."""
    means: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """All tests of each position, which never fade."""

    def record(self, *rounds: Outcome) -> None:
        """Learn from rounds. Earlier evidence fades by as many rounds."""
        self.fade(len(rounds))
        for (num_passed, failed), count in Counter(rounds).items():
            missing = num_passed + failed - len(self.means)
            self.means, self.weights = self.means + [0.0] * missing, self.weights + [0.0] * missing
            self.counts += [0] * missing
            for position in range(num_passed + failed):
                self.counts[position] += count
                self.weights[position] += count
                self.means[position] += count * ((position < num_passed) - self.means[position]) / self.weights[position]

    def fade(self, num_rounds: float) -> None:
        """Let the evidence fade as after so many rounds without a test."""
        keep = (1 - 1 / self.horizon) ** num_rounds
        self.weights = [keep * weight for weight in self.weights]

    def inherited(self, prior: Sequence[float]) -> list[float]:
        """Rates at ``len(prior)`` positions. Where evidence is thin, a rate is drawn towards its prior. The weight of a prior
        shrinks with the evidence against it: a hundred failures without a success are no bad luck. If one rate is above or
        below its prior, the next position is expected to deviate in the same direction. No rate becomes 1, or every further
        guess would look free."""
        rates, shift, prior_weight, most = list[float](), 0.0, TUNING.prior_weight, 1 - 1 / TUNING.memory
        known = self.means[: len(prior)], self.weights[: len(prior)], self.counts[: len(prior)]
        for mean, seen, weight, count in zip_longest(prior, *known, fillvalue=0.0):
            expected = min(max(mean + shift, 0.0), most)
            own = prior_weight / (1 + count * abs(seen - expected) / prior_weight) ** 2
            rate = (weight * seen + own * expected) / (weight + own)
            rates.append(rate)
            shift = rate - mean
        return rates

    def copy(self) -> PositionRates:
        return PositionRates(self.horizon, list(self.means), list(self.weights), list(self.counts))


def reach_of(rates: Sequence[float]) -> list[float]:
    """Probability that the first k guesses all succeed, for k = 1, 2, ..."""
    return list(accumulate(rates, mul))
