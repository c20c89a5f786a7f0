"""The metadata of a GGUF file: a dictionary of strings, numbers and arrays, and the cursor that reads through the file.

Arrays are read when they are asked for. A vocabulary is a hundred thousand strings, which take several times their bytes in the
file, and a model that runs does not need them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn, TypeAlias, final

import numpy as np

from outrider.core.errors import ModelError

Value: TypeAlias = "str | bool | int | float | list[Value]"

MAX_ARRAY_DEPTH = 4
STRING_TYPE, ARRAY_TYPE = 8, 9
NUMBER_TYPES: dict[int, np.dtype[np.generic]] = {
    code: np.dtype(name)
    for code, name in enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8"))
    if name
}
"""Metadata's number types by their code in the file; 8 and 9 are strings and arrays."""


@final
class Cursor:
    """Reads forward through the mapped file and refuses to run past its end."""

    def __init__(self, path: Path, data: np.memmap, position: int = 0) -> None:
        self.path = path
        self.data = data
        self.bytes = data.data  # slicing it is several times faster than slicing the array
        self.position = position

    def refuse(self, why: str) -> NoReturn:
        raise ModelError(f"{self.path}: damaged GGUF file: {why}; download or convert it again")

    def take(self, num_bytes: int) -> memoryview:
        end = self.position + num_bytes
        if end > len(self.data):
            self.refuse(f"truncated: it ends at byte {len(self.data)}, but {end} are needed to read its header")
        taken = self.bytes[self.position : end]
        self.position = end
        return taken

    def number(self, layout: str) -> int:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def text(self, *, strict: bool = False) -> str:
        """A string. Names must be UTF-8; a token of some vocabularies is a piece of a character, hence not strict."""
        raw = self.take(self.number("<Q"))
        try:
            return str(raw, "utf-8", "strict" if strict else "replace")
        except UnicodeDecodeError:
            self.refuse(f"a name at byte {self.position - len(raw)} is not UTF-8 text")


@final
class Metadata(Mapping[str, "Value"]):
    """A file's metadata. Reading starts at ``cursor``, which is then behind it."""

    def __init__(self, cursor: Cursor, num_items: int) -> None:
        self._cursor = cursor
        self._values: dict[str, Value] = {}
        self._arrays: dict[str, int] = {}
        """Offset of each array."""
        for _ in range(num_items):
            key, type_code = cursor.text(strict=True), cursor.number("<I")
            if type_code == ARRAY_TYPE:
                self._arrays[key] = cursor.position
                _skip_array(cursor, key, depth=1)
            else:
                self._values[key] = _read_value(cursor, type_code, key)

    def __getitem__(self, key: str) -> Value:
        if key not in self._arrays:
            return self._values[key]
        return _read_array(Cursor(self._cursor.path, self._cursor.data, self._arrays[key]), key)

    def __contains__(self, key: object) -> bool:
        return key in self._arrays or key in self._values

    def __iter__(self) -> Iterator[str]:
        yield from self._values
        yield from self._arrays

    def __len__(self) -> int:
        return len(self._values) + len(self._arrays)


def _read_value(cursor: Cursor, type_code: int, key: str) -> Value:
    if type_code == STRING_TYPE:
        return cursor.text()
    if type_code == ARRAY_TYPE:
        return _read_array(cursor, key)
    return _read_numbers(cursor, type_code, key, 1)[0]


def _read_array(cursor: Cursor, key: str) -> list[Value]:
    item_type, length = cursor.number("<I"), cursor.number("<Q")
    if item_type in (STRING_TYPE, ARRAY_TYPE):
        return [_read_value(cursor, item_type, key) for _ in range(length)]
    return _read_numbers(cursor, item_type, key, length)


def _skip_array(cursor: Cursor, key: str, *, depth: int) -> None:
    if depth > MAX_ARRAY_DEPTH:
        cursor.refuse(f"the value of {key!r} nests arrays more than {MAX_ARRAY_DEPTH} deep")
    item_type, length = cursor.number("<I"), cursor.number("<Q")
    if item_type == ARRAY_TYPE:
        for _ in range(length):
            _skip_array(cursor, key, depth=depth + 1)
    elif item_type == STRING_TYPE:
        for _ in range(length):
            cursor.take(cursor.number("<Q"))
    else:
        cursor.take(length * _number_type(cursor, item_type, key).itemsize)


def _read_numbers(cursor: Cursor, type_code: int, key: str, length: int) -> list[Value]:
    dtype = _number_type(cursor, type_code, key)
    return np.frombuffer(cursor.take(length * dtype.itemsize), dtype=dtype).tolist()


def _number_type(cursor: Cursor, type_code: int, key: str) -> np.dtype[np.generic]:
    dtype = NUMBER_TYPES.get(type_code)
    if dtype is None:
        cursor.refuse(f"the value of {key!r} has the unknown type {type_code}")
    return dtype
