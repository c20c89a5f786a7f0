"""Which pages of a pool the slots of a frame stand in, as tables at addresses that stay.

Captured rounds read pages through a table with a row for each slot, and one that is no slot's. Empty slots share a spare page,
for they are scored too. However many requests take slots at once, their pages are told to the device by one copy.

Who looks at the last tokens alone keeps a ring: no slot takes more pages than ``most`` tokens need, and the columns of its row
name them in turn. A token is then written over the one that stands so many pages before it. Kernels read a ring like any pages.

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
        """``longest`` is the longest text there may be, nodes included; a slot has ``rows_each`` rows of pages, each for
        ``most`` tokens at most (all if not given)."""
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
        """Changes when something that a captured round points to has moved."""
        return self.pool.version

    def has_room(self, reaches: Mapping[int, int], *, batch_size: int) -> bool:
        """Whether there are free pages for the texts of slots to reach so many tokens each."""
        return self.pool.has_room(sum(self._missing(batch_size, slot, reach) for slot, reach in reaches.items()))

    def grow(self, reaches: Mapping[int, int], *, batch_size: int) -> None:
        """Give slots pages for their texts to reach so many tokens each. Rounds in flight go on."""
        lacking = [slot for slot, reach in reaches.items() if self._missing(batch_size, slot, reach)]
        for slot in lacking:
            self._caches[batch_size, slot].extend(min(reaches[slot], self._most))
        self.tell(batch_size, lacking)

    def adopt(self, slots: Sequence[int], caches: Sequence[PagedCache], *, batch_size: int) -> None:
        """Give slots the caches of requests, with the rows of a slot each; nobody else may write to their last pages."""
        self.release(batch_size, slots)
        for slot, cache in zip(slots, caches, strict=True):
            cache.reserve(1)
            self._caches[batch_size, slot] = cache
        self.tell(batch_size, slots)

    def open(self, slots: Sequence[int], *, batch_size: int) -> None:
        """Give slots to texts that are to be read."""
        self.adopt(slots, [PagedCache.empty(self.pool, self._rows_each) for _ in slots], batch_size=batch_size)

    def places(self, slots: Sequence[int], lengths: Sequence[int], *, batch_size: int) -> list[int]:
        """Where the first tokens of slots stand among those of all pages, slot after slot."""
        size, rows = self.pool.page_len, [self._caches[batch_size, slot].pages[0] for slot in slots]
        pairs = zip(rows, lengths, strict=True)
        return [row[place // size] * size + place % size for row, length in pairs for place in range(length)]

    def cache_of(self, batch_size: int, slot: int, length: int) -> PagedCache:
        """The cache of a slot, of which ``length`` tokens were read."""
        cache = self._caches[batch_size, slot]
        cache.lengths = [length] * self._rows_each
        return cache

    def release(self, batch_size: int, slots: Iterable[int]) -> None:
        """Give back the memory of requests that have left; rounds in flight come before whoever takes it."""
        left = [slot for slot in slots if self._caches.pop((batch_size, slot), None) is not None]
        if left:
            table = self.table(batch_size)
            table.index_fill_(0, sent(self._rows_of(left), torch.int64, table.device), self.spare_page)

    def leave(self, batch_size: int) -> None:
        """Give all of it back."""
        self.release(batch_size, [slot for size, slot in self._caches if size == batch_size])

    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        """The requests of these slots take the first slots of a frame of another size."""
        moved = [self._caches[old_size, slot] for slot in slots]
        self.leave(old_size)
        self._caches |= {(new_size, slot): cache for slot, cache in enumerate(moved)}
        self.tell(new_size, range(len(moved)))

    def rows(self, lengths: Tensor) -> Rows:
        """What kernels read, behind so many [B] committed tokens. The pages are at an address that stays."""
        return Rows(lengths.int(), self.pages(len(lengths)), self.pool.page_len)

    def piece_rows(self, pieces: PromptPieces, batch_size: int) -> Rows:
        """What kernels read for pieces of prompts; those that nobody needs are written to the spare page."""
        return self.rows_of(torch.where(pieces.slots >= 0, pieces.slots, batch_size), pieces.starts, batch_size)

    def rows_of(self, slots: Tensor, lengths: Tensor, batch_size: int) -> Rows:
        """What kernels read for slots [R], behind so many [R] tokens; slot ``batch_size`` is nobody's."""
        chosen = self.table(batch_size).unflatten(0, (-1, self._rows_each)).index_select(0, slots).flatten(0, 1)
        return Rows(lengths.int(), chosen, self.pool.page_len)

    def pages(self, batch_size: int) -> Tensor:
        """[rows of B slots, P] int32, at an address that stays."""
        return self.table(batch_size)[: -self._rows_each]

    def table(self, batch_size: int) -> Tensor:
        """The pages of B slots, followed by those of nobody's slot, with columns for the longest possible text."""
        if batch_size not in self._tables:
            shape = ((batch_size + 1) * self._rows_each, self.pool.pages_for(self.longest))
            with torch.inference_mode(False):  # whoever asks first, anybody may write to it
                table = torch.full(shape, self.spare_page, dtype=torch.int32, device=self.pool.block.device)
                self._tables[batch_size] = table
        return self._tables[batch_size]

    @property
    def spare_page(self) -> int:
        """A page that is no slot's."""
        return self._spare.pages[0][0]

    def _missing(self, batch_size: int, slot: int, reach: int) -> int:
        """Pages that a slot lacks; an empty one lacks all."""
        cache = self._caches.get((batch_size, slot))
        wanted = self.pool.pages_for(min(reach, self._most))
        return self._rows_each * max(0, wanted - (0 if cache is None else len(cache.pages[0])))

    def _columns(self, row: list[int]) -> list[int]:
        """What the columns of the table name: the pages of a row, those of a full ring again and again."""
        num_columns = self.pool.pages_for(self.longest)
        is_full = self._most < self.longest and len(row) >= self.pool.pages_for(self._most)
        return (row * (num_columns // len(row) + 1))[:num_columns] if is_full else row

    def _rows_of(self, slots: Sequence[int]) -> list[int]:
        """Their rows in the table."""
        return [slot * self._rows_each + row for slot in slots for row in range(self._rows_each)]

    def tell(self, batch_size: int, slots: Sequence[int]) -> None:
        """Write the pages of slots into the table; behind them it holds the spare page already."""
        rows = [self._columns(row) for slot in slots for row in self._caches[batch_size, slot].pages]
        width = max(map(len, rows), default=0)
        if width:
            table, places = self.table(batch_size), zip(self._rows_of(slots), rows, strict=True)
            padded = [[place, *row, *[self.spare_page] * (width - len(row))] for place, row in places]
            told = sent(padded, torch.int32, table.device)
            table[:, :width].index_copy_(0, told[:, 0].long(), told[:, 1:])
