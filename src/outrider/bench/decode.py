"""Decodes a batch of prompts through the scheduler, with the prefill and the rounds timed apart."""

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
from outrider.engine.step import Batch

Watcher = Callable[[RoundReport], None]


@dataclass(frozen=True, eq=False)
class Decoded:
    """One chunk of prompts, decoded."""

    outputs: list[list[int]]
    seconds: float
    """Time of the rounds."""
    prefill_seconds: float
    tally: Tally
    batch: Batch
    """What was in memory before the last round."""


def decode(
    llm: LLM,
    method: Method,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    clock: Callable[[], float] = time.perf_counter,
    watcher: Watcher | None = None,
) -> Decoded:
    """Decode all prompts as one batch. Counting, and ``watcher``, which is shown every round, are not part of the time."""
    scheduler = scheduler_of(llm.target, method, max_batch_size=len(prompts))
    states = [RequestState.of(request) for request in llm.requests(list(prompts), list(params))]
    for index, state in enumerate(states):
        scheduler.check(state.request, None)
        scheduler.submit(Job(index, state))
    began = clock()
    scheduler.arrive()
    prefill_seconds, seconds, tally = clock() - began, 0.0, Tally()
    (batch,) = scheduler.batches
    while not scheduler.is_idle:
        (batch,) = scheduler.batches
        began = clock()
        reports = scheduler.round()
        seconds += clock() - began
        for report in reports:
            tally.add(report.seen)
            if watcher is not None:
                watcher(report)
        failure = next((state.failure for state in states if state.failure is not None), None)
        if failure is not None:
            raise failure
    return Decoded([state.output_ids for state in states], seconds, prefill_seconds, tally, batch)
