"""Keys and values in one block per row: committed tokens first, the nodes of the current tree right after them.

Rows have their own lengths, so row b's node n stands at slot ``lengths[b] + n``. A commit moves the accepted nodes next to the
prefix (on a chain nothing moves) and raises the length. Slots after the length hold old values, which the mask hides and the
next tree overwrites. After any commit the first ``lengths[b]`` slots hold what a new prefill would have written.

When rows leave a batch for good (``narrow``), the last rows move into their places, and rows that join later take the space at
the end. Copying the whole block instead would cost as much as several rounds of a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from outrider.cache.slots import LayeredCache
from outrider.core.interfaces import Cache

_GROWTH = 256
"""Slots are added in blocks of this many, and at least by half: growing copies everything."""
_MOST_SPARE = 4
"""Most rows of a block per row in use. A block with more is copied into a smaller one."""


@final
class ContiguousCache(LayeredCache):
    """One block [L, sides, B, Hkv, S, D] for all layers; ``keys`` and ``values`` are its [B, Hkv, S, D] views per layer.

    The block is the first B rows of the memory ``store``."""

    def __init__(self, block: Tensor, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self._nodes = (0, 0)
        self._index: tuple[Tensor, Tensor] | None = None
        self._hold(block)

    @staticmethod
    def empty(
        num_layers: int, shape: tuple[int, int, int], *, dtype: torch.dtype, device: torch.device, sides: int = 2
    ) -> ContiguousCache:
        """A cache without tokens. ``shape`` is (batch size, key-value heads, head size). With one side, keys serve as values
        too."""
        batch_size, num_heads, head_dim = shape
        block = torch.zeros(num_layers, sides, batch_size, num_heads, 0, head_dim, dtype=dtype, device=device)
        return ContiguousCache(block, [0] * batch_size)

    @property
    def capacity(self) -> int:
        return self.block.shape[4]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one row."""
        num_layers, sides, _, num_heads, _, head_dim = self.block.shape
        return num_layers * sides * num_heads * head_dim * self.block.element_size()

    def _hold(self, store: Tensor) -> None:
        self.store, self.block = store, store[:, :, : len(self.lengths)]
        self.keys, self.values = list(self.block[:, 0].unbind(0)), list(self.block[:, -1].unbind(0))

    def reserve(self, num_nodes: int, *, start: int = 0) -> None:
        """Make room for a tree of ``num_nodes`` after every row. The next ``write`` puts nodes ``start``.. of it there."""
        needed = max(self.lengths) + num_nodes
        if needed > self.capacity:
            grown = max(needed, self.capacity + self.capacity // 2)
            self._resize(-(-grown // _GROWTH) * _GROWTH)
        self._nodes = (start, num_nodes)
        self._index = None if self.is_level else self._slots(start, num_nodes)

    @property
    def is_level(self) -> bool:
        """All rows have the same length, so a tree is written as one slice."""
        return min(self.lengths) == max(self.lengths)

    def write(self, layer: int, keys: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """Write the new nodes' keys and values [B, Hkv, N, D] of a layer. Returns all of the layer's, up to the last used
        slot."""
        all_keys, all_values = self.keys[layer], self.values[layer]
        longest = max(self.lengths)
        end = longest + self._nodes[1]
        for memory, new in ((all_keys, keys), (all_values, values)):
            if new is None:
                continue
            if self._index is None:
                memory[:, :, longest + self._nodes[0] : end] = new
            else:
                rows, slots = self._index
                memory[rows, :, slots] = new.transpose(1, 2)
        return all_keys[:, :, :end], all_values[:, :, :end]

    def entries(self, layer: int) -> tuple[Tensor, Tensor]:
        end = max(self.lengths, default=0)
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def fork(self, rows: Sequence[int]) -> ContiguousCache:
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.block.device)
        return ContiguousCache(self.block.index_select(2, index), [self.lengths[row] for row in rows])

    def join(self, other: Cache) -> ContiguousCache:
        assert isinstance(other, ContiguousCache), "only caches of one kind can be joined"
        capacity, size = max(self.capacity, other.capacity), self.batch_size
        lengths, used = [*self.lengths, *other.lengths], max(other.lengths)
        self._resize(capacity)
        if len(lengths) <= self.store.shape[2]:  # rows that others left
            self.store[:, :, size : len(lengths), :, :used] = other.block[:, :, :, :, :used]
            return ContiguousCache(self.store, lengths)
        other._resize(capacity)
        return ContiguousCache(torch.cat((self.block, other.block), 2), lengths)

    def narrow(self, rows: Sequence[int]) -> ContiguousCache:
        moves = [(row, place) for place, row in enumerate(rows) if row != place]
        sources = {row for row, _ in moves if row >= len(rows)}
        if len(sources) < len(moves) or _MOST_SPARE * len(rows) < self.store.shape[2]:
            return self.fork(rows)
        for row, place in moves:
            used = self.lengths[row]
            self.store[:, :, place, :, :used] = self.store[:, :, row, :, :used]
        return ContiguousCache(self.store, [self.lengths[row] for row in rows])

    def _slots(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """[B, 1] rows and [B, N] slots of nodes ``start`` to ``end``."""
        device = self.block.device
        rows = torch.arange(self.batch_size, device=device)[:, None]
        return rows, torch.tensor(self.lengths, device=device)[:, None] + torch.arange(start, end, device=device)

    def _gather(self, row: int, path: Sequence[int]) -> None:
        source = torch.tensor(list(path), device=self.block.device) + self.lengths[row]
        begin, end = self.lengths[row], self.lengths[row] + len(path)
        of_row = self.block[:, :, row]
        of_row[:, :, :, begin:end] = of_row.index_select(3, source)

    def _resize(self, capacity: int) -> None:
        if capacity == self.capacity:
            return
        *outer, old, head_dim = self.store.shape
        grown = self.store.new_zeros(*outer, capacity, head_dim)
        grown[:, :, : self.batch_size, :, :old] = self.block
        self._hold(grown)
