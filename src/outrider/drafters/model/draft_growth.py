"""A tree that a draft model grows level by level, on its own cache.

The root is committed to the draft's cache before anything is guessed, so the nodes that the model is asked about form a forest
in it. A level costs one pass over its new nodes. Only nodes that get children are fed, so the cache may lack the last accepted
guess; the next round reads it together with the token the target added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from outrider.core.interfaces import Cache, Context, Target
from outrider.core.sampling import Law
from outrider.drafters.model.catch_up import catch_up, fit
from outrider.drafters.trees.levels import LevelGrowth


@final
class DraftGrowth(LevelGrowth):
    """The nodes that a draft model was fed in one round."""

    def __init__(self, model: Target, cache: Cache, context: Context, *, vocab_size: int, depths: Sequence[int]) -> None:
        """``depths[b]`` is the depth limit of row b. Rows that reached it are padded."""
        super().__init__(context)
        self.depths = depths
        self._model, self._cache, self._vocab_size = model, cache, vocab_size
        self._num_levels = 0

    def expand(self, tokens: Tensor, parents: Tensor) -> Law:
        self._num_levels += 1
        alive = [depth >= self._num_levels for depth in self.depths]
        if not all(alive):  # a finished row's nodes hang from the root, so that none lies beyond the draft's context
            parents = parents * torch.tensor(alive, device=parents.device)[:, None]
            self.is_chain = False
        return super().expand(tokens, parents)

    def _logits(self, start: int) -> Tensor:
        if start == 0:
            return fit(catch_up(self._model, self._cache, self.context), self._vocab_size)
        return fit(self._model.score(self.forest(), self._cache, start=start - 1).logits, self._vocab_size)
