"""Cost curves: prices that were measured at load, corrected by rounds with made-up times. The ledger of losses."""

from __future__ import annotations

import math
import random
from dataclasses import fields

import numpy as np
import pytest

from outrider.core.prices import Prices, between
from outrider.policies.cost_model import DRAFT, REST, BatchCosts, CostModel, Timed
from outrider.policies.loss_budget import LossBudget
from outrider.policies.optimal import Typical
from outrider.policies.tuning import TUNING

PRICES = Prices(((1, ((0, 1.0), (7, 1.7), (63, 7.3))),), ((1, ((1, 0.1), (4, 0.4))), (8, ((1, 0.2), (4, 0.8)))))


def record(costs: BatchCosts, width: int, rest: float, *, draft: float | None = None, count: int = 1) -> None:
    for _ in range(count):
        costs.record([Timed(width, width, draft, rest)])


def test_a_curve_between_and_beyond_its_points() -> None:
    points = [(1.0, 2.0), (3.0, 4.0), (5.0, 3.0)]
    assert [between(points, place) for place in (0, 1, 2, 3, 4, 5)] == [2, 2, 3, 4, 3.5, 3]
    assert between(points, 9) == 3.0, "it never falls beyond its end"
    assert between([(1.0, 2.0), (3.0, 4.0)], 5) == 6.0 and between([(4.0, 7.0)], 99) == 7.0


def test_prices_give_every_batch_size_its_curves_before_the_first_round() -> None:
    model = CostModel(PRICES)
    assert model.of(1).table(0, (0, 3, 7)) == pytest.approx([1.0, 1.3, 1.7])
    assert model.of(8).table(0, (0, 7)) == pytest.approx([1.7, 7.3])
    assert model.of(64).at(0, 1) == pytest.approx(7.3 + 64 * 0.1)
    assert model.of(1).table(1, range(1, 9)) == pytest.approx([0.1 * k for k in range(1, 9)])
    assert model.of(8).at(1, 4) == pytest.approx(0.8) and model.of(1).trial is None and model.of(64).trial is None


def test_prices_of_whole_rounds_are_interpolated_between_numbers_of_rows() -> None:
    whole = Prices(((1, ((0, 4.0), (4, 5.0))), (8, ((0, 4.7), (4, 6.4)))), ((1, ((1, 0.0), (4, 0.0))),))
    assert whole.passing(8, 2) == pytest.approx(5.55) and whole.passing(4, 0) == pytest.approx(4.3)
    assert whole.passing(15, 0) == pytest.approx(5.4), "the line goes on beyond the last number of rows"
    costs = BatchCosts(8, whole)
    assert costs.at(1, 4) == 0.0
    record(costs, 4, 6.4, draft=0.0, count=10)
    assert costs.at(1, 4) == 0.0 and costs.at(0, 4) == pytest.approx(6.4)


def test_what_all_lengths_have_in_common_is_pace_and_not_cost() -> None:
    costs = BatchCosts(1, PRICES)
    for _ in range(10):
        for length in (0, 3):
            record(costs, length, 1.5 * PRICES.passing(1, length))
    assert costs.pace == pytest.approx(1.5, rel=0.01) and costs.table(0, (0, 3)) == pytest.approx([1.0, 1.3], rel=0.01)
    for _ in range(40):
        for length, factor in ((0, 1.0), (7, 1.2)):
            record(costs, length, 1.5 * factor * PRICES.passing(1, length))
    assert costs.at(0, 7) == pytest.approx(1.2 * 1.7, rel=0.03), "a length that differs is corrected"
    assert 1.3 < costs.at(0, 3) < 1.1 * 1.3, "and those nearby a little"


def test_costs_compare_across_a_change_of_pace() -> None:
    """Length 0 was timed before the machine became three times slower; it is not taken for three times faster."""
    costs = BatchCosts(1, PRICES)
    for length in (0, 4):
        record(costs, length, 1 + 0.1 * length, count=40)
    for i in range(80):
        record(costs, 4, 1.4 * min(1 + i / 20, 3))
    assert costs.pace == pytest.approx(3, rel=0.1)
    assert costs.at(0, 4) == pytest.approx(1.4, rel=0.1)


def test_pace_and_errors_do_not_drift_apart_while_one_length_is_played() -> None:
    """Rounds have a long tail, so their mean is above their median. Plain decoding must not become dear beside drafts."""
    rng, costs = random.Random(1), BatchCosts(1, PRICES)
    for number in range(3000):
        length = 0 if number % 100 else 1
        record(costs, length, PRICES.passing(1, length) * rng.lognormvariate(0, 0.02) * (1 + rng.expovariate(10)))
    assert costs.at(0, 1) / costs.plain == pytest.approx(1.1, rel=0.05)


def test_a_round_corrects_costs_as_a_gaussian_guess_is_corrected() -> None:
    """Against the plain way: the prior guess, given all times at once. Rounds follow each other without a change of pace."""
    rng, costs, times = random.Random(3), BatchCosts(1, PRICES), list[tuple[int, float]]()
    spread, noise = costs._spread.copy(), costs._noise
    for place in (0, 3, 3, 7, 0, 1):
        times.append((place, math.log(rng.uniform(0.9, 1.1))))
        costs._noise = noise
        costs._learn(place, [times[-1][1]])
    seen = np.zeros((len(times), len(spread)))
    for row, (place, _) in enumerate(times):
        seen[row, [0, place]] = 1.0
    gain = spread @ seen.T @ np.linalg.inv(seen @ spread @ seen.T + noise * np.eye(len(times)))
    assert costs._log == pytest.approx(gain @ np.array([time for _, time in times]), abs=1e-9)
    assert costs._spread == pytest.approx(spread - gain @ seen @ spread, abs=1e-9)


def test_a_slow_first_round_does_not_make_its_neighbours_dear() -> None:
    """Where no round may come again: plain decoding would look dear for as long as drafting seems to pay."""
    costs = BatchCosts(1, PRICES)
    for _ in range(6):
        record(costs, 0, 1.0)
        record(costs, 3, 1.3)
    record(costs, 2, 4 * 1.2)
    assert costs.plain == 1.0 and costs.at(0, 2) <= 1.25 * 1.2 and costs.at(0, 3) <= 1.2 * 1.3
    for _ in range(60):
        record(costs, 0, 1.0)
        record(costs, 2, 4 * 1.2)
    assert costs.at(0, 2) > 4, "all of them are: it is no chance"


def test_more_work_never_takes_less_time() -> None:
    costs = BatchCosts(1, Prices(((1, ((0, 1.2), (1, 1.1), (8, 1.8))),), PRICES.drafts))
    record(costs, 1, 1.0, draft=0.1, count=20)
    assert costs.table(0, (0, 1, 8)) == sorted(costs.table(0, (0, 1, 8)))


def test_a_new_pace_does_not_become_the_cost_of_the_length_just_played() -> None:
    """Another text begins, and rounds are half as long."""
    costs = BatchCosts(1, PRICES)
    for pace in (2.0, 1.0):
        for _ in range(6):
            record(costs, 0, pace)
            record(costs, 4, 1.4 * pace, draft=0.4 * pace)
    assert costs.at(0, 4) / costs.plain == pytest.approx(1.4, rel=0.1)


def test_rounds_that_contradict_prices_are_noticed() -> None:
    costs = BatchCosts(1, PRICES)
    for _ in range(60):
        record(costs, 0, 1.0)
        record(costs, 7, 6.0)
    assert costs.contradicts and not BatchCosts(1, PRICES).contradicts


def test_a_length_that_was_timed_is_doubted_less() -> None:
    costs = BatchCosts(1, PRICES)
    at_first = costs.doubts((3, 8))
    for _ in range(10):
        record(costs, 0, 1.0)
        record(costs, 3, 1.3)
    (timed, other), (before, _) = costs.doubts((3, 8)), at_first
    assert timed < other < before, "others less than at first, since the pace is known"


def test_single_outliers_hardly_move_a_cost_and_a_run_of_them_does() -> None:
    rng, typical = random.Random(0), Typical()
    typical.add(50.0)
    for _ in range(60):
        typical.add(20.0 if rng.random() < 0.05 else 1.0)
    assert typical.value == pytest.approx(1.0, rel=0.1), "nor does a slow first call"
    for _ in range(TUNING.run):
        typical.add(4.0)
    assert typical.value == 4.0


def test_without_prices_the_first_rounds_of_a_batch_size_measure_them() -> None:
    model, played = CostModel(), []
    while (length := model.of(4).trial) is not None:
        played.append(length)
        record(model.of(4), length, 1 + 0.1 * length, draft=0.05 * length if length else None)
    costs = model.of(4)
    assert tuple(played) == TUNING.calibration
    assert [costs.pace * seconds for seconds in costs.table(0, (0, 2, 8))] == pytest.approx([1.0, 1.2, 1.8], rel=0.05)
    assert costs.pace * costs.at(1, 8) == pytest.approx(0.4, rel=0.05)
    assert model.of(5).trial is None and model.of(5).pace * model.of(5).at(0, 0) == pytest.approx(1.0, rel=0.05)
    assert model.of(64).trial == 0, "a far batch size is measured and not guessed"


def test_a_dear_guess_is_not_followed_by_four() -> None:
    costs = BatchCosts(1)
    for length in TUNING.calibration[:4]:
        record(costs, length, 1.0, draft=0.9 if length else None)
    assert costs.trial is None and costs.at(1, 4) > 2


def test_a_slow_round_of_the_calibration_is_played_again() -> None:
    costs = BatchCosts(1)
    for length, slow in zip(TUNING.calibration, (1, 1, 1, 1, 5, 1, 1, 1), strict=True):
        assert costs.trial == length
        record(costs, length, slow * (1 + 0.1 * length), draft=0.05 * length if length else None)
    assert [costs.pace * seconds for seconds in costs.table(0, (4, 8))] == pytest.approx([1.4, 1.8])


def test_where_only_passes_have_prices_the_first_rounds_measure_the_drafter() -> None:
    costs = BatchCosts(1, Prices(PRICES.passes))
    while (length := costs.trial) is not None:
        record(costs, length, 2 * (1 + 0.1 * length), draft=2 * 0.03 * length if length else None)
    assert costs.pace == pytest.approx(2, rel=0.05) and costs.at(1, 8) == pytest.approx(0.24, rel=0.05)


def test_times_of_one_place_are_learnt_from_together() -> None:
    """Five equal times at once teach as much as five in turn."""
    together, apart = BatchCosts(1, PRICES), BatchCosts(1, PRICES)
    for _ in range(4):
        together.record([Timed(3, 3, 0.45, 1.5)] * 5)
        record(apart, 3, 1.5, draft=0.45, count=5)
    whole = [costs.now(REST, [3])[3] + costs.now(DRAFT, [3])[3] for costs in (together, apart)]
    assert whole[0] == pytest.approx(whole[1], rel=0.02) == pytest.approx(1.95, rel=0.02)


def test_a_calibration_that_ended_has_ended() -> None:
    """Half of eight guesses would take over two plain rounds. So eight are not tried, and no later round is a trial."""
    costs = BatchCosts(1)
    while (length := costs.trial) is not None:
        record(costs, length, 1.0, draft=0.35 * length if length else None)
    record(costs, 8, 1.0, draft=20.0)
    assert costs.trial is None and costs.at(1, 8) < 10, "one bad time is no price"


def test_batches_of_about_one_size_share_their_costs() -> None:
    model = CostModel()
    assert model.of(9) is model.of(10) and model.of(64) is model.of(66)
    assert len({id(model.of(size)) for size in (1, 2, 3, 4, 5, 6, 7, 8)}) == 8


def test_purses_are_bounded() -> None:
    ledger = LossBudget(loss_share=0.01, probe_share=0.005)
    for _ in range(1000):
        ledger.book(1.0, 1.0, is_probe=False)
    assert ledger.drafting == 3 * TUNING.run, "a long good run does not pay for a long bad one"
    ledger.book(3.0, -2.0, is_probe=False)
    assert ledger.drafting == pytest.approx(3 * TUNING.run - 2 + 0.03)
    before = ledger.probing
    ledger.book(500.0, -499.0, is_probe=True)
    assert ledger.probing == -TUNING.run / 2 < before, "what was compiled once is forgiven"
    for _ in range(100):
        ledger.book(1.0)
    assert ledger.probing == pytest.approx(-TUNING.run / 2 + 0.5)


def test_the_default_policy_has_at_most_ten_constants() -> None:
    assert len(fields(TUNING)) <= 10


def test_a_long_draft_that_had_a_prompt_to_read_is_not_priced_by_it() -> None:
    """A hybrid asks its draft model late: the first long draft then takes the time of a whole prompt."""
    costs = BatchCosts(1)
    for length, draft in zip(TUNING.calibration, (0, 0.1, 0.1, 0, 0.4, 0.4, 6.0, 6.0), strict=True):
        costs.record([Timed(length, length, draft if length else None, 1.0)])
    assert costs.trial is None and 0.8 <= costs.at(1, 8) <= (1 + TUNING.outlier) * 0.8
