"""Mamba-2 checkpoints (``Mamba2ForCausalLM``): every layer is only a mixer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.cache.replay import ScanShape
from outrider.models.recurrent.config import UNBOUNDED, RecurrentConfig, RecurrentConfigKeys
from outrider.models.recurrent.family import RecurrentFamily
from outrider.models.recurrent.layers import RecurrentLayer
from outrider.models.recurrent.mamba_mixer import MambaMixer
from outrider.models.recurrent.tensors import Tensors

_DEFAULTS = {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "conv_kernel": 4,
    "n_groups": 8,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "residual_in_fp32": True,
    "eos_token_id": 2,
}
"""Defaults of transformers for keys that a file may leave out."""


def describe(raw: Mapping[str, Any]) -> RecurrentConfig | None:
    keys = RecurrentConfigKeys(raw, _DEFAULTS)
    if not keys.silu:
        return None
    num_heads, num_groups, state_size = keys.whole("num_heads"), keys.whole("n_groups"), keys.whole("state_size")
    keys.divided("num_heads", num_heads, "n_groups")
    inner = num_heads * keys.whole("head_dim")
    return RecurrentConfig(
        family="mamba2",
        vocab_size=keys.whole("vocab_size"),
        hidden_size=keys.whole("hidden_size"),
        max_len=UNBOUNDED,
        norm_eps=float(keys.raw["layer_norm_epsilon"]),
        is_attention=(False,) * keys.whole("num_hidden_layers"),
        scan=ScanShape(
            num_layers=keys.whole("num_hidden_layers"),
            num_heads=num_heads,
            head_dim=keys.whole("head_dim"),
            num_groups=num_groups,
            state_size=state_size,
            conv_len=keys.whole("conv_kernel"),
            conv_size=inner + 2 * num_groups * state_size,
        ),
        tied_head=keys.flag("tie_word_embeddings"),
        wide_residual=keys.flag("residual_in_fp32"),
        time_step_limit=keys.time_step_limit,
        mixer_biases=(keys.flag("use_bias"), keys.flag("use_bias")),
        conv_bias=keys.flag("use_conv_bias"),
        eos_ids=keys.eos_ids,
        dtype=keys.dtype,
    )


def layer(config: RecurrentConfig, index: int, tensors: Tensors) -> RecurrentLayer:
    return RecurrentLayer(MambaMixer(config, tensors.below("mixer"), index), tensors.norm("norm", config.hidden_size))


FAMILY = RecurrentFamily(
    describe=describe,
    layer=layer,
    prefix="backbone",
    embeddings=("embeddings", "embedding"),
    norm="norm_f",
)
