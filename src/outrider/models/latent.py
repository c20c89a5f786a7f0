"""Latent attention in its absorbed form: the cache holds one short vector per token, to which every head attends.

    c = norm(down x),   r = rotated(key x)                 cached: [c, r], one key head for all query heads
    q = [q_nope K, rotated(q_rope)],   s = q . [c, r]       K: the head's part of the up-projection of keys
    o = V (softmax(s) c)                                    V: the head's part of the up-projection of values

This gives the same scores and sums as the definition, with keys k = [K^T c, r] and values v = V c: q_nope . (K^T c) = (q_nope
K) . c, and V goes in front of the sum. (DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, 2.1.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from outrider.models.attention import attend
from outrider.models.decoder_weights import LayerWeights
from outrider.models.features import ModelConfig
from outrider.models.layers import Attention, Pass, rotate
from outrider.models.linear import Linear, LinearOf
from outrider.models.norms import rms_norm


@final
class LatentAttention(Attention):
    """Computes queries and latents in one product. Latents go to the cache, where queries attend to them."""

    def __init__(self, config: ModelConfig, layer: int, weights: LayerWeights, *, linear: LinearOf, out: Linear) -> None:
        assert config.latent is not None and weights.latent_norm is not None
        assert weights.key_up is not None and weights.value_up is not None
        self._latent = latent = config.latent
        self._layer, self._scale, self._window = layer, config.query_scale, config.windows[layer]
        rope = config.rope_of_layer[layer]
        self._rope = -1 if rope is None else rope
        self._down, self._out = linear(weights.qkv, weights.qkv_bias), out
        self._norm = rms_norm(weights.latent_norm, latent.norm_eps)
        self._query_norm = None if weights.query_norm is None else rms_norm(weights.query_norm, latent.norm_eps)
        self._query_up = None if weights.query_up is None else linear(weights.query_up)
        self._key_up, self._value_up = weights.key_up.transpose(1, 2), weights.value_up.transpose(1, 2)
        self._sizes = (len(weights.qkv) - config.head_dim, latent.rank, latent.rope_dim)

    def __call__(self, x: Tensor, step: Pass) -> Tensor:
        batch_size, num_nodes, rank = step.batch_size, step.num_nodes, self._latent.rank
        queries, latents = self._entries(x.view(batch_size, num_nodes, -1), step.rotations[self._rope])
        keys, values = step.cache.write(self._layer, latents, None)
        folded = queries.reshape(batch_size, 1, -1, queries.shape[-1])
        seen = attend(folded, keys, values[..., :rank], sight=step.sights[self._window], scale=self._scale)
        heads = seen.view(batch_size, -1, num_nodes, rank) @ self._value_up
        return heads.transpose(1, 2).reshape(batch_size * num_nodes, -1)

    def queries(self, x: Tensor, rotations: Sequence[tuple[Tensor, Tensor] | None]) -> Tensor:
        return self._entries(x[None], rotations[self._rope])[0][0]

    def _entries(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Queries [B, Hq, N, rank + rope] and latents [B, 1, N, rank + rope], from [B, N, H]."""
        sizes = (self._latent.nope_dim, self._latent.rope_dim)
        found = self._down(x.flatten(0, 1)).view(*x.shape[:2], -1)
        queries, latents, turned = found.split_with_sizes(self._sizes, -1)
        if self._query_up is not None and self._query_norm is not None:
            queries = self._query_up(self._query_norm(queries.flatten(0, 1))).view(*x.shape[:2], -1)
        free, own = queries.unflatten(-1, (-1, sum(sizes))).transpose(1, 2).split_with_sizes(sizes, -1)
        turned = turned[:, None]
        if rotation is not None:
            own, turned = rotate(own, rotation), rotate(turned, rotation)
        return torch.cat((free @ self._key_up, own), -1), torch.cat((self._norm(latents)[:, None], turned), -1)
