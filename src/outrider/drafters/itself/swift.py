"""SWIFT: drafts with the target without some sublayers, and searches during generation which ones it can skip.

Rounds draft with the best skip set known. Until the search ends, every round also tries another set on a stretch of the same
text, in one pass without the set's sublayers. A set that agrees more often with the whole target replaces the best one. The
search belongs to the method and outlives requests, so later requests start with what earlier ones found. (Xia et al. 2024,
arXiv 2410.06916. Its code copies the whole cache for every draft and every trial; here drafting needs no copy, and trials one
row, once per request.)

    skip n = 0.45 * 2 (L - 2) of the inner layers' sublayers;    score(s) = share of the stretch where argmax_s = argmax
    stop drafting after a guess x with chance(x) < 0.8

The search changes what is guessed, never what is said, and the unsure guess is kept (Lemma C of docs/lossless.md): lossless
under every rule that is exact for the draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from outrider.core.device_round import CapturedShape, DeviceDrafter
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import CompositionError, OptionError
from outrider.core.interfaces import Context, Drafter, Observation, Plan, RowState, Target
from outrider.core.lasting_memory import LastingMemory
from outrider.core.layered_target import LayeredTarget
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.itself.device_exits import exit_twin
from outrider.drafters.itself.self_chain import UnsureStop, cache_of, draft_along, layered
from outrider.drafters.itself.side_branches import draft_with_siblings
from outrider.drafters.itself.skip_search import Probe, SearchLimits, SkipSearch, SkipSpace


@dataclass(frozen=True)
class SwiftOptions:
    """Which sublayers are skipped, how they are found, and which guesses are uncertain."""

    skip_share: float = 0.45
    """Share of the inner layers' sublayers that is skipped while drafting."""
    threshold: float = 0.8
    """Drafting stops after a guess with lower confidence."""
    branches: bool = False
    """Add the next best candidates as siblings of every guess, as ``num_tree_nodes`` permits."""
    window: int = 32
    """Tokens of text on which sets are tried. A request must have generated more than these."""
    max_score: float = 0.95
    """The search ends when the best set agrees with the target this often."""
    patience: int = 300
    """The search ends after this many trials without a better set."""
    max_trials: int = 1000
    """The search ends after this many trials. With 0 the first set is kept: every second inner layer."""
    memory: SkipSearch | None = None
    """A search to continue, shared between methods of one target. Default: a new one."""

    def __post_init__(self) -> None:
        for name in ("threshold", "max_score"):
            if not 0 <= vars(self)[name] <= 1:
                raise OptionError(f"{name} = {vars(self)[name]!r} is not valid; use a number from 0 to 1")
        for name, least in (("window", 1), ("patience", 1), ("max_trials", 0)):
            value = vars(self)[name]
            if not isinstance(value, int) or value < least:
                raise OptionError(f"{name} = {value!r} is not valid; use a whole number of at least {least}")
        SkipSpace(4, self.skip_share)  # raises where the share is not one

    def new_memory(self, num_layers: int) -> SkipSearch:
        """The search these options ask for."""
        if self.memory is None:
            limits = SearchLimits(self.max_score, self.patience, self.max_trials)
            return SkipSearch(SkipSpace(num_layers, self.skip_share), limits)
        if self.memory.space.num_layers != num_layers:
            raise CompositionError(
                f"this memory is of a model with {self.memory.space.num_layers} layers and the target has {num_layers}; "
                "use a memory of the same model"
            )
        return self.memory


@dataclass
class _State(RowState):
    """The stretch of text on which sets are tried now, and its row."""

    probe: Probe | None = None
    row: int = 0
    num_rows: int = 0

    def fork(self, rows: Sequence[int]) -> _State:
        if self.probe is None or self.row not in rows:
            return _State(num_rows=len(rows))
        return _State(self.probe, list(rows).index(self.row), len(rows))

    def join(self, other: _State) -> _State:
        num_rows = self.num_rows + other.num_rows
        if self.probe is None and other.probe is not None:
            return _State(other.probe, self.num_rows + other.row, num_rows)
        return _State(self.probe, self.row, num_rows)


class _Searching(Drafter, ABC):
    """A drafter that runs the target without the sublayers that a running search skips."""

    def __init__(
        self, target: LayeredTarget, options: SwiftOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC
    ) -> None:
        self.target, self.draws = target, draws
        self.options = options or SwiftOptions()
        self.memory = self.options.new_memory(target.num_layers)
        """Shared by all requests and by every drafter that is given it."""

    @property
    def memories(self) -> tuple[LastingMemory, ...]:
        return (self.memory,)

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> _State:
        del taps
        return _State(num_rows=len(rows))

    def propose(self, state: _State, context: Context, plan: Plan) -> Draft:
        if self.memory.is_active:
            self._search(state, context)
        else:
            state.probe = None
        return self._draft(context, plan)

    def observe(self, state: _State, observation: Observation) -> None:
        """Nothing to do: drafter and target share a cache."""

    @abstractmethod
    def _draft(self, context: Context, plan: Plan) -> Draft:
        """Draft with the best known set."""

    def _search(self, state: _State, context: Context) -> None:
        """Run one trial on a text that is long enough."""
        window = self.options.window
        if state.probe is None:
            long = [row for row, request in enumerate(context.sampler.rows) if request.num_output > window]
            if not long:
                return
            state.row = long[0]
            state.probe = self._probe(context, state.row)
        state.probe.trial(self.memory)

    def _probe(self, context: Context, row: int) -> Probe:
        """The last tokens in the target's cache, with a copy of the cache before them."""
        tokens, window = context.tokens[row], self.options.window
        before = cache_of(context).fork([row])
        begin = before.lengths[0] - window
        before.truncate([begin])
        return Probe(self.target, before, tokens[begin : begin + window])


@final
class Swift(_Searching):
    """Chains."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.IID)
    shape: ClassVar = Shape.CHAIN

    def device_twin(self, shape: CapturedShape, target: Target) -> DeviceDrafter | None:
        """The twin of the best skip set, once the search has ended. Until then, every round tries another set on the host."""
        is_settled = self.draws is Draws.DETERMINISTIC and not self.memory.is_active
        return exit_twin(self.memory.route, shape, target, threshold=self.options.threshold) if is_settled else None

    def _draft(self, context: Context, plan: Plan) -> Draft:
        stop = UnsureStop(context, [self.options.threshold] * len(context.tokens), draws=self.draws)
        return draft_along(self.target, context, plan, route=self.memory.route, draws=self.draws, stop=stop)


@final
class SwiftTree(_Searching):
    """Chains with side branches."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.TREE

    def _draft(self, context: Context, plan: Plan) -> Draft:
        threshold = self.options.threshold
        return draft_with_siblings(self.target, context, plan, route=self.memory.route, threshold=threshold)


def build(parts: Parts) -> Drafter:
    target, options = layered(parts.target, "swift"), parts.options
    return SwiftTree(target, options) if options.branches else Swift(target, options, draws=parts.draws)


ROW = MethodRow(
    summary="the same, and which sublayers to skip is found while generating",
    paper="Xia et al. 2024, SWIFT (arXiv 2410.06916)",
    drafter=Swift,
    build=build,
    needs_layers=True,
    options=SwiftOptions,
    defaults={"num_draft_tokens": 25},
)
