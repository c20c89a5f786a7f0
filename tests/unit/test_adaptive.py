"""What the default policy makes of rounds with known costs and known acceptance (``policy_rounds``: nothing is measured)."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from statistics import fmean

import pytest
from policy_rounds import Machine, constant, observation, play, think_for
from policy_seats import Given
from tiers import in_turn

from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import Plan, Policy
from outrider.core.prices import Prices
from outrider.core.tree import TokenTree
from outrider.engine.launched import observation_of
from outrider.policies.adaptive import Adaptive
from outrider.policies.tuning import AdaptiveOptions

CURVES = {
    "flat": lambda k: 1.0,
    "linear": lambda k: 1 + 0.1 * k,
    "steep": lambda k: 1 + 0.5 * k,
    "stair": lambda k: 1 + 0.03 * k + 0.4 * (k >= 7),
}


@pytest.fixture(autouse=True)
def _thinking_takes_made_up_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds here take made-up seconds, so decisions do too: one is made every three rounds of a second."""
    think_for(monkeypatch, 0.02)


# --- adaptive ---------------------------------------------------------------------------------------------------------


WORLDS = list(itertools.product([0.0, 0.3, 0.6, 0.9], [0.02, 0.1, 0.5]))


@pytest.mark.parametrize(("world", "curve"), in_turn(WORLDS, ("linear", "steep", "stair")))
def test_adaptive_ends_near_the_best_fixed_length_and_never_far_below_plain(world: tuple[float, float], curve: str) -> None:
    """``world``: the rate of acceptance, and what a guess costs."""
    rate, cost = world
    machine = Machine(constant(rate), cost, CURVES[curve])
    runs = [play(Adaptive(), replace(machine, rng=random.Random(seed)), 1200) for seed in range(2)]
    assert fmean(run.merit(machine, 700) for run in runs) >= 0.96 * machine.speed_of(machine.best())
    assert min(run.merit(machine) for run in runs) >= 0.97 * machine.speed_of(0)
    assert min(run.merit(machine, 0, 200) for run in runs) >= 0.94 * machine.speed_of(0)  # the engine's very first rounds


@pytest.mark.parametrize("cost", [0.0, 0.02, 0.1, 0.3, 1.0, 5.0])
def test_a_useless_drafter_costs_at_most_three_percent(cost: float) -> None:
    """As it happened, luck and catching up included: 0.02 plain rounds per token that the drafter has not read."""
    machine, seconds = Machine(constant(0.0), cost, CURVES["linear"], catch_up=0.02), []
    for seed in range(4):
        policy = Adaptive()
        seconds.append(sum(play(policy, replace(machine, rng=random.Random(seed)), 2000).seconds))
        assert policy.num_probes > 0 or cost > 1  # it goes on asking
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
            (length,) = plan.doubt.lengths([beliefs])
        accepted = next((k for k in range(length) if rng.random() >= chances[k]), length)
        told = None if plan.doubt is None else [beliefs[:length]]
        policy.update(state, observation([length], [accepted], draft_seconds=0.1 * length, plan=plan, beliefs=told))
        tokens, seconds = tokens + accepted + 1, seconds + 1 + 0.1 * length
        lengths.append(length)
    return lengths, tokens / seconds, plan


def test_short_requests_pay_for_probes_together() -> None:
    """Requests too short for a decision of their own: what they saved still pays for probes."""
    policy = Adaptive()
    for _ in range(60):
        state = policy.start(1)
        for _ in range(30):
            depth = policy.plan(state, 1).max_depth[0]
            policy.update(state, observation([depth], [0], draft_seconds=0.5 * depth))
    assert policy.num_probes >= 5, "a drafter that never helped is asked again now and then"


@pytest.mark.parametrize("boast", [1.0, 1.5])
def test_drafts_end_where_they_are_doubted_and_beat_every_fixed_length(boast: float) -> None:
    """The chance of a guess is 0.625 on average; a fixed length can know no more than that."""
    lengths, speed, plan = _doubting(Adaptive(), boast, 3000)
    fixed = max((1 - 0.625 ** (k + 1)) / (1 - 0.625) / (1 + 0.1 * k) for k in range(17))
    assert speed >= 1.03 * fixed, (speed, fixed)
    assert len(set(lengths[1000:])) > 4, "long where it is sure, short where it is not"
    assert plan.doubt is not None and 0.05 < plan.doubt.levels[1] + plan.doubt.places[1] < 0.4
    assert plan.doubt.trust[0] == pytest.approx(1.0 if boast == 1.0 else 0.8, abs=0.15), "boasting is seen through"


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
    assert doubt is not None and all(place == 0.0 if padded else kept <= place <= 0.5 for place in doubt.places)


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
    assert fmean(run.merit(machine, 100) for run in runs) >= 0.95 * machine.speed_of(7)


def test_a_far_batch_size_is_measured_and_not_guessed() -> None:
    """What four rows have taught says that drafting loses in a batch of 64. It does not."""
    policy = Adaptive()
    play(policy, Machine(constant(0.7), 0.05, lambda length: 1 + 0.25 * length, num_rows=4), 300)
    large = Machine(constant(0.7), 0.05, lambda length: 1.3 + 0.3 * length, num_rows=64)
    run = play(policy, large, 100)
    assert run.merit(large, 20) >= 1.25 * large.speed_of(0)


def test_a_probe_that_compiles_something_is_not_the_last_one() -> None:
    policy, machine = Adaptive(), Machine(constant(0.0), 0.1, CURVES["linear"])
    play(policy, machine, 200)
    policy.budget.book(500.0, -499.0, is_probe=True)
    before = policy.num_probes
    play(policy, machine, 4000)
    assert policy.num_probes > before


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
    assert policy.num_probes == 0 and run.merit(machine, 500) >= 0.98 * machine.speed_of(0)


def test_a_drafter_that_looked_dear_by_chance_is_timed_by_probes() -> None:
    """Probes ask a drafter that has something to read, so its time is an upper bound, and may be less than it was thought."""
    policy = Adaptive()
    policy.expect(Given(Prices(((1, ((0.0, 1.0), (8.0, 1.8))),), ((1, ((1.0, 0.9), (8.0, 7.2))),))))
    state = policy.start(1)
    for _ in range(60):
        plan = policy.plan(state, 1)
        (depth,) = plan.max_depth
        policy.update(state, observation([depth], [depth], draft_seconds=0.3 * depth, score_seconds=1 + 0.1 * depth, plan=plan))
    assert policy.plan(state, 1).max_depth > (1,)


def test_a_drafter_that_seems_to_cost_many_rounds_is_asked_again_in_the_end() -> None:
    """A busy machine showed one guess as twenty plain rounds, which no account can pay for. It takes a tenth of one."""
    policy, machine = Adaptive(), Machine(constant(0.8), 0.1, CURVES["linear"])
    policy.expect(Given(Prices(((1, ((0.0, 1.0), (8.0, 1.8))),), ((1, ((1.0, 20.0), (8.0, 160.0))),))))
    lengths = play(policy, machine, 1600).lengths
    assert not any(lengths[:200]) and fmean(lengths[-100:]) >= 0.9


def test_a_pass_with_nodes_beside_the_path_is_priced_by_its_plan() -> None:
    """As lookahead's: eight guesses were asked for, one was found, and the pass was as wide as eight ask for."""
    draft, policy = Draft(TokenTree.of_rows([([0] * 4, [-1, 0, 0, 0])]), Draws.DETERMINISTIC), Adaptive()
    state = policy.start(1)
    for _ in range(5):
        policy.update(state, replace(observation([1], [0], plan=Plan((8,), (8,))), draft=draft))
    policy.learn()
    prices = policy.costs.of(1).prices
    assert prices is not None and prices.passes[0][1][0] == (8.0, 1.0)


def test_a_captured_round_is_priced_by_its_places_whatever_was_found() -> None:
    """Four guesses were asked for and two rows found none: the graph took the time of four all the same."""
    policy, notes = Adaptive(), [[1, 0, 0, 1, 5], [1, 0, 0, 1, 7]]
    state = policy.start(2)
    for _ in range(3):
        policy.update(state, observation_of(notes, 4, 5, 2.0, Plan((4, 4), (4, 4))))
        policy.update(state, observation_of(notes, 0, 1, 1.0, Plan((0, 0), (0, 0))))
    policy.learn()
    costs = policy.costs.of(2)
    assert [costs.pace * seconds for seconds in costs.table(0, (0, 4))] == pytest.approx([1.0, 2.0], rel=0.02)
    assert not policy.found.means and policy.usual.seen[1.0].means[0] == 0.0


def test_a_better_drafter_gets_its_chance() -> None:
    """After an exchange the policy forgets the useless guesses of the old drafter, and keeps what rounds cost."""
    policy, useless, good = Adaptive(), *(Machine(constant(rate), 0.1, CURVES["linear"]) for rate in (0.02, 0.9))
    play(policy, useless, 400)
    state, costs = policy.start(1), policy.costs.of(1)
    assert policy.plan(state, 1).max_depth <= (1,), "nothing, or a probe"
    before = costs.plain
    policy.forget(state)
    assert costs.plain == before and policy.costs.of(1) is costs and not policy.usual.seen[1.0].means
    assert policy.plan(state, 1).max_depth > (0,)
    assert play(policy, good, 60).merit(good) >= 0.8 * good.speed_of(good.best())


def test_speculation_that_loses_in_larger_batches_stops_there_at_once() -> None:
    """Alone, guesses are nearly free; eight rows fill the machine. What a plain round costs there is measured first."""
    policy = Adaptive()
    play(policy, Machine(constant(0.8), draft_cost=0.05, score_cost=lambda length: 1 + 0.01 * length), 100)
    crowded = Machine(constant(0.8), draft_cost=0.2, score_cost=lambda length: 1.2 + 0.9 * length, num_rows=8)
    run = play(policy, crowded, 300)
    assert run.merit(crowded) > 0.93 * crowded.speed_of(0)
    assert run.merit(crowded, 50) > 0.97 * crowded.speed_of(0)


def test_a_decision_outlives_a_row_that_comes_or_goes() -> None:
    policy = Adaptive()
    state = policy.start(8)
    for _ in range(40):
        plan = policy.plan(state, 8)
        policy.update(state, observation(plan.max_depth, plan.max_depth, plan=plan))
    (plan,) = state.plans.values()
    (kept,) = state.fork(range(7)).plans.values()
    assert kept.max_depth == (max(plan.max_depth),) * 7 and kept.doubt is not None and len(kept.doubt.trust) == 7
    assert not state.fork([0, 1]).plans
