"""A whole round as one graph: draft, score, walk and commit without asking the host anything.

What a round reads (tokens, lengths, sampling parameters) and what it decides stays in a ``Frame`` on the device. A note of each
round's result goes to the host by itself and is read one round late (``engine/device_lane.py``), so the device never waits.
Plain decoding is the round with no guesses.

    roots -> guesses -> logits -> choices -> accepted -> tokens, lengths, note          one launch

A round may also read pieces of the prompts of requests that have just arrived, in the same pass of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.device_round import PIECE_LEN, DeviceDrafter, Frame, Pieces
from outrider.engine.notes import NotedLogprobs, Notes
from outrider.models.attention.tree_tiles import Rows, Sights
from outrider.models.gpu.adjust import Trail
from outrider.models.gpu.chain import Seats
from outrider.models.gpu.choose import block_bests
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.replay import capturing
from outrider.models.gpu.uploads import sent
from outrider.models.gpu.walk import NOTE, RING, chain_parents, move_path, walk_and_commit


@dataclass(frozen=True, eq=False)
class RoundParts:
    """What a round is made of."""

    target: FastDecoder
    drafter: DeviceDrafter | None
    seats: Seats
    """The target's memory of the slots."""


@final
class RoundGraph:
    """One captured round of a frame."""

    def __init__(self, parts: RoundParts, frame: Frame, num_guesses: int, num_pieces: int, *, pool: Any) -> None:
        batch_size, device = frame.batch_size, parts.target.device
        self._parts, self._frame = parts, frame
        drafter = parts.drafter if num_guesses else None
        self._trees = None if drafter is None else drafter.trees(batch_size)
        num_nodes = num_guesses + 1 if self._trees is None else self._trees.parents.shape[1]
        self._parents = chain_parents(batch_size, num_nodes, device) if self._trees is None else self._trees.parents
        self._nodes = torch.zeros(batch_size, num_nodes, dtype=torch.int64, device=device)
        ring = torch.zeros(RING, batch_size, NOTE + num_guesses + 1, dtype=torch.int64, device=device)
        rounds = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.notes = Notes(rounds, ring, torch.zeros(ring.shape, dtype=torch.int64, pin_memory=True))
        self.logprobs = NotedLogprobs.empty(ring) if frame.has_logprobs else None
        self.num_guesses, self.num_pieces = num_guesses, num_pieces
        self.num_launched = 0
        self._table = torch.tensor([[-1] * num_pieces, [0] * num_pieces], device=device)
        """Slots of the pieces, and the tokens before them."""
        held = frame.limits.clone()
        frame.limits.zero_()  # kernels are compiled by running them; nobody moves while that happens
        self._round()
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with capturing(self.graph, pool):
            self._round()
        frame.limits.copy_(held)
        rounds.zero_()

    def launch(self, pieces: Sequence[tuple[int, int]] = ()) -> int:
        """Start a round that also reads these pieces, slots and the tokens before them; returns its number."""
        if self._table.numel():
            padded = [*pieces, *[(-1, 0)] * (self._table.shape[1] - len(pieces))]
            self._table.copy_(sent(list(zip(*padded, strict=True)), torch.int64, self._table.device), non_blocking=True)
        self.graph.replay()
        self.num_launched += 1
        return self.num_launched - 1

    def note(self, number: int) -> list[list[int]]:
        """What round ``number`` did, by slot. It must have ended, with fewer than RING rounds launched after it."""
        return self.notes.host[number % RING].tolist()

    def _round(self) -> None:
        parts, frame, nodes, trees = self._parts, self._frame, self._nodes, self._trees
        nodes[:, :1] = frame.tokens.gather(1, frame.lengths[:, None] - 1)
        if parts.drafter is not None and self.num_guesses:
            parts.drafter.propose(frame, nodes)
        rows = parts.seats.rows(frame.lengths - 1)
        logits, tapped = self._score(rows)
        before = frame.lengths - 1
        depths, words = (None, None) if trees is None else (trees.depths, trees.words)
        trail = Trail(nodes, words)
        raw = logits.clone() if frame.has_logprobs and frame.stages else logits
        bests = block_bests(logits, frame, depths=depths, vocab_size=parts.target.vocab_size, trail=trail)
        ring, rounds = self.notes.ring, self.notes.rounds
        path = walk_and_commit(bests, nodes, frame, parents=self._parents, ring=ring, rounds=rounds)
        if trees is not None:
            move_path(parts.target.pool.block, rows, path)
        if parts.drafter is not None and tapped is not None:
            parts.drafter.take(frame, before, tapped, None if trees is None else path)
        self.notes.host.copy_(self.notes.ring, non_blocking=True)
        if self.logprobs is not None:
            self.logprobs.note(raw[..., : parts.target.vocab_size], path, self.notes)

    def _score(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Logits and tapped states of the nodes; pieces of prompts are read in the same pass."""
        target, frame, nodes, trees = self._parts.target, self._frame, self._nodes, self._trees
        drafter, seats, batch_size = self._parts.drafter, self._parts.seats, frame.batch_size
        sights = Sights(None, None) if trees is None else Sights(trees.words, trees.depths, 0, trees.paths)
        num_slots = target.num_slots
        groups = [(nodes.clamp(min=0), target.step((batch_size, nodes.shape[1]), rows, sights, num_slots=num_slots))]
        pieces = Pieces(*self._table)
        if len(pieces):  # each sees those before it, whose keys are written first
            shape, places = (len(pieces), PIECE_LEN), seats.piece_rows(pieces, batch_size)
            groups.append((pieces.tokens(frame), target.step(shape, places, Sights(None, None), num_slots=num_slots)))
        taps = () if drafter is None else drafter.taps
        logits, tapped = target.forward_beside(groups, taps=taps)
        states = [torch.cat([group[tap] for tap in taps], -1) if taps else None for group in tapped]
        if drafter is not None and len(pieces):
            drafter.read(frame, pieces, states[1])
        return logits, states[0]
