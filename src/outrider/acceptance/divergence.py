"""Fuzzy acceptance: where the draft's law is near the target's, the guess is accepted without a test. LOSSY.

The gate looks at the two laws of a position and not at the guess: it opens where their distance is at most a threshold.
Where it is shut, the guess takes the exact test of rejection sampling (the paper replaces it by a draw from p: the same
law, fewer guesses kept). With threshold 0 only equal laws open the gate, which is rejection sampling itself.

    keep x_i  iff  Div(p_i, q_i) <= T  or  u_i q_i(x_i) < p_i(x_i);     first rejection: y ~ norm((p_i - q_i)+)

Holsman et al. 2025, "Fuzzy Speculative Decoding", arXiv 2502.20704. What is lost: out = q where the gate is open, and p where
it is shut. So TV(out, p) is TV(p, q) or 0. It is at most T by "tv", sqrt(T / 2) by "kl", sqrt(2 T) by "js". The gate "w1"
bounds how far the meaning moves and not how often the word changes. At temperature 0 both laws are point masses, at distance 0
(the guess is right) or at the largest distance there is. So the text stays the greedy one while T is below that largest
distance. It is log 2 for "js", 1 for "tv", infinite for "kl", and half the distance of the two embeddings for "w1".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.acceptance import discrepancy
from outrider.acceptance.chains import chain_laws, of_guesses, tested_chains, tested_row
from outrider.acceptance.lossy import LossyRule, OneGuess
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import OptionError, nearest
from outrider.core.interfaces import RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise
from outrider.core.sampling import Law
from outrider.core.verdict import RowVerdict, Verdict

MEASURES = ("js", "kl", "tv", "w1")


@dataclass(frozen=True, eq=False)
class DivergenceOptions:
    """The divergence between draft and target, and how much of it is tolerated."""

    divergence: str = "js"
    """"js", "kl", "tv", or "w1" over token embeddings."""
    divergence_threshold: float = 0.05
    """T: guesses are taken untested where the distance is at most this; 0 is exact."""
    embeddings: Tensor | None = field(default=None, repr=False)
    """[V, H] token embeddings, for "w1"."""
    w1_support: int = 16
    """Tokens of each law whose mass "w1" transports; the rest is charged the largest cost."""

    def __post_init__(self) -> None:
        if self.divergence not in MEASURES:
            raise OptionError(f"unknown divergence {self.divergence!r}; {nearest(self.divergence, MEASURES)}")
        if not self.divergence_threshold >= 0:
            raise OptionError(f"divergence_threshold = {self.divergence_threshold} is not valid; use 0 (lossless) or more")
        if self.divergence == "w1" and self.embeddings is None:
            raise OptionError("divergence 'w1' needs token embeddings; give embeddings=, or use 'js'")
        if self.w1_support < 1:
            raise OptionError(f"w1_support = {self.w1_support} is not valid; use at least 1")


@final
class Divergence(LossyRule):
    """Take guesses untested where the laws agree."""

    exact_for: ClassVar = (Draws.IID,)
    shape: ClassVar = Shape.CHAIN

    def __init__(self, options: DivergenceOptions | None = None) -> None:
        self.options = options or DivergenceOptions()

    def is_open(self, p: Tensor, q: Tensor) -> Tensor:
        """[...] true where guesses are taken untested."""
        return self.measure(p, q) <= self.options.divergence_threshold

    def measure(self, p: Tensor, q: Tensor) -> Tensor:
        """[...] the distance of two laws [..., V]."""
        options = self.options
        if options.divergence == "w1":
            assert options.embeddings is not None
            return discrepancy.w1(p, q, embeddings=options.embeddings, support=options.w1_support)
        return {"js": discrepancy.js, "kl": discrepancy.kl, "tv": discrepancy.tv}[options.divergence](p, q)

    def judge_row(self, row: RowDraft, judged: Tensor, source: RandomSource) -> RowVerdict:
        """Judges by p itself, because the guesses' q is shaped by the same temperature."""
        del judged

        def untested(node: int, guess: int) -> bool:
            assert row.q is not None, "sampled guesses come with their q"
            p, q = row.p[node], row.q[node]
            return bool(q[guess] > 0) and bool(self.is_open(p, q))  # a guess q cannot make was not drawn from it

        return tested_row(row, source, untested=untested)

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        p, q = chain_laws(draft, law)
        untested = (of_guesses(draft.tree, q) > 0) & self.is_open(p[:, :-1], q[:, :-1])
        return tested_chains(draft.tree, p, q, noise, untested=untested)

    def one_guess(self, p: Tensor, q: Tensor, *, judged: Tensor | None = None) -> OneGuess:
        del judged
        is_open = self.is_open(p, q)
        kept = torch.where(is_open, 1.0, torch.minimum(p, q).sum(-1))
        return OneGuess(torch.where(is_open[..., None], q, p), kept)
