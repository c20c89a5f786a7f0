"""How much of the prompts is read between two rounds, so that a long prompt does not stop those who run.

    seconds(piece) <= rounds * seconds(round)          where somebody runs: they become at most 1 + rounds times slower
    seconds(piece) <= 0.05 s                           where nobody runs: who comes next waits no longer than that

What a prompt token and a round cost is measured while serving. On a fast device a piece is as long as it may be.
"""

from __future__ import annotations

import math
from typing import final

from outrider.engine.job import Slots

_ALONE_S = 0.05
_FIRST = 64
"""Tokens of a piece before any was measured."""
_FEWEST = 2
_NEWEST = 0.3
"""Share of the latest measurement in a running mean."""


@final
class Pieces:
    """Sizes of pieces, from what pieces and rounds took."""

    def __init__(self, slots: Slots) -> None:
        self._most, self._rounds = slots.prefill_tokens, slots.reading_rounds
        self._token_s = self._round_s = 0.0

    def size(self, *, is_alone: bool) -> int:
        """Most tokens of the next piece; ``is_alone`` says that no request runs."""
        if math.isinf(self._rounds):
            return self._most
        if not self._token_s:
            return min(self._most, _FIRST)
        seconds = self._rounds * self._round_s
        allowed = int((max(seconds, _ALONE_S) if is_alone else seconds) / self._token_s)
        return min(self._most, max(_FEWEST, allowed))

    def was_read(self, num_tokens: int, seconds: float) -> None:
        """A piece was read."""
        if num_tokens > 0:
            self._token_s = _mean(self._token_s, seconds / num_tokens)

    def was_run(self, seconds: float) -> None:
        """The lanes were run for so long; not at all where nobody runs."""
        if seconds > 0:
            self._round_s = _mean(self._round_s, seconds)


def _mean(known: float, newest: float) -> float:
    return known + _NEWEST * (newest - known) if known else newest
