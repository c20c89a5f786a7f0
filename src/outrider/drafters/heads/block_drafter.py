"""Drafting with blocks of open positions (tokens not known yet): the memory of the text, and one pass over a block.

The memory holds keys and values of the target's fused features, layer by layer. Nothing of a block is kept. All positions of a
block see each other, so a block always has the length it was trained with, even if fewer guesses are planned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import Context
from outrider.core.tree import TokenTree
from outrider.drafters.heads.head_drafter import HeadDrafter, HeadState, NewColumns, read_columns
from outrider.drafters.heads.head_growth import LevelsGrowth
from outrider.drafters.heads.head_options import HeadOptions
from outrider.models.heads.block_head import BlockHead
from outrider.models.heads.levels import HeadLevels

if TYPE_CHECKING:
    from outrider.device.drafters.heads.memory import HeadMemory


class BlockDrafter(HeadDrafter, ABC):
    """Trees from blocks."""

    def __init__(self, head: BlockHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws, num_layers=len(head.layers))
        self._backbone = head

    def _growth(self, state: HeadState, context: Context, max_depth: int) -> LevelsGrowth:
        del max_depth
        for columns in read_columns(state, context):
            self._remember(state, columns)
        roots = torch.tensor(context.roots, device=context.device)[:, None]
        return LevelsGrowth(context, self._levels(self._block(state, roots), roots))

    @abstractmethod
    def _levels(self, places: Tensor, roots: Tensor) -> HeadLevels:
        """The heads at the roots [B, 1], from the states [B, P, H] of a block's positions."""

    def _device_memory(self, max_depth: int) -> HeadMemory | None:
        from outrider.device.drafters.heads.memory import BlockMemory  # needs triton

        del max_depth
        return BlockMemory(self._backbone, self._levels)

    def _remember(self, state: HeadState, columns: NewColumns) -> None:
        """Store keys and values of new features, in all layers."""
        assert state.cache is not None
        head, attending = self._backbone, self._layer.attending(TokenTree.chain(columns.tokens, columns.sizes), state.cache)
        for layer, (keys, values) in enumerate(head.entries(head.fuse(columns.features))):
            attending.of_layer(layer).put(keys, values)
        state.cache.commit([range(size) for size in columns.sizes])

    def _block(self, state: HeadState, roots: Tensor) -> Tensor:
        """[B, P, H] states of all positions. They are not committed, so the next columns overwrite them."""
        assert state.cache is not None
        head = self._backbone
        tokens = torch.nn.functional.pad(roots, (0, head.num_places - 1), value=head.config.mask_token)
        attending = self._layer.block(head.num_places, state.cache)
        return head.block(tokens, [attending.of_layer(layer) for layer in range(len(head.layers))], self._dtype)
