"""Tensors of a checkpoint by the names of its family, in the type and on the device of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from outrider.models.config import ModelConfig
from outrider.models.layers import GatedMlp, SelfAttention
from outrider.models.linear import Linear, linear_of
from outrider.models.norms import Norm
from outrider.models.recurrent.config import Scaled
from outrider.models.recurrent.norms import norm_of
from outrider.models.rope import head_order
from outrider.models.weights import TensorSource


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that states and steps are kept in: never less than float32."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, eq=False)
class Tensors:
    """A checkpoint, and below it the layers' parts by their names."""

    source: TensorSource
    dtype: torch.dtype
    device: torch.device
    norm_eps: float
    norm_offset: float = 0.0
    """Added to the weights of norms, where a family stores w of (1 + w)."""
    prefix: str = ""
    fast: bool = True
    """Whether linear layers made of them may be native or kernels."""
    scaled: tuple[Scaled, ...] = ()
    """Constants that some of them are multiplied with."""

    def below(self, name: str) -> Tensors:
        """The part called ``name``."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        return f"{self.prefix}{name}" in self.source.names

    def take(self, name: str, *shape: int) -> Tensor:
        return self._read(name, *shape).to(self.device, self.dtype)

    def exact(self, name: str, *shape: int) -> Tensor:
        """A small tensor that enters sums: in the type of the sums."""
        return self._read(name, *shape).to(self.device, sums_dtype(self.dtype))

    def _read(self, name: str, *shape: int) -> Tensor:
        tensor, whole = self.source.take(self.prefix + name, *shape), self.prefix + name
        for one in self.scaled:
            if one.name in whole:
                tensor = one.of(tensor)
        return tensor

    def norm(self, name: str, size: int) -> Norm:
        """1 + w does not fit into 16 bits, so such weights stay float32."""
        if not self.norm_offset:
            return norm_of(self.take(f"{name}.weight", size), self.norm_eps, self.dtype)
        return norm_of(self.exact(f"{name}.weight", size) + self.norm_offset, self.norm_eps, self.dtype)

    def linear(self, name: str, rows: int, columns: int, *, bias: bool = False) -> Linear:
        weight = self.take(f"{name}.weight", rows, columns)
        return linear_of(weight, self.take(f"{name}.bias", rows) if bias else None, twofold=True)

    def mlp(self, config: ModelConfig) -> GatedMlp:
        """A gated MLP made of the three matrices here."""
        size, hidden, biased = config.mlp_size, config.hidden_size, config.mlp_bias
        weight = torch.cat([self.take(f"{name}.weight", size, hidden) for name in ("gate_proj", "up_proj")])
        bias = torch.cat([self.take(f"{name}.bias", size) for name in ("gate_proj", "up_proj")]) if biased else None
        down = self.linear("down_proj", hidden, size, bias=biased)
        return GatedMlp(config, gate_up=linear_of(weight, bias, twofold=True), down=down)

    def attention(self, config: ModelConfig, layer: int, queries: Tensor | None = None) -> SelfAttention:
        """Attention made of the matrices here; ``layer`` is its number in the cache, ``queries`` its query matrix where that is
        not stored as usual."""
        q_rows, kv_rows, hidden = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size
        take, ordered = self.take, partial(_ordered, config)
        query = take("q_proj.weight", q_rows, hidden) if queries is None else queries
        parts = [ordered(query), ordered(take("k_proj.weight", kv_rows, hidden)), take("v_proj.weight", kv_rows, hidden)]
        biases = None
        if config.qkv_bias:
            query, key, value = (take(f"{n}_proj.bias", rows) for n, rows in zip("qkv", (q_rows, kv_rows, kv_rows)))
            biases = torch.cat((ordered(query), ordered(key), value))
        out = self.linear("o_proj", hidden, q_rows, bias=config.out_bias)
        norms = (self._head_norm(config, "q_norm"), self._head_norm(config, "k_norm")) if config.qk_norm else None
        return SelfAttention(config, layer, qkv=linear_of(torch.cat(parts), biases, twofold=True), out=out, norms=norms)

    def _head_norm(self, config: ModelConfig, name: str) -> Norm:
        weight = self.exact(f"{name}.weight", config.head_dim) + self.norm_offset
        return norm_of(_ordered(config, weight), self.norm_eps, self.dtype)


def _ordered(config: ModelConfig, rows: Tensor) -> Tensor:
    """Rows of query or key heads with rotary partners half a head apart."""
    order = head_order(config.ropes[0].dim, config.head_dim)
    return rows if order is None else rows.unflatten(0, (-1, config.head_dim))[:, order].flatten(0, 1)
