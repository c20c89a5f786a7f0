"""An EAGLE head's layer on the decoder's kernels. Its products run at memory bandwidth, and attention covers its own rows.

The oracle is ``models/heads/eagle.py``. Here embedding, gathered states and their norms are one kernel, followed by the kernels
of a decoder layer. Matrices that are read together are stored together, and the head's own tensors become views of them, so
nothing is stored twice. The results are guesses, so they need not be exact to the last bit.

    EAGLE-1   y = fc [e ; s],            layer(y),            logits = W s'
    EAGLE-3   y = [n1(e) ; n2(s)],       s + layer(y),        logits = W norm(s')
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from outrider.models.attention.tree_cut import cut_for
from outrider.models.attention.tree_tiles import Rows, Sights
from outrider.models.attention.tree_triton import attend_tree, rotate_and_write
from outrider.models.gpu import launch
from outrider.models.gpu.launch import begin, end
from outrider.models.gpu.products import multiply
from outrider.models.gpu.small_batch_matmul import NormParts
from outrider.models.gpu.sums import add_norm, added
from outrider.models.gpu.tiles import Kind
from outrider.models.heads import head as heads
from outrider.models.heads.eagle import EagleHead
from outrider.models.heads.eagle1 import Eagle1Head
from outrider.models.heads.eagle3 import Eagle3Head
from outrider.models.heads.layer import HeadLayer
from outrider.models.rope import RotaryTable


@dataclass(frozen=True, eq=False)
class NodePlaces:
    """Places of the nodes of a pass among the columns of their rows."""

    memory: tuple[Tensor, Tensor]
    """[P, Hkv, L, D] pages of keys and values."""
    rows: Rows
    sights: Sights


@dataclass(frozen=True, eq=False)
class ParentStates:
    """The states before the nodes: those of their parents, or the target's."""

    states: Tensor
    """[B, M, H]"""
    index: Tensor | None = None
    """[B, N] int64 which state each node continues; None if each node has its own."""


@final
class FastHead:
    """The layer, its embedding and its output matrix."""

    def __init__(self, head: EagleHead) -> None:
        assert isinstance(head, Eagle1Head | Eagle3Head) and head.config.layer is not None
        self.head, self.config = head, head.config.layer
        layer = head.midlayer if isinstance(head, Eagle3Head) else head.layers[0]
        assert isinstance(layer, HeadLayer)
        attention, mlp = layer.self_attn, layer.mlp
        self._layer = layer
        self._qkv = together((attention.q_proj, attention.k_proj, attention.v_proj))
        self._gate_up = together((mlp.gate_proj, mlp.up_proj))
        biases = [p.bias for p in (attention.q_proj, attention.k_proj, attention.v_proj) if p.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        weight = self._qkv
        self._table = RotaryTable(
            self.config.ropes[0],
            self.config.head_dim,
            context_len=self.config.max_len,
            dtype=weight.dtype,
            device=weight.device,
        )
        self._table.reach(self.config.max_len + 64)
        self.ids = None if head.config.draft_vocab_size == head.config.vocab_size else head.target_ids

    @staticmethod
    def can_run(head: EagleHead) -> bool:
        """Whether the kernels can run this layer."""
        layer = head.config.layer
        return isinstance(head, Eagle1Head | Eagle3Head) and (
            layer is not None and layer.activation == "silu" and not layer.out_bias and layer.head_dim in (16, 32, 64, 128, 256)
        )

    def fuse(self, features: Tensor) -> Tensor:
        """[B, N, H] the target's states as input of the layer."""
        if isinstance(self.head, Eagle1Head):
            return self.head.fuse(features)
        flat = features.reshape(-1, features.shape[-1])
        return _summed(multiply(flat, self.head.fc.weight, Kind.NARROW), flat.dtype).view(*features.shape[:-1], -1)

    def step(self, tokens: Tensor, above: ParentStates, standing: NodePlaces) -> tuple[Tensor, Tensor]:
        """The residual stream [B * N, H] after ``tokens`` [B, N], and what the MLP has yet to add to it."""
        x, stream = self._enter(tokens, above)
        seen = self._attention(x.view(*tokens.shape, -1), standing)
        parts = multiply(seen, self._layer.self_attn.o_proj.weight, Kind.NARROW)
        normed = add_norm(stream, parts, _norm(self._layer.post_attention_layernorm))
        gated = multiply(normed, self._gate_up, Kind.GATED)
        return stream, multiply(gated, self._layer.mlp.down_proj.weight, Kind.NARROW)

    def read(self, stream: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        """[M, H] states and [M, Vd] logits from the result of ``step``."""
        if isinstance(self.head, Eagle3Head):
            normed = add_norm(stream, parts, _norm(self.head.norm))  # the stream is complete after it
            return stream, multiply(normed, self.head.lm_head.weight, Kind.HEAD)
        assert isinstance(self.head, Eagle1Head)
        states = added(stream, parts)
        weight = self.head.lm_head.weight if self.head.has_readout else self.head.embed_tokens.weight
        return states, multiply(states, weight, Kind.HEAD)

    def _enter(self, tokens: Tensor, above: ParentStates) -> tuple[Tensor, Tensor]:
        """Input of attention [M, ..], and the stream to which its output is added."""
        states, embedding = above.states, self.head.embed_tokens.weight
        size, num_rows = states.shape[-1], tokens.numel()
        x = states.new_empty(num_rows, 2 * size)
        stream = states.new_empty(num_rows, size)
        normed = isinstance(self.head, Eagle3Head)
        gains = (self._layer.input_layernorm, self._layer.hidden_norm) if normed else (None, None)
        first, second = (embedding if gain is None else gain.weight for gain in gains)
        _enter[(num_rows,)](
            tokens.contiguous(), embedding, states, tokens if above.index is None else above.index, first, second, x, stream,
            tokens.shape[1], states.shape[1], size, self.config.norm_eps,
            INDEXED=above.index is not None, NORMED=normed, BLOCK=triton.next_power_of_2(size), EARLY=launch.EARLY,
            num_warps=8 if size >= 2048 else 4, launch_pdl=launch.EARLY,
        )  # fmt: skip
        if isinstance(self.head, Eagle1Head):
            x = _summed(multiply(x, self.head.fc.weight, Kind.NARROW), x.dtype)
            return x, x
        return x, stream

    def _attention(self, x: Tensor, standing: NodePlaces) -> Tensor:
        batch_size, num_nodes, width = x.shape
        qkv = multiply(x.view(-1, width), self._qkv, Kind.WIDE)
        qkv = qkv.view(*qkv.shape[:-2], batch_size, num_nodes, -1)
        memory, rows, sights, config = standing.memory, standing.rows, standing.sights, self.config
        tables = (self._table.cos, self._table.sin)
        queries = rotate_and_write(qkv, memory, rows, sights=sights, tables=tables, bias=self._bias)
        num_queries, capacity = num_nodes * config.num_heads // config.num_kv_heads, rows.places.shape[1] * rows.page_len
        cut = cut_for(batch_size, num_queries, num_kv_heads=config.num_kv_heads, capacity=capacity, invariant=False)
        seen = attend_tree(queries, memory, rows, sights=sights, cut=cut, scale=config.query_scale)
        return seen.view(batch_size * num_nodes, -1)


def together(parts: Sequence[nn.Linear]) -> Tensor:
    """The matrices joined into one, of which they become views. Matrices that are already adjacent stay where they are."""
    weights = [part.weight.detach() for part in parts]
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    adjacent = all(weight.data_ptr() == end for weight, end in zip(weights[1:], ends, strict=False))
    num_rows = sum(map(len, weights))
    if adjacent and weights[0].untyped_storage().data_ptr() == weights[-1].untyped_storage().data_ptr():
        return weights[0].as_strided((num_rows, weights[0].shape[1]), weights[0].stride())
    whole = torch.cat(weights)
    for part, weight in zip(parts, whole.split([len(weight) for weight in weights]), strict=True):
        part.weight = nn.Parameter(weight, requires_grad=False)
    return whole


def _summed(parts: Tensor, dtype: torch.dtype) -> Tensor:
    return parts if parts.dim() == 2 else parts.sum(0).to(dtype)


def _norm(norm: heads.HeadNorm) -> NormParts:
    return NormParts(norm.weight, norm.eps)


@triton.jit(do_not_specialize=["num_nodes", "num_states"])
def _enter(
    tokens, embedding, states, index, first_norm, second_norm, x, stream, num_nodes, num_states, width, eps,
    INDEXED: tl.constexpr, NORMED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    flat = tl.program_id(0)
    row = flat // num_nodes
    dims = tl.arange(0, BLOCK)
    inside = dims < width
    begin(EARLY)
    token = tl.load(tokens + flat)
    state = tl.load(index + flat) if INDEXED else (flat % num_nodes).to(tl.int64)
    e = tl.load(embedding + token * width + dims, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(states + (row * num_states + state) * width + dims, mask=inside, other=0.0).to(tl.float32)
    end(EARLY)
    tl.store(stream + flat.to(tl.int64) * width + dims, s.to(stream.dtype.element_ty), mask=inside)
    if NORMED:
        e *= tl.rsqrt(tl.sum(e * e, 0) / width + eps) * tl.load(first_norm + dims, mask=inside, other=0.0).to(tl.float32)
        s *= tl.rsqrt(tl.sum(s * s, 0) / width + eps) * tl.load(second_norm + dims, mask=inside, other=0.0).to(tl.float32)
    at = x + flat.to(tl.int64) * 2 * width + dims
    tl.store(at, e.to(x.dtype.element_ty), mask=inside)
    tl.store(at + width, s.to(x.dtype.element_ty), mask=inside)
