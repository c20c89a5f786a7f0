"""Products with matrices of 4 bits (``packed.py``). A tile of bytes holds two tiles of inputs, and every group has a scale.

    y = sum over groups g of  scale_g * (low_g x_g[:64] + high_g x_g[64:])

On Hopper and later, numbers are made from their bits (``code_bits.py``). An output is one sum in the order of the groups. So,
as in ``small_batch_matmul.py``, a row's numbers depend neither on other rows nor on their number. A zero point is subtracted
before the product. Codes that index a table (nf4) are looked up, and the values rounded to the type of the inputs.
"""

# ruff: noqa: N803, N806 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from outrider.models.gpu.code_bits import NIBBLES
from outrider.models.gpu.launch import begin, end


@triton.jit
def _tile(
    bytes_at, scales_at, zeros_at, levels, low_x, high_x, is_output,
    ZEROS: tl.constexpr, LEVELS: tl.constexpr, TABLE: tl.constexpr, BITWISE: tl.constexpr,
):  # fmt: skip
    """The contribution of one group to a tile of outputs. ``TABLE``: the code that looks numbers up, where there is one."""
    packed = tl.load(bytes_at, mask=is_output[:, None], other=0)
    if BITWISE:
        CODE: tl.constexpr = TABLE if LEVELS else NIBBLES
        low, high = tl.inline_asm_elementwise(
            CODE, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif LEVELS:
        low = tl.load(levels + (packed & 15)).to(low_x.dtype)
        high = tl.load(levels + (packed >> 4)).to(low_x.dtype)
    else:
        low = ((packed & 15).to(tl.int8) - 8).to(low_x.dtype)
        high = ((packed >> 4).to(tl.int8) - 8).to(low_x.dtype)
    if ZEROS:
        zero = tl.load(zeros_at, mask=is_output, other=0.0).to(low_x.dtype)[:, None]
        low, high = low - zero, high - zero
    part = tl.dot(low, low_x, input_precision="ieee")
    part = tl.dot(high, high_x, part, input_precision="ieee")
    return part * tl.load(scales_at, mask=is_output, other=0.0).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def nibble_product(
    x, weight, scales, zeros, levels, out, num_rows, num_outputs, depth, part_len,
    GATED: tl.constexpr, ZEROS: tl.constexpr, LEVELS: tl.constexpr, TABLE: tl.constexpr, BITWISE: tl.constexpr,
    HALF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The kernel of a product. ``HALF`` is half a group. ``num_outputs`` counts results; gated matrices have twice as many
    rows."""
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    ks = tl.arange(0, HALF)
    is_row = rows < num_rows
    is_output = outputs < num_outputs
    width = num_outputs * 2 if GATED else num_outputs
    bytes_at = weight + outputs[:, None].to(tl.int64) * (depth // 2) + ks[None, :]
    ups_at = bytes_at + num_outputs.to(tl.int64) * (depth // 2)
    x_at = x + rows[None, :] * depth + ks[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    total_up = tl.zeros((BN, BM), tl.float32)
    begin(EARLY)
    for k in range(part * part_len, tl.minimum((part + 1) * part_len, depth), 2 * HALF):
        low_x = tl.load(x_at + k, mask=is_row[None, :], other=0.0)
        high_x = tl.load(x_at + k + HALF, mask=is_row[None, :], other=0.0)
        at = (k // (2 * HALF)) * width + outputs
        places = (bytes_at + k // 2, scales + at, zeros + at)
        total += _tile(places[0], places[1], places[2], levels, low_x, high_x, is_output, ZEROS, LEVELS, TABLE, BITWISE)
        if GATED:
            at += num_outputs
            places = (ups_at + k // 2, scales + at, zeros + at)
            total_up += _tile(places[0], places[1], places[2], levels, low_x, high_x, is_output, ZEROS, LEVELS, TABLE, BITWISE)
    end(EARLY)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * total_up
    out_at = out + (part * num_rows + rows)[None, :].to(tl.int64) * num_outputs + outputs[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])
