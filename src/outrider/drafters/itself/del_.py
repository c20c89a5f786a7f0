"""DEL: early exit with the exit layer and the draft length chosen every round, by how well each exit would have done.

Every few rounds the verifying pass returns its hidden states. Each exit's token (its *shadow token*) is compared with the
target's at the verified positions (``exit_statistics.py``). The next rounds use the exit with most tokens per layer run. They
stop after a guess whose confidence is below the threshold that separates this exit's right guesses from its wrong ones. Where
no exit pays, nothing is drafted. (Entezari Zarch et al. 2025, arXiv 2504.05598.)

    (l, d) = argmax TPL(l, d),      stop after guess k if  softmax(l_l + T g)[guess] < tau_l

In other rounds the verifying pass resumes after the drafted layers, as with ``early_exit``. One exit serves all rows of a
batch, since they share passes. Choices depend only on the past, and the unsure guess is kept (Lemma C of docs/lossless.md):
lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import CompositionError, OptionError
from outrider.core.interfaces import Context, Drafter, Observation, Plan, RowState
from outrider.core.lasting_memory import LastingMemory
from outrider.core.layered_target import LayeredTarget
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.route import Route
from outrider.drafters.itself.draft_verify import layers_of
from outrider.drafters.itself.exit_statistics import ExitStatistics
from outrider.drafters.itself.self_chain import UnsureStop, draft_along, layered

_NUM_EXITS = 8
_STRETCH = 2
"""Confident guesses may exceed the chosen length by this factor. The paper sets no limit, which wastes work if no exit is
good."""


@dataclass(frozen=True)
class DynamicExitOptions:
    """The exits, and how they are evaluated."""

    exits: tuple[int, ...] | str | None = None
    """Layers at which drafting may exit ("2,4,8" on the command line). Default: about eight, evenly spaced."""
    look_every: int = 4
    """Rounds between two evaluations of all exits. One costs the output head once per exit and verified position."""
    prompt_window: int = 32
    """Number of last prompt tokens on which exits are evaluated before the first round."""
    decay: float = 0.98
    """Decay of earlier counts at each evaluation. (The paper: 0.95, with an evaluation in every round.)"""
    dynamic: bool = True
    """Stop after an uncertain guess, and otherwise draft up to twice the chosen length. If off, draft exactly the chosen
    length."""
    memory: ExitStatistics | None = None
    """Statistics to continue from, shared between methods of one target. Default: new ones."""

    def __post_init__(self) -> None:
        layers_of("exits", self.exits)
        if not 0 < self.decay <= 1:
            raise OptionError(f"decay = {self.decay!r} is not valid; use a number above 0, at most 1")
        for name, least in (("look_every", 1), ("prompt_window", 0)):
            value = vars(self)[name]
            if not isinstance(value, int) or value < least:
                raise OptionError(f"{name} = {value!r} is not valid; use a whole number of at least {least}")

    def new_memory(self, num_layers: int) -> ExitStatistics:
        """The statistics these options ask for."""
        if self.memory is not None:
            if self.memory.num_layers != num_layers:
                raise CompositionError(
                    f"this memory is of a model with {self.memory.num_layers} layers and the target has {num_layers}; "
                    "use a memory of the same model"
                )
            return self.memory
        step, last = max(1, num_layers // _NUM_EXITS), max(1, num_layers - 1)
        exits = layers_of("exits", self.exits) or tuple(range(step, max(2, num_layers), step))
        wrong = next((layer for layer in exits if not 1 <= layer <= last), None)
        if wrong is not None:
            raise OptionError(f"exits holds {wrong}; the target has {num_layers} layers, use whole numbers from 1 to {last}")
        return ExitStatistics(exits, num_layers, decay=self.decay)


@dataclass
class _State(RowState):
    looks: bool = False
    """Whether this round's pass taps all layers."""

    def fork(self, rows: Sequence[int]) -> _State:
        del rows
        return _State()

    def join(self, other: Any) -> _State:
        del other
        return _State()


@final
class DynamicExit(Drafter):
    """Chains from the target's first layers, as many as has recently paid best."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.IID)
    shape: ClassVar = Shape.CHAIN

    def __init__(
        self, target: LayeredTarget, options: DynamicExitOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC
    ) -> None:
        self.target, self.draws = target, draws
        self.options = options or DynamicExitOptions()
        self.memory = self.options.new_memory(target.num_layers)
        """Shared by all requests and by every drafter that is given it."""
        self.taps = (*self.memory.exits, target.num_layers)

    @property
    def memories(self) -> tuple[LastingMemory, ...]:
        return (self.memory,)

    @torch.inference_mode()
    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> _State:
        """Evaluate the exits on the end of the prompts."""
        del rows
        window = self.options.prompt_window
        ends = {layer: torch.cat([states[max(0, len(states) - window) :] for states in taps[layer]]) for layer in taps}
        if ends and len(ends[self.target.num_layers]):
            wanted = self.target.logits(ends[self.target.num_layers]).argmax(-1)
            self._look(ends, wanted)
        return _State()

    def propose(self, state: _State, context: Context, plan: Plan) -> Draft:
        memory = self.memory
        memory.num_rounds += 1
        state.looks = memory.num_rounds % self.options.look_every == 0
        choice = memory.choose(max(plan.max_depth))
        longest = _STRETCH * choice.depth if self.options.dynamic else choice.depth
        plan = plan.clipped([longest] * len(context.tokens))
        stop = UnsureStop(context, [choice.threshold] * len(context.tokens), draws=self.draws)
        route = Route.first(choice.exit, self.target.num_layers)
        draft = draft_along(
            self.target, context, plan, route=route, draws=self.draws, stop=stop if self.options.dynamic else None
        )
        return replace(draft, resume=None) if state.looks else draft

    def round_taps(self, state: _State) -> tuple[int, ...]:
        return self.taps if state.looks else ()

    def observe(self, state: _State, observation: Observation) -> None:
        """Evaluate the exits at the verified positions: the root and the accepted guesses."""
        if not state.looks:
            return
        state.looks = False
        logits, taps = observation.scores.logits, observation.scores.taps
        rows = torch.tensor([row for row, path in enumerate(observation.paths) for _ in path], device=logits.device)
        nodes = torch.tensor([node for path in observation.paths for node in path], device=logits.device)
        self._look({layer: states[rows, nodes] for layer, states in taps.items()}, logits[rows, nodes].argmax(-1))

    def _look(self, states: Mapping[int, Tensor], wanted: Tensor) -> None:
        """Compare the shadow tokens of every exit's ``states`` [P, H] with the target's tokens [P]."""
        for layer in self.memory.exits:
            sure, shadow = self.target.logits(states[layer]).float().softmax(-1).max(-1)
            self.memory.learn(layer, shadow == wanted, sure)


def build(parts: Parts) -> Drafter:
    return DynamicExit(layered(parts.target, "del"), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="early exit whose layer and length follow how well every exit would have done",
    paper="Entezari Zarch et al. 2025, DEL (arXiv 2504.05598)",
    drafter=DynamicExit,
    build=build,
    needs_layers=True,
    options=DynamicExitOptions,
    defaults={"num_draft_tokens": 18},
)
