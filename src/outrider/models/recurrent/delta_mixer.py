"""The mixer of gated delta networks (Yang et al. 2024, arXiv 2412.06464), as Qwen3-Next has it.

    [q k v | gate | b | a] = W_in u       out = W_out (norm(y) silu(gate))

``delta_scan.py`` makes y of q, k, v, b and a.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.replay import ScanShape
from outrider.models.linear import linear_of
from outrider.models.recurrent.config import RecurrentConfig
from outrider.models.recurrent.delta_scan import DeltaNumbers
from outrider.models.recurrent.layers import RecurrentPass
from outrider.models.recurrent.scans import delta_scan
from outrider.models.recurrent.tensors import Tensors, sums_dtype


@final
class DeltaMixer:
    """One recurrent layer's mixer, from the tensors of a Hugging Face layout."""

    def __init__(self, config: RecurrentConfig, tensors: Tensors, layer: int) -> None:
        """``layer`` is its number in the cache."""
        shape = config.scan
        self._shape, self._layer, self._eps = shape, layer, config.norm_eps
        self._in = linear_of(_projection(shape, tensors, config.hidden_size), twofold=True)
        self._out = tensors.linear("out_proj", config.hidden_size, shape.num_heads * shape.head_dim)
        numbers = DeltaNumbers(
            weight=tensors.exact("conv1d.weight", shape.conv_size, 1, shape.conv_len)[:, 0],
            rate=-tensors.exact("A_log", shape.num_heads).exp(),
            time_bias=tensors.exact("dt_bias", shape.num_heads),
        )
        self._scan = delta_scan(shape, numbers, fast=tensors.fast)
        self._norm = tensors.exact("norm.weight", shape.head_dim)
        self._dtype, self._sums = tensors.dtype, sums_dtype(tensors.dtype)

    def __call__(self, x: Tensor, step: RecurrentPass) -> Tensor:
        shape = self._shape
        projected = self._in(x).view(step.batch_size, step.num_nodes, -1).to(self._sums)
        found = self._scan(projected, self._layer, step).unflatten(-1, (shape.num_heads, shape.head_dim))
        gate = projected[..., shape.conv_size : shape.conv_size + shape.num_heads * shape.head_dim]
        normed = torch.rms_norm(found, (shape.head_dim,), self._norm, self._eps).flatten(2)
        return self._out((normed * F.silu(gate)).to(self._dtype).flatten(0, 1))


def _projection(shape: ScanShape, tensors: Tensors, hidden: int) -> Tensor:
    """One matrix for all projections of a mixer. Files store it by key heads: q, k, v and gate of one head, then of the
    next."""
    groups, key_dim, heads_each = shape.num_groups, shape.state_size, shape.num_heads // shape.num_groups
    value_dim = heads_each * shape.head_dim
    sizes = (key_dim, key_dim, value_dim, value_dim)
    stored = tensors.take("in_proj_qkvz.weight", groups * sum(sizes), hidden).unflatten(0, (groups, -1))
    pairs = tensors.take("in_proj_ba.weight", 2 * shape.num_heads, hidden).unflatten(0, (groups, -1))
    parts = [*stored.split_with_sizes(sizes, 1), *pairs.split_with_sizes((heads_each, heads_each), 1)]
    return torch.cat([part.flatten(0, 1) for part in parts])
