"""A small random target and drafts of different quality: the target's own weights with noise added."""

from __future__ import annotations

import torch

from outrider.models.config import config_of
from outrider.models.decoder import Decoder
from outrider.models.weights import TensorDict, read_weights

VOCAB = 61
_RAW = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def tiny_model(noise: float = 0.0, *, max_len: int = 256, vocab_size: int = VOCAB) -> Decoder:
    """Weights of one fixed random model plus ``noise`` times another; large logits, so that greedy choices are clear."""
    raw = {**_RAW, "max_position_embeddings": max_len, "vocab_size": vocab_size}
    config = config_of(raw)
    assert config is not None
    base, other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)

    def weight(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        mixed = torch.randn(VOCAB if rows == vocab_size else rows, columns, generator=base)
        mixed += noise * torch.randn(mixed.shape, generator=other)
        return (mixed * scale / columns**0.5)[:rows]

    hidden, heads, mlp = 32, 8, 48
    tensors = {"model.embed_tokens.weight": weight(vocab_size, hidden, 6.0), "model.norm.weight": torch.ones(hidden)}
    for layer in range(2):
        name = f"model.layers.{layer}."
        for part, rows, columns in (
            ("self_attn.q_proj", 4 * heads, hidden),
            ("self_attn.k_proj", 2 * heads, hidden),
            ("self_attn.v_proj", 2 * heads, hidden),
            ("self_attn.o_proj", hidden, 4 * heads),
            ("mlp.gate_proj", mlp, hidden),
            ("mlp.up_proj", mlp, hidden),
            ("mlp.down_proj", hidden, mlp),
        ):
            tensors[f"{name}{part}.weight"] = weight(rows, columns, 1.5)
        tensors[f"{name}input_layernorm.weight"] = torch.ones(hidden)
        tensors[f"{name}post_attention_layernorm.weight"] = torch.ones(hidden)
    tensors["lm_head.weight"] = weight(vocab_size, hidden, 2.5)
    weights = read_weights(TensorDict(tensors), config, dtype=torch.float32, device=torch.device("cpu"))
    return Decoder(config, weights)
