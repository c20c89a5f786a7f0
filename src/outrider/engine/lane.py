"""A lane: the running requests of one method, and which of them share the next round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from outrider.engine.grouping import Grouping
from outrider.engine.isolation import join_all
from outrider.engine.memory import BatchSize
from outrider.engine.step import Batch, Engine


@final
@dataclass(eq=False)
class Lane:
    """Requests that run with one method."""

    engine: Engine
    is_counted: bool
    """Memory has a budget, so none is kept for requests that may come."""
    batch: Batch | None = None
    order: list[int] = field(default_factory=list)
    """Numbers of the requests, by row."""
    waited: Counter[int] = field(default_factory=Counter)
    """Rounds since each request last took part in one."""

    @property
    def size(self) -> BatchSize:
        rows = self.batch.rows if self.batch else []
        lengths = [len(row.tokens) for row in rows]
        return BatchSize(len(lengths), max(lengths, default=0), sum(lengths))

    def join(self, fresh: Batch | None) -> None:
        """Add requests. Those that cannot be joined fail."""
        self._set(join_all([batch for batch in (self.batch, fresh) if batch is not None]))

    def group(self, grouping: Grouping, max_rows: int) -> Batch:
        """Take out the rows of the next round as it wants them; ``put_back`` returns them."""
        assert self.batch is not None, "somebody runs"
        batch = self.batch
        waited = [self.waited[number] for number in batch.ids]
        rows = grouping.choose(batch.cache.lengths, waited, max_rows=max_rows)
        if len(rows) == len(batch.rows):
            self.batch = grouping.laid_out(batch)
            return self.batch
        group, chosen = grouping.laid_out(batch.fork(rows)), set(rows)
        others = [row for row in range(len(batch.rows)) if row not in chosen]
        self.waited = Counter({batch.ids[row]: waited[row] + 1 for row in others})
        self._keep(others)
        return group

    def put_back(self, group: Batch) -> None:
        """The rows of a round that was played; those that have finished leave."""
        if group is not self.batch:
            self._set(group if self.batch is None else self.batch.join(group))
        self.leave_finished()

    def replace(self, broken: Batch, whole: Batch | None) -> None:
        """Put ``whole``, those who did not fail, in the place of a batch whose round raised."""
        if broken is self.batch:
            self.batch = None
        self.join(whole)
        self.leave_finished()

    def leave(self, number: int) -> None:
        """A request is given up."""
        self._keep([row for row, other in enumerate(self.order) if other != number])

    def leave_finished(self) -> None:
        rows = self.batch.rows if self.batch else []
        self._keep([row for row, state in enumerate(rows) if not state.is_finished])

    def _set(self, batch: Batch | None) -> None:
        self.batch, self.order = batch, list(batch.ids) if batch else []

    def _keep(self, rows: Sequence[int]) -> None:
        batch = self.batch
        if batch is None or len(rows) == len(batch.rows):
            return
        if not rows:
            self._set(None)
        else:
            self._set(batch.fork(rows) if self.is_counted else batch.narrow(_without_holes(rows)))


def _without_holes(rows: Sequence[int]) -> list[int]:
    """Rows that stay, in an order that moves as few as can be: the last ones fill the places of those that left."""
    staying = set(rows)
    last = [row for row in rows if row >= len(rows)]
    return [place if place in staying else last.pop() for place in range(len(rows))]
