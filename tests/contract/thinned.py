"""A random decoder of several layers, some of whose sublayers do nothing: what an early exit or a skip set can get right."""

from __future__ import annotations

from collections.abc import Collection

import torch

from outrider.models.decoder import Decoder
from outrider.models.random_decoder import _tensor_shapes, tiny_config
from outrider.models.weights import TensorDict, read_weights

VOCAB, LAYERS = 61, 6


def thinned_model(
    *, idle_attention: Collection[int] = (), idle_mlp: Collection[int] = (), strength: float = 1.0, max_len: int = 256
) -> Decoder:
    """Idle sublayers add zero to the residual stream; ``strength`` scales what the others add."""
    config = tiny_config(num_hidden_layers=LAYERS, vocab_size=VOCAB, max_position_embeddings=max_len)
    source = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in _tensor_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
            continue
        tensors[name] = torch.randn(shape, generator=source) / shape[1] ** 0.5
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        if "o_proj" in name:
            tensors[name] *= 0.0 if layer in idle_attention else strength
        if "down_proj" in name:
            tensors[name] *= 0.0 if layer in idle_mlp else strength
    tensors["model.embed_tokens.weight"] *= 6.0
    tensors["lm_head.weight"] *= 3.0
    return Decoder(config, read_weights(TensorDict(tensors), config, dtype=torch.float32, device=torch.device("cpu")))
