"""The real decoder, small and with random weights: for tests and examples that need keys, values and hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.models.config import ModelConfig, config_of
from outrider.models.decoder import Decoder
from outrider.models.weights import TensorDict, Weights, read_weights


def tiny_config(model_type: str = "llama", **changes: Any) -> ModelConfig:
    """A small config of a family; ``changes`` are keys of config.json."""
    raw = {
        "model_type": model_type,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        **changes,
    }
    config = config_of(raw)
    if config is None:
        raise OptionError(f"model_type = {model_type!r} is not one of the lean decoder's families")
    return config


def tiny_decoder(
    config: ModelConfig | None = None, *, seed: int = 0, sharpness: float = 3.0, noise: float = 0.0, device: str = "cpu"
) -> Decoder:
    """A decoder with random weights. ``noise`` mixes in a second set of weights: the more, the worse a draft it is for the
    model without. ``sharpness`` scales the logits."""
    config = config or tiny_config()
    return Decoder(config, tiny_weights(config, seed=seed, sharpness=sharpness, noise=noise, device=device))


def tiny_weights(
    config: ModelConfig, *, seed: int = 0, sharpness: float = 3.0, noise: float = 0.0, device: str = "cpu"
) -> Weights:
    """The weights of ``tiny_decoder``."""
    generators = [torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)]

    def random(*shape: int) -> Tensor:
        first, second = (torch.randn(shape, generator=generator) for generator in generators)
        return (first + noise * second) / (1 + noise**2) ** 0.5

    tensors: dict[str, Tensor] = {}
    for name, shape in _tensor_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = 0.1 * random(*shape) + (0.0 if name.endswith("bias") else 1.0 - config.norm_offset)
        else:
            tensors[name] = random(*shape) * (sharpness if "lm_head" in name else 1.0) / shape[1] ** 0.5
    tensors["model.embed_tokens.weight"] *= config.hidden_size**0.5
    return read_weights(TensorDict(tensors), config, dtype=torch.float32, device=torch.device(device))


def _tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint of this config."""
    hidden, mlp, head_dim = config.hidden_size, config.mlp_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    matrices = {"self_attn.q_proj": (q_rows, hidden), "self_attn.k_proj": (kv_rows, hidden)}
    matrices |= {"self_attn.v_proj": (kv_rows, hidden), "self_attn.o_proj": (hidden, q_rows)}
    matrices |= {"mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp)}
    biased = {"q_proj": config.qkv_bias, "k_proj": config.qkv_bias, "v_proj": config.qkv_bias, "o_proj": config.out_bias}
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.post_norms:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        for name, shape in matrices.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if biased.get(name.split(".")[1], config.mlp_bias):
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
        for name, size in norms.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (size,)
    return shapes if config.tied_head else {**shapes, "lm_head.weight": (config.vocab_size, hidden)}
