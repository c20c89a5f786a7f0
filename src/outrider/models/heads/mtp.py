"""Causal multi-token prediction: a chain of decoder layers. Each predicts one token further than the one before.

The layer of a depth reads the state of the depth before it and the token between. Embedding and output matrix are the target's,
which is not trained. (DeepSeek-V3, arXiv 2412.19437.)

    s_k(t) = layer_k(M_k [n1(e(x_{t+1+k})) ; n2(s_{k-1}(t))]),      s_{-1} = h,      q_k = softmax(W_target norm_k(s_k))

h is the last state after the target's final norm. Layer k looks at places up to t of its own depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from outrider.models.config import ModelConfig
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.head import Head, HeadNorm, PackedTexts
from outrider.models.heads.kind import HeadKind
from outrider.models.heads.layer import Attending, HeadLayer, PackedAttending, Rotations


class MtpModule(nn.Module):
    """One depth of the chain, with DeepSeek's names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.enorm, self.hnorm = HeadNorm(size, eps), HeadNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = HeadLayer(config, num_norms=1)
        self.norm = HeadNorm(size, eps)

    def forward(self, embedded: Tensor, states: Tensor, attending: Attending) -> Tensor:
        mixed = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(states)], -1))
        return self.layer(mixed, attending)


@final
class CausalMtp(Head):
    """Modules one after the other."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.layer is not None and config.num_depths is not None
        self.target_norm = HeadNorm(config.hidden_size, config.norm_eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MtpModule(config.layer) for _ in range(config.num_depths))
        self.rotations = Rotations(config.layer)
        self.add_readout()

    @property
    def frozen(self) -> tuple[str, ...]:
        return (*super().frozen, "lm_head.weight")

    def adopt(self, ends: EmbeddingAndOutput, ids: Tensor) -> None:
        super().adopt(ends, ids)
        for module in self.layers:
            assert isinstance(module, MtpModule)
            module.norm.weight.copy_(ends.norm)

    def step(self, depth: int, tokens: Tensor, states: Tensor, attending: Attending) -> Tensor:
        """[B, N, H] states of a depth, from those of the previous depth and the tokens between."""
        return self.layers[depth](self.embed_tokens(tokens).to(states.dtype), states, attending)

    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        assert self.config.layer is not None
        states = self.target_norm(batch.features)
        for depth in range(min(count, len(self.layers))):
            attending = PackedAttending(batch, self.rotations, self.config.layer)
            states = self.step(depth, batch.shifted(batch.tokens, depth + 1), states, attending)
            yield states

    def readout(self, depth: int, state: Tensor) -> Tensor:
        module = self.layers[depth]
        assert isinstance(module, MtpModule)
        return self.read_off(module.norm(state))


@final
class MtpKind(HeadKind[CausalMtp]):
    """Folders of causal multi-token prediction."""

    name = "mtp"
    module = CausalMtp
    architectures = ("CausalMtpModel",)
    model_type = "mtp"
    counted_by = "num_heads"
    has_layer = True
    training: ClassVar = {"num_heads": 4}


KIND = MtpKind()
