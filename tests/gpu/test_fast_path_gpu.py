"""Captured rounds and passes on a CUDA device: the same text as the engine, one graph launch a round, invariant scores.

make gpu-test        (or: PYTHONPATH=src python -m pytest tests/gpu)
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from invariance import (
    PROMPTS,
    assert_nodes_score_as_their_paths,
    assert_scores_do_not_depend_on_the_pass,
    assert_text_does_not_depend_on_how_prompts_are_cut,
)

from outrider import LLM, SamplingParams
from outrider.core.tree import TokenTree
from outrider.cuda_graphs import captured

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cuda", numerics="invariant")


METHODS = [
    ("plain", {}),
    ("draft-model", {"num_draft_tokens": 3}),
    ("prompt-lookup", {"num_draft_tokens": 6}),
    ("suffix", {"num_draft_tokens": 6}),
    ("ngram-cache", {"num_draft_tokens": 3}),
    ("early-exit", {"num_draft_tokens": 3}),
    ("kangaroo", {"num_draft_tokens": 4, "threshold": 0.3}),
]
PARAMS = [SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=0.8, seed=7)]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize(("name", "options"), METHODS, ids=[name for name, _ in METHODS])
def test_captured_rounds_say_what_plain_decoding_says(
    llm: LLM, name: str, options: dict[str, int], params: SamplingParams
) -> None:
    """Bit for bit, alone and in a batch: numerics are invariant. ``trace`` asks for the engine, whose rounds can be watched."""
    plain = llm.compose("plain")
    expected = [llm.generate(p, params, method=plain, trace=True)[0].token_ids for p in PROMPTS]
    method = llm.compose(name, **options)
    assert [llm.generate(p, params, method=method)[0].token_ids for p in PROMPTS] == expected
    assert [o.token_ids for o in llm.generate(PROMPTS, params, method=method)] == expected
    assert [o.token_ids for o in llm.generate(PROMPTS, params, method=method, trace=True)] == expected


def test_requests_wait_for_slots_and_end_where_they_should(llm: LLM) -> None:
    """More requests than slots, of different lengths: everyone gets its own text, and no token more."""
    llm.max_batch_size, old = 2, llm.max_batch_size
    try:
        params = [SamplingParams(max_tokens=n) for n in (5, 40, 1, 23)]
        expected = [
            llm.generate(p, q, method=llm.compose("plain"), trace=True)[0].token_ids
            for p, q in zip(PROMPTS, params, strict=True)
        ]
        for name, options in METHODS:
            got = llm.generate(PROMPTS, params, method=llm.compose(name, **options))
            assert [o.token_ids for o in got] == expected
            assert all(o.stats.num_tokens == len(o.token_ids) for o in got)
    finally:
        llm.max_batch_size = old


def test_stop_strings_and_end_of_sequence_are_seen_one_round_late_without_effect(llm: LLM) -> None:
    params = SamplingParams(max_tokens=200, stop=("she", "He"))
    for prompt in PROMPTS:
        expected = llm.generate(prompt, params, method=llm.compose("plain"), trace=True)[0]
        got = llm.generate(prompt, params, method=llm.compose("draft-model", num_draft_tokens=5))[0]
        assert (got.text, got.token_ids, got.finish_reason) == (expected.text, expected.token_ids, expected.finish_reason)


def test_a_stream_left_half_read_disturbs_nobody(llm: LLM) -> None:
    params, method = SamplingParams(max_tokens=40), llm.compose("draft-model", num_draft_tokens=3)
    expected = [llm.generate(prompt, params, method=method)[0].token_ids for prompt in PROMPTS]
    stream = llm.stream(PROMPTS[0], params, method=method)
    first = next(stream).token_ids
    assert [o.token_ids for o in llm.generate(PROMPTS, params, method=method)] == expected
    rest = [token for chunk in stream for token in chunk.token_ids]
    assert [*first, *rest] == expected[0]
    assert llm.generate(PROMPTS[1], params, method=method)[0].token_ids == expected[1]


def test_the_adaptive_policy_runs_captured(llm: LLM) -> None:
    params = SamplingParams(max_tokens=100)
    expected = [o.token_ids for o in llm.generate(PROMPTS, params, method=llm.compose("plain"))]
    for name in ("draft-model", "prompt-lookup", "suffix"):
        method = llm.compose(name, policy="adaptive", num_draft_tokens=6)
        for _ in range(2):
            assert [o.token_ids for o in llm.generate(PROMPTS, params, method=method)] == expected


def test_every_method_runs_on_captured_passes(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30)
    expected = [o.token_ids for o in llm.generate(PROMPTS, params, method=llm.compose("plain"))]
    for name in ("jacobi", "token-recycling", "early-exit", "medusa"):
        assert [o.token_ids for o in llm.generate(PROMPTS, params, method=llm.compose(name))] == expected, name


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_rules_on_the_host_say_what_the_engine_says(llm: LLM, acceptance: str) -> None:
    """Traced rounds are the engine's."""
    method = llm.compose("draft-model", acceptance=acceptance, policy="fixed", num_draft_tokens=3)
    graphs = llm.rounds.graphs_of(method)
    assert graphs is not None and graphs.beside is not None and graphs.beside.rule is method.rule
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=7)
    requests = llm.requests(PROMPTS, params)
    found = list[list[list[int]]]()
    for traced in (False, True):
        said: dict[int, list[int]] = {}
        for step in llm.rounds.run(method, requests, traced=traced):
            said.setdefault(step.request, []).extend(step.new_tokens)
        found.append([said[number] for number in range(len(requests))])
    assert found[0] == found[1]


TREE = {"branching": (3, 2, 1), "num_draft_tokens": 3, "num_tree_nodes": 15}
SEARCH = {"num_draft_tokens": 5, "num_tree_nodes": 31}
COPIED = {"tree": True, "num_draft_tokens": 5, "num_tree_nodes": 12, "offset": 2.0}
TREES = [("draft-tree", TREE), ("best-first", SEARCH), ("eagle3", SEARCH), ("eagle1", TREE), ("suffix", COPIED)]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize(("name", "options"), TREES, ids=[name for name, _ in TREES])
def test_trees_in_captured_rounds_say_what_plain_decoding_says(
    llm: LLM, name: str, options: dict[str, Any], params: SamplingParams
) -> None:
    """Bit for bit: a node's keys are added up in the order its text will have them."""
    expected = [llm.generate(p, params, method=llm.compose("plain"))[0].token_ids for p in PROMPTS]
    method = llm.compose(name, **options)
    assert captured(method, llm.target) is not None
    assert [llm.generate(p, params, method=method)[0].token_ids for p in PROMPTS] == expected
    batch = llm.generate(PROMPTS, params, method=method)
    assert [o.token_ids for o in batch] == expected
    engine = llm.generate(PROMPTS, params, method=method, trace=True)
    assert [o.token_ids for o in engine] == expected
    ours, theirs = (sum(o.stats.num_accepted for o in outputs) for outputs in (batch, engine))
    assert abs(ours - theirs) <= 0.05 * theirs  # the same trees, walked the same way


@pytest.mark.parametrize(("name", "options"), [*METHODS, *TREES], ids=[name for name, _ in [*METHODS, *TREES]])
def test_text_does_not_depend_on_how_a_prompt_was_cut(llm: LLM, name: str, options: dict[str, Any]) -> None:
    assert_text_does_not_depend_on_how_prompts_are_cut(llm, name, options)


@pytest.mark.parametrize("length", [60, 250, 300])
def test_a_node_of_a_tree_scores_as_plain_decoding_of_its_path(llm: LLM, length: int) -> None:
    """Bit for bit, where the tree begins in the middle of a tile, crosses a tile, crosses a piece."""
    assert_nodes_score_as_their_paths(llm.target, length, num_nodes=20, every=3)


ONE_LAUNCH = [("draft-model", {"num_draft_tokens": 3}), ("draft-tree", TREE), ("best-first", SEARCH), ("eagle3", SEARCH)]


@pytest.mark.parametrize(("name", "options"), ONE_LAUNCH, ids=[name for name, _ in ONE_LAUNCH])
def test_a_round_is_one_launch(llm: LLM, name: str, options: dict[str, Any]) -> None:
    from torch.profiler import ProfilerActivity, profile

    method, params = llm.compose(name, **options), SamplingParams(max_tokens=64, ignore_eos=True)
    llm.generate(PROMPTS[0], params, method=method)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        stats = llm.generate(PROMPTS[0], params, method=method)[0].stats
    launches = sum(event.count for event in seen.key_averages() if event.key == "cudaGraphLaunch")
    # one has read the prompt, and the last one was under way when the request was seen to have ended
    assert launches == stats.num_passes + 2


@pytest.mark.parametrize("num_nodes", [2, 5, 16, 64])
def test_scores_do_not_depend_on_what_shares_the_pass(llm: LLM, num_nodes: int) -> None:
    assert_scores_do_not_depend_on_the_pass(llm.target, num_nodes)


def test_pages_of_any_length_score_alike(llm: LLM) -> None:
    """Bit for bit in invariant numerics, on captured passes, with a beginning that two rows share. Pages of 64 tokens are
    fetched by the copy engine, those of 16 are not."""
    from outrider.bundled import bundled_path
    from outrider.cache.paged import PagedCache
    from outrider.models.config import config_of
    from outrider.models.gpu.decoder import FastDecoder
    from outrider.models.load import read_config
    from outrider.models.weights import SafetensorsFolder, read_weights

    folder = Path(bundled_path("target"))
    config = config_of(read_config(folder))
    assert config is not None
    weights = read_weights(SafetensorsFolder(folder), config, dtype=torch.bfloat16, device=torch.device("cuda"))
    rows, paged = (FastDecoder(config, weights, numerics="invariant", page_len=page_len) for page_len in (16, 64))
    prompts = [[5, 6, 7, 8, 9] * 30, [5, 6, 7, 8, 9] * 20 + [11, 12]]
    first, cache = paged.new_cache(1), rows.new_cache(2)
    paged.prefill([prompts[0]], first)
    twins = PagedCache.of_runs(paged.pool, [first.run(0), first.run(0, 100)])
    paged.prefill([[], prompts[1][100:]], twins)
    rows.prefill([prompts[0], prompts[1]], cache)
    tree = TokenTree.of_rows([([3, 4, 5, 6, 7], [-1, 0, 0, 1, 2]), ([9, 8, 1, 2], [-1, 0, 1, 2])], "cuda")
    for _ in range(3):
        expected, got = rows.score(tree, cache).logits, paged.score(tree, twins).logits
        for row, size in enumerate(tree.sizes):
            assert torch.equal(got[row, :size], expected[row, :size])
        for each in (cache, twins):
            each.commit([[0, 2, 4], [0, 1]])


PAGED = [("plain", {}), ("draft-model", {"num_draft_tokens": 3}), ("draft-tree", TREE), ("eagle3", SEARCH)]


def test_captured_rounds_on_small_pages_say_what_plain_decoding_says(llm: LLM) -> None:
    """Chains, trees whose branches move from page to page, more requests than slots; all pages come back."""
    from outrider.models.gpu.decoder import FastDecoder

    paged = LLM(device="cuda", numerics="invariant", page_len=16, max_batch_size=2)
    target = paged.target
    assert isinstance(target, FastDecoder)
    for params in PARAMS:
        expected = [llm.generate(p, params, method=llm.compose("plain"))[0].token_ids for p in PROMPTS]
        for name, options in PAGED:
            method = paged.compose(name, **options)
            assert captured(method, target) is not None
            assert [o.token_ids for o in paged.generate(PROMPTS, params, method=method)] == expected, name
    before = target.pool.num_used
    paged.generate(PROMPTS, PARAMS[0], method=paged.compose("draft-tree", **TREE))
    assert target.pool.num_used <= before + 1  # the spare page of the new method's slots


def test_requests_that_outgrow_the_pages_wait_and_say_the_same(llm: LLM) -> None:
    """Twelve requests in a pool for about six: the youngest wait again, nobody is lost, and nothing is captured anew."""
    from outrider.models.gpu.decoder import FastDecoder

    prompts, params = [PROMPTS[number % len(PROMPTS)] for number in range(12)], SamplingParams(max_tokens=120, ignore_eos=True)
    expected = [output.token_ids for output in llm.generate(prompts, params, method=llm.compose("plain"))]
    small = LLM(device="cuda", page_len=16, max_batch_size=12)
    assert isinstance(small.target, FastDecoder)
    small.target.pool.hold(64)
    version = small.target.pool.version
    for name, options in PAGED[:2]:
        outputs = small.generate(prompts, params, method=small.compose(name, **options))
        assert [output.token_ids for output in outputs] == expected, name
    assert small.target.pool.version == version and small.target.pool.num_pages == 64


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_speculation_on_few_bits_says_what_their_plain_decoding_says(dtype: str) -> None:
    llm, params = LLM(device="cuda", dtype=dtype, numerics="invariant"), SamplingParams(max_tokens=40)
    expected = [o.token_ids for o in llm.generate(PROMPTS, params, method=llm.compose("plain"))]
    assert [o.token_ids for o in llm.generate(PROMPTS, params, method=llm.compose("draft-model"))] == expected


def test_the_fast_path_can_be_switched_off() -> None:
    from outrider.models.decoder import Decoder

    slow = LLM(device="cuda", fast=False)
    assert isinstance(slow.target, Decoder)
    assert slow.generate(PROMPTS[0], SamplingParams(max_tokens=5))[0].token_ids


def test_what_is_prepared_is_not_captured_again() -> None:
    from outrider.engine import captured_rounds

    llm, params = LLM(device="cuda", max_batch_size=4, numerics="invariant"), SamplingParams(max_tokens=20)
    expected = [o.token_ids for o in llm.generate(PROMPTS, params)]
    llm = LLM(device="cuda", max_batch_size=4, numerics="invariant")
    llm.warm_up()
    captured, real = [], captured_rounds.RoundGraph
    try:
        captured_rounds.RoundGraph = lambda *given, **more: captured.append(given) or real(*given, **more)  # type: ignore[assignment, misc]
        assert [o.token_ids for o in llm.generate(PROMPTS, params)] == expected
    finally:
        captured_rounds.RoundGraph = real  # type: ignore[misc]
    assert not captured


def test_memory_is_weights_keys_and_one_workspace() -> None:
    """The formula of docs/gpu.md, within 10 %."""
    from outrider.models.gpu.decoder import FastDecoder

    gc.collect()  # models of earlier tests must not go while this one is looked at
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    llm, params = LLM(device="cuda"), SamplingParams(max_tokens=300)
    weights = torch.cuda.memory_allocated() - before
    method = llm.compose("plain")
    llm.generate(PROMPTS, params, method=method)
    torch.cuda.reset_peak_memory_stats()
    llm.generate(PROMPTS, params, method=method)
    target = llm.target
    assert isinstance(target, FastDecoder)
    config = target.config
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim + 4 * config.hidden_size + 3 * config.mlp_size
    workspace = target.chunk_len * width * 2 + len(PROMPTS) * config.vocab_size * 4
    needed = weights + target.pool.block.nbytes + workspace
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * needed
