"""Decodes a batch of prompts through the scheduler, as ``generate`` does, and times prefill and rounds separately.

A call of ``Scheduler.round`` that reports no round has read prompts, or assigned slots of captured rounds. Its time counts as
prefill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.api import LLM
from outrider.bench.tally import Tally
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.report import RoundReport
from outrider.core.request import RequestState
from outrider.engine.generate import scheduler_of
from outrider.engine.job import Job
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Batch

Watcher = Callable[[RoundReport], None]


@dataclass(frozen=True, eq=False)
class Decoded:
    """One chunk of prompts, decoded."""

    states: list[RequestState]
    seconds: float
    """Seconds of the rounds."""
    prefill_seconds: float
    tally: Tally
    batches: list[Batch]
    """The batches before the last round, if the host drives rounds."""

    @property
    def outputs(self) -> list[list[int]]:
        return [state.output_ids for state in self.states]


def decode(
    llm: LLM,
    method: Method,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    clock: Callable[[], float] = time.perf_counter,
    watcher: Watcher | None = None,
    traced: bool = False,
) -> Decoded:
    """Decode all prompts as one batch. Counting is not timed, and neither is ``watcher``, which sees every round. With
    ``traced``, rounds report trees and scores, so the host drives them."""
    scheduler = scheduler_of(llm.target, method, max_batch_size=len(prompts), device_lane=llm.rounds.lane)
    states = [RequestState.of(request) for request in llm.requests(list(prompts), list(params))]
    for index, state in enumerate(states):
        scheduler.check(state.request, None)
        scheduler.submit(Job(index, state, traced=traced))
    try:
        return _run(scheduler, states, clock, watcher)
    finally:
        scheduler.close()


def _run(scheduler: Scheduler, states: list[RequestState], clock: Callable[[], float], watcher: Watcher | None) -> Decoded:
    began = clock()
    scheduler.arrive()
    prefill_seconds, seconds, tally, batches = clock() - began, 0.0, Tally(), list[Batch]()
    while not scheduler.is_idle:
        batches, began = scheduler.batches, clock()
        reports = scheduler.round()
        taken = clock() - began
        seconds, prefill_seconds = (seconds + taken, prefill_seconds) if reports else (seconds, prefill_seconds + taken)
        for report in reports:
            tally.add(report.seen)
            if watcher is not None:
                watcher(report)
        failure = next((state.failure for state in states if state.failure is not None), None)
        if failure is not None:
            raise failure
    return Decoded(states, seconds, prefill_seconds, tally, batches)
