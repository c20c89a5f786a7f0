"""The bug gallery: every known way to get verification wrong, put through the same check, which must reject it.

Each entry has the bug and its correct twin on the same laws. The check is ``toy_laws.distance``: the exact total
variation between emitted texts and the target's. ``python -m pytest tests/contract/test_rules_mutations.py -s`` prints
the table of docs/lossless.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from planted_bugs import assert_caught
from torch import Tensor
from toy_laws import (
    DRAFT_LANE,
    Experiment,
    Guess,
    Guesser,
    Pair,
    RoundSource,
    RowRule,
    ToyDrafter,
    arbitrary,
    chain,
    clairvoyant,
    distance,
    grow,
    output_law,
    random_model,
    sampled,
    sampled_without_replacement,
    tempered,
    top_k,
    toy_pair,
)

from outrider.acceptance import Block, Coupled, Delta, Rejection
from outrider.acceptance.paths import path_of
from outrider.acceptance.residual import draw_row, ratio, surplus
from outrider.core.draft import Draws
from outrider.core.interfaces import RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.verdict import RowVerdict

EXACT, BIASED = 1e-12, 1e-3
NUM_SEEDS = 12
SIBLINGS = [-1, 0, 0]
DOCUMENTED = (Path(__file__).parents[2] / "docs" / "lossless.md").read_text()

# --- rules with exchangeable parts; unchanged, each is exact ----------------------------------------------------------


def _same(p: Tensor) -> Tensor:
    return p


@dataclass(frozen=True)
class RejectionWith:
    """Token-wise rejection."""

    chance: Callable[[float, float], float] = ratio
    owed: Callable[[Tensor, Tensor], Tensor] = surplus
    bonus: Callable[[Tensor], Tensor] = _same

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        assert row.q is not None
        last = len(row.tokens) - 1
        for node in range(last):
            p, q, guess = row.p[node], row.q[node], row.tokens[node + 1]
            if not source.bernoulli(self.chance(float(p[guess]), float(q[guess])), node + 1):
                return RowVerdict(path_of(row, node), draw_row(self.owed(p, q), p, source), rejected=True)
        return RowVerdict(path_of(row, last), draw_row(self.bonus(row.p[last]), row.p[last], source), rejected=False)


@dataclass(frozen=True)
class BlockWith:
    """Block verification."""

    ratio: Callable[[float, float], float] = ratio
    last_like_others: bool = False
    scaled_residual: bool = True

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        assert row.q is not None
        last, supply = len(row.tokens) - 1, [1.0]
        for node, guess in enumerate(row.tokens[1:]):
            supply.append(self.ratio(supply[-1] * float(row.p[node, guess]), float(row.q[node, guess])))
        for node in range(last, 0, -1):
            owed = surplus(supply[node] * row.p[node], row.q[node])
            missing = float(owed.sum()) + 1 - supply[node]
            keep = float(owed.sum()) / missing if missing > 0 else 1.0
            if node == last and not self.last_like_others:
                keep = supply[node]
            if source.bernoulli(keep, node):
                return RowVerdict(path_of(row, node), self._next(row, node, supply[node], source), rejected=node < last)
        return RowVerdict((), self._next(row, 0, 1.0, source), rejected=last > 0)

    def _next(self, row: RowDraft, node: int, supply: float, source: RandomSource) -> int:
        assert row.q is not None
        p = row.p[node]
        if node == len(row.tokens) - 1:
            return draw_row(p, p, source)
        return draw_row(surplus(supply * p if self.scaled_residual else p, row.q[node]), p, source)


@dataclass(frozen=True)
class Recursive:
    """Rejection of one sibling after the other (Miao et al. 2023), here at the root only."""

    with_replacement: bool
    """Siblings are independent draws from q; otherwise each is drawn from q without its elders."""
    renormalise: bool = True

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        assert row.q is not None
        rest, q = row.p[0].clone(), row.q[0].clone()
        for child in row.children(0):
            guess = row.tokens[child]
            proposal = q / q.sum() if self.renormalise else q
            if source.bernoulli(ratio(float(rest[guess]), float(proposal[guess])), child):
                return RowVerdict((child,), draw_row(row.p[child], row.p[child], source), rejected=False)
            left = surplus(rest, proposal)
            rest = left / left.sum() if left.sum() > 0 else rest
            if not self.with_replacement:
                q[guess] = 0
        return RowVerdict((), draw_row(rest, row.p[0], source), rejected=bool(row.children(0)))


class ResampledPerCandidate:
    """Each branch is compared with a target sample of its own; the longest match wins; the next token is drawn anew."""

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        matches = [0]
        for leaf in (node for node in range(1, len(row.tokens)) if not row.children(node)):
            end = 0
            for node in path_of(row, leaf):
                if source.categorical(row.p[end], 10 * leaf + node) != row.tokens[node]:
                    break
                end = node
            matches.append(end)
        end = max(matches, key=row.depth)
        return RowVerdict(path_of(row, end), draw_row(row.p[end], row.p[end], source), rejected=bool(row.children(end)))


# --- drafters ---------------------------------------------------------------------------------------------------------


def drop_unsure(pair: Pair) -> Guesser:
    """Sample a guess and throw it away if q gives it little: what is left is no sample of q."""

    def pick(guess: Guess) -> int | None:
        token = sampled(pair)(guess)
        assert token is not None
        return token if pair.q(guess.context)[token] >= 0.3 else None

    return pick


def stop_after_unsure(pair: Pair) -> Guesser:
    """Sample a guess, keep it, and draft no further if q gives it little."""

    def pick(guess: Guess) -> int | None:
        unsure = guess.depth > 0 and pair.q(guess.context[:-1])[guess.context[-1]] < 0.3
        return None if unsure else sampled(pair)(guess)

    return pick


def rearranged(drafter: ToyDrafter, order: Callable[[RowDraft], list[int]]) -> ToyDrafter:
    """The drafter's depth-1 tree with its guesses in another order, or some left out."""

    def draft(context: tuple[int, ...], source: RandomSource) -> RowDraft:
        row = drafter(context, source)
        nodes = [0, *order(row)]
        assert row.q is not None
        tokens = [row.tokens[node] for node in nodes]
        return RowDraft(tokens, [-1] + [0] * (len(nodes) - 1), row.p[nodes], row.q[nodes], row.draws)

    return draft


def likeliest_first(row: RowDraft) -> list[int]:
    assert row.q is not None
    q = row.q[0]
    return sorted(row.children(0), key=lambda child: -float(q[row.tokens[child]]))


def without_duplicates(row: RowDraft) -> list[int]:
    return [child for child in row.children(0) if row.tokens[child] not in row.tokens[1:child]]


# --- ways to name random numbers wrongly ------------------------------------------------------------------------------


class OneCoin(RoundSource):
    """Every acceptance test of a round uses one number."""

    def bernoulli(self, probability: float, lane: int) -> bool:
        return super().bernoulli(probability, 1)


class CoinsByPosition(RoundSource):
    """Acceptance numbers belong to the output position (on a chain: start + node), so a later round meets them again."""

    def bernoulli(self, probability: float, lane: int) -> bool:
        return self.inner.bernoulli(probability, self.start + lane)


class GuessesByPosition(RoundSource):
    """The numbers behind the guesses belong to the output position, so a guess thrown away is drawn again from its number."""

    def categorical(self, weights: Tensor, lane: int) -> int:
        return self.inner.categorical(weights, self.start + lane) if lane > DRAFT_LANE else super().categorical(weights, lane)


class FreshTargetNoise(RoundSource):
    """The target's numbers belong to the round, so a position that is reached again gets new ones."""

    def target_choice(self, probs: Tensor, depth: int) -> int:
        return self.inner.target_choice(probs, 1000 * self.start + depth)


# --- the gallery ------------------------------------------------------------------------------------------------------

Case = tuple[RowRule, Callable[[Pair], Experiment]]


@dataclass(frozen=True)
class Entry:
    bug: Case
    right: Case
    vocab_size: int = 4
    flavour: str = "random"
    temperature: float = 1.0

    def pairs(self) -> Iterator[Pair]:
        for seed in range(NUM_SEEDS):
            pair = toy_pair(self.flavour, seed, self.vocab_size)
            yield replace(pair, p=tempered(pair.p, self.temperature)) if self.temperature != 1 else pair


def drafted(
    guesser: Callable[[Pair], Guesser], parents: list[int], draws: Draws, *, rounds: int = 1, length: int | None = None
) -> Callable[[Pair], Experiment]:
    size = length if length is not None else (3 if len(parents) > 2 and parents != SIBLINGS else 2)
    return lambda pair: Experiment(pair, grow(pair, parents, draws, guesser(pair)), size, rounds=rounds)


def sorted_siblings(
    guesser: Callable[[Pair], Guesser], draws: Draws, order: Callable[[RowDraft], list[int]]
) -> Callable[[Pair], Experiment]:
    return lambda pair: Experiment(pair, rearranged(grow(pair, SIBLINGS, draws, guesser(pair)), order), 2)


def with_source(make: Callable[[Pair], Experiment], source: type[RoundSource]) -> Callable[[Pair], Experiment]:
    return lambda pair: replace(make(pair), round_source=source)


def to_the_end(make: Callable[[Pair], Experiment]) -> Callable[[Pair], Experiment]:
    return lambda pair: replace(make(pair), by_rule=True)


def untempered(p: Tensor) -> Tensor:
    """The law before the temperature of 0.5 that the entry applies."""
    return p.sqrt() / p.sqrt().sum()


def sampled_hot(pair: Pair) -> Guesser:
    return sampled(replace(pair, q=tempered(pair.q, 2.0)))


def anything(pair: Pair) -> Guesser:
    return arbitrary(pair, 0)


IID, WITHOUT, CHOSEN = Draws.IID, Draws.WITHOUT_REPLACEMENT, Draws.DETERMINISTIC
CHAIN_1, CHAIN_2 = drafted(sampled, chain(1), IID), drafted(sampled, chain(2), IID)
TWO_ROUNDS = drafted(sampled, chain(2), IID, rounds=2, length=3)
TOP_2, WITHOUT_2 = drafted(top_k, SIBLINGS, CHOSEN), drafted(sampled_without_replacement, SIBLINGS, WITHOUT)
PEEK = to_the_end(drafted(clairvoyant, chain(1), CHOSEN, length=3))

GALLERY: dict[str, Entry] = {
    "greedy draft token, softmax q in ratio and residual": Entry(
        (Rejection(), drafted(top_k, chain(1), IID)), (Delta(), drafted(top_k, chain(1), CHOSEN))
    ),
    "top-k children verified as if drawn without replacement": Entry(
        (Recursive(with_replacement=False), drafted(top_k, SIBLINGS, WITHOUT)), (Delta(), TOP_2)
    ),
    "a target sample per candidate, longest match wins": Entry((ResampledPerCandidate(), TOP_2), (Coupled(), TOP_2)),
    "children without replacement, q not renormalised after each": Entry(
        (Recursive(with_replacement=False, renormalise=False), WITHOUT_2), (Recursive(with_replacement=False), WITHOUT_2)
    ),
    "independent children, duplicates removed, verified as independent": Entry(
        (Recursive(with_replacement=True), sorted_siblings(sampled, IID, without_duplicates)),
        (Recursive(with_replacement=False), sorted_siblings(sampled, IID, without_duplicates)),
    ),
    "sampled siblings verified in order of q, not as drawn": Entry(
        (Recursive(with_replacement=False), sorted_siblings(sampled_without_replacement, WITHOUT, likeliest_first)),
        (Recursive(with_replacement=False), WITHOUT_2),
    ),
    "a sampled guess dropped for its low confidence": Entry(
        (Rejection(), drafted(drop_unsure, chain(2), IID)), (Rejection(), drafted(stop_after_unsure, chain(2), IID))
    ),
    "guesses sampled at another temperature than the q reported": Entry(
        (Rejection(), drafted(sampled_hot, chain(1), IID)), (Rejection(), CHAIN_1)
    ),
    "residual from unprocessed p (temperature 0.5)": Entry(
        (RejectionWith(owed=lambda p, q: surplus(untempered(p), q)), CHAIN_1), (RejectionWith(), CHAIN_1), temperature=0.5
    ),
    "bonus token from unprocessed p (temperature 0.5)": Entry(
        (RejectionWith(bonus=untempered), CHAIN_1), (RejectionWith(), CHAIN_1), temperature=0.5
    ),
    "p sampled after a rejection, no residual": Entry(
        (RejectionWith(owed=lambda p, q: p), CHAIN_1), (RejectionWith(), CHAIN_1)
    ),
    "residual with p and q exchanged": Entry(
        (RejectionWith(owed=lambda p, q: surplus(q, p)), CHAIN_1), (RejectionWith(), CHAIN_1)
    ),
    "ratio with p and q exchanged": Entry(
        (RejectionWith(chance=lambda p, q: ratio(q, p)), CHAIN_1), (RejectionWith(), CHAIN_1)
    ),
    "u q <= p with q = 0 (greedy target, guess outside q)": Entry(
        (RejectionWith(chance=lambda p, q: p / q if p < q else 1.0), drafted(anything, chain(1), IID)),
        (RejectionWith(), drafted(anything, chain(1), IID)),
        flavour="both greedy",
    ),
    "block: h of the last position as of the others": Entry(
        (BlockWith(last_like_others=True), CHAIN_2), (BlockWith(), CHAIN_2), vocab_size=3
    ),
    "block: pi not clamped at 1": Entry((BlockWith(ratio=lambda p, q: p / q), CHAIN_2), (BlockWith(), CHAIN_2), vocab_size=3),
    "block: residual without pi": Entry((BlockWith(scaled_residual=False), CHAIN_2), (BlockWith(), CHAIN_2), vocab_size=4),
    "block: one coin for all positions": Entry((Block(), with_source(CHAIN_2, OneCoin)), (Block(), CHAIN_2), vocab_size=3),
    "block: coins by output position, met again in the next round": Entry(
        (Block(), with_source(TWO_ROUNDS, CoinsByPosition)), (Block(), TWO_ROUNDS), vocab_size=2
    ),
    "block: guesses by output position, drawn again in the next round": Entry(
        (Block(), with_source(TWO_ROUNDS, GuessesByPosition)), (Block(), TWO_ROUNDS), vocab_size=2
    ),
    "delta: one coin for all siblings": Entry((Delta(), with_source(TOP_2, OneCoin)), (Delta(), TOP_2)),
    "coupled: target noise redrawn after a drafter has seen it": Entry(
        (Coupled(), with_source(PEEK, FreshTargetNoise)), (Coupled(), PEEK), vocab_size=3
    ),
}


@pytest.mark.parametrize("name", GALLERY)
def test_the_check_rejects(name: str, table: list[str]) -> None:
    entry = GALLERY[name]
    wrong = [distance(entry.bug[0], entry.bug[1](pair)) for pair in entry.pairs()]
    right = max(distance(entry.right[0], entry.right[1](pair)) for pair in entry.pairs())
    assert_caught(name, wrong, right, table=table, documented=DOCUMENTED, exact=EXACT, biased=BIASED)


def test_the_exchangeable_rules_are_the_real_ones() -> None:
    """Otherwise a mutant would only prove that a straw man falls."""
    for pair in Entry((Rejection(), CHAIN_2), (Rejection(), CHAIN_2), vocab_size=3).pairs():
        for loose, real in ((RejectionWith(), Rejection()), (BlockWith(), Block())):
            assert output_law(loose, CHAIN_2(pair)) == pytest.approx(output_law(real, CHAIN_2(pair)), abs=EXACT)


@pytest.mark.parametrize("source", [CoinsByPosition, GuessesByPosition])
def test_token_wise_rejection_may_meet_its_numbers_again(source: type[RoundSource]) -> None:
    """It never looks past the guess it stops at, so naming numbers by position is harmless: the bias is block's own."""
    for seed in range(NUM_SEEDS):
        pair = toy_pair("random", seed, 2)
        assert distance(Rejection(), with_source(TWO_ROUNDS, source)(pair)) < EXACT


def test_dropping_is_harmless_where_q_is_not_used() -> None:
    for seed in range(NUM_SEEDS):
        pair = toy_pair("random", seed, 3)
        for rule in (Coupled(), Delta()):
            assert distance(rule, drafted(drop_unsure, chain(2), CHOSEN)(pair)) < EXACT


def test_a_lost_law_is_noticed() -> None:
    """The check itself: a rule that ignores the target altogether is as far from it as the two models are."""

    class Credulous:
        def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
            return RowVerdict((1,), draw_row(row.p[1], row.p[1], source), rejected=False)

    pair = Pair(random_model(0, 3), random_model(1, 3), 3)
    expected = float(0.5 * (pair.p(()) - pair.q(())).abs().sum())
    one_token = drafted(sampled, chain(1), IID, length=1)
    assert distance(Credulous(), one_token(pair)) == pytest.approx(expected)
