"""Requests on their way into a lane: their prompts are read in pieces, beside running requests.

Where the target can, pieces share the pass of a round. Elsewhere, and if no request runs, they have passes of their own between
two rounds.
"""

from __future__ import annotations

import time
from collections.abc import Container
from typing import final

from outrider.core.interfaces import Cache, Target
from outrider.core.reading_target import PromptPiece, ReadingTarget
from outrider.core.request import RequestState
from outrider.engine.job import Slots
from outrider.engine.lane import Lane, Rank
from outrider.engine.memory import BatchSize
from outrider.engine.pieces import PieceSizes
from outrider.engine.prefill import Prefill

_IN_TURNS = 4
"""Number of long prompts that are read in turns. Further ones wait."""


@final
class Arrivals:
    """Requests whose prompts are being read. Requests of one lane that arrived together are read together, the others in turns.
    So a short prompt waits for one piece of a long prompt, not for all of it."""

    def __init__(self, target: Target, slots: Slots, rank: Rank, *, isolates: bool) -> None:
        """With ``isolates``, a request that cannot be read ends alone, and the others go on."""
        self._target, self._num_tokens, self._rank, self._isolates = target, slots.prefill_tokens, rank, isolates
        self.pieces = PieceSizes(slots)
        self._most = target.most_read if isinstance(target, ReadingTarget) else 0
        """Tokens of a row that may share a pass."""
        self._queue: list[tuple[Lane, Prefill]] = []
        self._riding: list[tuple[Lane, Prefill, PromptPiece]] = []

    @property
    def lanes(self) -> dict[int, Lane]:
        """The lane of each arriving request."""
        return {number: lane for lane, prefill in self._queue for number, _ in prefill.rows}

    @property
    def sizes(self) -> list[tuple[Lane, BatchSize]]:
        """Sizes of the arriving batches."""
        return [(lane, prefill.size) for lane, prefill in self._queue]

    def room_for(self, priority: int) -> int:
        """Prompt tokens that may still be admitted. A prompt counts as a quarter of a piece at most, so that a few long ones
        leave room for others. Less important prompts do not count, because they are read later."""
        before = (prefill.num_left for _, prefill in self._queue if self._priority(prefill) <= priority)
        return self._num_tokens - sum(min(num_left, self._num_tokens // _IN_TURNS) for num_left in before)

    def _priority(self, prefill: Prefill) -> int:
        return min(self._rank(number)[0] for number, _ in prefill.rows)

    def _sort(self) -> None:
        """The more important prompts come first. Those of one importance keep their turns."""
        self._queue.sort(key=lambda entry: self._priority(entry[1]))

    def add(self, lane: Lane, row: tuple[int, RequestState], prefix: Cache | None = None) -> None:
        """Start to read a request, given its number and state. ``prefix`` already holds its first tokens."""
        if prefix is None and self._queue and self._queue[-1][0] is lane:
            last = self._queue[-1][1]
            longest = max(last.size.longest, len(row[1].tokens))
            each = self.pieces.per_row(self.pieces.size, len(last.rows) + 1)
            if last.is_untouched and longest <= each:  # all of them are read at once
                last.add(row)
                return
        self._queue.append((lane, Prefill(self._target, lane.taps, [row], prefix)))

    def read(self, *, is_carried: bool) -> list[tuple[int, RequestState]]:
        """Read as much as is allowed between two rounds. If rounds carry pieces (``is_carried``), read only prompts that they
        cannot carry. Requests that are complete join their lanes. Requests that cannot be read are returned."""
        self._sort()
        riders = [entry for entry in self._queue if is_carried and self._rides(entry[1])]
        self._queue = [entry for entry in self._queue if entry not in riders]
        failed = self._read_apart()
        self._queue = riders + self._queue
        return failed

    def _rides(self, prefill: Prefill) -> bool:
        return self._most > 0 and prefill.num_left > 0 and not prefill.is_apart

    def ride(self) -> list[PromptPiece]:
        """The next pieces, for the pass of a round. ``rode`` is called when the round was run."""
        self._sort()
        budget, waiting = self.pieces.size_beside, self._queue
        self._queue, self._riding = [], []
        for lane, prefill in waiting:
            if budget <= 0 or not self._rides(prefill):
                self._queue.append((lane, prefill))
                continue
            piece = prefill.piece(min(self.pieces.per_row(budget, len(prefill.rows)), self._most))
            self._riding.append((lane, prefill, piece))
            budget -= piece.num_tokens
        return [piece for _, _, piece in self._riding]

    def rode(self, seconds: float) -> list[tuple[int, RequestState]]:
        """Record that the round was run, in so many seconds. Requests that are complete join their lanes. Requests that cannot
        join are returned."""
        riding, self._riding = self._riding, []
        num_read = sum(piece.num_tokens for _, _, piece in riding if piece.states is not None)
        self.pieces.was_run(seconds, num_read)
        failed = list[tuple[int, RequestState]]()
        for lane, prefill, piece in riding:
            if piece.states is None:
                self._queue.append((lane, Prefill(self._target, lane.taps, prefill.rows, is_apart=True)))
                continue
            try:
                read = prefill.took(piece, piece.seconds)
                if read is not None:
                    lane.join(read)
                else:
                    self._queue.append((lane, prefill))
            except Exception as error:
                failed += self._part(lane, prefill, error)
        return failed

    def _read_apart(self) -> list[tuple[int, RequestState]]:
        budget = self.pieces.size_alone if len(self._queue) == 1 else self.pieces.size
        failed = list[tuple[int, RequestState]]()
        while self._queue and budget > 0:
            lane, prefill = self._queue.pop(0)
            before, began = prefill.num_left, time.perf_counter()
            try:
                read = prefill.advance(self.pieces.per_row(budget, len(prefill.rows)))
                if read is not None:
                    lane.join(read)
            except Exception as error:
                failed += self._part(lane, prefill, error)
                budget -= before
                continue
            num_read = before - prefill.num_left
            self.pieces.was_read(num_read, time.perf_counter() - began)
            budget -= max(1, num_read)
            if read is None:
                self._queue.append((lane, prefill))
        return failed

    def keep(self, ids: Container[int]) -> None:
        """Drop all other requests. If requests were being read together and one of them is dropped, the others start again."""
        kept: list[tuple[Lane, Prefill]] = []
        for lane, prefill in self._queue:
            rows = [row for row in prefill.rows if row[0] in ids]
            if rows:
                same = len(rows) == len(prefill.rows)
                kept.append((lane, prefill if same else Prefill(self._target, lane.taps, rows)))
        self._queue = kept

    def _part(self, lane: Lane, prefill: Prefill, error: Exception) -> list[tuple[int, RequestState]]:
        """Read each request of a failed group alone. Those that fail alone end, and are returned."""
        if not self._isolates:
            raise error
        if len(prefill.rows) == 1:
            prefill.rows[0][1].fail(error)
            return prefill.rows
        self._queue[:0] = [(lane, Prefill(self._target, lane.taps, [row])) for row in prefill.rows]
        return []
