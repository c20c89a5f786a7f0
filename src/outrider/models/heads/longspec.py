"""LongSpec: one layer that attends to its own short window of tokens, and to the whole text through the target's last-layer
cache.

Self-attention sees the last ``draft_window`` tokens. Cross-attention has its own queries, but uses the keys and values that the
target's last layer keeps anyway, of verified tokens. So the draft's memory does not grow with the context. Embedding and output
matrix are the target's. (Yang et al. 2025, arXiv 2502.17421.)

    a_i = e(x_i) + SA(n1 e(x_j), i - W < j <= i),      c_k(t) = a_{t+1+k} + CA(n2 a_{t+1+k};  K_L, V_L of places <= t)
    s_k(t) = c_k + mlp(n3 c_k),      q_k(t) = softmax(W_target s_k(t))

Keys and values of the self-attention depend on tokens alone, so every depth is trained exactly as it drafts. Depth k sees the
target's entries up to k + 1 places before its own token. (The paper draws one such delay per batch.)

Anchor offsets: in training, all positions but a few first ones are shifted by one random offset up to ``max_offset``. So short
texts teach long distances to the first tokens. The target's keys are rotated by the offset. The small change of the target's
deeper states with the distance is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.errors import ModelError
from outrider.models.config import ModelConfig
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.head import Head, HeadNorm, PackedTexts
from outrider.models.heads.kind import HeadKind, Raw
from outrider.models.heads.layer import Attending, HeadAttention, HeadMlp, Rotations, safe_sight
from outrider.models.layers import rotate

_WINDOW = 512
_MOST_SINKS = 4
"""Most first tokens whose positions a random offset leaves unchanged."""


class CrossAttention(nn.Module):
    """Queries for the target's keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, width = config.head_dim, config.num_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def queries(self, x: Tensor) -> Tensor:
        """[B, heads, N, D]"""
        return self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def out(self, seen: Tensor) -> Tensor:
        """[B, N, H] from [B, heads, N, D]."""
        return self.o_proj(seen.transpose(1, 2).flatten(2))


@final
class LongSpecHead(Head):
    """A window, the target's cache, and an MLP."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.layer is not None
        size, eps = config.hidden_size, config.norm_eps
        self.window, self._max_offset = int(config.raw.get("draft_window", _WINDOW)), int(config.raw.get("max_offset", 0))
        if self.window < 1 or self._max_offset < 0:
            found = f"draft_window = {self.window}, max_offset = {self._max_offset}"
            raise ModelError(f"{found} are not valid; use at least 1, and 0 or more")
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.input_layernorm, self.cross_norm, self.post_attention_layernorm = (HeadNorm(size, eps) for _ in range(3))
        self.self_attn, self.cross_attn = HeadAttention(config.layer, size), CrossAttention(config.layer)
        self.mlp = HeadMlp(config.layer)
        self.add_readout()
        self.rotations = Rotations(config.layer)

    @property
    def frozen(self) -> tuple[str, ...]:
        return (*super().frozen, "lm_head.weight")

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        return self.embed_tokens(tokens).to(dtype)

    def near(self, embedded: Tensor, attending: Attending) -> Tensor:
        """[B, N, H] tokens after attention to the window."""
        return embedded + self.self_attn(self.input_layernorm(embedded), attending)

    def queries(self, near: Tensor) -> Tensor:
        """[B, heads, N, D] queries for the target's cache, before rotation."""
        return self.cross_attn.queries(self.cross_norm(near))

    def far(self, near: Tensor, seen: Tensor) -> Tensor:
        """[B, N, H] states, from the result of attention to the target's cache."""
        states = near + self.cross_attn.out(seen)
        return states + self.mlp(self.post_attention_layernorm(states))

    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        assert self.config.layer is not None
        config, dtype = self.config.layer, self.self_attn.o_proj.weight.dtype
        near = self.near(self.embed(batch.tokens, dtype), PackedWindow(batch, self.rotations, config, self.window))
        keys, values = batch.features.to(dtype).unflatten(-1, (2, config.num_kv_heads, config.head_dim)).unbind(2)
        moved, keys = self._anchored(batch.positions, keys.transpose(1, 2))
        groups, sight = config.num_heads // config.num_kv_heads, safe_sight(batch)
        keys, values = keys.repeat_interleave(groups, 1), values.transpose(1, 2).repeat_interleave(groups, 1)
        for depth in range(count):
            own = batch.shifted(near, depth + 1)
            asked = rotate(self.queries(own), self.rotations.at(moved + depth + 1, own.dtype))
            seen = F.scaled_dot_product_attention(asked, keys, values, attn_mask=sight, scale=config.query_scale)
            yield self.far(own, seen)

    def readout(self, depth: int, state: Tensor) -> Tensor:
        del depth
        return self.read_off(state)

    def _anchored(self, positions: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and the target's keys, with one random offset after a few first positions. Unchanged outside training."""
        if not self.training or not self._max_offset:
            return positions, keys
        sinks, offset = int(torch.randint(_MOST_SINKS + 1, ())), int(torch.randint(self._max_offset + 1, ()))
        moves = torch.where(positions >= sinks, offset, 0)
        return positions + moves, rotate(keys, self.rotations.at(moves, keys.dtype))


@final
class PackedWindow(Attending):
    """Attention of all positions of packed texts, each to the last ``window`` positions of its text."""

    def __init__(self, batch: PackedTexts, rotations: Rotations, config: ModelConfig, window: int) -> None:
        self._positions, self._rotations, self._config = batch.positions, rotations, config
        close = batch.positions[:, :, None] - batch.positions[:, None, :] < window
        self._sight = safe_sight(batch) & close[:, None]

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rotation, groups = self._rotations.at(self._positions, queries.dtype), self._config.num_heads // keys.shape[1]
        queries, keys = rotate(queries, rotation), rotate(keys, rotation).repeat_interleave(groups, 1)
        values, scale = values.repeat_interleave(groups, 1), self._config.query_scale
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._sight, scale=scale)


@final
class LongSpecKind(HeadKind[LongSpecHead]):
    """Folders of LongSpec heads."""

    name = "longspec"
    module = LongSpecHead
    architectures = ("LongSpecModel",)
    model_type = "longspec"
    has_layer = True
    reads_cache = True
    training: ClassVar = {"num_depths": 5}

    def new_keys(self, raw: Raw) -> dict[str, Any]:
        return {
            **super().new_keys(raw),
            "draft_window": raw.get("draft_window", _WINDOW),
            "max_offset": raw.get("max_offset", 0),
        }


KIND = LongSpecKind()
