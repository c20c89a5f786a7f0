"""From "what may come next, and how likely" to a draft: the most likely path, or the most likely tree.

A source of guesses is a function from a place to its continuations (token, probability, place after it), best first.
Following the first one each time gives a chain; taking the most probable open node each time gives the tree of a given
size with the largest sum of path probabilities, which is the expected number of accepted guesses if the source is right.

    prob(node) = prob(parent) * P(token | parent),    score = sum of prob over the nodes
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Place = TypeVar("Place")
Continuations = Sequence[tuple[int, float, Place]]

Row = tuple[list[int], list[int]]
"""Tokens and parents of one row, the root first: what ``TokenTree.of_rows`` takes."""


@dataclass(frozen=True)
class Limits:
    """How far guesses may go."""

    max_depth: int
    max_nodes: int
    min_prob: float = 0.0
    """Guesses whose path is less likely than this are not made."""

    def within(self, budget: int) -> Limits:
        """The same for at most ``budget`` nodes."""
        return Limits(self.max_depth, min(self.max_nodes, budget), self.min_prob)


@dataclass
class Growth:
    """Guesses below a root that is not among them."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """Index of each guess's parent, -1 for children of the root; a parent stands before its children."""
    score: float = 0.0

    def add(self, token: int, parent: int, prob: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.score += prob
        return len(self.tokens) - 1

    def row(self, root: int) -> Row:
        """The tree in breadth-first order below ``root``; siblings keep their order."""
        below: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node, parent in enumerate(self.parents):
            below[parent].append(node)  # the root's children go to the last place, index -1
        tokens, parents, queue = [root], [-1], [-1]
        for index, node in enumerate(queue):  # the queue grows while it is read: that is the breadth-first order
            for child in below[node]:
                tokens.append(self.tokens[child])
                parents.append(index)
                queue.append(child)
        return tokens, parents


def follow(place: Place, continuations: Callable[[Place], Continuations[Place]], *, limits: Limits) -> Growth:
    """The chain of best continuations."""
    grown, prob = Growth(), 1.0
    for depth in range(min(limits.max_depth, limits.max_nodes)):
        found = continuations(place)
        if not found:
            break
        token, chance, place = found[0]
        prob *= chance
        if prob < limits.min_prob:
            break
        grown.add(token, depth - 1, prob)
    return grown


def best_first(place: Place, continuations: Callable[[Place], Continuations[Place]], *, limits: Limits) -> Growth:
    """The tree of the ``max_nodes`` most probable paths."""
    grown, order = Growth(), 0
    if limits.max_nodes < 1 or limits.max_depth < 1:
        return grown
    # (-probability, order of discovery, parent, depth, token, place): the order keeps places from being compared.
    heap: list[tuple[float, int, int, int, int, Place]] = []
    parent, depth, prob = -1, 0, 1.0
    while True:
        if depth < limits.max_depth:
            for token, chance, after in continuations(place):
                if prob * chance >= limits.min_prob:
                    heapq.heappush(heap, (-prob * chance, order, parent, depth + 1, token, after))
                    order += 1
        if not heap or len(grown.tokens) >= limits.max_nodes:
            return grown
        prob, _, above, depth, token, place = heapq.heappop(heap)
        prob = -prob
        parent = grown.add(token, above, prob)
