"""Simulates a draft model whose layers run at once on several devices (``models/fuzzy.py``).

A round drafts first and then verifies. Its first draft pass is exact: layer after layer, each on its own device, with one
message per layer. The others are fuzzy: a group of layers costs as much as one layer, and two messages. Every device multiplies
its part of the weights. (Wu et al. 2025, EasySpec, arXiv 2502.02493.)

    round(K) = pass(K + 1) + exact + (K - 1) fuzzy
    exact = pass on one device + layers x message,        fuzzy = multiplying / devices + groups x (latency + 2 messages)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import final

from outrider.bench.simulate import Cluster, Scenario, predicted_speed


def drafting_seconds(length: int, *, exact: float, fuzzy: float) -> float:
    """Seconds to draft a chain: one exact pass, then fuzzy ones."""
    return exact + (length - 1) * fuzzy if length else 0.0


@final
@dataclass(frozen=True)
class EasySpecScenario:
    """A scenario whose draft has its layers on ``num_devices`` devices."""

    turns: Scenario
    """The scenario with the draft on one device."""
    num_devices: int

    def cost(self, length: int) -> float:
        """Seconds of a round with ``length`` guesses."""
        alone = replace(self.turns, draft=None)
        return alone.cost(length) + drafting_seconds(length, exact=self.exact_seconds(), fuzzy=self.fuzzy_seconds())

    def exact_seconds(self) -> float:
        """Seconds of the first draft pass of a round."""
        turns, draft = self.turns, self.turns.draft
        if draft is None:
            return 0.0
        one = Cluster(turns.cluster.hardware).pass_seconds(draft, 1, batch_size=turns.batch_size, context=turns.context)
        return one + draft.num_layers * self._place.message_seconds(draft, turns.batch_size)

    def fuzzy_seconds(self) -> float:
        """Seconds of a later draft pass."""
        turns, draft = self.turns, self.turns.draft
        if draft is None:
            return 0.0
        in_layers = self._place.pass_seconds(draft, 1, batch_size=turns.batch_size, context=turns.context)
        saved = draft.num_layers - math.ceil(draft.num_layers / self.num_devices)
        return in_layers - saved * self._place.layer_seconds(draft, turns.batch_size)

    def speed(self, length: int, by_depth: Sequence[float], *, num_tokens: int = 256) -> float:
        """Tokens per second of the whole batch."""
        return self.turns.batch_size * predicted_speed(num_tokens, length, by_depth, cache(self.cost))

    def best_length(self, by_depth: Sequence[float], *, longest: int = 12) -> int:
        return max(range(1, longest + 1), key=lambda length: self.speed(length, by_depth))

    @property
    def _place(self) -> Cluster:
        return Cluster(self.turns.cluster.hardware, self.num_devices, self.turns.cluster.link)
