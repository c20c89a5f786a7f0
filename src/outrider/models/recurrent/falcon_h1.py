"""Falcon-H1 checkpoints (``FalconH1ForCausalLM``): every layer has attention and a Mamba-2 mixer side by side, and an MLP.

The family scales the outputs of its matrices by constants of the config. These are multiplied into the weights when they are
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.cache.replay import ScanShape
from outrider.models.recurrent.config import HYBRID_SIZES, MixerNorm, RecurrentConfig, RecurrentConfigKeys, Scaled
from outrider.models.recurrent.family import RecurrentFamily
from outrider.models.recurrent.layers import AttentionMixer, RecurrentLayer, SideBySide
from outrider.models.recurrent.mamba_mixer import MambaMixer
from outrider.models.recurrent.tensors import Tensors

_DEFAULTS = {
    **HYBRID_SIZES,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_norm_before_gate": True,
    "eos_token_id": 2,
    "mlp_multipliers": (1.0, 1.0),
    "ssm_multipliers": (1.0,) * 5,
}
"""Defaults of transformers for keys that a file may leave out."""


def describe(raw: Mapping[str, Any]) -> RecurrentConfig | None:
    keys = RecurrentConfigKeys(raw, _DEFAULTS)
    is_one_table = keys.flag("tie_word_embeddings") and _factor(keys, "embedding") != _factor(keys, "lm_head")
    if not keys.silu or is_one_table:  # one table with two factors would be two
        return None
    num_layers = keys.whole("num_hidden_layers")
    scan = keys.mamba(num_layers, "mamba_d_ssm", keys.whole("mamba_d_ssm"))
    return RecurrentConfig(
        family="falcon_h1",
        scan=scan,
        time_step_limit=keys.time_step_limit,
        mixer_biases=(keys.flag("mamba_proj_bias"), keys.flag("projectors_bias")),
        mixer_norm=_norm(keys),
        conv_bias=keys.flag("mamba_conv_bias"),
        scaled=_scaled(keys, scan),
        **keys.of_attention(keys.attention("llama", 1.0), (True,) * num_layers),
    )


def _norm(keys: RecurrentConfigKeys) -> MixerNorm:
    if not keys.flag("mamba_rms_norm"):
        return MixerNorm.NONE
    return MixerNorm.BEFORE_GATE if keys.flag("mamba_norm_before_gate") else MixerNorm.AFTER_GATE


def _factor(keys: RecurrentConfigKeys, name: str) -> float:
    return float(keys.raw.get(f"{name}_multiplier", 1.0))


def _scaled(keys: RecurrentConfigKeys, scan: ScanShape) -> tuple[Scaled, ...]:
    """The constants. One that scales the input of a matrix does not change its bias."""
    enters, key = _factor(keys, "attention_in"), _factor(keys, "key")
    gate, down = (float(one) for one in keys.raw["mlp_multipliers"])
    inner, key_size = scan.num_heads * scan.head_dim, scan.num_groups * scan.state_size
    sizes = (inner, inner, key_size, key_size, scan.num_heads)
    parts = tuple(zip(sizes, map(float, keys.raw["ssm_multipliers"]), strict=True))
    given = _factor(keys, "ssm_in")
    found = [
        Scaled("embed_tokens.weight", _factor(keys, "embedding")),
        Scaled("lm_head.weight", _factor(keys, "lm_head")),
        *(Scaled(f"self_attn.{name}_proj.weight", enters) for name in "qv"),
        Scaled("self_attn.k_proj.weight", enters * key),
        Scaled("self_attn.k_proj.bias", key),
        Scaled("self_attn.o_proj", _factor(keys, "attention_out")),
        Scaled("mamba.in_proj.weight", given, parts),
        Scaled("mamba.in_proj.bias", 1.0, parts),
        Scaled("mamba.out_proj", _factor(keys, "ssm_out")),
        Scaled("feed_forward.gate_proj", gate),
        Scaled("feed_forward.down_proj", down),
    ]
    return tuple(one for one in found if one.factor != 1.0 or any(factor != 1.0 for _, factor in one.parts))


def layer(config: RecurrentConfig, index: int, tensors: Tensors) -> RecurrentLayer:
    assert config.attention is not None
    attention = AttentionMixer(tensors.below("self_attn").attention(config.attention, index))
    return RecurrentLayer(
        SideBySide(attention, MambaMixer(config, tensors.below("mamba"), index)),
        tensors.norm("input_layernorm", config.hidden_size),
        tensors.below("feed_forward").mlp(config.attention),
        tensors.norm("pre_ff_layernorm", config.hidden_size),
    )


FAMILY = RecurrentFamily(describe=describe, layer=layer, prefix="model", embeddings=("embed_tokens",), norm="final_layernorm")
