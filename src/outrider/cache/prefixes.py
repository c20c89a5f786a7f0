"""Beginnings that were read before: a radix tree of token runs, each with its keys and values.

Requests often begin alike: a system prompt, a conversation that goes on, the same prompt asked for several answers. A key or
value depends on nothing but the tokens up to it, so what one request computed serves the next. Runs are split where
texts part and stored once; a request that begins like a path of the tree gets a copy of it in its own cache, which it then
changes as it likes, so tree commits never touch what is shared. The idea is SGLang's RadixAttention (arXiv 2312.07104); there
requests share the memory too, here only the work.

    bytes(tree) <= budget, the leaves unused for longest leaving first
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.core.interfaces import Cache

_SHORTEST = 16
"""Tokens below which looking is dearer than reading."""


@dataclass(eq=False)
class _Node:
    tokens: tuple[int, ...]
    block: Tensor | None
    """[L, 2, Hkv, len(tokens), D]; None at the root."""
    children: dict[int, _Node] = field(default_factory=dict)
    used: int = 0

    @property
    def num_bytes(self) -> int:
        return 0 if self.block is None else self.block.nbytes


@final
class PrefixStore:
    """Keys and values of beginnings, at most ``budget`` bytes of them. Of one target, for one thread."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_bytes = 0
        self.num_hits = self.num_hit_tokens = 0
        self._root = _Node((), None)
        self._clock = 0

    def find(self, tokens: Sequence[int]) -> Cache | None:
        """A cache of one row that holds the longest known beginning of ``tokens``."""
        path = list(self._path(tokens))
        length = sum(size for _, size in path)
        if length < _SHORTEST:
            return None
        first = path[0][0].block
        assert first is not None
        num_layers, _, num_heads, _, head_dim = first.shape
        shape = (1, num_heads, head_dim)
        cache = ContiguousCache.empty(num_layers, shape, dtype=first.dtype, device=first.device)
        cache.reserve(length)
        begin = 0
        for node, size in path:
            assert node.block is not None
            cache.block[:, :, 0, :, begin : begin + size] = node.block[:, :, :, :size]
            begin += size
        cache.commit([range(length)])
        self.num_hits, self.num_hit_tokens = self.num_hits + 1, self.num_hit_tokens + length
        return cache

    def keep(self, tokens: Sequence[int], cache: Cache, row: int) -> None:
        """Remember ``tokens``, which row ``row`` of the cache begins with. Copies what is new."""
        if not isinstance(cache, ContiguousCache) or len(tokens) < _SHORTEST:
            return
        path = list(self._path(tokens))
        known = sum(size for _, size in path)
        node = path[-1][0] if path else self._root
        if path and path[-1][1] < len(node.tokens):
            self._split(node, path[-1][1])
        if known == len(tokens):
            return
        block = cache.block[:, :, row, :, known : len(tokens)].clone()
        leaf = _Node(tuple(tokens[known:]), block, used=self._clock)
        node.children[leaf.tokens[0]] = leaf
        self.num_bytes += leaf.num_bytes
        self._evict()

    def clear(self) -> None:
        self._root, self.num_bytes = _Node((), None), 0

    def _path(self, tokens: Sequence[int]) -> Iterator[tuple[_Node, int]]:
        """Nodes along ``tokens``, and how much of each is matched."""
        self._clock += 1
        node, begin = self._root, 0
        while begin < len(tokens):
            child = node.children.get(tokens[begin])
            if child is None:
                return
            size = _num_shared(child.tokens, tokens[begin : begin + len(child.tokens)])
            child.used = self._clock
            yield child, size
            if size < len(child.tokens):
                return
            node, begin = child, begin + size

    @staticmethod
    def _split(node: _Node, size: int) -> None:
        """Cut a run in two, the node keeping the first part."""
        assert node.block is not None
        lower = _Node(node.tokens[size:], node.block[:, :, :, size:].clone(), node.children, node.used)
        node.tokens, node.block = node.tokens[:size], node.block[:, :, :, :size].clone()
        node.children = {lower.tokens[0]: lower}

    def _evict(self) -> None:
        while self.num_bytes > self.budget:
            parent, leaf = min(self._leaves(self._root), key=lambda pair: pair[1].used)
            del parent.children[leaf.tokens[0]]
            self.num_bytes -= leaf.num_bytes

    def _leaves(self, node: _Node) -> Iterator[tuple[_Node, _Node]]:
        for child in node.children.values():
            if child.children:
                yield from self._leaves(child)
            else:
                yield node, child


def _num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(first, second)) if x != y), min(len(first), len(second)))
