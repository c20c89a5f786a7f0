"""Support of models by the native pass, decided by their features and types."""

from __future__ import annotations

import torch

from outrider.models.features import ModelConfig
from outrider.models.padded_heads import can_pad

LANES = 16
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_run(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the native pass supports this model: its features, and a type that has products for all of its matrices."""
    return device.type == "cpu" and dtype in _TYPES and not missing_features(config)


def missing_features(config: ModelConfig) -> list[str]:
    """Features of a model that the native pass lacks, in words; empty if it can run."""
    is_uneven, can_fill = config.head_dim % LANES != 0, can_pad(config) and config.latent is None and config.head_dim % 2 == 0
    found = {
        f"heads of {config.head_dim}, which do not fill vectors of {LANES}": is_uneven and not can_fill,
        "layer norms behind attention and MLP": config.norm_kind != "rms" and config.post_norms,
    }
    return [words for words, is_missing in found.items() if is_missing]


def multiplies_stored(config: ModelConfig) -> bool:
    """Whether all its matrices may stay as a file or a program holds them. Latent projections are split and padded heads are
    packed, so those must be floats."""
    return config.head_dim % LANES == 0 and not missing_features(config) and config.latent is None
