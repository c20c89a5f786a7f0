"""recipes/inflate.py: the inflated model says what the small one says."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from inflate import InflatedShape, inflated_weights

from outrider.bundled import bundled_path
from outrider.core.errors import OptionError
from outrider.core.params import SamplingParams
from outrider.core.request import Request
from outrider.core.tree import TokenTree
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import compose
from outrider.models.decoder import Decoder
from outrider.models.load import load_model

SMALL = InflatedShape(hidden=512, layers=18, heads=16, kv_heads=4, head_dim=128, mlp=896, vocab=4500, context=512)
CPU = torch.device("cpu")
PROMPT = [11, 402, 97, 1033, 250, 18, 77]


@pytest.fixture(scope="module")
def pair() -> tuple[Decoder, Decoder]:
    small = load_model(bundled_path("target"), dtype="float32", device="cpu", fast=False)
    assert isinstance(small, Decoder)
    return small, Decoder(*inflated_weights(bundled_path("target"), SMALL, dtype=torch.float32, device=CPU))


def test_logits_are_those_of_the_small_model(pair: tuple[Decoder, Decoder]) -> None:
    tree = TokenTree.chain(torch.tensor([PROMPT]))
    small, big = (model.score(tree, model.new_cache(1)).logits[0] for model in pair)
    torch.testing.assert_close(big[:, : small.shape[1]], small, atol=2e-3, rtol=1e-4)
    assert (big[:, small.shape[1] :].amax(-1) < small.amin(-1) - 10).all()  # added tokens are out of the question


def test_tokens_are_those_of_the_small_model(pair: tuple[Decoder, Decoder]) -> None:
    texts = []
    for model in pair:
        engine = Engine(model, compose("plain", model))
        requests = [
            Request(PROMPT, SamplingParams(max_tokens=24)),
            Request([3, 9], SamplingParams(max_tokens=24, temperature=0.8, seed=1)),
        ]
        texts.append([p.state.output_ids for p in run(engine, requests, max_batch_size=2) if p.state.is_finished])
    assert texts[0][0] == texts[1][0]  # greedy; the seeded text depends on the size of the vocabulary through nothing else
    assert texts[0][1] == texts[1][1]


def test_hardly_any_weight_is_zero(pair: tuple[Decoder, Decoder]) -> None:
    _, weights = inflated_weights(bundled_path("target"), SMALL, dtype=torch.float32, device=CPU)
    added = weights.layers[-1]
    for matrix in (added.out, added.down, added.gate_up, added.qkv):
        assert (matrix == 0).float().mean() < 0.3
    hidden = torch.zeros(1, SMALL.hidden)
    hidden[:, : pair[0].config.hidden_size + 1] = 1.0
    half = len(added.gate_up) // 2
    assert (hidden @ added.gate_up[half:].T == 0).all()  # "up" is blind to what lives
    assert (hidden @ added.gate_up[:half].T != 0).all()


def test_shapes_that_cannot_hold_the_model_are_refused() -> None:
    bad = InflatedShape(hidden=256, layers=18, heads=16, kv_heads=4, head_dim=128, mlp=896, vocab=4500)
    with pytest.raises(OptionError, match="hidden"):
        inflated_weights(bundled_path("target"), bad, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("shape", [replace(SMALL, family="mistral", window=64), replace(SMALL, family="mixtral", experts=3)])
def test_other_families_say_what_the_small_model_says(pair: tuple[Decoder, Decoder], shape: InflatedShape) -> None:
    config, weights = inflated_weights(bundled_path("target"), shape, dtype=torch.float32, device=CPU)
    assert config.family == shape.family and config.windows[0] == shape.window
    tree, small, big = TokenTree.chain(torch.tensor([PROMPT])), pair[0], Decoder(config, weights)
    expected, found = (model.score(tree, model.new_cache(1)).logits[0] for model in (small, big))
    torch.testing.assert_close(found[:, : expected.shape[1]], expected, atol=2e-3, rtol=1e-4)
    if shape.experts:
        routers = [layer.router for layer in weights.layers]
        assert all(router is not None and router.shape == (3, shape.hidden) for router in routers)


def test_a_family_without_its_experts_is_refused() -> None:
    with pytest.raises(OptionError, match="mixtral"):
        inflated_weights(bundled_path("target"), replace(SMALL, family="mixtral"), dtype=torch.float32, device=CPU)
