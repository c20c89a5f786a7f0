"""Quantised matrices that stay quantised on a CPU, with codes in the layout that the native pass multiplies.

The pass knows the blocks of 32 weights of GGUF files (``gguf/stored.py``) and types that are ours (``OWN``). A group of 64 or
128 inputs becomes blocks with the same scale. No number changes: a matrix takes the first type that holds it exactly.

    Q4_0, Q8_0   scale of 16 bits, the zero is the middle of the codes
    Q4_Z         scale of 16 bits, and the zero as a code: scale * zero would not fit into the 16 bits of a Q4_1 offset
    Q4_F, Q8_F   scale of 32 bits, and the zero as a code
    Q5_0         MXFP4: twice an e2m1 float is a whole number from -12 to 12, and half its power of two a scale of 16 bits

With act-order, columns are reordered by their groups. Matrices with other float codes have no such layout and are dequantised.
Embedding and head keep the checkpoint's 16 bits. Inputs are rounded to 8 bits for products with codes, as for GGUF files, and
stay floats for the head.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from outrider.models.decoder_weights import STORED_ROWS
from outrider.models.gguf.stored import NUMBERS, SPAN
from outrider.models.packed import factors
from outrider.models.quantised.folder import QuantisedFolder
from outrider.models.quantised.kept import KeptFolder
from outrider.models.quantised.matrix import Quantised

OWN = ("Q4_Z", "Q4_F", "Q8_F", "F16", "BF16")
"""Types that no GGUF file has here, in the order in which ``native/stored_types.hpp`` numbers them, from 11."""
TYPES = NUMBERS | {name: 11 + number for number, name in enumerate(OWN)}
FLOATS = {torch.float16: "F16", torch.bfloat16: "BF16"}
_ENDS = ("embed_tokens.weight", "lm_head.weight")
_MOST_OF_FIVE = 15
"""The largest whole number of 5 bits with a sign."""


@final
class StoredRows:
    """Rows of stored matrices, written one after the other; a page is taken when it is written, and given back when asked."""

    def __init__(self, num_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, max(1, num_bytes))
        self._bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self._used = 0
        self._orders: dict[range, Tensor] = {}
        """The order for rows that begin in a range of bytes."""

    @property
    def address(self) -> int:
        """The address of the rows in memory."""
        return self._bytes.ctypes.data

    @property
    def adds_halves(self) -> bool:
        """The head of a quantised checkpoint keeps float inputs."""
        return False

    def order_of(self, table: Tensor) -> Tensor | None:
        """[in] the input that each column of these rows multiplies; None where columns are in order."""
        begin = int(table[0, 0])
        return next((order for place, order in self._orders.items() if begin in place), None)

    def table(self, rows: Tensor, kind: str, order: Tensor | None = None) -> Tensor:
        """Keep rows [out, bytes] of one type, whose columns are in an ``order``. Returns their table: the address of each row,
        and the type's number."""
        size = rows.numel()
        if order is not None:
            self._orders[range(self._used, self._used + size)] = order
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
class StoredFolder(KeptFolder):
    """The tensors of a quantised checkpoint, its matrices as rows of ``memory`` where a type holds them exactly."""

    instead = "float32"

    def __init__(self, folder: QuantisedFolder, *, reorders: bool = True) -> None:
        super().__init__(folder, reorders=reorders)
        self.memory = StoredRows(-(-folder.num_parameters // SPAN) * 2 * SPAN)

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = super().take(name, *shape)
        if not name.endswith(_ENDS) or tensor.dtype not in FLOATS or shape[1] % SPAN:
            return tensor
        return self.memory.table(tensor.contiguous().view(torch.uint8), FLOATS[tensor.dtype])

    def keep(self, matrices: Mapping[str, Quantised], order: Tensor | None) -> dict[str, Tensor] | None:
        whole = {name: in_whole_numbers(matrix) for name, matrix in matrices.items()}
        kinds = {name: type_of(matrix) for name, matrix in whole.items()}
        found = {name: (matrix, kind) for name, matrix in whole.items() if (kind := kinds[name]) is not None}
        if len(found) < len(matrices):
            return None
        return {name: self._table(matrix, kind, order) for name, (matrix, kind) in found.items()}

    def _table(self, matrix: Quantised, kind: str, order: Tensor | None) -> Tensor:
        """[out, 2], or [E, 2, out] of experts, whose inputs come first."""
        table = self.memory.table(rows_of(matrix, kind), kind, order)
        return table.unflatten(0, (matrix.num_experts, -1)).transpose(1, 2) if matrix.num_experts else table


def in_whole_numbers(matrix: Quantised) -> Quantised:
    """The matrix with whole numbers as codes, if twice the numbers of its table are whole."""
    if matrix.levels is None:
        return matrix
    twice = 2 * matrix.levels
    if not torch.equal(twice, twice.round()) or twice.abs().max() > _MOST_OF_FIVE:
        return matrix
    codes = twice.to(torch.int8)[matrix.codes.long() + 8]
    return replace(matrix, codes=codes, scales=factors(matrix.scales) / 2, bits=5, levels=None)


def type_of(matrix: Quantised) -> str | None:
    """The first type that holds the matrix exactly; None where there is none."""
    if matrix.is_float or matrix.levels is not None or matrix.group_of is not None or matrix.shape[1] % SPAN:
        return None
    if matrix.scales.shape[1] > 1 and matrix.group_len % SPAN:
        return None
    wide = matrix.scales.float()
    fits = torch.equal(wide.half().float(), wide)
    if matrix.bits == 5:
        return "Q5_0" if fits else "Q8_F"
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
    if kind.startswith("Q8"):
        parts.append(codes.view(torch.uint8))
    elif kind == "Q5_0":
        numbers = (codes + 16).view(torch.uint8)
        upper = (numbers >> 4).view(num_outputs, blocks, 4, 8) << torch.arange(8, dtype=torch.uint8)
        parts.append(upper.sum(-1, dtype=torch.uint8))
        parts.append(numbers[..., : SPAN // 2] & 15 | numbers[..., SPAN // 2 :] << 4)
    else:
        numbers = (codes + 8).view(torch.uint8)
        parts.append(numbers[..., : SPAN // 2] | numbers[..., SPAN // 2 :] << 4)
    return torch.cat(parts, -1).flatten(1)


def _per_block(matrix: Quantised, values: Tensor) -> Tensor:
    """[out, blocks] from [out, groups]."""
    blocks = matrix.shape[1] // SPAN
    return values.repeat_interleave(-(-blocks // values.shape[1]), 1)[:, :blocks].contiguous()
