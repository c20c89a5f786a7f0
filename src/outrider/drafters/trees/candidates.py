"""The children of a node: which tokens, in which order, and how likely each is to be the target's own choice.

*Coupled* candidates are the top-k of log q + g, where g is the target's noise at that output position. The target will say
argmax(log p + g), and the draft's log q is its estimate of log p. Sampled candidates are the top-k of log q + noise of the
draft's own, which are draws from q without replacement in draw order (Gumbel-top-k, Kool et al. 2019, arXiv 1903.06059), or
independent draws. Where the temperature is 0 the candidates are the top-k of log q, whatever the draws: a greedy target is
lossless with any guesses (Lemma D of docs/lossless.md).

Best-first trees need the probability that a coupled candidate is right. Suppose the draft's logits are the target's plus
independent Gumbel errors of scale tau (in units of the logits at temperature 1). Then, given the noise, the target's choice at
temperature T is argmax(l + T g + tau g'), where l are the draft's logits and g' fresh Gumbel numbers, so

    P(target says v | l, g) = softmax((l + T g) / tau)[v]

One number tau describes the draft; temperature 0 is the case g = 0, where tau = 1 is EAGLE-2's confidence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import Context
from outrider.core.rng import Purpose
from outrider.core.sampling import Law

_OUTSIDE = 1e4
"""Offset of tokens outside the draft's law: they rank below all others, but above an empty place."""


def coupled_scores(law: Law, context: Context, *, depth: int) -> Tensor:
    """[B, M, V] T (log q + g) up to a constant, which ranks coupled candidates of nodes at ``depth``. At temperature 0,
    the logits."""
    if context.sampler.all_greedy:
        return law.adjusted
    temperature = _temperatures(context, law.adjusted)
    depths = torch.full((len(law.adjusted), 1), depth, device=law.adjusted.device)
    noise = context.noise.target_gumbel(depths, law.adjusted.shape[-1])  # of one position, so the same for all M nodes
    scores = temperature * (law.logits + noise)
    scores = torch.where(law.logits > -torch.inf, scores, law.adjusted - _OUTSIDE)
    return torch.where(temperature > 0, scores, law.adjusted)


def plain_scores(law: Law, context: Context) -> Tensor:
    """[B, M, V] log q up to a constant, with tokens outside its support last. At temperature 0, the logits."""
    if context.sampler.all_greedy:
        return law.adjusted
    inside = torch.where(law.logits > -torch.inf, law.logits, law.adjusted - _OUTSIDE)
    return torch.where(_temperatures(context, law.adjusted) > 0, inside, law.adjusted)


def sampled_scores(law: Law, context: Context, *, lanes: Tensor) -> Tensor:
    """[B, M, V] log q + the draft's noise of ``lanes`` [M]. The top-k are k draws without replacement, in order. Tokens
    outside the support are -inf."""
    num_rows, _, vocab_size = law.adjusted.shape
    scores = law.logits + context.noise.gumbel(Purpose.DRAFT, lanes.expand(num_rows, -1), vocab_size)
    return torch.where(_temperatures(context, law.adjusted) > 0, scores, law.adjusted)


def independent(law: Law, context: Context, *, count: int, lanes: Tensor) -> Tensor:
    """[B, M, count] independent draws from q, on lanes starting at ``lanes`` [M]. At temperature 0, the top tokens."""
    num_rows = len(law.adjusted)
    drawn = torch.stack([law.draw((lanes + rank).expand(num_rows, -1)) for rank in range(count)], -1)
    best = law.adjusted.topk(count, -1).indices
    return torch.where(_temperatures(context, law.adjusted) > 0, drawn, best)


@dataclass(frozen=True)
class Drawing:
    """How the children of a node are chosen."""

    draws: Draws
    perturb: bool = True
    """Rank deterministic children by log q + g instead of q. Right for the coupled rule; turn off for ``delta``."""

    def scores(self, law: Law, context: Context, *, depth: int, lanes: Tensor) -> Tensor:
        """[B, M, V] scores that rank the children of nodes at ``depth``."""
        if self.draws is not Draws.DETERMINISTIC:
            return sampled_scores(law, context, lanes=lanes)
        return coupled_scores(law, context, depth=depth) if self.perturb else plain_scores(law, context)

    def children(self, law: Law, context: Context, *, count: int, depth: int, lanes: Tensor) -> tuple[Tensor, Tensor]:
        """[B, M, count] tokens in order, and their scores: -inf where a law has no more tokens to draw.

        Node m uses the lanes ``lanes[m]`` to ``lanes[m] + count``.
        """
        count = min(count, law.adjusted.shape[-1])
        if self.draws is Draws.IID:
            drawn = independent(law, context, count=count, lanes=lanes)
            return drawn, torch.zeros_like(drawn, dtype=law.adjusted.dtype)
        best = self.scores(law, context, depth=depth, lanes=lanes).topk(count, -1)
        return best.indices, best.values


def log_chances(scores: Tensor, tau: float) -> Tensor:
    """[B, M, V] log-probability that each token is the target's choice, from its coupled scores. At most 0."""
    return torch.log_softmax(scores / tau, -1).clamp(max=0)


def _temperatures(context: Context, like: Tensor) -> Tensor:
    """[B, 1, 1]"""
    return torch.tensor([row.params.temperature for row in context.sampler.rows], device=like.device)[:, None, None]
