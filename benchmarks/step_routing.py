"""Accuracy against escalations for step-level routers, on synthetic sums of ten steps (LOSSY by design).

A step adds one number to a running total. Some numbers are hard: there the draft errs often, and for the hardest the target
errs as well, so a second attempt brings nothing. A reward model sees whether a step is right, with noise. The answer is right
if all steps are. Both writers are simulated, and the reward rests on an exact checker: easier than the papers' setting.
Prints a table; ``--json`` writes it to a file.

    python benchmarks/step_routing.py [--texts 400] [--noise 0.25] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from outrider.bench.provenance import results_head
from outrider.bench.routing import Advantage, Coin, Oracle, Pair, RewardThreshold, Routed, Router, learn_advantage, route

NUM_STEPS = 10
SCRIPT = "benchmarks/step_routing.py"


def difficulty(place: int) -> float:
    """Of a step: every third one is hard for the draft, every fifth hard for both."""
    return 0.9 if place % 5 == 4 else 0.5 if place % 3 == 2 else 0.05


def writer(skill: float):
    """Right with a probability that falls with the difficulty; ``skill`` is how much of it is overcome, but for the hardest."""

    def write(before: Sequence[str], chance: random.Random) -> str:
        hard = difficulty(len(before))
        error = 0.5 * hard if hard > 0.8 else hard * (1 - skill)
        return f"{'wrong' if chance.random() < error else 'right'} {chance.random():.9f}"  # no two steps are alike

    return write


def noisy_reward(noise: float):
    """A checker whose answer is blurred; the same step always gets the same score."""

    def reward(before: Sequence[str], step: str) -> float:
        blur = random.Random(f"{len(before)} {step}").gauss(0, noise)
        return min(1.0, max(0.0, (0.8 if step.startswith("right") else 0.2) + blur))

    return reward


def features(before: Sequence[str], step: str, reward: float) -> list[float]:
    """What a router can see: the score, and how hard steps of this kind were for the draft and for the target."""
    del step
    hard = difficulty(len(before))
    return [reward, float(hard > 0.8), float(0.3 < hard < 0.8)]


def measured(pair: Pair, router: Router, num_texts: int) -> dict[str, float]:
    texts = [route(pair, router, seed) for seed in range(num_texts)]
    return {
        "accuracy": sum(all(step.startswith("right") for step in text.steps) for text in texts) / num_texts,
        "escalated": _share(texts),
    }


def _share(texts: Sequence[Routed]) -> float:
    return sum(sum(text.escalated) for text in texts) / sum(len(text.escalated) for text in texts)


def main(words: Sequence[str] | None = None) -> dict[str, list[dict[str, float]]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--noise", type=float, default=0.25)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(words)
    pair = Pair(writer(0.2), writer(0.95), noisy_reward(chosen.noise), NUM_STEPS)
    learnt = learn_advantage(pair, features, num_texts=100)
    routers: dict[str, list[Router]] = {
        "random": [Coin(rate) for rate in (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)],
        "RSD": [RewardThreshold(limit) for limit in (0.1, 0.2, 0.3, 0.5, 0.7)],
        "arbitrage": [Advantage(features, learnt.weights, limit) for limit in (0.95, 0.9, 0.85, 0.8, 0.7, 0.5)],
        "oracle": [Oracle(margin) for margin in (0.3, 0.0)],
    }
    found = {name: [measured(pair, router, chosen.texts) for router in many] for name, many in routers.items()}
    lines = [
        {"router": name, **{key: f"{100 * row[key]:.1f} %" for key in row}} for name, rows in found.items() for row in rows
    ]
    for line in lines:
        print(f"{line['router']:<11}escalated {line['escalated']}  right answers {line['accuracy']}")
    if chosen.json:
        head = results_head("step-level routers on synthetic sums of ten steps: right answers by escalations", script=SCRIPT)
        chosen.json.write_text(json.dumps({**head, "rows": lines}, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
