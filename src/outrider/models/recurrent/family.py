"""What a family of recurrent models declares: how its config is read, and which tensors make a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.models.recurrent.config import RecurrentConfig
from outrider.models.recurrent.layers import RecurrentLayer
from outrider.models.recurrent.tensors import Tensors

Describe = Callable[[Mapping[str, Any]], RecurrentConfig | None]
"""Reads a ``config.json``; None where the checkpoint needs something that is not here."""
Build = Callable[[RecurrentConfig, int, Tensors], RecurrentLayer]
"""Layer number n of a model, from the tensors below ``layers.n``."""


@dataclass(frozen=True)
class RecurrentFamily:
    """One ``model_type``."""

    describe: Describe
    layer: Build
    prefix: str
    """The prefix of the names of the decoder's tensors."""
    embeddings: tuple[str, ...]
    """Names of the embedding; files of some ages have another."""
    norm: str
    """Name of the last norm."""
    norm_offset: float = 0.0
