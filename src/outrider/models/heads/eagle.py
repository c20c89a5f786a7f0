"""EAGLE: one decoder layer that continues the target's own features, token by token.

EAGLE-1 predicts the next feature of the target's last layer from the feature and the token after it, and reads it with the
target's own output matrix (Li et al. 2024, arXiv 2401.15077). EAGLE-3 fuses three layers, keeps its own states instead of
imitating features, and reads them with an output matrix of its own over the commonest tokens (Li et al. 2025, arXiv
2503.01840).

    EAGLE-1   s_k = layer(fc [e(x_{t+1+k}) ; s_{k-1}]),    s_{-1} = norm(h_L)_t,             q_k = softmax(W_target s_k)
    EAGLE-3   s_k = layer([n1(e(x)) ; n2(s_{k-1})]),       s_{-1} = fc [h_a ; h_b ; h_c]_t,  q_k = softmax(W norm(s_k))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn

from outrider.models.heads.config import HeadConfig
from outrider.models.heads.head import Head, Norm, Packed
from outrider.models.heads.layer import Attending, HeadLayer, PackedAttending, Rotations


class EagleHead(Head, ABC):
    """A layer that is applied to its own output."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.layer is not None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotations = Rotations(config.layer)

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """[..., H] the target's states as the layer takes them."""

    @abstractmethod
    def step(self, tokens: Tensor, states: Tensor, attending: Attending) -> Tensor:
        """[B, N, H] states after ``tokens`` [B, N], from the states before them."""

    def depths(self, batch: Packed, count: int) -> Iterator[Tensor]:
        assert self.config.layer is not None
        states, attending = self.fuse(batch.features), PackedAttending(batch, self.rotations, self.config.layer)
        for depth in range(count):
            states = self.step(batch.shifted(batch.tokens, depth + 1), states, attending)
            yield states


@final
class Eagle1Head(EagleHead):
    """Predicts features."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.layer is not None
        self.target_norm = Norm(config.hidden_size, config.norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(config.layer, num_norms=0)])
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def frozen(self) -> tuple[str, ...]:
        return (*super().frozen, "lm_head.weight")

    def fuse(self, features: Tensor) -> Tensor:
        return self.target_norm(features)

    def step(self, tokens: Tensor, states: Tensor, attending: Attending) -> Tensor:
        x = self.fc(torch.cat([self.embed_tokens(tokens).to(states.dtype), states], -1))
        return self.layers[0](x, attending)

    def readout(self, depth: int, state: Tensor) -> Tensor:
        del depth
        weight = self.embed_tokens.weight if self.config.tied else self.lm_head.weight
        return nn.functional.linear(state, weight.to(state.dtype))


@final
class Eagle3Head(EagleHead):
    """Keeps states of its own."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear((len(config.taps) or 3) * config.hidden_size, config.hidden_size, bias=False)
        assert config.layer is not None
        self.midlayer = HeadLayer(config.layer, num_norms=2)
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def step(self, tokens: Tensor, states: Tensor, attending: Attending) -> Tensor:
        embedded = self.embed_tokens(tokens).to(states.dtype)
        return self.midlayer(states, attending, embedded)

    def readout(self, depth: int, state: Tensor) -> Tensor:
        del depth
        return self.lm_head(self.norm(state))
