"""Matrices in 8 or 4 bits: a pass reads half or a quarter of the bytes, and multiplies with rounded numbers.

There is a scale for each output (8 bits), or for each 128 inputs of an output (4 bits): the largest number divided by 127 or 7,
without calibration. This changes the model. Speculative text equals plain decoding of the rounded model. A byte holds two 4-bit
codes: in a group of 128, byte j has input j in its low half and input 64 + j in its high half. So a tile of bytes is two tiles
of inputs, each in order.

    w ~ scale * q,      q = round(w / scale) in -127 .. 127,  or -7 .. 7 stored as q + 8

Quantised checkpoints (``quantised/packed_rows.py``) come in the same form, rounded by their makers. They may have other groups,
zero points (w = scale * (q - zero)), or e4m3 floats instead of 8-bit integers. In 4 bits they may have indices into a table
(nf4) or e2m1 floats (MXFP4). Scales of e2m1 floats are powers of two, stored as 127 more than the exponent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.models.decoder_weights import STORED_ROWS, LayerWeights, PackedSource, Weights
from outrider.models.few_bits import FewBits

GROUP = 128
"""Inputs that share a scale in 4 bits."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the sixteen e2m1 codes."""


@final
@dataclass(frozen=True, eq=False)
class Packed(FewBits):
    """A rounded [out, in] matrix."""

    outputs_at: ClassVar[Mapping[str, int]] = {"data": 0, "scales": 1, "zeros": 1}

    data: Tensor
    """[out, in] int8 or float8_e4m3fn, or [out, in / 2] uint8."""
    scales: Tensor
    """[groups, out]: one group, or one per 128 inputs. Checkpoints may have any number."""
    zeros: Tensor | None = None
    """[groups, out] bfloat16 zero points; None if they are 0. Only in 4 bits."""
    levels: Tensor | None = None
    """[16] float32 values of the 4-bit codes; None for integers and e2m1 floats."""
    order: Tensor | None = None
    """[in] the input that each column multiplies; None where columns are in order. Matrices with one order share the tensor."""
    rounds_inputs: bool = False
    """Whether inputs are rounded to e4m3 floats, too, for products of the tensor cores (``quantised/float8.py``)."""

    @property
    def bits(self) -> int:
        return 4 if self.data.dtype == torch.uint8 else 8

    @property
    def is_float(self) -> bool:
        """Whether the numbers are e4m3 floats."""
        return self.data.dtype == torch.float8_e4m3fn

    @property
    def is_e2m1(self) -> bool:
        """Whether the numbers are e2m1 floats, whose scales are powers of two."""
        return self.scales.dtype == torch.uint8

    @cached_property
    def values(self) -> tuple[float, ...]:
        """``levels`` as numbers of Python, read from the device once; none where there is no table."""
        return () if self.levels is None else tuple(self.levels.tolist())

    @property
    def group_len(self) -> int:
        """Inputs that share a scale."""
        return -(-self.shape[1] // self.scales.shape[0])

    @property
    def unit(self) -> int:
        if self.order is not None:
            return self.shape[1]
        return 1 if self.bits == 8 and len(self.scales) == 1 else self.group_len

    @property
    def is_usual(self) -> bool:
        """Whether the form is one that ``pack`` makes, which every product supports."""
        groups = self.shape[1] // GROUP if self.bits == 4 else 1
        return self.is_whole and not self.is_float and self.zeros is None and len(self.scales) == groups

    @property
    def is_whole(self) -> bool:
        """Whether the 4-bit codes are integers plus 8."""
        return self.levels is None and not self.is_e2m1

    @property
    def has_units(self) -> bool:
        """Whether scales belong to whole outputs or to 128 inputs, in 4 bits to 64 or 128, as the fastest products need."""
        if self.bits == 8:
            return len(self.scales) == 1 or self.group_len == GROUP
        return not self.is_e2m1 and self.group_len in (GROUP // 2, GROUP)

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.data, self.scales, self.zeros, self.levels) if part is not None)

    @property
    def form(self) -> tuple[object, ...]:
        order = None if self.order is None else self.order.data_ptr()
        kind = self.data.dtype, self.scales.dtype, self.rounds_inputs
        return *kind, self.group_len, self.zeros is None, self.values, order

    @property
    def device(self) -> torch.device:
        return self.data.device

    def unpacked(self, dtype: torch.dtype | None = None) -> Tensor:
        codes, levels = self.integers(), self.levels
        if self.is_e2m1:
            levels = torch.tensor(E2M1, device=codes.device)
        numbers = codes.float() if levels is None else levels[codes.long() + 8]
        if self.zeros is not None:
            numbers = numbers - self._spread(self.zeros)
        numbers = (numbers * self._spread(factors(self.scales))).to(dtype or self.scales.dtype)
        return numbers if self.order is None else numbers[:, self.order.argsort()]

    def integers(self) -> Tensor:
        """[out, in] rounded numbers, or table indices minus 8, without scales and zeros."""
        if self.bits == 8:
            return self.data
        groups = self.data.unflatten(1, (-1, self.group_len // 2))
        return torch.cat((groups & 15, groups >> 4), -1).flatten(1).to(torch.int8) - 8

    def _spread(self, values: Tensor) -> Tensor:
        return values.float().T.repeat_interleave(self.group_len, 1)[:, : self.shape[1]]


def factors(scales: Tensor) -> Tensor:
    """Scales as float32. Powers of two are stored as their exponent plus 127."""
    if scales.dtype != torch.uint8:
        return scales.float()
    return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.to(torch.int32) - 127)


def pack(weight: Tensor, bits: int) -> Packed:
    """The matrix rounded to this many bits."""
    assert bits == 8 or (bits == 4 and weight.shape[1] % GROUP == 0), "8 bits, or 4 where inputs come in groups of 128"
    num_outputs, depth = weight.shape
    groups = weight.float().view(num_outputs, 1 if bits == 8 else depth // GROUP, -1)
    top = 127 if bits == 8 else 7
    scales = _scales(groups, top).to(weight.dtype)
    whole = _whole(groups, scales, top)
    scales = scales.T.contiguous()
    if bits == 8:
        return Packed(whole.view(num_outputs, depth).to(torch.int8), scales)
    nibbles = (whole + 8).to(torch.uint8)
    return Packed((nibbles[..., : GROUP // 2] | nibbles[..., GROUP // 2 :] << 4).flatten(1), scales)


def part_in_eight(part: Tensor, whole: Tensor) -> Tensor:
    """[.., out, inputs + 4] int8: some inputs of a matrix, rounded as ``pack`` rounds the ``whole`` matrix. After an output's
    codes come the bytes of its scale."""
    scales = _scales(whole.float(), 127).to(whole.dtype)
    codes = _whole(part.float(), scales, 127).to(torch.int8)
    return torch.cat((codes, scales.float()[..., None].view(torch.int8)), -1)


def codes_and_scales(rounded: Tensor) -> tuple[Tensor, Tensor]:
    """[out, inputs] int8 codes and [out] float32 scales from the result of ``part_in_eight``."""
    size = torch.float32.itemsize
    return rounded[:, :-size].contiguous(), rounded[:, -size:].contiguous().view(torch.float32)[:, 0]


def _scales(groups: Tensor, top: int) -> Tensor:
    """The largest number of each group over ``top``."""
    return groups.abs().amax(-1).clamp(min=1e-8) / top


def _whole(groups: Tensor, scales: Tensor, top: int) -> Tensor:
    return (groups / scales.float()[..., None]).round_().clamp_(-top, top)


@final
@dataclass(frozen=True, eq=False)
class Stacked:
    """Matrices of different forms that the decoder joins, one below the other."""

    pieces: tuple[FewBits, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(piece.shape[0] for piece in self.pieces), self.pieces[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


Matrix = Tensor | FewBits | Stacked
_LARGE = ("qkv", "out", "gate_up", "down", "shared_gate_up", "shared_down", "query_up")


@dataclass(frozen=True, eq=False)
class LayerMatrices:
    """The matrices of a layer, and its other weights (whose matrices are empty where they have been packed)."""

    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    rest: LayerWeights
    shared_gate_up: Matrix | None = None
    """The same matrices of the shared MLP beside the experts."""
    shared_down: Matrix | None = None
    query_up: Matrix | None = None
    """Computes queries from their latents."""


@dataclass(frozen=True, eq=False)
class Matrices:
    """A decoder's weights in the form used for products."""

    embedding: Tensor | FewBits
    layers: list[LayerMatrices]
    norm: Tensor | None
    head: Matrix
    norm_bias: Tensor | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes that a pass reads: everything but the embedding, with all experts."""
        rest = [vars(layer.rest) for layer in self.layers]
        small = [each[name] for each in rest for name in each.keys() - {*_LARGE} if each[name] is not None]
        large = [each for layer in self.layers for name in _LARGE if (each := vars(layer)[name]) is not None]
        last = [] if self.norm is None else [self.norm]
        return sum(tensor.nbytes for tensor in [*small, *large, *last, self.head])


def matrices_of(weights: Weights, bits: int) -> Matrices:
    """The weights themselves for 16 bits; for 8 or 4, rounded layer by layer. A matrix whose inputs are not a multiple of
    128 takes 8 bits instead of 4."""
    shrink = partial(_shrunk, bits=bits, rows=weights.rows)
    embedding = _kept_embedding(weights)
    head = embedding if weights.head is weights.embedding and isinstance(embedding, FewBits) else shrink(weights.head)
    layers = [_layer(layer, shrink, weights.dtype) for layer in weights.layers]
    return Matrices(embedding, layers, weights.norm, head, weights.norm_bias)


def _kept_embedding(weights: Weights) -> Tensor | FewBits:
    """The embedding in 16 bits, or as its file has it."""
    if weights.embedding.dtype != STORED_ROWS:
        return weights.embedding
    found = _shrunk(weights.embedding, 16, weights.rows)
    assert isinstance(found, FewBits), "one matrix of a file has one form"
    return found


def _shrunk(weight: Tensor, bits: int, rows: PackedSource | None) -> Matrix:
    if weight.dtype == STORED_ROWS:
        assert rows is not None, "tables of rows come with what holds them"
        return rows.matrix(weight)
    if bits == 16:
        return weight
    return packed_if_in_groups(weight, bits)


def packed_if_in_groups(weight: Tensor, bits: int) -> Packed:
    """The matrix rounded to this many bits, or to 8 where its inputs do not come in groups of 128. Experts stand one below the
    other."""
    weight = weight.flatten(0, -2)
    return pack(weight, 4 if bits == 4 and weight.shape[1] % GROUP == 0 else 8)


def _layer(weights: LayerWeights, shrink: Callable[[Tensor], Matrix], dtype: torch.dtype) -> LayerMatrices:
    """A layer that drops its original matrices once they are packed."""
    found = {name: shrink(matrix) for name in _LARGE if (matrix := vars(weights)[name]) is not None}
    if weights.router is not None:
        found |= {name: _of_experts(found[name], len(weights.router), dtype) for name in ("gate_up", "down")}
    none = weights.qkv.new_empty(0, 0)
    rest = replace(weights, **{name: none for name, matrix in found.items() if not isinstance(matrix, Tensor)})
    return LayerMatrices(rest=rest, **found)


def _of_experts(matrix: Matrix, count: int, dtype: torch.dtype) -> Matrix:
    """Experts in one form, or [E, out, in] in ``dtype`` where they come in several: one product multiplies all of them."""
    if not isinstance(matrix, Stacked):
        return matrix
    return torch.cat([piece.unpacked(dtype) for piece in matrix.pieces]).unflatten(0, (count, -1))
