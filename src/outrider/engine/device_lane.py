"""A lane whose rounds are CUDA graphs. The device runs one round ahead of the host.

While a round runs, the host reads the note of the round before, gives every request its tokens, and informs the policy. It
notices the end of a request one round late, and discards what the device did meanwhile. The output is that of ``HostLane``, its
oracle, token for token. The number of slots is a power of two.

Rounds read the prompts of requests that arrive while others run, in pieces, and short prompts of requests that arrive alone.
Other prompts have passes of their own (``engine/admission.py``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, final

import torch

from outrider.core.device_round import LateTexts
from outrider.core.device_sampling import Stages, stages_for
from outrider.core.interfaces import Plan
from outrider.core.reading_target import PromptPiece
from outrider.core.report import RoundReport
from outrider.core.request import Request, RequestState
from outrider.engine.constrained import finish_round
from outrider.engine.device_seats import Arriving, Seat, next_pieces, num_pieces_left, prompts_of
from outrider.engine.lane import Lane
from outrider.engine.launched import Launched
from outrider.engine.memory import BatchSize
from outrider.engine.prefill import Prefilled
from outrider.engine.round_kind import SHRINKS, RoundKind, num_slots

if TYPE_CHECKING:
    from outrider.engine.between_rounds import BetweenRounds
    from outrider.engine.captured_rounds import RoundGraphs
    from outrider.engine.round_graph import RoundGraph


@final
class DeviceLane(Lane):
    """Requests of one method, in slots of its captured rounds."""

    def __init__(self, graphs: RoundGraphs) -> None:
        self._graphs = graphs
        self._size = self._num_rounds = 0
        """Number of slots of the frame, 0 while the lane has none; and rounds so far."""
        self._seats: dict[int, Seat] = {}
        """Requests that have a slot."""
        self._joining: list[Seat] = []
        self._pending: Launched | None = None
        self._arriving = Arriving()
        self._policy_state: Any = None
        self.keep, self.rank = lambda *_: None, lambda number: (0, number)
        self._clock = time.perf_counter()

    @property
    def taps(self) -> tuple[int, ...]:
        return self._graphs.prompt_taps

    @property
    def rows(self) -> list[tuple[int, RequestState]]:
        return [(seat.number, seat.state) for seat in (*self._seats.values(), *self._joining)]

    def accepts(self, request: Request) -> bool:
        """Whether captured rounds can serve the request. They must support its sampling, its prompt must be long enough for the
        drafter's first pass, and no other lane (an abandoned stream) may hold the slots."""
        graphs, length = self._graphs, len(request.prompt_ids)
        if graphs.is_held_by_another(self) or length < graphs.least_len or stages_for([request]) is None:
            return False
        if request.read_ids and self.taps:
            return False  # heads learn what the target made of an image from whoever reads the prompt, and that is the host
        return graphs.fits(min(len(request.prompt_ids) + request.params.max_tokens, graphs.target.max_len))

    def has_room(self, sizes: Sequence[BatchSize]) -> bool:
        return self._graphs.has_pages(sum(size.num_rows * size.longest for size in sizes), sum(size.num_rows for size in sizes))

    @property
    def one_too_many(self) -> int | None:
        """The least important request, if the next round needs more pages than there are and another can go on without it."""
        needy = self._needy(3)
        if not needy or self._graphs.has_room(self._size, needy):
            return None
        return max(self.order, key=self.rank) if len(self.order) > 1 else None

    def reads(self, number: int, state: RequestState, prefix: Any, *, is_alone: bool) -> bool:
        seat = Seat(number, state, prefix, rank=self.rank(number))
        if state.request.read_ids or not (self._seats or (is_alone and seat.is_read_at_once)):
            return False
        self._joining.append(seat)
        self._arriving.num_joined += 1
        return True

    def join(self, read: Prefilled) -> None:
        features: Iterable[Any] = repeat(None)
        if self.taps:  # of all rows at once: few launches
            together = torch.cat([torch.cat(read.taps[tap]) for tap in self.taps], -1)
            features = together.split([len(states) for states in read.taps[self.taps[0]]])
        for row, (number, state, known) in enumerate(zip(read.ids, read.states, features, strict=False)):
            self._joining.append(Seat(number, state, read.cache.fork([row]), known, rank=self.rank(number)))

    def leave(self, number: int) -> None:
        self._joining = [seat for seat in self._joining if seat.number != number]
        self._empty([slot for slot, seat in self._seats.items() if seat.number == number])
        self._rest()

    def step(self, room: int, pieces: Sequence[PromptPiece] = ()) -> RoundReport | None:
        """Start the next round, then report the previous one, if there was one."""
        del room, pieces  # rounds are captured only where memory has no budget, and read what ``reads`` has taken
        if not self.rows:
            return None
        self._arriving.begin_round()
        report = self._make_seats()
        self._start_read()
        policy, seats, beside = self._graphs.policy, self._seats.values(), self._graphs.beside
        policy.carry(self._policy_state, prompts_of(seats, num_pieces_left(seats)))
        plan = policy.plan(self._policy_state, self._size)
        if self._seats:
            runs = any(seat.first_round is not None for seat in seats)
            most, after = self._graphs.most_guesses if runs else self._graphs.depths[0], None
            depth = min(max(plan.max_depth), most)
            if beside is not None and beside.listens:
                report = report or self._read()
            is_told, lags = self._is_told(), depth > 0 and (beside is not None or any(seat.num_unread for seat in seats))
            if lags or is_told or self._is_too_late(depth):
                after = self._pending.ended if self._pending else None
                report = report or self._read()
                self._catch_up()
            graph = None
            if beside is not None and (depth or is_told):
                graph, depth = self._drafted(beside, plan, depth, is_told=is_told)
            for slot, num_tokens in self._graphs.grow(self._size, self._needy(2)).items():  # pages for this round and the next
                self._seats[slot].num_paged = num_tokens
            launched = self._launch(graph or self._graph(depth), plan, after)
            report = report or self._read()
            self._finish(launched)
            self._pending = launched
        self._rest()
        return report

    def _is_told(self) -> bool:
        """Whether the next round needs the rule on the host. Without draws, captured rounds do as a lossless rule does."""
        rule = None if self._graphs.beside is None else self._graphs.beside.rule
        running = (seat for seat in self._seats.values() if seat.first_round is not None)
        return rule is not None and any(not rule.lossless or seat.draws or any(seat.asks) for seat in running)

    def _drafted(self, beside: BetweenRounds, plan: Plan, depth: int, *, is_told: bool) -> tuple[RoundGraph | None, int]:
        """Let the drafter on the host draft. Returns the round, if it had to be chosen before, and its number of guesses."""
        running = {slot: seat.state for slot, seat in self._seats.items() if seat.first_round is not None}
        graph = self._graph(depth, is_told=True) if is_told else None
        depth = depth if graph is None else graph.num_guesses
        needed = beside.ready(running, plan, depth, batch_size=self._size, is_told=is_told)
        if graph is not None and needed < depth:
            shorter = self._graph(needed, is_told=True)
            graph = shorter if shorter.num_guesses == needed else graph
        return graph, needed

    def _needy(self, rounds: int) -> dict[int, RequestState]:
        """Slots without pages for what so many rounds may write."""
        ahead = rounds * self._graphs.slack
        return {slot: seat.state for slot, seat in self._seats.items() if len(seat.state.tokens) + ahead > seat.num_paged}

    def _make_seats(self) -> RoundReport | None:
        """Give slots to requests that have joined. Returns the report of the round that had to end for that."""
        needed, report = num_slots(len(self.rows)), None
        self._joining.sort(key=lambda seat: seat.rank)
        if needed > self._size or needed * SHRINKS <= self._size:
            report = self._read()
            needed = num_slots(max(1, len(self.rows)))  # some may have ended
            if needed != self._size:
                self._resize(needed)
        if count := self._arriving.num_seated(self._joining, self._size, is_idle=not self._seats):
            self._seat(count)
        return report

    def _resize(self, size: int) -> None:
        """Move every request to a frame of another size."""
        graphs, kept = self._graphs, list(self._seats)
        graphs.hold(self)
        graphs.resize(self._size, size, {slot: seat.state for slot, seat in self._seats.items()})
        self._seats, self._size = dict(enumerate(self._seats.values())), size
        graphs.start(size, {slot: seat.state for slot, seat in self._seats.items() if seat.first_round is not None})
        fresh = graphs.policy.start(max(1, size - len(kept)))
        if kept:
            known = self._policy_state.fork(kept)
            fresh = known if size == len(kept) else known.join(fresh)
        self._policy_state = fresh

    def _seat(self, count: int) -> None:
        began = time.perf_counter()
        free = [slot for slot in range(self._size) if slot not in self._seats]
        seats = dict(zip(free, self._joining[:count], strict=False))
        while len(seats) > (not self._seats) and not self._have_room(seats):
            seats.popitem()  # waits for pages
        self._joining = self._joining[len(seats) :]
        if seats:
            self._graphs.seat(self._size, seats)
        for seat in seats.values():
            seat.cache = seat.features = None
        self._seats |= seats
        self._clock += time.perf_counter() - began

    def _have_room(self, seats: dict[int, Seat]) -> bool:
        """Whether there are enough pages for the joining requests and for the running ones."""
        return self._graphs.has_room(self._size, self._needy(3) | {slot: seat.state for slot, seat in seats.items()})

    def _start_read(self) -> None:
        """Let requests whose last piece is in a started round run from the next round on."""
        done = {slot: seat for slot, seat in self._seats.items() if seat.first_round is None and not seat.num_left}
        self._graphs.start(self._size, {slot: seat.state for slot, seat in done.items()})
        for slot, seat in done.items():
            seat.start(self._num_rounds)
            self.keep(seat.number, self._graphs.seats.cache_of(self._size, slot, len(seat.state.tokens) - 1), 0)

    def _graph(self, num_guesses: int, *, is_told: bool = False) -> RoundGraph:
        """The captured round for the present requests."""
        began, seats = time.perf_counter(), self._seats.values()
        asked = {seat.asks for seat in seats if seat.first_round is not None} or {(Stages.TEMPERATURE, False, False)}
        stages, logprobs, constrained = map(max, zip(*asked, strict=True))
        wanted = RoundKind(self._size, num_guesses, num_pieces_left(seats), stages, logprobs, constrained)
        if is_told:
            wanted = replace(wanted, stages=Stages.TEMPERATURE, constrained=False, told=True)
        graph = self._graphs.at_hand(wanted)
        self._clock = began if self._pending is None else self._clock
        self._clock += time.perf_counter() - began  # capturing is no part of a round
        return graph

    def _launch(self, graph: RoundGraph, plan: Plan, after: torch.cuda.Event | None) -> Launched:
        prompts = prompts_of(self._seats.values(), graph.num_pieces)
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        number = graph.launch(next_pieces(self._seats, graph.num_pieces))
        if not (graph.is_constrained or graph.is_told):
            events[1].record()
        self._num_rounds += 1
        return Launched(graph, plan, number, self._num_rounds - 1, *events, prompts, after)

    def _finish(self, launched: Launched) -> None:
        """In a round that waits for the host, supply the grammar's masks or the rule's decision."""
        if launched.graph.is_told and self._graphs.beside is not None:
            self._graphs.beside.tell(launched.graph, self._size)
            launched.ended.record()
        elif launched.graph.is_constrained:
            states = {slot: seat.state for slot, seat in self._seats.items() if seat.is_constrained}
            finish_round(launched.graph, states, self._graphs.target.vocab_size)
            launched.ended.record()

    def _is_too_late(self, depth: int) -> bool:
        """Whether the drafter must catch up now: it keeps states for no more rounds without guesses, or needs those of the
        round in flight."""
        most = None if self._graphs.drafter is None else self._graphs.drafter.most_late
        if most is None:
            return False
        is_unread = depth > 0 and self._pending is not None and not self._pending.graph.num_guesses
        return is_unread or any(seat.num_unread + 2 > most for seat in self._seats.values())

    def _catch_up(self) -> None:
        """The drafter reads the tokens that rounds without guesses have added."""
        lagging = {slot: seat for slot, seat in self._seats.items() if seat.num_unread}
        if lagging and self._graphs.drafter is not None:
            texts = ((seat.state.tokens, seat.known, seat.num_unread) for seat in lagging.values())
            self._graphs.drafter.catch_up(LateTexts(list(lagging), *zip(*texts, strict=True)), batch_size=self._size)
        for seat in lagging.values():
            seat.num_unread = 0

    def _read(self) -> RoundReport | None:
        """Wait for the round in flight, and give every request its tokens."""
        launched, self._pending = self._pending, None
        if launched is None:
            return None
        launched.ended.synchronize()
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        beside, notes = self._graphs.beside, launched.graph.note(launched.number)
        taking = {slot: seat for slot, seat in self._seats.items() if seat.runs_in(launched.index)}
        if beside is not None:
            notes = beside.noted(notes)
        report = launched.hand_out(taking, notes, self._graphs.target.max_len, seconds) if taking else None
        seen = launched.seen([notes[slot] if slot in taking else None for slot in range(self._size)])
        self._arriving.took(seen.score_seconds, 0 if report is None else report.num_tokens, launched.graph.num_pieces)
        self._graphs.policy.update(self._policy_state, seen)
        ended = {slot: seat.state for slot, seat in taking.items() if seat.state.is_finished}
        if beside is not None:
            beside.took({slot: notes[slot] for slot in taking}, launched.graph.logits)
            beside.finish(ended)
        self._empty(list(ended))
        return report

    def _empty(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._seats[slot]
        if slots:
            self._graphs.stop(self._size, slots)

    def _rest(self) -> None:
        """Free the slots when no request is left."""
        if self._size and not self.rows:
            self._pending, self._size = None, 0
            self._graphs.let_go()
