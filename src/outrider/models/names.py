"""Names of a checkpoint's tensors. Ours are Llama's; families with other names declare them."""

from __future__ import annotations

_RENAMED: dict[str, dict[str, str]] = {
    "gpt_neox": {
        "embed_tokens.": "embed_in.",
        "lm_head.": "embed_out.",
        "norm.": "final_layer_norm.",
        ".self_attn.qkv_proj.": ".attention.query_key_value.",
        ".self_attn.o_proj.": ".attention.dense.",
        ".mlp.up_proj.": ".mlp.dense_h_to_4h.",
        ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
    },
    "gpt_oss": {".mlp.gate.": ".mlp.router.", ".self_attn.sinks.weight": ".self_attn.sinks"},
    "starcoder2": {".mlp.up_proj.": ".mlp.c_fc.", ".mlp.down_proj.": ".mlp.c_proj."},
    "mixtral": {
        ".mlp.gate.": ".block_sparse_moe.gate.",
        ".mlp.experts.": ".block_sparse_moe.experts.",
        ".gate_proj.": ".w1.",
        ".up_proj.": ".w3.",
        ".down_proj.": ".w2.",
    },
}


def named_in(family: str, name: str) -> str:
    """The family's name of one of our tensors."""
    for ours, theirs in _RENAMED.get(family, {}).items():
        if name.startswith(ours) or (ours.startswith(".") and ours in name):
            name = name.replace(ours, theirs)
    return name
