"""How a product is cut into programs. ``tiles.py`` says which tile measured best."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """How a product is cut: BN outputs and BM rows per program, BK of the sum per step."""

    bn: int
    bk: int
    num_warps: int = 4
    num_stages: int = 4
    bm: int = 16
    num_parts: int = 1
    """Parts of the sum, computed side by side."""
    copied: bool = False
    """Whether the copy engine of Hopper and later fetches the operands, which leaves the threads to multiply."""
    ringed: bool = False
    """Whether few-bit weights go through a ring of shared memory (``quantised_matmul.py``): BN is 16 per warp, BK whole
    groups."""
    is_wide: bool = False
    """Whether one warp fetches and groups of others multiply, for more than 64 rows (``wide.py``): BN is 64 or 128."""
