"""A model divided among ranks on CUDA devices: NCCL alone, its sums inside a captured graph, and two ranks on one device.

NCCL refuses two ranks on one device. So its wires are tried with one rank, and two ranks on one device are connected by gloo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from divided import VOCAB, checkpoint
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.models.parallel import ParallelTarget
from outrider.models.parallel.link import Link, backend_of, open_store
from outrider.models.share import Share

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROMPTS = [[5, 9, 11, 3], [40, 41], [66, 1, 2, 3, 4, 5], [8, 8, 9, 8, 8]]


@pytest.fixture(scope="module")
def alone() -> Link:
    """One rank on NCCL."""
    device = torch.device("cuda", 0)
    assert backend_of(device, 1) == "nccl"
    link = Link(Share(0, 1), VOCAB)
    link.connect(open_store(), device)
    return link


def test_one_rank_on_nccl_gets_its_own_values(alone: Link) -> None:
    states = torch.randn(3, 2, 64, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(3, VOCAB, device="cuda")
    assert torch.equal(alone.sum(states), states)
    assert torch.equal(alone.gather_vocabulary(logits), logits)
    values, places = logits.max(-1)
    assert torch.equal(alone.best(values, places), logits.argmax(-1))


def test_a_sum_over_nccl_is_captured(alone: Link) -> None:
    """A captured graph adds what lies in its input when it is replayed."""
    given = torch.randn(4, 64, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        alone.sum(given)
    side.synchronize()
    graph, found = torch.cuda.CUDAGraph(), list[Tensor]()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found.append(2 * alone.sum(given))
    for _ in range(2):
        given.normal_()
        graph.replay()
        assert torch.equal(found[0], 2 * given)


@pytest.mark.parametrize("method", ["plain", "draft-model", "best-first"])
def test_two_ranks_on_one_device_write_the_text_of_one(method: str, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    target, draft = checkpoint(tmp_path / "target"), checkpoint(tmp_path / "draft", noise=0.3)
    options: dict[str, Any] = {"draft": draft, "dtype": "float32", "device": "cuda"}
    one, two = LLM(target, **options, fast=False), LLM(target, **options, tensor_parallel=2)
    assert isinstance(two.target, ParallelTarget) and backend_of(two.target.device, 2) in ("gloo", "nccl")
    guessing: dict[str, Any] = {"plain": {}, "draft-model": {"num_draft_tokens": 3}, "best-first": {"num_tree_nodes": 6}}[
        method
    ]
    try:
        for params in (SamplingParams(max_tokens=10, ignore_eos=True), SamplingParams(max_tokens=10, temperature=0.9, seed=4)):
            texts = [
                [out.token_ids for out in llm.generate(PROMPTS, params, method=llm.compose(method, policy="fixed", **guessing))]
                for llm in (one, two)
            ]
            assert texts[0] == texts[1]
    finally:
        two.target.team.close()
