"""Growers of trees inside captured rounds, for any drafter: static shapes, best-first trees and chains.

A grower decides, level by level, which nodes the drafter evaluates and which tokens become the tree. The drafter's ``Answers``
supply the logits after those nodes. The trees equal those of ``drafters/trees/static.py`` and
``drafters/trees/best_first.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.core.device_round import Frame, SlotTrees
from outrider.device.drafters.model.draft_tree import FedTree, Level, Ranked, StaticTree
from outrider.device.drafters.trees.best_first import Growth, Growths, Pool, Search
from outrider.device.sampling.adjust import Trail
from outrider.device.sampling.choose import Bests, Guessing, block_bests, pick, pick_children
from outrider.models.attention.tree_tiles import Sights


@dataclass(frozen=True, eq=False)
class Asked:
    """The nodes of a level that a drafter is asked about. It was asked about earlier levels in the same order."""

    tokens: Tensor
    """[B, M] int64"""
    above: Tensor
    """[B, M] int64 number of the parent among the nodes asked about; the root is 0."""
    sights: Sights
    """Which nodes below the root each of them sees."""


class Answers(ABC):
    """The interface to a drafter during one round: the logits after nodes."""

    @abstractmethod
    def root(self) -> Tensor:
        """[B, 1, Vd] float32 logits after the roots."""

    @abstractmethod
    def below(self, asked: Asked) -> Tensor:
        """[B, M, Vd] float32 logits after the nodes, or [B, 1, Vd] where they are all the same."""


@dataclass(frozen=True, eq=False)
class Spoken:
    """The tokens that a drafter's logits stand for."""

    num_tokens: int
    ids: Tensor | None = None
    """[Vd] int64, ascending: the target's tokens; None if they are the first Vd ones."""


class Grower(ABC):
    """Grows trees or chains. ``depth`` is the number of guesses along a path, and a drafter is asked about at most so many
    levels."""

    def __init__(self, spoken: Spoken, max_depth: int) -> None:
        self._spoken = spoken
        self.max_depth = max_depth
        """Most guesses along a path."""

    @abstractmethod
    def num_nodes(self, depth: int) -> int:
        """Nodes of the result, the root included."""

    @property
    @abstractmethod
    def most_asked(self) -> int:
        """Most nodes per round that a drafter is asked about, the root included."""

    @abstractmethod
    def trees(self, batch_size: int, depth: int) -> SlotTrees | None:
        """The shapes of the trees, fixed or written by ``grow``; None for chains."""

    @abstractmethod
    def grow(self, answers: Answers, frame: Frame, nodes: Tensor, depth: int) -> None:
        """Fill columns 1.. of ``nodes`` [B, N]; column 0 holds the roots."""

    def _bests(
        self,
        logits: Tensor,
        frame: Frame,
        *,
        num_nodes: int,
        depth: int,
        num_best: int,
        trail: Trail | None,
        tau: float | None = None,
    ) -> Bests:
        """The best tokens after ``num_nodes`` nodes at ``depth``. Nodes with one law are computed once, unless penalties differ
        between them."""
        is_shared = logits.shape[1] < num_nodes
        if is_shared and frame.stages:
            logits, is_shared = logits.expand(-1, num_nodes, -1).contiguous(), False
        guessing, count = Guessing(num_best, self._spoken.ids, tau), self._spoken.num_tokens
        bests = block_bests(logits, frame, depths=depth, vocab_size=count, guessing=guessing, trail=trail)
        return bests.shared_by(num_nodes) if is_shared else bests


@dataclass(frozen=True, eq=False)
class AskedTree:
    """A tree of a fixed shape, and its nodes that a drafter is asked about."""

    tree: StaticTree
    fed: FedTree
    guesses: StaticTree
    """The nodes asked about, without the root."""

    @staticmethod
    def of(ranked: Ranked, device: torch.device) -> AskedTree:
        fed = FedTree.of(*ranked, device)
        below = [parent - 1 for parent in fed.shape.parents.tolist()[1:]] or [-1]
        return AskedTree(StaticTree.of(ranked[0], device), fed, StaticTree.of(below, device))

    def asked(self, level: Level, nodes: Tensor) -> Asked:
        """The nodes of a level below the root."""
        batch_size, first, end = len(nodes), level.first - 1, level.first - 1 + len(level.fed)
        above = self.fed.shape.parents[first + 1 : end + 1].expand(batch_size, -1).contiguous()
        return Asked(nodes.index_select(1, level.fed), above, self.guesses.sights(batch_size, start=first, end=end))


@final
class StaticGrower(Grower):
    """Trees of fixed shapes, by guesses along a path."""

    def __init__(self, spoken: Spoken, device: torch.device, trees: Mapping[int, Ranked]) -> None:
        super().__init__(spoken, max(trees))
        self._trees = {depth: AskedTree.of(ranked, device) for depth, ranked in trees.items()}

    def num_nodes(self, depth: int) -> int:
        return len(self._trees[depth].tree.parents)

    @property
    def most_asked(self) -> int:
        return max(len(tree.fed.shape.parents) for tree in self._trees.values())

    def trees(self, batch_size: int, depth: int) -> SlotTrees:
        return self._trees[depth].tree.trees(batch_size)

    def grow(self, answers: Answers, frame: Frame, nodes: Tensor, depth: int) -> None:
        tree = self._trees[depth]
        for level in tree.fed.levels:
            logits = answers.below(tree.asked(level, nodes)) if level.first else answers.root()
            trail = Trail(nodes, tree.tree.words[level.fed].expand(frame.batch_size, -1, -1).contiguous())
            num_nodes, num_best = level.children.shape
            tops = self._bests(logits, frame, num_nodes=num_nodes, depth=level.depth, num_best=num_best, trail=trail)
            pick_children(tops, nodes, level.children)


@final
class ChainGrower(Grower):
    """Chains of any length up to the deepest. A chain ends after a guess whose confidence is below a threshold."""

    def __init__(self, spoken: Spoken, max_depth: int, *, threshold: float | None = None) -> None:
        super().__init__(spoken, max_depth)
        self._threshold = threshold

    def num_nodes(self, depth: int) -> int:
        return depth + 1

    @property
    def most_asked(self) -> int:
        return self.max_depth

    def trees(self, batch_size: int, depth: int) -> None:
        del batch_size, depth

    def grow(self, answers: Answers, frame: Frame, nodes: Tensor, depth: int) -> None:
        unsure = list[Tensor]()
        for above in range(depth):
            logits = answers.below(self._asked(nodes, above)) if above else answers.root()
            trail, tau = Trail(nodes, length=above), None if self._threshold is None else 1.0
            tops = self._bests(logits, frame, num_nodes=1, depth=above, num_best=1, trail=trail, tau=tau)
            pick(tops, nodes, above + 1)
            if self._threshold is not None:
                unsure.append(tops.sureness()[:, 0] < self._threshold)
        if len(unsure) > 1:  # the unsure guess is kept
            stopped = torch.stack(unsure[:-1], 1).cummax(1).values
            nodes[:, 2:].masked_fill_(stopped, -1)

    def _asked(self, nodes: Tensor, depth: int) -> Asked:
        above = torch.full_like(nodes[:, :1], depth - 1)
        return Asked(nodes[:, depth : depth + 1].contiguous(), above, Sights(None, None, depth - 1))


Choose = Callable[[Growth, Tensor], None]
"""Makes trees of the candidates: tokens into columns 1.. of nodes [B, N], shapes into those of the search."""


@final
class BestFirstGrower(Grower):
    """Trees that follow the drafter's confidence, by guesses along a path."""

    def __init__(
        self, spoken: Spoken, device: torch.device, searches: Mapping[int, Search], *, choose: Choose = Growth.choose
    ) -> None:
        super().__init__(spoken, max(searches))
        self._choose = choose
        self._growths = {depth: Growths(search, device, with_root=False) for depth, search in searches.items()}

    def num_nodes(self, depth: int) -> int:
        return self._growths[depth].search.num_nodes

    @property
    def most_asked(self) -> int:
        return max(sum(growths.search.num_expanded) for growths in self._growths.values())

    def trees(self, batch_size: int, depth: int) -> SlotTrees:
        return self._growths[depth].of(batch_size).trees

    def grow(self, answers: Answers, frame: Frame, nodes: Tensor, depth: int) -> None:
        growth, search, first = self._growths[depth].of(frame.batch_size), self._growths[depth].search, 0
        for level, count in enumerate(search.num_expanded):
            trail = None
            if level:
                fed = growth.expanded.level(first, count)
                depths = torch.full_like(fed.tokens, level - 1, dtype=torch.int32)  # below the root
                logits = answers.below(Asked(fed.tokens, fed.above, Sights(fed.words, depths, first)))
                trail, first = growth.trail(fed), first + count
            else:
                logits = answers.root()
            tops = self._bests(
                logits, frame, num_nodes=count, depth=level, num_best=search.num_children, trail=trail, tau=search.tau
            )
            growth.add(level, tops, frame)
        self._choose(growth, nodes)


def choose_beams(growth: Growth, nodes: Tensor) -> None:
    """Trees of whole paths, the likeliest first, in the order of ``drafters/heads/redrafter.py``."""
    growth.choose_kept(nodes, _likeliest_paths(growth.pool, growth.search))


def _likeliest_paths(pool: Pool, search: Search) -> Tensor:
    """[B, P] the nodes of the likeliest full-depth paths, as many paths as the tree has room for."""
    num_places, num_ends = pool.chances.shape[1], search.num_expanded[-1] * search.num_children
    ends = pool.chances[:, -num_ends:].sort(dim=-1, descending=True, stable=True).indices
    place = num_places - num_ends + ends
    on_path = torch.zeros(*place.shape, num_places, dtype=torch.int32, device=place.device)
    for _ in range(search.max_depth + 1):
        on_path.scatter_(2, place[..., None], 1)
        place = pool.parents.long().gather(1, place)
    union = on_path.cummax(1).values  # of a path and those before it
    num_fit = (union.sum(2) <= search.num_nodes).sum(1)
    return union.gather(1, (num_fit - 1)[:, None, None].expand(-1, 1, num_places))[:, 0] > 0
