"""Penalties for tokens that came before: repetition, presence and frequency, at every node of a tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.request import RequestState
from outrider.core.tempering import Counted
from outrider.core.tree import TokenTree


def is_penalised(row: RequestState) -> bool:
    params = row.params
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


class Penalties:
    """Token counts of each row, updated as it grows, and the penalties at every node."""

    def __init__(self, rows: Sequence[RequestState], vocab_size: int, device: torch.device) -> None:
        self.rows = rows
        of_rows = [row.params for row in rows]
        penalties = torch.tensor(
            [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in of_rows], device=device
        )
        in_prompt = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
        for i, row in enumerate(rows):
            in_prompt[i, list(row.request.prompt_ids)] = True
        self._counted = Counted(penalties, torch.zeros(len(rows), vocab_size, device=device), in_prompt)
        self._num_counted = [len(row.request.prompt_ids) for row in rows]

    def counted(self) -> Counted:
        """The current token counts. They are updated in place."""
        in_output = self._counted.in_output
        for i, row in enumerate(self.rows):
            new = torch.tensor(row.tokens[self._num_counted[i] :], dtype=torch.int64, device=in_output.device)
            in_output[i].scatter_add_(0, new, torch.ones_like(new, dtype=in_output.dtype))
            self._num_counted[i] = len(row.tokens)
        return self._counted

    def apply(self, logits: Tensor, tree: TokenTree, start: int) -> Tensor:
        """[B, M, V] the logits after nodes ``start``.., penalised for the tokens on each node's path and in its row's
        text."""
        counted = self.counted()
        repetition, presence, frequency = counted.penalties.T[:, :, None, None]
        counts = counted.in_output[:, None].expand_as(logits).clone()
        on_path = tree.ancestors[:, start:, 1:].to(counts.dtype)  # the root is committed, so it is counted already
        tokens = tree.tokens[:, None, 1:].expand_as(on_path)
        counts.scatter_add_(2, tokens, on_path)
        seen = (counts > 0) | counted.in_prompt[:, None]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        return logits - frequency * counts - presence * (counts > 0)
