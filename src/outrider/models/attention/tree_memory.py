"""Tiles of keys and values in memory, stored in the model's type or as 8-bit codes with scales.

Codes are converted to the type of the queries, which holds each of them exactly. A scale belongs to a token and a key head, so
it can multiply a score, or a softmax weight. That is one product per key instead of one per dimension.

    s = (q . codes) scale_k,      o = sum (p scale_v) codes          (``core/key_storage.py``)
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from outrider.cache.page_pool import LayerPages
from outrider.models.attention.tree_tiles import KeySplit


def cut_of(cut: KeySplit, memory: LayerPages) -> KeySplit:
    """The cut for memory that holds codes. Codes are converted in registers, where small tiles may add products in another
    order than large ones, so every tile has the rows of a large one. The kernel for many queries reads no codes."""
    if memory.key_scales is None:
        return cut
    if cut.side_by_side:
        return replace(cut, side_by_side=False, block_queries=64, num_stages=3)
    return replace(cut, tail_queries=max(cut.tail_queries, 64))


def kernel_memory(memory: LayerPages) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values and their scales as kernels take them. Missing scales are replaced by any tensor."""
    keys, values, key_scales, value_scales, _ = memory
    return keys, values, keys if key_scales is None else key_scales, values if value_scales is None else value_scales


@triton.jit
def load_tile(memory, at, inside, D: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr):
    """Keys [D, BK], values [BK, D] and their scales at places in memory."""
    keys, values, key_scales, value_scales = memory
    dims = tl.arange(0, D)
    key_at, value_at = keys + at[None, :] * D + dims[:, None], values + at[:, None] * D + dims[None, :]
    if MASKED:
        k = tl.load(key_at, mask=inside[None, :], other=0.0)
        v = tl.load(value_at, mask=inside[:, None], other=0.0)
    else:
        k, v = tl.load(key_at), tl.load(value_at)
    key_share, value_share = load_scales(key_scales, value_scales, at, inside, MASKED, SCALED)
    return k, v, key_share, value_share


@triton.jit
def load_scales(key_scales, value_scales, at, inside, MASKED: tl.constexpr, SCALED: tl.constexpr):
    """[BK] scales of keys and of values; ones if numbers are stored as they are."""
    if not SCALED:
        key_share, value_share = 1.0, 1.0
    elif MASKED:
        key_share = tl.load(key_scales + at, mask=inside, other=0.0)
        value_share = tl.load(value_scales + at, mask=inside, other=0.0)
    else:
        key_share, value_share = tl.load(key_scales + at), tl.load(value_scales + at)
    return key_share, value_share
