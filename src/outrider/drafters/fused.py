"""Several drafters, one tree: what each of them guesses is fused by longest common prefix under one budget.

A retriever knows long copies, a draft model knows everything a little; their trees share a root, so they are merged like a
trie: equal beginnings are stored once, the rest is appended. The drafters are asked in the order of how often their guesses
have been right in this request, and each is given a share of the places that are left, so a drafter that finds nothing costs
none. (Quan et al. 2025, "RASD: Retrieval-Augmented Speculative Decoding", arXiv 2503.03434, for the fusion; the shares are
our own.)

    rate_i = (1 + accepted guesses of drafter i) / (2 + guesses of drafter i)               counted per request
    share_i = left * rate_i / (sum of the rates of i and those after it),  at least 1;  left <- left - new nodes of i

Guesses are chosen, not sampled: lossless under ``coupled`` and ``delta``. No inner guess is ever dropped, so every inner
drafter can be told what became of its own tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import CompositionError
from outrider.core.interfaces import Context, Drafter, Observation, Plan, RowState
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree


@dataclass
class _Tally:
    """How a drafter's guesses have done in one request."""

    accepted: int = 0
    guessed: int = 0

    @property
    def rate(self) -> float:
        return (1 + self.accepted) / (2 + self.guessed)


@dataclass
class _Round:
    """What was asked of one inner drafter, and where its nodes went."""

    draft: Draft
    plan: Plan
    places: list[list[int]]
    """Of each of its nodes in the fused tree, row by row."""


@dataclass
class FusedState(RowState):
    """The inner drafters' states, and how well each has done in every row."""

    inner: list[Any]
    tallies: list[list[_Tally]]
    """[row][drafter]"""
    rounds: list[_Round | None] = field(default_factory=list)

    def fork(self, rows: Sequence[int]) -> FusedState:
        tallies = [[_Tally(t.accepted, t.guessed) for t in self.tallies[row]] for row in rows]
        return FusedState([state.fork(rows) for state in self.inner], tallies)

    def join(self, other: FusedState) -> FusedState:
        inner = [mine.join(theirs) for mine, theirs in zip(self.inner, other.inner, strict=True)]
        return FusedState(inner, [*self.tallies, *other.tallies])


@final
class Fused(Drafter):
    """The union of several drafters' trees."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.TREE
    draws = Draws.DETERMINISTIC

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        for drafter in drafters:
            if drafter.draws is not Draws.DETERMINISTIC:
                name = type(drafter).__name__
                raise CompositionError(f"{name} guesses {drafter.draws.value}; only chosen guesses can be fused")
        self.drafters = tuple(drafters)
        self.taps = tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> FusedState:
        tallies = [[_Tally() for _ in self.drafters] for _ in rows]
        return FusedState([drafter.start(rows, taps) for drafter in self.drafters], tallies)

    def propose(self, state: FusedState, context: Context, plan: Plan) -> Draft:
        tries = [_Trie(root) for root in context.roots]
        state.rounds = [None] * len(self.drafters)
        waiting = self._order(state)
        while waiting:
            index = waiting[0]
            shares = [
                _share(budget - len(trie.tokens) + 1, [row[i].rate for i in waiting])
                for budget, trie, row in zip(plan.max_nodes, tries, state.tallies, strict=True)
            ]
            asked = Plan(tuple(d if n else 0 for d, n in zip(plan.max_depth, shares, strict=True)), tuple(shares), plan.stop)
            draft = self.drafters[index].propose(state.inner[index], context, asked)
            places = [trie.add(draft.tree, row) for row, trie in enumerate(tries)]
            state.rounds[index] = _Round(draft, asked, places)
            waiting = waiting[1:]
        rows = [trie.breadth_first() for trie in tries]
        for round_ in state.rounds:
            assert round_ is not None, "every drafter was asked"
            round_.places = [[row[2][place] for place in row_places] for row, row_places in zip(rows, round_.places)]
        return Draft(TokenTree.of_rows([(tokens, parents) for tokens, parents, _ in rows], context.device), self.draws)

    def observe(self, state: FusedState, observation: Observation) -> None:
        for index, (drafter, round_) in enumerate(zip(self.drafters, state.rounds, strict=True)):
            assert round_ is not None, "a round that was not proposed"
            seen = _own_view(observation, round_)
            for row, path in enumerate(seen.paths):
                state.tallies[row][index].accepted += len(path) - 1
                state.tallies[row][index].guessed += round_.draft.num_drafted[row]
            drafter.observe(state.inner[index], seen)
        state.rounds = []

    def finish(self, state: FusedState, row: int, tokens: Sequence[int]) -> None:
        for drafter, inner in zip(self.drafters, state.inner, strict=True):
            drafter.finish(inner, row, tokens)

    def _order(self, state: FusedState) -> list[int]:
        """Drafters by their mean rate in the batch, the best first: all rows are asked together."""
        means = [sum(row[i].rate for row in state.tallies) for i in range(len(self.drafters))]
        return sorted(range(len(self.drafters)), key=lambda index: -means[index])


def _share(left: int, rates: Sequence[float]) -> int:
    """Places for the first of the drafters that are still waiting."""
    if left <= 0:
        return 0
    return left if len(rates) == 1 else min(left, max(1, round(left * rates[0] / sum(rates))))


class _Trie:
    """One row's fused tree while it grows."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents = [root], [-1]
        self._below: list[dict[int, int]] = [{}]

    def add(self, tree: TokenTree, row: int) -> list[int]:
        """Insert a drafter's tree; returns the place of each of its nodes."""
        size = tree.sizes[row]
        tokens, parents = tree.tokens[row, :size].tolist(), tree.parents[row, :size].tolist()
        places = [0]
        for node in range(1, size):
            above = places[parents[node]]
            place = self._below[above].get(tokens[node])
            if place is None:
                place = len(self.tokens)
                self._below[above][tokens[node]] = place
                self._below.append({})
                self.tokens.append(tokens[node])
                self.parents.append(above)
            places.append(place)
        return places

    def breadth_first(self) -> tuple[list[int], list[int], list[int]]:
        """Tokens and parents in breadth-first order, and where every place went."""
        queue, moved = [0], [0] * len(self.tokens)
        for index, place in enumerate(queue):  # the queue grows while it is read
            moved[place] = index
            queue += self._below[place].values()
        parents = [moved[self.parents[place]] if place else -1 for place in queue]
        return [self.tokens[place] for place in queue], parents, moved


def _own_view(seen: Observation, round_: _Round) -> Observation:
    """The observation as if the inner drafter had been alone: its tree, the scores of its nodes, its part of the path."""
    num_nodes = round_.draft.tree.num_nodes
    index = [[*places, *[0] * (num_nodes - len(places))] for places in round_.places]
    nodes = torch.tensor(index, device=seen.scores.logits.device)[..., None]

    def own(values: Tensor) -> Tensor:
        return values.gather(1, nodes.expand(-1, -1, values.shape[2]))

    scores = Scores(own(seen.scores.logits), {tap: own(states) for tap, states in seen.scores.taps.items()})
    paths = []
    for path, places in zip(seen.paths, round_.places, strict=True):
        mine = {place: node for node, place in enumerate(places)}
        paths.append([mine[place] for place in path if place in mine])
    accepted = [len(path) - 1 for path in paths]
    return Observation(
        round_.draft, scores, paths, accepted, seen.draft_seconds, seen.score_seconds, round_.plan, seen.round_seconds
    )
