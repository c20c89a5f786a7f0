"""Token trees: what a drafter proposes and the target scores in one pass.

A tree is flat arrays in breadth-first order. Node 0 is the root: the last committed token, whose key and value are not in
the cache yet, so that scoring the tree also scores the root. Every other node is a guess; ``parents[n] < n``. Siblings
stand in the order they were drawn. A batch holds B trees of different sizes, padded to N nodes; a chain is a tree.

    tokens   5 ── 7 ── 9          index    0 1 2 3 4
             │    └── 2           tokens   5 7 3 9 2
             └── 3                parents -1 0 0 1 1      depths 0 1 1 2 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from outrider.core.errors import DraftError

TreeRow = tuple[list[int], list[int]]
"""Tokens and parents of one tree, the root first."""


@dataclass(frozen=True, eq=False)
class TokenTree:
    """B token trees. Padding nodes (``n >= sizes[b]``) hang from the root and are never accepted."""

    tokens: Tensor
    """[B, N] token ids; column 0 is the last committed token of each row."""
    parents: Tensor
    """[B, N] index of the parent node, -1 for the root."""
    sizes: tuple[int, ...]
    """Number of real nodes of each row, the root included (at least 1; 0 in prefill for a row with nothing left)."""
    is_chain: bool = False
    """Every row is a chain: the mask is then lower triangular and a commit moves nothing."""

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        """N, the padded number of nodes."""
        return self.tokens.shape[1]

    @property
    def is_ragged(self) -> bool:
        """Some row has padding nodes."""
        return any(size != self.num_nodes for size in self.sizes)

    @cached_property
    def valid(self) -> Tensor:
        """[B, N] true for real nodes."""
        sizes = torch.tensor(self.sizes, device=self.tokens.device)
        return torch.arange(self.num_nodes, device=self.tokens.device) < sizes[:, None]

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, N, N] true where column j is an ancestor of row i, or i itself."""
        if self.is_chain:
            return _causal(self.num_nodes, self.tokens.device).expand(self.batch_size, -1, -1)
        return ancestors_of(self.parents)

    @cached_property
    def depths(self) -> Tensor:
        """[B, N] distance from the root."""
        if self.is_chain:
            return torch.arange(self.num_nodes, device=self.tokens.device).expand(self.batch_size, -1)
        return self.ancestors.sum(-1) - 1

    @cached_property
    def heights(self) -> list[int]:
        """Guesses along the longest path of each row."""
        if self.is_chain:
            return [size - 1 for size in self.sizes]
        return [_height(parents[:size]) for parents, size in zip(self.parents.tolist(), self.sizes, strict=True)]

    def path(self, row: int, node: int) -> list[int]:
        """Nodes from the root's child down to ``node``; empty for the root."""
        parents = self.parents[row].tolist()
        path: list[int] = []
        while node > 0:
            path.append(node)
            node = parents[node]
        return path[::-1]

    def check(self, vocab_size: int, who: str) -> None:
        """Refuse a token outside the vocabulary and a node that comes before its parent. Fast passes use both as memory
        addresses."""
        rows = self.tokens.tolist()  # lists are the cheapest way to look at a few numbers
        low, high = min(map(min, rows)), max(map(max, rows))
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise DraftError(f"{who} guessed token {bad}, and the vocabulary is 0 to {vocab_size - 1}; check its tokenizer")
        if not self.is_chain and any(p >= node for row in self.parents.tolist() for node, p in enumerate(row)):
            raise DraftError(f"{who} proposed a tree with a node before its parent; order nodes so that parents come first")

    def to(self, device: torch.device) -> TokenTree:
        return TokenTree(self.tokens.to(device), self.parents.to(device), self.sizes, self.is_chain)

    @staticmethod
    def chain(tokens: Tensor, sizes: Sequence[int] | None = None) -> TokenTree:
        """B chains from [B, N] tokens, root first."""
        batch_size, num_nodes = tokens.shape
        parents = _chain_parents(num_nodes, tokens.device).expand(batch_size, -1)
        return TokenTree(tokens, parents, tuple(sizes or [num_nodes] * batch_size), is_chain=True)

    @staticmethod
    def of_rows(rows: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device | str = "cpu") -> TokenTree:
        """A batch from per-row ``(tokens, parents)`` lists of different lengths."""
        num_nodes = max(len(tokens) for tokens, _ in rows)
        tokens = [[*row, *[0] * (num_nodes - len(row))] for row, _ in rows]
        parents = [[*row, *[0] * (num_nodes - len(row))] for _, row in rows]
        is_chain = all(list(row) == list(range(-1, len(row) - 1)) for _, row in rows)
        if is_chain:
            return TokenTree.chain(torch.tensor(tokens, device=device), [len(row) for row, _ in rows])
        sizes = tuple(len(row) for row, _ in rows)
        return TokenTree(torch.tensor(tokens, device=device), torch.tensor(parents, device=device), sizes)


def _height(parents: Sequence[int]) -> int:
    """Longest distance from the root, which is the first node. Every round asks for it, so it needs no matrix products."""
    depths = list[int]()
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return max(depths, default=0)


@lru_cache(maxsize=64)
def _chain_parents(num_nodes: int, device: torch.device) -> Tensor:
    return torch.arange(-1, num_nodes - 1, device=device)


@lru_cache(maxsize=64)
def _causal(num_nodes: int, device: torch.device) -> Tensor:
    return torch.ones(1, num_nodes, num_nodes, dtype=torch.bool, device=device).tril()


def ancestors_of(parents: Tensor) -> Tensor:
    """Ancestor-or-self mask of [B, N] parents, by doubling the reach: log2(depth) small matrix products."""
    batch_size, num_nodes = parents.shape
    step = torch.zeros(batch_size, num_nodes, num_nodes, device=parents.device)
    step.scatter_(2, parents.clamp(min=0).unsqueeze(-1), (parents >= 0).to(step.dtype).unsqueeze(-1))
    reach = step + torch.eye(num_nodes, device=parents.device)
    span = 1
    while span < num_nodes:
        reach = (reach @ reach).clamp(max=1)
        span *= 2
    return reach > 0
