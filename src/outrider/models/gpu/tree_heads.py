"""The attention of a layer on the fast decoder, without the output matrix.

It has three steps: one product for queries, keys and values, then rotation with the cache write, then tree attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from outrider.cache.page_pool import LayerPages
from outrider.models.attention.rotate_triton import QueryNorms, rotate_and_write
from outrider.models.attention.tree_tiles import Bounds
from outrider.models.attention.tree_triton import attend_tree
from outrider.models.features import ModelConfig
from outrider.models.gpu.products import multiply
from outrider.models.gpu.stream import Step
from outrider.models.gpu.tiles import Kind
from outrider.models.packed import LayerMatrices
from outrider.models.rope import RotaryTable


class Heads(Protocol):
    """The attention heads of a layer."""

    def __call__(self, x: Tensor, index: int, layer: LayerMatrices, memory: LayerPages, steps: Sequence[Step]) -> Tensor:
        """[M, heads * D] output of attention for the nodes of all steps, one step after the other, from their norm [M, H]. The
        nodes' keys and values are written to the layer's memory first."""
        ...


@final
class TreeHeads(Heads):
    """Heads with keys and values of their own, or shared by a group."""

    def __init__(self, config: ModelConfig, tables: Sequence[RotaryTable], bounds: Sequence[Bounds], *, exact: bool) -> None:
        """``exact`` means that a node's numbers must not depend on how many share the pass."""
        self._config, self._tables, self._bounds, self._exact = config, tables, bounds, exact

    def __call__(self, x: Tensor, index: int, layer: LayerMatrices, memory: LayerPages, steps: Sequence[Step]) -> Tensor:
        qkv = multiply(x, layer.qkv, Kind.WIDE, exact=self._exact).split([step.num_nodes for step in steps], -2)
        groups = [(own.unflatten(-2, step.shape), step) for own, step in zip(qkv, steps, strict=True)]
        seen = [self._look(own, index, layer, memory, step) for own, step in groups]
        return seen[0] if len(seen) == 1 else torch.cat(seen)

    def _look(self, qkv: Tensor, index: int, layer: LayerMatrices, memory: LayerPages, step: Step) -> Tensor:
        """[B * N, Hq * D] output of attention for the nodes of a group of rows, whose keys are written first."""
        config, rest = self._config, layer.rest
        rope, bounds, rows, sights = config.rope_of_layer[index], self._bounds[index], step.rows, step.sights
        tables = None if rope is None else (self._tables[rope].cos, self._tables[rope].sin)
        norms = None
        if rest.q_norm is not None and rest.k_norm is not None:
            norms = QueryNorms(rest.q_norm, rest.k_norm, config.norm_eps, config.qk_norm_span, config.norm_kind)
        queries = rotate_and_write(qkv, memory, rows, sights=sights, tables=tables, bias=rest.qkv_bias, norms=norms)
        cut, scale = step.cuts[bounds.window], config.query_scale
        seen = attend_tree(queries, memory, rows, sights=sights, cut=cut, scale=scale, bounds=bounds)
        return seen.view(step.num_nodes, -1)
