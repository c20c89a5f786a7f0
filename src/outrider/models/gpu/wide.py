"""Products of more than 64 rows, at the speed of the tensor cores: one warp fetches, one or two groups of four
multiply.

With a hundred rows or more, reading the matrix no longer limits a product. The weights are the left operand, as in
``small_batch_matmul.py``, with 64 outputs per group of warps. One warp requests tiles from the copy engine into a ring of
shared memory, and the groups multiply them, so neither waits for the other. The first weights are requested before the previous
kernel has ended, but not the activations, which that kernel writes.

    y_c = W_c x_c                       gated: silu(W_gate x) * (W_up x)

Every output is one sum over k in the order of k, cut into the same parts as in ``small_batch_matmul.py``. So its bits are those
of a pass of one row. Rows of a program are 64, 128 or 256, alone or with a smaller power of two beside them (192 = 128 + 64).
``wide_tiles.py`` chooses the tile. The kernel is written in Gluon and uses instructions of Hopper.
"""

# ruff: noqa: N803, N806, RUF005 - kernels write compile-time numbers in capitals, and cannot unpack
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from outrider.models.gpu import launch
from outrider.models.gpu.finish import ACTIVATIONS, Finish
from outrider.models.gpu.launch_gluon import begin, end
from outrider.models.gpu.limits import stages_that_fit
from outrider.models.gpu.tile import Tile

_BK = 64
"""Inputs of a stage: rows of 128 bytes, as the copy engine swizzles them."""
_GROUP = gl.constexpr(64)
"""Outputs of a group of four warps."""


_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def wide_product(x: Tensor, weight: Tensor, out: Tensor, *, tile: Tile, finish: Finish, gated: bool, part_len: int) -> None:
    """Fill ``out``, [M, out] or [parts, M, out], with the products of [M, K] and [out, K]."""
    (num_rows, depth), num_outputs, sides = x.shape, out.shape[-1], 2 if gated else 1
    main = 1 << tile.bm.bit_length() - 1
    rest = tile.bm - main
    stage_bytes = (tile.bn * sides + tile.bm) * _BK * x.element_size()
    wide_kernel[(triton.cdiv(num_rows, tile.bm), triton.cdiv(num_outputs, tile.bn), tile.num_parts)](
        _tiles(weight, _GROUP.value),
        _tiles(x, main),
        _tiles(x, rest or main),
        out if finish.bias is None else finish.bias,
        out,
        num_rows,
        num_outputs,
        depth,
        part_len,
        ACTIVATION=ACTIVATIONS[finish.activation],
        HAS_BIAS=finish.bias is not None,
        SIDES=sides,
        GROUPS=tile.bn // _GROUP.value,
        REST=rest,
        STAGES=stages_that_fit(tile.num_stages, stage_bytes),
        EARLY=launch.EARLY,
        num_warps=4,
        launch_pdl=launch.EARLY,
    )


def _tiles(matrix: Tensor, num_rows: int) -> TensorDescriptor:
    block = [num_rows, _BK]
    return TensorDescriptor.from_tensor(matrix, block, gl.NVMMASharedLayout.get_default_for(block, _TYPES[matrix.dtype]))


@gluon.jit
def _fetch_weights(tiles, ring, full, stage, output, num_outputs, k, SIDES: gl.constexpr, GROUPS: gl.constexpr):
    for group in gl.static_range(GROUPS):
        for side in gl.static_range(SIDES):
            at = [output + group * _GROUP + side * num_outputs, k]
            tma.async_copy_global_to_shared(tiles, at, full.index(stage), ring.index((stage * GROUPS + group) * SIDES + side))


@gluon.jit
def _fetch_rows(tiles, rings, full, stage, row, k, REST: gl.constexpr):
    tma.async_copy_global_to_shared(tiles[0], [row, k], full.index(stage), rings[0].index(stage))
    if REST > 0:
        tma.async_copy_global_to_shared(tiles[1], [row + rings[0].shape[1], k], full.index(stage), rings[1].index(stage))


@gluon.jit
def _fetch(
    weights, tiles, ring, rings, full, empty, place, num_outputs, num_steps,
    SIDES: gl.constexpr, GROUPS: gl.constexpr, REST: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The loop of the fetching warp: step by step, into whichever stage is free."""
    STAGES: gl.constexpr = full.shape[0]
    BK: gl.constexpr = ring.shape[2]
    BYTES: gl.constexpr = (_GROUP * GROUPS * SIDES + rings[0].shape[1] + REST) * BK * 2
    row, output, first = place
    ahead = gl.minimum(num_steps, STAGES)
    for step in range(ahead):
        mbarrier.expect(full.index(step), BYTES)
        _fetch_weights(weights, ring, full, step, output, num_outputs, first + step * BK, SIDES, GROUPS)
    begin(EARLY)
    for step in range(ahead):
        _fetch_rows(tiles, rings, full, step, row, first + step * BK, REST)
    for step in range(ahead, num_steps):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        _fetch_weights(weights, ring, full, stage, output, num_outputs, first + step * BK, SIDES, GROUPS)
        _fetch_rows(tiles, rings, full, stage, row, first + step * BK, REST)


@gluon.jit
def _no_sums(SIDES: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr):
    """Totals to start from: those of the main rows, side by side, then those of the rest."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, MAIN, 16])
    totals = ()
    for _ in gl.static_range(SIDES):
        totals = totals + (gl.zeros([_GROUP, MAIN], gl.float32, LAYOUT),)
    if REST > 0:
        MORE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, REST, 16])
        for _ in gl.static_range(SIDES):
            totals = totals + (gl.zeros([_GROUP, REST], gl.float32, MORE),)
    return totals


@gluon.jit
def _ended(totals, OPEN: gl.constexpr):
    """The totals when all but the last ``OPEN`` products have ended."""
    ended = warpgroup_mma_wait(OPEN, deps=totals)
    COUNT: gl.constexpr = len(totals)
    if COUNT == 1:
        ended = (ended,)
    return ended


@gluon.jit
def _multiply(
    bias, out, ring, rings, full, empty, place, sizes, num_steps, GROUP: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr, SIDES: gl.constexpr, GROUPS: gl.constexpr, REST: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The loop of a multiplying group: its outputs of all rows of the tile."""
    STAGES: gl.constexpr = full.shape[0]
    totals = _no_sums(SIDES, rings[0].shape[1], REST)
    for step in range(num_steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        sums = ()
        for chunk in gl.static_range(len(totals) // SIDES):
            for side in gl.static_range(SIDES):
                weights = ring.index((stage * GROUPS + GROUP) * SIDES + side)
                inputs = rings[chunk].index(stage).permute((1, 0))
                sums = sums + (warpgroup_mma(weights, inputs, totals[chunk * SIDES + side], is_async=True),)
        totals = _ended(sums, len(sums))
        if step > 0:
            mbarrier.arrive(empty.index((step - 1) % STAGES))
    totals = _ended(totals, 0)
    end(EARLY)
    row, output, part = place
    for chunk in gl.static_range(len(totals) // SIDES):
        total, up = totals[chunk * SIDES], totals[chunk * SIDES + SIDES - 1]
        at = (row + chunk * rings[0].shape[1], output + GROUP * _GROUP, part)
        _store(total, up, bias, out, at, sizes, ACTIVATION, HAS_BIAS, SIDES)


@gluon.jit
def _activated(gate, ACTIVATION: gl.constexpr):
    """``small_batch_matmul.activated`` in Gluon, for one side. The clamped gate is not supported."""
    gl.static_assert(ACTIVATION < 4)
    if ACTIVATION == 1:
        gate = gate / (1.0 + gl.exp(-gate))
    if ACTIVATION == 2:
        gate = gate / (1.0 + gl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    if ACTIVATION == 3:
        gate = 0.5 * gate * (1.0 + gl.erf(gate * 0.7071067811865476))
    return gate


@gluon.jit
def _store(
    total, up, bias, out, place, sizes, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, SIDES: gl.constexpr
):  # fmt: skip
    """Store the totals of some rows, with bias and activation. Pairs of totals are gated."""
    LAYOUT: gl.constexpr = total.type.layout
    row, output, part = place
    num_rows, num_outputs = sizes
    outputs = output + gl.arange(0, _GROUP, gl.SliceLayout(1, LAYOUT))
    rows = row + gl.arange(0, total.shape[1], gl.SliceLayout(0, LAYOUT))
    if HAS_BIAS:
        is_output = outputs < num_outputs
        total += gl.load(bias + outputs, mask=is_output, other=0.0).to(gl.float32)[:, None]
        if SIDES == 2:
            up += gl.load(bias + num_outputs + outputs, mask=is_output, other=0.0).to(gl.float32)[:, None]
    total = _activated(total, ACTIVATION)
    if SIDES == 2:
        total = total * up
    at = out + (part * num_rows + rows)[None, :].to(gl.int64) * num_outputs + outputs[:, None]
    gl.store(at, total.to(out.dtype.element_ty), mask=(rows < num_rows)[None, :] & (outputs < num_outputs)[:, None])


@gluon.jit(do_not_specialize=["num_rows"])
def wide_kernel(
    weights, tiles, more_tiles, bias, out, num_rows, num_outputs, depth, part_len,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
    SIDES: gl.constexpr, GROUPS: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A program: 64 outputs for each of ``GROUPS`` groups, the rows of a tile and of ``more_tiles`` where there are
    any (``REST``), over a part of the sum. A gated matrix has two ``SIDES``. Programs next to each other share the
    weights."""
    MAIN: gl.constexpr = tiles.block_type.shape[0]
    BK: gl.constexpr = tiles.block_type.shape[1]
    row, output, part = gl.program_id(0) * (MAIN + REST), gl.program_id(1) * GROUPS * _GROUP, gl.program_id(2)
    num_steps = gl.cdiv(gl.minimum((part + 1) * part_len, depth) - part * part_len, BK)
    ring = gl.allocate_shared_memory(weights.dtype, [STAGES * GROUPS * SIDES, _GROUP, BK], weights.layout)
    rows = gl.allocate_shared_memory(tiles.dtype, [STAGES, MAIN, BK], tiles.layout)
    rings = (rows,)
    if REST > 0:
        rings = rings + (gl.allocate_shared_memory(tiles.dtype, [STAGES, REST, BK], more_tiles.layout),)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    place, sizes = (row, output, part), (num_rows, num_outputs)
    start, inputs = (row, output, part * part_len), (tiles, more_tiles)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (bias, out, ring, rings, full, empty, place, sizes, num_steps, 0,
                             ACTIVATION, HAS_BIAS, SIDES, GROUPS, REST, EARLY)),
                (_multiply, (bias, out, ring, rings, full, empty, place, sizes, num_steps, 1,
                             ACTIVATION, HAS_BIAS, SIDES, GROUPS, REST, EARLY)),
                (_fetch, (weights, inputs, ring, rings, full, empty, start, num_outputs, num_steps,
                          SIDES, GROUPS, REST, EARLY)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (bias, out, ring, rings, full, empty, place, sizes, num_steps, 0,
                             ACTIVATION, HAS_BIAS, SIDES, GROUPS, REST, EARLY)),
                (_fetch, (weights, inputs, ring, rings, full, empty, start, num_outputs, num_steps,
                          SIDES, GROUPS, REST, EARLY)),
            ],
            [1],
            [24],
        )  # fmt: skip
