"""The mixer of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): a matrix, the scan (``mamba_scan.py``), a gated norm, a matrix.

[gate | x B C | dt] = W_in u          y = scan(x, B, C, dt)          out = W_out norm(y silu(gate))
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from outrider.models.recurrent.config import MixerNorm, RecurrentConfig
from outrider.models.recurrent.layers import RecurrentPass
from outrider.models.recurrent.mamba_scan import MambaNumbers
from outrider.models.recurrent.norms import Gating, GroupNorm, gate_after, gate_only, gate_then
from outrider.models.recurrent.scans import mamba_scan
from outrider.models.recurrent.tensors import Tensors, sums_dtype


@final
class MambaMixer:
    """One recurrent layer's mixer, from the tensors of a Hugging Face layout."""

    def __init__(self, config: RecurrentConfig, tensors: Tensors, layer: int) -> None:
        """``layer`` is its number in the cache."""
        shape, hidden, biases = config.scan, config.hidden_size, config.mixer_biases
        self._layer, self._inner = layer, shape.num_heads * shape.head_dim
        inner = self._inner
        self._in = tensors.linear("in_proj", inner + shape.conv_size + shape.num_heads, hidden, bias=biases[0])
        self._out = tensors.linear("out_proj", hidden, inner, bias=biases[1])
        numbers = MambaNumbers(
            weight=tensors.exact("conv1d.weight", shape.conv_size, 1, shape.conv_len)[:, 0],
            bias=tensors.exact("conv1d.bias", shape.conv_size) if config.conv_bias else None,
            rate=-tensors.exact("A_log", shape.num_heads).exp(),
            time_bias=tensors.exact("dt_bias", shape.num_heads),
            skip=tensors.exact("D", shape.num_heads),
            limit=config.time_step_limit,
        )
        self._scan = mamba_scan(shape, numbers, fast=tensors.fast)
        self._gated = _gating(config, tensors)
        self._dtype, self._sums = tensors.dtype, sums_dtype(tensors.dtype)

    def __call__(self, x: Tensor, step: RecurrentPass) -> Tensor:
        projected = self._in(x).view(step.batch_size, step.num_nodes, -1).to(self._sums)
        found = self._scan(projected, self._layer, step)
        return self._out(self._gated(found, projected[..., : self._inner]).to(self._dtype).flatten(0, 1))


def _gating(config: RecurrentConfig, tensors: Tensors) -> Gating:
    if config.mixer_norm is MixerNorm.NONE:
        return gate_only
    inner = config.scan.num_heads * config.scan.head_dim
    norm = GroupNorm(tensors.exact("norm.weight", inner), config.norm_eps, config.scan.num_groups)
    return gate_then(norm) if config.mixer_norm is MixerNorm.AFTER_GATE else gate_after(norm)
