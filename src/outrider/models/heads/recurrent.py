"""Recurrent heads: a small state that takes in one token after the other, without attention.

The MLP speculator has a stage per depth, each a projection of the state plus an embedding of its own for the token (Wertheimer
et al. 2024, arXiv 2404.19124; IBM's Foundation Model Stack). ReDrafter has one cell for all depths, whose state stands beside
the target's when the next token is read off (Zhang et al. 2024, arXiv 2403.09919).

    MLP speculator   s_k = gelu(ln_k(P_k s_{k-1} + (ew / sw) E_k[x_{t+1+k}])),   s_{-1} = h_t,     q_k = softmax(W_k s_k)
                     sw = 2^(-1 / 2n),  ew^2 = (1 - sw^2) d / 2                  d: width of the state, n: stages
    ReDrafter        s_k = silu(W e(x_{t+1+k}) + U s_{k-1} + b),   s_{-1} = 0,   q_k = softmax(V res([h_t ; s_k]))

h is the target's last state after its final norm; e the target's embedding, which is not trained.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.heads.config import HeadConfig
from outrider.models.heads.ends import Ends
from outrider.models.heads.head import Head, Norm, Packed
from outrider.models.heads.medusa import Blocks


class RecurrentHead(Head, ABC):
    """A state that is moved on by tokens."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.target_norm = Norm(config.hidden_size, config.norm_eps)

    @abstractmethod
    def begin(self, features: Tensor) -> Tensor:
        """[..., S] the state before any token, from the target's."""

    @abstractmethod
    def advance(self, depth: int, states: Tensor, tokens: Tensor) -> Tensor:
        """[..., S] states after ``tokens``, which are number ``depth`` after the target's state."""

    def depths(self, batch: Packed, count: int) -> Iterator[Tensor]:
        states = self.begin(batch.features)
        for depth in range(min(count, self.config.num_depths or count)):
            states = self.advance(depth, states, batch.shifted(batch.tokens, depth + 1))
            yield states


class ShiftedNorm(nn.Module):
    """Root-mean-square norm with a scale and a shift; the format fixes its epsilon."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), _EPS) + self.bias.to(x.dtype)


_EPS = 1e-6


@final
class MlpSpeculator(RecurrentHead):
    """A stage per depth, or one for all."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.num_depths is not None
        size, count = config.inner_size or config.hidden_size, config.num_depths
        own = 1 if config.tie_stages else count
        embeddings = [nn.Embedding(config.vocab_size, size) for _ in range(own)]
        inner = [nn.Linear(size, size, bias=False) for _ in range(max(0, min(own, count - 1)))]
        heads = [nn.Linear(size, config.draft_vocab_size, bias=False) for _ in range(own)]
        norms = [ShiftedNorm(size) for _ in range(own)]
        self.emb = nn.ModuleList(_each(embeddings, count))
        self.proj = nn.ModuleList([nn.Linear(config.hidden_size, size, bias=False), *_each(inner, count - 1)])
        self.head = nn.ModuleList(_each(heads, count))
        self.ln = nn.ModuleList(_each(norms, count))
        state_weight = 0.5 ** (0.5 / count)
        self._mix = math.sqrt((1 - state_weight**2) * size / 2) / state_weight
        for module in (*self.emb, *self.proj, *self.head):
            assert isinstance(module, nn.Linear | nn.Embedding)
            nn.init.trunc_normal_(module.weight, std=1 / math.sqrt(size))

    def adopt(self, ends: Ends, ids: Tensor) -> None:
        """Output matrices and embeddings begin as the target's, the latter in the size that the mixture expects."""
        super().adopt(ends, ids)
        size = self.config.inner_size or self.config.hidden_size
        if size != self.config.hidden_size:
            return
        scaled = ends.embedding / ends.embedding.std().clamp(min=1e-6) / math.sqrt(size)
        for stage in range(len(self.emb)):
            self.emb[stage].weight.copy_(scaled)  # type: ignore[operator]
            self.head[stage].weight.copy_(ends.readout[ids])  # type: ignore[operator]

    def begin(self, features: Tensor) -> Tensor:
        states = self.target_norm(features)
        return F.rms_norm(states, states.shape[-1:], eps=_EPS) / math.sqrt(2) if self.config.scale_input else states

    def advance(self, depth: int, states: Tensor, tokens: Tensor) -> Tensor:
        x = self.proj[depth](states)
        return F.gelu(self.ln[depth](x + self.emb[depth](tokens).to(x.dtype) * self._mix))

    def readout(self, depth: int, state: Tensor) -> Tensor:
        return self.head[depth](state)


def _each(modules: list[nn.Module] | list[nn.Embedding] | list[nn.Linear] | list[ShiftedNorm], count: int) -> list[nn.Module]:
    """One module per stage; the last one stands for all that follow."""
    return [modules[min(stage, len(modules) - 1)] for stage in range(count)]


@final
class RedrafterHead(RecurrentHead):
    """One cell for all depths. The state is carried with the target's beside it."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        size, width = config.hidden_size, config.inner_size or 2 * config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.rnn_w = nn.Linear(size, size, bias=False)
        self.rnn_u = nn.Linear(size, size)
        self.input_proj = nn.Linear(2 * size, width) if width != 2 * size else None
        self.blocks = Blocks(width, config.num_blocks)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)

    def begin(self, features: Tensor) -> Tensor:
        states = self.target_norm(features)
        return torch.cat([states, torch.zeros_like(states)], -1)

    def advance(self, depth: int, states: Tensor, tokens: Tensor) -> Tensor:
        del depth
        context, cell = states.chunk(2, -1)
        cell = F.silu(self.rnn_w(self.embed_tokens(tokens).to(cell.dtype)) + self.rnn_u(cell))
        return torch.cat([context.to(cell.dtype), cell], -1)

    def readout(self, depth: int, state: Tensor) -> Tensor:
        del depth
        return self.lm_head(self.blocks(state if self.input_proj is None else self.input_proj(state)))
