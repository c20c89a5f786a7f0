"""Falcon: a layer that drafts a block of k tokens per pass, and the tree that goes with it.

The nodes of the first k levels share the laws of the block that ends the text. A node whose depth is a multiple of k opens a
block of its own: the k tokens on the way to it, with the k features of the block above, are its columns. So a tree of depth d
takes d / k passes, where EAGLE takes d. (Gao et al. 2025, arXiv 2412.12639; the module is ``models/heads/falcon.py``.)

    q(. | node at depth d) = softmax(W_target s_{d mod k}(block of the node)),      block: opened at depth k floor(d / k)

Trees are best-first, or with ``branching=spine`` of the paper's kind: wide along the likeliest path, narrow beside it.
Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import Context, Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.heads.head_drafter import Columns, HeadDrafter, HeadOptions, HeadState, read_columns
from outrider.drafters.heads.head_growth import HeadGrowth
from outrider.drafters.heads.trained import trained_head
from outrider.models.attention.parts import attend_part
from outrider.models.heads.falcon import KIND, FalconHead
from outrider.models.heads.layer import Attending
from outrider.models.layers import rotate


@final
class Falcon(HeadDrafter):
    """Trees from blocks of columns."""

    def __init__(self, head: FalconHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head = head

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> HeadState:
        state = super().start(rows, taps)
        nothing = torch.zeros(0, self.head.carried_size, dtype=self._dtype, device=self._device)
        state.carried = [nothing] * len(rows)
        return state

    def _growth(self, state: HeadState, context: Context, max_depth: int) -> FalconGrowth:
        del max_depth
        assert state.cache is not None
        before, lengths = list(state.carried), list(state.cache.lengths)
        for columns in read_columns(state, context):
            self._read(state, columns)
        last = torch.stack([_filled(rows, self.head.block_len) for rows in state.carried])
        growth = FalconGrowth(self.head, context, state, last)
        assert state.kept is not None
        for row, (kept, length) in enumerate(zip(state.kept, lengths, strict=True)):
            if kept == length:  # the column it read was none, and is forgotten after the round
                state.carried[row] = before[row]
        return growth

    def _read(self, state: HeadState, columns: Columns) -> None:
        """Columns go into the cache; of what is carried, that of each row's last k columns is kept."""
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
    """[count, 4H] the last of what is carried; the first stands for those before it."""
    return torch.cat([rows[:1].expand(count - len(rows), -1), rows])


@final
class FalconGrowth(HeadGrowth):
    """Keeps the blocks that were opened: their states, entries and what they carry on. The root's entries are in the cache."""

    def __init__(self, head: FalconHead, context: Context, state: HeadState, last: Tensor) -> None:
        """``last`` [B, k, 4H] is what each row's last k columns carry on."""
        super().__init__(head, context)
        assert state.cache is not None
        self._falcon, self._size = head, head.block_len
        self._lengths = torch.tensor(state.cache.lengths, device=context.device)[:, None]
        self.committed = state.cache.entries(0)
        slots = torch.arange(self.committed[0].shape[2], device=context.device)
        self.held = slots < self._lengths
        self.own = tuple(part[:, :, :0] for part in self.committed)
        self.seen = torch.ones(len(last), 1, 0, dtype=torch.bool, device=last.device)
        """[B, blocks, own columns]: what each block sees of the columns of blocks below the root's."""
        self._carried = last[:, -1:]
        self._block = torch.zeros_like(self.tokens)
        """[B, nodes] number of the block whose laws a node has."""
        self._path = self.tokens[..., None].expand(-1, -1, self._size)
        """[B, nodes, k] the last tokens on the way to a node."""
        places = torch.arange(self._size, device=last.device) - self._size
        positions = (self._lengths + places).clamp(min=0)
        self._outputs = self._asked(head.entering(last), positions, self.seen)[:, None]
        """[B, blocks, k, H]"""

    def _root_states(self) -> Tensor:
        return self._outputs[:, 0, :1]

    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        above = _at(self._path, parents)
        self._path = torch.cat([self._path, torch.cat([above[:, :, 1:], tokens[..., None]], 2)], 1)
        blocks = self._block.gather(1, parents)
        if self.depth % self._size == 0:
            blocks = self._open(self._path[:, -tokens.shape[1] :], blocks)
        self._block = torch.cat([self._block, blocks], 1)
        return _at(self._outputs[:, :, self.depth % self._size], blocks)

    def _open(self, tokens: Tensor, above: Tensor) -> Tensor:
        """[B, M] numbers of new blocks that hold ``tokens`` [B, M, k], below the blocks ``above`` [B, M]."""
        head, (rows, count), first = self._falcon, above.shape, self._outputs.shape[1]
        features, begin = _at(self._outputs, above), _at(self._carried, above)
        carried = head.read(tokens.flatten(0, 1), features.flatten(0, 1), begin.flatten(0, 1)).unflatten(0, (rows, count))
        own = torch.eye(count, dtype=torch.bool, device=above.device).repeat_interleave(self._size, 1).expand(rows, -1, -1)
        seen = torch.cat([_at(self.seen, above), own], 2)
        none = self.seen.new_zeros(*self.seen.shape[:2], count * self._size)
        self.seen = torch.cat([torch.cat([self.seen, none], 2), seen], 1)
        positions = self._lengths + self.depth - self._size + torch.arange(self._size, device=above.device)
        entering = head.entering(carried).flatten(1, 2)
        outputs = self._asked(entering, positions.repeat(1, count), seen).unflatten(1, (count, self._size))
        self._outputs = torch.cat([self._outputs, outputs], 1)
        self._carried = torch.cat([self._carried, carried[:, :, -1]], 1)
        return torch.arange(first, first + count, device=above.device).expand(rows, -1)

    def _asked(self, columns: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """[B, N, H] states of columns [B, N, H], those of a block side by side; ``seen`` [B, M, own columns] by block."""
        rotation = self._falcon.rotations.at(positions, columns.dtype)
        attending = _BlockAttending(self, rotation, seen.repeat_interleave(self._size, 1))
        return self._falcon.layer(columns, attending)


@final
class _BlockAttending(Attending):
    """The columns of blocks over the committed ones, over those of the blocks above, and over each other."""

    def __init__(self, growth: FalconGrowth, rotation: tuple[Tensor, Tensor], seen: Tensor) -> None:
        self._growth, self._rotation, self._seen = growth, rotation, seen

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        growth = self._growth
        if growth.depth:  # the root's columns are committed
            new = rotate(keys, self._rotation), values
            growth.own = tuple(torch.cat(pair, 2) for pair in zip(growth.own, new, strict=True))
        all_keys, all_values = (torch.cat(pair, 2) for pair in zip(growth.committed, growth.own, strict=True))
        held = growth.held[:, None].expand(-1, queries.shape[2], -1)
        sight = torch.cat([held, self._seen], 2)
        config = growth.head.config.layer
        assert config is not None
        return attend_part(rotate(queries, self._rotation), all_keys, all_values, scale=config.query_scale, sight=sight).seen


def _at(values: Tensor, index: Tensor) -> Tensor:
    """[B, M, ...] the entries of [B, N, ...] at ``index`` [B, M]."""
    shape = values.shape[2:]
    return values.gather(1, index.view(*index.shape, *[1] * len(shape)).expand(*index.shape, *shape))


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
