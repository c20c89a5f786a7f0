"""A draft whose layers run at once: fuzzy guesses change no text, what was accepted is read exactly, and an end has a name."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
import torch
from divided import VOCAB, checkpoint
from tiny_pair import tiny_model

from outrider import LLM, OptionError, SamplingParams
from outrider.bench.simulate import Cluster, ModelShape, Scenario, Wire, hardware_named
from outrider.bench.simulate_easyspec import EasySpecScenario
from outrider.cli.main import main
from outrider.core.errors import RankError
from outrider.core.request import Request
from outrider.core.tree import TokenTree
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import compose
from outrider.models.decoder import Decoder
from outrider.models.fuzzy import FuzzyDraft
from outrider.models.load import load_model
from outrider.models.parallel import ParallelTarget, load_layers_apart
from outrider.models.rank_sums import Alone

PROMPTS = [[5, 9, 11, 3], [40, 41], [66, 1, 2, 3, 4, 5]]
SHORT = [[3, 1, 4], [15, 9, 2, 6, 5], [35], [8, 9, 7, 9, 3, 2]]
SAMPLERS = [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.9, "top_p": 0.9, "seed": 2}]
METHODS = {
    "draft-model": {"num_draft_tokens": 3},
    "pearl": {"num_draft_tokens": 3},
    "best-first": {"num_tree_nodes": 6},
    "sequoia": {"num_tree_nodes": 6},
}


def fuzzy(decoder: Decoder, size: int) -> FuzzyDraft:
    """All layers in this process, ``size`` of them at once."""
    held = {layer: layer for layer in range(decoder.num_layers)}
    return FuzzyDraft(decoder, Alone(), num_layers=decoder.num_layers, size=size, held=held)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Five layers: the last group is not full."""
    home = tmp_path_factory.mktemp("easyspec")
    return checkpoint(home / "target", num_hidden_layers=5), checkpoint(home / "draft", noise=0.05, num_hidden_layers=5)


@pytest.fixture(scope="module")
def pair(names: tuple[str, str]) -> tuple[LLM, LLM]:
    here, spread = (LLM(names[0], draft=names[1], dtype="float32", device="cpu", draft_parallel=n) for n in (1, 2))
    return here, spread


def methods_and_samplers() -> list[Any]:
    """Every method with every sampler; ``make test`` takes one sampler a method, in turn."""
    return [
        pytest.param(method, params, marks=() if (place + turn) % 3 == 0 else pytest.mark.exhaustive)
        for place, method in enumerate(METHODS)
        for turn, params in enumerate(SAMPLERS)
    ]


@pytest.mark.parametrize(("method", "params"), methods_and_samplers())
def test_the_text_is_plain_decodings(pair: tuple[LLM, LLM], method: str, params: dict[str, float]) -> None:
    here, spread = pair
    sampling = [SamplingParams(max_tokens=8 + 5 * i, ignore_eos=True, **params) for i in range(len(PROMPTS))]
    found = spread.generate(PROMPTS, sampling, method=spread.compose(method, policy="fixed", **METHODS[method]))
    plain = here.generate(PROMPTS, sampling, method="plain")
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]


@pytest.mark.parametrize("acceptance", ["coupled", "block"])
def test_rows_come_and_go(acceptance: str) -> None:
    """Rows of different lengths, one more than there are places, in this process."""
    target = tiny_model()
    texts = []
    for method, draft in (("draft-model", fuzzy(tiny_model(0.2), 2)), ("plain", None)):
        options = {} if draft is None else {"num_draft_tokens": 3}
        rule = acceptance if draft is not None else None
        composed = compose(method, target, draft=draft, acceptance=rule, policy="fixed", options=options)
        many = [Request(prompt, SamplingParams(max_tokens=9 + 5 * i)) for i, prompt in enumerate(SHORT)]
        states = {step.request: step.state for step in run(Engine(target, composed), many, max_batch_size=3)}
        texts.append([states[i].output_ids for i in range(len(many))])
    assert texts[0] == texts[1]


def test_ranks_compute_what_one_process_does(names: tuple[str, str]) -> None:
    """An exact pass is the model's own; a fuzzy one is the same on two ranks as on one, and not the model's."""
    whole = load_model(names[1], dtype="float32", device="cpu", fast=False)
    assert isinstance(whole, Decoder)
    spread = load_layers_apart(names[1], 2, dtype="float32", device="cpu")
    tree = TokenTree.chain(torch.tensor([[7, 8, 9], [9, 10, 11]]))
    found = []
    for model in (fuzzy(whole, 2), spread):
        cache = model.new_cache(2)
        model.prefill([[1, 2, 3], [4, 5]], cache)
        exact = model.score(tree, cache).logits
        cache.commit([[0], [0, 1]])
        found.append((exact, model.score(tree, cache).logits))
    own = whole.new_cache(2)
    whole.prefill([[1, 2, 3], [4, 5]], own)
    exactly = whole.score(tree, own).logits
    own.commit([[0], [0, 1]])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(here, there, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[0][0], exactly, atol=1e-4, rtol=1e-4)
    assert (found[0][1] - whole.score(tree, own).logits).abs().max() > 0.1


def test_what_was_accepted_is_read_exactly() -> None:
    """After every round's first pass the cache is that of a fresh prefill: errors of fuzzy passes do not add up."""
    target, draft = tiny_model(), tiny_model(0.2)
    model = fuzzy(draft, 2)
    engine = Engine(target, compose("draft-model", target, draft=model, policy="fixed", options={"num_draft_tokens": 3}))
    batch = engine.start([Request(prompt, SamplingParams(max_tokens=40)) for prompt in SHORT[:2]])
    was_fuzzy = False
    for _ in range(8):
        engine.step(batch)
        cache, fresh = batch.drafter_state.cache, draft.new_cache(2)
        was_fuzzy |= cache.num_exact != cache.lengths
        cache.settle()
        draft.prefill([state.tokens[:length] for state, length in zip(batch.rows, cache.lengths)], fresh)
        for row, length in enumerate(fresh.lengths):
            for layer in range(draft.num_layers):
                ours, theirs = cache.inner.keys[layer][row, :, :length], fresh.keys[layer][row, :, :length]
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert was_fuzzy, "a guess that was accepted had been read by a fuzzy pass"


def test_a_rank_holds_its_layers(pair: tuple[LLM, LLM]) -> None:
    draft = pair[1].drafts[0]
    assert isinstance(draft, ParallelTarget) and draft.team.size == 2
    assert draft.num_layers == 5 and draft.vocab_size == VOCAB
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 97  # the matrices of one layer
    assert 3 * layer < draft.num_weights < 3.5 * layer, "layers 0, 2 and 4 of 5, and half of the vocabulary"


def test_bad_numbers_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(OptionError, match=r"the draft has 5; use at most 5"):
        load_layers_apart(names[1], 6, dtype="float32", device="cpu")
    with pytest.raises(OptionError, match="use 2 or more"):
        LLM(names[0], draft=names[1], draft_parallel=0, device="cpu")
    with pytest.raises(OptionError, match="leave one of them out"):
        LLM(names[0], draft=names[1], draft_parallel=2, draft_process=True, device="cpu")


def test_a_rank_that_dies_is_named(pair: tuple[LLM, LLM]) -> None:
    """Last: the pair is broken after this."""
    llm = pair[1]
    draft = llm.drafts[0]
    assert isinstance(draft, ParallelTarget)
    os.kill(draft.team.followers[0].process.pid, signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 1 of 2 .* ended by SIGKILL"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=8), method=llm.compose("draft-model", num_draft_tokens=3))


def scenario(*, latency: float = 5e-6) -> Scenario:
    return Scenario(ModelShape(70e9, 80, 3e5), ModelShape(8e9, 32), Cluster(hardware_named("h100"), 4, Wire(latency, 1e11)))


def test_fuzzy_passes_gain_what_their_groups_save() -> None:
    """Between a draft on one device and one divided by heads there are messages: fewer with layers at once."""
    turns = scenario()
    easyspec = EasySpecScenario(turns, 4)
    alone, divided = (
        place.pass_seconds(turns.draft or ModelShape(0, 1), 1, batch_size=1, context=1024)
        for place in (Cluster(hardware_named("h100")), Cluster(hardware_named("h100"), 4, Wire(5e-6, 1e11)))
    )
    assert alone / 4 < easyspec.fuzzy_seconds() < divided < alone < easyspec.exact_seconds()
    assert easyspec.speed(4, [0.8]) > turns.speed(4, [0.8])
    assert easyspec.cost(0) == turns.cost(0), "without guesses nothing is drafted"
    assert easyspec.cost(1) > turns.cost(1), "one guess is an exact pass, with its messages"
    slow = scenario(latency=2e-3)
    assert EasySpecScenario(slow, 4).speed(4, [0.8]) < slow.speed(4, [0.8]), "a slow link eats the gain"


def test_the_command_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate --devices 4 --draft-params 8e9 --draft-layers 32 --params 70e9 --layers 80 --batch-sizes 1".split()
    assert main([*words, "--easyspec", "4"]) == 0
    same = capsys.readouterr().out
    assert main([*words, "--easyspec", "4", "--easyspec-acceptance", "0.1"]) == 0
    worse = capsys.readouterr().out
    speeds = [json.loads(said.strip().splitlines()[-1])["rows"][0]["easyspec_speed"] for said in (same, worse)]
    assert speeds[0] > speeds[1]
    assert main([*words, "--easyspec", "1"]) == 2
