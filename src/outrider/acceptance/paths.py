"""From "this node is entered when its parent is reached" to the accepted path, for a whole batch without a loop.

A node is reached when it and all its ancestors are entered; the walk ends at the deepest reached node, the lowest index
where several are equally deep (duplicate siblings). On a chain that is the length of the first run of entered nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.interfaces import RowDraft
from outrider.core.tree import TokenTree
from outrider.core.verdict import Verdict


def path_of(row: RowDraft, node: int) -> tuple[int, ...]:
    """Nodes from the root's child down to ``node``; empty for the root."""
    return (*path_of(row, row.parents[node]), node) if node > 0 else ()


def row_at(values: Tensor, nodes: Tensor) -> Tensor:
    """[B, V] row ``nodes[b]`` of ``values[b]``, from [B, N, V] and [B]."""
    return values.gather(1, nodes[:, None, None].expand(-1, 1, values.shape[2]))[:, 0]


def guess_lanes(tree: TokenTree) -> Tensor:
    """[B, N - 1] every guess's own node index: the lane of its acceptance test."""
    return torch.arange(1, tree.num_nodes, device=tree.tokens.device).expand(tree.batch_size, -1)


def last_nodes(tree: TokenTree) -> Tensor:
    """[B] index of each row's last real node."""
    if tree.is_ragged:
        return tree.valid.sum(1) - 1
    return torch.full((tree.batch_size,), tree.num_nodes - 1, device=tree.tokens.device)


def first_run(tree: TokenTree, entered: Tensor) -> Tensor:
    """[B] how many guesses of each chain are entered before the first that is not; ``entered`` is [B, N - 1]."""
    if tree.is_ragged:
        entered = entered & tree.valid[:, 1:]
    return entered.cumprod(1).sum(1)


def chain_verdict(tree: TokenTree, num_accepted: Tensor, next_token: Tensor) -> Verdict:
    return Verdict(guess_lanes(tree), num_accepted, next_token, num_accepted < last_nodes(tree))


def deepest(tree: TokenTree, entered: Tensor) -> Tensor:
    """[B] the node where each walk ends. ``entered`` [B, N - 1] has an entry for each guess; the root is always reached."""
    if tree.is_ragged:
        entered = entered & tree.valid[:, 1:]
    lost = (tree.ancestors[:, :, 1:] & ~entered[:, None]).any(-1)
    return (tree.depths * ~lost).argmax(1)


def tree_verdict(tree: TokenTree, nodes: Tensor, next_token: Tensor) -> Verdict:
    """The verdict of walks that end at ``nodes`` [B]. A parent comes before its child, so a path is in index order."""
    on_path = row_at(tree.ancestors, nodes)[:, 1:]
    path = torch.argsort(~on_path, dim=1, stable=True) + 1
    return Verdict(path, on_path.sum(1), next_token, children_of(tree, nodes).any(1))


def children_of(tree: TokenTree, nodes: Tensor) -> Tensor:
    """[B, N] true for the guesses made at ``nodes`` [B]."""
    children = tree.parents == nodes[:, None]
    return children & tree.valid if tree.is_ragged else children
