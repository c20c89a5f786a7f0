"""The tree scan of a Mamba-2 layer on a GPU, in two kernels. ``mamba_scan.py``, the oracle, has the formulas.

The first kernel runs the convolution along the ancestors of a node and writes the node's step to the log. The second one reads.
A program takes a few nodes of one head and multiplies their queries with the state. Then it multiplies them with the keys of
the log and of all nodes, block by block, under the mask of the tree. Decays are summed in float64. The state of a node is never
computed.
"""

# ruff: noqa: N803, N806 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import final

import triton
import triton.language as tl
from torch import Tensor

from outrider.cache.recurrent import StateColumns
from outrider.models.recurrent.layers import RecurrentPass
from outrider.models.recurrent.mamba_scan import MambaNumbers
from outrider.models.recurrent.scan_kernels import BLOCK, at_nodes, convolved, fade_between, logged_decay, softplus
from outrider.models.recurrent.triton_scan import TritonScan

_CHANNELS = 256
"""Channels of a node per program of the first kernel."""


@final
class TritonMamba(TritonScan[MambaNumbers]):
    """Mamba-2."""

    def _convolve(self, projected: Tensor, mixed: Tensor, columns: StateColumns, step: RecurrentPass) -> None:
        shape, numbers, log = self._shape, self._numbers, columns.log
        windows = mixed if step.tree.is_chain else step.log_windows
        _mamba_convolve[(step.batch_size * step.num_nodes, triton.cdiv(shape.conv_size, _CHANNELS))](
            projected,
            log,
            mixed,
            windows,
            numbers.weight,
            mixed if numbers.bias is None else numbers.bias,
            numbers.rate,
            numbers.time_bias,
            *self._written(columns, step),
            projected.shape[2],
            *numbers.limit,
            **self._sizes(step),
            KEYS=shape.num_groups * shape.state_size,
            WINDOW=shape.conv_len,
            HAS_BIAS=numbers.bias is not None,
            BLOCK=_CHANNELS,
            HEAD_BLOCK=triton.next_power_of_2(shape.num_heads),
            num_warps=4,
        )

    def _read(self, inputs: tuple[Tensor, Tensor], out: Tensor, columns: StateColumns, step: RecurrentPass) -> None:
        shape, log, tree, (_, mixed) = self._shape, columns.log, step.tree, inputs
        seen = mixed if tree.is_chain else step.seen
        _mamba_read[(triton.cdiv(step.num_nodes, BLOCK), shape.num_heads, step.batch_size)](
            mixed,
            log,
            columns.state,
            seen,
            self._numbers.skip,
            out,
            *self._seen(columns, step),
            **self._sizes(step),
            **self._states(),
            BLOCK=BLOCK,
            SIZE_BLOCK=max(16, triton.next_power_of_2(shape.head_dim)),
            STATE_BLOCK=max(16, triton.next_power_of_2(shape.state_size)),
            num_warps=4,
        )


@triton.jit
def _time(times, bias, head, valid, low, high):
    """The time steps of heads."""
    moved = softplus(tl.load(times + head, valid, 0.0).to(tl.float32) + tl.load(bias + head, valid, 0.0))
    return tl.minimum(tl.maximum(moved, low), high)


@triton.jit(do_not_specialize=["num_nodes", "first", "row_stride"])
def _mamba_convolve(
    projected, log, mixed, windows, weight, bias, rate, time_bias, num_nodes, first, row_stride, column_stride, width,
    low, high, HEADS: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_CHAIN: tl.constexpr, BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    """Node ``place`` of all rows, and a block of its channels. ``first`` is the column of the first node that is computed."""
    INNER: tl.constexpr = HEADS * SIZE
    CHANNELS: tl.constexpr = INNER + 2 * KEYS
    place = tl.program_id(0).to(tl.int64)
    row, node = place // num_nodes, place % num_nodes
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = channel < CHANNELS
    log += row * row_stride
    inputs = projected + row * num_nodes * width + INNER
    own = log + (first + node) * column_stride
    total = convolved(inputs, log, windows, weight, channel, valid, place, node, first, column_stride, width,
                      WINDOW, IS_CHAIN, BLOCK)  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + channel, valid, 0.0)
    found = total / (1.0 + tl.exp(-total))
    tl.store(own + channel, tl.load(inputs + node * width + channel, valid, 0.0).to(tl.float32), valid)
    tl.store(mixed + place * CHANNELS + channel, found, valid)
    is_value = channel < INNER
    times = inputs + node * width + CHANNELS
    time = _time(times, time_bias, channel // SIZE, is_value, low, high)
    tl.store(own + CHANNELS + HEADS + KEYS + channel, found * time, is_value)
    tl.store(own + CHANNELS + HEADS + channel - INNER, found, (channel >= INNER) & (channel < INNER + KEYS))
    if tl.program_id(1) == 0:
        head = tl.arange(0, HEAD_BLOCK)
        clock = _time(times, time_bias, head, head < HEADS, low, high)
        tl.store(own + CHANNELS + head, clock * tl.load(rate + head, head < HEADS, 0.0), head < HEADS)


@triton.jit(do_not_specialize=["num_nodes", "total_nodes", "begin", "end", "row_stride"])
def _mamba_read(
    mixed, log, state, seen, skip, out, num_nodes, total_nodes, begin, end, row_stride, column_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr, GROUPS: tl.constexpr, IS_CHAIN: tl.constexpr,
    BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, STATE_BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of nodes of one row, in one head."""
    INNER: tl.constexpr = HEADS * SIZE
    KEYS: tl.constexpr = GROUPS * STATE
    CHANNELS: tl.constexpr = INNER + 2 * KEYS
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = head // (HEADS // GROUPS)
    new = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    node = total_nodes - num_nodes + new
    part, key, place = tl.arange(0, SIZE_BLOCK), tl.arange(0, STATE_BLOCK), tl.arange(0, BLOCK)
    log += row * row_stride
    seen += row * total_nodes * total_nodes
    mixed += (row * num_nodes + new) * CHANNELS
    is_new, is_part, is_key = new < num_nodes, part < SIZE, key < STATE
    query_at = mixed[:, None] + INNER + KEYS + group * STATE + key[None, :]
    query = tl.load(query_at, is_new[:, None] & is_key[None, :], 0.0)
    nodes = log + end * column_stride + CHANNELS + head
    before = logged_decay(log + CHANNELS + head, begin, end, column_stride, BLOCK)
    now = before + at_nodes(nodes, seen, node, total_nodes, column_stride, IS_CHAIN, BLOCK)
    state += (row * HEADS + head) * SIZE * STATE
    held = tl.load(state + part[None, :] * STATE + key[:, None], is_key[:, None] & is_part[None, :], 0.0)
    found = tl.dot(query, held, input_precision="ieee") * tl.exp(now.to(tl.float32))[:, None]
    passed = before - before
    for first in range(begin, end, BLOCK):
        column = first + place
        decay = tl.load(log + column * column_stride + CHANNELS + head, column < end, 0.0).to(tl.float64)
        left = now[:, None] - (passed + tl.cumsum(decay, 0))[None, :]
        passed += tl.sum(decay, 0)
        fade = tl.where((column < end)[None, :], tl.exp(left.to(tl.float32)), 0.0)
        found = _add(found, query, log, column, column < end, fade, group, head, column_stride, part, key,
                     HEADS, SIZE, STATE, KEYS, CHANNELS)  # fmt: skip
    for first in range(0, total_nodes, BLOCK):
        other = first + place
        there = before + at_nodes(nodes, seen, other, total_nodes, column_stride, IS_CHAIN, BLOCK)
        inside = is_new[:, None] & (other < total_nodes)[None, :]
        fade = fade_between(seen, node, other, inside, now, there, total_nodes, IS_CHAIN)
        found = _add(found, query, log, end + other, other < total_nodes, fade, group, head, column_stride, part, key,
                     HEADS, SIZE, STATE, KEYS, CHANNELS)  # fmt: skip
    kept = is_new[:, None] & is_part[None, :]
    value = tl.load(mixed[:, None] + head * SIZE + part[None, :], kept, 0.0)
    to = out + ((row * num_nodes + new) * INNER)[:, None] + head * SIZE + part[None, :]
    tl.store(to, found + value * tl.load(skip + head), kept)


@triton.jit
def _add(
    found, query, log, column, valid, fade, group, head, column_stride, part, key,
    HEADS: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """``found`` [nodes, SIZE] with what the nodes read from a block of columns, faded."""
    at = log + column * column_stride + CHANNELS + HEADS
    keys = tl.load(at[None, :] + group * STATE + key[:, None], (key < STATE)[:, None] & valid[None, :], 0.0)
    score = tl.dot(query, keys, input_precision="ieee") * fade
    values = tl.load(at[:, None] + KEYS + head * SIZE + part[None, :], valid[:, None] & (part < SIZE)[None, :], 0.0)
    return found + tl.dot(score, values, input_precision="ieee")
