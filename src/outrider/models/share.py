"""One rank's share of a model: whole heads, columns of the MLP, rows of the vocabulary.

Queries go with the key-value head they look at, so no head is cut. Sizes that do not divide evenly differ by one between ranks;
heads must divide evenly. Norms are whole everywhere. A bias behind a sum over ranks belongs to the first rank, or it would be
added once per rank. (The division is Megatron's: Shoeybi et al. 2019, arXiv 1909.08053.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.models.decoder_weights import LayerWeights
from outrider.models.features import ModelConfig


@final
@dataclass(frozen=True)
class Share:
    """Rank ``rank`` of ``size``."""

    rank: int
    size: int

    def span(self, total: int) -> tuple[int, int]:
        """Which of ``total`` rows or columns are its own: begin and end."""
        return total * self.rank // self.size, total * (self.rank + 1) // self.size

    def check(self, config: ModelConfig) -> None:
        """Refuse a model whose heads cannot be divided, or whose layers have parts that this division does not know."""
        undivided = {
            "experts": config.experts is not None,
            "attention sinks": config.sinks,
            "norms over all heads": config.qk_norm and config.qk_norm_span != "head",
            "a bias behind its norms": config.norm_bias,
            "an MLP without a gate": not config.gated,
            "scaled logits": config.logit_scale != 1.0,
        }
        found = [part for part, has in undivided.items() if has]
        if found:
            raise OptionError(
                f"tensor_parallel = {self.size} is not available for {config.family} models: {', '.join(found)} cannot be "
                "divided yet; leave it out"
            )
        if config.num_kv_heads % self.size:
            valid = [str(n) for n in range(1, config.num_kv_heads + 1) if config.num_kv_heads % n == 0]
            raise OptionError(
                f"tensor_parallel = {self.size} does not divide the model's {config.num_kv_heads} key-value heads, and a head "
                f"is not cut; use {', '.join(valid)}"
            )

    def config(self, config: ModelConfig) -> ModelConfig:
        """The share as a model of its own: fewer heads, a narrower MLP, part of the vocabulary."""
        heads, kv_heads = config.num_heads // self.size, config.num_kv_heads // self.size
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "mlp_size": self._count(config.mlp_size)}
        return replace(config, **sizes, vocab_size=self._count(config.vocab_size))

    def layer(self, config: ModelConfig, whole: LayerWeights) -> LayerWeights:
        """Its part of a layer of the model that ``config`` describes."""
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv, pair = (q_rows, kv_rows, kv_rows), (config.mlp_size, config.mlp_size)
        return replace(
            whole,
            qkv=self._rows(whole.qkv, qkv),
            qkv_bias=None if whole.qkv_bias is None else self._rows(whole.qkv_bias, qkv),
            out=self._columns(whole.out),
            out_bias=self._once(whole.out_bias),
            gate_up=self._rows(whole.gate_up, pair),
            gate_up_bias=None if whole.gate_up_bias is None else self._rows(whole.gate_up_bias, pair),
            down=self._columns(whole.down),
            down_bias=self._once(whole.down_bias),
        )

    def rows(self, matrix: Tensor) -> Tensor:
        """Its rows of a matrix, in memory of their own."""
        return self._rows(matrix, (len(matrix),))

    def _rows(self, stacked: Tensor, sizes: Sequence[int]) -> Tensor:
        """Its rows of each of several matrices that stand one below the other."""
        parts = stacked.split(list(sizes))
        return torch.cat([part[slice(*self.span(len(part)))] for part in parts])

    def _columns(self, matrix: Tensor) -> Tensor:
        return matrix[:, slice(*self.span(matrix.shape[1]))].clone()

    def _once(self, bias: Tensor | None) -> Tensor | None:
        return bias if self.rank == 0 else None

    def _count(self, total: int) -> int:
        begin, end = self.span(total)
        return end - begin
