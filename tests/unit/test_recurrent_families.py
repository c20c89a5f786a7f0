"""Checkpoints with recurrent layers: the logits of transformers' own models, and refusals that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from outrider import LLM, SamplingParams
from outrider.core.errors import CompositionError, ModelError, OptionError
from outrider.core.tree import TokenTree
from outrider.models.config import config_of
from outrider.models.heads.embedding_and_output import read_target
from outrider.models.info import describe_model
from outrider.models.load import load_model
from outrider.models.recurrent.random_model import tiny_raw, write_random

VARIANTS: dict[str, dict[str, Any]] = {
    "mamba2": {},
    "mamba2-one-group": {"n_groups": 1, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
    "mamba2-limited": {"time_step_limit": [0.05, 0.2]},
    "bamba": {},
    "bamba-biased": {"mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True, "attn_layer_indices": [0, 2]},
    "bamba-without-attention": {"attn_layer_indices": None},
    "falcon_h1": {},
    "falcon_h1-scaled": {
        "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7, "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6, "mlp_multipliers": [0.9, 1.4],
        "ssm_multipliers": [0.5, 0.8, 1.1, 1.5, 0.7], "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True,
        "projectors_bias": True, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
    },
    "falcon_h1-normed": {"mamba_rms_norm": True, "projectors_bias": True, "tie_word_embeddings": True},
    "qwen3_next": {},
    "qwen3_next-tied": {"tie_word_embeddings": True, "norm_topk_prob": False, "num_experts": 6, "mlp_only_layers": []},
}  # fmt: skip
TEXTS = torch.randint(3, 64, (2, 90), generator=torch.Generator().manual_seed(1))


def saved(variant: str, folder: Path) -> Any:
    """A random model of transformers, saved as transformers saves it."""
    raw = tiny_raw(variant.partition("-")[0], **VARIANTS[variant])
    if raw["model_type"] not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {raw['model_type']}")
    torch.manual_seed(0)
    keys = {key: value for key, value in raw.items() if key != "model_type"}
    config = CONFIG_MAPPING[raw["model_type"]](**keys, pad_token_id=0, bos_token_id=1)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 0.3 if parameter.dim() == 1 else 1.2 / parameter.shape[-1] ** 0.5
            parameter.normal_(0, size) if parameter.dim() > 1 else parameter.add_(size * torch.randn_like(parameter))
            if name.endswith("A_log"):
                parameter.uniform_(-3, 1)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    theirs, ours = saved(variant, tmp_path), load_model(str(tmp_path), dtype="float32", device="cpu")
    with torch.no_grad():
        expected = theirs(TEXTS, use_cache=False).logits
    whole = ours.score(TokenTree.chain(TEXTS), ours.new_cache(2)).logits
    cache = ours.new_cache(2)
    ours.prefill(TEXTS[:, :70].tolist(), cache)
    rest = ours.score(TokenTree.chain(TEXTS[:, 70:]), cache).logits
    tolerance = 2e-4 * float(expected.std())
    assert (whole - expected).abs().max() < tolerance
    assert (rest - expected[:, 70:]).abs().max() < tolerance


def test_a_16_bit_model_is_near_the_32_bit_one(tmp_path: Path) -> None:
    write_random(tmp_path, tiny_raw("bamba"))
    exact, rounded = (load_model(str(tmp_path), dtype=dtype, device="cpu") for dtype in ("float32", "bfloat16"))
    logits = [model.score(TokenTree.chain(TEXTS), model.new_cache(2)).logits.float() for model in (exact, rounded)]
    assert (logits[0] - logits[1]).abs().mean() < 0.05 * logits[0].std()
    assert rounded.new_cache(1).node_bytes == exact.new_cache(1).node_bytes, "states and steps are float32 in both"


def test_taps_are_the_stream_between_layers_and_logits_read_them_out(tmp_path: Path) -> None:
    theirs, ours = saved("bamba", tmp_path), load_model(str(tmp_path), dtype="float32", device="cpu")
    scores = ours.score(TokenTree.chain(TEXTS), ours.new_cache(2), taps=(0, 1, ours.num_layers))
    with torch.no_grad():
        states = theirs(TEXTS, output_hidden_states=True, use_cache=False).hidden_states
    for tap in (0, 1):
        assert (scores.taps[tap] - states[tap]).abs().max() < 1e-4
    assert torch.allclose(ours.logits(scores.taps[ours.num_layers]), scores.logits, atol=1e-4)


@pytest.mark.parametrize("family", ["mamba2", "bamba", "falcon_h1", "qwen3_next"])
def test_heads_are_built_from_the_targets_own_ends(family: str, tmp_path: Path) -> None:
    write_random(tmp_path, tiny_raw(family))
    target = load_model(str(tmp_path), dtype="float32", device="cpu")
    keys, ends = read_target(str(tmp_path))
    states = torch.randn(5, 32)
    normed = torch.rms_norm(states, (32,), ends.norm, float(keys["rms_norm_eps"]))
    assert torch.allclose(normed @ ends.readout.T, target.logits(states), atol=1e-4)
    assert config_of(keys) is not None and keys["vocab_size"] == len(ends.embedding)


def test_outrider_info_says_what_runs_it(tmp_path: Path) -> None:
    write_random(tmp_path, tiny_raw("bamba"))
    info = describe_model(str(tmp_path))
    assert info.runs_on == "lean decoder with recurrent layers (2 of 3; 1 with attention)"
    assert "nowhere" in info.same_bits and info.num_layers == 3 and info.vocab_size == 64


def test_a_text_by_the_ordinary_verbs(tmp_path: Path) -> None:
    write_random(tmp_path, tiny_raw("mamba2"))
    llm = LLM(tmp_path, method="suffix", device="cpu")
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = llm.generate([[5, 6, 7, 5, 6]], params, method="plain")[0].token_ids
    assert llm.generate([[5, 6, 7, 5, 6]], params)[0].token_ids == expected


@pytest.mark.parametrize("method", ["early-exit", "swift", "del", "draft-verify"])
def test_methods_that_run_layers_apart_are_refused(method: str, tmp_path: Path) -> None:
    write_random(tmp_path, tiny_raw("mamba2"))
    with pytest.raises(CompositionError, match=r"recurrent state.*prompt-lookup"):
        LLM(tmp_path, method=method, device="cpu")


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"page_len": 16}, "no pages"), ({"numerics": "invariant"}, "numerics"), ({"dtype": "int8"}, "int8")],
)
def test_what_needs_another_decoder_is_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_random(tmp_path, tiny_raw("mamba2"))
    with pytest.raises(OptionError, match=reason):
        load_model(str(tmp_path), device="cpu", **options)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("mamba2", {"num_heads": -3}, "num_heads = -3"),
        ("mamba2", {"n_groups": 3}, "cannot be divided by n_groups"),
        ("mamba2", {"state_size": "many"}, "state_size"),
        ("mamba2", {"hidden_size": 40}, "shape"),
        ("bamba", {"attn_layer_indices": [7]}, "layer 7"),
        ("bamba", {"mamba_n_heads": 7}, "cannot be divided"),
        ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3_next", {"linear_num_value_heads": 5}, "cannot be divided"),
        ("bamba", {"time_step_limit": "soon"}, "cannot be read"),
    ],
)
def test_a_broken_config_is_refused(family: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_random(tmp_path, tiny_raw(family))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(ModelError, match=reason):
        load_model(str(tmp_path), device="cpu")


def test_an_unknown_family_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match="mamba2"):
        tiny_raw("mamba3")
