"""Tree attention on a GPU: each node attends to its row's committed tokens and its own ancestors. Lengths are read on the
device.

Keys are cut into pieces that work side by side (split-KV, Dao et al. 2023, "Flash-Decoding"), each with the query heads that
share a key head folded into one tile; a second kernel joins the pieces (``tree_join.py``). What a node sees among the nodes is
a bit per pair, 64 to a word (SpecInfer's topology mask, Miao et al. 2023, arXiv 2305.09781).

    piece c:  m_c = max s,  l_c = sum exp(s - m_c),  o_c = sum exp(s - m_c) v          s = q . k * scale, seen keys of c only
    joined:   o = sum_c exp(m_c - m) o_c / sum_c exp(m_c - m) l_c                       m = max_c m_c

Slots of a row are found through ``Rows``: row number times capacity (contiguous), or a table of pages. Pieces are ``piece_len``
slots at fixed places, or as many equal ones as keep the device busy. At fixed places, results do not depend on what else is in
the pass, and on a chain they are those of one-token decoding, bit for bit. On a chain such pieces are joined by the last
program of a tile to end. The oracle is ``sdpa.py``.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.cache.page_pool import LayerPages
from outrider.models.attention.rotate_triton import QueryNorms, rotate_and_write
from outrider.models.attention.tree_in_order import join_in_order
from outrider.models.attention.tree_join import finish_tile, join_pieces
from outrider.models.attention.tree_memory import cut_of, kernel_memory
from outrider.models.attention.tree_over import over_slots
from outrider.models.attention.tree_tiles import (
    BLOCK,
    LOG2E,
    NO_BOUNDS,
    Bounds,
    KeySplit,
    Look,
    Rows,
    Sights,
    ends_of,
    fold_len_of,
    joined,
    nothing_seen,
    origin_of,
    piece_len_of,
    store_block,
    store_part,
)
from outrider.models.gpu import launch
from outrider.models.gpu.launch import begin, end
from outrider.models.gpu.limits import can_copy, stages_that_fit

__all__ = ["QueryNorms", "attend_tree", "pack_words", "rotate_and_write"]

_WORD = 64


def pack_words(ancestors: Tensor) -> Tensor:
    """[B, N, W] int64 from the [B, N, N] boolean ancestor-or-self mask."""
    batch_size, num_nodes, _ = ancestors.shape
    num_words = -(-num_nodes // _WORD)
    padded = torch.zeros(batch_size, num_nodes, num_words * _WORD, dtype=torch.int64, device=ancestors.device)
    padded[:, :, :num_nodes] = ancestors
    shifts = torch.arange(_WORD, device=ancestors.device)
    return (padded.unflatten(-1, (num_words, _WORD)) << shifts).sum(-1)


def attend_tree(
    queries: Tensor,
    memory: LayerPages | tuple[Tensor, Tensor],
    rows: Rows,
    *,
    sights: Sights,
    cut: KeySplit,
    scale: float,
    bounds: Bounds = NO_BOUNDS,
) -> Tensor:
    """[B, N, Hq, D] from rotated queries of that shape and the keys and values of a layer, [R, Hkv, S, D] (pages: [P, Hkv, L,
    D]). The nodes' own are already written into them, at slots ``lengths[b] + start``.. of each row."""
    memory = LayerPages(*memory)
    keys, cut = memory.keys, cut_of(cut, memory)
    batch_size, num_nodes, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    num_queries = num_nodes * num_heads // num_kv_heads
    shape = (batch_size, num_kv_heads, cut.num_pieces, num_queries)
    # many sums take long to write and read: where the result is bfloat16, and nothing is compared bit by bit, so are they
    rounded = queries.dtype == torch.bfloat16 and cut.block_queries >= 64 and not cut.piece_len
    parts = torch.empty(*shape, head_dim, dtype=torch.bfloat16 if rounded else torch.float32, device=keys.device)
    peaks = torch.empty(2, *shape, dtype=torch.float32, device=keys.device)
    look = Look(scale * LOG2E, bounds)
    if cut.side_by_side:
        from outrider.models.attention.tree_wide import launch_wide  # a language not every triton has

        assert bounds.is_plain, "the kernel for many queries knows neither windows nor caps"
        launch_wide(queries, memory[:2], rows, sights=sights, cut=cut, scale=look.scale, parts=(parts, peaks))
    else:
        out = torch.empty_like(queries)
        _launch_pieces(queries, memory, rows, sights=sights, cut=cut, look=look, parts=(parts, peaks, out))
        if cut.piece_len > 0 and sights.words is None:
            return out
    if cut.piece_len > 0 and sights.words is not None:
        return join_in_order(queries, memory, rows, parts=(parts, peaks), sights=sights, cut=cut, look=look)
    return join_pieces(queries, rows, parts=(parts, peaks), sights=sights, cut=cut, bounds=bounds)


_COUNTERS: dict[int, list[Tensor]] = {}
"""Counters of ended programs for each tile, by the memory they read, since passes over one memory never run at the same time.
They are zero between launches. Graphs hold their addresses, so small ones are kept when a larger one is made."""


def _counters(keys: Tensor, count: int) -> Tensor:
    """[count or more] int32"""
    held = _COUNTERS.setdefault(keys.untyped_storage().data_ptr(), [])
    if not held or len(held[-1]) < count:
        held.append(torch.zeros(triton.next_power_of_2(max(count, 4096)), dtype=torch.int32, device=keys.device))
    return held[-1]


def _launch_pieces(
    queries: Tensor,
    memory: LayerPages,
    rows: Rows,
    *,
    sights: Sights,
    cut: KeySplit,
    look: Look,
    parts: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill ``parts`` with the totals, and the peaks with weights, of every piece, and the final results where a program can
    compute them."""
    keys, is_scaled = memory.keys, memory.key_scales is not None
    batch_size, num_nodes, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    key_bytes, tile_bytes = (cut.block_keys * head_dim * part.element_size() for part in (keys, queries))
    other_bytes = tile_bytes * cut.block_queries // cut.block_keys + (2 * tile_bytes if is_scaled else 0)
    copied = cut.block_queries >= 64 and rows.page_len % cut.block_keys == 0 and can_copy(keys)
    block = [cut.block_keys, head_dim]
    tiles = [TensorDescriptor.from_tensor(part.view(-1, head_dim), block) if copied else part for part in memory[:2]]
    num_programs = cut.num_programs if cut.piece_len and cut.num_programs else cut.num_pieces
    num_tiles = num_kv_heads * triton.cdiv(num_nodes * group, cut.block_queries)
    _attend_pieces[(num_programs, num_tiles, batch_size)](
        *(queries, *kernel_memory(memory), *tiles, rows.lengths, rows.places),
        rows.lengths if sights.words is None else sights.words,
        rows.lengths if sights.depths is None else sights.depths,
        *parts,
        rows.lengths if look.bounds.sinks is None else look.bounds.sinks,
        _counters(keys, num_tiles * batch_size),
        *(num_nodes, sights.start, cut.num_pieces, cut.folds_above, keys.shape[2]),
        *(rows.places.shape[1] if rows.page_len else 0, look.scale, look.cap),
        GROUP=group,
        HEADS=num_kv_heads,
        D=head_dim,
        PIECE_LEN=cut.piece_len,
        BLOCK_LEN=cut.piece_len * BLOCK,
        SHORTEST=cut.shortest,
        WORDS=0 if sights.words is None else sights.words.shape[2],
        WINDOW=look.bounds.window,
        SINKS=look.bounds.sinks is not None,
        CAPPED=look.cap > 0,
        SCALED=is_scaled,
        BY_PATHS=cut.piece_len > 0 and sights.words is not None,
        COPIED=copied,
        PAGED=rows.page_len > 0,
        BQ=cut.block_queries,
        BK=cut.block_keys,
        EARLY=launch.EARLY,
        num_warps=cut.num_warps,
        num_stages=stages_that_fit(cut.num_stages, 2 * key_bytes, other_bytes=other_bytes),
        launch_pdl=launch.EARLY,
    )


@triton.jit(do_not_specialize=["num_nodes", "start", "num_pieces", "folds_above", "num_pages"])
def _attend_pieces(
    queries, keys, values, key_scales, value_scales, key_tiles, value_tiles, lengths, places, words, depths, parts, peaks, out,
    sinks, counters, num_nodes, start, num_pieces, folds_above, capacity, num_pages, scale, cap,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PIECE_LEN: tl.constexpr, BLOCK_LEN: tl.constexpr,
    SHORTEST: tl.constexpr, WORDS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr,
    SCALED: tl.constexpr, BY_PATHS: tl.constexpr, COPIED: tl.constexpr, PAGED: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1) % HEADS, tl.program_id(2)
    num_queries, first_query = num_nodes * GROUP, tl.program_id(1) // HEADS * BQ
    index = first_query + tl.arange(0, BQ)
    is_query, node, query = index < num_queries, index // GROUP, row * num_nodes + index // GROUP
    length = tl.load(lengths + row)  # written long before the kernel in front, so there is nothing to wait for
    num_slots = length + start + num_nodes
    common, stop = ends_of(length, start, num_slots, first_query, WORDS == 0, GROUP, BQ)
    origin = origin_of(length, start, WORDS == 0, WINDOW, BK)
    of, asking, numbers = (row, head, length, start, common, stop), (query, node, is_query), (capacity, num_pages, scale, cap)
    memory, tiles = (keys, values, key_scales, value_scales), (key_tiles, value_tiles)
    first_part = (row * HEADS + head) * num_pieces * num_queries + index
    num_parts = tl.num_programs(2) * HEADS * num_pieces * num_queries
    begin(EARLY)
    query_at = queries + (query * HEADS * GROUP + head * GROUP + index % GROUP)[:, None] * D + tl.arange(0, D)
    q = tl.load(query_at, mask=is_query[:, None], other=0.0)
    if PIECE_LEN > 0:  # at fixed places, which the programs of a row take in turns
        size = fold_len_of(num_slots, folds_above, PIECE_LEN, BLOCK_LEN)
        first_piece, last_piece, turn = origin // size, tl.cdiv(stop, size), tl.program_id(0)
        top, norm, sums = nothing_seen(BQ, D)
        for piece in range(first_piece + turn, last_piece, tl.num_programs(0)):
            low, end_of = tl.maximum(piece * size, origin), piece * size + size
            top, norm, sums, peak, weight, total, high = over_slots(
                q, memory, tiles, places, words, depths, of, (low, tl.minimum(end_of, stop)),
                asking, numbers, HEADS, D, WORDS, WINDOW, CAPPED, SCALED, BY_PATHS, COPIED, PAGED, BQ, BK, PIECE_LEN,
            )  # fmt: skip
            part = first_part + piece * num_queries
            if BY_PATHS:
                if low < high:
                    whole, rest, is_apart = (top, norm, sums), (peak, weight, total), (high < end_of) & (size > PIECE_LEN)
                    store_block(parts, peaks, part, num_parts, is_query, whole, rest, is_apart, part + num_queries, D)
            else:
                top, norm, sums = joined(top, norm, sums, peak, weight, total)
                if last_piece - first_piece > 1:
                    store_part(parts, peaks, part, num_parts, is_query, top, norm, sums, D)
        if not BY_PATHS:
            here, slots = (row, head, first_query, num_nodes), (first_piece, last_piece, size, origin, length + start)
            finish_tile(
                parts, peaks, out, sinks, counters, here, slots, (top, norm, sums), num_pieces, num_parts,
                GROUP, HEADS, D, SINKS, BLOCK_LEN, BQ,
            )  # fmt: skip
    else:
        size = piece_len_of(num_slots - origin, num_pieces, SHORTEST, BK)
        low = origin + tl.program_id(0) * size
        _, _, _, peak, weight, total, high = over_slots(
            q, memory, tiles, places, words, depths, of, (low, tl.minimum(low + size, stop)),
            asking, numbers, HEADS, D, WORDS, WINDOW, CAPPED, SCALED, BY_PATHS, COPIED, PAGED, BQ, BK, PIECE_LEN,
        )  # fmt: skip
        if low < high:
            first_part += tl.program_id(0) * num_queries
            store_part(parts, peaks, first_part, num_parts, is_query, peak, weight, total, D)
    end(EARLY)
