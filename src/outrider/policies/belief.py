"""How often guesses are accepted, compared with what was predicted.

Each request has one number of its own: how much likelier its guesses are to be accepted than usual. A drafter may state a
probability for each guess. It is trusted as far as its earlier statements came true. Older evidence counts less.

    shift = (passed - expected) / (tested + prior weight)       logit(rate_k) = logit(usual_k) + 4 shift
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import numpy as np

from outrider.policies.rates import PositionRates
from outrider.policies.tuning import TUNING


@final
@dataclass
class Evidence:
    """By row, the number of guesses that were tested, that were expected to be accepted, and that were accepted."""

    horizon: float
    sums: np.ndarray

    @staticmethod
    def of(horizon: float, num_rows: int = 1) -> Evidence:
        return Evidence(horizon, np.zeros((num_rows, 3)))

    def of_rows(self, rows: Sequence[int], *others: Evidence) -> Evidence:
        """The evidence of these rows, and of all rows of others after them."""
        return Evidence(self.horizon, np.concatenate([self.sums[list(rows)], *(other.sums for other in others)]))

    def record(self, *counts: np.ndarray) -> None:
        """Learn from rounds. Each of the three counts has a line for each of them, and a column for each row."""
        num_rounds = len(counts[0])
        shares = (1 - 1 / self.horizon) ** np.arange(num_rounds - 1, -1, -1.0)
        self.fade(num_rounds)
        self.sums += np.stack([shares @ count for count in counts], axis=-1)

    def fade(self, num_rounds: int) -> None:
        """Let the evidence fade as after so many rounds."""
        self.sums *= (1 - 1 / self.horizon) ** num_rounds

    def survival(self, usual: np.ndarray) -> np.ndarray:
        """By row and position, the probability that all guesses up to it are accepted. The shift applies to the odds, so rates
        near 1/2 change the most."""
        tested, expected, passed = self.sums.T[..., None]
        odds = np.exp(4 * (passed - expected) / (tested + TUNING.prior_weight))
        return np.cumprod(usual * odds / (1 - usual + usual * odds), axis=1)

    def trust(self, prior: float) -> float:
        """Factor by which an expected number of accepted guesses is corrected."""
        ((_, expected, passed),) = self.sums.tolist()
        return (passed + TUNING.prior_weight * prior) / (expected + TUNING.prior_weight)

    def rate(self, prior: float) -> float:
        """Probability that a guess is right if those before it are, as long as the drafter has not stated its own."""
        ((tested, _, passed),) = self.sums.tolist()
        return (passed + TUNING.prior_weight * prior) / (tested + TUNING.prior_weight)

    @property
    def is_empty(self) -> bool:
        return not self.sums.any()


@final
class Usual:
    """How likely guesses are to be accepted over all requests, by position and by the number of guesses at a level
    (``spread``). A wider level that was never tried is expected to miss a little less often than a narrower one."""

    def __init__(self, spreads: Sequence[float], prior: Sequence[float]) -> None:
        self._prior = prior
        self.seen = {spread: PositionRates(TUNING.memory) for spread in spreads}
        self.refresh()

    def record(self, spread: int, passed: np.ndarray, asked: np.ndarray) -> None:
        """Learn from rows with a draft, of the given number of a spread. Evidence of spreads that were not played fades twice
        as fast, so that bad luck with one does not rule it out for ever."""
        for number, rates in enumerate(self.seen.values()):
            if number == spread:
                rates.record(passed, asked)
            else:
                rates.fade(2 * len(asked))

    def fade(self, num_plain: float) -> None:
        """Let the evidence fade as after rounds without a draft: half as fast as after others."""
        for rates in self.seen.values():
            rates.fade(num_plain / 2)

    def refresh(self) -> None:
        """Compute the rates again. A wider level never has a lower rate than a narrower one."""
        self.by_spread, prior, least = dict[float, np.ndarray](), self._prior, [0.0] * len(self._prior)
        for spread, seen in self.seen.items():
            least = list(map(max, seen.inherited(prior), least))
            self.by_spread[spread], prior = np.array(least), [1 - TUNING.wider * (1 - rate) for rate in least]
        self.sums = np.array([list(accumulate(rates, initial=0.0)) for rates in self.by_spread.values()])
        """By spread, the expected number of accepted guesses among the first n, if each of them is tested."""
