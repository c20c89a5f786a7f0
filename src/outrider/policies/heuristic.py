"""Draft two guesses more after a fully accepted draft, and one fewer after any other.

This is the rule of Hugging Face's assisted generation. The length climbs while the drafter is right and sinks slowly where it
is not, so it hovers near the number of guesses that usually survive. It ignores what a guess costs. A drafter that is always
right reaches the upper bound even where that is slower, and a useless one still drafts the lower bound.

    K <- min(K + 2, K_max) if all K guesses were accepted,   max(K - 1, K_min) otherwise

A round in which the drafter found nothing to propose says nothing about the length and leaves it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from outrider.core.device_round import CapturedShape
from outrider.core.interfaces import Observation, Plan, Policy, RowState
from outrider.policies.checks import check_count, check_nodes, check_order
from outrider.policies.lengths import captured_lengths, plan_of


@dataclass(frozen=True)
class HeuristicOptions:
    """The first length, its bounds, and how fast it changes."""

    num_draft_tokens: int = 4
    """Guesses of a request's first round."""
    min_draft_tokens: int = 1
    """Fewest guesses."""
    max_draft_tokens: int = 20
    """Most guesses."""
    increase: int = 2
    """Guesses added after a fully accepted draft."""
    decrease: int = 1
    """Guesses removed after any other draft."""
    num_tree_nodes: int | None = None
    """Guesses in all at the longest depth, for drafters that grow trees; as many as along one path if not given."""

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "min_draft_tokens", "max_draft_tokens", "increase", "decrease"):
            check_count(name, vars(self)[name])
        check_nodes(self.num_tree_nodes)
        check_order("min_draft_tokens", self.min_draft_tokens, "num_draft_tokens", self.num_draft_tokens)
        check_order("num_draft_tokens", self.num_draft_tokens, "max_draft_tokens", self.max_draft_tokens)


@dataclass
class Lengths(RowState):
    """The length each row will draft next."""

    lengths: list[int]

    def fork(self, rows: Sequence[int]) -> Lengths:
        return Lengths([self.lengths[row] for row in rows])

    def join(self, other: Lengths) -> Lengths:
        return Lengths([*self.lengths, *other.lengths])


@final
class Heuristic(Policy):
    """Raises the length by two after a fully accepted draft and lowers it by one after any other."""

    def __init__(self, options: HeuristicOptions | None = None) -> None:
        self.options = options or HeuristicOptions()

    def start(self, num_rows: int) -> Lengths:
        return Lengths([self.options.num_draft_tokens] * num_rows)

    def plan(self, state: Lengths, num_rows: int) -> Plan:
        assert len(state.lengths) == num_rows
        return plan_of(state.lengths, self.options.max_draft_tokens, self.options.num_tree_nodes)

    def update(self, state: Lengths, observation: Observation) -> None:
        outcomes = zip(observation.draft.tree.heights, observation.num_accepted, strict=True)
        state.lengths = [
            self._next(length, drafted, accepted) for length, (drafted, accepted) in zip(state.lengths, outcomes, strict=True)
        ]

    def captured_shape(self) -> CapturedShape:
        return captured_lengths(self.options.max_draft_tokens, self.options.num_tree_nodes)

    def _next(self, length: int, drafted: int, accepted: int) -> int:
        if drafted == 0:
            return length
        if accepted == drafted:
            return min(length + self.options.increase, self.options.max_draft_tokens)
        return max(length - self.options.decrease, self.options.min_draft_tokens)
