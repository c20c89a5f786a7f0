"""Small random models of every architecture that transformers builds as a causal language model.

A configuration gets random sizes under whatever names the architecture has for them, and random features on top: activations,
biases, rotary scaling, windows, tied embeddings, experts. Where an architecture refuses the features, it gets sizes alone.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every architecture, by transformers' name."""
VOCAB, MOST_PARAMETERS = 61, 6_000_000
ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
DRAWS = 12
"""Configurations that are drawn until transformers can run one."""
_fits: set[str] = set()
"""Architectures of which one model was built: their sizes are known to be small."""


class BuildError(Exception):
    """transformers does not build or run the configuration."""


def small_model(kind: str, seed: int, draw: int = 0) -> Any:
    """A random model of an architecture; the same for the same seed and draw."""
    chance = random.Random(f"{kind} {seed}" + (f" {draw}" if draw else ""))
    sizes = _sizes(chance)
    try:
        default = CONFIG_MAPPING[kind]()
    except Exception as error:  # transformers raises many kinds
        raise BuildError(f"no default: {type(error).__name__}") from error
    mixed = {**sizes, **_layer_types(default, sizes["num_hidden_layers"])}
    reason = ""
    derived = {name: value for name, value in sizes.items() if name != "head_dim"}  # some work it out from other sizes
    for wanted in (mixed | _features(chance, sizes), mixed, sizes, derived):
        try:
            return _built(kind, _known(default, wanted) | _particular(kind, sizes), seed)
        except Exception as error:  # transformers raises many kinds; the architecture may do with less
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
    raise BuildError(reason)


def _layer_types(default: PretrainedConfig, num_layers: int) -> dict[str, list[str]]:
    """Every kind of layer that the architecture has, in turns; attention is one of them."""
    text = getattr(default, "text_config", None) or default
    found: dict[str, list[str]] = {}
    for name in ("layer_types", "layers_block_type"):
        kinds = list(dict.fromkeys(getattr(text, name, None) or ["full_attention"]))
        kinds += ["full_attention"] if kinds == ["linear_attention"] else []
        found[name] = (kinds * num_layers)[:num_layers]
    return found


def _built(kind: str, given: dict[str, Any], seed: int) -> Any:
    config = CONFIG_MAPPING[kind](**given)
    if kind not in _fits:
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
    _fits.add(kind)
    return model


def _known(default: PretrainedConfig, wanted: dict[str, Any], *, is_inner: bool = False) -> dict[str, Any]:
    """What of ``wanted`` this architecture has a name for; configurations inside it get the same."""
    found: dict[str, Any] = {}
    if not is_inner or "vocab_size" in vars(default):
        found |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name, value in vars(default).items():
        if isinstance(value, PretrainedConfig):
            found[name] = type(value)(**_known(value, wanted, is_inner=True)).to_dict()
        elif name in wanted:
            found[name] = wanted[name]
    if "rope_parameters" in found and not _takes_flat(default):
        del found["rope_parameters"]
    if "kv_lora_rank" in found:  # every head has keys and values of its own
        found["num_key_value_heads"] = wanted["num_attention_heads"]
    return found


def _takes_flat(default: PretrainedConfig) -> bool:
    """Whether one rotary embedding serves all layers."""
    rope = getattr(default, "rope_parameters", None)
    return isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values())


def _sizes(chance: random.Random) -> dict[str, Any]:
    heads, layers, head_dim = chance.choice((2, 4)), chance.choice((2, 2, 3)), chance.choice((8, 16))
    size, length, window = head_dim * heads, chance.choice((32, 64, 128)), chance.choice((4, 8, 64))
    return {
        **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "dim_model"), size),
        **dict.fromkeys(("emb_dim", "embedding_dim", "lru_width", "ple_embed_dim"), size),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), layers),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), heads),
        **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_query_groups"), heads),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "decoder_ffn_dim"), 2 * size),
        **dict.fromkeys(("encoder_ffn_dim", "shared_expert_intermediate_size", "dim_ff", "dff", "ffn_hidden_size"), 2 * size),
        **dict.fromkeys(("expert_ffn_hidden_size", "feed_forward_size", "shared_experts_intermediate_size"), 2 * size),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions"), length),
        **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
        **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), chance.choice((1, 2))),
        **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
        **dict.fromkeys(("num_expert_group", "zero_expert_num"), 1),
        **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
        **dict.fromkeys(("sliding_window", "attention_window_size"), window),
        "num_key_value_heads": chance.choice((heads, heads // 2)),
        "head_dim": head_dim,
        "rotary_dim": head_dim // 2,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "attention_types": [[["global"], layers]],
        "is_decoder": True,
        "causal": True,
        **_rare_sizes(heads, head_dim, layers, length),
    }


def _rare_sizes(heads: int, head_dim: int, layers: int, length: int) -> dict[str, Any]:
    """Sizes of latent attention, of indexers, of recurrences, and of architectures that have names of their own."""
    size = heads * head_dim
    return {
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim"), 16),
        **dict.fromkeys(("index_head_dim", "indexer_head_dim", "attention_head_dim", "mamba_d_head"), 2 * head_dim),
        **dict.fromkeys(("index_n_heads", "indexer_n_heads", "n_mamba_heads", "mamba_n_heads", "linear_num_heads"), heads),
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "kv_channels"), head_dim),
        **dict.fromkeys(("qk_rope_head_dim", "attention_head_size"), head_dim),
        **dict.fromkeys(("index_topk", "indexer_budget", "local_attn_chunk_length", "lsh_attn_chunk_length"), 4),
        **dict.fromkeys(("indexer_compress_ratio", "indexer_kv_heads", "n_groups", "attn_layer_offset"), 1),
        **dict.fromkeys(("state_size", "mamba_d_state", "hc_lowrank", "adapter_rank"), 8),
        "mamba_d_ssm": 2 * size,
        **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim", "nemo_conv_channels"), 16),
        **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size", "encoder_hash_byte_group_vocab"), VOCAB),
        **dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel"), size),
        "ngram_vocab_size_base": VOCAB,
        "num_blocks": layers,
        "mamba_headdim": 2 * head_dim,
        "mamba_expand": 2,
        "qk_dim_factor": 1.0,
        "attn_layer_indices": [1],
        "hybrid_layer_ids": [1],
        "attn_layer_period": 2,
        "block_types": ["recurrent", "attention"],
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [8, length // 8],
        "axial_pos_embds_dim": [size // 2, size // 2],
        "languages": ["en_XX"],
        "default_language": "en_XX",
    }


def _particular(kind: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """What a single architecture needs under a name that means something else elsewhere."""
    heads, size = sizes["num_attention_heads"], sizes["hidden_size"]
    rotary = {"rope_type": "default", "rope_theta": 1e4}
    found: dict[str, dict[str, Any]] = {
        "mamba2": {"num_heads": 2 * heads},
        "zamba": {"attention_hidden_size": 2 * size},
        "dbrx": {"attn_config": {"kv_n_heads": sizes["num_key_value_heads"], "rope_theta": 1e4, "clip_qkv": 8.0}},
        "cohere_compass_text": {"rope_parameters": {"full_attention": rotary, "sliding_attention": rotary}},
    }
    return found.get(kind, {})


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
