"""Continuous batching: requests join and leave between rounds, whatever method each of them asked for.

    leave -> admit -> read -> round -> leave

Requests of one method share a *lane*. All lanes share the target, the slots and the memory. The host drives a lane's rounds
(``host_lane.py``), or they are captured graphs (``device_lane.py``). The text of a request depends neither on that nor on other
requests. Prompts are read in pieces, so a long one delays the others by one piece at a time. Where the target can, a piece
shares the pass of a round (``admission.py``). Memory is counted before it is used (``memory.py``). Trees shrink first. Then the
youngest of the least important requests returns to the queue with all it has, and is read again later.

A request's life: waiting -> arriving (its tokens are read) -> running (a row of its lane) -> finished or cancelled, and from
running back to waiting where memory runs out. It is not thread-safe: ``server/worker.py`` runs it on a thread of its own.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, final

import torch

from outrider.cache.prefixes import PrefixTree
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.report import RoundReport
from outrider.core.request import Request, RequestState
from outrider.engine.admission import Arrivals
from outrider.engine.finish import report_apart
from outrider.engine.grouping import GROUPINGS
from outrider.engine.host_lane import HostLane
from outrider.engine.job import Job, Slots
from outrider.engine.lane import Lane, Rank
from outrider.engine.memory import BatchSize, MemoryModel
from outrider.engine.replace_drafter import replace_drafter
from outrider.engine.step import Batch, Engine

NewLane = Callable[[Method], Lane | None]
"""Makes a lane of the method's captured rounds; None where they cannot be captured."""


@final
class Scheduler:
    """Takes requests, runs rounds for all of them, and returns their tokens."""

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
        """``find_method`` makes the method of a lane when the first request asks for it. With ``isolates``, a failure ends only
        the request whose part failed; otherwise a failing round raises. ``device_lane`` makes the lane for captured rounds.
        Requests that it accepts run there, as long as memory has no budget."""
        self.target = target
        self.slots = slots or Slots()
        self.memory = memory or MemoryModel(0, 0)
        self.prefixes = prefixes
        self._grouping = GROUPINGS[self.slots.grouping]
        self._find_method = find_method
        self._isolates = isolates
        self._new_device_lane: NewLane = device_lane if device_lane and self.memory.budget is None else lambda _: None
        self._jobs: dict[int, Job] = {}
        self._waiting: deque[int] = deque()
        self._rank: Rank = lambda number: self._jobs[number].rank
        self._arrivals = Arrivals(target, self.slots, self._rank, isolates=isolates)
        self._hosts: dict[Hashable, HostLane] = {}
        self._devices: dict[Hashable, Lane | None] = {}
        """Lanes of captured rounds, made when the first request needs one; None where a method has none."""
        self._failed: list[RoundReport] = []
        """Requests that failed before their first round."""
        self._room = 0
        """Most guesses per row in the next round."""
        self.num_preempted = 0
        self.last_waits: list[float] = []
        """Seconds that requests waited which got a slot in the latest ``round``."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of requests that hold a slot."""
        return len(self._jobs) - len(self._waiting)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the requests that hold a slot, as counted against the budget."""
        return sum(self.memory.bytes_of(size, 1) for size in self._sizes())

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def check(self, request: Request, lane: Hashable) -> None:
        """Refuse a request that cannot be served, before it waits."""
        self._host(lane).engine.check(request)
        self.memory.check(min(len(request.prompt_ids) + request.params.max_tokens, self.target.max_len))

    def submit(self, job: Job) -> None:
        """Queue a request that was checked."""
        assert job.id not in self._jobs, "a request has a number of its own"
        self._jobs[job.id] = job
        insort(self._waiting, job.id, key=self._rank)

    @torch.inference_mode()
    def cancel(self, job_id: int) -> None:
        """Forget a request, wherever it is. Its slot is free before the next round. Unknown numbers are those of requests that
        ended."""
        if self._jobs.pop(job_id, None) is None:
            return
        if job_id in self._waiting:
            self._waiting.remove(job_id)
        self._arrivals.keep(self._jobs)
        for _, lane in self._lanes:
            lane.leave(job_id)

    def close(self) -> None:
        """Drop all remaining requests, and the slots of captured rounds."""
        for number in list(self._jobs):
            self.cancel(number)

    @torch.inference_mode()
    def round(self) -> list[RoundReport]:
        """Run one round of every lane and report each."""
        self.arrive()
        reports, carrier = list[RoundReport](), self._carrier
        pieces = [] if carrier is None else self._arrivals.ride()
        for name, lane in self._lanes:
            report = lane.step(self._room, pieces if lane is carrier else ())
            if report is not None:
                reports.append(replace(report, lane=name))
                self._forget(zip(report.ids, report.states, strict=True))
        self._fail(self._arrivals.rode(sum(report.seconds for report in reports)))
        failed, self._failed = self._failed, []
        return failed + reports

    @torch.inference_mode()
    def arrive(self) -> None:
        """Admit waiting requests and read prompts, as every ``round`` does before its passes."""
        self.last_waits = []
        self._make_room()
        self._admit()
        self._fail(self._arrivals.read(is_carried=self._carrier is not None))
        self._make_room()

    @property
    def batches(self) -> list[Batch]:
        """The batches that the host would run in the next round."""
        return [lane.batch for lane in self._hosts.values() if lane.batch is not None]

    def redraft(self, lanes: Collection[Hashable]) -> None:
        """Make the methods of the named lanes again, between rounds, because their drafters have changed. Running requests go
        on. Requests in captured rounds are read again, and so are those whose new drafter needs the states of their tokens."""
        for name in lanes:
            method, host = self._find_method(name), self._hosts.get(name)
            here = [number for number, job in self._jobs.items() if job.lane == name and number not in self._waiting]
            if host is not None and not method.drafter.taps:
                going = self._arrivals.lanes
                here = [number for number in here if number not in host.order and going.get(number) is not host]
            for number in sorted(here, reverse=True):
                self._send_back(number)
            if host is not None:
                replace_drafter(host.engine, host.batch, method)
            self._devices.pop(name, None)

    def retire(self, lane: Hashable) -> None:
        """Forget the method of a lane without requests. It is made again when a request asks for it."""
        if lane in self._hosts and all(job.lane != lane for job in self._jobs.values()):
            del self._hosts[lane]
            self._devices.pop(lane, None)

    def give_up(self) -> None:
        """Forget all requests after a failure. Their memory is freed now, because lanes and scheduler refer to each other, and
        a garbage collector that was frozen at the start would never free it."""
        self._jobs.clear()
        self._waiting.clear()
        self._arrivals.keep(self._jobs)
        self._hosts.clear()
        self._devices.clear()

    @property
    def lanes(self) -> list[Hashable]:
        """Lanes that a request has asked for."""
        return list(self._hosts)

    def check_integrity(self) -> None:
        """Check that nothing is held when idle: no rows, no readers, no numbers."""
        assert set(self._waiting) <= set(self._jobs), "a forgotten request waits"
        held = [*(number for _, lane in self._lanes for number in lane.order), *self._arrivals.lanes]
        assert sorted(held) == sorted(set(self._jobs) - set(self._waiting)), "a slot is held by nobody, or twice"

    @property
    def _lanes(self) -> list[tuple[Hashable, Lane]]:
        """Lanes with their names, those of the host first."""
        return [*self._hosts.items(), *((name, lane) for name, lane in self._devices.items() if lane is not None)]

    @property
    def _carrier(self) -> HostLane | None:
        """The lane whose next round may read pieces of prompts, since all lanes share the target; None where nobody runs."""
        return next((lane for lane in self._hosts.values() if lane.batch is not None), None)

    def _host(self, name: Hashable) -> HostLane:
        if name not in self._hosts:
            self._hosts[name] = HostLane(
                Engine(self.target, self._find_method(name), self._arrivals.pieces),
                self._grouping,
                self.slots.max_rows,
                self._keep_prefix,
                isolates=self._isolates,
                is_counted=self.memory.budget is not None,
            )
        return self._hosts[name]

    def _home(self, job: Job) -> Lane:
        """The lane for a request: captured rounds if they can serve it, or the host's lane."""
        if job.traced or job.state.max_draft is not None:
            return self._host(job.lane)
        if job.lane not in self._devices:
            made = self._devices[job.lane] = self._new_device_lane(self._find_method(job.lane))
            if made is not None:
                made.keep, made.rank = self._keep_prefix, self._rank
        device = self._devices[job.lane]
        return device if device is not None and device.accepts(job.state.request) else self._host(job.lane)

    def _sizes(self, *more: tuple[Lane, BatchSize]) -> list[BatchSize]:
        """The size of every lane once the requests being read, and ``more``, have joined."""
        sizes = {lane: lane.size for _, lane in self._lanes}
        for lane, extra in (*self._arrivals.sizes, *more):
            sizes[lane] = sizes[lane].joined(extra)
        return list(sizes.values())

    def _largest_tree(self, *more: tuple[Lane, BatchSize]) -> int | None:
        """Most guesses per row in the next round; None if there is no memory for the roots of all requests and of ``more``."""
        return self.memory.largest_tree([] if self.memory.budget is None else self._sizes(*more))

    def _make_room(self) -> None:
        """Cut the next trees to what memory allows. If not even the roots fit, the least important request waits again."""
        while (room := self._largest_tree()) is None:
            self._preempt(max(set(self._jobs) - set(self._waiting), key=self._rank))
        self._room = room
        for _, lane in self._lanes:
            while (number := lane.one_too_many) is not None:
                self._preempt(number)

    def _preempt(self, number: int) -> None:
        self._send_back(number)
        self.num_preempted += 1

    def _send_back(self, number: int) -> None:
        """Put a request back into the queue."""
        job = self._jobs[number]
        self.cancel(number)
        self._jobs[number] = job
        insort(self._waiting, number, key=self._rank)

    def _admit(self) -> None:
        """Admit the longest-waiting requests, while there are slots, memory and prompt tokens to read left."""
        while self._waiting and self.num_running < self.slots.max_rows:
            job = self._jobs[self._waiting[0]]
            state, lane, num_tokens = job.state, self._home(job), len(job.state.tokens)
            size = BatchSize(1, num_tokens, num_tokens)
            crowded = self.num_running and not lane.has_room([size, *(one for _, one in self._arrivals.sizes)])
            if self._arrivals.room_for(job.priority) <= 0 or crowded or self._largest_tree((lane, size)) is None:
                return
            self._waiting.popleft()
            self.last_waits += [] if state.num_output else [time.perf_counter() - job.created]
            known = self.prefixes if job.shares_prefix and not lane.taps else None
            prefix = None if known is None else known.find(state.read_tokens[:-1])
            if prefix is not None and not state.num_output:
                state.stats.num_cached = prefix.lengths[0]
            is_alone = self.num_running == 1 and (self.slots.max_rows == 1 or not self._waiting)
            if not lane.reads(job.id, state, prefix, is_alone=is_alone):
                self._arrivals.add(lane, (job.id, state), prefix)

    def _keep_prefix(self, number: int, cache: Any, row: int) -> None:
        """Store what was read of a request, as a prefix for others."""
        job = self._jobs[number]
        if self.prefixes is not None and job.shares_prefix:
            self.prefixes.keep(job.state.read_tokens[: cache.lengths[row]], cache, row)

    def _fail(self, rows: Sequence[tuple[int, RequestState]]) -> None:
        """Requests that could not be read, or could not join, have ended."""
        self._failed += [report_apart([number], [state], [state.num_output]) for number, state in rows]
        self._forget(rows)

    def _forget(self, rows: Iterable[tuple[int, RequestState]]) -> None:
        """Forget the requests that have ended."""
        for number, state in rows:
            if state.is_finished:
                self._jobs.pop(number, None)
