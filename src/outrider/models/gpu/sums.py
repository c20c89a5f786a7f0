"""The end of a sublayer and the beginning of the next in one kernel: adds parts and bias, normalises, adds to the residual
stream, and computes the next norm.

    y = (sum of parts + bias),   normalised where the layer says so,   times the residual multiplier
    r <- r + y                   n = norm(r)

Parts are added in their order and the sum is rounded once, so that tapping a pass does not change it (``added``).
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.features import ModelConfig
from outrider.models.gpu import launch
from outrider.models.gpu.launch import begin, end
from outrider.models.gpu.small_batch_matmul import PLAIN, Ending, NormParts


def add_norm(residual: Tensor, parts: Tensor | None, norm: NormParts | None, ending: Ending = PLAIN) -> Tensor:
    """The norm of residual + ended parts, [M, H]; without a norm the sum. The residual [M, H] is overwritten with the sum;
    ``parts`` is [M, H] or [parts, M, H], None to add nothing."""
    if norm is None and parts is None:
        return residual
    num_rows, width = residual.shape
    out = residual if norm is None else torch.empty_like(residual)
    num_parts = 0 if parts is None else 1 if parts.dim() == 2 else parts.shape[0]
    post = ending.norm if num_parts else None
    _add_norm[(num_rows,)](
        residual,
        residual if parts is None else parts,
        residual if norm is None else norm.weight,
        residual if norm is None or norm.bias is None else norm.bias,
        residual if post is None else post.weight,
        residual if ending.bias is None else ending.bias,
        out,
        width,
        0.0 if norm is None else norm.eps,
        0.0 if post is None else post.eps,
        ending.scale,
        PARTS=num_parts,
        NORMED=norm is not None,
        CENTRED=norm is not None and norm.centred,
        NORM_BIAS=norm is not None and norm.bias is not None,
        POST=post is not None,
        HAS_BIAS=ending.bias is not None,
        SCALED=ending.scale != 1.0,
        BLOCK=triton.next_power_of_2(width),
        EARLY=launch.EARLY,
        num_warps=8 if width >= 2048 else 4,
        launch_pdl=launch.EARLY,
    )
    return out


@triton.jit
def _add_norm(
    residual, parts, norm, norm_bias, post_norm, bias, out, width, eps, post_eps, factor,
    PARTS: tl.constexpr, NORMED: tl.constexpr, CENTRED: tl.constexpr, NORM_BIAS: tl.constexpr, POST: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < width
    if NORMED:
        gains = tl.load(norm + dims, mask=inside, other=0.0).to(tl.float32)
    begin(EARLY)
    x = tl.load(residual + row * width + dims, mask=inside, other=0.0).to(tl.float32)
    added = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        added += tl.load(parts + (part * tl.num_programs(0) + row) * width + dims, mask=inside, other=0.0).to(tl.float32)
    end(EARLY)
    if PARTS > 0:
        if HAS_BIAS:
            added += tl.load(bias + dims, mask=inside, other=0.0).to(tl.float32)
        if POST:
            added *= tl.rsqrt(tl.sum(added * added, 0) / width + post_eps)
            added *= tl.load(post_norm + dims, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            added *= factor
        rounded = (x + added).to(residual.dtype.element_ty)
        tl.store(residual + row * width + dims, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if NORMED:
        if CENTRED:
            x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
        scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        x = x * scale * gains
        if NORM_BIAS:
            x += tl.load(norm_bias + dims, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + dims, x.to(out.dtype.element_ty), mask=inside)


def added(x: Tensor, parts: Tensor | None, ending: Ending = PLAIN) -> Tensor:
    """The sum of ``add_norm``, in the same order and rounded once, so that tapping a pass does not change it."""
    if parts is None:
        return x
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for part in parts[None] if parts.dim() == 2 else parts:
        total += part.float()
    if ending.bias is not None:
        total += ending.bias.float()
    if ending.norm is not None:
        total = torch.rms_norm(total, total.shape[-1:], ending.norm.weight.float(), ending.norm.eps)
    return (x.float() + total * ending.scale).to(x.dtype)


def summed(parts: Tensor, bias: Tensor | None) -> Tensor:
    """[M, H] the parts [M, H] or [parts, M, H] with the bias, added in their order and rounded once."""
    if parts.dim() == 2 and bias is None:
        return parts
    return add_norm(torch.zeros_like(parts if parts.dim() == 2 else parts[0]), parts, None, Ending(bias))


def ended_logits(logits: Tensor, config: ModelConfig) -> Tensor:
    """The head's products, scaled and squashed as the model declares, in place."""
    if config.logit_scale != 1.0:
        logits = logits.mul_(config.logit_scale)
    cap = config.final_softcap
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
