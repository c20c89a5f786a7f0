"""Hydra: Medusa's heads, each of which also reads the embeddings of the tokens guessed before it.

So each guess depends on those before it. Hydra++ puts one decoder layer between the target's states and the heads. (Ankner et
al. 2024, arXiv 2402.05109.)

    q_k = softmax(W_k res(skip_k(z) + silu(B_k z + b))),      z = [g(h)_t ; e(x_{t+1}) ; .. ; e(x_{t+1+k})]

h is the target's last state after its final norm; e the target's embedding, which is not trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.decoder_weights import Weights
from outrider.models.heads.blocks import ResidualBlocks, new_readouts, readout_of
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.head import Head, HeadNorm, PackedTexts
from outrider.models.heads.kind import HeadKind
from outrider.models.heads.layer import Attending, HeadLayer, PackedAttending, Rotations
from outrider.models.heads.level_weights import Affine, HeadWeights, LevelWeights


class HydraBlock(nn.Module):
    """One head: from the state and the embeddings so far to a state of its own."""

    def __init__(self, config: HeadConfig, depth: int) -> None:
        super().__init__()
        width = (depth + 2) * config.hidden_size
        self.skip = nn.Linear(width, config.hidden_size, bias=False)
        self.mix = nn.Linear(width, config.hidden_size)
        self.blocks = ResidualBlocks(config.hidden_size, config.num_blocks - 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.skip(x) + F.silu(self.mix(x)))


@final
class HydraHead(Head):
    """Heads that depend on each other's guesses, with or without a prefix layer."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.num_depths is not None
        self.target_norm = HeadNorm(config.hidden_size, config.norm_eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.heads = nn.ModuleList(HydraBlock(config, depth) for depth in range(config.num_depths))
        self.lm_heads = new_readouts(config, config.num_depths)
        if config.layer is not None:
            self.prefix = HeadLayer(config.layer, num_norms=1)
            self.rotations = Rotations(config.layer)

    def read(self, features: Tensor, attending: Attending | None) -> Tensor:
        """[B, N, H] the target's states, as input of the heads."""
        states = self.target_norm(features)
        return states if attending is None else self.prefix(states, attending)

    def state(self, depth: int, read: Tensor, embedded: list[Tensor]) -> Tensor:
        """[..., H] the output of head ``depth`` for a state and the ``depth + 1`` embeddings after it."""
        return self.heads[depth](torch.cat([read, *embedded], -1))

    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        layer = self.config.layer
        read = self.read(batch.features, None if layer is None else PackedAttending(batch, self.rotations, layer))
        embedded: list[Tensor] = []
        for depth in range(min(count, len(self.heads))):
            embedded.append(self.embed_tokens(batch.shifted(batch.tokens, depth + 1)).to(read.dtype))
            yield self.state(depth, read, embedded)

    def readout(self, depth: int, state: Tensor) -> Tensor:
        return readout_of(self.lm_heads, depth)(state)

    def native_levels(self) -> HeadWeights:
        levels = (
            LevelWeights(
                readout=Affine.of(readout_of(self.lm_heads, depth)).weight,
                blocks=block.blocks.native_weights(),
                enter=Affine.of(block.skip),
                bent=Affine.of(block.mix),
                embedding=self.embed_tokens.weight.data,
            )
            for depth, block in enumerate(self.heads)
            if isinstance(block, HydraBlock)
        )
        norm = None if self.config.has_layer else self.target_norm.weight.data
        return HeadWeights(levels=tuple(levels), state_norm=norm, moving="tokens")

    def native_prefix(self) -> Weights | None:
        """The prefix layer as a model without an output matrix; None if there is no such layer."""
        layer = self.prefix.native_weights() if self.config.has_layer else None
        nothing = self.target_norm.weight.data.new_zeros(0, self.config.hidden_size)
        return None if layer is None else Weights(nothing, [layer], self.target_norm.weight.data, nothing)


@final
class HydraKind(HeadKind[HydraHead]):
    """Folders of Hydra heads."""

    name = "hydra"
    module = HydraHead
    architectures = ("HydraModel",)
    model_type = "hydra"
    counted_by = "num_heads"
    training: ClassVar = {"num_heads": 4, "num_blocks": 4, "prefix": True}


KIND = HydraKind()
