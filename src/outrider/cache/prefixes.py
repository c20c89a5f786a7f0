"""The prefix cache: a radix tree of token runs, each with its keys and values.

Requests often share a prefix: a system prompt, a conversation that continues, one prompt with several answers. A key or value
depends only on the tokens up to it, so a later request can use what an earlier one computed. Each run is stored once and split
where texts diverge, as in SGLang's RadixAttention (arXiv 2312.07104). ``PrefixStore`` copies: a request gets a copy of its
longest stored prefix in its own block, so the work is shared. ``PageStore`` lends pages (``cache/paged.py``), so the memory is
shared too. In both, commits never change what is shared.

    bytes(tree) <= budget, the leaves unused for longest leaving first
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, final
from weakref import ref

from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.cache.page_pool import PagePool, PageRun
from outrider.cache.paged import PagedCache
from outrider.core.interfaces import Cache

_SHORTEST = 16
"""Prefixes of fewer tokens are not looked up: reading them again is cheaper."""

Held = TypeVar("Held")


@dataclass(eq=False)
class _Node(Generic[Held]):
    tokens: tuple[int, ...]
    held: Held
    num_bytes: int
    children: dict[int, _Node[Held]] = field(default_factory=dict)
    used: int = 0


class PrefixTree(ABC, Generic[Held]):
    """Keys and values of prefixes, at most ``budget`` bytes in all. It serves one target and one thread."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_bytes = 0
        self.num_hits = self.num_hit_tokens = 0
        self._top: dict[int, _Node[Held]] = {}
        self._clock = 0

    def find(self, tokens: Sequence[int]) -> Cache | None:
        """A cache of one row with the longest stored prefix of ``tokens``."""
        path = list(self._path(tokens))
        length = sum(size for _, size in path)
        if length < _SHORTEST:
            return None
        self.num_hits, self.num_hit_tokens = self.num_hits + 1, self.num_hit_tokens + length
        return self._cache_of([(node.held, size) for node, size in path])

    def keep(self, tokens: Sequence[int], cache: Cache, row: int) -> None:
        """Store ``tokens``, with which row ``row`` of the cache begins."""
        if len(tokens) < _SHORTEST:
            return
        path = list(self._path(tokens))
        known = sum(size for _, size in path)
        node = path[-1][0] if path else None
        if node is not None and path[-1][1] < len(node.tokens):
            self._split(node, path[-1][1], end=known)
        if known == len(tokens):
            return
        held = self._take(cache, row, known, len(tokens))
        if held is not None:
            leaf = _Node(tuple(tokens[known:]), *held, used=self._clock)
            (self._top if node is None else node.children)[leaf.tokens[0]] = leaf
            self.num_bytes += leaf.num_bytes
            self._evict()

    def clear(self) -> None:
        self._top, self.num_bytes = {}, 0

    @abstractmethod
    def _take(self, cache: Cache, row: int, begin: int, end: int) -> tuple[Held, int] | None:
        """Slots ``begin`` to ``end`` of a row and the bytes they hold; None where the cache is of another kind."""

    @abstractmethod
    def _cut(self, held: Held, size: int, end: int) -> tuple[tuple[Held, int], tuple[Held, int]]:
        """Split a run after its first ``size`` tokens, which end at position ``end`` of the text. Returns both parts."""

    @abstractmethod
    def _cache_of(self, path: Sequence[tuple[Held, int]]) -> Cache:
        """One row that begins with the first so many tokens of each run."""

    def _path(self, tokens: Sequence[int]) -> Iterator[tuple[_Node[Held], int]]:
        """Nodes along ``tokens``, and how much of each is matched."""
        self._clock += 1
        children, begin = self._top, 0
        while begin < len(tokens):
            child = children.get(tokens[begin])
            if child is None:
                return
            size = _num_shared(child.tokens, tokens[begin : begin + len(child.tokens)])
            child.used = self._clock
            yield child, size
            if size < len(child.tokens):
                return
            children, begin = child.children, begin + size

    def _split(self, node: _Node[Held], size: int, *, end: int) -> None:
        """Split the run of a node in two. The node keeps the first part."""
        upper, lower = self._cut(node.held, size, end)
        self.num_bytes += upper[1] + lower[1] - node.num_bytes
        below = _Node(node.tokens[size:], *lower, node.children, node.used)
        node.tokens, (node.held, node.num_bytes) = node.tokens[:size], upper
        node.children = {below.tokens[0]: below}

    def _evict(self) -> None:
        while self.num_bytes > self.budget:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        siblings, leaf = min(_leaves(self._top), key=lambda pair: pair[1].used)
        del siblings[leaf.tokens[0]]
        self.num_bytes -= leaf.num_bytes


@final
class PrefixStore(PrefixTree[Tensor]):
    """Copies of runs [L, 2, Hkv, N, D] of contiguous caches."""

    def _take(self, cache: Cache, row: int, begin: int, end: int) -> tuple[Tensor, int] | None:
        if not isinstance(cache, ContiguousCache):
            return None
        block = cache.block[:, :, row, :, begin:end].clone()
        return block, block.nbytes

    def _cut(self, held: Tensor, size: int, end: int) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
        del end
        upper, lower = held[:, :, :, :size].clone(), held[:, :, :, size:].clone()
        return (upper, upper.nbytes), (lower, lower.nbytes)

    def _cache_of(self, path: Sequence[tuple[Tensor, int]]) -> Cache:
        first, length = path[0][0], sum(size for _, size in path)
        num_layers, _, num_heads, _, head_dim = first.shape
        cache = ContiguousCache.empty(num_layers, (1, num_heads, head_dim), dtype=first.dtype, device=first.device)
        cache.reserve(length)
        begin = 0
        for block, size in path:
            cache.block[:, :, 0, :, begin : begin + size] = block[:, :, :, :size]
            begin += size
        cache.commit([range(length)])
        return cache


@final
class PageStore(PrefixTree[PageRun]):
    """Lends pages of running and finished requests. A run here reaches from the beginning of the text to its node's end, so a
    request needs only the deepest one. A node's size is the number of its pages that its parent does not hold in full. When the
    pool is full, pages that no running request uses are freed."""

    def __init__(self, pool: PagePool, budget: int) -> None:
        super().__init__(budget)
        self._pool, mine = pool, ref(self)
        pool.reclaim = lambda num_pages: (store := mine()) and store.give_back(num_pages)

    def give_back(self, num_pages: int) -> None:
        """Forget prefixes until so many pages are free."""
        while self._top and self._pool.num_free < num_pages:
            self._forget_oldest()

    def _take(self, cache: Cache, row: int, begin: int, end: int) -> tuple[PageRun, int] | None:
        if not isinstance(cache, PagedCache):
            return None
        run = cache.run(row, end)
        return run, self._bytes(run, begin)

    def _cut(self, held: PageRun, size: int, end: int) -> tuple[tuple[PageRun, int], tuple[PageRun, int]]:
        upper = held.first(end)
        return (upper, self._bytes(upper, end - size)), (held, self._bytes(held, end))

    def _cache_of(self, path: Sequence[tuple[PageRun, int]]) -> Cache:
        run, length = path[-1][0], sum(size for _, size in path)
        return PagedCache.of_runs(run.pool, [run.first(length)])

    @staticmethod
    def _bytes(run: PageRun, begin: int) -> int:
        return (len(run.pages) - begin // run.pool.page_len) * run.pool.page_bytes


def prefix_tree(cache: Cache, budget: int) -> PrefixTree[Tensor] | PrefixTree[PageRun]:
    """The store for caches of this kind."""
    return PageStore(cache.pool, budget) if isinstance(cache, PagedCache) else PrefixStore(budget)


def _leaves(children: dict[int, _Node[Held]]) -> Iterator[tuple[dict[int, _Node[Held]], _Node[Held]]]:
    for child in children.values():
        if child.children:
            yield from _leaves(child.children)
        else:
            yield children, child


def _num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(first, second)) if x != y), min(len(first), len(second)))
