"""Lenience: rejection sampling that accepts guesses up to 1/l times too often. LOSSY.

The draft's law is scaled down by l before it is compared with the target's, so a guess is kept up to 1/l times as often as it
should be. After a rejection the token is drawn from the part of p above the scaled law. With l = 1 this is rejection sampling,
number for number. At temperature 0 a guess is kept when it is at least l times as likely as the best token.

    keep x_i  iff  u_i l q_i(x_i) < p_i(x_i);     first rejection: y ~ norm((p_i - l q_i)+);     none: y ~ p_{K+1}
    temperature 0:  keep x_i  iff  x_i is the argmax or  judged(x_i) > l max judged;     rejection: y = argmax

Leviathan, Kalman & Matias 2023, arXiv 2211.17192, appendix. What is lost: kept guesses supply min(q, p/l), so a token
may come up to 1/l times too often and never more:

    out = min(q, p/l) + R norm((p - l q)+) <= p / l,   R = 1 - sum min(q, p/l);     hence TV(out, p) <= 1 - l

(With S = sum (p - l q)+: sum min(l q, p) = 1 - S, so R = (S - 1 + l) / l <= S / l and out <= (min(l q, p) + (p - l q)+) / l.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.acceptance.chains import chain_laws, of_guesses, tested_chains, tested_row
from outrider.acceptance.lossy import LossyRule, OneGuess, is_single, judged_law
from outrider.acceptance.residual import NOTHING, surplus
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise
from outrider.core.sampling import Law
from outrider.core.verdict import RowVerdict, Verdict


@dataclass(frozen=True)
class LenientOptions:
    """Options of the lenient rule."""

    lenience: float = 0.5
    """l: no token comes more than 1/l times as often as it should; 1 is exact."""

    def __post_init__(self) -> None:
        if not 0 < self.lenience <= 1:
            raise OptionError(f"lenience = {self.lenience} is not valid; use a number above 0 and at most 1 (1 is lossless)")


@final
class Lenient(LossyRule):
    """Accept a sampled guess with probability min(1, p / (l q))."""

    exact_for: ClassVar = (Draws.IID,)
    shape: ClassVar = Shape.CHAIN

    def __init__(self, options: LenientOptions | None = None) -> None:
        self.options = options or LenientOptions()

    def judge_row(self, row: RowDraft, judged: Tensor, source: RandomSource) -> RowVerdict:
        near = self._near(row.p, judged)
        return tested_row(row, source, scale=self.options.lenience, untested=lambda node, guess: bool(near[node, guess]))

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        p, q = chain_laws(draft, law)
        near = of_guesses(draft.tree, self._near(p, judged_law(law)))
        return tested_chains(draft.tree, p, self.options.lenience * q, noise, untested=near)

    def one_guess(self, p: Tensor, q: Tensor, *, judged: Tensor | None = None) -> OneGuess:
        near = self._near(p, p if judged is None else judged)
        supplied = torch.where(near, q, torch.minimum(q, p / self.options.lenience))
        kept = supplied.sum(-1)
        owed = surplus(p, self.options.lenience * q)
        owed = torch.where(owed.sum(-1, keepdim=True) > NOTHING, owed, p)
        return OneGuess(supplied + (1 - kept)[..., None] * owed / owed.sum(-1, keepdim=True), kept)

    def _near(self, p: Tensor, judged: Tensor) -> Tensor:
        """[..., V] tokens that are kept at temperature 0 because they are nearly as likely as the best. The test is strict, so
        l = 1 keeps no ties."""
        return is_single(p)[..., None] & (judged > self.options.lenience * judged.amax(-1, keepdim=True))
