"""The tile for a product of more than 64 rows (``wide.py``): the one whose programs, distributed evenly, should end first.

The model of the time: a program's step takes as long as its products (counted as at least 128 rows) and a little more. All
programs of one product take the same number of steps. Programs are distributed among the processors. The busiest one ends last,
and a part of its last program overlaps with the next kernel. Fitted to 60 products of an 8B decoder on an H200
(``benchmarks/gpu_probe.py``). The chosen tile takes 1.004 times as long as the best one on average, and 1.06 times at most.
"""

from __future__ import annotations

from functools import lru_cache

from outrider.models.gpu.limits import stages_that_fit
from outrider.models.gpu.tile import Tile

ROWS = (64, 96, 128, 160, 192, 256, 288, 320, 384)
"""Rows a program may take: a power of two, alone or with a smaller one."""
_PROCESSORS = 132
_MOST_SUMS = 384
"""Most sums of a program, by its number of outputs. A gated matrix has two sums per output. More do not fit into registers."""
_LEAST_ROWS = 128
_OVERHEAD = 4000
"""Overhead of a step, in products."""
_OVERLAP = 0.25


_STEP = 32
"""Numbers of rows are rounded up to a multiple of this, which divides all of ``ROWS``, before the tile is chosen."""


@lru_cache(maxsize=64)
def telling_rows(num_outputs: int, num_parts: int, *, gated: bool, most: int) -> list[int]:
    """Numbers of rows that together use every tile that any number up to ``most`` uses."""
    found: dict[Tile, int] = {}
    for num_rows in range(64 + _STEP, most + 1, _STEP):
        found.setdefault(wide_tile(num_rows, num_outputs, num_parts, gated=gated), num_rows)
    return list(found.values())


@lru_cache(maxsize=4096)
def wide_tile(num_rows: int, num_outputs: int, num_parts: int, *, gated: bool) -> Tile:
    """The tile for a product."""
    sides = 2 if gated else 1
    cuts = [(bn, bm) for bn in (64, 128) for bm in ROWS if bm * sides <= _MOST_SUMS]

    def cost(cut: tuple[int, int]) -> tuple[float, int]:
        bn, bm = cut
        programs = -(-num_rows // bm) * -(-num_outputs // bn) * num_parts
        step = bn * sides * max(bm, _LEAST_ROWS) + _OVERHEAD
        turns = (1 - _OVERLAP) * -(-programs // _PROCESSORS) + _OVERLAP * programs / _PROCESSORS
        return turns * step, bm

    bn, bm = min(cuts, key=cost)
    stages = stages_that_fit(6, (bn * sides + bm) * 128)
    return Tile(bn, 64, 4, stages, bm, num_parts, is_wide=True)
