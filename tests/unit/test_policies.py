"""What policies make of rounds with known costs and known acceptance (``policy_rounds``: a simulation, nothing is measured)."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from itertools import accumulate
from operator import mul
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from policy_rounds import Machine, constant, observation, play

from outrider.core.draft import Draft, Draws
from outrider.core.errors import OptionError
from outrider.core.interfaces import Plan, Policy
from outrider.core.tree import TokenTree
from outrider.policies.adaptive import Adaptive, AdaptiveOptions
from outrider.policies.bandit import Bandit, BanditOptions
from outrider.policies.confidence import Confidence, ConfidenceOptions, best_threshold
from outrider.policies.costs import BatchCosts, CostModel, Timing
from outrider.policies.entropy import Entropy, EntropyOptions
from outrider.policies.heuristic import Heuristic, HeuristicOptions
from outrider.policies.ledger import Purse
from outrider.policies.lengths import depths_of, plan_of
from outrider.policies.lessons import Played, learn
from outrider.policies.optimal import Optimal, OptimalOptions
from outrider.policies.outlook import Outlook
from outrider.policies.rates import PRIOR_WEIGHT, PositionRates, best_length, reach_of
from outrider.policies.threshold import Threshold, ThresholdOptions

CURVES = {
    "flat": lambda k: 1.0,
    "linear": lambda k: 1 + 0.1 * k,
    "steep": lambda k: 1 + 0.5 * k,
    "stair": lambda k: 1 + 0.03 * k + 0.4 * (k >= 7),
}
ALL: dict[str, type] = {
    "heuristic": Heuristic, "optimal": Optimal, "adaptive": Adaptive, "bandit": Bandit, "confidence": Confidence,
    "entropy": Entropy, "threshold": Threshold,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _thinking_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds here take made-up seconds; how long a decision really takes must not decide how often one is made."""
    monkeypatch.setattr("outrider.policies.adaptive.time", SimpleNamespace(perf_counter=lambda: 0.0))


# --- heuristic --------------------------------------------------------------------------------------------------------


def test_heuristic_follows_its_rule_exactly() -> None:
    policy = Heuristic(HeuristicOptions(num_draft_tokens=3, max_draft_tokens=6))
    state = policy.start(1)
    for drafted, accepted, expected in [(3, 3, 5), (5, 5, 6), (6, 6, 6), (6, 5, 5), (5, 0, 4), (0, 0, 4), (2, 2, 6)]:
        policy.update(state, observation([drafted], [accepted]))
        assert policy.plan(state, 1).max_depth == (expected,)
    for _ in range(9):
        policy.update(state, observation([1], [0]))
    assert policy.plan(state, 1).max_depth == (1,)


def test_heuristic_rows_are_their_own() -> None:
    policy = Heuristic()
    state = policy.start(3)
    policy.update(state, observation([4, 4, 0], [4, 1, 0]))
    assert policy.plan(state, 3).max_depth == (6, 3, 4)


# --- rates and the formula --------------------------------------------------------------------------------------------


def test_rates_count_tested_guesses_only() -> None:
    rates = PositionRates(horizon=1e9)
    for accepted in (0, 1, 3, 3):  # of 3 guesses each
        rates.record((accepted, accepted < 3))
    assert rates.means == pytest.approx([3 / 4, 2 / 3, 1.0])
    assert rates.weights == pytest.approx([4, 3, 2])


def test_rates_converge_whatever_the_draft_length() -> None:
    """Accepted over drafted would not."""
    for length in (1, 2, 8):
        machine, rates = Machine(constant(0.6), rng=random.Random(length)), PositionRates(horizon=1e9)
        for _ in range(4000):
            accepted = machine.round(Plan((length,), (length,)), 0, 0).num_accepted[0]
            rates.record((accepted, accepted < length))
        assert rates.inherited([0.5])[0] == pytest.approx(0.6, abs=0.03)


def test_an_untested_position_is_not_a_hopeless_one() -> None:
    """The trap of windowed statistics: a length that was lowered must be able to rise again."""
    rates = PositionRates(horizon=4 * PRIOR_WEIGHT)
    for _ in range(100):
        rates.record((1, True))  # good, then bad
    assert rates.inherited([0.7] * 2)[1] < 0.3
    for _ in range(400):
        rates.record((1, False))  # only the first position is drafted now
    assert rates.inherited([0.7] * 3)[1] > 0.9
    assert rates.inherited([0.7] * 3)[2] > 0.9


def brute_force(rates: list[float], cost: float, score, longest: int) -> int:
    """The formula of the paper, written out."""

    def speed(length: int) -> float:
        tokens, product = 1.0, 1.0
        for j in range(length):
            product *= rates[j]
            tokens += product
        return tokens / (cost * length + score(length))

    return max(range(1, longest + 1), key=speed)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("cost", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.9])
def test_optimal_is_the_argmax_of_the_formula(curve: str, cost: float, rate: float) -> None:
    """Fed exact costs at every length, and outcomes whose frequencies are the rates."""
    policy = Optimal(OptimalOptions(horizon=10**6))
    state, rates = policy.start(1), [rate * 0.97**j for j in range(16)]
    for length in range(1, 17):
        policy.costs.of(1).record(*[Timing(length, cost * length, CURVES[curve](length))] * 1000)
    state.rates[0] = PositionRates(10**6, rates, [1e9] * 16)
    assert policy.plan(state, 1).max_depth == (brute_force(rates, cost, CURVES[curve], 16),)


def test_add_a_guess_while_it_pays_finds_the_same_length() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        reach = reach_of(sorted((rng.random() for _ in range(12)), reverse=True))
        seconds = list(accumulate([1.0, *sorted(rng.random() * 0.4 for _ in range(12))]))  # convex
        length, tokens = 0, 1.0
        while length < 12 and reach[length] / tokens > seconds[length + 1] / seconds[length] - 1:
            tokens += reach[length]
            length += 1
        assert best_length(reach, seconds) == length


def test_leviathans_table() -> None:
    """Best lengths for one rate, a constant pass and draft cost c; also where nothing pays (rate <= c)."""
    for c, rate, best in [(0.05, 0.6, 4), (0.05, 0.8, 8), (0.1, 0.7, 4), (0.2, 0.9, 7), (0.4, 0.6, 1), (0.5, 0.4, 0)]:
        reach = list(accumulate([rate] * 20, mul))
        assert best_length(reach, [1 + c * k for k in range(21)]) == best


def test_optimal_learns_what_it_needs_by_playing() -> None:
    for rate, cost in ((0.5, 0.1), (0.8, 0.1), (0.9, 0.05)):
        machine = Machine(constant(rate), cost, rng=random.Random(7))
        run = play(Optimal(), machine, 1500)
        assert run.merit(machine, 500) >= 0.95 * machine.speed_of(machine.best())


# --- costs ------------------------------------------------------------------------------------------------------------


def timed(length: int, seconds: float, *, draft: float = 0.01) -> Timing:
    return Timing(length, draft, seconds, asked=False)


def test_costs_ignore_slow_first_calls_and_outliers() -> None:
    costs = CostModel().of(1)
    rng = random.Random(0)
    for length in (0, 4):
        costs.record(timed(length, 50.0))
        for _ in range(60):
            spike = 20.0 if rng.random() < 0.05 else 1.0
            costs.record(timed(length, spike * (1 + 0.1 * length)))
    assert costs.rest.at(4) / costs.rest.at(0) == pytest.approx(1.4, rel=0.03)
    assert costs.rest.at(2) / costs.rest.at(0) == pytest.approx(1.2, rel=0.03)


def test_a_longer_draft_never_costs_less_and_the_often_timed_length_decides() -> None:
    costs = CostModel().of(1)
    for length, seconds, count in ((1, 1.1, 40), (2, 1.9, 3), (3, 1.3, 40)):
        costs.record(*[timed(length, seconds)] * count)
    assert costs.rest.at(2) == costs.rest.at(3) == pytest.approx((3 * 1.9 + 40 * 1.3) / 43, rel=0.03)
    table = costs.table(6)
    assert table == sorted(table)


def test_rounds_learnt_together_teach_what_they_teach_one_by_one() -> None:
    rng = random.Random(1)
    timings = [timed(length, (1 + 0.2 * length) * rng.uniform(0.95, 1.05)) for length in [0, 3] * 50]
    rounds = [(rng.randrange(5), True) for _ in range(40)]
    one_by_one, together = CostModel().of(1), CostModel().of(1)
    for timing in timings:
        one_by_one.record(timing)
    for at in range(0, len(timings), 10):
        together.record(*timings[at : at + 10])
    assert together.rest.at(3) / together.rest.at(0) == pytest.approx(one_by_one.rest.at(3) / one_by_one.rest.at(0), rel=0.02)
    single, block = PositionRates(50), PositionRates(50)
    for outcome in rounds:
        single.record(outcome)
    for at in range(0, len(rounds), 8):
        block.record(*rounds[at : at + 8])
    assert block.means == pytest.approx(single.means, abs=0.05) and block.weights == pytest.approx(single.weights, rel=0.2)


def test_costs_compare_across_a_change_of_pace() -> None:
    """Length 0 was timed before the machine became three times slower; it is not taken for three times faster."""
    costs = CostModel().of(1)
    for length in (0, 4):
        for _ in range(40):
            costs.record(timed(length, 1 + 0.1 * length))
    for i in range(80):
        costs.record(timed(4, 1.4 * min(1 + i / 20, 3)))
    assert costs.pace == pytest.approx(3, rel=0.1)
    assert costs.rest.at(4) / costs.rest.at(0) == pytest.approx(1.4, rel=0.1)
    assert costs.pace * costs.rest.at(4) == pytest.approx(4.2, rel=0.02)


def test_a_length_that_was_timed_once_or_twice_is_drawn_to_the_others() -> None:
    costs = CostModel().of(1)
    for length, seconds, count in ((2, 1.2, 100), (4, 1.4, 100), (6, 1.6, 100), (5, 3.0, 2)):
        costs.record(*[timed(length, seconds)] * count)
    assert 1.4 <= costs.rest.at(5) <= 1.6 + 0.05
    costs.record(*[timed(5, 3.0)] * 200)
    assert costs.rest.at(5) > 1.55, "many rounds are believed, as far as a longer draft never costs less"


def test_a_new_length_is_not_believed_while_the_pace_jumps() -> None:
    """It would be taken for twice as fast as all others, and be chosen for good."""
    costs = CostModel().of(1)
    for length in (0, 2):
        costs.record(*[timed(length, 1 + 0.1 * length)] * 20)
    costs.record(timed(2, 0.6), *[timed(4, 0.7)] * 3)
    assert not costs.rest.knows(4)
    costs.record(*[timed(2, 0.6)] * 10, *[timed(4, 0.7)] * 3)
    assert costs.rest.at(4) / costs.rest.at(2) == pytest.approx(0.7 / 0.6, rel=0.1)


def test_a_new_batch_size_borrows_the_shape_of_its_neighbour() -> None:
    model = CostModel()
    for length in (0, 4):
        for _ in range(10):
            model.of(4).record(timed(length, 1 + 0.5 * length))
    for _ in range(3):
        model.of(5).record(timed(4, 6.0))  # twice as slow as a batch of 4
    assert model.of(5).rest.at(0) == pytest.approx(2.0, rel=0.1)
    assert model.of(5).longest_known == 4


def test_a_pass_of_a_new_batch_size_costs_what_its_nodes_cost() -> None:
    """One row has taught passes of up to 9 nodes; a plain round of 8 rows is one of 8, not eight times one of 1."""
    model = CostModel()
    for length in (0, 3, 8):
        for _ in range(5):
            model.of(1).record(timed(length, 1 + 0.1 * length))
    assert model.of(8).rest.at(0) == pytest.approx(1.7)
    assert model.of(8).rest.at(1) == pytest.approx(2.5)
    assert model.of(2).rest.at(3) == pytest.approx(1.7)
    assert model.of(4).rest.at(1) == pytest.approx(1.7)  # through the lent curve of 2 rows
    assert not model.of(8).knows_plain


def test_speculation_that_loses_in_larger_batches_stops_there_at_once() -> None:
    """Alone, guesses are nearly free; eight rows fill the machine. What a plain round costs there is measured first."""
    policy = Adaptive()
    play(policy, Machine(constant(0.8), draft_cost=0.05, score_cost=lambda length: 1 + 0.01 * length), 100)
    crowded = Machine(constant(0.8), draft_cost=0.2, score_cost=lambda length: 1.2 + 0.9 * length, num_rows=8)
    run = play(policy, crowded, 300)
    assert run.merit(crowded) > 0.97 * crowded.speed_of(0)


def test_a_decision_outlives_a_row_that_comes_or_goes() -> None:
    policy = Adaptive()
    state = policy.start(8)
    for _ in range(40):
        plan = policy.plan(state, 8)
        policy.update(state, observation(plan.max_depth, plan.max_depth, plan=plan))
    assert state.outlook is not None
    one_less = state.fork(range(7))
    assert (one_less.outlook, one_less.best) == ((None, 0) if state.is_probe else (state.outlook, state.best))
    assert len(policy.plan(one_less, 7).max_depth) == 7
    assert state.fork([0, 1]).outlook is None


def test_a_purse_is_bounded() -> None:
    purse = Purse(share=0.01, balance=0.0, cap=1.0)
    for _ in range(1000):
        purse.settle(1.0, -1.0)
    assert purse.balance == 1.0 and purse.is_full
    purse.settle(1.0, 3.0)
    assert purse.balance == pytest.approx(-1.99)


# --- adaptive ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", ["linear", "steep", "stair"])
@pytest.mark.parametrize("cost", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
def test_adaptive_ends_near_the_best_fixed_length_and_never_far_below_plain(rate: float, cost: float, curve: str) -> None:
    machine = Machine(constant(rate), cost, CURVES[curve])
    runs = [play(Adaptive(), replace(machine, rng=random.Random(seed)), 2000) for seed in range(3)]
    assert fmean(run.merit(machine, 1000) for run in runs) >= 0.97 * machine.speed_of(machine.best())
    assert min(run.merit(machine) for run in runs) >= 0.97 * machine.speed_of(0)
    assert min(run.merit(machine, 0, 200) for run in runs) >= 0.94 * machine.speed_of(0)  # the engine's very first rounds


@pytest.mark.parametrize("cost", [0.0, 0.02, 0.1, 0.3, 1.0, 5.0])
def test_a_useless_drafter_costs_at_most_three_percent(cost: float) -> None:
    """As it happened, luck and catching up included: 0.02 plain rounds per token that the drafter has not read."""
    machine, seconds = Machine(constant(0.0), cost, CURVES["linear"], catch_up=0.02), []
    for seed in range(4):
        policy = Adaptive()
        seconds.append(sum(play(policy, replace(machine, rng=random.Random(seed)), 2000).seconds))
        assert policy.experience.num_probes > 0 or cost > 1  # it goes on asking
    plain = 2000 / machine.speed_of(0)
    assert fmean(seconds) <= plain / 0.97
    assert max(seconds) <= plain / 0.96


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.3])
def test_adaptive_follows_a_drafter_that_turns_useless_and_recovers(cost: float) -> None:
    rng = random.Random(11)
    good, bad = (Machine(constant(rate), cost, CURVES["linear"], rng=rng) for rate in (0.8, 0.0))
    runs = [play(Adaptive(), lambda index: bad if 1000 <= index < 2000 else good, 3200) for _ in range(4)]
    # (what the purse holds when the drafter fails is 1.6 % of a thousand rounds)
    spans = ((good, 500, 1000, 0.96), (bad, 1000, 2000, 0.955), (bad, 1200, 2000, 0.98), (good, 2400, 3200, 0.96))
    for machine, begin, end, least in spans:
        merit = fmean(run.merit(machine, begin, end) for run in runs)
        assert merit >= least * machine.speed_of(machine.best()), (begin, end)


def _doubting(policy: Policy, boast: float, num_rounds: int) -> tuple[list[int], float, Plan]:
    """Lengths, speed and last plan of a drafter that knows itself: a guess is worth 0.95 or 0.3, and it says ``boast`` times
    that. A pass takes 1, a guess 0.1."""
    rng, state, tokens, seconds, lengths = random.Random(7), policy.start(1), 0, 0.0, []
    for _ in range(num_rounds):
        plan = policy.plan(state, 1)
        chances = [rng.choice((0.95, 0.3)) for _ in range(plan.max_depth[0])]
        beliefs = [min(boast * chance, 1.0) for chance in chances]
        length = len(chances)
        if plan.doubt is not None:
            reaches = accumulate((min(1.0, plan.doubt.trust[0] * belief) for belief in beliefs), mul)
            length = next((k + 1 for k, reach in enumerate(reaches) if reach < plan.doubt.level + plan.doubt.place), length)
        accepted = next((k for k in range(length) if rng.random() >= chances[k]), length)
        told = None if plan.doubt is None else [beliefs[:length]]
        policy.update(state, observation([length], [accepted], draft_seconds=0.1 * length, plan=plan, beliefs=told))
        tokens, seconds = tokens + accepted + 1, seconds + 1 + 0.1 * length
        lengths.append(length)
    return lengths, tokens / seconds, plan


def test_rounds_of_a_request_that_ended_are_learnt_from() -> None:
    """Requests too short for a decision of their own: what they saved still pays for probes, and what they showed is known."""
    policy = Adaptive()
    for _ in range(60):
        state = policy.start(1)
        for _ in range(30):
            depth = policy.plan(state, 1).max_depth[0]
            policy.update(state, observation([depth], [0], draft_seconds=0.5 * depth))
    assert policy.experience.num_probes >= 5, "a drafter that never helped is asked again now and then"
    policy.start(1)
    assert not state.unread and state.num_plain == 0


@pytest.mark.parametrize("boast", [1.0, 1.5])
def test_drafts_end_where_they_are_doubted_and_beat_every_fixed_length(boast: float) -> None:
    """The chance of a guess is 0.625 on average; a fixed length can know no more than that."""
    lengths, speed, plan = _doubting(Adaptive(), boast, 3000)
    fixed = max((1 - 0.625 ** (k + 1)) / (1 - 0.625) / (1 + 0.1 * k) for k in range(17))
    assert speed >= 1.03 * fixed, (speed, fixed)
    assert len(set(lengths[1000:])) > 4, "long where it is sure, short where it is not"
    assert plan.doubt is not None and 0.05 < plan.doubt.level + plan.doubt.place < 0.4
    assert plan.doubt.trust[0] == pytest.approx(1.0 if boast == 1.0 else 0.8, abs=0.15), "boasting is seen through"


def test_doubt_asks_for_the_price_of_a_guess() -> None:
    outlook = Outlook([1.0, 1.6, 2.0], [1.0, 1.1, 1.25], [0.0, 0.1, 0.2], [1.0, 1.0, 1.05], per_guess=0.1, per_place=0.02)
    alone, padded = (outlook.doubt(2, (1.0,), further=1.0, padded=padded) for padded in (False, True))
    assert alone.level == pytest.approx(0.1 * 2.0 / 1.25) and alone.place == pytest.approx(0.02 * 2.0 / 1.25)
    assert padded.level == pytest.approx(0.12 * 2.0 / 1.25) and padded.place == 0.0
    dear = replace(outlook, per_guess=9.0, per_place=0.1).doubt(2, (1.0,), further=1.0, padded=False)
    assert dear.level + dear.place == 0.5, "no price ends every draft"
    halves, none = (outlook.doubt(2, (1.0,), further=further, padded=False) for further in (0.5, 0.0))
    assert halves.level == pytest.approx(2 * alone.level), "a guess that is right half the time must be hoped for twice as much"
    assert none.level + none.place == 0.5, "guesses that are never right are not divided by"
    several = replace(outlook, tokens=[4.0, 6.4, 8.0]).doubt(2, (1.0,) * 4, further=1.0, padded=False)
    assert several.level == pytest.approx(4 * alone.level), "drafting for four rows is paid by four"
    assert several.place == pytest.approx(alone.place), "a wider pass has a place for each of them"


def test_one_guess_more_is_priced_by_all_lengths() -> None:
    """One cell that was measured badly does not make the price; the pass's part is at most the drafter's."""
    costs = BatchCosts()
    for length in (1, 2, 3, 4, 5, 6):
        for _ in range(20):
            costs.record(Timing(length, 0.1 + 0.1 * length, 1.0 + 0.02 * length))
    assert costs.per_guess == pytest.approx(0.1, rel=0.1) and costs.per_place == pytest.approx(0.02, rel=0.1)
    for _ in range(3):
        costs.record(Timing(8, 0.9, 9.0))
    assert costs.per_guess + costs.per_place <= 0.25


def test_a_pass_that_does_not_pad_is_priced_by_its_mean_row() -> None:
    """Eight rows: drafts of up to four guesses that leave most rows short cost what their nodes cost."""
    costs = BatchCosts(8)
    for _ in range(30):
        costs.record(Timing(4, 0.4, 1.0 + 0.3, mean_length=1.1), Timing(4, 0.4, 1.0 + 0.9, mean_length=2.8))
        costs.record(Timing(1, 0.1, 1.0 + 0.3, mean_length=0.2), Timing(0, 0.01, 1.0, asked=False, mean_length=0.0))
    assert costs.rest.at(1) == pytest.approx(1.3, rel=0.02) and costs.rest.at(3) == pytest.approx(1.9, rel=0.02)
    assert costs.per_place == pytest.approx(0.3, rel=0.05), "three times the drafter's, and shared by eight rows"
    assert costs.plain == pytest.approx(1.01, rel=0.02), "a round with one guess is not a plain one"


@pytest.mark.parametrize(("padded", "kept"), [(True, 0.0), (False, 0.2)])
def test_a_guess_is_left_out_only_where_that_saves_its_place(padded: bool, kept: float) -> None:
    """Places cost a fifth of a round here, and tokens come one a round or faster: nothing less likely than that is kept."""
    policy = Adaptive()
    state = policy.start(4)
    for _ in range(300):
        depth = policy.plan(state, 4).max_depth[0]
        seen = observation([depth] * 4, [min(1, depth)] * 4, draft_seconds=0.05 * depth, score_seconds=1.0 + 0.2 * depth)
        policy.update(state, replace(seen, padded=padded))
    doubt = policy.plan(state, 4).doubt
    assert doubt is not None and (doubt.place == 0.0 if padded else kept <= doubt.place <= 0.5)


@pytest.mark.parametrize("found", [0.02, 0.1, 0.5])
def test_a_copying_drafter_is_not_punished_for_rare_matches(found: float) -> None:
    machine = Machine(constant(0.8), 0.0, CURVES["linear"], found=found, rng=random.Random(2))
    run = play(Adaptive(), machine, 2400)
    assert run.merit(machine) >= 0.97 * machine.speed_of(machine.best())
    assert sum(length > 0 for length in run.lengths) > 0.9 * len(run.lengths)


def test_a_copying_drafter_with_wrong_matches_is_dropped() -> None:
    machine = Machine(constant(0.02), 0.0, CURVES["linear"], found=0.5, rng=random.Random(2))
    run = play(Adaptive(), machine, 2000)
    assert run.merit(machine) >= 0.98 * machine.speed_of(0)


@pytest.mark.parametrize("rates", [(0.8,), (0.9, 0.9, 0.1, 0.1, 0.0, 0.0, 0.5, 0.5), (0.0,)])
@pytest.mark.parametrize("curve", ["flat", "linear", "steep"])
def test_adaptive_in_a_batch(rates: tuple[float, ...], curve: str) -> None:
    """Rows of different acceptance share one pass."""
    machine = Machine(constant(*rates), 0.1, CURVES[curve], num_rows=8, rng=random.Random(4))
    run = play(Adaptive(), machine, 800)
    assert run.merit(machine, 300) >= 0.97 * machine.speed_of(machine.best())
    assert run.merit(machine) >= 0.97 * machine.speed_of(0)


def test_costs_outlive_requests_and_acceptance_is_a_prior() -> None:
    """Requests of 20 rounds: no request pays for learning again what the last one knew."""
    for rate in (0.0, 0.8):
        machine = Machine(constant(rate), 0.1, CURVES["linear"], rng=random.Random(6))
        run = play(Adaptive(), machine, 2000, request_len=20)
        assert run.merit(machine, 1000) >= 0.95 * machine.speed_of(machine.best())
        assert run.merit(machine) >= 0.97 * machine.speed_of(0)


@pytest.mark.parametrize(
    "pace", [lambda i: 1 + (i % 500) / 500, lambda i: 2.0 if i // 300 % 2 else 1.0], ids=["growing contexts", "busy machine"]
)
def test_adaptive_on_a_machine_that_changes_pace(pace) -> None:
    machine = Machine(constant(0.8), 0.1, CURVES["linear"], pace=pace)
    for seed in range(6, 10):
        run = play(Adaptive(), replace(machine, rng=random.Random(seed)), 2400)
        assert run.merit(machine, 800) >= 0.95 * machine.speed_of(machine.best()), seed


def test_a_pass_with_nodes_beside_the_path_is_priced_by_its_plan() -> None:
    """As lookahead's: eight guesses were asked for, one was found, and the pass was as wide as eight ask for."""
    draft = Draft(TokenTree.of_rows([([0] * 4, [-1, 0, 0, 0])]), Draws.DETERMINISTIC)
    policy = Adaptive()
    played = Played(draft, (8,), [0], 0.1, 3.0, True, False, None, 0, False)
    learn(policy.start(1).rows, [played] * 3, policy.experience)
    costs = policy.experience.costs.of(1)
    assert costs.rest.knows(8) and not costs.rest.knows(1)


def test_a_drafter_that_becomes_free_has_a_price_all_the_same() -> None:
    """What it took before less what idling takes is then below zero, round after round."""
    costs = BatchCosts()
    for _ in range(20):
        costs.record(Timing(0, 0.1, 1.0, asked=False), Timing(2, 2.1, 1.0))
    for _ in range(20):
        costs.record(Timing(2, 0.05, 1.0))
    assert 0 < costs.draft.cells[2].value < 0.5


def test_no_acceptance_may_be_assumed() -> None:
    machine = Machine(constant(0.0), 0.1, CURVES["flat"], rng=random.Random(5))
    run = play(Adaptive(AdaptiveOptions(prior_acceptance=0.0)), machine, 200)
    assert sum(run.lengths[20:]) <= 40


@pytest.mark.parametrize("request_len", [25, 150])
def test_copies_end_before_a_step_of_the_costs(request_len: int) -> None:
    """Eight guesses cost an eighth more than seven, and half of the rounds find none: what counts is the mean of both."""
    curve = [1.0, *(1.12 + 0.015 * length + 0.12 * (length >= 8) for length in range(1, 17))]
    rates = [0.45, 0.75, 0.8, 0.85, 0.85, 0.85, 0.85]
    machine = Machine(lambda at, row: rates[at] if at < 7 else 0.7, 0.01, curve.__getitem__, found=0.6, noise=0.12)
    assert machine.best() == 7
    runs = [play(Adaptive(), replace(machine, rng=random.Random(seed)), 1500, request_len=request_len) for seed in range(4)]
    assert fmean(run.merit(machine, 100) for run in runs) >= 0.965 * machine.speed_of(7)


def test_a_new_request_is_not_probed_in_its_first_rounds() -> None:
    policy, machine = Adaptive(), Machine(constant(0.8), 0.1, CURVES["linear"])
    play(policy, machine, 200)
    num_probes = 0
    for _ in range(40):
        state = policy.start(1)
        for at in range(12):
            plan = policy.plan(state, 1)
            assert at >= 3 or not state.is_probe
            num_probes += state.is_probe
            policy.update(state, machine.round(plan, 0, 0))
    assert num_probes > 10


def test_a_far_batch_size_is_measured_and_not_guessed() -> None:
    """What four rows have taught says that drafting loses in a batch of 64. It does not."""
    policy = Adaptive()
    play(policy, Machine(constant(0.7), 0.05, lambda length: 1 + 0.25 * length, num_rows=4), 300)
    large = Machine(constant(0.7), 0.05, lambda length: 1.3 + 0.3 * length, num_rows=64)
    assert policy.experience.costs.of(64).rest.at(1) > 1.8 * policy.experience.costs.of(64).rest.at(0)
    run = play(policy, large, 100)
    assert run.merit(large, 20) >= 1.25 * large.speed_of(0)


def test_a_probe_that_compiles_something_is_not_the_last_one() -> None:
    policy, machine = Adaptive(), Machine(constant(0.0), 0.1, CURVES["linear"])
    play(policy, machine, 200)
    policy.experience.probes.settle(0.0, 500.0)
    before = policy.experience.num_probes
    play(policy, machine, 4000)
    assert policy.experience.num_probes > before


@pytest.mark.parametrize("cost", [0.5, 2.0])
def test_a_pass_that_becomes_much_faster_ends_what_paid_before(cost: float) -> None:
    """As where compiled code takes the place of eager code while the drafter stays as it is."""
    before, after = (Machine(constant(0.6), cost, lambda n, t=t: t, rng=random.Random(4)) for t in (10.0, 1.0))
    run = play(Adaptive(), lambda i: before if i < 600 else after, 3600, request_len=200)
    assert sum(length > 0 for length in run.lengths[100:600]) > 400, "it paid"
    lost = sum(run.seconds[600:]) - sum(run.tokens[600:]) * (1.0 + after.overhead)
    assert lost <= 0.03 * 3000 + 30 * cost * 4, "thirty rounds to find out, and the usual share"


def test_probes_stay_within_their_budget() -> None:
    policy = Adaptive(AdaptiveOptions(probe_share=0.0))
    machine = Machine(constant(0.0), 0.3, CURVES["linear"], rng=random.Random(1))
    run = play(policy, machine, 1000)
    assert policy.experience.num_probes == 0 and set(run.lengths[500:]) == {0}


# --- bandit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ucb", "exp3"])
def test_bandit_converges(algorithm: str) -> None:
    machine = Machine(constant(0.9), 0.3, CURVES["linear"], rng=random.Random(9))
    policy = Bandit(BanditOptions(algorithm=algorithm, num_draft_tokens=16))
    run = play(policy, machine, 6000)
    best = max(policy.arms, key=machine.speed_of)
    assert run.merit(machine, 5000) >= 0.95 * machine.speed_of(best)
    assert run.merit(machine, 5000) > run.merit(machine, 0, 500)


def test_ucb_bonus_belongs_to_the_arm() -> None:
    """Divided by the total number of plays the bonus would be the same for all arms, and the best mean would always win."""
    policy = Bandit(BanditOptions(num_draft_tokens=2))
    state = policy.start(1)
    row = state.rows[0]
    row.plays, row.rewards = [100.0, 2.0], [110.0, 2.0]  # means 1.1 and 1.0
    assert policy.plan(state, 1).max_depth == (2,)
    row.plays, row.rewards = [100.0, 100.0], [110.0, 100.0]
    assert policy.plan(state, 1).max_depth == (1,)


def test_bandit_arms_and_rounds_without_guesses() -> None:
    assert Bandit(BanditOptions(num_draft_tokens=8)).arms == (1, 2, 3, 4, 6, 8)
    assert Bandit(BanditOptions(num_draft_tokens=5, with_zero=True)).arms == (0, 1, 2, 3, 4, 5)
    policy = Bandit()
    state = policy.start(2)
    policy.plan(state, 2)
    policy.update(state, observation([0, 0], [0, 0]))
    assert sum(state.rows[0].plays) == 0


# --- learning to stop -------------------------------------------------------------------------------------------------


def test_best_threshold_separates() -> None:
    outcomes = [(0.1, False), (0.2, False), (0.3, False), (0.6, True), (0.8, True), (0.9, True)]
    assert best_threshold(outcomes, 3.0, otherwise=0.4) == pytest.approx(0.45)
    assert best_threshold([(0.5, True)] * 9, 3.0, otherwise=0.4) == 0.4
    mixed = [*outcomes, (0.25, True)]  # a good guess at 0.25: better to follow two bad ones than to miss it
    assert best_threshold(mixed, 3.0, otherwise=0.4) < 0.25
    assert best_threshold(mixed, 0.1, otherwise=0.4) > 0.25


def test_confidence_learns_a_threshold_that_is_used() -> None:
    policy = Confidence(ConfidenceOptions(threshold=0.4))
    state = policy.start(1)
    for _ in range(4):
        policy.plan(state, 1)
        assert state.rule is not None
        state.rule.seen = [[0.9], [0.7]]  # the second guess is always wrong
        policy.update(state, observation([2], [1]))
    plan = policy.plan(state, 1)
    assert plan.stop is state.rule and state.rule.thresholds[0] == pytest.approx(0.8)


def test_entropy_level_follows_outcomes() -> None:
    policy = Entropy(EntropyOptions(num_draft_tokens=4))
    state = policy.start(4)
    plan = policy.plan(state, 4)
    for _ in range(3):  # rejected; accepted and short; accepted and full; nothing drawn
        policy.update(state, observation([4, 2, 4, 0], [0, 2, 4, 0], plan=plan))
    assert state.levels == pytest.approx([0.703, 0.697, 0.7, 0.697])


# --- every policy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_fork_and_join_keep_what_rows_know(name: str) -> None:
    """A row forked away and joined again plans and learns as if it had stayed."""
    policy: Policy = ALL[name]()
    state = policy.start(3)
    for _ in range(40):
        plan = policy.plan(state, 3)
        drafted = [min(depth, 5) for depth in plan.max_depth]
        policy.update(state, observation(drafted, [drafted[0], drafted[1] // 2, 0], plan=plan))
    moved = state.fork([2, 1]).join(state.fork([0]))
    assert repr(moved.fork([2, 1, 0])) == repr(state.fork([0, 1, 2]))
    twin = state.fork([0, 0])
    before = repr(state.fork([0, 1, 2]))
    plan = policy.plan(twin, 2)
    policy.update(twin, observation([1, 1], [0, 1], plan=plan))
    assert repr(state.fork([0, 1, 2])) == before  # copies share nothing


@pytest.mark.parametrize("name", ALL)
def test_plans_fit_the_options(name: str) -> None:
    policy: Policy = ALL[name]()
    plan = policy.plan(policy.start(5), 5)
    assert len(plan.max_depth) == len(plan.max_nodes) == 5
    assert all(0 <= depth <= 20 for depth in plan.max_depth)


@pytest.mark.parametrize(
    ("options", "bad"),
    [
        (HeuristicOptions, {"num_draft_tokens": 30}), (HeuristicOptions, {"increase": 0}),
        (HeuristicOptions, {"min_draft_tokens": 9}), (OptimalOptions, {"prior_acceptance": 1.5}),
        (OptimalOptions, {"horizon": 2.5}), (AdaptiveOptions, {"num_draft_tokens": 0}), (AdaptiveOptions, {"probe_share": -1}),
        (AdaptiveOptions, {"num_tree_nodes": 0}), (BanditOptions, {"algorithm": "ucb1"}), (BanditOptions, {"exploration": "x"}),
        (ConfidenceOptions, {"threshold": 2}), (ConfidenceOptions, {"horizon": 3}), (EntropyOptions, {"gamma": -1}),
        (EntropyOptions, {"min_draft_tokens": 99}), (ThresholdOptions, {"threshold": True}),
        (ThresholdOptions, {"min_draft_tokens": 0}),
    ],
)  # fmt: skip
def test_bad_options_are_refused(options: type, bad: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(bad))):
        options(**bad)
    assert {"num_draft_tokens", "num_tree_nodes"} <= {item.name for item in fields(options)}


def test_trees_get_nodes_in_proportion() -> None:
    assert plan_of([0, 1, 4, 8], 8, None).max_nodes == (0, 1, 4, 8)
    assert plan_of([0, 1, 4, 8], 8, 60).max_nodes == (0, 8, 30, 60)
    tree = TokenTree.of_rows([([5, 7, 3, 9], [-1, 0, 0, 1]), ([5], [-1])])
    assert depths_of(tree) == [2, 0]
    assert torch.equal(tree.valid.sum(1), torch.tensor([4, 1]))


def test_a_better_drafter_gets_its_chance() -> None:
    """After an exchange the policy forgets the useless guesses of the old drafter, and keeps what rounds cost."""
    policy, useless, good = Adaptive(), *(Machine(constant(rate), 0.1, CURVES["linear"]) for rate in (0.02, 0.9))
    play(policy, useless, 400)
    state, costs = policy.start(1), policy.experience.costs.of(1)
    assert policy.plan(state, 1).max_depth == (0,)
    before = costs.plain
    policy.forget(state)
    assert costs.plain == before and not policy.experience.accepted.means
    assert policy.plan(state, 1).max_depth > (0,)
    assert play(policy, good, 60).merit(good) >= 0.8 * good.speed_of(good.best())
