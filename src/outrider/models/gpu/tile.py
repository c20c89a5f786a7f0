"""How a product is cut into programs. ``tiles.py`` says which tile measured best."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """How a product is cut. BN outputs and BM rows per program, BK of the sum per step."""

    bn: int
    bk: int
    num_warps: int = 4
    num_stages: int = 4
    bm: int = 16
    num_parts: int = 1
    """Parts of the sum, worked out side by side."""
    copied: bool = False
    """Tiles of the operands are fetched by the copy engine of Hopper and later, which leaves the threads to multiply."""
    ringed: bool = False
    """Few-bit weights go through a ring of shared memory (``quantised_matmul.py``): BN of 16 per warp, BK of whole groups."""
    is_wide: bool = False
    """More than 64 rows, fetched by one warp and multiplied by groups of others (``wide.py``): BN of 64 or 128."""
