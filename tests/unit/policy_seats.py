"""Seats without models: batches of many requests on a machine with scripted prices, to see how far a policy is from the best.

Nothing is measured and no clock is read. A policy is judged by what its plans deserve (expected tokens over expected seconds),
so luck in single rounds does not count, and the best fixed length is known exactly.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

from policy_rounds import observation

from outrider.core.interfaces import Observation, Plan, Policy
from outrider.core.prices import Points, Prices, PriceSource

FIXED = (0, 1, 2, 4, 6, 8)
"""Lengths that a policy is compared with, plain decoding included."""


@dataclass
class Given(PriceSource):
    """Prices as they were measured; counts how often somebody doubted them."""

    prices: Prices | None
    num_doubts: int = 0
    num_reads: int = 0

    def read(self, nodes_of: Callable[[int], int]) -> Prices | None:
        assert nodes_of(1) >= 1
        self.num_reads += 1
        return self.prices

    def doubt(self) -> None:
        self.num_doubts += 1


@dataclass
class Seats:
    """Rows that share passes. Seconds of a pass follow from its packed nodes."""

    passing: Callable[[float], float]
    drafting: Callable[[int, int], float]
    """Seconds by rows and guesses."""
    rates: Callable[[int], float]
    """Acceptance of a request, by its number: the same at every position."""
    num_rows: int = 1
    padded: bool = True
    spreads: Sequence[int] = (1,)
    """Guesses to a level of the fixed drafts that a policy is compared with."""
    wider: float = 1.0
    """Misses of a level with twice as many guesses, for each miss without them."""
    request_rounds: int = 10**9
    """Rounds after which a seat is given to the next request; seats do not change all at once."""
    is_whole: bool = False
    """Rounds are timed as a whole, as on a device."""
    noise: float = 0.04
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def prices(self, kind: str = "right", *, seed: int = 5, scale: float = 1.2) -> Prices:
        """As a rehearsal would measure them: another pace, and every point a little wrong. Of other kinds, all that has guesses
        is 30 % too "dear" or too "cheap", points are "scattered" by 15 % either way, or "whole" rounds were timed."""
        rng, spread = random.Random(seed), 0.15 if kind == "scattered" else 0.03
        factor = {"dear": 1.3, "cheap": 1 / 1.3}.get(kind, 1.0)

        def curve(seconds: Callable[[int], float], places: Sequence[int]) -> Points:
            found = {k: seconds(k) * scale * (factor if k else 1.0) * (1 + rng.uniform(-spread, spread)) for k in places}
            return tuple((float(k), min(found[later] for later in places if later >= k)) for k in places)

        if kind == "whole":
            sizes = (1, 8, 64)
            rounds = tuple((rows, curve(lambda k, rows=rows: self._whole(rows, k), (0, 1, 2, 4, 8))) for rows in sizes)
            return Prices(rounds, tuple((rows, ((1.0, 0.0), (8.0, 0.0))) for rows in sizes))
        passes = curve(lambda guesses: self.passing(1 + guesses), (0, 1, 3, 7, 15, 31, 63, 255))
        lengths = {1: (1, 2, 4, 8), 8: (1, 4), 32: (1, 4)}
        drafts = tuple((rows, curve(lambda k, rows=rows: self.drafting(rows, k), ks)) for rows, ks in lengths.items())
        return Prices(((1, passes),), drafts)

    def _whole(self, rows: int, guesses: int) -> float:
        return self.passing(rows * (1 + guesses)) + (self.drafting(rows, guesses) if guesses else 0.0)

    def deserved(self, lengths: Sequence[int], nodes: Sequence[int], requests: Sequence[int]) -> tuple[float, float]:
        """Expected tokens and seconds of a round with a length and a number of guesses for every row."""
        tokens = sum(
            1 + sum(accumulate([self._rate(one, length, count)] * length, mul))
            for one, length, count in zip(requests, lengths, nodes, strict=True)
        )
        places = len(nodes) * (1 + max(nodes)) if self.padded else len(nodes) + sum(nodes)
        return tokens, self.passing(places) + (self.drafting(len(nodes), max(lengths)) if any(lengths) else 0.0)

    def _rate(self, request: int, length: int, nodes: int) -> float:
        """Acceptance at every position of a tree."""
        return 1 - (1 - self.rates(request)) * self.wider ** math.log2(nodes / length) if length else 0.0

    def round(self, plan: Plan, requests: Sequence[int]) -> Observation:
        rows = list(zip(requests, plan.max_depth, plan.max_nodes, strict=True))
        accepted = [self._walk(length, self._rate(one, length, count)) for one, length, count in rows]
        _, seconds = self.deserved(plan.max_depth, plan.max_nodes, requests)
        draft = self.drafting(len(requests), max(plan.max_depth)) if any(plan.max_depth) else 0.0
        parts = (0.0, seconds) if self.is_whole else (draft, seconds - draft)
        noisy = [part * self.rng.lognormvariate(0, self.noise) for part in parts]
        nodes = plan.max_nodes
        seen = observation(plan.max_depth, accepted, draft_seconds=noisy[0], score_seconds=noisy[1], plan=plan, nodes=nodes)
        return replace(seen, padded=self.padded)

    def _walk(self, length: int, rate: float) -> int:
        return next((k for k in range(length) if self.rng.random() >= rate), length)


@dataclass
class Tally:
    """What was deserved, and what each fixed length would have been, round by round."""

    fixed: dict[tuple[int, int], list[tuple[float, float]]]
    """By guesses along a path, and to a level."""
    rounds: list[tuple[float, float]] = field(default_factory=list)

    def share(self, begin: int = 0, end: int | None = None, *, of: int | None = None) -> float:
        """Speed over that of the best fixed length, or of one of them."""
        others = [speed(rounds[begin:end]) for (length, _), rounds in self.fixed.items() if of in (None, length)]
        return speed(self.rounds[begin:end]) / max(others)


def speed(rounds: Sequence[tuple[float, float]]) -> float:
    return sum(tokens for tokens, _ in rounds) / sum(seconds for _, seconds in rounds)


def occupy(policy: Policy, seats: Seats, num_rounds: int, *, is_late: bool = False) -> Tally:
    """Serve requests on these seats. Where they come and go, a few rows leave and join every few rounds. ``is_late``: a round
    is seen when the next one was planned, as where a device runs ahead of the host."""
    tally = Tally({(length, spread): [] for length in FIXED for spread in seats.spreads})
    state, size = policy.start(seats.num_rows), seats.num_rows
    requests, number = list(range(size)), size
    every, unseen = max(1, seats.request_rounds // size), deque[Observation]()
    for index in range(1, num_rounds + 1):
        plan = policy.plan(state, size)
        unseen.append(seats.round(plan, requests))
        if len(unseen) > is_late:
            policy.update(state, unseen.popleft())
        tally.rounds.append(seats.deserved(plan.max_depth, plan.max_nodes, requests))
        for (length, spread), rounds in tally.fixed.items():
            rounds.append(seats.deserved([length] * size, [length * spread] * size, requests))
        if index % every == 0:
            fresh = policy.start(1)
            state = state.fork(range(1, size)).join(fresh) if size > 1 else fresh
            requests, number = [*requests[1:], number], number + 1
    return tally
