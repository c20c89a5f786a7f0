"""Prompts with images on a CUDA device: the text of the CPU in float32, and nearly its logits in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vision import IMAGE, image, new_folder

from outrider import LLM, SamplingParams
from outrider.core.tree import TokenTree
from outrider.cuda_graphs import Rounds
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import compose

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


def opened(folder: Path, device: str, dtype: str = "float32") -> LLM:
    return LLM(str(folder), method="suffix", dtype=dtype, device=device)


def next_logits(llm: LLM, prompt: Any) -> torch.Tensor:
    """After a prompt, its last token as the root."""
    request, cache = llm.requests([prompt])[0], llm.target.new_cache(1)
    llm.target.prefill([request.read_ids[:-1]], cache)
    root = TokenTree.chain(torch.tensor([request.prompt_ids[-1:]], device=llm.target.device))
    return llm.target.score(root, cache).logits[0, 0, : llm.target.vocab_size].float().cpu()


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_a_gpu_sees_what_a_cpu_sees(family: str, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = new_folder(family, tmp_path / family)
    prompts = [{"prompt": [10, 50, IMAGE, 70, 80], "images": [image(family, seed)]} for seed in (1, 2)]
    mixed = [*prompts, [10, 50, 60]]
    here, there = opened(folder, "cpu"), opened(folder, "cuda")
    wanted = [one.token_ids for one in here.generate(mixed, GREEDY)]
    assert [one.token_ids for one in there.generate(mixed, GREEDY)] == wanted
    assert [one.token_ids for one in there.generate(mixed, GREEDY, method="plain")] == wanted
    rounded = opened(folder, "cuda", "bfloat16")
    for prompt in prompts:
        one, other = next_logits(here, prompt), next_logits(rounded, prompt)
        assert torch.cosine_similarity(one, other, 0) > 0.99
    text = rounded.generate(mixed, GREEDY)
    assert all(len(one.token_ids) == 16 for one in text)


@pytest.mark.parametrize("name", ["plain", "prompt-lookup", "draft-model"])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_prompts_with_images_run_in_captured_rounds(family: str, name: str, tmp_path: Path) -> None:
    """Those that come while others run too: the host reads them, and they take slots. The text is that of host rounds."""
    from outrider.models.gpu.decoder import FastDecoder

    llm = opened(new_folder(family, tmp_path / family), "cuda", "bfloat16")
    assert isinstance(llm.target.captured_as, FastDecoder)
    draft = llm.target.captured_as if name == "draft-model" else None
    method = compose(name, llm.target, draft=draft, policy="fixed", options={} if name == "plain" else {"num_draft_tokens": 3})
    prompts = [{"prompt": [10, 50, IMAGE, 70, 80], "images": [image(family, seed)]} for seed in range(4)]
    params = [SamplingParams(max_tokens=size, temperature=0.8, seed=size, ignore_eos=True) for size in (9, 17, 24, 12, 20, 8)]
    requests = llm.requests([*prompts, [10, 50, 60], [9, 9, 9, 9]], params)
    rounds = Rounds(llm.target)
    assert rounds.graphs_of(method) is not None, "its rounds can be captured"
    found = texts(rounds.run(method, requests, max_batch_size=3), len(requests))
    assert found == texts(run(Engine(llm.target, method), requests, max_batch_size=3), len(requests))
    assert [len(one) for one in found] == [9, 17, 24, 12, 20, 8]


def texts(progress: Any, count: int) -> list[list[int]]:
    done = {step.request: step.state for step in progress if step.state.is_finished}
    return [done[number].output_ids for number in range(count)]
