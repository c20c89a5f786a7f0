"""A sequential test with a stated error rate: bets against the claimed law, at fair odds.

If outcomes have the law p, no strategy can win against bets that are fair under p. A gambler starts with 1 and bets on events
(the token is the likeliest one, it is one that the draft favours, ...). If the claim is true, the fortune is a martingale. The
probability that it ever reaches 1 / alpha is then at most alpha, whenever one stops (Ville 1939). If the claim is false, some
event occurs too often or too seldom, and a bet on it grows exponentially. The gambler splits the stake over many events and
rates. The sum of the fortunes is fair as well.

    fortune of a bet:   W <- W (1 + r (1[y in A] - p(A)));      reject p when  mean over bets of W  >= 1 / alpha

Waudby-Smith & Ramdas 2023 (arXiv 2010.09686) for bounded bets. The events A of a bet may depend on everything emitted before,
but not on the outcome of the bet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

RATES = tuple(sign * rate for rate in (0.03, 0.08, 0.2, 0.45, 0.9) for sign in (1, -1))


@final
class Gambler:
    """Bets on named events against claimed probabilities."""

    def __init__(self, names: tuple[str, ...], *, alpha: float) -> None:
        self.alpha = alpha
        self.count = 0
        self._log_wealth = {name: [0.0] * len(RATES) for name in names}
        self._surplus = {name: [0.0, 0.0] for name in names}
        self._log_highest = 0.0

    def bet(self, events: Mapping[str, tuple[bool, float]]) -> None:
        """Bet on one outcome: for each event, whether it happened and its claimed probability."""
        self.count += 1
        for name, (happened, chance) in events.items():
            edge = float(happened) - chance
            wealth = self._log_wealth[name]
            for place, rate in enumerate(RATES):
                wealth[place] += math.log1p(rate * edge) if edge > -1 or rate < 1 else -math.inf
            total = self._surplus[name]
            total[0] += edge
            total[1] += chance * (1 - chance)
        self._log_highest = max(self._log_highest, self.log_fortune)

    @property
    def log_fortune(self) -> float:
        """Logarithm of the present total stake."""
        every = [value for wealth in self._log_wealth.values() for value in wealth]
        top = max(every)
        return top + math.log(math.fsum(math.exp(value - top) for value in every) / len(every))

    @property
    def rejected(self) -> bool:
        """Whether the fortune has ever reached 1 / alpha."""
        return self._log_highest >= math.log(1 / self.alpha)

    @property
    def evidence(self) -> float:
        """The highest fortune so far. Its inverse bounds the probability of seeing as much under the claimed law."""
        return math.exp(min(self._log_highest, 700.0))

    @property
    def worst(self) -> tuple[str, float, float]:
        """The event furthest from its claimed probability in standard errors: its name, the excess frequency, and its standard
        error."""
        count = max(self.count, 1)
        found = [(name, edge / count, math.sqrt(var) / count) for name, (edge, var) in self._surplus.items()]
        return max(found, key=lambda item: abs(item[1]) / max(item[2], 1e-12))

    @property
    def sensitivity(self) -> float:
        """An event that is off by this much from an even chance would have been found about half of the time."""
        bets = len(self._log_wealth) * len(RATES)
        return 0.5 * math.sqrt(2 * math.log(bets / self.alpha) / max(self.count, 1))
