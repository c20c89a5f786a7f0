"""How much of the prompts is read in a round, so that a long prompt does not stop those who run or come next.

    seconds(n tokens) = pass + n * token                         a line through the latest pieces
    n = (rounds * seconds(round) - pass) / token                 a request becomes at most 1 + rounds times slower
    n >= pass / (2 * token)                                      where a pass alone takes as long as a round

Pieces that have passes of their own and pieces that share the pass of a round are measured apart. What a shared one takes is
what its round took above the mean round without pieces.

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
_LEAST = 0.02
"""Share of a round that its pieces take at least."""
_FLATTEST = 0.25
"""Smallest share of a piece's time that is taken to be for its tokens: what was not measured is approached in steps."""


@final
class PieceSizes:
    """Sizes of pieces, from what pieces and rounds took."""

    def __init__(self, slots: Slots) -> None:
        self._most, self._rounds = slots.prefill_tokens, slots.reading_rounds
        self._round_s, self._apart, self._beside, self._is_alone = 0.0, _Line(), _Line(), True

    @property
    def size(self) -> int:
        """Most tokens of the next piece."""
        return self._sized(self._rounds, self._apart)

    @property
    def size_alone(self) -> int:
        """Most tokens of the next piece of the only prompt there is; more where nobody runs."""
        return self._sized(self._rounds * (_ALONE if self._is_alone else 1), self._apart)

    @property
    def size_beside(self) -> int:
        """Most tokens of the next pieces that share the pass of a round."""
        return self._sized(self._rounds, self._beside)

    def share_of(self, num_tokens: int, num_nodes: int) -> float:
        """The part of a round's time that goes to its pieces of so many tokens, beside so many nodes of trees."""
        if not num_tokens or not self._beside.seconds:
            return num_tokens / (num_tokens + num_nodes)
        reading_s = self._beside.at(num_tokens)
        return reading_s / (reading_s + self._round_s)

    def _sized(self, rounds: float, line: _Line) -> int:
        """Tokens that are read in the time of so many rounds."""
        if math.isinf(rounds):
            return self._most
        if not line.seconds or not self._round_s:
            return min(self._most, _FIRST)
        pass_s, token_s = line.fitted()
        allowed = max(rounds * self._round_s - pass_s, pass_s / 2) / token_s
        return min(self._most, max(_FEWEST, int(allowed)))

    def of_a_drafter(self, num_rows: int) -> int | None:
        """Most tokens of a text that the drafter of some rows reads in a round; None for all of it. A drafter is faster than
        its target, so that it reads more."""
        if math.isinf(self._rounds):
            return None
        return max(self.size, self.size_beside, _FIRST * (_ALONE if num_rows == 1 else 1))

    def per_row(self, num_tokens: int, num_rows: int) -> int:
        """Most tokens of each of some rows that are read together, where all of them may read ``num_tokens``. Without a limit
        on time every row may."""
        return num_tokens if math.isinf(self._rounds) else max(1, num_tokens // num_rows)

    def was_read(self, num_tokens: int, seconds: float) -> None:
        """A piece was read."""
        if num_tokens > 0:
            self._apart.add(num_tokens, seconds)

    def was_run(self, seconds: float, num_read: int = 0) -> None:
        """The lanes were run for so long, and read so many tokens beside; not at all where nobody runs."""
        self._is_alone = seconds <= 0
        if num_read and self._round_s:
            self._beside.add(num_read, max(seconds - self._round_s, _LEAST * seconds))
        elif not self._is_alone and not num_read:
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

    def at(self, num_tokens: int) -> float:
        """Seconds of a piece."""
        pass_s, token_s = self.fitted()
        return pass_s + token_s * num_tokens

    def fitted(self) -> tuple[float, float]:
        """Seconds of a pass, and of each token in it."""
        variance, together = self._squares - self._tokens**2, self._products - self._tokens * self.seconds
        ratio = self.seconds / self._tokens
        token = together / variance if variance > 0 else ratio
        token = min(ratio, max(_FLATTEST * ratio, token))
        return self.seconds - token * self._tokens, token


def _mean(known: float, newest: float) -> float:
    return known + _NEWEST * (newest - known) if known else newest
