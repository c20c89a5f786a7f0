"""What each draft length promises a batch, and which one to take.

speed(K) = tokens(K) / seconds(K);      risk(K) = seconds(K) / seconds(0) - 1 / gain       all in plain rounds
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

_ABOUT = 0.95
"""Part of the best speed that is as good: estimates are no better."""
_HIGHEST_FLOOR = 0.5
"""No estimate of costs may end every draft at once: what is never drafted is never measured again."""


@final
@dataclass(frozen=True)
class Outlook:
    """What each length promises a batch: tokens and seconds of a round (at pace 1), by length."""

    tokens: list[float]
    seconds: list[float]
    by_depth: list[float]
    """Seconds of a round that asked the drafter and got this many guesses."""
    per_guess: float
    """Seconds of one guess more."""

    def best(self, purse: float, *, ends_itself: bool) -> int:
        """The fastest length whose worst case, nothing accepted, the purse could pay for. Where the drafter ends what it
        doubts, the longest that is about as fast: what is not worth it will not be drafted."""
        payable = [length for length in range(len(self.tokens)) if length == 0 or self.risk(length) <= purse]
        best = max(payable, key=self.gain)
        if best and ends_itself:
            best = max(length for length in payable if self.gain(length) >= _ABOUT * self.gain(best))
        return best

    def gain(self, length: int) -> float:
        """Expected speed, plain decoding being 1."""
        return self.tokens[length] / self.seconds[length] * self.seconds[0] / self.tokens[0]

    def floor(self, length: int) -> float:
        """How likely a further guess must be to pay for its time: the rate at which tokens come anyway, times its seconds."""
        return min(self.per_guess * self.tokens[length] / self.tokens[0] / self.seconds[length], _HIGHEST_FLOOR)

    def risk(self, length: int, gain: float = 1.0) -> float:
        """Plain rounds lost, against decoding at ``gain`` times plain speed, if nothing is accepted."""
        return self.seconds[length] / self.seconds[0] - 1 / gain
