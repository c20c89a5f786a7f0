"""The captured rounds of a method, and the slots their requests stand in.

Each kind of round (``engine/round_kind.py``) is captured once as a CUDA graph (``engine/round_graph.py``). After a warm-up
nothing more is captured: a round of a missing kind runs as another kind that can do the same.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final
from weakref import ReferenceType, ref

import torch

from outrider.core.device_round import PIECE_LEN, CapturedShape, DeviceDrafter, Frame, LateTexts, PairedRows, Texts
from outrider.core.device_sampling import Shaping, stages_for
from outrider.core.interfaces import Policy
from outrider.core.request import RequestState
from outrider.device.slot_pages import SlotPages
from outrider.engine.between_rounds import BetweenRounds
from outrider.engine.device_seats import Seat
from outrider.engine.round_graph import RoundGraph, RoundParts
from outrider.engine.round_kind import RoundKind, best_of, other_kinds, told_kinds, usual_kinds
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.reading import sizes_to_read
from outrider.models.gpu.uploads import sent

_STEP = 256
"""Sizes of token buffers are multiples of this."""


@final
class RoundGraphs:
    """The captured rounds of a target with a drafter, and the slots of their requests. It serves one lane at a time."""

    def __init__(
        self,
        target: FastDecoder,
        drafter: DeviceDrafter | None,
        policy: Policy,
        shape: CapturedShape,
        *,
        beside: BetweenRounds | None = None,
        pairs: PairedRows | None = None,
    ) -> None:
        """``shape`` describes the plans of ``policy``. ``beside`` is a drafter that drafts between rounds. With ``pairs``, a
        slot is two rows of the target."""
        self.target, self.drafter, self.policy, self.beside = target, drafter, policy, beside
        shape = shape if drafter is None else shape.within(drafter.max_depth)
        self.most_guesses = shape.depth
        may_be_none = drafter is None or beside is not None or shape.varies
        self.depths = [*([0] if may_be_none else []), *sorted(shape.guesses)]
        """Guesses along a path that rounds are made for."""
        self.slack = max(PIECE_LEN, 1 + self.num_nodes(self.most_guesses))
        """Slots a round may use beyond a text."""
        self._rows_each, self.least_len = 1 if pairs is None else 2, 1 if drafter is None else drafter.least_len
        self.seats = SlotPages.of_decoder(target, rows_each=self._rows_each)
        self._parts = RoundParts(target, drafter, self.seats, beside is not None and beside.reads_logits, pairs)
        self.pool: Any = None
        self._holder: ReferenceType[Any] | None = None
        self._frames: dict[int, Frame] = {}
        self._rounds: dict[RoundKind, RoundGraph] = {}
        self._prepared: set[int] = set()
        """Numbers of slots whose rounds were captured in advance. Other numbers are captured when they are first needed."""
        self._version = self._versions()

    def num_nodes(self, depth: int) -> int:
        """Nodes of a round with so many guesses along a path, the root included."""
        return 1 if self.drafter is None or not depth else self.drafter.num_nodes(depth)

    @property
    def prompt_taps(self) -> tuple[int, ...]:
        """Target layers whose states of a prompt the drafter begins with."""
        return self.beside.prompt_taps if self.beside is not None else self.drafter.taps if self.drafter is not None else ()

    def is_held_by_another(self, lane: object) -> bool:
        """Whether a lane that still exists uses the slots."""
        holder = None if self._holder is None else self._holder()
        return holder is not None and holder is not lane

    def hold(self, lane: object) -> None:
        """Give the slots to a lane. Anything left in them by a lane that no longer exists is freed."""
        if self._holder is None or self._holder() is not lane:
            self.let_go()
            self._holder = ref(lane)

    def let_go(self) -> None:
        """Give the slots up, so that another lane can hold them."""
        self._holder = None
        for batch_size in self._frames:
            self.leave(batch_size)

    def frame(self, batch_size: int) -> Frame:
        """The frame of this many slots, each with room for the longest text there is and a round that overshoots."""
        if batch_size not in self._frames:
            capacity = -(-self.target.most_slots // _STEP) * _STEP
            with torch.inference_mode(False):  # whoever asks first, anybody may write to it
                frame = Frame.empty(batch_size, capacity, self.target.device)
                self._frames[batch_size] = replace(frame, pages=self.seats.pages(batch_size)[:: self._rows_each])
        return self._frames[batch_size]

    def _shaped(self, batch_size: int) -> Frame:
        """The frame of this many slots with room for all sampling parameters."""
        frame = self.frame(batch_size)
        if frame.shaping is None:
            with torch.inference_mode(False):
                shaping = Shaping.empty(batch_size, self.target.vocab_size, frame.tokens.device)
            frame = self._frames[batch_size] = replace(frame, shaping=shaping)
        return frame

    def seat(self, batch_size: int, seats: Mapping[int, Seat]) -> None:
        """Put requests with their prefilled tokens into slots, where they wait for ``start``. The drafter reads the tokens that
        the target has read. Prompts that are not read yet are read by the rounds."""
        caches = [self.target.new_cache(self._rows_each) if seat.cache is None else seat.cache for seat in seats.values()]
        caches = caches if self._parts.pairs is None else [self._parts.pairs.held(cache) for cache in caches]
        states = {slot: seat.state for slot, seat in seats.items()}
        self.seats.adopt(list(seats), caches, batch_size=batch_size)
        self._fill(batch_size, states)
        if self.drafter is not None:
            read = {slot: seat for slot, seat in seats.items() if seat.cache is not None}
            fresh = [slot for slot in seats if slot not in read]
            if fresh:
                self.drafter.open(fresh, batch_size=batch_size)
            if read:
                features = [seat.features for seat in read.values() if seat.features is not None]
                rows, whole = [seat.state.tokens for seat in read.values()], len(features) == len(read)
                self.drafter.seat(Texts(list(read), rows, features if whole else None), batch_size=batch_size)
        self.grow(batch_size, states)

    def has_pages(self, num_tokens: int, num_rows: int) -> bool:
        """Whether there are free pages for rows with so many tokens in all, and for a round after each."""
        pool = self.target.pool
        num_pages = pool.pages_for(num_tokens) + num_rows * (1 + pool.pages_for(3 * self.slack))
        return pool.has_room(self._rows_each * num_pages)

    def has_room(self, batch_size: int, states: Mapping[int, RequestState]) -> bool:
        """Whether there are free pages for what the next rounds write, or for a new text. It asks for more than ``grow`` takes,
        because a round in flight may need more before it ends."""
        reaches = {slot: self._reach(state, rounds=3) for slot, state in states.items()}
        drafter = self.drafter
        return self.seats.has_room(reaches, batch_size=batch_size) and (
            drafter is None or drafter.has_room(reaches, batch_size=batch_size)
        )

    def grow(self, batch_size: int, states: Mapping[int, RequestState]) -> dict[int, int]:
        """Give slots the pages that the next rounds may write. Returns how many tokens each slot has pages for."""
        reaches = {slot: self._reach(state, rounds=2) for slot, state in states.items()}
        self.seats.grow(reaches, batch_size=batch_size)
        if self.drafter is not None:
            self.drafter.grow(reaches, batch_size=batch_size)
        return reaches

    def start(self, batch_size: int, states: Mapping[int, RequestState]) -> None:
        """Let slots run from the next round on; their prompts were read."""
        if states:
            self._limit_slots(batch_size, list(states), list(map(self._limit, states.values())))

    def resize(self, old_size: int, new_size: int, states: Mapping[int, RequestState]) -> None:
        """Move requests from the slots of one frame to the first slots of another, where they wait for ``start``."""
        if states:
            self.seats.move(old_size, new_size, list(states))
            if self.drafter is not None:
                self.drafter.move(old_size, new_size, list(states))
            self._fill(new_size, dict(enumerate(states.values())))
        if old_size in self._frames and old_size != new_size:
            self._frames[old_size].limits.zero_()

    def _limit(self, state: RequestState) -> int:
        """The length at which a request ends."""
        return min(len(state.request.prompt_ids) + state.params.max_tokens, self.target.max_len)

    def _capacity(self, state: RequestState) -> int:
        return self._limit(state) + self.slack

    def _reach(self, state: RequestState, *, rounds: int) -> int:
        """Last place that rounds may write after the known text: at least the round in flight and the next one, up to the end
        of a page."""
        pool = self.target.pool
        return min(pool.pages_for(len(state.tokens) + rounds * self.slack) * pool.page_len, self._capacity(state))

    def _fill(self, batch_size: int, filled: Mapping[int, RequestState]) -> None:
        """Fill in the columns of a frame. No slot runs yet."""
        slots, states = list(filled), list(filled.values())
        shaped = bool(stages_for([state.request for state in states]))
        frame = self._shaped(batch_size) if shaped else self.frame(batch_size)
        if frame.shaping is not None:
            frame.shaping.seat(slots, states, sent)
        device, lengths = frame.tokens.device, [len(state.tokens) for state in states]
        starts = [slot * frame.capacity for slot in slots]
        places = [start + place for start, length in zip(starts, lengths, strict=True) for place in range(length)]
        places, tokens = sent([places, [token for state in states for token in state.tokens]], torch.int64, device)
        frame.tokens.view(-1).index_copy_(0, places, tokens)
        prompt_lens, seeds = [len(state.request.prompt_ids) for state in states], [state.seed for state in states]
        index, *columns = sent([slots, lengths, prompt_lens, seeds], torch.int64, device)
        frame.limits.index_fill_(0, index, 0)
        for column, values in zip((frame.lengths, frame.prompt_lens, frame.seeds), columns, strict=True):
            column.index_copy_(0, index, values)
        temperatures = sent([state.params.temperature for state in states], torch.float32, device)
        frame.temperatures.index_copy_(0, index, temperatures)

    def _limit_slots(self, batch_size: int, slots: Sequence[int], limits: Sequence[int]) -> None:
        column = self.frame(batch_size).limits
        column.index_copy_(0, *sent([list(slots), list(limits)], torch.int64, column.device))

    def kinds(self, batch_size: int, pieces: Sequence[int]) -> tuple[list[RoundKind], list[RoundKind]]:
        """Kinds of rounds for so many slots and these numbers of pieces: those that are always captured, then others."""
        usual, rule = usual_kinds(batch_size, self.depths, pieces), None if self.beside is None else self.beside.rule
        if rule is None:
            return usual, list(other_kinds(batch_size, self.depths, pieces))
        return list(told_kinds(batch_size, self.depths, pieces)), usual if rule.lossless else []

    def prepare(self, batch_size: int, *, pieces: Sequence[int] = (0,)) -> Iterator[None]:
        """Compile and capture the rounds for so many slots, one per step, before any request waits for them. Kinds beyond the
        usual ones get no more time than the usual ones took, except for the few without which a request would wait. The slots
        must be free."""
        slots, began = range(batch_size), time.perf_counter()
        self.seats.open(slots, batch_size=batch_size)
        if not self._prepared:
            self._read_texts(batch_size)
        if self.drafter is not None:
            self.drafter.seat(Texts(slots, [[1, 1]] * batch_size), batch_size=batch_size)
            for power in range((self.drafter.most_late or PIECE_LEN).bit_length()):
                text, added = [1] * (1 + (1 << power)), 1 << power
                late = LateTexts(slots, [text] * batch_size, [1] * batch_size, [added] * batch_size)
                self.drafter.catch_up(late, batch_size=batch_size)
        usual, others = self.kinds(batch_size, pieces)
        for kind in usual:
            self.round(kind)
            yield
        ends = 2 * time.perf_counter() - began
        for kind in others:
            if kind.num_guesses == self.depths[0] or time.perf_counter() < ends:
                self.round(kind)
            yield
        self._prepared.add(batch_size)
        self.leave(batch_size)

    def _read_texts(self, batch_size: int) -> None:
        """Read texts as requests would bring them, so that the kernels of prefill are compiled."""
        target, drafter = self.target, self.drafter
        for size in sizes_to_read(target):
            target.prefill([[1] * size], target.new_cache(1), taps=self.prompt_taps)
        for size in () if drafter is None else drafter.text_sizes:
            if drafter is not None and drafter.fits(size + 1):
                drafter.seat(Texts([0], [[1] * (size + 1)]), batch_size=batch_size)

    def stop(self, batch_size: int, slots: Sequence[int]) -> None:
        """Stop these slots after the present round, and free their memory."""
        self._limit_slots(batch_size, slots, [0] * len(slots))
        lengths = self.frame(batch_size).lengths
        lengths.index_fill_(0, sent(list(slots), torch.int64, lengths.device), 2)  # to see less of the spare page
        self.seats.release(batch_size, slots)
        if self.drafter is not None:
            self.drafter.release(slots, batch_size=batch_size)

    def leave(self, batch_size: int) -> None:
        """All requests have finished: free the rows."""
        self.frame(batch_size).limits.zero_()
        self.seats.leave(batch_size)
        if self.drafter is not None:
            self.drafter.release(range(batch_size), batch_size=batch_size)

    def fits(self, capacity: int) -> bool:
        """Whether a text may grow to this many tokens."""
        if capacity + self.slack > self.target.most_slots:
            return False
        return self.drafter is None or self.drafter.fits(capacity + self.slack)

    def at_hand(self, wanted: RoundKind) -> RoundGraph:
        """A captured round that serves the wanted kind, perhaps with fewer guesses or pieces. After a warm-up, nothing new is
        captured."""
        self._forget_moved()
        served = best_of(self._rounds, wanted) if wanted.num_slots in self._prepared and wanted not in self._rounds else None
        return self.round(served or wanted)

    def round(self, kind: RoundKind) -> RoundGraph:
        """The captured round of this kind, which is captured now if necessary."""
        self._forget_moved()
        if kind not in self._rounds:
            if not self._rounds:  # a pool goes with the last graph that used it
                self.pool = torch.cuda.graph_pool_handle()
            frame = self._shaped(kind.num_slots) if kind.stages else self.frame(kind.num_slots)
            with torch.inference_mode():
                frame = replace(frame, stages=kind.stages, has_logprobs=kind.logprobs, is_constrained=kind.constrained)
                shape = (kind.num_guesses, kind.num_pieces)
                self._rounds[kind] = RoundGraph(self._parts, frame, *shape, pool=self.pool, is_told=kind.told)
        return self._rounds[kind]

    def _forget_moved(self) -> None:
        """Drop graphs whose memory has moved. They are captured again when they are needed."""
        if self._version != self._versions():
            self._rounds.clear()
            self._prepared.clear()
            self._version = self._versions()

    def _versions(self) -> tuple[Hashable, Hashable]:
        return self.seats.version, None if self.drafter is None else self.drafter.version
