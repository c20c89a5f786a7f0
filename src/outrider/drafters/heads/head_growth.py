"""What the growth of every kind of heads keeps: the expanded nodes, in the order in which they were expanded, alike in all
rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from outrider.core.interfaces import Context
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
from outrider.drafters.trees.levels import LevelGrowth
from outrider.models.heads import Head


class HeadGrowth(LevelGrowth, ABC):
    """Nodes of one round. Node 0 is the root; level d is answered by depth d of the heads."""

    def __init__(self, head: Head, context: Context) -> None:
        self.context = context
        self.head = head
        self.tokens = torch.tensor(context.roots, device=context.device)[:, None]
        self.parents = torch.full_like(self.tokens, -1)
        self.depth = 0

    @property
    def num_expanded(self) -> int:
        return self.tokens.shape[1]

    def root(self) -> Law:
        return self._law(self._root_states(), 0)

    def expand(self, tokens: Tensor, parents: Tensor) -> Law:
        self.depth += 1
        start = self.num_expanded
        self.tokens = torch.cat([self.tokens, tokens], 1)
        self.parents = torch.cat([self.parents, parents], 1)
        return self._law(self._states(tokens, parents), start)

    def _law(self, states: Tensor, start: int) -> Law:
        logits = self.head.over_target(self.head.readout(self.depth, states)).float()
        logits = logits.expand(-1, self.num_expanded - start, -1)
        tree = TokenTree(self.tokens, self.parents, (self.num_expanded,) * len(self.tokens))
        return self.context.sampler.law(logits, tree, self.context.noise, start=start)

    @abstractmethod
    def _root_states(self) -> Tensor:
        """[B, 1, H] states at the root."""

    @abstractmethod
    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """[B, M, H] states at the newest nodes, or [B, 1, H] where they are all the same."""


@final
class SharedLevels(HeadGrowth):
    """Heads that do not see the guesses: every level of the tree has one state."""

    def __init__(self, head: Head, context: Context, state_of: Callable[[int], Tensor]) -> None:
        """``state_of(depth)`` is the state [B, 1, H] of a level, asked for once."""
        super().__init__(head, context)
        self._state_of = state_of

    def _root_states(self) -> Tensor:
        return self._state_of(0)

    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        del tokens, parents
        return self._state_of(self.depth)
