"""How far two laws are apart, four ways, for any number of contexts at once: [..., V] and [..., V] to [...].

    KL   sum p log(p / q)                    infinite where q cannot say what p can;  TV <= sqrt(KL / 2)   (Pinsker)
    JS   KL(p, m) / 2 + KL(q, m) / 2         m = (p + q) / 2, at most log 2;          TV <= sqrt(2 JS)
    TV   1/2 sum |p - q|                     at most 1
    W1   least cost of moving p's mass to q's, where moving it from token x to y costs |e_x - e_y| / 2, with e the
         token's embedding scaled to length 1: between 0 and TV, small when q says other words for the same thing

W1 is a linear programme. Here it is bounded from above. The mass that both laws share stays, the ``m`` largest surpluses go to
the ``m`` largest deficits by a plan that Sinkhorn's iteration finds. All other mass pays the largest cost, 1. Any plan that
moves no more than there is gives such a bound, so a gate on it never opens by mistake.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SHARPNESS = 20.0
"""Inverse temperature of Sinkhorn's kernel, in units of the largest cost: higher is nearer to the optimum, and slower."""
_ITERATIONS = 30


def kl(p: Tensor, q: Tensor) -> Tensor:
    both = torch.where((p > 0) & (q > 0), p * (p.log() - q.log()), 0.0).sum(-1)
    return torch.where(((p > 0) & (q <= 0)).any(-1), torch.inf, both.clamp(min=0))


def js(p: Tensor, q: Tensor) -> Tensor:
    middle = (p + q) / 2
    return (kl(p, middle) + kl(q, middle)) / 2


def tv(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).abs().sum(-1) / 2


def w1(p: Tensor, q: Tensor, *, embeddings: Tensor, support: int) -> Tensor:
    """An upper bound of the transport distance; ``embeddings`` is [V, H]."""
    size = min(support, p.shape[-1])
    surplus, deficit = (p - q).clamp(min=0).topk(size, -1), (q - p).clamp(min=0).topk(size, -1)
    cost = torch.cdist(_unit(embeddings, surplus.indices), _unit(embeddings, deficit.indices)).div(2).clamp(0, 1)
    cost = cost.to(p.dtype)
    plan = _plan(surplus.values, deficit.values, cost)
    return (tv(p, q) - (plan * (1 - cost)).sum((-1, -2))).clamp(min=0)


def _unit(embeddings: Tensor, tokens: Tensor) -> Tensor:
    """[..., H] the tokens' embeddings, scaled to length 1, precise enough for differences of probabilities."""
    rows = embeddings.to(tokens.device)[tokens]
    return torch.nn.functional.normalize(rows if rows.dtype == torch.float64 else rows.float(), dim=-1)


def _plan(have: Tensor, want: Tensor, cost: Tensor) -> Tensor:
    """[..., m, m] transport plan: rows add up to at most ``have``, columns to at most ``want``."""
    plan = have[..., :, None] * want[..., None, :] * (-_SHARPNESS * cost).exp()
    for _ in range(_ITERATIONS):
        plan = plan * _scale(have, plan.sum(-1))[..., :, None]
        plan = plan * _scale(want, plan.sum(-2))[..., None, :]
    plan = plan * _scale(have, plan.sum(-1)).clamp(max=1)[..., :, None]
    return plan * _scale(want, plan.sum(-2)).clamp(max=1)[..., None, :]


def _scale(wanted: Tensor, found: Tensor) -> Tensor:
    """``wanted / found``, and 0 where ``found`` is 0."""
    return torch.where(found > 0, wanted / found, 0.0)
