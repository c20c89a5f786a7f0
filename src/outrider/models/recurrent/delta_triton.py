"""The tree scan of a gated delta layer on a GPU, in two kernels. ``delta_scan.py``, the oracle, has the formulas.

The first kernel runs the convolution along the ancestors of a node, makes keys and queries of length 1, and writes the node's
decay and keys to the log. In the second a program takes a part of one head's values. It goes through the nodes block by block:
what they know from the state, the log and the blocks before, then the triangular system within the block, row by row, then
what they read. Values of a head do not depend on each other, so its parts are programs of their own.
"""

# ruff: noqa: N803, N806 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import final

import triton
import triton.language as tl
from torch import Tensor

from outrider.cache.recurrent import Columns
from outrider.cache.replay import ScanShape
from outrider.models.recurrent.delta_scan import DeltaNumbers
from outrider.models.recurrent.layers import LayerScan, RecurrentPass
from outrider.models.recurrent.scan_kernels import BLOCK, at_nodes, convolved, fade_between, logged_decay, softplus

_PART = 32
"""Values of a head per program of the second kernel."""


@final
class TritonDelta(LayerScan):
    """One layer's scan, with sums in float32."""

    def __init__(self, shape: ScanShape, numbers: DeltaNumbers) -> None:
        self._shape, self._numbers = shape, numbers

    def __call__(self, projected: Tensor, layer: int, step: RecurrentPass) -> Tensor:
        columns, shape = step.cache.columns(layer), self._shape
        projected = projected.contiguous()
        mixed = projected.new_empty(step.batch_size, step.num_nodes, shape.conv_size)
        self._convolve(projected, mixed, columns, step)
        out = projected.new_empty(step.batch_size, step.num_nodes, shape.num_heads * shape.head_dim)
        self._read(projected, mixed, out, columns, step)
        return out

    def _convolve(self, projected: Tensor, mixed: Tensor, columns: Columns, step: RecurrentPass) -> None:
        shape, numbers, log = self._shape, self._numbers, columns.log
        heads_each = shape.num_heads // shape.num_groups
        _delta_convolve[(step.batch_size * step.num_nodes, shape.num_groups)](
            projected,
            log,
            mixed,
            mixed if step.tree.is_chain else step.log_windows,
            numbers.weight,
            numbers.rate,
            numbers.time_bias,
            step.num_nodes,
            columns.end + step.start,
            log.stride(0),
            log.stride(1),
            projected.shape[2],
            HEADS=shape.num_heads,
            SIZE=shape.head_dim,
            STATE=shape.state_size,
            GROUPS=shape.num_groups,
            WINDOW=shape.conv_len,
            IS_CHAIN=step.tree.is_chain,
            STATE_BLOCK=triton.next_power_of_2(shape.state_size),
            VALUE_BLOCK=triton.next_power_of_2(heads_each * shape.head_dim),
            HEAD_BLOCK=triton.next_power_of_2(heads_each),
            num_warps=4,
        )

    def _read(self, projected: Tensor, mixed: Tensor, out: Tensor, columns: Columns, step: RecurrentPass) -> None:
        shape, log, tree = self._shape, columns.log, step.tree
        part = min(_PART, max(16, triton.next_power_of_2(shape.head_dim)))
        _delta_read[(triton.cdiv(shape.head_dim, part), shape.num_heads, step.batch_size)](
            projected,
            mixed,
            log,
            columns.state,
            mixed if tree.is_chain else step.seen,
            out,
            step.num_nodes,
            tree.num_nodes,
            columns.begin,
            columns.end,
            log.stride(0),
            log.stride(1),
            projected.shape[2],
            HEADS=shape.num_heads,
            SIZE=shape.head_dim,
            STATE=shape.state_size,
            GROUPS=shape.num_groups,
            IS_CHAIN=tree.is_chain,
            BLOCK=BLOCK,
            PART=part,
            STATE_BLOCK=max(16, triton.next_power_of_2(shape.state_size)),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["num_nodes", "first", "row_stride"])
def _delta_convolve(
    projected, log, mixed, windows, weight, rate, time_bias, num_nodes, first, row_stride, column_stride, width,
    HEADS: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr, GROUPS: tl.constexpr, WINDOW: tl.constexpr,
    IS_CHAIN: tl.constexpr, STATE_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    """One group of channels of node ``place`` of all rows: query, key, and the values of its heads."""
    INNER: tl.constexpr = HEADS * SIZE
    KEYS: tl.constexpr = GROUPS * STATE
    CHANNELS: tl.constexpr = INNER + 2 * KEYS
    EACH: tl.constexpr = HEADS // GROUPS
    place, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, node = place // num_nodes, place % num_nodes
    log += row * row_stride
    inputs = projected + row * num_nodes * width
    own, new = log + (first + node) * column_stride, inputs + node * width
    key, value, head = tl.arange(0, STATE_BLOCK), tl.arange(0, VALUE_BLOCK), tl.arange(0, HEAD_BLOCK)
    is_key, is_value, is_head = key < STATE, value < EACH * SIZE, head < EACH
    for which in tl.static_range(2):  # queries, then keys
        channel = which * KEYS + group * STATE + key
        total = convolved(inputs, log, windows, weight, channel, is_key, place, node, first, column_stride, width,
                          WINDOW, IS_CHAIN, STATE_BLOCK)  # fmt: skip
        vector = tl.where(is_key, total / (1.0 + tl.exp(-total)), 0.0)
        vector = vector / tl.sqrt(tl.sum(vector * vector, 0) + 1e-6)
        tl.store(own + channel, tl.load(new + channel, is_key, 0.0).to(tl.float32), is_key)
        if which == 0:
            tl.store(mixed + place * CHANNELS + channel, vector / tl.sqrt(STATE * 1.0), is_key)
        else:
            tl.store(own + CHANNELS + HEADS + group * STATE + key, vector, is_key)
    channel = 2 * KEYS + group * EACH * SIZE + value
    total = convolved(inputs, log, windows, weight, channel, is_value, place, node, first, column_stride, width,
                      WINDOW, IS_CHAIN, VALUE_BLOCK)  # fmt: skip
    tl.store(own + channel, tl.load(new + channel, is_value, 0.0).to(tl.float32), is_value)
    tl.store(mixed + place * CHANNELS + channel, total / (1.0 + tl.exp(-total)), is_value)
    head += group * EACH
    time = tl.load(new + CHANNELS + INNER + HEADS + head, is_head, 0.0).to(tl.float32)
    decay = tl.load(rate + head, is_head, 0.0) * softplus(time + tl.load(time_bias + head, is_head, 0.0))
    tl.store(own + CHANNELS + head, decay, is_head)


@triton.jit
def _found(
    query, keys, found, known, log, column, valid, fade, group, head, column_stride, part, key,
    HEADS: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """[nodes, PART] with what queries and keys [nodes, STATE] find in a block of columns, faded."""
    at = log + column * column_stride + CHANNELS + HEADS
    there = tl.load(at[None, :] + group * STATE + key[:, None], (key < STATE)[:, None] & valid[None, :], 0.0)
    values = tl.load(at[:, None] + KEYS + head * SIZE + part[None, :], valid[:, None] & (part < SIZE)[None, :], 0.0)
    found += tl.dot(tl.dot(query, there, input_precision="ieee") * fade, values, input_precision="ieee")
    known += tl.dot(tl.dot(keys, there, input_precision="ieee") * fade, values, input_precision="ieee")
    return found, known


@triton.jit
def _solved(overlap, wanted, place, BLOCK: tl.constexpr):
    """X of (1 + overlap) X = wanted [BLOCK, PART]; ``overlap`` is 0 on and above its diagonal."""
    for row in range(1, BLOCK):
        is_row = (place == row)[:, None]
        factors = tl.sum(tl.where(is_row, overlap, 0.0), 0)
        taken = tl.sum(factors[:, None] * wanted, 0)
        wanted = tl.where(is_row, wanted - taken[None, :], wanted)
    return wanted


@triton.jit(do_not_specialize=["num_nodes", "total_nodes", "begin", "end", "row_stride"])
def _delta_read(
    projected, mixed, log, state, seen, out, num_nodes, total_nodes, begin, end, row_stride, column_stride, width,
    HEADS: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr, GROUPS: tl.constexpr, IS_CHAIN: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr, STATE_BLOCK: tl.constexpr,
):  # fmt: skip
    """All nodes of one row, in a part of one head. What a block writes, later blocks read: threads meet in between."""
    INNER: tl.constexpr = HEADS * SIZE
    KEYS: tl.constexpr = GROUPS * STATE
    CHANNELS: tl.constexpr = INNER + 2 * KEYS
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    group, start = head // (HEADS // GROUPS), total_nodes - num_nodes
    place, key = tl.arange(0, BLOCK), tl.arange(0, STATE_BLOCK)
    part = tl.program_id(0) * PART + tl.arange(0, PART)
    is_part, is_key = part < SIZE, key < STATE
    log += row * row_stride
    seen += row * total_nodes * total_nodes
    nodes = log + end * column_stride + CHANNELS + head
    before = logged_decay(log + CHANNELS + head, begin, end, column_stride, BLOCK)
    state += (row * HEADS + head) * SIZE * STATE
    held = tl.load(state + part[None, :] * STATE + key[:, None], is_key[:, None] & is_part[None, :], 0.0)
    for block in range(0, num_nodes, BLOCK):
        new = block + place
        node, is_new = start + new, new < num_nodes
        at_mixed = mixed + (row * num_nodes + new) * CHANNELS
        own = log + (end + node) * column_stride + CHANNELS + HEADS
        query = tl.load(at_mixed[:, None] + group * STATE + key[None, :], is_new[:, None] & is_key[None, :], 0.0)
        keys = tl.load(own[:, None] + group * STATE + key[None, :], is_new[:, None] & is_key[None, :], 0.0)
        now = before + at_nodes(nodes, seen, node, total_nodes, column_stride, IS_CHAIN, BLOCK)
        left_of_state = tl.exp(now.to(tl.float32))[:, None]
        found = tl.dot(query, held, input_precision="ieee") * left_of_state
        known = tl.dot(keys, held, input_precision="ieee") * left_of_state
        passed = before - before
        for first in range(begin, end, BLOCK):
            column = first + place
            decay = tl.load(log + column * column_stride + CHANNELS + head, column < end, 0.0).to(tl.float64)
            left = now[:, None] - (passed + tl.cumsum(decay, 0))[None, :]
            passed += tl.sum(decay, 0)
            fade = tl.where((column < end)[None, :], tl.exp(left.to(tl.float32)), 0.0)
            found, known = _found(query, keys, found, known, log, column, column < end, fade, group, head, column_stride,
                                  part, key, HEADS, SIZE, STATE, KEYS, CHANNELS)  # fmt: skip
        for first in range(0, start + block, BLOCK):
            other = first + place
            is_other = other < start + block
            there = before + at_nodes(nodes, seen, other, total_nodes, column_stride, IS_CHAIN, BLOCK)
            fade = fade_between(seen, node, other, is_new[:, None] & is_other[None, :], now, there, total_nodes, IS_CHAIN)
            found, known = _found(query, keys, found, known, log, end + other, is_other, fade, group, head, column_stride,
                                  part, key, HEADS, SIZE, STATE, KEYS, CHANNELS)  # fmt: skip
        fade = fade_between(seen, node, node, is_new[:, None] & is_new[None, :], now, now, total_nodes, IS_CHAIN)
        at_value = 2 * KEYS + head * SIZE + part
        value = tl.load(at_mixed[:, None] + at_value[None, :], is_new[:, None] & is_part[None, :], 0.0)
        rate = tl.load(projected + (row * num_nodes + new) * width + CHANNELS + INNER + head, is_new, 0.0)
        rate = 1.0 / (1.0 + tl.exp(-rate.to(tl.float32)))
        overlap = tl.dot(keys, tl.trans(keys), input_precision="ieee") * fade * rate[:, None]
        overlap = tl.where(place[None, :] < place[:, None], overlap, 0.0)
        written = _solved(overlap, (value - known) * rate[:, None], place, BLOCK)
        kept = is_new[:, None] & is_part[None, :]
        tl.store(own[:, None] + KEYS + head * SIZE + part[None, :], written, kept)
        found += tl.dot(tl.dot(query, tl.trans(keys), input_precision="ieee") * fade, written, input_precision="ieee")
        tl.store(out + ((row * num_nodes + new) * INNER)[:, None] + head * SIZE + part[None, :], found, kept)
        tl.debug_barrier()
