"""Tree attention of many nodes: the same pieces as in ``tree_triton.py``, with softmax and products computed at the same time.

With a hundred queries and more per key head, memory is no longer the limit. A tile's two products and its softmax take about
equally long, and one after the other they leave the tensor cores idle half of the time. Here one warp fetches keys and values,
and two groups of warps take 64 queries each. While one group computes its weights, its own second product and those of the
other group run (Shah et al. 2024, "FlashAttention-3", arXiv 2407.08608).

    step i of a group:   S = Q K_i^T  and  O += P V_(i-1)  start;   S ends;   P' = exp2(S - m);   O ends;   O *= shrink, P = P'

The kernel is written in Gluon, because Triton's own language waits for a product where its result is first used. It needs
Hopper's instructions, pages of whole tiles, and equal pieces. Keys of committed tokens are fetched before the previous kernel
has ended. Only the nodes' own keys wait for it.
"""

# ruff: noqa: N803, N806 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from outrider.models.attention.tree_tiles import KeySplit, Rows, Sights
from outrider.models.gpu import launch
from outrider.models.gpu.launch_gluon import begin, end

Pair = tuple[Tensor, Tensor]
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def launch_wide(queries: Tensor, memory: Pair, rows: Rows, *, sights: Sights, cut: KeySplit, scale: float, parts: Pair) -> None:
    """Fill ``parts`` with totals, and peaks with weights, of every piece; ``scale`` is that of powers of two."""
    keys = memory[0]
    batch_size, num_nodes, num_heads, head_dim = queries.shape
    num_kv_heads, block = keys.shape[1], [cut.block_keys, head_dim]
    group = num_heads // num_kv_heads
    layout = gl.NVMMASharedLayout.get_default_for(block, _TYPES[keys.dtype])
    grid = (cut.num_pieces, num_kv_heads * triton.cdiv(num_nodes * group, cut.block_queries), batch_size)
    attend_wide[grid](
        queries,
        *(TensorDescriptor.from_tensor(part.view(-1, head_dim), block, layout) for part in memory),
        rows.lengths,
        rows.places,
        rows.lengths if sights.words is None else sights.words,
        *parts,
        num_nodes,
        sights.start,
        keys.shape[2],
        rows.places.shape[1] if rows.page_len else 1,
        scale,
        GROUP=group,
        HEADS=num_kv_heads,
        D=head_dim,
        SHORTEST=cut.shortest,
        WORDS=0 if sights.words is None else sights.words.shape[2],
        BQ=cut.block_queries,
        BK=cut.block_keys,
        STAGES=cut.num_stages,
        EARLY=launch.EARLY,
        num_warps=4,
        launch_pdl=launch.EARLY,
    )


@gluon.jit
def _fetch(tiles, buffers, full, empty, places, where, low, steps, HEADS: gl.constexpr, EARLY: gl.constexpr):
    """The warp that fetches: keys and values, step by step, into whichever buffers are free."""
    STAGES: gl.constexpr = buffers[0].shape[0]
    BK: gl.constexpr = buffers[0].shape[1]
    row, head, capacity, num_pages = where
    num_steps, num_whole = steps
    for step in range(num_steps):
        if step >= num_whole:
            begin(EARLY)
        stage, slot = step % STAGES, low + step * BK
        page = gl.load(places + row * num_pages + slot // capacity)
        at = (page * HEADS + head) * capacity + slot % capacity
        for side in gl.static_range(2):
            mbarrier.wait(empty[side].index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full[side].index(stage), tiles[side].block_type.nbytes)
            tma.async_copy_global_to_shared(tiles[side], [at, 0], full[side].index(stage), buffers[side].index(stage))


@gluon.jit
def _weights(s, peak, weight, scale, MASKED: gl.constexpr):
    """One step of the running softmax (``tree_tiles.attend_block``): weights, new peak and sum, and what old sums shrink by."""
    new_peak = gl.maximum(peak, gl.max(s, 1) * scale)
    safe_peak = gl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    p = gl.exp2(gl.fma(s, gl.full_like(s, scale), gl.zeros_like(s) - safe_peak[:, None]))
    shrink = gl.exp2(peak - safe_peak)
    return p, new_peak, gl.fma(weight, shrink, gl.sum(p, 1)), shrink


@gluon.jit
def _seen(words, query, node, slots, length, start, is_query, WORDS: gl.constexpr):
    """[BQ, BK] as in ``tree_triton.py``."""
    other = slots - length
    if WORDS == 0:
        return other[None, :] <= (start + node)[:, None]
    safe = gl.minimum(gl.maximum(other, 0), WORDS * 64 - 1)
    if WORDS == 1:
        word = gl.load(words + query, mask=is_query, other=0)[:, None]
    else:
        word = gl.load(words + (query * WORDS)[:, None] + (safe // 64)[None, :], mask=is_query[:, None], other=0)
    return (other < 0)[None, :] | (((word >> (safe % 64)[None, :].to(gl.int64)) & 1) != 0)


@gluon.jit
def _over_whole(q, buffers, full, empty, num_whole, scale, peak, weight, total):
    """The steps in which every query sees every key; at least one."""
    STAGES: gl.constexpr = buffers[0].shape[0]
    BK: gl.constexpr = buffers[0].shape[1]
    BQ: gl.constexpr = q.shape[0]
    SCORES: gl.constexpr = peak.type.layout.parent
    SUMS: gl.constexpr = total.type.layout
    PROBS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    nothing = gl.zeros([BQ, BK], gl.float32, SCORES)
    mbarrier.wait(full[0].index(0), 0)
    s = warpgroup_mma(q, buffers[0].index(0).permute((1, 0)), nothing, use_acc=False)
    mbarrier.arrive(empty[0].index(0))
    p, peak, weight, shrink = _weights(s, peak, weight, scale, False)
    probs = gl.convert_layout(p.to(q.dtype), PROBS)
    for step in range(1, num_whole):
        stage, last = step % STAGES, (step - 1) % STAGES
        mbarrier.wait(full[0].index(stage), step // STAGES & 1)
        scores = warpgroup_mma(q, buffers[0].index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(full[1].index(last), (step - 1) // STAGES & 1)
        sums = warpgroup_mma(probs, buffers[1].index(last), total, is_async=True)
        s = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(empty[0].index(stage))
        p, peak, weight, shrink = _weights(s, peak, weight, scale, False)
        total, probs = warpgroup_mma_wait(0, deps=(sums, probs))
        mbarrier.arrive(empty[1].index(last))
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        probs = gl.convert_layout(p.to(q.dtype), PROBS)
    stage = (num_whole - 1) % STAGES
    mbarrier.wait(full[1].index(stage), (num_whole - 1) // STAGES & 1)
    total = warpgroup_mma(probs, buffers[1].index(stage), total)
    mbarrier.arrive(empty[1].index(stage))
    return peak, weight, total


@gluon.jit
def _over_end(
    q, buffers, full, empty, words, query, node, is_query, start, slots_of, steps, scale, peak, weight, total,
    LOADED: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """The end of the text and the nodes: few steps, each masked."""
    STAGES: gl.constexpr = buffers[0].shape[0]
    BK: gl.constexpr = buffers[0].shape[1]
    BQ: gl.constexpr = q.shape[0]
    SCORES: gl.constexpr = peak.type.layout.parent
    SUMS: gl.constexpr = total.type.layout
    nothing = gl.zeros([BQ, BK], gl.float32, SCORES)
    length, low, high = slots_of
    num_steps, num_whole = steps
    for step in range(num_whole, num_steps):
        stage, phase = step % STAGES, step // STAGES & 1
        first = low + step * BK
        mbarrier.wait(full[0].index(stage), phase)
        s = warpgroup_mma(q, buffers[0].index(stage).permute((1, 0)), nothing, use_acc=False)
        mbarrier.arrive(empty[0].index(stage))
        slots = first + gl.arange(0, BK, gl.SliceLayout(0, SCORES))
        seen = _seen(words, query, node, slots, length, start, is_query, WORDS) & (slots < high)[None, :]
        p, peak, weight, shrink = _weights(gl.where(seen, s, float("-inf")), peak, weight, scale, True)
        mbarrier.wait(full[1].index(stage), phase)
        inside = first + gl.arange(0, BK, gl.SliceLayout(1, LOADED)) < high
        values = buffers[1].index(stage).load(LOADED)  # beyond the nodes stands anything, and 0 times anything is not 0
        buffers[1].index(stage).store(gl.where(inside[:, None], values, gl.zeros_like(values)))
        fence_async_shared()
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        probs = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, SUMS, 2))
        total = warpgroup_mma(probs, buffers[1].index(stage), total)
        mbarrier.arrive(empty[1].index(stage))
    return peak, weight, total


@gluon.jit
def _attend(
    queries, words, parts, peaks, buffers, full, empty, place, first_query, nodes, slots_of, steps, scale,
    GROUP: gl.constexpr, HEADS: gl.constexpr, WORDS: gl.constexpr, BQ: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One group: its queries over all keys of the piece."""
    BK: gl.constexpr = buffers[0].shape[1]
    D: gl.constexpr = buffers[0].shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BK, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row, head, piece = place
    num_nodes, start = nodes
    num_steps, num_whole = steps
    num_queries = num_nodes * GROUP
    begin(EARLY)
    loaded = first_query + gl.arange(0, BQ, gl.SliceLayout(1, LOADED))
    heads = (row * num_nodes + loaded // GROUP) * HEADS * GROUP + head * GROUP + loaded % GROUP
    query_at = queries + heads[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, LOADED))[None, :]
    q = gl.load(query_at, mask=(loaded < num_queries)[:, None], other=0.0)
    q = gl.convert_layout(q, gl.DotOperandLayout(0, SCORES, 2))  # stays in registers: shared memory has enough to do
    total = gl.zeros([BQ, D], gl.float32, SUMS)
    peak = gl.full([BQ], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    weight = gl.zeros([BQ], gl.float32, gl.SliceLayout(1, SCORES))
    if num_whole > 0:
        peak, weight, total = _over_whole(q, buffers, full, empty, num_whole, scale, peak, weight, total)
    index = first_query + gl.arange(0, BQ, gl.SliceLayout(1, SCORES))
    is_query, node = index < num_queries, index // GROUP
    peak, weight, total = _over_end(
        q, buffers, full, empty, words, row * num_nodes + node, node, is_query, start, slots_of, steps, scale,
        peak, weight, total, LOADED, WORDS,
    )  # fmt: skip
    end(EARLY)
    if num_steps > 0:
        first_part = ((row * HEADS + head) * gl.num_programs(0) + piece) * num_queries
        num_parts = gl.num_programs(2) * HEADS * gl.num_programs(0) * num_queries
        gl.store(peaks + first_part + index, peak, mask=is_query)
        gl.store(peaks + num_parts + first_part + index, weight, mask=is_query)
        part_at = parts + (first_part + loaded)[:, None].to(gl.int64) * D + gl.arange(0, D, gl.SliceLayout(0, LOADED))[None, :]
        sums = gl.convert_layout(total.to(parts.dtype.element_ty), LOADED)
        gl.store(part_at, sums, mask=(loaded < num_queries)[:, None])


@gluon.jit(do_not_specialize=["num_nodes", "start", "num_pages"])
def attend_wide(
    queries, key_tiles, value_tiles, lengths, places, words, parts, peaks, num_nodes, start, capacity, num_pages, scale,
    GROUP: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, SHORTEST: gl.constexpr,
    WORDS: gl.constexpr, BQ: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A program: BQ queries of a key head of a row over a piece of its keys."""
    piece = gl.program_id(0)
    head = gl.program_id(1) % HEADS
    first_query = gl.program_id(1) // HEADS * BQ
    row = gl.program_id(2)
    length = gl.load(lengths + row)
    num_slots = length + start + num_nodes
    size = gl.maximum(gl.cdiv(gl.cdiv(num_slots, gl.num_programs(0)), BK) * BK, SHORTEST)
    low = piece * size
    high = gl.minimum(low + size, num_slots)
    num_steps = gl.cdiv(gl.maximum(high - low, 0), BK)
    num_whole = gl.maximum(gl.minimum(high, length) - low, 0) // BK

    dtype: gl.constexpr = key_tiles.dtype
    keys = gl.allocate_shared_memory(dtype, [STAGES, BK, D], key_tiles.layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, BK, D], value_tiles.layout)
    full_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_keys.index(stage), count=1)
        mbarrier.init(full_values.index(stage), count=1)
        mbarrier.init(empty_keys.index(stage), count=2)
        mbarrier.init(empty_values.index(stage), count=2)
    buffers, full, empty = (keys, values), (full_keys, full_values), (empty_keys, empty_values)
    place, nodes, slots, steps = (row, head, piece), (num_nodes, start), (length, low, high), (num_steps, num_whole)
    gl.warp_specialize(
        [
            (_attend, (queries, words, parts, peaks, buffers, full, empty, place, first_query,
                       nodes, slots, steps, scale, GROUP, HEADS, WORDS, BQ // 2, EARLY)),
            (_attend, (queries, words, parts, peaks, buffers, full, empty, place, first_query + BQ // 2,
                       nodes, slots, steps, scale, GROUP, HEADS, WORDS, BQ // 2, EARLY)),
            (_fetch, ((key_tiles, value_tiles), buffers, full, empty, places, (row, head, capacity, num_pages), low, steps,
                      HEADS, EARLY)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
