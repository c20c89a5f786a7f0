"""The middle part of a gated delta layer, between its two matrices: convolution, rates and decays, tree scan.

    [q k v | gate | b | a] of every node  q, k, v go through the convolution; q and k get length 1
    g = -A softplus(a + bias)             log decay;     b = sigmoid(b): how much of the new value is written
    S_t = exp(g) S_{t-1} + w_t k_t^T      w_t = b (v_t - exp(g) S_{t-1} k_t)      y_t = S_t q_t / sqrt(K)

In the terms of ``scan.py``: the key is k, the value w, the log decay g, and the query q. This file is in PyTorch, the oracle.
``scan_native.py`` (CPU) and ``delta_triton.py`` (for a GPU) compute the same with one call and with two kernels.
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
from outrider.models.recurrent.scan import DeltaNodes, Fading, corrections, read

_LENGTH_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class DeltaNumbers:
    """The small tensors of a layer, in the type of the sums."""

    weight: Tensor
    """[C, W] of the convolution, the newest token last."""
    rate: Tensor
    """[heads] -A, below 0."""
    time_bias: Tensor
    """[heads]"""


@final
class PlainDelta(LayerScan):
    """The scan in PyTorch, for any type. Projections are [q k v | gate | b | a]."""

    def __init__(self, shape: ScanShape, numbers: DeltaNumbers) -> None:
        self._shape, self._numbers = shape, numbers
        self._convolve = Convolution(numbers.weight, None)

    def __call__(self, projected: Tensor, layer: int, step: RecurrentPass) -> Tensor:
        shape, numbers, cache = self._shape, self._numbers, step.cache
        sizes = (shape.conv_size, shape.num_heads * shape.head_dim, shape.num_heads, shape.num_heads)
        inputs, _, rates, times = projected.split_with_sizes(sizes, -1)
        inputs = cache.write_inputs(layer, inputs)
        queries, keys, values = self._parts(self._convolve(inputs, step.num_nodes, step.windows))
        decays = numbers.rate * F.softplus(times + numbers.time_bias)
        columns = cache.steps(layer)
        num_before = columns.decays.shape[1] - step.num_nodes
        before = Steps(*(part[:, :num_before] for part in columns))
        fading = Fading(step.reach, torch.cat((before.decays, decays), 1))
        nodes = DeltaNodes(keys, values, rates.sigmoid().transpose(1, 2))
        written = corrections(nodes, cache.state(layer), before, fading).transpose(1, 2)
        steps = cache.write_steps(layer, Steps(decays, keys.transpose(1, 2), written))
        return read(queries, cache.state(layer), steps, fading).transpose(1, 2).flatten(2)

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, groups, N, K], values [B, heads, N, P]."""
        shape = self._shape
        size = shape.num_groups * shape.state_size
        queries, keys, values = mixed.split_with_sizes((size, size, shape.num_heads * shape.head_dim), -1)
        grouped = (shape.num_groups, shape.state_size)
        queries, keys = (_unit(part.unflatten(-1, grouped)).transpose(1, 2) for part in (queries, keys))
        return queries * shape.state_size**-0.5, keys, values.unflatten(-1, (shape.num_heads, shape.head_dim)).transpose(1, 2)


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + _LENGTH_EPS)
