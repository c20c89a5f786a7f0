"""Laws of several drafters that take turns in one tree: q with one dimension more.

Where the children of a node come from S drafters by turns, ``Draft.q`` is [B, N, S, V] instead of [B, N, V]: all drafters' laws
after each node. Child number i, counted from 0 and with the rejected elder ones, was drawn from law i mod S.
"""

from __future__ import annotations

from torch import Tensor


def by_turn(q: Tensor) -> Tensor:
    """[B, N, S, V] the laws of a batch; S = 1 for one drafter."""
    return q[:, :, None] if q.dim() == 3 else q


def law_of_turn(q: Tensor, turn: int) -> Tensor:
    """[V] the law from which child number ``turn`` of a node was drawn, from that node's [V] or [S, V]."""
    return q if q.dim() == 1 else q[turn % q.shape[0]]


def laws_at(laws: Tensor, nodes: Tensor, turn: Tensor) -> Tensor:
    """[B, V] the law of the drafter whose turn it is after ``nodes`` [B], from [B, N, S, V]."""
    num_laws = laws.shape[2]
    index = (nodes * num_laws + turn % num_laws)[:, None, None].expand(-1, 1, laws.shape[3])
    return laws.flatten(1, 2).gather(1, index)[:, 0]
