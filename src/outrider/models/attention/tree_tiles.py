"""The common parts of the kernels of tree attention: addresses of keys, masks of nodes, cuts into pieces, and one step of the
softmax.

    m' = max(m, max s),   l' = l exp(m - m') + sum exp(s - m'),   o' = o exp(m - m') + exp(s - m') v

Sums of products that occur in several kernels are written as fused multiply-adds, so that the compiler cannot fuse them
differently in two kernels. Results must be equal bit by bit.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634
BLOCK = 4
"""Number of pieces in a block. Pieces of fixed length are joined to blocks, and blocks to the whole, each in their order. If
there are enough programs, one program computes a whole block and writes one result; otherwise one piece. The bits are the
same."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Addresses of a pass's tokens in the memory of all rows. Everything is on the device."""

    lengths: Tensor
    """[B] int32 committed tokens."""
    places: Tensor
    """[B] int32 rows of the memory; [B, P] int32 pages when ``page_len`` is set."""
    page_len: int = 0
    """Slots of a page; 0 for contiguous rows."""


@dataclass(frozen=True, eq=False)
class Sights:
    """The tree's attention mask: which nodes see one another."""

    words: Tensor | None
    """[B, N, W] int64. Bit j % 64 of word j // 64 says that node j is an ancestor of the node, or the node itself. None on
    chains."""
    depths: Tensor | None
    """[B, N] int32; None on chains, where node n has depth ``start + n``."""
    start: int = 0
    """Number of nodes that earlier passes have written. This pass holds the others."""
    paths: Tensor | None = None
    """[B, N, P] int32 ancestor-or-self of each node at every depth up to its own. Entries past that are arbitrary nodes. Only
    attention in text order (``tree_in_order.py``) needs them."""


@dataclass(frozen=True, eq=False)
class Bounds:
    """Limits of a layer's attention beside the tree's mask."""

    window: int = 0
    """Most positions a node sees, itself included; 0 for all. Nodes of a tree see one another whatever the window, so a tree
    must be less deep than it."""
    cap: float = 0.0
    """Scores are squashed into (-cap, cap); 0 for no cap."""
    sinks: Tensor | None = None
    """[Hq] float32 scores that take part in the softmax and have no value."""

    @property
    def is_plain(self) -> bool:
        return not self.window and not self.cap


NO_BOUNDS = Bounds()


@dataclass(frozen=True, eq=False)
class Look:
    """How scores become weights, in powers of two."""

    scale: float
    bounds: Bounds = NO_BOUNDS

    @property
    def cap(self) -> float:
        return self.bounds.cap * LOG2E


@dataclass(frozen=True)
class KeySplit:
    """How keys are cut into pieces, and the tile of a program."""

    num_pieces: int
    """Number of results that a row has room for: its largest number of pieces, plus one."""
    piece_len: int = 0
    """Slots of a piece; 0 for ``num_pieces`` equal ones."""
    num_programs: int = 0
    """Number of programs that share a row's pieces of fixed length; 0 for one program per piece."""
    shortest: int = 64
    """Least number of slots of equal pieces. A short row has fewer pieces."""
    block_queries: int = 16
    block_keys: int = 64
    num_warps: int = 4
    num_stages: int = 3
    side_by_side: bool = False
    """Two groups of warps with half of the queries each, softmax and products side by side (``tree_wide.py``)."""
    folds_above: int = 1 << 30
    """In rows with more slots than this, a program joins ``BLOCK`` pieces of fixed length at a time. It changes no bit."""
    tail_queries: int = 16
    """For attention in text order: number of rows in the tiles that read the last keys of each node. There is a warp for every
    sixteen rows, so that every tile adds up a row's weights in the same order."""


def paths_of(ancestors: Tensor) -> Tensor:
    """[B, N, N] int32 node numbers by depth, from the [B, N, N] boolean ancestor-or-self mask; parents come first."""
    return torch.sort(ancestors.byte(), dim=-1, descending=True, stable=True).indices.int()


@triton.jit
def attend_block(
    q, tile, seen, peak, weight, total, scale, cap,
    MASKED: tl.constexpr, CAPPED: tl.constexpr = False, SCALED: tl.constexpr = False,
):  # fmt: skip
    """One step of the running softmax over a tile of keys and values. Codes are converted. Scales multiply scores and weights,
    which are fewer than codes."""
    k, v, key_share, value_share = tile
    s = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if SCALED:
        s *= key_share[None, :]
    return attend_scores(s, v.to(q.dtype), seen, peak, weight, total, scale, cap, MASKED, CAPPED, value_share, SCALED)


@triton.jit
def attend_scores(
    s, v, seen, peak, weight, total, scale, cap,
    MASKED: tl.constexpr, CAPPED: tl.constexpr = False, value_share=1.0, SCALED: tl.constexpr = False,
):  # fmt: skip
    """Join a tile of values from its scores. Peaks are of scaled scores. ``cap`` bounds them where CAPPED."""
    unit = scale
    if CAPPED:
        s = cap - 2.0 * cap / (1.0 + tl.exp2(s * (scale * 2.8853900817779268 / cap)))  # cap tanh(scale s / cap)
        unit = 1.0
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, 1) * unit)
    safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    p = tl.exp2(tl.fma(s, unit, -safe_peak[:, None]))
    shrink = tl.exp2(peak - safe_peak)
    weight = tl.fma(weight, shrink, tl.sum(p, 1))
    if SCALED:
        p *= value_share[None, :]
    total = tl.dot(p.to(v.dtype), v, total * shrink[:, None], input_precision="ieee")
    return new_peak, weight, total


@triton.jit
def drained(sinks, heads, is_query, top, norm, total, SINKS: tl.constexpr):
    """The sum of weights and the totals of queries, with the sinks of their heads included."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=is_query, other=0.0) * 1.4426950408889634
        peak = tl.maximum(top, sink)
        share = tl.exp2(top - peak)
        norm = norm * share + tl.exp2(sink - peak)
        total = total * share[:, None]
    return norm, total


@triton.jit
def joined(top, norm, sums, peak, weight, total):
    """Join one more piece to those joined so far. A piece in which nothing is seen changes nothing."""
    new_top = tl.maximum(top, peak)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    old, new = tl.exp2(top - safe), tl.exp2(peak - safe)
    return new_top, tl.fma(norm, old, weight * new), tl.fma(sums, old[:, None], total * new[:, None])


@triton.jit
def nothing_seen(BQ: tl.constexpr, D: tl.constexpr):
    """Peak, weight and total of queries that have seen nothing."""
    return tl.full((BQ,), float("-inf"), tl.float32), tl.zeros((BQ,), tl.float32), tl.zeros((BQ, D), tl.float32)


@triton.jit
def folded_at(slot, top, norm, sums, peak, weight, total, PIECE_LEN: tl.constexpr):
    """The joined pieces and the present piece. If a piece ends at ``slot``, it is joined and the next one begins."""
    if slot % PIECE_LEN == 0:
        top, norm, sums = joined(top, norm, sums, peak, weight, total)
        peak = tl.zeros_like(peak) + float("-inf")
        weight = tl.zeros_like(weight)
        total = tl.zeros_like(total)
    return top, norm, sums, peak, weight, total


@triton.jit
def load_part(parts, peaks, at, num_parts, there, D: tl.constexpr):
    """Load peak, weight and total of queries from a place. Queries that are not ``there`` have seen nothing."""
    total_at = parts + at[:, None].to(tl.int64) * D + tl.arange(0, D)[None, :]
    peak = tl.load(peaks + at, mask=there, other=float("-inf"))
    weight = tl.load(peaks + num_parts + at, mask=there, other=0.0)
    return peak, weight, tl.load(total_at, mask=there[:, None], other=0.0)


@triton.jit
def store_part(parts, peaks, at, num_parts, is_query, peak, weight, total, D: tl.constexpr):
    """Store peak, weight and total of queries at their place."""
    total_at = parts + at[:, None].to(tl.int64) * D + tl.arange(0, D)[None, :]
    tl.store(total_at, total.to(parts.dtype.element_ty), mask=is_query[:, None])
    tl.store(peaks + at, peak, mask=is_query)
    tl.store(peaks + num_parts + at, weight, mask=is_query)


@triton.jit
def store_block(parts, peaks, at, num_parts, is_query, fold, open_piece, is_apart, next_at, D: tl.constexpr):
    """Store the joined pieces of a program, with its last piece. If that one ``is_apart``, it is stored at the next place."""
    top, norm, sums = fold
    peak, weight, total = open_piece
    if is_apart:
        store_part(parts, peaks, next_at, num_parts, is_query, peak, weight, total, D)
    else:
        top, norm, sums = joined(top, norm, sums, peak, weight, total)
    store_part(parts, peaks, at, num_parts, is_query, top, norm, sums, D)


@triton.jit
def slots_at(places, row, head, slots, inside, capacity, num_pages, HEADS: tl.constexpr, PAGED: tl.constexpr):
    """Addresses of the keys of a row's slots, in units of heads of D numbers."""
    if PAGED:
        page = tl.load(places + row * num_pages + slots // capacity, mask=inside, other=0).to(tl.int64)
        return (page * HEADS + head) * capacity + slots % capacity
    return (tl.load(places + row).to(tl.int64) * HEADS + head) * capacity + slots


@triton.jit
def piece_len_of(num_slots, num_pieces, SHORTEST: tl.constexpr, BK: tl.constexpr):
    """Number of slots in each of a row's equal pieces."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_slots, num_pieces), BK) * BK, SHORTEST)


@triton.jit
def fold_len_of(num_slots, folds_above, PIECE_LEN: tl.constexpr, BLOCK_LEN: tl.constexpr):
    """Number of slots that a program computes at a time, for pieces of fixed length: one piece, or a block of them."""
    return tl.where(num_slots > folds_above, BLOCK_LEN, PIECE_LEN)


@triton.jit
def ends_of(length, start, num_slots, first_query, CHAIN: tl.constexpr, GROUP: tl.constexpr, BQ: tl.constexpr):
    """The end of the slots that all queries of a tile see, and the end of those that any of them sees."""
    if CHAIN:
        common = length + start + first_query // GROUP + 1
        stop = tl.minimum(length + start + (first_query + BQ - 1) // GROUP + 1, num_slots)
    else:
        common, stop = length, num_slots
    return common, stop


@triton.jit
def origin_of(length, start, CHAIN: tl.constexpr, WINDOW: tl.constexpr, BK: tl.constexpr):
    """The tile with the first slot that any node of the pass sees."""
    if WINDOW == 0:
        return 0
    return tl.maximum(length + (start if CHAIN else 0) + 1 - WINDOW, 0) // BK * BK


@triton.jit
def in_window(seen, depths, query, node, slots, length, start, is_query, CHAIN: tl.constexpr, WINDOW: tl.constexpr):
    """The part of [BQ, BK] ``sight`` that is in the window. Nodes of a tree see one another whatever the window is."""
    if WINDOW == 0:
        return seen
    if CHAIN:
        return seen & ((length + start + node)[:, None] - slots[None, :] < WINDOW)
    depth = tl.load(depths + query, mask=is_query, other=0)
    return seen & ((slots >= length)[None, :] | ((length + depth)[:, None] - slots[None, :] < WINDOW))


@triton.jit
def seen_among(words, query, node, other, start, is_query, WORDS: tl.constexpr):
    """[BQ, BK] whether queries see slots that hold nodes ``other`` (below 0: committed tokens). ``query`` numbers the words."""
    if WORDS == 0:
        return other[None, :] <= start + node[:, None]
    safe = tl.minimum(tl.maximum(other, 0), WORDS * 64 - 1)
    if WORDS == 1:
        word = tl.load(words + query, mask=is_query, other=0)[:, None]
    else:
        word = tl.load(words + (query * WORDS)[:, None] + (safe // 64)[None, :], mask=is_query[:, None], other=0)
    return (other < 0)[None, :] | (((word >> (safe % 64)[None, :].to(tl.int64)) & 1) != 0)
