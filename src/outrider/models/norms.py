"""The norms of a decoder: of the residual stream, of sublayer outputs, and of queries and keys.

rms     x / sqrt(mean(x^2) + eps) * w
layer   (x - mean(x)) / sqrt(var(x) + eps) * w + b
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.features import ModelConfig

Norm = Callable[[Tensor], Tensor]


def norm_of(config: ModelConfig, weight: Tensor | None, bias: Tensor | None = None) -> Norm:
    """A norm of the residual stream, or the identity if there is none."""
    if weight is None:
        return _unchanged
    if config.norm_kind == "rms":
        return rms_norm(weight, config.norm_eps)
    return partial(_layer_norm, weight=weight, bias=bias, eps=config.norm_eps)


def query_norm_of(config: ModelConfig, weight: Tensor) -> Norm:
    """The norm of [B, heads, N, D] queries or keys."""
    if config.qk_norm_span == "head":
        return norm_of(config, weight)
    if config.qk_norm_span == "whole":
        return partial(_over_all_heads, norm=norm_of(config, weight))
    each = weight.view(-1, 1, config.head_dim)
    return partial(_head_by_head, norm=norm_of(config, torch.ones_like(each[0, 0])), weight=each)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _over_all_heads(heads: Tensor, *, norm: Norm) -> Tensor:
    by_node = heads.transpose(1, 2)
    return norm(by_node.flatten(2)).view(by_node.shape).transpose(1, 2)


def _head_by_head(heads: Tensor, *, norm: Norm, weight: Tensor) -> Tensor:
    return norm(heads) * weight


def _layer_norm(x: Tensor, *, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(weight: Tensor, eps: float) -> Norm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside."""
    if weight.device.type == "cpu":
        return _RmsNormOfFewOps(weight, eps)
    return partial(_fused_rms_norm, weight=weight, eps=eps)


def _fused_rms_norm(x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype == x.dtype:
        return torch.rms_norm(x, weight.shape, weight, eps)
    return torch.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


class _RmsNormOfFewOps:
    """``rms_norm`` in four operations instead of nine, for a CPU: x / hypot(|x|, sqrt(H eps)) is the norm up to sqrt(H)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        self._weight = weight.float() * size**0.5
        self._floor = torch.tensor((size * eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return (x / torch.linalg.vector_norm(x, 2, -1, True).hypot_(self._floor)).mul_(self._weight)
        wide = x.float()
        return wide.div_(torch.linalg.vector_norm(wide, 2, -1, True).hypot_(self._floor)).mul_(self._weight).to(x.dtype)
