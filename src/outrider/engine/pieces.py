"""How many prompt tokens are read in a round, so that a long prompt stops neither running requests nor later arrivals.

    seconds(n tokens) = pass + n * token                         a line through the latest pieces
    n = (rounds * seconds(round) - pass) / token                 a request becomes at most 1 + rounds times slower
    n >= pass / (2 * token)                                      where a pass alone takes as long as a round

Pieces that have passes of their own and pieces that share the pass of a round are measured apart. The time of a shared piece is
that of its round beyond the mean round without pieces.

If no request runs, a new arrival waits for a piece only once, so a piece of the only prompt may take four times as long. Where
a pass mostly waits for weights, small pieces would waste time, and the last line makes pieces longer. On a fast device a piece
is as long as is allowed.
"""

from __future__ import annotations

import math
from typing import final

from outrider.engine.job import Slots

_FIRST = 64
"""Tokens of a piece before any was measured."""
_FEWEST = 2
_ALONE = 4
"""Factor on the time of a piece if no request runs."""
_NEWEST = 0.3
"""Weight of the latest measurement in a running mean."""
_LEAST = 0.02
"""Least share of a round's time that its pieces take."""
_FLATTEST = 0.25
"""Least share of a piece's time that is attributed to its tokens. It makes sizes grow in steps towards what was never
measured."""


@final
class PieceSizes:
    """Sizes of prompt pieces, learnt from the times of pieces and rounds."""

    def __init__(self, slots: Slots) -> None:
        self._most, self._rounds = slots.prefill_tokens, slots.reading_rounds
        self._round_s, self._apart, self._beside, self._is_alone = 0.0, _Line(), _Line(), True

    @property
    def size(self) -> int:
        """Most tokens of the next piece."""
        return self._sized(self._rounds, self._apart)

    @property
    def size_alone(self) -> int:
        """Most tokens of the next piece of the only prompt; larger if no request runs."""
        return self._sized(self._rounds * (_ALONE if self._is_alone else 1), self._apart)

    @property
    def size_beside(self) -> int:
        """Most tokens of the next pieces that share the pass of a round."""
        return self._sized(self._rounds, self._beside)

    def share_of(self, num_tokens: int, num_nodes: int) -> float:
        """The share of a round's time that goes to its pieces of so many tokens, beside so many nodes of trees."""
        if not num_tokens or not self._beside.seconds:
            return num_tokens / (num_tokens + num_nodes)
        reading_s = self._beside.at(num_tokens)
        return reading_s / (reading_s + self._round_s)

    def _sized(self, rounds: float, line: _Line) -> int:
        """Number of tokens that can be read in the time of so many rounds."""
        if math.isinf(rounds):
            return self._most
        if not line.seconds or not self._round_s:
            return min(self._most, _FIRST)
        pass_s, token_s = line.fitted()
        allowed = max(rounds * self._round_s - pass_s, pass_s / 2) / token_s
        return min(self._most, max(_FEWEST, int(allowed)))

    def of_a_drafter(self, num_rows: int) -> int | None:
        """Most tokens per round that the drafter of some rows reads of a text; None for all of it. A drafter is faster than its
        target, so it may read more."""
        if math.isinf(self._rounds):
            return None
        return max(self.size, self.size_beside, _FIRST * (_ALONE if num_rows == 1 else 1))

    def per_row(self, num_tokens: int, num_rows: int) -> int:
        """Most tokens of each of several rows that are read together and may read ``num_tokens`` in all. Without a time limit,
        every row may read as many."""
        return num_tokens if math.isinf(self._rounds) else max(1, num_tokens // num_rows)

    def was_read(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a piece."""
        if num_tokens > 0:
            self._apart.add(num_tokens, seconds)

    def was_run(self, seconds: float, num_read: int = 0) -> None:
        """Record the time of a round of the lanes, which read so many prompt tokens too; 0 seconds if no request runs."""
        self._is_alone = seconds <= 0
        if num_read and self._round_s:
            self._beside.add(num_read, max(seconds - self._round_s, _LEAST * seconds))
        elif not self._is_alone and not num_read:
            self._round_s = _mean(self._round_s, seconds)


@final
class _Line:
    """Seconds of a piece as a line over its tokens: least squares, with more weight on recent pieces."""

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
        """Seconds of a pass, and seconds per token in it."""
        variance, together = self._squares - self._tokens**2, self._products - self._tokens * self.seconds
        ratio = self.seconds / self._tokens
        token = together / variance if variance > 0 else ratio
        token = min(ratio, max(_FLATTEST * ratio, token))
        return self.seconds - token * self._tokens, token


def _mean(known: float, newest: float) -> float:
    return known + _NEWEST * (newest - known) if known else newest
