"""The common part of caches with slots: a row's committed tokens are in slots 0 .. length - 1, the tree's nodes after them.

A commit keeps a path of the tree: its nodes move down next to the prefix and the length goes up. On a chain nothing moves.
Caches differ only in where slots are stored (one block, or pages), so a subclass only has to say how slots move.

    slot(length + i) <- slot(length + path[i]),      path[i] >= i, so no slot is read after it was written

Memory has two sides, keys and values, or one (latent attention), where what is stored is key and value at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from outrider.core.interfaces import Cache


class SlotCache(Cache, ABC):
    """Commits and truncates. A subclass says how nodes move in its memory."""

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        for row, path in enumerate(paths):
            if list(path) != list(range(len(path))):
                self._gather(row, path)
            self.lengths[row] += len(path)

    def truncate(self, lengths: Sequence[int]) -> None:
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=True)), "truncate cannot lengthen a row"
        self.lengths = list(lengths)

    @abstractmethod
    def _gather(self, row: int, path: Sequence[int]) -> None:
        """Move nodes ``path`` of the row's tree to the slots right after its committed tokens."""


class LayeredCache(SlotCache, ABC):
    """A cache for decoders written in PyTorch, whose layers write their keys one after the other."""

    @abstractmethod
    def write(self, layer: int, keys: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """Write the keys and values [B, Hkv, N, D] of the nodes last reserved into a layer. Returns its keys and values [B,
        Hkv, S, D] in slot order, up to the last used slot of the longest row. Its ``values`` are None in memory of one side,
        where keys are values."""

    @abstractmethod
    def entries(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [B, Hkv, S, D] of committed tokens, in slot order, for drafters that read the target's
        cache. Slots past a row's length hold arbitrary numbers."""
