"""One rank's share of a model: whole heads, columns of the MLP, rows of the vocabulary.

Queries go with the key-value head they look at, so no head is cut. Sizes that do not divide evenly differ by one between ranks;
heads must divide evenly. Columns of the MLP may come in units, such as the inputs that share a scale, which are not cut. Norms
are whole everywhere. A bias that is added after a sum over ranks belongs to the first rank, or it would be added once per rank.
(The division is Megatron's: Shoeybi et al. 2019, arXiv 1909.08053.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final, overload

import torch
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.models.decoder_weights import STORED_ROWS, LayerWeights, RowTables
from outrider.models.features import Latent, ModelConfig
from outrider.models.stored_rows import FILE_ROWS


@final
@dataclass(frozen=True)
class Share:
    """Rank ``rank`` of ``size``."""

    rank: int
    size: int
    unit: int = 1
    """Neighbouring columns of an MLP that stay together."""
    tables: RowTables = FILE_ROWS

    def span(self, total: int, unit: int = 1) -> tuple[int, int]:
        """The range of ``total`` rows or columns that this rank holds, in whole units."""
        count = total // unit
        return count * self.rank // self.size * unit, count * (self.rank + 1) // self.size * unit

    def check(self, config: ModelConfig) -> None:
        """Refuse a model whose heads cannot be divided."""
        count, kind = (config.num_kv_heads, "key-value heads") if config.latent is None else (config.num_heads, "heads")
        if count % self.size:
            valid = [str(n) for n in range(1, count + 1) if count % n == 0]
            raise OptionError(
                f"tensor_parallel = {self.size} does not divide the model's {count} {kind}, and a head is not cut; "
                f"use {', '.join(valid)}"
            )
        if config.qk_norm and config.qk_norm_span == "whole":
            raise OptionError(
                f"tensor_parallel = {self.size} is not available for {config.family} models: they normalise all heads as one "
                "vector, which is not divided; leave it out"
            )

    def config(self, config: ModelConfig) -> ModelConfig:
        """The share as a model config: fewer heads, a narrower MLP, part of the vocabulary."""
        heads, kv_heads = config.num_heads // self.size, config.num_kv_heads // self.size
        kv_heads = kv_heads if config.latent is None else config.num_kv_heads  # every rank keeps the latents
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "mlp_size": self._columns(config.mlp_size)}
        experts = config.experts
        if experts is not None:
            experts = replace(experts, size=self._columns(experts.size), shared_size=self._columns(experts.shared_size))
        begin, end = self.span(config.vocab_size)
        return replace(config, **sizes, vocab_size=end - begin, experts=experts)

    def layers(self, num_layers: int) -> Sequence[int]:
        return range(num_layers)

    def layer(self, config: ModelConfig, whole: LayerWeights) -> LayerWeights:
        """This rank's part of a layer of the model with ``config``."""
        pair = (config.mlp_size,) * (2 if config.gated else 1)
        inner = 0 if whole.router is None else 1  # experts stand in the first dimension
        beside = 0 if config.experts is None else config.experts.shared_size
        if inner and config.experts is not None:
            pair = (config.experts.size, config.experts.size)
        unit = self.unit
        return replace(
            whole,
            **(self._queries_and_keys(config, whole) if config.latent is None else self._latents(config, config.latent, whole)),
            out_bias=self._once(whole.out_bias),
            gate_up=self._rows(whole.gate_up, pair, inner, unit),
            gate_up_bias=self._rows(whole.gate_up_bias, pair, inner, unit),
            down=self._inputs(whole.down, self.span(pair[0], unit), 1 + inner),
            down_bias=self._once(whole.down_bias),
            sinks=self._rows(whole.sinks, (config.num_heads,)),
            q_norm=self._of_heads(whole.q_norm, config),
            k_norm=self._of_heads(whole.k_norm, config),
            shared_gate_up=self._rows(whole.shared_gate_up, (beside, beside), 0, unit),
            shared_down=None if whole.shared_down is None else self._inputs(whole.shared_down, self.span(beside, unit), 1),
        )

    def _queries_and_keys(self, config: ModelConfig, whole: LayerWeights) -> dict[str, Tensor | None]:
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return {
            "qkv": self._rows(whole.qkv, (q_rows, kv_rows, kv_rows)),
            "qkv_bias": self._rows(whole.qkv_bias, (q_rows, kv_rows, kv_rows)),
            "out": self._inputs(whole.out, self.span(q_rows), 1),
        }

    def _latents(self, config: ModelConfig, latent: Latent, whole: LayerWeights) -> dict[str, Tensor | None]:
        """The weights of latent attention. Latents and their norms are whole on every rank; the matrices of a head belong to
        its rank."""
        count, found = config.num_heads, dict[str, Tensor | None]()
        for name, size in {"query_up": count * latent.query_dim, "key_up": count, "value_up": count}.items():
            found[name] = self._rows(vars(whole)[name], (size,))
        if latent.query_rank is None:
            of_heads, shared = whole.qkv.tensor_split([count * latent.query_dim])
            found["qkv"] = torch.cat((self.rows(of_heads), shared))
            if whole.qkv_bias is not None:
                of_heads, shared = whole.qkv_bias.tensor_split([count * latent.query_dim])
                found["qkv_bias"] = torch.cat((self.rows(of_heads), shared))
        return {**found, "out": self._inputs(whole.out, self.span(count * latent.value_dim), 1)}

    def _inputs(self, matrix: Tensor, span: tuple[int, int], dim: int) -> Tensor:
        """Some inputs of a matrix, along dimension ``dim``."""
        if matrix.dtype == STORED_ROWS:
            return self.tables.part(matrix, span)
        return matrix.narrow(dim, span[0], span[1] - span[0]).clone()

    def rows(self, matrix: Tensor) -> Tensor:
        """This rank's rows of a matrix, copied."""
        return self._rows(matrix, (len(matrix),))

    @overload
    def _rows(self, stacked: Tensor, sizes: Sequence[int], dim: int = 0, unit: int = 1) -> Tensor: ...
    @overload
    def _rows(self, stacked: Tensor | None, sizes: Sequence[int], dim: int = 0, unit: int = 1) -> Tensor | None: ...
    def _rows(self, stacked: Tensor | None, sizes: Sequence[int], dim: int = 0, unit: int = 1) -> Tensor | None:
        """This rank's rows of several stacked matrices."""
        if stacked is None:
            return None
        parts = zip(stacked.split(list(sizes), dim), (self.span(size, unit) for size in sizes), strict=True)
        found = torch.cat([part.narrow(dim, begin, end - begin) for part, (begin, end) in parts], dim)
        return self.tables.part(found) if found.dtype == STORED_ROWS else found

    def _of_heads(self, norm: Tensor | None, config: ModelConfig) -> Tensor | None:
        """The norms of this rank's heads, if each head has one."""
        if norm is None or config.qk_norm_span == "head":
            return norm
        return self.rows(norm.view(-1, config.head_dim)).flatten()

    def _once(self, bias: Tensor | None) -> Tensor | None:
        return bias if self.rank == 0 else None

    def _columns(self, total: int) -> int:
        begin, end = self.span(total, self.unit)
        return end - begin
