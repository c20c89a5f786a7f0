"""Targets and drafts with recurrent layers: the text of plain decoding, whatever the method, the seed and the batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import in_turn
from toy_codecs import toy_translation

from outrider.core.errors import CompositionError
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.drafters.copying.datastore_build import build_datastore
from outrider.engine.beam import BeamOptions, BeamResult, beam_search
from outrider.engine.beam_forest import ModelForest
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import METHODS, compose
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.folder import new_config, new_head, save_head
from outrider.models.recurrent.decoder import RecurrentDecoder
from outrider.models.recurrent.embedding_and_output import llama_keys
from outrider.models.recurrent.random_model import random_recurrent, tiny_raw

VOCAB = 64
PROMPTS = [[random.Random(i).randrange(3, VOCAB) for _ in range(1 + 5 * i % 17)] for i in range(4)]
PROMPTS[3] = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]  # something to copy
GREEDY = SamplingParams(max_tokens=10)
SEEDED = SamplingParams(max_tokens=10, temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=7)
COPYING = ("prompt-lookup", "suffix", "ngram-cache", "token-recycling", "jacobi", "lookahead")
DRAFTING = ("draft-model", "draft-tree", "best-first", "sequoia", "rsd-s", "spectr", "cascade", "hybrid", "rasd")
APART = ("early-exit", "draft-verify", "swift", "del", "specee")


def model(family: str, noise: float = 0.0) -> Target:
    return random_recurrent(tiny_raw(family), noise=noise, dtype=torch.float64)


FAMILIES = ("mamba2", "bamba", "falcon_h1", "qwen3_next")


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Target:
    return model(request.param)


@pytest.fixture(scope="module")
def expected(target: Target) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy and seeded."""
    greedy, seeded = (texts(target, compose("plain", target), params) for params in (GREEDY, SEEDED))
    return greedy, seeded


def serve(target: Target, method: Method, params: SamplingParams, batch: int) -> list[RequestState]:
    done: dict[int, RequestState] = {}
    requests = [Request(prompt, params, frozenset({2})) for prompt in PROMPTS]
    for step in run(Engine(target, method), requests, max_batch_size=batch):
        if step.state.is_finished:
            done[step.request] = step.state
    return [done[i] for i in range(len(PROMPTS))]


def texts(target: Target, method: Method, params: SamplingParams, batch: int = 1) -> list[list[int]]:
    return [state.output_ids for state in serve(target, method, params, batch)]


@pytest.mark.parametrize(("name", "target"), in_turn(COPYING, FAMILIES), indirect=["target"])
def test_methods_without_a_model_give_plain_texts(target: Target, expected, name: str) -> None:
    method = compose(name, target, policy="fixed")
    assert texts(target, method, GREEDY, 2) == expected[0]
    assert texts(target, method, SEEDED, 3) == expected[1]


@pytest.mark.parametrize(("name", "target"), in_turn(("rest", "reference", "hybrid"), FAMILIES[::-1]), indirect=["target"])
def test_methods_that_copy_from_elsewhere_give_plain_texts(target: Target, expected, name: str, tmp_path: Path) -> None:
    """From a datastore, from references, and from several sources in one tree."""
    documents = [prompt + text for prompt, text in zip(PROMPTS, expected[0], strict=True)]
    given: dict[str, dict[str, Any]] = {
        "rest": {"datastore": str(tmp_path / "store")},
        "reference": {"references": documents},
        "hybrid": {"parts": "suffix,token-recycling"},
    }
    build_datastore(documents, tmp_path / "store", vocab_size=VOCAB)
    for params, plain in zip((GREEDY, SEEDED), expected, strict=True):
        states = serve(target, compose(name, target, policy="fixed", options=given[name]), params, 3)
        assert [state.output_ids for state in states] == plain
        assert params is SEEDED or name == "hybrid" or max(state.stats.tokens_per_pass for state in states) > 2


@pytest.fixture(scope="module")
def mamba() -> tuple[Target, list[Target], list[list[int]], list[list[int]]]:
    """A target, its drafts, and its plain texts."""
    target = model("mamba2")
    plain = compose("plain", target)
    drafts = [model("mamba2", noise) for noise in (0.15, 0.3)]
    return target, drafts, texts(target, plain, GREEDY, 4), texts(target, plain, SEEDED, 4)


@pytest.mark.parametrize("name", DRAFTING)
def test_a_recurrent_draft_gives_plain_texts(mamba, name: str) -> None:
    target, drafts, greedy, seeded = mamba
    acceptance = None if METHODS[name].acceptance == "coupled" else "recursive"
    method = compose(name, target, draft=drafts, policy="fixed", acceptance=acceptance)
    assert texts(target, method, GREEDY, 3) == greedy
    if METHODS[name].acceptance == "coupled":
        assert texts(target, method, SEEDED, 4) == seeded


def test_a_hybrid_may_draft_for_another_family(target: Target, expected) -> None:
    method = compose("best-first", target, draft=model("bamba", 0.2), policy="fixed")
    assert texts(target, method, SEEDED, 4) == expected[1]


def test_a_good_draft_is_accepted(target: Target) -> None:
    """A model that drafts for itself is always right: a state that lost a token would show."""
    for name in ("draft-model", "best-first"):
        method = compose(name, target, draft=target, policy="fixed")
        for params in (GREEDY, SEEDED):
            states = serve(target, method, params, 4)
            assert all(state.stats.acceptance == 1.0 for state in states) or name == "best-first"
            assert max(state.stats.tokens_per_pass for state in states) > 3


def test_a_draft_with_another_tokenizer(expected, target: Target) -> None:
    method = compose("tli", target, draft=model("mamba2", 0.1), translation=toy_translation(VOCAB), policy="fixed")
    assert texts(target, method, GREEDY, 3) == expected[0]


def test_long_texts_pass_many_replays(target: Target) -> None:
    long = SamplingParams(max_tokens=80, ignore_eos=True, temperature=1.0, seed=3)
    method = compose("draft-model", target, draft=target, policy="fixed", options={"num_draft_tokens": 7})
    assert texts(target, method, long, 4) == texts(target, compose("plain", target), long, 3)


def test_a_rule_that_keeps_the_law_walks_recurrent_trees(target: Target, expected) -> None:
    method = compose("draft-tree", target, draft=model("mamba2", 0.1), policy="fixed", acceptance="traversal")
    assert texts(target, method, GREEDY, 3) == expected[0]


@pytest.mark.parametrize("name", APART)
def test_methods_that_run_layers_apart_are_refused(target: Target, name: str) -> None:
    with pytest.raises(CompositionError, match="recurrent state"):
        compose(name, target)


@pytest.mark.parametrize(("kind", "target"), in_turn(("medusa", "eagle1", "eagle3"), FAMILIES[1:]), indirect=["target"])
def test_heads_read_the_states_of_recurrent_targets(target: Target, expected, kind: str, tmp_path: Path) -> None:
    assert isinstance(target, RecurrentDecoder)
    config = new_config(kind, llama_keys(target.config, {}), **({"num_heads": 3} if kind == "medusa" else {}))
    ends = EmbeddingAndOutput(torch.randn(VOCAB, 32), torch.ones(32), torch.randn(VOCAB, 32) / 6, tied=False)
    save_head(new_head(config, ends), tmp_path, dtype=torch.float32)
    method = compose(kind, target, policy="fixed", options={"heads": str(tmp_path)})
    assert texts(target, method, GREEDY, 3) == expected[0]
    assert texts(target, method, SEEDED, 4) == expected[1]


def test_beams(target: Target) -> None:
    options = BeamOptions(num_beams=3, max_tokens=8)
    ahead = ModelForest(model("mamba2", 0.1), width=4, depth=3)
    found = beam_search(target, PROMPTS[3], options=options, end_ids=frozenset({2}), forest=ahead)
    plain = beam_search(target, PROMPTS[3], options=options, end_ids=frozenset({2}))
    assert _tokens(found) == _tokens(plain)


def _tokens(beams: BeamResult) -> list[list[int]]:
    return [list(beam.token_ids) for beam in beams.hypotheses]
