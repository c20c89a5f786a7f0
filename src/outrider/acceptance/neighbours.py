"""Distances between tokens' code vectors, for rules that accept a similar token.

Image tokens are entries of a codebook, so two tokens may differ in number and look alike. Without a codebook a token stands
at its own number on a line, which suits codes that are sorted (by brightness) and the proofs on toy models.
"""

from __future__ import annotations

from functools import cache
from typing import final

import torch
from torch import Tensor

from outrider.core.errors import OptionError

_ROWS = 1024
"""Tokens whose distances to all others are computed at once, to bound memory."""


@final
class Neighbourhood:
    """Distances between tokens."""

    def __init__(self, codebook: Tensor | None = None) -> None:
        """``codebook`` [V, D]: one vector per token of the vocabulary."""
        if codebook is not None and codebook.ndim != 2:
            shape = list(codebook.shape)
            raise OptionError(f"codebook has shape {shape}; give one vector per token of the vocabulary, [V, D]")
        self._codebook = codebook
        self._points = cache(self._make_points)
        self._nearest = cache(self._make_nearest)
        self._groups = cache(self._make_groups)

    def squared(self, tokens: Tensor, others: Tensor, vocab_size: int) -> Tensor:
        """[M, K] squared distances of ``tokens`` [M] to ``others`` [M, K]."""
        points = self._points(vocab_size, tokens.device)
        return (points[tokens][:, None] - points[others]).square().sum(-1)

    def nearest(self, k: int, vocab_size: int, device: torch.device) -> Tensor:
        """[V, k] the k nearest other tokens of each token, the nearest first; of equally near ones the smaller number."""
        return self._nearest(min(k, vocab_size - 1), vocab_size, device)

    def groups(self, num_groups: int, vocab_size: int, device: torch.device) -> Tensor:
        """[V] the number of each token's group: k-means over the code vectors, the same for every call."""
        return self._groups(min(num_groups, vocab_size), vocab_size, device)

    def _make_points(self, vocab_size: int, device: torch.device) -> Tensor:
        if self._codebook is None:
            return torch.arange(vocab_size, dtype=torch.float32, device=device)[:, None]
        if len(self._codebook) != vocab_size:
            size = len(self._codebook)
            raise OptionError(f"codebook has {size} vectors and the vocabulary {vocab_size} tokens; give one vector per token")
        return self._codebook.to(device).float()

    def _make_nearest(self, k: int, vocab_size: int, device: torch.device) -> Tensor:
        points = self._points(vocab_size, device)
        return torch.cat([_nearest_others(points, rows, k) for rows in torch.arange(vocab_size, device=device).split(_ROWS)])

    def _make_groups(self, num_groups: int, vocab_size: int, device: torch.device) -> Tensor:
        points = self._points(vocab_size, torch.device("cpu"))
        return _clustered(points, num_groups).to(device)


def _nearest_others(points: Tensor, rows: Tensor, k: int) -> Tensor:
    far = torch.cdist(points[rows], points)
    far[torch.arange(len(rows), device=points.device), rows] = torch.inf
    return far.argsort(dim=-1, stable=True)[:, :k]


def _clustered(points: Tensor, num_groups: int, rounds: int = 30) -> Tensor:
    """[V] groups by k-means from evenly spread tokens. Equal points may leave a group empty."""
    centres = points[torch.linspace(0, len(points) - 1, num_groups).round().long()]
    owners = torch.cdist(points, centres).argmin(-1)
    for _ in range(rounds):
        sums = torch.zeros_like(centres).index_add_(0, owners, points)
        counts = torch.bincount(owners, minlength=num_groups)[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
        owners = torch.cdist(points, centres).argmin(-1)
    return owners
