"""Ways of a drafter that cost differently: each has a price of its own, and the one that pays is played."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from policy_rounds import Machine, constant, observation, think_for

from outrider.core.interfaces import Plan
from outrider.methods import POLICIES
from outrider.policies.adaptive import Adaptive
from outrider.policies.fixed import Fixed, FixedOptions
from outrider.policies.tuning import AdaptiveOptions
from outrider.policies.ways import Ways

COPIES = Machine(constant(0.85), 0.0, lambda k: 1 + 0.05 * k, found=0.5)
"""Half of its rounds find something, in no time."""
NOTHING = Machine(constant(0.0), 0.0, lambda k: 1 + 0.05 * k, found=0.05)


@pytest.fixture(autouse=True)
def _thinking_takes_made_up_time(monkeypatch: pytest.MonkeyPatch) -> None:
    think_for(monkeypatch, 0.02)


def played(ways: Sequence[Machine], num_rounds: int) -> tuple[float, list[int]]:
    """Tokens per second of the later half, and how often every way drafted in it."""
    policy = Ways([Adaptive() for _ in ways])
    state, seconds, tokens, counts = policy.start(1), 0.0, 0, [0] * len(ways)
    for number in range(num_rounds):
        plan = policy.plan(state, 1)
        seen = ways[plan.way or 0].round(plan, number, 0)
        policy.update(state, seen)
        if number >= num_rounds // 2:
            seconds, tokens = seconds + seen.seconds, tokens + 1 + seen.num_accepted[0]
            counts[plan.way or 0] += any(plan.max_depth)
    return tokens / seconds, counts


def best_of(*ways: Machine) -> float:
    return max(way.speed_of(length) for way in ways for length in range(17))


def test_copies_are_played_where_the_draft_model_does_not_pay() -> None:
    both = Machine(constant(0.5), 0.9, lambda k: 1 + 0.05 * k, rng=random.Random(1))
    speed, (copies, all_parts) = played([COPIES, both], 1600)
    assert speed >= 0.9 * best_of(COPIES, both) and copies > 5 * all_parts


def test_the_draft_model_is_played_where_it_pays_more() -> None:
    both = Machine(constant(0.9), 0.05, lambda k: 1 + 0.05 * k, rng=random.Random(2))
    speed, (copies, all_parts) = played([NOTHING, both], 1600)
    assert speed >= 0.9 * best_of(NOTHING, both) and all_parts > 5 * copies


def test_where_no_way_pays_little_is_lost() -> None:
    dear = Machine(constant(0.2), 0.9, lambda k: 1 + 0.3 * k, rng=random.Random(3))
    speed, _ = played([NOTHING, dear], 1600)
    assert speed >= 0.95 * NOTHING.speed_of(0)


def test_a_way_that_was_given_up_is_tried_again() -> None:
    """What is known of it fades while the other one is played."""
    policy = Ways([Adaptive(), Adaptive()])
    state = policy.start(1)
    copies, all_parts = policy.ways
    all_parts.found.record(*[(0, True)] * 50)
    before = all_parts.found.weights[0]
    state.way = 0
    seen = observation([2], [1], plan=Plan((2,), (2,), way=0))
    for _ in range(100):
        policy.update(state, seen)
    assert all_parts.found.weights[0] < 0.5 * before
    assert copies.num_rounds == 100 and all_parts.num_rounds == 0


def test_rounds_that_do_not_draft_tell_all_ways() -> None:
    policy = Ways([Adaptive(), Adaptive()])
    state = policy.start(1)
    policy.update(state, observation([0], [0], plan=Plan((0,), (0,))))
    assert [way.num_rounds for way in policy.ways] == [1, 1]


def test_states_fork_and_join_and_forget() -> None:
    policy = Ways([Adaptive(), Adaptive()])
    state = policy.start(2)
    joined = state.fork([0]).join(state.fork([1, 1]))
    assert [len(inner.rows) for inner in joined.inner] == [3, 3]
    policy.forget(joined)
    assert policy.plan(joined, 3).way in (0, 1)


def test_a_captured_drafter_is_asked_as_a_whole() -> None:
    policy = Ways([Adaptive(), Adaptive()])
    assert policy.captured_shape() is not None
    assert policy.plan(policy.start(1), 1).way is None


def test_only_the_default_policy_has_one_for_each_way() -> None:
    assert isinstance(POLICIES["adaptive"].made(AdaptiveOptions(), 2), Ways)
    assert isinstance(POLICIES["adaptive"].made(AdaptiveOptions(), 1), Adaptive)
    assert isinstance(POLICIES["fixed"].made(FixedOptions(), 2), Fixed)
