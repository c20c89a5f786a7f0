"""Truncations of a distribution, each a threshold below which logits become -inf. All take logits [B, M, V] and [B, 1, 1].

    top-k      the k-th largest logit
    top-p      the logit at which the sorted probabilities first add up to p          (Holtzman et al. 2019)
    min-p      the largest probability times p                                        (Nguyen et al. 2024)
    typical-p  as top-p, sorted by how far -log p is from the entropy                 (Meister et al. 2022)

Each row's result depends on that row alone, so batching cannot change a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """The truncations of one request that are a threshold on the logit, applied in this order."""

    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Tempering:
    """Sampling of B requests that is nothing but a temperature and a cut."""

    temperatures: Sequence[float]
    """0 for greedy."""
    cuts: Sequence[Cut] | None = None
    """None if nobody cuts."""


def top_k(logits: Tensor, k: Tensor) -> Tensor:
    largest = logits.topk(int(k.max()), -1).values
    return _keep_from(logits, largest.gather(-1, (k - 1).expand(*logits.shape[:2], 1)))


def top_p(logits: Tensor, p: Tensor) -> Tensor:
    """Looks at the largest logits first and at more of them only while they do not add up to p: sorting all is slow."""
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
    return _keep_from(logits, torch.where(p < 1, threshold, -torch.inf))


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
