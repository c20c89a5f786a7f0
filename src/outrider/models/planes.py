"""Matrices of GGUF files for a GPU. Their blocks are split into planes, so that memory is read in whole lines.

    w = scale * (code - middle) + offset        scale = scales * steps,   offset = offsets * offset_steps

A unit is 32 inputs. Byte j of its 16 in ``low`` holds the low four bits of the codes of inputs j and 16 + j. ``high`` has the
upper bits of both, those of j first: 2 bits for codes of 5 bits, 4 for codes of 6, 8 for codes of 8. Blocks have a scale of 16
bits. In types with blocks of 256 (the K types) every group also has a whole number, its step. A storage type is described by
data, not by a kernel of its own: its planes, the lengths of groups and blocks, and the middle code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.models.few_bits import FewBits

UNIT = 32
"""Inputs whose codes share 16 bytes of ``low``."""
HALF = UNIT // 2


@final
@dataclass(frozen=True, eq=False)
class Planes(FewBits):
    """A stored [out, in] matrix."""

    outputs_at: ClassVar[Mapping[str, int]] = {
        "low": 0,
        "high": 0,
        "scales": 1,
        "steps": 1,
        "offsets": 1,
        "offset_steps": 1,
    }

    low: Tensor
    """[out, in / 2] uint8."""
    scales: Tensor
    """[in / block, out] float16."""
    middle: int = 0
    """The code of 0: a weight with this code equals its offset."""
    high: Tensor | None = None
    """[out, in * (bits - 4) / 8] uint8, in codes of more than 4 bits."""
    steps: Tensor | None = None
    """[in / group, out] int8: a group's scale is so many scales of its block."""
    offsets: Tensor | None = None
    """[in / block, out] float16."""
    offset_steps: Tensor | None = None
    """[in / group, out] int8."""

    @property
    def extra_bits(self) -> int:
        """Bits of a code above its low four."""
        return 0 if self.high is None else 4 * self.high.shape[1] // self.low.shape[1]

    @property
    def bits(self) -> int:
        return 4 + self.extra_bits

    @property
    def shape(self) -> tuple[int, int]:
        return self.low.shape[0], 2 * self.low.shape[1]

    @property
    def block_len(self) -> int:
        """Inputs that share a float."""
        return self.shape[1] // len(self.scales)

    @property
    def unit(self) -> int:
        return self.block_len

    @property
    def group_len(self) -> int:
        """Inputs that share a step: 16 or 32."""
        return self.block_len if self.steps is None else self.shape[1] // len(self.steps)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, Tensor))

    @property
    def form(self) -> tuple[object, ...]:
        return self.bits, self.middle, self.block_len, self.group_len, self.offsets is None

    @property
    def device(self) -> torch.device:
        return self.low.device

    def unpacked(self, dtype: torch.dtype | None = None) -> Tensor:
        numbers = (self.codes().to(torch.int16) - self.middle).float()
        numbers *= self._spread(self.scales, self.steps)
        if self.offsets is not None:
            numbers += self._spread(self.offsets, self.offset_steps)
        return numbers.to(dtype or torch.bfloat16)

    def codes(self) -> Tensor:
        """[out, in] uint8."""
        low = _apart(self.low, 4)
        if self.high is None:
            return low.flatten(1)
        return (low | _apart(self.high, self.extra_bits) << 4).flatten(1)

    def _spread(self, scales: Tensor, steps: Tensor | None) -> Tensor:
        """[out, in] float32: one number per block times one number per group, for every input."""
        found = scales.float().T.repeat_interleave(self.block_len, 1)
        return found if steps is None else found * steps.float().T.repeat_interleave(self.group_len, 1)


def _apart(packed: Tensor, bits: int) -> Tensor:
    """[out, units, 32] the codes of pairs with ``bits`` bits each, 16 pairs per unit."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    pairs = ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).reshape(len(packed), -1, HALF, 2)
    return pairs.transpose(-1, -2).flatten(2)


def together(codes: Tensor, bits: int) -> Tensor:
    """[out, in * bits / 8] from [out, in] codes of so many bits: the inverse of what ``Planes.codes`` does to a plane."""
    pairs = codes.unflatten(1, (-1, 2, HALF)).transpose(-1, -2).reshape(len(codes), -1, 8 // bits)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (pairs << shifts).sum(-1, dtype=torch.uint8)
