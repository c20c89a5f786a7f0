"""The default policy: the draft that emits the most tokens per second, none included, and never far below plain decoding.

Four parts. ``cost_model.py`` knows what a round of each length costs: prices measured at load, corrected by rounds.
``belief.py`` knows how likely guesses are to survive, per request, with all requests as the prior. ``chooser.py`` ranks the
nodes of all requests and takes the prefix with the best expected speed. ``loss_budget.py`` bounds what may be lost. This file
decides each round with them. As soon as rounds have paid for the last decision, the policy learns from all rounds since then at
once and makes a new plan. Until then the plan stays. The idea of goodput is SmartSpec's (Liu et al. 2024, arXiv 2406.14066),
the expectation Leviathan's (arXiv 2211.17192).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import final

from outrider.core.device_round import CapturedShape
from outrider.core.interfaces import Doubt, Observation, Plan, Policy, RowState
from outrider.core.prices import PriceSource
from outrider.core.prompt_reading import NO_PROMPTS, Prompts
from outrider.core.reason import Reason, ReasonCode
from outrider.policies.belief import Account, Usual
from outrider.policies.chooser import RoundForecast, look_ahead
from outrider.policies.cost_model import BatchCosts, CostModel
from outrider.policies.lengths import captured_lengths, nearest_spread, nodes_of, spreads_of
from outrider.policies.loss_budget import LossBudget
from outrider.policies.rates import Outcome, PositionRates, reach_of
from outrider.policies.rounds import SeenRound
from outrider.policies.tuning import TUNING, AdaptiveOptions


@dataclass
class _State(RowState):
    rows: list[Account]
    policy: Adaptive = field(repr=False)
    is_behind: bool = True
    """Whether the drafter must read committed tokens before it can draft."""
    plans: dict[tuple[int, bool], Plan] = field(default_factory=dict, repr=False)
    """Plans by what a round reads of prompts. Rounds of several kinds take turns, and each kind keeps its plan."""
    is_probe: bool = False
    prompts: Prompts = NO_PROMPTS

    def fork(self, rows: Sequence[int]) -> _State:
        self.policy.learn()
        return self._of([replace(self.rows[row]) for row in rows], self.is_behind)

    def join(self, other: _State) -> _State:
        self.policy.learn()
        return self._of([*self.rows, *other.rows], self.is_behind or other.is_behind)

    def _of(self, rows: list[Account], is_behind: bool) -> _State:
        """This state for other rows. Plans stay while the batch is about as large. Where requests come and go every few rounds,
        new plans each time would cost more than they could gain."""
        moved, count = _State(rows, self.policy, is_behind), len(rows)
        if 3 * len(self.rows) <= 4 * count <= 5 * len(self.rows):
            for kind, plan in self.plans.items():
                doubt = plan.doubt and replace(plan.doubt, trust=plan.doubt.trust[:1] * count)
                longest, most = (max(plan.max_depth),) * count, (max(plan.max_nodes),) * count
                moved.plans[kind] = Plan(longest, most, None, doubt, plan.reason)
        return moved


@final
class Adaptive(Policy):
    """Plans for the most tokens per second. Costs, losses and acceptance over all requests outlive requests. The rest belongs
    to one request."""

    def __init__(self, options: AdaptiveOptions | None = None) -> None:
        self.options = options or AdaptiveOptions()
        self.costs, self.budget = CostModel(), LossBudget(self.options.loss_share, self.options.probe_share)
        self.num_rounds = self.num_probes = 0
        self._padded, self._unpaid = True, 0.0
        """Whether passes are padded, and the seconds of planning that rounds have not paid for yet."""
        self._num_read = self._num_emitted = 0.0
        """Prompt tokens that were read inside rounds, and answer tokens. Older ones count less."""
        self._spreads = spreads_of(self.options.num_draft_tokens, self.options.num_tree_nodes)
        self._source: PriceSource | None = None
        self._is_replaced = False
        """Whether another drafter is there, and has not had its chance yet."""
        self._clear(None)

    def expect(self, prices: PriceSource) -> None:
        self._source, self.costs = prices, CostModel()

    def forget(self, state: _State | None) -> None:
        """Forget the acceptance of guesses, and the losses, as soon as time has paid for another chance. Until then the old
        drafter's acceptance counts. Costs stay, because they belong to the machine."""
        self._is_replaced = True
        if state is not None:
            state.is_behind = True
        self._give_chance(state)

    def _give_chance(self, state: _State | None) -> None:
        if self._is_replaced and self.budget.takes_chance():
            self._is_replaced = False
            self._clear(state)

    def _clear(self, state: _State | None) -> None:
        self.usual = Usual(self._spreads, [self.options.prior_acceptance] * self.options.num_draft_tokens)
        self.found, self.trust = PositionRates(TUNING.memory), Account(TUNING.memory)
        self._rounds: list[tuple[_State, SeenRound]] = []
        self.budget.forget()
        if state is not None:
            vars(state).update({**vars(self._fresh(len(state.rows))), "prompts": state.prompts})

    def _fresh(self, num_rows: int) -> _State:
        return _State([Account(self.options.horizon) for _ in range(num_rows)], self)

    def start(self, num_rows: int) -> _State:
        if self._source is not None and self.costs.prices is None and not self.num_rounds:
            self.costs = CostModel(self._source.read(lambda length: nodes_of(length, self._spreads[-1])))
        return self._fresh(num_rows)

    def captured_shape(self) -> CapturedShape:
        """The widest trees that may be planned. Rounds are captured for these alone, so no others are planned from now on."""
        self._spreads = self._spreads[-1:]
        self._clear(None)
        return captured_lengths(self.options.num_draft_tokens, self.options.num_tree_nodes)

    def carry(self, state: _State, prompts: Prompts) -> None:
        state.prompts = prompts

    def plan(self, state: _State, num_rows: int) -> Plan:
        plan, is_paid = state.plans.get(state.prompts[1:]), self._unpaid <= 0 or len(self._rounds) >= self.options.horizon
        if plan is None or is_paid:
            assert len(state.rows) == num_rows, "a batch that changed has a state of its own"
            began = time.thread_time()
            self.learn()
            plan = self._think(state)
            self._unpaid = max(self._unpaid, 0.0) + time.thread_time() - began
        return plan

    def update(self, state: _State, observation: Observation) -> None:
        """Record a round. Early rounds may spend a larger share on planning."""
        self.num_rounds += 1
        self._rounds.append((state, SeenRound.of(observation)))
        self._unpaid -= TUNING.thinking * (4 if self.num_rounds <= self.options.horizon else 1) * observation.seconds

    def _think(self, state: _State) -> Plan:
        """Make the next plan. It stays as it is, unless the round is a test. Prices that rounds contradict are measured again
        at the next start. Until then, rounds correct them place by place."""
        self._give_chance(state)
        costs = self.costs.of(len(state.rows), state.prompts.num_places)
        if self._source is not None and costs.contradicts:
            self._source.doubt()
            self._source = None
        if costs.trial is not None:
            length, state.is_probe = min(costs.trial, self.options.num_draft_tokens), False
            plan = _plan([length] * len(state.rows), self._spreads[0], Reason(ReasonCode.CALIBRATION, {"length": length}))
        else:
            plan = self._best(state, costs)
        state.plans.pop(state.prompts[1:], None)
        if costs.trial is None and not state.is_probe:
            state.plans[state.prompts[1:]] = plan
        return plan

    def _best(self, state: _State, costs: BatchCosts) -> Plan:
        """The fastest draft. If none pays, a probe, but never two probes in a row. A full account pays for a probe whatever it
        seems to cost: one wrong time must not end all drafting."""
        count, purse, ends_itself = len(state.rows), self.budget.drafting, self.trust.expected > 0
        self.usual.refresh()
        choices = list[tuple[float, int, float, RoundForecast]]()
        for spread in self._spreads:
            places = [nodes_of(length, spread) for length in range(self.options.num_draft_tokens + 1)]
            forecast = self._forecast(state, costs, spread, places)
            choice = forecast.best(purse, costs.doubts(places), ends_itself=ends_itself)
            choices.append((*choice, spread, forecast))
        _, best, spread, forecast = max(choices, key=itemgetter(0))
        lengths, reason = forecast.shares.get(best, (best,) * count), forecast.reason(best, purse)
        state.is_probe = not (best or state.is_probe) and min(forecast.risk(1), TUNING.run) <= self.budget.probing
        if state.is_probe:
            self.num_probes += 1
            lengths, reason = (1,) * count, Reason(ReasonCode.PROBE, {"length": 1, "best": 0})
        ends = {"longest": max(lengths), "further": self.trust.rate(self.options.prior_acceptance), "padded": self._padded}
        doubt = forecast.doubt(self.trust.trust(1.0), count, **ends) if any(lengths) else None
        return _plan(lengths, spread, reason, doubt)

    def _forecast(self, state: _State, costs: BatchCosts, spread: float, places: Sequence[int]) -> RoundForecast:
        """Expected tokens and seconds of drafts with ``spread`` guesses at each level.

        Every token of an answer brings its share of prompts to read, in whatever round it is emitted. So a draft must pay for
        itself beside them, and their time is left out. Where prompts wait, a round is made for their sake, and its time
        counts."""
        usual, prompts = self.usual.by_spread[spread], state.prompts
        alone = costs if prompts.is_full else self.costs.of(len(state.rows))
        reading = max(0.0, costs.plain - alone.pace * alone.plain / costs.pace)
        rests = [cost - reading for cost in costs.table(0, places)]
        ones = [1.0] * len(usual)
        found = reach_of(self.found.inherited(ones)) if self.found.means else ones
        survival, drafting = [row.survival(usual) for row in state.rows], costs.table(1, range(len(places)))
        forecast = look_ahead(survival, found, drafting, rests, padded=self._padded, most=self._most(prompts))
        is_ragged = len(survival) > 1 and not (self._padded or self.trust.expected or self.options.num_tree_nodes)
        return forecast.ranked(survival, found) if is_ragged else forecast

    def _most(self, prompts: Prompts) -> float:
        """Most answer tokens per round that waiting prompts can supply: every answer needs its prompt read first."""
        is_bound = prompts.is_full and self._num_read
        return max(prompts.num_tokens * self._num_emitted / self._num_read, 1.0) if is_bound else math.inf

    def learn(self) -> None:
        """Learn from the rounds since the last time. In a large batch, some rows are used now and the others in the next
        round."""
        rounds, self._rounds = self._rounds, []
        found, num_plain = list[Outcome](), 0
        accepted = {spread: list[Outcome]() for spread in self._spreads}
        for number, (state, seen) in enumerate(rounds, self.num_rounds):
            asked, reached, length, width = seen.shape()
            self._learn_cost(state, seen, length, width, is_asked=any(asked))
            num_plain += not any(asked)
            spread = nearest_spread(seen.plan, self._spreads)
            every = 1 + len(asked) // (8 if number > self.options.horizon else 32)
            for row in range(number % every, len(asked), every):
                passed, tried, got = seen.accepted[row], asked[row], min(reached[row], asked[row])
                tested = min(passed + 1, tried)
                state.rows[row].record(tested, self.usual.sums[spread][tested], passed)
                if tried:
                    accepted[spread].append((passed, passed < tried))
                    found.append((got, got < tried))
                    if seen.beliefs and got:
                        self.trust.record(min(passed + 1, got), sum(seen.beliefs[row][: passed + 1]), passed)
        self.usual.record(accepted, num_plain)
        if self.found.means or any(failed for _, failed in found):  # most drafters always find: no news
            self.found.record(*found)

    def _learn_cost(self, state: _State, seen: SeenRound, length: int, width: int, *, is_asked: bool) -> None:
        """Record what the round took, and what it lost. A single round changes a cost by little, because plain rounds have
        outliers too."""
        keep, num_rows = 1 - 1 / TUNING.memory, len(state.rows)
        self._padded, self._num_read = seen.padded, keep * self._num_read + seen.prompts.num_tokens
        self._num_emitted = keep * self._num_emitted + sum(map(len, seen.paths))
        is_reading, state.is_behind = state.is_behind, not is_asked
        costs, draft = self.costs.of(num_rows, seen.prompts.num_places), seen.draft_seconds if is_asked else 0.0
        is_timed = is_asked and (not is_reading or draft < costs.pace * costs.at(1, length))  # reading only adds
        usual = costs.record(length, width, draft if is_timed else None, seen.seconds - draft)
        if not is_asked:
            return self.budget.rest()
        spent = seen.seconds if is_reading else min(seen.seconds, (1 + TUNING.outlier) * usual)
        tokens, most = 1 + sum(seen.accepted) / max(sum(map(bool, seen.paths)), 1), self._most(seen.prompts) / num_rows
        cost = spent / (costs.pace * costs.plain)
        return self.budget.book(cost, min(tokens, most) / min(1.0, most) - cost, is_probe=seen.is_probe)


def _plan(lengths: Sequence[int], spread: float, reason: Reason, doubt: Doubt | None = None) -> Plan:
    return Plan(tuple(lengths), tuple(nodes_of(length, spread) for length in lengths), None, doubt, reason)
