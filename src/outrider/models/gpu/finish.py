"""The end of a product inside its kernel: scales, bias and activation."""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3, "clamped": 4}
"""Numbers by which kernels know the activations."""


@dataclass(frozen=True, eq=False)
class Finish:
    """A bias, then an activation (of the gate, if there is one)."""

    activation: str = "silu"
    bias: Tensor | None = None


SILU = Finish()


@triton.jit
def activated(gate, up, GATED: tl.constexpr, ACTIVATION: tl.constexpr):
    """activation(gate) * up, or activation(gate) alone; the numbers of ``ACTIVATIONS``."""
    if ACTIVATION == 4:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    if ACTIVATION == 1:
        gate = gate / (1.0 + tl.exp(-gate))
    if ACTIVATION == 2:
        gate = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    if ACTIVATION == 3:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    return gate * up if GATED else gate


@triton.jit
def store_sums(
    total, total_up, scales, bias, out, rows, outputs, num_rows, num_outputs, part,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """A tile of sums, scaled if outputs have scales, with its bias and activation."""
    is_output = outputs < num_outputs
    if SCALED:
        total *= tl.load(scales + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if GATED:
            total_up *= tl.load(scales + num_outputs + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if GATED:
            total_up += tl.load(bias + num_outputs + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    total = activated(total, total_up, GATED, ACTIVATION)
    out_at = out + (part * num_rows + rows)[None, :].to(tl.int64) * num_outputs + outputs[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=is_output[:, None] & (rows < num_rows)[None, :])
