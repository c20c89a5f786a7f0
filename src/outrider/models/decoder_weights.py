"""The weights of a decoder. Matrices that are read together are stored together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.models.features import ModelConfig

STORED_ROWS = torch.int64
"""Type of a table of rows, which stands for a matrix kept as its file stores it (``gguf/stored.py``,
``quantised/stored.py``)."""

HELD = 18
"""Row type of matrices that stay where their owner holds them (``native/held.py``). Lower numbers are those of
``quantised/stored.py``."""


class StoredBytes(Protocol):
    """The storage of stored matrices: a GGUF file, or memory."""

    @property
    def address(self) -> int: ...

    @property
    def adds_halves(self) -> bool:
        """Whether products with its F16 matrices may be added in 16 bits."""
        ...

    def order_of(self, table: Tensor) -> Tensor | None:
        """[in] the input that each column of these rows multiplies; None where columns are in order."""
        ...

    def forget(self, begin: int, end: int) -> None: ...


class RowTables(Protocol):
    """Cuts parts out of matrices that are given as tables of rows."""

    def part(self, table: Tensor, inputs: tuple[int, int] | None = None) -> Tensor:
        """A table of the same rows as a matrix of its own, with the inputs from the first number up to the second, or with
        all."""
        ...


class PackedSource(RowTables, Protocol):
    """The storage of packed matrices on a GPU (``quantised/packed_rows.py``)."""

    dtype: torch.dtype
    """Type of the activations in products with them."""

    def matrix(self, table: Tensor) -> Any:
        """The packed matrix of these rows."""


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer.

    Rows of ``qkv`` are query heads, key heads, value heads; rows of ``gate_up`` are the gate, then up. In latent
    attention, rows of ``qkv`` are those of the queries (or of their latent), of the latent, and of the rotated key. In a
    layer of E experts, ``gate_up`` and ``down`` (with their biases) are [E, ..], and ``router`` chooses among the
    experts. For the native CPU pass, a matrix may be a table of rows of a GGUF file (``gguf/stored.py``), or codes of 8
    bits with their scales (``packed.part_in_eight``).
    """

    attention_norm: Tensor | None
    """None if attention reads the residual stream without a norm."""
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor | None
    """None if the MLP reads the residual stream without a norm or, in a parallel layer, shares attention's norm."""
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
    """[D], or [heads * D] if each head has its own weights."""
    k_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    beside_norm: Tensor | None = None
    """The norm of the token's embedding, if queries, keys and values also read that embedding (EAGLE-3)."""
    sinks: Tensor | None = None
    """[heads] attention-sink scores, which have no value."""
    router: Tensor | None = None
    """[E, H]"""
    router_bias: Tensor | None = None
    router_correction: Tensor | None = None
    """[E] float32 bias that affects which experts are chosen, but not their weights."""
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
    """[heads, rank, nope_dim]: multiplies a head's query before it meets the latents."""
    value_up: Tensor | None = None
    """[heads, value_dim, rank]: turns a head's weighted sum of latents into its values."""


@dataclass(frozen=True, eq=False)
class Weights:
    """A whole decoder. With a tied head, ``head`` is ``embedding``."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor | None
    """None if the output head reads the last layer's output without a norm."""
    head: Tensor
    norm_bias: Tensor | None = None
    entry: Tensor | None = None
    """[H, 2H] maps a token's embedding and the previous state to the first layer's input (EAGLE-1)."""
    file: StoredBytes | None = None
    """The storage of the stored matrices, for a CPU."""
    float_inputs: bool = False
    """Whether products with stored matrices take inputs as they are, in floats (``dtype="stored-exact"``)."""
    rows: PackedSource | None = None
    """The storage of the packed matrices, for a GPU."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the cache and of the activations."""
        if self.embedding.dtype != STORED_ROWS:
            return self.embedding.dtype
        return torch.float32 if self.rows is None else self.rows.dtype

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor once."""
        inner = [tensor for layer in self.layers for tensor in vars(layer).values() if tensor is not None]
        ends = [tensor for tensor in (self.norm, self.norm_bias, self.entry) if tensor is not None]
        return [self.embedding, *inner, *ends, *([] if self.head is self.embedding else [self.head])]


class Division(Protocol):
    """Selects layers, and a part of every matrix, for one rank (``share.py``)."""

    def layers(self, num_layers: int) -> Sequence[int]: ...

    def layer(self, config: ModelConfig, whole: LayerWeights) -> LayerWeights: ...

    def rows(self, matrix: Tensor) -> Tensor: ...
