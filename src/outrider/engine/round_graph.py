"""A whole round as one CUDA graph: draft, score, walk and commit without waiting for the host.

What a round reads (tokens, lengths, sampling parameters) and what it decides stays in a ``Frame`` on the device. A note of each
round's result goes to the host by itself and is read one round late (``engine/device_lane.py``), so the device never waits.
Plain decoding is the round with no guesses.

    roots -> guesses -> logits -> choices -> accepted -> tokens, lengths, note          one launch

A round may also read pieces of the prompts of requests that have just arrived, in the same pass of the target. A round with
grammars is several graphs, between which the host changes guesses and uploads masks (``engine/constrained.py``).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.device_round import DeviceDrafter, Frame, PairedRows, PromptPieces
from outrider.device.acceptance.coupled import NOTE, RING, chain_parents, move_path, walk_and_commit
from outrider.device.sampling.adjust import Trail
from outrider.device.sampling.choose import Bests, block_bests
from outrider.device.sampling.masks import forbid, mask_bytes
from outrider.device.shared_round import RoundSpec, Sent, best_columns, sent_to_all
from outrider.device.slot_pages import SlotPages
from outrider.engine.notes import NotedLogprobs, Notes
from outrider.models.attention.tree_tiles import Rows
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.replay import capturing
from outrider.models.gpu.uploads import sent
from outrider.models.rank_sums import ALONE

_KEYS = itertools.count()
"""Names of captured rounds, for the followers of a divided model."""


@dataclass(frozen=True, eq=False)
class RoundParts:
    """The parts that a captured round is made of."""

    target: FastDecoder
    drafter: DeviceDrafter | None
    seats: SlotPages
    """The target's memory of the slots."""
    keeps_logits: bool = False
    """Whether the logits of a round are read after it has ended."""
    pairs: PairedRows | None = None
    """The pairing of rows, where a slot is two rows of the target."""


@dataclass(frozen=True, eq=False)
class Constraints:
    """Data that the host reads and writes between the parts of a round with grammars."""

    host_nodes: Tensor
    """[2, B, N] int64, pinned: tokens and parents of the nodes."""
    masks: Tensor
    """[B, N, bytes] uint8 packed masks."""
    host_masks: Tensor
    """Copy of the masks in pinned memory. It can be reused in the next round, because its upload has ended when the round has
    ended."""
    drafted: torch.cuda.Event

    @staticmethod
    def empty(nodes: Tensor, vocab_size: int) -> Constraints:
        """Masks for [B, N] nodes that allow every token."""
        host_nodes = torch.zeros(2, *nodes.shape, dtype=torch.int64, pin_memory=True)
        host_masks = torch.full((*nodes.shape, mask_bytes(vocab_size)), 255, dtype=torch.uint8, pin_memory=True)
        return Constraints(host_nodes, host_masks.to(nodes.device), host_masks, torch.cuda.Event())

    def upload(self, slot: int, mask: Tensor) -> None:
        self.host_masks[slot] = mask
        self.masks[slot].copy_(self.host_masks[slot], non_blocking=True)


@final
class RoundGraph:
    """One captured round of a frame."""

    def __init__(
        self, parts: RoundParts, frame: Frame, num_guesses: int, num_pieces: int, *, pool: Any, is_told: bool = False
    ) -> None:
        batch_size, device = frame.batch_size, parts.target.device
        self._parts, self._frame = parts, frame
        drafter = parts.drafter if num_guesses else None
        self._trees = None if drafter is None else drafter.trees(batch_size, num_guesses)
        self.num_nodes = num_nodes = 1 if drafter is None else drafter.num_nodes(num_guesses)
        self._parents = chain_parents(batch_size, num_nodes, device) if self._trees is None else self._trees.parents
        self._nodes = torch.zeros(batch_size, num_nodes, dtype=torch.int64, device=device)
        self._told = torch.zeros_like(self._nodes) if is_told else None
        """[B, N] what follows each node."""
        ring = torch.zeros(RING, batch_size, NOTE + num_guesses + 1, dtype=torch.int64, device=device)
        rounds = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.notes = Notes(rounds, ring, torch.zeros(ring.shape, dtype=torch.int64, pin_memory=True))
        self.logprobs = NotedLogprobs.empty(ring) if frame.has_logprobs else None
        self.num_guesses, self.num_pieces = num_guesses, num_pieces
        self.is_constrained = frame.is_constrained
        """Whether grammars forbid tokens in it, and the host supplies the masks after the round began
        (``engine/constrained.py``)."""
        self.is_told = is_told
        """Whether the host decides what follows each node, once it has seen the logits (``tell``)."""
        self.num_launched = 0
        self._table = torch.tensor([[-1] * num_pieces, [0] * num_pieces], device=device)
        """Slots of the prompt pieces, and the prompt tokens before each."""
        self._constraints = Constraints.empty(self._nodes, parts.target.vocab_size) if frame.is_constrained else None
        self._scored: tuple[Rows, Tensor, Tensor | None] | None = None
        """Data that the pass passes on to the choice."""
        held = frame.limits.clone()
        frame.limits.zero_()  # kernels are compiled by running them; nobody moves while that happens
        self._key = next(_KEYS)
        parts.target.joint.tell("capture", self._key, self._spec())
        weakref.finalize(self, parts.target.joint.tell, "forget", self._key).atexit = False
        for step in (self._draft, self._pass, self._choose):
            step()
        torch.cuda.synchronize(device)
        self._graphs = [_captured(steps, pool) for steps in self._cut()]
        self.logits = self._scored[1] if (parts.keeps_logits or is_told) and self._scored is not None else None
        """[B, N, V] of the last round, where they are kept."""
        self._scored = None
        frame.limits.copy_(held)
        rounds.zero_()

    def _cut(self) -> list[list[Callable[[], None]]]:
        """The steps of a round, grouped by graph. Without guesses there is nothing to change before the pass."""
        if self._told is not None:
            return [[self._draft, self._pass], [self._choose]]
        if self._constraints is None:
            return [[self._draft, self._pass, self._choose]]
        first = [[self._draft], [self._pass]] if self.num_guesses else [[self._draft, self._pass]]
        return [*first, [self._choose]]

    def launch(self, pieces: Sequence[tuple[int, int]] = ()) -> int:
        """Start a round that also reads these prompt pieces (slots, and the prompt tokens before each). Returns its number."""
        if self._table.numel():
            padded = [*pieces, *[(-1, 0)] * (self._table.shape[1] - len(pieces))]
            self._table.copy_(sent(list(zip(*padded, strict=True)), torch.int64, self._table.device), non_blocking=True)
        self._parts.target.joint.tell("launch", self._key)
        self._graphs[0].replay()
        if self._constraints is not None:
            self._constraints.drafted.record()
        self.num_launched += 1
        return self.num_launched - 1

    def drafted(self) -> tuple[list[list[int]], list[list[int]]]:
        """In a round with grammars: wait for the draft, and return tokens and parents of every slot's nodes. A round without
        guesses has one node, whose token is not needed."""
        assert self._constraints is not None
        if not self.num_guesses:
            return [[0]] * len(self._nodes), [[-1]] * len(self._nodes)
        self._constraints.drafted.synchronize()
        tokens, parents = self._constraints.host_nodes.tolist()
        return tokens, parents

    def score(self, amended: Mapping[int, Sequence[int]]) -> None:
        """In a round with grammars: start the pass, with other guesses for some slots."""
        assert self._constraints is not None
        for slot, tokens in amended.items():
            self._nodes[slot].copy_(sent(list(tokens), torch.int64, self._nodes.device), non_blocking=True)
        if self.num_guesses:
            self._graphs[1].replay()

    def choose(self, masks: Mapping[int, Tensor]) -> None:
        """In a round with grammars: start the rest, with packed masks [N, bytes] of some slots."""
        assert self._constraints is not None
        for slot, mask in masks.items():
            self._constraints.upload(slot, mask)
        self._graphs[-1].replay()

    def tell(self, nodes: Sequence[Sequence[int]], following: Sequence[Sequence[int]]) -> None:
        """In a round with a rule on the host: start the rest, with the accepted nodes [B, N] (-1 elsewhere) and the token after
        each."""
        assert self._told is not None
        both = sent([list(nodes), list(following)], torch.int64, self._told.device)
        self._nodes[:, 1:].copy_(both[0, :, 1:])
        self._told.copy_(both[1])
        self._graphs[-1].replay()

    def note(self, number: int) -> list[list[int]]:
        """The result of round ``number``, by slot. It must have ended, with fewer than RING rounds launched after it."""
        return self.notes.host[number % RING].tolist()

    def _draft(self) -> None:
        parts, frame, nodes = self._parts, self._frame, self._nodes
        nodes[:, :1] = frame.tokens.gather(1, frame.lengths[:, None] - 1)
        if parts.drafter is not None and self.num_guesses:
            parts.drafter.propose(frame, nodes, self.num_guesses)
        if self._constraints is not None:
            self._constraints.host_nodes.copy_(torch.stack((nodes, self._parents)), non_blocking=True)

    def _pass(self) -> None:
        """Logits and tapped states of the nodes; pieces of prompts are read in the same pass."""
        target, drafter, pieces = self._parts.target, self._parts.drafter, PromptPieces(*self._table)
        sent = sent_to_all(self._sent(pieces), target.joint)
        taps = () if drafter is None else drafter.taps
        groups = sent.groups(target)
        logits, tapped = target.forward_beside(groups, taps=taps)
        states = [torch.cat([group[tap] for tap in taps], -1) if taps else None for group in tapped]
        if self._parts.pairs is not None:  # drafters know the first row
            logits, states = self._parts.pairs.mixed(logits), [None if one is None else one[::2] for one in states]
        if drafter is not None and len(pieces):
            drafter.read(self._frame, pieces, states[1])
        self._scored = (groups[0][1].rows, logits, states[0])

    def _sent(self, pieces: PromptPieces) -> Sent:
        """Input of the pass and the choice, which every rank of a divided model receives."""
        frame, seats, trees = self._frame, self._parts.seats, self._trees
        columns = (frame.lengths, frame.prompt_lens, frame.seeds, frame.temperatures)
        shape = (None, None, None) if trees is None else (trees.words, trees.depths, trees.paths)
        read: tuple[Tensor, ...] = ()
        if len(pieces):  # each sees those before it, whose keys are written first
            rows = seats.piece_rows(pieces, frame.batch_size)
            read = (pieces.tokens(frame), rows.lengths, rows.places)
        sent = Sent(self._nodes, *columns, seats.pages(frame.batch_size), *shape, *read)
        return sent if self._parts.pairs is None else sent.twice(self._parts.pairs)

    def _choose(self) -> None:
        parts, frame, nodes, trees = self._parts, self._frame, self._nodes, self._trees
        assert self._scored is not None
        (rows, logits, tapped), before = self._scored, frame.lengths - 1
        bests, raw = self._bests(logits)
        ring, rounds = self.notes.ring, self.notes.rounds
        path = walk_and_commit(bests, nodes, frame, parents=self._parents, ring=ring, rounds=rounds)
        if trees is not None:
            parts.target.joint.of(0, path)
            moved = path if parts.pairs is None else path.repeat_interleave(2, 0)
            for block in parts.target.pool.blocks:
                move_path(block, rows, moved)
        if parts.drafter is not None and tapped is not None:
            parts.drafter.take(frame, before, tapped, None if trees is None else path)
        self.notes.host.copy_(self.notes.ring, non_blocking=True)
        if self.logprobs is not None:
            self.logprobs.note(raw[..., : parts.target.vocab_size], path, self.notes)

    def _bests(self, logits: Tensor) -> tuple[Bests, Tensor]:
        """The best tokens of every node, and the logits before the sampler changed them."""
        frame, trees, target = self._frame, self._trees, self._parts.target
        if self._told is not None:
            return Bests(torch.zeros_like(self._told[..., None], dtype=torch.float32), self._told[..., None]), logits
        depths, words = (None, None) if trees is None else (trees.depths, trees.words)
        if target.joint is not ALONE and not self._is_gathered:
            return best_columns(logits, frame, depths=depths, joint=target.joint), logits
        logits = target.joint.gather_vocabulary(logits)
        raw = logits.clone() if frame.has_logprobs and frame.stages else logits
        if self._constraints is not None and frame.shaping is not None:
            forbid(logits, self._constraints.masks, frame.shaping.uses, vocab_size=target.vocab_size)
        trail = Trail(self._nodes, words)
        return block_bests(logits, frame, depths=depths, vocab_size=target.vocab_size, trail=trail), raw

    @property
    def _is_gathered(self) -> bool:
        """Whether the choice needs more of a divided vocabulary than each part's best tokens."""
        frame = self._frame
        return bool(frame.stages) or frame.has_logprobs or frame.is_constrained

    def _spec(self) -> RoundSpec:
        """What the followers of a divided model need to know to capture their part."""
        drafter, path_len = self._parts.drafter, 0 if self._trees is None else self.num_guesses + 2
        layout = self._sent(PromptPieces(*self._table)).layout
        return RoundSpec(layout, () if drafter is None else tuple(drafter.taps), self._is_gathered, path_len)


def _captured(steps: Sequence[Callable[[], None]], pool: Any) -> torch.cuda.CUDAGraph:
    """The steps as one graph. Their outputs stay valid as long as no other graph of the pool runs in between."""
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, pool):
        for step in steps:
            step()
    return graph
