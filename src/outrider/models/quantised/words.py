"""Codes of a few bits that share words of 32: the lowest bits hold the first code."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.errors import ModelError


def codes_in(words: Tensor, bits: int, *, dim: int) -> Tensor:
    """The codes in int32 ``words`` along ``dim``, uint8: 32 / bits as many as there are words."""
    if bits not in (2, 4, 8):
        raise ModelError(f"codes of {bits} bits are not supported, only of 2, 4 and 8; use a checkpoint of 4 or 8 bits")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    apart = (words.movedim(dim, -1).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return apart.flatten(-2).to(torch.uint8).movedim(-1, dim)


def signed(codes: Tensor, bits: int) -> Tensor:
    """Codes 0 .. 2^bits - 1 as int8, less half of their range."""
    return (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
