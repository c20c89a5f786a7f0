"""Cost curves: shapes that were measured at load, corrected by rounds with made-up times."""

from __future__ import annotations

import random

import pytest

from outrider.core.prices import Prices, between
from outrider.policies.cost_model import BatchCosts, CostModel, Jumps, Timing
from outrider.policies.ledger import Ledger, Purse

PRICES = Prices(((1, ((0, 1.0), (7, 1.7), (63, 7.3))),), ((1, ((1, 0.1), (4, 0.4))), (8, ((1, 0.2), (4, 0.8)))))


def record(costs: BatchCosts, width: int, rest: float, *, draft: float = 0.01, count: int = 1, asked: bool = False) -> None:
    for _ in range(count):
        costs.record(Timing(width, width, draft, rest, asked))


def test_a_curve_between_and_beyond_its_points() -> None:
    points = [(1.0, 2.0), (3.0, 4.0), (5.0, 3.0)]
    assert [between(points, place) for place in (0, 1, 2, 3, 4, 5)] == [2, 2, 3, 4, 3.5, 3]
    assert between(points, 9) == 3.0, "it never falls beyond its end"
    assert between([(1.0, 2.0), (3.0, 4.0)], 5) == 6.0 and between([(4.0, 7.0)], 99) == 7.0


def test_prices_give_every_batch_size_its_curves_before_the_first_round() -> None:
    model = CostModel()
    model.prices = PRICES
    assert model.of(1).rest.table((0, 3, 7)) == pytest.approx([1.0, 1.3, 1.7])
    assert model.of(8).rest.table((0, 7)) == pytest.approx([1.7, 7.3])
    assert model.of(64).rest.at(1) == pytest.approx(7.3 + 64 * 0.1)
    assert model.of(1).drafting(8) == pytest.approx([0.0, *(0.1 * k for k in range(1, 9))])
    assert model.of(8).drafting(4)[4] == pytest.approx(0.8) and model.of(1).is_known and model.of(64).is_known


def test_rounds_correct_prices_by_level_at_once_and_by_shape_slowly() -> None:
    costs = BatchCosts(1, PRICES)
    record(costs, 3, 1.3 * 1.5, count=2)
    assert costs.rest.at(7) == pytest.approx(1.7 * 1.4, rel=0.05), "all of it takes half as long again"
    record(costs, 7, 1.7 * 3.0, count=2)
    assert costs.rest.at(7) / costs.rest.at(3) < 0.75 * 2 * 1.7 / 1.3, "two rounds do not bend a curve"
    record(costs, 7, 1.7 * 3.0, count=200)
    assert costs.rest.at(7) == pytest.approx(1.7 * 3.0, rel=0.1) and not costs.rest.contradicts


def test_rounds_that_contradict_prices_are_noticed() -> None:
    costs = BatchCosts(1, PRICES)
    for _ in range(20):
        record(costs, 0, 1.0)
        record(costs, 7, 6.0)
    assert costs.rest.contradicts
    assert not BatchCosts(1).rest.contradicts


def test_costs_ignore_slow_first_calls_and_outliers() -> None:
    costs, rng = CostModel().of(1), random.Random(0)
    for length in (0, 4):
        record(costs, length, 50.0)
        for _ in range(60):
            spike = 20.0 if rng.random() < 0.05 else 1.0
            record(costs, length, spike * (1 + 0.1 * length))
    assert costs.rest.at(4) / costs.rest.at(0) == pytest.approx(1.4, rel=0.03)


def test_costs_compare_across_a_change_of_pace() -> None:
    """Length 0 was timed before the machine became three times slower; it is not taken for three times faster."""
    costs = CostModel().of(1)
    for length in (0, 4):
        record(costs, length, 1 + 0.1 * length, count=40)
    for i in range(80):
        record(costs, 4, 1.4 * min(1 + i / 20, 3))
    assert costs.pace == pytest.approx(3, rel=0.1)
    assert costs.rest.at(4) / costs.rest.at(0) == pytest.approx(1.4, rel=0.1)


def test_a_length_that_was_timed_once_or_twice_is_drawn_to_the_others() -> None:
    costs = CostModel().of(1)
    for length, seconds, count in ((2, 1.2, 100), (4, 1.4, 100), (6, 1.6, 100), (5, 3.0, 2)):
        record(costs, length, seconds, count=count)
    assert 1.4 <= costs.rest.at(5) <= 2.1
    record(costs, 5, 3.0, count=200)
    assert costs.rest.at(5) > 2.5, "many rounds are believed"


def test_a_new_length_is_not_believed_while_the_pace_jumps() -> None:
    """It would be taken for twice as fast as all others, and be chosen for good."""
    costs = CostModel().of(1)
    for length in (0, 2):
        record(costs, length, 1 + 0.1 * length, count=20)
    record(costs, 2, 0.6)
    record(costs, 4, 0.7, count=3)
    assert not costs.rest.knows(4)
    record(costs, 2, 0.6, count=10)
    record(costs, 4, 0.7, count=3)
    assert costs.rest.at(4) / costs.rest.at(2) == pytest.approx(0.7 / 0.6, rel=0.1)


def test_without_prices_a_pass_of_a_new_batch_size_costs_what_its_nodes_cost() -> None:
    """One row has taught passes of up to 9 nodes; a plain round of 8 rows is one of 8, not eight times one of 1."""
    model = CostModel()
    for length in (0, 3, 8):
        record(model.of(1), length, 1 + 0.1 * length, count=20)
    assert model.of(8).rest.at(0) == pytest.approx(1.7, rel=0.02)
    assert model.of(2).rest.at(3) == pytest.approx(1.7, rel=0.02)
    assert not model.of(8).is_known and not model.of(8).rest.knows(0)


def test_batches_of_about_one_size_share_their_costs() -> None:
    model = CostModel()
    assert model.of(9) is model.of(10) and model.of(64) is model.of(66)
    assert len({id(model.of(size)) for size in (1, 2, 3, 4, 5, 6, 7, 8)}) == 8


def test_a_drafter_that_becomes_much_cheaper_is_followed() -> None:
    """What it took before less what idling takes is then below zero, round after round."""
    costs = BatchCosts(1)
    for _ in range(20):
        record(costs, 0, 1.0, draft=0.1)
        record(costs, 2, 1.0, draft=2.1, asked=True)
    record(costs, 2, 1.0, draft=0.05, asked=True, count=20)
    assert 0 < costs.draft.at(2) < 0.5


def test_a_round_that_reads_does_not_price_a_draft() -> None:
    costs = BatchCosts(1, PRICES)
    costs.record(Timing(4, 4, 30.0, 1.4, True, True))
    assert costs.drafting(4)[4] == pytest.approx(0.4)


def test_a_draft_without_guesses_has_a_price_of_its_own() -> None:
    costs = BatchCosts(1)
    record(costs, 0, 1.0, draft=0.02, asked=True, count=5)
    record(costs, 4, 1.2, draft=0.4, asked=True, count=5)
    assert costs.drafting(4)[0] == pytest.approx(0.02) and costs.drafting(4)[4] == pytest.approx(0.4, rel=0.05)


def test_single_outliers_are_no_jump() -> None:
    jumps = Jumps()
    assert all(jumps.add(ratio) is None for ratio in (1.0, 3.0, 1.0, 1.1, 3.0, 1.0, 3.0))
    assert 2.0 in [jumps.add(2.0) for _ in range(6)]


def test_a_purse_is_bounded() -> None:
    purse = Purse(share=0.01, balance=0.0, cap=1.0, lowest=-3.0)
    for _ in range(1000):
        purse.settle(1.0, -1.0)
    assert purse.balance == 1.0 and purse.is_full
    purse.settle(1.0, 3.0)
    assert purse.balance == pytest.approx(-1.99)
    purse.settle(1.0, 30.0)
    assert purse.balance == -3.0


def test_pauses_wear_patience_out_and_success_restores_it() -> None:
    ledger = Ledger(0.005, 0.01)
    for _ in range(5):
        ledger.book(3.0, 1.0, gain=1.2, is_probe=False)
    assert ledger.losses.balance < 0
    ledger.pause(True)
    assert ledger.patience == 0.15 and ledger.payable < ledger.losses.balance
    before = ledger.losses.balance
    ledger.rest(100, 0.5)
    assert ledger.losses.balance == pytest.approx(before + 100 * (0.01 + 0.15 * 0.5))
    ledger.pause(False)
    for _ in range(30):
        ledger.book(1.0, 2.0, gain=2.0, is_probe=False)
    ledger.pause(False)
    assert ledger.patience == 0.3
