"""The pieces of a decoder layer: rotation, attention, MLP, and how a layer puts them together.

Everything runs on flat [B * N, H] activations, in as few operations as possible: a small model on a CPU spends most of its time
calling kernels. Choices of a layer are made when the layer is built, not in a pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.slots import LayeredCache
from outrider.models.attention import Sight, attend, attend_softcapped, attend_with_sinks
from outrider.models.features import ModelConfig
from outrider.models.linear import Linear
from outrider.models.norms import Norm


@dataclass(frozen=True, eq=False)
class Pass:
    """Values that all layers of one pass share."""

    batch_size: int
    num_nodes: int
    cache: LayeredCache
    rotations: tuple[tuple[Tensor, Tensor] | None, ...]
    """Cosines and sines [B or 1, 1, N, D] of the nodes' positions, by rope. The last entry is None, for layers without
    positions."""
    sights: Mapping[int | None, Sight]


class Attend(Protocol):
    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, *, sight: Sight, scale: float) -> Tensor: ...


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate [B, heads, N, D] by their positions' angles."""
    cos, sin = rotation
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    return _ACTIVATIONS[name]


class Attention(ABC):
    """The attention heads of a layer, and their output matrix."""

    _out: Linear

    @abstractmethod
    def __call__(self, x: Tensor, step: Pass) -> Tensor:
        """[B * N, Hq * D]: the heads' outputs before the output matrix."""

    @abstractmethod
    def queries(self, x: Tensor, rotations: Sequence[tuple[Tensor, Tensor] | None]) -> Tensor:
        """[Hq, N, D] rotated queries of the N tokens of one row."""

    def add_to(self, residual: Tensor, x: Tensor, step: Pass) -> Tensor:
        return self._out.add_to(residual, self(x, step))

    def projected(self, x: Tensor, step: Pass) -> Tensor:
        return self._out(self(x, step))


class SelfAttention(Attention):
    """Queries, keys and values from one product. Keys and values go to the cache, where queries read them."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        qkv: Linear,
        out: Linear,
        norms: tuple[Norm, Norm] | None,
        sinks: Tensor | None = None,
    ) -> None:
        self._layer = layer
        self._qkv, self._out, self._norms = qkv, out, norms
        self._num_kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._queries_and_keys = (config.num_heads, config.num_kv_heads)
        self._pair_and_values = (config.num_heads + config.num_kv_heads, config.num_kv_heads)
        rope = config.rope_of_layer[layer]
        self._rope = -1 if rope is None else rope
        self._window = config.windows[layer]
        self._scale = config.query_scale
        cap = config.attention_softcap
        self._attend: Attend = attend if cap is None else partial(attend_softcapped, cap=cap)
        if sinks is not None:
            self._attend = partial(attend_with_sinks, sinks=sinks)

    def __call__(self, x: Tensor, step: Pass) -> Tensor:
        batch_size, num_nodes = step.batch_size, step.num_nodes
        heads = self._qkv(x).view(batch_size, num_nodes, -1, self._head_dim).transpose(1, 2)
        queries, keys, values = self._rotated(heads, step.rotations[self._rope])
        all_keys, all_values = step.cache.write(self._layer, keys, values)
        queries = queries.reshape(batch_size, self._num_kv_heads, -1, self._head_dim)
        seen = self._attend(queries, all_keys, all_values, sight=step.sights[self._window], scale=self._scale)
        seen = seen.reshape(batch_size, -1, num_nodes, self._head_dim).transpose(1, 2)
        return seen.reshape(batch_size * num_nodes, -1)

    def queries(self, x: Tensor, rotations: Sequence[tuple[Tensor, Tensor] | None]) -> Tensor:
        heads = self._qkv(x).view(1, len(x), -1, self._head_dim).transpose(1, 2)
        return self._rotated(heads, rotations[self._rope])[0][0]

    def _rotated(self, heads: Tensor, rotation: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values out of [B, Hq + 2 Hkv, N, D]."""
        pair, values = heads.split_with_sizes(self._pair_and_values, 1)
        if self._norms is not None:
            queries, keys = pair.split_with_sizes(self._queries_and_keys, 1)
            pair = torch.cat((self._norms[0](queries), self._norms[1](keys)), 1)
        if rotation is not None:
            pair = rotate(pair, rotation)
        queries, keys = pair.split_with_sizes(self._queries_and_keys, 1)
        return queries, keys, values


class Mlp(ABC):
    """The part of a layer that treats each node alone."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


@final
class GatedMlp(Mlp):
    """down(activation(gate) * up), gate and up from one product."""

    def __init__(self, config: ModelConfig, *, gate_up: Linear, down: Linear) -> None:
        self._activation = _ACTIVATIONS[config.activation]
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._gated(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._down.add_to(residual, self._gated(x))

    def _gated(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._activation(gate).mul_(up)


@final
class PlainMlp(Mlp):
    """down(activation(up))."""

    def __init__(self, config: ModelConfig, *, up: Linear, down: Linear) -> None:
        self._activation, self._up, self._down = _ACTIVATIONS[config.activation], up, down

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activation(self._up(x)))


class AnyLayer(ABC):
    """One layer of a decoder."""

    attention: Attention
    attention_norm: Norm

    def queries(self, x: Tensor, rotations: Sequence[tuple[Tensor, Tensor] | None]) -> Tensor:
        """[Hq, N, D] queries of the layer, from its input [N, H] for one row."""
        return self.attention.queries(self.attention_norm(x), rotations)

    def __call__(self, x: Tensor, step: Pass) -> Tensor:
        return self.part(x, step)

    @abstractmethod
    def part(self, x: Tensor, step: Pass, *, attends: bool = True, feeds: bool = True) -> Tensor:
        """The residual stream after the layer, or after one half of it."""


class InTurn(AnyLayer):
    """Attention first, then the MLP on its result."""

    @abstractmethod
    def attend(self, x: Tensor, step: Pass) -> Tensor: ...

    @abstractmethod
    def feed(self, x: Tensor) -> Tensor: ...

    def part(self, x: Tensor, step: Pass, *, attends: bool = True, feeds: bool = True) -> Tensor:
        x = self.attend(x, step) if attends else x
        return self.feed(x) if feeds else x


@final
@dataclass(frozen=True, eq=False)
class Layer(InTurn):
    """The Llama layer: norm, attention, add; norm, MLP, add."""

    attention: Attention
    mlp: Mlp
    attention_norm: Norm
    mlp_norm: Norm

    def attend(self, x: Tensor, step: Pass) -> Tensor:
        return self.attention.add_to(x, self.attention_norm(x), step)

    def feed(self, x: Tensor) -> Tensor:
        return self.mlp.add_to(x, self.mlp_norm(x))


@final
@dataclass(frozen=True, eq=False)
class PostNormLayer(InTurn):
    """A layer whose attention and MLP outputs are normalised (Gemma, OLMo-2) or scaled (Granite) before they are added."""

    attention: Attention
    mlp: Mlp
    attention_norm: Norm
    mlp_norm: Norm
    attention_post_norm: Norm
    mlp_post_norm: Norm

    def attend(self, x: Tensor, step: Pass) -> Tensor:
        return x + self.attention_post_norm(self.attention.projected(self.attention_norm(x), step))

    def feed(self, x: Tensor) -> Tensor:
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))


@final
@dataclass(frozen=True, eq=False)
class ParallelLayer(AnyLayer):
    """Attention and MLP read the same stream (Cohere, GPT-NeoX). If ``mlp_norm`` is None, they share a norm."""

    attention: Attention
    mlp: Mlp
    attention_norm: Norm
    mlp_norm: Norm | None

    def part(self, x: Tensor, step: Pass, *, attends: bool = True, feeds: bool = True) -> Tensor:
        normed = self.attention_norm(x)
        out = self.attention.add_to(x, normed, step) if attends else x
        return self.mlp.add_to(out, normed if self.mlp_norm is None else self.mlp_norm(x)) if feeds else out
