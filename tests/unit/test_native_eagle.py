"""EAGLE heads whose trees are one native call: the trees and the texts of the twin in PyTorch."""

from __future__ import annotations

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.bundled import bundled_path
from outrider.core.interfaces import Context, Observation, Plan
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.drafters.heads.eagle import Eagle
from outrider.drafters.heads.head_options import HeadOptions
from outrider.models.heads import load_head
from outrider.models.heads.eagle import EagleHead
from outrider.models.heads.trim import trimmed
from outrider.models.native import BUILD

PROMPTS = [[100, 200, 300, 400, 500], [77, 78], [9, 10, 11]]


@pytest.fixture(scope="module")
def llm() -> LLM:
    if BUILD.wait() is None:
        pytest.skip("no C++ compiler")
    return LLM(dtype="float32")


def drafters(name: str, *, is_trimmed: bool) -> list[Eagle]:
    """The same heads natively and in PyTorch."""
    head = load_head(bundled_path(f"heads/{name}"), ends=bundled_path("target"))
    head = trimmed(head, torch.arange(0, 4096, 3)) if is_trimmed else head
    assert isinstance(head, EagleHead)
    pair = [Eagle(head.float(), HeadOptions(width=3, num_children=4)) for _ in range(2)]
    assert pair[0]._native is not None
    pair[1]._native = None
    return pair


def grown(llm: LLM, drafter: Eagle, params: SamplingParams) -> list[TokenTree]:
    """The trees of two rounds: the second reads what the first has accepted."""
    rows = [RequestState.of(Request(prompt, params)) for prompt in PROMPTS]
    device, cache = torch.device("cpu"), llm.target.new_cache(len(rows))
    taps = llm.target.prefill([row.tokens[:-1] for row in rows], cache, taps=drafter.taps)
    state, trees = drafter.start([row.tokens for row in rows], taps), list[TokenTree]()
    paths = [[0, 1], [0], [0, 1]]
    for plan in (Plan((4, 2, 3), (7, 9, 5)), Plan((3, 4, 0), (6, 6, 6))):
        noise = Noise(torch.tensor([3, 4, 5]), torch.tensor([row.num_output for row in rows]))
        context = Context([row.tokens for row in rows], Sampler(rows, 4096, device), noise, device, cache)
        draft = drafter.propose(state, context, plan)
        scores = llm.target.score(draft.tree, cache, taps=drafter.taps)
        cache.commit(paths)
        drafter.observe(state, Observation(draft, scores, paths, [1, 0, 1], 0.0, 0.0, plan))
        trees.append(draft.tree)
        for row, path in enumerate(paths):
            rows[row].tokens.extend([*(int(draft.tree.tokens[row, node]) for node in path[1:]), 50 + row])
    return trees


@pytest.mark.parametrize("is_trimmed", [False, True])
@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_trees_are_the_twins(llm: LLM, name: str, is_trimmed: bool) -> None:
    for params in (
        SamplingParams(temperature=0.0, max_tokens=20),
        SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=1, max_tokens=20),
    ):
        ours, twins = (grown(llm, drafter, params) for drafter in drafters(name, is_trimmed=is_trimmed))
        for mine, twin in zip(ours, twins, strict=True):
            assert mine.sizes == twin.sizes
            for row, size in enumerate(mine.sizes):
                assert mine.tokens[row, :size].tolist() == twin.tokens[row, :size].tolist()
                assert mine.parents[row, :size].tolist() == twin.parents[row, :size].tolist()


def test_a_processor_takes_the_twin_on_the_same_memory(llm: LLM) -> None:
    """Requests of both kinds share a batch one after the other, and the text is that of plain decoding."""
    method = llm.compose("eagle3", num_draft_tokens=3, num_tree_nodes=4)
    params = [
        SamplingParams(max_tokens=12, temperature=0.0, logits_processors=(lambda tokens, logits: logits,)),
        SamplingParams(max_tokens=24, temperature=0.0),
    ]
    prompts = ["Once upon a time", "Lily and Ben"]
    plain = [llm.generate(prompt, each, method=llm.compose("plain"))[0].token_ids for prompt, each in zip(prompts, params)]
    drafted = [output.token_ids for output in llm.generate(prompts, params, method=method)]
    assert drafted == plain
