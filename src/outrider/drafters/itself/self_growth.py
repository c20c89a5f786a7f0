"""A tree that part of the target grows level by level, on the target's own cache.

The expanded nodes stand after the committed tokens in the order in which they were expanded, the root first. The verifying
pass resumes with the first nodes of the proposed tree that were expanded in the same order. With a fixed branching these are
all nodes but the last level. The pass overwrites the others.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from outrider.core.draft import Resume
from outrider.core.interfaces import Context
from outrider.core.layered_target import LayeredTarget
from outrider.core.route import Route
from outrider.core.tree import TokenTree
from outrider.drafters.itself.self_chain import cache_of
from outrider.drafters.trees.levels import LevelGrowth


@final
class SelfGrowth(LevelGrowth):
    """The nodes that part of the target was fed in one round."""

    def __init__(self, target: LayeredTarget, context: Context, *, route: Route) -> None:
        super().__init__(context)
        self._target, self._cache, self._route = target, cache_of(context), route
        self._states: list[Tensor] = []

    def resume(self, tree: TokenTree, numbers: Tensor) -> Resume | None:
        """The longest prefix of the proposed tree whose nodes are stored in expansion order; ``numbers`` is [B, N]."""
        if not self._route.is_first:
            return None
        places = torch.arange(tree.num_nodes, device=numbers.device)
        in_place = ((numbers == places) | ~tree.valid).all(0) & (places < self.num_expanded)
        count = int(in_place.int().cumprod(0).sum())
        return Resume(self._route.depth, torch.cat(self._states, 1)[:, :count])

    def _logits(self, start: int) -> Tensor:
        tree = TokenTree(self.tokens, self.parents, (self.num_expanded,) * len(self.tokens))
        self._states.append(self._target.exit(tree, self._cache, route=self._route, start=start))
        return self._target.logits(self._states[-1])
