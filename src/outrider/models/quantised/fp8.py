"""FP8: weights as e4m3 floats of 8 bits, with a scale per block of 128 x 128, per output or for the whole matrix.

    weight            [out, in]               float8_e4m3fn
    weight_scale_inv  [out / 128, in / 128]   w = code * scale_inv of its block (DeepSeek, Qwen)
    weight_scale      [out, 1] or []          w = code * scale (FBGEMM, one scale a matrix)

Despite its name ``weight_scale_inv`` is multiplied. Activations are not quantised here, even if the checkpoint asks for it
(``activation_scheme``): only the weights are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from outrider.models.quantised.format import Format, Names, Parts, Settings
from outrider.models.quantised.matrix import Quantised, spread_blocks


@final
@dataclass(frozen=True)
class FP8(Format):
    """FP8 with scales in blocks, or per output or matrix."""

    block: tuple[int, int] | None
    """Outputs and inputs of a block; None if scales belong to outputs or to the whole matrix."""

    @staticmethod
    def of(settings: Settings) -> FP8:
        block = settings.get("weight_block_size")
        return FP8((int(block[0]), int(block[1])) if block else None)

    @property
    def title(self) -> str:
        blocks = "a scale per output or matrix" if self.block is None else f"blocks of {self.block[0]} x {self.block[1]}"
        return f"FP8 (e4m3), {blocks}"

    @property
    def names(self) -> Names:
        marker = ".weight_scale_inv" if self.block else ".weight_scale"
        return Names(marker, (".weight", ".input_scale", ".activation_scale", ".input_scale_ub"))

    @property
    def codes(self) -> tuple[str, int]:
        return ".weight", 1

    @property
    def stays(self) -> bool:
        return False

    @property
    def packs(self) -> bool:
        return True

    def matrix(self, parts: Parts) -> Quantised:
        return float_matrix(parts[".weight"], parts[self.names.marker], self.block)


def float_matrix(codes: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Quantised:
    """Codes of e4m3 with a scale per block; without blocks one per output, or one alone."""
    num_outputs, num_inputs = codes.shape
    if block is None:
        scales = scales.reshape(-1, 1).expand(num_outputs, 1) if scales.numel() == 1 else scales.view(num_outputs, -1)
        return Quantised(codes, scales.contiguous(), -(-num_inputs // scales.shape[1]), 8)
    return Quantised(codes, spread_blocks(scales, num_outputs, block[0]), block[1], 8)
