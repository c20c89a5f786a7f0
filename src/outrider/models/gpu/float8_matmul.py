"""Products of matrices and inputs in 8 bits (``dtype="w8a8"``), with the tensor cores' own products of e4m3 floats.

The inputs of a row are rounded 128 at a time, with a power of two between them and their codes (``quantised/float8.py``). The
product of 128 inputs is the tensor core's; its result is multiplied by that power, and by the matrix's scale if 128 inputs have
one, and added in float32.

    y = scale * sum over units u of 128 inputs:  step_u * (codes of w)_u (codes of x)_u

A few rows are rounded inside the product, many by a kernel of their own. Both round alike, every output is one sum in the order
of its units, and all numbers of rows take this kernel. So a row's numbers do not depend on the others.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.models.gpu import launch
from outrider.models.gpu.finish import ACTIVATIONS, Finish, store_sums
from outrider.models.gpu.launch import begin, end, fetch
from outrider.models.gpu.limits import can_copy, stages_that_fit
from outrider.models.gpu.tile import Tile
from outrider.models.gpu.tiles import Kind, num_parts
from outrider.models.packed import GROUP, Packed

_UNIT = tl.constexpr(GROUP)
_ROUNDED_INSIDE = 16
"""Most rows that every program rounds for itself."""
_UNITS = 16
"""Units that a program of the rounding kernel takes."""


def multiply_float8(x: Tensor, weight: Packed, kind: Kind, *, gated: bool, finish: Finish, out_dtype: torch.dtype) -> Tensor:
    """[M, out] from [M, K] and [out, K], or [parts, M, out] yet to be added up where the matrix is narrow."""
    tile = float8_tile(kind, len(x), weight.shape[0] // 2 if gated else weight.shape[0], gated=gated)
    if gated or finish.activation != "none" or finish.bias is not None:
        tile = replace(tile, num_parts=1)
    return float8_product(x, weight, tile=tile, gated=gated, finish=finish, out_dtype=out_dtype)


def float8_tile(kind: Kind, num_rows: int, num_outputs: int, *, gated: bool) -> Tile:
    """The tile that measured best. A step is a unit."""
    parts = num_parts(kind, 8)
    if num_rows > 64 and num_outputs >= 128:
        return Tile(64 if gated else 128, GROUP, 8, 4, 128, parts, copied=True)
    bm = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    return Tile(64, GROUP, 4, 4, bm, parts)


def float8_product(
    x: Tensor, weight: Packed, *, tile: Tile, gated: bool, finish: Finish, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The product, cut as ``tile`` says."""
    (num_rows, depth), parts = x.shape, tile.num_parts
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert depth % GROUP == 0, "whole units of inputs"
    shape = (num_rows, num_outputs) if parts == 1 else (parts, num_rows, num_outputs)
    out = x.new_empty(shape, dtype=torch.float32 if parts > 1 else out_dtype or x.dtype)
    is_rounded = num_rows > _ROUNDED_INSIDE
    inputs, steps = rounded_rows(x) if is_rounded else (x, weight.scales)
    copied = tile.copied and can_copy(inputs, weight.data) and num_outputs % tile.bn == 0
    stage_bytes = GROUP * (tile.bn * (2 if gated else 1) + tile.bm * inputs.element_size())
    even = num_outputs % tile.bn == 0
    _product[triton.cdiv(num_rows, tile.bm), triton.cdiv(num_outputs, tile.bn), parts](
        TensorDescriptor.from_tensor(inputs, [tile.bm, GROUP]) if copied else inputs,
        steps,
        TensorDescriptor.from_tensor(weight.data, [tile.bn, GROUP]) if copied else weight.data,
        weight.data,
        weight.scales,
        weight.scales if finish.bias is None else finish.bias,
        out,
        num_rows,
        num_outputs,
        depth,
        triton.cdiv(depth // GROUP, parts),
        GATED=gated,
        ACTIVATION=ACTIVATIONS[finish.activation],
        HAS_BIAS=finish.bias is not None,
        GROUPED=len(weight.scales) > 1,
        ROUNDED=is_rounded,
        EVEN=even,
        FETCHED=even and depth > num_outputs,
        COPIED=copied,
        EARLY=launch.EARLY,
        launch_pdl=launch.EARLY,
        BM=tile.bm,
        BN=tile.bn,
        num_warps=tile.num_warps,
        num_stages=stages_that_fit(tile.num_stages, stage_bytes),
    )
    return out


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[M, K] e4m3 codes and [units, M] float32 steps of inputs, which the product rounds alike."""
    num_rows, depth = x.shape
    codes = x.new_empty(num_rows, depth, dtype=torch.float8_e4m3fn)
    steps = x.new_empty(depth // GROUP, num_rows, dtype=torch.float32)
    _round[num_rows, triton.cdiv(depth // GROUP, _UNITS)](
        x, codes, steps, num_rows, depth // GROUP, UNITS=_UNITS, EARLY=launch.EARLY, launch_pdl=launch.EARLY
    )
    return codes, steps


@triton.jit
def _rounded(x):
    """Codes of rows of 128 inputs, and the step of each: a power of two that puts its largest input at 224 to 448."""
    largest = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True)
    exponent = tl.maximum((largest + 0x1FFFFF) >> 23, 9)
    inverse = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    return (x * inverse[:, None]).to(tl.float8e4nv), ((exponent - 8) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_rows"])
def _round(x, codes, steps, num_rows, num_units, UNITS: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0)
    units = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    at = row.to(tl.int64) * num_units * _UNIT + units[:, None] * _UNIT + tl.arange(0, _UNIT)[None, :]
    is_there = (units < num_units)[:, None]
    begin(EARLY)
    found, step = _rounded(tl.load(x + at, mask=is_there, other=0.0).to(tl.float32))
    end(EARLY)
    tl.store(codes + at, found, mask=is_there)
    tl.store(steps + units * num_rows + row, step, mask=units < num_units)


@triton.jit
def _weights(weight, at, first, k, is_output, EVEN: tl.constexpr, COPIED: tl.constexpr):
    """A unit of the outputs from ``first`` on."""
    if COPIED:
        w = weight.load([first, k])
    elif EVEN:
        w = tl.load(at + k)
    else:
        w = tl.load(at + k, mask=is_output[:, None], other=0.0)
    return w


@triton.jit
def _added(total, w, codes, step, scale, GROUPED: tl.constexpr):
    """``total`` plus the product of a unit."""
    part = tl.dot(w, codes.T)
    step = tl.broadcast_to(step[None, :], part.shape)
    if GROUPED:
        total = tl.fma(part * step, tl.broadcast_to(scale[:, None], part.shape), total)
    else:
        total = tl.fma(part, step, total)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x, steps, weight, matrix, scales, bias, out, num_rows, num_outputs, depth, part_len,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, GROUPED: tl.constexpr, ROUNDED: tl.constexpr,
    EVEN: tl.constexpr, FETCHED: tl.constexpr, COPIED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    first_row, first = tl.program_id(0) * BM, tl.program_id(1) * BN  # neighbours share the weights
    rows, outputs, ks = first_row + tl.arange(0, BM), first + tl.arange(0, BN), tl.arange(0, _UNIT)
    part = tl.program_id(2)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    width = num_outputs * 2 if GATED else num_outputs
    weights_at = matrix + outputs[:, None].to(tl.int64) * depth + ks[None, :]
    ups_at = weights_at + num_outputs.to(tl.int64) * depth
    if not COPIED:
        x_at = x + rows[:, None].to(tl.int64) * depth + ks[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    total_up = tl.zeros((BN, BM), tl.float32)
    scale = tl.zeros((BN,), tl.float32)
    scale_up = scale
    if FETCHED:
        fetch(matrix + outputs.to(tl.int64) * depth + part * part_len * _UNIT, EARLY)
    begin(EARLY)
    for unit in range(part * part_len, tl.minimum((part + 1) * part_len, depth // _UNIT)):
        k = unit * _UNIT
        w = _weights(weight, weights_at, first, k, is_output, EVEN, COPIED)
        piece = x.load([first_row, k]) if COPIED else tl.load(x_at + k, mask=is_row[:, None], other=0.0)
        if ROUNDED:
            step = tl.load(steps + unit * num_rows + rows, mask=is_row, other=0.0)
        else:
            piece, step = _rounded(piece.to(tl.float32))
        if GROUPED:
            scale = tl.load(scales + unit * width + outputs, mask=is_output, other=0.0).to(tl.float32)
        total = _added(total, w, piece, step, scale, GROUPED)
        if GATED:
            w_up = _weights(weight, ups_at, num_outputs + first, k, is_output, EVEN, COPIED)
            if GROUPED:
                scale_up = tl.load(scales + unit * width + num_outputs + outputs, mask=is_output, other=0.0).to(tl.float32)
            total_up = _added(total_up, w_up, piece, step, scale_up, GROUPED)
    end(EARLY)
    store_sums(
        total, total_up, scales, bias, out, rows, outputs, num_rows, num_outputs, part, GATED, ACTIVATION, HAS_BIAS, not GROUPED
    )
