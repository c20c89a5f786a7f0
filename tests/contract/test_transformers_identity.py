"""Greedy text is token for token that of transformers' `generate`: 32 prompts in batches, some of them alone.

``make test-all`` asks 100 prompts. Every family with the methods the others are built from; one family with every method of
the table.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from test_decoder_families import FAMILIES, VOCAB, make_checkpoint
from tiers import repeats
from toy_codecs import toy_translation

from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams
from outrider.core.request import Request
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import METHODS, compose
from outrider.models.load import load_model

NEW_TOKENS = 8
CHECKED = ["llama2", "llama3", "llama-tied", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma2", "gemma3"]
LENGTHS = (3, 7, 12, 20)
SEEDS = [(size, 100 * size + number) for size in LENGTHS for number in repeats(3, of=25)]
PROMPTS = [random.Random(seed).choices(range(3, VOCAB), k=size) for size, seed in SEEDS]


def transformers_greedy(model: Any) -> list[list[int]]:
    """Prompts of one length go through `generate` together, so that nothing is padded."""
    outputs: list[list[int]] = []
    for size in LENGTHS:
        batch = torch.tensor([prompt for prompt in PROMPTS if len(prompt) == size])
        mask = torch.ones_like(batch)
        limits: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        outputs += model.generate(batch, attention_mask=mask, **limits)[:, size:].tolist()
    return outputs


def serve(
    target: Target, name: str, draft: Target, *, prompts: Sequence[list[int]] = PROMPTS, batch_size: int
) -> list[list[int]]:
    # transformers keeps the end-of-sequence token out of `min_new_tokens` by banning it
    params = SamplingParams(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)
    requests = [Request(prompt, params, frozenset({2})) for prompt in prompts]
    translation = toy_translation(target.vocab_size) if METHODS[name].any_tokenizer else None
    engine = Engine(target, compose(name, target, draft=draft, translation=translation))
    done: dict[int, list[int]] = {}
    for step in run(engine, requests, max_batch_size=batch_size):
        done[step.request] = step.state.output_ids
    return [done[i] for i in range(len(prompts))]


@pytest.fixture(scope="module", params=CHECKED)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = make_checkpoint(folder, *FAMILIES[request.param])
    target = load_model(str(folder), dtype="float32", device="cpu")
    with torch.no_grad():  # a draft that is often right: the target's weights with noise
        for parameter in theirs.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    noisy = tmp_path_factory.mktemp(request.param + "-draft")
    theirs.save_pretrained(noisy)
    draft = load_model(str(noisy), dtype="float32", device="cpu")
    original = type(theirs).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    reference = transformers_greedy(original)
    yield target, draft, reference


@pytest.mark.parametrize("name", ["plain", "draft-model", "prompt-lookup"])
def test_greedy_text_is_that_of_transformers(family: Any, name: str) -> None:
    target, draft, reference = family
    assert serve(target, name, draft, batch_size=10) == reference
    assert serve(target, name, draft, prompts=PROMPTS[7:8], batch_size=1) == reference[7:8]


@pytest.mark.parametrize("family", ["llama3"], indirect=True)
@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if not row.needs])
def test_every_method_says_what_transformers_says(family: Any, name: str) -> None:
    target, draft, reference = family
    assert serve(target, name, draft, prompts=PROMPTS[::2], batch_size=4) == reference[::2]
