"""Heads padded with zeros, for kernels that need wider heads. The results are the same.

Both halves of a head get equally many zeros, so rotary partners stay half a head apart. The new dimensions have the angle 0,
like those that partial rotation does not rotate. The output matrix gets columns of zeros for the added values.

    norm per head   w' = w sqrt(d / D),  eps' = eps d / D       so that  norm'(x, 0) = norm(x)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.models.decoder_weights import LayerWeights, Weights
from outrider.models.features import ModelConfig


def can_pad(config: ModelConfig) -> bool:
    """Whether heads can be padded. They cannot if a norm over a head subtracts the mean or has the stream's eps, because zeros
    would then change it."""
    return not config.qk_norm


def with_wider_heads(config: ModelConfig, weights: Weights, head_dim: int) -> tuple[ModelConfig, Weights]:
    """The model with heads of ``head_dim``; unchanged if they are that wide already."""
    if config.head_dim == head_dim:
        return config, weights
    assert can_pad(config) and head_dim > config.head_dim and not (head_dim - config.head_dim) % 2
    layers = [_wider(config, layer, head_dim) for layer in weights.layers]
    return replace(config, head_dim=head_dim), replace(weights, layers=layers)


def _wider(config: ModelConfig, layer: LayerWeights, head_dim: int) -> LayerWeights:
    sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    rows = [size * config.head_dim for size in sizes]
    queries, keys, values = (
        _halves(part, config.head_dim, head_dim) if turned else _end(part, config.head_dim, head_dim)
        for part, turned in zip(layer.qkv.split(rows), (True, True, False), strict=True)
    )
    bias = layer.qkv_bias
    if bias is not None:
        parts = zip(bias.split(rows), (_halves, _halves, _end), strict=True)
        bias = torch.cat([pad(part, config.head_dim, head_dim) for part, pad in parts])
    out = _end(layer.out.T, config.head_dim, head_dim).T.contiguous()
    return replace(layer, qkv=torch.cat((queries, keys, values)), qkv_bias=bias, out=out)


def _halves(rows: Tensor, head_dim: int, wider: int) -> Tensor:
    """Rows of rotated heads, with zeros after each half of a head."""
    return _end(rows, head_dim // 2, wider // 2)


def _end(rows: Tensor, size: int, wider: int) -> Tensor:
    """Rows in groups of ``size``, with zeros after every group."""
    groups = rows.unflatten(0, (-1, size))
    after = [0, 0] * (groups.dim() - 2) + [0, wider - size]
    return F.pad(groups, after).flatten(0, 1)
