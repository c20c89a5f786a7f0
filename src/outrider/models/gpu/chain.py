"""A draft model's chain inside a captured round: feed the last two committed tokens, then guess by guess.

After a round the draft's cache may lack one or two of the committed tokens, depending on how many guesses were accepted.
Feeding the last two always covers both cases with one shape of pass (the first of them is written again, with the same
numbers), so nothing about the round has to be known on the host. Guesses are coupled: the choice of q with the target's noise
of each position.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Hashable, Sequence
from typing import final

import torch
from torch import Tensor

from outrider.cache.paged import PagedCache
from outrider.core.device_round import PIECE_LEN, DeviceDrafter, Frame, Pieces
from outrider.models.attention.tree_tiles import Rows, Sights
from outrider.models.gpu.adjust import Trail
from outrider.models.gpu.arena import DeviceCache
from outrider.models.gpu.choose import Guessing, block_bests, pick
from outrider.models.gpu.decoder import FastDecoder, Step
from outrider.models.gpu.uploads import sent


@final
class Seats:
    """Which memory of a decoder the slots of a frame stand in: rows of its arena, or pages of its pool, enough of them for the
    whole text from the beginning. Empty slots share a spare row or page, for they are scored too."""

    def __init__(self, model: FastDecoder) -> None:
        self.model = model
        self._spare = model.new_cache(1)
        self._spare.reserve(1)
        self._spare_number = self._spare.places[0] if isinstance(self._spare, DeviceCache) else self._spare.pages[0][0]
        with torch.inference_mode(False):  # whoever asks first, anybody may read it
            self._spare_place = torch.full((), self._spare_number, dtype=torch.int32, device=model.device)
        self._caches: dict[tuple[int, int], DeviceCache | PagedCache] = {}
        self._places: dict[int, Tensor] = {}
        self._num_moved = 0

    @property
    def version(self) -> tuple[int, int]:
        """Changes when something that a captured round points to has moved."""
        return self.model.memory.version, self._num_moved

    def seat(self, slots: Sequence[int], rows: Sequence[Sequence[int]], *, batch_size: int, capacity: int) -> None:
        """Prefill all tokens of ``rows`` but the last, each into the memory of a slot."""
        for slot in slots:
            self._caches.pop((batch_size, slot), None)
        cache = self.model.new_cache(len(slots))
        if isinstance(cache, DeviceCache):
            cache.arena.ensure(capacity, num_rows=batch_size + 2)
        self.model.prefill([row[:-1] for row in rows], cache)
        alone = [cache.fork([index]) for index in range(len(slots))]
        del cache  # nobody shares them any more
        for slot, one in zip(slots, alone, strict=True):
            one.reserve(capacity - one.lengths[0])
            self._caches[batch_size, slot] = one
        self._tell(batch_size)

    def adopt(
        self,
        slots: Sequence[int],
        caches: Sequence[DeviceCache | PagedCache],
        *,
        batch_size: int,
        capacities: Sequence[int],
    ) -> None:
        """Give slots the caches of requests that were read, with room for so many tokens each."""
        if not self.model.page_len:
            self.model.arena.ensure(max(capacities), num_rows=batch_size + 2)
        for slot, cache, capacity in zip(slots, caches, capacities, strict=True):
            cache.reserve(capacity - cache.lengths[0])
            self._caches[batch_size, slot] = cache
        self._tell(batch_size)

    def open(self, slots: Sequence[int], *, batch_size: int, capacity: int) -> None:
        """Give slots room for texts that the next rounds read."""
        caches = [self.model.new_cache(1) for _ in slots]
        self.adopt(slots, caches, batch_size=batch_size, capacities=[capacity] * len(slots))

    def cache_of(self, batch_size: int, slot: int, length: int) -> DeviceCache | PagedCache:
        """The cache of a slot, of which ``length`` tokens were read."""
        cache = self._caches[batch_size, slot]
        cache.lengths = [length]
        return cache

    def release(self, batch_size: int, slots: Sequence[int]) -> None:
        """Give back the memory of requests that have left; rounds in flight come before whoever takes it."""
        for slot in slots:
            self._caches.pop((batch_size, slot), None)
        self._tell(batch_size)

    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        """The requests of these slots take the first slots of a frame of another size."""
        moved = [self._caches.pop((old_size, slot)) for slot in slots]
        self.leave(old_size)
        if not self.model.page_len:
            self.model.arena.ensure(self.model.arena.capacity, num_rows=new_size + 2)
        self._caches |= {(new_size, slot): cache for slot, cache in enumerate(moved)}
        self._tell(new_size)

    def catch_up(self, slots: Sequence[int], rows: Sequence[Sequence[int]], *, batch_size: int, known: Sequence[int]) -> None:
        """Prefill what ``rows`` hold beyond ``known`` tokens."""
        for slot, row, length in zip(slots, rows, known, strict=True):
            cache = self._caches[batch_size, slot]
            cache.lengths = [length]
            self.model.prefill([row[length:-1]], cache)

    def leave(self, batch_size: int) -> None:
        """Give the memory back."""
        for key in [key for key in self._caches if key[0] == batch_size]:
            del self._caches[key]
        self._tell(batch_size)

    def rows(self, lengths: Tensor) -> Rows:
        """What kernels read, behind so many [B] committed tokens. The places are at an address that stays."""
        return Rows(lengths.int(), self.places(len(lengths)), self.model.page_len)

    def piece_rows(self, pieces: Pieces, batch_size: int) -> Rows:
        """What kernels read for pieces of prompts; those that nobody needs are written to the spare row."""
        places = pieces.of_slots(self.places(batch_size), self._spare_place)
        return Rows(pieces.starts.int(), places, self.model.page_len)

    def num_slots(self, batch_size: int) -> int:
        """Tokens a slot may ever hold."""
        if not self.model.page_len:
            return self.model.arena.capacity
        return self.places(batch_size).shape[1] * self.model.page_len

    def places(self, batch_size: int) -> Tensor:
        """[B] int32 rows or [B, P] pages, at an address that stays."""
        if batch_size not in self._places:
            self._tell(batch_size)
        return self._places[batch_size]

    def _tell(self, batch_size: int) -> None:
        caches = [self._caches.get((batch_size, slot), self._spare) for slot in range(batch_size)]
        held = [cache.places if isinstance(cache, DeviceCache) else cache.pages[0] for cache in caches]
        places = self._places.get(batch_size)
        width = max(map(len, held))
        if places is None or places.numel() < batch_size * width:
            shape = (batch_size, width) if self.model.page_len else (batch_size,)
            self._num_moved += places is not None
            with torch.inference_mode(False):  # whoever asks first, anybody may write to it
                places = self._places[batch_size] = torch.zeros(shape, dtype=torch.int32, device=self.model.device)
        width = places.numel() // batch_size
        padded = [[*one, *[self._spare_number] * (width - len(one))] for one in held]
        places.copy_(sent(padded, torch.int32, places.device).view_as(places))


@final
class Again:
    """Which of the last committed tokens a drafter's first pass reads again: as many as a round may have added, so that one
    shape of pass covers every case."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count = count
        self._steps = torch.arange(count, device=device)

    def first(self, frame: Frame, *, behind: int = 0) -> Tensor:
        """[B] where they begin: ``behind`` places before the end is the last. A text that is shorter is read from its beginning
        on, beyond its end, where the next tokens are written over what that leaves."""
        return (frame.lengths - self.count - behind).clamp(min=0)

    def last(self, states: Tensor, frame: Frame, first: Tensor, *, behind: int = 0) -> Tensor:
        """[..., B, 1, H] of what was read [..., B, count, H], that of each row's last."""
        index = (frame.lengths - 1 - behind - first)[:, None, None].expand(*states.shape[:-2], 1, states.shape[-1])
        return states.gather(-2, index)

    def columns(self, first: Tensor) -> Tensor:
        """[B, count]"""
        return first[:, None] + self._steps


class ModelDrafter(DeviceDrafter, ABC):
    """A drafter that is a model with rows of its own."""

    def __init__(self, model: FastDecoder, *, vocab_size: int) -> None:
        self.model = model
        self._vocab_size = min(vocab_size, model.vocab_size)
        self._seats = Seats(model)

    @property
    def version(self) -> Hashable:
        return self._seats.version

    def seat(self, slots: Sequence[int], rows: Sequence[Sequence[int]], *, batch_size: int, capacity: int) -> None:
        self._seats.seat(slots, rows, batch_size=batch_size, capacity=capacity)

    def catch_up(self, slots: Sequence[int], rows: Sequence[Sequence[int]], *, batch_size: int, known: Sequence[int]) -> None:
        self._seats.catch_up(slots, rows, batch_size=batch_size, known=known)

    def open(self, slots: Sequence[int], *, batch_size: int, capacity: int) -> None:
        self._seats.open(slots, batch_size=batch_size, capacity=capacity)

    def read(self, frame: Frame, pieces: Pieces, features: Tensor | None) -> None:
        del features
        seats, shape = self._seats, (len(pieces), PIECE_LEN)
        rows = seats.piece_rows(pieces, frame.batch_size)
        step = self.model.step(shape, rows, Sights(None, None), num_slots=seats.num_slots(frame.batch_size))
        self.model.hidden(pieces.tokens(frame), step)

    def leave(self, batch_size: int) -> None:
        self._seats.leave(batch_size)

    def move(self, old_size: int, new_size: int, slots: Sequence[int], *, capacity: int) -> None:
        del capacity
        self._seats.move(old_size, new_size, slots)

    def fits(self, capacity: int) -> bool:
        return capacity <= self.model.max_len

    def _at_root(self, frame: Frame, again: Again) -> Tensor:
        """[B, 1, V] logits after the root, the last tokens read again."""
        first = again.first(frame)
        tokens = frame.tokens.gather(1, again.columns(first))
        hidden, _ = self.model.hidden(tokens, self._step(first, again.count, Sights(None, None)))
        return self.model.logits(again.last(hidden.view(*tokens.shape, -1), frame, first))

    def _step(self, lengths: Tensor, num_nodes: int, sights: Sights) -> Step:
        seats = self._seats
        shape = (len(lengths), num_nodes)
        return self.model.step(shape, seats.rows(lengths), sights, num_slots=seats.num_slots(len(lengths)))


@final
class DeviceChain(ModelDrafter):
    """Chains from a draft model."""

    def propose(self, frame: Frame, nodes: Tensor) -> None:
        columns = torch.stack((frame.lengths - 2, frame.lengths - 1), 1)
        fed = frame.tokens.gather(1, columns)
        lengths = columns[:, 0]
        for guess in range(1, nodes.shape[1]):
            logits, _ = self.model.forward(fed, self._step(lengths, fed.shape[1], Sights(None, None)))
            last, trail = logits[:, -1:].contiguous(), Trail(nodes, length=guess - 1)
            bests = block_bests(last, frame, depths=guess - 1, vocab_size=self._vocab_size, guessing=Guessing(1), trail=trail)
            pick(bests, nodes, guess)
            lengths = lengths + fed.shape[1]
            fed = nodes[:, guess : guess + 1].contiguous()
