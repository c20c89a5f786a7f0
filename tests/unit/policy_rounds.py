"""Rounds without models: a machine with known costs and a drafter with known acceptance, to see what a policy makes of them.

Nothing here is measured; times are made up. ``Machine.speed_of`` is exact, so a policy can be compared with the best fixed
length without a second simulation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, count
from operator import mul
from types import SimpleNamespace

import pytest
import torch

from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import Observation, Plan, Policy
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree

NO_SCORES = Scores(torch.empty(0))


def think_for(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every decision of the default policy takes so long, whatever the machine that runs the test does."""
    ticks = count(0.0, seconds)
    monkeypatch.setattr("outrider.policies.adaptive.time", SimpleNamespace(thread_time=lambda: next(ticks)))


@lru_cache(maxsize=4096)
def draft_of(sizes: tuple[int, ...], nodes: tuple[int, ...] | None = None) -> Draft:
    """So many guesses along a path of each row, and so many in all: the others stand beside the first one."""
    if nodes is not None and nodes != sizes:
        rows = [
            ([0] * (1 + count), [-1, *range(size), *[0] * (count - size)]) for size, count in zip(sizes, nodes, strict=True)
        ]
        return Draft(TokenTree.of_rows(rows), Draws.DETERMINISTIC)
    tokens = torch.zeros(len(sizes), max(sizes) + 1, dtype=torch.int64)
    return Draft(TokenTree.chain(tokens, [size + 1 for size in sizes]), Draws.DETERMINISTIC)


def observation(
    drafted: Sequence[int],
    accepted: Sequence[int],
    *,
    draft_seconds: float = 0.1,
    score_seconds: float = 1.0,
    plan=None,
    beliefs: Sequence[Sequence[float]] | None = None,
    nodes: tuple[int, ...] | None = None,
) -> Observation:
    """What a policy is told of a round."""
    paths = [list(range(n + 1)) for n in accepted]
    draft, seconds = replace(draft_of(tuple(drafted), nodes), beliefs=beliefs), draft_seconds + score_seconds
    return Observation(draft, NO_SCORES, paths, list(accepted), draft_seconds, score_seconds, plan, seconds)


def constant(*rates: float) -> Callable[[int, int], float]:
    """The same chance at every position; one per row, or one for all."""
    return lambda position, row: rates[row % len(rates)]


@dataclass
class Machine:
    """Seconds and chances of a round. A plain round of one row takes 1."""

    accept: Callable[[int, int], float]
    """Chance that the guess at a position (from 0) of a row is accepted if tested."""
    draft_cost: float = 0.1
    """Seconds per guess."""
    score_cost: Callable[[int], float] = lambda num_guesses: 1.0
    found: float = 1.0
    """Chance that the drafter has guesses at all; below 1 it copies, and a miss is free."""
    catch_up: float = 0.0
    """Seconds per token the drafter has not seen, when it is asked again."""
    noise: float = 0.05
    """Spread of a round's time (log-normal); one round in a hundred takes three times as long."""
    pace: Callable[[int], float] = lambda num_rounds: 1.0
    overhead: float = 0.01
    """Of every round, counted as drafting."""
    num_rows: int = 1
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def speed_of(self, length: int) -> float:
        """Tokens per second of a fixed length, exactly."""
        tokens, seconds = self.expected(length)
        return tokens / seconds

    def expected(self, length: int) -> tuple[float, float]:
        """Mean tokens of all rows and mean seconds of a round (noise has mean 1)."""
        gain = sum(sum(self._reach(length, row)) for row in range(self.num_rows))
        hit = 1 - (1 - self.found) ** self.num_rows if length else 0.0
        drafted = self.score_cost(length) + self.draft_cost * length
        seconds = self.overhead + hit * drafted + (1 - hit) * self.score_cost(0)
        return self.num_rows + self.found * gain, seconds

    def _reach(self, length: int, row: int) -> list[float]:
        return list(accumulate((self.accept(position, row) for position in range(length)), mul))

    def best(self, longest: int = 16) -> int:
        return max(range(longest + 1), key=self.speed_of)

    def noisy(self, seconds: float, num_rounds: int) -> float:
        spike = 3.0 if self.rng.random() < 0.01 else 1.0
        factor = math.exp(self.rng.gauss(0, self.noise) - self.noise**2 / 2)
        return seconds * factor * spike / 1.02 * self.pace(num_rounds)

    def round(self, plan: Plan, num_rounds: int, lag: int) -> Observation:
        """Play a round."""
        drafted = tuple(depth if depth and self.rng.random() < self.found else 0 for depth in plan.max_depth)
        accepted = [self._walk(length, row) for row, length in enumerate(drafted)]
        longest = max(drafted)
        draft = self.overhead + self.draft_cost * longest + (self.catch_up * lag if any(plan.max_depth) else 0)
        seconds = [self.noisy(part, num_rounds) for part in (draft, self.score_cost(longest))]
        return observation(drafted, accepted, draft_seconds=seconds[0], score_seconds=seconds[1], plan=plan)

    def _walk(self, length: int, row: int) -> int:
        for position in range(length):
            if self.rng.random() >= self.accept(position, row):
                return position
        return length


@dataclass
class Run:
    """What happened: seconds, tokens (of all rows) and planned length of every round."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def speed(self, begin: int = 0, end: int | None = None) -> float:
        """Tokens per second as it happened."""
        return sum(self.tokens[begin:end]) / sum(self.seconds[begin:end])

    def merit(self, machine: Machine, begin: int = 0, end: int | None = None) -> float:
        """Tokens per second that the planned lengths deserved: without luck (catching up not counted)."""
        rounds = [machine.expected(length) for length in self.lengths[begin:end]]
        return sum(tokens for tokens, _ in rounds) / sum(seconds for _, seconds in rounds)


def play(policy: Policy, machine: Machine | Callable[[int], Machine], num_rounds: int, *, request_len: int = 10**9) -> Run:
    """Serve requests of ``request_len`` rounds each; ``machine`` may change with the round."""
    first = machine if isinstance(machine, Machine) else machine(0)
    run, state, lag = Run(), policy.start(first.num_rows), 0
    for index in range(num_rounds):
        if index and index % request_len == 0:
            state, lag = policy.start(first.num_rows), 0
        now = machine if isinstance(machine, Machine) else machine(index)
        plan = policy.plan(state, now.num_rows)
        seen = now.round(plan, index, lag)
        lag = 0 if any(plan.max_depth) else lag + 1
        policy.update(state, seen)
        run.seconds.append(seen.seconds)
        run.tokens.append(sum(seen.num_accepted) + now.num_rows)
        run.lengths.append(max(plan.max_depth))
    return run
