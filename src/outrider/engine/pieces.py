"""How much of the prompts is read between two rounds, so that a long prompt does not stop those who run or come next.

    seconds(n tokens) = pass + n * token                         a line through the latest pieces
    n = (rounds * seconds(round) - pass) / token                 a request becomes at most 1 + rounds times slower
    n >= pass / (2 * token)                                      where a pass alone takes as long as a round

Where nobody runs, who comes next waits for a piece once and not in every round, so a piece of the only prompt there is may
take four times as long. A few tokens at a time are read as fast as many, unless the weights are what a pass waits for, and then
the last line lets a piece be longer. On a fast device a piece is as long as it may be.
"""

from __future__ import annotations

import math
from typing import final

from outrider.engine.job import Slots

_FIRST = 64
"""Tokens of a piece before any was measured."""
_FEWEST = 2
_ALONE = 4
"""How many times as long a piece may take where nobody runs."""
_NEWEST = 0.3
"""Share of the latest measurement in a running mean."""
_FLATTEST = 0.25
"""Smallest share of a piece's time that is taken to be for its tokens: what was not measured is approached in steps."""


@final
class PieceSizes:
    """Sizes of pieces, from what pieces and rounds took."""

    def __init__(self, slots: Slots) -> None:
        self._most, self._rounds = slots.prefill_tokens, slots.reading_rounds
        self._round_s, self._line, self._is_alone = 0.0, _Line(), True

    @property
    def size(self) -> int:
        """Most tokens of the next piece."""
        return self._sized(self._rounds)

    @property
    def size_alone(self) -> int:
        """Most tokens of the next piece of the only prompt there is; more where nobody runs."""
        return self._sized(self._rounds * (_ALONE if self._is_alone else 1))

    def _sized(self, rounds: float) -> int:
        """Tokens that are read in the time of so many rounds."""
        if math.isinf(rounds):
            return self._most
        if not self._line.seconds or not self._round_s:
            return min(self._most, _FIRST)
        pass_s, token_s = self._line.fitted()
        allowed = max(rounds * self._round_s - pass_s, pass_s / 2) / token_s
        return min(self._most, max(_FEWEST, int(allowed)))

    def of_a_drafter(self, num_rows: int) -> int | None:
        """Most tokens of a text that the drafter of some rows reads in a round; None for all of it. A drafter is faster than
        its target, so that it reads more."""
        if math.isinf(self._rounds):
            return None
        return max(self.size, _FIRST * (_ALONE if num_rows == 1 else 1))

    def per_row(self, num_tokens: int, num_rows: int) -> int:
        """Most tokens of each of some rows that are read together, where all of them may read ``num_tokens``. Without a limit
        on time every row may."""
        return num_tokens if math.isinf(self._rounds) else max(1, num_tokens // num_rows)

    def was_read(self, num_tokens: int, seconds: float) -> None:
        """A piece was read."""
        if num_tokens > 0:
            self._line.add(num_tokens, seconds)

    def was_run(self, seconds: float) -> None:
        """The lanes were run for so long; not at all where nobody runs."""
        self._is_alone = seconds <= 0
        if not self._is_alone:
            self._round_s = _mean(self._round_s, seconds)


@final
class _Line:
    """Seconds of a piece by its tokens: least squares, the latest pieces weigh most."""

    def __init__(self) -> None:
        self.seconds = self._tokens = self._squares = self._products = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self._squares = _mean(self._squares, num_tokens**2)
        self._products = _mean(self._products, num_tokens * seconds)
        self._tokens, self.seconds = _mean(self._tokens, num_tokens), _mean(self.seconds, seconds)

    def fitted(self) -> tuple[float, float]:
        """Seconds of a pass, and of each token in it."""
        variance, together = self._squares - self._tokens**2, self._products - self._tokens * self.seconds
        ratio = self.seconds / self._tokens
        token = together / variance if variance > 0 else ratio
        token = min(ratio, max(_FLATTEST * ratio, token))
        return self.seconds - token * self._tokens, token


def _mean(known: float, newest: float) -> float:
    return known + _NEWEST * (newest - known) if known else newest
