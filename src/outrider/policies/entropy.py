"""Draft while the drafter's law is sharp: stop before drawing where its entropy bounds acceptance too low.

Acceptance is 1 - TV(p, q), and a flat q rarely agrees with p. Its estimate is 1 - sqrt(gamma H(q)), without looking at the
guess, so nothing drawn is ever dropped. The level it is held against is steered by outcomes: up while too many guesses are
rejected, down while they are accepted and drafts end early. (Agrawal et al. 2024, "AdaEDL", arXiv 2410.18351; the update is
that of Draft & Verify, Zhang et al. 2023, arXiv 2309.08168.)

    stop before drawing if  1 - sqrt(gamma H(q)) < level
    rate  <- 0.5 rate + 0.5 accepted / drafted
    level <- 0.9 level + 0.1 level',   level' = level + step if rate < aim,  level if the draft was full,  level - step else

The pass that shows an entropy too high has its price and yields no guess. So the first guess of a round is drawn anyway
(``min_draft_tokens = 0`` is the rule as published). A round that drew nothing lowers the level, or it would never draw
again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from outrider.core.interfaces import Observation, Plan, Policy, RowState, StopRule
from outrider.core.sampling import Law
from outrider.policies.checks import check_between, check_count, check_nodes, check_order
from outrider.policies.draft_law import entropy_of
from outrider.policies.lengths import plan_of


@dataclass(frozen=True)
class EntropyOptions:
    """How low the entropy must be for another guess."""

    num_draft_tokens: int = 12
    """Most guesses of a round."""
    min_draft_tokens: int = 1
    """Guesses that are drawn whatever the entropy is."""
    level: float = 0.7
    """Estimated acceptance below which nothing is drawn, to begin with."""
    gamma: float = 0.2
    """Weight of the entropy (in nats)."""
    aim: float = 0.9
    """Acceptance the level is steered to."""
    step: float = 0.01
    """How far the level is steered at a time."""
    num_tree_nodes: int | None = None
    """Guesses in all at the longest depth, for drafters that grow trees; as many as along one path if not given."""

    def __post_init__(self) -> None:
        check_count("num_draft_tokens", self.num_draft_tokens)
        check_nodes(self.num_tree_nodes)
        check_count("min_draft_tokens", self.min_draft_tokens, at_least=0)
        check_order("min_draft_tokens", self.min_draft_tokens, "num_draft_tokens", self.num_draft_tokens)
        for name in ("level", "aim", "step"):
            check_between(name, vars(self)[name], 0, 1)
        check_between("gamma", self.gamma, 0, 100)


@final
class EntropyStop(StopRule):
    """Stops a draft before a guess whose law has too much entropy."""

    def __init__(self, levels: Sequence[float], options: EntropyOptions) -> None:
        self.levels = list(levels)
        self.options = options

    def before(self, depth: int, law: Law) -> list[bool] | None:
        if depth < self.options.min_draft_tokens:
            return None
        expected = [1 - math.sqrt(self.options.gamma * entropy) for entropy in entropy_of(law)]
        return [acceptance >= level for acceptance, level in zip(expected, self.levels, strict=True)]

    def after(self, depth: int, law: Law, guesses: Tensor) -> None:
        del depth, law, guesses


@dataclass
class _State(RowState):
    levels: list[float]
    rates: list[float]

    def fork(self, rows: Sequence[int]) -> _State:
        return _State([self.levels[row] for row in rows], [self.rates[row] for row in rows])

    def join(self, other: _State) -> _State:
        return _State([*self.levels, *other.levels], [*self.rates, *other.rates])


@final
class Entropy(Policy):
    """Plans long drafts, which its stopping rule cuts short."""

    def __init__(self, options: EntropyOptions | None = None) -> None:
        self.options = options or EntropyOptions()

    def start(self, num_rows: int) -> _State:
        return _State([self.options.level] * num_rows, [self.options.aim] * num_rows)

    def plan(self, state: _State, num_rows: int) -> Plan:
        longest = self.options.num_draft_tokens
        return plan_of([longest] * num_rows, longest, self.options.num_tree_nodes, stop=EntropyStop(state.levels, self.options))

    def update(self, state: _State, observation: Observation) -> None:
        planned = observation.plan.max_depth if observation.plan else (self.options.num_draft_tokens,) * len(state.levels)
        for b, (drafted, accepted) in enumerate(zip(observation.draft.tree.heights, observation.num_accepted, strict=True)):
            if drafted:
                state.rates[b] = 0.5 * state.rates[b] + 0.5 * accepted / drafted
            state.levels[b] += 0.1 * self._steer(state.rates[b], drafted, planned[b])

    def _steer(self, rate: float, drafted: int, planned: int) -> float:
        if planned == 0:
            return 0.0
        if drafted and rate < self.options.aim:
            return self.options.step
        return 0.0 if drafted >= planned else -self.options.step
