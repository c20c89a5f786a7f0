"""The native sampler chooses as PyTorch's does, for every parameter: penalties, bias, grammars, minimum lengths and cuts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.acceptance.coupled import followed_one_by_one
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tempering import Cut, Tempering
from outrider.core.tree import TokenTree
from outrider.models.native.build import built_library
from outrider.models.native.choices import choose, gumbel_stream

VOCAB = 301


class Third:
    """A grammar whose state counts tokens: those that leave the same remainder as the count may come."""

    def initial(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int | None:
        return state + 1 if token % 3 != (state + 1) % 3 else None

    def allowed(self, state: int, vocab_size: int) -> Tensor:
        return torch.arange(vocab_size) % 3 != (state + 1) % 3

    def forced(self, state: int) -> tuple[int, ...]:
        del state
        return ()


@pytest.fixture(scope="module")
def library() -> Any:
    found = built_library()
    if found is None:
        pytest.skip("the native pass cannot be built here")
    return found


def random_params(chance: random.Random, seed: int) -> SamplingParams:
    maybe: Callable[[Any, Any], Any] = lambda usual, other: other if chance.random() < 0.4 else usual  # noqa: E731
    return SamplingParams(
        temperature=maybe(chance.choice([0.3, 1.0, 1.7]), 0.0),
        top_k=maybe(0, chance.choice([1, 7, 150, 1000])),
        top_p=maybe(1.0, chance.choice([0.2, 0.9, 0.999])),
        min_p=maybe(0.0, chance.choice([0.01, 0.3])),
        typical_p=maybe(1.0, chance.choice([0.3, 0.9])),
        repetition_penalty=maybe(1.0, chance.choice([0.8, 1.3])),
        presence_penalty=maybe(0.0, 0.4),
        frequency_penalty=maybe(0.0, 0.7),
        logit_bias=maybe({}, {chance.randrange(VOCAB): chance.uniform(-4, 4) for _ in range(20)}),
        banned_token_ids=maybe((), (3, 4, 5)),
        min_tokens=maybe(0, 4),
        grammar=maybe(None, Third()),
        seed=seed,
        max_tokens=50,
    )


def random_row(chance: random.Random, size: int) -> tuple[list[int], list[int]]:
    """Few tokens, so that paths repeat them."""
    return [chance.randrange(12) for _ in range(size)], [-1, *(chance.randrange(node) for node in range(1, size))]


def state_of(chance: random.Random, params: SamplingParams) -> RequestState:
    request = Request([chance.randrange(VOCAB) for _ in range(9)], params, eos_ids=frozenset({1, 2}))
    state = RequestState.of(request)
    state.tokens.extend(chance.randrange(20) for _ in range(chance.choice([0, 3, 9])))
    return state


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("sharpness", [0.05, 3.0])
def test_choices_are_those_of_the_oracle(library: Any, seed: int, sharpness: float) -> None:
    chance = random.Random(seed)
    rows = [state_of(chance, random_params(chance, 7 * seed + row)) for row in range(4)]
    trees = [random_row(chance, chance.choice([1, 5, 9])) for _ in rows]
    if seed % 4 == 0:
        trees = [(tokens, [*range(-1, len(tokens) - 1)]) for tokens, _ in trees]
    tree = TokenTree.of_rows(trees)
    start = chance.choice([0, 0, min(2, tree.num_nodes - 1)])
    logits = sharpness * torch.randn(4, tree.num_nodes - start, VOCAB, generator=torch.Generator().manual_seed(seed))
    seeds, positions = torch.tensor([row.seed for row in rows]), torch.tensor([row.num_output for row in rows])
    sampler, stream = Sampler(rows, VOCAB, torch.device("cpu")), partial(gumbel_stream, library)
    ours, oracle = (
        sampler.law(logits, tree, Noise(seeds, positions, stream, native), start=start).choices
        for native in (partial(choose, library), None)
    )
    for row, size in enumerate(tree.sizes):
        assert ours[row, : max(0, size - start)].tolist() == oracle[row, : max(0, size - start)].tolist(), rows[row].params


@pytest.mark.parametrize("seed", range(40))
def test_walks_are_those_of_the_rule(library: Any, seed: int) -> None:
    """Siblings may hold the same token, and rows have trees of different sizes. Every fourth batch has chains."""
    chance = random.Random(seed)
    trees = [random_row(chance, chance.choice([1, 5, 17])) for _ in range(4)]
    if seed % 4 == 0:
        trees = [(tokens, [*range(-1, len(tokens) - 1)]) for tokens, _ in trees]
    tree = TokenTree.of_rows([([token % 3 for token in tokens], parents) for tokens, parents in trees])
    logits = torch.randn(4, tree.num_nodes, 3, generator=torch.Generator().manual_seed(seed))
    noise = Noise(torch.arange(4), torch.zeros(4, dtype=torch.int64))
    chosen = choose(library, logits, Tempering([0.0, 0.0, 1.0, 0.5]), noise=noise, tree=tree, start=0, masks={})
    assert chosen.walks == followed_one_by_one(tree, chosen.tokens).rows


def choices_of(library: Any, logits: Tensor, cut: Cut, seed: int) -> tuple[list[int], int]:
    noise = Noise(torch.tensor([seed]), torch.tensor([0]))
    given = {"noise": noise, "tree": TokenTree.chain(torch.zeros(1, 1, dtype=torch.int64)), "start": 0, "masks": {}}
    chosen = choose(library, logits[None, None], Tempering([1.0], [cut]), **given)
    assert (chosen.walks is None) == (chosen.num_open > 0)
    return chosen.tokens[0].tolist(), chosen.num_open


@pytest.mark.parametrize("cut", [Cut(top_p=0.75), Cut(typical_p=0.75), Cut(top_p=0.75, typical_p=0.9)], ids=str)
def test_what_rounding_decides_is_left_to_the_oracle(library: Any, cut: Cut) -> None:
    """Half and two quarters: whether a sum of three quarters is reached is a matter of rounding."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    found = [choices_of(library, logits, cut, seed) for seed in range(60)]
    assert any(num_open for _, num_open in found)
    clear = replace(cut, top_p=min(cut.top_p, 0.6), typical_p=1.0)
    found = [choices_of(library, logits, clear, seed) for seed in range(60)]
    assert not any(num_open for _, num_open in found) and {token for chosen, _ in found for token in chosen} == {0, 1}


def test_few_choices_are_left_to_the_oracle(library: Any) -> None:
    """A flat law of many tokens, where a cut often falls where rounding decides: it matters only if such a token is chosen."""
    logits = torch.randn(20000, generator=torch.Generator().manual_seed(1))
    for cut in (Cut(top_p=0.95), Cut(typical_p=0.95)):
        assert sum(choices_of(library, logits, cut, seed)[1] for seed in range(40)) == 0
