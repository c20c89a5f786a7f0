"""Exactness through the adapter, off the beaten path: scaled positions, odd heads, full rows, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf_adapter import LLAMA, MODELS, VOCAB, random_model

import outrider.models.hf as hf
from outrider import LLM
from outrider.core.errors import ModelError, OptionError, RequestError
from outrider.core.params import SamplingParams
from outrider.core.request import Request
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import compose
from outrider.models.hf import HFModel

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [4.0, 6.0, 8.0, 10.0],
    "original_max_position_embeddings": 40,
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "factor": 4.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "partial_rotary_factor": 0.5}
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "phimoe-longrope": (
        "phimoe",
        {**LLAMA, "num_local_experts": 2, "max_position_embeddings": 160, "original_max_position_embeddings": 40}
        | {"rope_parameters": LONGROPE},
    ),
    "stablelm-dynamic": ("stablelm", {**LLAMA, "max_position_embeddings": 40, "rope_parameters": DYNAMIC}),
}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granite", {**LLAMA, "logits_scaling": 8.0}),
    "cohere": ("cohere", {**LLAMA, "logit_scale": 0.0625}),
    "bert": (
        "bert",
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "is_decoder": True}
        | {"max_position_embeddings": 128},
    ),
}
PROMPTS = [[5, 9, 33, 4, 17, 8, 44, 21, 3], [7, 7, 12], [50, 4, 29, 30, 31, 50, 4, 29, 30, 31, 50, 4], [6]]


def texts(target: HFModel, name: str, *, num_tokens: int, batch: int) -> list[list[int]]:
    requests = [Request(prompt, SamplingParams(max_tokens=num_tokens)) for prompt in PROMPTS]
    engine = Engine(target, compose(name, target, options={} if name == "plain" else {"num_draft_tokens": 6}))
    done = {step.request: step.state for step in run(engine, requests, max_batch_size=batch) if step.state.is_finished}
    return [done[i].output_ids for i in range(len(PROMPTS))]


def generated(target: HFModel, *, num_tokens: int) -> list[list[int]]:
    """What transformers' own generate writes, prompt by prompt."""
    found: list[list[int]] = []
    for prompt in PROMPTS:
        ids, room = torch.tensor([prompt]), min(num_tokens, target.max_len - len(prompt))
        config = {"do_sample": False, "max_new_tokens": room, "eos_token_id": None, "pad_token_id": 0}
        out = target.model.generate(ids, attention_mask=torch.ones_like(ids), **config)
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("name", list(SCALED))
def test_scaled_positions_up_to_the_last_token(name: str) -> None:
    """Texts that fill the whole context, alone and beside shorter ones, with and without trees, are generate's."""
    target = HFModel(random_model(*SCALED[name]), name)
    assert target.max_len == 40
    expected = generated(target, num_tokens=60)
    for method, batch in (("plain", 4), ("prompt-lookup", 1), ("token-recycling", 4)):
        assert texts(target, method, num_tokens=60, batch=batch) == expected, (method, batch)


def test_a_switch_that_nobody_knew_of_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the length where its positions change a row would depend on its neighbours: the context ends before, and says so."""
    monkeypatch.setattr(hf, "_context_of", lambda config, name, wanted: wanted or 160)
    with pytest.warns(UserWarning, match=r"phimoe: .*longest row beside it.* opened for 40 tokens"):
        target = HFModel(random_model(*SCALED["phimoe-longrope"]), "phimoe")
    assert target.max_len == 40
    with pytest.raises(ModelError, match=r"longest row beside it.* use max_len = 40 or less"):
        HFModel(random_model(*SCALED["phimoe-longrope"]), "phimoe", max_len=100)


def test_a_switch_that_no_config_names_is_found_by_halving(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(*MODELS["gpt_neox"])
    forward = model.forward

    def crowded(*, position_ids: Any = None, **options: Any) -> Any:
        """Stretches positions once a row beside them is longer than 40."""
        moved = position_ids is not None and position_ids.shape[0] > 1 and int(position_ids.max()) > 40
        return forward(position_ids=2 * position_ids if moved else position_ids, **options)

    monkeypatch.setattr(model, "forward", crowded)
    with pytest.warns(UserWarning, match="opened for 32 tokens"):
        assert HFModel(model).max_len == 32


def test_a_context_beyond_the_switch_is_refused() -> None:
    model = random_model(*SCALED["phimoe-longrope"])
    with pytest.raises(OptionError, match="at most"):
        HFModel(model, "phimoe", max_len=100)
    assert HFModel(model, "phimoe", max_len=24).max_len == 24


def test_a_full_row_beside_one_that_drafts_on() -> None:
    """Learned positions end at the context: the padding of a full row stays inside."""
    target = HFModel(random_model("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}))
    expected = generated(target, num_tokens=40)
    assert texts(target, "token-recycling", num_tokens=40, batch=4) == expected
    assert texts(target, "prompt-lookup", num_tokens=40, batch=4) == expected


@pytest.mark.parametrize("name", list(HEADS))
def test_token_recycling_on_heads_that_scale_or_hide_their_logits(name: str) -> None:
    target = HFModel(random_model(*HEADS[name]), name)
    assert target.traits.can_read_out == (name != "bert")
    assert texts(target, "token-recycling", num_tokens=20, batch=2) == generated(target, num_tokens=20)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "ALiBi"),
        ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, "ALiBi"),
        ("falcon", {**LLAMA, "alibi": True, "new_decoder_architecture": False}, "ALiBi"),
        (
            "gpt_neo",
            {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
            "local attention",
        ),
        ("roformer", {**LLAMA, "is_decoder": True, "embedding_size": 32}, "no position for each token"),
    ],
)
def test_architectures_without_free_positions_are_refused_by_name(kind: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        HFModel(random_model(kind, options))


def test_a_model_that_cannot_step_in_a_ragged_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trees are fine, and one token beside a longer row is not."""
    model = random_model(*MODELS["gpt2"])
    forward = model.forward

    def narrow(*, input_ids: Any, attention_mask: Any = None, **options: Any) -> Any:
        if input_ids.shape[1] == 1 and attention_mask is not None:
            raise RuntimeError("Tensors must have same number of dimensions")
        return forward(input_ids=input_ids, attention_mask=attention_mask, **options)

    monkeypatch.setattr(model, "forward", narrow)
    with pytest.raises(ModelError, match=r"cannot score trees .RuntimeError: Tensors must"):
        HFModel(model)


def test_a_model_of_several_texts_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(*MODELS["gpt2"])

    def ambiguous(*_: Any, **__: Any) -> Any:
        raise ValueError("Multiple valid text configs were found")

    monkeypatch.setattr(model.config, "get_text_config", ambiguous)
    with pytest.raises(ModelError, match="music: GPT2LMHeadModel has several parts"):
        HFModel(model, "music")


def test_layers_that_share_keys_are_fine() -> None:
    options = {
        **LLAMA,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": None,
    }
    target = HFModel(random_model("gemma3n_text", options), "gemma3n")
    assert texts(target, "token-recycling", num_tokens=16, batch=4) == generated(target, num_tokens=16)


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gpt_neox", "llama"])
def test_a_folder_without_a_tokenizer_takes_token_ids(kind: str, tmp_path: Path) -> None:
    """Whatever the family: token ids need no tokenizer, and text says what is missing."""
    family, options = MODELS.get(kind, ("llama", {**LLAMA, "hidden_size": 64, "num_attention_heads": 4}))
    random_model(family, options).save_pretrained(tmp_path)
    llm = LLM(tmp_path, method="token-recycling", dtype="float32")
    output = llm.generate([5, 9, 33], SamplingParams(max_tokens=6, ignore_eos=True))[0]
    assert len(output.token_ids) == 6 and output.text == ""
    chunks = list(llm.stream([5, 9, 33], SamplingParams(max_tokens=6, ignore_eos=True)))
    assert [token for chunk in chunks for token in chunk.token_ids] == output.token_ids
    with pytest.raises(RequestError, match="token ids"):
        llm.generate("hi")
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        llm.generate([5], SamplingParams(stop="end"))
