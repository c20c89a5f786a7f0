"""llama.cpp's architectures: their Hugging Face names, the names of their tensors, and the changes that the converter makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.core.errors import ModelError, nearest
from outrider.models.gguf.reader import GGUFFile, ModelKeys

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FUSED_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
SANDWICH_NAMES = BLOCK_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SINK_NAMES = {"attn_sinks": "self_attn.sinks", "post_attention_norm": "post_attention_layernorm"}
"""gpt-oss: scores beside those of the keys, and the norm before the experts."""
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Factors of the rotary frequencies: part of the configuration, not of the weights."""


@dataclass(frozen=True)
class GGUFFamily:
    """One architecture: its Hugging Face name, its tensors' names, and the changes that the converter makes."""

    model_type: str
    class_name: str
    block_names: Mapping[str, str] = field(default_factory=lambda: BLOCK_NAMES)
    rotary_pairs_adjacent: bool = False
    norms_plus_one: bool = False
    normalises_experts: bool = True
    """The weights of a node's experts add up to 1."""


MISTRAL = GGUFFamily("mistral", "MistralForCausalLM", rotary_pairs_adjacent=True)
MIXTRAL = GGUFFamily("mixtral", "MixtralForCausalLM", BLOCK_NAMES | EXPERT_NAMES, rotary_pairs_adjacent=True)
FAMILIES = {
    "llama": GGUFFamily("llama", "LlamaForCausalLM", rotary_pairs_adjacent=True),
    "mistral": MISTRAL,
    "qwen2": GGUFFamily("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GGUFFamily("qwen3", "Qwen3ForCausalLM", BLOCK_NAMES | QK_NORM_NAMES),
    "qwen3moe": GGUFFamily("qwen3_moe", "Qwen3MoeForCausalLM", BLOCK_NAMES | QK_NORM_NAMES | EXPERT_NAMES),
    "olmoe": GGUFFamily("olmoe", "OlmoeForCausalLM", BLOCK_NAMES | QK_NORM_NAMES | EXPERT_NAMES, normalises_experts=False),
    "gpt-oss": GGUFFamily("gpt_oss", "GptOssForCausalLM", BLOCK_NAMES | SINK_NAMES | EXPERT_NAMES),
    "phi3": GGUFFamily("phi3", "Phi3ForCausalLM", BLOCK_NAMES | FUSED_NAMES),
    "gemma": GGUFFamily("gemma", "GemmaForCausalLM", norms_plus_one=True),
    "gemma2": GGUFFamily("gemma2", "Gemma2ForCausalLM", SANDWICH_NAMES, norms_plus_one=True),
    "gemma3": GGUFFamily("gemma3_text", "Gemma3ForCausalLM", SANDWICH_NAMES | QK_NORM_NAMES, norms_plus_one=True),
}


def family_of(file: GGUFFile) -> GGUFFamily:
    keys = ModelKeys(file)
    family = FAMILIES.get(keys.architecture)
    if family is None:
        hint = nearest(keys.architecture, FAMILIES)
        raise ModelError(f"{file.path}: architecture {keys.architecture!r} is not supported as GGUF; {hint}")
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{file.path}: only one part of several; join them with llama.cpp's llama-gguf-split --merge")
    # llama.cpp has no architecture for Mistral and Mixtral; a window and experts are all that tells them from Llama.
    if family.model_type == "llama" and keys.whole("expert_count", 0):
        return MIXTRAL
    return MISTRAL if family.model_type == "llama" and keys.whole("attention.sliding_window", 0) else family
