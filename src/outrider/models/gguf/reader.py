"""Read a GGUF file: a header, a typed dictionary of metadata, a table of tensors, then the tensors themselves.

    "GGUF" | version u32 | num_tensors u64 | num_metadata u64
    num_metadata x ( key | type u32 | value )
    num_tensors  x ( name | num_dims u32 | dims u64... | storage type u32 | offset u64 )
    padding to general.alignment (32), then the data; offsets count from here

Numbers are little endian, strings a u64 length and UTF-8. Dimensions are listed fastest first, the reverse of PyTorch.
The file is memory-mapped: reading the table costs no more than the table, a tensor is unpacked when it is asked for.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import ModelError, nearest
from outrider.models.gguf.metadata import Cursor, Metadata, Value
from outrider.models.gguf.quants import STORAGE_TYPES, UNSUPPORTED_NAMES, StorageType, dequantise

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class TensorEntry:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """Row-major, as PyTorch has it: [out, in] for a matrix."""
    storage: StorageType
    start: int
    """Position of the first byte in the file."""

    @property
    def end(self) -> int:
        return self.start + self.storage.num_bytes(math.prod(self.shape))


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """An open GGUF file: its metadata, and its tensors on demand."""

    path: Path
    version: int
    metadata: Metadata
    """Every key with a plain Python value: str, bool, int, float, or a list of them that is read on demand."""
    tensors: Mapping[str, TensorEntry]
    data: np.memmap
    """The whole file as bytes."""

    def tensor(self, name: str, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tensor ``name``, dequantised, in PyTorch's order of dimensions. The result owns its memory."""
        entry = self._entry(name)
        raw = np.asarray(self.data[entry.start : entry.end])
        return dequantise(raw, entry.storage, dtype=dtype).view(entry.shape)

    def rows(self, name: str) -> Tensor:
        """The bytes of the matrix ``name`` [out, bytes of a row], uint8, in the file's own memory."""
        entry = self._entry(name)
        return torch.from_numpy(np.asarray(self.data[entry.start : entry.end])).view(entry.shape[0], -1)

    @property
    def address(self) -> int:
        """The file's address in memory."""
        return self.data.ctypes.data

    @property
    def adds_halves(self) -> bool:
        """Products with F16 matrices may be added in 16 bits, as llama.cpp does."""
        return True

    def order_of(self, table: object) -> None:
        """Columns of a file are in order."""
        del table

    def forget(self, begin: int, end: int) -> None:
        """Release the memory of bytes that are no longer needed. They are read again on demand."""
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        mapping = self.data.base
        if sys.platform == "linux" and isinstance(mapping, mmap.mmap) and first < end:
            mapping.madvise(mmap.MADV_DONTNEED, first, end - first)

    def _entry(self, name: str) -> TensorEntry:
        entry = self.tensors.get(name)
        if entry is None:
            raise ModelError(f"{self.path}: no tensor {name!r} in the file; {nearest(name, self.tensors)}")
        return entry

    def text(self, key: str) -> str:
        """A string of the metadata that must be there."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else self._no(key)

    def strings(self, key: str) -> list[str]:
        """A list of strings of the metadata that must be there."""
        values = self.metadata.get(key)
        return [value for value in values if isinstance(value, str)] if isinstance(values, list) else self._no(key)

    def num_items(self, key: str) -> int:
        """Length of a list of the metadata that must be there."""
        return self.metadata.num_items(key) if key in self.metadata else self._no(key)

    def _no(self, key: str) -> NoReturn:
        raise ModelError(f"{self.path}: the metadata has no {key}; convert the model again with llama.cpp's converter")


class ModelKeys:
    """Typed look-ups of the metadata that describes the model: the keys that begin with its architecture's name."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.text("general.architecture")

    def get(self, key: str) -> Value | None:
        """The value of a key. A list with one equal value per layer counts as that value."""
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            return value[0]
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number, 0 or more. Without a default the key is required and must be positive."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or value < (1 if default is None else 0):
            what = "differs between layers" if isinstance(value, list) else f"is {value!r}, not a positive whole number"
            raise ModelError(f"{self.file.path}: {self.architecture}.{key} {what}; load the Hugging Face checkpoint")
        return value

    def real(self, key: str) -> float | None:
        """A number as the decimal it was written from: metadata is float32, where 1e-5 is 9.99999974e-06."""
        value = self.get(key)
        return float(str(np.float32(value))) if isinstance(value, int | float) else None


def read_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file (version 2 or 3, little endian) and read its metadata and its table of tensors.

    Raises ``ModelError`` for anything that is not a whole, well-formed GGUF file of storage types we can unpack.
    """
    path = Path(path)
    cursor = Cursor(path, _map_file(path))
    version = _read_version(cursor)
    num_tensors, num_metadata = cursor.number("<Q"), cursor.number("<Q")
    metadata = Metadata(cursor, num_metadata)
    rows = [_read_tensor_row(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        cursor.refuse(f"general.alignment is {alignment!r}, not a positive whole number")
    data_start = math.ceil(cursor.position / alignment) * alignment
    tensors = {row.name: _locate(cursor, row, data_start) for row in rows}
    if len(tensors) != len(rows):
        cursor.refuse("two tensors have the same name")
    file = GGUFFile(path, version, metadata, tensors, cursor.data)
    file.forget(0, data_start)
    return file


def _map_file(path: Path) -> np.memmap:
    try:
        if path.stat().st_size == 0:
            raise ModelError(f"{path}: the file is empty; download it again")
        # Copy-on-write, not read-only: PyTorch warns about memory it may not write, though nothing here writes.
        return np.memmap(path, dtype=np.uint8, mode="c")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}; give the path of a .gguf file") from error


def _read_version(cursor: Cursor) -> int:
    magic = bytes(cursor.data[: len(MAGIC)])
    if magic != MAGIC:
        why = f"it begins with {magic!r} instead of {MAGIC!r}"
        raise ModelError(f"{cursor.path}: not a GGUF file: {why}; convert the checkpoint with llama.cpp's converter")
    cursor.take(len(MAGIC))
    version = cursor.number("<I")
    if version in VERSIONS:
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    what = "big-endian GGUF file" if swapped in VERSIONS else f"GGUF version {version}"
    known = " and ".join(str(known) for known in VERSIONS)
    raise ModelError(f"{cursor.path}: {what} is not supported, only little-endian {known} are; convert the model again")


def _read_tensor_row(cursor: Cursor) -> TensorEntry:
    """A row as the file has it, its ``start`` still relative to the data section."""
    name = cursor.name()
    num_dims = cursor.number("<I")
    if num_dims > MAX_DIMS:
        cursor.refuse(f"tensor {name!r} claims {num_dims} dimensions, more than {MAX_DIMS}")
    dims = [cursor.number("<Q") for _ in range(num_dims)]
    storage = _storage_type(cursor, name, cursor.number("<I"))
    row_len = dims[0] if dims else 1
    if row_len % storage.block_len:
        cursor.refuse(f"tensor {name!r} has rows of {row_len}, not a multiple of {storage.name}'s {storage.block_len}")
    return TensorEntry(name, tuple(reversed(dims)), storage, start=cursor.number("<Q"))


def _storage_type(cursor: Cursor, name: str, code: int) -> StorageType:
    storage = STORAGE_TYPES.get(code)
    if storage is None:
        what = UNSUPPORTED_NAMES.get(code, f"type number {code}")
        known = ", ".join(storage.name for storage in STORAGE_TYPES.values())
        raise ModelError(f"{cursor.path}: tensor {name!r} is stored as {what}, not supported; use a file of {known}")
    return storage


def _locate(cursor: Cursor, row: TensorEntry, data_start: int) -> TensorEntry:
    entry = TensorEntry(row.name, row.shape, row.storage, data_start + row.start)
    if entry.end > len(cursor.data):
        cursor.refuse(f"truncated: tensor {row.name!r} ends at byte {entry.end}, the file at {len(cursor.data)}")
    return entry
