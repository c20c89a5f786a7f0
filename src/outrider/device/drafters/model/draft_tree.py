"""A draft model's tree of a fixed shape inside a captured round. Each level takes one draft pass over all its parents.

After a round the draft's cache may lack all tokens that the round has added, at most depth + 1. Feeding that many committed
tokens again covers every case with one shape of pass, so no accepted branch has to be moved. Only nodes with children are fed,
and the draft's cache holds them in that order. The trees equal those of ``drafters/model/draft_tree.py``.

    children(u) = first k of   log q(. | u) + g_position                     coupled, as the target will choose
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.core.device_round import Frame, SlotTrees
from outrider.core.tree import ancestors_of
from outrider.device.drafters.model.draft_model import Again, ModelDrafter
from outrider.device.sampling.adjust import Trail
from outrider.device.sampling.choose import Guessing, block_bests, pick_children
from outrider.models.attention.tree_tiles import Sights, paths_of
from outrider.models.attention.tree_triton import pack_words
from outrider.models.gpu.decoder import FastDecoder


@dataclass(frozen=True, eq=False)
class StaticTree:
    """The shape of a tree as kernels read it, the same for every slot."""

    parents: Tensor
    """[N] int64, -1 for the root."""
    depths: Tensor
    """[N] int32."""
    words: Tensor
    """[N, W] int64 ancestor bits."""
    paths: Tensor
    """[N, N] int32 ancestor at every depth."""

    @staticmethod
    def of(parents: Sequence[int], device: torch.device) -> StaticTree:
        """The shape with these parents. Several -1 make several trees side by side."""
        ancestors = ancestors_of(torch.tensor([parents]))
        depths, paths = ancestors[0].sum(-1).int() - 1, paths_of(ancestors)[0]
        return StaticTree(*(t.to(device) for t in (torch.tensor(parents), depths, pack_words(ancestors)[0], paths)))

    @property
    def max_depth(self) -> int:
        return int(self.depths.max())

    def trees(self, batch_size: int) -> SlotTrees:
        """This tree in every slot."""
        rows = (t.expand(batch_size, *t.shape).contiguous() for t in (self.parents, self.depths, self.words, self.paths))
        return SlotTrees(*rows)

    def sights(self, batch_size: int, *, start: int = 0, end: int | None = None) -> Sights:
        """Ancestors of the nodes from ``start`` to ``end``, in every slot."""
        depths = self.depths[start:end].expand(batch_size, -1).contiguous()
        words, paths = (t[start:end].expand(batch_size, -1, -1).contiguous() for t in (self.words, self.paths))
        return Sights(words, depths, start, paths)


@dataclass(frozen=True, eq=False)
class Level:
    """The nodes of one depth that have children."""

    fed: Tensor
    """[M] int64 their numbers in the tree."""
    depth: int
    children: Tensor
    """[M, K] int64 node that holds the k-th best token after each of them, -1 for none."""
    first: int
    """Number of the first of them among all fed nodes."""


@dataclass(frozen=True, eq=False)
class FedTree:
    """The nodes with children, level by level: those that a drafter is asked about."""

    levels: tuple[Level, ...]
    shape: StaticTree
    """Shape of the fed nodes alone, in the order in which they are fed."""

    @staticmethod
    def of(parents: Sequence[int], ranks: Sequence[int], device: torch.device) -> FedTree:
        """The fed nodes of a tree. ``ranks[n]`` says which of its parent's best tokens node n holds."""
        depths = StaticTree.of(parents, torch.device("cpu")).depths.tolist()
        inner = [node for node in range(len(parents)) if node in set(parents)]
        levels: list[Level] = []
        for depth in range(max(depths)):
            fed = [node for node in inner if depths[node] == depth]
            below = [(node, fed.index(parent)) for node, parent in enumerate(parents) if parent in fed]
            children = torch.full((len(fed), 1 + max(ranks[node] for node, _ in below)), -1)
            for node, row in below:
                children[row, ranks[node]] = node
            levels.append(Level(torch.tensor(fed, device=device), depth, children.to(device), inner.index(fed[0])))
        place = {node: index for index, node in enumerate(inner)}
        return FedTree(tuple(levels), StaticTree.of([place[parents[node]] if node else -1 for node in inner], device))

    @property
    def max_depth(self) -> int:
        """Depth of the whole tree."""
        return len(self.levels)


Ranked = tuple[Sequence[int], Sequence[int]]
"""The parents of a tree's nodes, and the rank of each node among its parent's best tokens."""


@final
class DeviceTree(ModelDrafter):
    """Trees from a draft model, by guesses along a path."""

    def __init__(self, model: FastDecoder, trees: Mapping[int, Ranked], *, vocab_size: int) -> None:
        super().__init__(model, vocab_size=vocab_size)
        self._trees = {depth: StaticTree.of(parents, model.device) for depth, (parents, _) in trees.items()}
        self._fed = {depth: FedTree.of(*ranked, model.device) for depth, ranked in trees.items()}
        self.max_depth = max(trees)
        self._back = Again(self.max_depth + 1, model.device)

    def num_nodes(self, depth: int) -> int:
        return len(self._trees[depth].parents)

    def trees(self, batch_size: int, depth: int) -> SlotTrees:
        return self._trees[depth].trees(batch_size)

    def propose(self, frame: Frame, nodes: Tensor, depth: int) -> None:
        tree, fed = self._trees[depth], self._fed[depth]
        logits = self._at_root(frame, self._back)
        for level in fed.levels:
            if level.first:
                sights = fed.shape.sights(frame.batch_size, start=level.first, end=level.first + len(level.fed))
                step = self._step(frame.lengths - 1, len(level.fed), sights)
                logits, _ = self.model.forward(nodes.index_select(1, level.fed), step)
            words = tree.words[level.fed].expand(frame.batch_size, -1, -1).contiguous()
            guessing, trail = Guessing(level.children.shape[1]), Trail(nodes, words)
            tops = block_bests(logits, frame, depths=level.depth, vocab_size=self._vocab_size, guessing=guessing, trail=trail)
            pick_children(tops, nodes, level.children)
