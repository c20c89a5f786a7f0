"""From packed blocks to numbers: one small function per storage type of GGUF, and one table of them.

A quantised row is cut into blocks of 32 or 256 weights. A block holds small integers q and a scale d (in the K types
also a second layer of per-group scales, in some an offset m), and its weights are

    w = d * q          symmetric:   Q4_0 Q5_0 Q8_0 Q3_K Q6_K Q8_K
    w = d * q + m      with offset: Q4_1 Q5_1 Q2_K Q4_K Q5_K   (K types store m as a positive number to subtract)
    w = d * table[q]   non-linear:  IQ4_NL IQ4_XS

Every function takes raw bytes [num_blocks, block_bytes] and returns float32 weights [num_blocks, block_len]. The
arithmetic keeps ggml's order of operations, so the results are bit for bit those of its reference code.

This uses NumPy, not PyTorch. NumPy's operations on a chunk run in the calling thread, so a thread per chunk uses every core.
PyTorch's parallel loops would cost hundreds of barriers (ten times slower on a busy machine).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes: TypeAlias = NDArray[Any]
"""Arrays of uint8. NumPy's annotations lose that type at the first shift."""
Floats: TypeAlias = NDArray[np.float32]

CHUNK_LEN = 1 << 18
"""Weights unpacked at a time: small enough for the intermediates to stay in a core's cache."""
MAX_THREADS = 16

BITS = np.arange(8, dtype=np.uint8)
BIT_PAIRS = np.arange(0, 8, 2, dtype=np.uint8)
MXFP4_TABLE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
IQ4_TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)


def _f32(values: NDArray[Any]) -> Floats:
    return values.astype(np.float32)


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 stored at byte ``start`` of every block: [num_blocks, 1]."""
    return _f32(blocks[:, start : start + 2].view(np.float16))


def _flat(values: NDArray[Any]) -> NDArray[Any]:
    return values.reshape(len(values), -1)


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] bytes to [..., 2, n]: all low halves first, then all high halves."""
    return np.stack((packed & 15, packed >> 4), axis=-2)


def _single_bits(packed: Bytes) -> Bytes:
    """[..., n] bytes to [..., 8, n]: bit 0 of every byte, then bit 1 of every byte, and so on."""
    return (packed[..., None, :] >> BITS[:, None]) & 1


def _pairs_of_bits(packed: Bytes) -> Bytes:
    """[..., n] bytes to [..., 4, n]: the lowest two bits of every byte, then the next two, and so on."""
    return (packed[..., None, :] >> BIT_PAIRS[:, None]) & 3


def _fifth_bits(packed: Bytes) -> Bytes:
    """The 32-bit word that holds bit 4 of each of 32 weights, as values 0 or 16."""
    return _flat((packed[..., None] >> BITS) & 1) << 4


def _grouped(scale: Floats, q: NDArray[Any], offset: Floats | None = None) -> Floats:
    """scale * q - offset, with scale and offset [n, groups] and q [n, groups * group_len] in any shape."""
    weights = _f32(q.reshape(*scale.shape, -1))
    weights *= scale[..., None]
    if offset is not None:
        weights -= offset[..., None]
    return _flat(weights)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_f32(_flat(_nibbles(blocks[:, 2:]))) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _f32(_flat(_nibbles(blocks[:, 4:]))) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    q = _flat(_nibbles(blocks[:, 6:])) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (_f32(q) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    q = _flat(_nibbles(blocks[:, 8:])) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * _f32(q) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _f32(blocks[:, 2:].view(np.int8))


def _q2_k(blocks: Bytes) -> Floats:
    """16 groups of 16; one byte per group holds its scale (low half) and its offset (high half)."""
    packed_scales, quants = blocks[:, :16], blocks[:, 16:80].reshape(-1, 2, 32)
    scale = _half(blocks, 80) * _f32(packed_scales & 15)
    offset = _half(blocks, 82) * _f32(packed_scales >> 4)
    return _grouped(scale, _pairs_of_bits(quants), offset)


def _q3_k(blocks: Bytes) -> Floats:
    """16 groups of 16; two low bits and one high bit apart, scales of 4 + 2 bits biased by 32."""
    high_bits, quants, packed = blocks[:, :32], blocks[:, 32:96].reshape(-1, 2, 32), blocks[:, 96:108]
    scales = _flat(_nibbles(packed[:, :8])) | (_flat(_pairs_of_bits(packed[:, 8:])) << 4)
    q = _flat(_pairs_of_bits(quants)) | (_flat(_single_bits(high_bits)) << 2)
    return _grouped(_half(blocks, 108) * (_f32(scales) - 32), q.view(np.int8) - 4)


def _scales_and_offsets(blocks: Bytes) -> tuple[Floats, Floats]:
    """The 8 scales and 8 offsets of Q4_K and Q5_K: twelve bytes of 6-bit numbers after the two halves d and dmin.

    Bytes 0-3 and 4-7 hold the first four scales and offsets in their low 6 bits. The other four have their low 4 bits
    in bytes 8-11 (scale low half, offset high half) and their top 2 bits in the spare bits of bytes 0-7.
    """
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, (rest & 15) | (first >> 6 << 4)), axis=1)
    offsets = np.concatenate((second & 63, (rest >> 4) | (second >> 6 << 4)), axis=1)
    return _half(blocks, 0) * _f32(scales), _half(blocks, 2) * _f32(offsets)


def _q4_k(blocks: Bytes) -> Floats:
    """8 groups of 32, with scale and offset; two groups share 32 bytes."""
    scale, offset = _scales_and_offsets(blocks)
    return _grouped(scale, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)), offset)


def _q5_k(blocks: Bytes) -> Floats:
    """Q4_K with a fifth bit: bit g of byte i belongs to weight i of group g."""
    scale, offset = _scales_and_offsets(blocks)
    low, high = _flat(_nibbles(blocks[:, 48:].reshape(-1, 4, 32))), _flat(_single_bits(blocks[:, 16:48]))
    return _grouped(scale, low | (high << 4), offset)


def _q6_k(blocks: Bytes) -> Floats:
    """16 groups of 16 with 8-bit scales; four low bits and two high bits apart, in two halves of 128 weights."""
    low = _flat(_nibbles(blocks[:, :128].reshape(-1, 2, 64)))
    high = _flat(_pairs_of_bits(blocks[:, 128:192].reshape(-1, 2, 32)))
    scale = _half(blocks, 208) * _f32(blocks[:, 192:208].view(np.int8))
    return _grouped(scale, (low | (high << 4)).view(np.int8) - 32)


def _q8_k(blocks: Bytes) -> Floats:
    """A float32 scale and 256 bytes; the sums of 16 that follow only serve dot products."""
    return blocks[:, :4].view(np.float32) * _f32(blocks[:, 4:260].view(np.int8))


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * IQ4_TABLE[_flat(_nibbles(blocks[:, 2:]))]


def _iq4_xs(blocks: Bytes) -> Floats:
    """8 groups of 32 with IQ4_NL's table; 6-bit scales biased by 32, top bits in bytes 2-3, low bits in 4-7."""
    high = _flat((blocks[:, 2:4, None] >> BIT_PAIRS) & 3)
    low = _flat(_nibbles(blocks[:, 4:8, None]))
    scale = _half(blocks, 0) * (_f32(low | (high << 4)) - 32)
    return _grouped(scale, IQ4_TABLE[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))])


def _mxfp4(blocks: Bytes) -> Floats:
    """Floats of 4 bits (e2m1), 32 of them with a power of two; the table has twice their numbers."""
    return np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128) * MXFP4_TABLE[_flat(_nibbles(blocks[:, 1:]))]


@dataclass(frozen=True)
class StorageType:
    """How a tensor's numbers lie in the file."""

    name: str
    block_len: int
    """Weights in a block; the length of a row is a multiple of it."""
    block_bytes: int
    decode: torch.dtype | Callable[[Bytes], Floats]
    """The type of plain numbers, or the function that unpacks blocks."""

    def num_bytes(self, num_weights: int) -> int:
        return num_weights // self.block_len * self.block_bytes


STORAGE_TYPES: dict[int, StorageType] = {
    0: StorageType("F32", 1, 4, torch.float32),
    1: StorageType("F16", 1, 2, torch.float16),
    2: StorageType("Q4_0", 32, 18, _q4_0),
    3: StorageType("Q4_1", 32, 20, _q4_1),
    6: StorageType("Q5_0", 32, 22, _q5_0),
    7: StorageType("Q5_1", 32, 24, _q5_1),
    8: StorageType("Q8_0", 32, 34, _q8_0),
    10: StorageType("Q2_K", 256, 84, _q2_k),
    11: StorageType("Q3_K", 256, 110, _q3_k),
    12: StorageType("Q4_K", 256, 144, _q4_k),
    13: StorageType("Q5_K", 256, 176, _q5_k),
    14: StorageType("Q6_K", 256, 210, _q6_k),
    15: StorageType("Q8_K", 256, 292, _q8_k),
    20: StorageType("IQ4_NL", 32, 18, _iq4_nl),
    23: StorageType("IQ4_XS", 256, 136, _iq4_xs),
    24: StorageType("I8", 1, 1, torch.int8),
    25: StorageType("I16", 1, 2, torch.int16),
    26: StorageType("I32", 1, 4, torch.int32),
    27: StorageType("I64", 1, 8, torch.int64),
    28: StorageType("F64", 1, 8, torch.float64),
    30: StorageType("BF16", 1, 2, torch.bfloat16),
    39: StorageType("MXFP4", 32, 17, _mxfp4),
}
"""Keyed by ggml's type number, as it stands in the file."""

UNSUPPORTED_NAMES: dict[int, str] = {
    **{9: "Q8_1", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M"},
    **{34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}
"""Types we know only by name, so that the refusal can name them."""


def dequantise(raw: Bytes, storage: StorageType, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Unpack the bytes of a whole tensor to a flat tensor of ``dtype`` that owns its memory."""
    if isinstance(storage.decode, torch.dtype):
        return torch.from_numpy(raw).view(storage.decode).to(dtype, copy=True)
    blocks = raw.reshape(-1, storage.block_bytes)
    return torch.from_numpy(_unpack_in_chunks(blocks, storage.decode, storage.block_len)).flatten().to(dtype)


def _unpack_in_chunks(blocks: Bytes, unpack: Callable[[Bytes], Floats], block_len: int) -> Floats:
    weights = np.empty((len(blocks), block_len), dtype=np.float32)
    step = CHUNK_LEN // block_len

    def unpack_chunk(start: int) -> None:
        with np.errstate(all="ignore"):  # infinite scales are the file's business
            weights[start : start + step] = unpack(blocks[start : start + step])

    starts = range(0, len(blocks), step)
    if len(starts) == 1:  # as for every norm and bias: not worth a thread
        unpack_chunk(0)
    else:
        with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1, MAX_THREADS)) as pool:
            list(pool.map(unpack_chunk, starts))
    return weights
