"""The part of a captured round that every rank of a divided model runs: the pass, the choice, and moving an accepted branch.

The first rank drafts, walks and manages the requests. Inside the graph it sends the other ranks the input of a pass: guesses,
lengths, pages and ancestor masks. So a follower has no requests, no page tables and no drafter. Page p of its pool holds the
same tokens as page p of the first rank's pool, for its own heads. If only a temperature shapes the logits, every rank finds the
best of its own columns, block by block, and those are gathered. For every other sampler the logits themselves are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.device_round import Frame, PairedRows
from outrider.device.acceptance.coupled import move_path
from outrider.device.sampling.choose import BLOCK, Bests, Guessing, block_bests
from outrider.models.attention.tree_tiles import Rows, Sights
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.replay import capturing
from outrider.models.gpu.stream import Step
from outrider.models.rank_sums import ALONE, Joint

Layout = Sequence[tuple[tuple[int, ...], torch.dtype] | None]
"""Shapes and types of the parts of a message; None for parts that are absent."""


@dataclass(frozen=True, eq=False)
class Sent:
    """The input of the pass and the choice of a round, all of it on the device."""

    nodes: Tensor
    """[B, N] int64 tokens; below 0 for no guess."""
    lengths: Tensor
    """[B] int64 tokens of the texts, the roots included."""
    prompt_lens: Tensor
    seeds: Tensor
    temperatures: Tensor
    """[B] temperatures and seeds, as in ``Frame``."""
    pages: Tensor
    """[B, P] int32."""
    words: Tensor | None
    depths: Tensor | None
    paths: Tensor | None
    """Ancestors of the nodes, as in ``Sights``."""
    piece_tokens: Tensor | None = None
    """[R, 32] int64 tokens of prompt pieces."""
    piece_starts: Tensor | None = None
    """[R] int32 tokens before each piece."""
    piece_pages: Tensor | None = None
    """[R, P] int32 pages of each piece."""

    def twice(self, pairs: PairedRows) -> Sent:
        """The message where every slot has two rows. ``pages`` and ``piece_pages`` already cover both rows."""
        own = {"pages": self.pages, "piece_pages": self.piece_pages}
        both = {
            name: None if one is None else one.repeat_interleave(2, 0) for name, one in vars(self).items() if name not in own
        }
        for name in ("nodes", "piece_tokens"):
            if (tokens := both[name]) is not None:
                tokens[1::2] = pairs.second(tokens[1::2])
        return Sent(**both, **own)

    @property
    def layout(self) -> Layout:
        return [None if one is None else (tuple(one.shape), one.dtype) for one in vars(self).values()]

    def packed(self) -> Tensor:
        """The whole message as one row of int64."""
        there = [one for one in vars(self).values() if one is not None]
        whole = [one.view(torch.int32) if one.is_floating_point() else one for one in there]
        return torch.cat([one.reshape(-1).long() for one in whole])

    def groups(self, target: FastDecoder) -> list[tuple[Tensor, Step]]:
        """The two groups of rows of a pass: the trees, and the pieces of prompts that are read beside them."""
        page_len, num_slots = target.page_len, target.num_slots
        sights, nodes = Sights(self.words, self.depths, 0, self.paths), self.nodes
        shape = (nodes.shape[0], nodes.shape[1])
        rows = Rows((self.lengths - 1).int(), self.pages, page_len)
        groups = [(nodes.clamp(min=0), target.step(shape, rows, sights, num_slots=num_slots))]
        if self.piece_tokens is not None and self.piece_starts is not None and self.piece_pages is not None:
            tokens, rows = self.piece_tokens, Rows(self.piece_starts, self.piece_pages, page_len)
            shape = (tokens.shape[0], tokens.shape[1])
            groups.append((tokens, target.step(shape, rows, Sights(None, None), num_slots=num_slots)))
        return groups


def unpacked(row: Tensor, layout: Layout) -> Sent:
    """The message read from one row of int64."""
    sizes = [0 if one is None else torch.Size(one[0]).numel() for one in layout]
    found: list[Any] = []
    for part, one in zip(row.split(sizes), layout, strict=True):
        if one is None:
            found.append(None)
            continue
        shape, dtype = one
        bits = part.int().view(dtype) if dtype.is_floating_point else part.to(dtype)
        found.append(bits.view(shape))
    return Sent(*found)


def best_columns(logits: Tensor, frame: Frame, *, depths: Tensor | None, joint: Joint) -> Bests:
    """The best column of every block of every rank, for [B, N] nodes whose logits only a temperature shapes."""
    first, count = joint.first_token, joint.num_tokens
    ids = torch.arange(first, first + count, device=logits.device)
    mine = block_bests(logits, frame, depths=depths, vocab_size=count, guessing=Guessing(1, ids))
    lacking = -(-joint.widest // BLOCK) - mine.values.shape[-1]
    values = torch.nn.functional.pad(mine.values, (0, lacking), value=float("-inf"))
    tokens = torch.nn.functional.pad(mine.tokens, (0, lacking))
    return Bests(*(torch.cat(joint.gather(part), -1) for part in (values, tokens)))


@dataclass(frozen=True)
class RoundSpec:
    """Everything a follower must know of a round to capture its part."""

    layout: Layout
    taps: tuple[int, ...]
    is_gathered: bool
    """Whether the choice needs all logits."""
    path_len: int
    """Length of a row's accepted path in the message; 0 where nothing moves."""

    def followed(self, target: FastDecoder) -> FollowedRound:
        """The part of the round that a follower with ``target`` plays."""
        return FollowedRound(target, self)


@final
class FollowedRound:
    """A follower's part of a captured round."""

    def __init__(self, target: FastDecoder, spec: RoundSpec) -> None:
        self._target, self._spec = target, spec
        size = sum(torch.Size(one[0]).numel() for one in spec.layout if one is not None)
        self._row = torch.zeros(size, dtype=torch.int64, device=target.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, pool: Any) -> None:
        """Capture like the first rank: run the round once, which compiles its kernels, then capture it."""
        self.run()
        torch.cuda.synchronize(self._target.device)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, pool):
            self.run()
        self._graph = graph

    def launch(self) -> None:
        """Start the next round. On the device, it waits for the message of the first rank."""
        assert self._graph is not None, "captured before it is launched"
        self._graph.replay()

    def run(self) -> None:
        target, spec, joint = self._target, self._spec, self._target.joint
        sent = unpacked(joint.of(0, self._row), spec.layout)
        groups = sent.groups(target)
        logits, _ = target.forward_beside(groups, taps=spec.taps)
        if spec.is_gathered:
            joint.gather_vocabulary(logits)
        else:
            still = torch.zeros_like(sent.lengths)
            frame = Frame(sent.nodes, sent.lengths, still, sent.prompt_lens, sent.seeds, sent.temperatures)
            best_columns(logits, frame, depths=sent.depths, joint=joint)
        if spec.path_len:
            path = joint.of(0, torch.zeros(len(sent.nodes), spec.path_len, dtype=torch.int64, device=target.device))
            for block in target.pool.blocks:
                move_path(block, groups[0][1].rows, path)


def sent_to_all(sent: Sent, joint: Joint) -> Sent:
    """The sending side on the first rank: every follower receives the message."""
    if joint is not ALONE:
        joint.of(0, sent.packed())
    return sent
