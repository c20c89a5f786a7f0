"""The interface of all trained heads: from the target's states and the tokens after them they compute their own states, and
from those logits.

Depth k at place t of a text reads the target's states up to t and the tokens up to t + 1 + k. It predicts the token t + 2 + k,
which the target itself predicts at place t + 1 + k:

    state_k(t) = body(features(<= t), x_{t+1} .. x_{t+1+k}),     q_k(t) = softmax(readout_k(state_k(t)))  ~  p(t + 1 + k)

The same modules are trained on packed texts (``depths``) and draft one level of a tree at a time (the drafters).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.errors import OptionError
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.level_weights import HeadWeights


@dataclass(frozen=True, eq=False)
class PackedTexts:
    """Texts packed into rows of L positions, with the target's states."""

    tokens: Tensor
    """[R, L]"""
    features: Tensor
    """[R, L, F] the concatenated tapped states."""
    last: Tensor
    """[R, L, H] the last layer's output, from which the target's logits are made."""
    segments: Tensor
    """[R, L] number of the text within its row, -1 for padding."""
    positions: Tensor
    """[R, L] position within the text."""
    supervised: Tensor
    """[R, L] whether the token counts in the loss."""
    revealed: Tensor | None = None
    """[R, L] whether what follows this position is shown to heads that learn by glancing (Falcon)."""

    def shifted(self, values: Tensor, count: int) -> Tensor:
        """[R, L, ...] ``values`` shifted by ``count`` positions; zero where there is none."""
        if count == 0:
            return values
        return torch.cat([values[:, count:], torch.zeros_like(values[:, :count])], 1)

    def valid(self, shift: int) -> Tensor:
        """[R, L] whether the target's law at position t + ``shift`` exists, belongs to the same text, and its next token
        counts."""
        ahead = self.shifted(self.segments + 1, shift + 1)
        counts = self.shifted(self.supervised.to(self.segments.dtype), shift + 1) > 0
        return (self.segments >= 0) & (ahead == self.segments + 1) & counts

    @property
    def sight(self) -> Tensor:
        """[R, 1, L, L] attention mask: the same text, not later."""
        same = self.segments[:, :, None] == self.segments[:, None, :]
        length = self.segments.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
        return (same & causal)[:, None]


class HeadNorm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Head(nn.Module, ABC):
    """Heads of one kind."""

    embed_tokens: nn.Embedding
    """The target's embedding, for kinds that read tokens."""
    lm_head: nn.Linear
    """The output matrix of kinds that call ``add_readout``, if ``has_readout``."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        """Offset of each of the head's tokens: the target's token is i + d2t[i]."""

    @property
    def has_readout(self) -> bool:
        """Whether the output matrix is a tensor of its own, instead of the whole embedding."""
        return not self.config.tied or self.config.draft_vocab_size != self.config.vocab_size

    def add_readout(self) -> None:
        """Make the output matrix, unless it is the embedding. Call it last, because new parameters draw random numbers in
        order."""
        if self.has_readout:
            self.lm_head = nn.Linear(self.config.hidden_size, self.config.draft_vocab_size, bias=False)

    def read_off(self, normed: Tensor) -> Tensor:
        """[..., Vd] logits of states after the final norm, by the target's own output matrix."""
        if self.has_readout:
            return self.lm_head(normed)
        return F.linear(normed, self.embed_tokens.weight.to(normed.dtype))

    @property
    def target_ids(self) -> Tensor:
        """[Vd] the target's token of each of the head's."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def native_levels(self) -> HeadWeights | None:
        """The weights with which a native call grows trees; None for kinds that it does not support."""
        return None

    @abstractmethod
    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        """[R, L, H] states at every position, of depth 0, 1 and so on, at most ``count`` of them."""

    @abstractmethod
    def readout(self, depth: int, state: Tensor) -> Tensor:
        """[..., Vd] logits of a state at a depth."""

    def confidence(self, state: Tensor) -> Tensor:
        """[...] logit of the probability that the guess from a state is accepted if those before it were, for kinds with
        confidence."""
        del state
        raise OptionError(f"{self.config.kind} heads have no confidence head; leave confidence_weight at 0")

    def glance(self, batch: PackedTexts, share: float) -> PackedTexts:
        """The texts with some positions revealed, about ``share`` times the number of wrong guesses, for kinds that glance."""
        del batch, share
        raise OptionError(f"{self.config.kind} heads cannot learn by glancing; leave glance at 0")

    @property
    def frozen(self) -> tuple[str, ...]:
        """Parameters that are the target's own."""
        return ("embed_tokens.weight", "target_norm.weight")

    def adopt(self, ends: EmbeddingAndOutput, ids: Tensor) -> None:
        """Start from the target's own parts: embedding, norm, and the output matrix for tokens ``ids``."""
        for name, parameter in self.named_parameters():
            if name == "embed_tokens.weight":
                parameter.copy_(ends.embedding)
            elif name == "target_norm.weight":
                parameter.copy_(ends.norm)
            elif name.startswith(("lm_head", "lm_heads")) and parameter.shape[1:] == ends.readout.shape[1:]:
                parameter.copy_(ends.readout[ids] if parameter.shape[0] != len(ends.readout) else ends.readout)

    def freeze(self) -> None:
        """Leave the target's own parameters out of training."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in self.frozen)

    def over_target(self, logits: Tensor) -> Tensor:
        """[..., V] the logits over the target's vocabulary. Tokens that the head lacks are never guessed."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return full.index_copy_(-1, self.target_ids, logits)


class FeatureHead(Head, ABC):
    """Heads whose states predict the target's features."""

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """[..., H] the target's states, as input of the heads."""

    def aligned(self, states: Tensor) -> Tensor:
        """[..., H] the part of states that is compared with the target's next features."""
        return states
