"""MXFP4: experts of gpt-oss in floats of 4 bits (e2m1), 32 of them with a power of two (OCP Microscaling formats, 2023).

    gate_up_proj_blocks  [E, out, in / 32, 16]   uint8: two numbers a byte, the lower half first
    gate_up_proj_scales  [E, out, in / 32]       uint8: the exponent, 127 more

    w = number * 2^(exponent - 127)              exact in bfloat16, which has one more bit and the same exponents

An unquantised gpt-oss checkpoint stores its experts with the inputs first, so dequantised experts are [E, in, out].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.models.packed import E2M1
from outrider.models.quantised.format import Format, Names, Parts, Settings
from outrider.models.quantised.matrix import Quantised

_GROUP = 32


@final
@dataclass(frozen=True)
class MXFP4(Format):
    """MXFP4 as gpt-oss has it."""

    @staticmethod
    def of(settings: Settings) -> MXFP4:
        del settings  # there is only one
        return MXFP4()

    @property
    def title(self) -> str:
        return "MXFP4 experts (e2m1, a power of two for every 32)"

    @property
    def names(self) -> Names:
        return Names("_blocks", ("_scales",), whole="")

    @property
    def codes(self) -> tuple[str, int]:
        return "_blocks", 2

    @property
    def stays(self) -> bool:
        return True

    @property
    def packs(self) -> bool:
        return True

    @property
    def is_of_experts(self) -> bool:
        return True

    def matrix(self, parts: Parts) -> Quantised:
        blocks, exponents = parts["_blocks"], parts["_scales"]
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-3).flatten(0, 1).view(torch.int8) - 8
        scales = exponents.flatten(0, 1)
        return Quantised(codes, scales, _GROUP, 4, levels=torch.tensor(E2M1), num_experts=len(blocks))

    def dequantised(self, parts: Parts) -> Tensor:
        blocks, exponents = parts["_blocks"], parts["_scales"].to(torch.int32) - 127
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
        numbers = torch.ldexp(torch.tensor(E2M1)[codes.long()], exponents[..., None])
        return numbers.flatten(-2).transpose(-1, -2).contiguous()
