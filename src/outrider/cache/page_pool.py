"""A pool of pages of keys and values, with the number of users of each page.

A ``PagePool`` is one block of pages, with a user count for each. It grows by half, up to ``max_pages``, and frees its memory
when no page is used. CUDA graphs hold the block's address. They check ``version`` for a move, or reserve enough pages in
advance (``hold``). A pool with reserved pages keeps its memory, and before it grows it asks for the pages of stored prefixes
back. Whoever reads or writes pages holds ``lock``, so that several threads can use one model.

Numbers may be stored in fewer bits than the model's type (``core/key_storage.py``). Their scales are then a second block, which
grows, moves and is copied with the first.

    users(page) = rows + runs that hold it;     free  iff  users = 0;     written only while users = 1
    bytes(page) = sides * layers * key heads * T * (head size * bytes per number + bytes of a scale)
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from threading import RLock
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import RequestError
from outrider.core.key_storage import OWN, KeyStorage

PAGE_LEN = 64
"""Default number of tokens per page."""
_FIRST = 16
"""Default number of pages at the start. As many are kept when no page is used."""
_ALIGNED = 64
"""Alignment in bytes: a cache line of the processor."""


class LayerPages(NamedTuple):
    """Keys and values of a layer, as kernels read them."""

    keys: Tensor
    """[P, Hkv, T, D]"""
    values: Tensor
    key_scales: Tensor | None = None
    """[P, Hkv, T] float32 scales of the codes; None if numbers are stored as they are."""
    value_scales: Tensor | None = None
    dtype: torch.dtype | None = None
    """The model's type, if codes are stored in another."""


@final
class PagePool:
    """A block of pages [L, sides, P, Hkv, T, D] of keys and values, with the number of users of each page."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        page_len: int = PAGE_LEN,
        max_pages: int | None = None,
        sides: int = 2,
        first_pages: int = _FIRST,
    ) -> None:
        """``shape`` is (layers, key-value heads, head size). With one side, keys serve as values too. ``first_pages`` is the
        initial size."""
        num_layers, num_heads, head_dim = shape
        self.page_len, self.max_pages, self._first_pages = page_len, max_pages, first_pages
        self.version = 0
        """Changes whenever the block has moved."""
        self.dtype, self.storage = dtype, OWN
        self.blocks = [torch.zeros(num_layers, sides, 0, num_heads, page_len, head_dim, dtype=dtype, device=device)]
        """The numbers, and their scales [L, sides, P, Hkv, T, 1] if they have any."""
        self.reclaim: Callable[[int], object] = lambda _: None
        """Called with a number of pages. It frees pages that no request needs until so many are free."""
        self.told: Callable[[str, tuple[Any, ...]], object] = lambda *_: None
        """Called with every operation on the block outside passes (a method's name and its arguments). Another process that
        keeps other heads of the same texts repeats them."""
        self.lock = RLock()
        self._is_held = False
        self._uses: list[int] = []
        self._free: list[int] = []

    def store_as(self, storage: KeyStorage) -> None:
        """Store numbers in another type, before there is any page."""
        assert self.num_pages == 0 and storage.is_rounded, "what is stored keeps its type"
        self.storage = storage
        self.blocks = [self.block.to(storage.codes), self.block[..., :1].float()]

    @property
    def block(self) -> Tensor:
        """The numbers, or their codes."""
        return self.blocks[0]

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
        """Whether so many pages are free, or could be freed."""
        if num_pages > len(self._free) and (self._is_held or self._limit_is_near(num_pages)):
            self.reclaim(num_pages)
        return num_pages <= len(self._free)

    @property
    def page_bytes(self) -> int:
        sizes = ((*block.shape[:2], *block.shape[3:], block.element_size()) for block in self.blocks)
        return sum(math.prod(size) for size in sizes)

    def memory(self, layer: int) -> LayerPages:
        """The pages of a layer."""
        if not self.storage.is_rounded:
            return LayerPages(self.block[layer, 0], self.block[layer, -1])
        codes, scales = self.block[layer], self.blocks[1][layer, ..., 0]
        return LayerPages(codes[0], codes[-1], scales[0], scales[-1], self.dtype)

    def write(self, layer: int, side: int, at: tuple[Tensor, Tensor], numbers: Tensor) -> None:
        """Store keys (side 0) or values [B, Hkv, N, D] of a layer in pages and places [B, N]."""
        pages, places = at
        new = numbers.transpose(1, 2)
        parts = (new,) if not self.storage.is_rounded else self.storage.rounded(new)
        for block, part in zip(self.blocks, parts, strict=True):
            block[layer, side][pages, :, places] = part.view(*part.shape[:3], -1)

    def read(self, layer: int, side: int, table: Tensor) -> Tensor:
        """Keys (side 0) or values (side -1) [B, Hkv, S, D] of a layer in the pages [B, P] of rows, in the model's type."""
        found, *scales = (block[layer, side][table].transpose(1, 2).flatten(2, 3) for block in self.blocks)
        return self.storage.restored(found, scales[0][..., 0], self.dtype) if scales else found

    def uses(self, page: int) -> int:
        """Number of rows and runs that hold a page."""
        return self._uses[page]

    def pages_for(self, num_slots: int) -> int:
        return -(-num_slots // self.page_len)

    def hold(self, num_pages: int) -> None:
        """Reserve at least so many pages from now on."""
        with self.lock:
            self._is_held = True
            if num_pages > self.num_pages:
                self._resize(num_pages)

    def take(self, count: int) -> list[int]:
        """Take free pages. Each then has one user."""
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
        """A new page with the same numbers and a single user. The shared page loses a user."""
        with self.lock:
            (own,) = self.take(1)
            self.copy(own, page)
            self.release([page])
            return own

    def copy(self, to: int, source: int) -> None:
        """Write the numbers of one page to another."""
        self.told("copy", (to, source))
        for block in self.blocks:
            block[:, :, to] = block[:, :, source]

    def move(self, moves: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy tokens one after the other. The arguments are target page and place, then source page and place, of each
        token."""
        if moves:
            self.told("move", (moves,))
        for page, place, old_page, old_place in moves:
            for block in self.blocks:
                block[:, :, page, :, place] = block[:, :, old_page, :, old_place]

    def _grow(self, missing: int) -> None:
        old, needed = self.num_pages, self.num_pages + missing
        if self.max_pages is not None and needed > self.max_pages:
            raise RequestError(
                f"the key-value cache is full: {missing} more pages of {self.page_len} tokens are needed and "
                f"{self.max_pages - old} of {self.max_pages} are left; run fewer requests at once or give the cache more memory"
            )
        size = max(needed, old + old // 2, self._first_pages)
        self._resize(size if self.max_pages is None else min(size, self.max_pages))

    def _resize(self, size: int) -> None:
        self.told("hold", (size,))
        old = self.num_pages
        self.blocks = [_grown(block, size) for block in self.blocks]
        self._uses += [0] * (size - old)
        self._free[:0] = range(size - 1, old - 1, -1)  # the lowest new one is taken first, after those given back
        self.version += 1

    def _limit_is_near(self, num_pages: int) -> bool:
        return self.max_pages is not None and self.num_used + num_pages > self.max_pages

    def _forget_all(self) -> None:
        """No page is used any more: free the memory of long texts."""
        self.blocks = [block[:, :, :0].clone() for block in self.blocks]
        self._uses, self._free = [], []
        self.version += 1


def _grown(block: Tensor, size: int) -> Tensor:
    """The block with room for ``size`` pages."""
    grown = _zeros((*block.shape[:2], size, *block.shape[3:]), block)
    grown[:, :, : block.shape[2]] = block
    return grown


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of the type and on the device of another tensor. In the system's memory they are NumPy arrays. The system clears
    them when they are first used, so a round in which the pool grows does not wait for all of it."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    num_bytes = math.prod(shape) * like.element_size()
    raw = np.zeros(num_bytes + _ALIGNED, np.uint8)
    begin = -raw.ctypes.data % _ALIGNED
    return torch.from_numpy(raw[begin : begin + num_bytes]).view(like.dtype).view(shape)


@final
class PageRun:
    """The first ``length`` tokens of some row, kept alive."""

    def __init__(self, pool: PagePool, pages: Sequence[int], length: int) -> None:
        self.pool, self.length = pool, length
        self.pages = tuple(pages[: pool.pages_for(length)])
        pool.retain(self.pages)
        weakref.finalize(self, pool.release, self.pages)

    def first(self, length: int) -> PageRun:
        """The first ``length`` tokens of this run, as a run of its own."""
        assert length <= self.length, "a run cannot be lengthened"
        return PageRun(self.pool, self.pages, length)
