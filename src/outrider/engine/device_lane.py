"""A lane whose rounds are graphs: the device runs one round ahead of the host.

While a round runs, the host reads the note of the one before: gives every request its tokens, sees who has ended and tells the
policy. A request that ended is noticed one round late; what the device did to its slot in the meantime is thrown away, so the
output is that of ``Lane``, its oracle, token for token. Slots come in powers of two: a frame grows when more requests join, and
shrinks when most have left.

A request that arrives while others run has its prompt read inside their rounds, a few pieces at a time, so nobody waits for a
pass of its own. When nobody runs, the scheduler reads prompts in passes as wide as they are long (``engine/arrival.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from outrider.core.device_sampling import Stages, stages_for
from outrider.core.interfaces import Plan
from outrider.core.report import RoundReport
from outrider.core.request import Request, RequestState
from outrider.engine.constrained import finish_round
from outrider.engine.device_seats import Joining, Seat, next_pieces, num_pieces_left, observation_of, prompts_of
from outrider.engine.launched import Launched
from outrider.engine.memory import BatchSize
from outrider.engine.round_kind import SHRINKS, RoundKind, num_slots
from outrider.engine.step import Batch, Engine

if TYPE_CHECKING:
    from outrider.engine.graphs import RoundGraphs
    from outrider.engine.round_graph import RoundGraph


@final
class DeviceLane:
    """Requests that run with one method, in slots of its captured rounds."""

    def __init__(self, graphs: RoundGraphs, reader: Engine) -> None:
        """``reader`` is the engine that reads prompts for it when nobody runs, without a drafter."""
        self.engine = reader
        self._graphs = graphs
        self._seats: list[Seat | None] = []
        self._joining: list[Joining] = []
        self._pending: Launched | None = None
        self._num_rounds = 0
        self._policy_state: Any = None
        self.on_read: Callable[[int, Any], object] = lambda *_: None
        """Told who was read inside rounds, and where its keys are."""
        self._clock = time.perf_counter()

    def accepts(self, request: Request) -> bool:
        """The device can do all that the request's sampling asks for, the prompt has the two tokens a drafter's first pass
        reads, and no other lane (a stream that was left half read) holds the slots."""
        graphs = self._graphs
        if graphs.is_held_by_another(self) or len(request.prompt_ids) < 2 or stages_for([request]) is None:
            return False
        if request.read_ids and graphs.drafter is not None and graphs.drafter.taps:
            return False  # heads learn what the target made of an image from whoever reads the prompt, and that is the host
        return graphs.fits(min(len(request.prompt_ids) + request.params.max_tokens, graphs.target.max_len))

    @property
    def order(self) -> list[int]:
        """Numbers of the requests."""
        return [*(seat.number for seat in self._taken), *(one.number for one in self._joining)]

    @property
    def size(self) -> BatchSize:
        states = [*(seat.state for seat in self._taken), *(one.state for one in self._joining)]
        lengths = [len(state.tokens) for state in states]
        return BatchSize(len(lengths), max(lengths, default=0), sum(lengths))

    def reads(self, request: Request) -> bool:
        """Whether a prompt is read inside rounds: some are on their way, and it is text alone."""
        return bool(self._taken) and not request.read_ids

    def _needy(self, rounds: int) -> dict[int, RequestState]:
        """Slots that have no pages for what so many rounds may write."""
        ahead = rounds * self._graphs.slack
        return {
            slot: seat.state
            for slot, seat in enumerate(self._seats)
            if seat is not None and len(seat.state.tokens) + ahead > seat.num_paged
        }

    @property
    def _taken(self) -> list[Seat]:
        return [seat for seat in self._seats if seat is not None]

    def admit(self, number: int, state: RequestState, prefix: Any = None) -> None:
        """A request takes a slot before the next round; rounds read its prompt. ``prefix`` holds the first tokens of it."""
        self._joining.append(Joining(number, state, prefix, is_read=False))

    def join(self, fresh: Batch) -> None:
        """Requests whose prompts were read take slots before the next round."""
        features = fresh.drafter_state.features
        for row, (number, state) in enumerate(zip(fresh.ids, fresh.rows, strict=True)):
            self._joining.append(Joining(number, state, fresh.cache.fork([row]), True, features[row]))

    def leave(self, number: int) -> None:
        """A request is given up."""
        self._joining = [one for one in self._joining if one.number != number]
        self._empty([slot for slot, seat in enumerate(self._seats) if seat is not None and seat.number == number])
        self._rest()

    def has_pages(self, sizes: Sequence[BatchSize]) -> bool:
        """Whether batches that are to be read find pages."""
        return self._graphs.has_pages(sum(size.num_rows * size.longest for size in sizes), sum(size.num_rows for size in sizes))

    @property
    def one_too_many(self) -> int | None:
        """The youngest request, where the next round needs more pages than there are and somebody else can go on."""
        needy = self._needy(3)
        if not needy or self._graphs.has_room(len(self._seats), needy):
            return None
        return max(self.order) if len(self.order) > 1 else None

    def step(self) -> RoundReport | None:
        """Start the next round, then report the one before it, if there was one."""
        if not self.order:
            return None
        report = self._make_seats()
        self._start_read()
        self._graphs.policy.carry(self._policy_state, prompts_of(self._seats, num_pieces_left(self._seats)))
        plan = self._graphs.policy.plan(self._policy_state, len(self._seats))
        if any(self._seats):
            graph, after = self._graph(min(max(plan.max_depth), self._graphs.most_guesses)), None
            if graph.num_guesses and any(seat.num_unread for seat in self._taken):
                after = self._pending.ended if self._pending else None
                report = report or self._read()
                self._catch_up()
            self._grow()
            launched = self._launch(graph, plan, after)
            report = report or self._read()
            self._finish(launched)
            self._pending = launched
        self._rest()
        return report

    def _grow(self) -> None:
        """Pages for this round and the next."""
        for slot, num_tokens in self._graphs.grow(len(self._seats), self._needy(2)).items():
            seat = self._seats[slot]
            assert seat is not None
            seat.num_paged = num_tokens

    def _make_seats(self) -> RoundReport | None:
        """Give slots to those who have joined; the report of the round that had to end before the frame could change."""
        needed, report = num_slots(len(self.order)), None
        if needed > len(self._seats) or needed * SHRINKS <= len(self._seats):
            report = self._read()
            needed = num_slots(max(1, len(self.order)))  # some may have ended
            if needed != len(self._seats):
                self._resize(needed)
        if self._joining:
            self._seat()
        return report

    def _resize(self, size: int) -> None:
        """Move every request to a frame of another size."""
        graphs, old = self._graphs, self._seats
        kept, seats = [slot for slot, seat in enumerate(old) if seat is not None], self._taken
        graphs.hold(self)
        graphs.resize(len(old), size, kept, [seat.state for seat in seats])
        self._seats = [*seats, *[None] * (size - len(kept))]
        running = [slot for slot, seat in enumerate(seats) if seat.first_round is not None]
        if running:
            graphs.start(size, running, [seats[slot].state for slot in running])
        fresh = graphs.policy.start(max(1, size - len(kept)))
        if kept:
            known = self._policy_state.fork(kept)
            fresh = known if size == len(kept) else known.join(fresh)
        self._policy_state = fresh

    def _seat(self) -> None:
        began, size = time.perf_counter(), len(self._seats)
        free = [slot for slot, seat in enumerate(self._seats) if seat is None]
        pairs = list(zip(free, self._joining, strict=False))
        while len(pairs) > (not self._taken) and not self._has_room(pairs):
            pairs.pop()  # waits for pages
        self._joining = self._joining[len(pairs) :]
        read = [(slot, one) for slot, one in pairs if one.is_read]
        if read:
            slots, states, *kept = zip(*((slot, one.state, one.cache, one.features) for slot, one in read), strict=True)
            self._graphs.seat(size, slots, states, *kept)
        unread = [(slot, one) for slot, one in pairs if not one.is_read]
        if unread:
            slots, states, prefixes = zip(*((slot, one.state, one.cache) for slot, one in unread), strict=True)
            self._graphs.open(size, slots, states, prefixes)
        for slot, one in pairs:
            stages = stages_for([one.state.request])
            assert stages is not None, "the others run on the host"
            num_read = 0 if one.cache is None else one.cache.lengths[0]
            seat = self._seats[slot] = Seat(one.number, one.state, stages, num_read, began)
            if one.is_read:
                seat.start(self._num_rounds)
        self._clock += time.perf_counter() - began

    def _has_room(self, pairs: Sequence[tuple[int, Joining]]) -> bool:
        """Whether there are pages for those who join, and for those who are here to go on."""
        return self._graphs.has_room(len(self._seats), self._needy(3) | {slot: one.state for slot, one in pairs})

    def _start_read(self) -> None:
        """Requests whose last piece is in a started round run from the next round on."""
        waiting = [(slot, seat) for slot, seat in enumerate(self._seats) if seat is not None and seat.first_round is None]
        done = [(slot, seat) for slot, seat in waiting if not seat.num_left]
        if done:
            self._graphs.start(len(self._seats), [slot for slot, _ in done], [seat.state for _, seat in done])
        for slot, seat in done:
            seat.start(self._num_rounds)
            self.on_read(seat.number, self._graphs.seats.cache_of(len(self._seats), slot, len(seat.state.tokens) - 1))

    def _graph(self, num_guesses: int) -> RoundGraph:
        """The round for those who are here."""
        began = time.perf_counter()
        asked = {seat.asks for seat in self._taken if seat.first_round is not None} or {(Stages.TEMPERATURE, False, False)}
        stages, logprobs, constrained = map(max, zip(*asked, strict=True))
        wanted = RoundKind(len(self._seats), num_guesses, num_pieces_left(self._seats), stages, logprobs, constrained)
        graph = self._graphs.at_hand(wanted)
        self._clock = began if self._pending is None else self._clock
        self._clock += time.perf_counter() - began  # capturing is no part of a round
        return graph

    def _launch(self, graph: RoundGraph, plan: Plan, after: torch.cuda.Event | None) -> Launched:
        prompts = prompts_of(self._seats, graph.num_pieces)
        pieces = next_pieces(self._seats, graph.num_pieces)
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        number = graph.launch(pieces)
        if not graph.is_constrained:
            events[1].record()
        self._num_rounds += 1
        return Launched(graph, plan, number, self._num_rounds - 1, *events, prompts, after)

    def _finish(self, launched: Launched) -> None:
        """Say what grammars allow in a round that waits for it, now that the round before was read."""
        if launched.graph.is_constrained:
            states = {slot: seat.state for slot, seat in enumerate(self._seats) if seat is not None and seat.is_constrained}
            finish_round(launched.graph, states, self._graphs.target.vocab_size)
            launched.ended.record()

    def _catch_up(self) -> None:
        """The drafter reads the tokens that rounds without guesses have added."""
        lagging = [(slot, seat) for slot, seat in enumerate(self._seats) if seat is not None and seat.num_unread]
        if lagging and self._graphs.drafter is not None:
            rows, known = [seat.state.tokens for _, seat in lagging], [seat.known for _, seat in lagging]
            slots = [slot for slot, _ in lagging]
            self._graphs.drafter.catch_up(slots, rows, batch_size=len(self._seats), known=known)
        for _, seat in lagging:
            seat.num_unread = 0

    def _read(self) -> RoundReport | None:
        """Wait for the round in flight, and give every request what it brought."""
        launched, self._pending = self._pending, None
        if launched is None:
            return None
        launched.ended.synchronize()
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        notes, depth = launched.graph.note(launched.number), launched.graph.num_guesses
        taking = {
            slot: seat
            for slot, seat in enumerate(self._seats)
            if seat is not None and seat.first_round is not None and launched.index >= seat.first_round
        }
        positions = [seat.state.num_output for seat in taking.values()]
        emitted = [
            seat.take(notes[slot], drafted=depth > 0, max_len=self._graphs.target.max_len) for slot, seat in taking.items()
        ]
        launched.add_logprobs(taking, emitted)
        everybody = [notes[slot] if slot in taking else None for slot in range(len(self._seats))]
        graph, plan = launched.graph, launched.plan
        took = launched.seconds, plan, launched.prompts
        seen = observation_of(everybody, depth, graph.num_nodes, *took, reading=launched.reading)
        self._graphs.policy.update(self._policy_state, seen)
        self._empty([slot for slot, seat in taking.items() if seat.state.is_finished])
        return launched.report(taking, notes, positions, emitted, seconds=seconds) if taking else None

    def _empty(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._seats[slot] = None
        if slots:
            self._graphs.stop(len(self._seats), slots)

    def _rest(self) -> None:
        """Free the slots when no request is left."""
        if self._seats and not self.order:
            self._pending, self._seats = None, []
            self._graphs.let_go()
