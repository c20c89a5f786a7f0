"""Layers over a block of open places: the backbone that DFlash and DSpark share.

A block begins with the newest token, and every further position holds a mask token. Positions attend to each other in both
directions, and to the target's features. Every layer computes keys and values of the features with its own matrices, but no
queries.

    c(j) = norm(fc [h_a ; h_b ; h_c]_j),      block of t:  b_0 = e(x_{t+1}),  b_k = e(mask)  at positions t + 1 + k
    layer:  Q from b,   K, V from [ c(j), j <= t ; b_0 .. b_K ],        u_k(t) = W_target norm(b_k)

Embedding and output matrix are the target's; of a reduced vocabulary the rows of its tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from outrider.core.errors import OptionError
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.head import Head, HeadNorm, PackedTexts
from outrider.models.heads.kind import plain_keys
from outrider.models.heads.layer import Attending, HeadLayer, Rotations, attend_beside, safe_sight
from outrider.models.layers import rotate


class BlockHead(Head, ABC):
    """Layers over a block."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.layer is not None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear((len(config.taps) or 3) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = HeadNorm(config.hidden_size, config.norm_eps)
        self.layers = nn.ModuleList(HeadLayer(config.layer, num_norms=1) for _ in range(config.num_layers))
        self.norm = HeadNorm(config.hidden_size, config.norm_eps)
        self.add_readout()
        self.rotations = Rotations(config.layer)

    @property
    @abstractmethod
    def num_places(self) -> int:
        """Number of positions in a block, the newest token's included."""

    @property
    def frozen(self) -> tuple[str, ...]:
        return (*super().frozen, "lm_head.weight")

    def fuse(self, features: Tensor) -> Tensor:
        """[..., H] the target's states, as the layers store them."""
        return self.hidden_norm(self.fc(features))

    def entries(self, context: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of fused states in every layer."""
        return [cast("HeadLayer", layer).self_attn.entries(context) for layer in self.layers]

    def block(self, tokens: Tensor, attending: Sequence[Attending], dtype: torch.dtype) -> Tensor:
        """[B, N, H] states of the positions that hold ``tokens``, through all layers, each with its own attention."""
        states = self.embed_tokens(tokens).to(dtype)
        for layer, sees in zip(self.layers, attending, strict=True):
            states = layer(states, sees)
        return states

    def blocks(self, batch: PackedTexts) -> tuple[Tensor, ...]:
        """[R, L, H] per position of a block: the blocks after all positions of packed texts."""
        context = self.fuse(batch.features)
        attending = [PackedBlocks(self, batch, *entries) for entries in self.entries(context)]
        open_places = [torch.full_like(batch.tokens, self.config.mask_token)] * (self.num_places - 1)
        tokens = torch.cat([batch.shifted(batch.tokens, 1), *open_places], 1)
        return self.block(tokens, attending, context.dtype).chunk(self.num_places, 1)


def exported_keys(head: BlockHead, *own: str) -> dict[str, Any]:
    """Config keys that other engines read of every head over a block, without those in ``own``, which only Outrider has."""
    config = head.config
    if 0 in config.taps:
        what = f"{config.kind} heads that read layers {list(config.taps)} cannot be exported, because layer 0 is the embedding"
        raise OptionError(f"{what}; train with layers from 1 on")
    assert config.layer is not None
    return {
        **{key: value for key, value in plain_keys(head).items() if key not in own},
        "model_type": "qwen3",
        "head_dim": config.layer.head_dim,  # or theirs would be 128
        "num_hidden_layers": config.num_layers,
        "num_target_layers": config.target_layers,
        "block_size": head.num_places,
        "tie_word_embeddings": False,
    }


@final
class PackedBlocks(Attending):
    """Blocks after all positions of packed texts at once, in one layer: [R, heads, P L, D], a block's positions L apart."""

    def __init__(self, head: BlockHead, batch: PackedTexts, keys: Tensor, values: Tensor) -> None:
        """``keys`` and ``values`` are those of the target's features at every position."""
        assert head.config.layer is not None
        self._config, self._rotations, self._positions = head.config.layer, head.rotations, batch.positions
        self._num_places, self._sight = head.num_places, safe_sight(batch)
        keys = rotate(keys, self._rotations.at(batch.positions, keys.dtype))
        self._keys, self._values = self._per_query(keys), self._per_query(values)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        positions = torch.cat([self._positions + 1 + place for place in range(self._num_places)], 1)
        rotation = self._rotations.at(positions, queries.dtype)
        asked = (rotate(queries, rotation) * self._config.query_scale).chunk(self._num_places, 2)
        own_keys = self._per_query(rotate(keys, rotation)).chunk(self._num_places, 2)
        own_values = self._per_query(values).chunk(self._num_places, 2)
        all_keys, all_values = (self._keys, *own_keys), (self._values, *own_values)
        return torch.cat([attend_beside(query, all_keys, all_values, self._sight) for query in asked], 2)

    def _per_query(self, entries: Tensor) -> Tensor:
        return entries.repeat_interleave(self._config.num_heads // self._config.num_kv_heads, 1)
