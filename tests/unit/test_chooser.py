"""What guesses must be likely to bring, from given costs and expectations."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outrider.policies.chooser import RoundForecast, slopes


def test_doubt_asks_for_the_price_of_a_guess() -> None:
    outlook = RoundForecast([1.0, 1.6, 2.0], [1.0, 1.1, 1.25], [0.0, 0.1, 0.2], [1.0, 1.03, 1.05])
    alone, padded = (outlook.doubt(1.0, 1, longest=2, further=1.0, padded=padded) for padded in (False, True))
    assert alone.levels == pytest.approx([0.1 * 1.6, 0.1 * 1.6]) and alone.places == pytest.approx([0.025 * 1.6, 0.02 * 1.6])
    assert padded.levels[1] == pytest.approx(0.12 * 1.6) and padded.places == (0.0, 0.0)
    dear = replace(outlook, drafting=[0.0, 9.0, 18.0], rests=[1.0, 1.0, 1.1]).doubt(
        1.0, 1, longest=2, further=1.0, padded=False
    )
    assert dear.levels[1] + dear.places[1] == 0.5, "no price ends every draft"
    halves, none = (outlook.doubt(1.0, 1, longest=2, further=further, padded=False) for further in (0.5, 0.0))
    assert halves.levels[1] == pytest.approx(2 * alone.levels[1]), "right half the time: hoped for twice as much"
    assert none.levels[1] + none.places[1] == 0.5, "guesses that are never right are not divided by"
    several = replace(outlook, tokens=[4.0, 6.4, 8.0]).doubt(1.0, 4, longest=2, further=1.0, padded=False)
    assert several.levels == pytest.approx([4 * level for level in alone.levels]), "drafting for four rows is paid by four"
    assert several.places == pytest.approx(alone.places), "a wider pass has a place for each of them"


def test_a_step_of_the_pass_is_paid_for_where_it_is() -> None:
    """Four nodes are one tile: guesses 1 to 3 are cheap, the fourth pays for the next tile, and so for all that are in it."""
    rests = [1.0, 1.0, 1.0, 1.0, 1.4, 1.4, 1.4, 1.4]
    doubt = RoundForecast([1.0] * 8, [1.0] * 8, [0.0] * 8, rests).doubt(1.0, 1, longest=7, further=1.0, padded=False)
    assert doubt.places == pytest.approx([0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0])
    assert doubt.lengths([[0.5, 0.5, 0.5, 0.7]]) == [3] and doubt.lengths([[0.5, 0.5, 0.9, 0.5, 0.5, 0.5]]) == [6]


def test_the_way_to_the_cheapest_later_place_is_the_lower_hull() -> None:
    """Against the plain way: all later places are tried."""
    rng = random.Random(1)
    for _ in range(200):
        curve = [rng.choice((1.0, 1.2, rng.random())) + 0.05 * at for at in range(rng.randint(1, 12))]
        ends = range(len(curve))
        plain = [max(min((curve[end] - curve[at]) / (end - at) for end in ends[at + 1 :]), 0.0) for at in ends[:-1]]
        assert slopes(curve) == pytest.approx(plain)
