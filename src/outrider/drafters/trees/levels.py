"""A tree that a draft model grows level by level: ask it about some nodes, hang candidates below them, ask about those.

The root is committed to the draft's cache before anything is guessed, so the nodes that the model is asked about form a
forest in it: several of them have no parent there. A level costs one pass over its new nodes; earlier levels are in the
cache. Only nodes that get children are *expanded* (fed to the model), so the cache may lack the last accepted guess, which
the next round reads together with the token the target added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from outrider.core.interfaces import Cache, Context, Target
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
from outrider.drafters.model.catch_up import catch_up, fit


class LevelGrowth(ABC):
    """What a way of growing trees asks of whoever grows them, a draft model or part of the target."""

    context: Context

    @property
    @abstractmethod
    def num_expanded(self) -> int:
        """Nodes so far, the root included."""

    @abstractmethod
    def root(self) -> Law:
        """[B, 1, V] the law after the root."""

    @abstractmethod
    def expand(self, tokens: Tensor, parents: Tensor) -> Law:
        """[B, M, V] the law after M new nodes; ``parents`` [B, M] are numbers of expanded nodes, 0 for the root."""


@final
class TreeGrowth(LevelGrowth):
    """The expanded nodes of one round. Node 0 is the root; others are numbered as they are expanded, alike in all rows."""

    def __init__(self, model: Target, cache: Cache, context: Context, *, vocab_size: int, depths: Sequence[int]) -> None:
        """``depths[b]``: how deep row b's guesses may be; a row that is done is carried along without moving on."""
        self.context = context
        self.depths = depths
        self._model, self._cache, self._vocab_size = model, cache, vocab_size
        self._tokens = torch.tensor(context.roots, device=context.device)[:, None]
        self._parents = torch.full_like(self._tokens, -1)
        self._is_chain = True
        self._num_levels = 0

    @property
    def num_expanded(self) -> int:
        return self._tokens.shape[1]

    def root(self) -> Law:
        logits = fit(catch_up(self._model, self._cache, self.context), self._vocab_size)
        return self.context.sampler.law(logits, TokenTree.chain(self._tokens), self.context.noise)

    def expand(self, tokens: Tensor, parents: Tensor) -> Law:
        self._num_levels += 1
        alive = [depth >= self._num_levels for depth in self.depths]
        if not all(alive):  # a finished row's nodes hang from the root, so that none lies beyond the draft's context
            parents = parents * torch.tensor(alive, device=parents.device)[:, None]
        self._is_chain = self._is_chain and tokens.shape[1] == 1 and all(alive)
        start = self.num_expanded
        self._tokens = torch.cat([self._tokens, tokens], 1)
        self._parents = torch.cat([self._parents, parents], 1)
        forest = self._tree(self._tokens[:, 1:], self._parents[:, 1:] - 1)
        logits = fit(self._model.score(forest, self._cache, start=start - 1).logits, self._vocab_size)
        return self.context.sampler.law(logits, self._tree(self._tokens, self._parents), self.context.noise, start=start)

    def _tree(self, tokens: Tensor, parents: Tensor) -> TokenTree:
        if self._is_chain:
            return TokenTree.chain(tokens)
        return TokenTree(tokens, parents, (tokens.shape[1],) * tokens.shape[0])


def kept_part(tokens: Tensor, parents: Tensor, kept: Tensor) -> tuple[TokenTree, Tensor]:
    """The nodes of [B, N] trees for which ``kept`` holds, in the same order, and [B, N'] where each one stood before.

    The root is kept and so is the parent of every kept node.
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
