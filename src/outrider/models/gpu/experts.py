"""A mixture of experts on a GPU: one grouped product over the experts that the nodes of a pass chose.

A pair is a node with one of its k experts. Pairs of an expert form blocks of up to BM, and a program multiplies some outputs of
one expert for one block. So weights are read once per block, and those of unused experts not at all. Nothing waits for the
host, so a pass can be captured: there are as many blocks as there could be, and empty ones end at once.

    gate_up:  g_p = activation(gate_e x) * up_e x        p = (node, expert e)
    down:     y[slot, node] = share_p down_e g_p         parts that the next norm adds up in the order of the slots

The products are in ``expert_products.py``. The oracle is ``models/experts.py``.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.features import Experts
from outrider.models.gpu import launch
from outrider.models.gpu.expert_products import ExpertBlocks, expert_product
from outrider.models.gpu.finish import Finish
from outrider.models.gpu.launch import begin, end
from outrider.models.gpu.products import multiply
from outrider.models.gpu.router import route
from outrider.models.gpu.small_batch_matmul import product
from outrider.models.gpu.tile import Tile
from outrider.models.gpu.tiles import MOST_ROWS, Kind
from outrider.models.packed import LayerMatrices

_MOST_PAIRS = 512
"""Most pairs that one program groups into blocks; more are sorted by PyTorch."""
_ROUTER_PARTS = 4


def experts_mlp(x: Tensor, layer: LayerMatrices, experts: Experts, *, activation: str, exact: bool) -> Tensor:
    """[k, M, H] float32 outputs of each node's experts, from [M, H], followed by the output of the MLP beside them."""
    weights = layer.rest
    assert weights.router is not None
    blocks = choose(_scores(x, weights.router, exact=exact), weights.router_bias, experts, weights.router_correction)
    num_rows, hidden = x.shape
    inner = x.new_empty(num_rows * experts.num_chosen, experts.size)
    expert_product(x, layer.gate_up, weights.gate_up_bias, inner, blocks, per_row=experts.num_chosen, activation=activation)
    out = x.new_empty(experts.num_chosen, num_rows, hidden, dtype=torch.float32)
    expert_product(inner, layer.down, weights.down_bias, out, blocks, per_row=experts.num_chosen, activation=None)
    if layer.shared_gate_up is None or layer.shared_down is None:
        return out
    beside = multiply(x, layer.shared_gate_up, Kind.GATED, exact=exact, finish=Finish(activation))
    added = multiply(beside, layer.shared_down, Kind.NARROW, exact=exact)
    return torch.cat((out, added if added.dim() == 3 else added[None]))


def _scores(x: Tensor, router: Tensor, *, exact: bool) -> Tensor:
    """[parts, M, E] the router's scores, yet to be added up. A router is small, so its sum is cut into parts to save time."""
    if len(x) > MOST_ROWS and not exact:
        return F.linear(x, router)[None]
    bm = 16 if len(x) <= 16 else 32 if len(x) <= 32 else 64
    return product(x, router, tile=Tile(16, 128, bm=bm, num_parts=_ROUTER_PARTS))


@lru_cache
def _one_node(num_pairs: int, size: int, device: torch.device) -> Tensor:
    """[P, BM] the blocks of a single node. Its experts differ, so each block holds one pair."""
    pairs = torch.full((num_pairs, size), num_pairs, dtype=torch.int32, device=device)
    pairs[:, 0] = torch.arange(num_pairs, dtype=torch.int32, device=device)
    return pairs


def choose(scores: Tensor, bias: Tensor | None, experts: Experts, correction: Tensor | None = None) -> ExpertBlocks:
    """The experts of every node and the blocks they make, from parts of the router's scores [parts, M, E] without its bias;
    ``correction`` [E] takes part in the choice alone."""
    _, num_rows, count = scores.shape
    num_pairs = num_rows * experts.num_chosen
    index, shares = route(scores, bias, experts, correction)
    size = 16 if num_pairs <= 16 * count else 64
    if num_rows == 1:
        return ExpertBlocks(shares, index, _one_node(num_pairs, size, scores.device))
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
    return ExpertBlocks(shares, found, pairs)


def sorted_blocks(index: Tensor, shares: Tensor, *, num_experts: int, size: int, num_blocks: int) -> ExpertBlocks:
    """The blocks, made by PyTorch's sort without waiting for the device."""
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
    return ExpertBlocks(shares, experts, pairs.view(num_blocks, size))


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _group(
    index, ranks, found, pairs, num_pairs, num_blocks,
    SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Group pairs. A pair's rank is the number of pairs before it with its expert. The pair of every SIZE-th rank leads a
    block."""
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
