"""One rank's share of a model: whole heads, columns of the MLP, rows of the vocabulary.

Queries go with the key-value head they look at, so no head is cut. Sizes that do not divide evenly differ by one between ranks;
heads must divide evenly. Norms are whole everywhere. A bias behind a sum over ranks belongs to the first rank, or it would be
added once per rank. (The division is Megatron's: Shoeybi et al. 2019, arXiv 1909.08053.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final, overload

import torch
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.models.decoder_weights import STORED_ROWS, LayerWeights
from outrider.models.features import ModelConfig
from outrider.models.stored_rows import from_input


@final
@dataclass(frozen=True)
class Share:
    """Rank ``rank`` of ``size``."""

    rank: int
    size: int

    def span(self, total: int) -> tuple[int, int]:
        """The range of ``total`` rows or columns that this rank holds."""
        return total * self.rank // self.size, total * (self.rank + 1) // self.size

    def check(self, config: ModelConfig) -> None:
        """Refuse a model whose heads cannot be divided."""
        if config.num_kv_heads % self.size:
            valid = [str(n) for n in range(1, config.num_kv_heads + 1) if config.num_kv_heads % n == 0]
            raise OptionError(
                f"tensor_parallel = {self.size} does not divide the model's {config.num_kv_heads} key-value heads, and a head "
                f"is not cut; use {', '.join(valid)}"
            )
        if config.qk_norm and config.qk_norm_span == "whole":
            raise OptionError(
                f"tensor_parallel = {self.size} is not available for {config.family} models: they normalise all heads as one "
                "vector, which is not divided; leave it out"
            )

    def config(self, config: ModelConfig) -> ModelConfig:
        """The share as a model config: fewer heads, a narrower MLP, part of the vocabulary."""
        heads, kv_heads = config.num_heads // self.size, config.num_kv_heads // self.size
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "mlp_size": self._count(config.mlp_size)}
        experts = config.experts and replace(config.experts, size=self._count(config.experts.size))
        return replace(config, **sizes, vocab_size=self._count(config.vocab_size), experts=experts)

    def layers(self, num_layers: int) -> Sequence[int]:
        return range(num_layers)

    def layer(self, config: ModelConfig, whole: LayerWeights) -> LayerWeights:
        """This rank's part of a layer of the model with ``config``."""
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv, pair = (q_rows, kv_rows, kv_rows), (config.mlp_size,) * (2 if config.gated else 1)
        inner = 0 if whole.router is None else 1  # experts stand in the first dimension
        if inner and config.experts is not None:
            pair = (config.experts.size, config.experts.size)
        return replace(
            whole,
            qkv=self._rows(whole.qkv, qkv),
            qkv_bias=self._rows(whole.qkv_bias, qkv),
            out=self._inputs(whole.out, q_rows, 1),
            out_bias=self._once(whole.out_bias),
            gate_up=self._rows(whole.gate_up, pair, inner),
            gate_up_bias=self._rows(whole.gate_up_bias, pair, inner),
            down=self._inputs(whole.down, pair[0], 1 + inner),
            down_bias=self._once(whole.down_bias),
            sinks=self._rows(whole.sinks, (config.num_heads,)),
            q_norm=self._of_heads(whole.q_norm, config),
            k_norm=self._of_heads(whole.k_norm, config),
        )

    def _inputs(self, matrix: Tensor, total: int, dim: int) -> Tensor:
        """This rank's part of the ``total`` inputs of a matrix, which stand in dimension ``dim``."""
        return from_input(matrix, self.span(total)[0]) if matrix.dtype == STORED_ROWS else self._part(matrix, dim)

    def rows(self, matrix: Tensor) -> Tensor:
        """This rank's rows of a matrix, copied."""
        return self._part(matrix, 0)

    @overload
    def _rows(self, stacked: Tensor, sizes: Sequence[int], dim: int = 0) -> Tensor: ...
    @overload
    def _rows(self, stacked: Tensor | None, sizes: Sequence[int], dim: int = 0) -> Tensor | None: ...
    def _rows(self, stacked: Tensor | None, sizes: Sequence[int], dim: int = 0) -> Tensor | None:
        """This rank's rows of several stacked matrices."""
        if stacked is None:
            return None
        return torch.cat([self._part(part, dim) for part in stacked.split(list(sizes), dim)], dim)

    def _part(self, tensor: Tensor, dim: int) -> Tensor:
        begin, end = self.span(tensor.shape[dim])
        return tensor.narrow(dim, begin, end - begin).clone()

    def _of_heads(self, norm: Tensor | None, config: ModelConfig) -> Tensor | None:
        """The norms of this rank's heads, if each head has one."""
        if norm is None or config.qk_norm_span == "head":
            return norm
        return self._part(norm.view(-1, config.head_dim), 0).flatten()

    def _once(self, bias: Tensor | None) -> Tensor | None:
        return bias if self.rank == 0 else None

    def _count(self, total: int) -> int:
        begin, end = self.span(total)
        return end - begin
