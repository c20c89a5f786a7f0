"""The two questions a scalar acceptance rule may ask of chance, and who answers them.

A rule written against ``RandomSource`` can be *run* (answers from ``NoiseSource``, the same numbers the vectorised rule uses).
It can also be *proved*: ``enumerate_law`` answers every question in every possible way and adds up the probabilities. So the
output law of the rule is computed exactly instead of being sampled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import cache
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from outrider.core.rng import Noise, Purpose

Outcome = TypeVar("Outcome", bound=Hashable)


class RandomSource(ABC):
    """Randomness as a rule sees it. ``lane`` names the number: two questions with the same lane get the same answer."""

    @abstractmethod
    def bernoulli(self, probability: float, lane: int) -> bool:
        """True with the given probability."""

    @abstractmethod
    def categorical(self, weights: Tensor, lane: int) -> int:
        """Index i with probability ``weights[i] / sum(weights)``."""

    @abstractmethod
    def target_choice(self, probs: Tensor, depth: int) -> int:
        """The target's own token after a node at ``depth``: a draw from ``probs`` that belongs to the output position."""


class NoiseSource(RandomSource):
    """Answers from row ``row`` of a round's noise. A lane's numbers never change, so each is computed once."""

    def __init__(self, noise: Noise, row: int = 0) -> None:
        own = Noise(noise.seeds[row : row + 1], noise.positions[row : row + 1])

        @cache
        def uniform(lane: int) -> float:
            return float(own.uniform(Purpose.ACCEPT, torch.tensor([[lane]])))

        @cache
        def race(lane: int, size: int) -> Tensor:
            return own.exponential(Purpose.RESIDUAL, torch.tensor([[lane]]), size)[0, 0]

        @cache
        def gumbel(depth: int, size: int) -> Tensor:
            return own.target_gumbel(torch.tensor([[depth]]), size)[0, 0]

        self._uniform, self._race, self._gumbel = uniform, race, gumbel

    def bernoulli(self, probability: float, lane: int) -> bool:
        return self._uniform(lane) < probability

    def categorical(self, weights: Tensor, lane: int) -> int:
        return int((weights.double() / self._race(lane, len(weights))).argmax())

    def target_choice(self, probs: Tensor, depth: int) -> int:
        return int((probs.log() + self._gumbel(depth, len(probs))).argmax())


class ReplaySource(RandomSource):
    """Follows a script of branch numbers. Past its end it takes the first possible branch and notes the alternatives.

    Each lane is one uniform number. An answer narrows the interval in which it can lie, and a repeated question is
    answered from the same number. So a rule that reuses a lane, or a drafter that reads the target's noise, is
    enumerated as it would run.
    """

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.weight = 1.0
        self.branches: list[list[float]] = []
        self.taken: list[int] = []
        self._known: dict[tuple[str, int], tuple[float, float]] = {}

    def _branch(self, probabilities: list[float]) -> int:
        depth = len(self.taken)
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        choice = self.script[depth] if depth < len(self.script) else possible[0]
        self.branches.append(probabilities)
        self.taken.append(choice)
        self.weight *= probabilities[choice]
        return choice

    def _cell(self, kind: str, lane: int, edges: list[float]) -> int:
        """Which of the cells between ``edges`` (rising from 0 to 1) the lane's number lies in."""
        low, high = self._known.get((kind, lane), (0.0, 1.0))
        if (low, high) != (0.0, 1.0):
            edges = [min(max(edge, low), high) for edge in edges]
        cells = list(pairwise(edges))
        choice = self._branch([(end - begin) / (high - low) for begin, end in cells])
        self._known[kind, lane] = cells[choice]
        return choice

    def bernoulli(self, probability: float, lane: int) -> bool:
        return self._cell("bernoulli", lane, [0.0, min(max(probability, 0.0), 1.0), 1.0]) == 0

    def categorical(self, weights: Tensor, lane: int) -> int:
        return self._cell("categorical", lane, _edges(weights))

    def target_choice(self, probs: Tensor, depth: int) -> int:
        return self._cell("target", depth, _edges(probs))


def _edges(weights: Tensor) -> list[float]:
    """0 and the running sums, scaled to end at 1. Dividing by the last sum gives a token of weight 0 no interval."""
    sums = list(accumulate(weights.tolist()))
    return [0.0, *(total / sums[-1] for total in sums)]


def enumerate_law(experiment: Callable[[RandomSource], Outcome]) -> dict[Outcome, float]:
    """The exact law of ``experiment``'s outcome: every branch runs once, weighted by its probability."""
    law: dict[Outcome, float] = {}
    scripts: list[list[int]] = [[]]
    while scripts:
        source = ReplaySource(scripts.pop())
        outcome = experiment(source)
        law[outcome] = law.get(outcome, 0.0) + source.weight
        for depth in range(len(source.script), len(source.taken)):
            for branch, probability in enumerate(source.branches[depth]):
                if probability > 0 and branch != source.taken[depth]:
                    scripts.append([*source.taken[:depth], branch])
    return law
