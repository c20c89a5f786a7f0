"""Layers of models with recurrences: a mixer that moves information between tokens, and mostly an MLP after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from outrider.cache.recurrent import RecurrentCache
from outrider.core.tree import TokenTree
from outrider.models.layers import Pass, SelfAttention
from outrider.models.linear import Linear
from outrider.models.norms import Norm
from outrider.models.recurrent.convolution import windows_of
from outrider.models.recurrent.scan import Reach


@dataclass(frozen=True, eq=False)
class RecurrentPass:
    """Values that all layers of one pass share."""

    cache: RecurrentCache
    attention: Pass | None
    """Nodes and cache of the attention layers, if there are any."""
    tree: TokenTree
    start: int
    """The first node that is computed."""

    @property
    def batch_size(self) -> int:
        return self.tree.batch_size

    @property
    def num_nodes(self) -> int:
        """Nodes that are computed."""
        return self.tree.num_nodes - self.start

    @cached_property
    def reach(self) -> Reach:
        """Which columns the nodes see, for scans in PyTorch."""
        return Reach.of(self.tree, self.cache.num_logged, self.start)

    @cached_property
    def windows(self) -> Tensor | None:
        """[B, N, W] columns that the nodes' convolutions read, counted from the first column that is read; None on a chain."""
        return self._windows(self.cache.num_logged + self.cache.shape.conv_len - 1)

    @cached_property
    def log_windows(self) -> Tensor | None:
        """The windows as columns of the log, for kernels."""
        windows = self._windows(self.cache.columns(0).end)
        return None if windows is None else windows.contiguous()

    @cached_property
    def seen(self) -> Tensor:
        """[B, all nodes, all nodes] int8 ones at a node's ancestors and itself, for kernels."""
        return self.tree.ancestors.contiguous().view(torch.int8)

    def _windows(self, num_before: int) -> Tensor | None:
        return windows_of(self.tree, conv_len=self.cache.shape.conv_len, num_before=num_before, start=self.start)


class LayerScan(Protocol):
    """The part of a recurrent layer between its two matrices. It writes the nodes' steps to the cache."""

    def __call__(self, projected: Tensor, layer: int, step: RecurrentPass) -> Tensor:
        """[B, N, heads * P] of nodes with projections [B, N, ...], in the type of the sums; ``layer`` is that of the cache."""
        ...


class Mixer(Protocol):
    """Attention or a recurrence: [B * N, H] from the normalised stream [B * N, H]."""

    def __call__(self, x: Tensor, step: RecurrentPass) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class AttentionMixer:
    """Attention as in other decoders."""

    attention: SelfAttention

    def __call__(self, x: Tensor, step: RecurrentPass) -> Tensor:
        assert step.attention is not None
        return self.attention.projected(x, step.attention)


@dataclass(frozen=True, eq=False)
class GatedAttention:
    """Attention whose heads pass a gate before they are projected."""

    attention: SelfAttention
    gate: Linear
    out: Linear

    def __call__(self, x: Tensor, step: RecurrentPass) -> Tensor:
        assert step.attention is not None
        return self.out(self.attention(x, step.attention) * torch.sigmoid(self.gate(x)))


@dataclass(frozen=True, eq=False)
class SideBySide:
    """Two mixers that read the same stream. Their outputs are added."""

    first: Mixer
    second: Mixer

    def __call__(self, x: Tensor, step: RecurrentPass) -> Tensor:
        return self.first(x, step) + self.second(x, step)


@dataclass(frozen=True, eq=False)
class RecurrentLayer:
    """A layer: norm, mixer, add; then norm, MLP, add if there is an MLP."""

    mixer: Mixer
    mixer_norm: Norm
    mlp: Callable[[Tensor], Tensor] | None = None
    mlp_norm: Norm | None = None

    def __call__(self, x: Tensor, step: RecurrentPass, dtype: torch.dtype) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x.to(dtype)), step)
        if self.mlp is None or self.mlp_norm is None:
            return x
        return x + self.mlp(self.mlp_norm(x.to(dtype)))
