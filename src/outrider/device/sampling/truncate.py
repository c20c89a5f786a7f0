"""Top-k, top-p, min-p and typical-p on the device, without sorting a vocabulary.

Each truncation keeps the tokens whose value is at least a cut. The cut is the smallest number above which there is too little:
fewer than k tokens, or less than the share p of the probability. Floats ordered by their bits are whole numbers, so a search
that splits the range into 32 parts finds the cut in seven steps. In a step, every block of tokens sums what it holds above each
of 32 numbers. The next step adds up the blocks, always in the same order.

    cut = min { c :  sum over {v : value(v) > c} of weight(v)  <  limit }      weight 1 and limit k, or weight e^x and limit p Z

The oracle is ``core/truncation.py``; ties at a cut are kept, as there.
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
from outrider.core.device_sampling import Stages, Use

_BLOCK = 2048
_CHUNK = 256
"""Tokens that are compared at a time."""
_SHIFTS = (27, 22, 17, 12, 7, 2, 0)
"""Number of bits below those that a step decides: five at a time, then the last two."""
_WAYS = tl.constexpr(32)
_TOP_K = tl.constexpr(int(Use.TOP_K))
_TOP_P = tl.constexpr(int(Use.TOP_P))
_MIN_P = tl.constexpr(int(Use.MIN_P))
_TYPICAL = tl.constexpr(int(Use.TYPICAL))
_CUTS = tl.constexpr(int(Use.TOP_K | Use.TOP_P | Use.MIN_P | Use.TYPICAL))


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Values that tell ``kept`` which tokens of [B, N] nodes are kept."""

    keys: Tensor
    """[3, B, N] int64: the cuts of top-k, top-p and typical-p, as ordered bits."""
    marks: Tensor
    """[3, B, N] float32: the largest tempered logit, then the two values of typical-p: log Z above it, and the entropy."""


def find_cuts(logits: Tensor, frame: Frame, *, vocab_size: int) -> KeptTokens:
    """The cuts of [B, N, V'] adjusted logits, of which ``vocab_size`` count."""
    batch_size, num_nodes, _ = logits.shape
    num_blocks, device = triton.cdiv(vocab_size, _BLOCK), logits.device
    cuts = KeptTokens(
        torch.empty(3, batch_size, num_nodes, dtype=torch.int64, device=device),
        torch.empty(3, batch_size, num_nodes, dtype=torch.float32, device=device),
    )
    sums = torch.empty(2, batch_size, num_nodes, num_blocks, int(_WAYS), dtype=torch.float32, device=device)
    bases = torch.empty(2, batch_size, num_nodes, dtype=torch.int64, device=device)
    search = _Search(logits, frame, cuts, sums, bases, vocab_size)
    search.measure(Use.TOP_P)
    if frame.stages >= Stages.TOP_K:
        search.find(Use.TOP_K)
    search.find(Use.TOP_P)
    if frame.stages >= Stages.TYPICAL:
        search.measure(Use.TYPICAL)
        search.find(Use.TYPICAL)
    return cuts


@dataclass(frozen=True, eq=False)
class _Search:
    logits: Tensor
    frame: Frame
    cuts: KeptTokens
    sums: Tensor
    """[2, B, N, blocks, 32] sum of each block above each number, for this step and the previous one."""
    bases: Tensor
    """[2, B, N] int64 start of the range that this step, and the previous one, split."""
    vocab_size: int

    def find(self, kind: Use) -> None:
        """The cut of one truncation, for the slots that use it."""
        logits, frame, cuts, sums, bases = self.logits, self.frame, self.cuts, self.sums, self.bases
        shaping, num_blocks = frame.shaping, sums.shape[3]
        assert shaping is not None
        limits = {Use.TOP_K: shaping.top_k, Use.TOP_P: shaping.top_p, Use.TYPICAL: shaping.typical_p}[kind]
        index = (Use.TOP_K, Use.TOP_P, Use.TYPICAL).index(kind)
        padded = triton.next_power_of_2(num_blocks)
        for step, shift in enumerate(_SHIFTS):
            _split[(num_blocks, *logits.shape[1::-1])](
                logits, frame.temperatures, shaping.uses, shaping.log_min_p, limits, cuts.keys, cuts.marks,
                sums[step % 2], sums[1 - step % 2], bases[step % 2], bases[1 - step % 2], logits.shape[2], self.vocab_size,
                KIND=int(kind), FIRST=step == 0, SHIFT=shift, ABOVE=_SHIFTS[step - 1] if step else 0,
                BLOCKS=padded, BLOCK=_BLOCK, CHUNK=_CHUNK, num_warps=8,
            )  # fmt: skip
        _settle[logits.shape[1::-1]](
            shaping.uses, limits, cuts.keys[index], sums[(len(_SHIFTS) - 1) % 2], bases[(len(_SHIFTS) - 1) % 2], num_blocks,
            KIND=int(kind), SHIFT=_SHIFTS[-1], BLOCKS=padded, num_warps=4,
        )  # fmt: skip

    def measure(self, kind: Use) -> None:
        """Compute the marks of the nodes: first the largest value, then the values that typical-p needs of the remaining
        tokens."""
        logits, frame, cuts, sums = self.logits, self.frame, self.cuts, self.sums
        shaping, num_blocks = frame.shaping, sums.shape[3]
        assert shaping is not None
        last = int(kind == Use.TYPICAL)
        _measure[(num_blocks, *logits.shape[1::-1])](
            logits, frame.temperatures, shaping.uses, shaping.log_min_p, cuts.keys, cuts.marks, sums,
            logits.shape[2], self.vocab_size, LAST=last, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
        _gather[logits.shape[1::-1]](
            shaping.uses, cuts.marks, sums, num_blocks, LAST=last, BLOCKS=triton.next_power_of_2(num_blocks), num_warps=4
        )


@triton.jit
def ordered(x):
    """The floats as int32 in the same order."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def typicality(x, marks, flat, num_flat):
    """Minus the distance between a token's surprise and the entropy."""
    log_prob = x - tl.load(marks + flat) - tl.load(marks + num_flat + flat)
    return -tl.abs(-log_prob - tl.load(marks + 2 * num_flat + flat))


@triton.jit
def kept(x, use, log_min_p, keys, marks, flat, num_flat, LAST: tl.constexpr):
    """Whether each tempered logit survives the truncations in ``use``; typical-p only with ``LAST``."""
    key = ordered(x)
    stays = ((use & _TOP_K) == 0) | (key >= tl.load(keys + flat))
    stays = stays & (((use & _TOP_P) == 0) | (key >= tl.load(keys + num_flat + flat)))
    stays = stays & (((use & _MIN_P) == 0) | (x >= tl.load(marks + flat) + log_min_p))
    if LAST:
        typical = ordered(typicality(x, marks, flat, num_flat))
        stays = stays & (((use & _TYPICAL) == 0) | (typical >= tl.load(keys + 2 * num_flat + flat)))
    return stays


@triton.jit
def _tempered(logits, temperatures, row, flat, width, vocab_size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + flat * width + places, mask=places < vocab_size, other=float("-inf"))
    return tl.div_rn(x, tl.load(temperatures + row))


@triton.jit
def _measure(logits, temperatures, uses, min_ps, keys, marks, sums, width, vocab_size, LAST: tl.constexpr, BLOCK: tl.constexpr):
    node = tl.program_id(1)
    row = tl.program_id(2)
    use = tl.load(uses + row)
    wanted = (use & _TYPICAL) if LAST else (use & _CUTS)
    if wanted:
        flat = (row * tl.num_programs(1) + node).to(tl.int64)
        num_flat = tl.num_programs(1) * tl.num_programs(2)
        x = _tempered(logits, temperatures, row, flat, width, vocab_size, BLOCK)
        at = sums + (flat * tl.num_programs(0) + tl.program_id(0)) * 32
        if LAST:
            far = x - tl.load(marks + flat)
            stays = kept(x, use & ~_TYPICAL, tl.load(min_ps + row), keys, marks, flat, num_flat, False)
            mass = tl.where(stays, tl.exp(far), 0.0)
            tl.store(at, tl.sum(mass, 0))
            tl.store(at + 1, tl.sum(tl.where(mass > 0, mass * far, 0.0), 0))
        else:
            tl.store(at, tl.max(x, 0))


@triton.jit
def _gather(uses, marks, sums, num_blocks, LAST: tl.constexpr, BLOCKS: tl.constexpr):
    node = tl.program_id(0)
    row = tl.program_id(1)
    use = tl.load(uses + row)
    wanted = (use & _TYPICAL) if LAST else (use & _CUTS)
    if wanted:
        flat = (row * tl.num_programs(0) + node).to(tl.int64)
        num_flat = tl.num_programs(0) * tl.num_programs(1)
        block = tl.arange(0, BLOCKS)
        at = sums + (flat * num_blocks + block) * 32
        if LAST:
            total = tl.sum(tl.load(at, mask=block < num_blocks, other=0.0), 0)
            mean = tl.sum(tl.load(at + 1, mask=block < num_blocks, other=0.0), 0)
            tl.store(marks + num_flat + flat, tl.log(total))
            tl.store(marks + 2 * num_flat + flat, tl.log(total) - mean / total)
        else:
            tl.store(marks + flat, tl.max(tl.load(at, mask=block < num_blocks, other=float("-inf")), 0))


@triton.jit
def _narrowed(limits, bases, sums, row, flat, num_blocks, KIND: tl.constexpr, SHIFT: tl.constexpr, BLOCKS: tl.constexpr):
    """The lower end of the part that contains the cut, from the sums of a step."""
    block = tl.arange(0, BLOCKS)
    way = tl.arange(0, _WAYS)
    at = (flat * num_blocks + block)[:, None] * _WAYS + way[None, :]
    parts = tl.load(sums + at, mask=(block < num_blocks)[:, None], other=0.0)
    above = tl.sum(parts.to(tl.float64), 0)
    limit = tl.load(limits + row).to(tl.float64)
    if KIND != _TOP_K:
        limit = limit * tl.sum(tl.where(way == _WAYS - 1, above, 0.0), 0)
    enough = (above < limit) | (way == _WAYS - 1)
    first = tl.min(tl.where(enough, way, _WAYS), 0).to(tl.int64)
    return tl.load(bases + flat) + (first << SHIFT)


@triton.jit
def _split(
    logits, temperatures, uses, min_ps, limits, keys, marks, sums, sums_before, bases, bases_before, width, vocab_size,
    KIND: tl.constexpr, FIRST: tl.constexpr, SHIFT: tl.constexpr, ABOVE: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(1)
    row = tl.program_id(2)
    use = tl.load(uses + row)
    if use & KIND:
        flat = (row * tl.num_programs(1) + node).to(tl.int64)
        num_flat = tl.num_programs(1) * tl.num_programs(2)
        num_blocks = tl.num_programs(0)
        base = tl.full((), -2147483648, tl.int64)
        if not FIRST:
            base = _narrowed(limits, bases_before, sums_before, row, flat, num_blocks, KIND, ABOVE, BLOCKS)
        tl.store(bases + flat, base, mask=tl.program_id(0) == 0)
        x = _tempered(logits, temperatures, row, flat, width, vocab_size, BLOCK)
        value, weight = _weighed(x, use, min_ps, row, keys, marks, flat, num_flat, KIND)
        key, last, total = ordered(value), base + (1 << SHIFT) * _WAYS - 1, tl.sum(weight, 0)
        way = tl.arange(0, _WAYS)
        above = tl.zeros((_WAYS,), tl.float32) + tl.sum(tl.where(key > last, weight, 0.0), 0)
        within = (key >= base) & (key <= last) & (weight > 0)
        if tl.max(within.to(tl.int32), 0) > 0:  # most blocks have nothing left to split after two steps
            ends = (base + ((way + 1).to(tl.int64) << SHIFT) - 1).to(tl.int32)
            parts = tl.zeros((CHUNK, _WAYS), tl.float32)
            for first in range(0, BLOCK, CHUNK):
                places = tl.program_id(0) * BLOCK + first + tl.arange(0, CHUNK)
                some = tl.load(logits + flat * width + places, mask=places < vocab_size, other=float("-inf"))
                some = tl.div_rn(some, tl.load(temperatures + row))
                their_value, their_weight = _weighed(some, use, min_ps, row, keys, marks, flat, num_flat, KIND)
                theirs = ordered(their_value)
                is_above = (theirs[:, None] > ends[None, :]) & (theirs <= last)[:, None]
                parts += tl.where(is_above, their_weight[:, None], 0.0)
            above += tl.sum(parts, 0)
        above = tl.where(way == _WAYS - 1, total, above)  # nothing is above the last: it holds the total
        tl.store(sums + (flat * num_blocks + tl.program_id(0)) * _WAYS + way, above)


@triton.jit
def _weighed(x, use, min_ps, row, keys, marks, flat, num_flat, KIND: tl.constexpr):
    """The values that a truncation compares, and the weights that it sums, for some tempered logits."""
    value, weight = x, (x > float("-inf")).to(tl.float32)
    if KIND != _TOP_K:
        earlier = use & (_TOP_K if KIND == _TOP_P else _TOP_K | _TOP_P | _MIN_P)
        stays = kept(x, earlier, tl.load(min_ps + row), keys, marks, flat, num_flat, False)
        weight = tl.where(stays, tl.exp(x - tl.load(marks + flat)), 0.0)
    if KIND == _TYPICAL:
        value = typicality(x, marks, flat, num_flat)
    return value, weight


@triton.jit
def _settle(uses, limits, keys, sums, bases, num_blocks, KIND: tl.constexpr, SHIFT: tl.constexpr, BLOCKS: tl.constexpr):
    node = tl.program_id(0)
    row = tl.program_id(1)
    if tl.load(uses + row) & KIND:
        flat = (row * tl.num_programs(0) + node).to(tl.int64)
        tl.store(keys + flat, _narrowed(limits, bases, sums, row, flat, num_blocks, KIND, SHIFT, BLOCKS))
