"""Parts of stored matrices: a rank's inputs, in rows that stay where a file or a program holds them.

A stored matrix is a table of its rows (``gguf/stored.py``). A part of its inputs is the same table, with rows that begin some
whole blocks later. Codes and scales are those of the whole matrix. Inputs are rounded 32 at a time for both. So products of
parts add up to the product of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.models.decoder_weights import RowTables
from outrider.models.gguf.quants import STORAGE_TYPES
from outrider.models.gguf.stored import SPAN
from outrider.models.quantised.stored import TYPES

_OWN_BYTES = {"Q4_Z": 19, "Q4_F": 21, "Q8_F": 37}
"""Bytes of a block of 32 weights in the types that no GGUF file has."""
_BLOCKS = {storage.name: (storage.block_len, storage.block_bytes) for storage in STORAGE_TYPES.values()}
_BLOCKS |= {name: (SPAN, size) for name, size in _OWN_BYTES.items()}
_BY_NUMBER = {number: _BLOCKS[name] for name, number in TYPES.items()}


def block_len(name: str) -> int:
    """Weights in a block of a type, and at least the 32 whose inputs are rounded together."""
    return max(SPAN, _BLOCKS[name][0])


class FileRows(RowTables):
    """Rows in a file or in memory, which stay there."""

    def part(self, table: Tensor, inputs: tuple[int, int] | None = None) -> Tensor:
        return table if inputs is None else from_input(table, inputs[0])


FILE_ROWS = FileRows()


def from_input(table: Tensor, begin: int) -> Tensor:
    """The rows of a table [..., 2] from input ``begin`` on, the first of a block."""
    moved = table.clone()
    for number in table[..., 1].unique().tolist():
        length, size = _BY_NUMBER[number]
        assert begin % length == 0, "a block is not cut"
        moved[..., 0] += torch.where(table[..., 1] == number, begin // length * size, 0)
    return moved
