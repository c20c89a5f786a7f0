"""A model whose products multiply e4m3 floats on a GPU (``dtype="w8a8"``): weights and inputs are rounded to 8 bits.

Matrices of an FP8 checkpoint keep their codes and scales. Others are rounded, with a scale for every output. Inputs are rounded
in every product. 128 neighbouring inputs of a row share a scale, a power of two.

    w ~ scale * code      scale = largest / 448
    x ~ step * code       step = the power of two for which largest / step is in 224 .. 448

This changes the model: speculative text equals the rounded model's own plain decoding. Embedding and head keep 16 bits, and so
do matrices whose inputs do not come in groups of 128. Experts have inputs of 16 bits. The products are in
``gpu/float8_matmul.py``; on a CPU the same option multiplies whole numbers (``weight_rounding.py``).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.layered_target import LayeredTarget
from outrider.models.decoder_weights import STORED_ROWS, LayerWeights, Weights
from outrider.models.features import ModelConfig
from outrider.models.gpu import can_run, gpu_decoder
from outrider.models.gpu.known import head_dim_for
from outrider.models.packed import GROUP, Packed
from outrider.models.padded_heads import with_wider_heads
from outrider.models.quantised.packed_rows import PackedRows

LARGEST = 448.0
"""The largest e4m3 float."""
_ALL = ("qkv", "out", "gate_up", "down", "shared_gate_up", "shared_down", "query_up")
_OF_EXPERTS = ("gate_up", "down")


def float8_decoder(config: ModelConfig, weights: Weights, *, numerics: str, page_len: int) -> LayeredTarget | None:
    """The fast decoder on e4m3 floats; None where it cannot run, or the device has no such products. One kernel multiplies any
    number of rows, so ``auto`` is invariant."""
    device = weights.embedding.device
    if not can_run(config, torch.bfloat16, device) or torch.cuda.get_device_capability(device) < (8, 9):
        return None
    wider, rounded = float8_weights(config, weights)
    return gpu_decoder(wider, rounded, numerics="invariant" if numerics == "auto" else numerics, page_len=page_len)


def float8_weights(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
    """The model with its matrices as e4m3 floats, as an FP8 checkpoint gives it."""
    rows = weights.rows if isinstance(weights.rows, PackedRows) else PackedRows(weights.dtype)
    config, weights = with_wider_heads(config, weights, head_dim_for(config))
    return config, replace(weights, layers=[_rounded_layer(layer, rows) for layer in weights.layers], rows=rows)


def round_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """[M, K] e4m3 codes and [M, units] steps of inputs, in plain PyTorch: the oracle."""
    units = x.float().unflatten(-1, (-1, GROUP))
    mantissas, exponents = torch.frexp(units.abs().amax(-1))
    exponents = torch.where(mantissas > 0.875, exponents - 8, exponents - 9).clamp(min=-126)
    steps = torch.ldexp(torch.ones_like(mantissas), exponents)
    return (units / steps[..., None]).to(torch.float8_e4m3fn).flatten(-2), steps


def pack_floats(weight: Tensor) -> Packed:
    """The [out, in] matrix in e4m3 floats with a scale for every output."""
    scales = weight.float().abs().amax(-1).clamp(min=1e-8) / LARGEST
    return Packed((weight.float() / scales[:, None]).to(torch.float8_e4m3fn), scales[None])


def _rounded_layer(layer: LayerWeights, rows: PackedRows) -> LayerWeights:
    found = {name: matrix for name in _ALL if (matrix := vars(layer)[name]) is not None and matrix.dtype != STORED_ROWS}
    tables: dict[str, Tensor] = {}
    for name, matrix in found.items():
        is_of_experts = layer.router is not None and name in _OF_EXPERTS
        if matrix.shape[-1] % GROUP == 0:
            packed = replace(pack_floats(matrix.flatten(0, -2)), rounds_inputs=not is_of_experts)
            tables[name] = rows.table(packed).unflatten(0, matrix.shape[:-1])
    return replace(layer, **tables)
