"""How much a rule loses in one step: the total variation between the first token it emits and the target's law.

It is computed in two independent ways. ``enumerated_law`` runs the scalar rule through every random outcome on small laws, for
any rule and any draft. ``measure`` uses the rule's closed form for one guess, over thousands of contexts of a real model. Tests
show that the two agree up to rounding. A lossless rule has loss 0 in both.

    TV(out, p) = 1/2 sum_v |out(v) - p(v)|  =  the least probability with which a reader could notice one token
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.acceptance.discrepancy import tv
from outrider.acceptance.lossy import LossyRule
from outrider.core.draft import Draws
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.random_source import RandomSource, enumerate_law

_DRAFT_LANE = 1_000_000
"""A lane that no rule uses, for drawing the guess."""


def enumerated_law(rule: AcceptanceRule, draft: Callable[[RandomSource], RowDraft]) -> Tensor:
    """[V] the exact law of the first token ``rule`` emits for trees made by ``draft``, by running every branch."""

    def first_token(source: RandomSource) -> tuple[int, int]:
        row = draft(source)
        verdict = rule.walk_row(row, source)
        return row.p.shape[1], row.tokens[verdict.path[0]] if verdict.path else verdict.next_token

    law = enumerate_law(first_token)
    vocab_size = next(iter(law))[0]
    result = torch.zeros(vocab_size, dtype=torch.float64)
    for (_, token), weight in law.items():
        result[token] += weight
    return result


def one_guess_draft(rule: AcceptanceRule, p: Tensor, q: Tensor) -> Callable[[RandomSource], RowDraft]:
    """Drafts one guess from ``q`` in the rule's preferred way of drawing. What follows the guess does not matter
    here."""
    laws, drafts = p.double().expand(2, -1), q.double().expand(2, -1)
    draws = rule.exact_for[0]

    def draft(source: RandomSource) -> RowDraft:
        guess = source.categorical(q.double(), _DRAFT_LANE)
        return RowDraft([0, guess], [-1, 0], laws, None if draws is Draws.DETERMINISTIC else drafts, draws)

    return draft


@dataclass(frozen=True, eq=False)
class Loss:
    """The loss and the acceptance of one guess in M contexts."""

    rule: str
    tv: Tensor
    """[M] one-step total variation."""
    kept: Tensor
    """[M] probability that the guess is kept."""
    exact_kept: Tensor
    """[M] probability that rejection sampling keeps the guess: 1 - TV(p, q). No lossless rule keeps more."""

    def __str__(self) -> str:
        return (
            f"{self.rule}: one-step TV mean {float(self.tv.mean()):.4f}, max {float(self.tv.max()):.4f}; "
            f"keeps {float(self.kept.mean()):.1%} of guesses, lossless {float(self.exact_kept.mean()):.1%} "
            f"({len(self.tv)} contexts)"
        )


def measure(rule: LossyRule, p: Tensor, q: Tensor, *, judged: Tensor | None = None, name: str = "") -> Loss:
    """The loss of ``rule`` with one guess x ~ q in M contexts, from the laws [M, V] of a target and a drafter.

    A chosen guess is a ``q`` with one possible token. ``judged`` matters at temperature 0: see ``judged_law``."""
    outcome = rule.one_guess(p, q, judged=judged)
    return Loss(name or type(rule).__name__, tv(outcome.law, p), outcome.kept, torch.minimum(p, q).sum(-1))
