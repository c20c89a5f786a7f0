"""Memory for the keys and values of all requests, at an address that stays: graphs hold pointers into it.

An ``Arena`` is one block of rows of equal capacity. A ``DeviceCache`` names the rows that its requests stand in, so that
letting a request go or putting two batches together moves no memory; kernels find rows through the list of their numbers.
Rows named by two caches are copied before either writes. When the block must grow it moves, and ``version`` tells the graphs
so.

    bytes = sides * layers * rows * key heads * capacity * head size * bytes per number
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.cache.paged import PagedCache
from outrider.cache.slots import SlotCache
from outrider.core.interfaces import Cache
from outrider.models.attention.tree_tiles import Rows

_STEP = 256
"""Capacity grows to multiples of this."""
_FIRST = 1024
"""Capacity to begin with: enough for most requests, so that graphs are captured once."""


@dataclass(frozen=True)
class ArenaShape:
    """Sizes of what is stored per token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    sides: int = 2
    """Keys and values; 1 where keys are values too."""


@final
class Arena:
    """[L, sides, R, Hkv, S, D] keys and values."""

    def __init__(self, shape: ArenaShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.version = 0
        """Changes whenever the block has moved."""
        self._uses: list[int] = []
        """Caches that name each row."""
        sizes = (shape.num_layers, shape.sides, 0, shape.num_kv_heads, _FIRST, shape.head_dim)
        self.block = torch.zeros(sizes, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        return self.block.shape[4]

    @property
    def num_rows(self) -> int:
        return self.block.shape[2]

    def memory(self, layer: int) -> tuple[Tensor, Tensor]:
        """[R, Hkv, S, D] keys and values of a layer."""
        return self.block[layer, 0], self.block[layer, -1]

    def take(self, count: int) -> list[int]:
        """Rows nobody uses, now used once."""
        free = [row for row, uses in enumerate(self._uses) if uses == 0]
        if len(free) < count:
            before = self.num_rows
            self.ensure(self.capacity, num_rows=before + count - len(free))
            free += range(before, self.num_rows)
        self.retain(free[:count])
        return free[:count]

    def retain(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._uses[row] += 1

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._uses[row] -= 1

    def is_shared(self, row: int) -> bool:
        return self._uses[row] > 1

    def ensure(self, capacity: int, *, num_rows: int = 0) -> None:
        """Rows hold at least ``capacity`` slots from now on, and there are ``num_rows`` of them."""
        num_rows = _rounded(num_rows) if num_rows > self.num_rows else self.num_rows
        if capacity > self.capacity:
            grown = max(capacity, self.capacity + self.capacity // 2)
            self._move(num_rows, -(-grown // _STEP) * _STEP)
        elif num_rows > self.num_rows:
            self._move(num_rows, self.capacity)

    def _move(self, num_rows: int, capacity: int) -> None:
        old = self.block
        self.block = old.new_zeros(*old.shape[:2], num_rows, old.shape[3], capacity, old.shape[5])
        self.block[:, :, : old.shape[2], :, : old.shape[4]] = old
        self._uses += [0] * (num_rows - len(self._uses))
        self.version += 1


def _rounded(num_rows: int) -> int:
    """A power of two, and two to spare: an arena that grows row by row would move, and drop its graphs, every time."""
    return 2 + (1 << max(0, num_rows - 3).bit_length())


@final
class DeviceCache(SlotCache):
    """Rows of an arena. Lengths are kept on the host, as the interface asks; ``rows`` puts them on the device."""

    def __init__(self, arena: Arena, places: Sequence[int], lengths: Sequence[int]) -> None:
        self.arena = arena
        self.places = list(places)
        self.lengths = list(lengths)
        weakref.finalize(self, arena.release, self.places)

    @staticmethod
    def empty(arena: Arena, batch_size: int) -> DeviceCache:
        return DeviceCache(arena, arena.take(batch_size), [0] * batch_size)

    def rows(self) -> Rows:
        """Lengths and places as the kernels read them."""
        return rows_in(flat_rows(self).to(self.arena.block.device), self.batch_size)

    def reserve(self, num_nodes: int, *, start: int = 0) -> None:
        del start
        self.arena.ensure(max(self.lengths) + num_nodes)
        for index, place in enumerate(self.places):
            if self.arena.is_shared(place):
                (own,) = self.arena.take(1)
                self.arena.block[:, :, own] = self.arena.block[:, :, place]
                self.arena.release([place])
                self.places[index] = own  # in place: the finaliser holds this list

    def fork(self, rows: Sequence[int]) -> DeviceCache:
        places = [self.places[row] for row in rows]
        self.arena.retain(places)
        return DeviceCache(self.arena, places, [self.lengths[row] for row in rows])

    def join(self, other: Cache) -> DeviceCache:
        assert isinstance(other, DeviceCache) and other.arena is self.arena, "only caches of one model can be joined"
        places = [*self.places, *other.places]
        self.arena.retain(places)
        return DeviceCache(self.arena, places, [*self.lengths, *other.lengths])

    def _gather(self, row: int, path: Sequence[int]) -> None:
        begin = self.lengths[row]
        memory = self.arena.block[:, :, self.places[row]]
        source = torch.tensor(list(path), device=memory.device) + begin
        memory[:, :, :, begin : begin + len(path)] = memory.index_select(3, source)


def flat_rows(cache: DeviceCache | PagedCache, num_columns: int = 0) -> Tensor:
    """[B + B * columns] int32 on the host: every row's length, then its place or its ``num_columns`` pages, padded with 0."""
    if isinstance(cache, DeviceCache):
        return torch.tensor([*cache.lengths, *cache.places], dtype=torch.int32)
    pages = [page for row in cache.pages for page in (*row, *[0] * (num_columns - len(row)))]
    return torch.tensor([*cache.lengths, *pages], dtype=torch.int32)


def rows_in(flat: Tensor, batch_size: int, *, page_len: int = 0) -> Rows:
    """The same, as views for the kernels."""
    places = flat[batch_size:]
    return Rows(flat[:batch_size], places.view(batch_size, -1) if page_len else places, page_len)
