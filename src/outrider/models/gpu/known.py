"""Support of models by the GPU's fast decoder, and what it lacks, in words."""

from __future__ import annotations

import torch

from outrider.core.key_storage import FP8, KeyStorage, check_heads, not_available
from outrider.models.features import ModelConfig
from outrider.models.padded_heads import can_pad

SHORTEST_WINDOW = 128
"""Shortest supported window. Nodes of a tree see one another whatever the window is, so trees must be less deep than it."""


def head_dim_for(config: ModelConfig) -> int:
    """Head size that kernels use: a power of two, at least 16. Latents stay as they are."""
    if config.latent is not None:
        return config.head_dim
    return max(16, 1 << (config.head_dim - 1).bit_length())


def missing_features(config: ModelConfig) -> list[str]:
    """Features of a model that the fast decoder lacks; empty if it can run."""
    wider = head_dim_for(config) != config.head_dim
    windows = [window for window in config.windows if window is not None and window < config.max_len]
    latent = config.latent
    sizes = (16,) if latent is None else (latent.rank, latent.rope_dim)
    found = {
        f"latents of {sizes}, sizes that are not powers of two from 16 on": any(n < 16 or n & (n - 1) for n in sizes),
        "layers without positions in latent attention": latent is not None and None in config.rope_of_layer,
        f"heads of {config.head_dim} with norms of their own": wider and not can_pad(config),
        f"heads of more than 256 ({config.head_dim})": config.head_dim > 256 and latent is None,
        f"latents of more than 512 ({sizes[0]})": sizes[0] > 512,
        f"a window of {min(windows, default=0)}, less than {SHORTEST_WINDOW}": min(windows, default=1 << 30) < SHORTEST_WINDOW,
        "layer norms after attention and MLP": config.post_norms and config.norm_kind != "rms",
    }
    return [words for words, is_missing in found.items() if is_missing]


def check_storage(config: ModelConfig, storage: KeyStorage, device: torch.device) -> None:
    """Refuse keys and values of a type that the kernels do not read for this model, or not on this device."""
    check_heads(storage, is_latent=config.latent is not None)
    is_cuda = device.type == "cuda" and torch.cuda.is_available()
    if storage == FP8 and is_cuda and torch.cuda.get_device_capability(device) < (8, 9):
        raise not_available(storage, "the GPU converts no FP8 (compute capability 8.9 and later do), and int8 is there")
