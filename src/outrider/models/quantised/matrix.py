"""A quantised matrix, whatever library wrote it: small codes, and a scale for every group of inputs.

    w[o, i] = scale[o, g] * (code[o, i] - zero[o, g])        g = i // group_len, or the group that act-order gave the input

Codes are whole numbers (4 or 8 bits), 8-bit floats (e4m3), or indices into a table of sixteen numbers. ``dequantised`` is the
reference of every product with such a matrix. It is exact in float32 for 16-bit scales, and rounded once for 32-bit scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from outrider.models.packed import factors


@final
@dataclass(frozen=True, eq=False)
class Quantised:
    """An [out, in] matrix of codes."""

    codes: Tensor
    """[out, in] int8, or float8_e4m3fn."""
    scales: Tensor
    """[out, groups], of any float type; uint8 for powers of two, 127 more than the exponent."""
    group_len: int
    """Neighbouring inputs that share a scale."""
    bits: int
    """4, 5 or 8: bits of a code. Whole codes are signed, -8 .. 7 or -128 .. 127."""
    zeros: Tensor | None = None
    """[out, groups] int16: the code of the number 0; None where it is 0 everywhere."""
    group_of: Tensor | None = None
    """[in] the group of every input, where groups are not neighbours (act-order)."""
    levels: Tensor | None = None
    """[16] float32 values of the codes -8 .. 7; None if the codes are whole numbers."""
    num_experts: int = 0
    """Number of experts whose matrices are stacked along the outputs. Unquantised checkpoints store them with the inputs
    first."""

    def __post_init__(self) -> None:
        groups = -(-self.codes.shape[1] // self.group_len) if self.group_of is None else int(self.group_of.max()) + 1
        for what, found in (("scales", self.scales), ("zeros", self.zeros)):
            if found is not None and tuple(found.shape) != (len(self.codes), groups):
                raise ValueError(f"{what} of {len(self.codes)} outputs and {groups} groups have shape {list(found.shape)}")
        if self.group_of is not None and len(self.group_of) != self.codes.shape[1]:
            raise ValueError(f"{self.codes.shape[1]} inputs, and groups of {len(self.group_of)}")

    @property
    def is_float(self) -> bool:
        """The codes are floats of 8 bits."""
        return self.codes.dtype == torch.float8_e4m3fn

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape that the matrix has in an unquantised checkpoint."""
        num_outputs, num_inputs = self.shape
        return (self.num_experts, num_inputs, num_outputs // self.num_experts) if self.num_experts else self.shape

    @property
    def order(self) -> Tensor | None:
        """[in] an order of the columns that makes groups neighbours; None if they are already, or if groups differ in
        length."""
        if self.group_of is None:
            return None
        order = self.group_of.argsort(stable=True)
        return order if in_order(self.group_of[order], self.group_len) else None

    def in_order(self) -> Quantised:
        """The matrix with its columns in their ``order``."""
        order = self.order
        assert order is not None, "columns that have another order"
        return replace(self, codes=self.codes[:, order].contiguous(), group_of=None)

    def dequantised(self) -> Tensor:
        """[out, in] float32."""
        numbers = self.codes.float() if self.levels is None else self.levels[self.codes.long() + 8]
        if self.zeros is not None:
            numbers -= self.spread(self.zeros).float()
        return numbers.mul_(self.spread(factors(self.scales)))

    def spread(self, values: Tensor) -> Tensor:
        """[out, in] from [out, groups]: each input has the value of its group."""
        if self.group_of is not None:
            return values[:, self.group_of]
        return values.repeat_interleave(self.group_len, 1)[:, : self.codes.shape[1]]


def in_order(group_of: Tensor, group_len: int) -> bool:
    """Whether the groups of inputs are neighbours, as without act-order."""
    return torch.equal(group_of.long(), torch.arange(len(group_of)) // group_len)


def spread_blocks(scales: Tensor, num_outputs: int, block_len: int) -> Tensor:
    """[out, groups] from a scale per block of outputs: [blocks, groups]."""
    return scales.repeat_interleave(block_len, 0)[:num_outputs]
