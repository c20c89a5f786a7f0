"""The draft length that Leviathan's formula calls best, from measured acceptance and measured cost.

Every further guess costs a draft step for certain, and yields a token only if all guesses up to it are accepted. So there is a
best length. It follows from two measured curves: how often each position is accepted in this request, and how long rounds of
each length take on this machine. The paper has one rate and a constant pass; here the rate is per position and the pass may
grow with the number of guesses. (Leviathan, Kalman & Matias 2023, arXiv 2211.17192, section 3.4.)

    E(K) = 1 + sum_{k <= K} prod_{j <= k} a_j              tokens of a round of K guesses
    K* = argmax_{K >= 1} E(K) / seconds(K)                 one more guess pays iff  reach_{K+1} / E(K) > seconds' growth

At least one guess is always drafted, which keeps the rates alive; for a drafter that may be useless, use ``adaptive``, which
can stop. In a batch each row takes its own best length at the costs of that batch size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from outrider.core.interfaces import Observation, Plan, Policy, RowState
from outrider.core.prices import between
from outrider.policies.checks import check_between, check_count, check_nodes, check_order
from outrider.policies.lengths import plan_of
from outrider.policies.rates import PositionRates, reach_of
from outrider.policies.tuning import TUNING


@dataclass(frozen=True)
class OptimalOptions:
    """Bounds of the length, and the acceptance rate assumed before any measurement."""

    num_draft_tokens: int = 16
    """Most guesses of a round."""
    min_draft_tokens: int = 1
    """Fewest guesses."""
    prior_acceptance: float = 0.7
    """Acceptance assumed of a new request; worth five tested guesses."""
    horizon: int = 50
    """Tested guesses that count. A larger number is steadier, a smaller one follows the text faster."""
    num_tree_nodes: int | None = None
    """Guesses in all at the longest depth, for drafters that grow trees; as many as along one path if not given."""

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "min_draft_tokens", "horizon"):
            check_count(name, vars(self)[name])
        check_nodes(self.num_tree_nodes)
        check_order("min_draft_tokens", self.min_draft_tokens, "num_draft_tokens", self.num_draft_tokens)
        check_between("prior_acceptance", self.prior_acceptance, 0, 1)


@dataclass
class _State(RowState):
    rates: list[PositionRates]

    def fork(self, rows: Sequence[int]) -> _State:
        return _State([self.rates[row].copy() for row in rows])

    def join(self, other: _State) -> _State:
        return _State([*self.rates, *other.rates])


@final
@dataclass
class Typical:
    """A running mean of positive numbers that resists outliers. The first number may be too large, so the second may correct
    it. Several outliers in a row on the same side are believed."""

    value: float = 0.0
    count: int = 0
    streak: int = 0

    def add(self, number: float) -> None:
        differs = min(max(number / self.value - 1, -TUNING.outlier), TUNING.outlier) if self.value else 0.0
        side = (differs >= TUNING.outlier) - (differs <= -TUNING.outlier)
        self.streak = self.streak + side if side * self.streak >= 0 and side else side
        self.count += 1
        is_better = self.count <= 2 and differs <= -TUNING.outlier
        if not self.value or is_better or abs(self.streak) >= TUNING.run:
            self.value, self.count, self.streak = number, min(self.count, 2), 0
        else:
            self.value *= 1 + differs / min(self.count, TUNING.memory)


@final
class LengthCosts:
    """Seconds of a round by its draft length, learnt from rounds. Lengths that were never played are interpolated linearly."""

    def __init__(self) -> None:
        self._seen: dict[int, Typical] = {}

    def record(self, length: int, seconds: float) -> None:
        self._seen.setdefault(length, Typical()).add(seconds)

    def table(self, longest: int) -> list[float]:
        """Seconds of rounds with 0, 1, ... guesses. If only one length was played, a guess is assumed to take a tenth of a
        plain round."""
        points = [(float(length), seen.value) for length, seen in sorted(self._seen.items())] or [(0.0, 1.0)]
        if len(points) == 1:
            ((length, seconds),) = points
            points = [(0.0, seconds / (1 + length / 10)), (length + 1, seconds * (11 + length) / (10 + length))]
        return [between(points, length) for length in range(longest + 1)]


@final
class Optimal(Policy):
    """Plans the length with the most expected tokens per expected second. Its costs (by batch size) outlive requests."""

    def __init__(self, options: OptimalOptions | None = None) -> None:
        self.options = options or OptimalOptions()
        self.costs: defaultdict[int, LengthCosts] = defaultdict(LengthCosts)

    def start(self, num_rows: int) -> _State:
        return _State([PositionRates(self.options.horizon) for _ in range(num_rows)])

    def plan(self, state: _State, num_rows: int) -> Plan:
        seconds = self.costs[num_rows].table(self.options.num_draft_tokens)
        lengths = [self._best(rates, seconds) for rates in state.rates]
        return plan_of(lengths, self.options.num_draft_tokens, self.options.num_tree_nodes)

    def update(self, state: _State, observation: Observation) -> None:
        drafted = observation.draft.tree.heights
        self.costs[len(drafted)].record(max(drafted), observation.seconds)
        for rates, num_drafted, num_accepted in zip(state.rates, drafted, observation.num_accepted, strict=True):
            if num_drafted:
                rates.record((num_accepted, num_accepted < num_drafted))

    def _best(self, rates: PositionRates, seconds: Sequence[float]) -> int:
        prior = [self.options.prior_acceptance] * self.options.num_draft_tokens
        return best_length(reach_of(rates.inherited(prior)), seconds, shortest=self.options.min_draft_tokens)


def best_length(reach: Sequence[float], seconds: Sequence[float], *, shortest: int = 0) -> int:
    """The K that maximises (1 + sum_{k <= K} reach_k) / seconds[K]; the shorter one of equals.

    "Add a guess while it pays" finds the same K where ``seconds`` is convex; the scan also sees past a step in it, which
    tiled kernels have."""
    best, best_pace, tokens = shortest, 0.0, 1.0
    for length, cost in enumerate(seconds):
        tokens += reach[length - 1] if length else 0.0
        if length >= shortest and tokens > best_pace * cost * (1 + 1e-12):
            best, best_pace = length, tokens / cost
    return best
