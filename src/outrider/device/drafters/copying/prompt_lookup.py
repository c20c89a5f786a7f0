"""Prompt lookup inside a captured round: the request's own tokens are on the device, so the device can search them.

One program per row reads the history once. At every position it counts how many of the last tokens stand before it. It keeps
the longest match, the most recent one on a tie. What followed is copied; a match close to the end repeats itself. The guesses
equal those of its oracle ``drafters/copying/prompt_lookup.py``, which keeps an index (Saxena 2023, "Prompt Lookup
Decoding").
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import triton
import triton.language as tl
from torch import Tensor

from outrider.core.device_round import DeviceDrafter, Frame, LateTexts, Texts


@final
class DeviceLookup(DeviceDrafter):
    """Chains copied from the request's own tokens. Without a match the guesses are -1, which never equals a choice."""

    def __init__(self, *, min_ngram: int, max_ngram: int) -> None:
        self._min_ngram, self._max_ngram = min_ngram, max_ngram

    @property
    def version(self) -> int:
        return 0

    def seat(self, texts: Texts, *, batch_size: int) -> None:
        del texts, batch_size

    def open(self, slots: Sequence[int], *, batch_size: int) -> None:
        del slots, batch_size

    def catch_up(self, late: LateTexts, *, batch_size: int) -> None:
        del late, batch_size

    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        del old_size, new_size, slots

    def release(self, slots: Sequence[int], *, batch_size: int) -> None:
        del slots, batch_size

    def fits(self, capacity: int) -> bool:
        del capacity
        return True

    def propose(self, frame: Frame, nodes: Tensor, depth: int) -> None:
        del depth
        _look_up[(frame.batch_size,)](
            frame.tokens, frame.lengths, nodes, nodes.shape[1], frame.capacity,
            MIN=self._min_ngram, MAX=self._max_ngram, BLOCK=2048, num_warps=8,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_nodes"])
def _look_up(tokens, lengths, chain, num_nodes, capacity, MIN: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    history = tokens + row * capacity
    length = tl.load(lengths + row)
    best = tl.full((), -1, tl.int64)
    for first in range(1, length, BLOCK):
        ends = first + tl.arange(0, BLOCK)  # a match ends before this token, which followed it
        run = (ends < length).to(tl.int64)
        size = tl.zeros((BLOCK,), tl.int64)
        for back in tl.static_range(1, MAX + 1):
            last = tl.load(history + length - back, mask=length >= back, other=-2)
            there = tl.load(history + ends - back, mask=(ends >= back) & (ends < length), other=-1)
            run = run * (there == last).to(tl.int64)
            size += run
        score = tl.where(size >= MIN, size * (1 << 32) + ends, -1)
        best = tl.maximum(best, tl.max(score, 0))
    start = best % (1 << 32)
    period = tl.maximum(length - start, 1)
    for node in range(1, num_nodes):
        copied = tl.load(history + start + (node - 1) % period, mask=best >= 0, other=-1)
        tl.store(chain + row * num_nodes + node, copied)
