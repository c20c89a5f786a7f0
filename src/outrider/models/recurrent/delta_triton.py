"""The tree scan of a gated delta layer on a GPU, in two kernels. ``delta_scan.py``, the oracle, has the formulas.

The first kernel runs the convolution along the ancestors of a node, makes keys and queries of length 1, and writes the node's
decay and keys to the log. In the second a program takes a part of one head's values. It goes through the nodes block by block.
First come the contributions of the state, the log and earlier blocks, then the triangular system within the block, row by row,
then the outputs. Values of a head do not depend on each other, so its parts are programs of their own.
"""

# ruff: noqa: N803, N806 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import final

import triton
import triton.language as tl
from torch import Tensor

from outrider.cache.recurrent import StateColumns
from outrider.models.recurrent.delta_scan import DeltaNumbers
from outrider.models.recurrent.layers import RecurrentPass
from outrider.models.recurrent.scan_kernels import BLOCK, at_nodes, convolved, fade_between, logged_decay, softplus
from outrider.models.recurrent.triton_scan import TritonScan

_PART = 32
"""Values of a head per program of the second kernel."""
_PIECE = 32
"""Dimensions of a key that are multiplied at once. A thread holds all of them, and 128 would not fit into its registers."""


@final
class TritonDelta(TritonScan[DeltaNumbers]):
    """The gated delta rule."""

    def _convolve(self, projected: Tensor, mixed: Tensor, columns: StateColumns, step: RecurrentPass) -> None:
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
            *self._written(columns, step),
            projected.shape[2],
            **self._sizes(step),
            **self._states(),
            WINDOW=shape.conv_len,
            STATE_BLOCK=triton.next_power_of_2(shape.state_size),
            VALUE_BLOCK=triton.next_power_of_2(heads_each * shape.head_dim),
            HEAD_BLOCK=triton.next_power_of_2(heads_each),
            num_warps=4,
        )

    def _read(self, inputs: tuple[Tensor, Tensor], out: Tensor, columns: StateColumns, step: RecurrentPass) -> None:
        shape, log, tree, (projected, mixed) = self._shape, columns.log, step.tree, inputs
        part = min(_PART, max(16, triton.next_power_of_2(shape.head_dim)))
        _delta_read[(triton.cdiv(shape.head_dim, part), shape.num_heads, step.batch_size)](
            projected,
            mixed,
            log,
            columns.state,
            mixed if tree.is_chain else step.seen,
            out,
            *self._seen(columns, step),
            projected.shape[2],
            **self._sizes(step),
            **self._states(),
            BLOCK=BLOCK,
            PART=part,
            PIECE=_PIECE,
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
def _products(
    query, keys, there, is_new, valid, STATE: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """[ROWS, WIDTH] each: queries and keys times the vectors that ``there`` [WIDTH] points to, all of STATE numbers."""
    by_query, by_key = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for begin in range(0, STATE, PIECE):
        number = begin + tl.arange(0, PIECE)
        is_number = number < STATE
        vectors = tl.load(there[None, :] + number[:, None], is_number[:, None] & valid[None, :], 0.0)
        mask = is_new[:, None] & is_number[None, :]
        by_query = tl.dot(tl.load(query[:, None] + number[None, :], mask, 0.0), vectors, by_query, input_precision="ieee")
        by_key = tl.dot(tl.load(keys[:, None] + number[None, :], mask, 0.0), vectors, by_key, input_precision="ieee")
    return by_query, by_key


@triton.jit
def _found(
    query, keys, found, known, at, is_new, valid, fade, values,
    STATE: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[nodes, PART] with what queries and keys find in a block of columns, faded: keys are ``at`` [BLOCK], with ``values``."""
    by_query, by_key = _products(query, keys, at, is_new, valid, STATE, PIECE, BLOCK, BLOCK)
    found = tl.dot(by_query * fade, values, found, input_precision="ieee")
    known = tl.dot(by_key * fade, values, known, input_precision="ieee")
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
    BLOCK: tl.constexpr, PART: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """All nodes of one row, in a part of one head. Threads meet between blocks, as later ones read earlier ones."""
    INNER: tl.constexpr = HEADS * SIZE
    KEYS: tl.constexpr = GROUPS * STATE
    CHANNELS: tl.constexpr = INNER + 2 * KEYS
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    group, start = head // (HEADS // GROUPS), total_nodes - num_nodes
    place, part = tl.arange(0, BLOCK), tl.program_id(0) * PART + tl.arange(0, PART)
    is_part = part < SIZE
    log, seen = log + row * row_stride, seen + row * total_nodes * total_nodes
    nodes = log + end * column_stride + CHANNELS + head
    before = logged_decay(log + CHANNELS + head, begin, end, column_stride, BLOCK)
    held = state + (row * HEADS + head) * SIZE * STATE + part * STATE
    log_keys, log_values = log + CHANNELS + HEADS + group * STATE, log + CHANNELS + HEADS + KEYS + head * SIZE + part[None, :]
    for block in range(0, num_nodes, BLOCK):
        new = block + place
        node, is_new = start + new, new < num_nodes
        at_mixed, own = mixed + (row * num_nodes + new) * CHANNELS, (end + node) * column_stride
        query, keys = at_mixed + group * STATE, log_keys + own
        now = before + at_nodes(nodes, seen, node, total_nodes, column_stride, IS_CHAIN, BLOCK)
        left = tl.exp(now.to(tl.float32))[:, None]
        found, known = _products(query, keys, held, is_new, is_part, STATE, PIECE, BLOCK, PART)
        found, known = found * left, known * left
        passed = before - before
        for first in range(begin, end, BLOCK):
            column = first + place
            is_there = column < end
            decay = tl.load(log + column * column_stride + CHANNELS + head, is_there, 0.0).to(tl.float64)
            fade = tl.exp((now[:, None] - (passed + tl.cumsum(decay, 0))[None, :]).to(tl.float32))
            fade = tl.where(is_there[None, :], fade, 0.0)
            passed += tl.sum(decay, 0)
            there = column * column_stride
            values = tl.load(log_values + there[:, None], is_there[:, None] & is_part[None, :], 0.0)
            found, known = _found(query, keys, found, known, log_keys + there, is_new, is_there, fade, values,
                                  STATE, PIECE, BLOCK)  # fmt: skip
        for first in range(0, start + block, BLOCK):
            other = first + place
            is_other = other < start + block
            then = before + at_nodes(nodes, seen, other, total_nodes, column_stride, IS_CHAIN, BLOCK)
            fade = fade_between(seen, node, other, is_new[:, None] & is_other[None, :], now, then, total_nodes, IS_CHAIN)
            there = (end + other) * column_stride
            values = tl.load(log_values + there[:, None], is_other[:, None] & is_part[None, :], 0.0)
            found, known = _found(query, keys, found, known, log_keys + there, is_new, is_other, fade, values,
                                  STATE, PIECE, BLOCK)  # fmt: skip
        fade = fade_between(seen, node, node, is_new[:, None] & is_new[None, :], now, now, total_nodes, IS_CHAIN)
        reads, overlap = _products(query, keys, keys, is_new, is_new, STATE, PIECE, BLOCK, BLOCK)
        kept = is_new[:, None] & is_part[None, :]
        value = tl.load(at_mixed[:, None] + (2 * KEYS + head * SIZE + part)[None, :], kept, 0.0)
        rate = tl.load(projected + (row * num_nodes + new) * width + CHANNELS + INNER + head, is_new, 0.0)
        rate = 1.0 / (1.0 + tl.exp(-rate.to(tl.float32)))
        overlap = tl.where(place[None, :] < place[:, None], overlap * fade * rate[:, None], 0.0)
        written = _solved(overlap, (value - known) * rate[:, None], place, BLOCK)
        tl.store(log_values + own[:, None], written, kept)
        found = tl.dot(reads * fade, written, found, input_precision="ieee")
        tl.store(out + ((row * num_nodes + new) * INNER)[:, None] + head * SIZE + part[None, :], found, kept)
        tl.debug_barrier()
