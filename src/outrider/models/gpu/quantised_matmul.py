"""Products with matrices of 8 and 4 bits (``packed.py``), at the speed their bytes can be read.

A tensor core may get the numbers of a sum in any order, as long as both factors have the same order. So every thread takes 16
(or 8) neighbouring bytes of a row as its share of a unit of 128 inputs, and the matching inputs. Bytes are never reordered,
neither in memory nor between threads. A ring of shared memory holds units, so the next ones are loaded while one is multiplied.
The first weights are requested before the previous kernel has ended.

    8 bits:  y = scale * sum q x          4 bits:  y = sum over groups g of  scale_g * (low_g x_g[:64] + high_g x_g[64:])

A matrix of a checkpoint may have scales for units in 8 bits, too, and zeros in 4. Units of 4 bits may have 64 inputs, and their
codes may be places in a table.

Numbers are made from their bits (``code_bits.py``). Every output is one sum in the same order, whatever the number of rows. The
kernel is written in Gluon, because Triton's own language cannot place a thread's numbers. ``int4_matmul.py`` and
``small_batch_matmul.py`` do the same on other devices.
"""

# ruff: noqa: N803, N806, RUF005 - kernels write compile-time numbers in capitals, and cannot unpack
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from outrider.models.gpu.code_bits import ABOVE_ZERO, BYTES, FLOATS, NIBBLES
from outrider.models.gpu.launch_gluon import begin, end

_CHUNK = gl.constexpr(16)
"""Rows whose inputs are in registers at a time."""
GROUPED, ZEROS, IN_FLOATS, TABLED = gl.constexpr(1), gl.constexpr(2), gl.constexpr(4), gl.constexpr(8)
"""Features of a matrix: a scale for every unit; in 4 bits a zero point for every unit, or indices into a table; in 8 bits e4m3
floats."""


@gluon.jit
def _outputs(num_outputs, SIDES: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows of the matrix that a program multiplies. In a gated matrix: BN gates, then the BN rows of ``up`` that they
    multiply."""
    index = gl.arange(0, SIDES * BN, LAYOUT)
    return gl.program_id(0) * BN + index % BN + index // BN * num_outputs


@gluon.jit
def _of_units(values, num_outputs, UNITS: gl.constexpr, SIDES: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """Addresses of the scales or zero points of the first units."""
    at = values + (gl.arange(0, UNITS, gl.SliceLayout(1, LAYOUT)) * num_outputs * SIDES)[:, None]
    return at + _outputs(num_outputs, SIDES, BN, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _fetch(ring, at, is_row, unit, stop, stage, LENGTH: gl.constexpr):
    """Load the numbers of the next units, ``LENGTH`` of every row each; zeros beyond the end."""
    ahead = gl.arange(0, at.shape[1], gl.SliceLayout(0, at.type.layout)) // LENGTH
    there = is_row[:, None] & (unit + ahead < stop)[None, :]
    async_copy.async_copy_global_to_shared(ring.index(stage), at + unit * LENGTH, mask=there)


@gluon.jit
def _fetch_scales(ring, at, unit, stop, stage, width):
    """Load the scales of the next units. They are stored unit by unit."""
    ahead = gl.arange(0, at.shape[0], gl.SliceLayout(1, at.type.layout))
    there = (unit + ahead < stop)[:, None] & (gl.arange(0, at.shape[1], gl.SliceLayout(0, at.type.layout)) >= 0)[None, :]
    async_copy.async_copy_global_to_shared(ring.index(stage), at + unit * width, mask=there)


@gluon.jit
def _fetch_more(s_ring, scales_at, z_ring, zeros_at, unit, stop, stage, width, FORM: gl.constexpr):
    """Load the scales and zeros of the next units, if units have them."""
    if FORM & GROUPED:
        _fetch_scales(s_ring, scales_at, unit, stop, stage, width)
    if FORM & ZEROS:
        _fetch_scales(z_ring, zeros_at, unit, stop, stage, width)


@gluon.jit
def _multiplied(
    packed, inputs, scale, middle, total, BITS: gl.constexpr, FORM: gl.constexpr, TABLE: gl.constexpr
):  # fmt: skip
    """``total`` plus the contribution of a unit. ``TABLE``: the code that looks numbers up."""
    part = total
    if FORM & GROUPED:
        part = gl.zeros_like(total)
    if BITS == 8:
        if FORM & IN_FLOATS:
            numbers = gl.inline_asm_elementwise(FLOATS, "=r,=r,r", [packed], dtype=gl.bfloat16, is_pure=True, pack=4)
        else:
            numbers = gl.inline_asm_elementwise(BYTES, "=r,=r,r", [packed], dtype=gl.bfloat16, is_pure=True, pack=4)
        part = mma_v2(numbers, inputs[0], part)
    else:
        if FORM & ZEROS:
            low, high = gl.inline_asm_elementwise(
                ABOVE_ZERO, "=r,=r,=r,=r,r,r,r", [packed, middle], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
            )
        else:
            CODE: gl.constexpr = TABLE if FORM & TABLED else NIBBLES
            low, high = gl.inline_asm_elementwise(
                CODE, "=r,=r,=r,=r,r", [packed], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
            )
        part = mma_v2(high, inputs[1], mma_v2(low, inputs[0], part))
    if FORM & GROUPED:
        return gl.fma(part, scale + gl.zeros_like(part), total)
    return part


@gluon.jit
def _no_sums(COUNT: gl.constexpr, BN: gl.constexpr, CHUNK: gl.constexpr, LAYOUT: gl.constexpr):
    """Totals to start from."""
    totals = ()
    for _ in gl.static_range(COUNT):
        totals = totals + (gl.zeros([BN, CHUNK], gl.float32, LAYOUT),)
    return totals


@gluon.jit
def _step(
    tile, inputs, scales, zeros, totals, UNITS: gl.constexpr, UNIT: gl.constexpr, BITS: gl.constexpr, FORM: gl.constexpr,
    TABLE: gl.constexpr, SIDES: gl.constexpr, WEIGHTS: gl.constexpr, INPUTS: gl.constexpr,
):  # fmt: skip
    """The totals plus the contribution of a stage's units, for every chunk of rows and both halves of a gated matrix."""
    PART: gl.constexpr = UNIT * BITS // 8
    BN: gl.constexpr = tile.shape[0] // SIDES
    CHUNK: gl.constexpr = totals[0].shape[1]
    SUMS: gl.constexpr = totals[0].type.layout
    for unit in gl.static_range(UNITS):
        packed, scale, middle = (), (), ()
        for side in gl.static_range(SIDES):
            packed = packed + (tile.slice(side * BN, BN, dim=0).slice(unit * PART, PART, dim=1).load(WEIGHTS),)
            if FORM & GROUPED:
                one = scales.slice(unit, 1, dim=0).slice(side * BN, BN, dim=1)
                scale = scale + (one.permute((1, 0)).load(SUMS).to(gl.float32),)
            else:
                scale = scale + (1.0,)
            if FORM & ZEROS:
                one = zeros.slice(unit, 1, dim=0).slice(side * BN, BN, dim=1)
                middle = middle + (one.permute((1, 0)).load(WEIGHTS) + 136.0,)
            else:
                middle = middle + (0.0,)
        sums = ()
        for chunk in gl.static_range(len(totals) // SIDES):
            rows = inputs.slice(chunk * CHUNK, CHUNK, dim=0)
            pieces = ()
            for half in gl.static_range(8 // BITS):
                pieces = pieces + (rows.slice(unit * UNIT + half * PART, PART, dim=1).permute((1, 0)).load(INPUTS),)
            for side in gl.static_range(SIDES):
                total = totals[chunk * SIDES + side]
                sums = sums + (_multiplied(packed[side], pieces, scale[side], middle[side], total, BITS, FORM, TABLE),)
        totals = sums
    return totals


@gluon.jit
def _store(totals, scales, out, first_row, num_rows, num_outputs, part, FORM: gl.constexpr, SIDES: gl.constexpr):
    """Scale and store the totals; pairs of them are gated."""
    BN: gl.constexpr = totals[0].shape[0]
    CHUNK: gl.constexpr = totals[0].shape[1]
    SUMS: gl.constexpr = totals[0].type.layout
    outputs = gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(1, SUMS))
    for chunk in gl.static_range(len(totals) // SIDES):
        total = totals[chunk * SIDES]
        if not FORM & GROUPED:
            total = total * gl.load(scales + outputs).to(gl.float32)[:, None]
        if SIDES == 2:
            up = totals[chunk * SIDES + 1]
            if not FORM & GROUPED:
                up = up * gl.load(scales + num_outputs + outputs).to(gl.float32)[:, None]
            total = total / (1.0 + gl.exp(-total)) * up
        rows = first_row + chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, SUMS))
        out_at = out + (part * num_rows + rows)[None, :].to(gl.int64) * num_outputs + outputs[:, None]
        gl.store(out_at, total.to(out.dtype.element_ty), mask=(rows < num_rows)[None, :])


@gluon.jit(do_not_specialize=["num_rows"])
def rounded_product(
    x, weight, scales, zeros, out, num_rows, num_outputs, depth, part_len,
    SIDES: gl.constexpr, BITS: gl.constexpr, FORM: gl.constexpr, TABLE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    UNIT: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """BN outputs, 16 times as many as warps or a multiple, of BM rows over ``part_len`` units of the sum, ``UNITS`` to a stage.
    A gated matrix has two ``SIDES``. ``FORM`` is a sum of what a matrix has. The scale of a whole output multiplies its sum."""
    PART: gl.constexpr = UNIT * BITS // 8
    CHUNK: gl.constexpr = BM if BM < _CHUNK else _CHUNK
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2 * BITS)
    INPUTS: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2 * BITS)
    LANES: gl.constexpr = UNITS * PART // 16  # that copy a row, 16 bytes each
    COPIED: gl.constexpr = gl.BlockedLayout([1, 16], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    COPIED_X: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    SCALES: gl.constexpr = 16 // (scales.dtype.element_ty.primitive_bitwidth // 8)  # that a lane copies
    COPIED_SCALES: gl.constexpr = gl.BlockedLayout([1, SCALES], [4, 8], [WARPS, 1], [1, 0])
    COPIED_ZEROS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    RING: gl.constexpr = gl.SwizzledSharedLayout(PART // 2, 1 if UNITS * PART >= 128 else 2, 2, [1, 0])
    RING_X: gl.constexpr = (
        gl.SwizzledSharedLayout(8, 1, 8, [1, 0]) if BITS == 8 else gl.SwizzledSharedLayout(PART // 2, 1, 2, [1, 0])
    )
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    part = gl.program_id(2)
    width = num_outputs * SIDES
    first, stop = part * part_len, gl.minimum((part + 1) * part_len, depth // UNIT)
    outputs = _outputs(num_outputs, SIDES, BN, gl.SliceLayout(1, COPIED))
    at = weight + outputs[:, None].to(gl.int64) * (depth // UNIT * PART)
    at = at + gl.arange(0, UNITS * PART, gl.SliceLayout(0, COPIED))[None, :]
    scales_at = _of_units(scales, num_outputs, UNITS, SIDES, BN, COPIED_SCALES)
    zeros_at = _of_units(zeros, num_outputs, UNITS, SIDES, BN, COPIED_ZEROS)
    ring = gl.allocate_shared_memory(weight.dtype.element_ty, [STAGES, SIDES * BN, UNITS * PART], RING)
    x_ring = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, BM, UNITS * UNIT], RING_X)
    s_ring = gl.allocate_shared_memory(scales.dtype.element_ty, [STAGES, UNITS, SIDES * BN if FORM & GROUPED else 1], FLAT)
    z_ring = gl.allocate_shared_memory(zeros.dtype.element_ty, [STAGES, UNITS, SIDES * BN if FORM & ZEROS else 1], FLAT)
    for stage in gl.static_range(STAGES - 1):
        _fetch(ring, at, outputs >= 0, first + stage * UNITS, stop, stage, PART)
        _fetch_more(s_ring, scales_at, z_ring, zeros_at, first + stage * UNITS, stop, stage, width, FORM)
        async_copy.commit_group()
    begin(EARLY)
    first_row = gl.program_id(1) * BM
    rows = first_row + gl.arange(0, BM, gl.SliceLayout(1, COPIED_X))
    x_at = x + rows[:, None].to(gl.int64) * depth + gl.arange(0, UNITS * UNIT, gl.SliceLayout(0, COPIED_X))[None, :]
    for stage in gl.static_range(STAGES - 1):
        _fetch(x_ring, x_at, rows < num_rows, first + stage * UNITS, stop, stage, UNIT)
        async_copy.commit_group()
    totals = _no_sums(BM // CHUNK * SIDES, BN, CHUNK, SUMS)
    for step in range(gl.cdiv(stop - first, UNITS)):
        async_copy.wait_group(STAGES - 2)
        now, later = step % STAGES, (step + STAGES - 1) % STAGES
        tile, inputs, scale, middle = ring.index(now), x_ring.index(now), s_ring.index(now), z_ring.index(now)
        totals = _step(tile, inputs, scale, middle, totals, UNITS, UNIT, BITS, FORM, TABLE, SIDES, WEIGHTS, INPUTS)
        unit = first + (step + STAGES - 1) * UNITS
        _fetch(ring, at, outputs >= 0, unit, stop, later, PART)
        _fetch(x_ring, x_at, rows < num_rows, unit, stop, later, UNIT)
        _fetch_more(s_ring, scales_at, z_ring, zeros_at, unit, stop, later, width, FORM)
        async_copy.commit_group()
    end(EARLY)  # not earlier: programs of the next kernel would crowd where there is room first
    _store(totals, scales, out, first_row, num_rows, num_outputs, part, FORM, SIDES)
