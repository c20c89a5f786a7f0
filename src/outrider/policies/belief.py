"""How often guesses are accepted, compared with what was predicted.

Each request has one number of its own: how much likelier its guesses are to be accepted than usual. A drafter may state a
probability for each guess. It is trusted as far as its earlier statements came true. Older evidence counts less.

    shift = (passed - expected) / (tested + prior weight)       logit(rate_k) = logit(usual_k) + 4 shift
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from outrider.policies.rates import Outcome, PositionRates, reach_of
from outrider.policies.tuning import TUNING


@final
@dataclass
class Account:
    """Number of guesses that were tested, that were expected to be accepted, and that were accepted."""

    horizon: float
    tested: float = 0.0
    expected: float = 0.0
    passed: float = 0.0

    def record(self, tested: float, expected: float, passed: float) -> None:
        """Learn from a round. Earlier evidence fades."""
        keep = 1 - 1 / self.horizon
        self.tested, self.expected = keep * self.tested + tested, keep * self.expected + expected
        self.passed = keep * self.passed + passed

    def survival(self, usual: Sequence[float]) -> list[float]:
        """By position, the probability that all guesses up to it are accepted. The shift applies to the odds, so rates near 1/2
        change the most."""
        odds = math.exp(4 * (self.passed - self.expected) / (self.tested + TUNING.prior_weight))
        return reach_of([rate * odds / (1 - rate + rate * odds) for rate in usual])

    @property
    def trust(self) -> float:
        """Factor by which an expected number of accepted guesses is corrected."""
        return (self.passed + TUNING.prior_weight) / (self.expected + TUNING.prior_weight)

    def rate(self, prior: float) -> float:
        """Probability that a guess is right if those before it are, as long as the drafter has not stated its own."""
        return (self.passed + TUNING.prior_weight * prior) / (self.tested + TUNING.prior_weight)


@final
class Usual:
    """How likely guesses are to be accepted over all requests, by position and by the number of guesses at a level
    (``spread``). A wider level that was never tried is expected to miss a little less often than a narrower one."""

    def __init__(self, spreads: Sequence[float], prior: Sequence[float]) -> None:
        self._prior = prior
        self.seen = {spread: PositionRates(TUNING.memory) for spread in spreads}
        self.refresh()

    def record(self, rounds: Mapping[float, Sequence[Outcome]], num_plain: float) -> None:
        """Learn from rounds. Rounds without a draft make old evidence fade half as fast as others. Evidence of spreads that
        were not played fades twice as fast, so that bad luck with one does not rule it out for ever."""
        total = sum(map(len, rounds.values()))
        for spread, outcomes in rounds.items():
            self.seen[spread].record(*outcomes)
            self.seen[spread].fade(num_plain / 2 + 2 * (total - len(outcomes)))

    def refresh(self) -> None:
        """Compute the rates again. Each spread learns from the others: first the narrower ones from the wider, then the wider
        ones from the narrower, none of which has a higher rate."""
        self.by_spread = dict[float, list[float]]()
        prior, least = self._chain_prior(), [0.0] * len(self._prior)
        for spread, seen in self.seen.items():
            least = self.by_spread[spread] = list(map(max, seen.inherited(prior), least))
            prior = [1 - TUNING.wider * (1 - rate) for rate in least]

    def _chain_prior(self) -> list[float]:
        """The prior rates of a chain, halfway between the usual ones and those that the rates of wider trees imply."""
        wider = list(self.seen.values())[:0:-1]
        prior = [1 - TUNING.wider ** len(wider) * (1 - rate) for rate in self._prior]
        for seen in wider:
            prior = [1 - (1 - rate) / TUNING.wider for rate in seen.inherited(prior)]
        return [(usual + implied) / 2 for usual, implied in zip(self._prior, prior, strict=True)]
