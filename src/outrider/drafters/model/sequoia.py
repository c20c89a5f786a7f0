"""Sequoia: the best static tree for how often each sibling rank is accepted, by dynamic programming.

Suppose that the b-th child of an accepted node is the accepted one with probability p[b], whatever came before. Then a tree is
expected to yield the sum over its nodes of the product of p along their paths. The best tree of m nodes splits into its first
child's subtree and the rest, so it is found from smaller ones. The rates p are measured: ``RankCounts`` counts accepted
children by rank. (Chen et al. 2024, "Sequoia", arXiv 2402.12374. Its table T[m][l][b] fixes the number b of the root's
children. Here the same recursion runs over the value of the b-th and later children of a node, which gives the same trees.)

    F(m, l) = 1 + H(m - 1, l, 1)                                                 a node with m - 1 nodes below it, l deep
    H(n, l, b) = max(0, max_{1 <= y <= n}  p[b] F(y, l - 1) + H(n - y, l, b + 1)),      H(., 0, .) = H(0, ., .) = 0

The shape is fixed before anything is drawn, so it is lossless with every way of drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

from outrider.core.errors import OptionError
from outrider.core.interfaces import Drafter, Observation
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.model.draft_tree import DraftTree
from outrider.drafters.trees.options import DraftTreeOptions
from outrider.drafters.trees.shape import RankPath, TreeShape

BY_RANK = (0.58, 0.13, 0.065, 0.04, 0.03, 0.02, 0.013, 0.009)
"""Measured on coupled candidates of the bundled pair at temperature 1."""


@dataclass(frozen=True)
class SequoiaOptions:
    """The size of the tree, and the acceptance rates for which it is optimal."""

    num_nodes: int = 32
    """Guesses in the tree."""
    max_depth: int = 8
    """Guesses along a path."""
    by_rank: tuple[float, ...] = BY_RANK
    """p: how often the first, second and further children are accepted."""

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.max_depth < 1:
            raise OptionError(
                f"num_nodes = {self.num_nodes}, max_depth = {self.max_depth} leave no tree; use at least 1 of each"
            )
        if not self.by_rank or min(self.by_rank) < 0 or sum(self.by_rank) > 1 + 1e-6:
            raise OptionError(f"by_rank = {self.by_rank!r} is not valid; use probabilities that add up to at most 1")

    @property
    def tree(self) -> TreeShape:
        return best_tree(tuple(self.by_rank), self.num_nodes, max_depth=self.max_depth)


@lru_cache(maxsize=64)
def best_tree(by_rank: tuple[float, ...], num_nodes: int, *, max_depth: int) -> TreeShape:
    """The tree of at most ``num_nodes`` guesses with the largest expected number of accepted ones."""

    @cache
    def below(nodes: int, depth: int, rank: int) -> tuple[float, int]:
        """H, and the number of nodes that the child of this rank gets."""
        if nodes == 0 or depth == 0 or rank == len(by_rank):
            return 0.0, 0
        options = (
            (by_rank[rank] * (1 + below(size - 1, depth - 1, 0)[0]) + below(nodes - size, depth, rank + 1)[0], size)
            for size in range(1, nodes + 1)
        )
        return max((0.0, 0), *options, key=lambda option: option[0])

    paths: list[RankPath] = []

    def collect(path: RankPath, nodes: int, rank: int) -> None:
        size = below(nodes, max_depth - len(path), rank)[1]
        if size:
            paths.append((*path, rank))
            collect((*path, rank), size - 1, 0)
            collect(path, nodes - size, rank + 1)

    collect((), num_nodes, 0)
    return TreeShape.of_paths(paths)


@dataclass
class RankCounts:
    """Measures p from rounds of any trees whose siblings stand in order."""

    accepted: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)

    def add(self, observation: Observation) -> None:
        """Count a round. Every node of the accepted path that had children counts once, by the rank of the accepted child."""
        tree = observation.draft.tree
        for row, path in enumerate(observation.paths):
            parents = tree.parents[row, : tree.sizes[row]].tolist()
            for place, node in enumerate(path):
                children = [child for child, parent in enumerate(parents) if parent == node and child > 0]
                self._count(children, path[place + 1] if place + 1 < len(path) else None)

    @property
    def by_rank(self) -> tuple[float, ...]:
        """p[b]: how often the child of rank b was accepted, among the nodes that had one."""
        return tuple(hits / max(asked, 1) for hits, asked in zip(self.accepted, self.offered, strict=True))

    def _count(self, children: Sequence[int], taken: int | None) -> None:
        missing = max(0, len(children) - len(self.offered))
        self.accepted += [0] * missing
        self.offered += [0] * missing
        for rank, child in enumerate(children):
            self.offered[rank] += 1
            self.accepted[rank] += child == taken


def build(parts: Parts) -> Drafter:
    shape = DraftTreeOptions(rank_paths=tuple(path for path in parts.options.tree.paths if path))
    return DraftTree(parts.draft_model, shape, vocab_size=parts.target.vocab_size, draws=parts.draws)


ROW = MethodRow(
    summary="a draft model guesses the tree that measured acceptance makes best",
    paper="Chen et al. 2024, Sequoia (arXiv 2402.12374)",
    drafter=DraftTree,
    build=build,
    options=SequoiaOptions,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
    needs_draft=True,
)
