"""The exact rule for chosen guesses with a gate in front: a guess the gate lets through is kept outright.

At every node the gate sets the smallest judged probability that passes it. A gate may also look at something else (``judge``).
A guess that does not pass takes the exact test of ``delta``, made easier by a share: the test assumes that the target's
probabilities add up to that share. With a closed gate and a share of 1 the rule is the exact one, number for number.

    for child x in order:   keep if judged(x) >= limit  or  u (share - sum of p over elders) < p(x)
    no child kept:          y ~ p without the children

One guess x ~ q: a(x) = 1 if judged(x) >= limit else min(1, p(x) / share);   w(x) = q(x) (1 - a(x)) / (1 - p(x))

    out(v) = q(v) a(v) + p(v) (sum(w) - w(v))

What is lost: a guess that passes the gate is emitted with the probability with which it was proposed, not with p's.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from outrider.acceptance.lossy import LossyRule, OneGuess, judged_law
from outrider.acceptance.paths import chain_verdict, deepest, first_run, guess_lanes, path_of, row_at, tree_verdict
from outrider.acceptance.residual import draw, draw_row, ratio
from outrider.acceptance.siblings import first_accepted, given_to, without_children
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise, Purpose
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
from outrider.core.verdict import RowVerdict, Verdict


class GatedRule(LossyRule):
    """A gate, then the exact test of chosen guesses."""

    exact_for: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.TREE

    @abstractmethod
    def limit(self, judged: Tensor) -> Tensor:
        """[..., N] the smallest judged probability that passes the gate at each node, from laws [..., N, V]."""

    def share(self) -> float:
        """The probability mass against which guesses are tested; 1 is exact."""
        return 1.0

    def judged_by(self, law: Law) -> Tensor:
        """[B, N, V] the laws that the gate judges by."""
        return judged_law(law)

    def gate(self, tree: TokenTree, judged: Tensor) -> Tensor:
        """[B, N - 1] true for the guesses that pass the gate, from laws [B, N, V]."""
        seen = given_to(tree, judged)
        return (seen > 0) & (seen >= self.limit(judged).gather(1, tree.parents[:, 1:]))

    def gate_row(self, row: RowDraft, judged: Tensor) -> list[bool]:
        """Which nodes of one row pass the gate. The root is not a guess."""
        limits = self.limit(judged).tolist()
        edges = zip(row.tokens[1:], row.parents[1:], strict=True)
        return [False, *(_passes(float(judged[parent, token]), limits[parent]) for token, parent in edges)]

    def judge_row(self, row: RowDraft, judged: Tensor, source: RandomSource) -> RowVerdict:
        let_through = self.gate_row(row, judged)
        node, entered = 0, True
        rest = row.p[node]
        while entered:
            entered, left, rest = False, self.share(), row.p[node].clone()
            for child in row.children(node):
                token = row.tokens[child]
                given = float(rest[token])
                if let_through[child] or source.bernoulli(ratio(given, left), child):
                    node, entered = child, True
                    break
                left, rest[token] = left - given, 0
        return RowVerdict(path_of(row, node), draw_row(rest, row.p[node], source), rejected=bool(row.children(node)))

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        tree, probs = draft.tree, law.probs
        coins = noise.uniform(Purpose.ACCEPT, guess_lanes(tree))
        given, outright = given_to(tree, probs), self.gate(tree, self.judged_by(law))
        if tree.is_chain:
            ends = first_run(tree, outright | (coins * self.share() < given))
        else:
            ends = deepest(tree, first_accepted(tree, given, coins, outright=outright, share=self.share()))
        p = row_at(probs, ends)
        next_token = draw(without_children(tree, ends, p), p, noise)
        return chain_verdict(tree, ends, next_token) if tree.is_chain else tree_verdict(tree, ends, next_token)

    def one_guess(self, p: Tensor, q: Tensor, *, judged: Tensor | None = None) -> OneGuess:
        judged = p if judged is None else judged
        return self._outcome(p, q, (judged > 0) & (judged >= self.limit(judged)[..., None]))

    def _outcome(self, p: Tensor, q: Tensor, outright: Tensor) -> OneGuess:
        """The outcome of one guess x ~ q, where ``outright`` [M, V] marks the tokens that pass the gate."""
        chance = torch.where(outright, 1.0, (p / self.share()).clamp(max=1))
        refused = torch.where(chance < 1, q * (1 - chance) / (1 - p), 0.0)
        law = q * chance + p * (refused.sum(-1, keepdim=True) - refused)
        return OneGuess(law, (q * chance).sum(-1))


def _passes(seen: float, limit: float) -> bool:
    return seen > 0 and seen >= limit
