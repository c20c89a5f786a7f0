"""EAGLE: one decoder layer continues the target's own features, token by token. EAGLE-1 and EAGLE-3 differ in the layer's
input.

s_k = layer(e(x_{t+1+k}), s_{k-1}),      s_{-1} = fuse(the target's states)_t,      q_k = softmax(readout(s_k))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn

from outrider.models.decoder_weights import Weights
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.head import FeatureHead, HeadNorm, PackedTexts
from outrider.models.heads.layer import Attending, PackedAttending, Rotations


class EagleHead(FeatureHead, ABC):
    """A layer that is applied to its own output."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.layer is not None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotations = Rotations(config.layer)

    @property
    def state_size(self) -> int:
        """Size of a state."""
        return self.config.hidden_size

    def native_weights(self) -> Weights | None:
        """The weights for a native model of this layer; None if the native pass has no such layer."""
        return None

    @abstractmethod
    def step(self, tokens: Tensor, states: Tensor, attending: Attending) -> Tensor:
        """[B, N, H] states after ``tokens`` [B, N], from the states before them."""

    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        assert self.config.layer is not None
        states, attending = self.fuse(batch.features), PackedAttending(batch, self.rotations, self.config.layer)
        for depth in range(count):
            states = self.step(batch.shifted(batch.tokens, depth + 1), states, attending)
            yield states


class ReadByTarget(EagleHead, ABC):
    """Predicts the normalised features of the target's last layer, which the target's output matrix reads."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.target_norm = HeadNorm(config.hidden_size, config.norm_eps)

    @property
    def frozen(self) -> tuple[str, ...]:
        return (*super().frozen, "lm_head.weight")

    def fuse(self, features: Tensor) -> Tensor:
        return self.target_norm(features)

    def said(self, state: Tensor) -> Tensor:
        """[..., H] the part of a state that the output matrix reads."""
        return state

    def readout(self, depth: int, state: Tensor) -> Tensor:
        del depth
        return self.read_off(self.said(state))
