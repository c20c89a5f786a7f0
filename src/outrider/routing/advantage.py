"""Arbitrage's router: a logistic prediction, from features of the draft's step, that the target's step would score higher.

Both writers continue the same text; the label is whether the target's step scored higher. One of the two, chosen at random,
goes into the text, so that the router also learns from texts of mixed origin. Both classes have the same weight.

    h(x, z_d) = sigmoid(w . features(x, z_d) + b),      loss = BCE against [ reward(x, z_t) > reward(x, z_d) ]
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.core.regression import balanced_logistic
from outrider.routing.routers import gains
from outrider.routing.steps import Reward, Routed, Router, StepWriter, Turn, WrittenStep, turns


class Features(ABC):
    """Features of steps, for a router."""

    @abstractmethod
    def of(self, texts: Sequence[str], steps: Sequence[WrittenStep]) -> Tensor:
        """[B, F] features of every step, given its text."""


@final
@dataclass(frozen=True, eq=False)
class Advantage(Router):
    """Escalates where the prediction exceeds a threshold."""

    features: Features
    weights: Sequence[float]
    """The weights; the last one is the bias."""
    threshold: float = 0.5

    def predicted(self, texts: Sequence[str], steps: Sequence[WrittenStep]) -> list[float]:
        """The probability that the target would score higher, for every step."""
        return self.chances(self.features.of(texts, steps))

    def chances(self, seen: Tensor) -> list[float]:
        """The probability that the target would score higher, for steps with features [N, F]."""
        if seen.shape[1] != len(self.weights) - 1:
            found = f"the router was trained on {len(self.weights) - 1} features and sees {seen.shape[1]}"
            raise OptionError(f"{found}, so it belongs to another model; train one for this model")
        weights = torch.tensor(list(self.weights), dtype=torch.float64)
        return (seen.double() @ weights[:-1] + weights[-1]).sigmoid().tolist()

    def escalates(self, turn: Turn) -> list[bool]:
        return [chance > self.threshold for chance in self.predicted(turn.texts, turn.steps)]

    def at(self, threshold: float) -> Advantage:
        """A router with these weights and another threshold."""
        return replace(self, threshold=threshold)

    def save(self, file: Path, notes: Mapping[str, Any]) -> None:
        """Write the weights as JSON."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**notes, "lossy": True, "weights": list(self.weights)}) + "\n")

    @staticmethod
    def load(file: Path, features: Features, *, threshold: float = 0.5) -> Advantage:
        if not file.is_file():
            raise OptionError(f"{file} does not exist; make it with `outrider train router`")
        return Advantage(features, json.loads(file.read_text())["weights"], threshold)


@dataclass(frozen=True, eq=False)
class Comparisons:
    """Steps of both writers after the same texts."""

    seen: Tensor
    """[N, F] features of the draft's steps."""
    scores: list[float]
    """The reward model's scores of the draft's steps."""
    gains: list[float]
    """How much higher the target's steps scored."""


def compare(
    prompts: Sequence[str],
    draft: StepWriter,
    target: StepWriter,
    reward: Reward,
    features: Features,
    *,
    num_steps: int,
    seed: int = 0,
) -> Comparisons:
    """Let both writers continue every text, and score both steps."""
    chance, found = random.Random(f"mixed {seed}"), [Routed(prompt) for prompt in prompts]
    seen, scores, gained = list[Tensor](), list[float](), list[float]()
    for turn, open_texts in turns(found, draft, target, num_steps=num_steps, seed=seed):
        seen.append(features.of(turn.texts, turn.steps))
        scores += reward.score(turn.texts, turn.steps)
        gained += gains(turn, reward)
        for one, pair in zip(open_texts, zip(turn.steps, turn.again(range(len(turn.texts))), strict=True), strict=True):
            one.steps.append(chance.choice(pair))
    return Comparisons(torch.cat(seen), scores, gained)


def learn_advantage(found: Comparisons, features: Features, *, decay: float = 1e-2, num_steps: int = 300) -> Advantage:
    """Logistic regression on scaled features, with equal weight for both classes."""
    label = torch.tensor([float(gain > 0) for gain in found.gains], dtype=torch.float64)
    if len(set(label.tolist())) < 2:
        raise OptionError(
            f"the target scored higher on {int(label.sum())} of {len(label)} steps, so there is nothing to learn; give more "
            "questions, or another draft"
        )
    weights, bias = balanced_logistic(found.seen.double(), label, decay=decay, num_steps=num_steps)
    return Advantage(features, [*weights.tolist(), bias])


def spearman(one: Sequence[float], two: Sequence[float]) -> float:
    """Rank correlation: 1 for the same order, -1 for the reverse. Equal values share their mean rank."""
    ranks = torch.stack([_ranks(torch.tensor(list(values), dtype=torch.float64)) for values in (one, two)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Tensor) -> Tensor:
    _, place, count = values.unique(return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2)[place].double()
