"""Latent attention on a GPU: the heads of a node attend to cached latents, which serve as both keys and values.

    s = q . [c, r] * scale,     o = softmax(s) c         c: the latent of a token, r: its rotated key; one vector for all heads

A program has up to 16 heads of one node, so nothing it computes depends on what else is in the pass. It reads keys in the order
in which the node's text has them: slots of committed tokens, then the node's ancestors by its path. On a tree without paths it
reads all nodes and masks the others. Pieces of fixed length are joined in order: by ``tree_join.py`` or, if there are enough
programs, by the program that reads all pieces of its node. A tile of latents is read once, for scores and for sums. The oracle
is ``models/latent.py``.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.attention.tree_join import join_pieces
from outrider.models.attention.tree_tiles import (
    BLOCK,
    LOG2E,
    NO_BOUNDS,
    KeySplit,
    Rows,
    Sights,
    attend_scores,
    fold_len_of,
    folded_at,
    joined,
    nothing_seen,
    slots_at,
    store_part,
)
from outrider.models.gpu import launch
from outrider.models.gpu.launch import begin, end
from outrider.models.gpu.limits import stages_that_fit


def attend_latents(
    queries: Tensor, latents: Tensor, rows: Rows, *, sights: Sights, cut: KeySplit, scale: float, rank: int
) -> Tensor:
    """[B, N, Hq, rank] from absorbed queries [B, N, Hq, rank + rope] and the latents of a layer. Latents are pages [P, 1, L,
    rank + rope] or rows [R, 1, S, rank + rope], into which the nodes' own are already written."""
    batch_size, num_nodes, num_heads, width = queries.shape
    whole = cut.num_pieces == 1
    shape = (batch_size, 1, cut.num_pieces, num_nodes * num_heads)
    parts = torch.empty(*shape, rank, dtype=queries.dtype if whole else torch.float32, device=queries.device)
    peaks = torch.empty(2, *shape, dtype=torch.float32, device=queries.device)
    nothing, stage_bytes = rows.lengths, cut.block_keys * width * latents.element_size()
    num_programs = 1 if whole else cut.num_programs or cut.num_pieces
    _attend_latents[(num_programs, num_nodes * triton.cdiv(num_heads, cut.block_queries), batch_size)](
        queries,
        latents,
        rows.lengths,
        rows.places,
        nothing if sights.words is None else sights.words,
        nothing if sights.paths is None else sights.paths,
        nothing if sights.depths is None else sights.depths,
        parts,
        peaks,
        num_nodes,
        sights.start,
        cut.num_pieces,
        cut.folds_above,
        latents.shape[2],
        rows.places.shape[1] if rows.page_len else 0,
        scale * LOG2E,
        HEADS=num_heads,
        R=rank,
        T=width - rank,
        PIECE_LEN=cut.piece_len,
        BLOCK_LEN=cut.piece_len * BLOCK,
        WHOLE=whole,
        WORDS=0 if sights.words is None else sights.words.shape[2],
        PATH=0 if sights.paths is None else sights.paths.shape[2],
        PAGED=rows.page_len > 0,
        TOGETHER=rows.page_len % cut.block_keys == 0,
        BQ=cut.block_queries,
        BK=cut.block_keys,
        EARLY=launch.EARLY,
        num_warps=cut.num_warps,
        num_stages=stages_that_fit(cut.num_stages, stage_bytes),
        launch_pdl=launch.EARLY,
    )
    if whole:
        return parts.view(batch_size, num_nodes, num_heads, rank)
    return join_pieces(queries[..., :rank], rows, parts=(parts, peaks), sights=sights, cut=cut, bounds=NO_BOUNDS)


@triton.jit
def _over_tile(
    q, q_turned, latents, at, inside, seen, scale, peak, weight, total,
    R: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax, over the latents in the slots ``at``."""
    first = latents + at[:, None] * (R + T)
    c_at, r_at = first + tl.arange(0, R)[None, :], first + R + tl.arange(0, T)[None, :]
    if MASKED:
        c = tl.load(c_at, mask=inside[:, None], other=0.0)
        r = tl.load(r_at, mask=inside[:, None], other=0.0)
    else:
        c = tl.load(c_at)
        r = tl.load(r_at)
    s = tl.dot(q, tl.trans(c), input_precision="ieee")
    s = tl.dot(q_turned, tl.trans(r), s, input_precision="ieee")
    return attend_scores(s, c, seen, peak, weight, total, scale, 0.0, MASKED)


@triton.jit
def _own_slots(paths, words, flat, position, length, inside, WORDS: tl.constexpr, PATH: tl.constexpr):
    """The slots of a node's text after the committed tokens, and which of them belong to its path."""
    is_node = inside & (position >= length)
    if PATH > 0:
        path = tl.load(paths + flat.to(tl.int64) * PATH + position - length, mask=is_node, other=0)
        return tl.where(is_node, length + path, position), inside
    if WORDS > 0:
        other = tl.maximum(position - length, 0)
        word = tl.load(words + flat.to(tl.int64) * WORDS + other // 64, mask=is_node, other=0)
        return position, inside & ((position < length) | (((word >> (other % 64).to(tl.int64)) & 1) != 0))
    return position, inside


@triton.jit
def _over(
    q, q_turned, latents, places, words, paths, of, between, numbers, of_blocks,
    R: tl.constexpr, T: tl.constexpr, WORDS: tl.constexpr, PATH: tl.constexpr, PAGED: tl.constexpr, TOGETHER: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, PIECE_LEN: tl.constexpr, BLOCK_LEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Peak, weight and total of queries over a range of slots. Pieces are joined to blocks, and with WHOLE the blocks to one
    result."""
    row, flat, length = of
    low, high = between
    capacity, num_pages, scale = numbers
    every, every_norm, every_sum = of_blocks
    top, norm, sums = nothing_seen(BQ, R)  # of the pieces of a block that are whole
    peak, weight, total = nothing_seen(BQ, R)
    whole = low + tl.maximum(tl.minimum(high, length) - low, 0) // BK * BK  # up to here every slot holds committed tokens
    for first in range(low, whole, BK):
        slots = first + tl.arange(0, BK)
        if TOGETHER:
            at = slots_at(places, row, 0, first, True, capacity, num_pages, 1, PAGED) + tl.arange(0, BK)
        else:
            at = slots_at(places, row, 0, slots, slots >= 0, capacity, num_pages, 1, PAGED)
        peak, weight, total = _over_tile(q, q_turned, latents, at, slots, slots, scale, peak, weight, total, R, T, False)
        top, norm, sums, peak, weight, total = folded_at(first + BK, top, norm, sums, peak, weight, total, PIECE_LEN)
        if WHOLE:
            every, every_norm, every_sum, top, norm, sums = folded_at(
                first + BK, every, every_norm, every_sum, top, norm, sums, BLOCK_LEN
            )
    for first in tl.range(whole, high, BK, num_stages=1):
        position = first + tl.arange(0, BK)
        inside = position < high
        slots, seen = _own_slots(paths, words, flat, position, length, inside, WORDS, PATH)
        at = slots_at(places, row, 0, slots, inside, capacity, num_pages, 1, PAGED)
        seen = seen[None, :] & (tl.arange(0, BQ) >= 0)[:, None]
        peak, weight, total = _over_tile(q, q_turned, latents, at, inside, seen, scale, peak, weight, total, R, T, True)
        top, norm, sums, peak, weight, total = folded_at(first + BK, top, norm, sums, peak, weight, total, PIECE_LEN)
        if WHOLE:
            every, every_norm, every_sum, top, norm, sums = folded_at(
                first + BK, every, every_norm, every_sum, top, norm, sums, BLOCK_LEN
            )
    top, norm, sums = joined(top, norm, sums, peak, weight, total)
    if WHOLE:
        top, norm, sums = joined(every, every_norm, every_sum, top, norm, sums)
    return top, norm, sums


@triton.jit(do_not_specialize=["num_nodes", "start", "num_pieces", "folds_above", "num_pages"])
def _attend_latents(
    queries, latents, lengths, places, words, paths, depths, parts, peaks,
    num_nodes, start, num_pieces, folds_above, capacity, num_pages, scale,
    HEADS: tl.constexpr, R: tl.constexpr, T: tl.constexpr, PIECE_LEN: tl.constexpr, BLOCK_LEN: tl.constexpr,
    WHOLE: tl.constexpr, WORDS: tl.constexpr, PATH: tl.constexpr, PAGED: tl.constexpr, TOGETHER: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(1) // tl.cdiv(HEADS, BQ)
    heads = tl.program_id(1) % tl.cdiv(HEADS, BQ) * BQ + tl.arange(0, BQ)
    row = tl.program_id(2)
    is_head = heads < HEADS
    flat = row * num_nodes + node
    length = tl.load(lengths + row)  # written long before the kernel in front, so there is nothing to wait for
    num_slots = length + start + num_nodes
    stop = num_slots  # of the node's text; on a tree without paths, of all nodes
    if WORDS == 0:
        stop = length + start + node + 1
    elif PATH > 0:
        stop = length + tl.load(depths + flat) + 1
    begin(EARLY)
    query_at = queries + (flat.to(tl.int64) * HEADS + heads)[:, None] * (R + T)
    q = tl.load(query_at + tl.arange(0, R)[None, :], mask=is_head[:, None], other=0.0)
    q_turned = tl.load(query_at + R + tl.arange(0, T)[None, :], mask=is_head[:, None], other=0.0)
    of, numbers, none = (row, flat, length), (capacity, num_pages, scale), nothing_seen(BQ, R)
    if WHOLE:
        _, norm, sums = _over(
            q, q_turned, latents, places, words, paths, of, (0, stop), numbers, none,
            R, T, WORDS, PATH, PAGED, TOGETHER, BQ, BK, PIECE_LEN, BLOCK_LEN, True,
        )  # fmt: skip
        out_at = parts + (flat.to(tl.int64) * HEADS + heads)[:, None] * R + tl.arange(0, R)[None, :]
        tl.store(out_at, (sums / norm[:, None]).to(parts.dtype.element_ty), mask=is_head[:, None])
    else:
        num_queries = num_nodes * HEADS
        first_part = row * num_pieces * num_queries + node * HEADS + heads
        num_parts = tl.num_programs(2) * num_pieces * num_queries
        size = fold_len_of(num_slots, folds_above, PIECE_LEN, BLOCK_LEN)
        for piece in range(tl.program_id(0), tl.cdiv(num_slots, size), tl.num_programs(0)):  # programs take turns
            peak, weight, total = _over(
                q, q_turned, latents, places, words, paths, of, (piece * size, tl.minimum(piece * size + size, stop)),
                numbers, none, R, T, WORDS, PATH, PAGED, TOGETHER, BQ, BK, PIECE_LEN, BLOCK_LEN, False,
            )  # fmt: skip
            store_part(parts, peaks, first_part + piece * num_queries, num_parts, is_head, peak, weight, total, R)
    end(EARLY)
