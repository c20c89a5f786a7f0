"""The short convolution before a recurrence, along the ancestors of each node.

A token's channels are mixed with those of the tokens just before it. In a tree these are the node's ancestors, and above the
root the newest committed tokens. On a chain the windows are slices; on a tree they are gathered.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.tree import TokenTree


def windows_of(tree: TokenTree, *, conv_len: int, num_before: int, start: int) -> Tensor | None:
    """[B, N, W] columns of the window of nodes ``start``.., the oldest first; None on a chain. Columns begin ``num_before``
    tokens before the first node."""
    if tree.is_chain:
        return None
    column = torch.arange(start, tree.num_nodes, device=tree.tokens.device).expand(tree.batch_size, -1)
    columns = [column]
    for _ in range(conv_len - 1):
        above = tree.parents.gather(1, column.clamp(min=0))
        column = torch.where(column >= 0, above, column - 1)
        columns.append(column)
    return torch.stack(columns[::-1], -1) + num_before


class Convolution:
    """One filter per channel, and SiLU after it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """``weight`` [C, W], the newest token last."""
        self._weight, self._bias = weight, bias

    def __call__(self, inputs: Tensor, num_nodes: int, windows: Tensor | None) -> Tensor:
        """[B, N, C] for the last N columns of [B, columns, C]; ``windows`` says where they look, None: straight back."""
        conv_len = self._weight.shape[1]
        if windows is None:
            seen = inputs[:, inputs.shape[1] - num_nodes - conv_len + 1 :].unfold(1, conv_len, 1)
        else:
            rows = torch.arange(inputs.shape[0], device=inputs.device)[:, None, None]
            seen = inputs[rows, windows].transpose(2, 3)
        mixed = (seen * self._weight).sum(-1)
        return F.silu(mixed if self._bias is None else mixed + self._bias)
