"""Layers of models with recurrences: a mixer that moves information between tokens, and mostly an MLP after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.cache.recurrent import RecurrentCache
from outrider.models.layers import Pass, SelfAttention
from outrider.models.linear import Linear
from outrider.models.norms import Norm
from outrider.models.recurrent.scan import Reach


@dataclass(frozen=True, eq=False)
class RecurrentPass:
    """What all layers of one pass share."""

    cache: RecurrentCache
    attention: Pass | None
    """The same for the attention layers, where there are any."""
    reach: Reach
    windows: Tensor | None
    """[B, N, W] where the convolutions of the nodes look; None on a chain."""
    batch_size: int
    num_nodes: int


class Mixer(Protocol):
    """Attention or a recurrence: [B * N, H] from the normalised stream [B * N, H]."""

    def __call__(self, x: Tensor, step: RecurrentPass) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention as in other decoders."""

    attention: SelfAttention

    def __call__(self, x: Tensor, step: RecurrentPass) -> Tensor:
        assert step.attention is not None
        return self.attention.projected(x, step.attention)


@dataclass(frozen=True, eq=False)
class GatedAttention:
    """Attention whose heads pass a gate before they are projected."""

    attention: SelfAttention
    gate: Linear
    out: Linear

    def __call__(self, x: Tensor, step: RecurrentPass) -> Tensor:
        assert step.attention is not None
        return self.out(self.attention(x, step.attention) * torch.sigmoid(self.gate(x)))


@dataclass(frozen=True, eq=False)
class RecurrentLayer:
    """Norm, mixer, add; and, where there is an MLP, norm, MLP, add."""

    mixer: Mixer
    mixer_norm: Norm
    mlp: Callable[[Tensor], Tensor] | None = None
    mlp_norm: Norm | None = None

    def __call__(self, x: Tensor, step: RecurrentPass, dtype: torch.dtype) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x.to(dtype)), step)
        if self.mlp is None or self.mlp_norm is None:
            return x
        return x + self.mlp(self.mlp_norm(x.to(dtype)))
