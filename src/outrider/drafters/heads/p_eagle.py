"""P-EAGLE: EAGLE-3's layers draft a whole block in one pass.

Each unknown token has an open position (a mask), and all positions pass the same layers at once. All nodes of a level share one
law. (Hui et al. 2026, P-EAGLE, arXiv 2602.01469.)

    q(. | node at depth d) = softmax(W norm(layers(fc m, mask)))  at the d-th open place, d > 0

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import Context, Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.heads.head_drafter import HeadDrafter, HeadState, NewColumns, read_columns, read_pending
from outrider.drafters.heads.head_growth import LevelsGrowth
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.trained import trained_head
from outrider.models.heads.levels import SharedLevels
from outrider.models.heads.p_eagle import KIND, ParallelEagle

if TYPE_CHECKING:
    from outrider.device.drafters.heads.memory import HeadMemory


@final
class BlockDrafting(HeadDrafter):
    """Trees from open positions."""

    def __init__(self, head: ParallelEagle, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws, num_layers=len(head.layers))
        self.head = head

    def _device_memory(self, max_depth: int) -> HeadMemory | None:
        from outrider.device.drafters.heads.text_attention import OpenMemory  # needs triton

        return OpenMemory(self.head, max_depth)

    def _growth(self, state: HeadState, context: Context, max_depth: int) -> LevelsGrowth:
        *pieces, final_piece = read_columns(state, context)
        root = read_pending(state, pieces, partial(self._read, state)) if pieces else None
        levels = self._block(state, final_piece, root, max_depth)
        return LevelsGrowth(context, SharedLevels(self.head, lambda depth: levels[:, depth : depth + 1]))

    def _read(self, state: HeadState, columns: NewColumns, chain: TokenTree) -> Tensor:
        return self._step(state, columns.tokens, self.head.fuse(columns.features), chain)

    def _step(self, state: HeadState, tokens: Tensor, states: Tensor, chain: TokenTree) -> Tensor:
        assert state.cache is not None
        attending = self._layer.attending(chain, state.cache)
        return self.head.step(tokens, states, [attending.of_layer(index) for index in range(len(self.head.layers))])

    def _block(self, state: HeadState, columns: NewColumns, root: Tensor | None, num_levels: int) -> Tensor:
        """[B, K, H] states of all levels. One pass reads each row's last columns, followed by its open positions. Commits
        the columns and drops the positions."""
        assert state.cache is not None
        sizes = torch.tensor(columns.sizes, device=columns.tokens.device)[:, None]
        width, more = columns.tokens.shape[1], num_levels - 1
        is_column = torch.arange(width + more, device=sizes.device) < sizes
        padded = torch.nn.functional.pad(columns.tokens, (0, more))
        tokens = torch.where(is_column, padded, self.head.config.mask_token)
        features = torch.nn.functional.pad(columns.features, (0, 0, 0, more))
        states = self.head.fuse(torch.where(is_column[..., None], features, self.head.mask_hidden))
        chain = TokenTree.chain(tokens, [size + more for size in columns.sizes])
        states = self._step(state, tokens, states, chain)
        state.cache.commit([range(size) for size in columns.sizes])
        before = states[:, :1] if root is None else root  # for rows that had no column left
        places = sizes + torch.arange(num_levels, device=sizes.device)
        return torch.cat([before, states], 1).gather(1, places[..., None].expand(-1, -1, states.shape[2]))


def build(parts: Parts) -> Drafter:
    return BlockDrafting(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="EAGLE-3's layers draft a block in one pass, from places held open (trained)",
    paper="Hui et al. 2026, P-EAGLE (arXiv 2602.01469)",
    drafter=BlockDrafting,
    build=build,
    defaults={"num_draft_tokens": 5, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
