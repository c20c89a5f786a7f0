"""The walk of rules that judge a sampled guess by the probability of its neighbours or of its group. LOSSY.

A relaxed rule defines two things for a guess x ~ q: the odds with which it is kept, and the residual after it was rejected.
Everything else follows: the walk of one row, the walk of a batch, and the law of the first token in closed form. Siblings are
tried in order, each against what its elders left, as recursive rejection does; so published LANTERN walks EAGLE's trees.

    r <- p;   for child x in order:   keep with probability  a(x) = min(1, claim(x) / q'(x)),   else  r <- norm(owed_x)
    no child left:   y ~ r
    one guess:   out(v) = q(v) a(v) + sum_x q(x) (1 - a(x)) norm(owed_x)(v)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from outrider.acceptance.lossy import LossyRule, OneGuess, is_single, judged_law
from outrider.acceptance.paths import chain_verdict, first_run, guess_lanes, last_nodes, path_of, row_at, tree_verdict
from outrider.acceptance.residual import NOTHING, draw, draw_row
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise, Purpose
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
from outrider.core.verdict import RowVerdict, Verdict

_MOST = 1 << 13
"""Most numbers of laws that the closed form holds at once. It loops over the guesses that any of the contexts allows, so a few
contexts at a time need few steps."""


class RelaxedRule(LossyRule, ABC):
    """A lossy rule of independent guesses. Its parts work on M contexts at once: laws are [M, V], guesses [M]."""

    exact_for: ClassVar = (Draws.IID,)
    shape: ClassVar = Shape.TREE

    @abstractmethod
    def odds(self, p: Tensor, q: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
        """[M] numerator and [M] denominator: the guess is kept with probability min(1, numerator / denominator), and
        never where the numerator is 0."""

    @abstractmethod
    def owed(self, p: Tensor, q: Tensor, guess: Tensor) -> Tensor:
        """[M, V] unnormalised residual of p after a rejected guess. Where it is all 0, p is unchanged."""

    def near_best(self, judged: Tensor, guess: Tensor) -> Tensor:
        """[M] whether the guess is kept at temperature 0, judged by the softmax of the logits. The argmax always is."""
        return judged.argmax(-1) == guess

    def judge_row(self, row: RowDraft, judged: Tensor, source: RandomSource) -> RowVerdict:
        node, entered, rest = 0, True, row.p[:1]
        while entered:
            here = slice(node, node + 1)
            entered, p, rest = False, row.p[here], row.p[here]
            for child in row.children(node):
                assert row.q is not None, "sampled guesses come with their q"
                q, guess = row.q[here], torch.tensor([row.tokens[child]])
                if source.bernoulli(float(self._chance(p, rest, q, guess, judged[here])), child):
                    node, entered = child, True
                    break
                rest = self._after(p, rest, q, guess)
        return RowVerdict(path_of(row, node), draw_row(rest[0], row.p[node], source), rejected=bool(row.children(node)))

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        assert draft.q is not None or draft.tree.num_nodes == 1, "sampled guesses come with their q"
        q = law.probs if draft.q is None else draft.q
        walk = self._walk_chains if draft.tree.is_chain else self._walk_trees
        return walk(draft.tree, law, q, noise)

    def _walk_chains(self, tree: TokenTree, law: Law, q: Tensor, noise: Noise) -> Verdict:
        """All guesses at once: on a chain each is the only child."""
        ends, p = self._ends(tree, law, q, noise), law.probs
        p_end, after = row_at(p, ends), (ends + 1).clamp(max=tree.num_nodes - 1)
        rejected = tree.tokens.gather(1, after[:, None])[:, 0]
        complete = (ends == last_nodes(tree))[:, None]
        rest = torch.where(complete, p_end, self._after(p_end, p_end, row_at(q, ends), rejected))
        return chain_verdict(tree, ends, draw(rest, p_end, noise))

    def _ends(self, tree: TokenTree, law: Law, q: Tensor, noise: Noise) -> Tensor:
        """[B] how many guesses of each chain are kept."""
        if tree.num_nodes == 1:
            return torch.zeros_like(tree.tokens[:, 0])
        p, q, judged = (values[:, :-1].flatten(0, 1) for values in (law.probs, q, judged_law(law)))
        coins = noise.uniform(Purpose.ACCEPT, guess_lanes(tree))
        chance = self._chance(p, p, q, tree.tokens[:, 1:].flatten(), judged)
        return first_run(tree, coins < chance.view(tree.batch_size, -1))

    def _walk_trees(self, tree: TokenTree, law: Law, q: Tensor, noise: Noise) -> Verdict:
        p, judged, coins = law.probs, judged_law(law), noise.uniform(Purpose.ACCEPT, guess_lanes(tree))
        ends, rest = torch.zeros_like(tree.tokens[:, 0]), p[:, 0]
        for node in range(1, tree.num_nodes):  # a node comes after its parent, so one pass is the whole walk
            tested, guess = (tree.parents[:, node] == ends) & tree.valid[:, node], tree.tokens[:, node]
            p_end, q_end, judged_end = (row_at(values, ends) for values in (p, q, judged))
            entered = tested & (coins[:, node - 1] < self._chance(p_end, rest, q_end, guess, judged_end))
            rest = torch.where(tested[:, None], self._after(p_end, rest, q_end, guess), rest)
            rest = torch.where(entered[:, None], p[:, node], rest)
            ends = torch.where(entered, node, ends)
        return tree_verdict(tree, ends, draw(rest, row_at(p, ends), noise))

    def _chance(self, p: Tensor, rest: Tensor, q: Tensor, guess: Tensor, judged: Tensor) -> Tensor:
        """[M] probability that a guess is kept, given ``rest``, the residual of p after its elders."""
        claim, share = self.odds(rest, q, guess)
        chance = torch.where(claim < share, claim / share, (claim > 0).to(p.dtype))
        return torch.where(is_single(p), self.near_best(judged, guess).to(p.dtype), chance)

    def _after(self, p: Tensor, rest: Tensor, q: Tensor, guess: Tensor) -> Tensor:
        """[M, V] the residual after a rejection: p itself where only one token is possible."""
        return torch.where(is_single(p)[:, None], p, _norm(self.owed(rest, q, guess), rest))

    def one_guess(self, p: Tensor, q: Tensor, *, judged: Tensor | None = None) -> OneGuess:
        size = max(1, _MOST // p.shape[1])
        parts = zip(p.split(size), q.split(size), (p if judged is None else judged).split(size), strict=True)
        found = [self._one_guess(*part) for part in parts]
        return OneGuess(torch.cat([one.law for one in found]), torch.cat([one.kept for one in found]))

    def _one_guess(self, p: Tensor, q: Tensor, judged: Tensor) -> OneGuess:
        """The closed form, guess by guess: each moves its rejected mass to its own residual."""
        law, kept = torch.zeros_like(p), torch.zeros_like(p[:, 0])
        for token in (q > 0).any(0).nonzero()[:, 0]:
            guess, mass = token.expand(len(p)), q[:, token]
            share = mass * self._chance(p, p, q, guess, judged)
            law[:, token] += share
            kept += share
            law += (mass - share)[:, None] * self._after(p, p, q, guess)
        return OneGuess(law, kept)


def _norm(weights: Tensor, rest: Tensor) -> Tensor:
    """Normalised weights, or ``rest`` where rounding left none, as when tokens are drawn."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > NOTHING, weights / total, rest)


def at(values: Tensor, tokens: Tensor) -> Tensor:
    """[M] the entry of ``values`` [M, V] at each token."""
    return values.gather(1, tokens[:, None])[:, 0]
