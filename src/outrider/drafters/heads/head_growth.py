"""Trees that trained heads grow level by level: level d is answered by depth d of the heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

from torch import Tensor

from outrider.core.interfaces import Context
from outrider.drafters.trees.levels import LevelGrowth
from outrider.models.heads import Head


class HeadGrowth(LevelGrowth, ABC):
    """The nodes that heads were asked about in one round."""

    def __init__(self, head: Head, context: Context) -> None:
        super().__init__(context)
        self.head = head
        self.depth = 0
        """Of the newest level."""

    def _logits(self, start: int) -> Tensor:
        self.depth += start > 0
        states = self._states(self.tokens[:, start:], self.parents[:, start:]) if start else self._root_states()
        logits = self.head.over_target(self._read_off(states)).float()
        return logits.expand(-1, self.num_expanded - start, -1)

    def _read_off(self, states: Tensor) -> Tensor:
        """[B, M, Vd] logits of the newest nodes' states."""
        return self.head.readout(self.depth, states)

    @abstractmethod
    def _root_states(self) -> Tensor:
        """[B, 1, H] states at the root."""

    @abstractmethod
    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """[B, M, H] states at the newest nodes, or [B, 1, H] where they are all the same."""


@final
class SharedLevels(HeadGrowth):
    """Heads that do not see the guesses: every level of the tree has one state."""

    def __init__(self, head: Head, context: Context, state_of: Callable[[int], Tensor]) -> None:
        """``state_of(depth)`` is the state [B, 1, H] of a level, asked for once."""
        super().__init__(head, context)
        self._state_of = state_of

    def _root_states(self) -> Tensor:
        return self._state_of(0)

    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        del tokens, parents
        return self._state_of(self.depth)
