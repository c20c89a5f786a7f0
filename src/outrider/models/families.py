"""What the config files of each family leave out, and the switches that a family's name alone decides.

``DEFAULTS`` are values that transformers fills in; ``TRAITS`` are fields of ``ModelConfig`` that no key of the file says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Raw = Mapping[str, Any]
"""A parsed config.json."""

FULL, SLIDING = "full_attention", "sliding_attention"


def _always(raw: Raw, layer: int) -> bool:
    del raw, layer
    return True


def _all_but_every(pattern: int | str) -> Callable[[Raw, int], bool]:
    """All layers but every ``pattern``-th one. A string names the key that holds the number."""

    def rule(raw: Raw, layer: int) -> bool:
        return (layer + 1) % (pattern if isinstance(pattern, int) else int(raw[pattern])) != 0

    return rule


def _upper(raw: Raw, layer: int) -> bool:
    return layer >= raw["max_window_layers"]


def without_rope(raw: Raw) -> list[int]:
    """Layers of SmolLM3 that have no positions."""
    count, every = int(raw["num_hidden_layers"]), int(raw["no_rope_layer_interval"])
    flags = raw.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(count)]
    return [layer for layer, has_rope in enumerate(flags) if not has_rope]


WINDOW_RULES: dict[str, Callable[[Raw, int], bool]] = {
    **dict.fromkeys(("mistral", "phi3", "starcoder2", "mixtral", "qwen3_moe"), _always),
    **dict.fromkeys(("qwen2", "qwen3"), _upper),
    "smollm3": lambda raw, layer: layer in without_rope(raw),
    **dict.fromkeys(("gemma2", "gpt_oss"), _all_but_every(2)),
    **dict.fromkeys(("gemma3_text", "cohere2"), _all_but_every("sliding_window_pattern")),
    "olmo3": _all_but_every(4),
}
"""Which layers have the sliding window when the file does not list ``layer_types``."""

_BASE: Raw = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_GEMMA: Raw = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
}
_QWEN: Raw = {"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_OLMO: Raw = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
_COHERE: Raw = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "eos_token_id": 255001,
}
_FAMILIES: dict[str, Raw] = {
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "smollm3": {
        "max_position_embeddings": 32768,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 32000},
    "gemma": {
        **_GEMMA,
        "hidden_activation": None,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "sliding_window": None,
        "query_pre_attn_scalar": None,
    },
    "gemma2": {
        **_GEMMA,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
        "sliding_window_pattern": 6,
    },
    "olmo2": _OLMO,
    "olmo3": {**_OLMO, "rope_theta": 500_000.0, "sliding_window": 4096},
    "granite": {
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    "cohere": {**_COHERE, "use_qk_norm": False},
    "cohere2": {**_COHERE, "sliding_window": 4096, "sliding_window_pattern": 4},
    "stablelm": {
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "num_key_value_heads": 32,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "eos_token_id": 0,
    },
    "gpt_neox": {
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "attention_bias": True,
        "use_parallel_residual": True,
        "eos_token_id": 2,
    },
    "starcoder2": {
        "max_position_embeddings": 4096,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "use_bias": True,
        "tie_word_embeddings": True,
        "eos_token_id": 50256,
    },
    "mixtral": {
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "usual_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "eos_token_id": 2,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "usual_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
    },
    "olmoe": {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "usual_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "eos_token_id": 50279,
    },
    "gpt_oss": {
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "attention_bias": True,
        "usual_experts": 128,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "mlp_bias": True,
    },
}
_LATENT: Raw = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": None,
    "topk_group": None,
    "rope_interleave": True,
}
_FAMILIES |= {
    "deepseek_v2": {
        **_LATENT,
        "max_position_embeddings": 2048,
        "usual_experts": 64,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "eos_token_id": 2,
    },
    "deepseek_v3": {
        **_LATENT,
        "max_position_embeddings": 4096,
        "usual_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "eos_token_id": 1,
    },
}
_FAMILIES |= {
    "glm4_moe_lite": {
        **_FAMILIES["deepseek_v3"],
        "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "usual_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
    },
    "youtu": {**_LATENT, "max_position_embeddings": 131_072, "tie_word_embeddings": True, "eos_token_id": 128_001},
    "minicpm3": {
        **_LATENT,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": None,
        "rope_interleave": False,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
}
DEFAULTS: dict[str, Raw] = {name: {**_BASE, **row} for name, row in _FAMILIES.items()}

_POST: Raw = {"post_norms": True, "pre_norms": False, "qk_norm": True, "qk_norm_span": "whole"}
_OF_COHERE: Raw = {"norm_kind": "layer", "parallel": True, "one_norm": True, "interleaved_rope": True}
_OF_GEMMA: Raw = {"norm_offset": 1.0}
TRAITS: dict[str, Raw] = {
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "gemma": _OF_GEMMA,
    "gemma2": {**_OF_GEMMA, "post_norms": True},
    "gemma3_text": {**_OF_GEMMA, "post_norms": True, "qk_norm": True},
    **dict.fromkeys(("olmo2", "olmo3"), _POST),
    "olmoe": {"qk_norm": True, "qk_norm_span": "whole"},
    "cohere": {**_OF_COHERE, "qk_norm_span": "heads"},
    "cohere2": _OF_COHERE,
    "stablelm": {"norm_kind": "layer", "norm_bias": True, "qk_norm_span": "heads"},
    "gpt_neox": {"norm_kind": "layer", "norm_bias": True, "gated": False, "mlp_bias": True},
    "starcoder2": {"norm_kind": "layer", "norm_bias": True, "gated": False},
    "gpt_oss": {"sinks": True, "activation": "clamped"},
}
_CORRECTED: Raw = {"scoring": "sigmoid", "corrected": True, "group_best": 2}
ROUTING: dict[str, Raw] = dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), _CORRECTED)
"""Fields of ``Experts`` that a family's name alone decides."""
