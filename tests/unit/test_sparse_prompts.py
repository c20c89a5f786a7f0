"""Sparse prompts: what is kept, at which positions it is read, and that everything behind the prompt is as exact as ever."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

import pytest
import torch
from tiers import in_turn
from tiny_transformers import shared

from outrider import LLM, OptionError, RequestError, SamplingParams
from outrider.cli.main import main
from outrider.core.request import Request, RequestState
from outrider.core.tree import TokenTree
from outrider.engine.prefill import Prefill
from outrider.models.config import config_of
from outrider.models.decoder import Decoder
from outrider.models.importance import ImportantTokens, PromptShare, attention_received
from outrider.models.sparse_prompts import SparsePrompts
from outrider.models.weights import TensorDict, read_weights

PROMPT = [(7 * i * i + 3 * i) % 47 + 3 for i in range(50)]
SHARE = PromptShare(0.4, chunk_len=4, num_last=5, reach=1)


@cache
def lean(max_len: int = 64) -> Decoder:
    """The tiny Llama of transformers in our decoder."""
    model = shared("llama")
    config = config_of(model.config.to_dict())
    assert config is not None
    weights = read_weights(TensorDict(model.state_dict()), config, dtype=torch.float32, device=torch.device("cpu"))
    return Decoder(replace(config, max_len=max_len), weights)


def sparse_target() -> SparsePrompts:
    return SparsePrompts(lean(), ImportantTokens(lean(), SHARE))


def next_logits(target: Any, prompt: list[int]) -> torch.Tensor:
    """After a prompt, its last token as the root."""
    memory = target.new_cache(1)
    target.prefill([prompt[:-1]], memory)
    return target.score(TokenTree.chain(torch.tensor([prompt[-1:]])), memory).logits[0, 0]


def test_importance_is_the_attention_that_transformers_reports() -> None:
    with torch.no_grad():
        maps = shared("llama")(torch.tensor([PROMPT]), output_attentions=True).attentions
    expected = torch.stack([one[0, :, -5:].mean((0, 1)) for one in maps]).mean(0)
    assert torch.allclose(attention_received(lean(), PROMPT, 5), expected, atol=1e-5)


def test_kept_tokens_are_read_at_their_own_positions() -> None:
    sparse = sparse_target()
    kept = [*sparse.choose_kept(PROMPT[:-1]), len(PROMPT) - 1]
    assert kept != list(range(kept[0], kept[0] + len(kept))), "something inside is left out"
    with torch.no_grad():
        out = shared("llama")(torch.tensor([[PROMPT[p] for p in kept]]), position_ids=torch.tensor([kept]))
        side_by_side = shared("llama")(torch.tensor([[PROMPT[p] for p in kept]])).logits[0, -1]
    logits = next_logits(sparse, PROMPT)
    assert torch.allclose(logits, out.logits[0, -1], atol=1e-3)
    assert not torch.allclose(logits, side_by_side, atol=1e-2), "positions make a difference here"


def test_the_last_chunk_and_the_best_others_are_kept_whole() -> None:
    importance = torch.zeros(20)
    importance[9] = 1.0
    assert PromptShare(0.5, chunk_len=5, reach=0).positions(importance) == [5, 6, 7, 8, 9, 15, 16, 17, 18, 19]
    assert PromptShare(0.75, chunk_len=5, reach=1).positions(importance) == list(range(5, 20)), "a peak lifts its neighbour"
    assert PromptShare(0.01, chunk_len=8).positions(importance) == list(range(12, 20))
    assert PromptShare(1.0, chunk_len=3).positions(importance) == list(range(20))


def test_all_of_a_prompt_is_the_target_itself() -> None:
    whole = SparsePrompts(lean(), ImportantTokens(lean(), PromptShare(1.0)))
    assert torch.equal(next_logits(whole, PROMPT), next_logits(lean(), PROMPT))


def test_rows_are_thinned_alone_and_caches_keep_count() -> None:
    sparse = sparse_target()
    rows = [PROMPT[:40], PROMPT[:3], [], PROMPT[5:45]]
    memory = sparse.new_cache(4)
    states = sparse.prefill(rows, memory, taps=(0, 2))
    assert memory.lengths == [40, 3, 0, 40] and [len(one) for one in states[2]] == [40, 3, 0, 40]
    kept = list(sparse.choose_kept(rows[3]))
    assert torch.equal(states[0][3][kept], lean().embed(torch.tensor([rows[3][p] for p in kept])))
    chosen = memory.fork([3, 1]).join(memory.fork([0]))
    roots = TokenTree.chain(torch.tensor([[7], [8], [9]]))
    found = sparse.score(roots, chosen).logits[:, 0]
    for logits, prompt in zip(found, ([*rows[3], 7], [*rows[1], 8], [*rows[0], 9]), strict=True):
        assert torch.allclose(logits, next_logits(sparse, prompt), atol=1e-4)
    chosen.commit([[0], [0], [0]])
    chosen.truncate([40, 2, 12])
    assert chosen.lengths == [40, 2, 0], "a row cannot be cut inside a thinned prompt, and is forgotten"


def test_a_prompt_is_read_in_one_piece_and_the_text_behind_it_in_full() -> None:
    """A request that comes back with text has the keys that it had when it left."""
    sparse = sparse_target()
    state = RequestState.of(Request(PROMPT[:40], SamplingParams()))
    state.tokens += PROMPT[40:]
    prefill = Prefill(sparse, (), [(0, state)])
    while (read := prefill.advance(4)) is None:
        pass
    memory = sparse.new_cache(1)
    sparse.prefill([PROMPT[:39]], memory)
    sparse.score(TokenTree.chain(torch.tensor([PROMPT[39:49]])), memory)
    memory.commit([range(10)])
    root = TokenTree.chain(torch.tensor([PROMPT[-1:]]))
    assert read.cache.lengths == memory.lengths == [49]
    assert torch.allclose(sparse.score(root, read.cache).logits, sparse.score(root, memory).logits, atol=1e-4)


@cache
def thinned() -> LLM:
    return LLM(keep_prompt=0.3, dtype="float32", device="cpu")


def diary(number: int, end: int) -> str:
    lines = (resources.files("outrider.bench") / "prompts" / "long-context.jsonl").read_text().splitlines()
    return json.loads(lines[number])["messages"][0]["content"][:end]


@pytest.mark.parametrize(("method", "temperature"), in_turn(("draft-model", "suffix", "eagle3"), (0.0, 1.0)))
def test_speculation_is_plain_decoding_on_the_same_sparse_prompt(method: str, temperature: float) -> None:
    llm, prompts = thinned(), [diary(0, 900), "Once upon a time", diary(1, 500)]
    params = SamplingParams(max_tokens=16, temperature=temperature, seed=3, ignore_eos=True)
    plain = [one.token_ids for one in llm.generate(prompts, params, method="plain")]
    assert [one.token_ids for one in llm.generate(prompts, params, method=method)] == plain
    assert [llm.generate(prompt, params, method="plain")[0].token_ids for prompt in prompts] == plain


def test_the_loaded_target_agrees_with_the_plain_decoder() -> None:
    """The native pass, where there is one, reads holes as PyTorch does."""
    llm, slow = thinned(), LLM(keep_prompt=0.3, dtype="float32", device="cpu", fast=False)
    ids = llm.codec.encode(diary(2, 700))
    assert torch.allclose(next_logits(llm.target, ids), next_logits(slow.target, ids), atol=1e-3)


def test_a_share_of_one_is_not_lossy() -> None:
    params, prompt = SamplingParams(max_tokens=12), diary(0, 600)
    whole, usual = LLM(keep_prompt=1.0), LLM()
    assert whole.generate(prompt, params)[0].token_ids == usual.generate(prompt, params)[0].token_ids


@pytest.mark.parametrize("keep", [0, -0.5, 1.5, True])
def test_shares_that_are_none(keep: float) -> None:
    with pytest.raises(OptionError, match="above 0 and up to 1"):
        PromptShare(keep)


def test_a_share_needs_somebody_to_choose(tmp_path: Any) -> None:
    with pytest.raises(OptionError, match="give draft="):
        LLM(tmp_path, keep_prompt=0.5)


def test_self_drafting_is_refused() -> None:
    with pytest.raises(Exception, match="it reads a part of the prompt"):
        thinned().compose("early-exit")


def test_a_prompt_longer_than_the_reader_is_refused() -> None:
    target = SparsePrompts(lean(), ImportantTokens(lean(max_len=16), SHARE))
    with pytest.raises(RequestError, match="reads 16 at most"):
        target.prefill([PROMPT], target.new_cache(1))


def test_models_without_holes_are_refused() -> None:
    target = sparse_target()
    with pytest.raises(OptionError, match="reads whole prompts"):
        SparsePrompts(target, lambda prompt: range(len(prompt)))
    with pytest.raises(OptionError, match="lean decoder to choose"):
        ImportantTokens.of(target, SHARE)


def test_the_command_line_says_that_it_is_lossy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", diary(0, 400), "--keep-prompt", "0.5", "-n", "4"]) == 0
    assert "lossy: about 50% of every prompt is read" in capsys.readouterr().err
