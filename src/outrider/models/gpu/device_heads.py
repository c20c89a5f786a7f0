"""Heads without a memory inside a captured round: of the text they read the target's newest states alone, and the root.

Those states are kept for every slot, at addresses that stay. A round hands over the states of its nodes; those of the accepted
ones follow what is kept, and the last few of both are kept next. A slot that stood still keeps what it had. From them the tree
grows as on the host, by the same code (``models/heads/levels.py``): Medusa, Hydra, L-MTP, MLP speculators and ReDrafter.

    kept' = last K of  [kept ; h(root) ; h(accepted 1) ; ..]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from outrider.core.device_round import DeviceDrafter, Frame, Pieces, SlotTrees, followed
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.growers import Answers, Asked, Grower
from outrider.models.gpu.uploads import sent
from outrider.models.heads.head import Head
from outrider.models.heads.levels import HeadLevels

NewLevels = Callable[[Tensor, Tensor], HeadLevels]
"""Heads at the roots [B, 1], from the newest states [B, K, F]."""


@final
class DeviceHeads(DeviceDrafter):
    """Trees from the newest states."""

    def __init__(self, head: Head, target: FastDecoder, grower: Grower, *, levels: NewLevels, num_kept: int) -> None:
        self._target, self._grower, self._levels, self._num_kept = target, grower, levels, num_kept
        self.taps, self.tree_size = head.config.taps, grower.tree_size
        self._like = next(head.parameters())
        self._width = len(self.taps) * head.config.hidden_size
        self._kept: dict[int, Tensor] = {}
        """[B + 1, K, F] by slots; the last row is no slot's."""

    @property
    def version(self) -> int:
        return 0

    def trees(self, batch_size: int) -> SlotTrees:
        return self._grower.trees(batch_size)

    def propose(self, frame: Frame, nodes: Tensor) -> None:
        levels = self._levels(self._of(frame.batch_size)[:-1], nodes[:, :1])
        self._grower.grow(LevelAnswers(levels), frame, nodes)

    def seat(self, slots: Sequence[int], rows: Sequence[Sequence[int]], *, batch_size: int, capacity: int) -> None:
        self.open(slots, batch_size=batch_size, capacity=capacity)
        kept = self._of(batch_size)
        with torch.inference_mode():
            found = self._target.prefill([row[:-1] for row in rows], self._target.new_cache(len(rows)), taps=self.taps)
            for index, slot in enumerate(slots):
                newest = torch.cat([found[tap][index][-self._num_kept :] for tap in self.taps], -1)
                kept[slot, -len(newest) :] = newest.to(kept.dtype)

    def open(self, slots: Sequence[int], *, batch_size: int, capacity: int) -> None:
        del capacity
        kept = self._of(batch_size)
        kept.index_fill_(0, sent(list(slots), torch.int64, kept.device), 0.0)

    def read(self, frame: Frame, pieces: Pieces, features: Tensor | None) -> None:
        assert features is not None, "heads read the target's states"
        kept = self._of(frame.batch_size)
        lengths = pieces.of_slots(frame.lengths, frame.lengths.new_zeros(()))
        places = pieces.columns() + 1 + self._num_kept - lengths[:, None]  # the last column read is that before the root
        is_kept = (places >= 0) & (places < self._num_kept)
        slots = torch.where(is_kept & (pieces.slots >= 0)[:, None], pieces.slots[:, None], frame.batch_size)
        kept[slots, places.clamp(0, self._num_kept - 1)] = features.to(kept.dtype)

    def take(self, frame: Frame, before: Tensor, features: Tensor, path: Tensor | None) -> None:
        kept = self._of(frame.batch_size)
        known = torch.cat([kept[:-1], followed(features, path).to(kept.dtype)], 1)
        num_new = frame.lengths - 1 - before
        places = num_new[:, None] + torch.arange(self._num_kept, device=before.device)
        kept[:-1] = known.gather(1, places[..., None].expand(-1, -1, self._width))

    def catch_up(self, slots: Sequence[int], rows: Sequence[Sequence[int]], *, batch_size: int, known: Sequence[int]) -> None:
        """Rounds without guesses hand over their states too."""
        del slots, rows, batch_size, known

    def move(self, old_size: int, new_size: int, slots: Sequence[int], *, capacity: int) -> None:
        del capacity
        old, new = self._of(old_size), self._of(new_size)
        new[: len(slots)] = old.index_select(0, sent(list(slots), torch.int64, old.device))

    def leave(self, batch_size: int) -> None:
        """Slots hold nothing that another request could not write over."""
        del batch_size

    def fits(self, capacity: int) -> bool:
        del capacity
        return True

    def _of(self, batch_size: int) -> Tensor:
        if batch_size not in self._kept:
            with torch.inference_mode(False):  # whoever asks first, anybody may write to it
                self._kept[batch_size] = self._like.new_zeros(batch_size + 1, self._num_kept, self._width)
        return self._kept[batch_size]


@final
class LevelAnswers(Answers):
    """Heads that are asked level by level."""

    def __init__(self, levels: HeadLevels) -> None:
        self._levels = levels

    def root(self) -> Tensor:
        return self._levels.at_root().float()

    def below(self, asked: Asked) -> Tensor:
        return self._levels.below(asked.tokens, asked.above).float()
