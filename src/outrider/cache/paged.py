"""Keys and values in pages of equal size: rows that begin alike share memory, and nobody holds more than a page too much.

A ``PagePool`` is one block of pages with a count of users each. A ``PagedCache`` holds a list of pages per row; slot s of a row
is place s mod T of page s div T. Forking, joining and lending a beginning (``PageRun``) copy lists and raise counts; a page
with several users is copied before it is written (*copy on write*), so what others see never changes. Pages as memory of
attention: Kwon et al. 2023, "PagedAttention" (arXiv 2309.06180); the GPU's kernels read them through the table.

    users(page) = rows + runs that hold it;     free  iff  users = 0;     written only while users = 1
    bytes(page) = sides * layers * key heads * T * head size * bytes per number

The contract, for whoever shares beginnings: ``run = cache.run(row, length)`` keeps the first ``length`` tokens alive whatever
the row does; ``PagedCache.of_runs(pool, [run, ...])`` is a cache whose rows begin with them, at no cost but the last page
(when a row first writes into one that is not full); a run goes back when nobody refers to it. The pool grows by half, up to
``max_pages``, and gives its memory back when nobody has a page. Graphs that hold its address look at ``version``, or ask for
enough at once (``hold``): such a pool keeps its memory, and asks for beginnings back before it grows. Who reads or writes pages
holds ``lock``, so that several threads may use one model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from threading import RLock
from typing import final

import torch
from torch import Tensor

from outrider.cache.slots import LayeredCache
from outrider.core.errors import RequestError
from outrider.core.interfaces import Cache

PAGE_LEN = 64
"""Tokens of a page, unless another number is asked for."""
_FIRST = 16
"""Pages to begin with."""


@final
class PagePool:
    """[L, sides, P, Hkv, T, D] keys and values, and who uses which page."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        page_len: int = PAGE_LEN,
        max_pages: int | None = None,
        sides: int = 2,
    ) -> None:
        """``shape`` is (layers, key-value heads, head size). One side: keys are values too."""
        num_layers, num_heads, head_dim = shape
        self.page_len, self.max_pages = page_len, max_pages
        self.version = 0
        """Changes whenever the block has moved."""
        self.block = torch.zeros(num_layers, sides, 0, num_heads, page_len, head_dim, dtype=dtype, device=device)
        self.reclaim: Callable[[int], object] = lambda _: None
        """Asked to give back pages that are kept without need, until so many are free."""
        self.lock = RLock()
        self._is_held = False
        self._uses: list[int] = []
        self._free: list[int] = []

    @property
    def num_pages(self) -> int:
        return self.block.shape[2]

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def has_room(self, num_pages: int) -> bool:
        """Whether so many pages are there that nobody needs."""
        if num_pages > len(self._free) and (self._is_held or self._limit_is_near(num_pages)):
            self.reclaim(num_pages)
        return num_pages <= len(self._free)

    @property
    def num_available(self) -> int | None:
        """Pages that could still be taken; None where only memory is the limit."""
        return None if self.max_pages is None else self.max_pages - self.num_used

    @property
    def page_bytes(self) -> int:
        num_layers, sides, _, num_heads, page_len, head_dim = self.block.shape
        return num_layers * sides * num_heads * page_len * head_dim * self.block.element_size()

    def memory(self, layer: int) -> tuple[Tensor, Tensor]:
        """[P, Hkv, T, D] keys and values of a layer."""
        return self.block[layer, 0], self.block[layer, -1]

    def uses(self, page: int) -> int:
        """Rows and runs that hold a page."""
        return self._uses[page]

    def pages_for(self, num_slots: int) -> int:
        return -(-num_slots // self.page_len)

    def hold(self, num_pages: int) -> None:
        """Have at least so many pages from now on."""
        with self.lock:
            self._is_held = True
            if num_pages > self.num_pages:
                self._resize(num_pages)

    def take(self, count: int) -> list[int]:
        """Pages nobody uses, now used once."""
        with self.lock:
            if count and not self.has_room(count):
                self._grow(count - len(self._free))
            taken = [self._free.pop() for _ in range(count)]
            self.retain(taken)
            return taken

    def retain(self, pages: Iterable[int]) -> None:
        with self.lock:
            for page in pages:
                self._uses[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        with self.lock:
            for page in pages:
                self._uses[page] -= 1
                assert self._uses[page] >= 0, "a page was given back twice"
                if self._uses[page] == 0:
                    self._free.append(page)
            if len(self._free) == self.num_pages > _FIRST and not self._is_held:
                self._forget_all()

    def copied(self, page: int) -> int:
        """A page of one's own instead of a shared one: the same numbers, and one user less there."""
        with self.lock:
            (own,) = self.take(1)
            self.block[:, :, own] = self.block[:, :, page]
            self.release([page])
            return own

    def _grow(self, missing: int) -> None:
        old, needed = self.num_pages, self.num_pages + missing
        if self.max_pages is not None and needed > self.max_pages:
            raise RequestError(
                f"the key-value cache is full: {missing} more pages of {self.page_len} tokens are needed and "
                f"{self.max_pages - old} of {self.max_pages} are left; run fewer requests at once or give the cache more memory"
            )
        size = max(needed, old + old // 2, _FIRST)
        self._resize(size if self.max_pages is None else min(size, self.max_pages))

    def _resize(self, size: int) -> None:
        old = self.num_pages
        grown = self.block.new_zeros(*self.block.shape[:2], size, *self.block.shape[3:])
        grown[:, :, :old] = self.block
        self.block = grown
        self._uses += [0] * (size - old)
        self._free[:0] = range(size - 1, old - 1, -1)  # the lowest new one is taken first, after those given back
        self.version += 1

    def _limit_is_near(self, num_pages: int) -> bool:
        return self.max_pages is not None and self.num_used + num_pages > self.max_pages

    def _forget_all(self) -> None:
        """Nobody has a page: memory of a long text goes back."""
        self.block = self.block[:, :, :0].clone()
        self._uses, self._free = [], []
        self.version += 1


@final
class PageRun:
    """The first ``length`` tokens of some row, kept alive."""

    def __init__(self, pool: PagePool, pages: Sequence[int], length: int) -> None:
        self.pool, self.length = pool, length
        self.pages = tuple(pages[: pool.pages_for(length)])
        pool.retain(self.pages)
        weakref.finalize(self, pool.release, self.pages)

    def first(self, length: int) -> PageRun:
        """A beginning of it."""
        assert length <= self.length, "a run cannot be lengthened"
        return PageRun(self.pool, self.pages, length)


@final
class PagedCache(LayeredCache):
    """Rows of pages. Lengths and tables are kept on the host; ``table`` is what kernels read."""

    def __init__(self, pool: PagePool, pages: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Takes over one use of every page named."""
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
        """The row's first ``length`` committed tokens, all of them by default, for others to begin with."""
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
        """Room for so many nodes after the committed tokens of each row, for passes that write no padding."""
        pool = self.pool
        for row, length, size in zip(self.pages, self.lengths, sizes, strict=True):
            for place in range(length // pool.page_len, len(row)):  # pages that the tree or its commit may write
                if pool.uses(row[place]) > 1:
                    row[place] = pool.copied(row[place])
            missing = pool.pages_for(length + size) - len(row)
            if missing > 0:
                row.extend(pool.take(missing))

    def extend(self, num_slots: int) -> None:
        """Give every row pages for so many tokens. The pages it has stay where they are."""
        for row in self.pages:
            row.extend(self.pool.take(max(0, self.pool.pages_for(num_slots) - len(row))))

    def write(self, layer: int, keys: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._index is None:
            self._index = self._slots(), self.table().long()
        (pages, places), table = self._index[0].unbind(0), self._index[1]
        end = max(self.lengths) + self._nodes[1]
        seen: list[Tensor] = []
        for memory, new in zip(self.pool.memory(layer), (keys, values), strict=True):
            if new is not None:
                memory[pages, :, places] = new.transpose(1, 2)
            seen.append(memory[table].transpose(1, 2).flatten(2, 3)[:, :, :end])
        return seen[0], seen[1]

    def entries(self, layer: int) -> tuple[Tensor, Tensor]:
        table, end = self.table().long(), max(self.lengths, default=0)
        keys, values = (memory[table].transpose(1, 2).flatten(2, 3)[:, :, :end] for memory in self.pool.memory(layer))
        return keys, values

    def truncate(self, lengths: Sequence[int]) -> None:
        super().truncate(lengths)
        for row, length in zip(self.pages, lengths, strict=True):
            keep = self.pool.pages_for(length)
            self.pool.release(row[keep:])
            del row[keep:]

    def fork(self, rows: Sequence[int]) -> PagedCache:
        return PagedCache.of_runs(self.pool, [self.run(row) for row in rows])

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
            block = self.pool.block
            for to, source in ((begin + place, begin + node) for place, node in enumerate(path) if node != place):
                block[:, :, pages[to // size], :, to % size] = block[:, :, pages[source // size], :, source % size]


def _release_rows(pool: PagePool, pages: list[list[int]]) -> None:
    for row in pages:
        pool.release(row)
