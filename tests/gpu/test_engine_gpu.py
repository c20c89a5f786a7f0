"""The engine on a CUDA device: the same random numbers, the same text as plain decoding, the same logits as on the CPU.

make gpu-test        (or: PYTHONPATH=src python -m pytest tests/gpu)
"""

from __future__ import annotations

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.core.rng import Noise, Purpose
from outrider.core.tree import TokenTree

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROMPTS = ["Once upon a time", "Tom and Lily went to the park.", "One day, a girl named Mia found", "The old man"]


def test_random_numbers_are_those_of_the_cpu() -> None:
    seeds, positions = torch.tensor([1, 2, -5]), torch.tensor([0, 17, 3])
    here, there = Noise(seeds, positions), Noise(seeds.cuda(), positions.cuda())
    lanes = torch.arange(5).expand(3, 5)
    assert torch.equal(here.uniform(Purpose.ACCEPT, lanes), there.uniform(Purpose.ACCEPT, lanes.cuda()).cpu())
    mine, theirs = here.target_gumbel(lanes, 4096), there.target_gumbel(lanes.cuda(), 4096).cpu()
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
    assert (mine != theirs).float().mean() < 1e-4  # float64 logarithms, rounded once: equal but for rare last bits


@pytest.fixture(scope="module")
def exact() -> LLM:
    torch.backends.cuda.matmul.allow_tf32 = False
    return LLM(dtype="float32", device="cuda")


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=80), SamplingParams(max_tokens=80, temperature=0.8, top_p=0.95, seed=7)]
)
def test_text_is_that_of_plain_decoding(exact: LLM, params: SamplingParams) -> None:
    expected = [exact.generate(prompt, params, method=exact.compose("plain"))[0].token_ids for prompt in PROMPTS]
    for method in (exact.compose("draft-model", num_draft_tokens=k) for k in (1, 3, 7)):
        assert [exact.generate(prompt, params, method=method)[0].token_ids for prompt in PROMPTS] == expected
        assert [output.token_ids for output in exact.generate(PROMPTS, params, method=method)] == expected
    assert [o.token_ids for o in exact.generate(PROMPTS, params, method=exact.compose("prompt-lookup"))] == expected


def test_text_is_that_of_the_cpu(exact: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=3)
    cpu = LLM(dtype="float32", device="cpu")
    assert [o.token_ids for o in exact.generate(PROMPTS, params)] == [o.token_ids for o in cpu.generate(PROMPTS, params)]


def test_rules_that_sample_run_and_reproduce(exact: LLM) -> None:
    """With a fixed number of guesses: a policy that looks at the clock drafts otherwise, and these rules draw otherwise."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=9)
    for rule in ("rejection", "block"):
        method = exact.compose("draft-model", acceptance=rule, num_draft_tokens=4)
        first = exact.generate(PROMPTS, params, method=method)
        alone = [exact.generate(prompt, params, method=method)[0].token_ids for prompt in PROMPTS]
        assert [o.token_ids for o in first] == alone


def test_a_tree_is_scored_as_its_paths(exact: LLM) -> None:
    target, cache = exact.target, exact.target.new_cache(1)
    target.prefill([[5, 6, 7, 8]], cache)
    tree = TokenTree.of_rows([([9, 10, 11, 12, 13], [-1, 0, 0, 1, 2])], target.device)
    logits = target.score(tree, cache).logits[0]
    for node in range(5):
        path = [9, *(int(tree.tokens[0, n]) for n in tree.path(0, node))]
        chain = TokenTree.chain(torch.tensor([[5, 6, 7, 8, *path]], device=target.device))
        torch.testing.assert_close(target.score(chain, target.new_cache(1)).logits[0, -1], logits[node], atol=1e-3, rtol=1e-3)


def test_bfloat16_runs_and_differs_only_at_close_calls() -> None:
    """Where texts part, the two best logits are close: rounding, not a defect."""
    llm = LLM(device="cuda")
    assert llm.target.dtype == torch.bfloat16
    params = SamplingParams(max_tokens=100, logprobs=2)
    for prompt in PROMPTS:
        fast = llm.generate(prompt, params)[0]
        plain = llm.generate(prompt, params, method=llm.compose("plain"))[0]
        parted = next((i for i, (a, b) in enumerate(zip(fast.token_ids, plain.token_ids, strict=False)) if a != b), None)
        if parted is not None:
            assert plain.logprobs is not None
            (_, first), (_, second) = plain.logprobs[parted].top
            assert first - second < 0.1
