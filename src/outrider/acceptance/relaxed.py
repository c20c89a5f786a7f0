"""The walk of rules that keep a sampled guess for what it stands for: its neighbours, or its group.

A relaxed rule says two things of a guess x ~ q: the odds with which it is kept, and what is drawn from after it was not.
Everything else follows: the walk of one row, the walk of a batch, and the law of the first token in closed form.

    keep x  with probability  a(x) = min(1, claim(x) / q'(x));        rejected:  y ~ norm(owed_x)
    out(v) = q(v) a(v) + sum_x q(x) (1 - a(x)) norm(owed_x)(v)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from outrider.acceptance.chains import chain_laws
from outrider.acceptance.lossy import LossyRule, OneGuess, is_single, judged_law
from outrider.acceptance.paths import chain_verdict, first_run, guess_lanes, last_nodes, path_of, row_at
from outrider.acceptance.residual import NOTHING, draw, draw_row, ratio
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise, Purpose
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
from outrider.core.verdict import RowVerdict, Verdict

_MOST = 1 << 22
"""Numbers that the closed form holds at once for each guess."""


class RelaxedRule(LossyRule, ABC):
    """A lossy rule of sampled chains. Its parts work on M contexts at once: laws are [M, V], guesses [M]."""

    exact_for: ClassVar = (Draws.IID,)
    shape: ClassVar = Shape.CHAIN

    @abstractmethod
    def odds(self, p: Tensor, q: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
        """[M] and [M]: the guess is kept with probability min(1, first / second), never where the first is 0."""

    @abstractmethod
    def owed(self, p: Tensor, q: Tensor, guess: Tensor) -> Tensor:
        """[M, V] weights of the token that follows a rejected guess; where they are all 0, p is drawn from."""

    def near_best(self, judged: Tensor, guess: Tensor) -> Tensor:
        """[M] whether the guess is kept at temperature 0, by the softmax of the logits. The argmax always is."""
        return judged.argmax(-1) == guess

    def judge_row(self, row: RowDraft, judged: Tensor, source: RandomSource) -> RowVerdict:
        last = len(row.tokens) - 1
        for node in range(last):
            assert row.q is not None, "sampled guesses come with their q"
            p, q, guess = row.p[node : node + 1], row.q[node : node + 1], torch.tensor([row.tokens[node + 1]])
            if not self._keeps(p, q, guess, judged[node : node + 1], source, node + 1):
                return RowVerdict(path_of(row, node), draw_row(self._after(p, q, guess)[0], p[0], source), rejected=True)
        return RowVerdict(path_of(row, last), draw_row(row.p[last], row.p[last], source), rejected=False)

    def _keeps(self, p: Tensor, q: Tensor, guess: Tensor, judged: Tensor, source: RandomSource, lane: int) -> bool:
        if is_single(p):
            return bool(self.near_best(judged, guess))
        claim, share = self.odds(p, q, guess)
        return source.bernoulli(ratio(float(claim), float(share)), lane)

    def _after(self, p: Tensor, q: Tensor, guess: Tensor) -> Tensor:
        """[M, V] what is drawn from after a rejection: p itself where only one token is possible."""
        return torch.where(is_single(p)[:, None], p, self.owed(p, q, guess))

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        p, q = chain_laws(draft, law)
        ends = self._ends(draft.tree, p, q, judged_law(law), noise)
        p_end, after = row_at(p, ends), (ends + 1).clamp(max=draft.tree.num_nodes - 1)
        rejected = draft.tree.tokens.gather(1, after[:, None])[:, 0]
        complete = (ends == last_nodes(draft.tree))[:, None]
        owed = torch.where(complete, p_end, self._after(p_end, row_at(q, ends), rejected))
        return chain_verdict(draft.tree, ends, draw(owed, p_end, noise))

    def _ends(self, tree: TokenTree, p: Tensor, q: Tensor, judged: Tensor, noise: Noise) -> Tensor:
        """[B] how many guesses of each chain are kept."""
        if tree.num_nodes == 1:
            return torch.zeros_like(tree.tokens[:, 0])
        p, q, judged = (values[:, :-1].flatten(0, 1) for values in (p, q, judged))
        guess = tree.tokens[:, 1:].flatten()
        claim, share = self.odds(p, q, guess)
        coins = noise.uniform(Purpose.ACCEPT, guess_lanes(tree)).flatten()
        kept = torch.where(is_single(p), self.near_best(judged, guess), coins * share < claim)
        return first_run(tree, kept.view(tree.batch_size, -1))

    def one_guess(self, p: Tensor, q: Tensor, *, judged: Tensor | None = None) -> OneGuess:
        size = max(1, _MOST // p.shape[1])
        parts = zip(p.split(size), q.split(size), (p if judged is None else judged).split(size), strict=True)
        found = [self._one_guess(*part) for part in parts]
        return OneGuess(torch.cat([one.law for one in found]), torch.cat([one.kept for one in found]))

    def _one_guess(self, p: Tensor, q: Tensor, judged: Tensor) -> OneGuess:
        """Guess by guess: each sends its own rejected mass to its own residual."""
        law, kept = torch.zeros_like(p), torch.zeros_like(p[:, 0])
        for token in torch.arange(p.shape[1], device=p.device):
            guess, mass = token.expand(len(p)), q[:, token]
            share = mass * self._chance(p, q, guess, judged)
            law[:, token] += share
            kept += share
            law += (mass - share)[:, None] * _norm(self._after(p, q, guess), p)
        return OneGuess(law, kept)

    def _chance(self, p: Tensor, q: Tensor, guess: Tensor, judged: Tensor) -> Tensor:
        """[M] probability that the guess is kept."""
        claim, share = self.odds(p, q, guess)
        chance = torch.where(claim < share, claim / share, (claim > 0).to(p.dtype))
        return torch.where(is_single(p), self.near_best(judged, guess).to(p.dtype), chance)


def _norm(weights: Tensor, p: Tensor) -> Tensor:
    """Weights as a law, or ``p`` where rounding left no weight: as tokens are drawn."""
    weights = torch.where(weights.sum(-1, keepdim=True) > NOTHING, weights, p)
    return weights / weights.sum(-1, keepdim=True)


def at(values: Tensor, tokens: Tensor) -> Tensor:
    """[M] the entry of ``values`` [M, V] at each token."""
    return values.gather(1, tokens[:, None])[:, 0]
