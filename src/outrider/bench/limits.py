"""A time limit that holds from the first round on: what is left, what fits into it, and what is left out, in words.

    needed = rounds * sum over settings and prompts of (prefill seconds * prompt tokens + pass seconds * tokens written)

Prompts are given up first, but one of every suite stays. Then suites are given up, then the dearest settings. Plain decoding
and one other setting always stay, because without them there is nothing to compare.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.bench.settings import BASELINE, Setting, Skipped

_ROUNDS = 3
"""Rounds that should fit: fewer give no interval."""
Suites = dict[str, list[list[int]]]


@dataclass(frozen=True)
class Limit:
    """A moment after which nothing new is begun; None: never."""

    seconds: float | None = None
    began: float = field(default_factory=time.perf_counter)

    def left(self) -> float:
        return float("inf") if self.seconds is None else self.began + self.seconds - time.perf_counter()

    def passed(self, share: float = 1.0) -> bool:
        """Whether this share of the time is gone."""
        return self.seconds is not None and time.perf_counter() - self.began > share * self.seconds


@dataclass(frozen=True)
class WarmUpCost:
    """What a setting takes, measured while warming up."""

    prefill: float
    """Seconds per prompt token."""
    token: float
    """Seconds per token written, rows of a batch together."""

    def of(self, prompt: Sequence[int], max_tokens: int) -> float:
        return self.prefill * len(prompt) + self.token * max_tokens


@dataclass(frozen=True)
class Fitted:
    """What is measured after all, and what is not."""

    settings: list[Setting]
    suites: Suites
    skipped: list[Skipped]


def fit(
    settings: Sequence[Setting],
    suites: Suites,
    costs: Mapping[str, WarmUpCost],
    *,
    limit: Limit,
    max_tokens: int,
    say: Callable[[str], None],
) -> Fitted:
    """As much of the plan as the time left has room for."""
    left, kept, skipped = limit.left(), list(settings), []

    def needed(these: Sequence[Setting], those: Suites) -> float:
        prompts = [prompt for many in those.values() for prompt in many]
        return _ROUNDS * sum(costs[one.label].of(prompt, max_tokens) for one in these for prompt in prompts)

    whole, count = needed(kept, suites), sum(map(len, suites.values()))
    if whole > left:
        suites = {name: many[: max(1, int(len(many) * max(0.0, left) / whole))] for name, many in suites.items()}
    while len(suites) > 1 and needed(kept, suites) > left:
        suites = dict(list(suites.items())[:-1])
    while len(kept) > 2 and needed(kept, suites) > left:
        dearest = max((one for one in kept if one.method != BASELINE), key=lambda one: costs[one.label].token)
        kept.remove(dearest)
        skipped.append(Skipped(dearest.label, f"there was no time for it within {limit.seconds:g} s; allow more --seconds"))
    now = sum(map(len, suites.values()))
    if now < count or skipped:
        say(f"to fit into {limit.seconds:g} s: {now} of {count} prompts, {len(kept)} of {len(settings)} settings")
    return Fitted(kept, suites, skipped)
