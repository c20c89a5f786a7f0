"""Recurrent layers one token at a time, as the papers write them: the oracle of the tree scan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.core.interfaces import Cache, Target
from outrider.core.tree import TokenTree
from outrider.models.recurrent.decoder import RecurrentDecoder
from outrider.models.recurrent.random_model import random_recurrent, tiny_raw

FAMILIES = ("mamba2", "bamba", "falcon_h1", "qwen3_next")
EXACT = 1e-12


def exact_model(family: str, **changes: object) -> RecurrentDecoder:
    return random_recurrent(tiny_raw(family, **changes), dtype=torch.float64)


def written(state: Tensor, decay: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """S' = exp(a) S + w k^T for one token: state [heads, P, K], decay [heads], key [heads, K], value [heads, P]."""
    return state * decay.exp()[:, None, None] + value[:, :, None] * key[:, None, :]


def delta_value(state: Tensor, decay: Tensor, key: Tensor, value: Tensor, rate: Tensor) -> Tensor:
    """What the delta rule writes: b (v - exp(a) S k)."""
    held = (state * decay.exp()[:, None, None] * key[:, None, :]).sum(-1)
    return rate[:, None] * (value - held)


def random_tree(seed: int, num_nodes: int, vocab_size: int = 64) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree with branches of several lengths."""
    rng = random.Random(seed)
    parents = [-1, *[rng.randrange(max(0, node - 4), node) for node in range(1, num_nodes)]]
    return [rng.randrange(vocab_size) for _ in range(num_nodes)], parents


def fed_one_by_one(model: Target, tokens: Sequence[int], cache: Cache) -> Tensor:
    """[V] logits after ``tokens``, every one of them fed and committed alone."""
    logits = torch.zeros(0)
    for token in tokens:
        logits = model.score(TokenTree.chain(torch.tensor([[token]])), cache).logits[0, 0]
        cache.commit([[0]])
    return logits


def one_by_one(model: Target, tokens: Sequence[int]) -> Tensor:
    """[V] logits after a whole text of ``tokens``."""
    return fed_one_by_one(model, tokens, model.new_cache(1))


def some_path(tree: TokenTree, row: int, seed: int) -> list[int]:
    """Nodes from the root to a random one, as a commit takes them; now and then none."""
    rng = random.Random(seed)
    if rng.random() < 0.1:
        return []
    return [0, *tree.path(row, rng.randrange(tree.sizes[row]))]


def check_twins(plain: RecurrentDecoder, other: RecurrentDecoder, *, num_rounds: int) -> None:
    """Ragged prompts, random trees, grown in two parts, with commits of random paths, past several replays."""
    chance, models = random.Random(0), (plain, other)
    caches = [model.new_cache(2) for model in models]
    prompts = [[chance.randrange(64) for _ in range(size)] for size in (41, 3)]
    near = partial(torch.testing.assert_close, atol=2e-4, rtol=2e-4)
    for model, cache in zip(models, caches, strict=True):
        model.prefill(prompts, cache)
    for number in range(num_rounds):
        tree = TokenTree.of_rows([random_tree(2 * number + row, 6 + 12 * row) for row in range(2)], plain.device)
        expected, found = (model.score(tree, cache).logits for model, cache in zip(models, caches, strict=True))
        near(found[tree.valid], expected[tree.valid])
        other.score(TokenTree(tree.tokens[:, :4], tree.parents[:, :4], (4, 4)), caches[1])
        near(other.score(tree, caches[1], start=4).logits, found[:, 4:])
        paths = [some_path(tree, row, number) for row in range(2)]
        for cache in caches:
            cache.commit(paths)
    for layer in range(caches[0].shape.num_layers):
        near(caches[1].state(layer), caches[0].state(layer))
