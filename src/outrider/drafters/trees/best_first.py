"""Trees of the likeliest paths: at every level, the most promising nodes so far are expanded.

A pool holds all candidates with the log-probability that the text passes through them. The proposed tree is the best of the
pool. A node is at most as likely as its parent, so the best of the pool form a tree. (Li et al. 2024, EAGLE-2, arXiv
2406.16858.)

    value(node) = value(parent) + log P(token | parent),      tree = the num_nodes largest values
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.core.interfaces import Context, Plan
from outrider.core.tree import TokenTree
from outrider.drafters.trees.children import ChildSource
from outrider.drafters.trees.levels import kept_part


def useful_width(width: int, plan: Plan) -> int:
    """How many of ``width`` nodes of a level can have a child in a tree of this plan. Probabilities only fall along a
    path, so only the best ``max_nodes - 1`` nodes of a pool can have children."""
    return max(1, min(width, max(plan.max_nodes) - 1))


def grow_pool(source: ChildSource, *, width: int, num_children: int, max_depth: int, keep: int | None = None) -> CandidatePool:
    """Expand the best ``width`` nodes of each of ``max_depth`` levels, with ``num_children`` candidates below each.

    ``keep``: most candidates of a level that can be in a tree. Only these are pooled.
    """
    pool = CandidatePool.of_roots(source.context)
    frontier = torch.zeros_like(pool.tokens)  # places in the pool
    for depth in range(max_depth):
        begin = pool.tokens.shape[1]
        found = source.children(num_children, depth=depth)
        total = (pool.chances.gather(1, frontier)[..., None] + found.scores).flatten(1)
        tokens, above = found.tokens.flatten(1), frontier[..., None].expand_as(found.tokens).flatten(1)
        if keep is not None and total.shape[1] > keep:
            best = total.topk(keep)
            total, tokens, above = best.values, tokens.gather(1, best.indices), above.gather(1, best.indices)
        pool.add(tokens, above, total, depth + 1)
        if depth + 1 < max_depth:
            frontier = pool.best(begin, width)
            pool.expand(frontier, source)
    return pool


@final
@dataclass(eq=False)
class CandidatePool:
    """All candidates so far, in breadth-first order, the root first."""

    tokens: Tensor
    """[B, P]"""
    parents: Tensor
    """[B, P] places in the pool, -1 for the root."""
    chances: Tensor
    """[B, P] log-probability that the text passes through."""
    numbers: Tensor
    """[B, P] number among the expanded nodes; 0 for the root and for unexpanded nodes."""
    depths: list[int]
    """[P] the same in every row."""

    @staticmethod
    def of_roots(context: Context) -> CandidatePool:
        tokens = torch.tensor(context.roots, device=context.device)[:, None]
        return CandidatePool(
            tokens, torch.full_like(tokens, -1), tokens.new_zeros(tokens.shape, dtype=torch.float32), tokens * 0, [0]
        )

    def add(self, tokens: Tensor, parents: Tensor, chances: Tensor, depth: int) -> None:
        """Add candidates [B, K] at ``depth`` below the pool entries ``parents``."""
        self.tokens = torch.cat([self.tokens, tokens], 1)
        self.parents = torch.cat([self.parents, parents], 1)
        self.chances = torch.cat([self.chances, chances.to(self.chances.dtype)], 1)
        self.numbers = torch.cat([self.numbers, torch.zeros_like(tokens)], 1)
        self.depths += [depth] * tokens.shape[1]

    def best(self, begin: int, width: int) -> Tensor:
        """[B, W] the best candidates from ``begin`` on, in pool order."""
        count = min(width, self.tokens.shape[1] - begin)
        return self.chances[:, begin:].topk(count, -1).indices.sort(-1).values + begin

    def expand(self, places: Tensor, source: ChildSource) -> None:
        """Expand the candidates at ``places`` [B, W]."""
        first, count = source.num_expanded, places.shape[1]
        above = self.numbers.gather(1, self.parents.gather(1, places))
        source.expand(self.tokens.gather(1, places), above)
        numbers = torch.arange(first, first + count, device=places.device).expand_as(places)
        self.numbers = self.numbers.scatter(1, places, numbers)

    def best_tree(self, plan: Plan, *, runs_out: bool = False) -> tuple[TokenTree, Tensor]:
        """The best candidates within every row's plan, and [B, N] their places in the pool.

        ``runs_out``: candidates with probability 0 are placeholders and are left out.
        """
        device = self.tokens.device
        depths = torch.tensor(self.depths, device=device)
        left_out = depths > torch.tensor(plan.max_depth, device=device)[:, None]
        if runs_out:
            left_out = left_out | (self.chances == -torch.inf)
        order = self.chances.masked_fill(left_out, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
        place = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=device).expand_as(order))
        kept = (place <= torch.tensor(plan.max_nodes, device=device)[:, None]) & ~left_out
        return kept_part(self.tokens, self.parents, kept)
