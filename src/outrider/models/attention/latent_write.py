"""The first step of latent attention, in one kernel: add up parts, normalise and write latents, rotate queries and keys.

    memory[slot] = [norm(c), rotated(r)],       queries[.., rank:] = rotated(q_rope)

The other dimensions of a query are its product with the up-projection of keys (``gpu/latent.py``).
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from outrider.models.attention.tree_tiles import Rows, Sights, slots_at
from outrider.models.gpu import launch
from outrider.models.gpu.launch import begin, end

_HEADS = 8
"""Query heads that one program rotates."""


class Entering(NamedTuple):
    """How a layer prepares latents before they are written."""

    norm: Tensor
    """[rank]"""
    eps: float
    tables: tuple[Tensor, Tensor]
    """Cosines and signed sines [S, rope]."""
    query_dim: int
    """Distance from one query head to the next, in numbers."""
    bias: Tensor | None = None
    """[rank + rope]"""


def parts_of(rows: Tensor, dims: int) -> tuple[int, int]:
    """The number of parts of a product that must be added up, and the distance from one to the next. ``dims`` are the
    dimensions of one part."""
    return (1, 0) if rows.dim() == dims else (len(rows), rows.stride(0))


def write_latents(
    down: Tensor, heads: Tensor, queries: Tensor, memory: Tensor, rows: Rows, *, sights: Sights, entering: Entering
) -> None:
    """Latents and rotated keys are the last ``rank + rope`` columns of ``down`` [B, N, ..], query heads are the first columns
    of ``heads`` [B, N, ..]. Both may be in parts [parts, B, N, ..] that are yet to be added up. Fills the ends of ``queries``
    [B, N, Hq, rank + rope], and slots ``lengths[b] + start + n`` of ``memory`` [R, 1, S, rank + rope] or of pages."""
    batch_size, num_nodes, num_heads, width = queries.shape
    rank, turned = len(entering.norm), width - len(entering.norm)
    (down_parts, down_step), (head_parts, head_step) = parts_of(down, 3), parts_of(heads, 3)
    cos, sin = entering.tables
    _write_latents[(1 + triton.cdiv(num_heads, _HEADS), batch_size * num_nodes)](
        down,
        heads,
        queries,
        memory,
        rows.lengths,
        rows.places,
        rows.lengths if sights.depths is None else sights.depths,
        cos,
        sin,
        entering.norm,
        down if entering.bias is None else entering.bias,
        down.shape[-1],
        down_step,
        heads.shape[-1],
        head_step,
        memory.shape[2],
        rows.places.shape[1] if rows.page_len else 0,
        entering.eps,
        num_nodes,
        sights.start,
        HEADS=num_heads,
        BLOCK=_HEADS,
        R=rank,
        T=turned,
        QUERY_DIM=entering.query_dim,
        DOWN_PARTS=down_parts,
        HEAD_PARTS=head_parts,
        CHAIN=sights.depths is None,
        HAS_BIAS=entering.bias is not None,
        PAGED=rows.page_len > 0,
        EARLY=launch.EARLY,
        num_warps=4,
        launch_pdl=launch.EARLY,
    )


@triton.jit
def summed(at, step, mask, PARTS: tl.constexpr):
    """Numbers in float32, added up from their parts in order."""
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(at + part * step, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _turned(x, y, angles):
    """Both halves, rotated."""
    low_cos, low_sin, high_cos, high_sin = angles
    return x * low_cos + y * low_sin, y * high_cos + x * high_sin


@triton.jit
def _turn_heads(
    at, to, step, head, angles, HEADS: tl.constexpr, R: tl.constexpr, T: tl.constexpr, QUERY_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The rotated ends of some query heads of a node."""
    half = tl.arange(0, T // 2)[None, :]
    is_head = (head < HEADS)[:, None] & (half >= 0)
    first = at + head[:, None] * QUERY_DIM + QUERY_DIM - T + half
    x, y = summed(first, step, is_head, PARTS), summed(first + T // 2, step, is_head, PARTS)
    x, y = _turned(x, y, angles)
    out = to + head[:, None] * (R + T) + R + half
    tl.store(out, x.to(to.dtype.element_ty), mask=is_head)
    tl.store(out + T // 2, y.to(to.dtype.element_ty), mask=is_head)


@triton.jit
def _write_latent(
    at, to, step, norm, bias, eps, angles, R: tl.constexpr, T: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """The normalised latent of a node, and its rotated key."""
    half, dims = tl.arange(0, T // 2), tl.arange(0, R)
    c = summed(at + dims, step, dims >= 0, PARTS)
    x = summed(at + R + half, step, half >= 0, PARTS)
    y = summed(at + R + T // 2 + half, step, half >= 0, PARTS)
    if HAS_BIAS:
        c += tl.load(bias + dims).to(tl.float32)
        x += tl.load(bias + R + half).to(tl.float32)
        y += tl.load(bias + R + T // 2 + half).to(tl.float32)
    c *= tl.rsqrt(tl.sum(c * c, 0) / R + eps) * tl.load(norm + dims).to(tl.float32)
    x, y = _turned(x, y, angles)
    tl.store(to + dims, c.to(to.dtype.element_ty))
    tl.store(to + R + half, x.to(to.dtype.element_ty))
    tl.store(to + R + T // 2 + half, y.to(to.dtype.element_ty))


@triton.jit(do_not_specialize=["num_nodes", "start", "num_pages"])
def _write_latents(
    down, heads, queries, memory, lengths, places, depths, cos, sin, norm, bias,
    down_width, down_step, head_width, head_step, capacity, num_pages, eps, num_nodes, start,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, T: tl.constexpr, QUERY_DIM: tl.constexpr,
    DOWN_PARTS: tl.constexpr, HEAD_PARTS: tl.constexpr, CHAIN: tl.constexpr, HAS_BIAS: tl.constexpr, PAGED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    flat = tl.program_id(1).to(tl.int64)
    row = tl.program_id(1) // num_nodes
    node = tl.program_id(1) % num_nodes
    length = tl.load(lengths + row)  # like all but the sums, written long before the kernel in front
    angle = (length + (start + node if CHAIN else tl.load(depths + flat))) * T + tl.arange(0, T // 2)
    low_cos, low_sin = tl.load(cos + angle).to(tl.float32), tl.load(sin + angle).to(tl.float32)
    high_cos, high_sin = tl.load(cos + angle + T // 2).to(tl.float32), tl.load(sin + angle + T // 2).to(tl.float32)
    begin(EARLY)
    if tl.program_id(0) == 0:
        to = memory + slots_at(places, row, 0, length + start + node, True, capacity, num_pages, 1, PAGED) * (R + T)
        _write_latent(
            down + flat * down_width + down_width - (R + T), to, down_step, norm, bias, eps,
            (low_cos, low_sin, high_cos, high_sin), R, T, DOWN_PARTS, HAS_BIAS,
        )  # fmt: skip
    else:
        _turn_heads(
            heads + flat * head_width, queries + flat * HEADS * (R + T), head_step,
            (tl.program_id(0) - 1) * BLOCK + tl.arange(0, BLOCK),
            (low_cos[None, :], low_sin[None, :], high_cos[None, :], high_sin[None, :]), HEADS, R, T, QUERY_DIM, HEAD_PARTS,
        )  # fmt: skip
    end(EARLY)
