"""A batch that comes at once and that nobody joins, without models: seats fall empty, and the slowest request ends it.

As on a device: a round takes the time of all slots of its frame, empty ones too, and is seen when the next one was planned. A
frame four times too large is given up for a smaller one. Nothing is measured.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from policy_rounds import observation

from outrider.core.interfaces import Observation, Policy
from outrider.core.prices import Prices
from outrider.engine.round_kind import SHRINKS, num_slots


@dataclass
class Leaving:
    """A machine, and the acceptance of the requests that come to it."""

    rates: Sequence[float]
    seconds: Callable[[int, int], float]
    """Of a whole round, by slots and guesses."""
    num_tokens: int = 64
    longest: int = 4
    noise: float = 0.02

    def prices(self) -> Prices:
        """Of whole rounds, as on a device."""
        lengths, sizes = [length for length in (0, 1, 2, 4, 8) if length <= self.longest], (1, 8, 64)
        rounds = tuple((rows, tuple((float(k), 1.1 * self.seconds(rows, k)) for k in lengths)) for rows in sizes)
        return Prices(rounds, tuple((rows, ((1.0, 0.0), (8.0, 0.0))) for rows in sizes))

    def answer(self, policy: Policy, seed: int = 1) -> float:
        """Tokens per second until all requests have ended."""
        rng, seats = random.Random(seed), dict(enumerate(self.rates))
        left, size, seconds = dict.fromkeys(seats, self.num_tokens), num_slots(len(seats)), 0.0
        state, unseen = policy.start(size), deque[Observation]()
        while seats:
            plan = policy.plan(state, size)
            length = min(max(plan.max_depth), self.longest)
            accepted = [_walk(rng, length, seats.get(slot, 0.0)) if slot in seats else 0 for slot in range(size)]
            took = self.seconds(size, length) * rng.lognormvariate(0, self.noise)
            seconds += took
            asked = tuple(length if slot in seats else 0 for slot in range(size))
            played = replace(plan, max_depth=asked, max_nodes=asked)
            seen = observation(asked, accepted, draft_seconds=0.0, score_seconds=took, plan=played)
            unseen.append(replace(seen, paths=[path if slot in seats else [] for slot, path in enumerate(seen.paths)]))
            if len(unseen) > 1:
                policy.update(state, unseen.popleft())
            for slot in list(seats):
                left[slot] -= 1 + accepted[slot]
                if left[slot] <= 0:
                    del seats[slot]
            if num_slots(max(1, len(seats))) * SHRINKS <= size:
                policy.update(state, unseen.popleft())
                kept, size = list(seats), num_slots(max(1, len(seats)))
                seats, left = dict(enumerate(seats.values())), dict(enumerate(left[slot] for slot in kept))
                state = state.fork(kept) if size == len(kept) else state.fork(kept).join(policy.start(size - len(kept)))
        return self.num_tokens * len(self.rates) / seconds


def _walk(rng: random.Random, length: int, rate: float) -> int:
    return next((k for k in range(length) if rng.random() >= rate), length)
