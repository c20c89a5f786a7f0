"""One pass of the decoder as a CUDA graph. It is captured once for every shape of pass, then replayed with new tokens, lengths
and masks.

Launching the three hundred kernels of a pass takes the host longer than running them takes the device. A captured pass is one
launch. Shapes are rounded up to a few sizes, so that trees that differ by a node share a graph; the padding is cut off. Graphs
are made when first needed and share one memory pool. They are dropped when the pool of pages has moved.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from outrider.cache.page_pool import PagePool
from outrider.cache.paged import PagedCache
from outrider.core.side_thread import check_may_capture
from outrider.core.traits import TargetTraits
from outrider.core.tree import TokenTree
from outrider.models.attention.tree_tiles import Rows, Sights, paths_of
from outrider.models.attention.tree_triton import pack_words
from outrider.models.gpu.pages import empty_rows, flat_rows, rows_in

_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
_MOST_GRAPHS = 32
"""Most graphs. Each holds its logits, which take hundreds of megabytes for a large pass. The one unused for longest goes
first."""
_FEWEST_PAGES = 16
_MOST_ROWS = 512
"""Rows of a pass beyond which launching is not the bottleneck."""


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """A context whose kernels go into the graph. Nothing is garbage-collected meanwhile, because an old graph that is freed
    during a capture would spoil it. Other threads go on with their own streams."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if was_enabled:
            gc.enable()


def rounded(num_nodes: int) -> int:
    """The size of graph that serves this many nodes."""
    return next((size for size in _SIZES if size >= num_nodes), -(-num_nodes // 32) * 32)


@dataclass(frozen=True)
class PassShape:
    """The shape of a pass for which a graph is captured."""

    batch_size: int
    num_nodes: int
    start: int
    num_words: int
    """0 on chains."""
    taps: tuple[int, ...]
    num_pages: int
    """Columns of the table of pages."""


def _own_bits(shape: PassShape) -> Tensor:
    """[B, N, W] words in which every node sees itself. A padding node that saw nothing would give NaN, which would spread."""
    words = torch.zeros(shape.batch_size, shape.num_nodes, shape.num_words, dtype=torch.int64)
    for node in range(shape.num_nodes):
        bit = (shape.start + node) % 64
        words[:, node, (shape.start + node) // 64] = (1 << bit) - ((1 << 64) if bit == 63 else 0)
    return words


def _num_columns(cache: PagedCache) -> int:
    """Columns of the page table that a graph is captured for: a power of two, so that there are few."""
    return max(_FEWEST_PAGES, 1 << (max(map(len, cache.pages)) - 1).bit_length())


class Replayed(Protocol):
    """The part of a decoder that a captured pass calls."""

    device: torch.device
    traits: TargetTraits
    pool: PagePool

    def step(self, shape: tuple[int, int], rows: Rows, sights: Sights, *, num_slots: int) -> Any: ...

    def step_of(self, tree: TokenTree, cache: PagedCache, start: int = 0) -> Any: ...

    def forward(self, tokens: Tensor, step: Any, *, taps: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]: ...


@final
class PassGraph:
    """A captured pass with the tensors it reads and writes."""

    def __init__(self, decoder: Replayed, shape: PassShape, pool: Any, *, first: tuple[TokenTree, PagedCache]) -> None:
        """``first`` is the pass on which the graph is captured. Kernels are compiled by running them, which writes to the
        rows."""
        batch_size, num_nodes, device = shape.batch_size, shape.num_nodes, decoder.device
        self.shape = shape
        self.tokens = torch.zeros(batch_size, num_nodes, dtype=torch.int64, device=device)
        self.rows = empty_rows(batch_size, shape.num_pages, device)
        self.depths: Tensor | None = None
        self.words: Tensor | None = None
        self.paths: Tensor | None = None
        if shape.num_words:
            self.depths = torch.zeros(batch_size, num_nodes, dtype=torch.int32, device=device)
            self.words = _own_bits(shape).to(device)
            if decoder.traits.is_invariant:
                width = shape.start + num_nodes
                self.paths = torch.zeros(batch_size, num_nodes, width, dtype=torch.int32, device=device)
        self.load(*first)
        self.graph = torch.cuda.CUDAGraph()
        sights = Sights(self.words, self.depths, shape.start, self.paths)
        page_len = decoder.pool.page_len
        rows = rows_in(self.rows, batch_size, page_len)
        step = decoder.step((batch_size, num_nodes), rows, sights, num_slots=shape.num_pages * page_len)
        decoder.forward(self.tokens, step, taps=shape.taps)  # compiles the kernels
        torch.cuda.synchronize(device)
        with capturing(self.graph, pool):
            self.logits, self.tapped = decoder.forward(self.tokens, step, taps=shape.taps)

    def load(self, tree: TokenTree, cache: PagedCache) -> None:
        """Copy a tree and the state of its rows to the graph's inputs."""
        start = self.shape.start
        count = tree.num_nodes - start
        self.rows.copy_(flat_rows(cache, self.shape.num_pages))
        self.tokens[:, :count] = tree.tokens[:, start:]
        if self.words is not None and self.depths is not None:
            self.depths[:, :count] = tree.depths[:, start:]
            self.words[:, :count, : -(-tree.num_nodes // 64)] = pack_words(tree.ancestors)[:, start:]
            if self.paths is not None:
                self.paths[:, :count, : tree.num_nodes] = paths_of(tree.ancestors)[:, start:]

    def replay(self, count: int) -> tuple[Tensor, dict[int, Tensor]]:
        self.graph.replay()
        return self.logits[:, :count].clone(), {tap: states[:, :count].clone() for tap, states in self.tapped.items()}


@final
class PassGraphs:
    """The graphs of a decoder. The decoder is passed to each call, because memory in a reference cycle would be freed late."""

    def __init__(self) -> None:
        self._graphs: dict[PassShape, PassGraph] = {}
        self._version = 0
        self._pool: Any = None

    def score(
        self, decoder: Replayed, tree: TokenTree, *, cache: PagedCache, taps: Sequence[int], start: int
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits and taps of nodes ``start``.. of the tree."""
        count = tree.num_nodes - start
        size = rounded(count)
        if size * tree.batch_size > _MOST_ROWS or not decoder.traits.can_be_captured:
            cache.reserve(tree.num_nodes, start=start)
            step = decoder.step_of(tree, cache, start)
            return decoder.forward(tree.tokens[:, start:], step, taps=taps)
        cache.reserve(start + size, start=start)
        num_words = 0 if tree.is_chain else -(-(start + size) // 64)
        shape = PassShape(tree.batch_size, size, start, num_words, tuple(taps), _num_columns(cache))
        graph = self._graph(decoder, shape, first=(tree, cache))
        graph.load(tree, cache)
        return graph.replay(count)

    def _graph(self, decoder: Replayed, shape: PassShape, *, first: tuple[TokenTree, PagedCache]) -> PassGraph:
        if self._version != decoder.pool.version:
            self._graphs.clear()
            self._version = decoder.pool.version
        graph = self._graphs.pop(shape, None)
        if graph is None:
            check_may_capture()
            if not self._graphs:  # a pool goes with the last graph that used it
                self._pool = torch.cuda.graph_pool_handle()
            if len(self._graphs) >= _MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            graph = PassGraph(decoder, shape, self._pool, first=first)
        self._graphs[shape] = graph  # the last in order is the last used
        return graph
