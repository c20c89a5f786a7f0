"""The default policy: the draft that emits the most tokens per second, none included, and never far below plain decoding.

Four parts. ``cost_model.py`` knows what a round of each length costs: prices measured at load, corrected by rounds.
``belief.py`` knows how likely guesses are to survive, per request, with all requests as the prior. ``chooser.py`` ranks the
nodes of all requests and takes the prefix with the best expected speed. ``ledger.py`` bounds what may be lost against plain
decoding. This file plays rounds with them: it notes each, and learns and decides again when rounds have paid for that time.

Where prices are known, rare probes only keep beliefs fresh. Where not, the first rounds measure them (``calibration``). The
idea of goodput is SmartSpec's (Liu et al. 2024, arXiv 2406.14066), the expectation Leviathan's (arXiv 2211.17192).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from outrider.core.device_round import CapturedShape
from outrider.core.interfaces import Doubt, Observation, Plan, Policy, RowState
from outrider.core.prices import PriceSource
from outrider.core.reason import Reason, ReasonCode
from outrider.policies.belief import Asked, Belief
from outrider.policies.chooser import Outlook, Survival, look_ahead
from outrider.policies.cost_model import BatchCosts, CostModel
from outrider.policies.ledger import Ledger
from outrider.policies.lengths import captured_lengths, plan_of
from outrider.policies.notes import Decision, Note
from outrider.policies.tuning import TUNING, AdaptiveOptions

_CALIBRATION = (0, 1, 1, 0, 1, 4, 4, 4)
"""Lengths of the first rounds where there are no prices; the last three only where a guess is cheap."""


@dataclass
class _State(RowState):
    rows: list[Belief]
    policy: Adaptive = field(repr=False)
    notes: list[Note] = field(default_factory=list)
    num_plain: int = 0
    """Plain rounds that were only counted."""
    has_new: bool = True
    """There are rows that the drafter was never asked for: it may have their prompts to read."""
    decision: Decision | None = field(default=None, repr=False)
    seconds: float = field(default=0.0, repr=False)
    """Time spent on rounds since the decision."""
    plan: Plan | None = field(default=None, repr=False)
    is_probe: bool = False
    num_more: int = field(default=0, repr=False)
    """Rounds of this probe that are still to come."""
    num_settling: int = field(default=TUNING.run, repr=False)
    """Rounds before the batch may be used to probe."""

    def fork(self, rows: Sequence[int]) -> _State:
        self.policy.learn(self)
        return self._of([self.rows[row].copy() for row in rows], self.has_new)

    def join(self, other: _State) -> _State:
        self.policy.learn(self)
        self.policy.learn(other)
        return self._of([*self.rows, *other.rows], self.has_new or other.has_new)

    def _of(self, rows: list[Belief], has_new: bool) -> _State:
        """Other rows. A decision for all alike stays while the batch is about as large: where requests come and go every few
        rounds, another one each time would cost more than it could gain."""
        moved, decision = _State(rows, self.policy, has_new=has_new), self.decision
        if decision and not self.is_probe and 3 * len(self.rows) <= 4 * len(rows) <= 5 * len(self.rows):
            moved.decision = decision._replace(lengths=(decision.best,) * len(rows))
            moved.seconds, moved.num_settling = self.seconds, self.num_settling
        return moved


@final
class Adaptive(Policy):
    """Most tokens per second. Costs, the ledger and the beliefs of all requests outlive requests; the rest is per request."""

    def __init__(self, options: AdaptiveOptions | None = None) -> None:
        self.options = options or AdaptiveOptions()
        self.costs, self.known = CostModel(), Belief(TUNING.memory)
        self.ledger = Ledger(self.options.probe_share, self.options.loss_share)
        self.num_rounds = self.num_asked = self.num_probes = 0
        self._last_probe = self._turn = 0
        self._padded, self._thinking = True, 0.0
        self._nodes = [self._nodes_of(length) for length in range(self.options.num_draft_tokens + 1)]
        self._source: PriceSource | None = None
        self._latest: _State | None = None
        """The state that was last told of a round; its request may have ended before it was learnt from."""

    def expect(self, prices: PriceSource) -> None:
        self._source, self.costs.prices = prices, None

    def start(self, num_rows: int) -> _State:
        if self._source is not None and self.costs.prices is None and not self.num_rounds:
            self.costs.prices = self._source.read(self._nodes_of)
        state, last = _State(self._new_rows(num_rows), self), self._latest
        if last is not None:
            self.learn(last)
            decision = last.decision
            if decision and not decision.best and (decision.num_asked, len(last.rows)) == (self.num_asked, num_rows):
                state.decision, state.seconds = decision, last.seconds  # nothing was drafted, and nothing is new
        return state

    def _new_rows(self, count: int) -> list[Belief]:
        return [Belief(self.options.horizon) for _ in range(count)]

    def forget(self, state: _State | None) -> None:
        """Costs stay, since they belong to the machine. What was learnt of guesses goes, and so do pauses."""
        for known in (self._latest, state):
            if known is not None:
                self.learn(known)
        self._latest, self.known = None, Belief(TUNING.memory)
        self.ledger.forget()
        if state is not None:
            state.rows, state.has_new = self._new_rows(len(state.rows)), True
            state.decision, state.plan, state.is_probe, state.num_more = None, None, False, 0

    def captured_shape(self) -> CapturedShape:
        return captured_lengths(self.options.num_draft_tokens, self.options.num_tree_nodes)

    def _nodes_of(self, length: int) -> int:
        return plan_of([length], self.options.num_draft_tokens, self.options.num_tree_nodes).max_nodes[0]

    def plan(self, state: _State, num_rows: int) -> Plan:
        assert len(state.rows) == num_rows, "a batch that changed has a state of its own"
        length = self._calibrating(state)
        if length is not None:
            return self._take(state, [length] * num_rows, Reason(ReasonCode.CALIBRATION, {"length": length}))
        if state.is_probe and state.num_more and state.plan is not None:
            state.num_more -= 1
            return state.plan
        is_due = state.decision is None or self._is_due(state)
        decision = self._decide(state) if is_due or state.decision is None else state.decision
        rest = self._costs(state).rest
        is_settling = state.num_settling > 0 and (rest.is_priced or rest.knows(0) or not decision.best)
        probe = None if is_settling else self._probe(state, decision)
        state.num_settling = max(state.num_settling - 1, 0)
        if probe is not None:
            state.is_probe, state.num_more = True, _run_of(probe, decision.best) - 1
            self.num_probes, self._last_probe = self.num_probes + 1, self.num_rounds
            return self._take(state, [probe] * num_rows, Reason(ReasonCode.PROBE, {"length": probe, "best": decision.best}))
        if is_due or state.is_probe or state.plan is None:
            state.is_probe = False
            reason = decision.outlook.reason(decision.best, self.ledger.losses.balance, self.ledger.is_paused)
            return self._take(state, decision.lengths, reason)
        return state.plan

    def _take(self, state: _State, lengths: Sequence[int], reason: Reason) -> Plan:
        options, doubt = self.options, self._doubt(state) if any(lengths) else None
        state.plan = plan_of(lengths, options.num_draft_tokens, options.num_tree_nodes, doubt=doubt, reason=reason)
        return state.plan

    def _doubt(self, state: _State) -> Doubt | None:
        """Where drafts end that are not going well."""
        if state.decision is None:
            return None
        usual, usual_rate = self.known.trust.given(1.0), self.known.trust.rate(self.options.prior_acceptance)
        trust = tuple(row.trust.given(usual) for row in state.rows)
        further = sum(row.trust.rate(usual_rate) for row in state.rows) / len(state.rows)
        return state.decision.outlook.doubt(state.decision.best, trust, further=further, padded=self._padded)

    def _calibrating(self, state: _State) -> int | None:
        """The length of one of the first rounds, where prices are not known."""
        at = self.num_rounds
        if at >= len(_CALIBRATION) or state.decision is not None or self.costs.prices is not None:
            return None
        if _CALIBRATION[at] > 1:
            self.learn(state)
            costs = self._costs(state)
            if costs.drafting(1)[1] > 0.4 * costs.plain:
                return None
        return min(_CALIBRATION[at], self.options.num_draft_tokens)

    def _is_due(self, state: _State) -> bool:
        """There is news of a drafter that was not in use, or rounds have paid for a decision; the first rounds pay more."""
        assert state.decision is not None
        share = TUNING.thinking * (4 if self.num_rounds < 64 else 1 if state.decision.best else 0.2)
        return (state.is_probe and not state.decision.best) or state.seconds * share >= self._thinking

    def _costs(self, state: _State) -> BatchCosts:
        return self.costs.of(len(state.rows))

    def _decide(self, state: _State) -> Decision:
        began = time.perf_counter()
        self.learn(state)
        costs, ends_itself, ledger = self._costs(state), self.known.trust.expected > 0, self.ledger
        survival = self._survival(state.rows, self._longest(costs))
        outlook = self._look_ahead(survival, costs)
        best = outlook.best(ledger.payable, ends_itself=ends_itself)
        ledger.pause(not best and outlook.best(math.inf, ends_itself=False) > 0)
        lengths = (best,) * len(state.rows)
        if best and len(lengths) > 1 and not (self._padded or ends_itself or self.options.num_tree_nodes):
            lengths = outlook.lengths(survival, best)
        state.decision, state.seconds = Decision(outlook, max(lengths), lengths, self.num_asked), 0.0
        if self._source is not None and (costs.rest.contradicts or costs.draft.contradicts):
            self._source.doubt()
            self._source = None
            self.costs.distrust()
        seconds = time.perf_counter() - began
        self._thinking += (seconds - self._thinking) / 8 if self._thinking else seconds
        return state.decision

    def _longest(self, costs: BatchCosts) -> int:
        """How far to look: costs that were not measured are guesses further out."""
        far = self.options.num_draft_tokens
        return far if costs.draft.is_priced else min(far, max(2, 2 * costs.longest_known))

    def _survival(self, rows: Sequence[Belief], longest: int) -> Survival:
        accepted = self.known.accepted.inherited([self.options.prior_acceptance] * longest)
        found = self.known.found.inherited([1.0] * longest) if self.known.found.means else [1.0] * longest
        return [row.survival(accepted, found) for row in rows]

    def _look_ahead(self, survival: Survival, costs: BatchCosts) -> Outlook:
        longest = len(survival[0][0])
        rests = costs.rest.table(self._nodes[: longest + 1])
        return look_ahead(survival, costs.plain, costs.drafting(longest), rests, padded=self._padded)

    def _probe(self, state: _State, decision: Decision) -> int | None:
        """A length worth trying for what it teaches, if one is due and the purse can pay for it. While drafting: by turns
        nothing, where plain decoding is not far behind, one more, half, twice and a third as many. While not: mostly one
        guess, and now and then as many as can be paid for, for drafters that are right late or not at all."""
        outlook, best, costs = decision.outlook, decision.best, self._costs(state)
        if not costs.rest.is_priced and (best or outlook.gain(1) >= 0.75):  # what there is to gain is not known before
            if not costs.rest.knows(0):
                return 0
            if not best and not costs.is_known:
                return 1
        if self.num_rounds - self._last_probe < 5 * TUNING.run:
            return None
        purse, longest = self.ledger.probes, len(outlook.tokens) - 1
        purse.cap = max(2.0, outlook.risk(1))  # one guess must stay within reach, however dear
        plain = 0 if outlook.gain(best) < 1.5 else best + 1
        turns = (plain, best + 1, best // 2 or plain, 2 * best, best // 3 or plain) if best else (1, 1, 1, longest)
        wanted = min(turns[self._turn % len(turns)], longest)
        lengths = range(wanted, best, -1) if wanted > best else (wanted,) if wanted < best else ()
        probe = next((k for k in lengths if outlook.price(k, best) * _run_of(k, best) <= purse.balance), None)
        self._turn += probe is not None or not lengths or purse.is_full  # what a full purse cannot pay is skipped
        return probe

    def update(self, state: _State, observation: Observation) -> None:
        """Note the round. It is learnt from at the next decision, with others: that costs far less than one by one."""
        self.num_rounds, self._latest = self.num_rounds + 1, state
        state.seconds += observation.seconds
        planned = observation.plan.max_depth if observation.plan else state.plan.max_depth if state.plan else ()
        asked, is_probe = any(planned), state.is_probe
        if is_probe and state.num_more == TUNING.run - 1:  # a pass of another width than the ones before is slow
            state.num_plain += not asked
            return
        if not asked and state.decision is not None and not is_probe and self.num_rounds % 4:
            state.num_plain += 1
            return
        self._padded, is_first = observation.padded, state.has_new and asked
        state.has_new = state.has_new and not is_first
        self.num_asked += asked
        if self.num_rounds > 64 and self.num_rounds % (1 + len(state.rows) // 8) and not is_probe:
            return  # reading a round takes time per row, and many rows teach fast
        state.notes.append(Note(observation, planned, is_first, state.decision, is_probe))

    def learn(self, state: _State) -> None:
        """Read the rounds since the last decision."""
        notes, num_plain, state.notes, state.num_plain = state.notes, state.num_plain, [], 0
        if num_plain:
            self._rested(state, num_plain, state.decision)
        asked: list[list[Asked]] = [[] for _ in state.rows]
        for note in notes:
            self._learn_one(state, note, asked)
        for row, rounds in zip(state.rows, asked, strict=True):
            if rounds:
                row.learn(rounds)
                self.known.learn(rounds)

    def _rested(self, state: _State, num_rounds: int, decision: Decision | None) -> None:
        for row in state.rows:
            row.rest(num_rounds)
        self.ledger.rest(num_rounds, decision.outlook.forgone if decision and not decision.best else 0.0)

    def _learn_one(self, state: _State, note: Note, asked: list[list[Asked]]) -> None:
        costs, timing = self._costs(state), note.timing(state.rows)
        pace = costs.record(timing)
        if not timing.asked:
            self._rested(state, 1, note.decision)
            return
        for row, rounds, one in zip(state.rows, asked, note.asked(), strict=True):
            if one is None:
                row.rest(1)
            else:
                row.lag = 0
                rounds.append(one)
        if note.decision is not None:
            usual = pace * (costs.drafting(timing.length)[timing.length] + costs.rest.at(timing.width))
            cost, accepted = note.cost(timing, usual) / (pace * costs.plain), note.seen.num_accepted
            gain = note.decision.outlook.gain(note.decision.best)
            self.ledger.book(cost, 1 + sum(accepted) / len(accepted), gain=gain, is_probe=note.is_probe)


def _run_of(probe: int, best: int) -> int:
    """Rounds of a probe."""
    return TUNING.run if probe < best or not probe else 1
