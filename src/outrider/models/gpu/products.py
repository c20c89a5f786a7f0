"""A product of any kind of matrix with any number of rows: our kernels for few rows, cuBLAS for many.

If a row's numbers must not depend on how many share the pass, our kernels take all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.few_bits import FewBits
from outrider.models.gpu.finish import SILU, Finish
from outrider.models.gpu.float8_matmul import multiply_float8
from outrider.models.gpu.gates import gated_rows
from outrider.models.gpu.grouped import packed_in_sixteen
from outrider.models.gpu.limits import can_multiply_wide, can_ring
from outrider.models.gpu.planes_matmul import multiply_planes, written_out
from outrider.models.gpu.planes_sums import multiply_codes
from outrider.models.gpu.small_batch_matmul import product
from outrider.models.gpu.tiles import MOST_ROWS, Kind, num_parts, tile_for
from outrider.models.gpu.wide_tiles import wide_tile
from outrider.models.layers import activation_of
from outrider.models.packed import Matrix, Packed, Stacked
from outrider.models.planes import Planes

_MOST_WIDE = 192
"""Most rows for which our own kernel for many rows measured faster than cuBLAS."""


def multiply(
    x: Tensor, weight: Matrix, kind: Kind, *, exact: bool = False, finish: Finish | None = None, gated: bool | None = None
) -> Tensor:
    """[M, out] from [M, K] and [out, K]. For a narrow matrix, [parts, M, out] that must still be added up. ``exact``: a row's
    numbers must not depend on the number of rows, so our kernels take all of them. ``gated`` False takes the kind's tile for a
    matrix without a gate. ``finish`` is its bias and activation."""
    gated = kind is Kind.GATED if gated is None else gated
    own = finish or (SILU if gated else Finish("none"))
    is_plain = own.bias is None and own.activation == ("silu" if gated else "none")
    if isinstance(weight, Packed) and weight.rounds_inputs:
        head = torch.float32 if kind is Kind.HEAD else x.dtype
        return multiply_float8(x, weight, kind, gated=gated, finish=own, out_dtype=head)
    if isinstance(weight, Stacked) or (isinstance(weight, Packed) and not is_plain):
        pieces = weight.pieces if isinstance(weight, Stacked) else (weight,)
        return _multiply_pieces(x, pieces, kind, exact=exact, finish=own, gated=gated)
    if isinstance(weight, Packed) and weight.order is not None:
        x = x.index_select(-1, weight.order)
    out_dtype = torch.float32 if kind is Kind.HEAD else x.dtype
    wide = len(x) > MOST_ROWS and (exact or len(x) <= _MOST_WIDE) and _can_go_wide(x, weight, finish)
    if len(x) <= MOST_ROWS or exact or wide:
        if isinstance(weight, Planes):
            multiply_few = multiply_codes if weight.bits < 8 and kind is not Kind.WIDE else multiply_planes
            return multiply_few(x, weight, kind, gated=gated, out_dtype=out_dtype, finish=own)
        assert isinstance(weight, Tensor | Packed)
        bits = weight.bits if isinstance(weight, Packed) else 16
        num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
        ringed = isinstance(weight, Packed) and _has_ring(weight) and can_ring(num_outputs, x.shape[1], x.dtype)
        if wide:
            tile = wide_tile(len(x), num_outputs, num_parts(kind), gated=gated)
        else:
            tile = tile_for(kind, len(x), num_outputs, bits=bits, ringed=ringed)
        return product(x, weight, tile=tile, gated=gated, out_dtype=out_dtype, finish=finish)
    y = F.linear(x, weight if isinstance(weight, Tensor) else sixteen_bits(weight, x.dtype), own.bias)
    if gated:
        return gated_rows(y, own.activation)
    return y.to(out_dtype) if own.activation == "none" else activation_of(own.activation)(y)


def _multiply_pieces(x: Tensor, pieces: Sequence[FewBits], kind: Kind, *, exact: bool, finish: Finish, gated: bool) -> Tensor:
    """Products of several matrices, side by side in the result, then bias, gate and activation."""
    y = torch.cat([multiply(x, piece, kind, exact=exact, gated=False) for piece in pieces], -1)
    y = y if finish.bias is None else y + finish.bias
    if gated:
        return gated_rows(y, finish.activation)
    return y if finish.activation == "none" else activation_of(finish.activation)(y)


def sixteen_bits(weight: FewBits, dtype: torch.dtype) -> Tensor:
    """[out, in] the numbers of the matrix in its own order of columns, each rounded once to ``dtype``, because cuBLAS needs 16
    bits."""
    if isinstance(weight, Planes):
        return written_out(weight, dtype)
    assert isinstance(weight, Packed)
    return packed_in_sixteen(weight, dtype)


def _can_go_wide(x: Tensor, weight: Tensor | FewBits, finish: Finish | None) -> bool:
    """Whether ``wide.py`` supports the product."""
    known = finish is None or finish.activation != "clamped"
    return known and isinstance(weight, Tensor) and can_multiply_wide(x, weight)


def _has_ring(weight: Packed) -> bool:
    """Whether the fastest products support a matrix of this form."""
    return (weight.is_usual and weight.scales.element_size() == 2) or weight.has_units
