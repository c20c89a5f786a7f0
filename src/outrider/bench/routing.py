"""Step-level routing (LOSSY): a draft writes a whole step, and a router decides whether the target writes it again.

A kept step is not verified by the target at all, so the text is a mixture of two models. What counts is how many answers are
right for how many steps that the target had to write. RSD (arXiv 2501.19324) asks a reward model about the draft's step.
Arbitrage (arXiv 2512.05033) asks whether the target's step would score higher, which is what matters. The oracle writes both
steps and looks; a coin is the other end.

    RSD:  again iff reward(step) <= t      Arbitrage:  again iff P(target scores higher | step) > t      oracle:  iff it does
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

Step = str
Writer = Callable[[Sequence[Step], random.Random], Step]
"""Writes the step after the given ones."""
Reward = Callable[[Sequence[Step], Step], float]
"""How good a step is after the given ones, 0 to 1."""


@dataclass(frozen=True, eq=False)
class Choice:
    """What a router may look at. ``again`` writes the target's step, which only the oracle can afford."""

    before: Sequence[Step]
    step: Step
    reward: Reward
    again: Callable[[], Step]
    chance: random.Random


class Router(ABC):
    """Decides about steps of a draft."""

    @abstractmethod
    def escalates(self, choice: Choice) -> bool:
        """Whether the target writes this step again."""


@final
@dataclass(frozen=True)
class Coin(Router):
    """Escalates at a rate, whatever the step."""

    rate: float

    def escalates(self, choice: Choice) -> bool:
        return choice.chance.random() < self.rate


@final
@dataclass(frozen=True)
class RewardThreshold(Router):
    """RSD: escalates steps that the reward model does not like."""

    threshold: float

    def escalates(self, choice: Choice) -> bool:
        return choice.reward(choice.before, choice.step) <= self.threshold


@final
@dataclass(frozen=True)
class Oracle(Router):
    """Escalates where the target's step does score higher, by more than ``margin``."""

    margin: float = 0.0

    def escalates(self, choice: Choice) -> bool:
        better = choice.reward(choice.before, choice.again())
        return better - choice.reward(choice.before, choice.step) > self.margin


Features = Callable[[Sequence[Step], Step, float], list[float]]
"""What a router sees of a step: the steps before it, the step, its reward."""


@final
@dataclass(frozen=True, eq=False)
class Advantage(Router):
    """Arbitrage: a logistic prediction that the target would do better."""

    features: Features
    weights: Sequence[float]
    threshold: float = 0.5

    def escalates(self, choice: Choice) -> bool:
        seen = self.features(choice.before, choice.step, choice.reward(choice.before, choice.step))
        return logistic(seen, self.weights) > self.threshold


def logistic(seen: Sequence[float], weights: Sequence[float]) -> float:
    """The last weight is the bias."""
    odds = sum(x * w for x, w in zip(seen, weights, strict=False)) + weights[-1]
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, odds))))


@dataclass(frozen=True, eq=False)
class Pair:
    """Two writers, and what is thought of their steps."""

    draft: Writer
    target: Writer
    reward: Reward
    num_steps: int


@dataclass(frozen=True, eq=False)
class Routed:
    """One text, and who wrote it."""

    steps: list[Step]
    escalated: list[bool]


def route(pair: Pair, router: Router, seed: int) -> Routed:
    """Write a text step by step."""
    chance, steps, escalated = random.Random(seed), list[Step](), list[bool]()
    for _ in range(pair.num_steps):
        step, later = pair.draft(steps, chance), random.Random(chance.random())
        again = random.Random(chance.random())
        rewritten = pair.target(steps, again)
        escalated.append(router.escalates(Choice(steps, step, pair.reward, lambda text=rewritten: text, later)))
        steps.append(rewritten if escalated[-1] else step)
    return Routed(steps, escalated)


def learn_advantage(pair: Pair, features: Features, *, num_texts: int, num_passes: int = 30) -> Advantage:
    """Both writers continue the draft's texts; the label is whether the target's step scored higher."""
    rows: list[tuple[list[float], bool]] = []
    for seed in range(num_texts):
        chance, steps = random.Random(f"learn {seed}"), list[Step]()
        for _ in range(pair.num_steps):
            step, other = pair.draft(steps, chance), pair.target(steps, chance)
            score = pair.reward(steps, step)
            rows.append((features(steps, step, score), pair.reward(steps, other) > score))
            steps.append(chance.choice((step, other)))
    return Advantage(features, _fit(rows, num_passes))


def _fit(rows: Sequence[tuple[list[float], bool]], num_passes: int) -> list[float]:
    """Logistic regression by plain gradient steps."""
    weights = [0.0] * (len(rows[0][0]) + 1)
    for turn in range(num_passes):
        for seen, better in rows:
            error = (float(better) - logistic(seen, weights)) * 0.1 / (1 + turn)
            weights = [w + error * x for w, x in zip(weights, [*seen, 1.0], strict=True)]
    return weights
