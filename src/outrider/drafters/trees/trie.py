"""A trie of guesses below a root, and two ways to fill it from "what may come next, and how likely".

Equal prefixes share their nodes, so the guesses of several sources are merged where they agree. A source is a function from a
place to its continuations (token, probability, next place), best first. Always following the first gives a chain. Always adding
the most probable open node gives the tree of a given size with the largest sum of path probabilities. That sum is the expected
number of accepted guesses if the source is right.

    prob(node) = prob(parent) * P(token | parent),    score = sum of prob over the nodes
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

from outrider.core.tree import TokenTree

Place = TypeVar("Place")
Continuations = Sequence[tuple[int, float, Place]]

Row = tuple[list[int], list[int]]
"""Tokens and parents of one row, the root first, as ``TokenTree.of_rows`` takes them."""


@dataclass(frozen=True)
class Limits:
    """Limits of the guesses."""

    max_depth: int
    max_nodes: int
    min_prob: float = 0.0
    """Least probability of a guess's path."""

    def within(self, budget: int) -> Limits:
        """These limits, with at most ``budget`` nodes."""
        return Limits(self.max_depth, min(self.max_nodes, budget), self.min_prob)


@final
class Trie:
    """One row's growing tree. Node 0 is the root; a parent precedes its children."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self.chances = [1.0]
        """Probability that the text passes through each node, where known."""
        self._child: dict[tuple[int, int], int] = {}

    @property
    def num_guesses(self) -> int:
        return len(self.tokens) - 1

    @property
    def score(self) -> float:
        """Expected number of accepted guesses."""
        return sum(self.chances[1:])

    def add(self, token: int, parent: int, chance: float = 0.0) -> int:
        """The node of ``token`` below ``parent``, added if missing. Of two probabilities, the larger one counts."""
        node = self._child.setdefault((parent, token), len(self.tokens))
        if node < len(self.tokens):
            self.chances[node] = max(self.chances[node], chance)
            return node
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.chances.append(chance)
        return node

    def add_tree(self, tree: TokenTree, row: int, chances: Sequence[float] | None = None) -> list[int]:
        """Insert a row of a batch of trees; returns the node here of each of its nodes."""
        size = tree.sizes[row]
        tokens, parents = tree.tokens[row, :size].tolist(), tree.parents[row, :size].tolist()
        nodes = [0]
        for index in range(1, size):
            nodes.append(self.add(tokens[index], nodes[parents[index]], chances[index] if chances is not None else 0.0))
        return nodes

    def add_path(self, path: Sequence[int], limits: Limits) -> list[int]:
        """Add as much of the path as the limits allow; returns its nodes."""
        nodes: list[int] = self.find(path[: limits.max_depth])
        for token in path[len(nodes) : limits.max_depth]:
            if self.num_guesses >= limits.max_nodes:
                break
            nodes.append(self.add(token, nodes[-1] if nodes else 0))
        return nodes

    def find(self, path: Sequence[int]) -> list[int]:
        """Nodes of the longest prefix of the path that is in the trie."""
        node, nodes = 0, list[int]()
        for token in path:
            child = self._child.get((node, token))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def fits(self, path: Sequence[int], limits: Limits) -> bool:
        """Whether the whole path can be added."""
        num_new = len(path) - len(self.find(path))
        return len(path) <= limits.max_depth and self.num_guesses + num_new <= limits.max_nodes

    def likeliest(self, limits: Limits) -> list[int]:
        """The likeliest guesses. Among equals, the shallower, then the older one comes first. Parents are at least as
        likely."""
        found = (node for node in range(1, len(self.tokens)) if self.depths[node] <= limits.max_depth)
        return sorted(found, key=lambda node: (-self.chances[node], self.depths[node], node))[: limits.max_nodes]

    def breadth_first(self, kept: Iterable[int] | None = None) -> list[int]:
        """The root and the ``kept`` guesses (default: all) level by level. Siblings are in order of insertion."""
        below: list[list[int]] = [[] for _ in self.tokens]
        for node in range(1, len(self.tokens)) if kept is None else sorted(kept):
            below[self.parents[node]].append(node)
        order = [0]
        for node in order:  # it grows while it is read
            order += below[node]
        return order

    def row(self, order: Sequence[int] | None = None) -> Row:
        """Tokens and parents of the nodes in ``order``, which is breadth-first."""
        order = self.breadth_first() if order is None else order
        place = {node: index for index, node in enumerate(order)}
        return [self.tokens[node] for node in order], [-1, *(place[self.parents[node]] for node in order[1:])]


def follow(trie: Trie, place: Place, continuations: Callable[[Place], Continuations[Place]], *, limits: Limits) -> Trie:
    """Add the chain of best continuations below the root; returns the trie."""
    node, prob = 0, 1.0
    for _ in range(min(limits.max_depth, limits.max_nodes)):
        found = continuations(place)
        if not found:
            break
        token, chance, place = found[0]
        prob *= chance
        if prob < limits.min_prob:
            break
        node = trie.add(token, node, prob)
    return trie


def best_first(trie: Trie, place: Place, continuations: Callable[[Place], Continuations[Place]], *, limits: Limits) -> Trie:
    """Add the ``max_nodes`` most probable paths below the root; returns the trie."""
    if limits.max_nodes < 1 or limits.max_depth < 1:
        return trie
    # (-probability, order of discovery, parent, depth, token, place): the order keeps places from being compared.
    heap: list[tuple[float, int, int, int, int, Place]] = []
    order, node, depth, prob, num_added = 0, 0, 0, 1.0, 0
    while True:
        if depth < limits.max_depth:
            for token, chance, after in continuations(place):
                if prob * chance >= limits.min_prob:
                    heapq.heappush(heap, (-prob * chance, order, node, depth + 1, token, after))
                    order += 1
        if not heap or num_added >= limits.max_nodes:
            return trie
        prob, _, above, depth, token, place = heapq.heappop(heap)
        prob = -prob
        node = trie.add(token, above, prob)
        num_added += 1
