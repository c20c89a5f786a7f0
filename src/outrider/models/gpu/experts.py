"""A mixture of experts on a GPU: one grouped product over the experts that the nodes of a pass chose.

A pair is a node with one of its k experts. Pairs of an expert stand together in blocks of up to BM, and a program multiplies
some outputs of one expert for one block: weights are read once per block, those of experts that nobody chose not at all.
Nothing waits for the host, so a pass can be captured: there are as many blocks as there could be, and empty ones end at once.

    gate_up:  g_p = activation(gate_e x) * up_e x        p = (node, expert e)
    down:     y[slot, node] = share_p down_e g_p         parts that the next norm adds up in the order of the slots

Every output of a pair is one sum in the order of its inputs, so it does not depend on what else is in the pass. The oracle is
``models/experts.py``.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.decoder_weights import LayerWeights
from outrider.models.features import Experts
from outrider.models.gpu import launch
from outrider.models.gpu.finish import ACTIVATIONS, Finish
from outrider.models.gpu.launch import begin, end
from outrider.models.gpu.limits import stages_that_fit
from outrider.models.gpu.products import multiply
from outrider.models.gpu.router import route
from outrider.models.gpu.skinny import activated, product
from outrider.models.gpu.tile import Tile
from outrider.models.gpu.tiles import MOST_ROWS, Kind

_MOST_PAIRS = 512
"""Pairs that one program puts into blocks; more are sorted by PyTorch."""
_PROGRAMS = 132
_ROUTER_PARTS = 4


@dataclass(frozen=True, eq=False)
class Blocks:
    """Pairs by expert. Pair p is node p // k with the p % k-th of its experts."""

    shares: Tensor
    """[P] float32, what each pair's output counts."""
    experts: Tensor
    """[blocks] int32, the expert of each block; -1 for none."""
    pairs: Tensor
    """[blocks, BM] int32; P for none."""


def experts_mlp(x: Tensor, weights: LayerWeights, experts: Experts, *, activation: str, exact: bool) -> Tensor:
    """[k, M, H] float32: what each node's experts add to it, from [M, H], and behind that what the MLP beside them adds."""
    assert weights.router is not None
    blocks = choose(_scores(x, weights.router, exact=exact), weights.router_bias, experts, weights.router_correction)
    num_rows, hidden = x.shape
    inner = x.new_empty(num_rows * experts.num_chosen, experts.size)
    _multiply(x, weights.gate_up, weights.gate_up_bias, inner, blocks, per_row=experts.num_chosen, activation=activation)
    out = x.new_empty(experts.num_chosen, num_rows, hidden, dtype=torch.float32)
    _multiply(inner, weights.down, weights.down_bias, out, blocks, per_row=experts.num_chosen, activation=None)
    if weights.shared_gate_up is None or weights.shared_down is None:
        return out
    beside = multiply(x, weights.shared_gate_up, Kind.GATED, exact=exact, finish=Finish(activation))
    added = multiply(beside, weights.shared_down, Kind.NARROW, exact=exact)
    return torch.cat((out, added if added.dim() == 3 else added[None]))


def _scores(x: Tensor, router: Tensor, *, exact: bool) -> Tensor:
    """[parts, M, E] the router's scores, yet to be added up: a router is small, so its sum is cut for the sake of time."""
    if len(x) > MOST_ROWS and not exact:
        return F.linear(x, router)[None]
    bm = 16 if len(x) <= 16 else 32 if len(x) <= 32 else 64
    return product(x, router, tile=Tile(16, 128, bm=bm, num_parts=_ROUTER_PARTS))


@lru_cache
def _one_node(num_pairs: int, size: int, device: torch.device) -> Tensor:
    """[P, BM] the blocks of a single node, whose experts differ: each holds one pair."""
    pairs = torch.full((num_pairs, size), num_pairs, dtype=torch.int32, device=device)
    pairs[:, 0] = torch.arange(num_pairs, dtype=torch.int32, device=device)
    return pairs


def choose(scores: Tensor, bias: Tensor | None, experts: Experts, correction: Tensor | None = None) -> Blocks:
    """The experts of every node and the blocks they make, from parts of the router's scores [parts, M, E] without its bias;
    ``correction`` [E] takes part in the choice alone."""
    _, num_rows, count = scores.shape
    num_pairs = num_rows * experts.num_chosen
    index, shares = route(scores, bias, experts, correction)
    size = 16 if num_pairs <= 16 * count else 64
    if num_rows == 1:
        return Blocks(shares, index, _one_node(num_pairs, size, scores.device))
    num_blocks = min(num_pairs, min(count, num_pairs) + num_pairs // size)
    if num_pairs > _MOST_PAIRS:
        return sorted_blocks(index, shares, num_experts=count, size=size, num_blocks=num_blocks)
    found = torch.empty(num_blocks, dtype=torch.int32, device=scores.device)
    pairs = torch.empty(num_blocks, size, dtype=torch.int32, device=scores.device)
    _group[(1,)](
        index,
        torch.empty_like(index),
        found,
        pairs,
        num_pairs,
        num_blocks,
        SIZE=size,
        PADDED=triton.next_power_of_2(num_pairs),
        BLOCKS=triton.next_power_of_2(num_blocks),
        CHUNK=32,
        EARLY=launch.EARLY,
        num_warps=1 if num_pairs <= 32 else 8,
        launch_pdl=launch.EARLY,
    )
    return Blocks(shares, found, pairs)


def sorted_blocks(index: Tensor, shares: Tensor, *, num_experts: int, size: int, num_blocks: int) -> Blocks:
    """The same blocks by PyTorch's sort, without waiting for the device."""
    num_pairs, device = len(index), index.device
    order = torch.argsort(index, stable=True)
    chosen = index[order].long()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device).scatter_add_(0, chosen, torch.ones_like(chosen))
    used = (counts + size - 1) // size
    rank = torch.arange(num_pairs, device=device) - (counts.cumsum(0) - counts)[chosen]
    block = (used.cumsum(0) - used)[chosen] + rank // size
    experts = torch.full((num_blocks,), -1, dtype=torch.int32, device=device)
    experts[block] = chosen.int()
    pairs = torch.full((num_blocks * size,), num_pairs, dtype=torch.int32, device=device)
    pairs[block * size + rank % size] = order.int()
    return Blocks(shares, experts, pairs.view(num_blocks, size))


def _multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, blocks: Blocks, *, per_row: int, activation: str | None
) -> None:
    """A grouped product: with an activation [P, F] of gates and ups, without one the shares of [k, M, H]."""
    num_outputs, depth, gated = out.shape[-1], x.shape[1], activation is not None
    num_blocks, bm = blocks.pairs.shape
    bn = next((bn for bn in (64, 32) if triton.cdiv(num_outputs, bn) * num_blocks >= _PROGRAMS), 16)
    bk = 128 if depth % 128 == 0 or depth > 512 else 64
    stage_bytes = (bn * (2 if gated else 1) + bm) * bk * weight.element_size()
    _grouped[(triton.cdiv(num_outputs, bn), num_blocks)](
        x,
        weight,
        weight if bias is None else bias,
        blocks.shares,
        blocks.experts,
        blocks.pairs,
        out,
        len(blocks.shares),
        num_outputs,
        depth,
        K=per_row,
        GATED=gated,
        ACTIVATION=ACTIVATIONS[activation or "none"],
        HAS_BIAS=bias is not None,
        EVEN=num_outputs % bn == 0 and depth % bk == 0,
        BM=bm,
        BN=bn,
        BK=bk,
        EARLY=launch.EARLY,
        num_warps=4,
        num_stages=stages_that_fit(4, stage_bytes),
        launch_pdl=launch.EARLY,
    )


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _group(
    index, ranks, found, pairs, num_pairs, num_blocks,
    SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A pair's rank is the number of pairs before it with its expert; the pair of every SIZE-th rank leads a block."""
    numbers = tl.arange(0, PADDED)
    is_pair = numbers < num_pairs
    blocks = tl.arange(0, BLOCKS)
    begin(EARLY)  # before the first store: the kernel in front may still read what stood there
    tl.store(found + blocks, tl.full((BLOCKS,), -1, tl.int32), mask=blocks < num_blocks)
    places = tl.arange(0, BLOCKS * SIZE)
    tl.store(pairs + places, tl.zeros((BLOCKS * SIZE,), tl.int32) + num_pairs, mask=places < num_blocks * SIZE)
    mine = tl.load(index + numbers, mask=is_pair, other=-1)
    rank = tl.zeros((PADDED,), tl.int32)
    for first in range(0, num_pairs, CHUNK):
        others = first + tl.arange(0, CHUNK)
        theirs = tl.load(index + others, mask=others < num_pairs, other=-2)
        before = (mine[:, None] == theirs[None, :]) & (others[None, :] < numbers[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
    tl.store(ranks + numbers, rank, mask=is_pair)
    tl.debug_barrier()  # ranks can be read, and what stands for "none" is written before what stands there
    block = rank // SIZE
    for first in range(0, num_pairs, CHUNK):
        others = first + tl.arange(0, CHUNK)
        theirs = tl.load(index + others, mask=others < num_pairs, other=1 << 30)
        leads = tl.load(ranks + others, mask=others < num_pairs, other=1) % SIZE == 0
        block += tl.sum(((theirs[None, :] < mine[:, None]) & leads[None, :]).to(tl.int32), 1)
    end(EARLY)
    tl.store(found + block, mine, mask=is_pair & (rank % SIZE == 0))
    tl.store(pairs + block * SIZE + rank % SIZE, numbers, mask=is_pair)


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped(
    x, weight, bias, shares, experts, pairs, out, num_pairs, num_outputs, depth,
    K: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    block = tl.program_id(1)
    ks = tl.arange(0, BK)
    is_output = outputs < num_outputs
    begin(EARLY)
    expert = tl.load(experts + block)
    if expert >= 0:
        pair = tl.load(pairs + block * BM + tl.arange(0, BM))
        is_row = pair < num_pairs
        rows = pair // K if GATED else pair
        sides = 2 if GATED else 1
        weights_at = weight + (expert.to(tl.int64) * sides * num_outputs + outputs)[:, None] * depth + ks[None, :]
        ups_at = weights_at + num_outputs.to(tl.int64) * depth
        x_at = x + rows[None, :].to(tl.int64) * depth + ks[:, None]
        total = tl.zeros((BN, BM), tl.float32)
        total_up = tl.zeros((BN, BM), tl.float32)
        for k in range(0, depth, BK):
            inside = k + ks < depth
            is_weight = is_output[:, None] & inside[None, :]
            w = tl.load(weights_at + k) if EVEN else tl.load(weights_at + k, mask=is_weight, other=0.0)
            piece = tl.load(x_at + k, mask=is_row[None, :] & inside[:, None], other=0.0)
            total = tl.dot(w, piece, total, input_precision="ieee")
            if GATED:
                w_up = tl.load(ups_at + k) if EVEN else tl.load(ups_at + k, mask=is_weight, other=0.0)
                total_up = tl.dot(w_up, piece, total_up, input_precision="ieee")
        if HAS_BIAS:
            own = bias + expert * sides * num_outputs + outputs
            total += tl.load(own, mask=is_output, other=0.0).to(tl.float32)[:, None]
            if GATED:
                total_up += tl.load(own + num_outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
        where = pair
        if GATED:
            total = activated(total, total_up, True, ACTIVATION)
        else:
            total *= tl.load(shares + pair, mask=is_row, other=0.0)[None, :]
            where = pair % K * (num_pairs // K) + pair // K
        out_at = out + where[None, :].to(tl.int64) * num_outputs + outputs[:, None]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])
    end(EARLY)
