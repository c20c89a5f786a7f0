"""Continuous batching: requests join and leave between rounds, whatever method each of them asked for.

    leave -> admit -> read -> round -> leave

Requests of one method share a batch, a *lane*; all lanes share the target, the slots and the memory. Every round of every lane
is a round of ``Engine.step``; nothing a request gets depends on who else is there. Prompts are read in pieces between rounds,
so a long one delays the others by one piece at a time. Memory is counted before it is used (``memory.py``): trees shrink first,
then the youngest request goes back to the queue with all it has, and reads itself again later.

A request's life: waiting -> arriving (its tokens are read) -> running (a row of its lane) -> finished or cancelled, and from
running back to waiting where memory runs out. Not for several threads: ``server/worker.py`` gives it one of its own.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import replace
from typing import Any, final

import torch

from outrider.cache.prefixes import PrefixTree
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.report import RoundReport
from outrider.core.request import Request, RequestState
from outrider.engine.arrival import Arrivals
from outrider.engine.device_lanes import DeviceLanes, NewLane, OnDevice
from outrider.engine.exchange import exchange
from outrider.engine.grouping import GROUPINGS
from outrider.engine.isolation import join_all, report_apart, step_apart
from outrider.engine.job import Job, Slots
from outrider.engine.lane import Lane
from outrider.engine.limits import Limited
from outrider.engine.memory import BatchSize, MemoryModel
from outrider.engine.step import Batch, Engine

_LOG = logging.getLogger("outrider.engine")


@final
class Scheduler:
    """Requests in, rounds of all of them, tokens out."""

    def __init__(
        self,
        target: Target,
        find_method: Callable[[Hashable], Method],
        *,
        slots: Slots | None = None,
        memory: MemoryModel | None = None,
        prefixes: PrefixTree[Any] | None = None,
        isolates: bool = True,
        device_lane: NewLane | None = None,
    ) -> None:
        """``find_method`` makes the method of a lane when the first request asks for it. A scheduler that ``isolates`` ends
        only the request whose part failed; otherwise a failing round raises. ``device_lane`` makes the lane of a method whose
        rounds can be captured; requests it accepts run there, as long as memory has no budget."""
        self.target = target
        self.slots = slots or Slots()
        self.memory = memory or MemoryModel(0, 0)
        self.prefixes = prefixes
        self._grouping = GROUPINGS[self.slots.grouping]
        self._find_method = find_method
        self._isolates = isolates
        self._devices = DeviceLanes(device_lane if self.memory.budget is None else None, find_method, self._keep_prefix)
        self._jobs: dict[int, Job] = {}
        self._waiting: deque[int] = deque()
        self._arrivals = Arrivals(self.slots, isolates=isolates)
        self._lanes: dict[Hashable, Lane] = {}
        self._failed: list[RoundReport] = []
        """Requests that failed before they had a round."""
        self.num_preempted = 0
        self.last_waits: list[float] = []
        """Seconds that those waited who got a slot in the latest ``round``."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._jobs) - len(self._waiting)

    @property
    def cache_bytes(self) -> int:
        """Memory of those who hold a slot, as it is counted against the budget."""
        return sum(self.memory.bytes_of(size, 1) for size in self._sizes())

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def check(self, request: Request, lane: Hashable) -> None:
        """Refuse what cannot be served, before it waits."""
        self._lane(lane).engine.check(request)
        self.memory.check(min(len(request.prompt_ids) + request.params.max_tokens, self.target.max_len))

    def submit(self, job: Job) -> None:
        """Let a request wait for its turn; it was checked."""
        assert job.id not in self._jobs, "a request has a number of its own"
        self._jobs[job.id] = job
        place = len(self._waiting)
        while place and self._jobs[self._waiting[place - 1]].priority > job.priority:
            place -= 1
        self._waiting.insert(place, job.id)

    @torch.inference_mode()
    def cancel(self, job_id: int) -> None:
        """Forget a request, wherever it is. Its slot is free before the next round; unknown numbers are those that ended."""
        if self._jobs.pop(job_id, None) is None:
            return
        if job_id in self._waiting:
            self._waiting.remove(job_id)
        self._arrivals.keep(self._jobs)
        self._devices.leave(job_id)
        for lane in self._lanes.values():
            lane.leave(job_id)

    def close(self) -> None:
        """Give up whoever is still here, and the slots of captured rounds."""
        for number in list(self._jobs):
            self.cancel(number)

    @torch.inference_mode()
    def round(self) -> list[RoundReport]:
        """Run one round of every lane and report each."""
        self.arrive()
        failed, self._failed = self._failed, []
        running = [(name, lane) for name, lane in self._lanes.items() if lane.batch is not None]
        reports = [*failed, *(self._step(name, lane) for name, lane in running)]
        self._arrivals.pieces.was_run(sum(report.seconds for report in reports))
        for report in self._devices.step():
            self._forget_finished(report)
            reports.append(report)
        return reports

    @torch.inference_mode()
    def arrive(self) -> None:
        """Admit waiting requests and read prompts, as every ``round`` does before its passes."""
        self.last_waits = []
        self._make_room()
        self._admit()
        for name, batch in self._arrivals.read(is_alone=not self.batches):
            self._join(name, batch)
        self._end_failed(self._arrivals.take_failed())
        self._make_room()

    @property
    def batches(self) -> list[Batch]:
        """What the next round would run."""
        return [lane.batch for lane in self._lanes.values() if lane.batch is not None]

    def redraft(self, lanes: Collection[Hashable]) -> None:
        """Make the methods of the named lanes anew, between rounds: their drafters have changed. Running requests go on."""
        for name in lanes:
            method, lane = self._find_method(name), self._lanes.get(name)
            here = lane.order if lane is not None and method.drafter.taps else []  # it has to see the states of all tokens
            for number in sorted([*here, *self._devices.numbers(name)], reverse=True):
                self._send_back(number)  # they read themselves again
            if lane is not None:
                exchange(lane.engine, lane.batch, method)
            self._devices.forget(name)

    def retire(self, lane: Hashable) -> None:
        """Forget the method of a lane that nobody is in and nobody waits for; it is made anew when it is asked for."""
        if lane in self._lanes and all(job.lane != lane for job in self._jobs.values()):
            del self._lanes[lane]
            self._devices.forget(lane)

    @property
    def lanes(self) -> list[Hashable]:
        """Lanes that a request has asked for."""
        return list(self._lanes)

    def check_integrity(self) -> None:
        """When idle, nothing is held: no rows, no readers, no numbers."""
        assert set(self._waiting) <= set(self._jobs), "a forgotten request waits"
        held = [*(n for lane in self._lanes.values() for n in lane.order), *self._arrivals.ids, *self._devices.ids]
        assert sorted(held) == sorted(set(self._jobs) - set(self._waiting)), "a slot is held by nobody, or twice"
        for lane in self._lanes.values():
            assert (lane.batch.ids if lane.batch else []) == lane.order, "a lane does not know its rows"

    def _lane(self, name: Hashable) -> Lane:
        if name not in self._lanes:
            method = self._find_method(name)
            limited = Method(method.drafter, method.rule, Limited(method.policy))
            self._lanes[name] = Lane(Engine(self.target, limited), self.memory.budget is not None)
        return self._lanes[name]

    def _sizes(self, *more: tuple[Hashable, BatchSize]) -> list[BatchSize]:
        """Every lane as it will be when those who are read, and ``more``, have joined."""
        sizes = {name: lane.size for name, lane in self._lanes.items()}
        sizes |= self._devices.sizes
        for name, extra in (*self._arrivals.sizes, *more):
            sizes[name] = sizes.get(name, BatchSize(0, 0, 0)).joined(extra)
        return list(sizes.values())

    def _room(self, *more: tuple[Hashable, BatchSize]) -> int | None:
        """Most guesses of a row in the next round; None where there is no memory for the roots of all and of ``more``."""
        return self.memory.largest_tree([] if self.memory.budget is None else self._sizes(*more))

    def _make_room(self) -> None:
        """Cut the next trees to what memory holds; where even roots do not fit, the youngest request goes back to wait."""
        while (room := self._room()) is None:
            self._preempt(max(number for number in self._jobs if number not in self._waiting))
        while (number := self._devices.one_too_many) is not None:
            self._preempt(number)
        for lane in self._lanes.values():
            if lane.batch is not None:
                lane.batch.policy_state.room = room

    def _preempt(self, number: int) -> None:
        self._send_back(number)
        self.num_preempted += 1

    def _send_back(self, number: int) -> None:
        """A request waits again, before all others."""
        job = self._jobs[number]
        self.cancel(number)
        self._jobs[number] = job
        self._waiting.appendleft(number)

    def _admit(self) -> None:
        """Let those who waited longest in, while there are slots, memory and prompt tokens to read left."""
        while self._waiting and self.num_running < self.slots.max_rows and self._arrivals.room > 0:
            job, prefixes = self._jobs[self._waiting[0]], self.prefixes
            size, device = BatchSize(1, len(job.state.tokens), len(job.state.tokens)), self._devices.home(job)
            crowded = device and self.num_running and not device.has_pages([size, *(one for _, one in self._arrivals.sizes)])
            if crowded or self._room((job.lane, size)) is None:
                return
            self._waiting.popleft()
            self.last_waits += [] if job.state.num_output else [time.perf_counter() - job.created]
            engine = self._lane(job.lane).engine if device is None else device.engine
            known = prefixes is not None and job.shares_prefix and not engine.method.drafter.taps
            prefix = prefixes.find(job.state.read_tokens[:-1]) if prefixes is not None and known else None
            if device is not None and device.reads(job.state.request):
                device.admit(job.id, job.state, prefix)
                continue
            self._arrivals.add(job.lane if device is None else OnDevice(job.lane), engine, (job.id, job.state), prefix)

    def _end_failed(self, rows: Iterable[tuple[int, RequestState]]) -> None:
        for number, state in rows:
            if state.failure is not None:
                self._jobs.pop(number, None)
                self._failed.append(report_apart([number], [state], [state.num_output]))

    def _set_limits(self, fresh: Batch) -> None:
        fresh.policy_state.limits = [self._jobs[number].max_draft for number in fresh.ids]

    def _join(self, name: Hashable, fresh: Batch) -> None:
        for row, number in enumerate(fresh.ids):
            self._keep_prefix(number, fresh.cache, row)
        if isinstance(name, OnDevice):
            self._devices[name].join(fresh)
            return
        self._set_limits(fresh)
        self._lane(name).join(fresh)
        self._end_failed(zip(fresh.ids, fresh.rows, strict=True))

    def _keep_prefix(self, number: int, cache: Any, row: int = 0) -> None:
        """The prompt of a request that was read may begin others."""
        job = self._jobs[number]
        if self.prefixes is not None and job.shares_prefix:
            self.prefixes.keep(job.state.read_tokens[:-1], cache, row)

    def _step(self, name: Hashable, lane: Lane) -> RoundReport:
        began = time.perf_counter()
        batch = lane.group(self._grouping, self.slots.max_rows)
        layout = time.perf_counter() - began
        known = [row.num_output for row in batch.rows]
        try:
            report = replace(lane.engine.step(batch), lane=name, layout_seconds=layout)
        except Exception as error:
            if not self._isolates:
                raise
            _LOG.warning("a round failed; its requests are run apart", exc_info=error)
            alone = step_apart(lane.engine, list(zip(batch.ids, batch.rows, strict=True)), self._set_limits)
            lane.replace(batch, join_all(alone))
            report = report_apart(batch.ids, batch.rows, known, lane=name, seconds=time.perf_counter() - began)
            self._forget_finished(report)
            return report
        for row, state in enumerate(batch.rows):
            if state.is_finished:
                job = self._jobs.pop(batch.ids[row])
                if self.prefixes is not None and job.shares_prefix:
                    self.prefixes.keep(state.read_tokens[: batch.cache.lengths[row]], batch.cache, row)
        lane.put_back(batch)
        return report

    def _forget_finished(self, report: RoundReport) -> None:
        for number, state in zip(report.ids, report.states, strict=True):
            if state.is_finished:
                self._jobs.pop(number, None)
