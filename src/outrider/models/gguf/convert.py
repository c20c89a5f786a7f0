"""A GGUF file as the Hugging Face checkpoint it was made from: config.json and weights.

llama.cpp's converter renames tensors and changes three things in them, all undone here, so that one decoder serves
both formats:

1. llama files: rotary pairs. Hugging Face rotates (i, i + d/2), llama.cpp (2i, 2i + 1), so the rows of q and k of every
   head were reordered from [2, d/2] to [d/2, 2].
2. gemma files: norms multiply by 1 + w in Hugging Face and by w in llama.cpp, so 1 was added to every norm.
3. Tied heads are left out: no ``output.weight`` means that the embedding is the head.

Numbers lost to quantisation stay lost; everything else comes back exactly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import ModelError, nearest
from outrider.models.gguf.reader import GGUFFile, ModelKeys
from outrider.models.gguf.tokenizer import token_ids

# --- families: what llama.cpp calls an architecture -----------------------------------------------------------------

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
NOTHING: Mapping[str, Tensor] = {}
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Factors of the rotary frequencies: part of the configuration, not of the weights."""


@dataclass(frozen=True)
class Family:
    """One architecture: its Hugging Face name, its tensors' names, and what the converter did to them."""

    model_type: str
    class_name: str
    block_names: Mapping[str, str] = field(default_factory=lambda: BLOCK_NAMES)
    rotary_pairs_adjacent: bool = False
    norms_plus_one: bool = False


MISTRAL = Family("mistral", "MistralForCausalLM", rotary_pairs_adjacent=True)
FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", rotary_pairs_adjacent=True),
    "mistral": MISTRAL,
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", BLOCK_NAMES | QK_NORM_NAMES),
    "phi3": Family("phi3", "Phi3ForCausalLM", BLOCK_NAMES | FUSED_NAMES),
    "gemma": Family("gemma", "GemmaForCausalLM", norms_plus_one=True),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", SANDWICH_NAMES, norms_plus_one=True),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", SANDWICH_NAMES | QK_NORM_NAMES, norms_plus_one=True),
}


def _family(file: GGUFFile) -> Family:
    keys = ModelKeys(file)
    family = FAMILIES.get(keys.architecture)
    if family is None:
        hint = nearest(keys.architecture, FAMILIES)
        raise ModelError(f"{file.path}: architecture {keys.architecture!r} is not supported as GGUF; {hint}")
    if keys.whole("expert_count", 0):
        raise ModelError(f"{file.path}: GGUF mixtures of experts are not supported; load the Hugging Face checkpoint")
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{file.path}: only one part of several; join them with llama.cpp's llama-gguf-split --merge")
    # llama.cpp has no architecture for Mistral; a window is all that tells it from Llama.
    return MISTRAL if family.model_type == "llama" and keys.whole("attention.sliding_window", 0) else family


# --- config.json ----------------------------------------------------------------------------------------------------

FULL = "full_attention"


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The model's ``config.json`` as Hugging Face would have written it.

    One key is ours: ``rope_freq_factors``, present in files with a ``rope_freqs`` tensor (Llama 3.1 and later), a list
    of rotary_dim/2 numbers by which the rotary inverse frequencies are divided. ``rope_scaling`` says the same in
    Hugging Face's terms, so a reader needs one of the two, never both.
    """
    family, keys = _family(file), ModelKeys(file)
    vocab_size, hidden_size = _matrix_shape(file, "token_embd.weight")
    num_heads = keys.whole("attention.head_count")
    num_kv_heads = keys.whole("attention.head_count_kv", num_heads)
    head_dim = keys.whole("attention.key_length", _head_dim(file, num_heads, num_kv_heads))
    config = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": keys.whole("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon") or 1e-6,
        "max_position_embeddings": keys.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    config |= _rope_config(keys, head_dim) | token_ids(file)
    if family.model_type in ("llama", "qwen3"):
        for key, stem in (("attention_bias", "attn_q"), ("mlp_bias", "ffn_up")):
            config[key] = f"blk.0.{stem}.bias" in file.tensors
    if family.model_type in ("mistral", "phi3"):
        config["sliding_window"] = keys.whole("attention.sliding_window", 0) or None
    if family.norms_plus_one:
        config |= _gemma_config(keys, config)
    return config


def _matrix_shape(file: GGUFFile, name: str) -> tuple[int, int]:
    entry = file.tensors.get(name)
    if entry is None or len(entry.shape) != 2:
        raise ModelError(f"{file.path}: no matrix {name!r}, so this is not a language model; give a model file")
    return entry.shape[0], entry.shape[1]


def _head_dim(file: GGUFFile, num_heads: int, num_kv_heads: int) -> int:
    """The head size, from the rows of q, which cannot be wrong, where no key gives it."""
    if "blk.0.attn_qkv.weight" in file.tensors:
        return _matrix_shape(file, "blk.0.attn_qkv.weight")[0] // (num_heads + 2 * num_kv_heads)
    return _matrix_shape(file, "blk.0.attn_q.weight")[0] // num_heads


def _rope_config(keys: ModelKeys, head_dim: int) -> dict[str, Any]:
    theta = keys.real("rope.freq_base") or 10000.0
    config: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None}
    rotary_dim = keys.whole("rope.dimension_count", head_dim)
    if rotary_dim < head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    tensors = keys.file.tensors
    if "rope_freqs.weight" in tensors:
        factors = keys.file.tensor("rope_freqs.weight").tolist()
        return config | {"rope_freq_factors": factors, "rope_scaling": _factors_scaling(keys, factors, theta)}
    if "rope_factors_long.weight" in tensors and "rope_factors_short.weight" in tensors:
        return config | _longrope_scaling(keys)
    return config | {"rope_scaling": _formula_scaling(keys)}


def _factors_scaling(keys: ModelKeys, factors: list[float], theta: float) -> dict[str, Any]:
    """Llama 3's scaling if its formula gives these factors, else any factors at all, spelled as longrope."""
    if not factors or min(factors) <= 0:
        raise ModelError(f"{keys.file.path}: rope_freqs.weight holds no positive factors; convert the model again")
    original_len = keys.whole("rope.scaling.original_context_length", 8192)
    llama3 = {"factor": max(factors), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wavelengths = [2 * math.pi * theta ** (index / len(factors)) for index in range(len(factors))]
    expected = [_llama3_factor(original_len / wavelength, **llama3) for wavelength in wavelengths]
    if np.allclose(expected, factors, rtol=1e-3):
        return {"rope_type": "llama3", **llama3, "original_max_position_embeddings": original_len}
    same = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    return {"rope_type": "longrope", **same, "original_max_position_embeddings": keys.whole("context_length")}


def _llama3_factor(periods: float, *, factor: float, low_freq_factor: float, high_freq_factor: float) -> float:
    """1 for frequencies with many periods in the original context, ``factor`` for few, blended between."""
    blend = min(1.0, max(0.0, (periods - low_freq_factor) / (high_freq_factor - low_freq_factor)))
    return 1.0 / ((1.0 - blend) / factor + blend)


def _longrope_scaling(keys: ModelKeys) -> dict[str, Any]:
    original_len = keys.whole("rope.scaling.original_context_length", keys.whole("context_length"))
    scaling: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": original_len}
    for length in ("short", "long"):
        scaling[f"{length}_factor"] = keys.file.tensor(f"rope_factors_{length}.weight").tolist()
    if (attention_factor := keys.real("rope.scaling.attn_factor")) is not None:
        scaling["attention_factor"] = attention_factor
    # Hugging Face's Phi-3 wants the original length beside the scaling as well as in it.
    return {"rope_scaling": scaling, "original_max_position_embeddings": original_len}


def _formula_scaling(keys: ModelKeys) -> dict[str, Any] | None:
    kind, factor = keys.get("rope.scaling.type"), keys.real("rope.scaling.factor")
    if factor is None or factor == 1.0 or kind not in ("linear", "yarn"):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original_len = keys.whole("rope.scaling.original_context_length", keys.whole("context_length"))
        scaling["original_max_position_embeddings"] = original_len
        betas = {name: keys.real(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        scaling |= {name: beta for name, beta in betas.items() if beta is not None}
        if (extra := keys.real("rope.scaling.attn_factor")) is not None:
            # llama.cpp multiplies YaRN's own attention factor by it; Hugging Face wants the product.
            scaling["attention_factor"] = extra * (1.0 + 0.1 * math.log(factor))
    return scaling


def _gemma_config(keys: ModelKeys, config: dict[str, Any]) -> dict[str, Any]:
    """What gemma files leave to the reader's knowledge of the models: windows, their pattern, the query scale."""
    gemma: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    if keys.architecture == "gemma":
        return gemma
    num_layers, second = config["num_hidden_layers"], keys.architecture == "gemma2"
    # The two 27B models, known by their depth, scale queries by hidden_size / num_heads, all others by head_dim.
    is_27b = num_layers == (46 if second else 62)
    query_scale = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    window = keys.whole("attention.sliding_window", 4096 if second else 0)
    gemma |= {
        "query_pre_attn_scalar": query_scale,
        "attn_logit_softcapping": keys.real("attn_logit_softcapping") or (50.0 if second else None),
        "final_logit_softcapping": keys.real("final_logit_softcapping") or (30.0 if second else None),
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": _layer_types(keys, num_layers, default=2 if second else 6) if window else [FULL] * num_layers,
    }
    if not second:
        gemma["rope_local_base_freq"] = keys.real("rope.freq_base_swa") or 10000.0
    return gemma


def _layer_types(keys: ModelKeys, num_layers: int, *, default: int) -> list[str]:
    """Which layers see only a window: a flag per layer if the file has them, else all but every n-th."""
    flags = keys.file.metadata.get(f"{keys.architecture}.attention.sliding_window_pattern")
    if not isinstance(flags, list):
        full_every = keys.whole("attention.sliding_window_pattern", default) or 1
        flags = [(layer + 1) % full_every != 0 for layer in range(num_layers)]
    return ["sliding_attention" if windowed else FULL for windowed in flags]


# --- weights --------------------------------------------------------------------------------------------------------


def hf_tensors(
    file: GGUFFile, *, dtype: torch.dtype = torch.float32, stored: Mapping[str, Tensor] = NOTHING
) -> Iterator[tuple[str, Tensor]]:
    """The weights one by one under their Hugging Face names, with the converter's changes undone. The matrices in ``stored``
    are taken from there, any tensor with a row per output, and not read."""
    family, keys = _family(file), ModelKeys(file)
    num_heads = keys.whole("attention.head_count")
    heads_of = {"attn_q": num_heads, "attn_k": keys.whole("attention.head_count_kv", num_heads) or num_heads}
    for name in file.tensors:
        if name in ROPE_TENSORS:
            continue
        hf_name, tensor = _hf_name(file, family, name), stored[name] if name in stored else file.tensor(name)
        num_rotary_heads = heads_of.get(name.split(".")[-2])
        if family.rotary_pairs_adjacent and num_rotary_heads is not None:
            if len(tensor) % (2 * num_rotary_heads):
                raise ModelError(f"{file.path}: {name!r} does not divide into its heads; convert the model again")
            tensor = _split_rotary_pairs(tensor, num_rotary_heads)
        if family.norms_plus_one and name.endswith("norm.weight"):
            tensor = tensor - 1
        yield hf_name, tensor if name in stored else tensor.to(dtype)


def hf_names(file: GGUFFile) -> dict[str, str]:
    """The Hugging Face name of every weight, by its name in the file."""
    family = _family(file)
    return {name: _hf_name(file, family, name) for name in file.tensors if name not in ROPE_TENSORS}


def _hf_name(file: GGUFFile, family: Family, name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    layer, stem, kind = match.groups() if match else (None, "", "")
    hf_stem = TOP_NAMES.get(stem) if layer is None else family.block_names.get(stem)
    if hf_stem is None:
        raise ModelError(
            f"{file.path}: tensor {name!r} has no place in a {family.model_type} model, so this is a variant we do not "
            "know; load its Hugging Face checkpoint instead"
        )
    return f"{hf_stem}.{kind}" if layer is None else f"model.layers.{layer}.{hf_stem}.{kind}"


def _split_rotary_pairs(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows (2i, 2i + 1) of every head back to (i, i + d/2); works on weights and on biases."""
    by_pair = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return by_pair.transpose(1, 2).reshape(tensor.shape)
