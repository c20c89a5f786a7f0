"""The rule for chosen guesses: each is accepted with the probability the target still gives it.

A guess that was chosen rather than sampled (top-k, copied, retrieved) is a draw from a point mass. Rejection sampling with a
point mass at x accepts x with probability p(x) and otherwise leaves p without x. Siblings are tried in order, each against what
its elders left. When all are rejected, the token is drawn from the rest. In distribution this is: draw y ~ p and follow the
branch that holds y, if there is one.

    r <- p
    for child x in order:   accept with probability r(x) / sum(r),   else r(x) <- 0
    no child left:          y ~ r / sum(r)

Recursive rejection (Miao et al. 2023, SpecInfer, arXiv 2305.09781) with point masses, as EAGLE-2 verifies its top-k trees (Li
et al. 2024, arXiv 2406.16858). Lossless for any guesses that do not depend on this rule's own numbers. It is declared for
chosen ones only: a sampled guess has a q, and the rules that use q accept it more often.
"""

from __future__ import annotations

from typing import ClassVar, final

from outrider.acceptance.paths import chain_verdict, deepest, first_run, guess_lanes, path_of, row_at, tree_verdict
from outrider.acceptance.residual import draw, draw_row
from outrider.acceptance.siblings import first_accepted, given_to, without_children
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise, Purpose
from outrider.core.sampling import Law
from outrider.core.verdict import RowVerdict, Verdict


@final
class Delta(AcceptanceRule):
    """Accept a chosen guess with the target's own probability of it."""

    exact_for: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.TREE
    lossless: ClassVar = True

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        node, entered = 0, True
        rest = row.p[node]
        while entered:
            entered, rest = False, row.p[node].clone()
            for child in row.children(node):
                token = row.tokens[child]
                if rest[token] > 0 and source.bernoulli(float(rest[token] / rest.sum()), child):
                    node, entered = child, True
                    break
                rest[token] = 0
        return RowVerdict(path_of(row, node), draw_row(rest, row.p[node], source), rejected=bool(row.children(node)))

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        tree, probs = draft.tree, law.probs
        coins = noise.uniform(Purpose.ACCEPT, guess_lanes(tree))
        given = given_to(tree, probs)
        if tree.is_chain:
            ends = first_run(tree, coins < given)
        else:
            ends = deepest(tree, first_accepted(tree, given, coins))
        p = row_at(probs, ends)
        next_token = draw(without_children(tree, ends, p), p, noise)
        return chain_verdict(tree, ends, next_token) if tree.is_chain else tree_verdict(tree, ends, next_token)
