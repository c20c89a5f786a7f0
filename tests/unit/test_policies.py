"""What policies make of rounds with known costs and known acceptance (``policy_rounds``: a simulation, nothing is measured)."""

from __future__ import annotations

import random
from dataclasses import fields
from itertools import accumulate
from operator import mul
from types import SimpleNamespace

import pytest
import torch
from policy_rounds import Machine, constant, observation, play
from tiers import in_turn

from outrider.core.errors import OptionError
from outrider.core.interfaces import Plan, Policy
from outrider.core.tree import TokenTree
from outrider.policies.adaptive import Adaptive
from outrider.policies.bandit import Bandit, BanditOptions
from outrider.policies.belief import Usual
from outrider.policies.confidence import Confidence, ConfidenceOptions, best_threshold
from outrider.policies.entropy import Entropy, EntropyOptions
from outrider.policies.heuristic import Heuristic, HeuristicOptions
from outrider.policies.lengths import plan_of
from outrider.policies.optimal import Optimal, OptimalOptions, best_length
from outrider.policies.rates import PositionRates, reach_of
from outrider.policies.threshold import Threshold, ThresholdOptions
from outrider.policies.tuning import TUNING, AdaptiveOptions

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
    monkeypatch.setattr("outrider.policies.adaptive.time", SimpleNamespace(thread_time=lambda: 0.0))


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
    rates = PositionRates(horizon=4 * TUNING.prior_weight)
    for _ in range(100):
        rates.record((1, True))  # good, then bad
    assert rates.inherited([0.7] * 2)[1] < 0.3
    for _ in range(400):
        rates.record((1, False))  # only the first position is drafted now
    assert rates.inherited([0.7] * 3)[1] > 0.9
    assert rates.inherited([0.7] * 3)[2] > 0.9


def test_a_chain_that_was_never_tried_does_not_make_wider_trees_look_better() -> None:
    """Two guesses at a level miss more than half of the time, so one guess does too."""
    usual = Usual((1.0, 2.0), [0.7] * 3)
    usual.record({1.0: [], 2.0: [(0, True)] * 60 + [(1, True)] * 40}, 0)
    usual.refresh()
    assert usual.by_spread[2.0][0] == pytest.approx(0.4, abs=0.03)
    assert usual.by_spread[1.0][0] <= usual.by_spread[2.0][0]


def test_what_is_known_of_chains_carries_over_to_trees() -> None:
    usual = Usual((1.0, 2.0), [0.7] * 3)
    usual.record({1.0: [(0, True)] * 60 + [(1, True)] * 40, 2.0: []}, 0)
    usual.refresh()
    assert usual.by_spread[1.0][0] == pytest.approx(0.4, abs=0.03)
    assert usual.by_spread[2.0][0] == pytest.approx(1 - TUNING.wider * (1 - usual.by_spread[1.0][0]))


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
@pytest.mark.parametrize(("rate", "cost"), in_turn([0.3, 0.6, 0.8, 0.9], [0.02, 0.1, 0.4]))
def test_optimal_is_the_argmax_of_the_formula(curve: str, cost: float, rate: float) -> None:
    """Fed exact costs at every length, and outcomes whose frequencies are the rates."""
    policy = Optimal(OptimalOptions(horizon=10**6))
    state, rates = policy.start(1), [rate * 0.97**j for j in range(16)]
    for length in range(1, 17):
        for _ in range(200):
            policy.costs[1].record(length, cost * length + CURVES[curve](length))
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
    assert tree.heights == [2, 0]
    assert torch.equal(tree.valid.sum(1), torch.tensor([4, 1]))
