"""Products with codes of 8 bits that have a scale for every group of inputs (``packed.py``), and codes made 16 bits.

    y = sum over groups g of  scale_g * (codes_g x_g)        codes: whole numbers, or e4m3 floats

``quantised_matmul.py`` does the same faster on Hopper, for groups of 128; this is for other devices and groups. An e4m3 float
becomes a 32-bit float by moving its bits. The bias of the exponent is then 127 instead of 7, which a factor of 2^120 corrects.
A whole number is placed in the low bits of 2^23, which is faster than the device's own conversion.

Many rows are multiplied by cuBLAS, which wants 16 bits: ``packed_in_sixteen`` writes a matrix out in one reading of its
codes.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.gpu import launch
from outrider.models.gpu.launch import begin, end
from outrider.models.gpu.limits import stages_that_fit
from outrider.models.gpu.tile import Tile
from outrider.models.packed import Packed

_ROWS, _COLUMNS = 16, 512
"""Outputs and inputs that a program writes out."""


@triton.jit
def numbers_of(codes, IS_FLOAT: tl.constexpr):
    """The numbers that codes of 8 bits stand for, float32."""
    bits = codes.to(tl.int32) & 255
    if IS_FLOAT:
        numbers = (((bits & 128) << 24) | ((bits & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        numbers = ((bits ^ 128) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    return numbers


@triton.jit
def _tile(codes_at, scales_at, piece, is_output, inside, IS_FLOAT: tl.constexpr):
    """The contribution of some inputs of one group to a tile of outputs."""
    codes = tl.load(codes_at, mask=is_output[:, None] & inside[None, :], other=0)
    part = tl.dot(numbers_of(codes, IS_FLOAT).to(piece.dtype), piece, input_precision="ieee")
    return part * tl.load(scales_at, mask=is_output, other=0.0).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def grouped_product(
    x, weight, scales, out, num_rows, num_outputs, depth, part_len, group_len,
    GATED: tl.constexpr, IS_FLOAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The kernel of a product. BK divides a group. ``num_outputs`` counts results; gated matrices have twice as many rows."""
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    ks = tl.arange(0, BK)
    is_row = rows < num_rows
    is_output = outputs < num_outputs
    width = num_outputs * 2 if GATED else num_outputs
    codes_at = weight + outputs[:, None].to(tl.int64) * depth + ks[None, :]
    ups_at = codes_at + num_outputs.to(tl.int64) * depth
    x_at = x + rows[None, :] * depth + ks[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    total_up = tl.zeros((BN, BM), tl.float32)
    begin(EARLY)
    for k in range(part * part_len, tl.minimum((part + 1) * part_len, depth), BK):
        inside = k + ks < depth
        piece = tl.load(x_at + k, mask=is_row[None, :] & inside[:, None], other=0.0)
        scales_at = scales + (k // group_len) * width + outputs
        total += _tile(codes_at + k, scales_at, piece, is_output, inside, IS_FLOAT)
        if GATED:
            total_up += _tile(ups_at + k, scales_at + num_outputs, piece, is_output, inside, IS_FLOAT)
    end(EARLY)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * total_up
    out_at = out + (part * num_rows + rows)[None, :].to(tl.int64) * num_outputs + outputs[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


def launch_grouped(x: Tensor, weight: Packed, out: Tensor, *, tile: Tile, gated: bool, grid: tuple[int, int, int]) -> None:
    """Launch a product into ``out``, cut as ``tile`` says."""
    (num_rows, depth), group = x.shape, weight.group_len
    bk = tile.bk if len(weight.scales) == 1 else min(tile.bk, group & -group)
    assert bk >= 16, "groups of a multiple of 16 inputs"
    stage_bytes = bk * (tile.bn * (2 if gated else 1) + tile.bm * x.element_size())
    grouped_product[grid](
        x,
        weight.data.view(torch.uint8),
        weight.scales,
        out,
        num_rows,
        out.shape[-1],
        depth,
        triton.cdiv(depth, tile.num_parts * bk) * bk,
        group,
        GATED=gated,
        IS_FLOAT=weight.is_float,
        BM=tile.bm,
        BN=tile.bn,
        BK=bk,
        EARLY=launch.EARLY,
        num_warps=tile.num_warps,
        num_stages=stages_that_fit(tile.num_stages, stage_bytes),
        launch_pdl=launch.EARLY,
    )


@triton.jit
def _write_bytes(
    codes, scales, out, num_outputs, depth, group_len, IS_FLOAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    outputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ks = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_there = (outputs < num_outputs)[:, None] & (ks < depth)[None, :]
    at = outputs[:, None].to(tl.int64) * depth + ks[None, :]
    numbers = numbers_of(tl.load(codes + at, mask=is_there, other=0), IS_FLOAT)
    scale = tl.load(scales + (ks // group_len)[None, :] * num_outputs + outputs[:, None], mask=is_there, other=0.0)
    tl.store(out + at, (numbers * scale.to(tl.float32)).to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _write_nibbles(
    codes, scales, zeros, levels, out, num_outputs, depth,
    HAS_ZEROS: tl.constexpr, HAS_LEVELS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program writes one group of some outputs. ``HALF`` is half a group."""
    outputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group, ks = tl.program_id(1), tl.arange(0, HALF)
    is_there = (outputs < num_outputs)[:, None] & (ks >= 0)[None, :]
    both = tl.load(codes + outputs[:, None].to(tl.int64) * (depth // 2) + group * HALF + ks[None, :], mask=is_there, other=0)
    at = group * num_outputs + outputs
    scale = tl.load(scales + at, mask=outputs < num_outputs, other=0.0).to(tl.float32)[:, None]
    middle = tl.full((ROWS, 1), 8.0, tl.float32)
    if HAS_ZEROS:
        middle += tl.load(zeros + at, mask=outputs < num_outputs, other=0.0).to(tl.float32)[:, None]
    to = out + outputs[:, None].to(tl.int64) * depth + group * 2 * HALF + ks[None, :]
    low = tl.load(levels + (both & 15)) if HAS_LEVELS else (both & 15).to(tl.float32) - middle
    high = tl.load(levels + (both >> 4)) if HAS_LEVELS else (both >> 4).to(tl.float32) - middle
    tl.store(to, (low * scale).to(out.dtype.element_ty), mask=is_there)
    tl.store(to + HALF, (high * scale).to(out.dtype.element_ty), mask=is_there)


def packed_in_sixteen(weight: Packed, dtype: torch.dtype) -> Tensor:
    """[out, in] the numbers of the matrix, each rounded once to ``dtype``."""
    num_outputs, depth = weight.shape
    out = weight.data.new_empty(num_outputs, depth, dtype=dtype)
    if weight.bits == 4:
        zeros, levels = (weight.scales if each is None else each for each in (weight.zeros, weight.levels))
        _write_nibbles[(triton.cdiv(num_outputs, _ROWS), depth // weight.group_len)](
            weight.data, weight.scales, zeros, levels, out, num_outputs, depth,
            HAS_ZEROS=weight.zeros is not None, HAS_LEVELS=weight.levels is not None, HALF=weight.group_len // 2, ROWS=_ROWS,
        )  # fmt: skip
        return out
    codes = weight.data.view(torch.uint8)
    _write_bytes[(triton.cdiv(num_outputs, _ROWS), triton.cdiv(depth, _COLUMNS))](
        codes, weight.scales, out, num_outputs, depth, weight.group_len,
        IS_FLOAT=weight.is_float, ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return out
