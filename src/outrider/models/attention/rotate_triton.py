"""Prepares queries and keys for attention in one kernel: adds up parts and bias, normalises, rotates, and writes keys and
values.

Norms of queries and keys come in three spans: a weight for all heads (Qwen3), one for each head (Cohere, StableLM), or one norm
over all heads (OLMo-2). For the last, every program reads the node's whole row once more.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals, and are long
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.cache.page_pool import LayerPages
from outrider.core.key_storage import SMALLEST, STORAGES
from outrider.models.attention.tree_memory import kernel_memory
from outrider.models.attention.tree_tiles import Rows, Sights, slots_at
from outrider.models.gpu import launch
from outrider.models.gpu.launch import begin, end


class QueryNorms(NamedTuple):
    """Norms of queries and keys."""

    queries: Tensor
    """[D], or [Hq * D] where the span is not "head"."""
    keys: Tensor
    eps: float
    span: str = "head"
    """Span of a norm, as in ``ModelConfig.qk_norm_span``: all heads share a weight, each has its own, or a node's heads are one
    vector."""
    kind: str = "rms"
    """RMS norm, or "layer" norm."""


LARGEST = {storage.codes: storage.largest for storage in STORAGES.values() if storage.is_rounded}
SMALLEST_TOP = tl.constexpr(SMALLEST)
_SPANS = {"head": 0, "heads": 1, "whole": 2}


def rotate_and_write(
    qkv: Tensor,
    memory: LayerPages | tuple[Tensor, Tensor],
    rows: Rows,
    *,
    sights: Sights,
    tables: tuple[Tensor, Tensor] | None,
    bias: Tensor | None = None,
    norms: QueryNorms | tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Rotated queries [B, N, Hq, D] out of [B, N, (Hq + 2 Hkv) * D], or of [parts, B, N, ..] yet to be added up. (The nodes of
    a part stand together, the parts need not.) Rotated keys and the values go to slots ``lengths[b] + start + n``. ``tables``
    are cosines and signed sines [S, D], None for a layer without positions; ``norms`` are those of queries and keys (three
    values: one weight per head, RMS)."""
    memory = LayerPages(*memory)
    keys, dtype = memory.keys, memory.dtype or memory.keys.dtype
    batch_size, num_nodes, width = qkv.shape[-3:]
    num_kv_heads, capacity, head_dim = keys.shape[1], keys.shape[2], keys.shape[3]
    num_heads = width // head_dim - 2 * num_kv_heads
    queries = torch.empty(batch_size, num_nodes, num_heads, head_dim, dtype=dtype, device=qkv.device)
    cos, sin = tables if tables is not None else (qkv, qkv)
    norms = None if norms is None else QueryNorms(*norms)
    block = math.gcd(math.gcd(num_heads, num_kv_heads), 8)  # heads of one sort per program
    _rotate_and_write[((num_heads + 2 * num_kv_heads) // block, batch_size * num_nodes)](
        qkv,
        queries,
        *kernel_memory(memory),
        rows.lengths,
        rows.places,
        rows.lengths if sights.depths is None else sights.depths,
        cos,
        sin,
        qkv if bias is None else bias,
        qkv if norms is None else norms[0],
        qkv if norms is None else norms[1],
        capacity,
        rows.places.shape[1] if rows.page_len else 0,
        0.0 if norms is None else norms[2],
        qkv.stride(0) if qkv.dim() == 4 else 0,
        num_nodes,
        sights.start,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        BLOCK=block,
        D=head_dim,
        PARTS=1 if qkv.dim() == 3 else len(qkv),
        CHAIN=sights.depths is None,
        TURNS=tables is not None,
        HAS_BIAS=bias is not None,
        HAS_NORMS=norms is not None,
        SPAN=0 if norms is None else _SPANS[norms.span],
        CENTRED=norms is not None and norms.kind == "layer",
        LARGEST=0.0 if memory.key_scales is None else LARGEST[keys.dtype],
        WIDE=triton.next_power_of_2(max(num_heads, num_kv_heads) * head_dim),
        PAGED=rows.page_len > 0,
        EARLY=launch.EARLY,
        num_warps=max(1, block // 2),
        launch_pdl=launch.EARLY,
    )
    return queries


@triton.jit
def _whole_scale(at, bias, count, step, eps, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, WIDE: tl.constexpr):
    """1 / rms of ``count`` numbers, added up from their parts and their bias."""
    dims = tl.arange(0, WIDE)
    inside = dims < count
    x = tl.load(at + dims, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(at + part * step + dims, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + dims, mask=inside, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 0) / count + eps)


@triton.jit
def _normed(
    x, y, row_at, bias, gains, count, step, eps,
    D: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, SPAN: tl.constexpr, CENTRED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Both halves of some heads under their norm; ``gains`` are where the first half's weights stand."""
    if CENTRED:
        mean = ((tl.sum(x, 1) + tl.sum(y, 1)) / D)[:, None]
        x -= mean
        y -= mean
    if SPAN == 2:
        scale = _whole_scale(row_at, bias, count, step, eps, PARTS, HAS_BIAS, WIDE)
    else:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
    return x * (scale * tl.load(gains).to(tl.float32)), y * (scale * tl.load(gains + D // 2).to(tl.float32))


@triton.jit
def _store_heads(memory, scales_at, spots, x, y, D: tl.constexpr, LARGEST: tl.constexpr):
    """Store both halves of some heads, as they are or as codes with scales (``core/key_storage.py``)."""
    to = memory + spots[:, None] * D + tl.arange(0, D // 2)[None, :]
    if LARGEST > 0:
        x, y = x.to(tl.float32), y.to(tl.float32)
        top = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
        scales = tl.maximum(top, SMALLEST_TOP) * (1.0 / LARGEST)
        tl.store(scales_at, scales)
        x, y = tl.div_rn(x, scales[:, None]), tl.div_rn(y, scales[:, None])  # a product would be fused with the sum below
        if tl.int8 == memory.dtype.element_ty:  # 3 * 2^22: what is behind the point leaves a float32
            x, y = x + 12582912.0 - 12582912.0, y + 12582912.0 - 12582912.0
    tl.store(to, x.to(memory.dtype.element_ty))
    tl.store(to + D // 2, y.to(memory.dtype.element_ty))


@triton.jit(do_not_specialize=["num_nodes", "start", "num_pages"])
def _rotate_and_write(
    qkv, queries, keys, values, key_scales, value_scales, lengths, places, depths, cos, sin, bias, q_norm, k_norm,
    capacity, num_pages, eps, part_step, num_nodes, start,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
    CHAIN: tl.constexpr, TURNS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORMS: tl.constexpr, SPAN: tl.constexpr,
    CENTRED: tl.constexpr, LARGEST: tl.constexpr, WIDE: tl.constexpr, PAGED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK
    heads = first + tl.arange(0, BLOCK)
    flat = tl.program_id(1)
    row = flat // num_nodes
    node = flat % num_nodes
    dims = tl.arange(0, D // 2)  # of the first half; a number turns with its partner in the second
    low = heads[:, None] * D + dims[None, :]
    high = low + D // 2
    at = qkv + flat.to(tl.int64) * (HEADS + 2 * KV_HEADS) * D
    length = tl.load(lengths + row)  # like all the rest but the sums, written long before the kernel in front
    turns = TURNS and first < HEADS + KV_HEADS
    angle = (length + (start + node if CHAIN else tl.load(depths + flat))) * D + dims
    low_cos = tl.load(cos + angle, mask=turns, other=0.0).to(tl.float32)[None, :]
    low_sin = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)[None, :]
    high_cos = tl.load(cos + angle + D // 2, mask=turns, other=0.0).to(tl.float32)[None, :]
    high_sin = tl.load(sin + angle + D // 2, mask=turns, other=0.0).to(tl.float32)[None, :]
    begin(EARLY)
    x = tl.load(at + low).to(tl.float32)
    y = tl.load(at + high).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        at += part_step
        x += tl.load(at + low).to(tl.float32)
        y += tl.load(at + high).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + low).to(tl.float32)
        y += tl.load(bias + high).to(tl.float32)
    if first < HEADS + KV_HEADS:
        if HAS_NORMS:
            before = 0 if first < HEADS else HEADS * D
            row_at = qkv + flat.to(tl.int64) * (HEADS + 2 * KV_HEADS) * D + before
            count = (HEADS if first < HEADS else KV_HEADS) * D
            gains = (q_norm if first < HEADS else k_norm) + (low - before if SPAN > 0 else dims[None, :])
            x, y = _normed(x, y, row_at, bias + before, gains, count, part_step, eps, D, PARTS, HAS_BIAS, SPAN, CENTRED, WIDE)
        if TURNS:
            x, y = x * low_cos + y * low_sin, y * high_cos + x * high_sin
    end(EARLY)
    x, y = x.to(queries.dtype.element_ty), y.to(queries.dtype.element_ty)
    if first < HEADS:
        tl.store(queries + flat.to(tl.int64) * HEADS * D + low, x)
        tl.store(queries + flat.to(tl.int64) * HEADS * D + high, y)
    else:
        kv_heads = (heads - HEADS) % KV_HEADS
        spots = slots_at(places, row, kv_heads, length + start + node, True, capacity, num_pages, KV_HEADS, PAGED)
        memory = keys if first < HEADS + KV_HEADS else values
        _store_heads(memory, (key_scales if first < HEADS + KV_HEADS else value_scales) + spots, spots, x, y, D, LARGEST)
