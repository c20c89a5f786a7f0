"""A time limit for a bench: it chooses what fits into the remaining time, and says what is left out.

    needed = rounds * sum over settings and prompts of (prefill seconds * prompt tokens + pass seconds * tokens written)

Prompts are left out first, but one of every suite stays. Next are suites, then the slowest settings. Plain decoding and one
other setting always stay, because without them there is nothing to compare.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.bench.settings import BASELINE, Setting, Skipped

_ROUNDS = 3
"""Rounds that should fit, because fewer give no interval."""
Suites = dict[str, list[list[int]]]


@dataclass(frozen=True)
class Limit:
    """A moment after which nothing new is started; None for no limit."""

    seconds: float | None = None
    began: float = field(default_factory=time.perf_counter)

    def left(self) -> float:
        return float("inf") if self.seconds is None else self.began + self.seconds - time.perf_counter()

    def passed(self, share: float = 1.0) -> bool:
        """Whether this share of the time is used."""
        return self.seconds is not None and time.perf_counter() - self.began > share * self.seconds


@dataclass(frozen=True)
class WarmUpCost:
    """Costs of a setting, measured during the warm-up."""

    prefill: float
    """Seconds per prompt token."""
    token: float
    """Seconds per written token, all rows of a batch together."""

    def of(self, prompt: Sequence[int], max_tokens: int) -> float:
        return self.prefill * len(prompt) + self.token * max_tokens


@dataclass(frozen=True)
class Fitted:
    """The part of a plan that is measured, and the part that is not."""

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
    """As much of the plan as fits into the remaining time."""
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
