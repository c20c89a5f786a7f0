"""Falcon: an EAGLE that drafts k tokens per pass, from the last k columns of the text instead of the last one.

A column is the target's feature and the token after it. Two LSTM layers run over the columns, then one decoder layer in which
the columns of a block see each other. The last k columns of the text predict the k features that follow. These, with k tokens
chosen from them, are the columns of the next block. (Gao et al. 2025, arXiv 2412.12639.)

    z_c = LSTM([e(x_{c+1}) ; f_c], z_{c-1}),      f_c = norm(h_L)_c, below the root s
    s_{i}(t) = layer(z_{t-k+1+i};  all columns <= t),  i < k,         q_i = softmax(W_target s_i)  ~  p(t + 1 + i)
    s_{k+i}(t) = layer(z of (s_i, x_{t+2+i});  all columns <= t, and s_0 .. s_{k-1}),                 and so on

If a text has fewer than k columns, its first one is repeated. *Glancing* (``glance``) is for training: some columns are
replaced by those one block later, so that the others of their block learn from the true continuation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.errors import ModelError
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.head import FeatureHead, HeadNorm, PackedTexts
from outrider.models.heads.kind import HeadKind, Raw
from outrider.models.heads.layer import Attending, HeadLayer, Rotations, attend_beside, safe_sight
from outrider.models.layers import rotate

_NUM_PARTS = 4
"""Parts of the carried state: output and cell of both LSTM layers."""


@final
class FalconHead(FeatureHead):
    """Blocks of features."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.layer is not None
        size = config.hidden_size
        self.block_len = int(config.raw.get("block_len", 2))
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.target_norm = HeadNorm(size, config.norm_eps)
        self.lstm = nn.ModuleList([nn.LSTMCell(2 * size, size), nn.LSTMCell(size, size)])
        self.layers = nn.ModuleList([HeadLayer(config.layer, num_norms=0)])
        self.add_readout()
        self.rotations = Rotations(config.layer)

    @property
    def frozen(self) -> tuple[str, ...]:
        return (*super().frozen, "lm_head.weight")

    @property
    def layer(self) -> HeadLayer:
        return cast("HeadLayer", self.layers[0])

    @property
    def carried_size(self) -> int:
        """Size of the state carried from column to column."""
        return _NUM_PARTS * self.config.hidden_size

    def fuse(self, features: Tensor) -> Tensor:
        return self.target_norm(features)

    def advance(self, tokens: Tensor, features: Tensor, carried: Tensor) -> Tensor:
        """[N, 4H] the carried state after columns [N] and [N, H], from the state before them."""
        first, first_cell, second, second_cell = carried.chunk(_NUM_PARTS, -1)
        x = torch.cat([self.embed_tokens(tokens).to(features.dtype), features], -1)
        lower = self.lstm[0](x, (first, first_cell))
        return torch.cat([*lower, *self.lstm[1](lower[0], (second, second_cell))], -1)

    def read(self, tokens: Tensor, features: Tensor, carried: Tensor, first: Tensor | None = None) -> Tensor:
        """[N, M, 4H] the carried state after each of M consecutive columns. Columns that are ``first`` start from zero."""
        found = list[Tensor]()
        for column in range(tokens.shape[1]):
            if first is not None:
                carried = carried * ~first[:, column, None]
            carried = self.advance(tokens[:, column], features[:, column], carried)
            found.append(carried)
        return torch.stack(found, 1)

    def entering(self, carried: Tensor) -> Tensor:
        """[..., H] the part of the carried state that enters the decoder layer."""
        return carried.chunk(_NUM_PARTS, -1)[2]

    def readout(self, depth: int, state: Tensor) -> Tensor:
        del depth
        return self.read_off(state)

    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        size, (tokens, features) = self.block_len, self._columns(batch)
        start = features.new_zeros(len(features), self.carried_size)
        carried = self.read(tokens, features, start, batch.positions == 0)
        blocks = _PackedBlocks(self, batch, self.entering(carried))
        backs = torch.stack([batch.positions.clamp(max=size - 1 - place) for place in range(size)], 1)  # [R, k, L]
        queries, positions = _earlier(self.entering(carried), backs), batch.positions[:, None] - backs
        for begin in range(0, count, size):
            states = blocks.states(queries, positions)
            yield from states.unbind(1)[: count - begin]
            ahead = torch.stack([batch.shifted(batch.tokens, begin + 2 + place) for place in range(size)], 2)
            laid = states.transpose(1, 2).flatten(0, 1)
            after = self.read(ahead.flatten(0, 1), laid, carried.flatten(0, 1)).unflatten(0, batch.tokens.shape)
            carried, queries = after[:, :, -1], self.entering(after).transpose(1, 2)
            positions = batch.positions[:, None] + begin + 1 + torch.arange(size, device=positions.device)[:, None]

    def _columns(self, batch: PackedTexts) -> tuple[Tensor, Tensor]:
        """Tokens and features of the columns; revealed ones come from a block ahead."""
        tokens, features = batch.shifted(batch.tokens, 1), self.fuse(batch.features)
        if batch.revealed is None:
            return tokens, features
        ahead = batch.shifted(tokens, self.block_len), batch.shifted(features, self.block_len)
        return torch.where(batch.revealed, ahead[0], tokens), torch.where(batch.revealed[..., None], ahead[1], features)

    def glance(self, batch: PackedTexts, share: float) -> PackedTexts:
        """Reveal random columns, as many as a ``share`` of the wrong guesses."""
        with torch.no_grad():
            *_, last = self.depths(batch, self.block_len)
            said = self.target_ids[self.readout(self.block_len - 1, last).argmax(-1)]
        valid = batch.valid(self.block_len)
        wrong = (said != batch.shifted(batch.tokens, self.block_len + 1)) & valid
        chance = share * wrong.sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)
        return replace(batch, revealed=valid & (torch.rand(valid.shape, device=valid.device) < chance))


@final
class _PackedBlocks(Attending):
    """Blocks after all positions of packed texts at once: [R, heads, k L, D], a block's columns L apart."""

    def __init__(self, head: FalconHead, batch: PackedTexts, columns: Tensor) -> None:
        assert head.config.layer is not None
        self._head, self._config, self._sight = head, head.config.layer, safe_sight(batch)
        keys, values = head.layer.self_attn.entries(columns)
        keys = rotate(keys, head.rotations.at(batch.positions, keys.dtype))
        self._keys, self._values = [self._per_query(keys)], [self._per_query(values)]
        self._is_first, self._positions = True, batch.positions

    def states(self, columns: Tensor, positions: Tensor) -> Tensor:
        """[R, k, L, H] states of the next blocks, from the layer's inputs of that shape."""
        self._positions = positions
        states = self._head.layer(columns.flatten(1, 2), self)
        self._is_first = False
        return states.unflatten(1, positions.shape[1:])

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention. The first blocks' keys and values are those of the text; later blocks add their own."""
        size = self._head.block_len
        rotation = self._head.rotations.at(self._positions.flatten(1), queries.dtype)
        if not self._is_first:
            self._keys += self._per_query(rotate(keys, rotation)).chunk(size, 2)
            self._values += self._per_query(values).chunk(size, 2)
        asked = rotate(queries, rotation).chunk(size, 2)
        return torch.cat([self._seen(query) for query in asked], 2)

    def _seen(self, queries: Tensor) -> Tensor:
        scale = self._config.query_scale
        if len(self._keys) == 1:
            keys, values = self._keys[0], self._values[0]
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._sight, scale=scale)
        return attend_beside(queries * scale, self._keys, self._values, self._sight)

    def _per_query(self, entries: Tensor) -> Tensor:
        return entries.repeat_interleave(self._config.num_heads // self._config.num_kv_heads, 1)


def _earlier(columns: Tensor, backs: Tensor) -> Tensor:
    """[R, k, L, H] the columns [R, L, H] at ``backs`` [R, k, L] positions before each one."""
    places = torch.arange(columns.shape[1], device=columns.device) - backs
    index = places.flatten(1)[..., None].expand(-1, -1, columns.shape[2])
    return columns.gather(1, index).unflatten(1, backs.shape[1:])


@final
class FalconKind(HeadKind[FalconHead]):
    """Folders of Falcon heads."""

    name = "falcon"
    module = FalconHead
    architectures = ("FalconDraftModel",)
    model_type = "falcon_draft"
    has_layer = True
    training: ClassVar = {"num_depths": 4, "feature_weight": 0.5, "noise": 0.02, "glance": 0.4}

    def new_keys(self, raw: Raw) -> dict[str, Any]:
        size = raw.get("block_len", 2)
        if not isinstance(size, int) or size < 1:
            raise ModelError(f"block_len = {size!r} is not valid; use a whole number of at least 1")
        return {**super().new_keys(raw), "block_len": size}


KIND = FalconKind()
