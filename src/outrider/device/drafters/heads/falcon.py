"""Falcon inside captured rounds: the states of two LSTM layers along the columns, and a layer over blocks of columns.

An LSTM takes one column after the other. A round adds a few columns. A prompt is read in pieces, each starting from the state
after the previous piece in the same slot. Blocks are those of ``models/heads/falcon_levels.py``, as on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from outrider.device.drafters.heads.memory import HeadColumns, LayerMemory, LevelAnswers, Roots, SlotAttending
from outrider.device.drafters.trees.growers import Answers
from outrider.models.attention.tree_tiles import Sights
from outrider.models.gpu.uploads import sent
from outrider.models.heads.falcon import FalconHead
from outrider.models.heads.falcon_levels import FalconLevels
from outrider.models.heads.layer import Attending

_WORD = 64


@final
class FalconMemory(LayerMemory):
    """Keys and values of columns, and the LSTM states of the newest k of them."""

    def __init__(self, head: FalconHead) -> None:
        super().__init__(head, head.config.layer, head.rotations, num_layers=1)
        self._head, self.width, self.num_kept = head, head.carried_size, head.block_len
        self._carried: dict[int, Tensor] = {}
        """[B + 1, 4H] LSTM state of each slot after the last column of a prompt that was read."""

    def _carried_by(self, batch_size: int) -> Tensor:
        if batch_size not in self._carried:
            with torch.inference_mode(False):  # whoever asks first, anybody may write to it
                self._carried[batch_size] = self._like.new_zeros(batch_size + 1, self.width)
        return self._carried[batch_size]

    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        old = self._carried_by(old_size)
        self._carried_by(new_size)[: len(slots)] = old.index_select(0, sent(list(slots), torch.int64, old.device))

    def read(self, batch_size: int, columns: HeadColumns, features: Tensor) -> Tensor:
        held, found = self._carried_by(batch_size), list[Tensor]()
        tokens, fused, is_first = columns.tokens(), self._head.fuse(features), (columns.starts == 0)[:, None]
        for row in range(len(tokens)):  # one may begin where the one before it ended
            slot = columns.slots[row : row + 1]
            begin = held.index_select(0, slot).masked_fill(is_first[row : row + 1], 0.0)
            found.append(self._head.read(tokens[row : row + 1], fused[row : row + 1], begin))
            held.index_copy_(0, slot, found[-1][:, -1])
        return self._put(batch_size, columns, torch.cat(found))

    def follow(self, batch_size: int, columns: HeadColumns, features: Tensor, newest: Tensor) -> Tensor:
        carried = self._head.read(columns.tokens(), self._head.fuse(features), newest[:, -1])
        return self._put(batch_size, columns, carried)

    def _put(self, batch_size: int, columns: HeadColumns, carried: Tensor) -> Tensor:
        entries = self._head.layer.self_attn.entries(self._head.entering(carried))
        self._attending(batch_size, columns)[0].put(*entries)
        return carried

    def answers(self, roots: Roots) -> Answers:
        num_columns, size = roots.num_columns[:, None], self.num_kept
        places = torch.arange(size, device=num_columns.device).expand(len(num_columns), -1)
        places = torch.maximum(places, size - num_columns).clamp(max=size - 1)  # the first stands for those before it
        last = roots.newest.gather(1, places[..., None].expand(-1, -1, self.width))
        return LevelAnswers(FalconLevels(self._head, last, num_columns, roots.tokens, _SlotLook(self, self._head, roots)))

    def look(self, roots: Roots, positions: Tensor, seen: Tensor | None, num_before: int) -> SlotAttending:
        """Columns after those of their slots and ``num_before`` others. Committed columns see committed columns alone."""
        starts = roots.num_columns.clamp(min=1)
        words = _words(seen) if seen is not None else torch.zeros_like(positions)[..., None]
        sights = Sights(words, (positions - starts[:, None]).int(), num_before)
        return self._attending(roots.frame.batch_size, roots.columns(starts, positions.shape[1]), sights)[0]


@final
class _SlotLook:
    """Attention of the layer over columns that follow those of their slots for the round."""

    def __init__(self, memory: FalconMemory, head: FalconHead, roots: Roots) -> None:
        self._memory, self._head, self._roots, self._num_own = memory, head, roots, 0

    def __call__(self, columns: Tensor, positions: Tensor, seen: Tensor | None) -> Tensor:
        attending = self._memory.look(self._roots, positions, seen, self._num_own)
        if seen is None:
            return self._head.layer(columns, _OfText(attending))
        self._num_own += columns.shape[1]
        return self._head.layer(columns, attending)


@final
class _OfText(Attending):
    """Columns whose keys and values are already in the memory."""

    def __init__(self, attending: SlotAttending) -> None:
        self._attending = attending

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        del keys, values
        return self._attending.look(queries)


def _words(seen: Tensor) -> Tensor:
    """[B, N, W] int64 bits of [B, N, columns] booleans."""
    padded = torch.nn.functional.pad(seen, (0, -seen.shape[2] % _WORD)).unflatten(-1, (-1, _WORD)).long()
    return (padded << torch.arange(_WORD, device=seen.device)).sum(-1)
