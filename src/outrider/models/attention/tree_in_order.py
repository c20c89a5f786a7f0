"""The last step of tree attention in invariant numerics: every node adds up its keys in text order.

Keys up to the last full tile of committed tokens are the same for all nodes, and are read for all of them together. The rest,
at most a tile of text and the node's ancestors, is gathered for each node along its path, in the same tiles as in one-token
decoding. Pieces are then joined in order. So a node's numbers are those of plain decoding, bit for bit, wherever it is in the
tree. (On a chain, keys are in that order anyway, so the kernels of ``tree_triton.py`` suffice.)

    slot(j) = j below the root,   root + path[j - root] from there on;      tiles at multiples of BK, pieces of PIECE_LEN
    joined:   m' = max(m, m_c),   l' = l 2^(m - m') + l_c 2^(m_c - m'),   o' likewise,   c = 0, 1, ..

Pieces are joined to blocks, and blocks to the whole (``tree_tiles.BLOCK``). If a program has joined a block, its place holds
the joined whole pieces, and the next place holds the piece that is not full yet.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.cache.page_pool import LayerPages
from outrider.models.attention.tree_memory import kernel_memory, load_tile
from outrider.models.attention.tree_tiles import (
    BLOCK,
    KeySplit,
    Look,
    Rows,
    Sights,
    attend_block,
    drained,
    fold_len_of,
    folded_at,
    joined,
    load_part,
    nothing_seen,
    slots_at,
)
from outrider.models.gpu import launch
from outrider.models.gpu.launch import begin, end


def join_in_order(
    queries: Tensor,
    memory: LayerPages,
    rows: Rows,
    *,
    parts: tuple[Tensor, Tensor],
    sights: Sights,
    cut: KeySplit,
    look: Look,
) -> Tensor:
    """[B, N, Hq, D] like ``queries``. ``parts`` are totals, and peaks with weights, of the whole tiles of every piece."""
    assert sights.words is None or sights.paths is not None, "trees need the paths of their nodes"
    keys = memory.keys
    batch_size, num_nodes, num_heads, head_dim = queries.shape
    num_kv_heads, capacity = keys.shape[1], keys.shape[2]
    sizes: dict[str, Any] = {"GROUP": num_heads // num_kv_heads, "HEADS": num_kv_heads, "D": head_dim}
    nothing, out = rows.lengths, torch.empty_like(queries)
    _join_in_order[(num_nodes, num_kv_heads, batch_size)](
        queries,
        *kernel_memory(memory),
        rows.lengths,
        rows.places,
        nothing if sights.paths is None else sights.paths,
        nothing if sights.depths is None else sights.depths,
        *parts,
        nothing if look.bounds.sinks is None else look.bounds.sinks,
        out,
        sights.start,
        cut.num_pieces,
        cut.folds_above,
        capacity,
        rows.places.shape[1] if rows.page_len else 0,
        look.scale,
        look.cap,
        **sizes,
        WINDOW=look.bounds.window,
        CAPPED=look.cap > 0,
        SINKS=look.bounds.sinks is not None,
        SCALED=memory.key_scales is not None,
        PATH=0 if sights.paths is None else sights.paths.shape[2],
        CHAIN=sights.words is None,
        PAGED=rows.page_len > 0,
        PIECE_LEN=cut.piece_len,
        BLOCK_LEN=cut.piece_len * BLOCK,
        BQ=max(cut.tail_queries, triton.next_power_of_2(num_heads // num_kv_heads)),
        BK=cut.block_keys,
        EARLY=launch.EARLY,
        num_warps=max(1, cut.tail_queries // 16),
        num_stages=1,
        launch_pdl=launch.EARLY,
    )
    return out


@triton.jit
def _below(
    parts, peaks, first_part, num_queries, num_parts, is_query, origin, whole, is_folded,
    PIECE_LEN: tl.constexpr, BLOCK_LEN: tl.constexpr, BQ: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The results of the previous kernel up to the last whole tile: all whole blocks, the block that is not whole, and its last
    piece, which may not be full."""
    top, norm, sums = nothing_seen(BQ, D)
    block_top, block_norm, block_sums = nothing_seen(BQ, D)
    peak, weight, total = nothing_seen(BQ, D)
    if is_folded:
        for block in range(origin // BLOCK_LEN, whole // BLOCK_LEN):
            part = load_part(parts, peaks, first_part + block * num_queries, num_parts, is_query, D)
            top, norm, sums = joined(top, norm, sums, part[0], part[1], part[2])
        if whole % BLOCK_LEN > 0:
            at = first_part + whole // BLOCK_LEN * num_queries
            block_top, block_norm, block_sums = load_part(parts, peaks, at, num_parts, is_query, D)
            peak, weight, total = load_part(parts, peaks, at + num_queries, num_parts, is_query, D)
    else:
        for piece in range(origin // PIECE_LEN, tl.cdiv(whole, PIECE_LEN)):
            block_top, block_norm, block_sums = joined(block_top, block_norm, block_sums, peak, weight, total)
            if piece * PIECE_LEN % BLOCK_LEN == 0:
                top, norm, sums = joined(top, norm, sums, block_top, block_norm, block_sums)
                block_top, block_norm, block_sums = nothing_seen(BQ, D)
            peak, weight, total = load_part(parts, peaks, first_part + piece * num_queries, num_parts, is_query, D)
    return top, norm, sums, block_top, block_norm, block_sums, peak, weight, total


@triton.jit(do_not_specialize=["start", "num_pieces", "folds_above", "num_pages"])
def _join_in_order(
    queries, keys, values, key_scales, value_scales, lengths, places, paths, depths, parts, peaks, sinks, out,
    start, num_pieces, folds_above, capacity, num_pages, scale, cap,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, SCALED: tl.constexpr, PATH: tl.constexpr, CHAIN: tl.constexpr, PAGED: tl.constexpr,
    PIECE_LEN: tl.constexpr, BLOCK_LEN: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    node, num_nodes = tl.program_id(0), tl.num_programs(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    num_queries = num_nodes * GROUP
    num_parts = tl.num_programs(2) * HEADS * num_pieces * num_queries
    index = tl.arange(0, BQ)
    is_query = index < GROUP
    dims = tl.arange(0, D)
    flat = row * num_nodes + node
    length = tl.load(lengths + row)
    depth = start + node if CHAIN else tl.load(depths + flat)
    begin(EARLY)
    query_at = (flat * HEADS * GROUP + head * GROUP + index)[:, None] * D + dims[None, :]
    q = tl.load(queries + query_at, mask=is_query[:, None], other=0.0)
    first_part = (row * HEADS + head) * num_pieces * num_queries + node * GROUP + index
    whole = length // BK * BK
    origin = tl.maximum(length + 1 - WINDOW, 0) // BK * BK if WINDOW > 0 else 0
    is_folded = fold_len_of(length + start + num_nodes, folds_above, PIECE_LEN, BLOCK_LEN) > PIECE_LEN
    top, norm, sums, block_top, block_norm, block_sums, peak, weight, total = _below(
        parts, peaks, first_part, num_queries, num_parts, is_query, origin, whole, is_folded, PIECE_LEN, BLOCK_LEN, BQ, D
    )
    for first in range(whole, length + depth + 1, BK):
        block_top, block_norm, block_sums, peak, weight, total = folded_at(
            first, block_top, block_norm, block_sums, peak, weight, total, PIECE_LEN
        )
        top, norm, sums, block_top, block_norm, block_sums = folded_at(
            first, top, norm, sums, block_top, block_norm, block_sums, BLOCK_LEN
        )
        position = first + tl.arange(0, BK)
        inside = position <= length + depth
        slots = position
        if not CHAIN:
            is_node = inside & (position >= length)
            path = tl.load(paths + flat * PATH + position - length, mask=is_node, other=0)
            slots = tl.where(is_node, length + path, position)
        at = slots_at(places, row, head, slots, inside, capacity, num_pages, HEADS, PAGED)
        tile = load_tile((keys, values, key_scales, value_scales), at, inside, D, True, SCALED)
        inside = inside & ((length + depth - position < WINDOW) | (WINDOW == 0))
        seen = inside[None, :] & (index >= 0)[:, None]
        peak, weight, total = attend_block(q, tile, seen, peak, weight, total, scale, cap, True, CAPPED, SCALED)
    block_top, block_norm, block_sums = joined(block_top, block_norm, block_sums, peak, weight, total)
    top, norm, sums = joined(top, norm, sums, block_top, block_norm, block_sums)
    norm, sums = drained(sinks, head * GROUP + index, is_query, top, norm, sums, SINKS)
    end(EARLY)
    tl.store(out + query_at, (sums / norm[:, None]).to(out.dtype.element_ty), mask=is_query[:, None])
