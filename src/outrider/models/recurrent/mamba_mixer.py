"""The mixer of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060).

    [gate | x B C | dt] = W_in u          x, B, C go through the convolution;  dt = softplus(dt + bias)
    S_t = exp(dt A) S_{t-1} + (dt x) B^T  y_t = S_t C + D x          out = W_out norm(y silu(gate))

In the words of ``scan.py``: the key is B, the value dt x, the log decay dt A, and C reads.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.replay import ScanShape, Steps
from outrider.models.recurrent.config import RecurrentConfig
from outrider.models.recurrent.convolution import Convolution
from outrider.models.recurrent.layers import RecurrentPass
from outrider.models.recurrent.norms import GatedGroupNorm
from outrider.models.recurrent.scan import Fading, read
from outrider.models.recurrent.tensors import Tensors, sums_dtype


@final
class MambaMixer:
    """One recurrent layer's mixer, from the tensors of a Hugging Face layout."""

    def __init__(self, config: RecurrentConfig, tensors: Tensors, layer: int) -> None:
        """``layer`` is its number in the cache."""
        shape, hidden, bias = config.scan, config.hidden_size, config.mixer_bias
        self._shape, self._layer, self._limit = shape, layer, config.time_step_limit
        self._inner = inner = shape.num_heads * shape.head_dim
        self._in = tensors.linear("in_proj", inner + shape.conv_size + shape.num_heads, hidden, bias=bias)
        self._out = tensors.linear("out_proj", hidden, inner, bias=bias)
        weight = tensors.exact("conv1d.weight", shape.conv_size, 1, shape.conv_len)[:, 0]
        self._convolve = Convolution(weight, tensors.exact("conv1d.bias", shape.conv_size) if config.conv_bias else None)
        self._rate = -tensors.exact("A_log", shape.num_heads).exp()
        self._time_bias, self._skip = tensors.exact("dt_bias", shape.num_heads), tensors.exact("D", shape.num_heads)[:, None]
        self._norm = GatedGroupNorm(tensors.exact("norm.weight", inner), config.norm_eps, shape.num_groups)
        self._dtype, self._sums = tensors.dtype, sums_dtype(tensors.dtype)

    def __call__(self, x: Tensor, step: RecurrentPass) -> Tensor:
        shape = self._shape
        sizes = (self._inner, shape.conv_size, shape.num_heads)
        projected = self._in(x).view(step.batch_size, step.num_nodes, -1).to(self._sums)
        gate, inputs, times = projected.split_with_sizes(sizes, -1)
        inputs = step.cache.write_inputs(self._layer, inputs)
        found = self._scan(self._convolve(inputs, step.num_nodes, step.windows), times, step)
        return self._out(self._norm(found, gate).to(self._dtype).flatten(0, 1))

    def _scan(self, mixed: Tensor, times: Tensor, step: RecurrentPass) -> Tensor:
        """[B, N, heads * P] from what the convolution left."""
        shape = self._shape
        values, keys, queries = self._parts(mixed, shape)
        times = self._times(times)
        new = Steps(times * self._rate, keys, values * times[..., None])
        steps = step.cache.write_steps(self._layer, new)
        found = read(queries.transpose(1, 2), step.cache.state(self._layer), steps, Fading(step.reach, steps.decays))
        return torch.addcmul(found.transpose(1, 2), values, self._skip).flatten(2)

    def _times(self, times: Tensor) -> Tensor:
        """[B, N, heads] how far each head's clock moves."""
        times = F.softplus(times + self._time_bias)
        return times if self._limit == (0.0, float("inf")) else times.clamp(*self._limit)

    def _parts(self, mixed: Tensor, shape: ScanShape) -> tuple[Tensor, Tensor, Tensor]:
        """Values [B, N, heads, P], keys and queries [B, N, groups, K]."""
        size = shape.num_groups * shape.state_size
        values, keys, queries = mixed.split_with_sizes((self._inner, size, size), -1)
        grouped = (shape.num_groups, shape.state_size)
        return (
            values.unflatten(-1, (shape.num_heads, shape.head_dim)),
            keys.unflatten(-1, grouped),
            queries.unflatten(-1, grouped),
        )
