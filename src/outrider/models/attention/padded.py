"""The tree mask of models that are not ours: an additive 4-D mask over [right-padded cache | nodes].

Such a model appends the nodes of all rows after the longest row, so a shorter row has a gap of unused slots before its
nodes. Otherwise what a node sees is what it sees in ``sdpa``: its row's committed tokens, its ancestors and itself, and
with a sliding window only positions less than ``window`` back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.tree import TokenTree


def padded_bias(tree: TokenTree, lengths: Sequence[int], *, window: int | None, dtype: torch.dtype, start: int = 0) -> Tensor:
    """[B, 1, N - start, max(lengths) + N] for nodes ``start``..: 0 where seen, the lowest number of the type where not."""
    device = tree.tokens.device
    starts = torch.tensor(lengths, device=device)[:, None]
    slots = torch.arange(max(lengths), device=device).expand(tree.batch_size, -1)
    committed = (slots < starts)[:, None].expand(-1, tree.num_nodes, -1)
    seen = torch.cat((committed, tree.ancestors), -1)
    if window is not None:
        nodes = starts + tree.depths
        positions = torch.cat((slots, nodes), -1)
        seen = seen & (nodes[:, :, None] - positions[:, None] < window)
    seen = seen[:, None, start:]
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)
