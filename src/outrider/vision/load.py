"""Opens a vision-language folder: the tower by transformers, the language model by the lean decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch

from outrider.codecs.text import TextCodec
from outrider.core.errors import ModelError, OptionError
from outrider.models.config import ModelConfig, config_of, why_not_lean
from outrider.models.decoder_choice import Running
from outrider.models.dtypes import computing_dtype
from outrider.models.load import decoder_of, device_of, read_config
from outrider.models.weights import Weights, read_weights
from outrider.vision.book import Book
from outrider.vision.families import VisionFamily, family_of
from outrider.vision.hf_tower import image_token_of, new_processor, open_parts
from outrider.vision.prompts import ImageTokens, Vision
from outrider.vision.target import SPARE_ROWS, VisionTarget


def can_see(path: Path) -> bool:
    """Whether a folder holds a vision-language model of a known family."""
    return path.is_dir() and family_of(read_config(path)) is not None


def load_vision(
    path: Path,
    codec: TextCodec,
    *,
    dtype: str | None = None,
    device: str | None = None,
    max_len: int | None = None,
    kv_cache: str = "auto",
    **running: Unpack[Running],
) -> Vision:
    """The model in a folder; the options are those of ``load_model``."""
    place, raw = device_of(device), read_config(path)
    family = family_of(raw)
    assert family is not None, "the folder can see"
    stored = raw.get("dtype") or raw.get("torch_dtype") or (raw.get("text_config") or {}).get("torch_dtype")
    used = computing_dtype(dtype, stored, place)
    tower, tensors, text = open_parts(path, family, dtype=used, device=place)
    config = _lean(text, path, family)
    config = config if max_len is None else replace(config, max_len=max_len)
    weights = _with_spare_rows(read_weights(tensors, config, dtype=used, device=place))
    decoder = decoder_of(config, weights, dtype=dtype, kv_cache=kv_cache, **running)
    return _eyes(path, raw, text, codec, VisionTarget(decoder, weights.embedding, Book()), tower=tower, family=family)


def _eyes(
    path: Path, raw: Mapping[str, Any], text: Mapping[str, Any], codec: TextCodec, target: VisionTarget, **parts: Any
) -> Vision:
    token = image_token_of(raw, path)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    merge = int(raw["vision_config"].get("spatial_merge_size", 2))
    sections = tuple(rope.get("mrope_section") or ()) if parts["family"].has_axes else ()
    written = codec.token_text(token) if codec.has_tokenizer else ""
    tokens = ImageTokens(token, written, merge, sections)
    process = new_processor(path, parts["family"])
    return Vision(target, tokens=tokens, process=process, encode=lambda t: codec.encode(t, add_special_tokens=False), **parts)


def _lean(text: Mapping[str, Any], path: Path, family: VisionFamily) -> ModelConfig:
    """The decoder's config, or the reason why the decoder cannot run the language model."""
    config = config_of(dict(text))
    if config is None:
        raise ModelError(f"{path}: its language model cannot be run ({why_not_lean(dict(text))}); use another model")
    if config.embedding_scale != 1.0:
        raise ModelError(f"{path}: its language model scales embeddings, which would scale images too; use another model")
    if family.has_axes and any(window is not None for window in config.windows):
        raise OptionError(f"{path}: sliding windows count slots, and its images take fewer positions; use another model")
    return config


def _with_spare_rows(weights: Weights) -> Weights:
    """An embedding table with spare rows for image embeddings. The output head keeps the vocabulary's size."""
    vocab_size, width = weights.embedding.shape
    table = torch.cat((weights.embedding, weights.embedding.new_zeros(SPARE_ROWS, width)))
    head = table[:vocab_size] if weights.head is weights.embedding else weights.head
    return replace(weights, embedding=table, head=head)
