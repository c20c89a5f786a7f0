"""Recurrent heads: a small state that reads one token after the other, without attention.

s_k = advance(s_{k-1}, x_{t+1+k}),      s_{-1} = begin(the target's last state),      q_k = softmax(readout(s_k))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from outrider.models.heads.config import HeadConfig
from outrider.models.heads.head import Head, HeadNorm, PackedTexts


class RecurrentHead(Head, ABC):
    """A state that each token advances."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.target_norm = HeadNorm(config.hidden_size, config.norm_eps)

    @abstractmethod
    def begin(self, features: Tensor) -> Tensor:
        """[..., S] the initial state, from the target's."""

    @abstractmethod
    def advance(self, depth: int, states: Tensor, tokens: Tensor) -> Tensor:
        """[..., S] states after ``tokens``, which are number ``depth`` after the target's state."""

    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        states = self.begin(batch.features)
        for depth in range(min(count, self.config.num_depths or count)):
            states = self.advance(depth, states, batch.shifted(batch.tokens, depth + 1))
            yield states
