"""The default policy when its drafter is exchanged again and again, as learning does. Times are made up."""

from __future__ import annotations

from policy_rounds import Machine, constant, play

from outrider.policies.adaptive import Adaptive


def _linear(length: int) -> float:
    return 1 + 0.15 * length


def test_exchanges_cost_a_bounded_share_however_many_there_are() -> None:
    """Drafters that never pay, each of which would like to be tried."""
    useless, often, once = Machine(constant(0.02), 0.3, _linear), Adaptive(), Adaptive()
    play(once, useless, 600)
    speeds = list[float]()
    for _ in range(60):
        often.forget(None)
        speeds.append(play(often, useless, 40).merit(useless))
    assert sum(speeds) / 60 >= 0.96 * useless.speed_of(0)


def test_a_drafter_that_had_to_wait_is_tried_later() -> None:
    useless, good = (Machine(constant(rate), 0.1, _linear) for rate in (0.02, 0.9))
    policy = Adaptive()
    for _ in range(2):
        policy.forget(None)
        play(policy, useless, 30)
    play(policy, useless, 600)
    assert play(policy, good, 600).merit(good, 300) >= 0.8 * good.speed_of(good.best())


def test_exchanges_of_good_drafters_cost_little() -> None:
    """Each is as good as the one before, so what was seen of that one is a better prior than none."""
    good, policy = Machine(constant(0.9), 0.1, _linear), Adaptive()
    play(policy, good, 300)
    speeds = list[float]()
    for _ in range(40):
        policy.forget(None)
        speeds.append(play(policy, good, 20).merit(good))
    assert sum(speeds) / 40 >= 0.968 * good.speed_of(good.best())
