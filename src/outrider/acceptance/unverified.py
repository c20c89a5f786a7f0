"""Unverified acceptance: every guess of a chain but the last is kept without a test. LOSSY.

Some drafters continue only after guesses they trust: ``specee`` and ``kangaroo`` end a chain with the first guess they doubt.
This rule trusts them. It keeps every guess of a chain but the last, and the last takes the exact test of ``delta``. With
``specee`` that is the early exit of its paper (Xu et al. 2025, arXiv 2504.08850), which emits the token of a trusted exit. The
target's pass then only fills the upper layers' cache, for all kept guesses at once.

    keep x  iff  x has a successor in the chain and p(x) > 0,   or  u < p(x)

What is lost: a kept guess is emitted with the probability that the exit gave it. One step is off by TV(q, p), where q is the
exit's law; at temperature 0 that is 1 where the exit's likeliest token is not the target's. ``num_unverified`` 0 is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.acceptance.gated import GatedRule
from outrider.acceptance.lossy import OneGuess
from outrider.acceptance.siblings import given_to
from outrider.core.draft import Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import RowDraft
from outrider.core.tree import TokenTree


@dataclass(frozen=True)
class UnverifiedOptions:
    """How far a drafter is trusted."""

    num_unverified: int = 64
    """Most guesses of a round that are kept without a test; 0 is lossless."""

    def __post_init__(self) -> None:
        if not isinstance(self.num_unverified, int) or self.num_unverified < 0:
            raise OptionError(f"num_unverified = {self.num_unverified!r} is not valid; use a whole number from 0 (lossless)")


@final
class Unverified(GatedRule):
    """Keep every guess of a chain but the last."""

    shape: ClassVar = Shape.CHAIN

    def __init__(self, options: UnverifiedOptions | None = None) -> None:
        self.options = options or UnverifiedOptions()

    def limit(self, judged: Tensor) -> Tensor:
        """Infinite, so that no probability passes: this gate looks at whether the drafter continued."""
        return torch.full(judged.shape[:-1], math.inf, dtype=judged.dtype, device=judged.device)

    def gate(self, tree: TokenTree, judged: Tensor) -> Tensor:
        places = torch.arange(1, tree.num_nodes, device=judged.device)
        ends = torch.tensor(tree.sizes, device=judged.device)[:, None] - 1
        return (places < ends) & (places <= self.options.num_unverified) & (given_to(tree, judged) > 0)

    def gate_row(self, row: RowDraft, judged: Tensor) -> list[bool]:
        edges = zip(row.tokens[1:], row.parents[1:], strict=True)
        possible = [float(judged[parent, token]) > 0 for token, parent in edges]
        last = min(len(row.tokens) - 2, self.options.num_unverified)
        return [False, *(can and place <= last for place, can in enumerate(possible, 1))]

    def one_guess(self, p: Tensor, q: Tensor, *, judged: Tensor | None = None) -> OneGuess:
        """The outcome of a guess from which the drafter continued."""
        judged = p if judged is None else judged
        return self._outcome(p, q, (judged > 0) & (self.options.num_unverified > 0))
