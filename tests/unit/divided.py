"""A small checkpoint whose sizes do not divide evenly, with biases, for tests of models divided among processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.models.checkpoint import write_checkpoint
from outrider.models.config import config_of
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.folder import new_config, new_head, save_head
from outrider.models.random_decoder import _tensor_shapes

VOCAB = 67
RAW: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 97,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "silu",
}


def checkpoint(folder: Path, *, noise: float = 0.0, **changes: Any) -> str:
    """One fixed random model plus ``noise`` times another, large logits; ``changes`` are keys of config.json."""
    raw = {**RAW, **changes}
    config = config_of(raw)
    assert config is not None
    base, other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in _tensor_shapes(config).items():
        mixed = torch.randn(shape, generator=base) + noise * torch.randn(shape, generator=other)
        if len(shape) == 1:
            tensors[name] = 0.1 * mixed + (0.0 if name.endswith("bias") else 1.0)
        else:
            tensors[name] = mixed * (6.0 if "lm_head" in name else 1.0) / shape[1] ** 0.5
    tensors["model.embed_tokens.weight"] *= 8.0
    write_checkpoint(folder, tensors, config=raw)
    return str(folder)


def eagle3_heads(folder: Path) -> str:
    """Random heads: they guess badly, and must change nothing."""
    torch.manual_seed(0)
    ends = EmbeddingAndOutput(torch.randn(VOCAB, 64), torch.ones(64), torch.randn(VOCAB, 64) / 8, tied=False)
    head = new_head(new_config("eagle3", RAW, draft_vocab_size=40), ends, ids=torch.arange(0, 40), seed=0)
    save_head(head, folder, dtype=torch.float32)
    return str(folder)
