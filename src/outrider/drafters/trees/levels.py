"""A tree that grows level by level: expand some nodes, add candidates below them, expand the best of those.

The guesser (a draft model, part of the target, trained heads) evaluates a level at once. Nodes that it has evaluated are
*expanded*. Node 0 is the root; the others are numbered as they are expanded, the same in all rows. The growers of this kit
(``static.py``, ``best_first.py``) decide which nodes those are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from outrider.core.interfaces import Context
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree


class LevelGrowth(ABC):
    """The expanded nodes of one round, and the laws after them."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.tokens = torch.tensor(context.roots, device=context.device)[:, None]
        """[B, N] tokens of the expanded nodes, the root first."""
        self.parents = torch.full_like(self.tokens, -1)
        """[B, N] numbers of their parents, -1 for the root."""
        self.is_chain = True
        """Whether every level so far has one node."""

    @property
    def num_expanded(self) -> int:
        """Number of expanded nodes, the root included."""
        return self.tokens.shape[1]

    def root(self) -> Law:
        """[B, 1, V] the law after the root."""
        return self._law(0)

    def expand(self, tokens: Tensor, parents: Tensor) -> Law:
        """[B, M, V] the law after M new nodes; ``parents`` [B, M] are numbers of expanded nodes, 0 for the root."""
        start = self.num_expanded
        self.is_chain = self.is_chain and tokens.shape[1] == 1
        self.tokens = torch.cat([self.tokens, tokens], 1)
        self.parents = torch.cat([self.parents, parents], 1)
        return self._law(start)

    def forest(self) -> TokenTree:
        """The expanded nodes without the root, so several have no parent."""
        return self._tree(self.tokens[:, 1:], self.parents[:, 1:] - 1)

    @abstractmethod
    def _logits(self, start: int) -> Tensor:
        """[B, M, V] logits after the expanded nodes from number ``start`` on."""

    def _law(self, start: int) -> Law:
        logits = self._logits(start)
        return self.context.sampler.law(logits, self._tree(self.tokens, self.parents), self.context.noise, start=start)

    def _tree(self, tokens: Tensor, parents: Tensor) -> TokenTree:
        if self.is_chain:
            return TokenTree.chain(tokens)
        return TokenTree(tokens, parents, (tokens.shape[1],) * tokens.shape[0])


def kept_part(tokens: Tensor, parents: Tensor, kept: Tensor) -> tuple[TokenTree, Tensor]:
    """The ``kept`` nodes of [B, N] trees in the same order, and [B, N'] their former indices.

    The root and the parent of every kept node must be kept.
    """
    sizes: list[int] = kept.sum(1).tolist()
    num_nodes = max(sizes)
    origin = torch.argsort(~kept, dim=1, stable=True)[:, :num_nodes]  # what is kept comes first, the rest is padding
    padding = torch.arange(num_nodes, device=tokens.device) >= kept.sum(1, keepdim=True)
    moved = kept.cumsum(1) - 1
    above = moved.gather(1, parents.gather(1, origin).clamp(min=0)).masked_fill(padding, 0)
    above = torch.cat([torch.full_like(above[:, :1], -1), above[:, 1:]], 1)
    tree = TokenTree(tokens.gather(1, origin).masked_fill(padding, 0), above, tuple(sizes), is_chain=num_nodes == 1)
    return tree, origin
