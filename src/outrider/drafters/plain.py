"""The drafter that proposes nothing. With it the loop is plain autoregressive decoding, measured by the same counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import Context, Drafter, Observation, Plan, Stateless
from outrider.core.method_rows import MethodRow, Parts


@final
class NullDrafter(Drafter):
    """Every tree is its root."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.IID, Draws.WITHOUT_REPLACEMENT)
    waits: ClassVar = "it drafts nothing"
    shape: ClassVar = Shape.CHAIN
    never_guesses: ClassVar = True

    def __init__(self, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        self.draws = draws

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> Stateless:
        del rows, taps
        return Stateless()

    def propose(self, state: Stateless, context: Context, plan: Plan) -> Draft:
        del state, plan
        return context.without_guesses(self.draws)

    def observe(self, state: Stateless, observation: Observation) -> None:
        del state, observation


def build(parts: Parts) -> Drafter:
    return NullDrafter(draws=parts.draws)


ROW = MethodRow(
    summary="no guesses: one target pass per token",
    paper="-",
    drafter=NullDrafter,
    build=build,
    policy="fixed",
)
