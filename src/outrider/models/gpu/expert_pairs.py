"""Reading and writing the pairs of an expert's block, for all grouped products."""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from outrider.models.gpu.finish import activated


@triton.jit
def rows_of(pairs, num_pairs, K: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr):
    """The pairs of a block, which of them exist, and the rows of their inputs."""
    pair = tl.load(pairs + tl.arange(0, BM))
    rows = pair // K if GATED else pair
    return pair, pair < num_pairs, rows


@triton.jit
def store_pairs(
    total, total_up, bias, shares, out, pair, outputs, expert, num_pairs, num_outputs,
    K: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Add biases, then apply the activation or the weight of the pair, and store."""
    is_output = outputs < num_outputs
    sides = 2 if GATED else 1
    if HAS_BIAS:
        own = bias + expert * sides * num_outputs + outputs
        total += tl.load(own, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if GATED:
            total_up += tl.load(own + num_outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    where = pair
    if GATED:
        total = activated(total, total_up, True, ACTIVATION)
    else:
        total *= tl.load(shares + pair, mask=pair < num_pairs, other=0.0)[None, :]
        where = pair % K * (num_pairs // K) + pair // K
    out_at = out + where[None, :].to(tl.int64) * num_outputs + outputs[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=is_output[:, None] & (pair < num_pairs)[None, :])
