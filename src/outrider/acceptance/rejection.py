"""Token-wise rejection sampling: the rule of the first speculative decoders.

A guess x sampled from the draft's law q is kept with probability min(1, p(x) / q(x)). The first rejected guess is replaced by a
draw from what q lacks, and the rest of the chain is dropped. Kept guesses supply min(p, q) and replacements supply (p - q)+,
which add up to p. After a chain that is kept whole comes a bonus token from p.

    accept x_i  iff  u_i q_i(x_i) < p_i(x_i);    first rejection: y ~ norm((p_i - q_i)+);    none: y ~ p_{K+1}

Leviathan, Kalman & Matias 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318. Lossless for guesses sampled
from exactly the q that is given here. The test does not divide and is strict, so a token the target cannot say is
never kept.
"""

from __future__ import annotations

from typing import ClassVar, final

from outrider.acceptance.chains import chain_laws, tested_chains, tested_row
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise
from outrider.core.sampling import Law
from outrider.core.verdict import RowVerdict, Verdict


@final
class Rejection(AcceptanceRule):
    """Accept a sampled guess with probability min(1, p/q)."""

    exact_for: ClassVar = (Draws.IID,)
    shape: ClassVar = Shape.CHAIN
    lossless: ClassVar = True

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        return tested_row(row, source)

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        return tested_chains(draft.tree, *chain_laws(draft, law), noise)
