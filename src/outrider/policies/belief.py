"""What guesses were worth against what was expected of them.

A request has one number of its own: how much likelier its guesses are to pass than is usual over all requests (``rates.py``). A
drafter that says how sure it is is believed as far as guesses have kept what it said. Evidence fades a little each round.

    shift = (passed - expected) / (tested + prior weight)       logit(rate_k) = logit(usual_k) + 4 shift
    trust = passed / expected by the drafter
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

from outrider.policies.rates import Outcome, PositionRates, reach_of
from outrider.policies.tuning import TUNING


@final
@dataclass
class Account:
    """Guesses that were tested, those that were expected to pass, and those that did."""

    horizon: float
    tested: float = 0.0
    expected: float = 0.0
    passed: float = 0.0

    def record(self, tested: float, expected: float, passed: float) -> None:
        """Learn from a round; what was known before it fades."""
        keep = 1 - 1 / self.horizon
        self.tested, self.expected = keep * self.tested + tested, keep * self.expected + expected
        self.passed = keep * self.passed + passed

    def survival(self, usual: Sequence[float]) -> list[float]:
        """By position, the chance that guesses up to it all pass. Odds are shifted, and so rates near 1/2 the most."""
        odds = math.exp(4 * (self.passed - self.expected) / (self.tested + TUNING.prior_weight))
        return reach_of([rate * odds / (1 - rate + rate * odds) for rate in usual])

    def trust(self, prior: float) -> float:
        """What an expectation has to be multiplied with."""
        return (self.passed + TUNING.prior_weight * prior) / (self.expected + TUNING.prior_weight)

    def rate(self, prior: float) -> float:
        """How likely a guess is to be right where those before it are, its belief not being known yet."""
        return (self.passed + TUNING.prior_weight * prior) / (self.tested + TUNING.prior_weight)


@final
class Usual:
    """How likely guesses are to pass over all requests: by position, and by how many guesses a level has (``spread``). A wider
    level that was not tried yet is expected to miss a little less often than a narrower one."""

    def __init__(self, spreads: Sequence[float], prior: Sequence[float]) -> None:
        self._prior = prior
        self.seen = {spread: PositionRates(TUNING.memory) for spread in spreads}
        self.refresh()

    def record(self, rounds: Mapping[float, Sequence[Outcome]], num_plain: float) -> None:
        """Learn from rounds. Those that did not draft make old evidence fade, half as much as others. Evidence of spreads that
        were not played fades twice as fast: bad luck with one must not be the end of it."""
        total = sum(map(len, rounds.values()))
        for spread, outcomes in rounds.items():
            self.seen[spread].record(*outcomes)
            self.seen[spread].fade(num_plain / 2 + 2 * (total - len(outcomes)))

    def refresh(self) -> None:
        """Rates from what has been seen. A wider level never does worse than a narrower one."""
        self.by_spread, prior, least = dict[float, list[float]](), self._prior, [0.0] * len(self._prior)
        for spread, seen in self.seen.items():
            least = self.by_spread[spread] = list(map(max, seen.inherited(prior), least))
            prior = [1 - TUNING.wider * (1 - rate) for rate in least]
        self.sums = {spread: list(accumulate(rates, initial=0.0)) for spread, rates in self.by_spread.items()}
        """Guesses that are expected to pass among the first so many, each tested."""
