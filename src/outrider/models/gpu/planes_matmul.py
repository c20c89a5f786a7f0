"""Products with the matrices of GGUF files as stored (``planes.py``): numbers are made in registers, then multiplied. For codes
of 8 bits, and for qkv, this is as fast as ``planes_sums.py`` with few rows, and faster with many.

A step takes the bytes of four units of 32 inputs. Codes become whole numbers, their scales and offsets floats of 32 bits.
A weight is rounded once to the type of the inputs, so the numbers are those of the matrix dequantised. The type of storage is
data: how many upper bits a code has, how many inputs share a scale, and whether there are steps and offsets. Every output is
one sum in the same order, whatever the number of rows.

    w = (scales * steps) * (code - middle) + offsets * offset_steps,       y = sum of  low x[low] + high x[high]
"""

# ruff: noqa: N803, N806 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.few_bits import FewBits
from outrider.models.gpu import launch
from outrider.models.gpu.finish import ACTIVATIONS, Finish, store_sums
from outrider.models.gpu.launch import begin, end
from outrider.models.gpu.limits import stages_that_fit
from outrider.models.gpu.tile import Tile
from outrider.models.gpu.tiles import Kind, num_parts
from outrider.models.planes import UNIT, Planes

_STEP = 4 * UNIT
"""Inputs of a step."""
_ROWS = 16
"""Outputs that a program writes out."""
_FORM = ("EXTRA", "MIDDLE", "BLOCK", "GROUP", "STEPS", "OFFSETS", "OFFSET_STEPS")
"""Compile-time arguments that describe the form of a matrix."""
_HALF = tl.constexpr(UNIT // 2)
"""Bytes of a unit."""
_BYTES = tl.constexpr(_STEP // 2)


def planes_tile(kind: Kind, num_rows: int) -> Tile:
    """The tile of a product. It always has 64 outputs: fewer go through other instructions, which add up in another order."""
    bm = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    return Tile(64, _STEP, num_stages=3, bm=bm, num_parts=num_parts(kind, 4))


@triton.jit
def _spread(values):
    """[BN, bytes] one number for each unit, repeated for its bytes."""
    wide = tl.broadcast_to(values[:, :, None], (values.shape[0], values.shape[1], _HALF))
    return tl.reshape(wide, (values.shape[0], _BYTES))


@triton.jit
def _upper(high, first, k, depth, is_output, EXTRA: tl.constexpr):
    """The upper bits of the codes of a step: those of the low halves' codes, and of the high halves'."""
    ADDRESSES: tl.constexpr = _BYTES * EXTRA // 4
    SHARED: tl.constexpr = 4 // EXTRA  # bytes of the plane below whose bits a byte holds
    at = tl.arange(0, ADDRESSES)
    there = is_output[:, None] & (k // 8 * EXTRA + at < depth // 8 * EXTRA)[None, :]
    packed = tl.load(high + first[:, None] * (depth // 8 * EXTRA) + k // 8 * EXTRA + at[None, :], mask=there, other=0)
    wide = tl.broadcast_to(packed.to(tl.int32)[:, :, None], (packed.shape[0], ADDRESSES, SHARED))
    wide = tl.reshape(wide, (packed.shape[0], _BYTES)) >> (tl.arange(0, _BYTES) % SHARED * 2 * EXTRA)[None, :]
    MASK: tl.constexpr = (1 << EXTRA) - 1
    return (wide & MASK) << 4, ((wide >> EXTRA) & MASK) << 4


@triton.jit
def _scale(floats, steps, unit, half, first, num_all, there, BLOCK: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr):
    """[BN, units] the factor of a half of each unit, or the number added to it."""
    found = tl.load(floats + (unit * 32 // BLOCK)[None, :] * num_all + first[:, None], mask=there, other=0.0).to(tl.float32)
    if STEPS:
        group = (unit * 32 + half * 16) // GROUP
        found *= tl.load(steps + group[None, :] * num_all + first[:, None], mask=there, other=0).to(tl.float32)
    return found


@triton.jit
def _weights(
    low, high, scales, steps, offsets, offset_steps, first, k, depth, num_all, is_output,
    EXTRA: tl.constexpr, MIDDLE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    STEPS: tl.constexpr, OFFSETS: tl.constexpr, OFFSET_STEPS: tl.constexpr,
):  # fmt: skip
    """[BN, bytes] float32 weights of the low and of the high halves of a step's units, from input ``k`` on. ``first``: the
    outputs, int64."""
    places, unit = tl.arange(0, _BYTES), k // 32 + tl.arange(0, _BYTES // _HALF)
    there = is_output[:, None] & (k // 2 + places < depth // 2)[None, :]
    known = is_output[:, None] & (unit < depth // 32)[None, :]
    packed = tl.load(low + first[:, None] * (depth // 2) + k // 2 + places[None, :], mask=there, other=0).to(tl.int32)
    below, above = packed & 15, packed >> 4
    if EXTRA > 0:
        more_below, more_above = _upper(high, first, k, depth, is_output, EXTRA)
        below, above = below | more_below, above | more_above
    scale_below = _scale(scales, steps, unit, 0, first, num_all, known, BLOCK, GROUP, STEPS)
    scale_above = scale_below
    if GROUP == 16:
        scale_above = _scale(scales, steps, unit, 1, first, num_all, known, BLOCK, GROUP, STEPS)
    below = ((below | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE)) * _spread(scale_below)
    above = ((above | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE)) * _spread(scale_above)
    if OFFSETS:
        offset = _spread(_scale(offsets, offset_steps, unit, 0, first, num_all, known, BLOCK, GROUP, OFFSET_STEPS))
        below, above = below + offset, above + offset
    return below, above


@triton.jit
def weights_of_planes(parts, first, k, depth, num_all, is_output, FORM: tl.constexpr):
    """``_weights`` for a matrix given by its planes (``parts_of``) and its form (``form_of``)."""
    low, high, scales, steps, offsets, offset_steps = parts
    below, above = _weights(
        low, high, scales, steps, offsets, offset_steps, first, k, depth, num_all, is_output,
        FORM[0], FORM[1], FORM[2], FORM[3], FORM[4], FORM[5], FORM[6],
    )  # fmt: skip
    return below, above


@triton.jit(do_not_specialize=["num_rows"])
def planes_product(
    x, low, high, scales, steps, offsets, offset_steps, bias, out, num_rows, num_outputs, depth, part_len, num_all,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    EXTRA: tl.constexpr, MIDDLE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    STEPS: tl.constexpr, OFFSETS: tl.constexpr, OFFSET_STEPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``num_outputs`` are those of the result, ``num_all`` those of the matrix: twice as many where it is gated."""
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    places, first = tl.arange(0, _BYTES), outputs.to(tl.int64)
    inputs = places // _HALF * (2 * _HALF) + places % _HALF  # of the low halves
    is_row = rows < num_rows
    is_output = outputs < num_outputs
    x_at = x + rows[None, :].to(tl.int64) * depth + inputs[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    total_up = tl.zeros((BN, BM), tl.float32)
    begin(EARLY)
    for k in range(part * part_len, tl.minimum((part + 1) * part_len, depth), 2 * _BYTES):
        is_x = is_row[None, :] & (k + inputs < depth)[:, None]
        low_x = tl.load(x_at + k, mask=is_x, other=0.0)
        high_x = tl.load(x_at + k + _HALF, mask=is_x, other=0.0)
        below, above = _weights(
            low, high, scales, steps, offsets, offset_steps, first, k, depth, num_all, is_output,
            EXTRA, MIDDLE, BLOCK, GROUP, STEPS, OFFSETS, OFFSET_STEPS,
        )  # fmt: skip
        total = tl.dot(below.to(low_x.dtype), low_x, total, input_precision="ieee")
        total = tl.dot(above.to(low_x.dtype), high_x, total, input_precision="ieee")
        if GATED:
            below, above = _weights(
                low, high, scales, steps, offsets, offset_steps, first + num_outputs, k, depth, num_all, is_output,
                EXTRA, MIDDLE, BLOCK, GROUP, STEPS, OFFSETS, OFFSET_STEPS,
            )  # fmt: skip
            total_up = tl.dot(below.to(low_x.dtype), low_x, total_up, input_precision="ieee")
            total_up = tl.dot(above.to(low_x.dtype), high_x, total_up, input_precision="ieee")
    end(EARLY)
    store_sums(total, total_up, bias, bias, out, rows, outputs, num_rows, num_outputs, part, GATED, ACTIVATION, HAS_BIAS, False)


@triton.jit
def _write(
    low, high, scales, steps, offsets, offset_steps, wanted, out, num_wanted, depth, num_all,
    PICKED: tl.constexpr, EXTRA: tl.constexpr, MIDDLE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    STEPS: tl.constexpr, OFFSETS: tl.constexpr, OFFSET_STEPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some outputs written out; ``wanted`` says which ones where not all are."""
    places = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k, at = tl.program_id(1) * 2 * _BYTES, tl.arange(0, _BYTES)
    is_there = places < num_wanted
    first = tl.load(wanted + places, mask=is_there, other=0).to(tl.int64) if PICKED else places
    below, above = _weights(
        low, high, scales, steps, offsets, offset_steps, first, k, depth, num_all, is_there,
        EXTRA, MIDDLE, BLOCK, GROUP, STEPS, OFFSETS, OFFSET_STEPS,
    )  # fmt: skip
    inputs = k + at // _HALF * (2 * _HALF) + at % _HALF
    to = out + places[:, None] * depth + inputs[None, :]
    inside = is_there[:, None] & (inputs < depth)[None, :]
    tl.store(to, below.to(out.dtype.element_ty), mask=inside)
    tl.store(to + _HALF, above.to(out.dtype.element_ty), mask=inside)


def parts_of(weight: Planes) -> tuple[Tensor, ...]:
    """The planes of a matrix. Missing ones are replaced by another, which is not read."""
    planes = (weight.low, weight.high, weight.scales, weight.steps, weight.offsets, weight.offset_steps)
    return tuple(weight.low if plane is None else plane for plane in planes)


def form_of(weight: Planes) -> tuple[Any, ...]:
    """The values of ``_FORM`` for a matrix."""
    there = (plane is not None for plane in (weight.steps, weight.offsets, weight.offset_steps))
    return (weight.extra_bits, weight.middle, weight.block_len, weight.group_len, *there)


def multiply_planes(x: Tensor, weight: Planes, kind: Kind, *, gated: bool, out_dtype: torch.dtype, finish: Finish) -> Tensor:
    """[M, out] from [M, K], or [parts, M, out] float32 where the kind of matrix has several parts."""
    (num_rows, depth), tile = x.shape, planes_tile(kind, len(x))
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    shape = (num_rows, num_outputs) if tile.num_parts == 1 else (tile.num_parts, num_rows, num_outputs)
    out = x.new_empty(shape, dtype=torch.float32 if tile.num_parts > 1 else out_dtype)
    stage_bytes = tile.bn * (2 if gated else 1) * _STEP * weight.bits // 8 + tile.bm * _STEP * x.element_size()
    grid = (triton.cdiv(num_outputs, tile.bn), triton.cdiv(num_rows, tile.bm), tile.num_parts)
    form = dict(zip(_FORM, form_of(weight), strict=True))
    planes_product[grid](
        x, *parts_of(weight), x if finish.bias is None else finish.bias, out,
        num_rows, num_outputs, depth, triton.cdiv(depth, tile.num_parts * _STEP) * _STEP, weight.shape[0],
        GATED=gated, ACTIVATION=ACTIVATIONS[finish.activation], HAS_BIAS=finish.bias is not None, **form,
        BM=tile.bm, BN=tile.bn, EARLY=launch.EARLY, num_warps=tile.num_warps,
        num_stages=stages_that_fit(tile.num_stages, stage_bytes), launch_pdl=launch.EARLY,
    )  # fmt: skip
    return out


def written_out(weight: Planes, dtype: torch.dtype, wanted: Tensor | None = None) -> Tensor:
    """[out, in] the numbers of a matrix, or of the outputs ``wanted``, each rounded once to ``dtype``."""
    count, depth = weight.shape[0] if wanted is None else wanted.numel(), weight.shape[1]
    out = torch.empty(count, depth, dtype=dtype, device=weight.device)
    form = dict(zip(_FORM, form_of(weight), strict=True))
    _write[(triton.cdiv(count, _ROWS), triton.cdiv(depth, _STEP))](
        *parts_of(weight), weight.low if wanted is None else wanted, out, count, depth, weight.shape[0],
        PICKED=wanted is not None, **form, ROWS=_ROWS,
    )  # fmt: skip
    return out


def embedded_rows(table: Tensor | FewBits, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, H] the embeddings of [N] tokens, from a table of floats or as stored."""
    if isinstance(table, Tensor):
        return table[tokens]
    assert isinstance(table, Planes), "embeddings of few bits are those of GGUF files"
    return written_out(table, dtype, tokens.reshape(-1).contiguous())
