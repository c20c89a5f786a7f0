"""EAGLE inside a captured round: the head reads the newest columns again, then grows a tree level by level.

The target's states of a round are written where the text has them, so that a column (state c, token c + 1) can be read at any
time. A round adds at most depth + 1 tokens; reading the last so many columns again covers every case with one shape of pass, as
``models/gpu/branches.py`` does for draft models. Keys and values of columns stay in a memory of their own; those of guesses
stand behind them for the round. The same trees as ``drafters/heads/eagle.py`` grow (``models/gpu/growers.py``).

    children(u) = first k of   log q(. | u) + g_position                     coupled, as the target will choose
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.core.device_round import DeviceDrafter, Frame, Pieces, SlotTrees, Texts, followed
from outrider.models.attention.tree_tiles import Rows, Sights
from outrider.models.gpu.chain import Again
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.growers import Answers, Asked, Grower
from outrider.models.gpu.head_layer import Above, FastHead, Standing
from outrider.models.gpu.head_texts import padded_tokens, tapped_states
from outrider.models.gpu.uploads import sent
from outrider.models.heads.eagle import EagleHead

_CHUNK = 512
"""Most columns read in one pass."""
_STEP = 256


@dataclass(frozen=True, eq=False)
class Memory:
    """What the slots of a frame hold, at addresses that stay."""

    keys: Tensor
    """[B + 1, kv heads, S, D] of columns."""
    values: Tensor
    features: Tensor
    """[B + 1, S, F] the target's states."""
    places: Tensor
    """[B] int32 rows of keys and values."""
    spare: Tensor
    """The number of a row that is no slot's."""

    @property
    def capacity(self) -> int:
        return self.features.shape[1]

    def standing(self, lengths: Tensor, sights: Sights) -> Standing:
        """Behind ``lengths`` [B] columns."""
        return Standing((self.keys, self.values), Rows(lengths.int(), self.places), sights)

    def take(self, other: Memory, slots: Sequence[int]) -> None:
        """The first slots become those of another memory."""
        length = min(self.capacity, other.capacity)
        for place, slot in enumerate(slots):
            self.features[place, :length] = other.features[slot, :length]
            for tensor, held in ((self.keys, other.keys), (self.values, other.values)):
                tensor[place, :, :length] = held[slot, :, :length]


@final
class DeviceEagle(DeviceDrafter):
    """Trees from an EAGLE head."""

    def __init__(self, head: EagleHead, target: FastDecoder, grower: Grower) -> None:
        assert head.config.layer is not None
        self.head, self._target, self._layer = FastHead(head), target, head.config.layer
        self.taps, self.max_depth, self._grower = head.config.taps, grower.max_depth, grower
        self._again = Again(grower.max_depth + 1, target.device)
        self._memories: dict[int, Memory] = {}
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def num_nodes(self, depth: int) -> int:
        return self._grower.num_nodes(depth)

    def trees(self, batch_size: int, depth: int) -> SlotTrees | None:
        return self._grower.trees(batch_size, depth)

    def propose(self, frame: Frame, nodes: Tensor, depth: int) -> None:
        self._grower.grow(_EagleAnswers(self, frame), frame, nodes, depth)

    def fits(self, capacity: int) -> bool:
        return capacity <= self._layer.max_len

    def leave(self, batch_size: int) -> None:
        """Slots hold nothing that another request could not write over."""
        del batch_size

    def move(self, old_size: int, new_size: int, slots: Sequence[int], *, capacity: int) -> None:
        self._room(new_size, capacity).take(self._memories[old_size], slots)

    def seat(self, texts: Texts, *, batch_size: int, capacity: int) -> None:
        memory = self._room(batch_size, capacity)
        with torch.inference_mode():
            states = tapped_states(self._target, texts, self.taps)
            pairs = zip(texts.slots, map(len, states), strict=True)
            places = [slot * memory.capacity + place for slot, length in pairs for place in range(length)]
            at = sent(places, torch.int64, memory.features.device)
            memory.features.flatten(0, 1).index_copy_(0, at, torch.cat(list(states)).to(memory.features.dtype))
            self._read(memory, texts.slots, texts.rows, begins=[0] * len(texts.rows))

    def open(self, slots: Sequence[int], *, batch_size: int, capacity: int) -> None:
        del slots
        self._room(batch_size, capacity)

    def read(self, frame: Frame, pieces: Pieces, features: Tensor | None) -> None:
        assert features is not None, "the head reads the target's states"
        memory = self._memories[frame.batch_size]
        slots = pieces.of_slots(torch.arange(frame.batch_size, device=features.device), memory.spare)
        memory.features[slots[:, None], pieces.columns()] = features.to(memory.features.dtype)
        standing = Standing((memory.keys, memory.values), Rows(pieces.starts.int(), slots.int()), Sights(None, None))
        self.head.step(pieces.tokens(frame, shift=1), Above(self.head.fuse(features)), standing)

    def catch_up(self, slots: Sequence[int], rows: Sequence[Sequence[int]], *, batch_size: int, known: Sequence[int]) -> None:
        with torch.inference_mode():
            begins = [max(0, length - 1 - self._again.count) for length in known]
            self._read(self._memories[batch_size], slots, rows, begins=begins)

    def take(self, frame: Frame, before: Tensor, features: Tensor, path: Tensor | None) -> None:
        memory, features = self._memories[frame.batch_size], followed(features, path)
        places = before[:, None] + torch.arange(features.shape[1], device=before.device)
        places = places.clamp(max=memory.capacity - 1)[..., None].expand_as(features)
        memory.features.scatter_(1, places, features.to(memory.features.dtype))

    def _room(self, batch_size: int, capacity: int) -> Memory:
        memory = self._memories.get(batch_size)
        if memory is None or memory.capacity < capacity + _STEP:
            size, config = -(-(capacity + _STEP) // _STEP) * _STEP, self._layer
            like = next(self.head.head.parameters())
            with torch.inference_mode(False):  # whoever asks first, anybody may write to it
                keys = like.new_zeros(batch_size + 1, config.num_kv_heads, size, config.head_dim)
                features = like.new_zeros(batch_size + 1, size, len(self.taps) * config.hidden_size)
                places = torch.arange(batch_size, dtype=torch.int32, device=like.device)
                spare = torch.full((), batch_size, device=like.device)
                grown = Memory(keys, torch.zeros_like(keys), features, places, spare)
            if memory is not None:
                grown.take(memory, range(batch_size))
                self._version += 1
            memory = self._memories[batch_size] = grown
        return memory

    def _read(self, memory: Memory, slots: Sequence[int], rows: Sequence[Sequence[int]], *, begins: Sequence[int]) -> None:
        """Columns from ``begins`` on of slots whose tokens are ``rows``. Rows with fewer of them are read beyond their ends."""
        device, longest = memory.keys.device, max(len(row) - 1 - begin for row, begin in zip(rows, begins, strict=True))
        owners, texts = sent(list(slots), torch.int64, device), padded_tokens(rows, device)
        for first in range(0, longest, _CHUNK):
            count = min(_CHUNK, longest - first)
            starts = sent([min(begin + first, memory.capacity - count) for begin in begins], torch.int64, device)
            columns = starts[:, None] + torch.arange(count, device=device)
            tokens = texts.gather(1, (columns + 1).clamp(max=texts.shape[1] - 1))
            standing = Standing((memory.keys, memory.values), Rows(starts.int(), owners.int()), Sights(None, None))
            self.head.step(tokens, Above(self.head.fuse(memory.features[owners[:, None], columns])), standing)

    def at_root(self, frame: Frame) -> tuple[Tensor, Tensor]:
        """[B, 1, H] state and [B, 1, Vd] logits after the root, the last columns read again."""
        memory = self._memories[frame.batch_size]
        first = self._again.first(frame, behind=1)
        columns = self._again.columns(first)
        features = memory.features.gather(1, columns[..., None].expand(-1, -1, memory.features.shape[2]))
        standing = memory.standing(first, Sights(None, None))
        stream, parts = self.head.step(frame.tokens.gather(1, columns + 1), Above(self.head.fuse(features)), standing)
        shape = (frame.batch_size, self._again.count)
        last = [self._again.last(read.unflatten(-2, shape), frame, first, behind=1).squeeze(-2) for read in (stream, parts)]
        return self._found(last[0], last[1], frame.batch_size)

    def below(self, frame: Frame, tokens: Tensor, above: Above, sights: Sights) -> tuple[Tensor, Tensor]:
        """[B, M, H] states and [B, M, Vd] logits of guesses, which stand behind the columns of their rows."""
        standing = self._memories[frame.batch_size].standing(frame.lengths - 1, sights)
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
        states, logits = self._eagle.below(self._frame, asked.tokens, Above(self._found, asked.above), asked.sights)
        self._found = torch.cat([self._found, states], 1)
        return logits
