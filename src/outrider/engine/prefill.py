"""Prefill: the tokens of new requests are read, at once or piece by piece.

A new request has a prompt. One that had to leave and comes back has a prompt and part of its text. Either way its tokens are
read, all but the last, which is the root of the first tree. A stored prefix (``cache/prefixes.py``) need not be read again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.core.interfaces import Cache, Target
from outrider.core.reading_target import PromptPiece
from outrider.core.request import RequestState
from outrider.engine.memory import BatchSize


@dataclass(frozen=True, eq=False)
class Prefilled:
    """Requests that were read."""

    ids: list[int]
    states: list[RequestState]
    cache: Cache
    taps: Mapping[int, list[Tensor]]
    """The target's tapped states [n, H] of each row's tokens but the last, by layer."""


@final
class Prefill:
    """A few requests that are being read together."""

    def __init__(
        self,
        target: Target,
        taps: Sequence[int],
        rows: Sequence[tuple[int, RequestState]],
        prefix: Cache | None = None,
        *,
        is_apart: bool = False,
    ) -> None:
        """``rows`` are numbers and states. ``prefix`` (for a single request) holds the first tokens of it already. Pieces that
        are read ``is_apart`` share no passes, since one with them has failed."""
        assert prefix is None or len(rows) == 1, "a stored beginning belongs to one request"
        self._target, self._taps, self._cache = target, tuple(taps), prefix
        self.is_apart = is_apart
        self._tapped: list[Mapping[int, list[Tensor]]] = []
        self.rows: list[tuple[int, RequestState]] = []
        self._longest = self._num_tokens = 0
        for row in rows:
            self.add(row)

    def add(self, row: tuple[int, RequestState]) -> None:
        """Add a request to those that are read together, before any of them was read."""
        self.rows.append(row)
        self._longest = max(self._longest, len(row[1].tokens))
        self._num_tokens += len(row[1].tokens) - 1

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was read yet, so that other requests may still be added."""
        return self._cache is None

    @property
    def size(self) -> BatchSize:
        """Number of rows and their length. Rows that are read together take as much memory as the longest."""
        return BatchSize(len(self.rows), self._longest, self._longest * len(self.rows))

    @property
    def num_left(self) -> int:
        """Tokens still to read, of all rows."""
        return self._num_tokens - (0 if self._cache is None else sum(self._cache.lengths))

    def whole(self) -> Prefilled:
        """Read everything that is left."""
        while (read := self.advance(sys.maxsize)) is None:
            pass
        return read

    def advance(self, num_tokens: int) -> Prefilled | None:
        """Read at most ``num_tokens`` more of every row in a pass of their own. Returns the result when all was read."""
        wait_for(self._target.device)
        began, piece = time.perf_counter(), self.piece(num_tokens)
        if any(piece.rows) or not (self._tapped or self.num_left):  # prompts of one token have taps of nothing
            piece.states = self._target.prefill(piece.rows, piece.cache, taps=piece.taps)
        wait_for(self._target.device)
        return self.took(piece, time.perf_counter() - began)

    def piece(self, num_tokens: int) -> PromptPiece:
        """The next tokens, at most ``num_tokens`` of every row."""
        states = [state for _, state in self.rows]
        cache = self._cache = self._target.new_cache(len(states)) if self._cache is None else self._cache
        rows = [
            state.read_tokens[length : self._end(state, length, num_tokens)]
            for state, length in zip(states, cache.lengths, strict=True)
        ]
        return PromptPiece(rows, cache, self._taps)

    def took(self, piece: PromptPiece, seconds: float) -> Prefilled | None:
        """Record that a piece was read, in so many seconds. Returns the result if it was the last."""
        self._tapped += [] if piece.states is None else [piece.states]
        states = [state for _, state in self.rows]
        for state in states:
            state.stats.prefill_seconds += seconds
        if self.num_left:
            return None
        piece.cache.truncate(piece.cache.lengths)  # what the shorter rows held beside the longest
        return Prefilled([number for number, _ in self.rows], states, piece.cache, self._all_taps())

    def _end(self, state: RequestState, num_read: int, num_tokens: int) -> int:
        """End of the next piece of a row. A prompt that must be read whole is one piece, and the text after it another."""
        prompt_end = len(state.request.prompt_ids) - 1
        if self._target.traits.reads_whole and num_read < prompt_end:
            return prompt_end
        return min(len(state.tokens) - 1, num_read + num_tokens)

    def _all_taps(self) -> Mapping[int, list[Tensor]]:
        if len(self._tapped) == 1:
            return self._tapped[0]
        rows = range(len(self.rows))
        return {tap: [torch.cat([piece[tap][row] for piece in self._tapped]) for row in rows] for tap in self._tapped[0]}


def wait_for(device: torch.device) -> None:
    """Wait for the device, so that parts of the work can be timed separately."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
