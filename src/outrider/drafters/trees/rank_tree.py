"""Static trees over ranks: which of a node's best, second best ... candidates are worth a place.

A node of such a tree is a path of ranks: (0, 2) is the third choice after the best choice. If a candidate of rank r is
right with probability a[r], whatever came before, a node is reached with the product of its path's probabilities, and the
tree of n nodes that is expected to accept most holds the n largest products (the sum over nodes of the chance to reach
them is the expected accepted length). Taking the largest again and again gives that tree for every size at once: a smaller
tree is the beginning of a larger one.

    value(r1, ..., rd) = a[r1] * ... * a[rd];    tree(n) = the n largest values      (parents come first: a <= 1)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

RankPath = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RankTree:
    """A static tree in breadth-first order, root first, for the rows of a batch."""

    parents: Tensor
    """[N] index of the parent, -1 for the root."""
    ranks: Tensor
    """[N] which of its parent's candidates a node is (0 for the root, which is none)."""
    levels: tuple[int, ...]
    """Where each depth begins, and N at the end: depth d is nodes levels[d] to levels[d + 1]."""
    wanted: Tensor
    """[B, N] true for the nodes that a row's own budget pays for. A wanted node's parent is wanted."""


@lru_cache(maxsize=256)
def grow(acceptance: tuple[float, ...], num_nodes: int, max_depth: int) -> tuple[RankPath, ...]:
    """The ``num_nodes`` rank paths of at most ``max_depth`` with the largest values, in order of value.

    ``acceptance[r]`` is how often a candidate of rank r is right; it must fall with r.
    """
    grown: list[RankPath] = []
    heap: list[tuple[float, RankPath]] = [(-acceptance[0], (0,))] if max_depth > 0 else []
    while heap and len(grown) < num_nodes:
        value, path = heapq.heappop(heap)
        grown.append(path)
        rank = path[-1]
        if rank + 1 < len(acceptance):  # the next sibling waits until its elder is taken, which is always better
            heapq.heappush(heap, (value / acceptance[rank] * acceptance[rank + 1], (*path[:-1], rank + 1)))
        if len(path) < max_depth:
            heapq.heappush(heap, (value * acceptance[0], (*path, 0)))
    return tuple(grown)


@lru_cache(maxsize=256)
def rank_tree(
    acceptance: tuple[float, ...], num_nodes: tuple[int, ...], *, max_depth: tuple[int, ...], device: torch.device
) -> RankTree:
    """One tree that holds every row's: row b's is the best one of ``num_nodes[b]`` guesses, ``max_depth[b]`` deep."""
    rows = [set(grow(acceptance, nodes, depth)) for nodes, depth in zip(num_nodes, max_depth, strict=True)]
    paths: list[RankPath] = [(), *sorted(set[RankPath]().union(*rows), key=lambda path: (len(path), path))]
    index = {path: node for node, path in enumerate(paths)}
    depths = [len(path) for path in paths]
    return RankTree(
        parents=torch.tensor([index[path[:-1]] if path else -1 for path in paths], device=device),
        ranks=torch.tensor([path[-1] if path else 0 for path in paths], device=device),
        levels=(*(depths.index(depth) for depth in range(depths[-1] + 1)), len(paths)),
        wanted=torch.tensor([[not path or path in row for path in paths] for row in rows], device=device),
    )
