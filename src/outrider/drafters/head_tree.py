"""Trees from trained heads: what Medusa, Hydra and EAGLE have in common.

Heads read hidden states that the target computed anyway: those of the prompt when a request starts, those of the accepted
nodes after every round. From the last of them, and the token after it, a tree grows level by level through the same code as
a draft model's: a static shape, or best-first, where candidates are ranked by log q + g and so know the target's noise
(docs/lossless.md, section 8).

    known at a round:  states of tokens 0 .. n - 2,  tokens 0 .. n - 1 (the last one is the root)      column c: (state c,
    token c + 1)

Lossless under every rule that is exact for the draws; what the heads say decides only how many guesses are accepted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import Context, Drafter, Observation, Plan, RowState
from outrider.core.tree import TokenTree
from outrider.drafters.best_first import BestFirstOptions, grow_pool
from outrider.drafters.draft_tree import DraftTreeOptions, grow_shape
from outrider.drafters.tree_candidates import Drawing
from outrider.drafters.tree_growth import LevelGrowth
from outrider.models.heads import Head

_CHUNK = 512
"""Most columns read in one pass."""


@dataclass(frozen=True)
class HeadOptions:
    """Where the heads are, and what grows from them."""

    heads: str | None = None
    """Folder of the trained heads; for the bundled target, its own."""
    ends: str | None = None
    """The target's folder, for public heads that leave embedding, norm or output matrix to it."""
    branching: tuple[int, ...] | str | None = None
    """Children of every node, level by level ("4,2,2,1"), for a static tree; best-first if not given."""
    width: int = 8
    """Best-first: nodes expanded per level."""
    num_children: int = 8
    """Best-first: candidates looked at below each of them."""
    tau: float = 0.9
    """Best-first: how far the heads' logits are from the target's."""
    perturb: bool = True
    """Rank candidates with the target's noise, as the coupled rule chooses; turn off for rule ``delta``."""

    def __post_init__(self) -> None:
        assert self.search and self.shape.tree  # raises where they are not valid

    @property
    def search(self) -> BestFirstOptions:
        return BestFirstOptions(self.width, self.num_children, self.tau, self.perturb)

    @property
    def shape(self) -> DraftTreeOptions:
        return DraftTreeOptions(branching=self.branching or (4, 3, 2, 1, 1), perturb=self.perturb)


@dataclass
class HeadState(RowState):
    """What the heads have read of each row, and what they have not."""

    pending: list[Tensor]
    """[m, F] per row: states of committed tokens that the heads have not read. A head without a memory keeps the last one."""
    cache: ContiguousCache | None = None
    kept: list[int] | None = None
    """Columns of the cache that are true, where this round put others into it."""

    def fork(self, rows: Sequence[int]) -> HeadState:
        cache = None if self.cache is None else self.cache.fork(rows)
        return HeadState([self.pending[row] for row in rows], cache)

    def join(self, other: HeadState) -> HeadState:
        cache = None
        if self.cache is not None:
            assert other.cache is not None
            cache = self.cache.join(other.cache)
        return HeadState([*self.pending, *other.pending], cache)


class HeadDrafter(Drafter, ABC):
    """Heads with a way of growing trees."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.WITHOUT_REPLACEMENT, Draws.IID)
    shape: ClassVar = Shape.TREE

    def __init__(self, head: Head, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        options = options or HeadOptions()
        self.taps = head.config.taps
        self.draws = draws
        self.max_depth = head.config.num_depths
        self._search = None if options.branching is not None or draws is not Draws.DETERMINISTIC else options.search
        self._tree, self._drawing = options.shape.tree, Drawing(draws, options.perturb)
        parameter = next(head.parameters())
        self._dtype, self._device = parameter.dtype, parameter.device

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> HeadState:
        states = [torch.cat([taps[tap][row] for tap in self.taps], -1).to(self._dtype) for row in range(len(rows))]
        return HeadState(states, self._new_cache(len(rows)))

    def propose(self, state: HeadState, context: Context, plan: Plan) -> Draft:
        limits = zip(plan.max_depth, plan.max_nodes, strict=True)
        most = max(plan.max_depth) if self.max_depth is None else self.max_depth
        depths = tuple(min(depth, nodes, most) for depth, nodes in limits)
        if not any(depths):
            return Draft(TokenTree.chain(torch.tensor(context.roots, device=context.device)[:, None]), self.draws)
        plan = Plan(depths, tuple(n if d else 0 for n, d in zip(plan.max_nodes, depths, strict=True)))
        growth = self._growth(state, context)
        if self._search is None:
            return grow_shape(growth, plan, tree=self._tree, drawing=self._drawing)[0]
        pool = grow_pool(growth, growth.root(), options=self._search, max_depth=max(depths))
        return Draft(pool.best_tree(plan)[0], self.draws)

    def observe(self, state: HeadState, observation: Observation) -> None:
        """Drafted columns are forgotten; the accepted nodes' true states are read next time."""
        if state.cache is not None and state.kept is not None:
            state.cache.truncate(state.kept)
        state.kept = None
        tapped = [observation.scores.taps[tap] for tap in self.taps]
        for row, path in enumerate(observation.paths):
            new = torch.cat([states[row, list(path)] for states in tapped], -1).to(self._dtype)
            unread = state.cache is not None and not self._has_read(state, row)
            state.pending[row] = torch.cat([state.pending[row], new]) if unread else new

    def _has_read(self, state: HeadState, row: int) -> bool:
        """A round without guesses leaves what was pending unread."""
        return len(state.pending[row]) == 0

    def _new_cache(self, num_rows: int) -> ContiguousCache | None:
        """A memory of the columns, for heads that have one."""
        del num_rows
        return None

    @abstractmethod
    def _growth(self, state: HeadState, context: Context) -> LevelGrowth:
        """The heads at the root of every row, all that was pending read."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Unread columns of every row, padded: (state c, token c + 1)."""

    features: Tensor
    """[B, M, F]"""
    tokens: Tensor
    """[B, M]"""
    sizes: list[int]


def read_columns(state: HeadState, context: Context) -> list[Columns]:
    """What is pending, in pieces; marks it as read. A row whose target has computed nothing yet gets one column of zeros,
    which it forgets after the round."""
    cache = state.cache
    assert cache is not None
    empty = [len(pending) == 0 for pending in state.pending]
    rows = [p.new_zeros(1, p.shape[1]) if none else p for p, none in zip(state.pending, empty, strict=True)]
    first = cache.lengths
    tokens = [list(context.tokens[b][first[b] : first[b] + len(row)]) for b, row in enumerate(rows)]
    for b, none in enumerate(empty):
        begin = first[b] + (0 if none else 1)
        tokens[b] = list(context.tokens[b][begin : begin + len(rows[b])])
    state.kept = [length + (0 if none else len(row)) for length, row, none in zip(first, rows, empty, strict=True)]
    state.pending = [row[:0] for row in rows]
    longest = max(len(row) for row in rows)
    return [_piece(rows, tokens, begin, context.device) for begin in range(0, longest, _CHUNK)]


def _piece(rows: Sequence[Tensor], tokens: Sequence[Sequence[int]], begin: int, device: torch.device) -> Columns:
    parts = [row[begin : begin + _CHUNK] for row in rows]
    longest = max(len(part) for part in parts)
    features = torch.stack([torch.nn.functional.pad(part, (0, 0, 0, longest - len(part))) for part in parts])
    ids = [[*row[begin : begin + _CHUNK], *[0] * (longest - len(part))] for row, part in zip(tokens, parts, strict=True)]
    return Columns(features, torch.tensor(ids, device=device), [len(part) for part in parts])


def last_of(states: Tensor, sizes: Sequence[int]) -> Tensor:
    """[B, 1, H] each row's last real state."""
    index = torch.tensor([max(size - 1, 0) for size in sizes], device=states.device)
    return states[torch.arange(len(sizes), device=states.device), index][:, None]
