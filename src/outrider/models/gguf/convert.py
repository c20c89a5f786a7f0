"""A GGUF file as the Hugging Face checkpoint it was made from: config.json and weights.

llama.cpp's converter renames tensors and changes three things in them, all undone here, so that one decoder serves
both formats:

1. llama files: rotary pairs. Hugging Face rotates (i, i + d/2), llama.cpp (2i, 2i + 1), so the rows of q and k of every
   head were reordered from [2, d/2] to [d/2, 2].
2. gemma files: norms multiply by 1 + w in Hugging Face and by w in llama.cpp, so 1 was added to every norm.
3. Tied heads are left out: no ``output.weight`` means that the embedding is the head.
4. The matrices of all experts of a layer are one tensor.

Quantised weights keep their rounding errors. Everything else is restored exactly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import ModelError
from outrider.models.gguf.families import ROPE_TENSORS, TOP_NAMES, GGUFFamily, family_of
from outrider.models.gguf.reader import GGUFFile, ModelKeys
from outrider.models.gguf.tokenizer import token_ids
from outrider.models.names import named_in

NOTHING: Mapping[str, Tensor] = {}

# --- config.json ----------------------------------------------------------------------------------------------------

FULL = "full_attention"


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The model's ``config.json`` as Hugging Face would have written it.

    One key is ours: ``rope_freq_factors``, present in files with a ``rope_freqs`` tensor (Llama 3.1 and later), a list of
    rotary_dim/2 numbers by which the rotary inverse frequencies are divided. ``rope_scaling`` says the same in Hugging Face's
    terms, so a reader needs only one of the two.
    """
    family, keys = family_of(file), ModelKeys(file)
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
    if family.model_type in ("mistral", "phi3", "gpt_oss"):
        config["sliding_window"] = keys.whole("attention.sliding_window", 0) or None
    if family.norms_plus_one:
        config |= _gemma_config(keys, config)
    return config | _expert_config(file, family, keys)


def _expert_config(file: GGUFFile, family: GGUFFamily, keys: ModelKeys) -> dict[str, Any]:
    """The keys of a mixture of experts. Layers without a router are ordinary ones."""
    if "ffn_gate_inp" not in family.block_names:
        return {}
    count = keys.whole("expert_count")
    size = keys.whole("expert_feed_forward_length", keys.whole("feed_forward_length"))
    dense = [layer for layer in range(keys.whole("block_count")) if f"blk.{layer}.ffn_gate_inp.weight" not in file.tensors]
    found = {"num_experts_per_tok": keys.whole("expert_used_count"), "norm_topk_prob": family.normalises_experts}
    if family.model_type == "qwen3_moe":
        return found | {"num_experts": count, "moe_intermediate_size": size, "mlp_only_layers": dense}
    name = "num_experts" if family.model_type == "olmoe" else "num_local_experts"
    return found | {name: count, "intermediate_size": size}


def _matrix_shape(file: GGUFFile, name: str) -> tuple[int, int]:
    entry = file.tensors.get(name)
    if entry is None or len(entry.shape) != 2:
        raise ModelError(f"{file.path}: no matrix {name!r}, so this is not a language model; give a model file")
    return entry.shape[0], entry.shape[1]


def _head_dim(file: GGUFFile, num_heads: int, num_kv_heads: int) -> int:
    """The head size. If no key gives it, it follows from the rows of q."""
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
    """Llama 3's scaling if its formula gives these factors; otherwise the factors as longrope."""
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
        if keys.architecture == "gpt-oss":  # the file does not say it
            scaling["truncate"] = False
        betas = {name: keys.real(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        scaling |= {name: beta for name, beta in betas.items() if beta is not None}
        if (extra := keys.real("rope.scaling.attn_factor")) is not None:
            # llama.cpp multiplies YaRN's own attention factor by it; Hugging Face wants the product.
            scaling["attention_factor"] = extra * (1.0 + 0.1 * math.log(factor))
    return scaling


def _gemma_config(keys: ModelKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Settings that gemma files do not hold: windows, their pattern, the query scale."""
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
    """Which layers have a window: from a flag per layer if the file has them, else all but every n-th."""
    flags = keys.file.metadata.get(f"{keys.architecture}.attention.sliding_window_pattern")
    if not isinstance(flags, list):
        full_every = keys.whole("attention.sliding_window_pattern", default) or 1
        flags = [(layer + 1) % full_every != 0 for layer in range(num_layers)]
    return ["sliding_attention" if windowed else FULL for windowed in flags]


# --- weights --------------------------------------------------------------------------------------------------------


def hf_tensors(
    file: GGUFFile, *, dtype: torch.dtype = torch.float32, stored: Mapping[str, Tensor] = NOTHING
) -> Iterator[tuple[str, Tensor]]:
    """The weights one by one under their Hugging Face names, with the converter's changes undone. Matrices in ``stored``
    are taken from there instead of being read."""
    family, keys = family_of(file), ModelKeys(file)
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
        tensor = tensor if name in stored else tensor.to(dtype)
        yield from zip(_each(hf_name, tensor.shape), tensor if "{}" in hf_name else [tensor], strict=True)


def hf_names(file: GGUFFile) -> dict[str, list[str]]:
    """The Hugging Face names of every weight, by its name in the file: one per expert, or one."""
    family, found = family_of(file), dict[str, list[str]]()
    for name, entry in file.tensors.items():
        if name not in ROPE_TENSORS:
            found[name] = _each(_hf_name(file, family, name), entry.shape)
    return found


def _each(hf_name: str, shape: Sequence[int]) -> list[str]:
    """The Hugging Face names for a tensor of this shape: one, or one per expert."""
    return [hf_name.format(expert) for expert in range(shape[0])] if "{}" in hf_name else [hf_name]


def _hf_name(file: GGUFFile, family: GGUFFamily, name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    layer, stem, kind = match.groups() if match else (None, "", "")
    hf_stem = TOP_NAMES.get(stem) if layer is None else family.block_names.get(stem)
    if hf_stem is None:
        raise ModelError(
            f"{file.path}: tensor {name!r} is unknown in a {family.model_type} model, so this is a variant we do not "
            "know; load its Hugging Face checkpoint instead"
        )
    inner = f"{hf_stem}.{kind}" if layer is None else f"layers.{layer}.{hf_stem}.{kind}"
    return inner if layer is None else "model." + named_in(family.model_type, inner)


def _split_rotary_pairs(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows (2i, 2i + 1) of every head back to (i, i + d/2); works on weights and on biases."""
    by_pair = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return by_pair.transpose(1, 2).reshape(tensor.shape)
