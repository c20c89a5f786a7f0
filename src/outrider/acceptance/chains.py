"""The walk that the rules of sampled chains share: test one guess after another against q, and draw from the residual after a
rejection.

    accept x_i  iff  u_i q_i(x_i) < p_i(x_i), or untested;    first rejection: y ~ norm((p_i - q_i)+);    none: y ~ p_{K+1}

Rules differ in the q they test against (a lenient rule scales it down) and in which guesses they take untested (a lossless one
takes none). The test does not divide and is strict, so a token the target cannot say is never kept by it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.acceptance.paths import chain_verdict, first_run, guess_lanes, last_nodes, path_of, row_at
from outrider.acceptance.residual import draw, draw_row, ratio, surplus
from outrider.core.draft import Draft
from outrider.core.interfaces import RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise, Purpose
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
from outrider.core.verdict import RowVerdict, Verdict

Untested = Callable[[int, int], bool]
"""Whether the guess (second argument) at a node (first) is accepted untested."""


def tested_row(row: RowDraft, source: RandomSource, *, scale: float = 1.0, untested: Untested | None = None) -> RowVerdict:
    """One row, tested against ``scale`` times q."""
    last = len(row.tokens) - 1
    for node in range(last):
        assert row.q is not None, "sampled guesses come with their q"
        p, q, guess = row.p[node], scale * row.q[node], row.tokens[node + 1]
        if untested is not None and untested(node, guess):
            continue
        if not source.bernoulli(ratio(float(p[guess]), float(q[guess])), node + 1):
            return RowVerdict(path_of(row, node), draw_row(surplus(p, q), p, source), rejected=True)
    return RowVerdict(path_of(row, last), draw_row(row.p[last], row.p[last], source), rejected=False)


def chain_laws(draft: Draft, law: Law) -> tuple[Tensor, Tensor]:
    """[B, N, V] p and q at every node. Where nothing was guessed q is set to p and is not used."""
    assert draft.tree.is_chain, "this rule walks chains"
    assert draft.q is not None or draft.tree.num_nodes == 1, "sampled guesses come with their q"
    return law.probs, law.probs if draft.q is None else draft.q


def of_guesses(tree: TokenTree, values: Tensor) -> Tensor:
    """[B, N - 1] each guess's entry in ``values`` [B, N, V] of the node it was made at."""
    return values[:, :-1].gather(2, tree.tokens[:, 1:, None])[..., 0]


def tested_chains(tree: TokenTree, p: Tensor, q: Tensor, noise: Noise, *, untested: Tensor | None = None) -> Verdict:
    """All rows, tested against ``q`` [B, N, V]. ``untested`` [B, N - 1] marks guesses that are accepted without a
    test."""
    coins = noise.uniform(Purpose.ACCEPT, guess_lanes(tree))
    kept = coins * of_guesses(tree, q) < of_guesses(tree, p)
    ends = first_run(tree, kept if untested is None else untested | kept)
    p_end = row_at(p, ends)
    complete = (ends == last_nodes(tree))[:, None]
    owed = torch.where(complete, p_end, surplus(p_end, row_at(q, ends)))
    return chain_verdict(tree, ends, draw(owed, p_end, noise))
