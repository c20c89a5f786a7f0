"""EAGLE inside a captured round. The head reads the newest columns again, then grows a tree level by level.

A column is the target's state of token c with token c + 1. The target's states of a round are stored at their places in the
text, so that any column can be read at any time. A round adds at most depth + 1 tokens; reading the last so many columns again
covers every case with one shape of pass, as ``device/drafters/model/draft_tree.py`` does for draft models. The head has pages
of its own for the keys and values of columns, and those of guesses follow them for the round. The trees equal those of
``drafters/heads/eagle.py`` (``device/drafters/trees/growers.py``).

    children(u) = first k of   log q(. | u) + g_position                     coupled, as the target will choose
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from outrider.cache.page_pool import PagePool
from outrider.core.device_round import Frame, LateTexts, PromptPieces, SlotTrees, Texts, followed
from outrider.device.drafters.heads.eagle_layer import FastHead, NodePlaces, ParentStates
from outrider.device.drafters.heads.texts import padded_tokens, tapped_states
from outrider.device.drafters.model.draft_model import Again
from outrider.device.drafters.trees.growers import Answers, Asked, Grower
from outrider.device.paged_drafter import PagedDrafter
from outrider.device.slot_pages import SlotPages
from outrider.models.attention.tree_tiles import Rows, Sights
from outrider.models.config import ModelConfig
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.pages import OF_HEADS, hold_enough
from outrider.models.gpu.uploads import sent
from outrider.models.heads.eagle import EagleHead

_CHUNK = 512
"""Most columns read in one pass."""


@final
class Memory:
    """Memory of the slots' columns: pages of the layer's keys and values, and the target's states beside them."""

    def __init__(self, like: Tensor, layer: ModelConfig, width: int) -> None:
        """``width`` is the width of the target's states."""
        pool = PagePool((1, layer.num_kv_heads, layer.head_dim), dtype=like.dtype, device=like.device)
        hold_enough(pool, longest=layer.max_len, beside=pool.page_len * width * like.element_size(), share=OF_HEADS)
        self.pages, self._pool = SlotPages(pool, longest=layer.max_len), pool
        self._states = like.new_zeros(0, width)

    @property
    def states(self) -> Tensor:
        """[places of all pages, F] the target's states. They move when the pool moves."""
        size = self._pool.num_pages * self._pool.page_len
        if len(self._states) < size:
            with torch.inference_mode(False):  # whoever asks first, anybody may write to it
                grown = self._states.new_zeros(size, self._states.shape[1])
            grown[: len(self._states)] = self._states
            self._states = grown
        return self._states

    def at(self, rows: Rows, columns: Tensor) -> Tensor:
        """[R, N] places of columns [R, N] among those of all pages."""
        size = rows.page_len
        columns = columns.clamp(max=rows.places.shape[1] * size - 1)
        return rows.places.gather(1, columns // size) * size + columns % size

    def standing(self, rows: Rows, sights: Sights) -> NodePlaces:
        return NodePlaces(self._pool.memory(0)[:2], rows, sights)


@final
class DeviceEagle(PagedDrafter):
    """Trees from an EAGLE head."""

    def __init__(self, head: EagleHead, target: FastDecoder, grower: Grower) -> None:
        assert head.config.layer is not None
        self.head, self._target, self._layer = FastHead(head), target, head.config.layer
        self.taps, self.max_depth, self._grower = head.config.taps, grower.max_depth, grower
        self._again = Again(grower.max_depth + 1, target.device)
        self._memory = Memory(next(head.parameters()), self._layer, len(self.taps) * self._layer.hidden_size)
        super().__init__(self._memory.pages)

    def num_nodes(self, depth: int) -> int:
        return self._grower.num_nodes(depth)

    def trees(self, batch_size: int, depth: int) -> SlotTrees | None:
        return self._grower.trees(batch_size, depth)

    def propose(self, frame: Frame, nodes: Tensor, depth: int) -> None:
        self._grower.grow(_EagleAnswers(self, frame), frame, nodes, depth)

    def fits(self, capacity: int) -> bool:
        return capacity <= self._layer.max_len

    def seat(self, texts: Texts, *, batch_size: int) -> None:
        pages, memory, lengths = self._pages, self._memory, [len(row) for row in texts.rows]
        pages.open(texts.slots, batch_size=batch_size)
        pages.grow(dict(zip(texts.slots, lengths, strict=True)), batch_size=batch_size)
        with torch.inference_mode():
            found = torch.cat(list(tapped_states(self._target, texts, self.taps)))
            places = pages.places(texts.slots, [length - 1 for length in lengths], batch_size=batch_size)
            states = memory.states
            states.index_copy_(0, sent(places, torch.int64, states.device), found.to(states.dtype))
            self._read(texts.slots, texts.rows, batch_size=batch_size, begins=[0] * len(lengths))

    def read(self, frame: Frame, pieces: PromptPieces, features: Tensor | None) -> None:
        assert features is not None, "the head reads the target's states"
        memory, rows = self._memory, self._pages.piece_rows(pieces, frame.batch_size)
        memory.states[memory.at(rows, pieces.columns())] = features.to(memory.states.dtype)
        standing = memory.standing(rows, Sights(None, None))
        self.head.step(pieces.tokens(frame, shift=1), ParentStates(self.head.fuse(features)), standing)

    def catch_up(self, late: LateTexts, *, batch_size: int) -> None:
        with torch.inference_mode():
            begins = [max(0, length - 1 - self._again.count) for length in late.known]
            self._read(late.slots, late.rows, batch_size=batch_size, begins=begins)

    def take(self, frame: Frame, before: Tensor, features: Tensor, path: Tensor | None) -> None:
        del frame
        memory, features = self._memory, followed(features, path)
        places = before[:, None] + torch.arange(features.shape[1], device=before.device)
        memory.states[memory.at(self._pages.rows(before), places)] = features.to(memory.states.dtype)

    def _read(self, slots: Sequence[int], rows: Sequence[Sequence[int]], *, batch_size: int, begins: Sequence[int]) -> None:
        """Read the columns from ``begins`` on, of slots whose tokens are ``rows``. Rows with fewer columns are read beyond
        their ends."""
        memory, device = self._memory, self._target.device
        longest = max(len(row) - 1 - begin for row, begin in zip(rows, begins, strict=True))
        owners, texts = sent(list(slots), torch.int64, device), padded_tokens(rows, device)
        for first in range(0, longest, _CHUNK):
            count = min(_CHUNK, longest - first)
            starts = sent([min(begin + first, self._pages.longest - count) for begin in begins], torch.int64, device)
            columns = starts[:, None] + torch.arange(count, device=device)
            tokens = texts.gather(1, (columns + 1).clamp(max=texts.shape[1] - 1))
            places = self._pages.rows_of(owners, starts, batch_size)
            above = ParentStates(self.head.fuse(memory.states[memory.at(places, columns)]))
            self.head.step(tokens, above, memory.standing(places, Sights(None, None)))

    def at_root(self, frame: Frame) -> tuple[Tensor, Tensor]:
        """[B, 1, H] states and [B, 1, Vd] logits after the root, read again with the newest columns."""
        memory, first = self._memory, self._again.first(frame, behind=1)
        columns, rows = self._again.columns(first), self._pages.rows(first)
        above = ParentStates(self.head.fuse(memory.states[memory.at(rows, columns)]))
        standing = memory.standing(rows, Sights(None, None))
        stream, parts = self.head.step(frame.tokens.gather(1, columns + 1), above, standing)
        shape = (frame.batch_size, self._again.count)
        last = [self._again.last(read.unflatten(-2, shape), frame, first, behind=1).squeeze(-2) for read in (stream, parts)]
        return self._found(last[0], last[1], frame.batch_size)

    def below(self, frame: Frame, tokens: Tensor, above: ParentStates, sights: Sights) -> tuple[Tensor, Tensor]:
        """[B, M, H] states and [B, M, Vd] logits of guesses, which follow the columns of their rows."""
        standing = self._memory.standing(self._pages.rows(frame.lengths - 1), sights)
        return self._found(*self.head.step(tokens, above, standing), frame.batch_size)

    def _found(self, stream: Tensor, parts: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
        states, logits = self.head.read(stream, parts)
        return states.view(batch_size, -1, states.shape[-1]), logits.view(batch_size, -1, logits.shape[-1])


@final
class _EagleAnswers(Answers):
    """Keeps the states of the nodes that the head was asked about."""

    def __init__(self, eagle: DeviceEagle, frame: Frame) -> None:
        self._eagle, self._frame = eagle, frame
        self._found: Tensor | None = None

    def root(self) -> Tensor:
        self._found, logits = self._eagle.at_root(self._frame)
        return logits

    def below(self, asked: Asked) -> Tensor:
        assert self._found is not None, "the root comes first"
        states, logits = self._eagle.below(self._frame, asked.tokens, ParentStates(self._found, asked.above), asked.sights)
        self._found = torch.cat([self._found, states], 1)
        return logits
