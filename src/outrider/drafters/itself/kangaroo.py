"""Double early exit: leave the target early, and stop drafting early.

Guesses come from the target's first layers, as in ``early_exit``. A guess that the exit is not sure of is the last of its
round, so that doubtful guesses do not pile up. (Liu et al. 2024, Kangaroo, arXiv 2404.18911.) The exit uses the target's norm
and head alone, or a trained adapter before them (``models/adapter.py``). The adapter is a layer with its own keys and values of
every committed token. After each round it reads the exit's states of the accepted tokens, which the verifying pass computes
anyway.

    stop after guess k if  softmax(l_E + T g)[guess] < eta        l_E: logits at the exit, g: the noise of a coupled guess

A coupled guess is the argmax of l_E + T g, so this is the largest probability. A sampled guess has its own probability there.

The unsure guess is kept and verified, so stopping biases nothing (Lemma C of docs/lossless.md): lossless under every rule
that is exact for the draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.core.device_round import CapturedShape, DeviceDrafter
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import CompositionError, OptionError
from outrider.core.interfaces import Context, Drafter, Observation, Plan, RowState, Stateless, Target
from outrider.core.layered_target import LayeredTarget
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.heads.pending_states import PendingStates
from outrider.drafters.itself.device_exits import adapted_twin, exit_twin
from outrider.drafters.itself.early_exit import exit_route
from outrider.drafters.itself.self_chain import UnsureStop, draft_along, layered
from outrider.models.adapter import Adapter, load_adapter
from outrider.models.heads.layer import LayerCache

_CHUNK = 512
"""Most states that an adapter reads in one pass."""


@dataclass(frozen=True)
class KangarooOptions:
    """Where to exit, and when to stop."""

    exit_layer: int | None = None
    """Number of layers that draft. Default: half of the target's."""
    threshold: float = 0.6
    """Eta: drafting stops after a guess with lower confidence."""
    adapter: str | None = None
    """Folder of a trained adapter (``outrider train kangaroo``), which also sets the exit layer. Default: no adapter."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise OptionError(f"threshold = {self.threshold!r} is not valid; use a number from 0 to 1")


@final
class Kangaroo(Drafter):
    """Chains from the target's first layers, as long as they are confident."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.IID)
    shape: ClassVar = Shape.CHAIN

    def __init__(
        self, target: LayeredTarget, options: KangarooOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC
    ) -> None:
        self.target, self.draws = target, draws
        self.options = options or KangarooOptions()
        self.route = exit_route(self.options.exit_layer, target.num_layers)

    def device_twin(self, shape: CapturedShape, target: Target) -> DeviceDrafter | None:
        is_coupled = self.draws is Draws.DETERMINISTIC
        return exit_twin(self.route, shape, target, threshold=self.options.threshold) if is_coupled else None

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> Stateless:
        del rows, taps
        return Stateless()

    def propose(self, state: Stateless, context: Context, plan: Plan) -> Draft:
        del state
        stop = UnsureStop(context, [self.options.threshold] * len(context.tokens), draws=self.draws)
        return draft_along(self.target, context, plan, route=self.route, draws=self.draws, stop=stop)

    def observe(self, state: Stateless, observation: Observation) -> None:
        """Nothing to do: drafter and target share a cache."""


@dataclass
class _Read(RowState):
    """The adapter's cache, and the states it has not read."""

    cache: ContiguousCache
    pending: PendingStates
    """Exit states of committed tokens that are not yet in the cache."""

    def fork(self, rows: Sequence[int]) -> _Read:
        return _Read(self.cache.fork(rows), self.pending.fork(rows))

    def join(self, other: _Read) -> _Read:
        return _Read(self.cache.join(other.cache), self.pending.join(other.pending))


@final
class AdaptedKangaroo(Drafter):
    """Chains from an exit with a trained layer before the target's output head."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.IID)
    shape: ClassVar = Shape.CHAIN

    def __init__(
        self, target: LayeredTarget, adapter: Adapter, options: KangarooOptions, *, draws: Draws = Draws.DETERMINISTIC
    ) -> None:
        self.target, self.adapter, self.options, self.draws = target, adapter, options, draws
        self.route, self.taps = exit_route(adapter.exit_layer, target.num_layers), (adapter.exit_layer,)
        self._dtype = adapter.layer.post_attention_layernorm.weight.dtype
        self._layer = LayerCache(adapter.config, dtype=self._dtype, device=target.device)

    def device_twin(self, shape: CapturedShape, target: Target) -> DeviceDrafter | None:
        if self.draws is not Draws.DETERMINISTIC:
            return None
        return adapted_twin(self.adapter, self.route, shape, target, threshold=self.options.threshold)

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> _Read:
        states = [states.to(self._dtype) for states in taps[self.adapter.exit_layer]]
        return _Read(self._layer.new(len(rows)), PendingStates(states, self.taps))

    def propose(self, state: _Read, context: Context, plan: Plan) -> Draft:
        if any(min(depth, nodes) for depth, nodes in zip(plan.max_depth, plan.max_nodes, strict=True)):
            self._catch_up(state)
        stop = UnsureStop(context, [self.options.threshold] * len(context.tokens), draws=self.draws)

        def logits_of(states: Tensor, chain: TokenTree) -> Tensor:
            attending = self._layer.attending(chain, state.cache, chain.num_nodes - states.shape[1])
            return self.target.logits(self.adapter.layer(states.to(self._dtype), attending).to(states.dtype))

        return draft_along(self.target, context, plan, route=self.route, draws=self.draws, stop=stop, logits_of=logits_of)

    def observe(self, state: _Read, observation: Observation) -> None:
        """Nothing to undo: drafted entries were never committed. The accepted tokens' states are read next time."""
        state.pending.note(observation.scores.taps, observation.paths)

    def _catch_up(self, state: _Read) -> None:
        """Read the pending states."""
        while any(len(row) for row in state.pending.rows):
            parts = [row[:_CHUNK] for row in state.pending.rows]
            state.pending.drop([len(part) for part in parts])
            longest, sizes = max(len(part) for part in parts), [len(part) for part in parts]
            states = torch.stack([torch.nn.functional.pad(part, (0, 0, 0, longest - len(part))) for part in parts])
            tokens = torch.zeros(states.shape[:2], dtype=torch.int64, device=states.device)
            self.adapter.layer(states, self._layer.attending(TokenTree.chain(tokens, sizes), state.cache))
            state.cache.commit([range(size) for size in sizes])


def build(parts: Parts) -> Drafter:
    """Builds the method with the adapter that the options name, or with the bare exit."""
    target, options = layered(parts.target, "kangaroo"), parts.options
    if options.adapter is None:
        return Kangaroo(target, options, draws=parts.draws)
    if parts.part is None:
        raise CompositionError(
            "kangaroo with an adapter cannot be part of another method: the adapter needs the states of all accepted tokens, "
            "and a part sees those of its own guesses; leave adapter out, or use kangaroo alone"
        )
    adapter = load_adapter(options.adapter, target)
    if options.exit_layer not in (None, adapter.exit_layer):
        found = f"exit_layer = {options.exit_layer}, and {options.adapter} was trained for exit {adapter.exit_layer}"
        raise OptionError(f"{found}; leave exit_layer out")
    return AdaptedKangaroo(target, adapter, options, draws=parts.draws)


ROW = MethodRow(
    summary="early exit, with a trained adapter where there is one, that stops drafting when unsure",
    paper="Liu et al. 2024, Kangaroo (arXiv 2404.18911)",
    drafter=Kangaroo,
    build=build,
    needs_layers=True,
    options=KangarooOptions,
    defaults={"num_draft_tokens": 6},
)
