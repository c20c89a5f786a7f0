"""Rules on trees: how to get them wrong, how they are related, and what may be merged. (Their exactness: test_rules_exact.)

``python -m pytest tests/contract/test_tree_rules.py -s`` prints the second table of docs/lossless.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from planted_bugs import assert_caught
from test_rules_mutations import BIASED, DOCUMENTED, EXACT, IID, NUM_SEEDS, WITHOUT, Case, drafted
from test_rules_vectorised import case_of
from tiers import repeats
from toy_laws import (
    Experiment,
    Pair,
    Text,
    ToyDrafter,
    chain,
    distance,
    grow,
    mean_emitted,
    output_law,
    sampled,
    sampled_without_replacement,
    toy_pair,
)

from outrider.acceptance import Block, KSeq, Recursive, Rejection, Traversal
from outrider.acceptance.paths import path_of
from outrider.acceptance.residual import draw_row, ratio, surplus
from outrider.core.draft import Draft, Draws
from outrider.core.equal_siblings import first_twins
from outrider.core.interfaces import RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.tree import TokenTree
from outrider.core.verdict import RowVerdict

TWO, THREE, LATE, BINARY = [-1, 0, 0], [-1, 0, 0, 0], [-1, 0, 1, 1], [-1, 0, 0, 1, 1, 2, 2]

# --- rules with exchangeable parts; unchanged, each is exact ----------------------------------------------------------


@dataclass(frozen=True)
class RecursiveWith:
    """Recursive rejection on whole trees."""

    renormalise: bool = True
    update_on_duplicates: bool = True

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        assert row.q is not None
        node, entered, rest = 0, True, row.p[0]
        while entered:
            entered, rest, q, tried = False, row.p[node], row.q[node].clone(), set[int]()
            for child in row.children(node):
                guess = row.tokens[child]
                if guess in tried and not self.update_on_duplicates:
                    continue
                tried.add(guess)
                drawn_from = q / q.sum() if self.renormalise else q
                if source.bernoulli(ratio(float(rest[guess]), float(drawn_from[guess])), child):
                    node, entered = child, True
                    break
                owed = surplus(rest, drawn_from)
                rest = owed / owed.sum() if owed.sum() > EXACT else rest
                if row.draws is not Draws.IID:
                    q[guess] = 0
        return RowVerdict(path_of(row, node), draw_row(rest, row.p[node], source), rejected=bool(row.children(node)))


class EasyKSeq:
    """k-SEQ with rho = 1, one level: likely tokens come up several times and are kept too often."""

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        assert row.q is not None
        p, q, guesses = row.p[0], row.q[0], row.children(0)
        for child in guesses:
            if source.bernoulli(ratio(float(p[row.tokens[child]]), float(q[row.tokens[child]])), child):
                return RowVerdict((child,), draw_row(row.p[child], row.p[child], source), rejected=False)
        supplied = torch.minimum(p, q)
        kept = 1 - (1 - supplied.sum()) ** len(guesses)
        return RowVerdict((), draw_row((p - supplied * kept / supplied.sum()).clamp(min=0), p, source), rejected=True)


@dataclass(frozen=True)
class TraversalWith:
    """Traversal."""

    update_supply: bool = True
    update_law: bool = True

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        end, rest = self._search(row, source, 0, 1.0)
        assert end is not None
        return RowVerdict(path_of(row, end), draw_row(rest, row.p[end], source), rejected=bool(row.children(end)))

    def _search(self, row: RowDraft, source: RandomSource, node: int, supply: float):
        assert row.q is not None
        p, q = row.p[node], row.q[node].clone()
        for child in row.children(node):
            guess = row.tokens[child]
            found = self._search(row, source, child, ratio(supply * float(p[guess]), float(q[guess])))
            if found[0] is not None:
                return found
            owed = surplus(supply * p, q)
            total = float(owed.sum())
            if self.update_law and total > EXACT:
                p = owed / total
            if self.update_supply:
                supply = total / (total + 1 - supply) if total + 1 - supply > 0 else 1.0
            if row.draws is not Draws.IID:
                q[guess] = 0
                q = q / q.sum() if q.sum() > 0 else q
        return (node if node == 0 or source.bernoulli(supply, node) else None), p


PAIR, TRIPLE = drafted(sampled, TWO, IID), drafted(sampled, THREE, IID, length=2)
OTHERS, LATE_OTHERS = (drafted(sampled_without_replacement, shape, WITHOUT, length=3) for shape in (TWO, LATE))

GALLERY: dict[str, tuple[Case, Case]] = {
    "tree without replacement, q not renormalised": (
        (RecursiveWith(renormalise=False), LATE_OTHERS), (RecursiveWith(), LATE_OTHERS)
    ),
    "independent siblings, residual not updated on a duplicate": (
        (RecursiveWith(update_on_duplicates=False), TRIPLE), (RecursiveWith(), TRIPLE)
    ),
    "siblings without replacement verified by k-SEQ": ((KSeq(), OTHERS), (Recursive(), OTHERS)),
    "k-SEQ with rho = 1": ((EasyKSeq(), PAIR), (KSeq(), PAIR)),
    "traversal: supply not updated after a dropped child": (
        (TraversalWith(update_supply=False), LATE_OTHERS), (TraversalWith(), LATE_OTHERS)
    ),
    "traversal: law not updated after a dropped child": (
        (TraversalWith(update_law=False), LATE_OTHERS), (TraversalWith(), LATE_OTHERS)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GALLERY)
def test_the_check_rejects(name: str, table: list[str]) -> None:
    (bug, wrong_draft), (twin, right_draft) = GALLERY[name]
    pairs = [toy_pair("random", seed, 3) for seed in range(NUM_SEEDS)]
    wrong = [distance(bug, wrong_draft(pair)) for pair in pairs]
    right = max(distance(twin, right_draft(pair)) for pair in pairs)
    assert_caught(name, wrong, right, table=table, documented=DOCUMENTED, exact=EXACT, biased=BIASED)


def test_the_exchangeable_rules_are_the_real_ones() -> None:
    for seed in range(4):
        pair = toy_pair("random", seed, 3)
        for loose, real in ((RecursiveWith(), Recursive()), (TraversalWith(), Traversal())):
            for experiment in (LATE_OTHERS(pair), TRIPLE(pair)):
                assert output_law(loose, experiment) == pytest.approx(output_law(real, experiment), abs=EXACT)


# --- how the rules are related ----------------------------------------------------------------------------------------


def means(pair: Pair, shape: list[int], draws: Draws, *rules) -> list[float]:
    """Expected tokens of one round on identical draws."""
    guesser = sampled(pair) if draws is Draws.IID else sampled_without_replacement(pair)
    return [mean_emitted(rule(), Experiment(pair, grow(pair, shape, draws, guesser), 1)) for rule in rules]


def test_on_a_chain_recursive_is_rejection_and_traversal_is_block() -> None:
    for seed in repeats(3, of=8):
        pair = toy_pair("random", seed, 3)
        recursive, rejection, traversal, block, kseq = means(pair, chain(2), IID, Recursive, Rejection, Traversal, Block, KSeq)
        assert recursive == pytest.approx(rejection) == pytest.approx(kseq)
        assert traversal == pytest.approx(block)
        assert rejection <= block + EXACT


def test_on_a_chain_recursive_gives_rejections_verdicts() -> None:
    for seed in repeats(10, of=60):
        case = case_of(seed, is_chain=True)
        for (mine, _), (theirs, _) in zip(case.verdicts(Recursive()), case.verdicts(Rejection()), strict=True):
            assert mine == theirs


def test_at_depth_one_traversal_is_recursive() -> None:
    for seed in repeats(3, of=8):
        pair = toy_pair("random", seed, 4)
        for shape, draws in ((THREE, WITHOUT), (TWO, IID)):
            recursive, traversal = means(pair, shape, draws, Recursive, Traversal)
            assert recursive == pytest.approx(traversal)


@pytest.mark.parametrize("shape", [LATE, BINARY, [-1, 0, 0, 1, 1, 3]], ids=["late", "binary", "comb"])
def test_traversal_never_accepts_less_than_recursive(shape: list[int]) -> None:
    gains = []
    for seed in repeats(1, of=2) if len(shape) > 5 else repeats(3, of=6):
        pair = toy_pair("random", seed, 3)
        recursive, traversal = means(pair, shape, WITHOUT, Recursive, Traversal)
        gains.append(traversal - recursive)
    assert min(gains) > -EXACT
    assert max(gains) > 0.005


def test_more_is_accepted_without_replacement_than_with() -> None:
    for seed in repeats(4, of=10):
        pair = toy_pair("random", seed, 4)
        for shape in (TWO, THREE):
            with_replacement = means(pair, shape, IID, Recursive)[0]
            assert means(pair, shape, WITHOUT, Recursive)[0] > with_replacement - EXACT


def test_k_seq_accepts_at_least_its_share_of_the_best_coupling() -> None:
    """1 - (1 - 1/k)^k of the optimum over all rules for k independent guesses: min over sets H of p(H) + 1 - q(H)^k."""
    for seed in repeats(4, of=10):
        pair = toy_pair("random", seed, 3)
        p, q, k = pair.p(()), pair.q(()), 2
        subsets = [torch.tensor([bool(mask >> v & 1) for v in range(3)]) for mask in range(8)]
        best = 1 + min(float(p[inside].sum() - q[inside].sum() ** k) for inside in subsets)
        accepted = means(pair, TWO, IID, KSeq)[0] - 1
        assert (1 - (1 - 1 / k) ** k) * best - EXACT <= accepted <= best + EXACT


# --- merging ----------------------------------------------------------------------------------------------------------


def merged_chains(pair: Pair, shape: list[int]) -> ToyDrafter:
    """Independent draws with equal texts made one, in order of appearance."""
    inner = grow(pair, shape, IID, sampled(pair))

    def draft(context: Text, source: RandomSource) -> RowDraft:
        row = inner(context, source)
        first = first_twins(TokenTree.of_rows([([0, *row.tokens[1:]], row.parents)]))[0].tolist()
        kept = [node for node, twin in enumerate(first) if node == twin]
        place = {node: index for index, node in enumerate(kept)}
        parents = [place[first[row.parents[node]]] if node else -1 for node in kept]
        assert row.q is not None
        return RowDraft([row.tokens[node] for node in kept], parents, row.p[kept], row.q[kept], WITHOUT)

    return draft


@pytest.mark.parametrize("rule", [Recursive, Traversal])
@pytest.mark.parametrize("shape", [THREE, [-1, 0, 0, 1, 2], [-1, 0, 0, 0, 1, 2, 3]], ids=["siblings", "two chains", "three"])
def test_merged_independent_chains_are_draws_without_replacement(rule, shape: list[int]) -> None:
    for seed in repeats(1, of=3):
        pair = toy_pair("random", seed, 2 if len(shape) > 5 else 3)
        assert distance(rule(), Experiment(pair, merged_chains(pair, shape), 3)) < EXACT


def test_first_twins_are_those_that_spell_the_same_text() -> None:
    for seed in repeats(12, of=100):
        tree = case_of(seed, is_chain=False).tree
        first = first_twins(tree)
        for row, size in enumerate(tree.sizes):
            tokens = tree.tokens[row].tolist()
            texts = [tuple(tokens[n] for n in tree.path(row, node)) for node in range(size)]
            depths = [len(text) for text in texts]
            expected = [min(i for i in range(node + 1) if texts[i] == texts[node]) for node in range(size)]
            assert first[row, :size].tolist() == expected, depths


@pytest.mark.parametrize("rule", [Recursive, Traversal])
def test_walk_is_walk_row_without_replacement(rule) -> None:
    """test_rules_vectorised draws independently; here the elder siblings leave q."""
    for seed in repeats(16, of=120):
        case = case_of(seed, is_chain=False)
        draft = Draft(case.tree, WITHOUT, case.draft.q)
        batched = rule().walk(draft, case.law, case.noise)
        for row in range(len(case.sizes)):
            scalar = rule().walk_row(RowDraft.of(draft, case.law, row), case.sources[row])
            assert batched.rows[row] == scalar, f"seed {seed}"
