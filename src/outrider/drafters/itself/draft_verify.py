"""Draft & Verify: the target with some of its sublayers left out drafts for the target.

A fixed set of attention and MLP sublayers is skipped while drafting; all others run on the target's own cache. Drafting stops
after a guess the drafter is not sure of, and the threshold follows the *matchness*, the share of guesses that were accepted. It
rises while too many are rejected, and falls while drafts end early without need. (Zhang et al. 2023, arXiv 2309.08168. There
the set is found by Bayesian optimisation; here by ``skip_search.find_skips``, or online by method ``swift``.)

    AR <- 0.5 AR + 0.5 accepted / drafted
    th' = th + 0.01  if AR < 0.9,    th  if the draft was as long as planned,    th - 0.01  otherwise
    th <- 0.9 th + 0.1 th'

The unsure guess is kept (Lemma C of docs/lossless.md): lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from outrider.core.device_round import CapturedShape, DeviceDrafter
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import Context, Drafter, Observation, Plan, RowState, Target
from outrider.core.layered_target import LayeredTarget
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.route import Route
from outrider.drafters.itself.device_exits import exit_twin
from outrider.drafters.itself.self_chain import UnsureStop, draft_along, layered

_RATE, _STEP, _INERTIA, _GOAL = 0.5, 0.01, 0.9, 0.9


@dataclass(frozen=True)
class DraftVerifyOptions:
    """Which sublayers are skipped, and which guesses are uncertain."""

    skip_attention: tuple[int, ...] | str | None = None
    """Layers whose attention is skipped while drafting ("1,3,5" on the command line). Default: every second layer."""
    skip_mlp: tuple[int, ...] | str | None = None
    """Layers whose MLP is skipped while drafting."""
    threshold: float = 0.8
    """Initial threshold: drafting stops after a guess with lower confidence."""
    adapt: bool = True
    """Whether the threshold follows the matchness."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise OptionError(f"threshold = {self.threshold!r} is not valid; use a number from 0 to 1")
        for name in ("skip_attention", "skip_mlp"):
            layers_of(name, vars(self)[name])

    def route(self, num_layers: int) -> Route:
        if self.skip_attention is None and self.skip_mlp is None:
            return Route.without(num_layers, attention=range(1, max(2, num_layers - 1), 2) if num_layers > 1 else ())
        attention, mlp = layers_of("skip_attention", self.skip_attention), layers_of("skip_mlp", self.skip_mlp)
        return Route.without(num_layers, attention=attention, mlp=mlp)


def layers_of(name: str, given: tuple[int, ...] | str | None) -> tuple[int, ...]:
    """Layer numbers, from a sequence or from text with commas."""
    try:
        return tuple(int(part) for part in (given.split(",") if isinstance(given, str) else given or ()) if part != "")
    except (TypeError, ValueError):
        raise OptionError(f"{name} = {given!r} is not valid; write layer numbers with commas between them") from None


@dataclass(frozen=True)
class Matchness:
    """One request's threshold, and the acceptance rate that it follows."""

    threshold: float
    rate: float = _GOAL
    """Running acceptance rate. Its initial value leaves the threshold unchanged."""

    def after(self, accepted: int, drafted: int, planned: int) -> Matchness:
        """The values for the next round, after one that drafted ``drafted`` of ``planned`` guesses."""
        rate = _RATE * self.rate + (1 - _RATE) * accepted / drafted
        change = _STEP if rate < _GOAL else 0.0 if drafted >= planned else -_STEP
        threshold = min(1.0, max(0.0, self.threshold + (1 - _INERTIA) * change))
        return Matchness(threshold, rate)


@dataclass
class _State(RowState):
    rows: list[Matchness]

    def fork(self, rows: Sequence[int]) -> _State:
        return _State([self.rows[row] for row in rows])

    def join(self, other: _State) -> _State:
        return _State([*self.rows, *other.rows])


@final
class DraftVerify(Drafter):
    """Chains from the target without some of its sublayers."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.IID)
    shape: ClassVar = Shape.CHAIN

    def __init__(
        self, target: LayeredTarget, options: DraftVerifyOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC
    ) -> None:
        self.target, self.draws = target, draws
        self.options = options or DraftVerifyOptions()
        self.route = self.options.route(target.num_layers)

    def device_twin(self, shape: CapturedShape, target: Target) -> DeviceDrafter | None:
        """Available if the threshold is fixed. One that follows the matchness needs the host."""
        is_fixed = self.draws is Draws.DETERMINISTIC and not self.options.adapt
        return exit_twin(self.route, shape, target, threshold=self.options.threshold) if is_fixed else None

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> _State:
        del taps
        return _State([Matchness(self.options.threshold)] * len(rows))

    def propose(self, state: _State, context: Context, plan: Plan) -> Draft:
        stop = UnsureStop(context, [row.threshold for row in state.rows], draws=self.draws)
        return draft_along(self.target, context, plan, route=self.route, draws=self.draws, stop=stop)

    def observe(self, state: _State, observation: Observation) -> None:
        """Move the thresholds of the rows that drafted."""
        if not self.options.adapt:
            return
        plan, drafted = observation.plan, observation.draft.num_drafted
        planned = drafted if plan is None else plan.max_depth
        rounds = zip(state.rows, observation.num_accepted, drafted, planned, strict=True)
        state.rows = [row.after(*counts) if counts[1] else row for row, *counts in rounds]


def build(parts: Parts) -> Drafter:
    return DraftVerify(layered(parts.target, "draft-verify"), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="the target without some sublayers guesses, as long as it is sure",
    paper="Zhang et al. 2023, Draft & Verify (arXiv 2309.08168)",
    drafter=DraftVerify,
    build=build,
    needs_layers=True,
    options=DraftVerifyOptions,
    defaults={"num_draft_tokens": 8},
)
