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
from collections import Counter, deque
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch

from outrider.cache.prefixes import PrefixTree
from outrider.core.errors import OptionError
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.report import RoundReport
from outrider.core.request import Request, RequestState
from outrider.engine.arrival import Arrival
from outrider.engine.exchange import exchange
from outrider.engine.grouping import GROUPINGS
from outrider.engine.isolation import join_all, report_apart, step_apart
from outrider.engine.limits import Limited
from outrider.engine.memory import BatchSize, MemoryModel
from outrider.engine.step import Batch, Engine

_LOG = logging.getLogger("outrider.engine")


@dataclass(frozen=True)
class Slots:
    """How much may happen at once."""

    max_rows: int = 32
    """Requests that share rounds."""
    prefill_tokens: int = 512
    """Prompt tokens read between two rounds."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise OptionError(f"{name} = {value} is not valid; use at least 1")


@dataclass(frozen=True, eq=False)
class Job:
    """A request in the scheduler."""

    id: int
    state: RequestState
    lane: Hashable = None
    """Name of the method it runs with."""
    max_draft: int | None = None
    """Most guesses along a path; 0 is plain decoding, None leaves it to the policy."""
    priority: int = 0
    """Requests with a larger one wait behind those with a smaller one."""
    shares_prefix: bool = True
    """Its tokens may be read from, and kept among, the shared beginnings."""
    created: float = field(default_factory=time.perf_counter)


@dataclass(eq=False)
class _Lane:
    engine: Engine
    batch: Batch | None = None
    order: list[int] = field(default_factory=list)
    waited: Counter[int] = field(default_factory=Counter)
    """Rounds since each request last took part in one."""

    @property
    def size(self) -> BatchSize:
        rows = self.batch.rows if self.batch else []
        lengths = [len(row.tokens) for row in rows]
        return BatchSize(len(lengths), max(lengths, default=0), sum(lengths))


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
        grouping: str = "ragged",
        isolates: bool = True,
    ) -> None:
        """``find_method`` makes the method of a lane when the first request asks for it. A scheduler that ``isolates`` ends
        only the request whose part failed; otherwise a failing round raises."""
        self.target = target
        self.slots = slots or Slots()
        self.memory = memory or MemoryModel(0, 0)
        self.prefixes = prefixes
        self._grouping = GROUPINGS[grouping]
        self._find_method = find_method
        self._isolates = isolates
        self._jobs: dict[int, Job] = {}
        self._waiting: deque[int] = deque()
        self._arrivals: list[tuple[Hashable, Arrival]] = []
        self._lanes: dict[Hashable, _Lane] = {}
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
        longest = min(len(request.prompt_ids) + request.params.max_tokens, self.target.max_len)
        self.memory.check(longest)

    def submit(self, job: Job) -> None:
        """Let a request wait for its turn; it was checked."""
        assert job.id not in self._jobs, "a request has a number of its own"
        self._jobs[job.id] = job
        behind = (place for place, number in enumerate(self._waiting) if self._jobs[number].priority > job.priority)
        self._waiting.insert(next(behind, len(self._waiting)), job.id)

    @torch.inference_mode()
    def cancel(self, job_id: int) -> None:
        """Forget a request, wherever it is. Its slot is free before the next round; unknown numbers are those that ended."""
        if self._jobs.pop(job_id, None) is None:
            return
        if job_id in self._waiting:
            self._waiting.remove(job_id)
        self._sweep_arrivals()
        for lane in self._lanes.values():
            self._keep(lane, [i for i, row in enumerate(lane.order) if row != job_id])

    @torch.inference_mode()
    def round(self) -> list[RoundReport]:
        """Run one round of every lane and report each."""
        self.arrive()
        failed, self._failed = self._failed, []
        running = [(name, lane, lane.batch) for name, lane in self._lanes.items() if lane.batch is not None]
        return [*failed, *(self._step(*lane) for lane in running)]

    @torch.inference_mode()
    def arrive(self) -> None:
        """Admit waiting requests and read prompts, as every ``round`` does before its passes."""
        self.last_waits = []
        self._make_room()
        self._admit()
        self._read()
        self._make_room()

    @property
    def batches(self) -> list[Batch]:
        """What the next round would run."""
        return [lane.batch for lane in self._lanes.values() if lane.batch is not None]

    def redraft(self, lanes: Container[Hashable]) -> None:
        """Make the methods of the named lanes anew, between rounds: their drafters have changed. Running requests go on."""
        for name, lane in self._lanes.items():
            if name in lanes:
                exchange(lane.engine, lane.batch, self._find_method(name))

    def retire(self, lane: Hashable) -> None:
        """Forget the method of a lane that nobody is in and nobody waits for; it is made anew when it is asked for."""
        if lane in self._lanes and all(job.lane != lane for job in self._jobs.values()):
            del self._lanes[lane]

    @property
    def lanes(self) -> list[Hashable]:
        """Those that somebody asked for."""
        return list(self._lanes)

    def check_integrity(self) -> None:
        """When idle, nothing is held: no rows, no readers, no numbers."""
        assert set(self._waiting) <= set(self._jobs), "a forgotten request waits"
        held = [number for lane in self._lanes.values() for number in lane.order]
        held += [number for _, arrival in self._arrivals for number in arrival.ids]
        assert sorted(held) == sorted(set(self._jobs) - set(self._waiting)), "a slot is held by nobody, or twice"
        for lane in self._lanes.values():
            assert (lane.batch.ids if lane.batch else []) == lane.order, "a lane does not know its rows"

    def _lane(self, name: Hashable) -> _Lane:
        if name not in self._lanes:
            method = self._find_method(name)
            limited = Method(method.drafter, method.rule, Limited(method.policy))
            self._lanes[name] = _Lane(Engine(self.target, limited))
        return self._lanes[name]

    def _sizes(self, *more: tuple[Hashable, BatchSize]) -> list[BatchSize]:
        """Every lane as it will be when those who are read, and ``more``, have joined."""
        sizes = {name: lane.size for name, lane in self._lanes.items()}
        arriving = [(name, arrival.size) for name, arrival in self._arrivals]
        for name, extra in (*arriving, *more):
            sizes[name] = sizes.get(name, BatchSize(0, 0, 0)).joined(extra)
        return list(sizes.values())

    def _make_room(self) -> None:
        """Cut the next trees to what memory holds; where even roots do not fit, the youngest request goes back to wait."""
        room = self.memory.largest_tree(self._sizes())
        while room is None:
            self._preempt()
            room = self.memory.largest_tree(self._sizes())
        for lane in self._lanes.values():
            if lane.batch is not None:
                lane.batch.policy_state.room = room

    def _preempt(self) -> None:
        youngest = max(number for number in self._jobs if number not in self._waiting)
        job = self._jobs[youngest]
        self.cancel(youngest)
        self.submit(job)
        self._waiting.remove(youngest)
        self._waiting.appendleft(youngest)
        self.num_preempted += 1

    def _admit(self) -> None:
        """Let those who waited longest in, while there are slots, memory and prompt tokens to read left."""
        budget = self.slots.prefill_tokens - sum(arrival.num_left for _, arrival in self._arrivals)
        while self._waiting and self.num_running < self.slots.max_rows and budget > 0:
            job = self._jobs[self._waiting[0]]
            size = len(job.state.tokens)
            if self.memory.largest_tree(self._sizes((job.lane, BatchSize(1, size, size)))) is None:
                return
            self._waiting.popleft()
            self.last_waits += [time.perf_counter() - job.created] if not job.state.num_output else []
            budget -= size
            self._arrive(job)

    def _arrive(self, job: Job) -> None:
        """Requests of one lane that came together are read together, if nothing of them is known."""
        lane = self._lane(job.lane)
        taps = lane.engine.method.drafter.taps
        is_shared = self.prefixes is not None and job.shares_prefix and not taps
        prefix = self.prefixes.find(job.state.tokens[:-1]) if self.prefixes is not None and is_shared else None
        if prefix is None and self._arrivals and self._arrivals[-1][0] == job.lane:
            last = self._arrivals[-1][1]
            if last.size.longest < self.slots.prefill_tokens and not any(last.cache.lengths):
                states, ids = [*last.states, job.state], [*last.ids, job.id]
                self._arrivals[-1] = job.lane, Arrival(lane.engine, states, ids)
                return
        self._arrivals.append((job.lane, Arrival(lane.engine, [job.state], [job.id], prefix=prefix)))

    def _read(self) -> None:
        """Read prompts, first come first; who is read joins the lane."""
        budget = self.slots.prefill_tokens
        while self._arrivals and budget > 0:
            name, arrival = self._arrivals[0]
            before = arrival.num_left
            try:
                batch = arrival.advance(budget)
            except Exception as error:
                if not self._isolates:
                    raise
                del self._arrivals[0]
                budget -= before
                self._part(name, arrival, error)
                continue
            budget -= max(1, before - arrival.num_left)
            if batch is not None:
                del self._arrivals[0]
                self._join(name, batch)

    def _part(self, name: Hashable, arrival: Arrival, error: Exception) -> None:
        """Requests whose reading failed are read one by one; one that fails alone ends."""
        if len(arrival.states) == 1:
            arrival.states[0].fail(error)
            self._end_failed(arrival.ids, arrival.states)
            return
        alone = zip(arrival.states, arrival.ids, strict=True)
        self._arrivals[:0] = [(name, Arrival(arrival.engine, [state], [number])) for state, number in alone]

    def _end_failed(self, ids: Sequence[int], states: Sequence[RequestState]) -> None:
        for number, state in zip(ids, states, strict=True):
            if state.failure is not None:
                self._jobs.pop(number, None)
                self._failed.append(report_apart([number], [state], [state.num_output]))

    def _set_limits(self, fresh: Batch) -> None:
        fresh.policy_state.limits = [self._jobs[number].max_draft for number in fresh.ids]

    def _join(self, name: Hashable, fresh: Batch) -> None:
        lane = self._lane(name)
        self._set_limits(fresh)
        if self.prefixes is not None:
            for row, state in enumerate(fresh.rows):
                if self._jobs[fresh.ids[row]].shares_prefix:
                    self.prefixes.keep(state.tokens[:-1], fresh.cache, row)
        lane.batch = join_all([batch for batch in (lane.batch, fresh) if batch is not None])
        lane.order = list(lane.batch.ids) if lane.batch else []
        self._end_failed(fresh.ids, fresh.rows)

    def _step(self, name: Hashable, lane: _Lane, everybody: Batch) -> RoundReport:
        began = time.perf_counter()
        batch = self._group(lane, everybody)
        layout = time.perf_counter() - began
        known = [row.num_output for row in batch.rows]
        try:
            report = replace(lane.engine.step(batch), lane=name, layout_seconds=layout)
        except Exception as error:
            if not self._isolates:
                raise
            _LOG.warning("a round failed; its requests are run apart", exc_info=error)
            alone = step_apart(lane.engine, list(zip(batch.ids, batch.rows, strict=True)), self._set_limits)
            self._regroup(lane, batch, join_all(alone))
            return report_apart(batch.ids, batch.rows, known, lane=name, seconds=time.perf_counter() - began)
        for row, state in enumerate(batch.rows):
            if state.is_finished:
                job = self._jobs.pop(batch.ids[row])
                if self.prefixes is not None and job.shares_prefix:
                    self.prefixes.keep(state.tokens[: batch.cache.lengths[row]], batch.cache, row)
        if batch is not lane.batch:
            batch = batch if lane.batch is None else lane.batch.join(batch)
            lane.batch, lane.order = batch, list(batch.ids)
        self._keep(lane, [row for row, state in enumerate(batch.rows) if not state.is_finished])
        return report

    def _regroup(self, lane: _Lane, broken: Batch, whole: Batch | None) -> None:
        """Put ``whole``, those who did not fail, in the place of a batch whose round raised."""
        if broken is lane.batch:
            lane.batch = None
        lane.batch = join_all([batch for batch in (lane.batch, whole) if batch is not None])
        lane.order = list(lane.batch.ids) if lane.batch else []
        for number, state in zip(broken.ids, broken.rows, strict=True):
            if state.is_finished:
                self._jobs.pop(number, None)
        if lane.batch is not None:
            self._keep(lane, [row for row, state in enumerate(lane.batch.rows) if not state.is_finished])

    def _group(self, lane: _Lane, batch: Batch) -> Batch:
        """The rows of the next round as it wants them; the others stay in the lane."""
        waited = [lane.waited[number] for number in batch.ids]
        rows = self._grouping.choose(batch.cache.lengths, waited, max_rows=self.slots.max_rows)
        if len(rows) == len(batch.rows):
            lane.batch = self._grouping.laid_out(batch)
            return lane.batch
        group, chosen = self._grouping.laid_out(batch.fork(rows)), set(rows)
        lane.waited = Counter({batch.ids[row]: waited[row] + 1 for row in range(len(batch.rows)) if row not in chosen})
        self._keep(lane, [row for row in range(len(batch.rows)) if row not in chosen])
        return group

    def _keep(self, lane: _Lane, rows: Sequence[int]) -> None:
        """Rows that stay in a lane. Where memory is counted none is left for those who may come."""
        if lane.batch is None or len(rows) == len(lane.batch.rows):
            return
        if not rows:
            lane.batch = None
        elif self.memory.budget is None:
            lane.batch = lane.batch.narrow(_without_holes(rows))
        else:
            lane.batch = lane.batch.fork(rows)
        lane.order = list(lane.batch.ids) if lane.batch else []

    def _sweep_arrivals(self) -> None:
        """Readers without the requests that are gone; the others of a group are read anew, with what is known of none."""
        kept: list[tuple[Hashable, Arrival]] = []
        for name, arrival in self._arrivals:
            rows = [row for row, number in enumerate(arrival.ids) if number in self._jobs]
            if len(rows) == len(arrival.ids):
                kept.append((name, arrival))
            elif rows:
                states, ids = [arrival.states[row] for row in rows], [arrival.ids[row] for row in rows]
                kept.append((name, Arrival(arrival.engine, states, ids)))
        self._arrivals = kept


def _without_holes(rows: Sequence[int]) -> list[int]:
    """Rows that stay, in an order that moves as few as can be: the last ones fill the places of those that left."""
    staying = set(rows)
    last = [row for row in rows if row >= len(rows)]
    return [place if place in staying else last.pop() for place in range(len(rows))]
