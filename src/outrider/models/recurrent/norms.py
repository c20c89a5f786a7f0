"""Root-mean-square norms of recurrent models, in float32 inside, or in float64 where the model is."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.norms import Norm, rms_norm


def norm_of(weight: Tensor, eps: float, dtype: torch.dtype) -> Norm:
    """The norm for activations of ``dtype``; the weight may be more precise."""
    if dtype != torch.float64:
        return rms_norm(weight, eps)
    return lambda x: torch.rms_norm(x, weight.shape, weight.double(), eps)


Gating = Callable[[Tensor, Tensor], Tensor]
"""Combines the scan and the gate of a Mamba-2 mixer."""


class GroupNorm:
    """A norm over each group of channels."""

    def __init__(self, weight: Tensor, eps: float, num_groups: int) -> None:
        self._weight, self._eps, self._num_groups = weight, eps, num_groups

    def __call__(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, (self._num_groups, -1))
        return torch.rms_norm(grouped, grouped.shape[-1:], None, self._eps).flatten(-2) * self._weight


def gate_only(x: Tensor, gate: Tensor) -> Tensor:
    """No norm."""
    return x * F.silu(gate)


def gate_then(norm: GroupNorm) -> Gating:
    """The gate first, as in Mamba-2."""
    return lambda x, gate: norm(gate_only(x, gate))


def gate_after(norm: GroupNorm) -> Gating:
    """The norm first."""
    return lambda x, gate: gate_only(norm(x), gate)
