"""The drafter of a lane that reads prompts before captured rounds run: it guesses nothing, and keeps what the target tapped.

A head inside a captured round reads the target's states of the prompt. The pass that reads the prompt hands them on, so that
nobody reads it twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import Context, Drafter, Observation, Plan
from outrider.core.row_state import RowState


@final
@dataclass(frozen=True, eq=False)
class PromptStates(RowState):
    """What was tapped of each row."""

    features: tuple[Tensor | None, ...]
    """[n, F] layer beside layer; None where nothing is tapped."""

    def fork(self, rows: Sequence[int]) -> PromptStates:
        return PromptStates(tuple(self.features[row] for row in rows))

    def join(self, other: PromptStates) -> PromptStates:
        return PromptStates(self.features + other.features)


@final
class PromptReader(Drafter):
    """Reads prompts for a drafter that taps these layers."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.CHAIN
    never_guesses: ClassVar = True

    def __init__(self, taps: Sequence[int]) -> None:
        self.taps = tuple(taps)
        self.draws = Draws.DETERMINISTIC

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> PromptStates:
        if not self.taps:
            return PromptStates((None,) * len(rows))
        together = torch.cat([torch.cat(taps[tap]) for tap in self.taps], -1)  # of all rows: few launches
        return PromptStates(together.split([len(states) for states in taps[self.taps[0]]]))

    def propose(self, state: PromptStates, context: Context, plan: Plan) -> Draft:
        del state, plan
        return context.without_guesses(self.draws)

    def observe(self, state: PromptStates, observation: Observation) -> None:
        del state, observation
