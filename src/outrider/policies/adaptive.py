"""The default policy: the draft that emits the most tokens per second, none included, and never far below plain decoding.

Four parts. ``cost_model.py`` knows what a round of each length costs: prices measured at load, corrected by rounds.
``belief.py`` knows how likely guesses are to survive, per request, with all requests as the prior. ``chooser.py`` ranks the
nodes of all requests and takes the prefix with the best expected speed. ``ledger.py`` bounds what may be lost against plain
decoding. This file plays rounds with them. It learns from rounds, and decides again when they have paid for that time.

Where prices are not known, the first rounds measure them (``calibration``). Where drafting does not pay, a guess is asked for
now and then (``probe``). The idea of goodput is SmartSpec's (Liu et al. 2024, arXiv 2406.14066), the expectation Leviathan's
(arXiv 2211.17192).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, final

from outrider.core.device_round import CapturedShape
from outrider.core.interfaces import Doubt, Observation, Plan, Policy, RowState
from outrider.core.prices import PriceSource
from outrider.core.reading import NO_PROMPTS, Prompts
from outrider.core.reason import Reason, ReasonCode
from outrider.policies.belief import Account, place_of, planned_of
from outrider.policies.chooser import Outlook, look_ahead
from outrider.policies.cost_model import BatchCosts, CostModel
from outrider.policies.ledger import Ledger
from outrider.policies.lengths import captured_lengths, depths_of, plan_of
from outrider.policies.rates import PositionRates, reach_of
from outrider.policies.tuning import TUNING, AdaptiveOptions


class Decision(NamedTuple):
    """What is drafted until the next decision, for every row, and for the longest."""

    outlook: Outlook
    lengths: tuple[int, ...]
    best: int
    made: float
    """Seconds of rounds before it."""
    plan: Plan | None = None


@dataclass
class _State(RowState):
    rows: list[Account]
    policy: Adaptive = field(repr=False)
    is_behind: bool = True
    """The drafter has something to read when it is asked."""
    decisions: dict[tuple[int, bool], Decision] = field(default_factory=dict, repr=False)
    """By what rounds read of prompts: rounds of several kinds take turns, and each has a decision."""
    seconds: float = field(default=0.0, repr=False)
    """Time spent on rounds."""
    is_probe: bool = False
    prompts: Prompts = NO_PROMPTS

    def fork(self, rows: Sequence[int]) -> _State:
        return self._of([replace(self.rows[row]) for row in rows], self.is_behind)

    def join(self, other: _State) -> _State:
        return self._of([*self.rows, *other.rows], self.is_behind or other.is_behind)

    def _of(self, rows: list[Account], is_behind: bool) -> _State:
        """Other rows. A decision for all alike stays while the batch is about as large: where requests come and go every few
        rounds, another one each time would cost more than it could gain."""
        moved, count = _State(rows, self.policy, is_behind, seconds=self.seconds), len(rows)
        if not self.is_probe and 3 * len(self.rows) <= 4 * count <= 5 * len(self.rows):
            for kind, one in self.decisions.items():
                moved.decisions[kind] = one._replace(lengths=(one.best,) * count, plan=None)
        return moved


@final
class Adaptive(Policy):
    """Most tokens per second. Costs, the ledger and the rates of all requests outlive requests; the rest is per request."""

    def __init__(self, options: AdaptiveOptions | None = None) -> None:
        self.options = options or AdaptiveOptions()
        self.costs, self.ledger = CostModel(), Ledger(self.options.loss_share, self.options.probe_share)
        self.num_rounds = self.num_probes = 0
        self._padded, self._thinking = True, 0.0
        self._num_read = self._num_emitted = 0.0
        """Tokens of prompts that were read inside rounds, and tokens of answers; old ones fade."""
        self._nodes = [self._nodes_of(length) for length in range(self.options.num_draft_tokens + 1)]
        self._source: PriceSource | None = None
        self.forget(None)

    def expect(self, prices: PriceSource) -> None:
        self._source, self.costs = prices, CostModel()

    def forget(self, state: _State | None) -> None:
        """Costs stay, since they belong to the machine. What was learnt of guesses goes, and so do losses."""
        self.accepted, self.found = PositionRates(TUNING.memory), PositionRates(TUNING.memory)
        self.trust = Account(TUNING.memory)
        self.ledger.forget()
        if state is not None:
            vars(state).update(vars(_State(self._new_rows(len(state.rows)), self)))

    def _new_rows(self, count: int) -> list[Account]:
        return [Account(self.options.horizon) for _ in range(count)]

    def start(self, num_rows: int) -> _State:
        if self._source is not None and self.costs.prices is None and not self.num_rounds:
            self.costs = CostModel(self._source.read(self._nodes_of))
        return _State(self._new_rows(num_rows), self)

    def captured_shape(self) -> CapturedShape:
        return captured_lengths(self.options.num_draft_tokens, self.options.num_tree_nodes)

    def _nodes_of(self, length: int) -> int:
        return plan_of([length], self.options.num_draft_tokens, self.options.num_tree_nodes).max_nodes[0]

    def carry(self, state: _State, prompts: Prompts) -> None:
        state.prompts = prompts

    def plan(self, state: _State, num_rows: int) -> Plan:
        assert len(state.rows) == num_rows, "a batch that changed has a state of its own"
        costs, kind = self.costs.of(num_rows, state.prompts.num_places), state.prompts[1:]
        if costs.trial is not None:
            length, state.is_probe = min(costs.trial, self.options.num_draft_tokens), False
            return self._plan([length] * num_rows, Reason(ReasonCode.CALIBRATION, {"length": length}))
        decision = state.decisions.get(kind)
        if decision is None or self._is_due(state, decision):
            decision = self._decide(state, costs)
        elif decision.plan is not None:
            return decision.plan
        state.is_probe = not (decision.best or state.is_probe) and decision.outlook.risk(1) <= self.ledger.probing
        self.num_probes += state.is_probe
        reason = decision.outlook.reason(decision.best, self.ledger.drafting)
        reason = Reason(ReasonCode.PROBE, {"length": 1, "best": 0}) if state.is_probe else reason
        lengths = [1] * num_rows if state.is_probe else decision.lengths
        plan = self._plan(lengths, reason, self._doubt(decision.outlook, num_rows) if any(lengths) else None)
        state.decisions[kind] = decision._replace(plan=plan)
        return plan

    def _is_due(self, state: _State, decision: Decision) -> bool:
        """A probe has brought news, or rounds have paid for a decision; the first ones pay more."""
        share = TUNING.thinking * (4 if self.num_rounds < 64 else 1) / len(state.decisions)
        return state.is_probe or (state.seconds - decision.made) * share >= self._thinking

    def _plan(self, lengths: Sequence[int], reason: Reason, doubt: Doubt | None = None) -> Plan:
        return plan_of(lengths, self.options.num_draft_tokens, self.options.num_tree_nodes, doubt=doubt, reason=reason)

    def _doubt(self, outlook: Outlook, num_rows: int) -> Doubt:
        """Where drafts end that are not going well."""
        trust, further = self.trust.trust(1.0), self.trust.rate(self.options.prior_acceptance)
        return outlook.doubt((trust,) * num_rows, further=further, padded=self._padded)

    def _decide(self, state: _State, costs: BatchCosts) -> Decision:
        began, longest = time.thread_time(), self.options.num_draft_tokens
        usual, ends_itself = self._usual(longest), self.trust.expected > 0
        found = reach_of(self.found.inherited([1.0] * longest)) if self.found.means else [1.0] * longest
        survival = [row.survival(usual) for row in state.rows]
        parts = costs.draft.table(range(longest + 1)), costs.rest.table(self._nodes)
        outlook = look_ahead(survival, found, *parts, padded=self._padded, most=self._most(state.prompts))
        if len(state.rows) > 1 and not (self._padded or ends_itself or self.options.num_tree_nodes):
            outlook = outlook.ranked(survival, found)
        optimism = [costs.rest.optimism(nodes) for nodes in self._nodes]
        best = outlook.best(self.ledger.drafting, optimism, ends_itself=ends_itself)
        lengths = outlook.shares.get(best, (best,) * len(state.rows))
        decision = state.decisions[state.prompts[1:]] = Decision(outlook, lengths, max(lengths), state.seconds)
        if costs.rest.contradicts or costs.draft.contradicts:
            if self._source is not None:
                self._source.doubt()
            self._source, self.costs = None, CostModel()
        seconds = time.thread_time() - began
        self._thinking += (seconds - self._thinking) / 8 if self._thinking else seconds
        return decision

    def _most(self, prompts: Prompts) -> float:
        """Tokens of a round that prompts can feed, where they wait: every answer needs its prompt read."""
        if not prompts.is_full or not self._num_read:
            return math.inf
        return max(prompts.num_tokens * self._num_emitted / self._num_read, 1.0)

    def _usual(self, count: int) -> list[float]:
        """At so many positions, how often a further guess of any request was found and accepted where it was asked for."""
        return self.accepted.inherited([self.options.prior_acceptance] * count)

    def update(self, state: _State, observation: Observation) -> None:
        """Learn from the round. That takes time, so after the first rounds a quarter of the plain ones must tell enough."""
        self.num_rounds, self._padded, keep = self.num_rounds + 1, observation.padded, 1 - 1 / TUNING.memory
        self._num_read = keep * self._num_read + observation.prompts.num_tokens
        self._num_emitted = keep * self._num_emitted + sum(map(len, observation.paths))
        state.seconds += observation.seconds
        asked = any(planned_of(observation))
        is_reading, state.is_behind = state.is_behind, not asked
        weight = 1 if asked or self.num_rounds <= 64 else 4
        if self.num_rounds % weight == 0:
            self._learn_cost(state, observation, is_reading=is_reading, weight=weight)
            self._learn_rates(state, observation, weight)

    def _learn_cost(self, state: _State, seen: Observation, *, is_reading: bool, weight: int) -> None:
        """What the round took, and what it lost. A round is booked at little more than usual: plain ones have outliers too."""
        (length, width), asked = place_of(seen), any(planned_of(seen))
        costs, draft = self.costs.of(len(state.rows), seen.prompts.num_places), seen.draft_seconds if asked else 0.0
        pace = costs.record(length, width, draft if asked and not is_reading else None, seen.seconds - draft)
        if not asked:
            self.ledger.rest(weight)
            return
        most = (1 + TUNING.outlier) * pace * (costs.draft.at(length) + costs.rest.at(width))
        spent = seen.seconds if is_reading else min(seen.seconds, most)
        tokens = 1 + sum(seen.num_accepted) / max(sum(map(bool, seen.paths)), 1)
        most = self._most(seen.prompts) / len(state.rows)
        is_probe = seen.plan is not None and seen.plan.reason is not None and seen.plan.reason.code == ReasonCode.PROBE
        self.ledger.book(spent / (pace * costs.plain), min(tokens, most) / min(1.0, most), is_probe=is_probe)

    def _learn_rates(self, state: _State, seen: Observation, weight: int) -> None:
        """What guesses were worth. In a large batch some rows tell enough, others in the next round."""
        every = 1 + len(state.rows) // 8 if self.num_rounds > 64 else 1
        rows, planned, accepted = range(self.num_rounds % every, len(state.rows), every), planned_of(seen), seen.num_accepted
        found = [place_of(seen)[0]] * len(planned) if seen.padded else depths_of(seen.draft.tree)
        if not any(planned[row] for row in rows):
            self.accepted.fade(weight / 2)
        usual = list(accumulate(self._usual(1 + max((accepted[row] for row in rows), default=0)), initial=0.0))
        for row in rows:
            passed, asked, got = accepted[row], planned[row], min(found[row], planned[row])
            tested = min(passed + 1, asked)
            state.rows[row].record(tested, usual[tested], passed, num_rounds=1 if asked else weight)
            if asked:
                self.accepted.record((passed, passed < asked))
                if self.found.means or got < asked:  # most drafters always find: no news
                    self.found.record((got, got < asked))
                if seen.draft.beliefs and got:
                    self.trust.record(min(passed + 1, got), sum(seen.draft.beliefs[row][: passed + 1]), passed)
