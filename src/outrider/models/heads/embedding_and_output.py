"""The target's own ends, read from its folder: embedding, final norm, output matrix. Heads are built around copies of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import ModelError
from outrider.models.config import config_of
from outrider.models.gguf import hf_config, hf_tensors, read_gguf
from outrider.models.load import read_config
from outrider.models.quantised.folder import checkpoint
from outrider.models.recurrent import recurrent_config
from outrider.models.recurrent.embedding_and_output import llama_keys, read_ends
from outrider.models.source import local_path
from outrider.models.weights import TensorDict, TensorSource


@dataclass(frozen=True, eq=False)
class EmbeddingAndOutput:
    """The target's own embedding, final norm and output matrix."""

    embedding: Tensor
    norm: Tensor
    readout: Tensor
    tied: bool


def read_target(name: str) -> tuple[dict[str, Any], EmbeddingAndOutput]:
    """The ``config.json`` of a target, and its embedding and output layers in float32. A target with recurrent layers is
    described as a Llama of its width."""
    path = local_path(name)
    raw, source = _gguf(path) if path.suffix == ".gguf" else _folder(path)
    return ends_of(raw, source, name)


def ends_of(raw: dict[str, Any], source: TensorSource, name: str) -> tuple[dict[str, Any], EmbeddingAndOutput]:
    """Embedding and output matrix of a target whose config and tensors are loaded."""
    recurrent = recurrent_config(raw)
    if recurrent is not None:
        return llama_keys(recurrent, raw), EmbeddingAndOutput(*read_ends(recurrent, source), tied=recurrent.tied_head)
    config = config_of(raw)
    if config is None or config.norm_kind != "rms":
        raise ModelError(
            f"{name}: heads can be trained for families of the lean decoder with an RMS norm (Llama, Mistral, Qwen, Phi-3, "
            f"Gemma, OLMo-2, Granite, Mixtral, Mamba-2, Bamba, Qwen3-Next), and this is {raw.get('model_type')!r}; use one "
            "of those"
        )
    shape = (config.vocab_size, config.hidden_size)
    embedding = source.take("model.embed_tokens.weight", *shape).float()
    norm = source.take("model.norm.weight", config.hidden_size).float() + config.norm_offset
    readout = embedding if config.tied_head else source.take("lm_head.weight", *shape).float()
    is_tied = config.tied_head and config.embedding_scale == config.logit_scale == 1.0
    return raw, EmbeddingAndOutput(embedding * config.embedding_scale, norm, readout * config.logit_scale, is_tied)


def _folder(path: Path) -> tuple[dict[str, Any], TensorSource]:
    raw = read_config(path)
    return raw, checkpoint(path, raw)


def _gguf(path: Path) -> tuple[dict[str, Any], TensorSource]:
    file = read_gguf(str(path))
    return dict(hf_config(file)), TensorDict(dict(hf_tensors(file, dtype=torch.float32)), str(path))
