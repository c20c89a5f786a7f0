"""The sampler's changes to logits before truncation, on the device: bias, minimum length, penalties.

The logits are changed in place. Penalties count the tokens of the output, which the walk keeps up to date, and the tokens on
the path to each node of the tree. The oracle is ``Sampler.adjust`` in ``core/sampling.py``.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
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
    """The guesses on the path to each of M nodes, as columns of [B, C] tokens. Column 0 holds the root where ``has_root``.
    Roots are counted already."""

    tokens: Tensor
    words: Tensor | None = None
    """[B, M, W] int64: bit c % 64 of word c // 64 says that column c is on the path. None for a chain."""
    length: int = 0
    """Guesses on the path to the first node of a chain; each node after it has one more."""
    has_root: bool = True


def adjust(logits: Tensor, frame: Frame, *, ids: Tensor | None, depths: Tensor | int | None, trail: Trail | None) -> None:
    """Change [B, N, V'] float32 logits as the slots ask for. ``depths`` is as in ``block_bests``. With ``ids`` [V'] the logits
    are a drafter's, for some of the target's tokens, and penalties count the committed text alone."""
    shaping = frame.shaping
    assert shaping is not None, "a round with stages has their columns"
    batch_size, num_nodes, width = logits.shape
    count = min(width if ids is None else len(ids), shaping.bias.shape[1])
    columns = (
        shaping.uses, shaping.bias, shaping.counts, shaping.penalties, shaping.ends, shaping.min_tokens,
        frame.lengths, frame.prompt_lens, depths if isinstance(depths, Tensor) else frame.lengths,
        depths if isinstance(depths, int) else 0,
    )  # fmt: skip
    kinds = {"DEPTHS": 0 if depths is None else 1 if isinstance(depths, Tensor) else 2, "ENDS": shaping.ends.shape[1]}
    passed = None if trail is None or ids is not None else _Passed(logits, trail)
    if passed is not None:
        passed.find(columns, shaping.bias.shape[1], kinds)
    _adjust[(triton.cdiv(count, _BLOCK), num_nodes, batch_size)](
        logits, *columns, logits if ids is None else ids, width, count, shaping.bias.shape[1],
        HAS_IDS=ids is not None, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False, **kinds,
    )  # fmt: skip
    if passed is not None:
        passed.store(shaping.uses)


class _Passed:
    """The logits of tokens on the path to a node, which have one more occurrence there."""

    def __init__(self, logits: Tensor, trail: Trail) -> None:
        self._logits, self._trail = logits, trail
        shape = (*logits.shape[:2], trail.tokens.shape[1])
        self._values = torch.empty(shape, dtype=torch.float32, device=logits.device)
        self._places = torch.empty(shape, dtype=torch.int32, device=logits.device)

    def find(self, columns: tuple[Any, ...], table_width: int, kinds: dict[str, int]) -> None:
        """Compute the changed values while the logits are still raw."""
        logits, tokens, words = self._logits, self._trail.tokens, self._trail.words
        _find_passed[(logits.shape[1], logits.shape[0])](
            logits, *columns, tokens, tokens if words is None else words, self._values, self._places,
            logits.shape[2], table_width, tokens.shape[1], 0 if words is None else words.shape[2], self._trail.length,
            IS_CHAIN=words is None, ROOT=int(self._trail.has_root), COLUMNS=triton.next_power_of_2(tokens.shape[1]),
            num_warps=4, enable_fp_fusion=False, **kinds,
        )  # fmt: skip

    def store(self, uses: Tensor) -> None:
        logits, num_columns = self._logits, self._values.shape[2]
        _store_passed[(logits.shape[1], logits.shape[0])](
            logits, uses, self._values, self._places, logits.shape[2], num_columns,
            COLUMNS=triton.next_power_of_2(num_columns), num_warps=1,
        )  # fmt: skip


@triton.jit
def _adjusted(
    x, tokens, held, inside, use, row, position, num_rows, bias, penalties, ends, min_tokens, table_width, ENDS: tl.constexpr
):
    """The changed logits of some tokens of a slot. ``held`` holds their numbers of occurrences."""
    if use & _BIAS:
        x += tl.load(bias + row.to(tl.int64) * table_width + tokens, mask=inside, other=0.0)
    if use & _MIN_TOKENS:
        end = tl.load(ends + row * ENDS + tl.arange(0, ENDS))
        is_end = tl.max((tokens[:, None] == end[None, :]).to(tl.int32), 1) > 0
        x = tl.where(is_end & (position < tl.load(min_tokens + row)), float("-inf"), x)
    if use & _PENALTIES:
        number = (held & _COUNT).to(tl.float32)
        repetition = tl.load(penalties + row)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(held != 0, repeated, x)
        x = x - tl.load(penalties + 2 * num_rows + row) * number
        x = x - tl.load(penalties + num_rows + row) * (number > 0).to(tl.float32)
    return x


@triton.jit
def _position(lengths, prompt_lens, depths, depth, row, node, flat, DEPTHS: tl.constexpr):
    """Output position of the choice after a node."""
    position = tl.load(lengths + row) - tl.load(prompt_lens + row) + depth
    if DEPTHS == 0:
        position += node
    if DEPTHS == 1:
        position += tl.load(depths + flat)
    return position


@triton.jit(do_not_specialize=["depth"])
def _adjust(
    logits, uses, bias, counts, penalties, ends, min_tokens, lengths, prompt_lens, depths, depth, ids,
    width, vocab_size, table_width, DEPTHS: tl.constexpr, ENDS: tl.constexpr, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(1)
    row = tl.program_id(2)
    use = tl.load(uses + row)
    if use & _ADJUSTS:
        places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = places < vocab_size
        flat = (row * tl.num_programs(1) + node).to(tl.int64)
        x = tl.load(logits + flat * width + places, mask=inside, other=float("-inf"))
        tokens = tl.load(ids + places, mask=inside, other=0).to(tl.int32) if HAS_IDS else places
        held = tl.load(counts + row.to(tl.int64) * table_width + tokens, mask=inside, other=0)
        position = _position(lengths, prompt_lens, depths, depth, row, node, flat, DEPTHS)
        x = _adjusted(
            x, tokens, held, inside, use, row, position, tl.num_programs(2), bias, penalties, ends, min_tokens,
            table_width, ENDS,
        )  # fmt: skip
        tl.store(logits + flat * width + places, x, mask=inside)


@triton.jit(do_not_specialize=["depth", "length", "num_columns", "num_words"])
def _find_passed(
    logits, uses, bias, counts, penalties, ends, min_tokens, lengths, prompt_lens, depths, depth, guesses, words,
    values, kept_places, width, table_width, num_columns, num_words, length,
    DEPTHS: tl.constexpr, ENDS: tl.constexpr, IS_CHAIN: tl.constexpr, ROOT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0)
    row = tl.program_id(1)
    use = tl.load(uses + row)
    if use & _PENALTIES:
        flat = (row * tl.num_programs(0) + node).to(tl.int64)
        column = tl.arange(0, COLUMNS)
        on_way = (column < num_columns) & (column >= ROOT)
        if IS_CHAIN:
            on_way = on_way & (column < length + node + ROOT)
        else:
            word = tl.load(words + flat * num_words + column // 64, mask=on_way, other=0)
            on_way = on_way & (((word >> (column % 64).to(tl.int64)) & 1) > 0)
        token = tl.load(guesses + row * num_columns + column, mask=on_way, other=-1).to(tl.int32)
        on_way = on_way & (token >= 0)
        held = tl.load(counts + row.to(tl.int64) * table_width + token, mask=on_way, other=0)
        held += tl.sum(((token[:, None] == token[None, :]) & on_way[None, :]).to(tl.int32), 1)
        x = tl.load(logits + flat * width + token, mask=on_way, other=0.0)
        position = _position(lengths, prompt_lens, depths, depth, row, node, flat, DEPTHS)
        x = _adjusted(
            x, token, held, on_way, use, row, position, tl.num_programs(1), bias, penalties, ends, min_tokens,
            table_width, ENDS,
        )  # fmt: skip
        inside = column < num_columns
        tl.store(values + flat * num_columns + column, x, mask=inside)
        tl.store(kept_places + flat * num_columns + column, tl.where(on_way, token, -1), mask=inside)


@triton.jit(do_not_specialize=["num_columns"])
def _store_passed(logits, uses, values, kept_places, width, num_columns, COLUMNS: tl.constexpr):
    row = tl.program_id(1)
    if tl.load(uses + row) & _PENALTIES:
        flat = (row * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        column = tl.arange(0, COLUMNS)
        place = tl.load(kept_places + flat * num_columns + column, mask=column < num_columns, other=-1)
        x = tl.load(values + flat * num_columns + column, mask=place >= 0, other=0.0)
        tl.store(logits + flat * width + place, x, mask=place >= 0)
