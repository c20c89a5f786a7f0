"""Products of matrices and inputs in 8 bits (``dtype="w8a8"``), with the tensor cores' own products of e4m3 floats.

The inputs of a row are rounded 128 at a time, with a power of two between them and their codes (``quantised/float8.py``). The
product of 128 inputs is the tensor core's; its result is multiplied by that power, and by the matrix's scale if 128 inputs have
one, and added in float32.

    y = scale * sum over units u of 128 inputs:  step_u * (codes of w)_u (codes of x)_u

A separate kernel rounds the rows, which costs less than rounding in every program of the product. This product serves any
number of rows. The sum of a narrow matrix has four parts, each in the order of its units. For few rows a program computes one
part, so that there are enough programs. For many rows it adds up several parts, in the order in which the next norm adds them.
So a row's numbers do not depend on the others.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

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
_PROGRAMS = 240
"""Programs that a product should have."""
_TWO_PROGRAMS = 112 * 1024
"""Half of the shared memory of a processor, in bytes."""
_UNITS = 16
"""Units that a program of the rounding kernel takes."""


def multiply_float8(x: Tensor, weight: Packed, kind: Kind, *, gated: bool, finish: Finish, out_dtype: torch.dtype) -> Tensor:
    """[M, out] from [M, K] and [out, K], or [parts, M, out] yet to be added up where the matrix is narrow."""
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    is_plain = not gated and finish.activation == "none" and finish.bias is None
    parts = num_parts(kind, 8) if is_plain else 1
    tile = float8_tile(len(x), num_outputs, parts, gated=gated, grouped=len(weight.scales) > 1)
    return float8_product(x, weight, tile=tile, folds=parts // tile.num_parts, gated=gated, finish=finish, out_dtype=out_dtype)


def float8_tile(num_rows: int, num_outputs: int, parts: int, *, gated: bool, grouped: bool = False) -> Tile:
    """The tile that measured best; its ``parts`` are side by side where there would be too few programs. A step is a unit."""
    bm = next((size for size in (16, 32, 64) if num_rows <= size), 64 if gated and grouped else 128)
    bn = 64
    if not gated and 128 < num_rows <= 384:
        bn, bm = 128, 64
    programs = triton.cdiv(num_rows, bm) * triton.cdiv(num_outputs, bn)
    stages = min(4, _TWO_PROGRAMS // (GROUP * (bn * (2 if gated else 1) + bm)))
    return Tile(bn, GROUP, 4, stages, bm, 1 if programs >= _PROGRAMS else parts, copied=True)


def float8_product(
    x: Tensor,
    weight: Packed,
    *,
    tile: Tile,
    folds: int = 1,
    gated: bool = False,
    finish: Finish,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The product, cut as ``tile`` says. A program adds up ``folds`` parts."""
    (num_rows, depth), beside = x.shape, tile.num_parts
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert depth % GROUP == 0, "whole units of inputs"
    in_parts = beside * folds > 1
    shape = (beside, num_rows, num_outputs) if in_parts else (num_rows, num_outputs)
    out = x.new_empty(shape, dtype=torch.float32 if in_parts else out_dtype or x.dtype)
    codes, steps = rounded_rows(x)
    even = num_outputs % tile.bn == 0
    copied = tile.copied and even and can_copy(codes, weight.data)
    stage_bytes = GROUP * (tile.bn * (2 if gated else 1) + tile.bm)
    _product[triton.cdiv(num_rows, tile.bm), triton.cdiv(num_outputs, tile.bn), beside](
        TensorDescriptor.from_tensor(codes, [tile.bm, GROUP]) if copied else codes,
        steps,
        TensorDescriptor.from_tensor(weight.data, [tile.bn, GROUP]) if copied else weight.data,
        weight.data,
        weight.scales,
        weight.scales if finish.bias is None else finish.bias,
        out,
        num_rows,
        num_outputs,
        depth,
        triton.cdiv(depth // GROUP, beside * folds),
        GATED=gated,
        ACTIVATION=ACTIVATIONS[finish.activation],
        HAS_BIAS=finish.bias is not None,
        GROUPED=len(weight.scales) > 1,
        FOLDS=folds,
        EVEN=even,
        COPIED=copied,
        EARLY=launch.EARLY,
        launch_pdl=launch.EARLY,
        BM=tile.bm,
        BN=tile.bn,
        num_warps=tile.num_warps,
        num_stages=stages_that_fit(tile.num_stages, stage_bytes),
        enable_fp_fusion=False,  # a part is scaled, then added, wherever that happens
    )
    return out


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[M, K] e4m3 codes and [units, M] float32 steps of inputs."""
    num_rows, depth = x.shape
    codes = x.new_empty(num_rows, depth, dtype=torch.float8_e4m3fn)
    steps = x.new_empty(depth // GROUP, num_rows, dtype=torch.float32)
    _round[num_rows, triton.cdiv(depth // GROUP, _UNITS)](
        x, codes, steps, num_rows, depth // GROUP, UNITS=_UNITS, EARLY=launch.EARLY, launch_pdl=launch.EARLY
    )
    return codes, steps


@triton.jit(do_not_specialize=["num_rows"])
def _round(x, codes, steps, num_rows, num_units, UNITS: tl.constexpr, EARLY: tl.constexpr):
    """Codes of some units of a row, and the step of each: a power of two that puts its largest input at 224 to 448."""
    row = tl.program_id(0)
    units = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    at = row.to(tl.int64) * num_units * _UNIT + units[:, None] * _UNIT + tl.arange(0, _UNIT)[None, :]
    is_there = (units < num_units)[:, None]
    begin(EARLY)
    inputs = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
    end(EARLY)
    largest = tl.max(tl.abs(inputs), 1).to(tl.int32, bitcast=True)
    exponent = tl.maximum((largest + 0x1FFFFF) >> 23, 9)
    inverse = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(codes + at, (inputs * inverse[:, None]).to(tl.float8e4nv), mask=is_there)
    step = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
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
def _scales(scales, unit, stop, outputs, num_outputs, GATED: tl.constexpr, GROUPED: tl.constexpr):
    """Scales of the outputs for a unit, which are asked for one unit ahead; 1 where they belong to whole outputs."""
    scale = tl.full(outputs.shape, 1.0, tl.float32)
    scale_up = scale
    if GROUPED:
        is_there = (outputs < num_outputs) & (unit < stop)
        at = scales + unit * (num_outputs * 2 if GATED else num_outputs) + outputs
        scale = tl.load(at, mask=is_there, other=0.0).to(tl.float32)
        if GATED:
            scale_up = tl.load(at + num_outputs, mask=is_there, other=0.0).to(tl.float32)
    return scale, scale_up


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
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, GROUPED: tl.constexpr, FOLDS: tl.constexpr,
    EVEN: tl.constexpr, COPIED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    first_row, first = tl.program_id(0) * BM, tl.program_id(1) * BN  # neighbours share the weights
    rows, outputs, ks = first_row + tl.arange(0, BM), first + tl.arange(0, BN), tl.arange(0, _UNIT)
    part = tl.program_id(2)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    weights_at = matrix + outputs[:, None].to(tl.int64) * depth + ks[None, :]
    ups_at = weights_at + num_outputs.to(tl.int64) * depth
    if not COPIED:
        x_at = x + rows[:, None].to(tl.int64) * depth + ks[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    total_up = tl.zeros((BN, BM), tl.float32)
    folded = tl.zeros((BN, BM), tl.float32)
    if EVEN:
        fetch(matrix + outputs.to(tl.int64) * depth + part * FOLDS * part_len * _UNIT, EARLY)
    begin(EARLY)
    for fold in range(FOLDS):
        start = (part * FOLDS + fold) * part_len
        stop = tl.minimum(start + part_len, depth // _UNIT)
        later = _scales(scales, start, stop, outputs, num_outputs, GATED, GROUPED)
        for unit in range(start, stop):
            k = unit * _UNIT
            scale, scale_up = later
            later = _scales(scales, unit + 1, stop, outputs, num_outputs, GATED, GROUPED)
            step = tl.load(steps + unit * num_rows + rows, mask=is_row, other=0.0)
            w = _weights(weight, weights_at, first, k, is_output, EVEN, COPIED)
            codes = x.load([first_row, k]) if COPIED else tl.load(x_at + k, mask=is_row[:, None], other=0.0)
            total = _added(total, w, codes, step, scale, GROUPED)
            if GATED:
                w_up = _weights(weight, ups_at, num_outputs + first, k, is_output, EVEN, COPIED)
                total_up = _added(total_up, w_up, codes, step, scale_up, GROUPED)
        if FOLDS > 1:
            folded += total if GROUPED else total * tl.load(scales + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
            total = tl.zeros((BN, BM), tl.float32)
    end(EARLY)
    if FOLDS > 1:
        total = folded
    store_sums(
        total, total_up, scales, bias, out, rows, outputs, num_rows, num_outputs, part, GATED, ACTIVATION, HAS_BIAS,
        not GROUPED and FOLDS == 1,
    )  # fmt: skip
