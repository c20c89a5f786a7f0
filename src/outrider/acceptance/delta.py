"""The rule for chosen guesses: each is accepted with the probability the target still gives it.

A guess that was chosen rather than sampled (top-k, copied, retrieved) is a draw from a point mass, and rejection
sampling with a point mass at x accepts x with probability p(x) and otherwise leaves p without x. Siblings are tried
in order, each against what its elders left; when all are rejected, the rest is drawn from. In distribution this is:
draw y ~ p and follow the branch that holds y, if there is one.

    r <- p
    for child x in order:   accept with probability r(x) / sum(r),   else r(x) <- 0
    no child left:          y ~ r / sum(r)

Recursive rejection (Miao et al. 2023, SpecInfer, arXiv 2305.09781) with point masses, as EAGLE-2 verifies its top-k
trees (Li et al. 2024, arXiv 2406.16858). Lossless for any guesses that do not depend on this rule's own numbers; it
is declared for chosen ones only, because a sampled guess has a q, and the rules that use q accept it more often.
"""

from __future__ import annotations

from typing import ClassVar, final

from torch import Tensor

from outrider.acceptance.paths import (
    chain_verdict,
    children_of,
    deepest,
    first_run,
    guess_lanes,
    path_of,
    row_at,
    tree_verdict,
)
from outrider.acceptance.residual import draw, draw_row
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise, Purpose
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
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
        given = _target_probability(tree, probs)
        if tree.is_chain:
            ends = first_run(tree, coins < given)
        else:
            ends = deepest(tree, _entered(tree, given, coins))
        p = row_at(probs, ends)
        next_token = draw(_without_children(tree, ends, p), p, noise)
        return chain_verdict(tree, ends, next_token) if tree.is_chain else tree_verdict(tree, ends, next_token)


def _target_probability(tree: TokenTree, probs: Tensor) -> Tensor:
    """[B, N - 1] p(guess | its parent)."""
    return probs.flatten(1).gather(1, tree.parents[:, 1:] * probs.shape[2] + tree.tokens[:, 1:])


def _entered(tree: TokenTree, given: Tensor, coins: Tensor) -> Tensor:
    """[B, N - 1] true for the first accepted guess of each parent."""
    tokens, parents = tree.tokens[:, 1:], tree.parents[:, 1:]
    elder = (parents[:, :, None] == parents[:, None]).tril(-1)  # [b, i, j]: j is an earlier sibling of i
    repeated = (elder & (tokens[:, :, None] == tokens[:, None])).any(-1)
    given = given.masked_fill(repeated, 0)  # its elder twin has taken all that p gives the token
    left = (1 - (elder * given[:, None]).sum(-1)).clamp(min=0)  # below 0 by rounding, it would let an impossible guess in
    accepted = coins * left < given
    return accepted & ~(elder & accepted[:, None]).any(-1)


def _without_children(tree: TokenTree, nodes: Tensor, p: Tensor) -> Tensor:
    """[B, V] the law after ``nodes`` without the guesses made there."""
    # A minimum per token: 0 for a rejected guess, infinity (no change) for the tokens of other nodes.
    bound = p.new_zeros(tree.tokens.shape).masked_fill(~children_of(tree, nodes), float("inf"))
    return p.scatter_reduce(1, tree.tokens, bound, "amin")
