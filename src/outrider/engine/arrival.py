"""Requests on their way into a batch: prompts are read piece by piece, between the rounds of those already running.

A request arrives with a prompt, or comes back after it had to leave, with a prompt and part of its text: either way what is
known is a list of tokens, and the batch it enters is the one a prefill of all of them would have made. A stored beginning
(``cache/prefixes.py``) need not be read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from outrider.core.interfaces import Cache
from outrider.core.request import RequestState
from outrider.core.sampling import Sampler
from outrider.engine.memory import BatchSize
from outrider.engine.step import Batch, Engine


@final
class Arrival:
    """A few requests of one engine that are being read."""

    def __init__(
        self, engine: Engine, states: Sequence[RequestState], ids: Sequence[int], *, prefix: Cache | None = None
    ) -> None:
        """``prefix`` (for a single request) holds the first tokens of it already."""
        assert prefix is None or len(states) == 1, "a stored beginning belongs to one request"
        self.engine = engine
        self.states, self.ids = list(states), list(ids)
        self.cache = engine.target.new_cache(len(self.states)) if prefix is None else prefix
        self._taps: list[dict[int, list[Tensor]]] = []

    @property
    def size(self) -> BatchSize:
        """Rows that are read together take what the longest takes until they are."""
        longest = max(len(state.tokens) for state in self.states)
        return BatchSize(len(self.states), longest, longest * len(self.states))

    @property
    def num_left(self) -> int:
        """Tokens still to read, of all rows."""
        return sum(len(state.tokens) - 1 - length for state, length in zip(self.states, self.cache.lengths, strict=True))

    def advance(self, num_tokens: int) -> Batch | None:
        """Read at most ``num_tokens`` more of every row; the batch when all are read."""
        began = self.engine.clock()
        target, taps = self.engine.target, self.engine.method.drafter.taps
        pieces = [
            state.tokens[length : min(len(state.tokens) - 1, length + num_tokens)]
            for state, length in zip(self.states, self.cache.lengths, strict=True)
        ]
        if any(pieces):
            self._taps.append(dict(target.prefill(pieces, self.cache, taps=taps)))
        batch = None if self.num_left else self._batch()
        seconds = self.engine.clock() - began
        for state in self.states:
            state.stats.prefill_seconds += seconds
        return batch

    def _batch(self) -> Batch:
        method, target = self.engine.method, self.engine.target
        self.cache.truncate(self.cache.lengths)  # what the shorter rows held beside the longest
        drafter_state = method.drafter.start([state.tokens for state in self.states], self._all_taps())
        sampler = Sampler(self.states, target.vocab_size, target.device)
        return Batch(self.states, self.ids, self.cache, drafter_state, method.policy.start(len(self.states)), sampler)

    def _all_taps(self) -> dict[int, list[Tensor]]:
        if len(self._taps) == 1:
            return self._taps[0]
        if not self._taps:  # prompts of one token: nothing to read, and taps of nothing
            return dict(self.engine.target.prefill([[]] * len(self.states), self.cache, taps=self.engine.method.drafter.taps))
        rows = range(len(self.states))
        return {tap: [torch.cat([piece[tap][row] for piece in self._taps]) for row in rows] for tap in self._taps[0]}
