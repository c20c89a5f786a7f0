"""Finds out whose failure it was. A round that raised is run again for each of its requests alone.

Everything a round changes can be made again from a request's own tokens, and those only grow by what was emitted. So a
batch whose round failed is read anew, one request at a time, and each takes its round by itself. A request that fails
alone ends with its error; the others go on in a new batch, with the text they would have had anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.core.request import RequestState
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
