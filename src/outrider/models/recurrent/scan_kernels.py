"""Common parts of the kernels of recurrent layers: the convolution along ancestors, decays along paths, masks of columns."""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 16
"""Nodes, and columns, per step of a kernel that reads."""


@triton.jit
def softplus(x):  # log(1 + e^x); the quotient gives back what 1 + e^x loses
    small = tl.exp(tl.minimum(x, 20.0))
    rounded = 1.0 + small
    lost = tl.where(rounded == 1.0, 1.0, small / tl.where(rounded == 1.0, 1.0, rounded - 1.0))
    return tl.where(x > 20.0, x, tl.where(rounded == 1.0, small, tl.log(rounded) * lost))


@triton.jit
def convolved(
    inputs, log, windows, weight, channel, valid, place, node, first, column_stride, width,
    WINDOW: tl.constexpr, IS_CHAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[BLOCK] channels of a node, mixed with those of its ancestors. ``first`` is the column of the first new node; ``inputs``
    has the new ones, ``log`` those before."""
    total = tl.zeros((BLOCK,), tl.float32)
    for past in tl.static_range(WINDOW):
        column = first + node - (WINDOW - 1 - past)
        if not IS_CHAIN:
            column = tl.load(windows + place * WINDOW + past)
        is_new = column >= first
        new = tl.load(inputs + (column - first) * width + channel, valid & is_new, 0.0)
        old = tl.load(log + column * column_stride + channel, valid & (column < first), 0.0)
        total += (new.to(tl.float32) + old) * tl.load(weight + channel * WINDOW + past, valid, 0.0)
    return total


@triton.jit
def on_path(seen, node, other, inside, total_nodes, IS_CHAIN: tl.constexpr):
    """[nodes, others] whether one is an ancestor of the other, or the node itself."""
    if IS_CHAIN:
        found = inside & (other[None, :] <= node[:, None])
    else:
        found = tl.load(seen + node[:, None] * total_nodes + other[None, :], inside, 0) != 0
    return found


@triton.jit
def at_nodes(decays, seen, node, total_nodes, column_stride, IS_CHAIN: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK] float64 sums of the decays of the ancestors of ``node`` [BLOCK], itself included."""
    total = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, total_nodes, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        decay = tl.load(decays + other * column_stride, other < total_nodes, 0.0).to(tl.float64)
        inside = (node[:, None] < total_nodes) & (other[None, :] < total_nodes)
        passed = on_path(seen, node, other, inside, total_nodes, IS_CHAIN)
        total += tl.sum(tl.where(passed, decay[None, :], 0.0), 1)
    return total


@triton.jit
def logged_decay(log, begin, end, column_stride, BLOCK: tl.constexpr):
    """The float64 sum of one head's decays over the log; ``log`` is the head's in column 0."""
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(begin, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total += tl.load(log + column * column_stride, column < end, 0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def fade_between(seen, node, other, inside, now, there, total_nodes, IS_CHAIN: tl.constexpr):
    """[nodes, others] how much of one is left at the other; 0 where it is no ancestor."""
    passed_by = on_path(seen, node, other, inside, total_nodes, IS_CHAIN)
    left = tl.where(passed_by, now[:, None] - there[None, :], 0.0)
    return tl.where(passed_by, tl.exp(left.to(tl.float32)), 0.0)
