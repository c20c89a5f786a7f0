"""A follower without books of its own: the first rank tells it pages with each pass, and what happens to them in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from divided import checkpoint
from interpreted_ranks import Interpreted
from torch import Tensor
from triton_interpreter import DEVICE

from outrider.core.interfaces import Cache, Target
from outrider.core.rng import Noise
from outrider.core.tree import TokenTree
from outrider.models.load import load_model
from outrider.models.parallel import ParallelTarget

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="tests/gpu has the ranks of a machine with GPUs")
PROMPTS = [[5, 9, 11, 3, 8, 8, 2], [40, 41]]
TREE = TokenTree.of_rows([([2, 6, 5, 3], [-1, 0, 0, 1]), ([7, 8, 9], [-1, 0, 0])])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Target, ParallelTarget]]:
    """One process with PyTorch's decoder, and two with the kernels of GPUs."""
    path = checkpoint(tmp_path_factory.mktemp("led"), intermediate_size=96, num_hidden_layers=1)
    led = ParallelTarget(Interpreted(path, 2, "float32", "cpu", None, fast=True, page_len=4))
    yield load_model(path, dtype="float32", device="cpu", fast=False), led
    led.team.close()


def logits_of(model: Target, cache: Cache) -> Tensor:
    return model.score(TREE, cache).logits.float()


def assert_alike(one: Tensor, other: Tensor) -> None:
    for row, size in enumerate(TREE.sizes):
        torch.testing.assert_close(one[row, :size], other[row, :size], atol=2e-3, rtol=2e-3)


@torch.inference_mode()
def test_passes_commits_and_copies_reach_the_follower(models: tuple[Target, ParallelTarget]) -> None:
    whole, led = models
    assert led.captured_as is not led and led.traits.is_invariant
    caches = [model.new_cache(2) for model in models]
    for model, cache in zip(models, caches, strict=True):
        model.prefill(PROMPTS, cache)
    assert_alike(logits_of(whole, caches[0]), logits_of(led, caches[1]))
    for cache in caches:
        cache.commit([[0, 2], [0, 2]])  # the second child moves next to the root
    assert_alike(logits_of(whole, caches[0]), logits_of(led, caches[1]))
    forks = [cache.fork([0, 0]) for cache in caches]  # written now, so their last page is copied first
    assert_alike(logits_of(whole, forks[0]), logits_of(led, forks[1]))


@torch.inference_mode()
def test_choices_need_no_logits(models: tuple[Target, ParallelTarget]) -> None:
    whole, led = models
    cache, own = led.new_cache(2), whole.new_cache(2)
    led.prefill(PROMPTS, cache)
    whole.prefill(PROMPTS, own)
    scores, expected = led.score(TREE, cache), logits_of(whole, own)
    assert scores.choose is not None
    noise = Noise(torch.tensor([1, 2]), torch.tensor([0, 0]))
    found = scores.choose([0.0, 0.0], noise, None)
    for row, size in enumerate(TREE.sizes):
        assert torch.equal(found[row, :size], expected[row, :size].argmax(-1))


@torch.inference_mode()
def test_ranks_that_cannot_capture_their_sums_keep_their_own_books(tmp_path: Path) -> None:
    """Several ranks on one GPU: the same kernels, in passes that are not captured."""
    path = checkpoint(tmp_path / "apart", intermediate_size=96, num_hidden_layers=1)
    apart = ParallelTarget(Interpreted(path, 2, "float32", "cpu", None, fast=False, page_len=4))
    whole = load_model(path, dtype="float32", device="cpu", fast=False)
    try:
        assert apart.traits.is_invariant and not apart.traits.can_be_captured
        caches = [model.new_cache(2) for model in (whole, apart)]
        for model, cache in zip((whole, apart), caches, strict=True):
            model.prefill(PROMPTS, cache)
            model.score(TREE, cache)
            cache.commit([[0, 2], [0, 2]])
        assert_alike(logits_of(whole, caches[0]), logits_of(apart, caches[1]))
    finally:
        apart.team.close()
