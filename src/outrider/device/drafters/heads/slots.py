"""Trained heads inside a captured round, with any kind of memory.

For every slot, the values of the newest columns are kept at fixed addresses: the target's states, or what the head computes
from them (``device/drafters/heads/memory.py``, ``text_attention.py``). A round passes on the states of its nodes. The states of
accepted nodes are appended to the kept ones, of which the last few stay. A slot that did not run keeps its values. A round
without guesses only stores its states; they are read before the next tree, many at a time. From there the tree grows as on the
host.

    kept' = last K of  [kept ; h(root) ; h(accepted 1) ; ..]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from outrider.core.device_round import DeviceDrafter, Frame, LateTexts, PromptPieces, SlotTrees, Texts, followed
from outrider.device.drafters.heads.memory import HeadColumns, HeadMemory, Roots
from outrider.device.drafters.heads.texts import padded_part, padded_tokens, tapped_states
from outrider.device.drafters.trees.growers import Grower
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.uploads import sent

_MOST_LATE = 64
"""Number of rounds without guesses whose states are stored."""
_CHUNK = 512
"""Most columns read in one pass."""


@final
class DeviceHeads(DeviceDrafter):
    """Trees from heads that read the newest columns."""

    most_late = _MOST_LATE

    def __init__(self, head: nn.Module, taps: tuple[int, ...], target: FastDecoder, grower: Grower, memory: HeadMemory) -> None:
        self._target, self._grower, self._memory = target, grower, memory
        self.taps, self.max_depth, self._num_kept = taps, grower.max_depth, memory.num_kept
        self._like = next(head.parameters())
        self._kept: dict[int, Tensor] = {}
        """[B + 1, K, S] kept values by slot; the last row belongs to no slot."""
        self._late: dict[int, Tensor] = {}
        """[B, L, F] the target's states of rounds without guesses. Column c is at c % L."""

    @property
    def version(self) -> int:
        return 0 if self._memory.pages is None else self._memory.pages.version

    def num_nodes(self, depth: int) -> int:
        return self._grower.num_nodes(depth)

    def trees(self, batch_size: int, depth: int) -> SlotTrees | None:
        return self._grower.trees(batch_size, depth)

    def propose(self, frame: Frame, nodes: Tensor, depth: int) -> None:
        roots = Roots(frame, self._of(frame.batch_size)[:-1], nodes[:, :1], depth)
        self._grower.grow(self._memory.answers(roots), frame, nodes, depth)

    def seat(self, texts: Texts, *, batch_size: int) -> None:
        self.open(texts.slots, batch_size=batch_size)
        self.grow(dict(zip(texts.slots, map(len, texts.rows), strict=True)), batch_size=batch_size)
        kept = self._of(batch_size)
        with torch.inference_mode():
            found = tapped_states(self._target, texts, self.taps)
            owners, tokens = sent(list(texts.slots), torch.int64, kept.device), padded_tokens(texts.rows, kept.device)
            lengths = sent([len(row) for row in texts.rows], torch.int64, kept.device)
            for first in range(0, tokens.shape[1] - 1, _CHUNK):
                part = padded_part(found, first, _CHUNK).to(kept.dtype)
                columns = HeadColumns(owners, torch.full_like(owners, first), part.shape[1], tokens)
                self._keep(batch_size, columns, lengths, self._memory.read(batch_size, columns, part))

    def open(self, slots: Sequence[int], *, batch_size: int) -> None:
        if self._memory.pages is not None:
            self._memory.pages.open(slots, batch_size=batch_size)
        kept = self._of(batch_size)
        kept.index_fill_(0, sent(list(slots), torch.int64, kept.device), 0.0)

    def read(self, frame: Frame, pieces: PromptPieces, features: Tensor | None) -> None:
        assert features is not None, "heads read the target's states"
        kept, spare = self._of(frame.batch_size), frame.batch_size
        owners = torch.where(pieces.slots >= 0, pieces.slots, spare)
        columns = HeadColumns(owners, pieces.starts, features.shape[1], frame.tokens[pieces.slots.clamp(min=0)])
        states = self._memory.read(spare, columns, features.to(kept.dtype))
        self._keep(spare, columns, pieces.of_slots(frame.lengths, frame.lengths.new_zeros(())), states)

    def _keep(self, batch_size: int, columns: HeadColumns, lengths: Tensor, states: Tensor) -> None:
        """Keep the last of the values [R, N, S] before the roots of texts of ``lengths`` [R]."""
        places = columns.at() + 1 + self._num_kept - lengths[:, None]
        owners = torch.where((places >= 0) & (places < self._num_kept), columns.slots[:, None], batch_size)
        self._of(batch_size)[owners, places.clamp(0, self._num_kept - 1)] = states

    def take(self, frame: Frame, before: Tensor, features: Tensor, path: Tensor | None) -> None:
        size, features = frame.batch_size, followed(features, path).to(self._like.dtype)
        slots = torch.arange(size, device=before.device)
        if features.shape[1] == 1:  # a round without guesses; more of them may follow, and nobody asks the heads meanwhile
            self._late_of(size)[slots, before % _MOST_LATE] = features[:, 0]
        else:
            columns = HeadColumns(slots, before, features.shape[1], frame.tokens)
            kept = self._of(size)[:-1]
            self._note(kept, self._memory.follow(size, columns, features, kept), frame.lengths - 1 - before)

    def catch_up(self, late: LateTexts, *, batch_size: int) -> None:
        kept, unread = self._of(batch_size), self._late_of(batch_size)
        with torch.inference_mode():
            slots, lengths, added = sent([late.slots, [len(row) for row in late.rows], late.added], torch.int64, kept.device)
            count = 1 << (max(late.added) - 1).bit_length()  # few shapes, for which kernels were compiled beforehand
            columns = HeadColumns(slots, lengths - 1 - added, count, padded_tokens(late.rows, kept.device))
            features, newest = unread[slots[:, None], columns.at() % _MOST_LATE], kept.index_select(0, slots)
            self._note(newest, self._memory.catch_up(batch_size, columns, features, newest), added)
            kept.index_copy_(0, slots, newest)

    def _note(self, kept: Tensor, states: Tensor, num_new: Tensor) -> None:
        """Append the first ``num_new`` of ``states`` [R, N, S] to the kept values [R, K, S], of which the last K stay."""
        known = torch.cat([kept, states], 1)
        places = num_new[:, None] + torch.arange(self._num_kept, device=known.device)
        kept.copy_(known.gather(1, places[..., None].expand(-1, -1, known.shape[2])))

    def has_room(self, reaches: Mapping[int, int], *, batch_size: int) -> bool:
        return self._memory.pages is None or self._memory.pages.has_room(reaches, batch_size=batch_size)

    def grow(self, reaches: Mapping[int, int], *, batch_size: int) -> None:
        if self._memory.pages is not None:
            self._memory.pages.grow(reaches, batch_size=batch_size)

    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        if self._memory.pages is not None:
            self._memory.pages.move(old_size, new_size, slots)
        self._memory.move(old_size, new_size, slots)
        index = sent(list(slots), torch.int64, self._like.device)
        for held in (self._of, self._late_of):
            held(new_size)[: len(slots)] = held(old_size).index_select(0, index)

    def release(self, slots: Sequence[int], *, batch_size: int) -> None:
        if self._memory.pages is not None:
            self._memory.pages.release(batch_size, slots)

    def fits(self, capacity: int) -> bool:
        return self._memory.fits(capacity)

    def _of(self, batch_size: int) -> Tensor:
        if batch_size not in self._kept:
            with torch.inference_mode(False):  # whoever asks first, anybody may write to it
                self._kept[batch_size] = self._like.new_zeros(batch_size + 1, self._num_kept, self._memory.width)
        return self._kept[batch_size]

    def _late_of(self, batch_size: int) -> Tensor:
        if batch_size not in self._late:
            with torch.inference_mode(False):
                width = len(self.taps) * self._target.config.hidden_size
                self._late[batch_size] = self._like.new_zeros(batch_size, _MOST_LATE, width)
        return self._late[batch_size]
