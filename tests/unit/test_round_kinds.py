"""Which captured rounds serve where others are wanted, and that a warm-up leaves nothing to capture."""

from __future__ import annotations

from itertools import product

import pytest

from outrider.core.device_sampling import Stages
from outrider.engine.device_seats import NUM_PIECES
from outrider.engine.round_kind import RoundKind, best_of, other_kinds, told_kinds, usual_kinds


@pytest.mark.parametrize("guesses", [[0], [4], list(range(9))])
def test_after_a_warm_up_every_round_is_served(guesses: list[int]) -> None:
    prepared = [*usual_kinds(8, guesses, NUM_PIECES), *other_kinds(8, guesses, NUM_PIECES)]
    assert len(set(prepared)) == len(prepared)
    least = [kind for kind in prepared if kind in usual_kinds(8, guesses, NUM_PIECES) or kind.num_guesses == guesses[0]]
    for length, pieces, stages, logprobs, constrained in product(guesses, NUM_PIECES, Stages, (False, True), (False, True)):
        wanted = RoundKind(8, length, pieces, stages, logprobs, constrained)
        for kinds in (prepared, least):  # all of them, and those that no want of time leaves out
            found = best_of(kinds, wanted)
            assert found is not None and found.serves(wanted)
            assert found.num_pieces or not pieces, "prompts would never be read"
        usual = stages == Stages.TEMPERATURE and not logprobs and not constrained
        assert not usual or best_of(prepared, wanted) == wanted


@pytest.mark.parametrize("told", [False, True])
def test_a_single_slot_reads_its_prompt_before_it_drafts(told: bool) -> None:
    guesses = list(range(9))
    prepared = list(told_kinds(1, guesses, NUM_PIECES)) if told else usual_kinds(1, guesses, NUM_PIECES)
    assert [kind for kind in prepared if kind.num_pieces] == [RoundKind(1, 0, count) for count in NUM_PIECES[1:]]
    assert not any(kind.num_pieces for kind in other_kinds(1, guesses, NUM_PIECES))


def test_rounds_of_a_rule_on_the_host_serve_every_sampler() -> None:
    guesses = [0, 1, 2, 4]
    prepared = [*told_kinds(8, guesses, NUM_PIECES), *usual_kinds(8, guesses, NUM_PIECES)]
    assert len(set(prepared)) == len(prepared)
    for length, pieces, logprobs in product(guesses, NUM_PIECES, (False, True)):
        wanted = RoundKind(8, length, pieces, logprobs=logprobs, told=True)
        found = best_of(prepared, wanted)
        assert found is not None and found.told and (found == wanted or logprobs)
        assert found.num_pieces or not pieces


def test_a_round_serves_those_who_ask_for_less() -> None:
    rich = RoundKind(4, 2, 4, Stages.TYPICAL, logprobs=True)
    assert rich.serves(RoundKind(4, 3, 16, Stages.TOP_P))
    for wanted in (
        RoundKind(8, 3, 16, Stages.TOP_P),
        RoundKind(4, 1, 16, Stages.TOP_P),
        RoundKind(4, 3, 0, Stages.TOP_P),
        RoundKind(4, 3, 16, Stages.TOP_P, constrained=True),
    ):
        assert not rich.serves(wanted)


def test_the_cheapest_of_the_longest_is_taken() -> None:
    long, short = RoundKind(1, 4, 0, Stages.TYPICAL, logprobs=True), RoundKind(1, 2, 0, Stages.TOP_P)
    lean = RoundKind(1, 4, 0, Stages.TOP_P)
    wanted = RoundKind(1, 5, 0, Stages.TOP_P)
    assert best_of([short, long], wanted) == long and best_of([short, long, lean], wanted) == lean
    assert best_of([short], RoundKind(2, 5)) is None
