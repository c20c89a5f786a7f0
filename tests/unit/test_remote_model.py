"""A draft in a process of its own: the same guesses and the same text, and an end that has a name."""

from __future__ import annotations

import os
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from divided import checkpoint
from tiers import in_turn

from outrider import LLM, OptionError, SamplingParams
from outrider.core.errors import RankError
from outrider.core.guessing_target import GuessingTarget
from outrider.core.plan import Plan
from outrider.core.rng import Noise
from outrider.core.tempering import Tempering
from outrider.core.tree import TokenTree
from outrider.models.load import load_model
from outrider.models.remote import RemoteModel

PROMPTS = [[5, 9, 11, 3], [40, 41], [66, 1, 2, 3, 4, 5]]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    home = tmp_path_factory.mktemp("remote")
    return checkpoint(home / "target"), checkpoint(home / "draft", noise=0.2)


@pytest.fixture(scope="module")
def pair(names: tuple[str, str]) -> tuple[LLM, LLM]:
    here, there = (LLM(names[0], draft=names[1], dtype="float32", device="cpu", draft_process=far) for far in (False, True))
    return here, there


@pytest.mark.parametrize(("method", "temperature"), in_turn(("pearl", "draft-model", "best-first"), (0.8, 0.0)))
def test_guesses_and_texts_are_those_of_a_draft_here(pair: tuple[LLM, LLM], method: str, temperature: float) -> None:
    params: dict[str, Any] = {"temperature": temperature, "seed": 3}
    sampling = [SamplingParams(max_tokens=8 + 5 * i, ignore_eos=True, **params) for i in range(len(PROMPTS))]
    options = {"num_tree_nodes": 6} if method == "best-first" else {"num_draft_tokens": 3}
    found = [llm.generate(PROMPTS, sampling, method=llm.compose(method, policy="fixed", **options)) for llm in pair]
    plain = pair[0].generate(PROMPTS, sampling, method="plain")
    for here, there, alone in zip(*found, plain, strict=True):
        assert here.token_ids == there.token_ids == alone.token_ids
        assert here.stats.num_passes == there.stats.num_passes
        assert here.stats.num_accepted == there.stats.num_accepted


def test_caches_over_there_follow_those_here(names: tuple[str, str], pair: tuple[LLM, LLM]) -> None:
    here, there = load_model(names[1], dtype="float32", device="cpu"), pair[1].drafts[0]
    rows = []
    for model in (here, there):
        cache = model.new_cache(2)
        model.prefill([[1, 2, 3], [4, 5]], cache)
        cache.truncate([2, 2])
        both = cache.fork([1, 0]).join(cache.narrow([0]))
        assert list(both.lengths) == [2, 2, 2]
        tree = TokenTree.chain(torch.tensor([[7, 8], [9, 10], [11, 12]]))
        rows.append(model.score(tree, both, taps=(1,)))
        both.commit([[0], [0, 1], []])
        assert list(both.lengths) == [3, 4, 2]
    torch.testing.assert_close(rows[0].logits, rows[1].logits)
    torch.testing.assert_close(rows[0].taps[1], rows[1].taps[1])


@pytest.mark.usefixtures("started_companions")
def test_a_model_that_cannot_run_ahead_drafts_in_one_message(names: tuple[str, str]) -> None:
    """The chain is that of a model here that can, greedy and drawn."""
    here = load_model(names[1], dtype="float32", device="cpu")
    assert isinstance(here, GuessingTarget)
    there = RemoteModel(names[1], dtype="float32", device="cpu", fast=False)
    found: dict[float, list[list[list[int]]]] = {0.0: [], 0.8: []}
    for model, temperature in product((here, there), found):
        cache = model.new_cache(3)
        noise = Noise(torch.tensor([3, 4, 5]), torch.tensor([7, 0, 2]), here.gumbel_stream, here.choose)
        rows, plan = [[1, 2, 3], [], list(range(40, 60))], Plan((3, 0, 2), (3, 0, 2))
        guesses = model.guess(rows, cache, plan=plan, tempering=Tempering([temperature] * 3), noise=noise)
        assert guesses is not None
        chains = [row[:depth] for row, depth in zip(guesses.tokens.tolist(), plan.max_depth, strict=True)]
        found[temperature].append(chains)
        assert list(cache.lengths) == [5, 0, 21]
    assert all(ours == theirs for ours, theirs in found.values())


def test_a_model_that_cannot_be_opened_is_refused_here(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no such folder"):
        RemoteModel(str(tmp_path / "nowhere"))


def test_a_process_that_dies_is_named(pair: tuple[LLM, LLM]) -> None:
    """Last: the pair is broken after this."""
    llm = pair[1]
    draft = llm.drafts[0]
    assert isinstance(draft, RemoteModel)
    os.kill(draft.process_id, signal.SIGKILL)
    with pytest.raises(RankError, match=r"the process of model .* ended by SIGKILL"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=8), method=llm.compose("pearl", num_draft_tokens=3))
