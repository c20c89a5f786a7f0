"""Routers. RSD (arXiv 2501.19324) asks a reward model about the draft's step. Arbitrage (arXiv 2512.05033) predicts whether the
target's step would score higher. The oracle writes both steps and compares them, which is the upper bound. A coin is the
baseline.

    RSD:  again iff reward(step) <= t      Arbitrage:  again iff P(target scores higher | step) > t      oracle:  iff it does
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import final

from outrider.routing.steps import Reward, Router, Turn


@final
@dataclass(frozen=True)
class Coin(Router):
    """Escalates steps at random, at a fixed rate."""

    rate: float

    def escalates(self, turn: Turn) -> list[bool]:
        return [random.Random(f"coin {seed}").random() < self.rate for seed in turn.seeds]


@final
@dataclass(frozen=True, eq=False)
class RewardThreshold(Router):
    """RSD: escalates steps with a low reward."""

    reward: Reward
    threshold: float

    def escalates(self, turn: Turn) -> list[bool]:
        return [score <= self.threshold for score in self.reward.score(turn.texts, turn.steps)]


@final
@dataclass(frozen=True, eq=False)
class Oracle(Router):
    """Escalates a step if the target's step scores higher, by more than ``margin``. The target writes every step, so this saves
    nothing; it is the upper bound for routers."""

    reward: Reward
    margin: float = 0.0

    def escalates(self, turn: Turn) -> list[bool]:
        return [gain > self.margin for gain in gains(turn, self.reward)]


def gains(turn: Turn, reward: Reward) -> list[float]:
    """How much higher the target's steps score: the advantage that Arbitrage predicts."""
    ours = reward.score(turn.texts, turn.steps)
    theirs = reward.score(turn.texts, turn.again(range(len(turn.texts))))
    return [again - first for first, again in zip(ours, theirs, strict=True)]
