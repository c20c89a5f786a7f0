"""A float model rounded to 4 or 8 bits on a CPU (``dtype="int4"``, ``"w8a8"``), multiplied by the products of stored matrices.

The weights of 32 inputs share a scale of 16 bits. The weight that is farthest from zero becomes the lowest code, so all codes
are in use and the scale may be negative. The head is rounded to 8 bits either way. The embedding stays in 16 bits.

    scale = farthest / lowest,      code = round(w / scale) in -8 .. 7, or -128 .. 127

This changes the model: speculative text equals the rounded model's own plain decoding. Inputs are rounded to 8 bits for every
product, as for GGUF files.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.layered_target import LayeredTarget
from outrider.models.decoder_weights import LayerWeights, Weights
from outrider.models.features import ModelConfig
from outrider.models.gguf.stored import SPAN
from outrider.models.native import native_decoder
from outrider.models.native.known import multiplies_stored
from outrider.models.quantised.matrix import Quantised
from outrider.models.quantised.stored import FLOATS, StoredRows, rows_of
from outrider.models.rank_sums import Joint

_HEAD_BITS = 8
_TYPES = {4: "Q4_0", 8: "Q8_0"}


def rounded_decoder(
    config: ModelConfig, weights: Weights, bits: int, *, joint: Joint | None = None, page_len: int = 0
) -> LayeredTarget | None:
    """The native decoder on weights of 4 or 8 ``bits``; None where it cannot run, or where inputs are not in groups of 32. With
    a ``joint``, config and weights are one rank's share: it holds whole groups, so rounding it gives the same codes as rounding
    the whole matrix."""
    if not multiplies_stored(config) or any(size % SPAN for size in _inputs(config)):
        return None
    memory = StoredRows(2 * (weights.embedding.numel() + sum(tensor.numel() for tensor in [weights.head, *weights.tensors])))
    layers = [_rounded_layer(layer, bits, memory) for layer in weights.layers]
    head = _table(weights.head, _HEAD_BITS, memory)
    embedding = weights.embedding if weights.embedding.dtype in FLOATS else weights.embedding.bfloat16()
    if joint is None:
        embedding = memory.table(embedding.contiguous().view(torch.uint8), FLOATS[embedding.dtype])
    else:
        embedding = embedding.float()  # its rows are summed over ranks in PyTorch
    weights = replace(weights, embedding=embedding, layers=layers, head=head, file=memory)
    return native_decoder(config, weights, joint=joint, page_len=page_len)


def round_to_codes(weight: Tensor, bits: int) -> Quantised:
    """An [out, in] matrix rounded to the nearest code, with a scale for every 32 inputs."""
    groups, lowest = weight.float().unflatten(1, (-1, SPAN)), -(1 << (bits - 1))
    farthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = (farthest / lowest).half()
    wide = scales.float()
    codes = torch.where(wide == 0, 0.0, groups / wide).round_().clamp_(lowest, -lowest - 1)
    return Quantised(codes.flatten(1).to(torch.int8), scales.squeeze(-1), SPAN, bits)


def _inputs(config: ModelConfig) -> list[int]:
    """Numbers of inputs of all matrices."""
    found, experts = [config.hidden_size, config.num_heads * config.head_dim], config.experts
    found += [] if experts is not None and all(experts.layers) else [config.mlp_size]
    return found if experts is None else [*found, experts.size, experts.shared_size]


def _table(weight: Tensor, bits: int, memory: StoredRows) -> Tensor:
    if weight.dim() == 3:
        return torch.stack([_table(one, bits, memory) for one in weight])
    return memory.table(rows_of(round_to_codes(weight, bits), _TYPES[bits]), _TYPES[bits])


def _rounded_layer(layer: LayerWeights, bits: int, memory: StoredRows) -> LayerWeights:
    names = ("qkv", "out", "gate_up", "down", "shared_gate_up", "shared_down")
    matrices = {name: matrix for name in names if (matrix := vars(layer)[name]) is not None}
    return replace(layer, **{name: _table(matrix, bits, memory) for name, matrix in matrices.items()})
