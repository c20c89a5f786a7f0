"""Early exit: the target's first layers guess, its other layers check.

The output of layer E goes through the target's own final norm and head, and the predicted tokens are the guesses. Keys, values
and hidden states of the first E layers are the target's, so the verifying pass continues the guesses at layer E. The first E
layers are not run twice, and drafting needs no memory. (Elhoushi et al. 2024, LayerSkip, arXiv 2404.16710, train the target so
that its early layers predict well. Those of an ordinary target hardly do.)

    q(. | u) = law(head(norm(h_E(u)))),        cost of a round with K guesses, in layers:  K E  +  (K (L - E) + L in one pass)

Chains, or trees of fixed branching whose levels are expanded together. Guesses are coupled or sampled from q: lossless under
every rule that is exact for the draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

from torch import Tensor

from outrider.core.device_round import CapturedShape, DeviceDrafter
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import Context, Drafter, Observation, Plan, Stateless, Target
from outrider.core.layered_target import LayeredTarget
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.route import Route
from outrider.drafters.itself.device_exits import exit_twin
from outrider.drafters.itself.self_chain import draft_along, layered
from outrider.drafters.itself.self_growth import SelfGrowth
from outrider.drafters.trees.candidates import Drawing
from outrider.drafters.trees.options import DraftTreeOptions
from outrider.drafters.trees.static import grow_shape


@dataclass(frozen=True)
class EarlyExitOptions:
    """The exit layer, and the shape of the tree."""

    exit_layer: int | None = None
    """E: number of layers that draft. Default: half of the target's."""
    branching: tuple[int, ...] | str | None = None
    """Number of children at each level ("4,2,1" on the command line), for trees. Default: chains."""
    perturb: bool = True
    """Rank a tree's candidates with the target's noise, as the coupled rule chooses. Turn off for rule ``delta``."""

    def __post_init__(self) -> None:
        if self.branching is not None:
            assert self.shape  # raises where it is not a tree

    @property
    def shape(self) -> DraftTreeOptions:
        return DraftTreeOptions(branching=self.branching or (1,), perturb=self.perturb)


def exit_route(exit_layer: int | None, num_layers: int) -> Route:
    """The first ``exit_layer`` layers, half of them by default."""
    last = max(1, num_layers - 1)
    layer = max(1, num_layers // 2) if exit_layer is None else exit_layer
    if not isinstance(layer, int) or not 1 <= layer <= last:
        raise OptionError(
            f"exit_layer = {layer!r} is not valid; the target has {num_layers} layers, use a whole number from 1 to {last}"
        )
    return Route.first(layer, num_layers)


@final
class EarlyExit(Drafter):
    """Chains from the target's first layers."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.IID)
    shape: ClassVar = Shape.CHAIN

    def __init__(
        self, target: LayeredTarget, options: EarlyExitOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC
    ) -> None:
        self.target, self.draws = target, draws
        self.route = exit_route((options or EarlyExitOptions()).exit_layer, target.num_layers)

    def device_twin(self, shape: CapturedShape, target: Target) -> DeviceDrafter | None:
        return exit_twin(self.route, shape, target) if self.draws is Draws.DETERMINISTIC else None

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> Stateless:
        del rows, taps
        return Stateless()

    def propose(self, state: Stateless, context: Context, plan: Plan) -> Draft:
        del state
        return draft_along(self.target, context, plan, route=self.route, draws=self.draws)

    def observe(self, state: Stateless, observation: Observation) -> None:
        """Nothing to do: drafter and target share a cache."""


@final
class EarlyExitTree(Drafter):
    """Trees of a fixed branching from the target's first layers."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.WITHOUT_REPLACEMENT, Draws.IID)
    shape: ClassVar = Shape.TREE

    def __init__(self, target: LayeredTarget, options: EarlyExitOptions, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        self.target, self.draws = target, draws
        self.route = exit_route(options.exit_layer, target.num_layers)
        self.tree = options.shape.tree
        self._drawing = Drawing(draws, options.perturb)

    def device_twin(self, shape: CapturedShape, target: Target) -> DeviceDrafter | None:
        """Available if children are ranked with the target's noise."""
        is_coupled = self.draws is Draws.DETERMINISTIC and self._drawing.perturb
        return exit_twin(self.route, shape, target, tree=self.tree) if is_coupled else None

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> Stateless:
        del rows, taps
        return Stateless()

    def propose(self, state: Stateless, context: Context, plan: Plan) -> Draft:
        del state
        if not any(min(depth, nodes) for depth, nodes in zip(plan.max_depth, plan.max_nodes, strict=True)):
            return context.without_guesses(self.draws)
        growth = SelfGrowth(self.target, context, route=self.route)
        draft, numbers = grow_shape(growth, plan, tree=self.tree, drawing=self._drawing)
        return replace(draft, resume=growth.resume(draft.tree, numbers))

    def observe(self, state: Stateless, observation: Observation) -> None:
        """Nothing to do: drafter and target share a cache."""


def build(parts: Parts) -> Drafter:
    target, options = layered(parts.target, "early-exit"), parts.options
    return (EarlyExit if options.branching is None else EarlyExitTree)(target, options, draws=parts.draws)


ROW = MethodRow(
    summary="the target's first layers guess, and its other layers go on from there",
    paper="Elhoushi et al. 2024, LayerSkip (arXiv 2404.16710)",
    drafter=EarlyExit,
    build=build,
    needs_layers=True,
    options=EarlyExitOptions,
)
