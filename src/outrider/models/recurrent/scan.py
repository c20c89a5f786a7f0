"""The tree scan: every node of a tree reads the state that the path to it leads to, and no node's state is stored.

With S_0 the state before the log, a the log decays, and s_i the sum of a over the log and node i's ancestors (i included):

    y_i = exp(s_i) S_0 q_i + sum_j exp(s_i - s_j) (k_j . q_i) w_j          j: tokens of the log, ancestors of i, and i

This is attention without a softmax, under the mask of the tree (STree, Wu et al. 2025, arXiv 2505.14969). The delta rule writes
only the part of a value that its state does not hold yet. So its values u_i depend on those of the ancestors, through a
triangular system that the tree's mask makes sparse (Yang et al. 2024, arXiv 2412.06464, for chains):

    u_i = b_i (v_i - exp(s_i) S_0 k_i - sum_j exp(s_i - s_j) (k_j . k_i) u_j)          j: as above, without i itself

Sums of decays are kept in float64. One token at a time gives the same numbers (``tests/unit/recurrence.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.cache.replay import Steps, wide
from outrider.core.tree import TokenTree


@dataclass(frozen=True, eq=False)
class Reach:
    """The columns (log, then nodes) that each node of a pass sees. All layers share it."""

    num_nodes: int
    """New nodes, which are the last ones."""
    ancestors: Tensor | None
    """[B, all nodes, all nodes] ones at a node's ancestors and itself; None on a chain."""
    bias: Tensor | None
    """[1 or B, 1, N, T] 0 where a column is seen, -inf where not; None for one node that sees everything."""

    @staticmethod
    def of(tree: TokenTree, num_logged: int, start: int) -> Reach:
        """The scan of nodes ``start``.. after ``num_logged`` columns of the log."""
        dtype, num_new = wide(tree.tokens.device), tree.num_nodes - start
        if tree.is_chain and num_new == 1:
            return Reach(1, None, None)
        seen = tree.ancestors[:1] if tree.is_chain else tree.ancestors
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, start:]
        bias = torch.nn.functional.pad(bias, (num_logged, 0))[:, None]
        return Reach(num_new, None if tree.is_chain else seen.to(dtype), bias)

    def totals(self, decays: Tensor) -> Tensor:
        """[B, heads, T] sums of the log decays [B, T, heads] on the way to each column."""
        decays = decays.to(wide(decays.device))
        if self.ancestors is None:
            return decays.cumsum(1).transpose(1, 2)
        num_logged = decays.shape[1] - self.ancestors.shape[1]
        log = decays[:, :num_logged].cumsum(1)
        nodes = self.ancestors @ decays[:, num_logged:]
        return torch.cat((log, nodes + log[:, -1:] if num_logged else nodes), 1).transpose(1, 2)


class Fading:
    """The decay from every column to every node of a pass, in one layer."""

    def __init__(self, reach: Reach, decays: Tensor) -> None:
        totals, dtype = reach.totals(decays), decays.dtype
        at_nodes = totals[:, :, -reach.num_nodes :]
        between = at_nodes[..., None] - totals[:, :, None]
        if reach.bias is not None:
            between = between + reach.bias
        self.of_columns = between.to(dtype).exp()
        """[B, heads, N, T] zero where a column is not seen."""
        self.of_state = at_nodes.to(dtype).exp()
        """[B, heads, N]"""


def read(vectors: Tensor, state: Tensor, steps: Steps, fading: Fading) -> Tensor:
    """[B, heads, N, P] what the nodes read with vectors [B, groups, N, K] from the state and from their columns."""
    num_heads = state.shape[1]
    scores = _per_head(vectors @ steps.keys.permute(0, 2, 3, 1), num_heads) * fading.of_columns
    return scores @ steps.values.transpose(1, 2) + _read_state(vectors, state) * fading.of_state[..., None]


def _read_state(vectors: Tensor, state: Tensor) -> Tensor:
    """[B, heads, N, P] S v for each node's vector."""
    batch_size, num_groups, num_nodes, _ = vectors.shape
    num_heads, head_dim = state.shape[1:3]
    of_group = state.reshape(batch_size, num_groups, -1, state.shape[3])
    found = (vectors @ of_group.transpose(2, 3)).view(batch_size, num_groups, num_nodes, -1, head_dim)
    return found.transpose(2, 3).reshape(batch_size, num_heads, num_nodes, head_dim)


def _per_head(scores: Tensor, num_heads: int) -> Tensor:
    """[B, heads, ...] of what heads of one group share."""
    return scores if scores.shape[1] == num_heads else scores.repeat_interleave(num_heads // scores.shape[1], 1)


@dataclass(frozen=True, eq=False)
class DeltaNodes:
    """Inputs of the delta rule for N new nodes."""

    keys: Tensor
    """[B, groups, N, K] of length 1."""
    values: Tensor
    """[B, heads, N, P] to be stored under the keys."""
    rates: Tensor
    """[B, heads, N] how far the state moves towards them, 0 to 1."""


def corrections(nodes: DeltaNodes, state: Tensor, before: Steps, fading: Fading) -> Tensor:
    """[B, heads, N, P] what the nodes add to the state; ``before`` are the steps of the columns before them."""
    num_heads, num_new = nodes.values.shape[1:3]
    num_before = before.decays.shape[1]
    of_log, of_nodes = fading.of_columns[..., :num_before], fading.of_columns[..., num_before:]
    scores = _per_head(nodes.keys @ before.keys.permute(0, 2, 3, 1), num_heads) * of_log
    known = scores @ before.values.transpose(1, 2) + _read_state(nodes.keys, state) * fading.of_state[..., None]
    wanted = (nodes.values - known) * nodes.rates[..., None]
    if num_new == 1:
        return wanted
    overlap = _per_head(nodes.keys @ nodes.keys.transpose(2, 3), num_heads) * of_nodes
    return torch.linalg.solve_triangular(overlap * nodes.rates[..., None], wanted, upper=False, unitriangular=True)
