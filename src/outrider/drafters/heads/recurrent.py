"""Recurrent heads: each node has a state, computed from its parent's state and its token. MLP speculator and ReDrafter grow
trees this way.

A node costs a few small products and no attention, and its law depends on the guesses above it.

    state(node) = advance(state(parent), token of node),      q(. | node) = softmax(readout(state(node)))
"""

from __future__ import annotations

from abc import ABC
from typing import final

import torch
from torch import Tensor

from outrider.core.draft import Draws
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.newest import NewestDrafter
from outrider.models.heads.levels import HeadLevels
from outrider.models.heads.recurrent import RecurrentHead


class Recurrent(NewestDrafter, ABC):
    """Trees from a recurrent state that reads the guesses."""

    def __init__(self, head: RecurrentHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head = head

    def _levels(self, features: Tensor, roots: Tensor) -> RecurrentLevels:
        return RecurrentLevels(self.head, features, roots)


@final
class RecurrentLevels(HeadLevels):
    """Keeps the states of all nodes."""

    def __init__(self, head: RecurrentHead, features: Tensor, roots: Tensor) -> None:
        super().__init__(head)
        self._recurrent = head
        self._all = head.advance(0, head.begin(features), roots)

    def _root_states(self) -> Tensor:
        return self._all

    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        above = self._all.gather(1, parents[..., None].expand(-1, -1, self._all.shape[2]))
        states = self._recurrent.advance(self.depth, above, tokens)
        self._all = torch.cat([self._all, states], 1)
        return states
