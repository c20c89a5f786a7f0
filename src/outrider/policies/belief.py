"""How likely a guess is to survive, from rounds that stopped at the first rejection.

Position k is only *tested* when all guesses before it were accepted, so the rate is accepted over tested; accepted over
drafted would depend on the draft length. Recent rounds weigh more: evidence fades a little each round, and where it has faded
away (or never was) the rate falls back to a prior, which is what other requests have shown. A drafter that says how sure it is
is believed as far as its guesses have kept what it said.

    w <- (1 - 1/horizon) w + tested         a <- a + (success - a) / w         reach_k = prod_{j <= k} a_j
    trust = accepted / expected by the drafter, at most 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple, final

from outrider.policies.tuning import TUNING

Outcome = tuple[int, bool]
"""Of a round: how many positions succeeded, and whether the next one was tested and failed."""

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
        missing = [0.0] * (most - len(self.means))
        self.means, self.weights = [*self.means, *missing], [*self.weights, *missing]
        for position in range(most):
            passed = sum(num_passed > position for num_passed, _ in rounds)
            tested = passed + sum(failed and num_passed == position for num_passed, failed in rounds)
            self.weights[position] += tested
            self.means[position] += (passed - tested * self.means[position]) / (self.weights[position] or 1.0)

    def fade(self, num_rounds: int) -> None:
        """Trust what was seen a little less, as after so many rounds without evidence."""
        keep = (1 - 1 / self.horizon) ** num_rounds
        self.weights = [keep * weight for weight in self.weights]

    def inherited(self, prior: Sequence[float]) -> list[float]:
        """Rates at ``len(prior)`` positions, each drawn to the prior where evidence is thin.

        A row that is better or worse than the prior at one position is expected to be so at the next: the prior there is
        shifted as much as the rate before it."""
        rates: list[float] = []
        shift = 0.0
        for position, mean in enumerate(prior):
            rate = min(max(mean + shift, 0.0), _HIGHEST)
            if position < len(self.means):
                weight = self.weights[position]
                rate = (weight * self.means[position] + TUNING.prior_weight * rate) / (weight + TUNING.prior_weight)
            rates.append(rate)
            shift = rate - mean
        return rates

    def copy(self) -> PositionRates:
        return PositionRates(self.horizon, list(self.means), list(self.weights))


@final
@dataclass
class Trust:
    """Guesses accepted, those that the drafter expected to be, and those that were tested."""

    horizon: float
    """Rounds that count, about."""
    accepted: float = 0.0
    expected: float = 0.0
    tested: float = 0.0

    def record(self, accepted: int, expected: float, tested: int) -> None:
        self.accepted, self.expected, self.tested = self.accepted + accepted, self.expected + expected, self.tested + tested

    def fade(self, num_rounds: int) -> None:
        keep = (1 - 1 / self.horizon) ** num_rounds
        self.accepted, self.expected, self.tested = keep * self.accepted, keep * self.expected, keep * self.tested

    def given(self, prior: float) -> float:
        """What a belief has to be multiplied with. At most 1: modest drafters lose little by being believed."""
        return min((self.accepted + TUNING.prior_weight * prior) / (self.expected + TUNING.prior_weight), 1.0)

    def rate(self, prior: float) -> float:
        """How likely a guess is to be right where those before it are, its belief not being known yet."""
        return (self.accepted + TUNING.prior_weight * prior) / (self.tested + TUNING.prior_weight)


class Asked(NamedTuple):
    """Guesses of a row in a round."""

    planned: int
    found: int
    accepted: int
    expected: float
    """Of those that were tested, by the drafter's beliefs; 0 where it has none."""


@final
@dataclass
class Belief:
    """What is known of one request, or of all of them."""

    horizon: float
    accepted: PositionRates = field(init=False)
    """How often a further guess was found and accepted where it was asked for."""
    found: PositionRates = field(init=False)
    """How often it was found; a drafter that copies may have none."""
    trust: Trust = field(init=False)
    lag: int = 0
    """Rounds since the drafter was last asked."""

    def __post_init__(self) -> None:
        self.accepted, self.found = PositionRates(self.horizon), PositionRates(self.horizon)
        self.trust = Trust(self.horizon)

    def rest(self, num_rounds: int) -> None:
        """So many rounds without the drafter: what was seen counts less."""
        self.lag += num_rounds
        for part in (self.accepted, self.found, self.trust):
            part.fade(num_rounds)

    def learn(self, rounds: Sequence[Asked]) -> None:
        """From rounds that asked the drafter."""
        self.lag = 0
        if self.found.means or any(one.found < one.planned for one in rounds):  # most drafters always find: no news
            self.found.record(*((one.found, one.found < one.planned) for one in rounds))
        self.accepted.record(*((one.accepted, one.accepted < one.planned) for one in rounds))
        self.trust.fade(len(rounds))
        for one in rounds:
            if one.expected:
                self.trust.record(one.accepted, one.expected, min(one.accepted + 1, one.found))

    def survival(self, accepted: Sequence[float], found: Sequence[float]) -> tuple[list[float], list[float]]:
        """By position, the chance that guesses up to it are all accepted, and that they are all found, with the rates of all
        requests as the prior."""
        return reach_of(self.accepted.inherited(accepted)), reach_of(self.found.inherited(found))

    def copy(self) -> Belief:
        twin = Belief(self.horizon, self.lag)
        twin.accepted, twin.found = self.accepted.copy(), self.found.copy()
        twin.trust = Trust(self.horizon, self.trust.accepted, self.trust.expected, self.trust.tested)
        return twin


def reach_of(rates: Sequence[float]) -> list[float]:
    """Probability that the first k guesses all succeed, for k = 1, 2, ..."""
    return list(accumulate(rates, mul))
