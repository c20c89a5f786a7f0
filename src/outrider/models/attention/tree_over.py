"""Attention of queries over a range of slots. Tiles that every query sees are fetched ahead; the few others are masked."""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from outrider.models.attention.tree_memory import load_scales, load_tile
from outrider.models.attention.tree_tiles import (
    attend_block,
    folded_at,
    in_window,
    nothing_seen,
    seen_among,
    slots_at,
)


@triton.jit
def _over_masked(
    q, memory, places, words, depths, of, between, asking, numbers, top, norm, sums, peak, weight, total,
    HEADS: tl.constexpr, D: tl.constexpr, WORDS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SCALED: tl.constexpr, PAGED: tl.constexpr, BK: tl.constexpr, PIECE_LEN: tl.constexpr,
):  # fmt: skip
    """Tiles that not every query sees in full. There are few, so they are not fetched ahead."""
    row, head, length, start = of
    low, high = between
    query, node, is_query = asking
    capacity, num_pages, scale, cap = numbers
    for first in tl.range(low, high, BK, num_stages=1):
        slots = first + tl.arange(0, BK)
        inside = slots < high
        at = slots_at(places, row, head, slots, inside, capacity, num_pages, HEADS, PAGED)
        tile = load_tile(memory, at, inside, D, True, SCALED)
        seen = seen_among(words, query, node, slots - length, start, is_query, WORDS) & inside[None, :]
        seen = in_window(seen, depths, query, node, slots, length, start, is_query, WORDS == 0, WINDOW)
        peak, weight, total = attend_block(q, tile, seen, peak, weight, total, scale, cap, True, CAPPED, SCALED)
        if PIECE_LEN > 0:
            top, norm, sums, peak, weight, total = folded_at(first + BK, top, norm, sums, peak, weight, total, PIECE_LEN)
    return top, norm, sums, peak, weight, total


@triton.jit
def _over_whole(
    q, memory, tiles, places, of, between, is_query, numbers, top, norm, sums, peak, weight, total,
    HEADS: tl.constexpr, D: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, COPIED: tl.constexpr,
    PAGED: tl.constexpr, BK: tl.constexpr, PIECE_LEN: tl.constexpr,
):  # fmt: skip
    """Tiles whose every slot is seen by all."""
    row, head = of
    capacity, num_pages, scale, cap = numbers
    at = slots_at(places, row, head, between[0], between[0] < between[1], capacity, num_pages, HEADS, PAGED).to(tl.int32)
    for first in range(between[0], between[1], BK):
        if COPIED:
            key_share, value_share = load_scales(memory[2], memory[3], at + tl.arange(0, BK), is_query, False, SCALED)
            tile = (tiles[0].load([at, 0]).T, tiles[1].load([at, 0]), key_share, value_share)
            then = first + BK  # where the next tile is, before anybody waits for it
            at = slots_at(places, row, head, then, then < between[1], capacity, num_pages, HEADS, PAGED).to(tl.int32)
        else:
            slots = first + tl.arange(0, BK)
            spots = slots_at(places, row, head, slots, slots >= 0, capacity, num_pages, HEADS, PAGED)
            tile = load_tile(memory, spots, is_query, D, False, SCALED)
        peak, weight, total = attend_block(q, tile, is_query, peak, weight, total, scale, cap, False, CAPPED, SCALED)
        if PIECE_LEN > 0:
            top, norm, sums, peak, weight, total = folded_at(first + BK, top, norm, sums, peak, weight, total, PIECE_LEN)
    return top, norm, sums, peak, weight, total


@triton.jit
def over_slots(
    q, memory, tiles, places, words, depths, of, between, asking, numbers,
    HEADS: tl.constexpr, D: tl.constexpr, WORDS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SCALED: tl.constexpr, BY_PATHS: tl.constexpr, COPIED: tl.constexpr, PAGED: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    PIECE_LEN: tl.constexpr,
):  # fmt: skip
    """Attention of queries over a range of slots. Returns peak, weight and total of the joined whole pieces and of the piece
    that is not full yet, and the end of the slots that were read."""
    row, head, length, start, common, num_slots = of
    low, high = between
    top, norm, sums = nothing_seen(BQ, D)  # of the pieces that are whole
    peak, weight, total = nothing_seen(BQ, D)
    whole = low + tl.maximum(tl.minimum(high, common) - low, 0) // BK * BK  # up to here every query sees every slot
    inner = low
    if WINDOW > 0:
        inner = tl.minimum(low + tl.cdiv(tl.maximum(num_slots - WINDOW - low, 0), BK) * BK, whole)
        top, norm, sums, peak, weight, total = _over_masked(  # not in everybody's window
            q, memory, places, words, depths, (row, head, length, start), (low, inner), asking,
            numbers, top, norm, sums, peak, weight, total, HEADS, D, WORDS, WINDOW, CAPPED, SCALED, PAGED, BK, PIECE_LEN,
        )  # fmt: skip
    top, norm, sums, peak, weight, total = _over_whole(
        q, memory, tiles, places, (row, head), (inner, whole), asking[2],
        numbers, top, norm, sums, peak, weight, total, HEADS, D, CAPPED, SCALED, COPIED, PAGED, BK, PIECE_LEN,
    )  # fmt: skip
    if BY_PATHS:
        high = whole  # the rest is each node's own (tree_in_order.py)
    top, norm, sums, peak, weight, total = _over_masked(
        q, memory, places, words, depths, (row, head, length, start), (whole, high), asking,
        numbers, top, norm, sums, peak, weight, total, HEADS, D, WORDS, WINDOW, CAPPED, SCALED, PAGED, BK, PIECE_LEN,
    )  # fmt: skip
    return top, norm, sums, peak, weight, total, high
