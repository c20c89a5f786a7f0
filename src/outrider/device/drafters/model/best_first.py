"""A draft model's best-first tree inside a captured round.

Each level takes one draft pass over its expanded nodes. Small kernels choose the nodes to expand next and, at the end, the
nodes of the tree (``device/drafters/trees/best_first.py``). As in ``device/drafters/model/draft_tree.py``, the last depth + 1
committed tokens are fed again, so no accepted branch has to be moved in the draft's cache. The trees equal those of
``drafters/model/best_first.py``. They are lossless, since the coupled rule is exact for any candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from outrider.core.device_round import Frame, SlotTrees
from outrider.device.drafters.model.draft_model import Again, ModelDrafter
from outrider.device.drafters.trees.best_first import MOST, Growths, Search
from outrider.device.sampling.choose import Guessing, block_bests
from outrider.models.attention.tree_tiles import Sights, paths_of
from outrider.models.gpu.decoder import FastDecoder


@final
class DeviceBestFirst(ModelDrafter):
    """Trees that follow a draft model's confidence."""

    def __init__(self, model: FastDecoder, *, vocab_size: int, searches: Mapping[int, Search]) -> None:
        """``searches`` are keyed by the number of guesses along a path."""
        super().__init__(model, vocab_size=vocab_size)
        self.max_depth = max(searches)
        self._again = Again(self.max_depth + 1, model.device)
        self._growths = {depth: Growths(search, model.device, with_root=True) for depth, search in searches.items()}
        self._bits = torch.arange(MOST, device=model.device)

    def num_nodes(self, depth: int) -> int:
        return self._growths[depth].search.num_nodes

    def trees(self, batch_size: int, depth: int) -> SlotTrees:
        return self._growths[depth].of(batch_size).trees

    def propose(self, frame: Frame, nodes: Tensor, depth: int) -> None:
        growth, search, first = self._growths[depth].of(frame.batch_size), self._growths[depth].search, 0
        logits = self._at_root(frame, self._again)
        for level, count in enumerate(search.num_expanded):
            trail = None
            if level:
                fed = growth.expanded.level(first, count)
                sights = self._sights(fed.words, level, first + 1)
                logits, _ = self.model.forward(fed.tokens, self._step(frame.lengths - 1, count, sights))
                trail, first = growth.trail(fed), first + count
            guessing = Guessing(search.num_children, tau=search.tau)
            tops = block_bests(logits, frame, depths=level, vocab_size=self._vocab_size, guessing=guessing, trail=trail)
            growth.add(level, tops, frame)
        growth.choose(nodes)

    def _sights(self, words: Tensor, depth: int, start: int) -> Sights:
        depths = torch.full(words.shape[:2], depth, dtype=torch.int32, device=words.device)
        paths = paths_of((words >> self._bits) & 1) if self.model.traits.is_invariant else None
        return Sights(words, depths, start, paths)
