"""Find the request that made a round fail: the round is run again for each of its requests alone.

Everything a round changes can be made again from a request's own tokens, and those only grow by what was emitted. So a
batch whose round failed is read anew, one request at a time, and each takes its round by itself. A request that fails
alone ends with its error; the others go on in a new batch, with the text they would have had anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import Observation
from outrider.core.report import RoundReport
from outrider.core.request import RequestState
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.engine.arrival import Arrival
from outrider.engine.step import Batch, Engine

Prepare = Callable[[Batch], None]
"""Gives a new batch the limits of its requests."""


def step_apart(engine: Engine, rows: Sequence[tuple[int, RequestState]], prepare: Prepare) -> list[Batch]:
    """One round of every request by itself; batches of those that did not fail. Finished requests are left out."""
    found = [_step_alone(engine, number, state, prepare) for number, state in rows if not state.is_finished]
    return [batch for batch in found if batch is not None]


def join_all(batches: Sequence[Batch]) -> Batch | None:
    """One batch of all. Requests of a batch that cannot be joined fail."""
    whole: Batch | None = None
    for batch in batches:
        try:
            whole = batch if whole is None else whole.join(batch)
        except Exception as error:
            for state in batch.rows:
                state.fail(error)
    return whole


def report_apart(
    ids: Sequence[int],
    states: Sequence[RequestState],
    known: Sequence[int],
    *,
    lane: Hashable = None,
    seconds: float = 0.0,
) -> RoundReport:
    """The report of requests that were run apart, or failed: what they have beyond their first ``known`` tokens. Guesses are
    counted in their statistics only."""
    rows = len(ids)
    draft = Draft(TokenTree.chain(torch.zeros(rows, 1, dtype=torch.int64)), Draws.DETERMINISTIC)
    seen = Observation(draft, Scores(torch.zeros(0)), [[0]] * rows, [0] * rows, 0.0, 0.0)
    emitted = [state.output_ids[count:] for state, count in zip(states, known, strict=True)]
    return RoundReport(ids, states, known, seen, [0] * rows, [False] * rows, emitted, seconds, lane)


def _step_alone(engine: Engine, number: int, state: RequestState, prepare: Prepare) -> Batch | None:
    try:
        batch = Arrival(engine, [state], [number]).advance(len(state.tokens))
        assert batch is not None, "all tokens were read at once"
        prepare(batch)
        engine.step(batch)
    except Exception as error:
        state.fail(error)
        return None
    return batch
