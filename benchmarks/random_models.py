"""Small random models of every architecture that transformers builds as a causal language model.

A configuration gets random sizes under whatever names the architecture has for them, and random features on top: activations,
biases, rotary scaling, windows, tied embeddings, experts. Where an architecture refuses the features, it gets sizes alone.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every architecture, by transformers' name."""
VOCAB, MOST_PARAMETERS = 61, 6_000_000
ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_GIVE_UP = 3
"""Configurations without features that fail before an architecture is given up."""
_failed: Counter[str] = Counter()


class BuildError(Exception):
    """transformers does not build the architecture this small."""


def small_model(kind: str, seed: int) -> Any:
    """A random model of an architecture; the same for the same seed."""
    if _failed[kind] >= _GIVE_UP:
        raise BuildError(f"{_GIVE_UP} other configurations failed")
    chance = random.Random(f"{kind} {seed}")
    sizes = _sizes(chance)
    try:
        default = CONFIG_MAPPING[kind]()
    except Exception as error:  # transformers raises many kinds
        raise BuildError(f"no default: {type(error).__name__}") from error
    mixed = {**sizes, "layer_types": _layer_types(default, sizes["num_hidden_layers"])}
    reason = ""
    derived = {name: value for name, value in sizes.items() if name != "head_dim"}  # some work it out from other sizes
    for wanted in (mixed | _features(chance, sizes), mixed, sizes, derived):
        try:
            return _built(kind, _known(default, wanted), seed)
        except Exception as error:  # transformers raises many kinds; the architecture may do with less
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
    _failed[kind] += 1
    raise BuildError(reason)


def _layer_types(default: PretrainedConfig, num_layers: int) -> list[str]:
    """Every kind of layer that the architecture has, in turns."""
    text = getattr(default, "text_config", None) or default
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ["full_attention"]))
    return (kinds * num_layers)[:num_layers]


def _built(kind: str, given: dict[str, Any], seed: int) -> Any:
    config = CONFIG_MAPPING[kind](**given)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise BuildError(f"{count:,} parameters")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
        model(input_ids=torch.tensor([[1, 2, 3]]))  # sizes that do not fit each other are found here
    return model


def _known(default: PretrainedConfig, wanted: dict[str, Any]) -> dict[str, Any]:
    """What of ``wanted`` this architecture has a name for; configurations inside it get the same."""
    found: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name, value in vars(default).items():
        if isinstance(value, PretrainedConfig):
            found[name] = type(value)(**_known(value, wanted)).to_dict()
        elif name in wanted:
            found[name] = wanted[name]
    if "rope_parameters" in found and not _takes_flat(default):
        del found["rope_parameters"]
    return found


def _takes_flat(default: PretrainedConfig) -> bool:
    """Whether one rotary embedding serves all layers."""
    rope = getattr(default, "rope_parameters", None)
    return isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values())


def _sizes(chance: random.Random) -> dict[str, Any]:
    heads, layers, head_dim = chance.choice((2, 4)), chance.choice((2, 3)), chance.choice((8, 16))
    size, length = head_dim * heads, chance.choice((32, 64, 128))
    return {
        **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "dim_model"), size),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), layers),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), heads),
        **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), heads),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "decoder_ffn_dim"), 2 * size),
        **dict.fromkeys(("encoder_ffn_dim", "shared_expert_intermediate_size", "dim_ff", "dff", "ffn_hidden_size"), 2 * size),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions"), length),
        **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
        **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), chance.choice((1, 2))),
        **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim"), 16),
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads"), heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), head_dim),
        "qk_rope_head_dim": head_dim,
        "attn_layer_indices": [1],
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_key_value_heads": chance.choice((heads, heads // 2)),
        "head_dim": head_dim,
        "rotary_dim": head_dim // 2,
        "state_size": 8,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_d_head": 2 * head_dim,
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "sliding_window": chance.choice((4, 8, 64)),
        "num_kv_shared_layers": 0,
        "attention_types": [[["global"], layers]],
        "is_decoder": True,
    }


def _features(chance: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    """Choices that are no sizes. A feature is left at its default half of the time."""
    act = chance.choice(("silu", "gelu", "relu", "gelu_pytorch_tanh"))
    choices: dict[str, Any] = {
        **dict.fromkeys(("hidden_act", "activation_function", "hidden_activation"), act),
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "bias", "qkv_bias"), chance.random() < 0.5),
        **dict.fromkeys(("use_qk_norm", "qk_layernorm", "parallel_attn", "use_parallel_residual"), chance.random() < 0.5),
        "tie_word_embeddings": chance.random() < 0.5,
        "norm_topk_prob": chance.random() < 0.5,
        "use_sliding_window": chance.random() < 0.5,
        "logits_scaling": chance.choice((1.0, 4.0)),
        "logit_scale": chance.choice((0.25, 1.0)),
        "residual_multiplier": chance.choice((0.5, 1.0)),
        "embedding_multiplier": chance.choice((1.0, 3.0)),
        "attention_multiplier": chance.choice((0.1, 0.5)),
        "final_logit_softcapping": chance.choice((None, 5.0)),
        "multi_query": chance.random() < 0.5,
        "rope_parameters": rope(chance.choice(ROPES), chance, sizes["head_dim"]),
    }
    return {name: value for name, value in choices.items() if chance.random() < 0.5}


def rope(kind: str, chance: random.Random, head_dim: int) -> dict[str, Any]:
    """Rotary parameters of a kind; what depends on the length of a text changes within the lengths that are tried."""
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": chance.choice((1e4, 5e5)), "factor": 4.0}
    if kind in ("yarn", "longrope", "llama3"):
        found["original_max_position_embeddings"] = 16
    if kind == "longrope":
        half = head_dim // 2
        found |= {"short_factor": [1.0 + 0.5 * i for i in range(half)], "long_factor": [4.0 + i for i in range(half)]}
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {name: value for name, value in found.items() if kind != "default" or name != "factor"}
