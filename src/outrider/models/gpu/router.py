"""The experts of every node on a GPU, from the scores of a router; the oracle is ``models/experts.py``."""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.features import Experts
from outrider.models.gpu import launch
from outrider.models.gpu.launch import begin, end


def route(scores: Tensor, bias: Tensor | None, experts: Experts, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """[M * k] int32 experts and their float32 weights, from parts of the router's scores [parts, M, E] without its bias."""
    _, num_rows, count = scores.shape
    num_pairs = num_rows * experts.num_chosen
    index = torch.empty(num_pairs, dtype=torch.int32, device=scores.device)
    shares = torch.empty(num_pairs, dtype=torch.float32, device=scores.device)
    _choose[(num_rows,)](
        scores,
        scores if bias is None else bias,
        scores if correction is None else correction,
        index,
        shares,
        count,
        experts.scale,
        PARTS=len(scores),
        K=experts.num_chosen,
        NORMALISED=experts.normalised,
        HAS_BIAS=bias is not None,
        SIGMOID=experts.scoring == "sigmoid",
        CORRECTED=correction is not None,
        GROUPS=experts.groups,
        CHOSEN=experts.chosen_groups,
        PAIRED=experts.group_best == 2,
        BLOCK=triton.next_power_of_2(count),
        EARLY=launch.EARLY,
        num_warps=1 if count <= 128 else 4,
        launch_pdl=launch.EARLY,
    )
    return index, shares


@triton.jit
def _in_best_groups(choice, experts, size, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, PAIRED: tl.constexpr):
    """``choice`` where an expert's group is among the best, otherwise -inf. A group is as good as its best expert, or with
    PAIRED as its best two."""
    goodness = tl.full(choice.shape, float("-inf"), tl.float32)  # of every expert's group
    for group in tl.static_range(GROUPS):
        own = tl.where(experts // size == group, choice, float("-inf"))
        best = tl.max(own, 0)
        if PAIRED:
            best += tl.max(tl.where(experts == tl.argmax(own, 0), float("-inf"), own), 0)
        goodness = tl.where(experts // size == group, best, goodness)
    left = goodness
    for _ in tl.static_range(CHOSEN):
        left = tl.where(experts // size == tl.argmax(left, 0) // size, float("-inf"), left)
    return tl.where(left == float("-inf"), choice, float("-inf"))


@triton.jit
def _choose(
    scores, bias, correction, index, shares, count, factor,
    PARTS: tl.constexpr, K: tl.constexpr, NORMALISED: tl.constexpr, HAS_BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    experts = tl.arange(0, BLOCK)
    inside = experts < count
    begin(EARLY)
    s = tl.load(scores + row * count + experts, mask=inside, other=float("-inf")).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        at = scores + (part * tl.num_programs(0) + row) * count + experts
        s += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    end(EARLY)
    if HAS_BIAS:
        s += tl.load(bias + experts, mask=inside, other=0.0).to(tl.float32)
    weights = 1.0 / (1.0 + tl.exp(-s)) if SIGMOID else tl.exp(s - tl.max(s, 0))
    norm = 1.0 if SIGMOID else tl.sum(weights, 0)
    if CORRECTED:
        s = tl.where(inside, weights + tl.load(correction + experts, mask=inside, other=0.0), float("-inf"))
    if GROUPS > 1:
        s = _in_best_groups(s, experts, count // GROUPS, GROUPS, CHOSEN, PAIRED)
    if NORMALISED:
        norm = 1e-20
        rest = s
        for _ in tl.static_range(K):
            which = tl.argmax(rest, 0)
            norm += tl.sum(tl.where(experts == which, weights, 0.0), 0)
            rest = tl.where(experts == which, float("-inf"), rest)
    for place in tl.static_range(K):
        which = tl.argmax(s, 0)
        share = tl.sum(tl.where(experts == which, weights, 0.0), 0)
        tl.store(index + row * K + place, which.to(tl.int32))
        tl.store(shares + row * K + place, share / norm * factor)
        s = tl.where(experts == which, float("-inf"), s)
