"""Keys of the native CPU pass live in pages: the same bits whatever the pages, memory for the sum of the lengths."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch

from outrider.cache.prefixes import PageStore, prefix_tree
from outrider.core.tree import TokenTree
from outrider.models.config import ModelConfig, config_of
from outrider.models.native import NativeDecoder
from outrider.models.random_decoder import tiny_weights

VOCAB = 97


def a_config(**more: object) -> ModelConfig:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192}
    config = config_of({"model_type": "mistral", **sizes, **heads, **more})
    assert config is not None
    return config


def a_model(library, page_len: int = 64, **more: object) -> NativeDecoder:
    config = a_config(**more)
    return NativeDecoder(library, config, tiny_weights(config, seed=3), page_len=page_len)


def texts(*lengths: int) -> list[list[int]]:
    chance = random.Random(5)
    return [[chance.randrange(VOCAB) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("window", [None, 40])
def test_the_length_of_a_page_changes_no_bit(library, window: int | None) -> None:
    prompts, trees = texts(3, 130, 70), [([1, 2, 3, 4, 5], [-1, 0, 0, 1, 2]), ([6, 7], [-1, 0]), ([8, 9, 10], [-1, 0, 0])]
    tree, found = TokenTree.of_rows(trees), []
    for page_len in (1, 16, 64, 256):
        model = a_model(library, page_len, sliding_window=window)
        cache = model.new_cache(3)
        model.prefill(prompts, cache)
        first = model.score(tree, cache).logits
        cache.commit([[0, 2, 4], [0], [0, 2]])  # nodes move, for page_len = 1 from page to page
        cache = cache.fork([2, 0]).join(cache.fork([1]))
        found.append(torch.cat((first.flatten(), model.score(tree, cache).logits.flatten())))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_long_text_beside_short_ones_takes_memory_for_the_sum_of_lengths(library) -> None:
    model = a_model(library)
    prompts = texts(4000, *[50] * 16)
    cache = model.new_cache(len(prompts))
    model.prefill(prompts, cache)
    needed = sum(model.pool.pages_for(length) for length in cache.lengths)
    assert model.pool.num_used == needed == 63 + 16
    assert model.pool.num_pages <= needed + needed // 2  # it grows by half
    del cache
    gc.collect()
    assert model.pool.block.nbytes == 0  # and goes back when nobody has a page


def test_texts_that_begin_alike_share_pages(library) -> None:
    model = a_model(library)
    store, (prompt,), cache = prefix_tree(model.new_cache(1), 1 << 30), texts(200), model.new_cache(1)
    model.prefill([prompt], cache)
    assert isinstance(store, PageStore)
    store.keep(prompt, cache, 0)
    used, twin = model.pool.num_used, store.find(prompt)
    assert twin is not None and model.pool.num_used == used
    chain = TokenTree.chain(torch.tensor([[1, 2]]))
    assert torch.equal(model.score(chain, twin).logits, model.score(chain, cache).logits)
    assert model.pool.num_used == used + 2  # each has a last page of its own, since all three hold one that is not full


def test_several_threads_may_use_one_model(library) -> None:
    """The pool grows, and so moves, while others read and write it."""
    model, prompts = a_model(library, 16), texts(*range(40, 700, 40))
    alone = [_next_logits(a_model(library, 16), prompt) for prompt in prompts]
    found: list[torch.Tensor | None] = [None] * len(prompts)

    def work(index: int) -> None:
        found[index] = _next_logits(model, prompts[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for logits, other in zip(alone, found, strict=True):
        assert other is not None and torch.equal(logits, other)


def _next_logits(model: NativeDecoder, prompt: list[int]) -> torch.Tensor:
    cache = model.new_cache(1)
    for begin in range(0, len(prompt) - 1, 64):
        model.prefill([prompt[begin : min(begin + 64, len(prompt) - 1)]], cache)
    return model.score(TokenTree.chain(torch.tensor([prompt[-1:]])), cache).logits
