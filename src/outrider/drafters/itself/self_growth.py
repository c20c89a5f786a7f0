"""A tree that part of the target grows level by level, on the target's own cache.

The expanded nodes stand behind the committed tokens in the order in which they were expanded, the root first. Where the tree
that is proposed begins with the same nodes in the same order, the verifying pass goes on from them; with a fixed branching that
is every node but the last level. Other nodes are scratch that the pass writes over.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from outrider.core.draft import Resume
from outrider.core.interfaces import Context, LayeredTarget
from outrider.core.route import Route
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
from outrider.drafters.itself.self_chain import cache_of
from outrider.drafters.trees.levels import LevelGrowth


@final
class SelfGrowth(LevelGrowth):
    """The expanded nodes of one round, numbered as they are expanded, alike in all rows; node 0 is the root."""

    def __init__(self, target: LayeredTarget, context: Context, *, route: Route) -> None:
        self.context = context
        self._target, self._cache, self._route = target, cache_of(context), route
        self._tokens = torch.tensor(context.roots, device=context.device)[:, None]
        self._parents = torch.full_like(self._tokens, -1)
        self._states: list[Tensor] = []

    @property
    def num_expanded(self) -> int:
        return self._tokens.shape[1]

    def root(self) -> Law:
        return self._law(0)

    def expand(self, tokens: Tensor, parents: Tensor) -> Law:
        start = self.num_expanded
        self._tokens = torch.cat([self._tokens, tokens], 1)
        self._parents = torch.cat([self._parents, parents], 1)
        return self._law(start)

    def resume(self, tree: TokenTree, numbers: Tensor) -> Resume | None:
        """The longest beginning of the proposed tree whose nodes stand where they were expanded; ``numbers`` [B, N]."""
        if not self._route.is_first:
            return None
        places = torch.arange(tree.num_nodes, device=numbers.device)
        in_place = ((numbers == places) | ~tree.valid).all(0) & (places < self.num_expanded)
        count = int(in_place.int().cumprod(0).sum())
        return Resume(self._route.depth, torch.cat(self._states, 1)[:, :count])

    def _law(self, start: int) -> Law:
        tree = TokenTree(self._tokens, self._parents, (self.num_expanded,) * len(self._tokens))
        self._states.append(self._target.exit(tree, self._cache, route=self._route, start=start))
        return self.context.sampler.law(self._target.logits(self._states[-1]), tree, self.context.noise, start=start)
