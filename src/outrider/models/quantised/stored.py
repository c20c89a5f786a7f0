"""Quantised matrices that stay so on a CPU: their codes in the layout that the native pass multiplies.

The pass knows the blocks of 32 weights of GGUF files (``gguf/stored.py``) and types that are ours (``OWN``). A group of 64 or
128 inputs becomes blocks with the same scale. No number changes: a matrix takes the first type that holds it exactly.

    Q4_0, Q8_0   scale of 16 bits, the zero is the middle of the codes
    Q4_Z         scale of 16 bits, and the zero as a code: scale * zero would not fit into the 16 bits of a Q4_1 offset
    Q4_F, Q8_F   scale of 32 bits, and the zero as a code

Codes of floats and act-order have no such layout: those matrices are dequantised. Embedding and head stay in the 16 bits that
the checkpoint has. Inputs are rounded to 8 bits for codes, as for GGUF files, and stay floats for the head.
"""

from __future__ import annotations

import mmap
import sys
import warnings
from typing import final

import numpy as np
import torch
from torch import Tensor

from outrider.models.decoder_weights import STORED_ROWS
from outrider.models.gguf.stored import SPAN
from outrider.models.gguf.stored import STORED as GGUF_TYPES
from outrider.models.quantised.folder import QuantisedFolder
from outrider.models.quantised.matrix import Quantised
from outrider.models.weights import TensorSource

OWN = ("Q4_Z", "Q4_F", "Q8_F", "F16", "BF16")
"""Types that no GGUF file has here, in the order in which ``native/stored_types.hpp`` numbers them, after those of GGUF."""
TYPES = {name: 1 + number for number, name in enumerate((*GGUF_TYPES, *OWN))}
FLOATS = {torch.float16: "F16", torch.bfloat16: "BF16"}
MOST_BYTES = 37
"""Of a block of 32 weights, whatever its type."""
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_ENDS = ("embed_tokens.weight", "lm_head.weight")


@final
class RowMemory:
    """Rows of stored matrices, written one after the other; a page is taken when it is written, and given back when asked."""

    def __init__(self, num_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, max(1, num_bytes))
        self._bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self._used = 0

    @property
    def address(self) -> int:
        """Where the rows lie in memory."""
        return self._bytes.ctypes.data

    def table(self, rows: Tensor, kind: str) -> Tensor:
        """Keep rows [out, bytes] of one type: where each begins, and the number of the type."""
        size = rows.numel()
        self._bytes[self._used : self._used + size] = rows.reshape(-1).numpy()
        begins = self._used + rows.shape[1] * torch.arange(len(rows), dtype=STORED_ROWS)
        self._used += size
        return torch.stack((begins, torch.full_like(begins, TYPES[kind])), 1)

    def forget(self, begin: int, end: int) -> None:
        """Give back the memory of rows that have been packed."""
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if sys.platform == "linux" and first < last:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


@final
class StoredFolder(TensorSource):
    """The tensors of a quantised checkpoint, its matrices as rows of ``memory`` where a type holds them exactly."""

    def __init__(self, folder: QuantisedFolder) -> None:
        self.origin, self._folder = folder.origin, folder
        self.memory = RowMemory(-(-folder.num_parameters // SPAN) * 2 * SPAN)
        self._ready: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        self.num_dequantised = 0

    @property
    def names(self) -> frozenset[str]:
        return self._folder.names

    def read(self, name: str) -> Tensor:
        return self._folder.read(name)

    def take(self, name: str, *shape: int) -> Tensor:
        if name.endswith(_ENDS) and name in self.names and name not in self._folder.quantised_names:
            return self._end(name, shape)
        if name not in self._folder.quantised_names:
            return super().take(name, *shape)
        if name not in self._ready:
            self._prepare(_beside(name))
        tensor, found = self._ready.pop(name)
        self.check_shape(name, found, shape)
        return tensor

    def warn(self) -> None:
        """Say how many quantised matrices had to be dequantised."""
        if self.num_dequantised:
            total, form = len(self._folder.quantised_names), self._folder.form.title
            warnings.warn(
                f"{self.origin}: {self.num_dequantised} of {total} quantised matrices ({form}) are multiplied in float32",
                stacklevel=4,
            )

    def _prepare(self, names: list[str]) -> None:
        """Matrices that the decoder joins: all of them stay, or none."""
        quantised = self._folder.quantised_names
        found = {name: self._folder.matrix(name) if name in quantised else None for name in names if name in self.names}
        kinds = {name: None if matrix is None else type_of(matrix) for name, matrix in found.items()}
        for name, matrix in found.items():
            kind = kinds[name]
            if matrix is None or kind is None or None in kinds.values():
                self.num_dequantised += name in quantised
                whole = self._folder.read(name)
                self._ready[name] = whole, tuple(whole.shape)
            else:
                self._ready[name] = self.memory.table(rows_of(matrix, kind), kind), matrix.shape

    def _end(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Embedding or head in the 16 bits that it has."""
        whole = super().take(name, *shape)
        if whole.dtype not in FLOATS or shape[1] % SPAN:
            return whole.float()
        return self.memory.table(whole.contiguous().view(torch.uint8).view(len(whole), -1), FLOATS[whole.dtype])


def type_of(matrix: Quantised) -> str | None:
    """The first type that holds the matrix exactly; None where there is none."""
    if matrix.is_float or matrix.group_of is not None or matrix.shape[1] % SPAN:
        return None
    if matrix.scales.shape[1] > 1 and matrix.group_len % SPAN:
        return None
    wide = matrix.scales.float()
    fits = torch.equal(wide.half().float(), wide)
    if matrix.bits == 8:
        return "Q8_0" if fits and matrix.zeros is None else "Q8_F"
    return "Q4_F" if not fits else "Q4_0" if matrix.zeros is None else "Q4_Z"


def rows_of(matrix: Quantised, kind: str) -> Tensor:
    """[out, bytes of a row] uint8: the matrix in blocks of this type."""
    num_outputs, num_inputs = matrix.shape
    blocks = num_inputs // SPAN
    scales = _per_block(matrix, matrix.scales.to(torch.float32 if kind.endswith("F") else torch.float16))
    parts = [scales.unsqueeze(-1).view(torch.uint8)]
    if kind in OWN:
        zeros = matrix.zeros if matrix.zeros is not None else torch.zeros_like(matrix.scales, dtype=torch.int16)
        parts.append(_per_block(matrix, zeros).to(torch.int8).unsqueeze(-1).view(torch.uint8))
    codes = matrix.codes.view(num_outputs, blocks, SPAN)
    if matrix.bits == 8:
        parts.append(codes.view(torch.uint8))
    else:
        numbers = (codes + 8).view(torch.uint8)
        parts.append(numbers[..., : SPAN // 2] | numbers[..., SPAN // 2 :] << 4)
    return torch.cat(parts, -1).flatten(1)


def _per_block(matrix: Quantised, values: Tensor) -> Tensor:
    """[out, blocks] from [out, groups]."""
    blocks = matrix.shape[1] // SPAN
    return values.repeat_interleave(-(-blocks // values.shape[1]), 1)[:, :blocks].contiguous()


def _beside(name: str) -> list[str]:
    """A matrix and those that the decoder joins it with."""
    before, _, stem = name.removesuffix(".weight").rpartition(".")
    joined = next((group for group in _JOINED if stem in group), (stem,))
    return [f"{before}.{other}.weight" for other in joined]
