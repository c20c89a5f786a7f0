"""Parallel multi-token prediction: a decoder layer for each of the next tokens, all over the same columns of the text.

The layers read the text into a cache of their own and answer for every level of the tree in one pass. So all nodes of a level
share one law. (Gloeckle et al. 2024, arXiv 2404.19737.)

    q(. | node at depth d) = softmax(W norm(layer_d(h)))

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.core.draft import Draws
from outrider.core.interfaces import Context, Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.heads.head_drafter import HeadDrafter, HeadState, NewColumns, read_columns, read_pending
from outrider.drafters.heads.head_growth import LevelsGrowth
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.trained import trained_head
from outrider.models.heads.levels import SharedLevels
from outrider.models.heads.mtp_parallel import KIND, ParallelMtp

if TYPE_CHECKING:
    from outrider.device.drafters.heads.memory import HeadMemory


@final
class ParallelPrediction(HeadDrafter):
    """Trees from a layer per level."""

    def __init__(self, head: ParallelMtp, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws, num_layers=len(head.layers))
        self.head = head

    def _device_memory(self, max_depth: int) -> HeadMemory | None:
        from outrider.device.drafters.heads.text_attention import ParallelMemory  # needs triton

        del max_depth
        return ParallelMemory(self.head)

    def _growth(self, state: HeadState, context: Context, max_depth: int) -> LevelsGrowth:
        del max_depth
        assert state.cache is not None
        last = read_pending(state, read_columns(state, context), partial(self._read, state.cache))
        levels = last.unflatten(-1, (len(self.head.layers), -1))[:, 0]
        return LevelsGrowth(context, SharedLevels(self.head, lambda depth: levels[:, depth : depth + 1]))

    def _read(self, cache: ContiguousCache, columns: NewColumns, chain: TokenTree) -> Tensor:
        """[B, M, D H] the states of all levels, concatenated."""
        attending = self._layer.attending(chain, cache)
        levels = range(len(self.head.layers))
        return torch.cat([self.head.state(depth, columns.features, attending.of_layer(depth)) for depth in levels], -1)


def build(parts: Parts) -> Drafter:
    return ParallelPrediction(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="a decoder layer for each of the next tokens, all at once (trained)",
    paper="Gloeckle et al. 2024 (arXiv 2404.19737)",
    drafter=ParallelPrediction,
    build=build,
    defaults={"num_draft_tokens": 4, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
