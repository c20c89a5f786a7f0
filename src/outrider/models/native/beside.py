"""Pieces of prompts as further rows of a pass, behind the rows whose trees it scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.core.reading_target import PromptPiece
from outrider.core.tree import TokenTree


def with_pieces(tree: TokenTree, pieces: Sequence[PromptPiece]) -> TokenTree:
    """The trees, and every row of the pieces as a chain."""
    rows = [row for piece in pieces for row in piece.rows]
    sizes = (*tree.sizes, *map(len, rows))
    width = max(tree.num_nodes, *sizes)
    tokens = torch.zeros(len(sizes), width, dtype=torch.int64)
    tokens[: tree.batch_size, : tree.num_nodes] = tree.tokens
    for place, row in enumerate(rows, tree.batch_size):
        tokens[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
    chains = TokenTree.chain(tokens, sizes)
    if tree.is_chain:
        return chains
    parents = chains.parents.clone()
    parents[: tree.batch_size, : tree.num_nodes] = tree.parents
    return TokenTree(tokens, parents, sizes)


def hand_out(tapped: Mapping[int, Tensor], first: int, pieces: Sequence[PromptPiece]) -> None:
    """Give each piece its states, of what the rows from ``first`` on left at all tapped layers."""
    for piece in pieces:
        rows = list(enumerate(piece.rows, first))
        piece.states = {tap: [tapped[tap][place, : len(row)].clone() for place, row in rows] for tap in piece.taps}
        first += len(rows)
