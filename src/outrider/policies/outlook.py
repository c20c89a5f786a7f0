"""What each draft length promises a batch, and which one to take.

speed(K) = tokens(K) / seconds(K);      risk(K) = seconds(K) / seconds(0) - 1       in plain rounds
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from outrider.core.interfaces import Doubt
from outrider.core.reason import Reason, ReasonCode

_ABOUT = 0.95
"""Part of the best speed that is as good: estimates are no better."""
_MARGIN = 0.05
"""Part of what a length risks that it must promise to gain: estimates are no better, and drafting takes more thinking."""
_HIGHEST_PRICE = 0.5
"""Tokens a guess may cost: no estimate of costs may end every draft at once: what is never drafted is never measured again."""


@final
@dataclass(frozen=True)
class Outlook:
    """What each length promises a batch: tokens and seconds of a round (at pace 1), by length."""

    tokens: list[float]
    seconds: list[float]
    drafting: list[float]
    """The drafter's part of a round that asked it, by the guesses of the longest draft, ..."""
    rests: list[float]
    """... and the other part, by the width of the pass."""
    per_guess: float
    """Seconds of drafting one guess more for every row, ..."""
    per_place: float
    """... and of a pass that has a place for it."""

    def best(self, purse: float, *, ends_itself: bool) -> int:
        """The fastest length whose worst case, nothing accepted, the purse could pay for. Where the drafter ends what it
        doubts, the longest that is about as fast: what is not worth it will not be drafted."""
        payable = [length for length in range(len(self.tokens)) if length == 0 or self.risk(length) <= purse]
        best = max(payable, key=self.gain)
        if best and self.gain(best) - 1 < _MARGIN * self.risk(best):
            return 0
        if best and ends_itself:
            best = max(length for length in payable if self.gain(length) >= _ABOUT * self.gain(best))
        return best

    def reason(self, length: int, budget: float, is_paused: bool) -> Reason:
        """Why ``length`` was chosen, with what it promises; without a draft, what the most promising one would."""
        promising = length or max(range(1, len(self.tokens)), key=self.gain, default=0)
        numbers = {
            "length": promising,
            "gain": self.gain(promising),
            "tokens": self.tokens[promising] / self.tokens[0],
            "cost": self.seconds[promising] / self.seconds[0],
            "budget": budget,
        }
        none = ReasonCode.BUDGET if is_paused else ReasonCode.PLAIN_IS_FASTER
        return Reason(ReasonCode.FASTEST if length else none, numbers)

    @property
    def forgone(self) -> float:
        """Tokens that a plain round forgoes, for every one it brings."""
        return max(map(self.gain, range(len(self.tokens)))) - 1

    def gain(self, length: int) -> float:
        """Expected speed, plain decoding being 1."""
        return self.tokens[length] / self.seconds[length] * self.seconds[0] / self.tokens[0]

    def doubt(self, length: int, trust: tuple[float, ...], *, further: float, padded: bool) -> Doubt:
        """What guesses must be likely to bring: what comes in their time anyway. Where rows are padded a place is saved for
        all or for none of them. A guess that is yet to be drafted will be right with chance ``further`` if those before it
        are, so their hope must be so much higher."""
        rate, num_rows = self.tokens[length] / self.seconds[length], len(trust)
        place = 0.0 if padded else min(rate * self.per_place / num_rows, _HIGHEST_PRICE)
        level = rate * (self.per_guess + (self.per_place if padded else 0.0))
        most = num_rows * (_HIGHEST_PRICE - place)
        return Doubt(min(level / further, most) if further > 0 else most, place, trust)

    def usual(self, length: int, width: int) -> float:
        """Seconds of a round that asked the drafter."""
        return self.drafting[min(length, len(self.drafting) - 1)] + self.rests[min(width, len(self.rests) - 1)]

    def risk(self, length: int) -> float:
        """Plain rounds lost if nothing is accepted."""
        return self.seconds[length] / self.seconds[0] - 1

    def price(self, length: int, best: int) -> float:
        """Plain rounds that trying a length costs, against the best: what is expected if it is shorter, the worst if not."""
        tokens = self.tokens[length] / self.tokens[0] if length < best else 1.0
        return self.seconds[length] / self.seconds[0] - tokens / self.gain(best)
