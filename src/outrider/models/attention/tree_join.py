"""The second kernel of tree attention: it joins the pieces into which the keys of a row were cut.

    o = sum_c exp(m_c - m) o_c / sum_c exp(m_c - m) l_c,      m = max_c m_c

Pieces at fixed places are joined in order, to blocks and then to the whole, so that a piece in which nothing is seen changes no
bit. On chains, the kernel that computes the pieces joins them itself (``finish_tile``). Other pieces are all loaded before the
first sum, which is faster. ``tree_triton.py`` computes the pieces.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.attention.tree_tiles import (
    BLOCK,
    Bounds,
    KeySplit,
    Rows,
    Sights,
    drained,
    fold_len_of,
    joined,
    load_part,
    nothing_seen,
    origin_of,
    piece_len_of,
)
from outrider.models.gpu import launch
from outrider.models.gpu.launch import begin, end

_JOINED = 4
"""Queries whose pieces one program joins, each by one warp."""


def join_pieces(
    queries: Tensor, rows: Rows, *, parts: tuple[Tensor, Tensor], sights: Sights, cut: KeySplit, bounds: Bounds
) -> Tensor:
    """[B, N, Hq, D] like ``queries``, from ``parts``: the totals, and the peaks with the weights, of every piece."""
    totals, peaks = parts
    batch_size, num_nodes, num_heads, head_dim = queries.shape
    num_kv_heads = totals.shape[1]
    out = torch.empty_like(queries)
    _join_pieces[(triton.cdiv(num_nodes * num_heads // num_kv_heads, _JOINED), num_kv_heads, batch_size)](
        totals, peaks, rows.lengths, rows.lengths if bounds.sinks is None else bounds.sinks, out, num_nodes, sights.start,
        cut.num_pieces, cut.folds_above, GROUP=num_heads // num_kv_heads, HEADS=num_kv_heads, D=head_dim,
        WINDOW=bounds.window, CHAIN=sights.words is None, SINKS=bounds.sinks is not None, PIECE_LEN=cut.piece_len,
        BLOCK_LEN=cut.piece_len * BLOCK, SHORTEST=cut.shortest, BK=cut.block_keys,
        PADDED=1 if cut.piece_len else triton.next_power_of_2(cut.num_pieces), BQ=_JOINED, EARLY=launch.EARLY,
        num_warps=_JOINED,
        launch_pdl=launch.EARLY,
    )  # fmt: skip
    return out


@triton.jit
def _part(parts, peaks, first, piece, used, num_queries, num_parts, is_query, D: tl.constexpr):
    """Peak, weight and total of queries in a piece. A missing piece counts as one in which nothing is seen."""
    at = first + piece * num_queries
    there = is_query & (piece >= used[0]) & (piece < used[1])
    return load_part(parts, peaks, at, num_parts, there, D)


@triton.jit
def _in_turn(
    parts, peaks, first, used, slots, num_queries, num_parts, is_query, BLOCK_LEN: tl.constexpr, BQ: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Join pieces of fixed length in order, so that a piece in which nothing is seen changes nothing."""
    origin, stop, size = slots
    top, norm, total = nothing_seen(BQ, D)
    first_piece = origin // BLOCK_LEN * (BLOCK_LEN // size)
    for piece in range(first_piece, tl.cdiv(stop, size), 4):  # loads of four: none waits for another
        p0, w0, t0 = _part(parts, peaks, first, piece, used, num_queries, num_parts, is_query, D)
        p1, w1, t1 = _part(parts, peaks, first, piece + 1, used, num_queries, num_parts, is_query, D)
        p2, w2, t2 = _part(parts, peaks, first, piece + 2, used, num_queries, num_parts, is_query, D)
        p3, w3, t3 = _part(parts, peaks, first, piece + 3, used, num_queries, num_parts, is_query, D)
        if size < BLOCK_LEN:  # four pieces are a block
            p0, w0, t0 = joined(p0, w0, t0, p1, w1, t1)
            p0, w0, t0 = joined(p0, w0, t0, p2, w2, t2)
            p0, w0, t0 = joined(p0, w0, t0, p3, w3, t3)
            top, norm, total = joined(top, norm, total, p0, w0, t0)
        else:
            top, norm, total = joined(top, norm, total, p0, w0, t0)
            top, norm, total = joined(top, norm, total, p1, w1, t1)
            top, norm, total = joined(top, norm, total, p2, w2, t2)
            top, norm, total = joined(top, norm, total, p3, w3, t3)
    return top, norm, total


@triton.jit
def _store_seen(
    out, sinks, here, index, top, norm, total, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr
):  # fmt: skip
    """Store the results of the queries ``index`` of a tile, together with their sinks."""
    row, head, first_query, num_nodes = here
    query = first_query + index
    is_query = query < num_nodes * GROUP
    norm, total = drained(sinks, head * GROUP + query % GROUP, is_query, top, norm, total, SINKS)
    at = ((row * num_nodes + query // GROUP) * HEADS * GROUP + head * GROUP + query % GROUP)[:, None] * D + tl.arange(0, D)
    tl.store(out + at, (total / norm[:, None]).to(out.dtype.element_ty), mask=is_query[:, None])


@triton.jit
def _join_tile(
    parts, peaks, out, sinks, here, slots, num_pieces, num_parts,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, BLOCK_LEN: tl.constexpr,
    BQ: tl.constexpr,
):  # fmt: skip
    """Join the pieces of a tile of queries on a chain, sixteen at a time."""
    row, head, first_query, num_nodes = here
    first_piece, last_piece, size, origin, root = slots
    num_queries = num_nodes * GROUP
    for offset in range(0, tl.minimum(BQ, num_queries - first_query), 16):
        index = offset + tl.arange(0, 16)
        query = first_query + index
        used = (first_piece, tl.cdiv(root + query // GROUP + 1, size))
        first = (row * HEADS + head) * num_pieces * num_queries + query
        top, norm, total = _in_turn(
            parts, peaks, first, used, (origin, last_piece * size, size), num_queries, num_parts, query < num_queries,
            BLOCK_LEN, 16, D,
        )  # fmt: skip
        _store_seen(out, sinks, here, index, top, norm, total, GROUP, HEADS, D, SINKS)


@triton.jit
def finish_tile(
    parts, peaks, out, sinks, counters, here, slots, fold, num_pieces, num_parts,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, BLOCK_LEN: tl.constexpr,
    BQ: tl.constexpr,
):  # fmt: skip
    """The end of a program on a chain. With one piece, ``fold`` is the result. Otherwise the last program of the tile to arrive
    joins the results of all, and resets the counter."""
    num_used, turn = slots[1] - slots[0], tl.program_id(0)
    num_working = tl.minimum(num_used, tl.num_programs(0))
    if num_used == 1:
        if turn == 0:
            _store_seen(out, sinks, here, tl.arange(0, BQ), fold[0], fold[1], fold[2], GROUP, HEADS, D, SINKS)
    elif turn < num_working:
        counter = counters + here[0] * tl.num_programs(1) + tl.program_id(1)
        tl.debug_barrier()  # what all threads have stored comes before the count
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_working - 1:
            _join_tile(parts, peaks, out, sinks, here, slots, num_pieces, num_parts, GROUP, HEADS, D, SINKS, BLOCK_LEN, BQ)
            tl.store(counter, 0)


@triton.jit(do_not_specialize=["num_nodes", "start", "num_pieces", "folds_above"])
def _join_pieces(
    parts, peaks, lengths, sinks, out, num_nodes, start, num_pieces, folds_above,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, CHAIN: tl.constexpr,
    SINKS: tl.constexpr, PIECE_LEN: tl.constexpr, BLOCK_LEN: tl.constexpr, SHORTEST: tl.constexpr, BK: tl.constexpr,
    PADDED: tl.constexpr, BQ: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    num_queries = num_nodes * GROUP
    index = tl.program_id(0) * BQ + tl.arange(0, BQ)
    is_query = index < num_queries
    head, row = tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    origin = origin_of(length, start, CHAIN, WINDOW, BK)
    num_slots = length + start + num_nodes
    stop = length + start + index // GROUP + 1 if CHAIN else num_slots  # nobody has written what a query does not see
    if PIECE_LEN > 0:
        size = fold_len_of(num_slots, folds_above, PIECE_LEN, BLOCK_LEN)
        used = (origin // size, tl.cdiv(stop, size))
    else:
        size = piece_len_of(num_slots - origin, num_pieces, SHORTEST, BK)
        used = (0, tl.cdiv(stop - origin, size))
    num_parts = tl.num_programs(2) * HEADS * num_pieces * num_queries
    begin(EARLY)
    first = (row * HEADS + head) * num_pieces * num_queries + index
    if PIECE_LEN > 0:
        top, norm, total = _in_turn(
            parts, peaks, first, used, (origin, num_slots, size), num_queries, num_parts, is_query, BLOCK_LEN, BQ, D
        )
    else:
        top = tl.full((BQ,), float("-inf"), tl.float32)
        found = ()
        for piece in tl.static_range(PADDED):  # all loads before the first sum
            one = _part(parts, peaks, first, piece, used, num_queries, num_parts, is_query, D)
            found = found + (one,)  # noqa: RUF005 - kernels cannot unpack
            top = tl.maximum(top, one[0])
        top = tl.where(is_query, top, 0.0)
        norm = tl.zeros((BQ,), tl.float32)
        total = tl.zeros((BQ, D), tl.float32)
        for piece in tl.static_range(PADDED):
            share = tl.exp2(found[piece][0] - top)
            norm += share * found[piece][1]
            total += share[:, None] * found[piece][2]
    norm, total = drained(sinks, head * GROUP + index % GROUP, is_query, top, norm, total, SINKS)
    end(EARLY)
    at = ((row * num_nodes + index // GROUP) * HEADS * GROUP + head * GROUP + index % GROUP)[:, None] * D + tl.arange(0, D)
    tl.store(out + at, (total / norm[:, None]).to(out.dtype.element_ty), mask=is_query[:, None])
