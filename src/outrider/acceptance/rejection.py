"""Token-wise rejection sampling: the rule of the first speculative decoders.

A guess x sampled from the draft's law q is kept with probability min(1, p(x) / q(x)); the first one that is not is
replaced by a draw from what q lacks, and the rest of the chain is dropped. Kept guesses supply min(p, q) and
replacements supply (p - q)+, which add up to p. After a chain that is kept whole comes a bonus token from p.

    accept x_i  iff  u_i q_i(x_i) < p_i(x_i);    first rejection: y ~ norm((p_i - q_i)+);    none: y ~ p_{K+1}

Leviathan, Kalman & Matias 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318. Lossless for guesses sampled
from exactly the q that is given here. The test does not divide and is strict, so a token the target cannot say is
never kept.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch

from outrider.acceptance.paths import chain_verdict, first_run, guess_lanes, last_nodes, path_of, row_at
from outrider.acceptance.residual import draw, draw_row, ratio, surplus
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise, Purpose
from outrider.core.sampling import Law
from outrider.core.verdict import RowVerdict, Verdict


@final
class Rejection(AcceptanceRule):
    """Accept a sampled guess with probability min(1, p/q)."""

    exact_for: ClassVar = (Draws.IID,)
    shape: ClassVar = Shape.CHAIN
    lossless: ClassVar = True

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        last = len(row.tokens) - 1
        for node in range(last):
            assert row.q is not None, "sampled guesses come with their q"
            p, q, guess = row.p[node], row.q[node], row.tokens[node + 1]
            if not source.bernoulli(ratio(float(p[guess]), float(q[guess])), node + 1):
                return RowVerdict(path_of(row, node), draw_row(surplus(p, q), p, source), rejected=True)
        return RowVerdict(path_of(row, last), draw_row(row.p[last], row.p[last], source), rejected=False)

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        tree, p = draft.tree, law.probs
        assert tree.is_chain, "this rule walks chains"
        assert draft.q is not None or tree.num_nodes == 1, "sampled guesses come with their q"
        q = p if draft.q is None else draft.q
        guesses = tree.tokens[:, 1:, None]
        p_guess, q_guess = p[:, :-1].gather(2, guesses)[..., 0], q[:, :-1].gather(2, guesses)[..., 0]
        coins = noise.uniform(Purpose.ACCEPT, guess_lanes(tree))
        ends = first_run(tree, coins * q_guess < p_guess)
        p_end = row_at(p, ends)
        complete = (ends == last_nodes(tree))[:, None]  # where nothing was guessed q means nothing
        owed = torch.where(complete, p_end, surplus(p_end, row_at(q, ends)))
        return chain_verdict(tree, ends, draw(owed, p_end, noise))
