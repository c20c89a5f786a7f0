"""Grouped products over the experts that nodes chose, with matrices of few bits as they are stored.

One kernel serves every form: a decoder turns a tile of codes into numbers, and which one is a compile-time argument. A step
takes 128 inputs of 64 outputs in two halves, as two codes share a byte. The first ``HALF`` neighbouring inputs belong to the
first half, the next ones to the second, and so on.

    y = sum over steps of  below x[below] + above x[above]            numbers are rounded once to the type of the inputs
    y = sum over steps of  scale (below x[below] + above x[above])    where a scale belongs to a whole step

Every output is one sum in the order of its inputs, so it does not depend on what else is in the pass.
"""

# ruff: noqa: N803, N806 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.few_bits import FewBits
from outrider.models.gpu.code_bits import BYTES, E2M1, FLOATS, NIBBLES, table_code
from outrider.models.gpu.expert_pairs import rows_of, store_pairs
from outrider.models.gpu.grouped import numbers_of
from outrider.models.gpu.launch import begin, end
from outrider.models.gpu.limits import HOPPER
from outrider.models.gpu.planes_matmul import form_of, parts_of, weights_of_planes
from outrider.models.packed import Packed
from outrider.models.planes import HALF as PLANES_HALF
from outrider.models.planes import Planes

OUTPUTS = 64
"""Outputs of a program. Fewer go through other instructions, which add up in another order."""
STEP = 128
"""Inputs of a step."""
_COUNT = tl.constexpr(STEP // 2)
"""Inputs of each half of a step."""


@dataclass(frozen=True, eq=False)
class Decoding:
    """How codes become numbers."""

    decoder: Any
    """The function that does it in the kernel."""
    parts: tuple[Tensor, ...]
    """Codes, scales and other tensors that the function reads."""
    form: tuple[Any, ...]
    """Compile-time arguments of the function."""
    half: int
    after: int = 0
    """Inputs of a group whose scale multiplies the sum of a whole step; 0 if the numbers are already scaled."""


def decoding_of(weight: FewBits, dtype: torch.dtype) -> Decoding:
    """The decoding of a matrix for inputs of a type."""
    if isinstance(weight, Planes):
        return Decoding(weights_of_planes, parts_of(weight), form_of(weight), PLANES_HALF)
    assert isinstance(weight, Packed)
    group, bitwise = weight.group_len, HOPPER and dtype == torch.bfloat16
    if weight.bits == 8:
        is_after = len(weight.scales) == 1 or group % STEP == 0
        form = (group, min(_COUNT.value, group & -group), weight.is_float, bitwise, is_after)
        return Decoding(_of_bytes, (weight.data.view(torch.uint8), weight.scales), form, STEP // 2, group if is_after else 0)
    if weight.is_e2m1:
        return Decoding(_of_e2m1, (weight.data, weight.scales), (bitwise,), group // 2)
    zeros, levels = (weight.scales if each is None else each for each in (weight.zeros, weight.levels))
    is_after = group == STEP
    table = table_code(weight.values) if bitwise and weight.values else None
    form = (group // 2, weight.zeros is not None, weight.levels is not None, table, bitwise, is_after)
    return Decoding(_of_nibbles, (weight.data, weight.scales, zeros, levels), form, group // 2, group if is_after else 0)


@triton.jit
def _spread(values, HALF: tl.constexpr):
    """[BN, 64] from [BN, groups], each with ``HALF`` inputs in a half of a step."""
    wide = tl.broadcast_to(values[:, :, None], (values.shape[0], values.shape[1], HALF))
    return tl.reshape(wide, (values.shape[0], _COUNT))


@triton.jit
def _of_nibbles(parts, first, k, depth, num_all, is_output, FORM: tl.constexpr):
    """Codes of 4 bits: integers, with zeros or without, or places in a table. FORM: half a group, whether there are zeros and
    a table, the code that looks numbers up, whether a bfloat16 is put together from bits, and whether scales come later."""
    codes, scales, zeros, levels = parts
    HALF: tl.constexpr = FORM[0]
    at = tl.arange(0, _COUNT)
    there = is_output[:, None] & (k // 2 + at < depth // 2)[None, :]
    packed = tl.load(codes + first[:, None] * (depth // 2) + k // 2 + at[None, :], mask=there, other=0)
    if FORM[4]:
        CODE: tl.constexpr = FORM[3] if FORM[2] else NIBBLES
        below, above = tl.inline_asm_elementwise(
            CODE, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif FORM[2]:
        below, above = tl.load(levels + (packed & 15)), tl.load(levels + (packed >> 4))
    else:
        below = ((packed & 15).to(tl.int32) - 8).to(tl.float32)
        above = ((packed >> 4).to(tl.int32) - 8).to(tl.float32)
    groups = k // (2 * HALF) + tl.arange(0, _COUNT // HALF)
    known = is_output[:, None] & (groups < depth // (2 * HALF))[None, :]
    where = groups[None, :] * num_all + first[:, None]
    if FORM[1]:
        zero = _spread(tl.load(zeros + where, mask=known, other=0.0).to(below.dtype), HALF)
        below, above = below - zero, above - zero
    if not FORM[5]:
        scale = _spread(tl.load(scales + where, mask=known, other=0.0).to(tl.float32), HALF)
        below, above = below.to(tl.float32) * scale, above.to(tl.float32) * scale
    return below, above


@triton.jit
def _of_e2m1(parts, first, k, depth, num_all, is_output, FORM: tl.constexpr):
    """Floats of 4 bits, 32 with a power of two. A bfloat16 has the same bits elsewhere, with an exponent that counts from 127
    instead of 1: a factor of 2^126 makes that right. FORM: whether the bits of a bfloat16 are put together."""
    codes, scales = parts
    HALF: tl.constexpr = 16
    at = tl.arange(0, _COUNT)
    there = is_output[:, None] & (k // 2 + at < depth // 2)[None, :]
    packed = tl.load(codes + first[:, None] * (depth // 2) + k // 2 + at[None, :], mask=there, other=0)
    if FORM[0]:
        below, above = tl.inline_asm_elementwise(
            E2M1, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = packed.to(tl.int32), packed.to(tl.int32) >> 4
        below = (((low & 8) << 28) | ((low & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
        above = (((high & 8) << 28) | ((high & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    groups = k // (2 * HALF) + tl.arange(0, _COUNT // HALF)
    known = is_output[:, None] & (groups < depth // (2 * HALF))[None, :]
    exponents = tl.load(scales + groups[None, :] * num_all + first[:, None], mask=known, other=127).to(tl.int32)
    bits = tl.where(exponents == 0, 1 << 22, exponents << 23)  # 2^-127 is below the normal numbers
    scale = _spread(bits.to(tl.float32, bitcast=True).to(below.dtype), HALF)
    return below * scale, above * scale


@triton.jit
def _bytes_at(codes, scales, first, k, depth, num_all, is_output, FORM: tl.constexpr):
    """The numbers of the inputs of half a step, from input ``k`` on."""
    ks = k + tl.arange(0, _COUNT)
    there = is_output[:, None] & (ks < depth)[None, :]
    packed = tl.load(codes + first[:, None] * depth + ks[None, :], mask=there, other=0)
    if FORM[3]:
        CODE: tl.constexpr = FLOATS if FORM[2] else BYTES
        found = tl.inline_asm_elementwise(CODE, "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        found = numbers_of(packed, FORM[2])
    if not FORM[4]:
        spans = k + tl.arange(0, _COUNT // FORM[1]) * FORM[1]
        known = is_output[:, None] & (spans < depth)[None, :]
        scale = tl.load(scales + (spans // FORM[0])[None, :] * num_all + first[:, None], mask=known, other=0.0)
        found = found.to(tl.float32) * _spread(scale.to(tl.float32), FORM[1])
    return found


@triton.jit
def _of_bytes(parts, first, k, depth, num_all, is_output, FORM: tl.constexpr):
    """Codes of 8 bits. FORM: the length of a group, and how many neighbouring inputs have one scale. Then whether codes are
    floats, whether a bfloat16 is put together from bits, and whether scales come later."""
    codes, scales = parts
    below = _bytes_at(codes, scales, first, k, depth, num_all, is_output, FORM)
    above = _bytes_at(codes, scales, first, k + _COUNT, depth, num_all, is_output, FORM)
    return below, above


@triton.jit
def _add_step(
    total, parts, first, k, depth, num_all, is_output, low_x, high_x,
    DECODER: tl.constexpr, FORM: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """A tile of sums, and what a step adds. ``AFTER``: inputs of a group whose scale multiplies the sum of a step, or 0."""
    below, above = DECODER(parts, first, k, depth, num_all, is_output, FORM)
    if AFTER > 0:
        part = tl.dot(below.to(low_x.dtype), low_x, input_precision="ieee")
        part = tl.dot(above.to(high_x.dtype), high_x, part, input_precision="ieee")
        scale = tl.load(parts[1] + (k // AFTER) * num_all + first, mask=is_output, other=0.0).to(tl.float32)
        total += part * scale[:, None]
    else:
        total = tl.dot(below.to(low_x.dtype), low_x, total, input_precision="ieee")
        total = tl.dot(above.to(high_x.dtype), high_x, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_pairs"])
def grouped_codes(
    x, parts, bias, shares, experts, pairs, out, num_pairs, num_outputs, depth, num_all,
    DECODER: tl.constexpr, FORM: tl.constexpr, HALF: tl.constexpr, AFTER: tl.constexpr,
    K: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``num_all`` outputs of all experts together."""
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    block = tl.program_id(1)
    places = tl.arange(0, _COUNT)
    inputs = places // HALF * (2 * HALF) + places % HALF  # of the first halves
    is_output = outputs < num_outputs
    begin(EARLY)
    expert = tl.load(experts + block)
    if expert >= 0:
        pair, is_row, rows = rows_of(pairs + block * BM, num_pairs, K, GATED, BM)
        first = expert.to(tl.int64) * (2 if GATED else 1) * num_outputs + outputs
        x_at = x + rows[None, :].to(tl.int64) * depth + inputs[:, None]
        total = tl.zeros((BN, BM), tl.float32)
        total_up = tl.zeros((BN, BM), tl.float32)
        for k in range(0, depth, 2 * _COUNT):
            low_x = tl.load(x_at + k, mask=is_row[None, :] & (k + inputs < depth)[:, None], other=0.0)
            high_x = tl.load(x_at + k + HALF, mask=is_row[None, :] & (k + HALF + inputs < depth)[:, None], other=0.0)
            total = _add_step(
                total, parts, first, k, depth, num_all, is_output, low_x, high_x, DECODER, FORM, AFTER
            )  # fmt: skip
            if GATED:
                total_up = _add_step(
                    total_up, parts, first + num_outputs, k, depth, num_all, is_output, low_x, high_x, DECODER, FORM, AFTER
                )  # fmt: skip
        store_pairs(
            total, total_up, bias, shares, out, pair, outputs, expert, num_pairs, num_outputs, K, GATED, ACTIVATION, HAS_BIAS
        )  # fmt: skip
    end(EARLY)
