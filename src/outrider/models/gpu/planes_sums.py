"""Products with the matrices of GGUF files as stored (``models/planes.py``): codes are multiplied, and sums are scaled.

Codes are whole numbers, which 16 bits hold exactly. Tensor cores multiply those of a group, and the group's sum is scaled in 32
bits. So a weight takes three to six instructions. To make each weight as a float first (``planes_matmul.py``) takes eight to
twelve, which lasts longer than reading it.

    y = sum over groups g of  scale_g * sum_j (code_j - middle) x_j  +  offset_g * sum_j x_j

The units of a step are multiplied side by side, and their sums are added at the end. On Hopper and later, numbers are made from
their bits (``code_bits.py``), as 128 + n. The 128 is subtracted from the numbers, or from the offset where there is one. Floats
and steps are too small for the copies that run ahead, so those of the next step are requested before the present one is
multiplied. Every output is one sum in the same order, whatever the number of rows. Codes of 8 bits gain nothing by this way.
"""

# ruff: noqa: N803, N806 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.gpu import launch
from outrider.models.gpu.code_bits import FIVE_BITS, FOUR_BITS, ONES, SIX_BITS
from outrider.models.gpu.finish import ACTIVATIONS, Finish, store_sums
from outrider.models.gpu.launch import begin, end
from outrider.models.gpu.limits import HOPPER, stages_that_fit
from outrider.models.gpu.planes_matmul import form_of, parts_of
from outrider.models.gpu.tile import Tile
from outrider.models.gpu.tiles import Kind, num_parts
from outrider.models.planes import UNIT, Planes

_STEP = 4 * UNIT
"""Inputs of a step. Each of four warps multiplies a unit."""
_HALF = tl.constexpr(UNIT // 2)
"""Inputs of the low halves of a unit."""
_STAGES = {32: 5, 64: 4, 128: 3}
"""Steps in flight, by outputs."""
_FORM = ("EXTRA", "MIDDLE", "BLOCK", "GROUP", "STEPS", "OFFSETS", "OFFSET_STEPS")
"""Compile-time arguments that describe the form of a matrix."""


def codes_tile(kind: Kind, num_rows: int) -> Tile:
    """The tile that measured best. Rows are scaled one by one, so 32 are as many as pay at once."""
    bm = next((size for size in (8, 16) if num_rows <= size), 32)
    bn = 64 if bm == 32 else 128 if kind is Kind.HEAD else 4 * bm
    return Tile(bn, _STEP, num_stages=3 if bm == 32 else _STAGES[bn], bm=bm, num_parts=num_parts(kind, 4))


@triton.jit
def _shifted(packed, upper, EXTRA: tl.constexpr, BITWISE: tl.constexpr, DTYPE: tl.constexpr):
    """[units, BN, 16] the codes of the low and of the high halves as numbers, with ``BITWISE`` plus 128. ``upper``: their upper
    bits (``_upper``)."""
    if BITWISE:
        if EXTRA == 0:
            below, above = tl.inline_asm_elementwise(
                FOUR_BITS, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        elif EXTRA == 1:
            below, above = tl.inline_asm_elementwise(
                FIVE_BITS, "=r,=r,=r,=r,r,r", [packed, upper], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            below, above = tl.inline_asm_elementwise(
                SIX_BITS, "=r,=r,=r,=r,r,r,r", [packed, upper], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
    else:
        MASK: tl.constexpr = (1 << EXTRA) - 1
        wide = packed.to(tl.int32)
        below, above = wide & 15, wide >> 4
        if EXTRA > 0:
            more = upper.to(tl.int32)
            below, above = below | (more & MASK) << 4, above | ((more >> EXTRA) & MASK) << 4
        below, above = below.to(DTYPE), above.to(DTYPE)
    return below, above


@triton.jit
def _packed(low, first, is_output, unit, depth):
    """[units, BN, 16] the lower four bits of the codes of some units."""
    there = is_output[None, :, None] & (unit < depth // 32)[:, None, None]
    at = low + (first * (depth // 2))[None, :, None] + (unit * 16)[:, None, None] + tl.arange(0, _HALF)[None, None, :]
    return tl.load(at, mask=there, other=0)


@triton.jit
def _upper(high, first, is_output, unit, depth, EXTRA: tl.constexpr, BITWISE: tl.constexpr):
    """[units, BN, 16] the upper bits of the codes of some units, a number for each byte of ``_packed``. With ``BITWISE`` it
    has those of the four bytes that are multiplied together."""
    BYTES: tl.constexpr = _HALF * EXTRA // 4
    there = is_output[None, :, None] & (unit < depth // 32)[:, None, None]
    if BITWISE:
        # A word of ``EXTRA`` bytes belongs to four bytes of the plane below.
        words = high + (first * (depth // 32 * 4))[None, :, None] + (unit * 4)[:, None, None] + tl.arange(0, 4)[None, None, :]
        found = tl.load(words, mask=there, other=0)
        wide = tl.broadcast_to(found[:, :, :, None], (found.shape[0], found.shape[1], 4, 4))
        upper = tl.reshape(wide, (found.shape[0], found.shape[1], _HALF))
    else:
        SHARED: tl.constexpr = 4 // EXTRA  # bytes of the plane below whose bits a byte holds
        place = tl.arange(0, _HALF)
        at = high + (first * (depth // 32 * BYTES))[None, :, None] + (unit * BYTES)[:, None, None]
        found = tl.load(at + (place // SHARED)[None, None, :], mask=there, other=0).to(tl.int32)
        upper = found >> (place % SHARED * 2 * EXTRA)[None, None, :]
    return upper


@triton.jit
def _numbers(values, place, first, is_output, count, num_all):
    """[units, BN] floats or steps, those at ``place`` for each unit."""
    there = is_output[None, :] & (place < count)[:, None]
    return tl.load(values + place[:, None] * num_all + first[None, :], mask=there, other=0)


@triton.jit
def _fetched(
    scales, steps, offsets, offset_steps, unit, first, is_output, depth, num_all,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSETS: tl.constexpr, OFFSET_STEPS: tl.constexpr,
):  # fmt: skip
    """The floats of the scales of some units, the steps of both their halves, and the same of their offsets. What a matrix does
    not have stands for itself."""
    scale = _numbers(scales, unit * 32 // BLOCK, first, is_output, depth // BLOCK, num_all)
    below = _numbers(steps, unit * (32 // GROUP), first, is_output, depth // GROUP, num_all) if STEPS else scale
    above = _numbers(steps, unit * 2 + 1, first, is_output, depth // 16, num_all) if GROUP == 16 else below
    offset = _numbers(offsets, unit * 32 // BLOCK, first, is_output, depth // BLOCK, num_all) if OFFSETS else scale
    more = _numbers(offset_steps, unit, first, is_output, depth // 32, num_all) if OFFSET_STEPS else offset
    return scale, below, above, offset, more


@triton.jit
def _sums(packed, low_x, high_x, BITWISE: tl.constexpr):
    """[units, BN, BM] the sums of the inputs of some units, the same for each output. The ones are made from codes, so that the
    inputs are multiplied from where they lie."""
    if BITWISE:
        ones = tl.inline_asm_elementwise(ONES, "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        ones = tl.full(packed.shape, 1.0, low_x.dtype)
    return tl.dot(ones, high_x, tl.dot(ones, low_x, input_precision="ieee"), input_precision="ieee")


@triton.jit
def _added(
    total, packed, high, fetched, low_x, high_x, sums_x, unit, first, is_output, depth,
    EXTRA: tl.constexpr, MIDDLE: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSETS: tl.constexpr,
    OFFSET_STEPS: tl.constexpr, BITWISE: tl.constexpr,
):  # fmt: skip
    """``total`` and the contribution of some units. ``sums_x``: the sums of their inputs, where there are offsets."""
    scale, step_below, step_above, offset, offset_step = fetched
    upper = _upper(high, first, is_output, unit, depth, EXTRA, BITWISE) if EXTRA > 0 else packed
    below, above = _shifted(packed, upper, EXTRA, BITWISE, low_x.dtype)
    SHIFT: tl.constexpr = 128 if BITWISE else 0
    if not OFFSETS and SHIFT + MIDDLE != 0:
        below, above = below - (SHIFT + MIDDLE), above - (SHIFT + MIDDLE)
    factor = scale.to(tl.float32)
    factor_below = factor * step_below.to(tl.float32) if STEPS else factor
    part = tl.dot(below, low_x, input_precision="ieee")
    if GROUP == 16:
        total = tl.fma(part, tl.broadcast_to(factor_below[:, :, None], total.shape), total)
        part = tl.dot(above, high_x, input_precision="ieee")
        total = tl.fma(part, tl.broadcast_to((factor * step_above.to(tl.float32))[:, :, None], total.shape), total)
    else:
        part = tl.dot(above, high_x, part, input_precision="ieee")
        total = tl.fma(part, tl.broadcast_to(factor_below[:, :, None], total.shape), total)
    if OFFSETS:
        more = offset.to(tl.float32)
        if OFFSET_STEPS:
            more *= offset_step.to(tl.float32)
        total = tl.fma(sums_x, tl.broadcast_to((more - (SHIFT + MIDDLE) * factor_below)[:, :, None], total.shape), total)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def planes_sums(
    x, low, high, scales, steps, offsets, offset_steps, bias, out, num_rows, num_outputs, depth, part_len, num_all,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    EXTRA: tl.constexpr, MIDDLE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    STEPS: tl.constexpr, OFFSETS: tl.constexpr, OFFSET_STEPS: tl.constexpr, BITWISE: tl.constexpr,
    UNITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The kernel of a product. ``num_outputs`` counts results. ``num_all`` counts the matrix's rows, twice as many if it is
    gated."""
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    first, units, places = outputs.to(tl.int64), tl.arange(0, UNITS), tl.arange(0, _HALF)
    ups, is_row, is_output = first + num_outputs, rows < num_rows, outputs < num_outputs
    x_at = x + rows[None, None, :].to(tl.int64) * depth + (units * 32)[:, None, None] + places[None, :, None]
    start, stop = part * part_len, tl.minimum((part + 1) * part_len, depth)
    total = tl.zeros((UNITS, BN, BM), tl.float32)
    total_up = total
    now = _fetched(
        scales, steps, offsets, offset_steps, start // 32 + units, first, is_output, depth, num_all,
        BLOCK, GROUP, STEPS, OFFSETS, OFFSET_STEPS,
    )  # fmt: skip
    now_up = now
    if GATED:
        now_up = _fetched(
            scales, steps, offsets, offset_steps, start // 32 + units, ups, is_output, depth, num_all,
            BLOCK, GROUP, STEPS, OFFSETS, OFFSET_STEPS,
        )  # fmt: skip
    begin(EARLY)
    for k in range(start, stop, UNITS * 32):
        unit = k // 32 + units
        later = _fetched(
            scales, steps, offsets, offset_steps, unit + UNITS, first, is_output, depth, num_all,
            BLOCK, GROUP, STEPS, OFFSETS, OFFSET_STEPS,
        )  # fmt: skip
        later_up = later
        if GATED:
            later_up = _fetched(
                scales, steps, offsets, offset_steps, unit + UNITS, ups, is_output, depth, num_all,
                BLOCK, GROUP, STEPS, OFFSETS, OFFSET_STEPS,
            )  # fmt: skip
        is_x = is_row[None, None, :] & (unit < depth // 32)[:, None, None]
        low_x = tl.load(x_at + k, mask=is_x, other=0.0)
        high_x = tl.load(x_at + k + _HALF, mask=is_x, other=0.0)
        packed = _packed(low, first, is_output, unit, depth)
        sums_x = _sums(packed, low_x, high_x, BITWISE) if OFFSETS else total
        total = _added(
            total, packed, high, now, low_x, high_x, sums_x, unit, first, is_output, depth,
            EXTRA, MIDDLE, GROUP, STEPS, OFFSETS, OFFSET_STEPS, BITWISE,
        )  # fmt: skip
        if GATED:
            packed_up = _packed(low, ups, is_output, unit, depth)
            total_up = _added(
                total_up, packed_up, high, now_up, low_x, high_x, sums_x, unit, ups, is_output, depth,
                EXTRA, MIDDLE, GROUP, STEPS, OFFSETS, OFFSET_STEPS, BITWISE,
            )  # fmt: skip
        now, now_up = later, later_up
    end(EARLY)
    whole, whole_up = tl.sum(total, 0), tl.sum(total_up, 0)
    store_sums(whole, whole_up, bias, bias, out, rows, outputs, num_rows, num_outputs, part, GATED, ACTIVATION, HAS_BIAS, False)


def multiply_codes(
    x: Tensor, weight: Planes, kind: Kind, *, gated: bool, out_dtype: torch.dtype, finish: Finish, tile: Tile | None = None
) -> Tensor:
    """[M, out] from [M, K], or [parts, M, out] float32 where the kind of matrix has several parts."""
    (num_rows, depth), tile = x.shape, tile or codes_tile(kind, len(x))
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    shape = (num_rows, num_outputs) if tile.num_parts == 1 else (tile.num_parts, num_rows, num_outputs)
    out = x.new_empty(shape, dtype=torch.float32 if tile.num_parts > 1 else out_dtype)
    stage_bytes = tile.bn * (2 if gated else 1) * tile.bk * weight.bits // 8 + tile.bm * tile.bk * x.element_size()
    grid = (triton.cdiv(num_outputs, tile.bn), triton.cdiv(num_rows, tile.bm), tile.num_parts)
    low, high, *numbers = parts_of(weight)
    bitwise = HOPPER and x.dtype == torch.bfloat16
    if bitwise and weight.extra_bits == 2:
        high = high.view(torch.int16)
    planes_sums[grid](
        x, low, high, *numbers, x if finish.bias is None else finish.bias, out,
        num_rows, num_outputs, depth, triton.cdiv(depth, tile.num_parts * tile.bk) * tile.bk, weight.shape[0],
        GATED=gated, ACTIVATION=ACTIVATIONS[finish.activation], HAS_BIAS=finish.bias is not None,
        **dict(zip(_FORM, form_of(weight), strict=True)), BITWISE=bitwise, UNITS=tile.bk // UNIT,
        BM=tile.bm, BN=tile.bn, EARLY=launch.EARLY, num_warps=tile.num_warps,
        num_stages=stages_that_fit(tile.num_stages, stage_bytes), launch_pdl=launch.EARLY,
    )  # fmt: skip
    return out
