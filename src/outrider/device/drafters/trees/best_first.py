"""Best-first trees grown on the device, with passes of fixed shapes. The trees equal those of ``drafters/model/best_first.py``.

At each level, the best ``width`` candidates are expanded, each with its ``num_children`` best tokens. A pool keeps every
candidate with its path probability (``drafters/trees/candidates.py``), and the best of the pool become the tree. The number of
candidates at each level is known. Two small kernels, one program per slot, choose them. (Li et al. 2024, arXiv 2406.16858.)

    chance(child) = chance(parent) * softmax((l + T g) / tau)[child]           expand: top width of a level;  tree: top N of all
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.core.device_round import CapturedShape, Frame, SlotTrees
from outrider.device.sampling.adjust import Trail
from outrider.device.sampling.choose import Bests

_RANKED = 16
"""Places that one program ranks."""
MOST = 64
"""Most nodes of a tree, and most expanded nodes, because ancestors are bits of one 64-bit word."""


@dataclass(frozen=True)
class Search:
    """Size of a search: how many candidates it considers, and how many nodes it proposes."""

    max_depth: int
    num_nodes: int
    """Nodes of the tree, the root included."""
    width: int
    num_children: int
    tau: float

    @property
    def num_expanded(self) -> tuple[int, ...]:
        """Number of nodes expanded at every level: the root, then the best of those found below the previous level."""
        counts = [1]
        while len(counts) < self.max_depth:
            counts.append(min(self.width, counts[-1] * self.num_children))
        return tuple(counts)

    @property
    def pool_size(self) -> int:
        return 1 + sum(self.num_expanded) * self.num_children

    @property
    def fits(self) -> bool:
        """Whether the search fits into one word of bits and considers enough candidates for its tree."""
        return 2 <= self.num_nodes <= min(MOST, self.pool_size) and sum(self.num_expanded) <= MOST


def searches_of(shape: CapturedShape, *, width: int, num_children: int, tau: float) -> dict[int, Search] | None:
    """The searches for trees by guesses along a path, no larger than what they consider; None if one is too large."""
    found = {depth: Search(depth, count + 1, width, num_children, tau) for depth, count in shape.guesses.items()}
    found = {depth: replace(one, num_nodes=min(one.num_nodes, one.pool_size)) for depth, one in found.items()}
    return found if all(search.fits for search in found.values()) else None


@dataclass(frozen=True, eq=False)
class Pool:
    """Candidates of every slot, the root first, and those that are expanded: P places, F expanded nodes below the root."""

    tokens: Tensor
    """[B, P] int64"""
    parents: Tensor
    """[B, P] int32 places"""
    chances: Tensor
    """[B, P] float32 log-probability that the text passes through"""
    numbers: Tensor
    """[B, P] int32 number among the expanded nodes; the root is 0"""
    places: Tensor
    """[B, W] int32 places of the nodes expanded last"""
    moved: Tensor
    """[B, P] int32 rank during the choice, then node of the tree"""

    @staticmethod
    def empty(batch_size: int, search: Search, device: torch.device) -> Pool:
        shape = (batch_size, search.pool_size)
        whole = [torch.zeros(shape, dtype=kind, device=device) for kind in (torch.int64, torch.int32, torch.float32)]
        numbers, moved = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2))
        places = torch.zeros(batch_size, max(search.num_expanded), dtype=torch.int32, device=device)
        return Pool(*whole, numbers, places, moved)


@dataclass(frozen=True, eq=False)
class Expanded:
    """The expanded nodes below the root, in the order in which the drafter is asked. Nodes of one level are adjacent."""

    tokens: Tensor
    """[B, F] int64"""
    above: Tensor
    """[B, F] int64 number of the parent among the expanded nodes, 0 for the root"""
    words: Tensor
    """[B, F, 1] int64 ancestor bits: of the expanded nodes alone, or (``with_root``) with the root as bit 0"""

    def level(self, first: int, count: int) -> Expanded:
        return Expanded(*(t[:, first : first + count].contiguous() for t in (self.tokens, self.above, self.words)))


@final
class Growth:
    """One search over a number of slots: the arrays that its kernels write, at fixed addresses."""

    def __init__(self, search: Search, batch_size: int, device: torch.device, *, with_root: bool) -> None:
        """``with_root`` counts the root as the first of the expanded nodes in their ancestor words."""
        self.search, self._with_root = search, with_root
        num_fed = max(1, sum(search.num_expanded) - 1)
        with torch.inference_mode(False):  # whoever asks first, anybody may write to it
            self.pool = Pool.empty(batch_size, search, device)
            fed = [torch.zeros(batch_size, num_fed, dtype=torch.int64, device=device) for _ in range(2)]
            self.expanded = Expanded(*fed, torch.zeros(batch_size, num_fed, 1, dtype=torch.int64, device=device))
            levels = [level for level, count in enumerate(search.num_expanded) for _ in range(count * search.num_children)]
            self._depths = torch.tensor([0, *(level + 1 for level in levels)], dtype=torch.int32, device=device)
            self.trees = _empty_trees(batch_size, search, device)

    def add(self, level: int, bests: Bests, frame: Frame) -> None:
        """Add the candidates below the nodes expanded at ``level``, from their best tokens, and expand the best of them."""
        search, pool, fed = self.search, self.pool, self.expanded
        counts = (*search.num_expanded, 0)
        assert bests.sums is not None
        batch_size, num_parents, num_bests = bests.values.shape
        num_blocks, begin = bests.sums.shape[3], 1 + sum(counts[:level]) * search.num_children
        _add[(batch_size,)](
            bests.values, bests.tokens, bests.sums, frame.temperatures, pool.tokens, pool.parents, pool.chances, pool.numbers,
            pool.places, fed.tokens, fed.above, fed.words, begin, sum(counts[: level + 1]) - 1, num_parents, num_bests,
            num_blocks, pool.tokens.shape[1], fed.tokens.shape[1], pool.places.shape[1], 1.0 / search.tau,
            CHILDREN=search.num_children, NEXT=counts[level + 1], PARENTS=triton.next_power_of_2(num_parents),
            BESTS=triton.next_power_of_2(num_bests), BLOCKS=triton.next_power_of_2(num_blocks),
            FOUND=triton.next_power_of_2(num_parents * search.num_children), ROOT=int(self._with_root), num_warps=4,
        )  # fmt: skip

    def trail(self, level: Expanded) -> Trail:
        """The path to the nodes of a level."""
        words = level.words >> 1 if self._with_root else level.words
        return Trail(self.expanded.tokens, words, has_root=False)

    def choose(self, nodes: Tensor) -> None:
        """Choose the best of the pool as trees: tokens into columns 1.. of ``nodes`` [B, N], shapes into ``trees``."""
        chances, num_places = self.pool.chances, self.pool.chances.shape[1]
        _rank_all[(triton.cdiv(num_places, _RANKED), len(nodes))](
            chances, self.pool.moved, num_places, PLACES=triton.next_power_of_2(num_places), BLOCK=_RANKED, num_warps=4
        )
        self._take(nodes)

    def choose_kept(self, nodes: Tensor, kept: Tensor) -> None:
        """Choose among the candidates that are ``kept`` [B, P], one tree per slot. Unused nodes hold no guess."""
        self.pool.moved.copy_(torch.where(kept, 0, self.search.num_nodes))
        for tensor, value in ((nodes, -1), (self.trees.parents, 0), (self.trees.depths, 1)):
            tensor[:, 1:] = value
        self._take(nodes)

    def _take(self, nodes: Tensor) -> None:
        """Let the places whose rank is less than the number of nodes become the tree."""
        pool, trees, num_places = self.pool, self.trees, self.pool.tokens.shape[1]
        _choose[(len(nodes),)](
            pool.tokens, pool.parents, pool.moved, self._depths, nodes,
            trees.parents, trees.depths, trees.words, trees.paths, num_places, nodes.shape[1], trees.paths.shape[2],
            PLACES=triton.next_power_of_2(num_places), NODES=triton.next_power_of_2(nodes.shape[1]), num_warps=4,
        )  # fmt: skip


@final
class Growths:
    """A search for any number of slots. Each size is made when it is first needed."""

    def __init__(self, search: Search, device: torch.device, *, with_root: bool) -> None:
        self.search = search
        self._new = lambda batch_size: Growth(search, batch_size, device, with_root=with_root)
        self._by_size: dict[int, Growth] = {}

    def of(self, batch_size: int) -> Growth:
        if batch_size not in self._by_size:
            self._by_size[batch_size] = self._new(batch_size)
        return self._by_size[batch_size]


def _empty_trees(batch_size: int, search: Search, device: torch.device) -> SlotTrees:
    shape = (batch_size, search.num_nodes)
    parents = torch.full(shape, -1, dtype=torch.int64, device=device)
    words = torch.ones(*shape, 1, dtype=torch.int64, device=device)
    paths = torch.zeros(*shape, search.max_depth + 1, dtype=torch.int32, device=device)
    return SlotTrees(parents, torch.zeros(shape, dtype=torch.int32, device=device), words, paths)


@triton.jit
def _add(
    values, best_tokens, sums, temperatures, tokens, parents, chances, numbers, places, fed_tokens, fed_above, fed_words,
    begin, first, num_parents, num_bests, num_blocks, num_places, num_fed, width, sharpness,
    CHILDREN: tl.constexpr, NEXT: tl.constexpr, PARENTS: tl.constexpr, BESTS: tl.constexpr, BLOCKS: tl.constexpr,
    FOUND: tl.constexpr, ROOT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    scale = tl.where(temperature > 0, temperature, 1.0) * sharpness
    m = tl.arange(0, PARENTS)
    is_parent = m < num_parents
    place = tl.load(places + row * width + m, mask=is_parent & (begin > 1), other=0)
    above = tl.load(chances + row * num_places + place, mask=is_parent, other=float("-inf"))
    block = tl.arange(0, BLOCKS)
    at = (row * num_parents + m)[:, None] * num_blocks + block[None, :]
    inside = is_parent[:, None] & (block < num_blocks)[None, :]
    peak = tl.load(sums + at, mask=inside, other=float("-inf"))
    part = tl.load(sums + tl.num_programs(0) * num_parents * num_blocks + at, mask=inside, other=0.0)
    top = tl.max(tl.where(is_parent[:, None], peak, 0.0), 1)
    norm = top + tl.log(tl.maximum(tl.sum(part * tl.exp(peak - top[:, None]), 1), 1e-30))
    best = tl.arange(0, BESTS)
    at = (row * num_parents + m)[:, None] * num_bests + best[None, :]
    inside = is_parent[:, None] & (best < num_bests)[None, :]
    value = tl.load(values + at, mask=inside, other=float("-inf"))
    token = tl.load(best_tokens + at, mask=inside, other=9223372036854775807)
    mine = row * num_places + begin
    for child in tl.static_range(CHILDREN):
        largest = tl.max(value, 1)
        chosen = tl.min(tl.where(value == largest[:, None], token, 9223372036854775807), 1)
        to = mine + m * CHILDREN + child
        tl.store(tokens + to, chosen, mask=is_parent)
        tl.store(parents + to, place, mask=is_parent)
        tl.store(chances + to, above + tl.minimum(largest * scale - norm, 0.0), mask=is_parent)
        value = tl.where(token == chosen[:, None], float("-inf"), value)
    if NEXT > 0:
        tl.debug_barrier()
        found = tl.arange(0, FOUND)
        is_found = found < num_parents * CHILDREN
        chance = tl.load(chances + mine + found, mask=is_found, other=float("-inf"))
        kept = is_found & (_rank(chance, found, chance, found) < NEXT)
        slot = tl.cumsum(kept.to(tl.int32), 0) - 1
        fed = row * num_fed + first + slot
        parent = tl.load(parents + mine + found, mask=kept, other=0)
        number = tl.load(numbers + row * num_places + parent, mask=kept, other=0)
        word = tl.load(fed_words + row * num_fed + number - 1, mask=kept & (number > 0), other=ROOT)
        bit = tl.full((FOUND,), 1, tl.int64) << (first + slot + ROOT).to(tl.int64)
        tl.store(places + row * width + slot, begin + found, mask=kept)
        tl.store(numbers + mine + found, first + slot + 1, mask=kept)
        tl.store(fed_tokens + fed, tl.load(tokens + mine + found, mask=kept, other=0), mask=kept)
        tl.store(fed_above + fed, number.to(tl.int64), mask=kept)
        tl.store(fed_words + fed, word | bit, mask=kept)


@triton.jit
def _rank(chance, place, others, other_places):
    """The number of other places that are better, or as good and older."""
    better = others[None, :] > chance[:, None]
    older = (others[None, :] == chance[:, None]) & (other_places[None, :] < place[:, None])
    return tl.sum((better | older).to(tl.int32), 1)


@triton.jit
def _rank_all(chances, ranks, num_places, PLACES: tl.constexpr, BLOCK: tl.constexpr):
    """Rank one place of the pool against all, a block of places per program: a single program took longer than a level."""
    mine = tl.program_id(1) * num_places
    place, others = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PLACES)
    chance = tl.load(chances + mine + place, mask=place < num_places, other=float("-inf"))
    other = tl.load(chances + mine + others, mask=others < num_places, other=float("-inf"))
    tl.store(ranks + mine + place, _rank(chance, place, other, others), mask=place < num_places)


@triton.jit
def _choose(
    tokens, parents, moved, all_depths, nodes, tree_parents, tree_depths, words, paths,
    num_places, num_nodes, path_len, PLACES: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    place = tl.arange(0, PLACES)
    inside = place < num_places
    mine, tree = row * num_places, row * num_nodes
    kept = inside & (tl.load(moved + mine + place, mask=inside, other=num_nodes) < num_nodes)
    node = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(moved + mine + place, node, mask=kept)
    tl.store(nodes + tree + node, tl.load(tokens + mine + place, mask=kept, other=0), mask=kept & (place > 0))
    tl.store(tree_depths + tree + node, tl.load(all_depths + place, mask=kept, other=0), mask=kept)
    tl.debug_barrier()
    parent = tl.load(parents + mine + place, mask=kept, other=0)
    above = tl.load(moved + mine + parent, mask=kept, other=0)
    tl.store(tree_parents + tree + node, above.to(tl.int64), mask=kept & (place > 0))
    tl.debug_barrier()
    start = tl.arange(0, NODES)
    is_node = start < num_nodes
    depth = tl.load(tree_depths + tree + start, mask=is_node, other=0)
    at = start.to(tl.int64)
    one = tl.full((NODES,), 1, tl.int64)
    word = one << at
    tl.store(paths + (tree + start) * path_len + depth, start, mask=is_node)
    for _ in range(path_len - 1):
        climbs = is_node & (at > 0)
        at = tl.load(tree_parents + tree + at, mask=climbs, other=0)
        depth = depth - 1
        word |= tl.where(climbs, one << at, 0)
        tl.store(paths + (tree + start) * path_len + depth, at.to(tl.int32), mask=climbs)
    tl.store(words + tree + start, word, mask=is_node)
