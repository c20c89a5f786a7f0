"""compressed-tensors, the format of LLM Compressor and vLLM: int4, int8 and FP8, a scale per matrix, output, group or block.

    pack-quantized    weight_packed [out, in / 8] int32, eight inputs a word (4 bits), each 8 more than the code
                      weight_shape [2], weight_zero_point [out / 8, groups] int32 where codes are not symmetric
                      weight_g_idx [in], the group of every input, where groups are not neighbours
    int-quantized     weight [out, in] int8, weight_zero_point [out, groups] int8
    float-quantized   weight [out, in] float8_e4m3fn
    all               weight_scale [1], [out, 1], [out, groups] or [out / 128, in / 128]

    w = scale * (code - zero)

Quantisation of activations (W8A8), if the checkpoint asks for it, is ignored: only the weights are rounded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.errors import ModelError, nearest
from outrider.models.quantised.format import Format, Names, Parts, Settings
from outrider.models.quantised.fp8 import float_matrix
from outrider.models.quantised.matrix import Quantised, in_order, spread_blocks
from outrider.models.quantised.words import codes_in, signed

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
"""Layouts that are read; "naive-quantized" is the older name of the two that do not pack."""


@final
@dataclass(frozen=True)
class Compressed(Format):
    """One scheme for every quantised matrix of the checkpoint."""

    layout: str
    bits: int
    strategy: str
    group_len: int
    block: tuple[int, int] | None
    is_float: bool
    act_order: bool

    @staticmethod
    def of(settings: Settings) -> Compressed:
        layout, scheme = _scheme(settings)
        kind, bits = str(scheme.get("type", "int")), int(scheme.get("num_bits", 8))
        if kind == "float" and bits != 8:
            raise ModelError(f"compressed-tensors floats of {bits} bits are not supported, only of 8; use an FP8 checkpoint")
        block = scheme.get("block_structure")
        blocks = (int(block[0]), int(block[1])) if isinstance(block, list | tuple) else None
        strategy, group_len = str(scheme.get("strategy") or "tensor"), int(scheme.get("group_size") or -1)
        ordered = scheme.get("actorder") in ("group", True)  # with "weight" the groups are neighbours
        return Compressed(layout, bits, strategy, group_len, blocks, kind == "float", ordered)

    @property
    def title(self) -> str:
        sizes = {"group": f"groups of {self.group_len}", "channel": "a scale per output", "tensor": "a scale per matrix"}
        what = "blocks of {} x {}".format(*self.block) if self.block else sizes.get(self.strategy, self.strategy)
        return f"compressed-tensors {self.layout}, {self.bits} bits, {what}"

    @property
    def names(self) -> Names:
        others = (".weight", ".weight_packed", ".weight_shape", ".weight_zero_point", ".weight_g_idx")
        return Names(".weight_scale", (*others, ".input_scale", ".input_zero_point"))

    @property
    def codes(self) -> tuple[str, int]:
        return (".weight_packed", 32 // self.bits) if self.layout == "pack-quantized" else (".weight", 1)

    @property
    def stays(self) -> bool:
        return not self.is_float

    @property
    def packs(self) -> bool:
        return True

    @property
    def reorders(self) -> bool:
        return self.act_order

    def matrix(self, parts: Parts) -> Quantised:
        codes, scales = self._codes(parts), parts[".weight_scale"]
        if codes.dtype == torch.float8_e4m3fn:
            return float_matrix(codes, scales, self.block)
        num_outputs, num_inputs = codes.shape
        group_of = parts.get(".weight_g_idx")
        scales = self._per_output(scales, num_outputs)
        group_len = self.block[1] if self.block else -(-num_inputs // scales.shape[1])
        if group_of is not None and in_order(group_of, group_len):
            group_of = None
        zeros, order = self._zeros(parts, num_outputs), None if group_of is None else group_of.long()
        return Quantised(codes, scales, group_len, 4 if self.bits <= 4 else 8, zeros, order)

    def _codes(self, parts: Parts) -> Tensor:
        if ".weight_packed" not in parts:
            return parts[".weight"]
        num_outputs, num_inputs = parts[".weight_shape"].tolist()
        words = codes_in(parts[".weight_packed"], self.bits, dim=1)[:num_outputs, :num_inputs]
        return signed(words, self.bits).contiguous()

    def _zeros(self, parts: Parts, num_outputs: int) -> Tensor | None:
        stored = parts.get(".weight_zero_point")
        if stored is None:
            return None
        if stored.dtype == torch.int32 and ".weight_packed" in parts:
            stored = signed(codes_in(stored, self.bits, dim=0)[:num_outputs], self.bits)
        zeros = self._per_output(stored.to(torch.int16), num_outputs)
        return zeros if bool(zeros.any()) else None

    def _per_output(self, values: Tensor, num_outputs: int) -> Tensor:
        """[out, groups] of a tensor with one number per matrix, output, group or block."""
        if self.block is not None:
            return spread_blocks(values, num_outputs, self.block[0])
        if values.numel() == 1:
            return values.reshape(1, 1).expand(num_outputs, 1).contiguous()
        return values.reshape(num_outputs, -1)


def _scheme(settings: Settings) -> tuple[str, Mapping[str, Any]]:
    """The layout, and how weights are quantised, which must be the same for all quantised matrices."""
    layout = str(settings.get("format"))
    groups = [dict(group) for group in dict(settings.get("config_groups") or {}).values()]
    layouts = {str(group.get("format") or layout) for group in groups}
    schemes = [group["weights"] for group in groups if group.get("weights")]
    if not schemes or len(layouts) > 1 or any(_shape(each) != _shape(schemes[0]) for each in schemes):
        found = f"{len(schemes)} different schemes" if schemes else "no scheme of weights"
        raise ModelError(f"compressed-tensors with {found} is not supported; use a checkpoint with one scheme for all matrices")
    layout = layouts.pop()
    if layout not in FORMATS:
        raise ModelError(f"compressed-tensors layout {layout!r} is not supported; {nearest(layout, FORMATS)}")
    return layout, schemes[0]


def _shape(scheme: Mapping[str, Any]) -> tuple[Any, ...]:
    """The part of a scheme that determines the layout of its tensors."""
    return tuple(scheme.get(key) for key in ("num_bits", "type", "strategy", "group_size", "block_structure"))
