"""GGUF files on a GPU: each matrix as stored, with its blocks split into the planes of ``models/planes.py``.

No number changes: the scales and codes of a block are those of the file. A product multiplies what ``gguf/quants.py``
dequantises, rounded to the type of the activations. Where the codes of a type lie in its blocks is data (``LAYOUTS``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from outrider.models.decoder_weights import Weights
from outrider.models.features import ModelConfig
from outrider.models.few_bits import FewBits
from outrider.models.gguf.reader import GGUFFile, TensorEntry
from outrider.models.gguf.stored import StoredTensors, stored_matrices
from outrider.models.gpu import can_run as gpu_can_run
from outrider.models.gpu.known import head_dim_for, missing_features
from outrider.models.packed import Packed
from outrider.models.planes import Planes, together
from outrider.models.quantised.packed_rows import PackedRows
from outrider.models.weights import read_weights

_MXFP4 = "MXFP4"


@dataclass(frozen=True)
class Field:
    """Codes of ``bits`` in the bytes ``start`` to ``stop`` of a block. The lowest bits of ``run`` bytes belong to as many
    neighbouring weights, the next bits to those that follow."""

    start: int
    stop: int
    bits: int
    run: int

    def read(self, blocks: Tensor) -> Tensor:
        """[blocks, weights] uint8."""
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=blocks.device)[:, None]
        runs = blocks[:, self.start : self.stop].unflatten(1, (-1, 1, self.run))
        return ((runs >> shifts) & ((1 << self.bits) - 1)).flatten(1)


Steps = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""The steps of scales and of offsets [blocks, groups], from blocks."""


@dataclass(frozen=True)
class Layout:
    """Positions of a storage type's numbers within its blocks."""

    low: Field
    middle: int
    scale: int
    """The byte at which the float of the block begins."""
    high: Field | None = None
    offset: int | None = None
    """The byte at which the float of the offsets begins."""
    subtracts: bool = False
    """Whether offsets are subtracted."""
    steps: Steps | None = None
    is_signed: bool = False
    """Whether codes are signed bytes."""


def _signed_bytes(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Q6_K: a byte with a sign for each of 16 groups."""
    return blocks[:, 192:208].view(torch.int8), None


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Q4_K and Q5_K: 8 scales and 8 offsets of 6 bits (``quants._scales_and_offsets``)."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), 1)
    offsets = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), 1)
    return scales.view(torch.int8), offsets.view(torch.int8)


LAYOUTS: Mapping[str, Layout] = {
    "Q8_0": Layout(Field(2, 34, 8, 1), 128, 0, is_signed=True),
    "Q4_0": Layout(Field(2, 18, 4, 16), 8, 0),
    "Q4_1": Layout(Field(4, 20, 4, 16), 0, 0, offset=2),
    "Q5_0": Layout(Field(6, 22, 4, 16), 16, 0, high=Field(2, 6, 1, 1)),
    "Q5_1": Layout(Field(8, 24, 4, 16), 0, 0, high=Field(4, 8, 1, 1), offset=2),
    "Q4_K": Layout(Field(16, 144, 4, 32), 0, 0, offset=2, subtracts=True, steps=_six_bits),
    "Q5_K": Layout(Field(48, 176, 4, 32), 0, 0, high=Field(16, 48, 1, 32), offset=2, subtracts=True, steps=_six_bits),
    "Q6_K": Layout(Field(0, 128, 4, 64), 32, 208, high=Field(128, 192, 2, 32), steps=_signed_bytes),
}


def planes_of(rows: Tensor, entry: TensorEntry) -> Planes:
    """A matrix from the bytes of its rows [out, bytes], on their device. Experts stand one below the other."""
    layout, num_outputs, num_inputs = LAYOUTS[entry.storage.name], math.prod(entry.shape[:-1]), entry.shape[-1]
    blocks = rows.reshape(-1, entry.storage.block_bytes)

    def by_output(values: Tensor) -> Tensor:
        return values.reshape(num_outputs, -1).T.contiguous()

    low = layout.low.read(blocks).view(num_outputs, num_inputs)
    high = None if layout.high is None else layout.high.read(blocks).view(num_outputs, num_inputs)
    if layout.is_signed:
        low ^= 128
    if layout.low.bits == 8:
        low, high = low & 15, low >> 4
    found = Planes(together(low, 4), by_output(_half(blocks, layout.scale)), layout.middle)
    if high is not None:
        bits = 4 if layout.low.bits == 8 else layout.high.bits if layout.high is not None else 0
        found = replace(found, high=together(high, bits))
    if layout.offset is not None:
        offsets = by_output(_half(blocks, layout.offset))
        found = replace(found, offsets=-offsets if layout.subtracts else offsets)
    if layout.steps is not None:
        steps, offset_steps = layout.steps(blocks)
        offset_steps = None if offset_steps is None else by_output(offset_steps)
        found = replace(found, steps=by_output(steps), offset_steps=offset_steps)
    return found


def mxfp4_of(rows: Tensor, entry: TensorEntry) -> Packed:
    """Floats of 4 bits (MXFP4) as a packed matrix: a block is the exponent of its scale, then the codes of 32 weights."""
    blocks, num_outputs = rows.reshape(-1, entry.storage.block_bytes), math.prod(entry.shape[:-1])
    scales = blocks[:, 0].reshape(num_outputs, -1).T.contiguous()
    return Packed(blocks[:, 1:].reshape(num_outputs, -1).contiguous(), scales)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at a byte of every block."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def planes_source(file: GGUFFile, device: torch.device, dtype: torch.dtype) -> tuple[StoredTensors, PackedRows]:
    """The tensors of a GGUF file, matrices as tables of the rows beside them. ``dtype`` of the activations."""
    rows = PackedRows(dtype)
    kept = [entry for name in stored_matrices(file) if (entry := file.tensors[name]) and _stays(entry)]

    def made(entry: TensorEntry) -> FewBits:
        read = mxfp4_of if entry.storage.name == _MXFP4 else planes_of
        return read(file.rows(entry.name).to(device), entry)

    tables = {entry.name: _table(rows, entry, partial(made, entry)) for entry in kept}
    return StoredTensors(file, tables, instead="16 bits", stay=(*LAYOUTS, _MXFP4)), rows


def _stays(entry: TensorEntry) -> bool:
    """Whether products take the matrix as stored. Floats of 4 bits are those of experts."""
    return entry.storage.name in LAYOUTS or (entry.storage.name == _MXFP4 and len(entry.shape) == 3)


def _table(rows: PackedRows, entry: TensorEntry, make: Callable[[], FewBits]) -> Tensor:
    """[.., 2] the table of a matrix, or of all experts' matrices."""
    return rows.later(math.prod(entry.shape[:-1]), make).view(*entry.shape[:-1], 2)


def why_not_on_gpu(config: ModelConfig) -> list[str]:
    """Why a GPU cannot multiply the matrices of a GGUF file as stored; empty if it can."""
    found = {
        "latent attention in the blocks of a file": config.latent is not None,
        f"heads of {config.head_dim} in the blocks of a file": head_dim_for(config) != config.head_dim,
    }
    return [*missing_features(config), *(words for words, is_missing in found.items() if is_missing)]


def gguf_planes(config: ModelConfig, file: GGUFFile, device: torch.device) -> Weights | None:
    """The weights of a GGUF file for the fast decoder of a GPU, matrices as stored; None where it cannot."""
    if why_not_on_gpu(config) or not gpu_can_run(config, torch.bfloat16, device):
        return None
    source, rows = planes_source(file, device, torch.bfloat16)
    weights = read_weights(source, config, dtype=torch.bfloat16, device=device)
    return replace(weights, rows=rows)
