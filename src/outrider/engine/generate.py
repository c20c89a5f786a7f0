"""Runs all requests to the end: the scheduler in a loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.report import Progress
from outrider.core.request import Request, RequestState
from outrider.engine.job import Job, Slots
from outrider.engine.scheduler import NewLane, Scheduler
from outrider.engine.step import Engine

_WHOLE_PROMPTS = 1 << 62
"""Prompts are read whole, since no other request waits for a round."""


def scheduler_of(
    target: Target,
    method: Method,
    *,
    max_batch_size: int,
    device_lane: NewLane | None = None,
) -> Scheduler:
    """A scheduler with one lane, ``None``, whose requests have the target to themselves."""
    slots = Slots(max_batch_size, _WHOLE_PROMPTS)
    return Scheduler(target, lambda _: method, slots=slots, isolates=False, device_lane=device_lane)


def run(
    engine: Engine,
    requests: Sequence[Request],
    *,
    max_batch_size: int,
    device_lane: NewLane | None = None,
) -> Iterator[Progress]:
    """Serve all requests, at most ``max_batch_size`` at a time, yielding every row's progress after every round."""
    scheduler = scheduler_of(engine.target, engine.method, max_batch_size=max_batch_size, device_lane=device_lane)
    for index, request in enumerate(requests):
        scheduler.check(request, None)
        scheduler.submit(Job(index, RequestState.of(request)))
    try:
        while not scheduler.is_idle:
            for report in scheduler.round():
                for step in report.progress():
                    if step.state.failure is not None:
                        raise step.state.failure
                    yield step
    finally:
        scheduler.close()
