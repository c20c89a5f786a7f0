"""A whole round as one graph: draft, score, walk and commit without asking the host anything.

For every (slots, guesses, stages of the sampler) the round is captured once. What it reads (tokens, lengths, sampling
parameters) and what it decides stays in a ``Frame`` on the device. A note of each round's result goes to the host by itself
and is read one round late (``engine/device_lane.py``), so the device never waits. Plain decoding is the round with no guesses.

    roots -> guesses -> logits -> choices -> accepted -> tokens, lengths, note          one launch
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final
from weakref import ReferenceType, ref

import torch

from outrider.cache.paged import PagedCache
from outrider.core.device_round import DeviceDrafter, Frame
from outrider.core.device_sampling import Shaping, Stages, stages_for
from outrider.core.interfaces import Policy
from outrider.core.request import RequestState
from outrider.engine.notes import NotedLogprobs, Notes
from outrider.models.attention.tree_tiles import Sights
from outrider.models.gpu.adjust import Trail
from outrider.models.gpu.arena import DeviceCache
from outrider.models.gpu.chain import Seats
from outrider.models.gpu.choose import block_bests
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.replay import capturing
from outrider.models.gpu.walk import NOTE, RING, chain_parents, move_path, walk_and_commit

_STEP = 256
"""Token buffers are made in multiples of this."""
_LONGEST = 1 << 17
"""Tokens of a text that a frame has room for."""


@final
class RoundGraph:
    """One captured round of a frame."""

    def __init__(self, graphs: RoundGraphs, frame: Frame, num_guesses: int) -> None:
        batch_size, device = frame.batch_size, graphs.target.device
        self._graphs, self._frame = graphs, frame
        drafter = graphs.drafter if num_guesses else None
        self._trees = None if drafter is None else drafter.trees(batch_size)
        num_nodes = num_guesses + 1 if self._trees is None else self._trees.parents.shape[1]
        self._parents = chain_parents(batch_size, num_nodes, device) if self._trees is None else self._trees.parents
        self._nodes = torch.zeros(batch_size, num_nodes, dtype=torch.int64, device=device)
        ring = torch.zeros(RING, batch_size, NOTE + num_guesses + 1, dtype=torch.int64, device=device)
        rounds = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.notes = Notes(rounds, ring, torch.zeros(ring.shape, dtype=torch.int64, pin_memory=True))
        self.logprobs = NotedLogprobs.empty(ring) if frame.has_logprobs else None
        self.num_guesses = num_guesses
        self.num_launched = 0
        held = frame.limits.clone()
        frame.limits.zero_()  # kernels are compiled by running them; nobody moves while that happens
        self._round()
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with capturing(self.graph, graphs.pool):
            self._round()
        frame.limits.copy_(held)
        rounds.zero_()

    def launch(self) -> int:
        """Start a round; returns its number."""
        self.graph.replay()
        self.num_launched += 1
        return self.num_launched - 1

    def note(self, number: int) -> list[list[int]]:
        """What round ``number`` did, by slot. It must have ended, with fewer than RING rounds launched after it."""
        return self.notes.host[number % RING].tolist()

    def _round(self) -> None:
        graphs, frame, nodes, trees = self._graphs, self._frame, self._nodes, self._trees
        nodes[:, :1] = frame.tokens.gather(1, frame.lengths[:, None] - 1)
        if graphs.drafter is not None and self.num_guesses:
            graphs.drafter.propose(frame, nodes)
        target, seats = graphs.target, graphs.seats
        rows = seats.rows(frame.lengths - 1)
        sights = Sights(None, None) if trees is None else Sights(trees.words, trees.depths, 0, trees.paths)
        shape = (frame.batch_size, nodes.shape[1])
        step = target.step(shape, rows, sights, num_slots=seats.num_slots(frame.batch_size))
        taps = () if graphs.drafter is None else graphs.drafter.taps
        logits, tapped = target.forward(nodes.clamp(min=0), step, taps=taps)
        before = frame.lengths - 1
        depths, words = (None, None) if trees is None else (trees.depths, trees.words)
        trail = Trail(nodes, words)
        raw = logits.clone() if frame.has_logprobs and frame.stages else logits
        bests = block_bests(logits, frame, depths=depths, vocab_size=target.vocab_size, trail=trail)
        ring, rounds = self.notes.ring, self.notes.rounds
        path = walk_and_commit(bests, nodes, frame, parents=self._parents, ring=ring, rounds=rounds)
        if trees is not None:
            move_path(target.memory.block, rows, path)
        if graphs.drafter is not None and taps:
            features = torch.cat([tapped[tap] for tap in taps], -1)
            graphs.drafter.take(before, features, None if trees is None else path)
        self.notes.host.copy_(self.notes.ring, non_blocking=True)
        if self.logprobs is not None:
            self.logprobs.note(raw[..., : target.vocab_size], path, self.notes)


@final
class RoundGraphs:
    """The captured rounds of a target with a drafter, and the slots their requests stand in. Serves one lane at a time."""

    def __init__(self, target: FastDecoder, drafter: DeviceDrafter | None, policy: Policy, *, most_guesses: int) -> None:
        """``policy`` plans the number of guesses, up to ``most_guesses``."""
        self.target, self.drafter, self.policy = target, drafter, policy
        size = None if drafter is None else drafter.tree_size
        self.most_guesses = 0 if drafter is None else most_guesses if size is None else size[1]
        self._slack = 1 + (self.most_guesses + 1 if size is None else size[0])
        """Slots a round may use beyond a text."""
        self.seats = Seats(target)
        self.pool: Any = None
        self._holder: ReferenceType[Any] | None = None
        self._frames: dict[int, Frame] = {}
        self._rounds: dict[tuple[int, int, Stages, bool], RoundGraph] = {}
        self._version = self._versions()

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
            capacity = -(-(min(self.target.max_len, _LONGEST) + self._slack) // _STEP) * _STEP
            with torch.inference_mode(False):  # whoever asks first, anybody may write to it
                self._frames[batch_size] = Frame.empty(batch_size, capacity, self.target.device)
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
        self, batch_size: int, slots: Sequence[int], states: Sequence[RequestState], caches: Sequence[DeviceCache | PagedCache]
    ) -> None:
        """Put requests whose prompts were read into slots."""
        rows = [state.tokens for state in states]
        capacities = [self._limit(state) + self._slack for state in states]
        self.seats.adopt(slots, caches, batch_size=batch_size, capacities=capacities)
        if self.drafter is not None:
            self.drafter.seat(slots, rows, batch_size=batch_size, capacity=max(capacities))
        self._fill(batch_size, slots, states)

    def resize(self, old_size: int, new_size: int, slots: Sequence[int], states: Sequence[RequestState]) -> None:
        """Move requests from slots of one frame to the first ones of another."""
        if slots:
            capacity = max(self._limit(state) for state in states) + self._slack
            self.seats.move(old_size, new_size, slots)
            if self.drafter is not None:
                self.drafter.move(old_size, new_size, slots, capacity=capacity)
            self._fill(new_size, range(len(slots)), states)
        if old_size in self._frames and old_size != new_size:
            self._frames[old_size].limits.zero_()

    def _limit(self, state: RequestState) -> int:
        """The length at which a request ends."""
        return min(len(state.request.prompt_ids) + state.params.max_tokens, self.target.max_len)

    def _fill(self, batch_size: int, slots: Sequence[int], states: Sequence[RequestState]) -> None:
        """Fill in the columns of a frame."""
        shaped = bool(stages_for([state.request for state in states]))
        frame = self._shaped(batch_size) if shaped else self.frame(batch_size)
        if frame.shaping is not None:
            frame.shaping.seat(slots, states)
        device = frame.tokens.device
        for slot, state in zip(slots, states, strict=True):
            frame.tokens[slot, : len(state.tokens)] = torch.tensor(state.tokens, device=device)
        index = torch.tensor(list(slots), device=device)
        for column, values in (
            (frame.lengths, [len(state.tokens) for state in states]),
            (frame.prompt_lens, [len(state.request.prompt_ids) for state in states]),
            (frame.limits, [self._limit(state) for state in states]),
            (frame.seeds, [state.seed for state in states]),
            (frame.temperatures, [state.params.temperature for state in states]),
        ):
            column[index] = torch.tensor(values, dtype=column.dtype, device=device)

    def prepare(self, batch_size: int, capacity: int, *, guesses: Sequence[int]) -> Iterator[None]:
        """Compile and capture the rounds of so many slots with these numbers of guesses, one per step, before anybody waits
        for them. The slots must be free."""
        slots, capacity = range(batch_size), capacity + self._slack
        cache = self.target.new_cache(batch_size)
        self.target.prefill([[1]] * batch_size, cache)
        caches = [cache.fork([row]) for row in slots]
        del cache
        # memory moves when rows are added, and graphs hold its address
        self.seats.adopt(slots, caches, batch_size=batch_size, capacities=[capacity] * batch_size)
        if self.drafter is not None:
            self.drafter.seat(slots, [[1, 1]] * batch_size, batch_size=batch_size, capacity=capacity)
        for num_guesses in guesses:
            self.round(batch_size, num_guesses)
            yield
        self.leave(batch_size)

    def stop(self, batch_size: int, slots: Sequence[int]) -> None:
        """Slots stand still from the next round on, and give their memory back."""
        self.frame(batch_size).limits[list(slots)] = 0
        self.seats.release(batch_size, slots)

    def leave(self, batch_size: int) -> None:
        """Everybody has finished: nothing moves any more, and the rows are free."""
        self.frame(batch_size).limits.zero_()
        self.seats.leave(batch_size)
        if self.drafter is not None:
            self.drafter.leave(batch_size)

    def fits(self, capacity: int) -> bool:
        """Whether a text may grow to this many tokens."""
        if capacity > _LONGEST:
            return False
        return self.drafter is None or self.drafter.fits(capacity + self._slack)

    def round(
        self, batch_size: int, num_guesses: int, stages: Stages = Stages.TEMPERATURE, *, logprobs: bool = False
    ) -> RoundGraph:
        """The captured round, captured now if it must be."""
        if self._version != self._versions():
            self._rounds.clear()
            self._version = self._versions()
        key = (batch_size, num_guesses, stages, logprobs)
        if key not in self._rounds:
            if not self._rounds:  # a pool goes with the last graph that used it
                self.pool = torch.cuda.graph_pool_handle()
            frame = self._shaped(batch_size) if stages else self.frame(batch_size)
            with torch.inference_mode():
                self._rounds[key] = RoundGraph(self, replace(frame, stages=stages, has_logprobs=logprobs), num_guesses)
        return self._rounds[key]

    def _versions(self) -> tuple[Hashable, Hashable]:
        return self.seats.version, None if self.drafter is None else self.drafter.version
