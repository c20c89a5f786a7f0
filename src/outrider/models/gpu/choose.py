"""The target's choice and the coupled walk on the device: which token each node picks, how far guesses agree, the commit.

The choice is argmax(logits / T + Gumbel noise of the output position), the plain argmax at T = 0, the lowest token on a tie;
the noise is that of ``core/rng.py``, number by number. It is taken in two steps, since one row of a large vocabulary must be
read by the whole device: the best of every block, then the best block. On a chain the emitted tokens *are* the choices up to
the first that differs from its guess, so walk and commit are one small kernel.

    accepted = first n with choice_n != guess_{n+1};      text += choice_0 .. choice_accepted, as far as the limit allows
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.core.device_round import Frame
from outrider.core.rng import Purpose

_BLOCK = 2048
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_TARGET = tl.constexpr(int(Purpose.TARGET))
RING = 4
"""Rounds whose results are kept for the host."""
NOTE = 4
"""Numbers of a note before its choices: emitted, guessed, agreed, and whether a guess was rejected."""


def block_bests(
    logits: Tensor, frame: Frame, *, vocab_size: int, depth: int = 0, depths: Tensor | None = None, num_best: int = 1
) -> tuple[Tensor, Tensor]:
    """[B, N, blocks * num_best] the best perturbed logits of every block of tokens, and their tokens. Node n stands at
    ``depth + n``, or where ``depths`` [N] int32 says."""
    batch_size, num_nodes, width = logits.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    values = torch.empty(batch_size, num_nodes, num_blocks * num_best, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(values.shape, dtype=torch.int64, device=logits.device)
    _block_bests[(num_blocks, num_nodes, batch_size)](
        logits, frame.seeds, frame.lengths, frame.prompt_lens, frame.temperatures, values, tokens,
        frame.lengths if depths is None else depths, depth, width, vocab_size,
        HAS_DEPTHS=depths is not None, BEST=num_best, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return values, tokens


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
    """float32 noise of the target's choice, as ``gumbel_stream(make_key(seed, position, TARGET))`` draws it."""
    key = _mix(seed + _GOLDEN)
    key = _mix(key + position * _GOLDEN + _TARGET)
    key = _mix(key + _GOLDEN)
    words = _mix(key + (tokens + 1).to(tl.int64) * _GOLDEN)
    uniform = (_shift_right(words, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit(do_not_specialize=["depth"])
def _block_bests(
    logits, seeds, lengths, prompt_lens, temperatures, values, best_tokens, depths, depth, width, vocab_size,
    HAS_DEPTHS: tl.constexpr, BEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    node = tl.program_id(1)
    row = tl.program_id(2)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    flat = (row * tl.num_programs(1) + node).to(tl.int64)
    x = tl.load(logits + flat * width + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        position = tl.load(lengths + row) - tl.load(prompt_lens + row) + depth
        position += tl.load(depths + node) if HAS_DEPTHS else node
        x = tl.div_rn(x, temperature) + _gumbel(tl.load(seeds + row), position, tokens)
    at = (flat * tl.num_programs(0) + block) * BEST
    for rank in tl.static_range(BEST):
        best = tl.max(x, 0)
        token = tl.min(tl.where(x == best, tokens, 2147483647), 0)
        tl.store(values + at + rank, best)
        tl.store(best_tokens + at + rank, token.to(tl.int64))
        x = tl.where(tokens == token, float("-inf"), x)


def pick(bests: tuple[Tensor, Tensor], chain: Tensor, column: int) -> None:
    """Write the choice of the last node of each row into a column of ``chain`` [B, N]."""
    values, tokens = bests
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


def pick_children(bests: tuple[Tensor, Tensor], nodes: Tensor, children: Tensor) -> None:
    """Write the r-th best token of parent m to column ``children[m, r]`` of ``nodes`` [B, N], for all that are not -1."""
    values, tokens = bests
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


def accept_and_commit(bests: tuple[Tensor, Tensor], chain: Tensor, frame: Frame, *, ring: Tensor, rounds: Tensor) -> None:
    """Walk every row's chain, append what it emits to the frame, and note it in ``ring`` [RING, B, NOTE + N] at the row's
    round number ``rounds`` [B]: how many were emitted, how many guesses there were (-1 is none) and agreed, whether one was
    rejected, the choices."""
    values, tokens = bests
    batch_size, num_nodes, num_blocks = values.shape
    _accept_and_commit[(batch_size,)](
        values, tokens, chain, frame.tokens, frame.lengths, frame.limits, ring, rounds, num_nodes, num_blocks, frame.capacity,
        PADDED=triton.next_power_of_2(num_blocks), RINGS=RING, HEAD=NOTE, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_nodes"])
def _accept_and_commit(
    values, best_tokens, chain, tokens, lengths, limits, ring, rounds, num_nodes, num_blocks, capacity,
    PADDED: tl.constexpr, RINGS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    room = tl.maximum(tl.load(limits + row) - length, 0)
    number = tl.load(rounds + row)
    note = ring + (number % RINGS * tl.num_programs(0) + row) * (HEAD + num_nodes)
    agrees = tl.full((), 1, tl.int64)
    accepted = tl.full((), 0, tl.int64)
    emitted = tl.full((), 0, tl.int64)
    guessed = tl.full((), 0, tl.int64)
    for node in range(num_nodes):
        choice = choice_of(values, best_tokens, row * num_nodes + node, num_blocks, PADDED)
        takes = (agrees == 1) & (emitted < room)
        tl.store(tokens + row * capacity + length + node, choice, mask=takes)
        tl.store(note + HEAD + node, choice)
        emitted += takes.to(tl.int64)
        guess = tl.load(chain + row * num_nodes + node + 1, mask=node + 1 < num_nodes, other=-1)
        agrees = agrees * (guess == choice).to(tl.int64)
        accepted += agrees
        guessed += (guess >= 0).to(tl.int64)
    tl.store(note, emitted)
    tl.store(note + 1, guessed)
    tl.store(note + 2, accepted)
    tl.store(note + 3, (accepted < guessed).to(tl.int64))
    tl.store(lengths + row, length + emitted)
    tl.store(rounds + row, number + 1)
