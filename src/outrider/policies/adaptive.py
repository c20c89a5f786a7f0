"""The length that emits the most tokens per second, zero included: measured, per batch, and never far below plain decoding.

Every round teaches what rounds of its length cost on this machine and how often guesses at each position are accepted in
this request; the next length maximises expected tokens over expected seconds. Length 0 is plain decoding; it wins where the
drafter is useless or too dear, and rare probes, paid from a bounded budget, notice when that changes. The idea of goodput is
SmartSpec's (Liu et al. 2024, arXiv 2406.14066), the expectation Leviathan's (arXiv 2211.17192); the measuring, the probes
and the budgets are ours.

    tokens(K)  = sum_b (1 + sum_{k <= K} prod_{j <= k} a_bj)             a_bj: found and accepted, if asked for and j - 1 were
    seconds(K) = c(0) + sum_{k <= K} P(some row finds k) (c(k) - c(k-1))      c: drafter and pass, k guesses in the longest row
    K* = argmax tokens(K) / seconds(K),  against B / t_plain for K = 0      (a pass that does not pad: as wide as the mean row)

Batches: rows share the pass, so cost is a matter of the batch; acceptance is a matter of the row. Hence one length for all,
chosen by the sum of what every row expects from it.

A drafter that copies may find nothing: such a round costs about nothing and promises nothing, so rare matches do not argue
against asking. One that knows how sure it is (``Doubt``) ends a draft itself, once a further guess is not worth its time:

    stop after guess k if  a * prod_{j <= k} trust * belief_j  <  tokens per second now * seconds of one guess more

where ``trust`` is what the request has shown its beliefs to be worth, and a how often its guesses are right: the next one's
belief is not known before it is drafted. K is then only a cap, and a generous one is taken. A
batch goes on while the sum of its rows' products pays for drafting; where the pass does not pad, each guess must pay for its
own place there too, or is left out: in large batches that is most of its cost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import final

from outrider.core.device_round import CapturedShape
from outrider.core.interfaces import Doubt, Observation, Plan, Policy, RowState
from outrider.core.reason import Reason, ReasonCode
from outrider.policies.checks import check_between, check_count, check_nodes
from outrider.policies.costs import ABOUT, BatchCosts
from outrider.policies.ledger import Experience, Purse
from outrider.policies.lengths import plan_of
from outrider.policies.lessons import Played, Row, learn
from outrider.policies.outlook import Outlook
from outrider.policies.rates import PositionRates, Trust, reach_of

_CALIBRATION = (0, 1, 1, 0, 1)
"""Lengths of an engine's first rounds: each cost twice, since first calls are slow, and the first draft reads the prompt."""
_LONGER = (4, 4, 4)
"""... and of the next ones, where a guess is cheap: single rounds of another length, as probes are, are slower than usual."""
_CHEAP = 0.4
"""Plain rounds that a guess takes at most there."""
_PROBE_INTERVAL = 16
"""Fewest rounds from one probe to the next."""
_PROBE_CAP = 2.0
"""Plain rounds a probe of more than one guess may cost."""
_MOST_DEBT = 24.0
"""... and at most has to save before the next one, whatever it took: what had to be compiled for it is compiled once."""
_RUN = 3
"""Rounds of a probe that is shorter than what is drafted. The first is not timed: a pass of another width than the ones before
is slow. (So are longer probes, but more of them would be dear.)"""
_HOPEFUL = 0.75
"""Part of plain decoding's speed from which on one guess is tried soon at a batch size at which nothing was drafted yet."""
_NEAR = 0.95
"""Part of the best speed from which on a shorter length might be the best, were it known better."""
_SETTLING = 3
"""Rounds of a new batch before one is a probe: the first ones are slow, and a drafter that copies has little to copy from."""
_CLOSE = 1.5
"""Speed, plain decoding being 1, below which it matters what a plain round costs now."""
_THINKING_SHARE = 0.008
"""Part of the time that deciding may take: a decision holds until rounds of a model have paid for it."""
_IDLE_SHARE = 0.0015
"""... while nothing is drafted, ..."""
_EAGER_SHARE = 0.03
_WARM = 64
"""... and in an engine's first rounds, when there is more to learn."""
_PLAIN_SAMPLE = 4
"""One in so many plain rounds is timed."""
_TAUGHT_ROWS = 8
"""Rows a round teaches enough about: larger batches learn from one round in several, since reading it takes time per row. (What
may be spent on probes and losses grows with these rounds too, so it stays on the safe side there.)"""
_START_CREDIT = 6.0
"""Plain rounds that may be lost before anything was gained."""
_RESUMING = 3.0
"""... and that there must be after a pause, or the first guesses that fail begin another."""
_MOST_CREDIT = 16.0
"""... and after much was: a stretch of text that is hard to guess must not end speculation for the next one."""


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
    """Acceptance assumed before any guess was tested; worth ten tests."""
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
class _State(RowState):
    known: Experience = field(repr=False)
    rows: list[Row]
    unread: list[Played] = field(default_factory=list)
    """Rounds that were not learnt from."""
    num_plain: int = 0
    """Plain rounds of these that were only counted."""
    has_new: bool = True
    """There are rows that the drafter was never asked for: it may have their prompts to read."""
    num_rows: int = field(default=0, repr=False)
    """Size of the batch that the last decision was made for."""
    seconds: float = field(default=0.0, repr=False)
    """Time spent on rounds since then."""
    outlook: Outlook | None = field(default=None, repr=False)
    """What the decision rests on; None where the batch is new."""
    best: int = field(default=0, repr=False)
    """The decision: length of a round that is no probe."""
    depth: int = 0
    """Length of this round."""
    plan: Plan | None = None
    """... as a plan."""
    is_probe: bool = False
    num_more: int = field(default=0, repr=False)
    """Rounds of this probe that are still to come."""
    num_settling: int = field(default=0, repr=False)
    """Rounds before a new batch may be used to probe."""

    def learn(self) -> None:
        """Read the rounds since the last decision."""
        for row in self.rows:
            row.rest(self.num_plain)
        known = self.known
        credit = known.credit(self.outlook.forgone) if self.outlook and self.num_plain and not self.best else 0.0
        known.probes.settle(self.num_plain, 0.0)
        known.losses.settle(self.num_plain, -credit * self.num_plain)
        learn(self.rows, self.unread, self.known)
        self.unread, self.num_plain = [], 0

    def fork(self, rows: Sequence[int]) -> _State:
        self.learn()
        return self._of([self.rows[row].copy() for row in rows], has_new=self.has_new)

    def join(self, other: _State) -> _State:
        self.learn()
        other.learn()
        return self._of([*self.rows, *other.rows], has_new=self.has_new or other.has_new)

    def _of(self, rows: list[Row], *, has_new: bool) -> _State:
        """Other rows. The decision stays while the batch is about as large as when it was made: where requests come and go
        every few rounds, another one each time would cost more than it could gain."""
        moved = _State(self.known, rows, has_new=has_new)
        if self.num_rows / ABOUT <= len(rows) <= self.num_rows * ABOUT and not self.is_probe:
            moved.num_rows, moved.seconds, moved.outlook, moved.best = self.num_rows, self.seconds, self.outlook, self.best
        return moved


@final
class Adaptive(Policy):
    """Most tokens per second. ``experience`` outlives requests (see ``Experience``); the rest is per request."""

    def __init__(self, options: AdaptiveOptions | None = None) -> None:
        self.options = options or AdaptiveOptions()
        self.experience = Experience(
            probes=Purse(self.options.probe_share, 0.0, cap=_PROBE_CAP, lowest=-_MOST_DEBT),
            losses=Purse(self.options.loss_share, _START_CREDIT, cap=_MOST_CREDIT, lowest=-_RESUMING),
        )
        self._latest: _State | None = None
        """The state that was last told of a round; its request may have ended before it was learnt from."""
        self._idle: tuple[tuple[int, int], Outlook] | None = None
        """Where nothing was drafted for new requests: what was known then, and the outlook. It holds until there is news."""

    def start(self, num_rows: int) -> _State:
        last = self._latest
        state = _State(self.experience, self._new_rows(num_rows))
        if last is not None:
            last.learn()
            if last.best == 0 and self._idle is not None and self._idle[0] == self._known_for(num_rows):
                state.outlook, state.num_rows, state.seconds = self._idle[1], num_rows, last.seconds
        return state

    def _new_rows(self, count: int) -> list[Row]:
        horizon = self.options.horizon
        return [Row(PositionRates(horizon), PositionRates(horizon), Trust(horizon)) for _ in range(count)]

    def forget(self, state: _State | None) -> None:
        """Costs stay, since they belong to the machine. What was learnt of guesses goes, and so do pauses."""
        for known in (self._latest, state):
            if known is not None:
                known.learn()
        self._latest, self._idle = None, None
        self.experience.forget_guesses(_START_CREDIT)
        if state is not None:
            state.rows, state.has_new = self._new_rows(len(state.rows)), True
            state.outlook, state.plan, state.is_probe, state.num_more = None, None, False, 0

    def _known_for(self, num_rows: int) -> tuple[int, int]:
        """Changes when there is news for such a batch."""
        return self.experience.num_asked, num_rows

    def plan(self, state: _State, num_rows: int) -> Plan:
        assert len(state.rows) == num_rows, "a batch that changed has a state of its own"
        num_rounds = self.experience.num_rounds
        if num_rounds < len(_CALIBRATION) + len(_LONGER):
            length = self._calibrating(state, num_rounds)
            if length is not None:
                length = min(length, self.options.num_draft_tokens)
                return self._take(state, length, Reason(ReasonCode.CALIBRATION, {"length": length}))
        if state.is_probe and state.num_more and state.plan is not None:
            state.num_more -= 1
            return state.plan
        is_new, was_settling = state.outlook is None, state.num_settling > 0
        state.num_settling = max(state.num_settling - 1, 0)
        is_due = is_new or self._is_due(state)
        if is_due:
            self._decide(state)
        if is_new and (not state.best or self._costs(state).knows_plain):
            state.num_settling = _SETTLING
        if state.outlook is not None and not state.num_settling and (is_due or was_settling):
            return self._probe_or_not(state, state.outlook)
        if is_due or state.is_probe or state.plan is None:
            state.is_probe = False
            return self._take(state, state.best, self._why(state))
        return state.plan

    def captured_shape(self) -> CapturedShape:
        return CapturedShape(self.options.num_draft_tokens, None)

    def _probe_or_not(self, state: _State, outlook: Outlook) -> Plan:
        probe = self._probe(state, outlook)
        state.is_probe, state.num_more = probe is not None, 0 if probe is None else _run_of(probe, state.best) - 1
        if probe is None:
            return self._take(state, state.best, self._why(state))
        return self._take(state, probe, Reason(ReasonCode.PROBE, {"length": probe, "best": state.best}))

    def _calibrating(self, state: _State, num_rounds: int) -> int | None:
        """The length of one of the first rounds, if it is one that only serves to time it."""
        if num_rounds < len(_CALIBRATION):
            return _CALIBRATION[num_rounds]
        if state.unread and state.outlook is None:
            state.learn()
        costs = self._costs(state)
        is_cheap = costs.drafting(1)[1] <= _CHEAP * costs.plain
        return _LONGER[num_rounds - len(_CALIBRATION)] if is_cheap and state.outlook is None else None

    def _costs(self, state: _State) -> BatchCosts:
        return self.experience.costs.of(len(state.rows))

    def _why(self, state: _State) -> Reason | None:
        """What the decision in force rests on; None where there is none yet."""
        known = self.experience
        return None if state.outlook is None else state.outlook.reason(state.best, known.losses.balance, known.is_paused)

    def _take(self, state: _State, depth: int, reason: Reason | None) -> Plan:
        state.depth, options = depth, self.options
        lengths, doubt = [depth] * len(state.rows), self._doubt(state) if depth else None
        state.plan = plan_of(lengths, options.num_draft_tokens, options.num_tree_nodes, doubt=doubt, reason=reason)
        return state.plan

    def _doubt(self, state: _State) -> Doubt | None:
        """Where drafts end that are not going well."""
        if state.outlook is None:
            return None
        known = self.experience
        usual, usual_rate = known.trust.given(1.0), known.trust.rate(self.options.prior_acceptance)
        trust = tuple(row.trust.given(usual) for row in state.rows)
        further = sum(row.trust.rate(usual_rate) for row in state.rows) / len(state.rows)
        return state.outlook.doubt(state.best, trust, further=further, padded=known.padded)

    def update(self, state: _State, observation: Observation) -> None:
        """Note the round. It is learnt from at the next decision, with others: that costs far less than one by one."""
        known = self.experience
        known.num_rounds += 1
        state.seconds += observation.seconds
        self._latest = state
        is_probe = state.is_probe
        if is_probe and state.best and state.depth and max(observation.draft.tree.sizes) == 1:
            state.num_more += not self._is_due(state)  # tried again, since this taught nothing about the length
            is_probe = False
        if is_probe and state.num_more == _RUN - 1:
            state.num_plain += not state.depth
            return
        if state.depth == 0 and state.outlook is not None and not state.is_probe and known.num_rounds % _PLAIN_SAMPLE:
            state.num_plain += 1
            return
        planned = observation.plan.max_depth if observation.plan else (state.depth,) * len(state.rows)
        known.padded, is_first = observation.padded, state.has_new and any(planned)
        state.has_new = state.has_new and not is_first
        known.num_asked += any(planned)
        if known.num_rounds > _WARM and known.num_rounds % (1 + len(state.rows) // _TAUGHT_ROWS) and not state.is_probe:
            return
        seen = (observation.draft, planned, observation.num_accepted, observation.draft_seconds, observation.seconds)
        state.unread.append(Played(*seen, known.padded, is_first, state.outlook, state.best, is_probe))

    def _is_due(self, state: _State) -> bool:
        """Whether there is news of a drafter that was not in use, or enough time has gone by to pay for a decision."""
        known = self.experience
        share = _EAGER_SHARE if known.num_rounds < _WARM else _THINKING_SHARE if state.best else _IDLE_SHARE
        return (state.is_probe and not state.best) or state.seconds * share >= known.thinking.value

    def _decide(self, state: _State) -> None:
        began = time.perf_counter()
        state.learn()
        state.num_rows, state.seconds = len(state.rows), 0.0
        is_new, known = state.outlook is None, self.experience
        state.outlook = self._look_ahead(state.rows)
        purse = known.losses.balance - (_RESUMING if known.is_paused else 0.0)
        state.best = state.outlook.best(purse, ends_itself=known.trust.expected > 0)
        known.pause(not state.best and state.outlook.forgone > 0)
        if is_new:
            self._idle = None if state.best else (self._known_for(len(state.rows)), state.outlook)
        known.thinking.add(time.perf_counter() - began)

    def _look_ahead(self, rows: Sequence[Row]) -> Outlook:
        known, costs = self.experience, self.experience.costs.of(len(rows))
        longest = min(self.options.num_draft_tokens, max(2, 2 * costs.longest_known))  # costs are guesses further out
        usual_accepted = known.accepted.inherited([self.options.prior_acceptance] * longest)
        usual_found = known.found.inherited([1.0] * longest)
        gains, nobody, finders = [0.0] * longest, [1.0] * longest, [0.0] * longest
        for row in rows:
            row.fade()
            found = row.found.inherited(usual_found)
            reach = reach_of(row.accepted.inherited(usual_accepted))
            gains = [x + y for x, y in zip(gains, reach, strict=True)]
            finds = list(accumulate(found, mul))
            nobody = [x * (1 - y) for x, y in zip(nobody, finds, strict=True)]
            finders = [x + y for x, y in zip(finders, finds, strict=True)]
        drafting, rests, somebody = costs.drafting(longest), costs.rest.table(range(longest + 1)), [1 - x for x in nobody]
        if known.padded or len(rows) == 1:
            seconds = _mean_cost([draft + rest for draft, rest in zip(drafting, rests, strict=True)], somebody)
        else:
            widths = accumulate((x / len(rows) for x in finders), initial=0.0)
            drafts = _mean_cost(drafting, somebody)
            seconds = [draft + rest for draft, rest in zip(drafts, costs.rest.table(widths), strict=True)]
        tokens = list(accumulate(gains, initial=float(len(rows))))
        return Outlook(tokens, [costs.plain, *seconds[1:]], drafting, rests, costs.per_guess, costs.per_place)

    def _probe(self, state: _State, outlook: Outlook) -> int | None:
        """A length worth trying for what it teaches, if one is due and the purse can pay for it.

        While drafting: by turns nothing, where plain decoding is not far behind, the least known of the shorter lengths that
        promise about as much, a little longer, half as long (costs may have steps) and much longer. While not: mostly one
        guess, and now and then as many as can be paid for, for drafters that are right late or not at all."""
        known, best = self.experience, state.best
        costs = self._costs(state)
        if best and not costs.knows_plain:
            return 0  # what there is to gain is not known before, whatever other batch sizes make of it
        if not best and not costs.knows_drafting and outlook.gain(1) >= _HOPEFUL:
            return 1 if costs.knows_plain else 0
        if known.num_rounds - known.last_probe < _PROBE_INTERVAL:
            return None
        known.probes.cap = max(_PROBE_CAP, outlook.risk(1))  # one guess must stay within reach, however dear
        longest, gain = len(outlook.tokens) - 1, outlook.gain(best)
        plain = 0 if gain < _CLOSE else best + 1
        near = self._least_known(state, outlook) or plain
        in_use = (plain, near, best + 1, best // 2 or plain, near, 2 * best, near, longest)
        turns = in_use if best else (1, 1, 1, 1, 1, longest)
        wanted = min(turns[known.turn % len(turns)], longest)
        catch_up = costs.catch_up(max(row.lag for row in state.rows))
        purse = known.probes.balance - catch_up / outlook.seconds[0]
        lengths = range(wanted, best, -1) if wanted > best else (wanted,) if wanted < best else ()
        probe = next((k for k in lengths if outlook.price(k, best) * _run_of(k, best) <= purse), None)
        if probe is not None:
            known.last_probe = known.num_rounds
            known.num_probes += 1
        known.turn += probe is not None or not lengths or known.probes.is_full  # what a full purse cannot pay is skipped
        return probe

    def _least_known(self, state: _State, outlook: Outlook) -> int:
        """Of the shorter lengths that promise about as much as the best; 0 if there is none."""
        rests, enough = self._costs(state).rest, _NEAR * outlook.gain(state.best)
        near = [length for length in range(state.best - 1, 0, -1) if outlook.gain(length) >= enough]
        return min(near, key=rests.weight, default=0)


def _run_of(probe: int, best: int) -> int:
    """Rounds of a probe."""
    return _RUN if probe < best or not probe else 1


def _mean_cost(costs: Sequence[float], chances: Sequence[float]) -> list[float]:
    """By the length asked for, the mean of ``costs`` over the lengths found: ``chances[k]`` is that of more than k."""
    growth = (chance * (costs[k + 1] - costs[k]) for k, chance in enumerate(chances))
    return list(accumulate(growth, initial=costs[0]))
