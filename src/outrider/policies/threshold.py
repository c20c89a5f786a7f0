"""Stop drafting once an earlier guess has probably been rejected, since further guesses would be wasted.

The predicted probability that all guesses so far are accepted is the product of their acceptance probabilities. Drafting stops
when its complement passes a bound. (Huang et al. 2024, "SpecDec++", arXiv 2405.19715, who show that a bound of this form is
best.)

    stop after guess k if  1 - prod_{i <= k} a_i > h

What h should be, in one step: another guess costs c_draft, for nothing with probability 1 - prod a; with probability prod a it
may save a pass, c_target. So going on pays only while 1 - prod a < c_target / (c_draft + c_target): cheap drafts want h near 1.
The prediction a_i is the draft's own probability of the guess, that of a trained head (``head``, as in SpecDec++; see
models/acceptance_head.py), or any ``Predictor`` given instead. The guess that passes the bound is kept (Lemma C of
docs/lossless.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from outrider.core.interfaces import Observation, Plan, Policy, Stateless, StopRule
from outrider.core.sampling import Law
from outrider.models.acceptance_head import load_acceptance_head
from outrider.policies.checks import check_between, check_count, check_nodes, check_order
from outrider.policies.draft_law import probability_of
from outrider.policies.lengths import plan_of

Predictor = Callable[[Law, Tensor], Sequence[float]]
"""Predicted acceptance probability of each row's guess [B], drawn from the law."""


@dataclass(frozen=True)
class ThresholdOptions:
    """How likely an earlier rejection must be before drafting stops."""

    num_draft_tokens: int = 12
    """Most guesses of a round."""
    min_draft_tokens: int = 1
    """Guesses that are drawn whatever is predicted."""
    threshold: float = 0.7
    """Probability of an earlier rejection above which drafting stops, h."""
    head: str | None = None
    """Folder of a trained acceptance head (``outrider train acceptance-head``); the draft's own probability if not given."""
    num_tree_nodes: int | None = None
    """Guesses in all at the longest depth, for drafters that grow trees; as many as along one path if not given."""

    def __post_init__(self) -> None:
        check_count("num_draft_tokens", self.num_draft_tokens)
        check_nodes(self.num_tree_nodes)
        check_count("min_draft_tokens", self.min_draft_tokens)
        check_order("min_draft_tokens", self.min_draft_tokens, "num_draft_tokens", self.num_draft_tokens)
        check_between("threshold", self.threshold, 0, 1)


@final
class ThresholdStop(StopRule):
    """Multiplies the predicted acceptance probabilities along each row's path."""

    def __init__(self, options: ThresholdOptions, predict: Predictor, num_rows: int) -> None:
        self.options = options
        self.predict = predict
        self.all_accepted = [1.0] * num_rows
        """Predicted probability that no guess of the row is rejected."""

    def before(self, depth: int, law: Law) -> None:
        del depth, law

    def after(self, depth: int, law: Law, guesses: Tensor) -> list[bool] | None:
        predicted = self.predict(law, guesses)
        self.all_accepted = [so_far * a for so_far, a in zip(self.all_accepted, predicted, strict=True)]
        if depth + 1 < self.options.min_draft_tokens:
            return None
        return [1 - chance <= self.options.threshold for chance in self.all_accepted]


@final
class Threshold(Policy):
    """Plans long drafts, which its stopping rule cuts short."""

    def __init__(self, options: ThresholdOptions | None = None, *, predictor: Predictor = probability_of) -> None:
        self.options = options or ThresholdOptions()
        head = self.options.head
        self.predictor = predictor if head is None else load_acceptance_head(head).predict

    def start(self, num_rows: int) -> Stateless:
        del num_rows
        return Stateless()

    def plan(self, state: Stateless, num_rows: int) -> Plan:
        del state
        longest, rule = self.options.num_draft_tokens, ThresholdStop(self.options, self.predictor, num_rows)
        return plan_of([longest] * num_rows, longest, self.options.num_tree_nodes, stop=rule)

    def update(self, state: Stateless, observation: Observation) -> None:
        del state, observation
