"""Bamba checkpoints (``BambaForCausalLM``): Mamba-2 and attention layers, each with an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.core.errors import ModelError
from outrider.models.recurrent.config import HYBRID_SIZES, RecurrentConfig, RecurrentConfigKeys
from outrider.models.recurrent.family import RecurrentFamily
from outrider.models.recurrent.layers import AttentionMixer, Mixer, RecurrentLayer
from outrider.models.recurrent.mamba_mixer import MambaMixer
from outrider.models.recurrent.tensors import Tensors

_ROTARY = 0.5
"""Share of a head that is rotated, whatever the file says (as in transformers)."""
_DEFAULTS = {
    **HYBRID_SIZES,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "eos_token_id": 2,
}
"""Defaults of transformers for keys that a file may leave out."""


def describe(raw: Mapping[str, Any]) -> RecurrentConfig | None:
    keys = RecurrentConfigKeys(raw, _DEFAULTS)
    if not keys.silu:
        return None
    attention, is_attention = keys.attention("llama", _ROTARY), _is_attention(keys)
    inner = keys.whole("mamba_expand") * keys.whole("hidden_size")
    return RecurrentConfig(
        family="bamba",
        scan=keys.mamba(is_attention.count(False), "mamba_expand * hidden_size", inner),
        time_step_limit=keys.time_step_limit,
        mixer_biases=(keys.flag("mamba_proj_bias"), keys.flag("mamba_proj_bias")),
        conv_bias=keys.flag("mamba_conv_bias"),
        **keys.of_attention(attention, is_attention),
    )


def _is_attention(keys: RecurrentConfigKeys) -> tuple[bool, ...]:
    num_layers, given = keys.whole("num_hidden_layers"), set(keys.raw.get("attn_layer_indices") or [])
    outside = sorted(given - set(range(num_layers)))
    if outside:
        raise ModelError(
            f"config.json has attention in layer {outside[0]}, and the layers are 0 to {num_layers - 1}; fetch the file again"
        )
    return tuple(layer in given for layer in range(num_layers))


def layer(config: RecurrentConfig, index: int, tensors: Tensors) -> RecurrentLayer:
    assert config.attention is not None
    hidden = config.hidden_size
    return RecurrentLayer(
        _mixer(config, index, tensors),
        tensors.norm("input_layernorm", hidden),
        tensors.below("feed_forward").mlp(config.attention),
        tensors.norm("pre_ff_layernorm", hidden),
    )


def _mixer(config: RecurrentConfig, index: int, tensors: Tensors) -> Mixer:
    assert config.attention is not None
    place = config.memory_layer(index)
    if config.is_attention[index]:
        return AttentionMixer(tensors.below("self_attn").attention(config.attention, place))
    return MambaMixer(config, tensors.below("mamba"), place)


FAMILY = RecurrentFamily(describe=describe, layer=layer, prefix="model", embeddings=("embed_tokens",), norm="final_layernorm")
