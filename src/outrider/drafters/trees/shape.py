"""Static trees: shapes that say how many candidates each node gets, before anything is drawn.

A node is a path of ranks: (0, 2) is the third child of the first child of the root. A shape is a set of such paths closed under
"parent" and "elder sibling", in breadth-first order. It is fixed before anything is drawn, so it may be used with every way of
drawing (Lemma C of docs/lossless.md). The same holds for smaller parts of it. A budget keeps the cheapest nodes, where a node
costs 1 + rank more than its parent.

    branching (2, 2)  =  {(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from outrider.core.errors import OptionError
from outrider.drafters.trees.trie import Limits, Trie, best_first

RankPath = tuple[int, ...]


@dataclass(frozen=True)
class TreeShape:
    """Rank paths in breadth-first order, the root's empty path first."""

    paths: tuple[RankPath, ...]

    @staticmethod
    def of_paths(paths: Iterable[Sequence[int]]) -> TreeShape:
        """The shape of rank paths in any order. The root's may be left out."""
        given = {tuple(path) for path in paths} | {()}
        for path in given:
            missing = path and (path[:-1] not in given or (path[-1] > 0 and (*path[:-1], path[-1] - 1) not in given))
            if missing or any(rank < 0 for rank in path):
                raise OptionError(f"rank path {path} has no parent or no elder sibling in the tree; add them")
        return TreeShape(tuple(sorted(given, key=lambda path: (len(path), path))))

    @staticmethod
    def of_branching(branching: Sequence[int]) -> TreeShape:
        """Every node at depth d has ``branching[d]`` children."""
        if not branching or any(not isinstance(width, int) or width < 1 for width in branching):
            raise OptionError(f"branching = {branching!r} is not valid; use whole numbers of at least 1, one per level")
        levels = (product(*(range(width) for width in branching[:depth])) for depth in range(len(branching) + 1))
        return TreeShape(tuple(path for level in levels for path in level))

    @staticmethod
    def spine(max_depth: int, num_children: int, num_followed: int) -> TreeShape:
        """A tree whose paths deviate at most once from the likeliest guess. The likeliest path has ``num_children`` at
        every step; the first ``num_followed`` of them are continued by likeliest guesses. (The kind of tree of Falcon,
        arXiv 2412.12639.)
        """
        ends = [(*(0,) * depth, rank) for depth in range(max_depth) for rank in range(num_children)]
        followed = [(path, max_depth - len(path)) for path in ends if 0 < path[-1] < num_followed]
        return TreeShape.of_paths([*ends, *((*path, *(0,) * more) for path, room in followed for more in range(1, room + 1))])

    @staticmethod
    @lru_cache(maxsize=256)
    def of_acceptance(by_rank: tuple[float, ...], num_nodes: int, max_depth: int) -> TreeShape:
        """The ``num_nodes`` rank paths accepted most often if a candidate of rank r is right with probability
        ``by_rank[r]``, whatever came before. The probabilities must fall. A smaller tree is part of a larger one."""
        ranks = [(rank, chance, None) for rank, chance in enumerate(by_rank)]
        trie = best_first(Trie(0), None, lambda _: ranks, limits=Limits(max_depth, num_nodes))
        paths: list[RankPath] = [()]
        for rank, parent in zip(trie.tokens[1:], trie.parents[1:], strict=True):
            paths.append((*paths[parent], rank))
        return TreeShape.of_paths(paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Index of each node's parent, -1 for the root."""
        index = {path: node for node, path in enumerate(self.paths)}
        return tuple(index[path[:-1]] if path else -1 for path in self.paths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each node among its parent's candidates; 0 for the root."""
        return tuple(path[-1] if path else 0 for path in self.paths)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Number of children of each node."""
        counts = [0] * len(self.paths)
        for parent in self.parents[1:]:
            counts[parent] += 1
        return tuple(counts)

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """The nodes at each depth, the root's first."""
        begins = [node for node, path in enumerate(self.paths) if node == 0 or len(path) > len(self.paths[node - 1])]
        return tuple(range(begin, end) for begin, end in zip(begins, [*begins[1:], len(self.paths)], strict=True))

    @cached_property
    def lanes(self) -> dict[RankPath, int]:
        """First random-number lane of each node's children, the same in every smaller tree."""
        return {path: node * max(self.widths) for node, path in enumerate(self.paths)}

    @property
    def max_depth(self) -> int:
        return len(self.paths[-1])

    @property
    def num_nodes(self) -> int:
        """Number of guesses, the root not counted."""
        return len(self.paths) - 1

    @property
    def is_chain(self) -> bool:
        return self.max_depth == self.num_nodes

    def within(self, max_nodes: int, max_depth: int) -> TreeShape:
        """The cheapest part with at most this many guesses."""
        if max_nodes >= self.num_nodes and max_depth >= self.max_depth:
            return self
        return _within(self, max_nodes, max_depth)


@lru_cache(maxsize=256)
def _within(shape: TreeShape, max_nodes: int, max_depth: int) -> TreeShape:
    paths = [path for path in shape.paths if 0 < len(path) <= max_depth]
    paths.sort(key=lambda path: sum(path) + len(path))  # stable, and a parent or elder sibling is always cheaper
    return TreeShape.of_paths(paths[:max_nodes])


def union(shapes: Sequence[TreeShape]) -> tuple[TreeShape, list[list[bool]] | None]:
    """One shape that contains all of them, and the nodes of it that each shape has (None if every shape has all)."""
    if len(set(shapes)) == 1:
        return shapes[0], None
    whole = TreeShape.of_paths({path for shape in shapes for path in shape.paths})
    rows = [set(shape.paths) for shape in shapes]
    return whole, [[path in row for path in whole.paths] for row in rows]
