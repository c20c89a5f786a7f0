"""GPTQ: 2, 4 or 8 bits, a scale and a zero for every group of inputs (Frantar et al. 2022, arXiv 2210.17323).

    qweight  [in / 8, out]       int32, eight inputs of an output in a word (4 bits)
    qzeros   [groups, out / 8]   int32, the zeros of eight outputs in a word
    scales   [groups, out]       w[o, i] = scale[g, o] * (q[i, o] - zero[g, o])
    g_idx    [in]                the group g of every input

The first version of the format (``checkpoint_format`` "gptq") stores each zero less 1, with 0 as the largest code; version 2
("gptq_v2") stores it as it is. With act-order (``desc_act``) the groups are not neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from outrider.models.quantised.format import Format, Names, Parts, Settings
from outrider.models.quantised.matrix import Quantised, in_order
from outrider.models.quantised.words import codes_in, signed


@final
@dataclass(frozen=True)
class GPTQ(Format):
    """GPTQ, and AutoRound's files in its format."""

    bits: int
    group_len: int
    """Inputs of a group; -1 if all inputs of an output are one group."""
    zero_offset: int
    """Number to add to a stored zero: 1 in version 1 of the format."""
    act_order: bool

    @staticmethod
    def of(settings: Settings) -> GPTQ:
        offset = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
        bits, group_len = int(settings.get("bits", 4)), int(settings.get("group_size", 128))
        return GPTQ(bits, group_len, offset, bool(settings.get("desc_act")))

    @property
    def title(self) -> str:
        groups = f"groups of {self.group_len}" if self.group_len > 0 else "one group per output"
        return f"GPTQ, {self.bits} bits, {groups}{', act-order' if self.act_order else ''}"

    @property
    def names(self) -> Names:
        return Names(".qweight", (".qzeros", ".scales", ".g_idx"))

    @property
    def codes(self) -> tuple[str, int]:
        return ".qweight", 32 // self.bits

    @property
    def reorders(self) -> bool:
        return self.act_order and self.group_len > 0

    def matrix(self, parts: Parts) -> Quantised:
        middle, most = 1 << (self.bits - 1), (1 << self.bits) - 1
        codes = codes_in(parts[".qweight"], self.bits, dim=0).T
        stored = codes_in(parts[".qzeros"], self.bits, dim=1)[:, : codes.shape[0]].T
        zeros = ((stored.to(torch.int16) + self.zero_offset) & most) - middle
        group_len = self.group_len if self.group_len > 0 else codes.shape[1]
        group_of = parts.get(".g_idx")
        if group_of is not None and in_order(group_of, group_len):
            group_of = None
        return Quantised(
            signed(codes, self.bits).contiguous(),
            parts[".scales"].T.contiguous(),
            group_len,
            max(4, self.bits),
            zeros.contiguous() if bool(zeros.any()) else None,
            None if group_of is None else group_of.long(),
        )
