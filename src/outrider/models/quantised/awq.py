"""AWQ: 4 bits, a scale and a zero for every group of inputs (Lin et al. 2023, arXiv 2306.00978), in the "gemm" layout.

    qweight  [in, out / 8]       int32, eight outputs of an input in a word
    qzeros   [groups, out / 8]   int32, likewise
    scales   [groups, out]       w[o, i] = scale[g, o] * (q[i, o] - zero[g, o])

A word holds outputs 0 to 7 in the order 0 2 4 6 1 3 5 7, which suits a conversion of two numbers at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.core.errors import ModelError, nearest
from outrider.models.quantised.format import Format, Names, Parts, Settings
from outrider.models.quantised.matrix import Quantised
from outrider.models.quantised.words import codes_in, signed

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The places of outputs 0 to 7 in a word."""
_BITS = 4


@final
@dataclass(frozen=True)
class AWQ(Format):
    """AWQ as AutoAWQ writes it."""

    group_len: int
    """Inputs of a group; -1 if all inputs of an output are one group."""

    @staticmethod
    def of(settings: Settings) -> AWQ:
        version, bits = str(settings.get("version", "gemm")).lower(), int(settings.get("bits", _BITS))
        if version != "gemm":
            hint = nearest(version, ["gemm"])
            raise ModelError(
                f"AWQ layout {version!r} is not supported, only 'gemm' is; {hint}: use a checkpoint in that layout"
            )
        if bits != _BITS:
            raise ModelError(f"AWQ with {bits} bits is not supported, only 4; use a checkpoint of 4 bits")
        return AWQ(int(settings.get("group_size", 128)))

    @property
    def title(self) -> str:
        return f"AWQ, 4 bits, groups of {self.group_len}" if self.group_len > 0 else "AWQ, 4 bits, one group per output"

    @property
    def names(self) -> Names:
        return Names(".qweight", (".qzeros", ".scales"))

    @property
    def codes(self) -> tuple[str, int]:
        return ".qweight", 32 // _BITS

    def matrix(self, parts: Parts) -> Quantised:
        codes = signed(_apart(parts[".qweight"]).T, _BITS).contiguous()
        zeros = signed(_apart(parts[".qzeros"]).T, _BITS).to(torch.int16).contiguous()
        group_len = self.group_len if self.group_len > 0 else codes.shape[1]
        return Quantised(codes, parts[".scales"].T.contiguous(), group_len, _BITS, zeros if bool(zeros.any()) else None)


def _apart(words: Tensor) -> Tensor:
    """[rows, out] codes of [rows, out / 8] words, outputs in order."""
    return codes_in(words, _BITS, dim=1).unflatten(1, (-1, 8))[..., PLACES].flatten(1)
