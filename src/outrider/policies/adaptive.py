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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import final

import numpy as np

from outrider.core.device_round import CapturedShape
from outrider.core.interfaces import Doubt, Observation, Plan, Policy, RowState
from outrider.core.prices import PriceSource
from outrider.core.prompt_reading import NO_PROMPTS, Prompts
from outrider.core.reason import Reason, ReasonCode
from outrider.policies.belief import Evidence, Usual
from outrider.policies.chooser import RoundForecast, look_ahead
from outrider.policies.cost_model import BatchCosts, CostModel
from outrider.policies.lengths import captured_lengths, nearest_spread, nodes_of, spreads_of
from outrider.policies.loss_budget import LossBudget
from outrider.policies.rates import PositionRates, reach_of
from outrider.policies.rounds import DraftSize, PlannedSize, SeenRound
from outrider.policies.tuning import TUNING, AdaptiveOptions


@dataclass
class _State(RowState):
    num_rows: int
    evidence: Evidence
    policy: Adaptive = field(repr=False)
    is_behind: bool = True
    """Whether the drafter must read committed tokens before it can draft."""
    plans: dict[tuple[int, bool], Plan] = field(default_factory=dict, repr=False)
    """Plans by what a round reads of prompts. Rounds of several kinds take turns, and each kind keeps its plan."""
    is_probe: bool = False
    prompts: Prompts = NO_PROMPTS

    def fork(self, rows: Sequence[int]) -> _State:
        self.policy.learn()
        return self._of(len(rows), self.evidence.of_rows(rows), self.is_behind)

    def join(self, other: _State) -> _State:
        self.policy.learn()
        evidence = self.evidence.of_rows(range(self.num_rows), other.evidence)
        return self._of(self.num_rows + other.num_rows, evidence, self.is_behind or other.is_behind)

    def _of(self, count: int, evidence: Evidence, is_behind: bool) -> _State:
        """This state for other rows. Plans stay while the batch is about as large. Where requests come and go every few rounds,
        new plans each time would cost more than they could gain."""
        moved = _State(count, evidence, self.policy, is_behind)
        if 3 * self.num_rows <= 4 * count <= 5 * self.num_rows:
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
        longest = self.options.num_draft_tokens
        self._places = [tuple(nodes_of(length, spread) for length in range(longest + 1)) for spread in self._spreads]
        self.usual = Usual(self._spreads, [self.options.prior_acceptance] * longest)
        self.found, self.trust = PositionRates(TUNING.memory), Evidence.of(TUNING.memory)
        self._rounds: list[tuple[_State, SeenRound]] = []
        self.budget.forget()
        if state is not None:
            vars(state).update({**vars(self._fresh(state.num_rows)), "prompts": state.prompts})

    def _fresh(self, num_rows: int) -> _State:
        return _State(num_rows, Evidence.of(self.options.horizon, num_rows), self)

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
            assert state.num_rows == num_rows, "a batch that changed has a state of its own"
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
        costs = self.costs.of(state.num_rows, state.prompts.num_places)
        if self._source is not None and (costs.rest.contradicts or costs.draft.contradicts):
            self._source.doubt()
            self._source = None
        if costs.trial is not None:
            length, state.is_probe = min(costs.trial, self.options.num_draft_tokens), False
            plan = _plan([length] * state.num_rows, self._spreads[0], Reason(ReasonCode.CALIBRATION, {"length": length}))
        else:
            plan = self._best(state, costs)
        state.plans.pop(state.prompts[1:], None)
        if costs.trial is None and not state.is_probe:
            state.plans[state.prompts[1:]] = plan
        return plan

    def _best(self, state: _State, costs: BatchCosts) -> Plan:
        """The fastest draft. If none pays, a probe, but never two probes in a row. A full account pays for a probe whatever it
        seems to cost: one wrong time must not end all drafting."""
        count, purse, ends_itself = state.num_rows, self.budget.drafting, not self.trust.is_empty
        self.usual.refresh()
        choices = list[tuple[float, int, float, RoundForecast]]()
        for spread, places in zip(self._spreads, self._places, strict=True):
            forecast = self._forecast(state, costs, spread, places)
            choice = forecast.best(purse, costs.rest.optimism(places), ends_itself=ends_itself)
            choices.append((*choice, spread, forecast))
        _, best, spread, forecast = max(choices, key=itemgetter(0))
        lengths, reason = forecast.lengths(best, count), forecast.reason(best, purse)
        state.is_probe = not (best or state.is_probe) and min(forecast.risks[1], TUNING.run) <= self.budget.probing
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
        prompts, survival = state.prompts, state.evidence.survival(self.usual.by_spread[spread])
        alone = costs if prompts.is_full else self.costs.of(state.num_rows)
        rests = costs.rest.table(places).copy()
        rests[0] = costs.plain
        rests -= max(0.0, costs.plain - alone.pace * alone.plain / costs.pace)
        found = np.ones(len(places) - 1)
        if self.found.means:
            found = np.array(reach_of(self.found.inherited(found.tolist())))
        drafting = costs.draft.table(tuple(range(len(places))))
        forecast = look_ahead(survival, found, drafting, rests, padded=self._padded, most=self._most(prompts))
        if state.num_rows > 1 and not self._padded and self.trust.is_empty and not self.options.num_tree_nodes:
            forecast.rank(survival, found)
        return forecast

    def _most(self, prompts: Prompts) -> float:
        """Most answer tokens per round that waiting prompts can supply: every answer needs its prompt read first."""
        is_bound = prompts.is_full and self._num_read
        return max(prompts.num_tokens * self._num_emitted / self._num_read, 1.0) if is_bound else math.inf

    def learn(self) -> None:
        """Learn from the rounds since the last time, together from those of one batch and one plan that follow each other."""
        seen, self._rounds = self._rounds, []
        for (_, asked), group in groupby(seen, lambda one: (id(one[0]), one[1].asked)):
            states, rounds = zip(*group, strict=True)
            known, shapes = dict[tuple[int, ...], DraftSize](), list[DraftSize]()
            for one in rounds:
                sizes = one.tree.sizes
                shapes.append(known[sizes] if one.tree.is_chain and sizes in known else known.setdefault(sizes, one.shape()))
            self._learn_costs(states[0], asked, rounds, shapes)
            if any(asked.lengths):
                self._learn_acceptance(states[0], asked, rounds, shapes)
            else:
                states[0].evidence.fade(len(rounds))
                self.usual.fade(len(rounds))

    def _learn_acceptance(
        self, state: _State, asked: PlannedSize, rounds: Sequence[SeenRound], shapes: Sequence[DraftSize]
    ) -> None:
        spread, lengths = nearest_spread(asked.lengths, asked.nodes, self._spreads), np.array(asked.lengths)
        passed = np.array([one.accepted for one in rounds])
        tested, got = np.minimum(passed + 1, lengths), np.minimum([shape.found for shape in shapes], lengths)
        state.evidence.record(tested, self.usual.sums[spread][tested], passed)
        tried = lengths > 0
        passed, lengths, reached = passed[:, tried].ravel(), np.tile(lengths[tried], len(rounds)), got[:, tried].ravel()
        self.usual.record(spread, passed, lengths)
        if self.found.means or (reached < lengths).any():  # most drafters always find: no news
            self.found.record(reached, lengths)
        for one, row in zip(rounds, got, strict=True):
            if one.beliefs:
                self._learn_trust(one.beliefs, one.accepted, row.tolist())

    def _learn_trust(self, beliefs: Sequence[Sequence[float]], accepted: Sequence[int], got: Sequence[int]) -> None:
        """Compare what a drafter stated with what came true. In a large batch, some rows are used."""
        known = [row for row in range(0, len(got), 1 + len(got) // 8) if got[row]]
        tested = [[min(accepted[row] + 1, got[row])] for row in known]
        expected = [[sum(beliefs[row][: accepted[row] + 1])] for row in known]
        self.trust.record(np.array(tested), np.array(expected), np.array([[accepted[row]] for row in known]))

    def _learn_costs(self, state: _State, asked: PlannedSize, rounds: Sequence[SeenRound], shapes: Sequence[DraftSize]) -> None:
        """Record what rounds took, those of one shape together, and what they lost."""
        keep = (1 - 1 / TUNING.memory) ** len(rounds)
        self._padded, self._num_read = rounds[-1].padded, keep * self._num_read + sum(one.prompts.num_tokens for one in rounds)
        num_accepted, num_rows = sum(sum(one.accepted) for one in rounds), sum(one.num_rows for one in rounds)
        self._num_emitted = keep * self._num_emitted + num_accepted + num_rows
        is_asked, is_reading, costs = any(asked.lengths), state.is_behind, self.costs.of(state.num_rows, asked.num_places)
        state.is_behind = not is_asked
        alike = defaultdict[tuple[int, int, bool], list[SeenRound]](list)
        for number, (one, shape) in enumerate(zip(rounds, shapes, strict=True)):
            alike[shape.length, shape.width, is_asked and is_reading and not number].append(one)
        spent = 0.0
        for (length, width, is_late), same in alike.items():
            drafts = [one.draft_seconds if is_asked else 0.0 for one in same]
            is_timed = is_asked and (not is_late or drafts[0] < costs.pace * costs.draft.at(length))  # reading only adds
            usual = costs.record(length, width, drafts if is_timed else (), [one.seconds - t for one, t in zip(same, drafts)])
            spent += sum(one.seconds if is_late else min(one.seconds, (1 + TUNING.outlier) * usual) for one in same)
        if not is_asked:
            return self.budget.rest(len(rounds))
        cost, most = spent / (costs.pace * costs.plain), self._most(rounds[0].prompts) / state.num_rows
        tokens = min(1 + num_accepted / max(num_rows, 1), most) / min(1.0, most)
        return self.budget.book(cost, len(rounds) * tokens - cost, is_probe=asked.is_probe)


def _plan(lengths: Sequence[int], spread: float, reason: Reason, doubt: Doubt | None = None) -> Plan:
    nodes = {length: nodes_of(length, spread) for length in set(lengths)}
    return Plan(tuple(lengths), tuple(map(nodes.__getitem__, lengths)), None, doubt, reason)
