"""Trees from DFlash's blocks: the newest token and places held open behind it go through the layers once, and every place
says its own token.

What is kept of the text are keys and values of the target's fused features, layer by layer; a block leaves nothing behind. All
places see each other, so a block always has the length it was trained with, however few levels are asked for (Chen et al.
2026, arXiv 2602.06036; trees over the places' laws are ours, as for all heads that do not see the guesses).

    q(. | node at depth d) = softmax(W_target norm(b_{d+1}))          b: models/heads/dflash.py

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import Context, Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.heads.head_drafter import Columns, HeadDrafter, HeadOptions, HeadState, read_columns
from outrider.drafters.heads.head_growth import SharedLevels
from outrider.drafters.heads.trained import trained_head
from outrider.models.heads.dflash import KIND, DflashHead


@final
class Dflash(HeadDrafter):
    """Trees from blocks."""

    def __init__(self, head: DflashHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws, num_layers=len(head.layers))
        self.head = head

    def _growth(self, state: HeadState, context: Context, max_depth: int) -> SharedLevels:
        del max_depth
        for columns in read_columns(state, context):
            self._remember(state, columns)
        levels = self._block(state, context)
        return SharedLevels(self.head, context, lambda depth: levels[:, depth : depth + 1])

    def _remember(self, state: HeadState, columns: Columns) -> None:
        """Keys and values of new features, in all layers."""
        assert state.cache is not None
        attending = self._layer.attending(TokenTree.chain(columns.tokens, columns.sizes), state.cache)
        for layer, (keys, values) in enumerate(self.head.entries(self.head.fuse(columns.features))):
            attending.of_layer(layer).put(keys, values)
        state.cache.commit([range(size) for size in columns.sizes])

    def _block(self, state: HeadState, context: Context) -> Tensor:
        """[B, K, H] states of the open places; not committed, so the next columns overwrite them."""
        assert state.cache is not None
        roots = torch.tensor(context.roots, device=context.device)[:, None]
        tokens = torch.nn.functional.pad(roots, (0, self.head.num_places - 1), value=self.head.config.mask_token)
        attending = self._layer.block(self.head.num_places, state.cache)
        layers = [attending.of_layer(layer) for layer in range(len(self.head.layers))]
        return self.head.block(tokens, layers, self._dtype)[:, 1:]


def build(parts: Parts) -> Drafter:
    return Dflash(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="layers over a block of open places, with the target's features as keys and values (trained)",
    paper="Chen et al. 2026, DFlash (arXiv 2602.06036)",
    drafter=Dflash,
    build=build,
    defaults={"num_draft_tokens": 5, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
