"""Grouped products over the experts that nodes chose, with matrices of 16 bits, or of 4 as MXFP4 stores them.

Every output of a pair is one sum in the order of its inputs, so it does not depend on what else is in the pass.

An e2m1 float becomes a bfloat16 by moving its bits: the exponent then counts from 127 instead of 1, which a factor of 2^126
makes right. Times the power of two of its 32 it is exact. Byte j of a group holds inputs j and 16 + j (``packed.py``). A step
takes the bytes of four groups, and the inputs that belong to their low and high halves.

    w = e2m1 * 2^(exponent - 127),       y = sum of  low x[low] + high x[high]
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.gpu import launch
from outrider.models.gpu.finish import ACTIVATIONS
from outrider.models.gpu.launch import begin, end
from outrider.models.gpu.limits import HOPPER, stages_that_fit
from outrider.models.gpu.small_batch_matmul import activated
from outrider.models.packed import Matrix, Packed

_PROGRAMS = 132
_BYTES = 64
"""Bytes of an output's row that a step takes."""
_HALF = tl.constexpr(16)
"""Bytes of a group of 32 inputs."""


def _e2m1() -> str:
    """Each half byte's magnitude and sign are moved to where bfloat16 has them, and the exponent is made up for."""
    halves = [(source, place) for place in (6, 2) for source in "ab"]
    moves = [
        line
        for number, (source, place) in enumerate(halves)
        for line in (
            f"shl.b32 t, {source}, {place};",
            f"shl.b32 s, {source}, {place + 6};",
            "and.b32 t, t, 0x01C001C0;",
            f"lop3.b32 ${number}, s, 0x80008000, t, 0xEA;",
        )
    ]
    taken = [f"prmt.b32 {name}, $4, 0, 0x{order};" for name, order in (("a", 4140), ("b", 4342))]
    scaled = [f"mul.bf16x2 ${number}, ${number}, c;" for number in range(4)]
    lines = [".reg .b32 a, b, c, s, t;", "mov.b32 c, 0x7E807E80;", *taken, *moves, *scaled]
    return "\n    ".join(["{", *lines, "}"])


_E2M1 = tl.constexpr(_e2m1())
"""Four bytes to the floats of their four low and their four high halves."""


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
    is [E, .., in], or [E * .., in] in MXFP4."""
    num_outputs, depth, gated = out.shape[-1], x.shape[1], activation is not None
    num_blocks, bm = blocks.pairs.shape
    bn = next((bn for bn in (64, 32) if triton.cdiv(num_outputs, bn) * num_blocks >= _PROGRAMS), 16)
    grid = (triton.cdiv(num_outputs, bn), num_blocks)
    common = {"K": per_row, "GATED": gated, "ACTIVATION": ACTIVATIONS[activation or "none"], "HAS_BIAS": bias is not None}
    common |= {"BM": bm, "BN": bn, "EARLY": launch.EARLY, "num_warps": 4, "launch_pdl": launch.EARLY}
    own = (blocks.shares, blocks.experts, blocks.pairs, out, len(blocks.shares), num_outputs, depth)
    sides = 2 if gated else 1
    if isinstance(weight, Packed):
        assert weight.is_e2m1 and weight.group_len == 2 * _HALF.value, "experts of few bits are in MXFP4"
        stage_bytes = bn * sides * _BYTES + bm * 2 * _BYTES * x.element_size()
        _grouped_e2m1[grid](
            x, weight.data, weight.scales, x if bias is None else bias, *own, weight.shape[0],
            BYTES=_BYTES, BITWISE=HOPPER and x.dtype == torch.bfloat16, num_stages=stages_that_fit(4, stage_bytes), **common,
        )  # fmt: skip
        return
    assert isinstance(weight, Tensor), "experts of other few bits are made 16 bits"
    bk = 128 if depth % 128 == 0 or depth > 512 else 64
    stage_bytes = (bn * sides + bm) * bk * weight.element_size()
    _grouped[grid](
        x, weight, weight if bias is None else bias, *own,
        EVEN=num_outputs % bn == 0 and depth % bk == 0, BK=bk, num_stages=stages_that_fit(4, stage_bytes), **common,
    )  # fmt: skip


@triton.jit
def _store_pairs(
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


@triton.jit
def _rows_of(pairs, num_pairs, K: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr):
    """The pairs of a block, which of them exist, and the rows of their inputs."""
    pair = tl.load(pairs + tl.arange(0, BM))
    rows = pair // K if GATED else pair
    return pair, pair < num_pairs, rows


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
        pair, is_row, rows = _rows_of(pairs + block * BM, num_pairs, K, GATED, BM)
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
        _store_pairs(
            total, total_up, bias, shares, out, pair, outputs, expert, num_pairs, num_outputs,
            K, GATED, ACTIVATION, HAS_BIAS,
        )  # fmt: skip
    end(EARLY)


@triton.jit
def _weights(bytes_at, scales_at, is_there, is_scale, x, BYTES: tl.constexpr, BITWISE: tl.constexpr):
    """The numbers in a tile of bytes, for their low and their high halves, in the type of the inputs."""
    packed = tl.load(bytes_at, mask=is_there, other=0)
    if BITWISE:
        low, high = tl.inline_asm_elementwise(
            _E2M1, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        codes = packed.to(tl.int32)
        low = (((codes & 8) << 28) | ((codes & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
        codes = codes >> 4
        high = (((codes & 8) << 28) | ((codes & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    exponents = tl.load(scales_at, mask=is_scale, other=127).to(tl.int32)
    bits = tl.where(exponents == 0, 1 << 22, exponents << 23)  # 2^-127 is below the normal numbers
    factors = bits.to(tl.float32, bitcast=True).to(low.dtype)
    spread = tl.broadcast_to(factors[:, :, None], (factors.shape[0], factors.shape[1], _HALF))
    spread = tl.reshape(spread, (factors.shape[0], BYTES))
    return (low * spread).to(x.dtype.element_ty), (high * spread).to(x.dtype.element_ty)


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_e2m1(
    x, weight, scales, bias, shares, experts, pairs, out, num_pairs, num_outputs, depth, num_all,
    K: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, BITWISE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BYTES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``num_all`` outputs of all experts together. Scales are [groups, outputs of all]."""
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    block = tl.program_id(1)
    places = tl.arange(0, BYTES)
    inputs = places // _HALF * (2 * _HALF) + places % _HALF  # of the low halves
    groups = tl.arange(0, BYTES // _HALF)
    is_output = outputs < num_outputs
    begin(EARLY)
    expert = tl.load(experts + block)
    if expert >= 0:
        pair, is_row, rows = _rows_of(pairs + block * BM, num_pairs, K, GATED, BM)
        first = expert * (2 if GATED else 1) * num_outputs + outputs
        bytes_at = weight + first[:, None].to(tl.int64) * (depth // 2) + places[None, :]
        scales_at = scales + first[:, None] + groups[None, :].to(tl.int64) * num_all
        ups = num_outputs.to(tl.int64) * (depth // 2)
        x_at = x + rows[None, :].to(tl.int64) * depth + inputs[:, None]
        total = tl.zeros((BN, BM), tl.float32)
        total_up = tl.zeros((BN, BM), tl.float32)
        for k in range(0, depth, 2 * BYTES):
            inside = k + inputs < depth
            is_x = is_row[None, :] & inside[:, None]
            low_x = tl.load(x_at + k, mask=is_x, other=0.0)
            high_x = tl.load(x_at + k + _HALF, mask=is_x, other=0.0)
            is_there = is_output[:, None] & inside[None, :]
            group = k // (2 * _HALF)
            is_scale = is_output[:, None] & ((group + groups) * (2 * _HALF) < depth)[None, :]
            own = scales_at + group.to(tl.int64) * num_all
            low, high = _weights(bytes_at + k // 2, own, is_there, is_scale, x, BYTES, BITWISE)
            total = tl.dot(low, low_x, total, input_precision="ieee")
            total = tl.dot(high, high_x, total, input_precision="ieee")
            if GATED:
                low, high = _weights(bytes_at + ups + k // 2, own + num_outputs, is_there, is_scale, x, BYTES, BITWISE)
                total_up = tl.dot(low, low_x, total_up, input_precision="ieee")
                total_up = tl.dot(high, high_x, total_up, input_precision="ieee")
        _store_pairs(
            total, total_up, bias, shares, out, pair, outputs, expert, num_pairs, num_outputs,
            K, GATED, ACTIVATION, HAS_BIAS,
        )  # fmt: skip
    end(EARLY)
