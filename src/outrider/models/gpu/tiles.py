"""Which kernel multiplies which matrix at how many rows. Measured on an H200 (benchmarks/gpu_probe.py), microseconds of an 8B decoder:

    rows           1                         8                         64
    qkv            vector 16x512     15.5    64x128        16.1        cuBLAS        16.6        floor  11.7
    out            vector 16x512     11.9    32x256        12.6        cuBLAS        12.5               7.8
    gate and up    128x64, norm in   60.6    64x128        56.8        128x64        60.6              54.6
    down           vector 16x512     30.9    32x256        32.9        cuBLAS        36.1              27.3
    head           64x128, norm in  243.9    64x128       240.3        128x64       260.3             244.3

In ``invariant`` mode one tile serves every number of rows, so that a row's result does not depend on the others.
"""

from __future__ import annotations

from enum import Enum

from outrider.models.gpu.skinny import Tile

MOST_ROWS = 64
"""More rows than this are multiplied by cuBLAS."""
_PROGRAMS = 120
"""Programs a product should have, about one for every processor of the device."""


class Kind(Enum):
    """A matrix by its place in the decoder."""

    WIDE = "qkv"
    NARROW = "out and down: followed by a sum and a norm"
    GATED = "gate and up"
    HEAD = "head"


def vector_tile(num_outputs: int) -> Tile:
    """For a single row."""
    return Tile(16, 512, num_warps=8, num_stages=1) if num_outputs >= 16 * _PROGRAMS else Tile(8, 512, num_stages=1)


def single_tile(kind: Kind, num_outputs: int) -> Tile | None:
    """For a single row with the norm inside, where the tensor cores win; None where ``vector_tile`` does."""
    if kind is Kind.GATED and num_outputs >= 128 * _PROGRAMS // 2:
        return Tile(128, 64)
    return Tile(64, 128) if kind is Kind.HEAD else None


def tile_for(kind: Kind, num_rows: int, num_outputs: int) -> Tile | None:
    """For several rows, without a norm; None where cuBLAS wins."""
    if num_rows > MOST_ROWS:
        return None
    bm = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    if num_outputs < 16 * _PROGRAMS:
        return Tile(16, 128, bm=bm)
    if kind is Kind.HEAD or kind is Kind.GATED:
        if num_outputs < 64 * _PROGRAMS:
            return Tile(32, 128, bm=bm)
        return Tile(128, 64, bm=bm) if bm == 64 else Tile(64, 128, num_stages=3, bm=bm)
    if bm == 64:
        return None
    return Tile(64, 128, bm=bm) if num_outputs >= 48 * _PROGRAMS else Tile(32, 256, bm=bm)


def invariant_tile(kind: Kind) -> Tile:
    """For any number of rows."""
    return Tile(64, 128, num_stages=3 if kind is Kind.HEAD else 4, bm=64, num_parts=4 if kind is Kind.NARROW else 1)
