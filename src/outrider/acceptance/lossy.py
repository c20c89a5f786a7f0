"""Lossy rules keep more guesses than the target's law allows, and can compute how much they lose.

A lossy rule judges guesses by a law. That is p itself, except at temperature 0. There p is a point mass that says nothing about
the other tokens, so guesses are judged by the softmax of the same logits. Tokens are still drawn from p. Each rule also gives
the law of the first token it emits from one guess in closed form, and so its own bias.

    out(v) = P(first emitted token = v | one guess x ~ q);     one-step loss = TV(out, p) = 1/2 sum_v |out(v) - p(v)|
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.sampling import Law
from outrider.core.verdict import RowVerdict


@dataclass(frozen=True, eq=False)
class OneGuess:
    """The outcome of a rule for one guess drawn from q, in each of M contexts."""

    law: Tensor
    """[M, V] the law of the first emitted token."""
    kept: Tensor
    """[M] probability that the guess is kept."""


class LossyRule(AcceptanceRule):
    """A rule whose output law is not the target's. ``exact_for`` names the draws for which its lossless setting is
    exact."""

    lossless: ClassVar = False

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        return self.judge_row(row, row.p, source)

    @abstractmethod
    def judge_row(self, row: RowDraft, judged: Tensor, source: RandomSource) -> RowVerdict:
        """The scalar rule. ``judged`` [N, V] are the laws by which guesses are judged; tokens are still drawn from p."""

    @abstractmethod
    def one_guess(self, p: Tensor, q: Tensor, *, judged: Tensor | None = None) -> OneGuess:
        """The outcome of one guess x ~ q in M contexts, in closed form; all laws are [M, V]."""


def judged_law(law: Law) -> Tensor:
    """[B, N, V] the law that guesses are judged by."""
    # The sampler writes a law of temperature 0 as log-probabilities 0 and -inf. A law that only happens to have one
    # possible token (cut by top-p, or forced by a grammar) has another logit there and is judged as it is.
    greedy = ((law.logits == 0) | (law.logits == -torch.inf)).all(-1, keepdim=True)
    return torch.where(greedy, law.adjusted.softmax(-1), law.probs)


def is_single(p: Tensor) -> Tensor:
    """[...] true where ``p`` [..., V] leaves one possible token, as at temperature 0."""
    return (p > 0).sum(-1) == 1
