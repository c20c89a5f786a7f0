"""What the sampler does to logits before it truncates them, on the device: bias, minimum length, penalties.

The logits are changed where they stand. Penalties count the tokens of the output, kept up to date by the walk, and those on the
way to each node of the tree. The oracle is ``Sampler.adjust`` in ``core/sampling.py``.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from outrider.core.device_round import Frame
from outrider.core.device_sampling import IN_PROMPT, Use

_BLOCK = 1024
_BIAS = tl.constexpr(int(Use.BIAS))
_MIN_TOKENS = tl.constexpr(int(Use.MIN_TOKENS))
_PENALTIES = tl.constexpr(int(Use.PENALTIES))
_ADJUSTS = tl.constexpr(int(Use.BIAS | Use.MIN_TOKENS | Use.PENALTIES))
_COUNT = tl.constexpr(IN_PROMPT - 1)


@dataclass(frozen=True, eq=False)
class Trail:
    """The guesses on the way to each of M nodes, as columns of [B, C] tokens. Column 0 holds the root where ``has_root``, and
    roots are counted already."""

    tokens: Tensor
    words: Tensor | None = None
    """[B, M, W] int64: bit c % 64 of word c // 64 says that column c is on the way. None for a chain."""
    length: int = 0
    """Guesses on the way to the first node of a chain; each node after it has one more."""
    has_root: bool = True


def adjust(logits: Tensor, frame: Frame, *, ids: Tensor | None, depths: Tensor | int | None, trail: Trail | None) -> None:
    """Change [B, N, V'] float32 logits as the slots ask for it. ``ids`` [V'] are their tokens, None for all; ``depths`` as in
    ``block_bests``."""
    shaping = frame.shaping
    assert shaping is not None, "a round with stages has their columns"
    batch_size, num_nodes, width = logits.shape
    count = width if ids is None else len(ids)
    count = min(count, shaping.bias.shape[1])
    guesses = frame.tokens if trail is None else trail.tokens
    words = None if trail is None else trail.words
    num_columns = 0 if trail is None else guesses.shape[1]
    _adjust[(triton.cdiv(count, _BLOCK), num_nodes, batch_size)](
        logits, shaping.uses, shaping.bias, shaping.counts, shaping.penalties, shaping.ends, shaping.min_tokens,
        frame.lengths, frame.prompt_lens, logits if ids is None else ids, guesses, guesses if words is None else words,
        frame.lengths if not isinstance(depths, Tensor) else depths, depths if isinstance(depths, int) else 0,
        width, count, shaping.bias.shape[1], num_columns, 0 if words is None else words.shape[2],
        0 if trail is None else trail.length,
        DEPTHS=0 if depths is None else 1 if isinstance(depths, Tensor) else 2, HAS_IDS=ids is not None,
        TRAIL=0 if trail is None else 1 if words is None else 2, ROOT=int(trail is not None and trail.has_root),
        COLUMNS=triton.next_power_of_2(max(1, num_columns)), ENDS=shaping.ends.shape[1], BLOCK=_BLOCK, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["depth", "length", "num_columns", "num_words"])
def _adjust(
    logits, uses, bias, counts, penalties, ends, min_tokens, lengths, prompt_lens, ids, guesses, words, depths, depth,
    width, vocab_size, table_width, num_columns, num_words, length,
    DEPTHS: tl.constexpr, HAS_IDS: tl.constexpr, TRAIL: tl.constexpr, ROOT: tl.constexpr, COLUMNS: tl.constexpr,
    ENDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(1)
    row = tl.program_id(2)
    use = tl.load(uses + row)
    if use & _ADJUSTS:
        places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = places < vocab_size
        flat = (row * tl.num_programs(1) + node).to(tl.int64)
        x = tl.load(logits + flat * width + places, mask=inside, other=float("-inf"))
        tokens = tl.load(ids + places, mask=inside, other=0).to(tl.int64) if HAS_IDS else places.to(tl.int64)
        at = row.to(tl.int64) * table_width + tokens
        if use & _BIAS:
            x += tl.load(bias + at, mask=inside, other=0.0)
        if use & _MIN_TOKENS:
            position = tl.load(lengths + row) - tl.load(prompt_lens + row) + depth
            if DEPTHS == 0:
                position += node
            if DEPTHS == 1:
                position += tl.load(depths + flat)
            end = tl.load(ends + row * ENDS + tl.arange(0, ENDS))
            is_end = tl.max((tokens[:, None] == end[None, :]).to(tl.int32), 1) > 0
            x = tl.where(is_end & (position < tl.load(min_tokens + row)), float("-inf"), x)
        if use & _PENALTIES:
            held = tl.load(counts + at, mask=inside, other=0)
            if TRAIL > 0:
                column = tl.arange(0, COLUMNS)
                on_way = (column < num_columns) & (column >= ROOT)
                if TRAIL == 1:
                    on_way = on_way & (column < length + node + ROOT)
                if TRAIL == 2:
                    word = tl.load(words + flat * num_words + column // 64, mask=on_way, other=0)
                    on_way = on_way & (((word >> (column % 64).to(tl.int64)) & 1) > 0)
                guess = tl.load(guesses + row * num_columns + column, mask=on_way, other=-1)
                held += tl.sum((tokens[:, None] == guess[None, :]).to(tl.int32), 1)
            number = (held & _COUNT).to(tl.float32)
            repetition = tl.load(penalties + row)
            repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            x = tl.where(held != 0, repeated, x)
            presence = tl.load(penalties + tl.num_programs(2) + row)
            frequency = tl.load(penalties + 2 * tl.num_programs(2) + row)
            x = x - frequency * number
            x = x - presence * (number > 0).to(tl.float32)
        tl.store(logits + flat * width + places, x, mask=inside)
