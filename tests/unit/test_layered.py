"""A target whose layers are run apart: what an exit returns, and that a pass that goes on from it is the ordinary pass."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.core.draft import Resume
from outrider.core.errors import OptionError
from outrider.core.route import Route
from outrider.core.tree import TokenTree
from outrider.models.config import config_of
from outrider.models.decoder import Decoder
from outrider.models.random_decoder import tiny_decoder

LAYERS, VOCAB = 4, 61
PROMPTS = [[5, 9, 33, 2, 17, 8, 44, 21, 3, 50, 11], [7, 7, 12], [60, 4, 29, 30, 31, 1, 5]]
LEVEL = [PROMPTS[0], PROMPTS[0][::-1]]
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_FAMILIES = {
    "llama": {"model_type": "llama"},
    "windows": {"model_type": "mistral", "sliding_window": 5},
    "gemma": {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6},
}
TREE = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 7]


@pytest.fixture(scope="module", params=list(_FAMILIES))
def target(request) -> Decoder:
    config = config_of({**_SIZES, **_FAMILIES[request.param]})
    assert config is not None
    return tiny_decoder(config, seed=3)


def tree_of(parents: list[int], num_rows: int, *, sizes: list[int] | None = None) -> TokenTree:
    """Random tokens on the shape, cut to ``sizes``."""
    chance = random.Random(1)
    sizes = sizes or [len(parents)] * num_rows
    return TokenTree.of_rows([([chance.randrange(VOCAB) for _ in range(size)], parents[:size]) for size in sizes])


def cases() -> list[tuple[list[list[int]], TokenTree]]:
    chain = list(range(-1, 5))
    return [
        (PROMPTS[:1], tree_of(chain, 1)),
        (LEVEL, tree_of(chain, 2)),
        (PROMPTS, tree_of(chain, 3)),
        (PROMPTS, tree_of(chain, 3, sizes=[6, 2, 4])),
        (PROMPTS[:1], tree_of(TREE, 1)),
        (LEVEL, tree_of(TREE, 2, sizes=[10, 7])),
        (PROMPTS, tree_of(TREE, 3, sizes=[3, 10, 6])),
    ]


def filled(target: Decoder, prompts: list[list[int]]):
    cache = target.new_cache(len(prompts))
    target.prefill(prompts, cache)
    return cache


OTHER_WAYS = [(1, 1), (2, 3), (LAYERS, 1)]
"""Layers and steps that are left to ``make test-all``."""


def prefix(tree: TokenTree, size: int) -> TokenTree:
    """The first nodes of every tree, as a drafter has them while the tree grows."""
    sizes = tuple(min(size, own) for own in tree.sizes)
    return TokenTree(tree.tokens[:, :size], tree.parents[:, :size], sizes, tree.is_chain)


@pytest.mark.parametrize(
    ("layer", "step"), [(1, 3), (2, 1), (LAYERS, 3), *(pytest.param(*way, marks=pytest.mark.exhaustive) for way in OTHER_WAYS)]
)
@pytest.mark.parametrize("case", range(len(cases())))
def test_a_resumed_pass_is_the_ordinary_pass(target, case: int, layer: int, step: int) -> None:
    """Logits, taps and cache, whatever part of the tree was drafted, in steps of one node or of several."""
    prompts, tree = cases()[case]
    taps = tuple(range(LAYERS + 1))
    plain_cache = filled(target, prompts)
    plain = target.score(tree, plain_cache, taps=taps)
    for begun in {1, tree.num_nodes - 1, tree.num_nodes}:
        cache, route, pieces = filled(target, prompts), Route.first(layer, LAYERS), []
        for start in range(0, begun, step):
            pieces.append(target.exit(prefix(tree, min(start + step, begun)), cache, route=route, start=start))
        resume = Resume(layer, torch.cat(pieces, 1))
        assert resume.num_nodes == begun
        torch.testing.assert_close(resume.hidden, plain.taps[layer][:, :begun], atol=1e-5, rtol=1e-5)
        scores = target.score(tree, cache, taps=taps, resume=resume)
        torch.testing.assert_close(scores.logits, plain.logits, atol=1e-5, rtol=1e-5)
        assert sorted(scores.taps) == list(range(layer, LAYERS + 1))
        for tap, states in scores.taps.items():
            torch.testing.assert_close(states, plain.taps[tap], atol=1e-5, rtol=1e-5)
        assert cache.lengths == plain_cache.lengths
        for row, length in enumerate(cache.lengths):
            used = length + tree.num_nodes
            for mine, other in zip(cache.keys + cache.values, plain_cache.keys + plain_cache.values, strict=True):
                torch.testing.assert_close(mine[row, :, :used], other[row, :, :used], atol=1e-5, rtol=1e-5)


def test_the_whole_route_is_the_target(target) -> None:
    for prompts, tree in cases():
        hidden = target.exit(tree, filled(target, prompts), route=Route.first(LAYERS, LAYERS))
        torch.testing.assert_close(target.logits(hidden), target.score(tree, filled(target, prompts)).logits)


def test_a_skipping_route_leaves_out_what_it_names() -> None:
    """Against the sublayers called by hand; and what it did not write was never read."""
    config = config_of({**_SIZES, **_FAMILIES["llama"]})
    assert config is not None
    target = tiny_decoder(config, seed=3)
    route = Route.without(LAYERS, attention=(1, 2), mlp=(0, 2))
    for prompts, tree in cases():
        cache, expected_cache = filled(target, prompts), filled(target, prompts)
        for block in cache.keys[1:3] + cache.values[1:3]:
            block.fill_(torch.nan)
        hidden = torch.cat(
            [target.exit(prefix(tree, 1), cache, route=route), target.exit(tree, cache, route=route, start=1)], 1
        )
        assert torch.isfinite(hidden).all()
        expected_cache.reserve(tree.num_nodes)
        step, x = target._pass(tree, expected_cache), target.embed(tree.tokens.flatten())
        x = target._layers[0].attend(x, step)
        x = target._layers[1].feed(x)
        x = target._layers[3].feed(target._layers[3].attend(x, step))
        torch.testing.assert_close(hidden.flatten(0, 1), x, atol=1e-5, rtol=1e-5)


def test_scratch_of_an_exit_does_not_outlive_the_next_pass(target) -> None:
    """A drafter that skips hands nothing on; the ordinary pass writes over what it wrote."""
    for prompts, tree in cases():
        cache, fresh = filled(target, prompts), filled(target, prompts)
        target.exit(tree, cache, route=Route.without(LAYERS, attention=(1,), mlp=(2, 3)))
        torch.testing.assert_close(target.score(tree, cache).logits, target.score(tree, fresh).logits)


def test_routes() -> None:
    route = Route.first(2, 5)
    assert route.depth == 2 and route.share == pytest.approx(0.4) and route.num_layers == 5
    skipping = Route.without(4, attention=(1, 2), mlp=(3,))
    assert skipping.attention == (True, False, False, True) and skipping.mlp == (True, True, True, False)
    assert skipping.depth == 4 and skipping.share == pytest.approx(5 / 8)
    assert Route.first(0, 3).depth == 0
    with pytest.raises(OptionError, match="layer 4 cannot be skipped"):
        Route.without(4, mlp=(4,))
    with pytest.raises(OptionError, match="one of each per layer"):
        Route((True,), (True, False))
