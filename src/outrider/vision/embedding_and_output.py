"""Embedding and output matrix of a vision-language target's language model, for heads, and its config with the placeholder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.models.heads.embedding_and_output import EmbeddingAndOutput, ends_of
from outrider.models.load import read_config
from outrider.vision.families import family_of
from outrider.vision.hf_tower import image_token_of, open_parts


def read_vision_target(path: Path) -> tuple[dict[str, Any], EmbeddingAndOutput]:
    """``read_target`` for the folder of a vision-language model."""
    raw = read_config(path)
    family = family_of(raw)
    assert family is not None, "the folder can see"
    _, tensors, text = open_parts(path, family, dtype=torch.float32, device=torch.device("cpu"))
    return ends_of({**text, "image_token_id": image_token_of(raw, path)}, tensors, str(path))
