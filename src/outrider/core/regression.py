"""Logistic regression for small heads: a judge's, a router's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def balanced_logistic(seen: Tensor, label: Tensor, *, decay: float, num_steps: int) -> tuple[Tensor, float]:
    """Weights [F] and bias for features [N, F] in float64 and labels [N] of 0 and 1. Both classes weigh the same."""
    mean, scale = seen.mean(0), seen.std(0).clamp(min=1e-6)
    weight = torch.where(label > 0, 0.5 / label.mean(), 0.5 / (1 - label.mean()))
    w, b = torch.zeros(seen.shape[1], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    rule = torch.optim.AdamW([w.requires_grad_(), b.requires_grad_()], lr=0.05, weight_decay=decay)
    for _ in range(num_steps):
        odds = (seen - mean) / scale @ w + b
        loss = F.binary_cross_entropy_with_logits(odds, label, weight=weight)
        rule.zero_grad()
        loss.backward()
        rule.step()
    scaled = (w / scale).detach()
    return scaled, float(b.detach() - mean @ scaled)
