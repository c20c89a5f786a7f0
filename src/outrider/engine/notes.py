"""Notes of captured rounds, which the host reads one round late: choices and their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.device_sampling import MOST_LOGPROBS
from outrider.core.request import TokenLogprob
from outrider.device.acceptance.coupled import NOTE, RING


@dataclass(frozen=True, eq=False)
class Notes:
    """Results of the latest rounds, on the device and on the host."""

    rounds: Tensor
    """[B] int64 rounds each slot has taken."""
    ring: Tensor
    """[RING, B, NOTE + D + 1] int64: emitted, guessed, agreed, rejected, the choices."""
    host: Tensor
    """Copy of the ring in pinned memory, which the graph writes."""


@dataclass(frozen=True, eq=False)
class NotedLogprobs:
    """Log-probabilities of the last rounds' choices under the raw logits, and the best alternatives."""

    ring: Tensor
    """[RING, B, D + 1, 1 + 2 * MOST_LOGPROBS] float32: of the choice, then the best ones, then their tokens."""
    host: Tensor

    @staticmethod
    def empty(notes: Tensor) -> NotedLogprobs:
        """Empty notes for the rounds of a ring."""
        shape = (*notes.shape[:2], notes.shape[2] - NOTE, 1 + 2 * MOST_LOGPROBS)
        return NotedLogprobs(torch.zeros(shape, device=notes.device), torch.zeros(shape, pin_memory=True))

    def note(self, logits: Tensor, path: Tensor, notes: Notes) -> None:
        """``logits`` [B, N, V] of the nodes, of which ``path`` was followed in the round that was noted last."""
        steps = torch.arange(path.shape[1] - 1, device=path.device)
        followed = torch.cat([torch.zeros_like(path[:, :1]), path[:, 2:]], 1)
        followed = torch.where(steps <= path[:, 1:2], followed, 0)  # the others are of no round
        said = logits.gather(1, followed[..., None].expand(-1, -1, logits.shape[2])).log_softmax(-1)
        slot = (notes.rounds[:1] - 1) % RING
        choices = notes.ring.index_select(0, slot)[0, :, NOTE:]
        best = said.topk(MOST_LOGPROBS, -1)
        parts = (said.gather(2, choices[..., None]), best.values, best.indices.to(said.dtype))
        self.ring.index_copy_(0, slot, torch.cat(parts, -1)[None])
        self.host.copy_(self.ring, non_blocking=True)

    def of(self, number: int, slot: int, place: int, *, count: int, token: int) -> TokenLogprob:
        """The log-probabilities that round ``number`` noted for the token at ``place`` of a slot's choices."""
        chosen, *rest = self.host[number % RING, slot, place].tolist()
        best, tokens = rest[:count], [int(token) for token in rest[MOST_LOGPROBS : MOST_LOGPROBS + count]]
        return TokenLogprob(token, chosen, tuple(zip(tokens, best, strict=True)))
