"""A model divided between two gloo processes writes the text of one, with any method, and ends when a rank does."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from divided import VOCAB, checkpoint, eagle3_heads
from test_shares import LATENT
from tiers import in_turn

from outrider import LLM, OptionError, SamplingParams
from outrider.core.traits import TargetTraits
from outrider.core.tree import TokenTree
from outrider.models import parallel as parallel_models
from outrider.models.load import load_model
from outrider.models.native.build import can_build
from outrider.models.parallel import ParallelTarget, RankError
from outrider.models.random_decoder import tiny_config
from outrider.models.share import Share
from outrider.models.source import Source
from outrider.models.weights import SafetensorsFolder
from outrider.opening import divided

PROMPTS = [[5, 9, 11, 3], [40, 41], [66, 1, 2, 3, 4, 5], [8, 8, 9, 8, 8]]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.9, seed=4)
CUT = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.9, top_p=0.8, seed=4, logprobs=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("divided")
    return {
        "target": checkpoint(home / "target"),
        "draft": checkpoint(home / "draft", noise=0.3),
        "heads": eagle3_heads(home / "heads"),
    }


@pytest.fixture(scope="module")
def one(folders: dict[str, str]) -> LLM:
    return LLM(folders["target"], draft=folders["draft"], dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def two(folders: dict[str, str]) -> Iterator[LLM]:
    llm = LLM(folders["target"], draft=folders["draft"], dtype="float32", device="cpu", tensor_parallel=2)
    yield llm
    parallel(llm).team.close()


def parallel(llm: LLM) -> ParallelTarget:
    assert isinstance(llm.target, ParallelTarget)
    return llm.target


@pytest.mark.parametrize(("method", "batch_size"), in_turn(("plain", "draft-model", "best-first", "eagle3"), (4, 1)))
def test_two_processes_write_the_text_of_one(one: LLM, two: LLM, folders: dict[str, str], method: str, batch_size: int) -> None:
    options = {"heads": folders["heads"]} if method == "eagle3" else {}
    guessing = {} if method == "plain" else {"num_draft_tokens": 3} if method == "draft-model" else {"num_tree_nodes": 6}
    prompts = PROMPTS if batch_size == 4 else PROMPTS[:1]
    for params in (GREEDY, SEEDED):
        texts: list[list[list[int]]] = []
        for llm in (one, two):
            llm.max_batch_size = batch_size
            composed = llm.compose(method, policy="fixed", **options, **guessing)
            texts.append([list(out.token_ids) for out in llm.generate(prompts, params, method=composed)])
        assert texts[0] == texts[1]
        assert all(len(text) == 10 for text in texts[0])


@pytest.mark.skipif(not can_build(), reason="rounded weights are divided by the native pass")
@pytest.mark.parametrize("dtype", ["int4", "int8", "w8a8"])
def test_shares_of_rounded_weights_are_those_of_the_rounded_model(dtype: str, tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", head_dim=32, intermediate_size=128)
    alone = LLM(target, method="plain", dtype=dtype, device="cpu")
    apart = LLM(target, method="suffix", dtype=dtype, device="cpu", tensor_parallel=2)
    try:
        for params in (GREEDY, SEEDED):
            texts = [[list(out.token_ids) for out in llm.generate(PROMPTS, params)] for llm in (alone, apart)]
            assert texts[0] == texts[1]
    finally:
        parallel(apart).team.close()


def test_weights_that_shares_would_round_differently_are_refused(folders: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="MLP columns do not come in"):
        LLM(folders["target"], dtype="int4", device="cpu", tensor_parallel=2)


def test_what_a_temperature_does_not_cover_gathers_the_logits(one: LLM, two: LLM) -> None:
    ours, theirs = (llm.generate(PROMPTS[:2], CUT, method="plain") for llm in (two, one))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.logprobs is not None and other.logprobs is not None
        for a, b in zip(mine.logprobs, other.logprobs, strict=True):
            assert a.token == b.token and abs(a.logprob - b.logprob) < 1e-3


@pytest.mark.parametrize("name", ["early-exit", "specee"])
def test_self_drafting_runs_parts_of_a_divided_model(one: LLM, two: LLM, name: str) -> None:
    texts = [
        [out.token_ids for out in llm.generate(PROMPTS[:2], GREEDY, method=llm.compose(name, num_draft_tokens=2))]
        for llm in (one, two)
    ]
    assert texts[0] == texts[1]


def test_greedy_and_seeded_choices_gather_no_logits(two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("somebody looked at the logits")

    monkeypatch.setattr(ParallelTarget, "_gathered", refuse)
    for params in (GREEDY, SEEDED):
        assert len(two.generate(PROMPTS[0], params, method="plain")[0].token_ids) == 10


def test_scores_do_not_depend_on_what_shares_the_pass(two: LLM) -> None:
    """Sums over ranks have a fixed order. So a node's scores are the same bits alone and behind others, where the decoder of a
    single process promises that too."""
    target = two.target
    if not target.traits.is_invariant:
        pytest.skip("the native pass cannot be built here")
    together, alone = target.new_cache(1), target.new_cache(1)
    for cache in (together, alone):
        target.prefill([PROMPTS[0]], cache)
    chain = torch.tensor([[7, 12, 60, 33]])
    whole = target.score(TokenTree.chain(chain), together).logits
    for place in range(chain.shape[1]):
        single = target.score(TokenTree.chain(chain[:, place : place + 1]), alone).logits
        alone.commit([[0]])
        assert torch.equal(single[0, 0], whole[0, place])


def test_a_share_is_its_part_of_the_weights(folders: dict[str, str], two: LLM) -> None:
    whole = SafetensorsFolder(Path(folders["target"])).num_parameters
    mine = parallel(two).num_weights
    assert abs(mine / (whole / 2) - 1) < 0.02


def test_shares_cover_every_row_once() -> None:
    spans = [Share(rank, 3).span(VOCAB) for rank in range(3)]
    assert [begin for begin, _ in spans[1:]] == [end for _, end in spans[:-1]]
    assert spans[0][0] == 0 and spans[-1][1] == VOCAB
    assert max(end - begin for begin, end in spans) - min(end - begin for begin, end in spans) <= 1


def test_heads_that_cannot_be_divided_are_refused(folders: dict[str, str]) -> None:
    with pytest.raises(OptionError, match=r"2 key-value heads.*use 1, 2"):
        LLM(folders["target"], method="plain", tensor_parallel=3)
    with pytest.raises(OptionError, match="normalise all heads as one vector"):
        Share(0, 2).check(tiny_config("olmo2"))
    with pytest.raises(OptionError, match="tensor_parallel = 0"):
        LLM(folders["target"], method="plain", tensor_parallel=0)


@pytest.mark.parametrize(("family", "options"), [("gemma2", {}), ("mixtral", {"page_len": 4}), ("deepseek_v3", {})])
def test_families_in_the_native_pass_and_in_pytorch(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """Norms behind the sums (Gemma, in the native pass); experts, and keys in pages (Mixtral, in PyTorch); latents that every
    rank keeps, with an MLP beside experts (DeepSeek)."""
    changes = {"model_type": family, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}
    changes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None} if family == "mixtral" else {}
    changes |= LATENT if family == "deepseek_v3" else {}
    name = checkpoint(tmp_path / family, **changes)
    texts: list[list[list[int]]] = []
    for more in ({}, {"tensor_parallel": 2, **options}):
        llm = LLM(name, method="plain", dtype="float32", device="cpu", **more)
        texts.append([list(out.token_ids) for out in llm.generate(PROMPTS[:2], GREEDY)])
    parallel(llm).team.close()
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("started_companions")
def test_a_dead_rank_is_named_and_ends_the_job(folders: dict[str, str]) -> None:
    llm = LLM(folders["target"], method="plain", dtype="float32", device="cpu", tensor_parallel=2)
    lines = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
    next(lines)
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    parallel(llm).tell_loss(told.put)
    follower = parallel(llm).team.followers[0].process
    os.kill(follower.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankError, match=rf"rank 1 of 2 \(process {follower.pid} on cpu\) ended by SIGKILL"):
        for _ in lines:
            pass
    assert time.monotonic() - began < 60, "a dead rank must not be waited for"
    assert "rank 1 of 2" in told.get(timeout=60), "who asked to be told is told"
    with pytest.raises(RankError, match="rank 1 of 2"):
        llm.generate(PROMPTS[0], GREEDY)
    assert all(one.process.returncode is not None for one in parallel(llm).team.followers)


@pytest.mark.parametrize("is_invariant", [True, False])
def test_invariant_numerics_are_those_of_the_ranks(is_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[bool]()
    team = SimpleNamespace(close=lambda: ended.append(True))
    made = SimpleNamespace(traits=TargetTraits(is_invariant=is_invariant), team=team)
    monkeypatch.setattr(parallel_models, "load_parallel", lambda *_, **__: made)
    try:
        assert divided(2, partial(load_model), Source("x"), numerics="invariant", kv_cache="auto") is made and is_invariant
    except OptionError as error:
        assert "native pass" in str(error) and ended and not is_invariant
