"""Routers. RSD (arXiv 2501.19324) asks a reward model about the draft's step. Arbitrage (arXiv 2512.05033) asks whether the
target's step would score higher, which is what matters. The oracle writes both steps and looks; a coin is the other end.

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
    """Escalates at a rate, whatever the step."""

    rate: float

    def escalates(self, turn: Turn) -> list[bool]:
        return [random.Random(f"coin {seed}").random() < self.rate for seed in turn.seeds]


@final
@dataclass(frozen=True, eq=False)
class RewardThreshold(Router):
    """RSD: escalates steps that the reward model does not like."""

    reward: Reward
    threshold: float

    def escalates(self, turn: Turn) -> list[bool]:
        return [score <= self.threshold for score in self.reward.score(turn.texts, turn.steps)]


@final
@dataclass(frozen=True, eq=False)
class Oracle(Router):
    """Escalates where the target's step does score higher, by more than ``margin``. It has the target write every step, so
    it saves nothing and shows what a router could reach."""

    reward: Reward
    margin: float = 0.0

    def escalates(self, turn: Turn) -> list[bool]:
        return [gain > self.margin for gain in gains(turn, self.reward)]


def gains(turn: Turn, reward: Reward) -> list[float]:
    """How much higher the target's steps score: Arbitrage's advantage."""
    ours = reward.score(turn.texts, turn.steps)
    theirs = reward.score(turn.texts, turn.again(range(len(turn.texts))))
    return [again - first for first, again in zip(ours, theirs, strict=True)]
