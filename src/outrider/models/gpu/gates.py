"""The gate of a wide product: activation(gate) * up in one kernel, rounded once. For few rows the product itself does this."""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.gpu.finish import ACTIVATIONS, activated

_BLOCK = 2048


def gated_rows(y: Tensor, activation: str) -> Tensor:
    """[M, I] from [M, 2 I] products, the gates first."""
    num_rows, width = y.shape[0], y.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=y.dtype, device=y.device)
    _gate[(triton.cdiv(width, _BLOCK), num_rows)](y, out, width, ACTIVATION=ACTIVATIONS[activation], BLOCK=_BLOCK, num_warps=8)
    return out


@triton.jit
def _gate(y, out, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    dims = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < width
    gate = tl.load(y + row * 2 * width + dims, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y + row * 2 * width + width + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + dims, activated(gate, up, True, ACTIVATION).to(out.dtype.element_ty), mask=inside)
