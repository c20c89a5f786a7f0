"""Trees of a shape that is fixed before anything is drawn: all children of a level come from one call of the source.

A batch grows one tree that holds the shapes of all its rows; each row keeps its own part. The shape does not depend on what was
drawn, so it is lossless with every way of drawing (Lemma C of docs/lossless.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.interfaces import Plan
from outrider.core.tree import TokenTree
from outrider.drafters.trees.candidates import Drawing
from outrider.drafters.trees.children import ChildSource, DrawnChildren
from outrider.drafters.trees.levels import LevelGrowth, kept_part
from outrider.drafters.trees.shape import RankPath, TreeShape, union


def grow_shape(growth: LevelGrowth, plan: Plan, *, tree: TreeShape, drawing: Drawing) -> tuple[Draft, Tensor]:
    """Trees of the given shape, cut to every row's plan, and [B, N] their nodes' numbers among the expanded ones."""
    return grow_shapes(DrawnChildren(growth, drawing), cut(tree, plan), lanes=tree.lanes)


def cut(tree: TreeShape, plan: Plan) -> list[TreeShape]:
    """The cheapest part of a shape within the plan of each row."""
    return [tree.within(nodes, depth) for nodes, depth in zip(plan.max_nodes, plan.max_depth, strict=True)]


def grow_shapes(
    source: ChildSource, shapes: Sequence[TreeShape], *, lanes: Mapping[RankPath, int] | None = None
) -> tuple[Draft, Tensor]:
    """A tree of each row's shape, and [B, N] its nodes' numbers among the expanded ones; 0 for unexpanded nodes.

    ``lanes`` are the random numbers of each node's children, for sources that sample.
    """
    whole, wanted = union(shapes)
    levels = _Levels(source, whole, lanes)
    while levels.depth < whole.max_depth:
        levels.add()
    return levels.draft(None if wanted is None else torch.tensor(wanted, device=levels.tokens.device))


class _Levels:
    """A growing tree of one shape."""

    def __init__(self, source: ChildSource, shape: TreeShape, lanes: Mapping[RankPath, int] | None) -> None:
        self.source, self.shape, self.lanes = source, shape, lanes
        self.depth = 0
        self.tokens = torch.tensor(source.context.roots, device=source.context.device)[:, None]
        self.possible = torch.ones_like(self.tokens, dtype=torch.bool)
        self.inner: list[int] = [0]
        """Nodes of the last level that have children; the source provides these."""
        self.asked: list[list[int]] = []
        """Nodes with children, for every level."""
        self.number = [0] * len(shape.paths)
        """Number of each node among the expanded ones."""

    def add(self) -> None:
        """Add the next level: choose its tokens, and expand the nodes that have children."""
        shape, place = self.shape, {node: index for index, node in enumerate(self.inner)}
        level = shape.levels[self.depth + 1]
        found = self.source.children(
            max(shape.widths[node] for node in self.inner), depth=self.depth, lanes=self._lanes_of(self.inner)
        )
        self.asked.append(self.inner)
        places = [place[shape.parents[node]] for node in level]
        ranks = [min(shape.paths[node][-1], found.tokens.shape[2] - 1) for node in level]
        chosen, possible = found.tokens[:, places, ranks], found.scores[:, places, ranks] > -torch.inf
        possible = possible & self.possible[:, [shape.parents[node] for node in level]]
        self.tokens, self.possible = torch.cat([self.tokens, chosen], 1), torch.cat([self.possible, possible], 1)
        self.depth += 1
        self.inner = [node for node in level if shape.widths[node]]
        if self.inner:
            self._expand(chosen[:, [node - level[0] for node in self.inner]])

    def draft(self, wanted: Tensor | None) -> tuple[Draft, Tensor]:
        """The tree of the wanted nodes that have a candidate, with their laws and their numbers."""
        tokens, draws = self.tokens, self.source.draws
        parents = torch.tensor(self.shape.parents, device=tokens.device).expand_as(tokens)
        number = torch.tensor(self.number, device=tokens.device).expand_as(tokens)
        q = self.source.q(self.asked, tokens.shape[1])
        if self.source.runs_out:
            wanted = self.possible if wanted is None else self.possible & wanted
        if wanted is None:
            tree = TokenTree(tokens, parents, (tokens.shape[1],) * len(tokens), is_chain=self.shape.is_chain)
            return Draft(tree, draws, q), number
        tree, origin = kept_part(tokens, parents, wanted)
        return Draft(tree, draws, None if q is None else _rows_of(q, origin)), number.gather(1, origin)

    def _lanes_of(self, nodes: Sequence[int]) -> Tensor | None:
        lanes, paths = self.lanes, self.shape.paths
        return None if lanes is None else torch.tensor([lanes[paths[node]] for node in nodes], device=self.tokens.device)

    def _expand(self, tokens: Tensor) -> None:
        parents = torch.tensor([self.number[self.shape.parents[node]] for node in self.inner], device=tokens.device)
        for place, node in enumerate(self.inner):
            self.number[node] = self.source.num_expanded + place
        self.source.expand(tokens, parents.expand(len(tokens), -1))


def _rows_of(q: Tensor, origin: Tensor) -> Tensor:
    """[B, N', ...] the laws at the former indices ``origin`` [B, N'], from [B, N, ...]."""
    index = origin.view(*origin.shape, *[1] * (q.dim() - 2))
    return q.gather(1, index.expand(-1, -1, *q.shape[2:]))
