"""Attention over two sets of keys, merged by their log-sum-exps. The result is exactly the attention over both sets.

    o = w o_1 + (1 - w) o_2,      w = sigmoid(LSE_1 - LSE_2)

The prefix needs no tree mask, and the tree only a small one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MASKED = -1e9


class Part(NamedTuple):
    """The attention of queries over one part."""

    seen: Tensor
    """[B, heads, N, D]"""
    weight: Tensor
    """[B, heads, N] log of the sum of the exponentiated scores."""


def attend_part(queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, sight: Tensor | None = None) -> Part:
    """Queries [B, heads, N, D] over keys and values [B, Hkv, S, D]; ``sight`` [B, N, S] is true where a query may look. Queries
    that see nothing get zeros. Without ``sight`` a fused kernel is used if there is one."""
    batch_size, num_heads, num_nodes, head_dim = queries.shape
    num_shared, num_slots = keys.shape[1:3]
    num_groups = num_heads // num_shared
    folded = queries.reshape(batch_size, num_shared, num_groups * num_nodes, head_dim)
    if sight is None and num_slots and keys.is_cuda and keys.dtype != torch.float32:
        found = torch.ops.aten._scaled_dot_product_flash_attention(folded, keys, values, scale=scale)
        return Part(found[0].reshape(queries.shape), found[1].reshape(batch_size, num_heads, num_nodes))
    scores = (folded @ keys.transpose(2, 3)).float().mul(scale).view(batch_size, num_shared, num_groups, num_nodes, num_slots)
    if sight is not None:
        scores = scores.masked_fill(~sight[:, None, None], _MASKED)
    weights = torch.softmax(scores, -1)
    if sight is not None:
        weights = weights * sight[:, None, None]
    seen = weights.to(values.dtype).flatten(2, 3) @ values
    return Part(seen.reshape(queries.shape), scores.logsumexp(-1).reshape(batch_size, num_heads, num_nodes))


def merged(one: Part, other: Part) -> Tensor:
    """[B, heads, N, D] attention over both parts."""
    share = torch.sigmoid(one.weight - other.weight)[..., None].to(one.seen.dtype)
    return share * one.seen + (1 - share) * other.seen
