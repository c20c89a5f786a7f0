"""The metadata of a GGUF file: a dictionary of strings, numbers and arrays, and the cursor that reads through the file.

Arrays are read on demand. A vocabulary is a hundred thousand strings, which take much more memory than in the file, and a
running model does not need them.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
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

    def skip_strings(self, count: int) -> None:
        """Go past ``count`` strings. A vocabulary has hundreds of thousands, so each takes few steps."""
        length_at, data, position = struct.Struct("<Q").unpack_from, self.bytes, self.position
        try:
            for _ in range(count):
                position += 8 + length_at(data, position)[0]
        except (struct.error, OverflowError):
            position = max(position + 8, len(data) + 1)
        self.take(position - self.position)

    def string(self) -> str:
        """A string. Bytes that are not UTF-8 are replaced, because some tokens are parts of a character."""
        return str(self.take(self.number("<Q")), "utf-8", "replace")

    def name(self) -> str:
        """A string that must be UTF-8."""
        raw = self.take(self.number("<Q"))
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            self.refuse(f"a name at byte {self.position - len(raw)} is not UTF-8 text")


@final
class Metadata(Mapping[str, "Value"]):
    """A file's metadata. Reading starts at ``cursor``, which is then after it."""

    def __init__(self, cursor: Cursor, num_items: int) -> None:
        self._cursor = cursor
        self._values: dict[str, Value] = {}
        self._arrays: dict[str, int] = {}
        """Offset of each array."""
        for _ in range(num_items):
            key, type_code = cursor.name(), cursor.number("<I")
            if type_code == ARRAY_TYPE:
                self._arrays[key] = cursor.position
                _skip_array(cursor, key, depth=1)
            else:
                self._values[key] = _read_value(cursor, type_code, key)

    def __getitem__(self, key: str) -> Value:
        if key not in self._arrays:
            return self._values[key]
        return _read_array(Cursor(self._cursor.path, self._cursor.data, self._arrays[key]), key)

    def num_items(self, key: str) -> int:
        """Length of an array, which is not read; 0 if there is none."""
        return self._array(key)[2] if key in self._arrays else 0

    def some_strings(self, key: str, indices: Collection[int]) -> dict[int, str]:
        """Some items of an array of strings. The others are skipped."""
        cursor, item_type, _ = self._array(key)
        found: dict[int, str] = {}
        passed = 0
        for index in sorted(set(indices)) if item_type == STRING_TYPE else ():
            cursor.skip_strings(index - passed)
            found[index], passed = cursor.string(), index + 1
        return found

    def _array(self, key: str) -> tuple[Cursor, int, int]:
        """A cursor at an array's first item, the items' type and their number."""
        cursor = Cursor(self._cursor.path, self._cursor.data, self._arrays[key])
        return cursor, cursor.number("<I"), cursor.number("<Q")

    def __contains__(self, key: object) -> bool:
        return key in self._arrays or key in self._values

    def __iter__(self) -> Iterator[str]:
        yield from self._values
        yield from self._arrays

    def __len__(self) -> int:
        return len(self._values) + len(self._arrays)


def _read_value(cursor: Cursor, type_code: int, key: str) -> Value:
    if type_code == STRING_TYPE:
        return cursor.string()
    if type_code == ARRAY_TYPE:
        return _read_array(cursor, key)
    return _read_numbers(cursor, type_code, key, 1)[0]


def _read_array(cursor: Cursor, key: str) -> list[Value]:
    item_type, length = cursor.number("<I"), cursor.number("<Q")
    if item_type == STRING_TYPE:
        return [cursor.string() for _ in range(length)]
    if item_type == ARRAY_TYPE:
        return [_read_array(cursor, key) for _ in range(length)]
    return _read_numbers(cursor, item_type, key, length)


def _skip_array(cursor: Cursor, key: str, *, depth: int) -> None:
    if depth > MAX_ARRAY_DEPTH:
        cursor.refuse(f"the value of {key!r} nests arrays more than {MAX_ARRAY_DEPTH} deep")
    item_type, length = cursor.number("<I"), cursor.number("<Q")
    if item_type == ARRAY_TYPE:
        for _ in range(length):
            _skip_array(cursor, key, depth=depth + 1)
    elif item_type == STRING_TYPE:
        cursor.skip_strings(length)
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
