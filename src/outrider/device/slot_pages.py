"""Page tables of the slots of a frame, at fixed memory addresses.

Captured rounds read pages through a table with one row per slot, and one more row for no slot. Empty slots are scored too, so
they share a spare page. One copy sends the new rows to the device, however many requests take slots at once.

A model that attends to the last tokens alone keeps a ring. A slot takes no more pages than ``most`` tokens need, and the
columns of its row repeat them in turn. A token then overwrites the one that stands so many pages before it. Kernels read a ring
like other pages.

    page of token t = ring[t div T mod R],      R = pages of ``most`` tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from outrider.cache.page_pool import PagePool
from outrider.cache.paged import PagedCache
from outrider.core.device_round import PromptPieces
from outrider.models.attention.tree_tiles import Rows
from outrider.models.gpu.pages import hold_enough
from outrider.models.gpu.uploads import sent

if TYPE_CHECKING:
    from outrider.models.gpu.decoder import FastDecoder


@final
class SlotPages:
    """Pages of the slots of all frames, by the number of slots."""

    def __init__(self, pool: PagePool, *, longest: int, rows_each: int = 1, most: int | None = None) -> None:
        """``longest`` is the longest possible text, nodes included. A slot has ``rows_each`` rows of pages, each for at most
        ``most`` tokens (all tokens if not given)."""
        self.pool, self.longest, self._rows_each = pool, longest, rows_each
        self._most = longest if most is None else min(most, longest)
        self._spare = PagedCache.empty(pool, 1)
        self._spare.reserve(1)
        self._caches: dict[tuple[int, int], PagedCache] = {}
        self._tables: dict[int, Tensor] = {}

    @staticmethod
    def of_decoder(model: FastDecoder, *, rows_each: int = 1) -> SlotPages:
        """The pages of a decoder, which takes its memory now."""
        hold_enough(model.pool, longest=model.most_slots)
        return SlotPages(model.pool, longest=model.most_slots, rows_each=rows_each)

    @property
    def version(self) -> int:
        """Changes whenever memory that captured rounds point to has moved."""
        return self.pool.version

    def has_room(self, reaches: Mapping[int, int], *, batch_size: int) -> bool:
        """Whether there are enough free pages for the texts of slots to reach so many tokens each."""
        return self.pool.has_room(sum(self._missing(batch_size, slot, reach) for slot, reach in reaches.items()))

    def grow(self, reaches: Mapping[int, int], *, batch_size: int) -> None:
        """Give slots enough pages for texts of so many tokens each. Rounds in flight go on."""
        lacking = [slot for slot, reach in reaches.items() if self._missing(batch_size, slot, reach)]
        for slot in lacking:
            self._caches[batch_size, slot].extend(min(reaches[slot], self._most))
        self.tell(batch_size, lacking)

    def adopt(self, slots: Sequence[int], caches: Sequence[PagedCache], *, batch_size: int) -> None:
        """Give slots the caches of requests, as many rows as a slot has. Nobody else may write to their last pages."""
        self.release(batch_size, slots)
        for slot, cache in zip(slots, caches, strict=True):
            cache.reserve(1)
            self._caches[batch_size, slot] = cache
        self.tell(batch_size, slots)

    def open(self, slots: Sequence[int], *, batch_size: int) -> None:
        """Give slots to texts that are to be read."""
        self.adopt(slots, [PagedCache.empty(self.pool, self._rows_each) for _ in slots], batch_size=batch_size)

    def places(self, slots: Sequence[int], lengths: Sequence[int], *, batch_size: int) -> list[int]:
        """Places of the first tokens of slots among the tokens of all pages, slot after slot."""
        size, rows = self.pool.page_len, [self._caches[batch_size, slot].pages[0] for slot in slots]
        pairs = zip(rows, lengths, strict=True)
        return [row[place // size] * size + place % size for row, length in pairs for place in range(length)]

    def cache_of(self, batch_size: int, slot: int, length: int) -> PagedCache:
        """The cache of a slot, of which ``length`` tokens were read."""
        cache = self._caches[batch_size, slot]
        cache.lengths = [length] * self._rows_each
        return cache

    def release(self, batch_size: int, slots: Iterable[int]) -> None:
        """Free the memory of requests that have left. Rounds in flight finish before others use it."""
        left = [slot for slot in slots if self._caches.pop((batch_size, slot), None) is not None]
        if left:
            table = self.table(batch_size)
            table.index_fill_(0, sent(self._rows_of(left), torch.int64, table.device), self.spare_page)

    def leave(self, batch_size: int) -> None:
        """Free all slots."""
        self.release(batch_size, [slot for size, slot in self._caches if size == batch_size])

    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        """Move the requests of these slots to the first slots of a frame of another size."""
        moved = [self._caches[old_size, slot] for slot in slots]
        self.leave(old_size)
        self._caches |= {(new_size, slot): cache for slot, cache in enumerate(moved)}
        self.tell(new_size, range(len(moved)))

    def rows(self, lengths: Tensor) -> Rows:
        """The page tables that kernels read, for texts of [B] committed tokens. Their address stays."""
        return Rows(lengths.int(), self.pages(len(lengths)), self.pool.page_len)

    def piece_rows(self, pieces: PromptPieces, batch_size: int) -> Rows:
        """The page tables that kernels read for pieces of prompts. Unused pieces are written to the spare page."""
        return self.rows_of(torch.where(pieces.slots >= 0, pieces.slots, batch_size), pieces.starts, batch_size)

    def rows_of(self, slots: Tensor, lengths: Tensor, batch_size: int) -> Rows:
        """The page tables that kernels read for slots [R] with [R] committed tokens. Slot ``batch_size`` belongs to nobody."""
        chosen = self.table(batch_size).unflatten(0, (-1, self._rows_each)).index_select(0, slots).flatten(0, 1)
        return Rows(lengths.int(), chosen, self.pool.page_len)

    def pages(self, batch_size: int) -> Tensor:
        """[rows of B slots, P] int32, at a fixed address."""
        return self.table(batch_size)[: -self._rows_each]

    def table(self, batch_size: int) -> Tensor:
        """The pages of B slots, then those of the slot that belongs to nobody, with columns for the longest possible text."""
        if batch_size not in self._tables:
            shape = ((batch_size + 1) * self._rows_each, self.pool.pages_for(self.longest))
            with torch.inference_mode(False):  # whoever asks first, anybody may write to it
                table = torch.full(shape, self.spare_page, dtype=torch.int32, device=self.pool.block.device)
                self._tables[batch_size] = table
        return self._tables[batch_size]

    @property
    def spare_page(self) -> int:
        """The page that belongs to no slot."""
        return self._spare.pages[0][0]

    def _missing(self, batch_size: int, slot: int, reach: int) -> int:
        """Pages that a slot lacks; an empty slot lacks all."""
        cache = self._caches.get((batch_size, slot))
        wanted = self.pool.pages_for(min(reach, self._most))
        return self._rows_each * max(0, wanted - (0 if cache is None else len(cache.pages[0])))

    def _columns(self, row: list[int]) -> list[int]:
        """Columns of a row in the table: its pages, and those of a full ring repeated."""
        num_columns = self.pool.pages_for(self.longest)
        is_full = self._most < self.longest and len(row) >= self.pool.pages_for(self._most)
        return (row * (num_columns // len(row) + 1))[:num_columns] if is_full else row

    def _rows_of(self, slots: Sequence[int]) -> list[int]:
        """Rows of the table that belong to these slots."""
        return [slot * self._rows_each + row for slot in slots for row in range(self._rows_each)]

    def tell(self, batch_size: int, slots: Sequence[int]) -> None:
        """Write the pages of slots into the table. The columns after them already hold the spare page."""
        rows = [self._columns(row) for slot in slots for row in self._caches[batch_size, slot].pages]
        width = max(map(len, rows), default=0)
        if width:
            table, places = self.table(batch_size), zip(self._rows_of(slots), rows, strict=True)
            padded = [[place, *row, *[self.spare_page] * (width - len(row))] for place, row in places]
            told = sent(padded, torch.int32, table.device)
            table[:, :width].index_copy_(0, told[:, 0].long(), told[:, 1:])
