"""A draft model's chain inside a captured round: feed the last two committed tokens, then guess by guess.

After a round the draft's cache may lack one or two of the committed tokens, depending on how many guesses were accepted.
Feeding the last two always covers both cases with one shape of pass (the first of them is written again, with the same
numbers), so nothing about the round has to be known on the host. Where grammars may have changed the guesses of the last round,
as many tokens are fed as that round can have added. Guesses are coupled: the choice of q with the target's noise of each
position.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Hashable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from outrider.cache.paged import as_one
from outrider.core.device_round import PIECE_LEN, DeviceDrafter, Frame, Pieces, Texts
from outrider.models.attention.tree_tiles import Sights
from outrider.models.gpu.adjust import Trail
from outrider.models.gpu.choose import Guessing, block_bests, pick
from outrider.models.gpu.decoder import FastDecoder, Step
from outrider.models.gpu.pages import hold_enough
from outrider.models.gpu.slot_pages import SlotPages


@final
class Seats(SlotPages):
    """The pages of a decoder, which reads texts into them."""

    def __init__(self, model: FastDecoder) -> None:
        hold_enough(model.pool, longest=model.most_slots)
        super().__init__(model.pool, longest=model.most_slots)
        self.model = model

    def seat(self, slots: Sequence[int], rows: Sequence[Sequence[int]], *, batch_size: int) -> None:
        """Prefill all tokens of ``rows`` but the last, each into the memory of a slot."""
        self.release(batch_size, slots)
        cache = self.model.new_cache(len(slots))
        self.model.prefill([row[:-1] for row in rows], cache)
        alone = [cache.fork([index]) for index in range(len(slots))]
        del cache  # nobody shares them any more
        self.adopt(slots, alone, batch_size=batch_size)

    def catch_up(self, slots: Sequence[int], rows: Sequence[Sequence[int]], *, batch_size: int, known: Sequence[int]) -> None:
        """Prefill what ``rows`` hold beyond ``known`` tokens, all of them in one pass."""
        caches = [self.cache_of(batch_size, slot, length) for slot, length in zip(slots, known, strict=True)]
        with as_one(caches) as together:
            self.model.prefill([row[length:-1] for row, length in zip(rows, known, strict=True)], together)
        self._tell(batch_size, slots)


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

    def seat(self, texts: Texts, *, batch_size: int) -> None:
        self._seats.seat(texts.slots, texts.rows, batch_size=batch_size)

    def catch_up(self, slots: Sequence[int], rows: Sequence[Sequence[int]], *, batch_size: int, known: Sequence[int]) -> None:
        self._seats.catch_up(slots, rows, batch_size=batch_size, known=known)

    def open(self, slots: Sequence[int], *, batch_size: int) -> None:
        self._seats.open(slots, batch_size=batch_size)

    def read(self, frame: Frame, pieces: Pieces, features: Tensor | None) -> None:
        del features
        seats, shape = self._seats, (len(pieces), PIECE_LEN)
        rows = seats.piece_rows(pieces, frame.batch_size)
        step = self.model.step(shape, rows, Sights(None, None), num_slots=self.model.num_slots)
        self.model.hidden(pieces.tokens(frame), step)

    def release(self, slots: Sequence[int], *, batch_size: int) -> None:
        self._seats.release(batch_size, slots)

    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        self._seats.move(old_size, new_size, slots)

    def fits(self, capacity: int) -> bool:
        return capacity <= self.model.max_len

    def has_room(self, reaches: Mapping[int, int], *, batch_size: int) -> bool:
        return self._seats.has_room(reaches, batch_size=batch_size)

    def grow(self, reaches: Mapping[int, int], *, batch_size: int) -> None:
        self._seats.grow(reaches, batch_size=batch_size)

    def _at_root(self, frame: Frame, again: Again) -> Tensor:
        """[B, 1, V] logits after the root, the last tokens read again."""
        first = again.first(frame)
        tokens = frame.tokens.gather(1, again.columns(first))
        hidden, _ = self.model.hidden(tokens, self._step(first, again.count, Sights(None, None)))
        return self.model.logits(again.last(hidden.view(*tokens.shape, -1), frame, first))

    def _step(self, lengths: Tensor, num_nodes: int, sights: Sights) -> Step:
        seats = self._seats
        shape = (len(lengths), num_nodes)
        return self.model.step(shape, seats.rows(lengths), sights, num_slots=self.model.num_slots)


@final
class DeviceChain(ModelDrafter):
    """Chains from a draft model."""

    def propose(self, frame: Frame, nodes: Tensor, depth: int) -> None:
        del depth
        num_nodes = nodes.shape[1]
        logits = self._at_root(frame, Again(num_nodes if frame.is_constrained else 2, nodes.device))
        for guess in range(1, num_nodes):
            if guess > 1:
                step = self._step(frame.lengths + guess - 2, 1, Sights(None, None))
                logits, _ = self.model.forward(nodes[:, guess - 1 : guess].contiguous(), step)
            trail = Trail(nodes, length=guess - 1)
            bests = block_bests(logits, frame, depths=guess - 1, vocab_size=self._vocab_size, guessing=Guessing(1), trail=trail)
            pick(bests, nodes, guess)
