"""Products of a few rows with a large matrix, at the speed the matrix can be read.

The weight is the left operand, so that its rows fill the tensor core's long side and the few activations its short one. The
gate's activation is computed inside the product. For a matrix with few outputs the sum is cut into parts too, so that enough
programs read the matrix. Then ``add_norm`` adds up the parts in order, together with the residual and the next norm.

    product:   y_c = W_c x_c                       gated: silu(W_gate x) * (W_up x)
    add_norm:  r <- r + sum_c y_c                  n = r / sqrt(mean(r^2) + eps) * g

Every output is one sum over k in the order of k, so it depends neither on the other rows nor on their number. On an H200 it is
bit for bit the same for every tile with the same number of parts.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.models.gpu import launch
from outrider.models.gpu.code_bits import table_code
from outrider.models.gpu.finish import ACTIVATIONS, SILU, Finish, store_sums
from outrider.models.gpu.grouped import launch_grouped
from outrider.models.gpu.int4_matmul import nibble_product
from outrider.models.gpu.launch import begin, end, fetch
from outrider.models.gpu.limits import HOPPER, can_copy, stages_that_fit
from outrider.models.gpu.tile import Tile
from outrider.models.packed import GROUP, Packed

_FETCHED = 256
"""Numbers of every output's row that are prefetched before the previous kernel has ended, in a matrix with fewer outputs than
inputs. Such a matrix follows a large product (down follows gate and up), whose last programs leave memory idle. After a norm,
prefetching slows the norm by as much as it saves."""

_PART_STEP = 256
"""Parts of a sum are so many numbers long, or a multiple: they must not depend on the tile."""


@dataclass(frozen=True, eq=False)
class NormParts:
    """A norm: x / sqrt(mean(x^2) + eps) * weight. With ``centred``, of x - mean(x), and with a bias."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    centred: bool = False


@dataclass(frozen=True, eq=False)
class Ending:
    """Operations on the output of attention or MLP before it is added to the residual stream."""

    bias: Tensor | None = None
    norm: NormParts | None = None
    scale: float = 1.0


PLAIN = Ending()


def product(
    x: Tensor,
    weight: Tensor | Packed,
    *,
    tile: Tile,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    finish: Finish | None = None,
) -> Tensor:
    """[M, out] from [M, K] and [out, K]; [parts, M, out] in float32 where the tile has several parts. ``gated`` weights hold
    gate, then up, and give half as many outputs. Without ``finish``, gated weights use SiLU."""
    finish = finish or (SILU if gated else Finish("none"))
    num_rows, depth = x.shape
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    is_plain = finish.bias is None and finish.activation == ("silu" if gated else "none")
    assert tile.num_parts == 1 or not (gated or finish.activation != "none"), "an activation is not linear in its parts"
    assert is_plain or isinstance(weight, Tensor), "matrices of few bits know no other activation, and no bias"
    shape = (num_rows, num_outputs) if tile.num_parts == 1 else (tile.num_parts, num_rows, num_outputs)
    out = x.new_empty(shape, dtype=torch.float32 if tile.num_parts > 1 else out_dtype or x.dtype)
    grid = (triton.cdiv(num_outputs, tile.bn), triton.cdiv(num_rows, tile.bm), tile.num_parts)
    if isinstance(weight, Packed) and tile.ringed:
        _launch_rounded(x, weight, out, tile=tile, gated=gated, grid=grid)
        return out
    if isinstance(weight, Packed) and weight.bits == 4:
        _launch_nibbles(x, weight, out, tile=tile, gated=gated, grid=grid)
        return out
    if isinstance(weight, Packed) and not weight.is_usual:
        launch_grouped(x, weight, out, tile=tile, gated=gated, grid=grid)
        return out
    part_len = triton.cdiv(depth, tile.num_parts * _PART_STEP) * _PART_STEP
    if tile.is_wide:
        from outrider.models.gpu.wide import wide_product  # a language not every triton has

        assert isinstance(weight, Tensor), "wide tiles know matrices of 16 bits"
        wide_product(x, weight, out, tile=tile, finish=finish, gated=gated, part_len=part_len)
        return out
    _launch_plain(x, weight, out, tile=tile, finish=finish, gated=gated, part_len=part_len)
    return out


def _launch_plain(
    x: Tensor, weight: Tensor | Packed, out: Tensor, *, tile: Tile, finish: Finish, gated: bool, part_len: int
) -> None:
    (num_rows, depth), num_outputs = x.shape, out.shape[-1]
    data, scales = (weight.data, weight.scales) if isinstance(weight, Packed) else (weight, weight)
    copied = tile.copied and isinstance(weight, Tensor) and can_copy(x, weight)
    even = num_outputs % tile.bn == 0 and depth % tile.bk == 0
    stage_bytes = (tile.bn * (2 if gated else 1) * data.element_size() + tile.bm * x.element_size()) * tile.bk
    _product[triton.cdiv(num_rows, tile.bm), triton.cdiv(num_outputs, tile.bn), tile.num_parts](
        TensorDescriptor.from_tensor(x, [tile.bm, tile.bk]) if copied else x,
        TensorDescriptor.from_tensor(data, [tile.bn, tile.bk]) if copied else data,
        data,
        scales,
        scales if finish.bias is None else finish.bias,
        out,
        num_rows,
        num_outputs,
        depth,
        part_len,
        GATED=gated,
        ACTIVATION=ACTIVATIONS[finish.activation],
        HAS_BIAS=finish.bias is not None,
        SCALED=isinstance(weight, Packed),
        EVEN=even,
        FETCH=_FETCHED if even and depth > num_outputs and depth % (tile.num_parts * _FETCHED) == 0 else 0,
        COPIED=copied,
        BM=tile.bm,
        BN=tile.bn,
        BK=tile.bk,
        EARLY=launch.EARLY,
        num_warps=tile.num_warps,
        num_stages=stages_that_fit(tile.num_stages, stage_bytes),
        launch_pdl=launch.EARLY,
    )


def _launch_rounded(x: Tensor, weight: Packed, out: Tensor, *, tile: Tile, gated: bool, grid: tuple[int, int, int]) -> None:
    from outrider.models.gpu.quantised_matmul import rounded_product  # a language not every triton has

    (num_rows, depth), sides = x.shape, 2 if gated else 1
    unit = weight.group_len if weight.bits == 4 else GROUP
    assert depth % GROUP == 0 and out.shape[-1] % tile.bn == 0, "whole groups of inputs, whole tiles of outputs"
    of_scales = 12 * tile.bn * sides * GROUP // unit
    stage_bytes = tile.bk * (tile.bn * sides * weight.bits // 8 + tile.bm * x.element_size()) + of_scales
    form = (weight.bits == 4 or len(weight.scales) > 1) + 2 * (weight.zeros is not None) + 4 * weight.is_float
    form += 8 * bool(weight.values)
    data = weight.data.view(torch.int8) if weight.bits == 8 else weight.data
    rounded_product[grid](
        x,
        data,
        weight.scales,
        x if weight.zeros is None else weight.zeros,
        out,
        num_rows,
        out.shape[-1],
        depth,
        triton.cdiv(depth // unit, tile.num_parts),
        SIDES=sides,
        BITS=weight.bits,
        FORM=form,
        TABLE=table_code(weight.values) if weight.values else None,
        BM=tile.bm,
        BN=tile.bn,
        UNIT=unit,
        UNITS=tile.bk // unit,
        STAGES=stages_that_fit(tile.num_stages, stage_bytes),
        EARLY=launch.EARLY,
        num_warps=tile.num_warps,
        launch_pdl=launch.EARLY,
    )


def _launch_nibbles(x: Tensor, weight: Packed, out: Tensor, *, tile: Tile, gated: bool, grid: tuple[int, int, int]) -> None:
    (num_rows, depth), group, bitwise = x.shape, weight.group_len, HOPPER and x.dtype == torch.bfloat16
    stage_bytes = tile.bn * (2 if gated else 1) * group // 2 + tile.bm * group * x.element_size()
    nibble_product[grid](
        x,
        weight.data,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if weight.levels is None else weight.levels,
        out,
        num_rows,
        out.shape[-1],
        depth,
        triton.cdiv(depth, tile.num_parts * group) * group,
        GATED=gated,
        ZEROS=weight.zeros is not None,
        LEVELS=weight.levels is not None,
        TABLE=table_code(weight.values) if bitwise and weight.values else None,
        BITWISE=bitwise,
        HALF=group // 2,
        BM=tile.bm,
        BN=tile.bn,
        EARLY=launch.EARLY,
        num_warps=tile.num_warps,
        num_stages=stages_that_fit(tile.num_stages, stage_bytes),
        launch_pdl=launch.EARLY,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x, weight, matrix, scales, bias, out, num_rows, num_outputs, depth, part_len,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr,
    FETCH: tl.constexpr, COPIED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    first_row, first = tl.program_id(0) * BM, tl.program_id(1) * BN  # neighbours share the weights
    outputs = first + tl.arange(0, BN)
    rows = first_row + tl.arange(0, BM)
    part = tl.program_id(2)
    ks = tl.arange(0, BK)
    is_row = rows < num_rows
    is_output = outputs < num_outputs
    if not COPIED:
        weights_at = weight + outputs[:, None].to(tl.int64) * depth + ks[None, :]
        ups_at = weights_at + num_outputs.to(tl.int64) * depth
        x_at = x + rows[None, :] * depth + ks[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    total_up = tl.zeros((BN, BM), tl.float32)
    if FETCH > 0:
        lines = tl.arange(0, FETCH // 64) * 64
        fetch(matrix + outputs[:, None].to(tl.int64) * depth + part * part_len + lines[None, :], EARLY)
    begin(EARLY)
    for k in range(part * part_len, tl.minimum((part + 1) * part_len, depth), BK):
        if COPIED:
            w = weight.load([first, k])
            piece = x.load([first_row, k]).T
        elif EVEN:
            w = tl.load(weights_at + k)
            piece = tl.load(x_at + k, mask=is_row[None, :], other=0.0)
        else:
            inside = k + ks < depth
            w = tl.load(weights_at + k, mask=is_output[:, None] & inside[None, :], other=0.0)
            piece = tl.load(x_at + k, mask=is_row[None, :] & inside[:, None], other=0.0)
        total = tl.dot(w.to(piece.dtype), piece, total, input_precision="ieee")
        if GATED:
            if COPIED:
                w_up = weight.load([num_outputs + first, k])
            elif EVEN:
                w_up = tl.load(ups_at + k)
            else:
                w_up = tl.load(ups_at + k, mask=is_output[:, None] & (k + ks < depth)[None, :], other=0.0)
            total_up = tl.dot(w_up.to(piece.dtype), piece, total_up, input_precision="ieee")
    end(EARLY)
    store_sums(
        total, total_up, scales, bias, out, rows, outputs, num_rows, num_outputs, part, GATED, ACTIVATION, HAS_BIAS, SCALED
    )


def reference_product(x: Tensor, weight: Tensor, *, gated: bool = False) -> Tensor:
    """The product in plain PyTorch and float32, which is the oracle."""
    y = x.float() @ weight.float().T
    if gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y
