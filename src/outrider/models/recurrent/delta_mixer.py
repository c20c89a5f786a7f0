"""The mixer of gated delta networks (Yang et al. 2024, arXiv 2412.06464), as Qwen3-Next has it.

    [q k v | gate | b | a] = W_in u       q, k, v go through the convolution; q and k get length 1
    g = -A softplus(a + bias)             log decay;     b = sigmoid(b): how much of the new value is written
    S_t = exp(g) S_{t-1} + w_t k_t^T      w_t = b (v_t - exp(g) S_{t-1} k_t)      out = W_out (norm(S_t q / sqrt(K)) silu(gate))

In the words of ``scan.py``: the key is k, the value w, the log decay g, and q reads.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.replay import ScanShape, Steps
from outrider.models.linear import linear_of
from outrider.models.recurrent.config import RecurrentConfig
from outrider.models.recurrent.convolution import Convolution
from outrider.models.recurrent.layers import RecurrentPass
from outrider.models.recurrent.scan import DeltaNodes, Fading, corrections, read
from outrider.models.recurrent.tensors import Tensors, sums_dtype

_LENGTH_EPS = 1e-6


@final
class DeltaMixer:
    """One recurrent layer's mixer, from the tensors of a Hugging Face layout."""

    def __init__(self, config: RecurrentConfig, tensors: Tensors, layer: int) -> None:
        """``layer`` is its number in the cache."""
        shape = config.scan
        self._shape, self._layer, self._eps = shape, layer, config.norm_eps
        self._in = linear_of(_projection(shape, tensors, config.hidden_size), twofold=True)
        self._out = tensors.linear("out_proj", config.hidden_size, shape.num_heads * shape.head_dim)
        weight = tensors.exact("conv1d.weight", shape.conv_size, 1, shape.conv_len)[:, 0]
        self._convolve = Convolution(weight, None)
        self._rate = -tensors.exact("A_log", shape.num_heads).exp()
        self._time_bias = tensors.exact("dt_bias", shape.num_heads)
        self._norm = tensors.exact("norm.weight", shape.head_dim)
        self._dtype, self._sums = tensors.dtype, sums_dtype(tensors.dtype)

    def __call__(self, x: Tensor, step: RecurrentPass) -> Tensor:
        shape = self._shape
        sizes = (shape.conv_size, shape.num_heads * shape.head_dim, shape.num_heads, shape.num_heads)
        projected = self._in(x).view(step.batch_size, step.num_nodes, -1).to(self._sums)
        inputs, gate, rates, times = projected.split_with_sizes(sizes, -1)
        inputs = step.cache.write_inputs(self._layer, inputs)
        mixed = self._convolve(inputs, step.num_nodes, step.windows)
        found = self._scan(mixed, rates.sigmoid(), self._rate * F.softplus(times + self._time_bias), step)
        normed = torch.rms_norm(found, (shape.head_dim,), self._norm, self._eps).flatten(2)
        return self._out((normed * F.silu(gate)).to(self._dtype).flatten(0, 1))

    def _scan(self, mixed: Tensor, rates: Tensor, decays: Tensor, step: RecurrentPass) -> Tensor:
        """[B, N, heads, P] from what the convolution left."""
        queries, keys, values = self._parts(mixed)
        cache, layer = step.cache, self._layer
        columns = cache.steps(layer)
        num_before = columns.decays.shape[1] - step.num_nodes
        before = Steps(*(part[:, :num_before] for part in columns))
        fading = Fading(step.reach, torch.cat((before.decays, decays), 1))
        nodes = DeltaNodes(keys, values, rates.transpose(1, 2))
        written = corrections(nodes, cache.state(layer), before, fading).transpose(1, 2)
        steps = cache.write_steps(layer, Steps(decays, keys.transpose(1, 2), written))
        return read(queries, cache.state(layer), steps, fading).transpose(1, 2)

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


def _projection(shape: ScanShape, tensors: Tensors, hidden: int) -> Tensor:
    """One matrix for all that a mixer projects. Files store it by key heads: q, k, v, gate of one, then of the next."""
    groups, key_dim, heads_each = shape.num_groups, shape.state_size, shape.num_heads // shape.num_groups
    value_dim = heads_each * shape.head_dim
    sizes = (key_dim, key_dim, value_dim, value_dim)
    stored = tensors.take("in_proj_qkvz.weight", groups * sum(sizes), hidden).unflatten(0, (groups, -1))
    pairs = tensors.take("in_proj_ba.weight", 2 * shape.num_heads, hidden).unflatten(0, (groups, -1))
    parts = [*stored.split_with_sizes(sizes, 1), *pairs.split_with_sizes((heads_each, heads_each), 1)]
    return torch.cat([part.flatten(0, 1) for part in parts])
