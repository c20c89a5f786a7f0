"""bitsandbytes: LLM.int8 (Dettmers et al. 2022, arXiv 2208.07339), and 4 bits as in QLoRA (2023, arXiv 2305.14314).

    int8    weight [out, in] int8, SCB [out]      w = code * SCB / 127
    4 bits  weight [n / 2, 1] uint8               two codes a byte, the upper half first, along the flattened matrix
            weight.quant_map [16]                 what the codes stand for: normal-float or fp4 numbers
            weight.absmax [n / 64]                w = quant_map[code] * absmax of its 64

With double quantisation absmax is stored as codes: ``nested_quant_map[code] * nested_absmax of its 256``, plus an offset in
``quant_state``, as JSON. The library's int8 path treats outlier inputs apart, in 16 bits. That is not needed here, because
inputs are not rounded where weights are dequantised.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.errors import ModelError
from outrider.models.quantised.format import Format, Names, Parts, Settings
from outrider.models.quantised.matrix import Quantised

_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")


@final
@dataclass(frozen=True)
class EightBits(Format):
    """bitsandbytes with 8 bits."""

    @property
    def title(self) -> str:
        return "bitsandbytes, 8 bits, a scale per output"

    @property
    def names(self) -> Names:
        return Names(".SCB", (".weight", ".weight_format"))

    @property
    def codes(self) -> tuple[str, int]:
        return ".weight", 1

    def matrix(self, parts: Parts) -> Quantised:
        codes, scales = parts[".weight"], parts[".SCB"].float().view(-1, 1) / 127
        return Quantised(codes, scales, codes.shape[1], 8)


@final
@dataclass(frozen=True)
class FourBits(Format):
    """bitsandbytes with 4 bits: nf4 or fp4, with or without double quantisation."""

    kind: str

    @property
    def title(self) -> str:
        return f"bitsandbytes, 4 bits ({self.kind})"

    @property
    def names(self) -> Names:
        return Names(".weight.absmax", (".weight", ".weight.quant_map", *_NESTED, *_STATES))

    @property
    def codes(self) -> tuple[str, int]:
        return ".weight", 2

    @property
    def stays(self) -> bool:
        return False  # the codes are no whole numbers

    @property
    def packs(self) -> bool:
        return True

    def matrix(self, parts: Parts) -> Quantised | None:
        """Available if blocks are groups of inputs, since bitsandbytes cuts the flattened matrix into blocks."""
        state, packed = _state(parts), parts[".weight"].flatten()
        (num_outputs, num_inputs), size = state["shape"], int(state["blocksize"])
        if num_inputs % size:
            return None
        codes = torch.stack((packed >> 4, packed & 15), -1).view(num_outputs, num_inputs).view(torch.int8) - 8
        scales = _absmax(parts, state).view(num_outputs, -1)
        return Quantised(codes, scales, size, 4, levels=parts[".weight.quant_map"].float())

    def dequantised(self, parts: Parts) -> Tensor:
        state = _state(parts)
        packed = parts[".weight"].flatten()
        codes = torch.stack((packed >> 4, packed & 15), -1).flatten()
        numbers = parts[".weight.quant_map"].float()[codes.long()]
        scales = _absmax(parts, state).repeat_interleave(int(state["blocksize"]))
        size = torch.Size(state["shape"])
        return (numbers * scales[: len(numbers)])[: size.numel()].view(size)


def _absmax(parts: Parts, state: dict[str, Any]) -> Tensor:
    """The scale of every block, in floats."""
    stored = parts[".weight.absmax"]
    if _NESTED[0] not in parts:
        return stored.float()
    outer = parts[_NESTED[0]].float().repeat_interleave(int(state["nested_blocksize"]))[: len(stored)]
    return parts[_NESTED[1]].float()[stored.long()] * outer + float(state.get("nested_offset", 0.0))


def _state(parts: Parts) -> dict[str, Any]:
    """The settings that bitsandbytes wrote beside a matrix: its shape, block sizes and offset."""
    found = next((parts[name] for name in _STATES if name in parts), None)
    if found is None:
        raise ModelError("a matrix has no quant_state beside it; save the checkpoint again with bitsandbytes 0.41.3 or later")
    return json.loads(bytes(found.tolist()))


def of(settings: Settings) -> EightBits | FourBits:
    """The format for a checkpoint with these settings."""
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        return EightBits()
    return FourBits(str(settings.get("bnb_4bit_quant_type", "fp4")))
