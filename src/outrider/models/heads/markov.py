"""DSpark's two small heads: a low-rank bias from the previous token, and the probability that a position's guess is accepted.

    vanilla   m_k = W1[x_{k-1}]                                              bias_k = W2 m_k
    gated     m_k = sigmoid(G [h_k ; W1[x_{k-1}]]) * W1[x_{k-1}]
    rnn       [g ; c ; o] = J [s_{k-1} ; W1[x_{k-1}] ; h_k],   s_k = sigmoid(g) s_{k-1} + (1 - sigmoid(g)) tanh(c),
              m_k = tanh(o),   s_{-1} = 0

h_k is the backbone's state of place k after the final norm, x_{k-1} the token before the one it answers for.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from outrider.core.errors import ModelError, nearest

TYPES = ("vanilla", "gated", "rnn")


@final
class MarkovHead(nn.Module):
    """A bias of rank ``rank`` on a position's logits. Tensor names are those of public checkpoints."""

    def __init__(self, form: str, *, hidden_size: int, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        if form not in TYPES:
            raise ModelError(f"markov_head_type = {form!r} is not known; {nearest(form, TYPES)}")
        if rank < 1:
            raise ModelError(f"markov_rank = {rank} is not valid; use at least 1, or method 'dflash', which has no such head")
        self.form, self.rank = form, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)  # training begins with the backbone alone
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if form == "gated" else None
        self.joint_proj = nn.Linear(hidden_size + 2 * rank, 3 * rank) if form == "rnn" else None

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., r] W1 of the previous tokens."""
        return self.markov_w1(tokens).to(dtype)

    def mix(self, normed: Tensor, embedded: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """[..., r] the input of the bias, and the memory for the next position."""
        if self.gate_proj is not None:
            return torch.sigmoid(self.gate_proj(torch.cat([normed, embedded], -1))) * embedded, memory
        if self.joint_proj is None:
            return embedded, memory
        gate, new, out = self.joint_proj(torch.cat([memory, embedded, normed], -1)).chunk(3, -1)
        kept = torch.sigmoid(gate)
        return torch.tanh(out), kept * memory + (1 - kept) * torch.tanh(new)


@final
class ConfidenceHead(nn.Module):
    """Logit of the probability that a position's guess is accepted if those before it were."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)[..., 0]
