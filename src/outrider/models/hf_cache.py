"""Keys and values of a Hugging Face model: a ``DynamicCache`` whose rows have their own lengths.

transformers appends the new tokens of all rows at one place, after the longest row. A row's committed tokens are its first
``lengths[b]`` slots; what follows them up to the nodes of the current tree is a gap that the mask hides. A commit moves the
accepted nodes to their row's end and cuts the cache after the longest row. A chain with rows of equal length moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from transformers import DynamicCache

from outrider.core.interfaces import Cache


@final
class HFCache(Cache):
    """B rows in a ``DynamicCache`` that holds plain, growing layers only."""

    def __init__(self, lengths: Sequence[int], blocks: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self.lengths = list(lengths)
        self.storage: Any = DynamicCache()
        for layer, (keys, values) in enumerate(blocks):
            self.storage.update(keys, values, layer)

    @property
    def blocks(self) -> list[tuple[Tensor, Tensor]]:
        """[B, heads, S, D] keys and values of each layer; none before the first token."""
        return [(layer.keys, layer.values) for layer in self.storage.layers if layer.is_initialized]

    @property
    def num_slots(self) -> int:
        blocks = self.blocks
        return blocks[0][0].shape[2] if blocks else 0

    def reserve(self, num_nodes: int, *, start: int = 0) -> None:
        """Drop uncommitted nodes ``start``.. of a tree. The model itself appends the next ones."""
        del num_nodes
        self._cut(max(self.lengths) + start)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        first_node = max(self.lengths)
        for row, path in enumerate(paths):
            begin, end = self.lengths[row], self.lengths[row] + len(path)
            if [first_node + node for node in path] != list(range(begin, end)):
                self._move(row, [first_node + node for node in path], begin)
            self.lengths[row] = end
        self._cut(max(self.lengths))

    def truncate(self, lengths: Sequence[int]) -> None:
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=True)), "truncate cannot lengthen a row"
        self.lengths = list(lengths)
        self._cut(max(lengths))

    def fork(self, rows: Sequence[int]) -> HFCache:
        blocks = [(keys[list(rows)], values[list(rows)]) for keys, values in self.blocks]
        return HFCache([self.lengths[row] for row in rows], blocks)

    def join(self, other: Cache) -> HFCache:
        assert isinstance(other, HFCache), "only caches of one kind can be joined"
        num_slots = max(self.num_slots, other.num_slots)
        mine, theirs = self._padded(num_slots, other), other._padded(num_slots, self)
        pairs = [(torch.cat((k, k2)), torch.cat((v, v2))) for (k, v), (k2, v2) in zip(mine, theirs, strict=True)]
        return HFCache([*self.lengths, *other.lengths], pairs)

    def _padded(self, num_slots: int, like: HFCache) -> list[tuple[Tensor, Tensor]]:
        """This cache's blocks with ``num_slots`` slots; shapes come from ``like`` where this one is still empty."""
        empty = [(keys[:0, :, :0], values[:0, :, :0]) for keys, values in like.blocks]
        return [(self._pad(keys, num_slots), self._pad(values, num_slots)) for keys, values in self.blocks or empty]

    def _pad(self, block: Tensor, num_slots: int) -> Tensor:
        padded = block.new_zeros(self.batch_size, block.shape[1], num_slots, block.shape[3])
        padded[: block.shape[0], :, : block.shape[2]] = block
        return padded

    def _move(self, row: int, source: list[int], begin: int) -> None:
        for pair in self.blocks:
            for block in pair:
                block[row, :, begin : begin + len(source)] = block[row, :, source]

    def _cut(self, num_slots: int) -> None:
        if num_slots == self.num_slots:
            return
        for layer in self.storage.layers:
            layer.keys, layer.values = layer.keys[:, :, :num_slots], layer.values[:, :, :num_slots]
