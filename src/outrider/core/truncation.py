"""Truncations of a distribution, each a threshold below which logits become -inf. All take logits [B, M, V] and [B, 1, 1].

    top-k      the k-th largest logit
    top-p      the logit at which the sorted probabilities first add up to p          (Holtzman et al. 2019)
    min-p      the largest probability times p                                        (Nguyen et al. 2024)
    typical-p  as top-p, sorted by how far -log p is from the entropy                 (Meister et al. 2022)

Each row's result depends on that row alone, so batching cannot change a text.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CLOSE = 1e-5
"""Sums of probabilities that differ by less may be ordered by rounding alone."""


def top_k(logits: Tensor, k: Tensor) -> Tensor:
    largest = logits.topk(int(k.max()), -1).values
    return _keep_from(logits, largest.gather(-1, (k - 1).expand(*logits.shape[:2], 1)))


def top_p(logits: Tensor, p: Tensor) -> Tensor:
    """Sorts only as many of the largest logits as are needed to reach p, since sorting all is slow.

    If a sum is so near p that rounding decides, all logits are added in transformers' order. So a token at the threshold falls
    on the same side on every machine."""
    norm = logits.logsumexp(-1, keepdim=True)
    size = min(64, logits.shape[-1])
    while True:
        largest = logits.topk(size, -1).values
        probs = (largest - norm).exp()
        before = probs.cumsum(-1) - probs
        if size == logits.shape[-1] or bool(((before[..., -1:] >= p) | (p >= 1)).all()):
            break
        size = min(size * 8, logits.shape[-1])
    last = (before < p).sum(-1, keepdim=True) - 1
    threshold = largest.gather(-1, last.clamp(min=0))
    is_close = ((before - p).abs() < _CLOSE).any(-1, keepdim=True) & (p < 1)
    if bool(is_close.any()):
        threshold = torch.where(is_close, _nucleus_from_below(logits, p), threshold)
    return _keep_from(logits, torch.where(p < 1, threshold, -torch.inf))


def _nucleus_from_below(logits: Tensor, p: Tensor) -> Tensor:
    """[B, M, 1] the smallest logit kept when probabilities are added up from the smallest and 1 - p of them are dropped."""
    ascending = logits.sort(-1).values
    is_dropped = ascending.softmax(-1).cumsum(-1) <= (1 - p).to(logits.dtype)
    first = is_dropped.sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return ascending.gather(-1, first)


def min_p(logits: Tensor, p: Tensor) -> Tensor:
    return _keep_from(logits, logits.amax(-1, keepdim=True) + p.log())


def typical_p(logits: Tensor, p: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs.masked_fill(probs == 0, 0)).sum(-1, keepdim=True)
    distance = (-log_probs - entropy).abs()
    order = torch.argsort(distance, dim=-1, stable=True)
    sorted_probs = probs.gather(-1, order)
    keep = ((sorted_probs.cumsum(-1) - sorted_probs) < p) | (p >= 1)
    return logits.masked_fill(~torch.zeros_like(keep).scatter(-1, order, keep), -torch.inf)


def _keep_from(logits: Tensor, threshold: Tensor) -> Tensor:
    return logits.masked_fill(logits < threshold, -torch.inf)
