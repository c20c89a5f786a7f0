"""The tile for each matrix and number of rows. Microseconds of an 8B decoder on an H200, with 16 bits inside a pass:

    rows           1               64              cuBLAS, 8 and 64    floor
    qkv            14.0            16.1            16.6    16.6        11.7
    out             9.5            11.5            13.7    12.5         7.8
    gate and up    55.8            60.3            57.1    62.1        54.6        (ours with the activation)
    down           28.1            31.5            32.4    36.1        27.3
    head          235.5           254.5           244.0   271.9       244.3

    ``quantised_matmul.py`` (qkv, out, gate and up, down, head; floors of 8 bits 5.9, 3.9, 27.3, 13.7, 122, of 4 half of it)
    rows            1 (8 at the head)              32                             64
    8 bits          8.5  7.3  31.7  17.3  130      11.8  9.3  43.7  21.4  152     16.6  12.8  68.9  32.7  263
    4 bits          7.1  5.2  20.1  12.8   83      10.3  8.1  37.4  21.2  146     18.4  12.0  66.0  32.5  275

Without it, 8 rows take 14.2, 8.8, 51.6, 22.6, 166 and 21.7, 8.2, 38.8, 21.8, 135. PyTorch's own product for 4 bits takes 22.2,
13.7, 78.7, 41.5 and 334 at 8 rows, its one for 8 bits thirty times ours.
"""

from __future__ import annotations

from enum import Enum

from outrider.models.gpu.tile import Tile
from outrider.models.gpu.tuned import choices, tile_key

MOST_ROWS = 64
"""Most rows for our kernels; more are multiplied by cuBLAS."""
_PROGRAMS = 120
"""Number of programs that a product should have: about one for every processor of the device."""


class Kind(Enum):
    """The place of a matrix in the decoder."""

    WIDE = "qkv"
    NARROW = "out and down: followed by a sum and a norm"
    GATED = "gate and up"
    HEAD = "head"


_Cut = tuple[int, int, int, int]


def _rings(wide: _Cut, narrow: _Cut, gated: _Cut, head: _Cut) -> dict[Kind, _Cut]:
    return {Kind.WIDE: wide, Kind.NARROW: narrow, Kind.GATED: gated, Kind.HEAD: head}


_RINGS = {
    (8, 8): _rings((64, 256, 4, 3), (32, 128, 2, 4), (64, 256, 4, 3), (64, 256, 4, 3)),
    (8, 16): _rings(*[(64, 128, 4, 4)] * 4),
    (8, 32): _rings((64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 8, 4), (128, 128, 4, 3)),
    (8, 64): _rings((64, 128, 4, 3), (128, 128, 8, 4), (128, 128, 8, 4), (128, 128, 4, 3)),
    (4, 8): _rings(*[(64, 256, 4, 4)] * 4),
    (4, 16): _rings((64, 256, 4, 4), (64, 256, 4, 3), (64, 256, 4, 4), (64, 256, 4, 3)),
    (4, 32): _rings((64, 256, 4, 3), (128, 128, 8, 4), (64, 128, 4, 4), (128, 128, 4, 4)),
    (4, 64): _rings(*[(64, 128, 4, 3)] * 4),
}
"""Outputs, inputs, warps and stages of a tile, by bits and rows."""


def num_parts(kind: Kind, bits: int = 16) -> int:
    """Number of parts of a matrix's sum. Results depend on it, so it depends on nothing but the matrix."""
    if bits < 16:
        return 4 if kind in (Kind.NARROW, Kind.WIDE) else 1
    return 2 if kind in (Kind.NARROW, Kind.WIDE) else 1


def tile_for(kind: Kind, num_rows: int, num_outputs: int, *, bits: int = 16, ringed: bool = False) -> Tile:
    """The tile that measured best. ``ringed``: few bits, where they can go through a ring (``limits.can_ring``)."""
    parts = num_parts(kind, bits)
    tuned = choices().get(tile_key(kind.name, num_rows, num_outputs, bits=bits))
    if tuned is not None and tuned.get("ringed", False) == ringed:
        return Tile(**{**tuned, "num_parts": parts})
    bm = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    if ringed:
        return _ring(kind, 8 if num_rows <= 8 else bm, parts, bits)
    if bits < 16:
        return _tile_of_few_bits(kind, bm, parts, bits)
    if num_outputs * parts < 48 * _PROGRAMS:
        return Tile(16 if num_outputs * parts < 32 * _PROGRAMS else 32, 128, bm=bm, num_parts=parts)
    if kind is Kind.NARROW:
        return Tile(64, 128, num_stages=6, bm=bm, num_parts=parts, copied=bm == 64)
    if kind is Kind.WIDE:
        return (
            Tile(128, 64, num_stages=6, bm=bm, num_parts=parts, copied=True)
            if bm == 64
            else Tile(64, 128, bm=bm, num_parts=parts)
        )
    if kind is Kind.HEAD:
        return Tile(128, 64, bm=bm, copied=True) if bm == 64 else Tile(64, 128, bm=bm, copied=True)
    if bm == 16:
        return Tile(64, 128, num_stages=3, bm=bm)
    return Tile(128, 128, num_stages=3, bm=bm, copied=True) if bm == 32 else Tile(64, 64, num_stages=3, bm=bm, copied=True)


def _ring(kind: Kind, bm: int, parts: int, bits: int) -> Tile:
    bn, bk, num_warps, num_stages = _RINGS[bits, bm][kind]
    return Tile(bn, bk, num_warps, num_stages, bm, parts, ringed=True)


def _tile_of_few_bits(kind: Kind, bm: int, parts: int, bits: int) -> Tile:
    if bits == 8:
        return Tile(64, 128, num_stages=6, bm=bm, num_parts=parts) if bm == 64 else Tile(32, 256, bm=bm, num_parts=parts)
    if bm == 64:
        return Tile(128, 128, num_stages=6, bm=bm, num_parts=parts) if kind is not Kind.GATED else Tile(64, 128, bm=bm)
    if kind in (Kind.NARROW, Kind.GATED):
        return Tile(32, 128, num_warps=2, num_stages=6, bm=bm, num_parts=parts)
    return Tile(64, 128, bm=bm)
