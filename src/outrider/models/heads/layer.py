"""The decoder layer of EAGLE heads and of Hydra++'s prefix, and the three ways to compute its attention.

In training, all positions of packed texts are computed at once. Step k of EAGLE-3's training-time test attends to the true
entries up to its own position. It also attends to its own drafted entries of steps 1 .. k, as in drafting (Li et al. 2025,
arXiv 2503.01840):

    softmax over  [ q_k(t) . k_0(j), j <= t ;   q_k(t) . k_i(t), i = 1 .. k ],      rotated as position t + i of step i

While drafting, keys and values stand in a cache: those of committed places first, drafted nodes after them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.cache.contiguous import ContiguousCache
from outrider.core.tree import TokenTree
from outrider.models.attention import Sight, SightMaker, attend
from outrider.models.config import ModelConfig
from outrider.models.decoder_weights import LayerWeights
from outrider.models.heads.head import HeadNorm, PackedTexts
from outrider.models.layers import rotate
from outrider.models.rope import RotaryTable

_ATTENTION_MASKED = -1e9


class Attending(ABC):
    """Computes attention: [B, heads, N, D] from queries, keys and values of that shape."""

    @abstractmethod
    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor: ...


class HeadAttention(nn.Module):
    """Grouped self-attention from inputs of any width."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        wide, narrow = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, wide, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, narrow, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, narrow, bias=config.qkv_bias)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=config.out_bias)
        self.q_norm = HeadNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = HeadNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, attending: Attending) -> Tensor:
        queries = _normed(self._heads(self.q_proj, x), self.q_norm)
        return self.o_proj(attending(queries, *self.entries(x)).transpose(1, 2).flatten(2))

    def entries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, N, D] of inputs [B, N, W]."""
        return _normed(self._heads(self.k_proj, x), self.k_norm), self._heads(self.v_proj, x)

    def _heads(self, projection: nn.Module, x: Tensor) -> Tensor:
        return projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _normed(heads: Tensor, norm: HeadNorm | None) -> Tensor:
    """Normalise each head separately, if the layer does so (Qwen3)."""
    return heads if norm is None else norm(heads)


class HeadMlp(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, config: ModelConfig, *, out_size: int = 0) -> None:
        """``out_size`` is the output width, if it differs from the stream's."""
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_size, out_size or config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HeadLayer(nn.Module):
    """Attention and MLP around a residual stream. Attention reads the stream, the normalised stream, or an embedding and
    the stream concatenated, each after its own norm."""

    def __init__(self, config: ModelConfig, *, num_norms: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.self_attn = HeadAttention(config, 2 * size if num_norms == 2 else size)
        self.mlp = HeadMlp(config)
        self.post_attention_layernorm = HeadNorm(size, eps)
        self.input_layernorm = HeadNorm(size, eps) if num_norms else None
        self.hidden_norm = HeadNorm(size, eps) if num_norms == 2 else None

    def forward(self, states: Tensor, attending: Attending, embedded: Tensor | None = None) -> Tensor:
        states = states + self.self_attn(self._entering(states, embedded), attending)
        return states + self.mlp(self.post_attention_layernorm(states))

    def native_weights(self) -> LayerWeights | None:
        """The layer's weights for the native pass; None if products have biases."""
        attention, mlp = self.self_attn, self.mlp
        parts = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        parts += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if any(part.bias is not None for part in parts):
            return None
        first, second = self.input_layernorm, self.hidden_norm
        of_stream, of_embedding = (first, None) if second is None else (second, first)
        matrices = [part.weight.data for part in parts]
        return LayerWeights(
            attention_norm=None if of_stream is None else of_stream.weight.data,
            beside_norm=None if of_embedding is None else of_embedding.weight.data,
            qkv=torch.cat(matrices[:3]),
            out=matrices[3],
            mlp_norm=self.post_attention_layernorm.weight.data,
            gate_up=torch.cat(matrices[4:6]),
            down=matrices[6],
            q_norm=None if attention.q_norm is None else attention.q_norm.weight.data,
            k_norm=None if attention.k_norm is None else attention.k_norm.weight.data,
        )

    def _entering(self, states: Tensor, embedded: Tensor | None) -> Tensor:
        if self.input_layernorm is None:
            return states
        if self.hidden_norm is None:
            return self.input_layernorm(states)
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], -1)


class Rotations:
    """Rotary tables of a layer on any device, made when asked for."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._tables: dict[torch.device, RotaryTable] = {}

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, 1, N, D] of [B, N] positions."""
        config, device = self._config, positions.device
        if device not in self._tables:
            self._tables[device] = RotaryTable(
                config.ropes[0], config.head_dim, context_len=config.max_len, dtype=torch.float32, device=device
            )
        table = self._tables[device]
        table.reach(config.max_len + 64 if device.type == "cuda" else int(positions.max()) + 1)
        return table.cos[positions][:, None].to(dtype), table.sin[positions][:, None].to(dtype)


@final
class PackedAttending(Attending):
    """Attention over all positions of packed texts. Each call is the next step; the first one is ordinary causal attention."""

    def __init__(self, batch: PackedTexts, rotations: Rotations, config: ModelConfig, *, kept: Tensor | None = None) -> None:
        """Only the ``kept`` [R, L] positions are attended to (default: all)."""
        self._positions, self._rotations, self._config = batch.positions, rotations, config
        self._sight = safe_sight(batch, kept)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        step = len(self._keys)
        rotation = self._rotations.at(self._positions + step, queries.dtype)
        groups = self._config.num_heads // self._config.num_kv_heads
        queries, keys = rotate(queries, rotation), rotate(keys, rotation).repeat_interleave(groups, 1)
        self._keys.append(keys)
        self._values.append(values.repeat_interleave(groups, 1))
        scale = self._config.query_scale
        if step == 0:
            return F.scaled_dot_product_attention(queries, keys, self._values[0], attn_mask=self._sight, scale=scale)
        return attend_beside(queries * scale, self._keys, self._values, self._sight)


def safe_sight(batch: PackedTexts, kept: Tensor | None = None) -> Tensor:
    """[R, 1, L, L] attention mask over the ``kept`` positions. Each position sees itself, so that no softmax is empty."""
    sight = batch.sight if kept is None else batch.sight & kept[:, None, None]
    return sight | torch.eye(sight.shape[-1], dtype=torch.bool, device=sight.device)


def attend_beside(queries: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], sight: Tensor) -> Tensor:
    """[R, heads, L, D] from scaled queries: attention to the first keys and values under ``sight``, and to the entries of
    the same position in all others."""
    true = (queries @ keys[0].transpose(2, 3)).float().masked_fill(~sight, _ATTENTION_MASKED)
    own = torch.stack([(queries * key).sum(-1) for key in keys[1:]], -1).float()
    weights = torch.softmax(torch.cat([true, own], -1), -1).to(queries.dtype)
    length = true.shape[-1]
    seen = weights[..., :length] @ values[0]
    for index, value in enumerate(values[1:]):
        seen = seen + weights[..., length + index, None] * value
    return seen


@final
class CachedAttending(Attending):
    """Attention of tree nodes over a cache, to which their keys and values are written."""

    def __init__(
        self, cache: ContiguousCache, rotation: tuple[Tensor, Tensor], sight: Sight, config: ModelConfig, *, layer: int = 0
    ) -> None:
        self._cache, self._rotation, self._sight, self._config, self._layer = cache, rotation, sight, config, layer

    def of_layer(self, layer: int) -> CachedAttending:
        """The nodes in another layer of the cache."""
        return CachedAttending(self._cache, self._rotation, self._sight, self._config, layer=layer)

    def put(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the nodes' keys and values; returns all of the layer's."""
        return self._cache.write(self._layer, rotate(keys, self._rotation), values)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        batch_size, num_heads, num_nodes, head_dim = queries.shape
        queries = rotate(queries, self._rotation)
        all_keys, all_values = self.put(keys, values)
        folded = queries.reshape(batch_size, self._config.num_kv_heads, -1, head_dim)
        seen = attend(folded, all_keys, all_values, sight=self._sight, scale=self._config.query_scale)
        return seen.reshape(batch_size, num_heads, num_nodes, head_dim)


@final
class LayerCache:
    """Makes caches for layers of one shape, and the attention of nodes over them."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, num_layers: int = 1) -> None:
        self._config, self._dtype, self._device, self._num_layers = config, dtype, device, num_layers
        self._rotations = Rotations(config)
        self._sights = SightMaker((None,), config.num_heads // config.num_kv_heads, dtype=dtype)

    def new(self, batch_size: int) -> ContiguousCache:
        shape = (batch_size, self._config.num_kv_heads, self._config.head_dim)
        return ContiguousCache.empty(self._num_layers, shape, dtype=self._dtype, device=self._device)

    def attending(
        self, tree: TokenTree, cache: ContiguousCache, start: int = 0, *, positions: Tensor | None = None
    ) -> CachedAttending:
        """Attention of nodes ``start``.. after each row's committed entries, in the first layer. ``positions`` [B, N] are
        the nodes' positions if the cache has fewer entries than the text."""
        cache.reserve(tree.num_nodes, start=start)
        if positions is None:
            positions = tree.depths[:, start:] + torch.tensor(cache.lengths, device=self._device)[:, None]
        sight = self._sights(tree, cache.lengths, start)[None]
        return CachedAttending(cache, self._rotations.at(positions, self._dtype), sight, self._config)

    def block(self, num_places: int, cache: ContiguousCache) -> CachedAttending:
        """Attention of mutually visible positions after each row's committed entries, in the first layer."""
        cache.reserve(num_places)
        starts = torch.tensor(cache.lengths, device=self._device)[:, None]
        positions = starts + torch.arange(num_places, device=self._device)
        slots = torch.arange(max(cache.lengths) + num_places, device=self._device)
        bias = torch.zeros(len(starts), len(slots), dtype=self._dtype, device=self._device)
        bias = bias.masked_fill(slots >= starts + num_places, -torch.inf)[:, None, None]
        rotation = self._rotations.at(positions, self._dtype)
        return CachedAttending(cache, rotation, Sight(0, None if cache.is_level else bias), self._config)
