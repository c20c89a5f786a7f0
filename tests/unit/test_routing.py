"""Step-level routing: the ends are the two writers alone, the oracle is best, and a learnt router beats a coin."""

from __future__ import annotations

import sys
from pathlib import Path

from outrider.bench.routing import Coin, Oracle, Pair, RewardThreshold, logistic, route

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import step_routing  # type: ignore[import-not-found]

PAIR = Pair(lambda before, _: "d", lambda before, _: "t", lambda before, step: 0.9 if step == "t" else 0.4, 4)


def test_the_ends_are_the_writers_alone() -> None:
    assert route(PAIR, Coin(0.0), 1).steps == ["d"] * 4 and route(PAIR, Coin(1.0), 1).steps == ["t"] * 4
    assert route(PAIR, RewardThreshold(0.3), 1).escalated == [False] * 4
    assert route(PAIR, RewardThreshold(0.4), 1).escalated == [True] * 4
    assert route(PAIR, Oracle(), 1).escalated == [True] * 4 and route(PAIR, Oracle(0.6), 1).escalated == [False] * 4


def test_a_text_follows_from_its_seed() -> None:
    assert route(PAIR, Coin(0.5), 3).steps == route(PAIR, Coin(0.5), 3).steps
    assert len({tuple(route(PAIR, Coin(0.5), seed).steps) for seed in range(20)}) > 3


def test_logistic_by_hand() -> None:
    assert logistic([0.0], [3.0, 0.0]) == 0.5 and logistic([1.0], [1e9, 0.0]) > 0.999


def test_learnt_routing_lies_between_a_coin_and_the_oracle() -> None:
    found = step_routing.main(["--texts", "300"])
    best = max(row["accuracy"] for row in found["oracle"])
    alone = found["random"][0]["accuracy"]
    for name, rows in found.items():
        assert all(row["accuracy"] <= best + 0.06 for row in rows), name
    learnt = found["arbitrage"][3]
    coin = max(row["accuracy"] for row in found["random"] if row["escalated"] <= learnt["escalated"] + 0.1)
    assert learnt["accuracy"] > coin >= alone
