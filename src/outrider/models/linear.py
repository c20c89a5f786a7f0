"""Matrix products with a fixed matrix, stored the way the machine multiplies it fastest.

On a GPU the weight stays as it is. On a CPU the layout decides: a small float32 matrix is multiplied up to twice as fast when
it is stored transposed, and a bfloat16 one is packed for oneDNN once instead of in every call, after which eight nodes cost no
more than one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

_SMALL = 1 << 22
"""Elements up to which a float32 matrix is stored transposed; the product with a larger one only waits for memory."""
_PACKED_FOR = 8
"""Rows the packed layout is laid out for; it serves any number."""


class Linear(ABC):
    """x W^T + b for activations [M, in] and a frozen weight [out, in]."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b."""


@final
class PlainLinear(Linear):
    """The weight as PyTorch stores it, or its transpose."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias, self._transposed = weight, bias, weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self._bias is not None:
            residual = residual + self._bias
        return torch.addmm(residual, x, self._transposed)


@final
class PackedLinear(Linear):
    """A bfloat16 weight in oneDNN's own blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR), bias
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._sum = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self._weight, self._bias, "none", [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._sum(x, residual, self._weight, self._bias, "add")


def linear_of(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest linear for the weight's device, type and size."""
    if weight.device.type != "cpu":
        return PlainLinear(weight, bias)
    if weight.dtype == torch.float32:
        small = weight.numel() <= _SMALL
        return PlainLinear(weight.t().contiguous().t() if small else weight, bias)
    return PackedLinear(weight, bias) if weight.dtype == torch.bfloat16 and _can_pack() else PlainLinear(weight, bias)


def _can_pack() -> bool:
    """oneDNN is there and multiplies bfloat16 itself instead of through float32."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
