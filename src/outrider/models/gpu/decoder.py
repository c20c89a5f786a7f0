"""The lean decoder on a GPU, at the speed its weights can be read: fused kernels, and a graph for every shape of pass.

The same computation as ``models/decoder.py``, its oracle, with other seams: residual sum with the norm that follows, rotation
with the cache write, activation with the product, tree attention over lengths that stay on the device: nine kernels a layer.
``forward`` waits for nothing on the host, so it can be captured alone (``score``) or as part of a whole round.

numerics="invariant": keys are cut at fixed places and added up in the order of the text, and long passes go through the kernels
of short ones, so that the score of a node is bit for bit the same whatever else is in the pass; "fast": what measures best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.cache.paged import PagedCache, PagePool
from outrider.core.interfaces import Cache
from outrider.core.layered_target import LayeredTarget
from outrider.core.resume import Resume
from outrider.core.route import Route
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.models.attention.tree_tiles import Cut, Rows, Sights, paths_of
from outrider.models.attention.tree_triton import attend_tree, cut_for, pack_words, rotate_and_write
from outrider.models.config import ModelConfig
from outrider.models.gpu.arena import Arena, ArenaShape, DeviceCache, flat_rows, rows_in
from outrider.models.gpu.limits import can_go_wide
from outrider.models.gpu.products import added, multiply
from outrider.models.gpu.replay import PassGraphs
from outrider.models.gpu.skinny import Norm, add_norm
from outrider.models.gpu.tiles import Kind
from outrider.models.packed import Matrix, matrices_of
from outrider.models.prefill import chunks_of, joined_taps
from outrider.models.rope import RotaryTable
from outrider.models.weights import Weights

_MOST_PLACES = 65_535
"""Rows times tokens of a pass: kernels count them in a dimension of the grid that CUDA keeps this small."""
_CHUNK = 512


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

    can_be_captured = True

    def __init__(
        self, config: ModelConfig, weights: Weights, *, numerics: str = "fast", bits: int = 16, page_len: int = 0
    ) -> None:
        """``bits`` (16, 8, 4) of the matrices; ``page_len`` (a power of two) keeps keys in pages of so many tokens, so that
        requests can share beginnings."""
        self.config, self.numerics = config, numerics
        self.vocab_size, self.max_len, self.num_layers = config.vocab_size, config.max_len, config.num_layers
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self.weights = matrices_of(weights, bits)
        self.is_invariant = numerics == "invariant"
        shape = ArenaShape(config.num_layers, config.num_kv_heads, config.head_dim)
        self.arena = Arena(shape, dtype=self.dtype, device=self.device)
        self.page_len = page_len
        self._is_wide = not page_len and can_go_wide(config.head_dim, self.dtype)
        pages = (shape.num_layers, shape.num_kv_heads, shape.head_dim)
        self.pool = PagePool(pages, dtype=self.dtype, device=self.device, page_len=page_len) if page_len else None
        self._tables = [
            RotaryTable(rope, config.head_dim, context_len=config.max_len, dtype=self.dtype, device=self.device)
            for rope in config.ropes
        ]
        for table in self._tables:
            table.reach(min(config.max_len, 1 << 17) + 512)  # whole, since graphs hold its address
        self._graphs = PassGraphs()

    @property
    def memory(self) -> Arena | PagePool:
        """Where its caches are."""
        return self.arena if self.pool is None else self.pool

    def new_cache(self, batch_size: int) -> DeviceCache | PagedCache:
        if self.pool is not None:
            return PagedCache.empty(self.pool, batch_size)
        return DeviceCache.empty(self.arena, batch_size)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        assert isinstance(cache, DeviceCache | PagedCache), "a FastDecoder works on the caches it made"
        pieces: list[tuple[TokenTree, Mapping[int, Tensor]]] = []
        for tree in chunks_of(rows, max(1, min(_CHUNK, _MOST_PLACES // max(1, len(rows)))), self.device):
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
        assert isinstance(cache, DeviceCache | PagedCache), "a FastDecoder works on the caches it made"
        with torch.inference_mode():
            logits, tapped = self._graphs.score(self, tree, cache=cache, taps=tuple(taps), start=start)
        return Scores(logits, tapped)

    def exit(self, tree: TokenTree, cache: Cache, *, route: Route, start: int = 0) -> Tensor:
        assert isinstance(cache, DeviceCache | PagedCache), "a FastDecoder works on the caches it made"
        cache.reserve(tree.num_nodes, start=start)
        with torch.inference_mode():
            hidden, _ = self.hidden(tree.tokens[:, start:], self.step_of(tree, cache, start), route=route)
        return hidden.view(tree.batch_size, tree.num_nodes - start, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] float32 from the last layer's output [..., H]."""
        return self._head(hidden.reshape(-1, hidden.shape[-1]).contiguous(), None).view(*hidden.shape[:-1], -1)

    def _head(self, x: Tensor, parts: Tensor | None) -> Tensor:
        return self._product(add_norm(x, parts, self._norm(self.weights.norm)), self.weights.head, Kind.HEAD)

    def step_of(self, tree: TokenTree, cache: DeviceCache | PagedCache, start: int = 0) -> Step:
        """Everything the layers share, for nodes ``start``.. of the tree."""
        words = None if tree.is_chain else pack_words(tree.ancestors)[:, start:].contiguous()
        depths = None if tree.is_chain else tree.depths[:, start:].int().contiguous()
        paths = paths_of(tree.ancestors)[:, start:].contiguous() if self.is_invariant and words is not None else None
        shape = (tree.batch_size, tree.num_nodes - start)
        columns = 0 if isinstance(cache, DeviceCache) else max(map(len, cache.pages))
        rows = rows_in(flat_rows(cache, columns).to(self.device), cache.batch_size, page_len=self.page_len)
        return self.step(shape, rows, Sights(words, depths, start, paths), num_slots=max(cache.lengths) + tree.num_nodes)

    def step(self, shape: tuple[int, int], rows: Rows, sights: Sights, *, num_slots: int) -> Step:
        """``num_slots`` bounds the rows' lengths with the tree: those of now, or, in a graph, of ever."""
        group = self.config.num_heads // self.config.num_kv_heads
        if shape[1] > 64 and not self.is_invariant:
            cut = Cut(1, block_queries=64)
        else:
            cut = cut_for(
                shape[0],
                shape[1] * group,
                num_kv_heads=self.config.num_kv_heads,
                capacity=num_slots,
                invariant=self.is_invariant,
                wide=self._is_wide,
            )
        return Step(shape, rows, sights, cut)

    def forward(self, tokens: Tensor, step: Step, *, taps: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """[B, N, V] logits of [B, N] tokens, and the tapped states. Nothing here waits for the device."""
        x, parts, tapped = self._climb(tokens, step, taps)
        logits = self._head(x, parts).view(*step.shape, -1)  # x is complete after it
        if self.num_layers in taps:
            tapped[self.num_layers] = x.view(*step.shape, -1)
        return logits, tapped

    def hidden(
        self, tokens: Tensor, step: Step, *, taps: Sequence[int] = (), route: Route | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """[B * N, H] the last layer's output, and the tapped states [B, N, H]."""
        x, parts, tapped = self._climb(tokens, step, taps, route)
        x = added(x, parts)
        if self.num_layers in taps:
            tapped[self.num_layers] = x.view(*step.shape, -1)
        return x, tapped

    def _climb(
        self, tokens: Tensor, step: Step, taps: Sequence[int], route: Route | None = None
    ) -> tuple[Tensor, Tensor | None, dict[int, Tensor]]:
        """The residual stream, what the last sublayer has yet to add to it (the next norm does), and the tapped states."""
        x = self.weights.embedding[tokens.reshape(-1)]
        parts: Tensor | None = None
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.weights.layers):
            if index in taps:
                x, parts = added(x, parts), None
                tapped[index] = x.clone().view(*step.shape, -1)
            if route is None or route.attention[index]:
                parts = self._attention(add_norm(x, parts, self._norm(layer.rest.attention_norm)), index, step)
            if route is None or route.mlp[index]:
                normed = add_norm(x, parts, self._norm(layer.rest.mlp_norm))
                gated = self._product(normed, layer.gate_up, Kind.GATED)
                parts = self._product(gated, layer.down, Kind.NARROW)
        return x, parts, tapped

    def _attention(self, x: Tensor, index: int, step: Step) -> Tensor:
        """What attention adds to the stream, from its norm."""
        layer, config, memory = self.weights.layers[index], self.config, self.memory.memory(index)
        qkv = self._product(x, layer.qkv, Kind.WIDE)
        qkv = qkv.view(*qkv.shape[:-2], *step.shape, -1)
        rope = config.rope_of_layer[index]
        tables = None if rope is None else (self._tables[rope].cos, self._tables[rope].sin)
        rest = layer.rest
        norms = None if rest.q_norm is None or rest.k_norm is None else (rest.q_norm, rest.k_norm, config.norm_eps)
        queries = rotate_and_write(qkv, memory, step.rows, sights=step.sights, tables=tables, bias=rest.qkv_bias, norms=norms)
        seen = attend_tree(queries, memory, step.rows, sights=step.sights, cut=step.cut, scale=config.query_scale)
        return self._product(seen.view(len(x), -1), layer.out, Kind.NARROW)

    def _product(self, x: Tensor, weight: Matrix, kind: Kind) -> Tensor:
        return multiply(x, weight, kind, exact=self.is_invariant)

    def _norm(self, weight: Tensor) -> Norm:
        return Norm(weight, self.config.norm_eps)
