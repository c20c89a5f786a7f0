"""The length that emits the most tokens per second, zero included: measured, per batch, and never far below plain decoding.

Every round teaches what rounds of its length cost on this machine and how often guesses at each position are accepted in
this request; the next length maximises expected tokens over expected seconds. Length 0 is plain decoding; it wins where the
drafter is useless or too dear, and rare probes, paid from a bounded budget, notice when that changes. The idea of goodput is
SmartSpec's (Liu et al. 2024, arXiv 2406.14066), the expectation Leviathan's (arXiv 2211.17192); the measuring, the probes
and the budgets are ours.

    tokens(K)  = sum_b (1 + sum_{k <= K} prod_{j <= k} f_bj a_bj)        a: accepted, if tested;  f: found, if asked for
    seconds(K) = t(0) + sum_{k <= K} P(some row finds k) (t(k) - t(k-1))         t(k): the longest draft has k guesses
    K* = argmax tokens(K) / seconds(K),  against B / t_plain for K = 0

Batches: rows share the pass, so cost is a matter of the batch: the pass is as wide as its longest row, and a shorter row saves
nothing. Acceptance is a matter of the row. Hence one length for all, chosen by the sum of what every row expects from it.

A drafter that copies may find nothing: such a round costs about nothing and promises nothing, which f says on both sides of
the ratio, so rare matches do not argue against asking.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import final

from outrider.core.interfaces import Observation, Plan, Policy, RowState
from outrider.policies.checks import check_between, check_count, check_nodes
from outrider.policies.costs import SHORT_LAG, BatchCosts
from outrider.policies.ledger import Experience, Purse
from outrider.policies.lengths import depths_of, plan_of
from outrider.policies.rates import PositionRates, reach_of

_CALIBRATION = (0, 1, 0, 1)
"""Lengths of an engine's first rounds: each cost twice, since first calls are slow."""
_PROBE_INTERVAL = 16
"""Fewest rounds from one probe to the next."""
_PROBE_CAP = 2.0
"""Plain rounds a probe of more than one guess may cost."""
_CLOSE = 1.5
"""Speed, plain decoding being 1, below which it matters what a plain round costs now."""
_THINKING_SHARE = 0.004
"""Part of the time that deciding may take: a decision holds until rounds of a model have paid for it."""
_EAGER_SHARE = 0.03
_WARM = 64
"""... and in an engine's first rounds, when there is more to learn."""
_PLAIN_SAMPLE = 4
"""One in so many plain rounds is timed."""
_START_CREDIT = 4.0
"""Plain rounds that may be lost before anything was gained."""


@dataclass(frozen=True)
class AdaptiveOptions:
    """How far to go, and how much to spend on finding out."""

    num_draft_tokens: int = 16
    """Most guesses of a round."""
    probe_share: float = 0.0075
    """Share of the time that may be lost on rounds that only serve to learn."""
    loss_share: float = 0.01
    """Share of the time that speculation may lose against plain decoding before it is suspended."""
    prior_acceptance: float = 0.7
    """Acceptance assumed before any guess was tested; worth five tests."""
    horizon: int = 50
    """Rounds of a request that count: a larger number is steadier, a smaller one follows the text faster."""
    num_tree_nodes: int | None = None
    """Guesses in all at the longest depth, for drafters that grow trees; as many as along one path if not given."""

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "horizon"):
            check_count(name, vars(self)[name])
        check_nodes(self.num_tree_nodes)
        for name in ("probe_share", "loss_share"):
            check_between(name, vars(self)[name], 0, 0.5)
        check_between("prior_acceptance", self.prior_acceptance, 0, 1)


@dataclass
class _Row:
    accepted: PositionRates
    found: PositionRates
    lag: int = 0
    """Tokens emitted since the drafter was last asked for this row."""
    num_unfaded: int = 0
    """Of these rounds, those that the rates have not forgotten yet."""

    def copy(self) -> _Row:
        return _Row(self.accepted.copy(), self.found.copy(), self.lag, self.num_unfaded)

    def fade(self) -> None:
        """What was seen counts less the longer it is ago."""
        if self.num_unfaded:
            self.accepted.fade(self.num_unfaded)
            self.found.fade(self.num_unfaded)
            self.num_unfaded = 0


@dataclass(frozen=True)
class _Outlook:
    """What each length promises a batch: tokens and seconds of a round (at pace 1), by length."""

    tokens: list[float]
    seconds: list[float]
    by_depth: list[float]
    """Seconds of a round that asked the drafter and got this many guesses."""

    def best(self, purse: float) -> int:
        """The fastest length whose worst case, nothing accepted, the purse could pay for."""
        lengths = (k for k in range(len(self.tokens)) if k == 0 or self.risk(k) <= purse)
        return max(lengths, key=lambda length: self.tokens[length] / self.seconds[length])

    def gain(self, length: int) -> float:
        """Expected speed, plain decoding being 1."""
        return self.tokens[length] / self.seconds[length] * self.seconds[0] / self.tokens[0]

    def risk(self, length: int, gain: float = 1.0) -> float:
        """Plain rounds lost, against decoding at ``gain`` times plain speed, if nothing is accepted."""
        return self.seconds[length] / self.seconds[0] - 1 / gain


@dataclass
class _State(RowState):
    rows: list[_Row]
    outlook: _Outlook | None = None
    """What the decision rests on; None where the batch is new."""
    best: int = 0
    """The decision: length of a round that is no probe."""
    seconds: float = 0.0
    """Time spent on rounds since the decision."""
    is_due: bool = False
    """Something was learnt that the decision did not know."""
    probe: int | None = None
    """Length of this round, if it is a probe."""

    def fork(self, rows: Sequence[int]) -> _State:
        return _State([self.rows[row].copy() for row in rows])

    def join(self, other: _State) -> _State:
        return _State([*self.rows, *other.rows])


@final
class Adaptive(Policy):
    """Most tokens per second. ``experience`` outlives requests (see ``Experience``); the rest is per request."""

    def __init__(self, options: AdaptiveOptions | None = None) -> None:
        self.options = options or AdaptiveOptions()
        self.experience = Experience(
            probes=Purse(self.options.probe_share, 0.0, cap=_PROBE_CAP),
            losses=Purse(self.options.loss_share, _START_CREDIT, cap=3 * _START_CREDIT),
        )

    def start(self, num_rows: int) -> _State:
        horizon = self.options.horizon
        return _State([_Row(PositionRates(horizon), PositionRates(horizon)) for _ in range(num_rows)])

    def plan(self, state: _State, num_rows: int) -> Plan:
        known = self.experience
        state.probe = None
        if known.num_rounds < len(_CALIBRATION):
            state.best = min(_CALIBRATION[known.num_rounds], self.options.num_draft_tokens)
        else:
            outlook = self._decide(state)
            state.probe = self._probe(state, outlook)
        depth = state.best if state.probe is None else state.probe
        return plan_of([depth] * num_rows, self.options.num_draft_tokens, self.options.num_tree_nodes)

    def update(self, state: _State, observation: Observation) -> None:
        own = state.best if state.probe is None else state.probe
        planned = observation.plan.max_depth if observation.plan else (own,) * len(state.rows)
        if state.outlook is not None and not any(planned) and self.experience.num_rounds % _PLAIN_SAMPLE:
            self._pass_by(state, observation)
            return
        drafted = depths_of(observation)
        depth, asked = max(drafted), any(planned)
        lag = max((row.lag for row, length in zip(state.rows, planned, strict=True) if length), default=0)
        costs = self.experience.costs.of(len(drafted))
        costs.record(observation, depth, asked=asked, lag=lag)
        for row, length, found, accepted in zip(state.rows, planned, drafted, observation.num_accepted, strict=True):
            self._learn(row, length, found=found, accepted=accepted)
        self._settle(state, observation, costs, depth=depth, asked=asked, lag=lag)

    def _pass_by(self, state: _State, seen: Observation) -> None:
        """A plain round that teaches nothing new: of these only some are looked at, since a look costs time."""
        for row in state.rows:
            row.lag += 1
            row.num_unfaded += 1
        state.seconds += seen.seconds
        known = self.experience
        known.num_rounds += 1
        known.probes.settle(1.0, 0.0)
        known.losses.settle(1.0, 0.0)

    def _decide(self, state: _State) -> _Outlook:
        known = self.experience
        share = _THINKING_SHARE if known.num_rounds >= _WARM else _EAGER_SHARE
        if state.outlook is None or state.is_due or state.seconds * share >= known.thinking.value:
            began = time.perf_counter()
            state.outlook = self._look_ahead(state.rows)
            state.best = state.outlook.best(known.losses.balance)
            state.seconds, state.is_due = 0.0, False
            known.thinking.add(time.perf_counter() - began)
        return state.outlook

    def _look_ahead(self, rows: Sequence[_Row]) -> _Outlook:
        known, costs = self.experience, self.experience.costs.of(len(rows))
        longest = min(self.options.num_draft_tokens, max(2, 2 * costs.longest_known))  # costs are guesses further out
        usual_accepted = known.accepted.inherited([self.options.prior_acceptance] * longest)
        usual_found = known.found.given([1.0] * longest)
        gains, nobody = [0.0] * longest, [1.0] * longest
        for row in rows:
            row.fade()
            found = row.found.given(usual_found)
            reach = reach_of([a * f for a, f in zip(row.accepted.inherited(usual_accepted), found, strict=True)])
            gains = [x + y for x, y in zip(gains, reach, strict=True)]
            nobody = [x * (1 - y) for x, y in zip(nobody, accumulate(found, mul), strict=True)]
        table = costs.table(longest)
        growth = ((1 - nobody[k]) * (table[k + 1] - table[k]) for k in range(longest))
        seconds = list(accumulate(growth, initial=table[0]))
        tokens = accumulate(gains, initial=float(len(rows)))
        return _Outlook(list(tokens), [costs.plain, *seconds[1:]], table)

    def _probe(self, state: _State, outlook: _Outlook) -> int | None:
        """A length worth trying for what it teaches, if one is due and the purse can pay for it.

        While drafting: by turns a little longer, much longer, and nothing, where plain decoding is not far behind. While
        not: mostly one guess, and now and then as many as can be paid for, for drafters that are right late or not at all."""
        known, best = self.experience, state.best
        known.probes.cap = max(_PROBE_CAP, outlook.risk(1))  # one guess must stay within reach, however dear
        if known.num_rounds - known.last_probe < _PROBE_INTERVAL:
            return None
        longest, gain = len(outlook.tokens) - 1, outlook.gain(best)
        plain = 0 if gain < _CLOSE else best + 1
        turns = (plain, best + 1, 2 * best, plain, best + 1, longest) if best else (1, 1, 1, 1, 1, longest)
        wanted = min(turns[known.turn % len(turns)], longest)
        catch_up = known.costs.of(len(state.rows)).catch_up(max(row.lag for row in state.rows))
        purse = known.probes.balance - catch_up / outlook.seconds[0]
        lengths = range(wanted, best, -1) if wanted else (0,)
        probe = next((k for k in lengths if outlook.risk(k, gain) <= purse), None)
        if probe is not None:
            known.last_probe, state.is_due = known.num_rounds, True
            known.num_probes += 1
        known.turn += probe is not None or not lengths or known.probes.is_full  # what a full purse cannot pay is skipped
        return probe

    def _learn(self, row: _Row, planned: int, *, found: int, accepted: int) -> None:
        known = self.experience
        if planned == 0:
            row.lag += 1
            row.num_unfaded += 1
            return
        row.fade()
        row.lag = 0
        if found < planned or known.found.means:  # most drafters always find a guess: nothing to count
            for rates in (row.found, known.found):
                rates.record(found, failed=found < planned)
        if found == 0:
            row.accepted.fade()
            return
        for rates in (row.accepted, known.accepted):
            rates.record(accepted, failed=accepted < found)

    def _settle(self, state: _State, seen: Observation, costs: BatchCosts, *, depth: int, asked: bool, lag: int) -> None:
        """Book the round, at the usual cost of its depth (single rounds are noisy), or as measured if it caught up."""
        known, outlook = self.experience, state.outlook
        known.num_rounds += 1
        state.seconds += seen.seconds
        if outlook is None:
            return
        usual = outlook.by_depth[min(depth, len(outlook.by_depth) - 1)] if asked else outlook.seconds[0]
        cost = (max(seen.seconds / costs.pace, usual) if lag > SHORT_LAG else usual) / outlook.seconds[0]
        tokens = sum(seen.num_accepted) / len(state.rows) + 1
        over_best = max(cost - tokens / outlook.gain(state.best), 0.0)
        known.probes.settle(cost, 0.0 if state.probe is None else over_best)
        known.losses.settle(cost, cost - tokens if asked and state.probe is None else 0.0)
