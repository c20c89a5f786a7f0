"""What a decoder is made of, as numbers and switches: one decoder runs every family whose features are declared here.

A family is a row of values, never a class: two checkpoints with the same features run the same code on every device.
``config.py`` reads them from a ``config.json``. ``Decoder`` (PyTorch) supports all of them. The GPU decoder and the native one
say which they support (``gpu/known.py``, ``native/known.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.models.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in the place of the MLP: a router picks a few of many small MLPs for every node."""

    count: int
    num_chosen: int
    size: int
    """Inner size of one expert."""
    normalised: bool
    """The weights of the chosen experts add up to 1; otherwise they are the router's probabilities over all experts."""
    layers: tuple[bool, ...]
    """For each layer, whether it has experts; the others have an ordinary MLP."""
    scoring: str = "softmax"
    """How the router's scores become weights: "softmax" over all experts, or "sigmoid"."""
    groups: int = 1
    """Number of equal groups of experts. A node's experts come from the best groups."""
    chosen_groups: int = 1
    group_best: int = 1
    """A group's score is the sum of this many of its best experts (1 or 2)."""
    corrected: bool = False
    """Whether a learned bias affects the choice of experts, but not their weights."""
    scale: float = 1.0
    """Factor of the chosen experts' weights."""
    shared_size: int = 0
    """Inner size of an MLP that every node passes beside its experts; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Latent attention: keys and values of all heads are products of one short vector per token, and only that is cached.

    A head's key is its matrix times the latent, and a rotated part that all heads share. In the absorbed form, the head's
    matrices multiply its query and its output instead. Then every head attends to the latents themselves, as one key head of
    size ``rank + rope_dim`` whose first ``rank`` dimensions are the values. (DeepSeek-AI 2024, arXiv 2405.04434.)"""

    rank: int
    """Size of the latent of keys and values."""
    query_rank: int | None
    """Size of the queries' latent; None if queries are computed from the residual stream."""
    nope_dim: int
    """Dimensions of a head's query that meet the latent."""
    rope_dim: int
    """Dimensions of a head's query, and of the shared key, that are rotated."""
    value_dim: int
    norm_eps: float = 1e-6
    """Epsilon of the norms of both latents."""

    @property
    def query_dim(self) -> int:
        """Width of one head's query."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a key in the cache."""
    mlp_size: int
    max_len: int
    """Longest context of the opened model."""
    norm_eps: float
    norm_offset: float = 0.0
    """Added to the weights of every norm. It is 1 if a checkpoint stores w for (1 + w)."""
    norm_kind: str = "rms"
    """Either "rms", x / sqrt(mean(x^2) + eps) * w, or "layer", which takes the mean off first."""
    norm_bias: bool = False
    """The norms of the residual stream add a bias."""
    qk_norm: bool = False
    """Queries and keys are normalised before they are rotated."""
    qk_norm_span: str = "head"
    """"head": all heads share one weight. "heads": each has its own. "whole": a node's heads are normalised as one vector."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    gated: bool = True
    """down(activation(gate) * up); without a gate down(activation(up))."""
    ropes: tuple[Rope, ...]
    rope_of_layer: tuple[int | None, ...]
    """Index into ``ropes`` for each layer; None for a layer without positions."""
    interleaved_rope: bool = False
    """Whether the checkpoint rotates neighbours (0 with 1, 2 with 3). Its rows are reordered when they are read."""
    windows: tuple[int | None, ...]
    """Most positions a node of each layer sees, itself included; None for all."""
    sinks: bool = False
    """Whether every head has a learned attention-sink score without a value."""
    attention_softcap: float | None = None
    final_softcap: float | None = None
    query_scale: float
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual stream."""
    logit_scale: float = 1.0
    pre_norms: bool = True
    """Attention and MLP read the residual stream through a norm."""
    post_norms: bool = False
    """Attention and MLP outputs are normalised before they are added to the residual stream."""
    parallel: bool = False
    """Attention and MLP read the same stream, and both are added to it."""
    one_norm: bool = False
    """Attention and MLP of a parallel layer share their norm."""
    latent: Latent | None = None
    experts: Experts | None = None
    tied_head: bool = False
    eos_ids: tuple[int, ...] = ()
    dtype: str | None = None
    """Name of the stored weights' type, if the file gives it."""

    @property
    def cache_sides(self) -> int:
        """2 for keys and values, 1 for latents."""
        return 2 if self.latent is None else 1

    @property
    def rotary_dim(self) -> int:
        """Width of the tables of cosines and sines."""
        return self.head_dim if self.latent is None else self.latent.rope_dim
