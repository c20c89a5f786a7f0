"""Keys and values in pages of equal size. Rows with the same prefix share memory, and a row wastes less than a page.

A ``PagedCache`` holds a list of pages of a pool (``cache/page_pool.py``) per row; slot s of a row is place s mod T of page s
div T. Forking, joining and sharing a prefix (``PageRun``) copy page lists and raise user counts. A page with several users is
copied before it is written (*copy on write*), so what others see never changes. Paged key-value memory is from Kwon et al.
2023, "PagedAttention" (arXiv 2309.06180). GPU kernels and the CPU's native pass read pages through the table.

How to share a prefix: ``run = cache.run(row, length)`` keeps the first ``length`` tokens of a row alive, whatever happens to
the row. ``PagedCache.of_runs(pool, [run, ...])`` is a cache whose rows begin with these runs. It copies at most a run's last
page, when a row first writes into it and it is not full. A run's pages are released when nothing refers to the run any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from outrider.cache.page_pool import PagePool, PageRun
from outrider.cache.slots import LayeredCache
from outrider.core.interfaces import Cache


@final
class PagedCache(LayeredCache):
    """Rows of pages. Lengths and tables are kept on the host; ``table`` is what kernels read."""

    def __init__(self, pool: PagePool, pages: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """The rows become users of the given pages, in place of the caller."""
        self.pool = pool
        self.pages = [list(row) for row in pages]
        self.lengths = list(lengths)
        self._nodes = (0, 0)
        self._index: tuple[Tensor, Tensor] | None = None
        weakref.finalize(self, _release_rows, pool, self.pages)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one row."""
        return self.pool.page_bytes // self.pool.page_len

    @staticmethod
    def empty(pool: PagePool, batch_size: int) -> PagedCache:
        return PagedCache(pool, [[]] * batch_size, [0] * batch_size)

    @staticmethod
    def of_runs(pool: PagePool, runs: Sequence[PageRun]) -> PagedCache:
        """Rows that begin with these tokens."""
        assert all(run.pool is pool for run in runs), "a run belongs to one pool"
        for run in runs:
            pool.retain(run.pages)
        return PagedCache(pool, [run.pages for run in runs], [run.length for run in runs])

    def run(self, row: int, length: int | None = None) -> PageRun:
        """The row's first ``length`` committed tokens (by default all), as a prefix for other rows."""
        length = self.lengths[row] if length is None else length
        assert length <= self.lengths[row], "only committed tokens can be lent"
        return PageRun(self.pool, self.pages[row], length)

    def table(self, num_columns: int | None = None) -> Tensor:
        """[B, P] int32 pages of each row, padded with 0."""
        width = max(1, *map(len, self.pages)) if num_columns is None else num_columns
        rows = [[*row, *[0] * (width - len(row))] for row in self.pages]
        return torch.tensor(rows, dtype=torch.int32).to(self.pool.block.device)

    def reserve(self, num_nodes: int, *, start: int = 0) -> None:
        self.reserve_each([num_nodes] * self.batch_size)
        self._nodes, self._index = (start, num_nodes), None

    def reserve_each(self, sizes: Sequence[int]) -> None:
        """Make room for so many nodes after the committed tokens of each row, for passes that write no padding."""
        pool = self.pool
        for row, length, size in zip(self.pages, self.lengths, sizes, strict=True):
            for place in range(length // pool.page_len, len(row)):  # pages that the tree or its commit may write
                if pool.uses(row[place]) > 1:
                    row[place] = pool.copied(row[place])
            missing = pool.pages_for(length + size) - len(row)
            if missing > 0:
                row.extend(pool.take(missing))

    def extend(self, num_slots: int) -> None:
        """Give every row pages for so many tokens. Its present pages stay."""
        for row in self.pages:
            row.extend(self.pool.take(max(0, self.pool.pages_for(num_slots) - len(row))))

    def write(self, layer: int, keys: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._index is None:
            self._index = self._slots(), self.table().long()
        (pages, places), table = self._index[0].unbind(0), self._index[1]
        for side, new in ((0, keys), (-1, values)):
            if new is not None:
                self.pool.write(layer, side, (pages, places), new)
        return self._read(layer, table, max(self.lengths) + self._nodes[1])

    def entries(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._read(layer, self.table().long(), max(self.lengths, default=0))

    def _read(self, layer: int, table: Tensor, end: int) -> tuple[Tensor, Tensor]:
        keys, values = (self.pool.read(layer, side, table)[:, :, :end] for side in (0, -1))
        return keys, values

    def truncate(self, lengths: Sequence[int]) -> None:
        super().truncate(lengths)
        for row, length in zip(self.pages, lengths, strict=True):
            keep = self.pool.pages_for(length)
            self.pool.release(row[keep:])
            del row[keep:]

    def fork(self, rows: Sequence[int]) -> PagedCache:
        """Copies rows. Nodes that were scored but not committed are copied too, so that copies may commit different paths."""
        for row in rows:
            self.pool.retain(self.pages[row])
        return PagedCache(self.pool, [self.pages[row] for row in rows], [self.lengths[row] for row in rows])

    def join(self, other: Cache) -> PagedCache:
        assert isinstance(other, PagedCache) and other.pool is self.pool, "only caches of one pool can be joined"
        both = (self, other)
        return PagedCache.of_runs(self.pool, [cache.run(row) for cache in both for row in range(cache.batch_size)])

    def _slots(self) -> Tensor:
        """[2, B, N] page and place of the nodes last reserved."""
        size = self.pool.page_len
        rows = zip(
            self.pages, (range(length + self._nodes[0], length + self._nodes[1]) for length in self.lengths), strict=True
        )
        found = [[(row[slot // size], slot % size) for slot in slots] for row, slots in rows]
        return torch.tensor(found, device=self.pool.block.device).permute(2, 0, 1)

    def _gather(self, row: int, path: Sequence[int]) -> None:
        pages, size, begin = self.pages[row], self.pool.page_len, self.lengths[row]
        with self.pool.lock:
            moved = [(begin + place, begin + node) for place, node in enumerate(path) if node != place]
            for place in {to // size for to, _ in moved}:
                if self.pool.uses(pages[place]) > 1:
                    pages[place] = self.pool.copied(pages[place])
            found = [(pages[to // size], to % size, pages[source // size], source % size) for to, source in moved]
            self.pool.move(found)


def _release_rows(pool: PagePool, pages: list[list[int]]) -> None:
    for row in pages:
        pool.release(row)


@contextmanager
def as_one(caches: Sequence[PagedCache]) -> Iterator[PagedCache]:
    """The rows of several caches of a pool in one cache, for a pass over all of them. What the pass appends belongs to the
    single caches afterwards."""
    rows = [(cache, row) for cache in caches for row in range(cache.batch_size)]
    together = PagedCache(
        caches[0].pool, [cache.pages[row] for cache, row in rows], [cache.lengths[row] for cache, row in rows]
    )
    for cache, row in rows:
        cache.pages[row].clear()
    try:
        yield together
    finally:
        for place, (cache, row) in enumerate(rows):
            cache.pages[row].extend(together.pages[place])
            cache.lengths[row] = together.lengths[place]
            together.pages[place].clear()  # their uses went back with them
