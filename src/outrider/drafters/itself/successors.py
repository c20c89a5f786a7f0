"""A memory of the target's likeliest tokens after each token, shared by all requests of a method.

The table outlives requests because what follows a token is much the same in all of them. The order of writes does not matter
for the text. Every write is deterministic all the same, for reproducible speed.

    successors[v] = ids of the k largest logits the target gave after token v, the largest first;  -1 while v is unknown
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from outrider.core.lasting_memory import LastingMemory


@final
class SuccessorTable(LastingMemory):
    """Top-k successors of every token, with their logits. Rows that were never written are empty."""

    def __init__(self, vocab_size: int, num_successors: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.num_successors = min(num_successors, vocab_size)
        shape = (vocab_size, self.num_successors)
        self.ids = torch.full(shape, -1, dtype=torch.int64, device=device)
        """[V, k] successors, the likeliest first; -1 in an empty row."""
        self.logits = torch.zeros(shape, device=device)
        """[V, k] the logits of these successors."""
        self.num_idle = 0
        """Number of rounds that did not read it."""

    @property
    def num_known(self) -> int:
        """Number of tokens with successors."""
        return int((self.ids[:, 0] >= 0).sum())

    def clear(self) -> None:
        """Forget everything."""
        self.ids.fill_(-1)
        self.logits.zero_()
        self.num_idle = 0

    @torch.inference_mode()
    def write(self, tokens: Tensor, logits: Tensor, *, order: Tensor | None = None) -> None:
        """Replace the rows of ``tokens`` [n] by the best of ``logits`` [n, V]. If a token occurs twice, its last row counts.
        ``order`` names the entries to write and their sequence, if it is not that of the arguments."""
        best = logits[:, : self.ids.shape[0]].topk(self.num_successors)
        ids, values = best.indices, best.values.to(self.logits.dtype)
        if order is not None:
            tokens, ids, values = tokens[order], ids[order], values[order]
        # A scatter with repeated indices may keep any of them, so every occurrence writes what the last one says.
        entries = torch.arange(len(tokens), device=tokens.device)
        last = entries.new_zeros(self.ids.shape[0]).scatter_reduce_(0, tokens, entries, "amax")[tokens]
        self.ids[tokens] = ids[last]
        self.logits[tokens] = values[last]
