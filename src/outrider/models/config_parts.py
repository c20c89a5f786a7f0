"""Reads what a config file says of latent attention and of experts."""

from __future__ import annotations

from typing import Any, Protocol

from outrider.models.families import ROUTING, Raw
from outrider.models.features import Experts, Latent


class ConfigKeys(Protocol):
    """A config file with its family's defaults filled in."""

    raw: Raw
    family: str
    num_layers: int

    def whole(self, key: str) -> int:
        """A positive whole number."""
        ...

    def own(self, key: str) -> Any:
        """The value of a key, if this family uses it; otherwise None, even if the file has it."""
        ...


def latent_of(keys: ConfigKeys) -> Latent | None:
    """The latent attention of a config; None if keys and values are cached directly."""
    if not keys.own("kv_lora_rank"):
        return None
    widest = keys.whole("hidden_size") // keys.whole("num_attention_heads")
    return Latent(
        rank=keys.whole("kv_lora_rank"),
        query_rank=None if keys.raw["q_lora_rank"] is None else keys.whole("q_lora_rank"),
        nope_dim=keys.whole("qk_nope_head_dim"),
        rope_dim=keys.whole("qk_rope_head_dim"),
        value_dim=widest if keys.raw["v_head_dim"] is None else keys.whole("v_head_dim"),
    )


def experts_of(keys: ConfigKeys) -> Experts | None:
    """The experts of a config; None if every layer has one MLP."""
    raw = keys.raw
    if not keys.own("usual_experts"):
        return None
    names = ("num_experts", "num_local_experts", "n_routed_experts", "usual_experts")
    grouped = (keys.own("topk_method") or "greedy") != "greedy"
    return Experts(
        count=int(next(raw[name] for name in names if raw.get(name))),
        num_chosen=keys.whole("num_experts_per_tok"),
        size=keys.whole("moe_intermediate_size" if keys.own("moe_intermediate_size") else "intermediate_size"),
        normalised=bool(keys.own("norm_topk_prob")),
        layers=_layers_with_experts(keys),
        groups=keys.whole("n_group") if grouped else 1,
        chosen_groups=keys.whole("topk_group") if grouped else 1,
        scale=float(keys.own("routed_scaling_factor") or 1.0),
        shared_size=int(keys.own("n_shared_experts") or 0) * int(keys.own("moe_intermediate_size") or 0),
        **ROUTING.get(keys.family, {}),
    )


def _layers_with_experts(keys: ConfigKeys) -> tuple[bool, ...]:
    kinds = keys.own("mlp_layer_types")
    if kinds:
        return tuple(kind == "sparse" for kind in kinds)
    step, dense = int(keys.own("decoder_sparse_step") or 1), keys.raw.get("mlp_only_layers") or ()
    first = int(keys.own("first_k_dense_replace") or 0)
    return tuple(layer >= first and layer not in dense and (layer + 1) % step == 0 for layer in range(keys.num_layers))
