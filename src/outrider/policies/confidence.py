"""Draft until a guess is unsure: stop after one whose draft probability is below a threshold, and learn the threshold.

The unsure guess itself is kept and verified; dropping it would bias sampled drafts (Lemma C of docs/lossless.md). Which
threshold pays depends on the pair of models, so it is chosen again from this request's own outcomes. It should separate
accepted from rejected guesses. Missing a good guess counts three times as much as following a bad one. (Hugging Face's "dynamic
speculation", after Mamou et al. 2024, arXiv 2405.04304; there the adapted value never reaches the drafter.)

    stop after x if q(x) < threshold
    threshold <- argmin_t  P(q >= t | rejected) + 3 P(q < t | accepted)          over the last tested guesses
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from outrider.core.interfaces import Observation, Plan, Policy, RowState, StopRule
from outrider.core.sampling import Law
from outrider.policies.checks import check_between, check_count, check_nodes
from outrider.policies.draft_law import probability_of
from outrider.policies.lengths import plan_of

_FEWEST = 6
"""Outcomes that are needed before the threshold moves."""


@dataclass(frozen=True)
class ConfidenceOptions:
    """When a guess counts as unsure."""

    num_draft_tokens: int = 12
    """Most guesses of a round."""
    threshold: float = 0.4
    """Draft probability below which a guess is the last, to begin with."""
    adapt: bool = True
    """Learn the threshold from outcomes."""
    miss_weight: float = 3.0
    """How much worse it is to stop after a good guess than to go on after a bad one."""
    horizon: int = 64
    """Tested guesses the threshold is learnt from."""
    num_tree_nodes: int | None = None
    """Guesses in all at the longest depth, for drafters that grow trees; as many as along one path if not given."""

    def __post_init__(self) -> None:
        check_count("num_draft_tokens", self.num_draft_tokens)
        check_nodes(self.num_tree_nodes)
        check_count("horizon", self.horizon, at_least=_FEWEST)
        check_between("threshold", self.threshold, 0, 1)
        check_between("miss_weight", self.miss_weight, 0, 1000)


@final
class ConfidenceStop(StopRule):
    """Stops a draft after an unsure guess, and remembers the probability of each guess."""

    def __init__(self, thresholds: Sequence[float]) -> None:
        self.thresholds = list(thresholds)
        self.seen: list[list[float]] = []
        """Probability of each guess, by depth and row."""

    def before(self, depth: int, law: Law) -> None:
        del depth, law

    def after(self, depth: int, law: Law, guesses: Tensor) -> list[bool]:
        assert depth == len(self.seen)
        self.seen.append(probability_of(law, guesses))
        return [sure >= threshold for sure, threshold in zip(self.seen[-1], self.thresholds, strict=True)]


@dataclass
class _Row:
    threshold: float
    outcomes: list[tuple[float, bool]] = field(default_factory=list)
    """Draft probability of recent tested guesses, and whether they were accepted."""

    def copy(self) -> _Row:
        return _Row(self.threshold, list(self.outcomes))


@dataclass
class _State(RowState):
    rows: list[_Row]
    rule: ConfidenceStop | None = None
    """The stopping rule of the round in progress."""

    def fork(self, rows: Sequence[int]) -> _State:
        return _State([self.rows[row].copy() for row in rows])

    def join(self, other: _State) -> _State:
        return _State([*self.rows, *other.rows])


@final
class Confidence(Policy):
    """Plans long drafts, which its stopping rule cuts short."""

    def __init__(self, options: ConfidenceOptions | None = None) -> None:
        self.options = options or ConfidenceOptions()

    def start(self, num_rows: int) -> _State:
        return _State([_Row(self.options.threshold) for _ in range(num_rows)])

    def plan(self, state: _State, num_rows: int) -> Plan:
        state.rule = ConfidenceStop([row.threshold for row in state.rows])
        longest = self.options.num_draft_tokens
        return plan_of([longest] * num_rows, longest, self.options.num_tree_nodes, stop=state.rule)

    def update(self, state: _State, observation: Observation) -> None:
        if not self.options.adapt or state.rule is None or not state.rule.seen:  # the drafter did not ask
            return
        seen = state.rule.seen
        outcomes = zip(observation.draft.tree.heights, observation.num_accepted, strict=True)
        for b, (row, (drafted, accepted)) in enumerate(zip(state.rows, outcomes, strict=True)):
            tested = range(min(accepted + 1, drafted))
            row.outcomes += [(seen[depth][b], depth < accepted) for depth in tested]
            del row.outcomes[: -self.options.horizon]
            if tested and len(row.outcomes) >= _FEWEST:
                row.threshold = best_threshold(row.outcomes, self.options.miss_weight, otherwise=row.threshold)


def best_threshold(outcomes: Sequence[tuple[float, bool]], miss_weight: float, *, otherwise: float) -> float:
    """The probability that best separates accepted from rejected guesses; ``otherwise`` if all went the same way."""
    num_good = sum(good for _, good in outcomes)
    num_bad = len(outcomes) - num_good
    if not num_good or not num_bad:
        return otherwise
    best, lowest = 0.0, 1.0  # a threshold of 0 follows every bad guess and misses no good one
    missed, followed = 0, num_bad
    ranked = sorted(outcomes)
    for i, (sure, good) in enumerate(ranked):
        missed, followed = missed + good, followed - (not good)
        if i + 1 < len(ranked) and ranked[i + 1][0] == sure:
            continue
        cost = followed / num_bad + miss_weight * missed / num_good
        if cost < lowest:  # halfway to the next one, so that neither side sits on the edge
            above = ranked[i + 1][0] if i + 1 < len(ranked) else 1.0
            best, lowest = (sure + above) / 2, cost
    return best
