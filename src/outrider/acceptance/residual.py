"""The residual: the part of the target's law that is left after a rejection, and a draw from it.

A rejected guess has used up part of the target's law p; the *residual* is the rest, kept unnormalised. It is drawn by an
exponential race, which needs neither a normaliser nor a logarithm of the weights (zeros are never first).

    y = argmax_v w(v) / E(v),   E(v) ~ Exp(1)   =>   P(y) = w(y) / sum(w)

One race per row and round is enough, because a round draws one token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.random_source import RandomSource
from outrider.core.rng import OWED_LANE, Noise, Purpose

LANE = OWED_LANE
"""The lane of a round's one residual draw."""

NOTHING = 1e-12
"""Residual masses below this are rounding errors: a residual is reached with about the probability of its mass."""


def ratio(p: float, q: float) -> float:
    """min(1, p / q), and 0 for 0 / 0: a token with p = 0 is never kept, whatever q is."""
    return p / q if p < q else float(p > 0)


def surplus(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+, the target's probability beyond the draft's."""
    return (p - q).clamp(min=0)


def draw_row(weights: Tensor, p: Tensor, source: RandomSource) -> int:
    """A token from ``weights`` [V], or from ``p`` where rounding left no weight."""
    return source.categorical(weights if float(weights.sum()) > NOTHING else p, LANE)


def draw(weights: Tensor, p: Tensor, noise: Noise) -> Tensor:
    """[B] the same for every row of ``weights`` and ``p`` [B, V]."""
    lanes = torch.full((weights.shape[0], 1), LANE, device=weights.device)
    race = noise.exponential(Purpose.RESIDUAL, lanes, weights.shape[1])[:, 0]
    weights = torch.where(weights.sum(-1, keepdim=True) > NOTHING, weights, p)
    return (weights / race).argmax(-1)
