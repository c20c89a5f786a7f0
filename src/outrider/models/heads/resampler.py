"""Replaces an image's many vectors by a few: learned queries attend to all of them (ViSpec, and an expert of SpecVLM)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Resampler(nn.Module):
    """Learned queries that attend to the vectors of an image."""

    def __init__(self, size: int, num_heads: int, num_queries: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(num_heads, num_queries, size // num_heads) / (size // num_heads) ** 0.5)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(self, vectors: Tensor, there: Tensor) -> Tensor:
        """[I, Q, H] from [I, M, H]; ``there`` [I, M] masks padding."""
        heads, _, width = self.queries.shape
        keys, values = (part(vectors).unflatten(-1, (heads, width)).transpose(1, 2) for part in (self.k_proj, self.v_proj))
        queries = self.queries.to(keys.dtype).expand(len(vectors), -1, -1, -1)
        seen = F.scaled_dot_product_attention(queries, keys, values, attn_mask=there[:, None, None])
        return self.o_proj(seen.transpose(1, 2).flatten(2))


def spread_last(vectors: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """[I, M, H] vectors [I, Q, H] at each image's last columns, and the mask [I, M] of those columns."""
    count = vectors.shape[1]
    rank = torch.arange(there.shape[1], device=there.device) - there.sum(1, keepdim=True) + count
    kept = there & (rank >= 0)
    index = rank.clamp(0, max(count - 1, 0))[..., None].expand(-1, -1, vectors.shape[2])
    return vectors.gather(1, index), kept
