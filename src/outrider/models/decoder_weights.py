"""The weights of a decoder as its matrices multiply: what is read together stands together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.models.features import ModelConfig

STORED_ROWS = torch.int64
"""Type of a table of rows, what a matrix is that stays as a file stores it (``gguf/stored.py``, ``quantised/stored.py``)."""

HELD = 16
"""Type of rows that stay where somebody holds them (``native/held.py``); lower numbers are those of ``quantised/stored.py``."""


class StoredBytes(Protocol):
    """What holds the rows of stored matrices: a GGUF file, or memory that they were written to."""

    @property
    def address(self) -> int: ...

    def forget(self, begin: int, end: int) -> None: ...


class PackedSource(Protocol):
    """What holds the rows of packed matrices on a GPU (``quantised/packed_rows.py``)."""

    def matrix(self, table: Tensor) -> Any:
        """The packed matrix of these rows."""


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer. Rows of ``qkv`` are query heads, key heads, value heads; of ``gate_up`` the gate, then up. In latent
    attention rows of ``qkv`` are those of the queries or of their latent, of the latent, and of the rotated key.

    A layer of E experts has them as [E, ..]: ``gate_up`` and ``down`` (with their biases) are those of all experts, and
    ``router`` chooses among them. For the native CPU pass, a matrix may be a table of rows of a GGUF file
    (``gguf/stored.py``)."""

    attention_norm: Tensor | None
    """None where attention reads the residual stream itself."""
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor | None
    """None where the MLP reads the residual stream itself, or in a parallel layer what attention reads."""
    gate_up: Tensor
    """Gate and up matrices in one; only up in an MLP without a gate."""
    down: Tensor
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    attention_norm_bias: Tensor | None = None
    mlp_norm_bias: Tensor | None = None
    q_norm: Tensor | None = None
    """[D], or [heads * D] where heads have weights of their own."""
    k_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    sinks: Tensor | None = None
    """[heads] scores beside those of the keys, without a value."""
    router: Tensor | None = None
    """[E, H]"""
    router_bias: Tensor | None = None
    router_correction: Tensor | None = None
    """[E] float32, added to the weights of experts for the choice alone."""
    shared_gate_up: Tensor | None = None
    """The same matrices of the shared MLP beside the experts."""
    shared_down: Tensor | None = None
    latent_norm: Tensor | None = None
    """[rank]; this and the rest are of latent attention (``features.Latent``)."""
    query_norm: Tensor | None = None
    """[query rank]"""
    query_up: Tensor | None = None
    """[heads * query_dim, query rank]"""
    key_up: Tensor | None = None
    """[heads, rank, nope_dim]: what a head's query is multiplied by before it meets the latents."""
    value_up: Tensor | None = None
    """[heads, value_dim, rank]: what a head makes of the latents it has seen."""


@dataclass(frozen=True, eq=False)
class Weights:
    """A whole decoder. With a tied head, ``head`` is ``embedding``."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor
    norm_bias: Tensor | None = None
    file: StoredBytes | None = None
    """What holds the rows of the stored matrices, for a CPU."""
    rows: PackedSource | None = None
    """What holds the rows of the packed matrices, for a GPU."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the cache and of what is computed."""
        return torch.float32 if self.embedding.dtype == STORED_ROWS else self.embedding.dtype

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor once."""
        inner = [tensor for layer in self.layers for tensor in vars(layer).values() if tensor is not None]
        ends = [self.norm, *([] if self.norm_bias is None else [self.norm_bias])]
        return [self.embedding, *inner, *ends, *([] if self.head is self.embedding else [self.head])]


class Division(Protocol):
    """Which layers are wanted, and which part of every matrix (``share.py``)."""

    def layers(self, num_layers: int) -> Sequence[int]: ...

    def layer(self, config: ModelConfig, whole: LayerWeights) -> LayerWeights: ...

    def rows(self, matrix: Tensor) -> Tensor: ...
