"""Matrix products with a fixed matrix, stored the way the machine multiplies it fastest.

On a GPU the weight stays as it is. On a CPU the layout decides. A bfloat16 matrix is packed for oneDNN once instead of in every
call, after which eight nodes cost no more than one. A float32 matrix is best read transposed for one node and packed for many,
so it is kept in both forms where memory allows. A pass over eight nodes then takes about half the time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.packed import pack

_TRANSPOSED = 1 << 22
"""Most elements of a float32 matrix that is stored transposed. Larger products are bound by memory anyway."""
_WORTH_PACKING = 1 << 19
"""Fewest elements for which packing a float32 matrix pays for its slower call."""
_FEW_ROWS = 2
_VECTOR = 32
"""Inputs that PyTorch's 8-bit product reads at once."""
_PACKED_FOR = 8
"""Rows for which the packed layout is optimised. It serves any number."""


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
    """The weight in oneDNN's own blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR), bias
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._sum = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self._weight, self._bias, "none", [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._sum(x, residual, self._weight, self._bias, "add")


@final
class RoundedLinear(Linear):
    """The weight in 8 bits with a scale per output, multiplied by PyTorch's bfloat16 x int8 product (CPU).

    That product reads whole vectors, even past the end, so inputs are padded with zeros.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        rounded = pack(weight, 8)
        self._missing = -weight.shape[1] % _VECTOR
        self._weight, self._scales, self._bias = F.pad(rounded.data, (0, self._missing)), rounded.scales[0].contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, self._missing)) if self._missing else x.contiguous()
        found = torch.ops.aten._weight_int8pack_mm(x, self._weight, self._scales)
        return found if self._bias is None else found + self._bias

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


@final
class TwofoldLinear(Linear):
    """One form of the weight for a few rows, another for many."""

    def __init__(self, few: Linear, many: Linear, in_size: int) -> None:
        self._few, self._many, self._few_elements = few, many, _FEW_ROWS * in_size

    def __call__(self, x: Tensor) -> Tensor:
        return self._few(x) if x.numel() <= self._few_elements else self._many(x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._few.add_to(residual, x) if x.numel() <= self._few_elements else self._many.add_to(residual, x)


class LinearOf(Protocol):
    """Makes a linear from a weight."""

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear: ...


def linear_of(weight: Tensor, bias: Tensor | None = None, *, twofold: bool = False, bits: int = 16) -> Linear:
    """The fastest linear for the weight's device, type and size. ``twofold`` allows two copies of it; ``bits`` 8 rounds it."""
    if bits == 8:
        return RoundedLinear(weight, bias)
    if weight.device.type != "cpu":
        return PlainLinear(weight, bias)
    if weight.dtype == torch.bfloat16 and can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    if weight.dtype != torch.float32:
        return PlainLinear(weight, bias)
    few = PlainLinear(weight.t().contiguous().t() if weight.numel() <= _TRANSPOSED else weight, bias)
    if not twofold or weight.numel() < _WORTH_PACKING or not can_pack(weight.dtype):
        return few
    return TwofoldLinear(few, PackedLinear(weight, bias), weight.shape[1])


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN is available and packs this type on this machine without going through float32.

    Packing is tried once: for bfloat16 it needs AVX-512, which PyTorch reports only by an error.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype != torch.float32 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    try:
        linear = PackedLinear(torch.ones(_VECTOR, _VECTOR, dtype=dtype), None)
        return bool((linear(torch.ones(1, _VECTOR, dtype=dtype)) == _VECTOR).all())
    except RuntimeError:
        return False
