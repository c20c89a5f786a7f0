"""Double early exit: leave the target early, and stop drafting early.

Guesses come from the target's first layers, as in ``early_exit``; a guess the exit is not sure of is the last of its round, so
that doubtful guesses are not piled on each other. (Liu et al. 2024, Kangaroo, arXiv 2404.18911. There a small trained adapter
stands between the exit and the head; here the exit speaks for itself.)

    stop after guess k if  softmax(l_E + T g)[guess] < eta        l_E: logits at the exit, g: the noise of a coupled guess

A coupled guess is the argmax of l_E + T g, so this is the exit's top probability (of a sampled guess, its own).

The unsure guess is kept and verified, so stopping biases nothing (Lemma C of docs/lossless.md): lossless under every rule that
is exact for the draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import Context, Drafter, LayeredTarget, Observation, Plan, Stateless
from outrider.drafters.early_exit import exit_route
from outrider.drafters.self_chain import UnsureStop, draft_along


@dataclass(frozen=True)
class KangarooOptions:
    """The two exits."""

    exit_layer: int | None = None
    """Layers that draft; half of the target's if not given."""
    threshold: float = 0.6
    """Eta: drafting stops after a guess less sure than this."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise OptionError(f"threshold = {self.threshold!r} is not valid; use a number from 0 to 1")


@final
class Kangaroo(Drafter):
    """Chains from the target's first layers, as long as these are sure."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.IID)
    shape: ClassVar = Shape.CHAIN

    def __init__(
        self, target: LayeredTarget, options: KangarooOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC
    ) -> None:
        self.target, self.draws = target, draws
        self.options = options or KangarooOptions()
        self.route = exit_route(self.options.exit_layer, target.num_layers)

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> Stateless:
        del rows, taps
        return Stateless()

    def propose(self, state: Stateless, context: Context, plan: Plan) -> Draft:
        del state
        stop = UnsureStop(context, [self.options.threshold] * len(context.tokens), draws=self.draws)
        return draft_along(self.target, context, plan, route=self.route, draws=self.draws, stop=stop)

    def observe(self, state: Stateless, observation: Observation) -> None:
        """Nothing to do: the target's cache is the drafter's."""
