"""Our drafters as vLLM's proposers: the calls vLLM makes, played by a loop that checks guesses as vLLM does."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, OptionError, SamplingParams
from outrider.core.tree import TokenTree
from outrider.vllm_plugin import (
    OPTIONS_VARIABLE,
    HybridProposer,
    NgramCacheProposer,
    PromptLookupProposer,
    ReferenceProposer,
    SlotDrafting,
    SuffixProposer,
    TokenRecyclingProposer,
    register,
)

MAX_LEN = 512
NUM_GUESSES = 6


def config(vocab_size: int = 4096) -> Any:
    model = SimpleNamespace(max_model_len=MAX_LEN, get_vocab_size=lambda: vocab_size)
    return SimpleNamespace(model_config=model, speculative_config=SimpleNamespace(num_speculative_tokens=NUM_GUESSES))


class Batch:
    """vLLM's side: slots of tokens, guesses checked against texts that are known, requests that move and leave."""

    def __init__(self, proposer: Any, texts: list[tuple[list[int], list[int]]]) -> None:
        self.proposer = proposer
        self.rows = [(number, list(prompt), list(answer)) for number, (prompt, answer) in enumerate(texts)]
        self.done = {number: 0 for number, _, _ in self.rows}
        self.passes = {number: 0 for number, _, _ in self.rows}
        self.guesses: dict[int, list[int]] = {number: [] for number, _, _ in self.rows}

    def step(self) -> None:
        sampled: list[list[int]] = []
        for number, _, answer in self.rows:
            left = answer[self.done[number] :]
            accepted = next((i for i, (x, y) in enumerate(zip(self.guesses[number], left)) if x != y), None)
            count = min(len(self.guesses[number]), len(left)) if accepted is None else accepted
            sampled.append(left[: count + 1])
            self.done[number] += len(sampled[-1])
            self.passes[number] += 1
        self._propose(sampled)
        self.rows = [row for row in self.rows if self.done[row[0]] < len(row[2])][::-1]  # others take the places

    def _propose(self, sampled: list[list[int]]) -> None:
        table = np.zeros((len(self.rows), MAX_LEN), dtype=np.int32)
        counts = np.zeros(len(self.rows), dtype=np.int32)
        for slot, (number, prompt, answer) in enumerate(self.rows):
            text = [*prompt, *answer[: self.done[number]]]
            table[slot, : len(text)], counts[slot] = text, len(text)
        found = self.proposer.propose(sampled, counts, table, slot_mappings=None)
        for (number, _, _), guesses in zip(self.rows, found, strict=True):
            assert len(guesses) <= NUM_GUESSES
            self.guesses[number] = guesses


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(method="plain")


@pytest.mark.parametrize(("proposer", "method"), [(SuffixProposer, "suffix"), (PromptLookupProposer, "prompt-lookup")])
def test_passes_are_those_of_our_own_engine(llm: LLM, proposer: Any, method: str) -> None:
    prompt = "Tom had a red ball. Tom had a red ball. Tom had a"
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    composed = llm.compose(method, policy="fixed", num_draft_tokens=NUM_GUESSES)
    ours = llm.generate(prompt, params, method=composed)[0]
    batch = Batch(proposer(config()), [(llm.codec.encode(prompt), list(ours.token_ids))])
    while batch.rows:
        batch.step()
    assert abs(batch.passes[0] - ours.stats.num_passes) <= 1, "vLLM's first token comes without guesses"
    assert batch.passes[0] < 48


def test_a_hybrid_learns_which_of_its_parts_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference goes on in another way than the text, which repeats itself."""
    text = [10 + i % 5 for i in range(60)]
    options = {"parts": ["reference", "prompt-lookup"], "references": [[*text[:10], *range(60, 90)]]}
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps(options))
    drafting = SlotDrafting("hybrid", vocab_size=100, num_guesses=NUM_GUESSES, options=options)
    for count in range(10, 30, 2):
        drafting.guesses([text[:count]])
    wrong, right = (rates.chances(1)[0] for rates in drafting._slots[0].state.rates[0])
    assert right > 0.8 and right > wrong
    found = drafting.guesses([text[:30]])[0]
    assert found and found == text[30 : 30 + len(found)]
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps({"parts": ["suffix", "token-recycling"]}))
    with pytest.raises(OptionError, match="'token-recycling' cannot be one"):
        HybridProposer(config())


def test_requests_are_recognised_in_other_slots() -> None:
    """Requests leave, and those that stay change places: each goes on copying from its own text."""
    texts = [([1, 2, 3, 4] * 4, [1, 2, 3, 4] * (3 + i)) for i in range(3)]
    texts += [([50 + i for i in range(6)] * 3, [50 + i for i in range(6)] * 3)]
    batch = Batch(PromptLookupProposer(config(100)), texts)
    while batch.rows:
        batch.step()
    assert all(batch.passes[number] <= len(answer) // 4 + 2 for number, (_, answer) in enumerate(texts))


def test_a_slot_that_is_still_reading_gets_nothing() -> None:
    proposer = SuffixProposer(config(100))
    table = np.tile(np.array([5, 6, 7, 8], dtype=np.int32), (2, 4))
    found = proposer.propose([[], [8]], np.array([16, 16]), table)
    assert found[0] == [] and found[1][:4] == [5, 6, 7, 8]
    full = np.tile(np.array([5, 6, 7, 8], dtype=np.int32), (1, MAX_LEN // 4))
    assert proposer.propose([[8]], np.array([MAX_LEN]), full) == [[]]


def test_options_come_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, '{"references": [[9, 8, 7, 6, 5, 4, 3]]}')
    table = np.array([[1, 9, 8, 7]], dtype=np.int32)
    assert ReferenceProposer(config(20)).propose([[7]], np.array([4]), table)[0][:3] == [6, 5, 4]
    monkeypatch.setenv(OPTIONS_VARIABLE, "[1]")
    with pytest.raises(OptionError, match="not a JSON object"):
        NgramCacheProposer(config(20))


class Shown:
    """vLLM's model, whose logits a proposer may see."""

    def __init__(self) -> None:
        self.rows = torch.zeros(0)

    def compute_logits(self, hidden_states: Any) -> Any:
        del hidden_states
        return self.rows


def scored(llm: LLM, text: list[int], guesses: list[int]) -> torch.Tensor:
    """[1 + guesses, V] what vLLM's pass finds behind a text and its guesses."""
    cache = llm.target.new_cache(1)
    llm.target.prefill([text[:-1]], cache)
    return llm.target.score(TokenTree.chain(torch.tensor([[text[-1], *guesses]])), cache).logits[0]


def test_token_recycling_sees_the_scores_of_vllms_model(llm: LLM) -> None:
    """Its passes are those of our engine with the same options."""
    prompt, params = "Tom had a red ball. Tom had a", SamplingParams(max_tokens=24, ignore_eos=True)
    options = {"num_draft_tokens": NUM_GUESSES, "num_tree_nodes": NUM_GUESSES, "num_successors": 1, "recycle_prompt": False}
    ours = llm.generate(prompt, params, method=llm.compose("token-recycling", policy="fixed", **options))[0]
    proposer, model = TokenRecyclingProposer(config()), Shown()
    proposer.load_model(model)
    ids, answer = llm.codec.encode(prompt), list(ours.token_ids)
    batch = Batch(proposer, [(ids, answer)])
    while batch.rows:
        model.rows = scored(llm, [*ids, *answer[: batch.done[0]]], batch.guesses[0])
        assert model.compute_logits(None) is model.rows
        batch.step()
    assert abs(batch.passes[0] - ours.stats.num_passes) <= 1
    assert batch.passes[0] < 24, "some guesses came true"


def test_scores_that_do_not_fit_the_guesses_are_not_learnt_from() -> None:
    drafting = SlotDrafting("token-recycling", vocab_size=8, num_guesses=3)
    after = torch.eye(8).roll(1, 1)  # token t is followed by t + 1
    assert drafting.guesses([[1, 2], None], after[[1, 5]]) == [[], []]
    assert drafting.guesses([[1, 2, 3]], after[[2, 3]]) == [[]], "a row too many"
    assert drafting.guesses([[1, 2, 3, 1]], after[[3]]) == [[2]]
    assert drafting.guesses([[1, 2, 3, 1, 2, 3]], after[[1, 2]]) == [[4]]


def test_what_cannot_be_a_proposer_is_refused() -> None:
    with pytest.raises(OptionError, match=r"'jacobi' cannot be a proposer of vLLM"):
        SlotDrafting("jacobi", vocab_size=20, num_guesses=3)
    with pytest.raises(OptionError, match="num_successors is 1 for a proposer"):
        SlotDrafting("token-recycling", vocab_size=20, num_guesses=3, options={"num_successors": 4})


def test_the_entry_point_finds_wrong_options_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.setenv(OPTIONS_VARIABLE, "{")
    with pytest.raises(OptionError, match="not a JSON object"):
        register()
