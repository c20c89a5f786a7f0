"""The drop-in for ``generate`` of transformers: the same greedy text, the same law, options honoured or refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import in_turn
from tiny_transformers import FAMILIES, GREEDY, MASK, PROCESSORS, RAGGED, VOCAB, both, noisy, random_model, shared
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    pipeline,
)

import outrider.transformers as drop_in
from outrider.bundled import bundled_path
from outrider.core.errors import OptionError


@pytest.mark.parametrize(("family", "processors"), in_turn(FAMILIES, ("none", "many")))
def test_greedy_text_is_that_of_generate(family: str, processors: str) -> None:
    model, loop = shared(family), drop_in.generate("suffix", num_draft_tokens=4)
    both(model, loop, **GREEDY, **(PROCESSORS if processors == "many" else {}))
    assert sum(stats.num_passes for stats in loop.stats) > 0


@pytest.mark.parametrize("method", ["plain", "prompt-lookup", "token-recycling", "ngram-cache"])
def test_every_kind_of_method_runs(method: str) -> None:
    both(shared(), drop_in.generate(method), **GREEDY)


@pytest.mark.parametrize("method", ["draft-model", "best-first"])
def test_a_draft_in_memory_saves_passes(method: str) -> None:
    loop = drop_in.generate(method, draft=noisy(), num_draft_tokens=4)
    both(shared(), loop, **GREEDY)
    assert all(stats.tokens_per_pass > 1.5 for stats in loop.stats)


def test_trained_heads_on_a_model_in_memory() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(bundled_path("target"), dtype=torch.float32)
    loop = drop_in.generate("eagle3", heads=bundled_path("heads/eagle3"), num_draft_tokens=4)
    prompt = torch.tensor([[1, 40, 50, 60]])
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False, custom_generate=loop), expected)
    assert loop.stats[0].num_drafted > 0


def test_attach_and_detach() -> None:
    model = random_model("llama")
    expected = model.generate(RAGGED, **GREEDY)
    loop = drop_in.attach(model, "suffix", num_draft_tokens=4)
    assert torch.equal(model.generate(RAGGED, GenerationConfig(max_new_tokens=12), attention_mask=MASK), expected)
    assert len(loop.stats) == 3
    again = drop_in.attach(model, "prompt-lookup")
    assert torch.equal(model.generate(inputs=RAGGED, **GREEDY), expected) and len(again.stats) == 3
    assert all(parameter.requires_grad for parameter in model.parameters()), "the model is as it was"
    copied = copy.deepcopy(model)
    drop_in.detach(model)
    assert "generate" not in vars(model) and torch.equal(copied.generate(RAGGED, **GREEDY), expected)
    with pytest.raises(OptionError, match="nothing is attached"):
        drop_in.detach(model)


def test_a_pipeline_and_stop_strings() -> None:
    words = {**{f"w{number}": number for number in range(VOCAB - 1)}, "abcdef": VOCAB - 1}  # transformers joins tokens to it
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w3")), pad_token="w0", eos_token="w2", padding_side="left"
    )
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    model = copy.deepcopy(shared())
    writes = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=2, device="cpu")
    prompts, options = ["w5 w6 w7 w5 w6", "w8 w9"], {"max_new_tokens": 12, "do_sample": False}
    expected = writes(prompts, **options)
    word = expected[0][0]["generated_text"].split()[8]
    loop = drop_in.attach(model, "suffix", num_draft_tokens=4)
    assert writes(prompts, **options) == expected and loop.stats
    ids = tokenizer(prompts, return_tensors="pt", padding=True)
    ending: dict[str, Any] = {"stop_strings": [word], "tokenizer": tokenizer, **options}
    found = model.generate(**ids, **ending)
    drop_in.detach(model)
    assert torch.equal(found, model.generate(**ids, **ending)) and int((found[0, 5:] == 0).sum()) < 8


def test_a_resized_model_is_opened_again() -> None:
    model, loop = random_model("llama"), drop_in.generate()
    both(model, loop, **GREEDY)
    model.resize_token_embeddings(60)
    both(model, loop, **GREEDY)


@pytest.mark.parametrize("as_checkpoint", [False, True])
def test_a_folder_as_the_hub_expects_it(as_checkpoint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = drop_in.write_folder(tmp_path / "repo", "suffix", num_draft_tokens=4)
    assert sorted(path.name for path in folder.iterdir()) == ["generate.py", "requirements.txt"]
    expected = shared().generate(RAGGED, **GREEDY)
    # the package under test may run from its source tree, where no requirement can be found
    monkeypatch.setattr("transformers.generation.utils.check_python_requirements", lambda *_, **__: None)
    if as_checkpoint:
        shared().save_pretrained(tmp_path / "repo")
        options: dict[str, Any] = {"trust_remote_code": True, "attn_implementation": "eager"}
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "repo", **options)
        assert "generate" in vars(model) and torch.equal(model.generate(RAGGED, **GREEDY), expected)
    else:
        found = shared().generate(RAGGED, **GREEDY, custom_generate=str(folder.parent), trust_remote_code=True)
        assert torch.equal(found, expected)
    with pytest.raises(OptionError, match="draft"):
        drop_in.write_folder(tmp_path, "draft-model", draft=noisy())
