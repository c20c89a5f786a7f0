"""The matrices of latent attention, from a checkpoint's own to those of the absorbed form (``latent.py``)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from outrider.models.features import ModelConfig
from outrider.models.rope import head_order


class Read(Protocol):
    """A tensor of the checkpoint by our name for it, checked against a shape."""

    def __call__(self, name: str, *shape: int) -> Tensor: ...


def latent_tensors(config: ModelConfig, layer: int, read: Read) -> dict[str, Tensor]:
    """The tensors of a layer's attention, by their names in ``LayerWeights``."""
    latent, hidden, at = config.latent, config.hidden_size, f"layers.{layer}.self_attn."
    assert latent is not None
    heads, width, query_dim = config.num_heads, config.head_dim, latent.query_dim
    ups = read(f"{at}kv_b_proj.weight", heads * (latent.nope_dim + latent.value_dim), latent.rank)
    key_up, value_up = ups.unflatten(0, (heads, -1)).split([latent.nope_dim, latent.value_dim], 1)
    found = {
        "latent_norm": read(f"{at}kv_a_layernorm.weight", latent.rank),
        "key_up": key_up.transpose(1, 2).contiguous(),
        "value_up": value_up.contiguous(),
    }
    if latent.query_rank is None:
        first = _ordered(config, layer, read(f"{at}q_proj.weight", heads * query_dim, hidden), query_dim)
    else:
        up = read(f"{at}q_b_proj.weight", heads * query_dim, latent.query_rank)
        found["query_norm"] = read(f"{at}q_a_layernorm.weight", latent.query_rank)
        found["query_up"] = _ordered(config, layer, up, query_dim)
        first = read(f"{at}q_a_proj.weight", latent.query_rank, hidden)
    down = _ordered(config, layer, read(f"{at}kv_a_proj_with_mqa.weight", width, hidden), width)
    found["qkv"] = torch.cat((first, down))
    if config.qkv_bias:  # queries that come from the residual stream have none
        bias = _ordered(config, layer, read(f"{at}kv_a_proj_with_mqa.bias", width), width)
        before = first.new_zeros(len(first)) if latent.query_rank is None else read(f"{at}q_a_proj.bias", len(first))
        found["qkv_bias"] = torch.cat((before, bias))
    return found


def _ordered(config: ModelConfig, layer: int, rows: Tensor, size: int) -> Tensor:
    """Rows of heads of ``size``, with the rotary partners of each head's rotated end half that end apart."""
    latent, rope = config.latent, config.rope_of_layer[layer]
    assert latent is not None
    order = None
    if rope is not None:
        order = head_order(config.ropes[rope].dim, latent.rope_dim, interleaved=config.interleaved_rope)
    if order is None:
        return rows
    free = size - latent.rope_dim
    places = torch.cat((torch.arange(free), free + order))
    return rows.unflatten(0, (-1, size))[:, places].flatten(0, 1)
