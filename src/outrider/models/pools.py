"""The pool of pages that a decoder keeps its keys and values in."""

from __future__ import annotations

from typing import Any

import torch

from outrider.cache.page_pool import PagePool
from outrider.models.features import ModelConfig


def pool_for(config: ModelConfig, dtype: torch.dtype, device: torch.device, *, page_len: int, **sizes: Any) -> PagePool:
    """An empty pool for a model; ``sizes`` are those of ``PagePool``."""
    shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    return PagePool(shape, dtype=dtype, device=device, page_len=page_len, sides=config.cache_sides, **sizes)
