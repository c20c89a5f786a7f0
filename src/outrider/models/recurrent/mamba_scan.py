"""The middle part of a Mamba-2 layer, between its two matrices: convolution, time steps, tree scan.

    [gate | x B C | dt] of every node      x, B, C go through the convolution;  dt = softplus(dt + bias)
    S_t = exp(dt A) S_{t-1} + (dt x) B^T   y_t = S_t C + D x

In the terms of ``scan.py``: the key is B, the value dt x, the log decay dt A, and the query C. This file is in PyTorch, the
oracle. ``scan_native.py`` (CPU) and ``mamba_triton.py`` (GPU) compute the same with one call and with two kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.replay import ScanShape, Steps
from outrider.models.recurrent.convolution import Convolution
from outrider.models.recurrent.layers import LayerScan, RecurrentPass
from outrider.models.recurrent.scan import Fading, read


@dataclass(frozen=True, eq=False)
class MambaNumbers:
    """The small tensors of a layer, in the type of the sums."""

    weight: Tensor
    """[C, W] of the convolution, the newest token last."""
    bias: Tensor | None
    """[C]"""
    rate: Tensor
    """[heads] A, below 0."""
    time_bias: Tensor
    """[heads]"""
    skip: Tensor
    """[heads] D."""
    limit: tuple[float, float]
    """Bounds of a time step."""


@final
class PlainMamba(LayerScan):
    """The scan in PyTorch, for any type. Projections are [gate | x B C | dt]."""

    def __init__(self, shape: ScanShape, numbers: MambaNumbers) -> None:
        self._shape, self._numbers = shape, numbers
        self._convolve = Convolution(numbers.weight, numbers.bias)

    def __call__(self, projected: Tensor, layer: int, step: RecurrentPass) -> Tensor:
        shape, numbers = self._shape, self._numbers
        inner = shape.num_heads * shape.head_dim
        _, inputs, times = projected.split_with_sizes((inner, shape.conv_size, shape.num_heads), -1)
        inputs = step.cache.write_inputs(layer, inputs)
        values, keys, queries = self._parts(self._convolve(inputs, step.num_nodes, step.windows))
        times = self._times(times)
        new = Steps(times * numbers.rate, keys, values * times[..., None])
        steps = step.cache.write_steps(layer, new)
        found = read(queries.transpose(1, 2), step.cache.state(layer), steps, Fading(step.reach, steps.decays))
        return torch.addcmul(found.transpose(1, 2), values, numbers.skip[:, None]).flatten(2)

    def _times(self, times: Tensor) -> Tensor:
        """[B, N, heads] the time step of each head."""
        times = F.softplus(times + self._numbers.time_bias)
        return times if self._numbers.limit == (0.0, float("inf")) else times.clamp(*self._numbers.limit)

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values [B, N, heads, P], keys and queries [B, N, groups, K]."""
        shape = self._shape
        size, grouped = shape.num_groups * shape.state_size, (shape.num_groups, shape.state_size)
        values, keys, queries = mixed.split_with_sizes((shape.num_heads * shape.head_dim, size, size), -1)
        values = values.unflatten(-1, (shape.num_heads, shape.head_dim))
        return values, keys.unflatten(-1, grouped), queries.unflatten(-1, grouped)
