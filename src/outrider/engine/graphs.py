"""The captured rounds of a method, and the slots their requests stand in.

Every kind of round (``engine/round_kind.py``) is captured once (``engine/round_graph.py``). After a warm-up nothing is
captured: a kind that is missing is played by one that serves it.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from outrider.cache.paged import PagedCache
from outrider.core.device_round import PIECE_LEN, CapturedShape, DeviceDrafter, Frame, Texts
from outrider.core.device_sampling import Shaping, stages_for
from outrider.core.interfaces import Policy
from outrider.core.request import RequestState
from outrider.engine.round_graph import RoundGraph, RoundParts
from outrider.engine.round_kind import RoundKind, best_of, other_kinds, usual_kinds
from outrider.models.gpu.chain import Seats
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.uploads import sent

_STEP = 256
"""Token buffers are made in multiples of this."""


@final
class RoundGraphs:
    """The captured rounds of a target with a drafter, and the slots their requests stand in. Serves one lane at a time."""

    def __init__(self, target: FastDecoder, drafter: DeviceDrafter | None, policy: Policy, shape: CapturedShape) -> None:
        """``shape`` says what ``policy`` plans."""
        self.target, self.drafter, self.policy = target, drafter, policy
        shape = shape if drafter is None else shape.within(drafter.max_depth)
        self.most_guesses = shape.depth
        self.depths = [*([] if drafter is not None and not shape.varies else [0]), *sorted(shape.guesses)]
        """Guesses along a path that rounds are made for."""
        self.slack = max(PIECE_LEN, 1 + self.num_nodes(self.most_guesses))
        """Slots a round may use beyond a text."""
        self.seats = Seats(target)
        self._parts = RoundParts(target, drafter, self.seats)
        self.pool: Any = None
        self._holder: ReferenceType[Any] | None = None
        self._frames: dict[int, Frame] = {}
        self._rounds: dict[RoundKind, RoundGraph] = {}
        self._prepared: set[int] = set()
        """Numbers of slots whose rounds are captured; others are when they are first asked for."""
        self._version = self._versions()

    def num_nodes(self, depth: int) -> int:
        """Nodes of a round with so many guesses along a path, the root included."""
        return 1 if self.drafter is None or not depth else self.drafter.num_nodes(depth)

    def is_held_by_another(self, lane: object) -> bool:
        """Whether a lane that still exists uses the slots."""
        holder = None if self._holder is None else self._holder()
        return holder is not None and holder is not lane

    def hold(self, lane: object) -> None:
        """The slots are the lane's; whatever one that was dropped has left in them is given up."""
        if self._holder is None or self._holder() is not lane:
            self.let_go()
            self._holder = ref(lane)

    def let_go(self) -> None:
        """The slots are for whoever comes next."""
        self._holder = None
        for batch_size in self._frames:
            self.leave(batch_size)

    def frame(self, batch_size: int) -> Frame:
        """The frame of this many slots, each with room for the longest text there is and a round that overshoots."""
        if batch_size not in self._frames:
            capacity = -(-self.target.most_slots // _STEP) * _STEP
            with torch.inference_mode(False):  # whoever asks first, anybody may write to it
                frame = Frame.empty(batch_size, capacity, self.target.device)
                self._frames[batch_size] = replace(frame, pages=self.seats.table(batch_size)[:-1])
        return self._frames[batch_size]

    def _shaped(self, batch_size: int) -> Frame:
        """The frame of this many slots with room for all sampling parameters."""
        frame = self.frame(batch_size)
        if frame.shaping is None:
            with torch.inference_mode(False):
                shaping = Shaping.empty(batch_size, self.target.vocab_size, frame.tokens.device)
            frame = self._frames[batch_size] = replace(frame, shaping=shaping)
        return frame

    def seat(
        self,
        batch_size: int,
        slots: Sequence[int],
        states: Sequence[RequestState],
        caches: Sequence[PagedCache],
        features: Sequence[Tensor | None] = (),
    ) -> None:
        """Put requests whose prompts were read into slots, where they run from the next round on. ``features`` are the tapped
        states of their tokens but the last, where they were kept."""
        self._adopt(batch_size, slots, states, caches)
        if self.drafter is not None:
            rows = [state.tokens for state in states]
            known = [one for one, row in zip(features, rows, strict=False) if one is not None and len(one) == len(row) - 1]
            whole = known if len(known) == len(rows) else None
            self.drafter.seat(Texts(slots, rows, whole), batch_size=batch_size)
        self.grow(batch_size, dict(zip(slots, states, strict=True)))
        self.start(batch_size, slots, states)

    def open(
        self,
        batch_size: int,
        slots: Sequence[int],
        states: Sequence[RequestState],
        prefixes: Sequence[PagedCache | None],
    ) -> None:
        """Put requests into slots, where they stand still while rounds read their prompts. Prefixes hold the first tokens of
        some already; the drafter, which has not read them, reads all of these texts now."""
        caches = [self.target.new_cache(1) if prefix is None else prefix for prefix in prefixes]
        self._adopt(batch_size, slots, states, caches)
        if self.drafter is not None:
            known = [prefix is not None for prefix in prefixes]
            lent = Texts(list(compress(slots, known)), [state.tokens for state in compress(states, known)])
            fresh = [slot for slot in slots if slot not in lent.slots]
            if fresh:
                self.drafter.open(fresh, batch_size=batch_size)
            if lent.slots:
                self.drafter.seat(lent, batch_size=batch_size)
        self.grow(batch_size, dict(zip(slots, states, strict=True)))

    def has_pages(self, num_tokens: int, num_rows: int) -> bool:
        """Whether there are free pages for rows that hold so many tokens in all, and for a round behind each."""
        pool = self.target.pool
        return pool.has_room(pool.pages_for(num_tokens) + num_rows * (1 + pool.pages_for(3 * self.slack)))

    def has_room(self, batch_size: int, states: Mapping[int, RequestState]) -> bool:
        """Whether there are free pages for what the next rounds write to slots, or for a text that is to be read there. It asks
        for more than ``grow`` takes: until then a round in flight may end."""
        reaches = {slot: self._reach(state, rounds=3) for slot, state in states.items()}
        drafter = self.drafter
        return self.seats.has_room(reaches, batch_size=batch_size) and (
            drafter is None or drafter.has_room(reaches, batch_size=batch_size)
        )

    def grow(self, batch_size: int, states: Mapping[int, RequestState]) -> dict[int, int]:
        """Give slots the pages that the next rounds may write; the tokens that each has pages for then."""
        reaches = {slot: self._reach(state, rounds=2) for slot, state in states.items()}
        self.seats.grow(reaches, batch_size=batch_size)
        if self.drafter is not None:
            self.drafter.grow(reaches, batch_size=batch_size)
        return reaches

    def start(self, batch_size: int, slots: Sequence[int], states: Sequence[RequestState]) -> None:
        """Slots whose prompts were read run from the next round on."""
        self._limit_slots(batch_size, slots, list(map(self._limit, states)))

    def resize(self, old_size: int, new_size: int, slots: Sequence[int], states: Sequence[RequestState]) -> None:
        """Move requests from slots of one frame to the first ones of another, where they stand still until ``start``."""
        if slots:
            self.seats.move(old_size, new_size, slots)
            if self.drafter is not None:
                self.drafter.move(old_size, new_size, slots)
            self._fill(new_size, range(len(slots)), states)
        if old_size in self._frames and old_size != new_size:
            self._frames[old_size].limits.zero_()

    def _adopt(
        self, batch_size: int, slots: Sequence[int], states: Sequence[RequestState], caches: Sequence[PagedCache]
    ) -> None:
        self.seats.adopt(slots, caches, batch_size=batch_size)
        self._fill(batch_size, slots, states)

    def _limit(self, state: RequestState) -> int:
        """The length at which a request ends."""
        return min(len(state.request.prompt_ids) + state.params.max_tokens, self.target.max_len)

    def _capacity(self, state: RequestState) -> int:
        return self._limit(state) + self.slack

    def _reach(self, state: RequestState, *, rounds: int) -> int:
        """Where rounds may write behind what is known of a text: at least the one in flight and the next, to the end of a
        page."""
        pool = self.target.pool
        return min(pool.pages_for(len(state.tokens) + rounds * self.slack) * pool.page_len, self._capacity(state))

    def _fill(self, batch_size: int, slots: Sequence[int], states: Sequence[RequestState]) -> None:
        """Fill in the columns of a frame. Nobody moves yet."""
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
        index, *columns = sent([list(slots), lengths, prompt_lens, seeds], torch.int64, device)
        frame.limits.index_fill_(0, index, 0)
        for column, values in zip((frame.lengths, frame.prompt_lens, frame.seeds), columns, strict=True):
            column.index_copy_(0, index, values)
        temperatures = sent([state.params.temperature for state in states], torch.float32, device)
        frame.temperatures.index_copy_(0, index, temperatures)

    def _limit_slots(self, batch_size: int, slots: Sequence[int], limits: Sequence[int]) -> None:
        column = self.frame(batch_size).limits
        column.index_copy_(0, *sent([list(slots), list(limits)], torch.int64, column.device))

    def prepare(self, batch_size: int, *, guesses: Sequence[int], pieces: Sequence[int] = (0,)) -> Iterator[None]:
        """Compile and capture the rounds of so many slots with these numbers of guesses and pieces, one per step, before
        anybody waits for them. Those of unusual samplers take no longer than the usual ones, except for the few without which
        a request would wait. The slots must be free."""
        slots, began = range(batch_size), time.perf_counter()
        self.seats.open(slots, batch_size=batch_size)
        if self.drafter is not None:
            self.drafter.seat(Texts(slots, [[1, 1]] * batch_size), batch_size=batch_size)
        for kind in usual_kinds(batch_size, guesses, pieces):
            self.round(kind)
            yield
        ends = 2 * time.perf_counter() - began
        for kind in other_kinds(batch_size, guesses, pieces):
            if kind.num_guesses == guesses[0] or time.perf_counter() < ends:
                self.round(kind)
            yield
        self._prepared.add(batch_size)
        self.leave(batch_size)

    def stop(self, batch_size: int, slots: Sequence[int]) -> None:
        """Slots stand still from the next round on, and give their memory back."""
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
        """A round that does what is wanted, maybe with fewer guesses or pieces: none is captured where a warm-up was made."""
        self._forget_moved()
        served = best_of(self._rounds, wanted) if wanted.num_slots in self._prepared and wanted not in self._rounds else None
        return self.round(served or wanted)

    def round(self, kind: RoundKind) -> RoundGraph:
        """The captured round, captured now if it must be."""
        self._forget_moved()
        if kind not in self._rounds:
            if not self._rounds:  # a pool goes with the last graph that used it
                self.pool = torch.cuda.graph_pool_handle()
            frame = self._shaped(kind.num_slots) if kind.stages else self.frame(kind.num_slots)
            with torch.inference_mode():
                frame = replace(frame, stages=kind.stages, has_logprobs=kind.logprobs, is_constrained=kind.constrained)
                self._rounds[kind] = RoundGraph(self._parts, frame, kind.num_guesses, kind.num_pieces, pool=self.pool)
        return self._rounds[kind]

    def _forget_moved(self) -> None:
        """Memory that rounds point to has moved: they are captured again when they are asked for."""
        if self._version != self._versions():
            self._rounds.clear()
            self._prepared.clear()
            self._version = self._versions()

    def _versions(self) -> tuple[Hashable, Hashable]:
        return self.seats.version, None if self.drafter is None else self.drafter.version
