"""Grouped products over the experts that nodes chose: of 16 bits here, of fewer in ``expert_codes.py``.

Every output of a pair is one sum in the order of its inputs, so it does not depend on what else is in the pass.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from outrider.models.few_bits import FewBits
from outrider.models.gpu import launch
from outrider.models.gpu.expert_codes import OUTPUTS, STEP, decoding_of, grouped_codes
from outrider.models.gpu.expert_pairs import rows_of, store_pairs
from outrider.models.gpu.finish import ACTIVATIONS
from outrider.models.gpu.launch import begin, end
from outrider.models.gpu.limits import stages_that_fit
from outrider.models.packed import Matrix

_PROGRAMS = 132


@dataclass(frozen=True, eq=False)
class ExpertBlocks:
    """Pairs grouped by expert. Pair p is node p // k with its expert number p % k."""

    shares: Tensor
    """[P] float32 weight of each pair's output."""
    experts: Tensor
    """[blocks] int32, the expert of each block; -1 for none."""
    pairs: Tensor
    """[blocks, BM] int32 pairs of each block; P for none."""


def expert_product(
    x: Tensor, weight: Matrix, bias: Tensor | None, out: Tensor, blocks: ExpertBlocks, *, per_row: int, activation: str | None
) -> None:
    """Outputs of the experts. With an activation: [P, F] from gates and ups. Without: the weighted parts [k, M, H]. ``weight``
    is [E, .., in], or [E * .., in] in few bits."""
    num_outputs, depth, gated = out.shape[-1], x.shape[1], activation is not None
    num_blocks, bm = blocks.pairs.shape
    common = {"K": per_row, "GATED": gated, "ACTIVATION": ACTIVATIONS[activation or "none"], "HAS_BIAS": bias is not None}
    common |= {"BM": bm, "EARLY": launch.EARLY, "num_warps": 4, "launch_pdl": launch.EARLY}
    own = (x if bias is None else bias, blocks.shares, blocks.experts, blocks.pairs, out)
    sizes, sides = (len(blocks.shares), num_outputs, depth), 2 if gated else 1
    if isinstance(weight, FewBits):
        found = decoding_of(weight, x.dtype)
        stage_bytes = STEP * (OUTPUTS * sides * weight.bits // 8 + bm * x.element_size())
        grouped_codes[triton.cdiv(num_outputs, OUTPUTS), num_blocks](
            x, found.parts, *own, *sizes, weight.shape[0],
            DECODER=found.decoder, FORM=found.form, HALF=found.half, AFTER=found.after,
            BN=OUTPUTS, num_stages=stages_that_fit(4, stage_bytes), **common,
        )  # fmt: skip
        return
    assert isinstance(weight, Tensor), "experts of several forms are made 16 bits"
    bn = next((bn for bn in (64, 32) if triton.cdiv(num_outputs, bn) * num_blocks >= _PROGRAMS), 16)
    bk = 128 if depth % 128 == 0 or depth > 512 else 64
    stage_bytes = (bn * sides + bm) * bk * weight.element_size()
    _grouped[triton.cdiv(num_outputs, bn), num_blocks](
        x, weight, *own, *sizes,
        EVEN=num_outputs % bn == 0 and depth % bk == 0, BN=bn, BK=bk, num_stages=stages_that_fit(4, stage_bytes), **common,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped(
    x, weight, bias, shares, experts, pairs, out, num_pairs, num_outputs, depth,
    K: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    block = tl.program_id(1)
    ks = tl.arange(0, BK)
    is_output = outputs < num_outputs
    begin(EARLY)
    expert = tl.load(experts + block)
    if expert >= 0:
        pair, is_row, rows = rows_of(pairs + block * BM, num_pairs, K, GATED, BM)
        weights_at = weight + (expert.to(tl.int64) * (2 if GATED else 1) * num_outputs + outputs)[:, None] * depth + ks[None, :]
        ups_at = weights_at + num_outputs.to(tl.int64) * depth
        x_at = x + rows[None, :].to(tl.int64) * depth + ks[:, None]
        total = tl.zeros((BN, BM), tl.float32)
        total_up = tl.zeros((BN, BM), tl.float32)
        for k in range(0, depth, BK):
            inside = k + ks < depth
            is_weight = is_output[:, None] & inside[None, :]
            w = tl.load(weights_at + k) if EVEN else tl.load(weights_at + k, mask=is_weight, other=0.0)
            piece = tl.load(x_at + k, mask=is_row[None, :] & inside[:, None], other=0.0)
            total = tl.dot(w, piece, total, input_precision="ieee")
            if GATED:
                w_up = tl.load(ups_at + k) if EVEN else tl.load(ups_at + k, mask=is_weight, other=0.0)
                total_up = tl.dot(w_up, piece, total_up, input_precision="ieee")
        store_pairs(
            total, total_up, bias, shares, out, pair, outputs, expert, num_pairs, num_outputs,
            K, GATED, ACTIVATION, HAS_BIAS,
        )  # fmt: skip
    end(EARLY)
