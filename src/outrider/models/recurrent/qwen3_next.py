"""Qwen3-Next checkpoints (``Qwen3NextForCausalLM``): gated delta and gated attention layers, most with experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.cache.replay import ScanShape
from outrider.core.errors import ModelError
from outrider.models.linear import linear_of
from outrider.models.recurrent.config import ExpertShape, RecurrentConfig, RecurrentConfigKeys
from outrider.models.recurrent.delta_mixer import DeltaMixer
from outrider.models.recurrent.experts import RoutedExperts
from outrider.models.recurrent.family import RecurrentFamily
from outrider.models.recurrent.layers import GatedAttention, Mixer, RecurrentLayer
from outrider.models.recurrent.tensors import Tensors

_FULL, _LINEAR = "full_attention", "linear_attention"
_ROTARY = 0.25
_DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
    "full_attention_interval": 4,
}
"""Defaults of transformers for keys that a file may leave out."""


def describe(raw: Mapping[str, Any]) -> RecurrentConfig | None:
    keys = RecurrentConfigKeys(raw, _DEFAULTS)
    if not keys.silu or keys.flag("attention_bias"):
        return None
    rope = keys.raw.get("rope_parameters") or {}
    rotary = float(rope.get("partial_rotary_factor") or keys.raw.get("partial_rotary_factor") or _ROTARY)
    attention, is_attention = keys.attention("qwen3", rotary), _is_attention(keys)
    return RecurrentConfig(
        family="qwen3_next",
        scan=_scan(keys, is_attention.count(False)),
        experts=_experts(keys),
        **keys.of_attention(attention, is_attention),
    )


def _is_attention(keys: RecurrentConfigKeys) -> tuple[bool, ...]:
    num_layers, every = keys.whole("num_hidden_layers"), keys.whole("full_attention_interval")
    kinds = keys.raw.get("layer_types") or [_LINEAR if (n + 1) % every else _FULL for n in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {_FULL, _LINEAR}:
        raise ModelError(
            f"config.json is inconsistent: layer_types must be {num_layers} of {_FULL} and {_LINEAR}; fetch the file again"
        )
    return tuple(kind == _FULL for kind in kinds)


def _scan(keys: RecurrentConfigKeys, num_layers: int) -> ScanShape:
    num_heads, head_dim = keys.whole("linear_num_value_heads"), keys.whole("linear_value_head_dim")
    num_groups, state_size = keys.whole("linear_num_key_heads"), keys.whole("linear_key_head_dim")
    keys.divided("linear_num_value_heads", num_heads, "linear_num_key_heads")
    return ScanShape(
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=state_size,
        conv_len=keys.whole("linear_conv_kernel_dim"),
        conv_size=num_heads * head_dim + 2 * num_groups * state_size,
    )


def _experts(keys: RecurrentConfigKeys) -> tuple[ExpertShape | None, ...]:
    """The mixture of each layer; None for a layer with an ordinary MLP."""
    num_layers, plain = keys.whole("num_hidden_layers"), set(keys.raw.get("mlp_only_layers") or [])
    if not keys.raw.get("num_experts"):
        return (None,) * num_layers
    shape = ExpertShape(
        num_experts=keys.whole("num_experts"),
        num_chosen=keys.whole("num_experts_per_tok"),
        mlp_size=keys.whole("moe_intermediate_size"),
        shared_size=keys.whole("shared_expert_intermediate_size"),
        rescaled=keys.flag("norm_topk_prob"),
    )
    every = keys.whole("decoder_sparse_step")
    return tuple(None if n in plain or (n + 1) % every else shape for n in range(num_layers))


def layer(config: RecurrentConfig, index: int, tensors: Tensors) -> RecurrentLayer:
    hidden = config.hidden_size
    return RecurrentLayer(
        _mixer(config, index, tensors),
        tensors.norm("input_layernorm", hidden),
        _mlp(config, index, tensors.below("mlp")),
        tensors.norm("post_attention_layernorm", hidden),
    )


def _mixer(config: RecurrentConfig, index: int, tensors: Tensors) -> Mixer:
    place = config.memory_layer(index)
    if config.is_attention[index]:
        return _attention(config, place, tensors.below("self_attn"))
    return DeltaMixer(config, tensors.below("linear_attn"), place)


def _attention(config: RecurrentConfig, place: int, tensors: Tensors) -> GatedAttention:
    """Queries and gates are stored head by head: a query head, then its gate."""
    assert config.attention is not None
    num_heads, head_dim, hidden = config.attention.num_heads, config.attention.head_dim, config.hidden_size
    stored = tensors.take("q_proj.weight", 2 * num_heads * head_dim, hidden).unflatten(0, (num_heads, 2, head_dim))
    queries, gates = (stored[:, part].flatten(0, 1) for part in range(2))
    attention = tensors.attention(config.attention, place, queries)
    out = tensors.linear("o_proj", hidden, num_heads * head_dim, bias=config.attention.out_bias)
    return GatedAttention(attention, linear_of(gates, twofold=True), out)


def _mlp(config: RecurrentConfig, index: int, tensors: Tensors) -> Callable[[Tensor], Tensor]:
    assert config.attention is not None
    shape = config.experts[index]
    if shape is None:
        return tensors.mlp(config.attention)
    shared = tensors.below("shared_expert").mlp(replace(config.attention, mlp_size=shape.shared_size))
    return RoutedExperts(shape, tensors, config.hidden_size, shared)


FAMILY = RecurrentFamily(
    describe=describe,
    layer=layer,
    prefix="model",
    embeddings=("embed_tokens",),
    norm="norm",
    norm_offset=1.0,
)
