"""Drafting beside verifying: late or dropped guesses change no text, and the simulator counts passes as a run does."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from tiny_pair import VOCAB, tiny_model

from outrider.bench.simulate import Cluster, ModelShape, Scenario, Wire, expected_seconds, hardware_named
from outrider.bench.simulate_pearl import PearlScenario, beside_seconds, parallel_tokens_per_pass, pearl_seconds
from outrider.cli.main import main
from outrider.core.interfaces import Cache
from outrider.core.params import SamplingParams
from outrider.core.request import Request
from outrider.core.side_thread import check_may_capture
from outrider.core.tree import TokenTree
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import compose
from outrider.models.decoder import Decoder

PROMPTS = [[3, 1, 4], [15, 9, 2, 6, 5], [35], [8, 9, 7, 9, 3, 2]]


def texts(target: Decoder, method: str, draft: Decoder | None, **params: float) -> tuple[list[list[int]], float]:
    """Rows that end after different numbers of tokens, and tokens per pass of all."""
    composed = compose(method, target, draft=draft, policy="fixed", options={} if draft is None else {"num_draft_tokens": 3})
    many = [Request(prompt, SamplingParams(max_tokens=9 + 5 * i, **params)) for i, prompt in enumerate(PROMPTS)]
    states = {step.request: step.state for step in run(Engine(target, composed), many, max_batch_size=3)}
    ordered = [states[i] for i in range(len(many))]
    stats = [state.stats for state in ordered]
    return [state.output_ids for state in ordered], sum(s.num_tokens for s in stats) / sum(s.num_passes for s in stats)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 0.9, "top_p": 0.9, "seed": 2}])
@pytest.mark.parametrize("noise", [0.0, 0.2, 3.0])
def test_the_text_is_plain_decodings(params: dict[str, float], noise: float) -> None:
    target = tiny_model()
    ours, _ = texts(target, "pearl", tiny_model(noise), **params)
    plain, _ = texts(target, "plain", None, **params)
    assert ours == plain
    assert all(0 <= token < VOCAB for text in ours for token in text)


def test_a_pass_that_must_be_captured_is_left_to_the_thread_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the first pass of every shape may not run in the thread beside."""
    target, draft = tiny_model(), tiny_model(0.2)
    score, threads = Decoder.score, dict[tuple[int, ...], set[str]]()

    def captured(model: Decoder, tree: TokenTree, cache: Cache, **options: Any) -> Any:
        shape = tuple(tree.tokens.shape)
        if model is draft and shape not in threads:
            check_may_capture()
        if model is draft:
            threads.setdefault(shape, set()).add(threading.current_thread().name.split("_")[0])
        return score(model, tree, cache, **options)

    monkeypatch.setattr(Decoder, "score", captured)
    ours, _ = texts(target, "pearl", draft)
    assert ours == texts(target, "plain", None)[0]
    assert {"MainThread", "outrider-draft"} <= set.union(*threads.values())


def test_a_perfect_draft_is_never_waited_for() -> None:
    """The target itself as its draft: every pass but a text's first checks a whole chain."""
    target = tiny_model()
    _, tokens = texts(target, "pearl", target)
    assert tokens > 2.5


def test_the_drafts_cache_is_what_was_read(draft_noise: float = 0.2) -> None:
    """Ahead of the text, and after a wrong turn back to it: the same keys as those of a fresh prefill."""
    target, draft = tiny_model(), tiny_model(draft_noise)
    engine = Engine(target, compose("pearl", target, draft=draft, policy="fixed", options={"num_draft_tokens": 3}))
    batch = engine.start([Request(prompt, SamplingParams(max_tokens=40)) for prompt in PROMPTS[:2]])
    for _ in range(12):
        engine.step(batch)
        ahead, cache, fresh = batch.drafter_state.ahead, batch.drafter_state.inner.cache, draft.new_cache(2)
        fed = [[*text, *row[1:]] for text, row in zip(ahead.texts, ahead.draft.tree.tokens.tolist(), strict=True)]
        assert cache.lengths == [len(row) - 1 for row in fed], "the last guess is not fed"
        draft.prefill([row[:-1] for row in fed], fresh)
        for row, length in enumerate(fresh.lengths):
            for layer in range(draft.num_layers):
                torch.testing.assert_close(cache.keys[layer][row, :, :length], fresh.keys[layer][row, :, :length])


def walked(by_depth: list[float], length: int, num_tokens: int, chance: random.Random) -> float:
    """Tokens per pass of one long text, played out."""
    rate = [*by_depth, *[by_depth[-1]] * (length + 2)]
    tokens, passes, has_chain = 0, 0, False
    while tokens < num_tokens:
        passes += 1
        accepted = 0
        while has_chain and accepted < length and chance.random() < rate[1 + accepted]:
            accepted += 1
        tokens += accepted + 1
        whole = accepted == (length if has_chain else 0)
        has_chain = whole and chance.random() < rate[length + 1 if has_chain else 0]
    return tokens / passes


@pytest.mark.parametrize("by_depth", [[0.9], [0.8, 0.7, 0.6], [0.3]])
def test_the_simulator_counts_passes_as_a_walk_does(by_depth: list[float]) -> None:
    found = walked(by_depth, 4, 60_000, random.Random(1))
    assert abs(parallel_tokens_per_pass(by_depth, 4, num_tokens=4000) / found - 1) < 0.03


def test_the_ends_of_the_scale() -> None:
    assert parallel_tokens_per_pass([0.0], 4) == pytest.approx(1.0)
    assert parallel_tokens_per_pass([1.0], 4, num_tokens=5000) == pytest.approx(5.0, rel=0.01)


def scenario(*, draft: float, link: Wire | None = None) -> Scenario:
    cluster = Cluster(hardware_named("h100"), 2, link)
    return Scenario(ModelShape(70e9, 80, 3e5), ModelShape(draft, 32), cluster)


def test_a_row_that_drafts_beside_is_never_slower_than_in_turns() -> None:
    """A pass costs 1 and a guess a tenth. With a quick draft a pass that checks nothing, as in pearl, costs more."""
    at = {"score": lambda _: 1.0, "draft": lambda k: 0.1 * k}
    for rate in (0.9, 0.6, 0.2):
        assert beside_seconds(2000, 4, [rate], **at) <= 1.001 * expected_seconds(2000, 4, [rate], lambda k: 1.0 + 0.1 * k)
    quick = {"score": lambda _: 1.0, "draft": lambda k: 0.01 * k}
    assert beside_seconds(2000, 4, [0.9], **quick) < pearl_seconds(2000, 4, [0.9], **quick)


def test_working_at_once_gains_where_drafting_takes_long() -> None:
    for params, least in ((8e9, 1.15), (1e7, 0.0)):
        turns = scenario(draft=params)
        pearl = PearlScenario(turns)
        gain = pearl.speed(4, [0.9]) / turns.speed(4, [0.9])
        assert gain > least
    assert gain < 1.0, "a draft that costs nothing has nothing to hide"


def test_a_slow_link_slows_a_divided_model() -> None:
    fast, slow = (scenario(draft=1e9, link=Wire(latency, 1e11)) for latency in (5e-6, 5e-5))
    assert fast.speed(4, [0.8]) > slow.speed(4, [0.8])
    assert scenario(draft=1e9, link=Wire(5e-6, 1e8)).speed(4, [0.8]) < fast.speed(4, [0.8])


def test_the_command_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate --devices 2 --link-latency 10 --draft-params 1e9 --draft-layers 16 --pearl --batch-sizes 1".split()
    assert main(words) == 0
    said = capsys.readouterr().out
    assert '"pearl_against_turns"' in said and '"beside_against_turns"' in said
    assert main([*words, "--link-bandwidth", "0"]) == 2
