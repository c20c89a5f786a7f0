"""A draft model's chain inside a captured round: feed the last two committed tokens, then guess by guess.

After a round the draft's cache may lack one or two of the committed tokens, depending on how many guesses were accepted.
Feeding the last two always covers both cases with one shape of pass (the first of them is written again, with the same
numbers). So the host need not know anything about the round. Where grammars may have changed the guesses of the last round, as
many tokens are fed as that round can have added. Guesses are coupled: the choice of q with the target's noise of each
position.
"""

from __future__ import annotations

from abc import ABC
from typing import final

import torch
from torch import Tensor

from outrider.cache.paged import as_one
from outrider.core.device_round import PIECE_LEN, Frame, LateTexts, PromptPieces, Texts
from outrider.device.paged_drafter import PagedDrafter
from outrider.device.sampling.adjust import Trail
from outrider.device.sampling.choose import Guessing, block_bests, pick
from outrider.device.slot_pages import SlotPages
from outrider.models.attention.tree_tiles import Sights
from outrider.models.gpu.decoder import FastDecoder, Step
from outrider.models.gpu.reading import sizes_to_read


@final
class Again:
    """The range of committed tokens that a drafter's first pass reads again: as many as a round may have added, so that one
    shape of pass covers every case."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count = count
        self._steps = torch.arange(count, device=device)

    def first(self, frame: Frame, *, behind: int = 0) -> Tensor:
        """[B] first token of the range, ``behind`` places before the end of the text. A text that is shorter is read from its
        beginning on and beyond its end, where later tokens overwrite the extra keys."""
        return (frame.lengths - self.count - behind).clamp(min=0)

    def last(self, states: Tensor, frame: Frame, first: Tensor, *, behind: int = 0) -> Tensor:
        """[..., B, 1, H] the last of each row's values [..., B, count, H]."""
        index = (frame.lengths - 1 - behind - first)[:, None, None].expand(*states.shape[:-2], 1, states.shape[-1])
        return states.gather(-2, index)

    def columns(self, first: Tensor) -> Tensor:
        """[B, count]"""
        return first[:, None] + self._steps


class ModelDrafter(PagedDrafter, ABC):
    """A drafter that is a model with rows of its own."""

    def __init__(self, model: FastDecoder, *, vocab_size: int) -> None:
        super().__init__(SlotPages.of_decoder(model))
        self.model = model
        self._vocab_size = min(vocab_size, model.vocab_size)
        self.text_sizes = sizes_to_read(model)

    def seat(self, texts: Texts, *, batch_size: int) -> None:
        self._pages.release(batch_size, texts.slots)
        cache = self.model.new_cache(len(texts.slots))
        self.model.prefill([row[:-1] for row in texts.rows], cache)
        alone = [cache.fork([index]) for index in range(len(texts.slots))]
        del cache  # nobody shares them any more
        self._pages.adopt(texts.slots, alone, batch_size=batch_size)

    def catch_up(self, late: LateTexts, *, batch_size: int) -> None:
        caches = [self._pages.cache_of(batch_size, *pair) for pair in zip(late.slots, late.known, strict=True)]
        with as_one(caches) as together:  # one pass for all of them
            self.model.prefill([row[length:-1] for row, length in zip(late.rows, late.known, strict=True)], together)
        self._pages.tell(batch_size, late.slots)

    def read(self, frame: Frame, pieces: PromptPieces, features: Tensor | None) -> None:
        del features
        rows = self._pages.piece_rows(pieces, frame.batch_size)
        step = self.model.step((len(pieces), PIECE_LEN), rows, Sights(None, None), num_slots=self.model.num_slots)
        self.model.hidden(pieces.tokens(frame), step)

    def fits(self, capacity: int) -> bool:
        return capacity <= self.model.max_len

    def _at_root(self, frame: Frame, again: Again) -> Tensor:
        """[B, 1, V] logits after the root; the last tokens are read again."""
        first = again.first(frame)
        tokens = frame.tokens.gather(1, again.columns(first))
        hidden, _ = self.model.hidden(tokens, self._step(first, again.count, Sights(None, None)))
        return self.model.logits(again.last(hidden.view(*tokens.shape, -1), frame, first))

    def _step(self, lengths: Tensor, num_nodes: int, sights: Sights) -> Step:
        shape = (len(lengths), num_nodes)
        return self.model.step(shape, self._pages.rows(lengths), sights, num_slots=self.model.num_slots)


@final
class DeviceChain(ModelDrafter):
    """Chains from a draft model."""

    least_len = 1

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
