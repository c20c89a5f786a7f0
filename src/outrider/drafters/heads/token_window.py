"""Keys and values of each row's last W tokens: all that a LongSpec draft remembers, however long the context is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.models.heads.longspec import LongSpecHead
from outrider.models.layers import rotate


class Near(NamedTuple):
    """The windows of a batch, padded at the end."""

    keys: Tensor
    """[B, Hkv, W, D]"""
    values: Tensor
    positions: Tensor
    """[B, W] positions; padding is in the far future."""


_NOWHERE = 1 << 40


@dataclass
class TokenWindow:
    """Keys and values [Hkv, m, D], m <= W, of each row, the oldest first, and the number of tokens read."""

    keys: list[Tensor]
    values: list[Tensor]
    ends: list[int]

    @staticmethod
    def empty(head: LongSpecHead, num_rows: int, dtype: torch.dtype, device: torch.device) -> TokenWindow:
        assert head.config.layer is not None
        nothing = torch.zeros(head.config.layer.num_kv_heads, 0, head.config.layer.head_dim, dtype=dtype, device=device)
        return TokenWindow([nothing] * num_rows, [nothing] * num_rows, [0] * num_rows)

    @property
    def num_bytes(self) -> int:
        """Memory of the rows."""
        return sum(part.numel() * part.element_size() for part in (*self.keys, *self.values))

    def read(self, head: LongSpecHead, texts: Sequence[Sequence[int]], dtype: torch.dtype) -> Near:
        """Read the new tokens of the texts, drop those that left the window, and stack the windows."""
        begins = [max(end, len(text) - head.window) for end, text in zip(self.ends, texts, strict=True)]
        longest = max(len(text) - begin for text, begin in zip(texts, begins, strict=True))
        device = self.keys[0].device
        new = [[*text[begin:], *[0] * (longest - len(text) + begin)] for text, begin in zip(texts, begins, strict=True)]
        places = torch.tensor(begins, device=device)[:, None] + torch.arange(longest, device=device)
        embedded = head.input_layernorm(head.embed(torch.tensor(new, device=device), dtype))
        keys, values = head.self_attn.entries(embedded)
        keys = rotate(keys, head.rotations.at(places, keys.dtype))
        for row, (text, begin) in enumerate(zip(texts, begins, strict=True)):
            count = len(text) - begin
            self.keys[row] = torch.cat([self.keys[row], keys[row, :, :count]], 1)[:, -head.window :].clone()
            self.values[row] = torch.cat([self.values[row], values[row, :, :count]], 1)[:, -head.window :].clone()
            self.ends[row] = len(text)
        return self._beside()

    def _beside(self) -> Near:
        sizes, device = [part.shape[1] for part in self.keys], self.keys[0].device
        widest = max(sizes)
        keys, values = (
            torch.stack([torch.nn.functional.pad(row, (0, 0, 0, widest - row.shape[1])) for row in part])
            for part in (self.keys, self.values)
        )
        ranks = torch.arange(widest, device=device)
        first = torch.tensor([end - size for end, size in zip(self.ends, sizes, strict=True)], device=device)[:, None]
        there = ranks < torch.tensor(sizes, device=device)[:, None]
        return Near(keys, values, torch.where(there, first + ranks, _NOWHERE))

    def fork(self, rows: Sequence[int]) -> TokenWindow:
        return TokenWindow(*([part[row] for row in rows] for part in (self.keys, self.values, self.ends)))  # type: ignore[arg-type]

    def join(self, other: TokenWindow) -> TokenWindow:
        return TokenWindow([*self.keys, *other.keys], [*self.values, *other.values], [*self.ends, *other.ends])
