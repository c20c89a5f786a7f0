"""The lean decoder on a GPU, at the speed its weights can be read: fused kernels, and a graph for every shape of pass.

The same computation as ``models/decoder.py``, its oracle, with other seams: the norm inside the product that follows it (one row) or
together with the sum before it (more), rotation with the cache write, activation with the product, tree attention over lengths
that stay on the device. ``forward`` waits for nothing on the host, so it can be captured alone (``score``) or as part of a
whole round (``engine/graphs.py``).

numerics="invariant": one tile per matrix and keys cut at fixed places, so that the score of a node on a chain is bit for bit the same
whatever else is in the pass; "fast": what measures best for the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.errors import OptionError, nearest
from outrider.core.interfaces import Cache, LayeredTarget, Resume
from outrider.core.route import Route
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.models.attention.tree_triton import Cut, Rows, Sights, attend_tree, cut_for, pack_words, rotate_and_write
from outrider.models.config import ModelConfig
from outrider.models.gpu.arena import Arena, ArenaShape, DeviceCache
from outrider.models.gpu.replay import PassGraphs
from outrider.models.gpu.skinny import Norm, add_norm, product, vector_product
from outrider.models.gpu.tiles import Kind, invariant_tile, single_tile, tile_for, vector_tile
from outrider.models.prefill import chunks_of, joined_taps
from outrider.models.rope import RotaryTable
from outrider.models.weights import LayerWeights, Weights

_CHUNK = 512
NUMERICS = ("fast", "invariant")


def can_run(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """The fast decoder knows this model, and the device can run its kernels."""
    plain = config.activation == "silu" and not (config.post_norms or config.out_bias or config.mlp_bias or config.norm_offset)
    uncapped = config.attention_softcap is None and config.final_softcap is None and config.embedding_scale == 1.0
    unbounded = all(window is None or window >= config.max_len for window in config.windows)
    power = config.head_dim >= 16 and config.head_dim & (config.head_dim - 1) == 0
    return device.type == "cuda" and dtype != torch.float64 and plain and uncapped and unbounded and power


@dataclass(frozen=True, eq=False)
class Step:
    """What all layers of one pass share."""

    shape: tuple[int, int]
    rows: Rows
    sights: Sights
    cut: Cut


@final
class FastDecoder(LayeredTarget):
    """A frozen decoder with one arena for all its caches; passes of one decoder must not run side by side."""

    def __init__(self, config: ModelConfig, weights: Weights, *, numerics: str = "fast") -> None:
        if numerics not in NUMERICS:
            raise OptionError(f"numerics = {numerics!r} is not valid; {nearest(numerics, NUMERICS)}")
        self.config, self.numerics = config, numerics
        self.vocab_size, self.max_len, self.num_layers = config.vocab_size, config.max_len, config.num_layers
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self._weights = weights
        self._invariant = numerics == "invariant"
        shape = ArenaShape(config.num_layers, config.num_kv_heads, config.head_dim)
        self.arena = Arena(shape, dtype=self.dtype, device=self.device)
        self._tables = [
            RotaryTable(rope, config.head_dim, context_len=config.max_len, dtype=self.dtype, device=self.device)
            for rope in config.ropes
        ]
        for table in self._tables:
            table.reach(min(config.max_len, 1 << 17) + 512)  # whole, since graphs hold its address
        self._graphs = PassGraphs(self)

    def new_cache(self, batch_size: int) -> DeviceCache:
        return DeviceCache.empty(self.arena, batch_size)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        assert isinstance(cache, DeviceCache), "a FastDecoder works on the caches it made"
        pieces: list[tuple[TokenTree, Mapping[int, Tensor]]] = []
        for tree in chunks_of(rows, _CHUNK, self.device):
            cache.reserve(tree.num_nodes)
            with torch.inference_mode():
                _, tapped = self.hidden(tree.tokens, self.step_of(tree, cache), taps=taps)
            cache.commit([range(size) for size in tree.sizes])
            pieces.append((tree, tapped))
        empty = torch.zeros(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        return joined_taps(pieces, taps, num_rows=len(rows), empty=empty)

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        del resume  # the same scores without it
        assert isinstance(cache, DeviceCache), "a FastDecoder works on the caches it made"
        with torch.inference_mode():
            logits, tapped = self._graphs.score(tree, cache, taps=tuple(taps), start=start)
        return Scores(logits, tapped)

    def exit(self, tree: TokenTree, cache: Cache, *, route: Route, start: int = 0) -> Tensor:
        assert isinstance(cache, DeviceCache), "a FastDecoder works on the caches it made"
        cache.reserve(tree.num_nodes, start=start)
        with torch.inference_mode():
            hidden, _ = self.hidden(tree.tokens[:, start:], self.step_of(tree, cache, start), route=route)
        return hidden.view(tree.batch_size, tree.num_nodes - start, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] float32 from the last layer's output [..., H]."""
        flat, norm = hidden.reshape(-1, hidden.shape[-1]), self._norm(self._weights.norm)
        head = self._weights.head
        if len(flat) == 1 and not self._invariant:
            tile = single_tile(Kind.HEAD, head.shape[0])
            assert tile is not None
            y = product(flat, head, tile=tile, norm=norm, out_dtype=torch.float32)
        else:
            y = self._product(add_norm(flat, None, norm), head, Kind.HEAD)
        return y.view(*hidden.shape[:-1], -1)

    def step_of(self, tree: TokenTree, cache: DeviceCache, start: int = 0) -> Step:
        """Everything the layers share, for nodes ``start``.. of the tree."""
        words = None if tree.is_chain else pack_words(tree.ancestors)[:, start:].contiguous()
        depths = None if tree.is_chain else tree.depths[:, start:].int().contiguous()
        shape = (tree.batch_size, tree.num_nodes - start)
        return self.step(shape, cache.rows(), Sights(words, depths, start), num_slots=max(cache.lengths) + tree.num_nodes)

    def step(self, shape: tuple[int, int], rows: Rows, sights: Sights, *, num_slots: int) -> Step:
        """``num_slots`` bounds the rows' lengths with the tree: those of now, or, in a graph, of ever."""
        group = self.config.num_heads // self.config.num_kv_heads
        if shape[1] > 64 and not self._invariant:
            cut = Cut(1, block_queries=64)
        else:
            heads = self.config.num_kv_heads
            cut = cut_for(shape[0], shape[1] * group, num_kv_heads=heads, capacity=num_slots, invariant=self._invariant)
        return Step(shape, rows, sights, cut)

    def forward(self, tokens: Tensor, step: Step, *, taps: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """[B, N, V] logits of [B, N] tokens, and the tapped states. Nothing here waits for the device."""
        hidden, tapped = self.hidden(tokens, step, taps=taps)
        return self.logits(hidden).view(*step.shape, -1), tapped

    def hidden(
        self, tokens: Tensor, step: Step, *, taps: Sequence[int] = (), route: Route | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """[B * N, H] the last layer's output, and the tapped states [B, N, H]."""
        x = self._weights.embedding[tokens.reshape(-1)]
        tapped: dict[int, Tensor] = {}
        parts: Tensor | None = None  # what the last sublayer adds to x, where the next norm does the sum
        for index, layer in enumerate(self._weights.layers):
            if index in taps:
                x, parts = _added(x, parts), None
                tapped[index] = x.clone().view(*step.shape, -1)
            if route is None or route.attention[index]:
                parts = self._attention(x, parts, index, step)
            if route is None or route.mlp[index]:
                parts = self._mlp(x, parts, layer)
        x = _added(x, parts)
        if self.num_layers in taps:
            tapped[self.num_layers] = x.clone().view(*step.shape, -1)
        return x, tapped

    def _attention(self, x: Tensor, parts: Tensor | None, index: int, step: Step) -> Tensor | None:
        """What attention adds to x; None where it was added already. ``parts`` are added to x first."""
        layer, config = self._weights.layers[index], self.config
        single = len(x) == 1 and not self._invariant
        norm = self._norm(layer.attention_norm)
        if single:
            qkv = vector_product(x, layer.qkv, tile=vector_tile(layer.qkv.shape[0]), norm=norm)
        else:
            qkv = self._product(add_norm(x, parts, norm), layer.qkv, Kind.WIDE)
        rope = config.rope_of_layer[index]
        tables = None if rope is None else (self._tables[rope].cos, self._tables[rope].sin)
        memory = self.arena.memory(index)
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm, config.norm_eps)
        queries = rotate_and_write(
            qkv.view(*step.shape, -1), memory, step.rows, sights=step.sights, tables=tables, bias=layer.qkv_bias, norms=norms
        )
        seen = attend_tree(queries, memory, step.rows, sights=step.sights, cut=step.cut, scale=config.query_scale)
        return self._narrow(seen.view(len(x), -1), layer.out, x, single=single)

    def _mlp(self, x: Tensor, parts: Tensor | None, layer: LayerWeights) -> Tensor | None:
        single = len(x) == 1 and not self._invariant
        norm = self._norm(layer.mlp_norm)
        if single:
            tile = single_tile(Kind.GATED, layer.gate_up.shape[0] // 2)
            if tile is None:
                gated = vector_product(x, layer.gate_up, tile=vector_tile(layer.gate_up.shape[0] // 2), norm=norm, gated=True)
            else:
                gated = product(x, layer.gate_up, tile=tile, norm=norm, gated=True)
        else:
            gated = self._product(add_norm(x, parts, norm), layer.gate_up, Kind.GATED)
        return self._narrow(gated, layer.down, x, single=single)

    def _narrow(self, y: Tensor, weight: Tensor, x: Tensor, *, single: bool) -> Tensor | None:
        if not single:
            return self._product(y, weight, Kind.NARROW)
        vector_product(y, weight, tile=vector_tile(weight.shape[0]), residual=x)
        return None

    def _product(self, x: Tensor, weight: Tensor, kind: Kind) -> Tensor:
        gated = kind is Kind.GATED
        num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
        tile = invariant_tile(kind) if self._invariant else tile_for(kind, len(x), num_outputs)
        out_dtype = torch.float32 if kind is Kind.HEAD else None
        if tile is not None:
            return product(x, weight, tile=tile, gated=gated, out_dtype=out_dtype)
        y = F.linear(x, weight)
        if gated:
            gate, up = y.chunk(2, -1)
            return F.silu(gate).mul_(up)
        return y if out_dtype is None else y.to(out_dtype)

    def _norm(self, weight: Tensor) -> Norm:
        return Norm(weight, self.config.norm_eps)


def _added(x: Tensor, parts: Tensor | None) -> Tensor:
    if parts is None:
        return x
    return x + (parts if parts.dim() == 2 else parts.sum(0)).to(x.dtype)
