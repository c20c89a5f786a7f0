"""The target's log-probability of each prompt token. Prompts are scored in pieces between rounds, so that nobody waits for a
long one.

log p(x_i | x_1 .. x_{i-1}),  i >= 2;   nothing comes before the first token, so it has none
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from outrider.core.interfaces import Target
from outrider.core.request import TokenLogprob
from outrider.core.tree import TokenTree

PIECE = 128
"""Tokens that are scored in one pass."""


@dataclass(frozen=True)
class PromptToken:
    """A prompt token with its log-probability and the likeliest alternatives."""

    token: int
    scored: TokenLogprob | None
    """The score; None for the first token."""
    rank: int = 0
    """Rank by probability; 1 for the most probable token."""


@final
class PromptScores:
    """Scores one prompt."""

    def __init__(self, target: Target, token_ids: Sequence[int], num_top: int) -> None:
        self._target, self._ids, self._num_top = target, list(token_ids), num_top
        self._cache = target.new_cache(1)
        self._num_read = 0
        self.entries: list[PromptToken] = [PromptToken(self._ids[0], None)]

    @property
    def is_done(self) -> bool:
        return len(self.entries) == len(self._ids)

    @torch.inference_mode()
    def advance(self) -> None:
        """Score the next few tokens."""
        piece = self._ids[self._num_read : min(self._num_read + PIECE, len(self._ids) - 1)]
        if not piece:
            return
        tree = TokenTree.chain(torch.tensor([piece], device=self._target.device))
        logits = self._target.score(tree, self._cache).logits[0, :, : self._target.vocab_size]
        self._cache.commit([list(range(len(piece)))])
        self._num_read += len(piece)
        log_probs = logits.float().log_softmax(-1)
        top = log_probs.topk(self._num_top, -1) if self._num_top else None
        for row in range(len(piece)):
            token = self._ids[len(self.entries)]
            own = log_probs[row, token]
            best = () if top is None else tuple(zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True))
            rank = int((log_probs[row] > own).sum()) + 1
            self.entries.append(PromptToken(token, TokenLogprob(token, float(own), best), rank))
