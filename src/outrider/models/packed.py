"""Matrices in 8 or 4 bits: a pass reads half or a quarter of the bytes, and multiplies with rounded numbers.

Each output (8 bits) or each 128 inputs of an output (4 bits) share a scale, the largest number of theirs over 127 or 7; no
calibration. It changes the model: the text is that of the rounded model, whose own plain decoding is what speculation on it
equals. Two nibbles share a byte: input j of a group of 128 is the low one of byte j, input 64 + j the high one, so that a
tile of bytes is two tiles of inputs, each in order.

    w ~ scale * q,      q = round(w / scale) in -127 .. 127,  or -7 .. 7 stored as q + 8
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from outrider.models.weights import LayerWeights, Weights

GROUP = 128
"""Inputs that share a scale in 4 bits."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A rounded [out, in] matrix."""

    data: Tensor
    """[out, in] int8, or [out, in / 2] uint8."""
    scales: Tensor
    """[1, out], or [in / 128, out]."""

    @property
    def bits(self) -> int:
        return 8 if self.data.dtype == torch.int8 else 4

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def unpacked(self) -> Tensor:
        """[out, in] in the type of the scales."""
        return (self.integers().float() * self._spread()).to(self.scales.dtype)

    def integers(self) -> Tensor:
        """[out, in] the rounded numbers without their scales."""
        if self.bits == 8:
            return self.data
        groups = self.data.unflatten(1, (-1, GROUP // 2))
        return torch.cat((groups & 15, groups >> 4), -1).flatten(1).to(torch.int8) - 8

    def _spread(self) -> Tensor:
        width = self.shape[1] // self.scales.shape[0]
        return self.scales.float().T.repeat_interleave(width, 1)


def pack(weight: Tensor, bits: int) -> Packed:
    """The matrix in so many bits, to the nearest."""
    assert bits == 8 or (bits == 4 and weight.shape[1] % GROUP == 0), "8 bits, or 4 where inputs come in groups of 128"
    num_outputs, depth = weight.shape
    groups = weight.float().view(num_outputs, 1 if bits == 8 else depth // GROUP, -1)
    top = 127 if bits == 8 else 7
    scales = (groups.abs().amax(-1).clamp(min=1e-8) / top).to(weight.dtype)
    whole = (groups / scales.float()[..., None]).round_().clamp_(-top, top)
    scales = scales.T.contiguous()
    if bits == 8:
        return Packed(whole.view(num_outputs, depth).to(torch.int8), scales)
    nibbles = (whole + 8).to(torch.uint8)
    return Packed((nibbles[..., : GROUP // 2] | nibbles[..., GROUP // 2 :] << 4).flatten(1), scales)


Matrix = Tensor | Packed


@dataclass(frozen=True, eq=False)
class Layer:
    """The matrices of a layer, and its other weights (whose matrices are empty where they have been packed)."""

    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    rest: LayerWeights


@dataclass(frozen=True, eq=False)
class Matrices:
    """A decoder's weights as it multiplies with them."""

    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Matrix
    norm_bias: Tensor | None = None

    @property
    def bytes_read(self) -> int:
        """What a pass reads: everything but the embedding, and every expert."""
        small = [
            tensor for layer in self.layers for tensor in vars(layer.rest).values() if tensor is not None and tensor.dim() == 1
        ]
        large = [matrix for layer in self.layers for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return sum(tensor.nbytes for tensor in [*small, *large, self.norm, self.head])


def matrices_of(weights: Weights, bits: int) -> Matrices:
    """16: the weights themselves. 8 or 4: rounded, layer by layer; a matrix whose inputs do not come in groups of 128 takes 8
    bits instead of 4."""
    layers = [_layer(layer, partial(_shrunk, bits=bits)) for layer in weights.layers]
    return Matrices(weights.embedding, layers, weights.norm, _shrunk(weights.head, bits), weights.norm_bias)


def _shrunk(weight: Tensor, bits: int) -> Matrix:
    if bits == 16:
        return weight
    return pack(weight, 4 if bits == 4 and weight.shape[1] % GROUP == 0 else 8)


def _layer(weights: LayerWeights, shrink: Callable[[Tensor], Matrix]) -> Layer:
    """Holds the layer's own matrices no longer where it has packed ones."""
    qkv, out, gate_up, down = (shrink(matrix) for matrix in (weights.qkv, weights.out, weights.gate_up, weights.down))
    if isinstance(qkv, Packed):
        none = weights.qkv.new_empty(0, 0)
        weights = replace(weights, qkv=none, out=none, gate_up=none, down=none)
    return Layer(qkv, out, gate_up, down, weights)
