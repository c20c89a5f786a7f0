"""Proofs by enumeration: the output law of every rule is the target's, for every way of drawing it declares."""

from __future__ import annotations

import pytest
import torch
from tiers import repeats
from toy_laws import (
    FLAVOURS,
    Experiment,
    Guess,
    Guesser,
    Pair,
    arbitrary,
    by_draws,
    chain,
    clairvoyant,
    distance,
    grow,
    mean_emitted,
    output_law,
    sampled,
    top_k,
    toy_pair,
)

from outrider.acceptance import Block, Coupled, Delta, KSeq, Recursive, Rejection, Transport, Traversal
from outrider.core.draft import Draws, Shape
from outrider.core.interfaces import AcceptanceRule
from outrider.core.random_source import RandomSource, enumerate_law

pytestmark = pytest.mark.usefixtures("remembered_plans")
EXACT = 1e-12
RULES: list[type[AcceptanceRule]] = [Block, Coupled, Delta, KSeq, Recursive, Rejection, Transport, Traversal]
CASES = [
    pytest.param(rule, draws, id=f"{rule.__name__}-{draws.name}")
    for rule in RULES
    for draws in rule.exact_for
    if draws is not Draws.BEAM  # in a fixed shape that is "without replacement"; real beams are in test_draft_trees.py
]
TREE_CASES = [case for case in CASES if case.values[0].shape is Shape.TREE]  # type: ignore[attr-defined]
TREES = {
    "two leaves": [-1, 0, 0],
    "three leaves": [-1, 0, 0, 0],
    "ragged": [-1, 0, 0, 1],
    "late branch": [-1, 0, 1, 1],
    "full binary": [-1, 0, 0, 1, 1, 2, 2],
    "comb": [-1, 0, 0, 1, 1, 3],
}


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("length", range(4))
@pytest.mark.parametrize(("rule", "draws"), CASES)
def test_chains(rule: type[AcceptanceRule], draws: Draws, length: int, flavour: str) -> None:
    """Chains of 0..3 guesses; the sampler-shaped laws have zeros on either side and point masses."""
    for seed in repeats(1, of=3 if length < 3 else 1):
        pair = toy_pair(flavour, seed, 4 if length < 2 else 3)
        drafter = grow(pair, chain(length), draws, by_draws(pair, draws))
        assert distance(rule(), Experiment(pair, drafter, length + 1)) < EXACT


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize(("rule", "draws"), TREE_CASES)
def test_trees(rule: type[AcceptanceRule], draws: Draws, shape: str) -> None:
    large = len(TREES[shape]) > 5 and draws is not Draws.DETERMINISTIC
    for seed in repeats(1, of=1 if large else 3):
        for flavour in ("random", "target cut to two", "draft cut to two", "greedy target"):
            pair = toy_pair(flavour, seed, 2 if large else 3)
            drafter = grow(pair, TREES[shape], draws, by_draws(pair, draws))
            assert distance(rule(), Experiment(pair, drafter, 3 if large else 4)) < EXACT


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("rule", [Coupled, Delta])
def test_trees_with_duplicate_siblings(rule: type[AcceptanceRule], shape: str) -> None:
    """Arbitrary guesses, so that siblings are often equal and one twin may have children where the other has none."""
    for seed in repeats(4, of=12):
        pair = toy_pair("random" if seed % 2 else "target cut to two", seed, 3)
        drafter = grow(pair, TREES[shape], Draws.DETERMINISTIC, arbitrary(pair, seed))
        assert distance(rule(), Experiment(pair, drafter, 4)) < EXACT


@pytest.mark.parametrize("draws", list(Draws))
def test_delta_is_exact_for_any_guesses_made_without_its_numbers(draws: Draws) -> None:
    """Wider than it declares: see its docstring."""
    for seed in range(3):
        pair = toy_pair("random", seed, 3)
        drafter = grow(pair, TREES["ragged"], draws, by_draws(pair, draws))
        assert distance(Delta(), Experiment(pair, drafter, 3)) < EXACT


# --- rounds compose ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab_size", "num_seeds"), [(2, 4), pytest.param(3, 1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("rule", "draws"), CASES)
def test_two_rounds(rule: type[AcceptanceRule], draws: Draws, vocab_size: int, num_seeds: int) -> None:
    for seed in repeats(1, of=num_seeds):
        pair = toy_pair("random", seed, vocab_size)
        drafter = grow(pair, chain(2), draws, by_draws(pair, draws))
        assert distance(rule(), Experiment(pair, drafter, 4, rounds=2)) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_rounds_to_the_end(rule: type[AcceptanceRule]) -> None:
    """Rounds of two guesses until the text is long enough, everything enumerated."""
    pair = toy_pair("random", 5, 2)
    drafter = grow(pair, chain(2), rule.exact_for[0], by_draws(pair, rule.exact_for[0]))
    assert distance(rule(), Experiment(pair, drafter, 4, rounds=4)) < EXACT


@pytest.mark.parametrize("rule", [Block, Rejection])
def test_policies_may_look_at_the_past(rule: type[AcceptanceRule]) -> None:
    """A length that depends on the text so far, and stopping by the entropy of q before a guess is drawn."""
    for seed in repeats(2, of=4):
        pair = toy_pair("random", seed, 2)
        guess = sampled(pair)

        def careful(question: Guess, pair: Pair = pair, guess: Guesser = guess) -> int | None:
            return guess(question) if pair.q(question.context).max() > 0.6 else None

        by_text = [grow(pair, chain(length), Draws.IID, careful) for length in (2, 1)]
        experiment = Experiment(pair, lambda text, source, d=by_text: d[sum(text) % 2](text, source), 4, rounds=2)
        assert distance(rule(), experiment) < EXACT


# --- the coupled rule: drafters that see the target's noise -----------------------------------------------------------


def oracle(pair: Pair) -> Guesser:
    """Guesses exactly what the target is going to choose."""
    return lambda guess: guess.source.target_choice(pair.p(guess.context), guess.depth)


def coupled_draft(pair: Pair) -> Guesser:
    """q's own choice with the target's noise: the honest use of it."""
    return lambda guess: guess.source.target_choice(pair.q(guess.context), guess.depth)


def contrary(pair: Pair) -> Guesser:
    """Guesses right only where the target is about to say token 0: tries to make accepted texts rich in zeros."""

    def pick(guess: Guess) -> int:
        choice = guess.source.target_choice(pair.p(guess.context), guess.depth)
        return 0 if choice == 0 else (choice + 1) % pair.vocab_size

    return pick


def secretive(pair: Pair) -> Guesser:
    """Draws a guess only where the target's choice is likely; leaves the rest of the tree out."""

    def pick(guess: Guess) -> int | None:
        choice = guess.source.target_choice(pair.p(guess.context), guess.depth)
        return choice if pair.p(guess.context)[choice] > 0.4 else None

    return pick


PEEKING = [oracle, coupled_draft, contrary, clairvoyant, secretive]


@pytest.mark.parametrize("shape", ["chain", "two leaves", "ragged"])
@pytest.mark.parametrize("guesser", PEEKING, ids=lambda guesser: guesser.__name__)
def test_coupled_is_exact_for_drafters_that_see_the_noise(guesser, shape: str) -> None:
    for seed in repeats(1, of=3):
        pair = toy_pair("random", seed, 3)
        drafter = grow(pair, TREES.get(shape, chain(2)), Draws.DETERMINISTIC, guesser(pair))
        for rounds in (1, 2):
            assert distance(Coupled(), Experiment(pair, drafter, 3, rounds=rounds, by_rule=True)) < EXACT


@pytest.mark.parametrize("guesser", PEEKING, ids=lambda guesser: guesser.__name__)
def test_the_text_does_not_depend_on_the_draft(guesser) -> None:
    """Stronger than the law: in every single branch of chance, the drafted text is the undrafted one."""
    pair = toy_pair("random", 3, 3)
    drafted = Experiment(pair, grow(pair, chain(2), Draws.DETERMINISTIC, guesser(pair)), 3, rounds=2, by_rule=True)
    plain = Experiment(pair, grow(pair, [-1], Draws.DETERMINISTIC, top_k(pair)), 3, by_rule=True)

    def both(source: RandomSource) -> bool:
        return drafted.run(Coupled(), source) == plain.run(Coupled(), source)

    assert enumerate_law(both) == {True: pytest.approx(1.0)}


def test_an_oracle_is_always_accepted() -> None:
    pair = toy_pair("random", 1, 3)
    experiment = Experiment(pair, grow(pair, chain(3), Draws.DETERMINISTIC, oracle(pair)), 4)
    assert mean_emitted(Coupled(), experiment) == pytest.approx(4.0)


# --- known answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "accepted"), [(Rejection, 10 / 9), (Block, 11 / 9)])
def test_the_example_of_the_block_paper(rule: type[AcceptanceRule], accepted: float) -> None:
    """Section 2 of arXiv 2403.10444: p = (1/3, 2/3), q = (2/3, 1/3) whatever the context, two guesses."""
    p, q = (torch.tensor(law, dtype=torch.float64) for law in ([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
    pair = Pair(lambda _: p, lambda _: q, 2)
    experiment = Experiment(pair, grow(pair, chain(2), Draws.IID, sampled(pair)), 3)
    assert mean_emitted(rule(), experiment) == pytest.approx(1 + accepted)


def test_block_never_accepts_less_than_rejection() -> None:
    for seed in range(10):
        pair = toy_pair("random", seed, 3)
        experiment = Experiment(pair, grow(pair, chain(2), Draws.IID, sampled(pair)), 3)
        assert mean_emitted(Block(), experiment) > mean_emitted(Rejection(), experiment) - EXACT


def test_rates_of_one_level() -> None:
    """Rejection accepts sum(min(p, q)); the rule for chosen guesses accepts what p gives the children."""
    pair = toy_pair("random", 4, 4)
    p, q = pair.p(()), pair.q(())
    one = Experiment(pair, grow(pair, chain(1), Draws.IID, sampled(pair)), 2)
    assert mean_emitted(Rejection(), one) == pytest.approx(1 + float(torch.minimum(p, q).sum()))
    two = Experiment(pair, grow(pair, TREES["two leaves"], Draws.DETERMINISTIC, top_k(pair)), 2)
    assert mean_emitted(Delta(), two) == pytest.approx(1 + float(p[q.topk(2).indices].sum()))


@pytest.mark.parametrize("rule", RULES)
def test_greedy_target_whatever_the_guesses(rule: type[AcceptanceRule]) -> None:
    """p is a point mass: one text, also for guesses that were not drawn from the q they come with (zeros included)."""
    for seed in repeats(4, of=20):
        pair = toy_pair("both greedy" if seed % 2 else "greedy target", seed, 4)
        draws = Draws.DETERMINISTIC if rule in (Coupled, Delta) else Draws.IID
        drafter = grow(pair, chain(2), draws, arbitrary(pair, seed))
        greedy: tuple[int, ...] = ()
        for _ in range(3):
            greedy = (*greedy, int(pair.p(greedy).argmax()))
        assert output_law(rule(), Experiment(pair, drafter, 3)) == {greedy: pytest.approx(1.0)}
