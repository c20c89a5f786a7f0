"""Parts of a recurrent target that trained heads and new draft models use: embedding, output matrix, and sizes for a layer of
their own.

Heads are built from Llama layers whatever the target is. A target without attention does not say how many heads such a layer
should have. So it gets heads of size 64 or near it, and an MLP four times as wide as the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.models.recurrent.config import RecurrentConfig
from outrider.models.recurrent.families import FAMILIES
from outrider.models.recurrent.tensors import Tensors
from outrider.models.weights import TensorSource

_HEAD_DIM = 64


def llama_keys(config: RecurrentConfig, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of a Llama as wide as this model, with its vocabulary."""
    kept = {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in raw}
    return {
        **kept,
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_len,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_head,
        **_layer_keys(config),
    }


def _layer_keys(config: RecurrentConfig) -> dict[str, Any]:
    attention, hidden = config.attention, config.hidden_size
    if attention is None:
        num_heads = next(n for n in range(max(1, hidden // _HEAD_DIM), 0, -1) if hidden % (2 * n) == 0 or n == 1)
        sizes, mlp_size, theta = (num_heads, num_heads, hidden // num_heads), 4 * hidden, 10_000.0
    else:
        sizes = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
        mlp_size, theta = attention.mlp_size, attention.ropes[0].theta
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return {**dict(zip(names, sizes, strict=True)), "intermediate_size": mlp_size, "rope_theta": theta}


def read_ends(config: RecurrentConfig, source: TensorSource) -> tuple[Tensor, Tensor, Tensor]:
    """Embedding, weight of the last norm and output matrix, in float32."""
    family, shape = FAMILIES[config.family], (config.vocab_size, config.hidden_size)
    whole = Tensors(source, torch.float32, torch.device("cpu"), config.norm_eps, family.norm_offset, scaled=config.scaled)
    inner = whole.below(family.prefix)
    names = [name for name in family.embeddings if inner.has(f"{name}.weight")]
    embedding = inner.take(f"{(names or family.embeddings)[0]}.weight", *shape)
    norm = inner.take(f"{family.norm}.weight", config.hidden_size) + family.norm_offset
    return embedding, norm, embedding if config.tied_head else whole.take("lm_head.weight", *shape)
