"""The loop over captured rounds: the device runs one round ahead of the host.

While a round runs, the host reads the note of the one before: gives every request its tokens, sees who has ended, tells the
policy, and lets waiting requests take free slots. A request that ended is noticed one round late; what the device did to its
slot in the meantime is thrown away, so the output is that of ``engine/generate.py``, its oracle, token for token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from outrider.core.device_sampling import Stages, stages_for
from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import Observation, Plan
from outrider.core.report import Progress, RoundReport
from outrider.core.request import Origin, Request, RequestState
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.engine.finish import emit
from outrider.engine.graphs import RoundGraph, RoundGraphs

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def can_overlap(graphs: RoundGraphs, requests: Sequence[Request]) -> bool:
    """The device can do all that the requests' sampling asks for, a prompt has the two tokens a drafter's first pass reads, and
    no other loop (a stream that was left half read) holds the slots."""
    if graphs.is_busy or any(len(request.prompt_ids) < 2 for request in requests) or stages_for(requests) is None:
        return False
    return graphs.fits(capacity_of(graphs, requests))


def capacity_of(graphs: RoundGraphs, requests: Sequence[Request]) -> int:
    """The longest text any of the requests can become."""
    return min(max(len(r.prompt_ids) + r.params.max_tokens for r in requests), graphs.target.max_len)


@dataclass
class _Seat:
    """A request in a slot."""

    request: int
    state: RequestState
    first_round: int
    """Rounds before this one belong to whoever stood here earlier."""
    known: int
    """Tokens the drafter has certainly read."""
    stages: Stages
    """Of the sampler that the request needs."""
    num_unread: int = 0
    """Rounds since then that drafted nothing."""

    def take(self, note: Sequence[int], *, drafted: bool, max_len: int) -> list[int]:
        """The tokens a round brought, up to where one of them ends the request."""
        num_emitted, _, num_agreed, rejected, *choices = note
        last = Origin.RECOVERED if rejected else Origin.BONUS
        origins = [Origin.ACCEPTED if place < num_agreed else last for place in range(num_emitted)]
        taken = emit(self.state, choices[:num_emitted], origins, max_len=max_len)
        if drafted:
            self.known = len(self.state.tokens) - 2
        else:
            self.num_unread += 1
        return choices[:taken]


@dataclass(frozen=True, eq=False)
class _Launched:
    """A round on its way."""

    graph: RoundGraph
    number: int
    """Of the graph's rounds."""
    index: int
    """Of the loop's rounds."""
    began: torch.cuda.Event
    ended: torch.cuda.Event

    @property
    def seconds(self) -> float:
        """What the round took on the device, whatever was queued before and after it."""
        return self.began.elapsed_time(self.ended) / 1e3


def num_slots(count: int) -> int:
    """Slots of the frame that serves so many requests at once."""
    return next((size for size in _SIZES if size >= count), count)


def run_overlapped(graphs: RoundGraphs, requests: Sequence[Request], *, max_batch_size: int) -> Iterator[Progress]:
    """Serve all requests, yielding every row's progress after every round, as ``generate.run`` does."""
    size = num_slots(min(len(requests), max_batch_size))
    capacity = capacity_of(graphs, requests)
    loop = _Loop(graphs, deque(enumerate(requests)), batch_size=size, capacity=capacity, limit=max_batch_size)
    graphs.is_busy = True
    try:
        yield from loop.run()
    finally:
        graphs.is_busy = False
        loop.close()


class _Loop:
    """What evolves while requests are served."""

    def __init__(
        self, graphs: RoundGraphs, waiting: deque[tuple[int, Request]], *, batch_size: int, capacity: int, limit: int
    ) -> None:
        self.graphs, self.waiting, self.limit = graphs, waiting, limit
        self.frame = graphs.frame(batch_size, capacity)
        self.seats: list[_Seat | None] = [None] * batch_size
        self.num_rounds = 0
        self.policy_state = graphs.policy.start(batch_size)
        self.clock = time.perf_counter()

    def run(self) -> Iterator[Progress]:
        self._admit()
        pending: _Launched | None = None
        while any(self.seats):
            plan = self.graphs.policy.plan(self.policy_state, len(self.seats))
            depth = min(max(plan.max_depth), self.graphs.most_guesses)
            if depth and self._lags():
                if pending is not None:
                    yield from self._read(pending)
                pending = None
                self._catch_up()
                if not any(self.seats):
                    return
            launched = self._launch(depth)
            if pending is not None:
                yield from self._read(pending)
                self._admit()
            pending = launched

    def close(self) -> None:
        torch.cuda.synchronize(self.frame.tokens.device)
        self.graphs.leave(self.frame)

    def _launch(self, depth: int) -> _Launched:
        began = time.perf_counter()
        stages = max(seat.stages for seat in self.seats if seat is not None)
        logprobs = any(seat is not None and seat.state.params.logprobs is not None for seat in self.seats)
        graph = self.graphs.round(self.frame, depth, stages, logprobs=logprobs)
        self.clock = began if self.num_rounds == 0 else self.clock
        self.clock += time.perf_counter() - began  # capturing is no part of a round
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        number = graph.launch()
        events[1].record()
        self.num_rounds += 1
        return _Launched(graph, number, self.num_rounds - 1, *events)

    def _admit(self) -> None:
        """Waiting requests take free slots."""
        free = [slot for slot, seat in enumerate(self.seats) if seat is None]
        room = self.limit - (len(self.seats) - len(free))
        arrivals = [(slot, *self.waiting.popleft()) for slot in free[: min(room, len(self.waiting))]]
        if not arrivals:
            return
        began = time.perf_counter()
        states = [RequestState.of(request) for _, _, request in arrivals]
        self.graphs.seat(self.frame, [slot for slot, _, _ in arrivals], states)
        torch.cuda.synchronize(self.frame.tokens.device)
        for (slot, index, _), state in zip(arrivals, states, strict=True):
            state.stats.prefill_seconds = time.perf_counter() - began
            stages = stages_for([state.request])
            assert stages is not None, "the others run on the host"
            known = len(state.tokens) - 1
            self.seats[slot] = _Seat(index, state, first_round=self.num_rounds, known=known, stages=stages)
        self.clock += time.perf_counter() - began

    def _lags(self) -> bool:
        """Rounds without guesses have added tokens that the drafter has not read."""
        return any(seat is not None and seat.num_unread for seat in self.seats)

    def _catch_up(self) -> None:
        lagging = [(slot, seat) for slot, seat in enumerate(self.seats) if seat is not None and seat.num_unread]
        if lagging and self.graphs.drafter is not None:
            rows, known = [seat.state.tokens for _, seat in lagging], [seat.known for _, seat in lagging]
            slots = [slot for slot, _ in lagging]
            self.graphs.drafter.catch_up(slots, rows, batch_size=len(self.seats), known=known)
        for _, seat in lagging:
            seat.num_unread = 0

    def _read(self, launched: _Launched) -> Iterator[Progress]:
        """Wait for a round, and give every request what it brought."""
        launched.ended.synchronize()
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        notes, depth = launched.graph.note(launched.number), launched.graph.num_guesses
        taking = {slot: seat for slot, seat in enumerate(self.seats) if seat is not None and launched.index >= seat.first_round}
        positions = [seat.state.num_output for seat in taking.values()]
        emitted = [
            seat.take(notes[slot], drafted=depth > 0, max_len=self.graphs.target.max_len) for slot, seat in taking.items()
        ]
        self._add_logprobs(launched, taking, emitted)
        for slot, seat in taking.items():
            if seat.state.is_finished:
                self.seats[slot] = None
                self.frame.limits[slot] = 0
        if taking:
            yield from self._report(taking, notes, positions, emitted, depth=depth, seconds=seconds).progress()
        everybody = [notes[slot] if slot in taking else None for slot in range(len(self.seats))]
        self.graphs.policy.update(self.policy_state, _observation(everybody, depth, launched.seconds))

    @staticmethod
    def _add_logprobs(launched: _Launched, taking: Mapping[int, _Seat], emitted: Sequence[list[int]]) -> None:
        noted = launched.graph.logprobs
        for (slot, seat), tokens in zip(taking.items(), emitted, strict=True):
            count = seat.state.params.logprobs
            if count is not None and noted is not None:
                seat.state.logprobs += [
                    noted.of(launched.number, slot, place, count=count, token=token) for place, token in enumerate(tokens)
                ]

    def _report(
        self,
        taking: Mapping[int, _Seat],
        notes: Sequence[Sequence[int]],
        positions: Sequence[int],
        emitted: Sequence[list[int]],
        *,
        depth: int,
        seconds: float,
    ) -> RoundReport:
        """The round of the seats that took part, counted. How its time splits between draft and score is not known."""
        seen = _observation([notes[slot] for slot in taking], depth, seconds)
        report = RoundReport(
            ids=[seat.request for seat in taking.values()],
            states=[seat.state for seat in taking.values()],
            positions=positions,
            seen=replace(seen, score_seconds=0.0),
            drafted=[notes[slot][1] for slot in taking],
            rejected=[bool(notes[slot][3]) for slot in taking],
            emitted=emitted,
            seconds=seconds,
        )
        report.count()
        return report


def _observation(notes: Sequence[Sequence[int] | None], depth: int, seconds: float) -> Observation:
    """What a policy and the statistics read of a round: depths, acceptance and seconds. The guesses stay on the device. A seat
    that was empty has no note: it was asked for nothing."""
    drafted = [0 if note is None else min(note[1], depth) for note in notes]
    accepted = [0 if note is None else min(note[2], note[0]) for note in notes]
    asked = tuple(0 if note is None else depth for note in notes)
    tokens = torch.zeros(len(notes), depth + 1, dtype=torch.int64)
    draft = Draft(TokenTree.chain(tokens, [count + 1 for count in drafted]), Draws.DETERMINISTIC)
    paths = [list(range(count + 1)) for count in accepted]
    return Observation(draft, Scores(torch.zeros(0)), paths, accepted, 0.0, seconds, Plan(asked, asked), seconds)
