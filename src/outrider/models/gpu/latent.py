"""Latent attention on the fast decoder: products of every head with a matrix of its own, around attention over latents.

    queries = [q_nope K, rotated q_rope]        out = V (what the heads have seen of the latents)

K and V are the parts of the up-projections of keys and values that belong to a head (``models/latent.py``, the oracle). Every
number is one sum in the order of its inputs, so it does not depend on what else is in the pass.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.cache.page_pool import LayerPages
from outrider.models.attention.latent_triton import attend_latents
from outrider.models.attention.latent_write import Entering, parts_of, summed, write_latents
from outrider.models.attention.tree_tiles import Bounds
from outrider.models.features import ModelConfig
from outrider.models.gpu import launch
from outrider.models.gpu.launch import begin, end
from outrider.models.gpu.limits import stages_that_fit
from outrider.models.gpu.products import multiply
from outrider.models.gpu.stream import Step
from outrider.models.gpu.tiles import Kind
from outrider.models.gpu.tree_heads import Heads, TreeHeads
from outrider.models.packed import LayerMatrices
from outrider.models.rope import RotaryTable

_OUTPUTS = 32
"""Outputs of a head that one program computes."""


@final
class LatentHeads(Heads):
    """The attention of a decoder's layers, without the output matrix."""

    def __init__(self, config: ModelConfig, tables: Sequence[RotaryTable], *, exact: bool) -> None:
        """``exact`` means that a node's numbers must not depend on how many share the pass."""
        assert config.latent is not None
        self._config, self._latent, self._tables, self._exact = config, config.latent, tables, exact

    def __call__(self, x: Tensor, index: int, layer: LayerMatrices, memory: LayerPages, steps: Sequence[Step]) -> Tensor:
        weights, latents = layer.rest, memory.keys
        assert weights.key_up is not None and weights.value_up is not None and weights.latent_norm is not None
        latent, config = self._latent, self._config
        down = multiply(x, layer.qkv, Kind.WIDE, exact=self._exact)
        heads = self._heads(down, layer)
        queries = x.new_empty(len(x), config.num_heads, config.head_dim)
        by_head(heads, weights.key_up, queries, step=latent.query_dim)
        cos_sin = self._tables[config.rope_of_layer[index] or 0]
        bias = None if weights.qkv_bias is None else weights.qkv_bias[-config.head_dim :]
        entering = Entering(weights.latent_norm, latent.norm_eps, (cos_sin.cos, cos_sin.sin), latent.query_dim, bias)
        sizes, seen, scale = [step.num_nodes for step in steps], list[Tensor](), config.query_scale
        groups = zip(*(part.split(sizes, -2) for part in (down, heads, queries.flatten(1))), steps, strict=True)
        for *parts, step in groups:
            own_down, own_heads, flat = (part.unflatten(-2, step.shape) for part in parts)
            own, rows, sights = flat.unflatten(-1, queries.shape[1:]), step.rows, step.sights
            write_latents(own_down, own_heads, own, latents, rows, sights=sights, entering=entering)
            found = attend_latents(own, latents, rows, sights=sights, cut=step.cuts[0], scale=scale, rank=latent.rank)
            seen.append(found.view(step.num_nodes, -1))
        out = x.new_empty(len(x), config.num_heads, latent.value_dim)
        by_head(seen[0] if len(seen) == 1 else torch.cat(seen), weights.value_up, out, step=latent.rank)
        return out.flatten(1)

    def _heads(self, down: Tensor, layer: LayerMatrices) -> Tensor:
        """[.., M, ..] products whose first columns are the query heads, possibly in parts that must still be added up."""
        if layer.query_up is None or layer.rest.query_norm is None:
            return down
        normed = _normed(down, layer.rest.query_norm, self._latent.norm_eps, layer.rest.qkv_bias)
        return multiply(normed, layer.query_up, Kind.WIDE, exact=self._exact)


def heads_of(config: ModelConfig, tables: Sequence[RotaryTable], bounds: Sequence[Bounds], *, exact: bool) -> Heads:
    """The attention of a decoder; ``bounds`` are the windows of its layers."""
    if config.latent is not None:
        return LatentHeads(config, tables, exact=exact)
    return TreeHeads(config, tables, bounds, exact=exact)


def _normed(rows: Tensor, norm: Tensor, eps: float, bias: Tensor | None) -> Tensor:
    """[M, rank] the norm of the first columns of [M, ..] or of [parts, M, ..], after their bias."""
    (num_parts, step), num_rows = parts_of(rows, 2), rows.shape[-2]
    out = norm.new_empty(num_rows, len(norm))
    _norm_parts[(num_rows,)](
        rows,
        norm,
        rows if bias is None else bias,
        out,
        len(norm),
        rows.shape[-1],
        step,
        eps,
        PARTS=num_parts,
        HAS_BIAS=bias is not None,
        BLOCK=triton.next_power_of_2(len(norm)),
        EARLY=launch.EARLY,
        num_warps=4,
        launch_pdl=launch.EARLY,
    )
    return out


def by_head(x: Tensor, weight: Tensor, out: Tensor, *, step: int) -> None:
    """out[m, h, :O] = weight[h] x[m, h], with weights [H, O, I]. Head h has I columns of ``x`` [M, ..] from ``h * step`` on;
    rows may be in parts [parts, M, ..] yet to be added up."""
    (num_parts, part_step), num_rows = parts_of(x, 2), x.shape[-2]
    num_heads, num_outputs, depth = weight.shape
    bm = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    bk = min(128, triton.next_power_of_2(max(16, depth)))
    stage_bytes = (_OUTPUTS * weight.element_size() + bm * x.element_size() * num_parts) * bk
    _by_head[(triton.cdiv(num_rows, bm), triton.cdiv(num_outputs, _OUTPUTS), num_heads)](
        x,
        weight,
        out,
        num_rows,
        num_outputs,
        depth,
        x.shape[-1],
        part_step,
        step,
        out.stride(0),
        out.stride(1),
        PARTS=num_parts,
        BM=bm,
        BN=_OUTPUTS,
        BK=bk,
        EARLY=launch.EARLY,
        num_warps=4,
        num_stages=stages_that_fit(3, stage_bytes),
        launch_pdl=launch.EARLY,
    )


@triton.jit
def _norm_parts(
    rows, norm, bias, out, size, width, step, eps,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < size
    gains = tl.load(norm + dims, mask=inside, other=0.0).to(tl.float32)
    begin(EARLY)
    x = summed(rows + row * width + dims, step, inside, PARTS)
    end(EARLY)
    if HAS_BIAS:
        x += tl.load(bias + dims, mask=inside, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / size + eps) * gains
    tl.store(out + row * size + dims, x.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _by_head(
    x, weight, out, num_rows, num_outputs, depth, width, part_step, head_step, out_row, out_head,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    outputs = tl.program_id(1) * BN + tl.arange(0, BN)
    head = tl.program_id(2)
    ks = tl.arange(0, BK)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    weights_at = weight + (head * num_outputs + outputs)[:, None].to(tl.int64) * depth + ks[None, :]
    x_at = x + rows[None, :].to(tl.int64) * width + head * head_step + ks[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    begin(EARLY)
    for k in range(0, depth, BK):
        inside = k + ks < depth
        w = tl.load(weights_at + k, mask=is_output[:, None] & inside[None, :], other=0.0)
        piece = summed(x_at + k, part_step, is_row[None, :] & inside[:, None], PARTS)
        total = tl.dot(w, piece.to(w.dtype), total, input_precision="ieee")
    end(EARLY)
    out_at = out + rows[None, :].to(tl.int64) * out_row + head * out_head + outputs[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])
