"""The loop: requests wait, join the batch, take rounds together, and leave when they finish."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.core.request import Request, RequestState
from outrider.engine.step import Batch, Engine


@dataclass(frozen=True, eq=False)
class Progress:
    """What one round did to one request."""

    request: int
    """Index among the submitted requests."""
    state: RequestState
    new_tokens: list[int]


def run(engine: Engine, requests: Sequence[Request], *, max_batch_size: int) -> Iterator[Progress]:
    """Serve all requests, at most ``max_batch_size`` at a time, yielding every row's progress after every round."""
    waiting = deque(enumerate(requests))
    batch: Batch | None = None
    while batch is not None or waiting:
        batch = _admit(engine, batch, waiting, max_batch_size)
        emitted = engine.step(batch)
        for request, state, tokens in zip(batch.ids, batch.rows, emitted, strict=True):
            yield Progress(request, state, tokens)
        running = sum(not row.is_finished for row in batch.rows)
        batch = batch.without_finished() if running else None


def _admit(engine: Engine, batch: Batch | None, waiting: deque[tuple[int, Request]], limit: int) -> Batch:
    """Let waiting requests in where there is room."""
    room = limit - (len(batch.rows) if batch else 0)
    arrivals = [waiting.popleft() for _ in range(min(room, len(waiting)))]
    if arrivals:
        fresh = engine.start([request for _, request in arrivals], [index for index, _ in arrivals])
        batch = fresh if batch is None else batch.join(fresh)
    assert batch is not None
    return batch
