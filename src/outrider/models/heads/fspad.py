"""FSPAD: EAGLE with a token embedding that selects parts of the feature, and a layer with one output for logits and one for
features.

Two changes to EAGLE-1. *Feature sampling*: the mixture of embedding and feature is widened, and the embedding alone decides how
much of each wide number passes. *Partial alignment distillation*: the layer has two output vectors. The target's output matrix
reads one, which is not otherwise constrained. The other is trained to equal the target's next feature, and is the next step's
input. (Gui et al. 2024, arXiv 2408.15562; sizes, weights and tensor names follow the authors' code, github.com/Luc4Gui/FSPAD.)

    z   = fc [e ; r_{k-1}] + b,        y = z + D (silu(G e) * U norm(z)),         e = e(x_{t+1+k}),  r_{-1} = norm(h_L)_t
    a   = y + attention(y),            [s_k ; r_k] = [a ; a] + mlp(norm(a)),      q_k = softmax(W_target s_k)
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.config import ModelConfig
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.eagle import ReadByTarget
from outrider.models.heads.head import HeadNorm
from outrider.models.heads.kind import HeadKind
from outrider.models.heads.layer import Attending, HeadAttention, HeadMlp


class SampledFeatures(nn.Module):
    """Combines embedding and feature into one vector: the embedding selects from the feature."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.mlp = HeadMlp(config)
        self.post_attention_layernorm = HeadNorm(config.hidden_size, config.norm_eps)

    def forward(self, embedded: Tensor, features: Tensor) -> Tensor:
        mixed = self.fc(torch.cat([embedded, features], -1))
        passed = F.silu(self.mlp.gate_proj(embedded)) * self.mlp.up_proj(self.post_attention_layernorm(mixed))
        return mixed + self.mlp.down_proj(passed)


class ForkedLayer(nn.Module):
    """A decoder layer without an input norm, whose MLP ends in two vectors."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, config.hidden_size)
        self.mlp = HeadMlp(config, out_size=2 * config.hidden_size)
        self.post_attention_layernorm = HeadNorm(config.hidden_size, config.norm_eps)

    def forward(self, states: Tensor, attending: Attending) -> Tensor:
        states = states + self.self_attn(states, attending)
        return torch.cat([states, states], -1) + self.mlp(self.post_attention_layernorm(states))


@final
class FspadHead(ReadByTarget):
    """A state is [the part that is read out ; the part that is compared with the feature]."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.layer is not None
        self.fc = SampledFeatures(config.layer)
        self.layers = nn.ModuleList([ForkedLayer(config.layer)])
        self.add_readout()

    @property
    def state_size(self) -> int:
        return 2 * self.config.hidden_size

    def aligned(self, states: Tensor) -> Tensor:
        return states[..., -self.config.hidden_size :]

    def step(self, tokens: Tensor, states: Tensor, attending: Attending) -> Tensor:
        """``states`` are the target's features, or states of this head."""
        embedded = self.embed_tokens(tokens).to(states.dtype)
        return self.layers[0](self.fc(embedded, self.aligned(states)), attending)

    def said(self, state: Tensor) -> Tensor:
        return state[..., : self.config.hidden_size]


@final
class FspadKind(HeadKind[FspadHead]):
    """Folders of FSPAD heads."""

    name = "fspad"
    module = FspadHead
    architectures = ("FspadModel",)
    model_type = "fspad"
    has_layer = True
    training: ClassVar = {"num_depths": 3, "feature_weight": 0.5, "noise": 0.02}


KIND = FspadKind()
