"""What each draft length promises a batch, and which one to take.

speed(K) = tokens(K) / seconds(K);      risk(K) = seconds(K) / seconds(0) - 1 / gain       all in plain rounds
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Outlook:
    """What each length promises a batch: tokens and seconds of a round (at pace 1), by length."""

    tokens: list[float]
    seconds: list[float]
    by_depth: list[float]
    """Seconds of a round that asked the drafter and got this many guesses."""

    def best(self, purse: float) -> int:
        """The fastest length whose worst case, nothing accepted, the purse could pay for."""
        lengths = (k for k in range(len(self.tokens)) if k == 0 or self.risk(k) <= purse)
        return max(lengths, key=lambda length: self.tokens[length] / self.seconds[length])

    def gain(self, length: int) -> float:
        """Expected speed, plain decoding being 1."""
        return self.tokens[length] / self.seconds[length] * self.seconds[0] / self.tokens[0]

    def risk(self, length: int, gain: float = 1.0) -> float:
        """Plain rounds lost, against decoding at ``gain`` times plain speed, if nothing is accepted."""
        return self.seconds[length] / self.seconds[0] - 1 / gain
