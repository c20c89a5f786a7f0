"""The batched form of every rule gives the verdict of its scalar form on the same random numbers, case by case."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from tiers import repeats
from torch import Tensor

from outrider.acceptance import Block, Coupled, Delta, KSeq, Recursive, Rejection, Transport, Traversal
from outrider.acceptance.coupled import followed, followed_one_by_one
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.equal_siblings import first_twins
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.params import SamplingParams
from outrider.core.random_source import NoiseSource
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Law, Sampler
from outrider.core.tree import TokenTree
from outrider.core.verdict import RowVerdict

RULES: list[type[AcceptanceRule]] = [Block, Coupled, Delta, KSeq, Recursive, Rejection, Transport, Traversal]
VOCAB_SIZE = 5

pytestmark = pytest.mark.usefixtures("one_thread")


def random_law(chance: random.Random, num_nodes: int, *, kind: str) -> Tensor:
    """[N, V] float64 laws: flat or peaked, cut to a few tokens, or point masses."""
    weights = torch.tensor(
        [[chance.gammavariate(0.7, 1.0) for _ in range(VOCAB_SIZE)] for _ in range(num_nodes)], dtype=torch.float64
    )
    keep = {"full": VOCAB_SIZE, "cut": 2, "greedy": 1}[kind]
    weights = weights * (weights >= weights.topk(keep, -1).values[:, -1:])
    return weights / weights.sum(-1, keepdim=True)


def random_parents(chance: random.Random, size: int, *, is_chain: bool) -> list[int]:
    """Breadth-first trees: parents never decrease."""
    if is_chain:
        return list(range(-1, size - 1))
    parents = [-1]
    for node in range(1, size):
        parents.append(chance.randint(max(parents[-1], 0), min(node - 1, max(parents[-1], 0) + 2)))
    return parents


def random_tokens(chance: random.Random, parents: list[int], p: Tensor, q: Tensor) -> list[int]:
    """Guesses from q, from p, or from anywhere (also where q is 0); siblings are often equal."""
    tokens = [chance.randrange(VOCAB_SIZE)]
    for parent in parents[1:]:
        law = chance.choice([q[parent], p[parent], torch.ones(VOCAB_SIZE)])
        tokens.append(chance.choices(range(VOCAB_SIZE), law.tolist())[0])
    return tokens


class Case:
    """A random batch: trees of different sizes, laws with zeros, greedy rows among the others, garbage in the padding."""

    def __init__(self, seed: int, *, is_chain: bool, dtype: torch.dtype = torch.float64) -> None:
        chance = random.Random(seed)
        batch_size = chance.randint(1, 6)
        sizes = [chance.randint(1, 6 if is_chain else 12) for _ in range(batch_size)]
        if chance.random() < 0.3:
            sizes = [sizes[0]] * batch_size
        num_nodes = max(sizes)
        p = torch.full((batch_size, num_nodes, VOCAB_SIZE), torch.nan, dtype=torch.float64)
        q = p.clone()
        rows: list[tuple[list[int], list[int]]] = []
        for b, size in enumerate(sizes):
            p[b, :size] = random_law(chance, size, kind=chance.choice(["full", "cut", "greedy"]))
            q[b, :size] = random_law(chance, size, kind=chance.choice(["full", "cut", "greedy"]))
            if chance.random() < 0.1:
                q[b, :size] = p[b, :size]
            parents = random_parents(chance, size, is_chain=is_chain)
            rows.append((random_tokens(chance, parents, p[b], q[b]), parents))
        self.sizes = sizes
        self.tree = TokenTree.of_rows(rows)
        seeds = torch.tensor([chance.getrandbits(62) for _ in range(batch_size)])
        self.noise = Noise(seeds, torch.tensor([chance.randrange(300) for _ in range(batch_size)]))
        self.draft = Draft(self.tree, Draws.IID, q.to(dtype) if num_nodes > 1 else None)
        self.law = law_of(p.to(dtype), self.tree, self.noise)
        self.sources = [NoiseSource(self.noise, row) for row in range(batch_size)]
        """The noise of each row, remembered from rule to rule."""

    def verdicts(self, rule: AcceptanceRule) -> Iterator[tuple[RowVerdict, RowVerdict]]:
        """Row by row: what the batched form says, what the scalar form says."""
        batched = rule.walk(self.draft, self.law, self.noise)
        for row in range(len(self.sizes)):
            scalar = rule.walk_row(RowDraft.of(self.draft, self.law, row), self.sources[row])
            yield batched.rows[row], scalar


@cache
def case_of(seed: int, *, is_chain: bool, dtype: torch.dtype = torch.float64) -> Case:
    return Case(seed, is_chain=is_chain, dtype=dtype)


def law_of(p: Tensor, tree: TokenTree, noise: Noise) -> Law:
    """The target's law as the engine builds it, from logits that are log p."""
    params = SamplingParams(temperature=1.0)
    rows = [RequestState.of(Request([0], params)) for _ in range(len(p))]
    return Sampler(rows, p.shape[-1], torch.device("cpu")).law(p.log(), tree, noise)


def assert_forms_agree(rule: AcceptanceRule, *, cases: range, is_chain: bool) -> None:
    """``walk`` gives what ``walk_row`` gives, on cases that accept any number of guesses from none to three."""
    lengths = set()
    for seed in cases:
        for batched, scalar in case_of(seed, is_chain=is_chain).verdicts(rule):
            assert batched == scalar, f"seed {seed}"
            lengths.add(len(scalar.path))
    assert lengths >= {0, 1, 2, 3}, "the cases are too easy"


SHAPES = [(rule, is_chain) for rule in RULES for is_chain in (True, False) if is_chain or rule.shape is Shape.TREE]


@pytest.mark.parametrize(("rule", "is_chain"), SHAPES)
def test_walk_is_walk_row(rule: type[AcceptanceRule], is_chain: bool) -> None:
    assert_forms_agree(rule(), cases=repeats(30, of=120), is_chain=is_chain)


@pytest.mark.parametrize(("rule", "is_chain"), SHAPES)
def test_walk_in_float32(rule: type[AcceptanceRule], is_chain: bool) -> None:
    """Production's dtype: a verdict may differ from float64's only where a number falls within rounding of its threshold."""
    pairs = [
        pair for seed in repeats(10, of=60) for pair in case_of(seed, is_chain=is_chain, dtype=torch.float32).verdicts(rule())
    ]
    assert sum(batched == scalar for batched, scalar in pairs) >= len(pairs) - 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_nothing_drafted(rule: type[AcceptanceRule], batch_size: int) -> None:
    tree = TokenTree.chain(torch.zeros(batch_size, 1, dtype=torch.int64))
    p = random_law(random.Random(0), batch_size, kind="full")[:, None]
    noise = Noise(torch.arange(batch_size), torch.zeros(batch_size, dtype=torch.int64))
    law = law_of(p, tree, noise)
    verdict = rule().walk(Draft(tree, rule.exact_for[0]), law, noise)
    assert verdict.num_accepted.tolist() == [0] * batch_size
    assert not verdict.rejected.any()
    for row in range(batch_size):
        scalar = rule().walk_row(RowDraft.of(Draft(tree, rule.exact_for[0]), law, row), NoiseSource(noise, row))
        assert verdict.rows[row] == scalar


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rule", "is_chain"), SHAPES)
def test_greedy_rows_follow_the_argmax(rule: type[AcceptanceRule], is_chain: bool, dtype: torch.dtype) -> None:
    """Temperature 0 through the sampler, with a q that has zeros and does not match the guesses."""
    for seed in repeats(10, of=60):
        case = case_of(seed, is_chain=is_chain, dtype=dtype)
        rows = [RequestState.of(Request([0], SamplingParams(temperature=0.0))) for _ in case.sizes]
        logits = torch.randn(*case.tree.tokens.shape, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        law = Sampler(rows, VOCAB_SIZE, torch.device("cpu")).law(logits, case.tree, case.noise)
        verdict = rule().walk(case.draft, law, case.noise)
        greedy = logits.argmax(-1)
        for row in range(len(case.sizes)):
            node, choices = 0, greedy[row].tolist()
            if rule in (KSeq, Transport):  # guesses of one text are judged by the law of the first node that spells it
                choices = [choices[first] for first in first_twins(case.tree)[row].tolist()]
            found = verdict.rows[row]
            for child in found.path:
                assert int(case.tree.parents[row, child]) == node
                assert int(case.tree.tokens[row, child]) == choices[node]
                node = child
            assert found.next_token == choices[node]
            one_row = RowDraft.of(case.draft, law, row)
            if rule in (Coupled, Delta):  # the others may throw a right guess away and say it again
                assert all(one_row.tokens[child] != choices[node] for child in one_row.children(node))


def test_greedy_is_not_held_up_by_rounding() -> None:
    """q a hair over 1 in float32 may reject the right guess; the token that replaces it is the same one."""
    tree = TokenTree.chain(torch.tensor([[0, 1, 1]]).expand(4000, -1))
    p = torch.zeros(4000, 3, VOCAB_SIZE)
    p[..., 1] = 1
    q = p * (1 + 1e-3)
    noise = Noise(torch.arange(4000), torch.zeros(4000, dtype=torch.int64))
    for rule in (Block(), Rejection()):
        verdict = rule.walk(Draft(tree, Draws.IID, q), law_of(p, tree, noise), noise)
        assert (verdict.num_accepted < 2).any()
        assert (verdict.next_token == 1).all()


def test_coupled_same_seed_same_text() -> None:
    """Rounds of random trees and plain one-token decoding with the same seed give one text, with the real generator."""
    chance = random.Random(1)
    weights = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = weights.softmax(-1)  # the next token depends on the last one
    num_accepted = 0
    seeds = repeats(20, of=60)
    for seed in seeds:
        plain = decode(p, seed, lambda: 1)
        drafted = decode(p, seed, lambda: chance.randint(1, 9))
        assert plain[0] == drafted[0]
        num_accepted += drafted[1]
    assert num_accepted > 2 * len(seeds)


def decode(p: Tensor, seed: int, next_size: Callable[[], int]) -> tuple[list[int], int]:
    """16 tokens of a first-order Markov target, drafting random trees; also how many guesses were accepted."""
    chance = random.Random(next_size())
    text, num_accepted = [0], 0
    while len(text) < 17:
        size = next_size()
        parents = random_parents(chance, size, is_chain=chance.random() < 0.5)
        tokens = [text[-1], *(chance.randrange(VOCAB_SIZE) for _ in parents[1:])]
        tree = TokenTree.of_rows([(tokens, parents)])
        noise = Noise(torch.tensor([seed]), torch.tensor([len(text) - 1]))
        verdict = Coupled().walk(Draft(tree, Draws.DETERMINISTIC), law_of(p[tree.tokens], tree, noise), noise)
        found = verdict.rows[0]
        text += [*(tokens[node] for node in found.path), found.next_token]
        num_accepted += len(found.path)
    return text[:17], num_accepted


@pytest.mark.parametrize("rule", RULES)
def test_a_row_does_not_depend_on_its_batch(rule: type[AcceptanceRule]) -> None:
    """The row alone, without padding, has the verdict it has in company."""
    for seed in repeats(8, of=50):
        case = case_of(seed, is_chain=True)
        batched = rule().walk(case.draft, case.law, case.noise)
        for row, size in enumerate(case.sizes):
            tree = TokenTree.chain(case.tree.tokens[row : row + 1, :size])
            noise = Noise(case.noise.seeds[row : row + 1], case.noise.positions[row : row + 1])
            q = None if case.draft.q is None else case.draft.q[row : row + 1, :size]
            law = law_of(case.law.probs[row : row + 1, :size], tree, noise)
            alone = rule().walk(Draft(tree, Draws.IID, q), law, noise)
            assert alone.rows[0] == batched.rows[row]


@dataclass
class BareLaw:
    """What a rule reads of a law."""

    probs: Tensor
    choices: Tensor


@pytest.mark.parametrize(("rule", "is_chain"), SHAPES)
def test_walk_stays_on_the_device(rule: type[AcceptanceRule], is_chain: bool) -> None:
    """Tensors without data: an operation that waits for a value, or mixes devices, raises. So a round can be one graph."""
    for seed in repeats(2, of=20):
        case, meta = case_of(seed, is_chain=is_chain), torch.device("meta")
        tree = case.tree.to(meta)
        q = None if case.draft.q is None else case.draft.q.to(meta)
        law: Any = BareLaw(case.law.probs.to(meta), case.law.choices.to(meta))
        noise = Noise(case.noise.seeds.to(meta), case.noise.positions.to(meta))
        verdict = rule().walk(Draft(tree, Draws.IID, q), law, noise)
        assert verdict.path.shape == (tree.batch_size, tree.num_nodes - 1)
        assert verdict.next_token.shape == verdict.num_accepted.shape == verdict.rejected.shape == (tree.batch_size,)


def test_the_coupled_walk_with_and_without_a_loop() -> None:
    """On a CPU trees are walked node by node, on a GPU without a loop: the verdicts are the same, duplicates included."""
    chance = random.Random(5)
    for _ in range(200):
        rows = []
        for _ in range(3):
            size = chance.randrange(1, 14)
            parents = [-1, *sorted(chance.randrange(node) for node in range(1, size))]
            rows.append(([chance.randrange(3) for _ in range(size)], parents))
        tree = TokenTree.of_rows(rows)
        choices = torch.tensor([[chance.randrange(3) for _ in range(tree.num_nodes)] for _ in rows])
        looped, batched = followed_one_by_one(tree, choices), followed(tree, choices)
        for row, length in enumerate(batched.num_accepted.tolist()):
            assert looped.path[row, :length].tolist() == batched.path[row, :length].tolist()
        for left, right in ((looped.num_accepted, batched.num_accepted), (looped.next_token, batched.next_token)):
            assert left.tolist() == right.tolist()
        assert looped.rejected.tolist() == batched.rejected.tolist()
