"""Products of a packed matrix with any number of rows: those of plain PyTorch, and a row's bits are its own."""

from __future__ import annotations

from torch import Tensor

from outrider.models.packed import Packed

TILES = [(1, 8, 64, 4), (5, 8, 32, 2), (9, 16, 64, 4), (20, 32, 64, 4), (64, 64, 128, 8), (130, 64, 64, 4)]
"""Rows, and the tile: rows, outputs and warps of a program."""


def assert_rows_alike(x: Tensor, packed: Packed, expected: Tensor, *, num_parts: int, gated: bool) -> None:
    """Products of the first rows of ``x`` [130, depth], by several tiles. Groups that are not there add nothing."""
    from outrider.models.gpu.small_batch_matmul import Tile, product

    first = None
    for num_rows, bm, bn, num_warps in TILES:
        tile = Tile(bn, 256 if bm < 64 else 128, num_warps, 3, bm, num_parts, ringed=True)
        y = product(x[:num_rows], packed, tile=tile, gated=gated)
        first = y[..., :1, :].clone() if first is None else first
        assert (y[..., :1, :] == first).all(), num_rows
        y = (y.sum(0) if num_parts > 1 else y).float()
        assert float((y - expected[:num_rows]).norm() / expected[:num_rows].norm()) < 5e-3, num_rows
