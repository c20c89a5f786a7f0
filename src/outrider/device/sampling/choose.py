"""The target's choice on the device: the token that each node picks, and the tokens that a drafter ranks first.

The choice is argmax(logits / T + Gumbel noise of the output position), the plain argmax at T = 0, the lowest token on a tie.
The noise is that of ``core/rng.py``, number by number. It takes two steps, because the whole device must share the reading of
one large row: first the best of every block, then the best block. Drafters ask for the k best of every block and for the sum of
the softmax, which turns them into probabilities (``drafters/trees/candidates.py``):

    P(target says v | l, g) = softmax((l + T g) / tau)[v]
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.core.device_round import Frame
from outrider.core.device_sampling import Stages
from outrider.core.rng import Purpose
from outrider.device.sampling.adjust import Trail, adjust
from outrider.device.sampling.truncate import find_cuts, kept

BLOCK = 1024
"""Tokens of a block."""
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_TARGET = tl.constexpr(int(Purpose.TARGET))
_TYPICAL = tl.constexpr(int(Stages.TYPICAL))


@dataclass(frozen=True, eq=False)
class Bests:
    """The best perturbed logits of every block of tokens, for [B, N] nodes."""

    values: Tensor
    """[B, N, blocks * best]"""
    tokens: Tensor
    """[B, N, blocks * best] int64 the target's tokens."""
    sums: Tensor | None = None
    """[2, B, N, blocks] largest (l + T g) / tau of each block, and the sum of the exponentials of the differences from it."""

    def sureness(self) -> Tensor:
        """[B, N] probability of each node's best token."""
        assert self.sums is not None, "asked for with tau"
        peaks, weights = self.sums
        return 1 / (weights * (peaks - peaks.amax(-1, keepdim=True)).exp()).sum(-1)

    def shared_by(self, num_nodes: int) -> Bests:
        """These values repeated for so many nodes, if all nodes have the same values."""
        values, tokens = (part.expand(-1, num_nodes, -1).contiguous() for part in (self.values, self.tokens))
        return Bests(values, tokens, None if self.sums is None else self.sums.expand(-1, -1, num_nodes, -1).contiguous())


@dataclass(frozen=True, eq=False)
class Guessing:
    """Additional results for drafters."""

    num_best: int
    ids: Tensor | None = None
    """[Vd] int64, ascending: the target's tokens that the logits stand for; None for all of them."""
    tau: float | None = None
    """Temperature of path probabilities."""


def block_bests(
    logits: Tensor,
    frame: Frame,
    *,
    vocab_size: int,
    depths: Tensor | int | None = None,
    guessing: Guessing | None = None,
    trail: Trail | None = None,
) -> Bests:
    """The best tokens of every block. ``depths`` holds the depths of the nodes: [B, N] int32, one for all, or None where node n
    has depth n. Only ``vocab_size`` logits count. ``trail`` is the path to each node, for penalties. If the frame has sampler
    stages, the logits are changed by them. Guesses are not truncated, since a token outside a draft's nucleus may be inside the
    target's."""
    batch_size, num_nodes, width = logits.shape
    is_target = guessing is None
    num_blocks, guessing = triton.cdiv(vocab_size, BLOCK), guessing or Guessing(1)
    shape = (batch_size, num_nodes, num_blocks)
    values = torch.empty(*shape[:2], num_blocks * guessing.num_best, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(values.shape, dtype=torch.int64, device=logits.device)
    sums = None if guessing.tau is None else torch.empty(2, *shape, dtype=torch.float32, device=logits.device)
    cuts, shaping = None, frame.shaping
    if frame.stages:
        adjust(logits, frame, ids=guessing.ids, depths=depths, trail=trail)
        cuts = find_cuts(logits, frame, vocab_size=vocab_size) if is_target else None
    _block_bests[(num_blocks, num_nodes, batch_size)](
        logits, values if shaping is None else shaping.uses, values if shaping is None else shaping.log_min_p,
        values if cuts is None else cuts.keys, values if cuts is None else cuts.marks,
        frame.seeds, frame.lengths, frame.prompt_lens, frame.temperatures, values, tokens,
        values if sums is None else sums, tokens if guessing.ids is None else guessing.ids,
        depths if isinstance(depths, Tensor) else tokens, depths if isinstance(depths, int) else 0,
        width, vocab_size, 1.0 / (guessing.tau or 1.0),
        DEPTHS=0 if depths is None else 1 if isinstance(depths, Tensor) else 2, HAS_IDS=guessing.ids is not None,
        SUMS=sums is not None, BEST=guessing.num_best, STAGES=0 if cuts is None else int(frame.stages), BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip
    return Bests(values, tokens, sums)


@triton.jit
def _shift_right(words, COUNT: tl.constexpr):
    return (words >> COUNT) & ((1 << (64 - COUNT)) - 1)


@triton.jit
def _mix(words):
    words = (words ^ _shift_right(words, 30)) * _MULTIPLIER_1
    words = (words ^ _shift_right(words, 27)) * _MULTIPLIER_2
    return words ^ _shift_right(words, 31)


@triton.jit
def _gumbel(seed, position, tokens):
    """Gumbel noise of the target's choice in float32, as ``gumbel_stream(make_key(seed, position, TARGET))`` draws it."""
    key = _mix(seed + _GOLDEN)
    key = _mix(key + position * _GOLDEN + _TARGET)
    key = _mix(key + _GOLDEN)
    words = _mix(key + (tokens + 1).to(tl.int64) * _GOLDEN)
    uniform = (_shift_right(words, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit(do_not_specialize=["depth"])
def _block_bests(
    logits, uses, min_ps, keys, marks, seeds, lengths, prompt_lens, temperatures, values, best_tokens, sums, ids, depths, depth,
    width, vocab_size, sharpness,
    DEPTHS: tl.constexpr, HAS_IDS: tl.constexpr, SUMS: tl.constexpr, BEST: tl.constexpr,
    STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    node = tl.program_id(1)
    row = tl.program_id(2)
    places = block * BLOCK + tl.arange(0, BLOCK)
    inside = places < vocab_size
    flat = (row * tl.num_programs(1) + node).to(tl.int64)
    x = tl.load(logits + flat * width + places, mask=inside, other=float("-inf")).to(tl.float32)
    tokens = tl.load(ids + places, mask=inside, other=0) if HAS_IDS else places
    temperature = tl.load(temperatures + row)
    scale = sharpness
    if temperature > 0:
        position = tl.load(lengths + row) - tl.load(prompt_lens + row) + depth
        if DEPTHS == 0:
            position += node
        if DEPTHS == 1:
            position += tl.load(depths + flat)
        x = tl.div_rn(x, temperature)
        if STAGES > 0:
            use, num_flat = tl.load(uses + row), tl.num_programs(1) * tl.num_programs(2)
            stays = kept(x, use, tl.load(min_ps + row), keys, marks, flat, num_flat, STAGES >= _TYPICAL)
            x = tl.where(stays, x, float("-inf"))
        x += _gumbel(tl.load(seeds + row), position, tokens)
        scale *= temperature
    if SUMS:
        at = flat * tl.num_programs(0) + block
        peak = tl.max(x, 0) * scale
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(sums + at, peak)
        num_all = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * tl.num_programs(2)
        tl.store(sums + num_all + at, tl.sum(tl.exp(x * scale - safe), 0))
    at = (flat * tl.num_programs(0) + block) * BEST
    for rank in tl.static_range(BEST):
        best = tl.max(x, 0)
        token = tl.min(tl.where(x == best, tokens, 2147483647), 0)
        tl.store(values + at + rank, best)
        tl.store(best_tokens + at + rank, token.to(tl.int64))
        x = tl.where(tokens == token, float("-inf"), x)


def pick(bests: Bests, chain: Tensor, column: int) -> None:
    """Write the choice of the last node of each row into a column of ``chain`` [B, N]."""
    values, tokens = bests.values, bests.tokens
    batch_size, num_nodes, num_blocks = values.shape
    _pick[(batch_size,)](
        values,
        tokens,
        chain,
        num_nodes,
        num_blocks,
        chain.shape[1],
        column,
        PADDED=triton.next_power_of_2(num_blocks),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_nodes", "width", "column"])
def _pick(values, tokens, chain, num_nodes, num_blocks, width, column, PADDED: tl.constexpr):
    row = tl.program_id(0)
    choice = choice_of(values, tokens, row * num_nodes + num_nodes - 1, num_blocks, PADDED)
    tl.store(chain + row * width + column, choice)


@triton.jit
def choice_of(values, tokens, flat, num_blocks, PADDED: tl.constexpr):
    """The best of the blocks of one node, the lowest token on a tie."""
    blocks = tl.arange(0, PADDED)
    inside = blocks < num_blocks
    value = tl.load(values + flat * num_blocks + blocks, mask=inside, other=float("-inf"))
    token = tl.load(tokens + flat * num_blocks + blocks, mask=inside, other=0)
    return tl.min(tl.where(inside & (value == tl.max(value, 0)), token, 9223372036854775807), 0)


def pick_children(bests: Bests, nodes: Tensor, children: Tensor) -> None:
    """Write the r-th best token of parent m to column ``children[m, r]`` of ``nodes`` [B, N], for all that are not -1."""
    values, tokens = bests.values, bests.tokens
    batch_size, num_parents, width = values.shape
    _pick_children[(num_parents, batch_size)](
        values, tokens, nodes, children, width, nodes.shape[1],
        RANKS=children.shape[1], PADDED=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip


@triton.jit
def _pick_children(values, tokens, nodes, children, width, num_nodes, RANKS: tl.constexpr, PADDED: tl.constexpr):
    parent = tl.program_id(0)
    row = tl.program_id(1)
    places = tl.arange(0, PADDED)
    inside = places < width
    at = (row * tl.num_programs(0) + parent) * width + places
    value = tl.load(values + at, mask=inside, other=float("-inf"))
    token = tl.load(tokens + at, mask=inside, other=9223372036854775807)
    for rank in tl.static_range(RANKS):
        best = tl.min(tl.where(value == tl.max(value, 0), token, 9223372036854775807), 0)
        child = tl.load(children + parent * RANKS + rank)
        tl.store(nodes + row * num_nodes + child, best, mask=child >= 0)
        value = tl.where(token == best, float("-inf"), value)
