"""Pages of keys and values on a GPU (``cache/paged.py``): the form that kernels read, and the number that a device has room
for.

Captured rounds hold the address of the pool and of the tables of pages. Both are made once, large enough: a pool that must grow
moves, and every round is captured again while requests wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.cache.page_pool import PagePool
from outrider.cache.paged import PagedCache
from outrider.models.attention.tree_tiles import Rows

PAGE_LEN = 64
"""Tokens of a page: one tile of attention's keys, which the copy engine fetches at once."""
_SHARE = 0.5
"""Share of the free memory that the keys of a model may take."""
OF_HEADS = 0.125
"""Share of the free memory that the keys of heads may take."""
_MOST_ROWS, _MOST_TOKENS = 64, 1 << 19
"""A new pool holds at most so many of the longest texts, and at most so many tokens."""


def _begin(batch_size: int) -> int:
    """Offset of the pages after the lengths. Kernels are compiled for addresses that are multiples of 16 bytes."""
    return -(-batch_size // 4) * 4


def empty_rows(batch_size: int, num_columns: int, device: torch.device) -> Tensor:
    """An empty tensor for ``flat_rows``."""
    return torch.zeros(_begin(batch_size) + batch_size * num_columns, dtype=torch.int32, device=device)


def flat_rows(cache: PagedCache, num_columns: int) -> Tensor:
    """int32 on the host: every row's length, then its ``num_columns`` pages, padded with 0."""
    pages, gap = [page for row in cache.pages for page in (*row, *[0] * (num_columns - len(row)))], -len(cache.pages) % 4
    return torch.tensor([*cache.lengths, *[0] * gap, *pages], dtype=torch.int32)


def rows_in(flat: Tensor, batch_size: int, page_len: int) -> Rows:
    """The two parts of ``flat_rows`` as views for the kernels."""
    return Rows(flat[:batch_size], flat[_begin(batch_size) :].view(batch_size, -1), page_len)


def hold_enough(pool: PagePool, *, longest: int, beside: int = 0, share: float = _SHARE) -> PagePool:
    """The pool. If it has no pages yet, they are made: as many as fit, for texts of at most ``longest`` tokens. ``beside`` are
    bytes that others need for every page."""
    device = pool.block.device
    if pool.num_pages == 0 and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        wanted = min(_MOST_ROWS * longest, _MOST_TOKENS)
        pool.hold(min(pool.pages_for(wanted), int(free * share) // (pool.page_bytes + beside)))
    return pool
