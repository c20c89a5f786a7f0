"""Trees that trained heads grow level by level: depth d of the heads gives the laws of level d."""

from __future__ import annotations

from abc import ABC
from typing import final

from torch import Tensor

from outrider.core.interfaces import Context
from outrider.drafters.trees.levels import LevelGrowth
from outrider.models.heads import Head
from outrider.models.heads.levels import HeadLevels, LevelStates


class HeadGrowth(LevelGrowth, LevelStates, ABC):
    """The nodes that heads expanded in one round."""

    def __init__(self, head: Head, context: Context) -> None:
        super().__init__(context)
        self.head, self.depth = head, 0

    def _logits(self, start: int) -> Tensor:
        self.depth += start > 0
        states = self._states(self.tokens[:, start:], self.parents[:, start:]) if start else self._root_states()
        logits = self.head.over_target(self._read_off(states)).float()
        return logits.expand(-1, self.num_expanded - start, -1)


@final
class LevelsGrowth(LevelGrowth):
    """Trees of heads that need nothing more from the text once the round has begun."""

    def __init__(self, context: Context, levels: HeadLevels) -> None:
        super().__init__(context)
        self.levels = levels

    def _logits(self, start: int) -> Tensor:
        levels = self.levels
        logits = levels.below(self.tokens[:, start:], self.parents[:, start:]) if start else levels.at_root()
        return levels.head.over_target(logits).float().expand(-1, self.num_expanded - start, -1)
