"""Chimera: a cheap encoder of the last three tokens, one decoder layer for the whole context, and a head per depth.

A *trigram encoder* replaces the target's shallow layers, which mostly mix neighbouring tokens. A *full-context encoder*, one
decoder layer, attends from the newest trigram to the target's states and to its own earlier outputs. Every head reads the
target's state and that output side by side. (Zeng et al. 2024, arXiv 2402.15758.)

    g_j = W res([e(x_{j-2}) ; e(x_{j-1}) ; e(x_j)]),         o_k(t) = layer(g_{t+1+k};  h_{<= t}, o_0 .. o_{k-1}, g_{t+1+k})
    q_k(t) = softmax(V_k [h_t ; o_k(t)])

h is the target's last state after its final norm; e the target's embedding, which is not trained. The first token of a text is
repeated before its beginning. V_k is initialised with two copies of the target's output matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from outrider.models.heads.blocks import ResidualBlocks
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.head import Head, HeadNorm, PackedTexts
from outrider.models.heads.kind import HeadKind
from outrider.models.heads.layer import Attending, HeadLayer, Rotations, attend_beside, safe_sight
from outrider.models.layers import rotate

NUM_TOKENS = 3
"""Tokens of a trigram."""


class TrigramEncoder(nn.Module):
    """The last three tokens' embeddings, as one vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.blocks = ResidualBlocks(NUM_TOKENS * size, 1)
        self.out = nn.Linear(NUM_TOKENS * size, size, bias=False)

    def forward(self, embedded: Tensor) -> Tensor:
        return self.out(self.blocks(embedded))


@final
class ChimeraHead(Head):
    """Heads on [target's state ; full-context encoding]. A state is the two side by side."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.num_depths is not None and config.layer is not None
        size, count = config.hidden_size, config.num_depths if config.own_readouts else 1
        self.target_norm = HeadNorm(size, config.norm_eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.trigram = TrigramEncoder(size)
        self.layer = HeadLayer(config.layer, num_norms=1)
        self.lm_heads = nn.ModuleList(nn.Linear(2 * size, config.draft_vocab_size, bias=False) for _ in range(count))
        self.rotations = Rotations(config.layer)

    def adopt(self, ends: EmbeddingAndOutput, ids: Tensor) -> None:
        super().adopt(ends, ids)
        for head in self.lm_heads:
            assert isinstance(head, nn.Linear)
            head.weight.copy_(torch.cat([ends.readout[ids], ends.readout[ids]], -1))

    def encoded(self, grams: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., H] encodings of the last three tokens [..., 3], the newest last."""
        return self.trigram(self.embed_tokens(grams).to(dtype).flatten(-2))

    def entries(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of states, as the layer sees them."""
        assert self.layer.input_layernorm is not None
        return self.layer.self_attn.entries(self.layer.input_layernorm(states))

    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        known, grams = self.target_norm(batch.features), self.encoded(_trigrams(batch), batch.features.dtype)
        context = _PackedContext(self, batch, known)
        for depth in range(min(count, self.config.num_depths or count)):
            found = self.layer(batch.shifted(grams, depth + 1), context)
            context.note(found)
            yield torch.cat([known, found], -1)

    def readout(self, depth: int, state: Tensor) -> Tensor:
        return self.lm_heads[depth if self.config.own_readouts else 0](state)


def _trigrams(batch: PackedTexts) -> Tensor:
    """[R, L, 3] the tokens that end at each position of packed texts."""
    places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    backs = [batch.positions.clamp(max=NUM_TOKENS - 1 - index) for index in range(NUM_TOKENS)]
    return torch.stack([batch.tokens.gather(1, places - back) for back in backs], -1)


@final
class _PackedContext(Attending):
    """Attention of the trigrams after all positions to the target's states, and to the layer's outputs at earlier depths."""

    def __init__(self, head: ChimeraHead, batch: PackedTexts, known: Tensor) -> None:
        assert head.config.layer is not None
        self._head, self._config, self._positions = head, head.config.layer, batch.positions
        self._sight = safe_sight(batch)
        self._held = [self._rotated(*head.entries(known), shift=0)]

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shift = len(self._held)
        rotation = self._head.rotations.at(self._positions + shift, queries.dtype)
        all_keys, all_values = zip(*self._held, self._rotated(keys, values, shift), strict=True)
        return attend_beside(rotate(queries, rotation) * self._config.query_scale, all_keys, all_values, self._sight)

    def note(self, found: Tensor) -> None:
        """Store the layer's output, which deeper trigrams see instead of the trigram."""
        self._held.append(self._rotated(*self._head.entries(found), shift=len(self._held)))

    def _rotated(self, keys: Tensor, values: Tensor, shift: int) -> tuple[Tensor, Tensor]:
        keys = rotate(keys, self._head.rotations.at(self._positions + shift, keys.dtype))
        groups = self._config.num_heads // self._config.num_kv_heads
        return keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)


@final
class ChimeraKind(HeadKind[ChimeraHead]):
    """Folders of Chimera heads."""

    name = "chimera"
    module = ChimeraHead
    architectures = ("ChimeraModel",)
    model_type = "chimera"
    counted_by = "num_heads"
    has_layer = True
    training: ClassVar = {"num_heads": 4}


KIND = ChimeraKind()
