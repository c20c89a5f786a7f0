"""A lane whose rounds the host drives: one ``Engine.step`` at a time.

If a round fails, it is run again for each of its requests alone. This is possible because all state can be rebuilt from a
request's own tokens, which only grow by what was emitted. A request that fails alone ends with its error. The others go on in a
new batch, with the text that they would have had anyway. Prompt pieces of a failed round are read in passes of their own.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

from outrider.core.reading_target import PromptPiece
from outrider.core.report import RoundReport
from outrider.core.request import RequestState
from outrider.engine.finish import report_apart
from outrider.engine.grouping import Grouping
from outrider.engine.lane import Keep, Lane
from outrider.engine.prefill import Prefilled
from outrider.engine.step import Batch, Engine

_LOG = logging.getLogger("outrider.engine")


@final
@dataclass(eq=False)
class HostLane(Lane):
    """Requests of one method in one batch."""

    engine: Engine
    grouping: Grouping
    max_rows: int
    keep: Keep
    isolates: bool
    """A failing part ends only its own request; otherwise a failing round raises."""
    is_counted: bool
    """Memory has a budget, so nothing is reserved for requests that may come."""
    batch: Batch | None = None
    _waited: Counter[int] = field(default_factory=Counter)
    """Rounds since each request last took part in one."""

    @property
    def taps(self) -> tuple[int, ...]:
        return self.engine.method.drafter.taps

    @property
    def rows(self) -> list[tuple[int, RequestState]]:
        return list(zip(self.batch.ids, self.batch.rows, strict=True)) if self.batch else []

    def join(self, read: Prefilled) -> None:
        for row, number in enumerate(read.ids):
            self.keep(number, read.cache, row)
        self._add(self.engine.batch(read))

    def leave(self, number: int) -> None:
        self._stay([row for row, (other, _) in enumerate(self.rows) if other != number])

    def step(self, room: int, pieces: Sequence[PromptPiece] = ()) -> RoundReport | None:
        if self.batch is None:
            return None
        began = time.perf_counter()
        batch = self._group(self.batch)
        layout, known = time.perf_counter() - began, [row.num_output for row in batch.rows]
        try:
            report = replace(self.engine.step(batch, room, pieces), layout_seconds=layout)
        except Exception as error:
            if not self.isolates:
                raise
            _LOG.warning("a round failed; its requests are run apart", exc_info=error)
            self._step_apart(batch, room)
            report = report_apart(batch.ids, batch.rows, known, seconds=time.perf_counter() - began)
        else:
            for row, state in enumerate(batch.rows):
                if state.is_finished:
                    self.keep(batch.ids[row], batch.cache, row)
            if batch is not self.batch:
                self._add(batch)
        self._stay([row for row, (_, state) in enumerate(self.rows) if not state.is_finished])
        return report

    def _step_apart(self, broken: Batch, room: int) -> None:
        """A round of every request by itself."""
        if broken is self.batch:
            self.batch = None
        for number, state in zip(broken.ids, broken.rows, strict=True):
            if not state.is_finished:
                try:
                    alone = self.engine.restart([(number, state)])
                    self.engine.step(alone, room)
                    self._add(alone)
                except Exception as error:
                    state.fail(error)

    def _group(self, batch: Batch) -> Batch:
        """The rows of the next round in the layout of the grouping. Rows that wait stay in ``batch``."""
        grouping, waited = self.grouping, [self._waited[number] for number in batch.ids]
        rows = grouping.choose(batch.cache.lengths, waited, self.max_rows)
        if len(rows) == len(batch.rows):
            self.batch = grouping.laid_out(batch)
            return self.batch
        group, others = grouping.laid_out(batch.fork(rows)), sorted(set(range(len(batch.rows))) - set(rows))
        self._waited = Counter({batch.ids[row]: waited[row] + 1 for row in others})
        self._stay(others)
        return group

    def _add(self, batch: Batch) -> None:
        self.batch = batch if self.batch is None else self.batch.join(batch)

    def _stay(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        batch = self.batch
        if batch is not None and len(rows) < len(batch.rows):
            kept = batch.fork if self.is_counted else batch.narrow
            self.batch = kept(rows if self.is_counted else _without_holes(rows)) if rows else None


def _without_holes(rows: Sequence[int]) -> list[int]:
    """The rows that stay, in an order that moves as few as possible: the last ones take the places of those that left."""
    staying = set(rows)
    last = [row for row in rows if row >= len(rows)]
    return [place if place in staying else last.pop() for place in range(len(rows))]
