"""Falcon: a layer that drafts a block of k tokens per pass, and the tree that goes with it.

The nodes of the first k levels share the laws of the block that ends the text. A node whose depth is a multiple of k opens a
block of its own. Its columns are the k tokens on the path to it, with the k features of the block above. So a tree of depth d
takes d / k passes, where EAGLE takes d. (Gao et al. 2025, arXiv 2412.12639; the module is ``models/heads/falcon.py``, the
blocks of a tree ``models/heads/falcon_levels.py``.)

    q(. | node at depth d) = softmax(W_target s_{d mod k}(block of the node)),      block: opened at depth k floor(d / k)

Trees are best-first, or with ``branching=spine`` of the paper's kind: wide along the likeliest path, narrow beside it.
Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.core.draft import Draws
from outrider.core.interfaces import Context, Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.heads.head_drafter import HeadDrafter, HeadState, NewColumns, read_columns
from outrider.drafters.heads.head_growth import LevelsGrowth
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.trained import trained_head
from outrider.models.attention.parts import attend_part
from outrider.models.heads.falcon import KIND, FalconHead
from outrider.models.heads.falcon_levels import FalconLevels
from outrider.models.heads.layer import Attending
from outrider.models.layers import rotate

if TYPE_CHECKING:
    from outrider.device.drafters.heads.memory import HeadMemory


@final
class Falcon(HeadDrafter):
    """Trees from blocks of columns."""

    def __init__(self, head: FalconHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head = head

    def _device_memory(self, max_depth: int) -> HeadMemory | None:
        from outrider.device.drafters.heads.falcon import FalconMemory  # needs triton

        del max_depth
        return FalconMemory(self.head)

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> HeadState:
        state = super().start(rows, taps)
        nothing = torch.zeros(0, self.head.carried_size, dtype=self._dtype, device=self._device)
        state.carried = [nothing] * len(rows)
        return state

    def _growth(self, state: HeadState, context: Context, max_depth: int) -> LevelsGrowth:
        del max_depth
        assert state.cache is not None
        before, lengths = list(state.carried), list(state.cache.lengths)
        for columns in read_columns(state, context):
            self._read(state, columns)
        last = torch.stack([_filled(rows, self.head.block_len) for rows in state.carried])
        lengths_now = torch.tensor(state.cache.lengths, device=context.device)[:, None]
        look = _TextLook(self.head, state.cache, lengths_now)
        roots = torch.tensor(context.roots, device=context.device)[:, None]
        growth = LevelsGrowth(context, FalconLevels(self.head, last, lengths_now, roots, look))
        assert state.kept is not None
        for row, (kept, length) in enumerate(zip(state.kept, lengths, strict=True)):
            if kept == length:  # the column it read was none, and is forgotten after the round
                state.carried[row] = before[row]
        return growth

    def _read(self, state: HeadState, columns: NewColumns) -> None:
        """Add columns to the cache, and keep the carried states of each row's last k columns."""
        assert state.cache is not None
        head, zero = self.head, columns.features.new_zeros(1, self.head.carried_size)
        begin = torch.cat([torch.cat([zero, rows])[-1:] for rows in state.carried])
        carried = head.read(columns.tokens, head.fuse(columns.features), begin)
        attending = self._layer.attending(TokenTree.chain(columns.tokens, columns.sizes), state.cache)
        attending.put(*head.layer.self_attn.entries(head.entering(carried)))
        state.cache.commit([range(size) for size in columns.sizes])
        for row, size in enumerate(columns.sizes):
            state.carried[row] = torch.cat([state.carried[row], carried[row, :size]])[-head.block_len :]


def _filled(rows: Tensor, count: int) -> Tensor:
    """[count, 4H] carried states. If there are fewer, the first one is repeated."""
    return torch.cat([rows[:1].expand(count - len(rows), -1), rows])


@final
class _TextLook:
    """Attention of block columns to the committed columns, to the blocks above, and to each other."""

    def __init__(self, head: FalconHead, cache: ContiguousCache, lengths: Tensor) -> None:
        """``lengths`` [B, 1] are the cache's lengths."""
        self._head, self.committed = head, cache.entries(0)
        self.held = torch.arange(self.committed[0].shape[2], device=lengths.device) < lengths
        self.own = tuple(part[:, :, :0] for part in self.committed)

    def __call__(self, columns: Tensor, positions: Tensor, seen: Tensor | None) -> Tensor:
        rotation = self._head.rotations.at(positions, columns.dtype)
        return self._head.layer(columns, _BlockAttending(self, rotation, seen, self._head))


@final
class _BlockAttending(Attending):
    """The attention of ``_TextLook`` on queries, keys and values."""

    def __init__(self, look: _TextLook, rotation: tuple[Tensor, Tensor], seen: Tensor | None, head: FalconHead) -> None:
        self._look, self._rotation, self._seen, self._head = look, rotation, seen, head

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        look, config = self._look, self._head.config.layer
        assert config is not None
        sight = look.held[:, None].expand(-1, queries.shape[2], -1)
        if self._seen is not None:  # the root's columns are committed
            new = rotate(keys, self._rotation), values
            look.own = tuple(torch.cat(pair, 2) for pair in zip(look.own, new, strict=True))
            sight = torch.cat([sight, self._seen], 2)
        all_keys, all_values = (torch.cat(pair, 2) for pair in zip(look.committed, look.own, strict=True))
        return attend_part(rotate(queries, self._rotation), all_keys, all_values, scale=config.query_scale, sight=sight).seen


def build(parts: Parts) -> Drafter:
    return Falcon(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="a layer that drafts a block of tokens per pass, from the last columns of the text (trained)",
    paper="Gao et al. 2025, Falcon (arXiv 2412.12639)",
    drafter=Falcon,
    build=build,
    defaults={"num_draft_tokens": 6, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
