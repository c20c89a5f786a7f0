"""Requests on their way into a batch: prompts are read piece by piece, between the rounds of those already running.

A request arrives with a prompt, or comes back after it had to leave, with a prompt and part of its text: either way what is
known is a list of tokens, and the batch it enters is the one a prefill of all of them would have made. A stored beginning
(``cache/prefixes.py``) need not be read again.
"""

from __future__ import annotations

import time
from collections.abc import Container, Hashable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from outrider.core.interfaces import Cache
from outrider.core.request import RequestState
from outrider.core.sampling import Sampler
from outrider.engine.job import Slots
from outrider.engine.memory import BatchSize
from outrider.engine.pieces import Pieces
from outrider.engine.step import Batch, Engine

_IN_TURNS = 4
"""Long prompts that are read in turns; more of them wait."""


@final
class Arrival:
    """A few requests of one engine that are being read."""

    def __init__(
        self, engine: Engine, states: Sequence[RequestState], ids: Sequence[int], *, prefix: Cache | None = None
    ) -> None:
        """``prefix`` (for a single request) holds the first tokens of it already."""
        assert prefix is None or len(states) == 1, "a stored beginning belongs to one request"
        self.engine = engine
        self.states, self.ids = list[RequestState](), list[int]()
        self.longest = self._num_tokens = 0
        for row in zip(ids, states, strict=True):
            self.add(*row)
        self._cache = prefix
        self._taps: list[dict[int, list[Tensor]]] = []

    def add(self, number: int, state: RequestState) -> None:
        """Read one more request with them; nothing was read yet."""
        self.states.append(state)
        self.ids.append(number)
        self.longest = max(self.longest, len(state.tokens))
        """Tokens of the longest."""
        self._num_tokens += len(state.tokens) - 1

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was read yet, so that others may still join."""
        return self._cache is None

    @property
    def cache(self) -> Cache:
        """The cache, made when the first token is read."""
        if self._cache is None:
            self._cache = self.engine.target.new_cache(len(self.states))
        return self._cache

    @property
    def size(self) -> BatchSize:
        """Rows that are read together take what the longest takes until they are."""
        return BatchSize(len(self.states), self.longest, self.longest * len(self.states))

    @property
    def num_left(self) -> int:
        """Tokens still to read, of all rows."""
        num_read = 0 if self._cache is None else sum(self._cache.lengths)
        return self._num_tokens - num_read

    def advance(self, num_tokens: int) -> Batch | None:
        """Read at most ``num_tokens`` more of every row; the batch when all are read."""
        began = self.engine.clock()
        target, taps = self.engine.target, self.engine.method.drafter.taps
        pieces = [
            state.read_tokens[length : self._end(state, length, num_tokens)]
            for state, length in zip(self.states, self.cache.lengths, strict=True)
        ]
        if any(pieces):
            self._taps.append(dict(target.prefill(pieces, self.cache, taps=taps)))
        batch = None if self.num_left else self._batch()
        seconds = self.engine.clock() - began
        for state in self.states:
            state.stats.prefill_seconds += seconds
        return batch

    def _end(self, state: RequestState, num_read: int, num_tokens: int) -> int:
        """Where the next piece of a row ends. A prompt that has to be read whole is a piece, and the text behind it another."""
        prompt_end = len(state.request.prompt_ids) - 1
        if self.engine.target.traits.reads_whole and num_read < prompt_end:
            return prompt_end
        return min(len(state.tokens) - 1, num_read + num_tokens)

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


@final
class Arrivals:
    """Everybody who is being read. Requests of one lane that came together are read together, the others in turns: a short
    prompt waits for a piece of a long one, not for all of it."""

    def __init__(self, slots: Slots, *, isolates: bool) -> None:
        """Where it ``isolates``, a request that cannot be read ends alone."""
        self._num_tokens, self._isolates = slots.prefill_tokens, isolates
        self.pieces = Pieces(slots)
        self._queue: list[tuple[Hashable, Arrival]] = []
        self._failed: list[tuple[int, RequestState]] = []

    @property
    def ids(self) -> list[int]:
        return [number for _, arrival in self._queue for number in arrival.ids]

    @property
    def sizes(self) -> list[tuple[Hashable, BatchSize]]:
        """Sizes of the arriving batches, by lane."""
        return [(lane, arrival.size) for lane, arrival in self._queue]

    @property
    def room(self) -> int:
        """Tokens that may still be added. A prompt counts as a quarter of a piece at most, so a few long ones leave room."""
        return self._num_tokens - sum(min(arrival.num_left, self._num_tokens // _IN_TURNS) for _, arrival in self._queue)

    def add(self, lane: Hashable, engine: Engine, row: tuple[int, RequestState], prefix: Cache | None = None) -> None:
        """Read one more request, its number and its state. ``prefix`` holds the first tokens of it already."""
        number, state = row
        if prefix is None and self._queue and self._queue[-1][0] == lane:
            last = self._queue[-1][1]
            longest = max(last.longest, len(state.tokens))
            if last.is_untouched and longest <= self.pieces.size(is_alone=True):  # all of them are read at once
                last.add(number, state)
                return
        self._queue.append((lane, Arrival(engine, [state], [number], prefix=prefix)))

    def read(self, *, is_alone: bool) -> Iterator[tuple[Hashable, Batch]]:
        """Read as much as is allowed between two rounds; batches of those who are read, with their lanes. ``is_alone`` says
        that no request runs."""
        budget = self.pieces.size(is_alone=is_alone)
        while self._queue and budget > 0:
            lane, arrival = self._queue[0]
            before, began = arrival.num_left, time.perf_counter()
            try:
                batch = arrival.advance(budget)
            except Exception as error:
                if not self._isolates:
                    raise
                del self._queue[0]
                budget -= before
                self._part(lane, arrival, error)
                continue
            num_read = before - arrival.num_left
            self.pieces.was_read(num_read, time.perf_counter() - began)
            budget -= max(1, num_read)
            del self._queue[0]
            if batch is not None:
                yield lane, batch
            else:
                self._queue.append((lane, arrival))

    def take_failed(self) -> list[tuple[int, RequestState]]:
        """Requests that could not be read since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def keep(self, ids: Container[int]) -> None:
        """Forget all others. Those who were read together with one of them are read anew."""
        kept: list[tuple[Hashable, Arrival]] = []
        for lane, arrival in self._queue:
            rows = [row for row, number in enumerate(arrival.ids) if number in ids]
            if len(rows) == len(arrival.ids):
                kept.append((lane, arrival))
            elif rows:
                states, numbers = [arrival.states[row] for row in rows], [arrival.ids[row] for row in rows]
                kept.append((lane, Arrival(arrival.engine, states, numbers)))
        self._queue = kept

    def _part(self, lane: Hashable, arrival: Arrival, error: Exception) -> None:
        """Requests whose reading failed are read one by one; one that fails alone ends."""
        rows = list(zip(arrival.ids, arrival.states, strict=True))
        if len(rows) == 1:
            arrival.states[0].fail(error)
            self._failed += rows
            return
        self._queue[:0] = [(lane, Arrival(arrival.engine, [state], [number])) for number, state in rows]
