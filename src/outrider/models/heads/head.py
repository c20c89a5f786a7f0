"""What all trained heads are: from the target's states and the tokens after them to states of their own, and from those to
logits.

Depth k at place t of a text reads what is known at t (the target's states up to t, the tokens up to t + 1 + k) and answers
for the token t + 2 + k, which is what the target itself says at place t + 1 + k:

    state_k(t) = body(features(<= t), x_{t+1} .. x_{t+1+k}),     q_k(t) = softmax(readout_k(state_k(t)))  ~  p(t + 1 + k)

The same modules are trained on packed texts (``depths``) and run ahead one level of a tree at a time (the drafters).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.heads.config import HeadConfig
from outrider.models.heads.ends import Ends


@dataclass(frozen=True, eq=False)
class PackedTexts:
    """Texts laid end to end in rows of L places, with what the target computed for them."""

    tokens: Tensor
    """[R, L]"""
    features: Tensor
    """[R, L, F] the tapped states side by side."""
    last: Tensor
    """[R, L, H] the last layer's output, from which the target's logits are made."""
    segments: Tensor
    """[R, L] number of the text within its row, -1 for padding."""
    positions: Tensor
    """[R, L] place within the text."""
    supervised: Tensor
    """[R, L] the token at this place counts in the loss."""
    revealed: Tensor | None = None
    """[R, L] what follows this place is shown to heads that learn by glancing (Falcon)."""

    def shifted(self, values: Tensor, count: int) -> Tensor:
        """[R, L, ...] ``values`` as seen ``count`` places earlier; zero where there is none."""
        if count == 0:
            return values
        return torch.cat([values[:, count:], torch.zeros_like(values[:, :count])], 1)

    def valid(self, shift: int) -> Tensor:
        """[R, L] the target's opinion at place t + ``shift`` exists, belongs to the same text, and its next token counts."""
        ahead = self.shifted(self.segments + 1, shift + 1)
        counts = self.shifted(self.supervised.to(self.segments.dtype), shift + 1) > 0
        return (self.segments >= 0) & (ahead == self.segments + 1) & counts

    @property
    def sight(self) -> Tensor:
        """[R, 1, L, L] true where a place may look: the same text, not later."""
        same = self.segments[:, :, None] == self.segments[:, None, :]
        length = self.segments.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
        return (same & causal)[:, None]


class Norm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Head(nn.Module, ABC):
    """Heads of one kind."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        """Offset of each of the head's tokens: the target's token is i + d2t[i]."""

    @property
    def has_readout(self) -> bool:
        """The output matrix is a tensor of its own, for kinds that take the target's: not where it is the whole embedding."""
        return not self.config.tied or self.config.draft_vocab_size != self.config.vocab_size

    @property
    def target_ids(self) -> Tensor:
        """[Vd] the target's token of each of the head's."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @abstractmethod
    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        """[R, L, H] states of depth 0, 1 .. at every place, at most ``count`` of them."""

    @abstractmethod
    def readout(self, depth: int, state: Tensor) -> Tensor:
        """[..., Vd] logits of a state at a depth."""

    def confidence(self, state: Tensor) -> Tensor:
        """[...] logit of the chance that the guess from a state is accepted if those before it were, for kinds that know."""
        raise NotImplementedError(f"{self.config.kind} heads have no confidence head; leave confidence_weight at 0")

    def glance(self, batch: PackedTexts, share: float) -> PackedTexts:
        """The texts with some places revealed, about ``share`` times as many as were guessed wrong, for kinds that glance."""
        del batch, share
        raise NotImplementedError(f"{self.config.kind} heads do not glance; leave glance at 0")

    @property
    def frozen(self) -> tuple[str, ...]:
        """Parameters that are the target's own."""
        return ("embed_tokens.weight", "target_norm.weight")

    def adopt(self, ends: Ends, ids: Tensor) -> None:
        """Begin with the target's own parts where there are any: embedding, norm, and the output matrix for tokens ``ids``."""
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
        """[..., V] the same logits over the target's vocabulary: what the head cannot say is never guessed."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return full.index_copy_(-1, self.target_ids, logits)


class FeatureHead(Head, ABC):
    """Heads whose states are guesses of the target's features."""

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """[..., H] the target's states as the heads take them."""

    def aligned(self, states: Tensor) -> Tensor:
        """[..., H] the part of states that is held to the target's next features."""
        return states
