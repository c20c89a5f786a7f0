"""The lean decoder: Llama and its relatives (Mistral, Qwen, SmolLM, Phi-3, Gemma) as one loop over layers of plain tensors.

A pass takes the nodes of B trees, puts their keys and values behind each row's committed tokens and scores every node. All
that the layers share (positions, masks, where to write) is worked out once per pass. Weights are frozen, so nothing here is
an ``nn.Module``: on small models calling modules costs more than multiplying.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.core.interfaces import Cache, Target
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.models.attention import SightMaker
from outrider.models.config import ModelConfig
from outrider.models.layers import GatedMlp, Layer, Pass, PostNormLayer, SelfAttention, rms_norm
from outrider.models.linear import linear_of
from outrider.models.prefill import chunks_of, joined_taps
from outrider.models.rope import RotaryTable
from outrider.models.weights import LayerWeights, Weights

_CHUNK = 512
"""Most tokens of a row per prefill pass: bounds the size of masks and activations."""
_TWOFOLD = 500_000_000
"""Parameters up to which a float32 model on a CPU may keep its matrices in two layouts (2 GB more at most)."""


@final
class Decoder(Target):
    """A frozen decoder. All methods may be called from any thread: what changes lives in the cache."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.vocab_size, self.max_len, self.num_layers = config.vocab_size, config.max_len, config.num_layers
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        twofold = sum(tensor.numel() for tensor in weights.tensors) <= _TWOFOLD
        self._layers = [_layer_of(config, index, layer, twofold) for index, layer in enumerate(weights.layers)]
        self._embedding = weights.embedding  # other weights are not kept: their layers hold them in layouts of their own
        self._norm = rms_norm(weights.norm, config.norm_eps)
        self._head = linear_of(weights.head, twofold=twofold)
        num_groups = config.num_heads // config.num_kv_heads
        self._sights = SightMaker(config.windows, num_groups, dtype=self.dtype)
        self._tables = [
            RotaryTable(rope, config.head_dim, context_len=config.max_len, dtype=self.dtype, device=self.device)
            for rope in config.ropes
        ]

    def new_cache(self, batch_size: int) -> ContiguousCache:
        shape = (batch_size, self.config.num_kv_heads, self.config.head_dim)
        return ContiguousCache.empty(self.num_layers, shape, dtype=self.dtype, device=self.device)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        pieces: list[tuple[TokenTree, Mapping[int, Tensor]]] = []
        for tree in chunks_of(rows, _CHUNK, self.device):
            cache.reserve(tree.num_nodes)
            with torch.inference_mode():
                _, tapped = self._hidden(tree, cache, taps)
            cache.commit([range(size) for size in tree.sizes])
            pieces.append((tree, tapped))
        empty = torch.zeros(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        return joined_taps(pieces, taps, num_rows=len(rows), empty=empty)

    def score(self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0) -> Scores:
        cache.reserve(tree.num_nodes, start=start)
        with torch.inference_mode():
            hidden, tapped = self._hidden(tree, cache, taps, start)
            logits = self.logits(hidden).view(tree.batch_size, tree.num_nodes - start, -1)
        return Scores(logits, tapped)

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., H] what enters the first layer."""
        embedded = self._embedding[tokens]
        scale = self.config.embedding_scale
        return embedded if scale == 1.0 else embedded * torch.tensor(scale, dtype=self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] from the last layer's output [..., H], the final norm included."""
        logits = self._head(self._norm(hidden))
        cap = self.config.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _hidden(self, tree: TokenTree, cache: Cache, taps: Sequence[int], start: int = 0) -> tuple[Tensor, dict[int, Tensor]]:
        """[B * N, H] the last layer's output at the N nodes from ``start`` on, and the tapped states [B, N, H]."""
        assert isinstance(cache, ContiguousCache), "a Decoder works on the caches it made"
        shape = (tree.batch_size, tree.num_nodes - start, self.config.hidden_size)
        step = self._pass(tree, cache, start)
        hidden = self.embed(tree.tokens[:, start:].reshape(-1))
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in taps:
                tapped[index] = hidden.view(shape)
            hidden = layer(hidden, step)
        if self.num_layers in taps:
            tapped[self.num_layers] = hidden.view(shape)
        return hidden, tapped

    def _pass(self, tree: TokenTree, cache: ContiguousCache, start: int) -> Pass:
        lengths, num_nodes = cache.lengths, tree.num_nodes - start
        rotations = [self._rotation(table, tree, lengths, start) for table in self._tables]
        return Pass(tree.batch_size, num_nodes, cache, (*rotations, None), self._sights(tree, lengths, start))

    def _rotation(self, table: RotaryTable, tree: TokenTree, lengths: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1 or B, 1, N, D] at the nodes' positions: row length plus depth."""
        longest, num_nodes = max(lengths), tree.num_nodes
        table.reach(longest + num_nodes)
        if tree.is_chain and min(lengths) == longest:
            nodes = slice(longest + start, longest + num_nodes)
            return table.cos[nodes][None, None], table.sin[nodes][None, None]
        positions = tree.depths[:, start:] + torch.tensor(lengths, device=self.device)[:, None]
        return table.cos[positions][:, None], table.sin[positions][:, None]


def _layer_of(config: ModelConfig, index: int, weights: LayerWeights, twofold: bool) -> Layer | PostNormLayer:
    def norm(weight: Tensor | None) -> Any:
        return None if weight is None else rms_norm(weight, config.norm_eps)

    linear = partial(linear_of, twofold=twofold)
    q_norm, k_norm = norm(weights.q_norm), norm(weights.k_norm)
    qkv, out = linear(weights.qkv, weights.qkv_bias), linear(weights.out, weights.out_bias)
    attention = SelfAttention(config, index, qkv=qkv, out=out, norms=(q_norm, k_norm) if q_norm else None)
    gate_up, down = linear(weights.gate_up, weights.gate_up_bias), linear(weights.down, weights.down_bias)
    mlp = GatedMlp(config, gate_up=gate_up, down=down)
    pair = norm(weights.attention_norm), norm(weights.mlp_norm)
    if not config.post_norms:
        return Layer(attention, mlp, *pair)
    return PostNormLayer(attention, mlp, *pair, norm(weights.attention_post_norm), norm(weights.mlp_post_norm))
