"""A model divided among ranks on CUDA devices: NCCL alone, its sums inside captured rounds, and two ranks on one device.

NCCL refuses two ranks on one device. So its wires are tried with one rank, whose rounds have all the sums and messages of
several, and two ranks on one device are connected by gloo. ``tests/unit/test_shared_round.py`` has a follower.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from divided import VOCAB, checkpoint
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.core.interfaces import Target
from outrider.core.report import Progress
from outrider.core.request import Request
from outrider.core.tree import TokenTree
from outrider.cuda_graphs import Rounds
from outrider.methods import compose
from outrider.models.load import load_model
from outrider.models.parallel import ParallelTarget
from outrider.models.parallel.link import Link, backend_of, open_store
from outrider.models.parallel.rank import ByHeads
from outrider.models.share import Share

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROMPTS = [[5, 9, 11, 3], [40, 41], [56, 1, 2, 3, 4, 5], [8, 8, 9, 8, 8]]


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


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> tuple[ParallelTarget, Target]:
    """A target of one rank on NCCL, and a draft."""
    folder = tmp_path_factory.mktemp("wired")
    sizes = {"intermediate_size": 128, "vocab_size": 96}
    opening = ByHeads(checkpoint(folder / "target", **sizes), 1, "bfloat16", "cuda", None, fast=True, page_len=0)
    draft = load_model(checkpoint(folder / "draft", noise=0.3, **sizes), dtype="bfloat16", device="cuda")
    return ParallelTarget(opening), draft


SAMPLERS = {
    "greedy": SamplingParams(max_tokens=12, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=4),
    "top-p": SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, top_p=0.8, presence_penalty=0.5, seed=4),
}


@pytest.mark.parametrize("sampler", list(SAMPLERS))
@pytest.mark.parametrize("name", ["plain", "prompt-lookup", "draft-model", "best-first"])
def test_whole_rounds_of_a_rank_are_captured(name: str, sampler: str, wired: tuple[ParallelTarget, Target]) -> None:
    """Sums, messages to followers and the choice are in the graph; texts are those of rounds that the host runs."""
    target, draft = wired
    assert target.traits.can_be_captured and target.traits.is_invariant
    method = compose(name, target, draft=draft if name in ("draft-model", "best-first") else None, policy="fixed")
    rounds, told = Rounds(target), list[str]()
    graphs = rounds.graphs_of(method)
    assert graphs is not None
    link = graphs.target.joint
    assert isinstance(link, Link)
    link.on_tell = lambda verb, _: told.append(verb)
    texts = []
    for traced in (False, True):  # a traced round is the host's
        requests = [Request(prompt, SAMPLERS[sampler]) for prompt in PROMPTS]
        texts.append(texts_of(rounds.run(method, requests, traced=traced)))
    assert texts[0] == texts[1] and all(len(text) == 12 for text in texts[0].values())
    assert "capture" in told and "launch" in told


def texts_of(progress: Iterable[Progress]) -> dict[int, list[int]]:
    return {one.request: list(one.state.output_ids) for one in progress}


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


WHOLE_GROUPS = {"attention_bias": False, "mlp_bias": False, "hidden_size": 256, "num_attention_heads": 16}
WHOLE_GROUPS |= {"intermediate_size": 768, "num_key_value_heads": 4}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}


def model_of(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A model, and the type in which it is opened. In the GGUF file ranks have different numbers of columns."""
    import test_packed_shares
    import test_stored_gguf

    if kind in ("int8", "int4", "bfloat16"):
        return checkpoint(folder / "floats", **WHOLE_GROUPS), kind
    if kind == "experts":
        return checkpoint(folder / "experts", **WHOLE_GROUPS, **EXPERTS), "bfloat16"
    if kind == "gguf":
        monkeypatch.setattr(test_stored_gguf, "LARGE", test_stored_gguf.Shape(512, 768, 32, 4))
        return str(test_stored_gguf.model_file(folder, test_stored_gguf.Q4_K_M)), "stored"
    if kind == "latents":
        return str(test_packed_shares.latents_of(folder)), "bfloat16"
    return str(test_packed_shares.folder_of(folder, kind)), "stored"


@pytest.mark.parametrize("kind", ["bfloat16", "experts", "latents", "int8", "int4", "gptq", "fp8-channel", "mxfp4", "gguf"])
def test_kernels_of_two_ranks_on_one_device(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of 16 bits and of few bits, experts too, by the fast kernels on gloo: the scores of one process up to the
    rounding of a sum, and speculative text that is plain text on the same ranks."""
    path, dtype = model_of(kind, tmp_path, monkeypatch)
    options: dict[str, Any] = {"dtype": dtype, "device": "cuda", "numerics": "invariant", "method": "prompt-lookup"}
    one, two = LLM(path, **options), LLM(path, **options, tensor_parallel=2)
    assert isinstance(two.target, ParallelTarget) and two.target.traits.is_invariant
    try:
        chain = TokenTree.chain(torch.arange(5, 25, device="cuda")[None], [20])
        mine, theirs = (llm.target.score(chain, llm.target.new_cache(1)).logits for llm in (two, one))
        assert ((mine - theirs).norm(dim=-1) / theirs.norm(dim=-1)).median() < 0.03, "a few nodes may take another expert"
        for sampler in ("greedy", "seeded"):
            outputs = [two.generate(PROMPTS, SAMPLERS[sampler], method=name) for name in ("plain", "prompt-lookup")]
            assert [list(out.token_ids) for out in outputs[0]] == [list(out.token_ids) for out in outputs[1]]
    finally:
        two.target.team.close()
