"""Twins: nodes of one tree that stand for the same text, because sampled siblings may be equal.

Two nodes are twins when their paths spell the same tokens. Their contexts are the same, so a rule may pool their children,
and a drafter may keep one of them for all.

    twins(i, j)  iff  i = j,  or  token(i) = token(j) and twins(parent(i), parent(j))
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.tree import TokenTree


def first_twins(tree: TokenTree) -> Tensor:
    """[B, N] the lowest index among each node's twins, which is the node itself if it is the first. Padding is left
    unchanged."""
    tokens, parents, valid = tree.tokens, tree.parents, tree.valid
    nodes = torch.arange(tree.num_nodes, device=tokens.device)
    first = nodes.expand(tree.batch_size, -1).clone()
    for node in range(1, tree.num_nodes):  # parents come before their children, so their twins are known
        above = first.gather(1, parents[:, 1 : node + 1])  # of nodes 1 .. node
        same = (above == above[:, -1:]) & (tokens[:, 1 : node + 1] == tokens[:, node : node + 1]) & valid[:, 1 : node + 1]
        first[:, node] = torch.where(valid[:, node], same.int().argmax(1) + 1, node)
    return first
