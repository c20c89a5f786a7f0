"""The default policy: the draft that emits the most tokens per second, none included, and never far below plain decoding.

It has four parts. ``cost_model.py`` knows what rounds cost, ``belief.py`` how likely guesses are to survive. ``chooser.py``
chooses what to draft, and ``loss_budget.py`` bounds what may be lost. As soon as rounds have paid for the last decision, the
policy learns from all rounds since then and makes a new plan. Until then the plan stays. The idea of goodput is SmartSpec's
(Liu et al. 2024, arXiv 2406.14066), the expectation Leviathan's (arXiv 2211.17192).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import itemgetter
from typing import final

from outrider.core.device_round import CapturedShape
from outrider.core.interfaces import Doubt, Observation, Plan, Policy, RowState
from outrider.core.prices import PriceSource
from outrider.core.prompt_reading import NO_PROMPTS, Prompts
from outrider.core.reason import Reason, ReasonCode
from outrider.policies.belief import Account, Usual
from outrider.policies.chooser import RoundForecast, look_ahead
from outrider.policies.cost_model import DRAFT, REST, BatchCosts, CostModel, Timed
from outrider.policies.lengths import captured_lengths, nearest_spread, nodes_of, spreads_of
from outrider.policies.loss_budget import LossBudget
from outrider.policies.rates import Outcome, PositionRates, reach_of
from outrider.policies.rounds import KeptRound, kept
from outrider.policies.tuning import TUNING, AdaptiveOptions


@dataclass
class _State(RowState):
    rows: list[Account]
    """A row takes its account along wherever it goes. Several copies of a row have copies."""
    policy: Adaptive = field(repr=False)
    is_behind: bool = True
    """Whether the drafter must read committed tokens before it can draft."""
    plans: dict[tuple[int, bool], Plan] = field(default_factory=dict, repr=False)
    """Plans by what a round reads of prompts. Rounds of several kinds take turns, and each kind keeps its plan."""
    is_probe: bool = False
    """Whether the last plan was a probe."""
    prompts: Prompts = NO_PROMPTS

    def fork(self, rows: Sequence[int]) -> _State:
        known = [self.rows[row] for row in rows]
        if len(set(rows)) < len(rows):
            self.policy.learn()
            known = list(map(replace, known))
        return self._of(known, self.is_behind)

    def join(self, other: _State) -> _State:
        return self._of([*self.rows, *other.rows], self.is_behind or other.is_behind)

    def _of(self, rows: list[Account], is_behind: bool) -> _State:
        """This state for other rows. Plans stay while the batch is about as large. Where requests come and go every few rounds,
        new plans each time would cost more than they could gain."""
        moved = _State(rows, self.policy, is_behind)
        if 3 * len(self.rows) <= 4 * len(rows) <= 5 * len(self.rows):
            moved.plans = {kind: _for_rows(plan, len(rows)) for kind, plan in self.plans.items()}
        return moved


@final
class Adaptive(Policy):
    """Plans for the most tokens per second. Costs, losses and acceptance over all requests outlive requests. The rest belongs
    to one request."""

    def __init__(self, options: AdaptiveOptions | None = None) -> None:
        self.options = options or AdaptiveOptions()
        self.costs, self.budget = CostModel(), LossBudget(self.options.loss_share, self.options.probe_share)
        self.num_rounds = self.num_probes = 0
        self._padded = True
        """Whether passes are padded."""
        self._unpaid = 0.0
        """Seconds of planning that rounds have not paid for yet."""
        self._num_read = self._num_emitted = 0.0
        """Prompt tokens that were read inside rounds, and answer tokens. Older ones count less."""
        self._spreads = spreads_of(self.options.num_draft_tokens, self.options.num_tree_nodes)
        self._source: PriceSource | None = None
        self._clear()

    def expect(self, prices: PriceSource) -> None:
        self._source, self.costs = prices, CostModel()

    def forget(self, state: _State | None) -> None:
        """Forget what was seen of acceptance. A drafter that learned is like the one before, so the new prior lies halfway
        between the rates of that one and the usual prior. Costs stay, because they belong to the machine. Losses stay too:
        learning may replace a drafter every few rounds, and each may only lose what time has paid for."""
        self.learn()
        self.usual.refresh()
        known = self.usual.by_spread[self._spreads[0]]
        self._clear([(rate + self.options.prior_acceptance) / 2 for rate in known])
        if state is not None:
            state.rows, state.plans, state.is_behind = self._fresh(len(state.rows)), {}, True

    def _clear(self, prior: Sequence[float] | None = None) -> None:
        self.usual = Usual(self._spreads, prior or [self.options.prior_acceptance] * self.options.num_draft_tokens)
        self.found, self.trust = PositionRates(TUNING.memory), Account(TUNING.memory)
        self._rounds: list[tuple[list[Account], KeptRound]] = []

    def _fresh(self, num_rows: int) -> list[Account]:
        return [Account(self.options.horizon) for _ in range(num_rows)]

    def start(self, num_rows: int) -> _State:
        if self._source is not None and self.costs.prices is None and not self.num_rounds:
            self.costs = CostModel(self._source.read(lambda length: nodes_of(length, self._spreads[-1])))
        return _State(self._fresh(num_rows), self)

    def captured_shape(self) -> CapturedShape:
        """The widest trees that may be planned. Rounds are captured for these alone, so no others are planned from now on."""
        self._spreads = self._spreads[-1:]
        self._clear()
        return captured_lengths(self.options.num_draft_tokens, self.options.num_tree_nodes)

    def carry(self, state: _State, prompts: Prompts) -> None:
        state.prompts = prompts

    def plan(self, state: _State, num_rows: int) -> Plan:
        plan = state.plans.get(state.prompts[1:])
        if plan is None or self._unpaid <= 0 or len(self._rounds) >= self.options.horizon:
            assert len(state.rows) == num_rows, "a batch that changed has a state of its own"
            began = time.thread_time()
            self.learn()
            plan = self._think(state)
            self._unpaid = max(self._unpaid, 0.0) + time.thread_time() - began
        return plan

    def update(self, state: _State, observation: Observation) -> None:
        """Record a round. Early rounds may spend a larger share on planning."""
        self.num_rounds += 1
        played = kept(observation, nearest_spread(observation.plan, self._spreads), was_behind=state.is_behind)
        state.is_behind = not played.is_asked
        self._rounds.append((state.rows, played))
        self._unpaid -= TUNING.thinking * (4 if self.num_rounds <= self.options.horizon else 1) * observation.seconds

    def _think(self, state: _State) -> Plan:
        """Make the next plan. It stays as it is, unless the round is a test. Prices that rounds contradict are measured again
        at the next start. Until then, rounds correct them place by place."""
        costs = self.costs.of(len(state.rows), state.prompts.num_places)
        if self._source is not None and costs.contradicts:
            self._source.doubt()
            self._source = None
        plan = self._best(state, costs) if costs.trial is None else self._calibrating(state, costs.trial)
        state.plans.pop(state.prompts[1:], None)
        if plan.reason and plan.reason.code not in (ReasonCode.CALIBRATION, ReasonCode.PROBE):
            state.plans[state.prompts[1:]] = plan
        return plan

    def _calibrating(self, state: _State, length: int) -> Plan:
        """One of the first rounds, where there are no prices."""
        length, state.is_probe = min(length, self.options.num_draft_tokens), False
        return _plan([length] * len(state.rows), self._spreads[0], Reason(ReasonCode.CALIBRATION, {"length": length}))

    def _best(self, state: _State, costs: BatchCosts) -> Plan:
        """The fastest draft. If none pays, a probe, but never two probes in a row. A full account pays for a probe whatever it
        seems to cost: one wrong time must not end all drafting."""
        purse = self.budget.drafting
        self.usual.refresh()
        forecasts = [(self._forecast(state, costs, spread), spread) for spread in self._spreads]
        choices = [(*one.best(purse), one, spread) for one, spread in forecasts]
        _, best, forecast, spread = max(choices, key=itemgetter(0))
        lengths, reason = forecast.lengths(best, len(state.rows)), forecast.reason(best, purse)
        state.is_probe = not (best or state.is_probe) and min(forecast.risk(1), TUNING.run) <= self.budget.probing
        if state.is_probe:
            self.num_probes += 1
            lengths, reason = [1] * len(state.rows), Reason(ReasonCode.PROBE, {"length": 1, "best": 0})
        return _plan(lengths, spread, reason, self._doubt(forecast, lengths))

    def _doubt(self, forecast: RoundForecast, lengths: Sequence[int]) -> Doubt | None:
        """Where drafts of these lengths end by the drafter's own confidence."""
        if not any(lengths):
            return None
        further = self.trust.rate(self.options.prior_acceptance)
        return forecast.doubt(self.trust.trust, len(lengths), longest=max(lengths), further=further, padded=self._padded)

    def _forecast(self, state: _State, costs: BatchCosts, spread: float) -> RoundForecast:
        """Expected tokens and seconds of drafts with ``spread`` guesses at each level."""
        depths = range(self.options.num_draft_tokens + 1)
        places = [nodes_of(depth, spread) for depth in depths]
        usual = self.usual.by_spread[spread]
        ones = [1.0] * len(usual)
        found = reach_of(self.found.inherited(ones)) if self.found.means else ones
        survival = [row.survival(usual) for row in state.rows]
        reading = self._reading(state, costs)
        rests = [cost - reading for cost in costs.table(REST, places)]
        most, drafting = self._most(state.prompts), costs.table(DRAFT, depths)
        forecast = look_ahead(survival, found, drafting, rests, padded=self._padded, most=most)
        forecast.doubts = costs.doubts(places)
        is_ragged = len(survival) > 1 and not (self._padded or self.trust.expected or self.options.num_tree_nodes)
        return forecast.ranked(survival, found) if is_ragged else forecast

    def _reading(self, state: _State, costs: BatchCosts) -> float:
        """Seconds of a round for prompts that drafts do not pay for. Every token of an answer brings its share of prompts to
        read, in whatever round it is emitted. Where prompts wait, a round is made for their sake, and its time counts."""
        alone = costs if state.prompts.is_full else self.costs.of(len(state.rows))
        return max(0.0, costs.plain - alone.pace * alone.plain / costs.pace)

    def _most(self, prompts: Prompts) -> float:
        """Most answer tokens per round that waiting prompts can supply: every answer needs its prompt read first."""
        is_bound = prompts.is_full and self._num_read
        return max(prompts.num_tokens * self._num_emitted / self._num_read, 1.0) if is_bound else math.inf

    def learn(self) -> None:
        """Learn from the rounds since the last time. In a large batch, some rows are used now and the others in the next
        round."""
        rounds, self._rounds = self._rounds, []
        alike, found, num_plain = defaultdict[BatchCosts, list[KeptRound]](list), list[Outcome](), 0
        accepted = {spread: list[Outcome]() for spread in self._spreads}
        expected = {spread: list(accumulate(rates, initial=0.0)) for spread, rates in self.usual.by_spread.items()}
        for number, (rows, seen) in enumerate(rounds, self.num_rounds):
            alike[self.costs.of(len(rows), seen.prompts.num_places)].append(seen)
            num_plain += not seen.is_asked
            every = 1 + len(rows) // (8 if number > self.options.horizon else 32)
            for row in range(number % every, len(rows), every):
                passed, tried, got = seen.accepted[row], seen.asked[row], min(seen.found[row], seen.asked[row])
                tested = min(passed + 1, tried)
                rows[row].record(tested, expected[seen.spread][tested], passed)
                if tried:
                    accepted[seen.spread].append((passed, passed < tried))
                    found.append((got, got < tried))
                    if seen.beliefs and got:
                        self.trust.record(min(passed + 1, got), sum(seen.beliefs[row][: passed + 1]), passed)
        for costs, seen in alike.items():
            self._learn_costs(costs, seen)
        self.usual.record(accepted, num_plain)
        if self.found.means or any(failed for _, failed in found):  # most drafters always find: no news
            self.found.record(*found)

    def _learn_costs(self, costs: BatchCosts, rounds: Sequence[KeptRound]) -> None:
        """Record what rounds of one batch size took, and what they lost."""
        keep = (1 - 1 / TUNING.memory) ** len(rounds)
        self._num_read = keep * self._num_read + sum(seen.prompts.num_tokens for seen in rounds)
        self._num_emitted = keep * self._num_emitted + sum(seen.num_tokens for seen in rounds)
        self._padded, times = rounds[-1].padded, list[Timed]()
        usual = costs.now(DRAFT, (seen.length for seen in rounds))
        for seen in rounds:
            is_usual = seen.is_asked and not (seen.was_behind and seen.draft_seconds >= usual[seen.length])  # reading only adds
            rest = seen.seconds - seen.draft_seconds if seen.is_asked else seen.seconds
            times.append(Timed(seen.length, seen.width, seen.draft_seconds if is_usual else None, rest))
        costs.record(times)
        drafts, rests = (costs.now(part, places) for part, places in ((DRAFT, usual), (REST, (seen.width for seen in rounds))))
        for seen in rounds:
            most = math.inf if seen.was_behind else (1 + TUNING.outlier) * (drafts[seen.length] + rests[seen.width])
            cost = min(seen.seconds, most) / (costs.pace * costs.plain) if seen.is_asked else 1.0
            self.budget.book(cost, self._worth(seen) - cost if seen.is_asked else 0.0, is_probe=seen.is_probe)

    def _worth(self, seen: KeptRound) -> float:
        """Plain rounds that a round was worth. Its tokens count as far as waiting prompts can supply them."""
        tokens = 1 + sum(seen.accepted) / max(seen.num_live, 1)
        most = self._most(seen.prompts) / len(seen.asked)
        return min(tokens, most) / min(1.0, most)


def _plan(lengths: Sequence[int], spread: float, reason: Reason, doubt: Doubt | None = None) -> Plan:
    return Plan(tuple(lengths), tuple(nodes_of(length, spread) for length in lengths), None, doubt, reason)


def _for_rows(plan: Plan, count: int) -> Plan:
    """A plan for another number of rows, all as long as its longest."""
    doubt = plan.doubt and replace(plan.doubt, trust=plan.doubt.trust[:1] * count)
    return Plan((max(plan.max_depth),) * count, (max(plan.max_nodes),) * count, None, doubt, plan.reason)
