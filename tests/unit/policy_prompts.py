"""Seats whose prompts are read inside rounds, without models: requests that come and go, and a pass that both share.

Always as many requests as there are seats. A round reads some tokens of the prompts of those who have come, and decodes the
others. Its seconds follow from all nodes of its pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from policy_rounds import observation

from outrider.core.interfaces import Observation, Plan, Policy, Stateless
from outrider.core.prices import Prices
from outrider.core.prompt_reading import Prompts

NUM_READ = 512
"""Tokens of prompts that a round reads at most."""


@dataclass
class Readers:
    """A machine, and the requests that come to it."""

    num_seats: int
    prompt_len: int
    passing: Callable[[float], float]
    drafting: Callable[[int, int], float]
    rate: float = 0.75
    noise: float = 0.04

    def prices(self) -> Prices:
        """Of whole rounds without prompts, as on a device."""
        lengths, sizes = (0, 1, 2, 4, 8), (1, 8, 64)
        rounds = tuple((rows, tuple((float(k), 1.1 * self.seconds(rows, k, 0)) for k in lengths)) for rows in sizes)
        return Prices(rounds, tuple((rows, ((1.0, 0.0), (8.0, 0.0))) for rows in sizes))

    def seconds(self, rows: int, length: int, num_places: int) -> float:
        return self.passing(rows * (1 + length) + num_places) + (self.drafting(rows, length) if length else 0.0)

    def speed(self, policy: Policy, num_rounds: int, *, skipped: int = 100) -> float:
        """Tokens per second of answers, after the first rounds."""
        rng, sizes, tokens, seconds = random.Random(3), random.Random(4), 0, 0.0  # all policies meet the same answers
        state, left = policy.start(self.num_seats), [64] * self.num_seats
        unread = [0, *[self.prompt_len] * (self.num_seats - 1)]
        for index in range(num_rounds):
            prompts = self._prompts(sum(unread))
            policy.carry(state, prompts)
            plan = policy.plan(state, self.num_seats)
            running = [not count for count in unread]
            length, room = max(plan.max_depth), prompts.num_tokens
            for seat, count in enumerate(unread):
                unread[seat], room = count - min(count, room), room - min(count, room)
                left[seat] = sizes.randint(32, 96) if count and not unread[seat] else left[seat]
            accepted = [_walk(rng, length, self.rate) if runs else 0 for runs in running]
            took = self.seconds(self.num_seats, length, prompts.num_places) * rng.lognormvariate(0, self.noise)
            asked = tuple(length if runs else 0 for runs in running)
            seen = observation(
                asked, accepted, draft_seconds=0.0, score_seconds=took, plan=replace(plan, max_depth=asked, max_nodes=asked)
            )
            paths = [list(range(count + 1)) if runs else [] for count, runs in zip(accepted, running, strict=True)]
            policy.update(state, replace(seen, paths=paths, prompts=prompts))
            for seat in (seat for seat, runs in enumerate(running) if runs):
                taken = min(left[seat], accepted[seat] + 1)
                left[seat] -= taken
                unread[seat] = 0 if left[seat] else self.prompt_len
                tokens += taken if index >= skipped else 0
            seconds += took if index >= skipped else 0.0
        return tokens / seconds

    def _prompts(self, waiting: int) -> Prompts:
        """What the next round reads; a round has places for none, a quarter of the most, or the most."""
        num_places = next((size for size in (0, NUM_READ // 4) if size >= waiting), NUM_READ)
        return Prompts(min(waiting, num_places), num_places, waiting > NUM_READ)


@final
@dataclass
class Always(Policy):
    """Drafts so many guesses, or none."""

    length: int

    def start(self, num_rows: int) -> Stateless:
        del num_rows
        return Stateless()

    def plan(self, state: Stateless, num_rows: int) -> Plan:
        del state
        return Plan((self.length,) * num_rows, (self.length,) * num_rows)

    def update(self, state: Stateless, observation: Observation) -> None:
        del state, observation


def _walk(rng: random.Random, length: int, rate: float) -> int:
    return next((k for k in range(length) if rng.random() >= rate), length)
