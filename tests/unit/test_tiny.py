"""The toy models say exactly what they were told to say, by every route a law can be asked for."""

from __future__ import annotations

import pytest
import torch

from outrider.core.errors import OptionError
from outrider.core.interfaces import Target
from outrider.core.tree import TokenTree
from outrider.models.tiny import NgramModel, TableModel, tiny_config, tiny_decoder

TREE = ([1, 2, 0, 3, 3], [-1, 0, 0, 1, 2])


def all_laws(model: Target, prompt: list[int]) -> torch.Tensor:
    cache = model.new_cache(1)
    model.prefill([prompt], cache)
    return model.score(TokenTree.of_rows([TREE]), cache).logits[0].exp()


@pytest.mark.parametrize("num_seen", [0, 1, 2])
def test_a_table_gives_its_own_numbers(num_seen: int) -> None:
    model = TableModel.random(4, num_seen=num_seen, seed=5)
    probs = all_laws(model, [3, 2])
    tokens, parents = TREE
    for node in range(5):
        path = [tokens[node]]
        above = parents[node]
        while above >= 0:
            path.insert(0, tokens[above])
            above = parents[above]
        expected = model.law([3, 2, *path])
        torch.testing.assert_close(probs[node], expected, atol=1e-15, rtol=1e-12)
        assert float(expected.sum()) == pytest.approx(1, abs=1e-12)


def test_short_contexts_are_filled_with_token_zero() -> None:
    model = TableModel.random(4, num_seen=2)
    assert torch.equal(model.law([3]), model.law([0, 3]))
    assert torch.equal(model.law([]), model.law([0, 0]))


def test_a_function_sees_the_whole_context() -> None:
    seen: list[list[int]] = []

    def law(context: object) -> list[float]:
        seen.append(list(context))  # type: ignore[call-overload]
        return [0.25, 0.75]

    model = TableModel(law)
    assert model.vocab_size == 2
    seen.clear()
    cache = model.new_cache(2)
    model.prefill([[1, 1], [0]], cache)
    logits = model.score(TokenTree.of_rows([([0, 1], [-1, 0]), ([1], [-1])]), cache).logits
    assert logits.dtype == torch.float64
    assert seen[:3] == [[1, 1, 0], [1, 1, 0, 1], [0, 1]]


def test_the_cache_follows_commits_forks_and_cuts() -> None:
    model = TableModel.random(4)
    cache = model.new_cache(2)
    model.prefill([[1, 2], [3]], cache)
    model.score(TokenTree.of_rows([TREE, ([2], [-1])]), cache)
    cache.commit([[0, 2, 4], [0]])
    assert cache.rows == [[1, 2, 1, 0, 3], [3, 2]]
    joined = cache.fork([1, 1]).join(cache)
    joined.truncate([1, 2, 4, 0])
    assert joined.rows == [[3], [3, 2], [1, 2, 1, 0], []] and joined.lengths == [1, 2, 4, 0]
    assert cache.rows == [[1, 2, 1, 0, 3], [3, 2]], "a fork is a copy"


def test_growing_a_tree_level_by_level() -> None:
    model = TableModel.random(4, num_seen=2)
    cache = model.new_cache(1)
    tree = TokenTree.of_rows([TREE])
    whole = model.score(tree, cache).logits
    assert torch.equal(model.score(tree, cache, start=3).logits, whole[:, 3:])


def test_taps_are_one_hot_tokens() -> None:
    model = TableModel.random(4)
    cache = model.new_cache(1)
    assert model.prefill([[2, 3]], cache, taps=[0])[0][0].argmax(-1).tolist() == [2, 3]
    scores = model.score(TokenTree.of_rows([TREE]), cache, taps=[0])
    assert scores.taps[0].argmax(-1).tolist() == [TREE[0]]
    assert torch.equal(model.logits(scores.taps[0]), scores.logits), "with one token seen, the token is all the context"


def test_ngram_counts() -> None:
    model = NgramModel([0, 1, 0, 1, 0, 2], order=2, vocab_size=3, smoothing=1.0)
    unigram = (torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64) + 1 / 3) / 7
    after_zero = (torch.tensor([0.0, 2.0, 1.0], dtype=torch.float64) + unigram) / 4
    torch.testing.assert_close(model.law([]), unigram, atol=1e-15, rtol=0)
    torch.testing.assert_close(model.law([1, 0]), after_zero, atol=1e-15, rtol=0)
    assert torch.equal(model.law([2]), unigram), "a context never seen says what the order below says"
    torch.testing.assert_close(all_laws(NgramModel([1, 2, 3], order=3, vocab_size=4), [0]).sum(-1), torch.ones(5).double())


def test_ngram_options() -> None:
    with pytest.raises(OptionError, match="order = 0"):
        NgramModel([1], order=0, vocab_size=2)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma", "gemma2", "gemma3_text"])
def test_tiny_decoder_of_every_family(family: str) -> None:
    config = tiny_config(family, query_pre_attn_scalar=8)
    model, same, other = tiny_decoder(config), tiny_decoder(config), tiny_decoder(config, seed=9)
    probs = torch.softmax(
        torch.stack([each.score(TokenTree.of_rows([TREE]), each.new_cache(1)).logits for each in (model, same, other)]), -1
    )
    assert torch.equal(probs[0], probs[1]) and not torch.allclose(probs[0], probs[2], atol=0.01)
    assert probs.isfinite().all() and probs.max() > 0.05, "sharp enough to have an opinion"


def test_noise_makes_a_worse_draft() -> None:
    models = [tiny_decoder(noise=noise) for noise in (0.0, 0.1, 1.0)]
    tree = TokenTree.chain(torch.arange(40)[None])
    target, near, far = (torch.softmax(model.score(tree, model.new_cache(1)).logits, -1) for model in models)
    assert torch.minimum(target, near).sum() > torch.minimum(target, far).sum()


def test_unknown_family() -> None:
    with pytest.raises(OptionError, match="gpt2"):
        tiny_config("gpt2")
